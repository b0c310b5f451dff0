"""Isolates the process that it runs in, which is then process 1 of a sandbox.

- "docker": the container engine has isolated it already.
- "namespaces": new user, PID, network, IPC, UTS and mount namespaces, and a root file system of
  read-only bind mounts, for root and for ordinary users if the kernel permits it (Linux 5.12).
- "landlock": rules that every command applies to itself (Linux 6.7); docs/clusters.md says
  what they miss.

Standard library only, Python 3.8 or newer. System call numbers are the same on all architectures.
"""

import ctypes
import errno
import fcntl
import os
import pwd
import signal
import socket
import struct
from contextlib import suppress

LIBC = ctypes.CDLL(None, use_errno=True)
# Machine -> its number in a filter of system calls, and those that make what outlives its process
# and no limit counts: shared memory, semaphores and message queues of System V, message queues of
# POSIX, and keys.
LASTING = {
    "x86_64": (0xC000003E, (29, 64, 68, 240, 248, 249, 250)),
    "aarch64": (0xC00000B7, (180, 186, 190, 194, 217, 218, 219)),
}
MOUNT_SETATTR = 442
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
READ_ONLY, NO_SUID, NO_DEV, NO_EXEC = 1, 2, 4, 8  # MS_* and MOUNT_ATTR_* share these values
CLONE_NAMESPACES = 0x3C020000  # mount, UTS, IPC, user and PID
CLONE_NEWNET = 0x40000000
MS_BIND_RECURSIVE = 0x5000
MS_PRIVATE_RECURSIVE = 0x44000
MNT_DETACH = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
MOST_FILES = 500_000  # in a tmpfs: each takes memory that no limit counts
DEVICES = ("null", "zero", "full", "random", "urandom")  # in /dev
KEPT_CAPABILITIES = 0xEB  # chown, dac_override, fowner, kill, setgid, setuid: bits 0, 1, 3, 5, 6, 7


def libc(name, *args):
    """Calls a C function. A negative result raises an OSError that names the function."""
    converted = []
    for arg in args:
        if isinstance(arg, str):
            arg = arg.encode()
        elif isinstance(arg, int):
            arg = ctypes.c_ulong(arg)
        converted.append(arg)
    result = getattr(LIBC, name)(*converted)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def isolate(config):
    """Isolates this process. Raises OSError."""
    if config.isolation == "docker":
        with suppress(KeyError):
            config.uid, config.gid = pwd.getpwnam("agent")[2:4]
    elif config.isolation == "namespaces":
        enter_namespaces(config)
        build_root(config)
    elif config.isolation == "landlock":
        libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # daemons stay our descendants
    else:
        raise OSError("there is no isolation called " + config.isolation)


# ------------------------------------------------------------------------------------ namespaces


def tmpfs(path, size, mode):
    os.makedirs(path, exist_ok=True)
    options = f"size={size},mode={mode},nr_inodes={MOST_FILES}"
    libc("mount", "tmpfs", path, "tmpfs", NO_SUID | NO_DEV, options)


def set_mount_attributes(path, attributes, flags):
    settings = struct.pack("4Q", attributes, 0, 0, 0)
    libc("syscall", MOUNT_SETATTR, AT_FDCWD, path, flags, settings, len(settings))


def bind(source, target, attributes):
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.mkfifo(target)  # a mount point that `find -type f` does not take for a file to read
    libc("mount", source, target, None, MS_BIND_RECURSIVE, None)
    set_mount_attributes(target, attributes, AT_RECURSIVE)


def enter_namespaces(config):
    """Moves into new namespaces. Only process 1 of the PID namespace returns from here."""
    parent = os.getpid()
    maps = {"uid_map": "0 0 65536", "gid_map": "0 0 65536"}
    if os.geteuid():
        maps = {
            "setgroups": "deny",
            "uid_map": f"{config.uid} {os.geteuid()} 1",
            "gid_map": f"{config.gid} {os.getegid()} 1",
        }
    wait, ready = os.pipe()
    helper = os.fork()
    if not helper:  # the id maps of root can only be written from outside
        try:
            os.close(ready)
            os.read(wait, 1)
            for name, text in maps.items():
                write(f"/proc/{parent}/{name}", text)
            os._exit(0)
        finally:
            os._exit(1)
    libc("unshare", CLONE_NAMESPACES | (0 if config.network else CLONE_NEWNET))
    os.write(ready, b"x")
    if os.waitpid(helper, 0)[1]:
        raise OSError(errno.EPERM, "id maps: not permitted")
    child = os.fork()
    if child:  # stays outside, only to wait
        os.waitpid(child, 0)
        os._exit(0)
    libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def build_root(config):
    """Makes a new root of read-only bind mounts and private tmpfs, and detaches the old root."""
    home = os.path.dirname(config.workspace)
    libc("mount", None, "/", None, MS_PRIVATE_RECURSIVE, None)  # no mount shows outside
    tmpfs("/tmp", 16 << 20, "755")
    os.mkdir("/tmp/.old")
    libc("pivot_root", "/tmp", "/tmp/.old")
    os.chdir("/")
    tmpfs("/tmp", config.disk, "1777")
    tmpfs("/dev/shm", config.shared_memory, "1777")
    tmpfs(home, config.disk, "755")
    for target, source in sorted(config.view):  # parents come before children
        show(target, source)
    os.makedirs("/proc", exist_ok=True)
    libc("mount", "proc", "/proc", "proc", NO_SUID | NO_DEV | NO_EXEC, None)
    for name in DEVICES:
        bind("/.old/dev/" + name, "/dev/" + name, NO_SUID | NO_EXEC)
    os.symlink("/proc/self/fd", "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", "/dev/" + name)
    libc("umount2", "/.old", MNT_DETACH)
    os.rmdir("/.old")
    write_etc(config, home)
    socket.sethostname("sandbox")
    if not config.network:
        with socket.socket() as loopback:  # SIOCSIFFLAGS: up and running
            fcntl.ioctl(loopback, 0x8914, struct.pack("16sh14x", b"lo", 0x41))
    write("/proc/sys/user/max_user_namespaces", "0")  # no namespaces inside of this one


def show(target, source):
    """Makes a path of the old root visible, read-only; an empty source hides a visible folder."""
    old = "/.old" + source
    if not source:
        if os.path.isdir(target):
            tmpfs(target, 65536, "755")
    elif os.path.islink(old):
        if not os.path.lexists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(old), target)
    elif os.path.isdir(old) or os.path.exists(old) and not os.path.lexists(target):
        bind(old, target, READ_ONLY | NO_SUID | NO_DEV)


def write_etc(config, home):
    os.makedirs("/etc", exist_ok=True)
    agent = f"agent:x:{config.uid}:{config.gid}::{home}:/bin/bash\n"
    texts = {
        "passwd": "root:x:0:0::/root:/bin/sh\n" + agent,
        "group": f"root:x:0:\nagent:x:{config.gid}:\n",
        "hosts": "127.0.0.1 localhost sandbox\n",
    }
    for name, text in texts.items():
        write("/etc/" + name, text)


# -------------------------------------------------------------------------------------- Landlock


def make_landlock_rules(config):
    """A ruleset: commands read the view, write the home, and have no TCP."""
    abi = libc("syscall", LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi < 4:
        raise OSError(errno.EOPNOTSUPP, f"Landlock ABI 4 is needed, this kernel has {abi}")
    all_rights = (1 << (16 if abi >= 5 else 15)) - 1
    tcp = 0 if config.network else 3
    attributes = struct.pack("3Q", all_rights, tcp, 3)  # files, TCP, signals and abstract sockets
    attributes = attributes[: 24 if abi >= 6 else 16]
    rules = libc("syscall", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    devices = ["/dev/" + name for name in DEVICES]
    read_rights = 0x000D
    allowed = [("/proc", read_rights)]
    allowed += [(source, read_rights) for _, source in config.view if source]
    allowed += [(path, all_rights) for path in devices + [os.path.dirname(config.workspace)]]
    no_device_nodes, rights_on_files = ~0x0840, 0xC007
    for path, rights in allowed:
        if not os.path.exists(path):
            continue
        rights &= all_rights & no_device_nodes
        if not os.path.isdir(path):
            rights &= rights_on_files
        at = os.open(path, os.O_PATH)
        libc("syscall", LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", rights, at), 0)
        os.close(at)
    return rules


# -------------------------------------------------------------------------------------- all kinds


def refuse_lasting_memory():
    """Makes the system calls of LASTING fail with ENOSYS, and all those of foreign ABIs (32 bits).

    On other machines it does nothing.
    """
    machine, refused = LASTING.get(os.uname().machine, (0, ()))
    if not refused:
        return
    load, if_equal, if_at_least, end = 0x20, 0x15, 0x35, 0x06
    most = len(refused)
    code = [(load, 0, 0, 4), (if_equal, 0, most + 3, machine), (load, 0, 0, 0)]
    code.append((if_at_least, most + 1, 0, 0x40000000))  # x32
    code += [(if_equal, most - n, 0, number) for n, number in enumerate(refused)]
    code += [(end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050000 | errno.ENOSYS)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters))
    libc("prctl", PR_SET_SECCOMP, 2, program, 0, 0)


def seal(config):
    """Nothing may inspect this process from here on, and nothing in the sandbox can gain rights."""
    if config.isolation == "namespaces":
        set_mount_attributes("/", READ_ONLY, 0)
    if config.isolation != "docker":  # Docker has done this part
        # A root process that hands commands to another user keeps what that needs.
        keep = KEPT_CAPABILITIES if os.geteuid() == 0 and config.uid else 0
        for number in range(64):
            if not keep >> number & 1:
                LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
        header = struct.pack("Ii", 0x20080522, 0)
        libc("capset", header, struct.pack("6I", keep, keep, 0, 0, 0, 0))
        libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        refuse_lasting_memory()
    libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # no ptrace, no /proc/<pid>/{mem,fd,environ}
