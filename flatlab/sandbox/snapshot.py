"""Everything that was written in a sandbox as one tar, and back into another sandbox.

The tar is never unpacked on this machine. Its members are relative to the workspace: solve.py, and
../.local for what was written elsewhere (installed packages, /tmp, the home). A line of JSON
follows it: cwd, exported variables, and the entries of changed folders, from which follows what was
deleted.
"""

import json
import os

from flatlab.errors import SandboxFault
from flatlab.sandbox.client import COPY_BYTES, Sandbox

TAR = ("/bin/tar", "--absolute-names")  # tar leaves .. as it is
TAR_SECONDS = 120
PACK_OPTIONS = (
    "-cf",
    "-",
    "--sparse",  # holes stay holes
    "--format=posix",
    "--pax-option=delete=atime,delete=ctime",
    "--no-recursion",
    "--ignore-failed-read",  # files that their own user cannot read are left out
    "--null",
    "--verbatim-files-from",
    "--files-from=-",
)
roots_of: dict[str, list[str]] = {}  # image -> where its commands can write


def take(box: Sandbox) -> bytes:
    """Ends the background processes, and packs. Raises SandboxFault if it is too much."""
    box.call("sweep")
    changes = box.call("written", roots=writable_roots(box))[0]
    state = box.call("state")[0]
    # When tar leaves a folder it sets its times, and goes by names: what is below .. comes first.
    names = sorted(changes["paths"], key=lambda name: not name.startswith(".."))
    argv = [*TAR, "-C", box.workspace, *PACK_OPTIONS]
    stdin = b"\0".join(map(os.fsencode, names))
    reply, files = box.program(argv, TAR_SECONDS, stdin, (COPY_BYTES, 0))
    if reply["code"] or reply["dropped"]:
        limit = COPY_BYTES >> 20
        raise SandboxFault(f"the files cannot be copied: more than {limit} MB, or tar failed")
    notes = {"state": json.dumps(state), "home": home(box), "folders": changes["folders"]}
    return files + b"\n" + json.dumps(notes).encode()


def put_back(box: Sandbox, files: bytes) -> None:
    """Unpacks into a sandbox that was made in the same way. Raises SandboxFault."""
    files, _, notes = files.rpartition(b"\n")
    try:
        notes = json.loads(notes)
    except ValueError as damage:
        raise SandboxFault(f"the copied files cannot be read: {damage}") from damage
    box.call("prune", folders=notes["folders"])
    argv = [*TAR, "-C", box.workspace, "-xpf", "-"]
    if box.program(argv, TAR_SECONDS, files)[0]["code"]:
        raise SandboxFault("the copied files cannot be unpacked")
    # With Landlock, each sandbox has a home of its own.
    state = notes["state"].replace(notes["home"], home(box))
    box.call("state", **json.loads(state))


def home(box: Sandbox) -> str:
    return os.path.dirname(box.workspace)


def writable_roots(box: Sandbox) -> list[str]:
    """Files and folders that commands can write to; everything below them may have changed."""
    if box.backend.writable is not None:
        return [home(box), *box.backend.writable]
    image = box.spec.image
    if image not in roots_of:
        roots_of[image] = box.call("writable", root="/")[0]["roots"]
    return roots_of[image] + ["/dev/shm"]
