"""The main process of every sandbox. sandbox.py sends isolate.py and this text to a python3 in there.

It reads requests from stdin and answers on stdout, in frames: length of the JSON, length of the bytes (two big-endian
32-bit numbers), JSON, bytes. Commands never hold these two files; they print into pipes that only this process reads,
so no text of theirs can imitate an answer. End of stdin means that the owner is gone: everything in the sandbox ends.
CONFIG, libc and the functions that isolate come from isolate.py, those for files from files.py. Standard library only,
Python 3.8 or newer.
"""

import atexit
import errno
import fcntl
import json
import os
import pwd
import resource
import select
import signal
import struct
import sys
import time
from collections import namedtuple
from contextlib import suppress

LIFE_ENDS = time.monotonic() + CONFIG["life"]

IN, OUT = os.dup(0), os.dup(1)  # copies that no command inherits
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(2, 1)

Child = namedtuple(
    "Child", "pid output saved text"
)  # output: a pipe; saved, text: files of a shell
shell = {"cwd": WORKSPACE, "exports": b""}  # what one command leaves to the next
exit_codes = {}  # of the children that somebody waits for; None while they run
prepared = None  # (Child, pipe it waits on, place): the shell of the next command
strays = []  # output pipes that background jobs still hold
landlock_rules = None


# ---------------------------------------------------------------------------------------------- processes


def reap():
    """Collects every child that has ended, also daemons that became ours."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in exit_codes:
                exit_codes[pid] = (
                    os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
                )


def descendants():
    children, found = {}, [os.getpid()]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open("/proc/%s/stat" % pid) as file:  # it may just have ended
            children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(pid))
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def sweep(blob=b""):
    """Kills every process of the sandbox except this one, daemons included."""
    deadline = (
        time.monotonic() + 5
    )  # on a busy machine, the end of many or large processes takes its time
    while time.monotonic() < deadline:
        reap()
        try:
            if MODE == "landlock":
                for pid in descendants() or [0x7FFFFFFF]:  # nobody is left: this pid does not exist
                    os.kill(pid, signal.SIGKILL)
            else:  # everything in this pid namespace; outside of one it would be everything of this user
                os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            if MODE != "landlock" or not descendants():
                return {}, b""
        time.sleep(0.001)
    return {"error": "processes survive SIGKILL"}, b""


def leave():
    if MODE == "landlock":
        sweep()
        with suppress(OSError):
            remove(os.path.dirname(HOME))
    os._exit(0)  # the end of process 1 ends all others


def memory_file(data=b""):
    fd = os.memfd_create("flatlab")
    os.pwrite(fd, data, 0)  # the file offset stays at 0
    return fd


# The first lines that a shell reads ($BASH_ENV): at its exit it saves cwd and exported variables to fd 99. Behind them and
# TAKE comes what the last shell saved. `exec`, `kill $$` or an own EXIT trap save nothing: then the older state stays.
PRELUDE = b"""unset BASH_ENV
trap '{ printf "%s\\0" "$PWD"; unset PWD OLDPWD SHLVL flatlab; export -p; } >&99 2>/dev/null' EXIT
"""
WAIT = b"read -rn1 -u96 flatlab && exec 96<&-\n"  # of a shell that is started before its command is known
TAKE = b"IFS= read -rd '' -u97 flatlab || true; SECONDS=0\n"  # the command: of any length, and never on a command line
RUN = 'eval "$flatlab"'


def execute(argv, env, user, fds):
    """In the child: own session, user and place, then the command."""
    os.setsid()
    with suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")  # where memory is short, a command goes, not the runner
        os.close(fd)
    high = [
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in fds
    ]  # out of the way of the targets
    for fd, target in zip(high, (0, 1, 2, 97, 98, 99, 96)):
        os.dup2(fd, target)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if user == "agent" and os.geteuid() == 0 and CONFIG["uid"]:
        os.setgroups([])
        os.setgid(CONFIG["gid"])
        os.setuid(CONFIG["uid"])
    for place in (shell["cwd"], WORKSPACE, "/"):
        with suppress(OSError, ValueError):  # deleted, or not a path at all
            os.chdir(place)
            break
    if landlock_rules is not None:
        libc("syscall", LANDLOCK_RESTRICT, landlock_rules, 0)
    os.execvpe(argv[0], argv, dict(env, PWD=place))


def start(command, stdin=b"", user="agent", stderr=True, bodies=(), gate=None):
    """Starts a shell command (str) or a program (list). Returns a Child. gate: a pipe on which the shell waits."""
    output, end = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    fds = [memory_file(stdin) if stdin else null, end, end if stderr else null]
    env, argv, text, saved = ENVIRON, command, None, None
    if isinstance(command, str):
        text, saved = memory_file(as_text(command)), memory_file()
        fds += [
            text,
            memory_file(
                PRELUDE + (WAIT if gate else b"") + (TAKE if BASH else b"") + shell["exports"]
            ),
            saved,
        ]
        if bodies:  # of edits: text that the shell must not see, for commands.py
            fds.append(memory_file(json.dumps(bodies).encode()))
        if gate:
            fds.append(gate)
        argv = [BASH, "-c", RUN] if BASH else ["sh", "-c", b". /dev/fd/98\n. /dev/fd/97"]
        env = dict(env, BASH_ENV="/dev/fd/98")
    try:
        pid = os.fork()
    except BlockingIOError:  # the commands have used up all processes
        if gate:
            for fd in {output, null, *fds}:
                os.close(fd)
            raise
        sweep()
        pid = os.fork()
    if not pid:
        try:
            execute(argv, env, user, fds)
        except (OSError, ValueError) as error:
            os.write(2, ("%s: %s\n" % (argv[0], error)).encode("utf-8", "replace"))
        finally:
            os._exit(127)
    exit_codes[pid] = None
    for fd in {null, *fds} - {saved, text if gate else None}:
        os.close(fd)
    os.set_blocking(output, False)
    return Child(pid, output, saved, text)


def as_text(command):
    return command.encode("utf-8", "replace").replace(b"\0", b"")


def prepare():
    """Starts the shell of the agent's next command while the model thinks; starting it is most of a short command's time.

    It is the agent's, like any command: background jobs may kill it, and then the next command starts its own.
    """
    global prepared
    if BASH and not ready_shell():
        gate, go = os.pipe()
        os.set_blocking(go, False)  # a job of the agent's may have filled it
        try:
            prepared = start("", gate=gate), go, place()
        except OSError:  # no process is left; the next command makes room
            os.close(go)


def place():
    """Which folder the shell's cwd is: another one may come to have that name."""
    with suppress(OSError, ValueError):
        return os.stat(shell["cwd"])[1:3]  # inode and device


def ready_shell():
    """The prepared shell, when there is one that would do what a new one does."""
    if prepared:
        child, _, where = prepared
        stopped = True
        with suppress(OSError), open("/proc/%d/stat" % child.pid) as file:
            stopped = file.read().rpartition(")")[2].split()[0] in "Tt"
        if stopped or exit_codes[child.pid] is not None or place() != where:
            forget_prepared()
    return prepared


def forget_prepared():
    """Ends the prepared shell: it has been started with what is no longer true."""
    global prepared
    if prepared:
        child, go, _ = prepared
        prepared = None
        if exit_codes.pop(child.pid) is None:
            os.kill(child.pid, signal.SIGKILL)
        for fd in (child.output, child.saved, child.text, go):
            os.close(fd)


def start_prepared(command):
    """Hands the command to the prepared shell. None when there is none."""
    global prepared
    if not ready_shell():
        return None
    (child, go, _), prepared = prepared, None
    os.pwrite(child.text, as_text(command), 0)
    with suppress(
        BrokenPipeError, BlockingIOError
    ):  # it has just been killed; that is how this command ends, too
        os.write(go, b"!")
    os.close(go)
    os.close(child.text)
    return child


def run(blob, command, timeout, user="agent", keep=(32768, 32768), stderr=True, bodies=()):
    """Returns when the command has ended and its output is read, at the latest soon after its time limit.

    After the limit: SIGTERM to its group, a grace, then SIGKILL for everything in the sandbox. Background jobs of a
    command that ends in time live on; what they print after 0.1 s is thrown away. keep: bytes of head and tail.
    """
    begin = time.monotonic()
    plain = isinstance(command, str) and user == "agent" and stderr and not (blob or bodies)
    child = plain and start_prepared(command)
    if not child:
        forget_prepared()  # what runs now may change cwd, exports or files that it was started with
        child = start(command, blob, user, stderr, bodies)
    pid, output, saved, _ = child
    head, tail, total, is_open, phase, limit = (
        bytearray(),
        bytearray(),
        0,
        True,
        "running",
        begin + timeout,
    )
    poll = select.poll()
    for fd, events in (
        (output, select.POLLIN),
        (WAKE, select.POLLIN),
        (IN, 0),
    ):  # of IN only that it was closed
        poll.register(fd, events)
    timed_out = False
    while True:
        ready = [fd for fd, _ in poll.poll(max(0, int((limit - time.monotonic()) * 1000) + 1))]
        if IN in ready:
            leave()
        if output in ready:
            chunk = os.read(output, 65536)
            if not chunk:
                is_open = False
                poll.unregister(output)
            total += len(chunk)
            room = keep[0] - len(head)
            head += chunk[:room]
            tail += chunk[room:]
            if len(tail) > keep[1] + (1 << 18):
                del tail[: len(tail) - keep[1]]
        drain(ready)
        now = time.monotonic()
        if phase != "ended" and exit_codes[pid] is not None:
            if timed_out:
                sweep()
            phase, limit = "ended", now + (1 if timed_out else 0.1)
        if phase == "ended" and not is_open or now >= limit and phase in ("ended", "killed"):
            break
        if now >= limit and phase == "terminated":
            sweep()
            phase, limit = "killed", now + 5
        elif now >= limit and phase == "running":
            phase, limit, timed_out = "terminated", now + CONFIG["grace"], True
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
    if is_open:
        strays.append(output)
    else:
        os.close(output)
    code = exit_codes.pop(pid)
    if (
        saved is not None
    ):  # a command may have written anything there, which harms only its own next shell
        cwd, found, exports = os.pread(saved, 1 << 19, 0).partition(b"\0")
        os.close(saved)
        if found and len(exports) < 1 << 18:
            shell.update(cwd=os.fsdecode(cwd) or WORKSPACE, exports=exports)
    tail = tail[max(0, len(tail) - keep[1]) :]
    return {
        "code": 137 if code is None else code,
        "cwd": shell["cwd"],
        "timed_out": timed_out,
        "head": len(head),
        "dropped": total - len(head) - len(tail),
        "seconds": time.monotonic() - begin,
    }, bytes(head + tail)


def drain(ready):
    """Empties the pipe that signals wake us with, and those of background jobs."""
    if WAKE in ready:
        os.read(WAKE, 4096)
        reap()
    for fd in strays[:]:
        with suppress(BlockingIOError):
            if not os.read(fd, 65536):
                strays.remove(fd)
                os.close(fd)


# ---------------------------------------------------------------------------------------------- state


def state(blob, cwd=None):
    """Reads, or with `cwd` sets, what the shell keeps between commands."""
    if cwd is not None:
        forget_prepared()
        shell.update(cwd=cwd, exports=blob)
    return {"cwd": shell["cwd"]}, shell["exports"]


def configure(blob, env):
    """Adds to the environment of the commands to come."""
    forget_prepared()
    ENVIRON.update(env)
    return {}, b""


# ---------------------------------------------------------------------------------------------- protocol


def receive(count):
    data = bytearray()
    while len(data) < count:
        chunk = os.read(IN, min(count - len(data), 1 << 20))
        if not chunk:
            leave()
        data += chunk
    return bytes(data)


def send(reply, blob=b""):
    head = json.dumps(reply).encode()
    view = memoryview(struct.pack(">II", len(head), len(blob)) + head + blob)
    while view:
        view = view[os.write(OUT, view) :]


def find(program, path):
    return next(
        (
            folder + "/" + program
            for folder in path.split(":")
            if os.path.exists(folder + "/" + program)
        ),
        None,
    )


def set_up():
    global landlock_rules, HOME_FD, ENVIRON, BASH, WAKE
    os.umask(0o022)
    if MODE == "docker":
        agents = [user for user in pwd.getpwall() if user.pw_name == "agent"]
        CONFIG["uid"], CONFIG["gid"] = (
            (agents[0].pw_uid, agents[0].pw_gid) if agents else (1000, 1000)
        )
    elif MODE == "namespaces":
        enter_namespaces()
        build_root()
    elif MODE != "landlock":
        raise OSError("there is no isolation called " + MODE)
    if CONFIG.get("forget") and MODE == "docker":
        ours = os.path.dirname(os.path.dirname(sys.executable)) + "/lib/python3*/*-packages"
        for place in [ours] + CONFIG["packages"]:
            for name in CONFIG["forget"]:
                empty(place + "/" + name)
    path = CONFIG["tools"] + ":" + (CONFIG["path"] or os.environ.get("PATH", os.defpath))
    ENVIRON = dict(os.environ, **CONFIG["env"], PATH=path, HOME=HOME)
    BASH = find("bash", path)
    for folder in (WORKSPACE, CONFIG["tools"]):
        os.makedirs(folder, exist_ok=True)
    HOME_FD = os.open(HOME, os.O_RDONLY | os.O_DIRECTORY)
    own(".", HOME_FD, "agent")
    own(os.path.basename(WORKSPACE), HOME_FD, "agent")
    for folder, folders, _, at in os.fwalk(WORKSPACE):  # of mounted files
        for name in folders:
            own(name, at, "agent")
    for source, target in CONFIG.get(
        "copies", ()
    ):  # links to read-only files, in folders that are writable
        os.makedirs(target, exist_ok=True)
        os.system(
            "cp -rs %s/. %s && chown -hR %d:%d %s"
            % (source, target, CONFIG["uid"], CONFIG["gid"], target)
        )
    if not find("python", path):
        CONFIG["programs"]["python"] = 'exec python3 "$@"'
    for name, text in CONFIG["programs"].items():
        with open(CONFIG["tools"] + "/" + name, "w") as file:
            file.write(text if name.endswith(".py") else "#!/bin/sh\n" + text + "\n")
        os.chmod(CONFIG["tools"] + "/" + name, 0o755)
    if MODE == "landlock":
        landlock_rules = make_landlock_rules()
    seal()
    for name, limit in CONFIG["limits"].items():  # commands inherit them
        what = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))
    WAKE, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # the end of a child interrupts a poll
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(
        signal.SIGALRM, lambda *_: leave() if time.monotonic() >= LIFE_ENDS else None
    )  # others may send it
    signal.setitimer(signal.ITIMER_REAL, CONFIG["life"] + 1, 60)


def serve():
    calls = {
        call.__name__: call
        for call in (run, put, get, listing, writable, written, prune, state, sweep, configure)
    }
    while True:
        poll = select.poll()
        for fd in [IN, WAKE] + strays:
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        drain(ready)
        if IN in ready:
            sizes = struct.unpack(">II", receive(8))
            request, blob = json.loads(receive(sizes[0])), receive(sizes[1])
            name = request.pop("call")
            try:
                reply = calls[name](blob, **request)
            except OSError as error:
                words = {
                    errno.ENOENT: "is not there",
                    errno.ELOOP: "is a link",
                    errno.ENOTDIR: "does not lie in a plain folder",
                }
                reply = {"error": words.get(error.errno, error.strerror)}, b""
            except (ValueError, RuntimeError) as error:  # RecursionError, too
                reply = {"error": str(error)}, b""
            send(*reply)
            if name in ("run", "listing") and request.get("user", "agent") == "agent":
                prepare()


atexit.register(leave)  # also after an error that nobody expects, which Python prints first
try:
    set_up()
    first = {"workspace": WORKSPACE}
except OSError as problem:  # no isolation
    first = {"error": problem.strerror or str(problem)}
try:
    send(first)
    if "workspace" in first:
        serve()
except OSError:  # the owner has gone, or nothing works any more: for the owner the connection ends
    pass
