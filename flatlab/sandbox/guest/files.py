"""The files of a sandbox: into the workspace and out of it, never through a link; what has changed.

Standard library only, Python 3.8 or newer.
"""

import errno
import heapq
import math
import os
import stat
import time
from contextlib import suppress

PIECE = 65536  # bytes of a file that are held at a time


class Files:
    """Each public method answers a request: takes its bytes and fields, returns (reply, last
    bytes). Earlier ones go through `send`.
    """

    def __init__(self, config, send):
        self.config = config
        self.send = send
        self.workspace = config.workspace
        self.name = os.path.basename(config.workspace)
        self.begin = time.monotonic()
        self.ahead = math.inf  # least seconds that the wall clock was seen ahead of this one
        self.look_at_clock()
        self.home = os.open(os.path.dirname(config.workspace), os.O_RDONLY | os.O_DIRECTORY)

    def look_at_clock(self):
        """Notes whether the wall clock was set back, which sets the times of files."""
        self.ahead = min(self.ahead, time.time() - time.monotonic())

    def descend(self, path, user=None):
        """(fd of the folder, last name) of a path in the workspace. Follows no link on the way.

        Makes folders that are missing if there is a `user` to own them.
        """
        names = [self.name] + path.split("/")
        if any(name in ("", ".", "..") or "\0" in name for name in names):
            raise ValueError("is not a path in the workspace")
        at = os.dup(self.home)
        for name in names[:-1]:
            if user:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=at)
                    self.own(name, at, user)
            above = at
            try:
                at = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            finally:
                os.close(above)
        return at, names[-1]

    def own(self, name, at, user="agent"):
        if os.geteuid() == 0:
            uid, gid = (self.config.uid, self.config.gid) if user == "agent" else (0, 0)
            os.chown(name, uid, gid, dir_fd=at, follow_symlinks=False)

    def put(self, blob, files, user):
        """Writes files, [[path, size], ...], whose contents follow each other in blob.

        Never writes through a link. The workspace and the files then belong to `user`.
        """
        self.own(self.name, self.home, user)
        mode = 0o600 if user == "root" else 0o644
        view = memoryview(blob)
        for path, size in files:
            at, name = self.descend(path, user)
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode, dir_fd=at)
            self.own(name, at, user)
            os.close(at)
            with open(fd, "wb") as file:
                file.write(view[:size])
            view = view[size:]
        return {}, b""

    def get(self, blob, path, limit):
        """One regular file of at most `limit` bytes."""
        at, name = self.descend(path)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(name, flags, dir_fd=at)
        finally:
            os.close(at)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise ValueError("is not a regular file")
        left = info.st_size
        with open(fd, "rb", buffering=0) as file:
            if left > limit:
                raise ValueError(f"is larger than {limit} bytes")
            while data := file.read(min(left, PIECE)):
                self.send(data)
                left -= len(data)
        return {}, b""

    def listing(self, blob, most):
        """The first `most` [path, size] pairs of the workspace, sorted, and the count of all."""
        count = 0

        def rows():
            nonlocal count
            for path, info, _ in walk(self.workspace, mounts=True):
                if not os.path.isdir(path) and path != self.workspace:  # nor links to folders
                    count += 1
                    yield os.path.relpath(path, self.workspace), info.st_size

        found = heapq.nsmallest(most, rows())
        return {"files": found, "count": count}, b""

    def writable(self, blob, root):
        """The topmost files and folders below a root that commands may write to."""
        roots = []
        for path, info, names in walk(root):
            if stat.S_ISLNK(info.st_mode):
                continue
            by_group = info.st_mode & 0o020 and info.st_gid == self.config.gid
            if info.st_uid == self.config.uid or info.st_mode & 0o002 or by_group:
                roots.append(path)
                names.clear()
        return {"roots": roots}, b""

    def written(self, blob, roots):
        """Paths that are new or changed below roots, relative to the workspace.

        Also the names in the folders among them. A change sets the ctime, which no command can set
        back. Mounts below a root are left out.
        """
        self.look_at_clock()
        paths = []
        folders = {}
        for root in roots:
            for path, info, names in walk(root):
                if info.st_ctime < self.begin + self.ahead:
                    continue
                path = os.path.relpath(path, self.workspace)
                paths.append(path)
                if stat.S_ISDIR(info.st_mode):
                    folders[path] = names
        return {"paths": paths, "folders": folders}, b""

    def prune(self, blob, folders):
        """Removes everything in folders beyond the given names: {folder: names}.

        A mount stays, with the folders above it: it is a file of the task, and a command that
        renames such a folder takes the mount along.
        """
        for folder, names in folders.items():
            folder = os.path.normpath(os.path.join(self.workspace, folder))
            if os.path.isdir(folder) and not os.path.islink(folder):
                for name in set(os.listdir(folder)) - set(names):
                    path = os.path.join(folder, name)
                    try:
                        remove(path)
                    except OSError:
                        if not holds_mount(path):
                            raise
        return {}, b""


def walk(root, mounts=False):
    """Yields (path, lstat result, names in it) of a root and of all below it.

    A folder before what is in it: whoever empties its list of names keeps out. Nothing below a
    mount comes, and the mount itself only with `mounts`.
    """
    device = None
    left = [root]
    while left:  # not os.walk: before Python 3.12 it fails in a thousand nested folders
        path = left.pop()
        try:
            info = os.lstat(path)
        except OSError:  # removed by a background job, or in a folder that is closed to us
            continue
        device = device or info.st_dev
        names = []
        if stat.S_ISDIR(info.st_mode) and info.st_dev == device:
            with suppress(OSError):
                names = os.listdir(path)
        if mounts or info.st_dev == device:
            yield path, info, names
        left += [os.path.join(path, name) for name in names]


def remove(path):
    """Removes a file, or a folder however deep it is. Raises OSError."""
    if not os.path.isdir(path) or os.path.islink(path):
        return os.unlink(path)
    # A command may have closed folders to its own user.
    os.spawnv(os.P_WAIT, "/bin/chmod", ["chmod", "-Rf", "u+rwx", "--", path])
    if os.spawnv(os.P_WAIT, "/bin/rm", ["rm", "-rf", "--", path]):
        raise OSError(errno.EBUSY, f"{path} cannot be removed")


def holds_mount(path):
    """Returns whether something is mounted at a path or below it."""
    path = path.replace(" ", "\\040")  # as mountinfo writes it
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return any(f"{line.split(' ')[4]}/".startswith(f"{path}/") for line in file)
