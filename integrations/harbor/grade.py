"""Runs the tests in a grading sandbox, on the workspace of the agent. Prints the reward."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

ARCHIVE = "/flatlab.tar"
REWARD = "/logs/verifier/reward"


def replace_workspace() -> None:
    """Brings the workspace to the state in the archive, which the agent may have written. Files
    that are the same keep their times, which `make` compares.

    Raises ValueError for anything but plain files, folders and the links of the image: another link
    could lead to the tests.
    """
    with tarfile.open(ARCHIVE, "r:") as archive:
        members = {os.path.normpath(member.name): member for member in archive}
        for path, member in members.items():
            parents = [members.get(str(parent)) for parent in Path(path).parents]
            is_fine = member.isfile() or member.isdir()
            if member.issym() and os.path.islink(path):
                is_fine = os.readlink(path) == member.linkname
            is_fine &= not any(parent and not parent.isdir() for parent in parents)
            if not is_fine or path.split("/")[0] in ("", ".."):
                raise ValueError(f"{path!a} is neither a plain file nor a folder")
        for folder, folders, names in os.walk(".", topdown=False):
            for name in names + folders:
                path = os.path.normpath(os.path.join(folder, name))
                member = members.get(path)
                is_link = os.path.islink(path)
                is_folder = os.path.isdir(path) and not is_link
                if not member or member.isdir() != is_folder or member.issym() != is_link:
                    remove = os.rmdir if is_folder else os.unlink
                    remove(path)
        for path, member in members.items():
            if member.isdir():
                os.makedirs(path, exist_ok=True)
            if member.isfile():
                write_file(path, archive.extractfile(member).read(), member.mode)


def write_file(path: str, data: bytes, mode: int) -> None:
    """Writes a file, unless it is there with this content, and sets its mode."""
    file = Path(path)
    if not file.exists() or file.read_bytes() != data:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    file.chmod(mode)


def read_reward() -> float:
    """The reward of that name, or the first one. Raises OSError or ValueError if there is none."""
    file = Path(f"{REWARD}.json")
    if not file.exists():
        return float(Path(f"{REWARD}.txt").read_text(encoding="utf-8"))
    rewards = json.loads(file.read_text(encoding="utf-8"))
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
