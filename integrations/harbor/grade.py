"""Runs the tests in a grading sandbox, on the workspace of the agent. Prints the reward."""

import json
import os
import subprocess
import sys
import tarfile

ARCHIVE = "/flatlab.tar"
REWARD = "/logs/verifier/reward"


def replace_workspace() -> None:
    """Replaces the workspace by the one in the archive, which the agent may have written.

    Raises ValueError for anything but plain files, folders and the links of the image: another link
    could lead to the tests.
    """
    with tarfile.open(ARCHIVE, "r:") as archive:
        members = archive.getmembers()
        for member in members:
            path = member.name = os.path.normpath(member.name)
            is_fine = member.isfile() or member.isdir()
            if member.issym() and os.path.islink(path):
                is_fine = os.readlink(path) == member.linkname
            if not is_fine or path.split("/")[0] in ("", ".."):
                raise ValueError(f"{path!a} is neither a plain file nor a folder")
        subprocess.run(["bash", "-c", "shopt -s dotglob; rm -rf ./*"], check=True)
        archive.extraction_filter = lambda member, path: member  # the default of 3.14 refuses links
        members.sort(key=tarfile.TarInfo.issym)  # nothing is written through a link
        archive.extractall(members=members)


def read_reward() -> float:
    """The reward of that name, or the first one. Raises OSError or ValueError if there is none."""
    if not os.path.exists(f"{REWARD}.json"):
        with open(f"{REWARD}.txt") as file:
            return float(file.read())
    with open(f"{REWARD}.json") as file:
        rewards = json.load(file)
    return rewards.get("reward", next(iter(rewards.values()), None))


os.rename(".flatlab", "/flatlab")
os.rename(".flatlab.tar", ARCHIVE)
try:
    replace_workspace()
except (OSError, ValueError, tarfile.TarError) as error:
    print(json.dumps({"error": f"No submission: {error}"}))
    sys.exit()
os.rename("/flatlab/tests", "/tests")
subprocess.run(["chmod", "-R", "755", "/tests"], check=True)
os.makedirs("/logs/verifier", exist_ok=True)
subprocess.run(["bash", "/tests/test.sh"], stdout=sys.stderr)
try:
    print(json.dumps({"reward": read_reward()}))
except (OSError, ValueError):
    print(json.dumps({"error": "The tests wrote no reward."}))
    sys.exit(1)  # the tests may be broken
