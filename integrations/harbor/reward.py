"""Part of an exported task's tests: reads a grader's output, writes the improvement as the reward.

It is clipped to [-1, 1]; -1 without a valid submission, so it never pays to submit nothing. Called
as: reward.py METRIC BASELINE IMPROVEMENT CODE, with the improvement of a score that is 1 higher,
and the grader's exit code.
"""

import json
import sys

metric = sys.argv[1]
baseline, improvement, code = map(float, sys.argv[2:])
grade = json.loads(sys.stdin.readlines()[-1])
rewards = {"reward": -1.0}
if metric in grade and code == 0:  # else the grader has printed an error, or failed afterwards
    reward = improvement * (grade[metric] - baseline)
    rewards = {"reward": max(-1.0, min(1.0, reward)), metric: grade[metric]}
with open("/logs/verifier/reward.json", "w") as file:
    json.dump(rewards, file)
