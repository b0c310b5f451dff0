"""First part of the program in every sandbox (then files.py and runner.py): shuts a process of this machine in.

Three modes. "namespaces": new user, pid, net, ipc, uts and mount namespaces, and a root made of read-only binds; root
and ordinary users can do that where the kernel allows it. "landlock": rules that every command puts on itself; less,
see env.py. "docker": the engine has done it. Needs Linux 5.12 for namespaces, 6.7 for Landlock. Standard library only.
CONFIG is set before this text runs: mode, workspace, tools, programs, path, env, limits, grace, life; for a local
sandbox also uid, gid, network, view ([path, real path] pairs; an empty real path hides a folder), disk (bytes per tmpfs).
"""

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct

CONFIG = globals()["CONFIG"]
MODE, WORKSPACE = CONFIG["mode"], CONFIG["workspace"]
HOME = os.path.dirname(WORKSPACE)
LIBC = ctypes.CDLL(None, use_errno=True)
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = (
    442,
    444,
    445,
    446,
)  # the same on all architectures
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC = 1, 2, 4, 8  # MS_* and MOUNT_ATTR_* share these values


def libc(name, *args):
    """Calls a C function; a negative result raises OSError that names it."""
    args = [
        a.encode() if isinstance(a, str) else ctypes.c_ulong(a) if isinstance(a, int) else a
        for a in args
    ]
    result = getattr(LIBC, name)(*args)
    if result < 0:
        raise OSError(ctypes.get_errno(), name + ": " + os.strerror(ctypes.get_errno()))
    return result


def tmpfs(path, size, mode):
    os.makedirs(path, exist_ok=True)
    libc("mount", "tmpfs", path, "tmpfs", NO_SUID | NO_DEV, "size=%d,mode=%s" % (size, mode))


def bind(source, target, attributes):
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.mkfifo(target)  # a place to mount on that no `find -type f` takes for a file to read
    libc("mount", source, target, None, 0x5000, None)  # MS_BIND | MS_REC
    libc(
        "syscall", MOUNT_SETATTR, -100, target, 0x8000, struct.pack("4Q", attributes, 0, 0, 0), 32
    )  # and below


def enter_namespaces():
    """Moves into new user, pid, net, ipc, uts and mount namespaces. Only their process 1 returns from here."""
    me, root = os.getpid(), os.geteuid() == 0
    uids, gids = (
        ["0 0 65536"] * 2
        if root
        else ["%d %d 1" % (CONFIG["uid"], os.geteuid()), "%d %d 1" % (CONFIG["gid"], os.getegid())]
    )
    wait, ready = os.pipe()
    helper = os.fork()
    if not helper:  # root's id maps can only be written from outside
        try:
            os.close(ready)
            os.read(wait, 1)
            for name, text in ([] if root else [("setgroups", "deny")]) + [
                ("uid_map", uids),
                ("gid_map", gids),
            ]:
                with open("/proc/%d/%s" % (me, name), "w") as file:
                    file.write(text)
            os._exit(0)
        finally:
            os._exit(1)
    libc("unshare", 0x3C020000 if CONFIG["network"] else 0x7C020000)  # with or without CLONE_NEWNET
    os.write(ready, b"x")
    if os.waitpid(helper, 0)[1]:
        raise OSError(errno.EPERM, "id maps: not permitted")
    child = os.fork()
    if child:  # stays outside, only to reap
        os.waitpid(child, 0)
        os._exit(0)
    libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def build_root():
    """A new root: read-only binds of what is in view, private tmpfs for the rest. The old root is gone after it."""
    libc(
        "mount", None, "/", None, 0x44000, None
    )  # MS_PRIVATE | MS_REC: nothing spreads to the outside
    tmpfs("/tmp", 16 << 20, "755")
    os.mkdir("/tmp/.old")
    libc("pivot_root", "/tmp", "/tmp/.old")
    os.chdir("/")
    for path, mode in (("/tmp", "1777"), ("/dev/shm", "1777"), (HOME, "755")):
        tmpfs(path, CONFIG["disk"], mode)
    for target, source in sorted(CONFIG["view"]):  # parents come before children
        old = "/.old" + source
        if not source:  # a place to hide, if a bind has made it visible
            if os.path.isdir(target):
                tmpfs(target, 65536, "755")
        elif os.path.islink(old):
            if not os.path.lexists(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.symlink(os.readlink(old), target)
        elif os.path.isdir(old) or os.path.exists(old) and not os.path.lexists(target):
            bind(old, target, READ_ONLY | NO_SUID | NO_DEV)
    os.makedirs("/proc", exist_ok=True)
    libc("mount", "proc", "/proc", "proc", NO_SUID | NO_DEV | NO_EXEC, None)
    for name in ("null", "zero", "full", "random", "urandom"):
        bind("/.old/dev/" + name, "/dev/" + name, NO_SUID | NO_EXEC)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + target, "/dev/" + name)
    libc("umount2", "/.old", 2)  # MNT_DETACH
    os.rmdir("/.old")
    os.makedirs("/etc", exist_ok=True)
    user = "agent:x:%d:%d::%s:/bin/bash\n" % (CONFIG["uid"], CONFIG["gid"], HOME)
    for name, text in (
        ("passwd", "root:x:0:0::/root:/bin/sh\n" + user),
        ("hosts", "127.0.0.1 localhost sandbox\n"),
        ("group", "root:x:0:\nagent:x:%d:\n" % CONFIG["gid"]),
    ):
        with open("/etc/" + name, "w") as file:
            file.write(text)
    socket.sethostname("sandbox")
    if not CONFIG["network"]:
        with socket.socket() as lo:
            fcntl.ioctl(
                lo, 0x8914, struct.pack("16sh14x", b"lo", 0x41)
            )  # the loopback device is up and running
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # no namespaces inside of this one


def make_landlock_rules():
    """Where namespaces are refused: rules that every command puts on itself. Reads the view, writes HOME, no TCP."""
    abi = libc("syscall", LANDLOCK_CREATE, None, 0, 1)
    if abi < 4:
        raise OSError(errno.EOPNOTSUPP, "Landlock ABI 4 is needed, this kernel has %d" % abi)
    every = (1 << (16 if abi >= 5 else 15)) - 1
    tcp = 0 if CONFIG["network"] else 3
    attributes = struct.pack("3Q", every, tcp, 3)[
        : 24 if abi >= 6 else 16
    ]  # files, TCP, signals and abstract sockets
    rules = libc("syscall", LANDLOCK_CREATE, attributes, len(attributes), 0)
    read_rights, no_device_nodes, rights_on_files = 0x000D, ~0x0840, 0xC007
    devices = ["/dev/" + name for name in ("null", "zero", "full", "random", "urandom", "shm")]
    readable = ["/proc"] + [source for _, source in CONFIG["view"] if source]
    for path, rights in [(path, read_rights) for path in readable] + [
        (path, every) for path in devices + [HOME]
    ]:
        if os.path.exists(path):
            at = os.open(path, os.O_PATH)
            rights &= every & no_device_nodes & (every if os.path.isdir(path) else rights_on_files)
            libc("syscall", LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, at), 0)
            os.close(at)
    libc("prctl", 36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: daemons stay our descendants
    return rules


def seal():
    """From here on nothing may look into this process, and nothing in the sandbox can gain rights."""
    if MODE == "namespaces":
        libc("syscall", MOUNT_SETATTR, -100, "/", 0, struct.pack("4Q", READ_ONLY, 0, 0, 0), 32)
    if MODE != "docker":  # Docker has done this part
        # A root that hands commands to another user keeps: chown, dac_override, fowner, kill, setgid, setuid.
        keep = sum(1 << n for n in (0, 1, 3, 5, 6, 7)) if os.geteuid() == 0 and CONFIG["uid"] else 0
        for n in range(64):
            if not keep >> n & 1:
                LIBC.prctl(24, n, 0, 0, 0)  # PR_CAPBSET_DROP
        libc("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", keep, keep, 0, 0, 0, 0))
        libc("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no ptrace, /proc/<pid>/mem, fd, environ
