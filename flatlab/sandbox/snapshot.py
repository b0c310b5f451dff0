"""Everything that was written in a sandbox as one tar, and back into another sandbox.

The tar is never unpacked on this machine. Its members are relative to the workspace: ./solve.py,
and ./../.local for what was written elsewhere (installed packages, /tmp, the home). One member is
our own, STATE: cwd, exported variables, and the entries of changed folders, from which follows what
was deleted.
"""

from __future__ import annotations

import io
import json
import os
import tarfile

from flatlab.errors import ArtefactError, SandboxFault
from flatlab.sandbox.client import COPY_BYTES, Sandbox, readable

STATE = ".flatlab-state"
PACK_OPTIONS = (
    "--format=posix",
    "--pax-option=delete=atime,delete=ctime",
    "--no-recursion",
    "--ignore-failed-read",  # files that their own user cannot read are left out
    "--absolute-names",  # leaves .. as it is
    "--null",
    "--verbatim-files-from",
)
UNPACK_OPTIONS = (
    "--absolute-names",
    "--anchored",
    "--no-wildcards",  # with wildcards a folder costs its depth squared
    f"--exclude=./{STATE}",
    f"--exclude={STATE}",
)
roots_of: dict[str, list[str]] = {}  # image -> where its commands can write


def take(box: Sandbox) -> bytes:
    """Ends the background processes, and packs. Raises SandboxFault if it is too much."""
    box.call("sweep")
    changes = box.call("written", roots=writable_roots(box))[0]
    state, exports = box.call("state")
    notes = {
        "cwd": state["cwd"],
        "exports": exports.decode("latin-1"),
        "home": home(box),
        "folders": changes["folders"],
    }
    out = io.BytesIO(pack(box, changes["paths"]))
    data = json.dumps(notes).encode()
    member = tarfile.TarInfo(STATE)
    member.size = len(data)
    try:
        with tarfile.open(fileobj=out, mode="a") as tar:
            tar.addfile(member, io.BytesIO(data))
    except tarfile.TarError as error:
        raise SandboxFault(f"the files cannot be copied: {error}") from error
    return out.getvalue()


def put_back(box: Sandbox, files: bytes) -> None:
    """Unpacks into a sandbox that was made in the same way. Raises SandboxFault."""
    try:
        with tarfile.open(fileobj=io.BytesIO(files)) as tar:
            notes = json.load(tar.extractfile(STATE))
    except (tarfile.TarError, KeyError) as error:
        raise SandboxFault(f"the copied files cannot be read: {error}") from error
    old_home = notes["home"]

    def moved(path):
        """The path in this sandbox: with Landlock, each one has a home of its own."""
        return path.replace(old_home, home(box), 1) if path.startswith(old_home) else path

    folders = {moved(folder): names for folder, names in notes["folders"].items()}
    box.call("prune", folders=folders)
    unpack(box, files)
    exports = notes["exports"].replace(old_home, home(box)).encode("latin-1")
    box.call("state", exports, cwd=moved(notes["cwd"]))


def take_workspace(box: Sandbox) -> dict[str, bytes]:
    """What was written, changed or removed in the workspace, for put_workspace.

    Raises ArtefactError for a link, a special file, or more than COPY_BYTES.
    """
    changes = box.call("written", roots=[box.workspace])[0]
    files = pack(box, changes["paths"], ArtefactError)
    with tarfile.open(fileobj=io.BytesIO(files)) as tar:
        for member in tar:
            if not member.isfile() and not member.isdir():
                name = readable(member.name.removeprefix("./"))
                raise ArtefactError(f"{name} is neither a plain file nor a folder")
    return {"files": files, "folders": json.dumps(changes["folders"]).encode()}


def put_workspace(box: Sandbox, changes: dict[str, bytes]) -> None:
    """Repeats the changes in a new sandbox. Raises ArtefactError if they do not fit in there."""
    box.call("prune", folders=json.loads(changes["folders"]))
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


def pack(box: Sandbox, paths: list[str], error=SandboxFault) -> bytes:
    """A tar of files and folders. Raises `error` if it is too large."""
    names = [os.path.join(".", os.path.relpath(path, box.workspace)) for path in paths]
    # When tar leaves a folder it sets its times, and goes by names: what is below ./.. comes first.
    names.sort(key=lambda name: not name.startswith("./.."))
    argv = ["/bin/tar", "-C", box.workspace, *PACK_OPTIONS, "-T", "-", "-cf", "-"]
    stdin = b"\0".join(os.fsencode(name) for name in names)
    reply, data = box.program(argv, 120, stdin, (COPY_BYTES, 0))
    if reply["code"] or reply["dropped"]:
        raise error(f"the files cannot be copied: more than {COPY_BYTES >> 20} MB, or tar failed")
    return data


def unpack(box: Sandbox, files: bytes, error=SandboxFault) -> None:
    argv = ["/bin/tar", "-C", box.workspace, *UNPACK_OPTIONS, "-xpf", "-"]
    if box.program(argv, 120, files)[0]["code"]:
        raise error("the copied files cannot be unpacked")
