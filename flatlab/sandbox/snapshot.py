"""All that was written in a sandbox as one tar, and back into another sandbox. Never unpacked on this machine.

The members are the workspace, relative to it (./solve.py), and two of our own: REST, a tar of what was written elsewhere
(installed packages, /tmp, the home), and STATE: cwd, exported variables, and what was deleted from the image.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import PurePosixPath

from flatlab.errors import SandboxFault
from flatlab.sandbox.sandbox import COPY_BYTES, Sandbox

STATE, REST = ".flatlab-state", ".flatlab-rest.tar"
roots_of: dict[str, list[str]] = {}  # image -> where its commands can write


def take(box: Sandbox) -> bytes:
    """Ends the background processes, and packs. Raises SandboxFault when it is too much."""
    box.call("sweep")
    changes = written(box)
    paths = changes["paths"]
    inside = [
        path for path in paths if path == box.workspace or path.startswith(box.workspace + "/")
    ]
    state, exports = box.call("state")
    notes = {
        "cwd": state["cwd"],
        "exports": exports.decode("latin-1"),
        "home": home(box),
        "folders": changes["folders"],
    }
    rest = pack(box, [path for path in paths if path not in set(inside)], root(box))
    out = io.BytesIO(pack(box, inside, box.workspace))
    try:
        with tarfile.open(fileobj=out, mode="a") as tar:
            for name, data in ((STATE, json.dumps(notes).encode()), (REST, rest)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    except tarfile.TarError as error:
        raise SandboxFault(f"the files cannot be copied: {error}") from error
    return out.getvalue()


def put_back(box: Sandbox, files: bytes) -> None:
    """Unpacks into a sandbox that was made in the same way. Raises SandboxFault."""
    try:
        with tarfile.open(fileobj=io.BytesIO(files)) as tar:
            notes, rest = json.load(tar.extractfile(STATE)), tar.extractfile(REST).read()
    except (tarfile.TarError, KeyError) as error:
        raise SandboxFault(f"the copied files cannot be read: {error}") from error
    move = lambda text: (
        text.replace(notes["home"], home(box), 1) if text.startswith(notes["home"]) else text
    )
    box.call("prune", folders={move(folder): names for folder, names in notes["folders"].items()})
    unpack(box, rest, root(box))
    unpack(box, files, box.workspace)
    box.call(
        "state",
        notes["exports"].replace(notes["home"], home(box)).encode("latin-1"),
        cwd=move(notes["cwd"]),
    )


def home(box: Sandbox) -> str:
    return str(PurePosixPath(box.workspace).parent)


def root(box: Sandbox) -> str:
    """What a sandbox has for itself, and may write to in part."""
    return home(box) if box.backend == "landlock" else "/"


def written(box: Sandbox) -> dict:
    """{"paths": what differs from a new sandbox, "folders": names of all entries of the folders among them}."""
    if box.backend == "landlock":  # everything in these is private; the rest is read-only
        roots = [home(box)]
    elif box.backend == "namespaces":
        roots = [home(box), "/tmp", "/dev/shm"]
    else:
        if box.image not in roots_of:
            roots_of[box.image] = box.call("writable", root="/")[0]["roots"]
        roots = roots_of[box.image] + ["/dev/shm"]
    return box.call("written", roots=roots)[0]


def pack(box: Sandbox, paths: list[str], place: str) -> bytes:
    names = [os.path.join(".", os.path.relpath(path, place)) for path in paths]
    argv = [
        "/bin/tar",
        "-C",
        place,
        "--format=posix",
        "--pax-option=delete=atime,delete=ctime",
        "--no-recursion",
        "--ignore-failed-read",  # what its own user cannot read is left out
        "--null",
        "--verbatim-files-from",
        "-T",
        "-",
        "-cf",
        "-",
    ]
    data, reply = box.program(
        argv, 120, user="root", stdin=b"\0".join(map(os.fsencode, names)), limit=COPY_BYTES
    )
    if reply["code"] or reply["dropped"]:
        raise SandboxFault(
            f"the files cannot be copied: more than {COPY_BYTES >> 20} MB, or tar failed"
        )
    return data


def unpack(box: Sandbox, files: bytes, place: str) -> None:
    argv = [
        "/bin/tar",
        "-C",
        place,
        "--anchored",
        "--no-wildcards",  # else each costs (depth of a folder) squared
        f"--exclude=./{STATE}",
        f"--exclude={STATE}",
        f"--exclude={REST}",
        "-xpf",
        "-",
    ]
    if box.program(argv, 120, user="root", stdin=files)[1]["code"]:
        raise SandboxFault("the copied files cannot be unpacked")
