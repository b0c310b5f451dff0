"""Everything that was written in a sandbox as one tar, and back into another sandbox.

The tar is never unpacked on this machine. Its members are the workspace, relative to it
(./solve.py), and two of our own: REST, a tar of what was written elsewhere (installed packages,
/tmp, the home), and STATE: cwd, exported variables, and the entries of changed folders, from which
follows what was deleted.
"""

from __future__ import annotations

import io
import json
import os
import tarfile

from flatlab.errors import ArtefactError, SandboxFault
from flatlab.sandbox.client import COPY_BYTES, Sandbox, readable

STATE = ".flatlab-state"
REST = ".flatlab-rest.tar"
PACK_OPTIONS = (
    "--format=posix",
    "--pax-option=delete=atime,delete=ctime",
    "--no-recursion",
    "--ignore-failed-read",  # files that their own user cannot read are left out
    "--null",
    "--verbatim-files-from",
)
UNPACK_OPTIONS = (
    "--anchored",
    "--no-wildcards",  # with wildcards a folder costs its depth squared
    f"--exclude=./{STATE}",
    f"--exclude={STATE}",
    f"--exclude={REST}",
)
roots_of: dict[str, list[str]] = {}  # image -> where its commands can write


def take(box: Sandbox) -> bytes:
    """Ends the background processes, and packs. Raises SandboxFault if it is too much."""
    box.call("sweep")
    changes = box.call("written", roots=writable_roots(box))[0]
    inside = []
    outside = []
    for path in changes["paths"]:
        is_inside = path == box.workspace or path.startswith(box.workspace + "/")
        (inside if is_inside else outside).append(path)
    state, exports = box.call("state")
    notes = {
        "cwd": state["cwd"],
        "exports": exports.decode("latin-1"),
        "home": home(box),
        "folders": changes["folders"],
    }
    rest = pack(box, outside, top_folder(box))
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


def take_workspace(box: Sandbox) -> dict[str, bytes]:
    """What was written, changed or removed in the workspace, for put_workspace.

    Raises ArtefactError for a link, a special file, or more than COPY_BYTES.
    """
    changes = box.call("written", roots=[box.workspace])[0]
    files = pack(box, changes["paths"], box.workspace, ArtefactError)
    with tarfile.open(fileobj=io.BytesIO(files)) as tar:
        for member in tar:
            if not member.isfile() and not member.isdir():
                name = readable(member.name.removeprefix("./"))
                raise ArtefactError(f"{name} is neither a plain file nor a folder")
    return {"files": files, "folders": json.dumps(changes["folders"]).encode()}


def put_workspace(box: Sandbox, changes: dict[str, bytes]) -> None:
    """Repeats the changes in a new sandbox. Raises ArtefactError if they do not fit in there."""
    box.call("prune", folders=json.loads(changes["folders"]))
    unpack(box, changes["files"], box.workspace, ArtefactError)


def put_back(box: Sandbox, files: bytes) -> None:
    """Unpacks into a sandbox that was made in the same way. Raises SandboxFault."""
    try:
        with tarfile.open(fileobj=io.BytesIO(files)) as tar:
            notes = json.load(tar.extractfile(STATE))
            rest = tar.extractfile(REST).read()
    except (tarfile.TarError, KeyError) as error:
        raise SandboxFault(f"the copied files cannot be read: {error}") from error
    old_home = notes["home"]

    def moved(path):
        """The path in this sandbox: with Landlock, each one has a home of its own."""
        return path.replace(old_home, home(box), 1) if path.startswith(old_home) else path

    folders = {moved(folder): names for folder, names in notes["folders"].items()}
    box.call("prune", folders=folders)
    unpack(box, rest, top_folder(box))
    unpack(box, files, box.workspace)
    exports = notes["exports"].replace(old_home, home(box)).encode("latin-1")
    box.call("state", exports, cwd=moved(notes["cwd"]))


def home(box: Sandbox) -> str:
    return os.path.dirname(box.workspace)


def top_folder(box: Sandbox) -> str:
    """The folder that holds everything a sandbox can write to."""
    return home(box) if box.backend.writable == () else "/"


def writable_roots(box: Sandbox) -> list[str]:
    """Files and folders that commands can write to; everything below them may have changed."""
    if box.backend.writable is not None:
        return [home(box), *box.backend.writable]
    if box.image not in roots_of:
        roots_of[box.image] = box.call("writable", root="/")[0]["roots"]
    return roots_of[box.image] + ["/dev/shm"]


def pack(box: Sandbox, paths: list[str], folder: str, error=SandboxFault) -> bytes:
    """A tar of files and folders, relative to `folder`. Raises `error` if it is too large."""
    names = [os.path.join(".", os.path.relpath(path, folder)) for path in paths]
    argv = ["/bin/tar", "-C", folder, *PACK_OPTIONS, "-T", "-", "-cf", "-"]
    stdin = b"\0".join(os.fsencode(name) for name in names)
    reply, data = box.program(argv, 120, stdin, (COPY_BYTES, 0))
    if reply["code"] or reply["dropped"]:
        raise error(f"the files cannot be copied: more than {COPY_BYTES >> 20} MB, or tar failed")
    return data


def unpack(box: Sandbox, files: bytes, folder: str, error=SandboxFault) -> None:
    argv = ["/bin/tar", "-C", folder, *UNPACK_OPTIONS, "-xpf", "-"]
    if box.program(argv, 120, files)[0]["code"]:
        raise error("the copied files cannot be unpacked")
