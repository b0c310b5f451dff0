"""Everything that was written in a sandbox as one tar, and back into another sandbox.

The tar is never unpacked on this machine. Its members are relative to the workspace: solve.py, and
../.local for what was written elsewhere (installed packages, /tmp, the home). A line of JSON
follows it: cwd, exported variables, and the entries of changed folders, from which follows what was
deleted.
"""

from __future__ import annotations

import json
import os

from flatlab.errors import ArtefactError, SandboxFault
from flatlab.sandbox.client import COPY_BYTES, Sandbox, readable

TAR = ("/bin/tar", "--absolute-names")  # which leaves .. as it is
TAR_SECONDS = 120
PACK_OPTIONS = (
    "-cf",
    "-",
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
    roots = writable_roots(box)
    changes = box.call("written", roots=roots)[0]
    state = box.call("state")[0]
    notes = {
        "state": json.dumps(state),
        "home": home(box),
    }
    return pack(box, changes, notes, SandboxFault)


def put_back(box: Sandbox, files: bytes) -> None:
    """Unpacks into a sandbox that was made in the same way. Raises SandboxFault."""
    notes = unpack(box, files, SandboxFault)
    # With Landlock, each sandbox has a home of its own.
    state = notes["state"].replace(notes["home"], home(box))
    box.call("state", **json.loads(state))


def take_workspace(box: Sandbox) -> dict[str, bytes]:
    """Takes what was written, changed or removed in the workspace, for put_workspace.

    Raises ArtefactError for a link, a special file, or more than COPY_BYTES.
    """
    changes = box.call("written", roots=[box.workspace])[0]
    for path in changes["special"]:
        raise ArtefactError(f"{readable(path)} is neither a plain file nor a folder")
    return {"files": pack(box, changes, {}, ArtefactError)}


def put_workspace(box: Sandbox, changes: dict[str, bytes]) -> None:
    """Repeats the changes in a new sandbox. Raises ArtefactError if they do not fit in there."""
    unpack(box, changes["files"], ArtefactError)


def home(box: Sandbox) -> str:
    return os.path.dirname(box.workspace)


def writable_roots(box: Sandbox) -> list[str]:
    """Files and folders that commands can write to; everything below them may have changed."""
    if box.backend.writable is not None:
        return [home(box), *box.backend.writable]
    if box.image not in roots_of:
        roots_of[box.image] = box.call("writable", root="/")[0]["roots"]
    return roots_of[box.image] + ["/dev/shm"]


def pack(box: Sandbox, changes: dict, notes: dict, error: type[Exception]) -> bytes:
    """A tar of the changed files, and the notes. Raises `error` if it is too large."""
    # When tar leaves a folder it sets its times, and goes by names: what is below .. comes first.
    names = sorted(changes["paths"], key=lambda name: not name.startswith(".."))
    argv = [*TAR, "-C", box.workspace, *PACK_OPTIONS]
    stdin = b"\0".join(map(os.fsencode, names))
    reply, files = box.program(argv, TAR_SECONDS, stdin, (COPY_BYTES, 0))
    if reply["code"] or reply["dropped"]:
        limit = COPY_BYTES >> 20
        raise error(f"the files cannot be copied: more than {limit} MB, or tar failed")
    notes["folders"] = changes["folders"]
    return files + b"\n" + json.dumps(notes).encode()


def unpack(box: Sandbox, files: bytes, error: type[Exception]) -> dict:
    """Repeats the changes in a sandbox. Returns the notes; raises `error`."""
    files, _, notes = files.rpartition(b"\n")
    try:
        notes = json.loads(notes)
    except ValueError as damage:
        raise error(f"the copied files cannot be read: {damage}") from damage
    box.call("prune", folders=notes["folders"])
    argv = [*TAR, "-C", box.workspace, "-xpf", "-"]
    reply = box.program(argv, TAR_SECONDS, files)[0]
    if reply["code"]:
        raise error("the copied files cannot be unpacked")
    return notes
