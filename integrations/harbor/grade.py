"""Runs the tests in a grading sandbox, as the agent left the workspace. Prints the reward."""

import json
import os
import subprocess
import sys

REWARD = "/logs/verifier/reward"


def read_reward() -> float:
    """The reward of that name, or the first one. Raises OSError or ValueError if there is none."""
    if not os.path.exists(f"{REWARD}.json"):
        with open(f"{REWARD}.txt") as file:
            return float(file.read())
    with open(f"{REWARD}.json") as file:
        rewards = json.load(file)
    return rewards.get("reward", next(iter(rewards.values()), None))


os.rename(".flatlab", "/flatlab")
os.rename("/flatlab/tests", "/tests")
subprocess.run(["chmod", "-R", "755", "/tests"], check=True)
os.makedirs("/logs/verifier", exist_ok=True)
subprocess.run(["bash", "/tests/test.sh"], stdout=sys.stderr)
try:
    print(json.dumps({"reward": read_reward()}))
except (OSError, ValueError):
    print(json.dumps({"error": "The tests wrote no reward."}))
    sys.exit(1)  # the tests may be broken
