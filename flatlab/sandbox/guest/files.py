"""The files of a sandbox: into the workspace and out of it, never through a link, and what was written since its start.

A part of the runner's program: boot.py puts isolate.py before it (CONFIG, WORKSPACE) and runner.py behind it (HOME_FD).
Standard library only, Python 3.8 or newer.
"""

import os
import stat
import time
from contextlib import suppress

BEGIN = time.time()


def descend(path, make=False, user="agent"):
    """(fd of the directory, last name) of a path relative to the workspace. Follows no link on the way."""
    names = [os.path.basename(WORKSPACE)] + path.split("/")
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise ValueError("is not a path in the workspace")
    at = os.dup(HOME_FD)
    for name in names[:-1]:
        if make:
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=at)
                own(name, at, user)
        above = at
        try:
            at = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        finally:
            os.close(above)
    return at, names[-1]


def own(name, at, user):
    if os.geteuid() == 0:
        uid, gid = (CONFIG["uid"], CONFIG["gid"]) if user == "agent" else (0, 0)
        os.chown(name, uid, gid, dir_fd=at, follow_symlinks=False)


def put(blob, files, user="agent", mode=0o644):
    """Writes files, [[path, size], ...], whose contents follow each other in blob, never through a link. Theirs and the
    workspace's owner becomes `user`."""
    own(os.path.basename(WORKSPACE), HOME_FD, user)
    view = memoryview(blob)
    for path, size in files:
        at, name = descend(path, make=True, user=user)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=at)
        own(name, at, user)
        os.close(at)
        with open(fd, "wb") as file:
            file.write(view[:size])
        view = view[size:]
    return {}, b""


def get(blob, path, limit):
    """One regular file of at most `limit` bytes."""
    at, name = descend(path)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=at)
    finally:
        os.close(at)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise ValueError("is not a regular file")
    with open(fd, "rb") as file:
        data = file.read(limit + 1) if info.st_size <= limit else b""  # it may still grow
    if info.st_size > limit or len(data) > limit:
        raise ValueError("is larger than %d bytes" % limit)
    return {}, data


def listing(blob, most):
    """[path, size] of files in the workspace in order, at most `most` of them, and how many there are."""
    rows, left = [], [WORKSPACE]
    while left:  # not os.walk: before Python 3.12 it ends at a thousand folders in each other
        with suppress(OSError):  # a background job may have just removed it, or it is closed to us
            for entry in os.scandir(left.pop()):
                if entry.is_dir():  # a link to a folder is neither followed nor listed
                    left += [] if entry.is_symlink() else [entry.path]
                    continue
                with suppress(OSError):
                    rows.append(
                        (
                            os.path.relpath(entry.path, WORKSPACE),
                            entry.stat(follow_symlinks=False).st_size,
                        )
                    )
    return {"files": sorted(rows)[:most], "count": len(rows)}, b""


def writable(blob, root):
    """The highest files and folders below a root that commands may write to. Nothing above and beside them changes."""
    found, device, left = [], os.lstat(root).st_dev, [root]
    while left:
        for entry in os.scandir(left.pop()):
            info = entry.stat(follow_symlinks=False)
            if info.st_dev != device or stat.S_ISLNK(info.st_mode):
                continue
            if (
                info.st_uid == CONFIG["uid"]
                or info.st_mode & 0o002
                or info.st_mode & 0o020
                and info.st_gid == CONFIG["gid"]
            ):
                found.append(entry.path)
            elif stat.S_ISDIR(info.st_mode):
                left.append(entry.path)
    return {"roots": found}, b""


def written(blob, roots):
    """Absolute paths that are new or changed in or below some roots, and the entries of the folders among them.

    A change sets the ctime, which no command can set back. What is mounted below a root is left out.
    """
    paths, folders, left = [], {}, []
    for root in reversed(roots):
        info = os.lstat(root)
        left.append((root, info, info.st_dev))
    while left:
        path, info, device = left.pop()
        entries = None
        if stat.S_ISDIR(info.st_mode):
            with suppress(PermissionError):  # an ordinary user cannot look into chmod 000
                entries = list(os.scandir(path))
        if info.st_ctime >= BEGIN:
            paths.append(path)
            if entries is not None:
                folders[path] = [entry.name for entry in entries]
        for entry in entries or []:
            try:
                info = entry.stat(follow_symlinks=False)
            except PermissionError:  # nor at what lies in chmod 444
                continue
            if info.st_dev == device and entry.path != CONFIG["tools"]:
                left.append((entry.path, info, device))
    return {"paths": paths, "folders": folders}, b""


def prune(blob, folders):
    """Removes what lies in folders beyond given names: {folder: names}."""
    for folder, names in folders.items():
        if os.path.isdir(folder) and not os.path.islink(folder):
            for name in set(os.listdir(folder)) - set(names):
                path = os.path.join(folder, name)
                remove(path)
    return {}, b""


def remove(path):
    """A file, or a folder however deep it is. Raises OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        code = os.spawnv(os.P_WAIT, "/bin/rm", ["rm", "-rf", "--", path])
        if code:
            raise OSError("%s cannot be removed" % path)
    else:
        os.unlink(path)


def empty(pattern):
    """Removes all that lies in the folders that match. A folder that stays full is an OSError: no sandbox starts then."""
    import glob

    for place in glob.glob(pattern):
        for folder, folders, names in os.walk(place, topdown=False):
            for name in names + folders:
                path = os.path.join(folder, name)
                os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(
                    path
                )
