"""The main process of every sandbox: runs the commands of its owner, the process that started it.

It reads requests from stdin: length of the JSON, length of the bytes (two big-endian 32-bit
numbers), JSON, bytes. It writes replies to stdout: pieces of the bytes, an empty piece, and the
JSON, each after its length. A long reply is sent as it is made: this process never holds it.
Commands never hold these two files; their output goes to pipes that only this process reads, so no
printed text can imitate a reply. End of stdin means that the owner is gone: the sandbox ends.
Standard library only, Python 3.8 or newer, no slow imports. The modules of this folder are sent to
the sandbox and imported there under these names, see BOOT in backend.py.
"""

import atexit
import errno
import fcntl
import json
import os
import resource
import select
import signal
import struct
import time
from contextlib import suppress

import files
import isolate

# What a shell command runs first; then follow the variables that the last command exported. On exit
# it saves its folder and its exported variables to fd 99. `exec`, `kill $$` or an EXIT trap of its
# own save nothing: then the older state stays. No shell can set its read-only variables.
PRELUDE = b"""unset BASH_ENV
trap '{ printf "%s\\0" "$PWD"; unset PWD OLDPWD SHLVL flatlab
export -n SHELLOPTS BASHOPTS BASH_VERSINFO UID EUID PPID; export -p; } >&99 2>/dev/null' EXIT
IFS= read -rd '' -u97 flatlab || true
"""
SHELL_FDS = (0, 1, 2, 97, 98, 99)  # stdin, stdout, stderr, command, prelude, saved state
MESSAGES = {
    errno.ENOENT: "is not there",
    errno.ELOOP: "is a link",
    errno.ENOTDIR: "does not lie in a plain folder",
}

ALONE = 'echo "{0} works only as the single word in a bash block of its own." >&2; exit 1'
PROGRAMS = {
    "validate": ALONE.format("validate"),
    "submit": ALONE.format("submit"),
    "python": 'exec python3 "$@"',  # not every image has it
}
LOST = b"\n[the exported variables of this command are not kept: they are larger than 256 kB]\n"
GRACE = 2  # seconds between SIGTERM and SIGKILL
SWEEP_SECONDS = 25  # large processes take time to end on a busy machine
ERROR_BYTES = 8192  # tail of the stderr of root's programs
STATE_BYTES = 1 << 18  # of exported variables that are kept for the next command
IDLE_POLLS = 20  # number of times an idle command is checked before it is stopped
CPU_SECONDS = 0.1  # between two looks at the CPU time of a command that has a limit of it
IDLE_SHARE = 1 / 200  # of one core: timers and repeated requests without an answer use less


def memory_file(data=b""):
    fd = os.memfd_create("flatlab")
    os.pwrite(fd, data, 0)  # the file offset stays at 0
    return fd


class Output:
    """The first bytes of a command's output, which are sent at once, and the last ones."""

    def __init__(self, most_head, most_tail, send=None):
        self.room = most_head
        self.most_tail = most_tail
        self.send = send
        self.tail = bytearray()
        self.dropped = 0

    def add(self, chunk):
        head = chunk[: self.room]
        if head:
            self.send(head)
        self.room -= len(head)
        self.tail += chunk[len(head) :]
        surplus = max(0, len(self.tail) - self.most_tail)
        del self.tail[:surplus]
        self.dropped += surplus

    def rest(self):
        """A line about what was dropped, if anything was, and the tail."""
        gap = b""
        if self.dropped:
            gap = b"\n[... %d bytes left out ...]\n" % self.dropped
        return gap + self.tail


class Runner:
    """`run`, `sweep` and `state` answer requests: they return (reply, last bytes)."""

    def __init__(self, config):
        self.requests = os.fdopen(os.dup(0), "rb")  # copies that no command inherits
        self.replies = os.fdopen(os.dup(1), "wb")
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)
        os.umask(0o022)
        self.config = config
        self.home = os.path.dirname(config.workspace)
        self.cwd = config.workspace  # what one shell command leaves to the next
        self.exports = b""
        self.exit_codes = {}  # of the children that somebody waits for; None while they run
        self.strays = []  # output pipes that background jobs still hold
        self.landlock_rules = None
        self.files = None  # before set_up()

    # -------------------------------------------------------------------------------- start and end

    def set_up(self):
        """Isolates this process, prepares its files. Raises OSError without isolation."""
        config = self.config
        isolate.isolate(config)
        path = config.tools + ":" + (config.path or os.environ.get("PATH", os.defpath))
        if not any(os.path.exists(folder + "/bash") for folder in path.split(":")):
            raise OSError("there is no bash")
        self.environ = dict(os.environ, **config.env, PATH=path, HOME=self.home)
        for folder in (config.workspace, config.tools):
            os.makedirs(folder, exist_ok=True)
        self.files = files.Files(config, self.send)
        self.files.own(".", self.files.home)
        self.files.own(self.files.name, self.files.home)
        for _, folders, _, at in os.fwalk(config.workspace):  # above mounts
            for name in folders:
                self.files.own(name, at)
        for name, text in PROGRAMS.items():
            program = config.tools + "/" + name
            isolate.write(program, f"#!/bin/sh\n{text}\n")
            os.chmod(program, 0o755)
        if config.isolation == "landlock":
            self.landlock_rules = isolate.make_landlock_rules(config)
        isolate.seal(config)
        for name, limit in config.limits.items():  # commands inherit them
            kind = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(kind)[1]
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
        # The end of a child writes to this pipe and so interrupts a poll.
        self.wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def leave(self):
        if self.config.isolation == "landlock":  # only there these are of our own making
            self.sweep(seconds=5)
            with suppress(OSError):
                files.remove(os.path.dirname(self.home))
        os._exit(0)  # the end of process 1 ends all others

    # ------------------------------------------------------------------------------------ processes

    def reap(self):
        """Collects every child that has ended, including daemons that became ours."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self.exit_codes:
                    code = os.WEXITSTATUS(status)
                    if os.WIFSIGNALED(status):
                        code = 128 + os.WTERMSIG(status)
                    self.exit_codes[pid] = code

    def sweep(self, blob=b"", seconds=SWEEP_SECONDS):
        """Kills every process of the sandbox except this one, including daemons."""
        deadline = time.monotonic() + seconds
        pause = 0.001
        while time.monotonic() < deadline:
            self.reap()
            pids = descendants()
            if not pids:
                return {}, b""
            # As process 1 of a PID namespace, a signal to -1 reaches all of this sandbox at once.
            for pid in [-1] if os.getpid() == 1 else pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return {"error": "processes survive SIGKILL"}, b""

    def start(self, command, stdin, user):
        """Starts a shell command (str) or a program (list).

        Returns its pid, the pipes of its output and errors (one pipe for both, unless it runs as
        root), and the file of a shell's state.
        """
        output, end = os.pipe()
        errors, errors_end = os.pipe() if user == "root" else (output, end)
        stdin_fd = memory_file(stdin) if stdin else os.open(os.devnull, os.O_RDWR)
        fds = [stdin_fd, end, errors_end]
        env = self.environ
        saved = None
        if isinstance(command, str):
            text = command.encode("utf-8", "replace").replace(b"\0", b"")
            saved = memory_file()
            # The command is in a file: it may be of any length, and no process list shows it.
            command = ["bash", "-c", 'eval "$flatlab"']
            env = dict(env, BASH_ENV="/dev/fd/98")
            fds += [memory_file(text), memory_file(PRELUDE + self.exports), saved]
        try:
            pid = os.fork()
        except BlockingIOError:  # the commands have used up all processes
            self.sweep()
            pid = os.fork()
        if not pid:
            try:
                self.execute(command, env, user, fds)
            except (OSError, ValueError) as error:
                os.write(2, (f"{command[0]}: {error}\n").encode("utf-8", "replace"))
            finally:
                os._exit(127)
        self.exit_codes[pid] = None
        for fd in set(fds) - {saved}:
            os.close(fd)
        for fd in {output, errors}:
            os.set_blocking(fd, False)
        return pid, output, errors, saved

    def execute(self, argv, env, user, fds):
        """In the child: a session, user and folder of its own, then the command."""
        os.setsid()
        with suppress(OSError):  # if memory is short, a command is killed before this process
            isolate.write("/proc/self/oom_score_adj", "1000")
        # First out of the way of the targets.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200) for fd in fds]
        for fd, target in zip(high, SHELL_FDS):
            os.dup2(fd, target)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if user == "agent" and os.geteuid() == 0 and self.config.uid:
            os.setgroups([])
            os.setgid(self.config.gid)
            os.setuid(self.config.uid)
        for folder in (self.cwd, self.config.workspace, "/"):
            with suppress(OSError, ValueError):  # deleted, or not a path at all
                os.chdir(folder)
                break
        if self.landlock_rules is not None:
            restrict = isolate.LANDLOCK_RESTRICT_SELF
            isolate.libc("syscall", restrict, self.landlock_rules, 0)
        os.execvpe(argv[0], argv, dict(env, PWD=folder))

    def run(self, blob, command, timeout, keep, user="agent", cpu=None, idle=0):
        """Runs a command with `blob` as stdin; keep: bytes of head and tail of the output.

        timeout: seconds by the clock; cpu: seconds of CPU time, None: no limit; idle: seconds in
        which nothing was printed and the sandbox used no CPU, 0: no limit. After one of them:
        SIGTERM to its process group, a grace period, then SIGKILL for everything in the sandbox.
        Background jobs of a command that ends in time live on; what they print after 0.1 s is
        dropped.
        """
        limit = time.monotonic() + timeout
        cpu_limit = cpu and self.cpu_seconds() + cpu
        pid, output_pipe, error_pipe, saved = self.start(command, blob, user)
        output = Output(*keep, self.send)
        errors = Output(0, ERROR_BYTES)
        outputs = {error_pipe: errors, output_pipe: output}
        stopped = self.wait(pid, outputs, limit, cpu_limit, idle)
        if saved is not None and not self.take_state(saved):
            output.add(LOST)
        code = self.exit_codes.pop(pid)
        reply = {
            "code": 137 if code is None else code,
            "stopped": stopped,
            "dropped": output.dropped,
            "stderr": errors.tail.decode("utf-8", "replace"),
        }
        return reply, output.rest()

    def cpu_seconds(self):
        """CPU time of all processes of the sandbox but this one, also of those that have ended.

        One that ends while its parent ignores SIGCHLD is not counted.
        """
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = sum(descendants().values())
        return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")

    def wait(self, pid, outputs, limit, cpu_limit, idle):
        """Collects output until the command has ended. Returns the limit that it exceeded: "idle",
        "time" (by the clock or of the CPU), or "".

        outputs: pipe -> Output.
        """
        poll = select.poll()
        for fd in outputs:
            poll.register(fd, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        poll.register(self.requests, 0)  # only whether it was closed
        stopped = ""
        interval = CPU_SECONDS if cpu_limit else idle / IDLE_POLLS  # 0: no look at the CPU time
        next_look = active = time.monotonic()  # active: when it last printed or used the CPU
        used = 0  # CPU seconds then
        phase = "running"  # then "terminated" and "killed" after a time limit; "ended" at the end
        while True:
            left = max(0.0, limit - time.monotonic())
            if interval:
                left = min(left, interval)
            ready = [fd for fd, _ in poll.poll(int(left * 1000) + 1)]
            if self.requests.fileno() in ready:
                self.leave()
            for fd in outputs.keys() & set(ready):
                chunk = os.read(fd, 65536)
                outputs[fd].add(chunk)
                active = time.monotonic()
                if not chunk:
                    poll.unregister(fd)
                    os.close(fd)
                    del outputs[fd]
            self.drain(ready)
            now = time.monotonic()
            if interval and phase == "running" and now >= next_look:
                next_look = now + interval
                seconds = self.cpu_seconds()
                if cpu_limit and seconds >= cpu_limit:
                    stopped = "time"
                elif seconds - used > IDLE_SHARE * idle or can_run(descendants()):
                    used = seconds
                    active = now
                elif idle and now - active >= idle:
                    stopped = "idle"
                if stopped:
                    limit = now
            if phase != "ended" and self.exit_codes[pid] is not None:
                if stopped:
                    self.sweep()
                phase = "ended"
                limit = now + (1 if stopped else 0.1)
            if phase == "ended" and not outputs:
                break
            if now < limit:
                continue
            if phase in ("ended", "killed"):
                break
            if phase == "terminated":
                self.sweep()
                phase = "killed"
                limit = now + 5
            else:
                phase = "terminated"
                stopped = stopped or "time"
                limit = now + GRACE
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGTERM)
        self.strays += outputs
        return stopped

    def drain(self, ready):
        """Empties the pipe that signals write to, and those of background jobs."""
        if self.wake in ready:
            with suppress(BlockingIOError):
                os.read(self.wake, 4096)
            self.reap()
        for fd in self.strays[:]:
            with suppress(BlockingIOError):
                if not os.read(fd, 65536):
                    self.strays.remove(fd)
                    os.close(fd)

    # ---------------------------------------------------------------------------------------- state

    def take_state(self, saved):
        """Reads what a shell saved. A command may write anything there; it harms only the next one.

        Returns whether the exported variables are few enough to be kept; else the older ones stay.
        """
        cwd, found, exports = os.pread(saved, 2 * STATE_BYTES, 0).partition(b"\0")
        os.close(saved)
        is_small = len(exports) < STATE_BYTES
        if found and b"\0" not in exports:
            self.cwd = os.fsdecode(cwd) or self.config.workspace
            if is_small:
                self.exports = exports
        return is_small

    def state(self, blob, cwd=None, exports=""):
        """Returns, or with `cwd` sets, the folder and exports of the next shell command."""
        if cwd is not None:
            self.cwd = cwd
            self.exports = exports.encode("latin-1")
        return {"cwd": self.cwd, "exports": self.exports.decode("latin-1")}, b""

    # ------------------------------------------------------------------------------------- protocol

    def receive(self, count):
        data = self.requests.read(count)
        if len(data) < count:
            self.leave()
        return data

    def answer(self, calls):
        """Reads one request and answers it."""
        sizes = struct.unpack(">II", self.receive(8))
        request = json.loads(self.receive(sizes[0]))
        data = self.receive(sizes[1])
        try:
            reply, data = calls[request.pop("call")](data, **request)
        except OSError as error:
            reply, data = {"error": MESSAGES.get(error.errno) or error.strerror}, b""
        except (ValueError, RuntimeError) as error:  # RecursionError, too
            reply, data = {"error": str(error)}, b""
        if self.files:
            self.files.look_at_clock()
        if data:
            self.send(data)
        self.send(b"")
        self.send(json.dumps(reply).encode())
        self.replies.flush()

    def send(self, data):
        self.replies.write(struct.pack(">I", len(data)))
        self.replies.write(data)

    def serve(self):
        """Answers requests, one at a time, until the owner is gone."""
        box = self.files
        handlers = [self.run, self.sweep, self.state, box.put, box.get, box.listing]
        handlers += [box.writable, box.written, box.prune]
        calls = {handler.__name__: handler for handler in handlers}
        while True:
            poll = select.poll()
            for fd in [self.requests, self.wake, *self.strays]:
                poll.register(fd, select.POLLIN)
            ready = [fd for fd, _ in poll.poll()]
            self.drain(ready)
            if self.requests.fileno() in ready:
                self.answer(calls)


def descendants():
    """All processes below this one: pid -> clock ticks of CPU time, with its ended children."""
    children = {}
    ticks = {}
    # Parents come first, so that what a process has used is not counted again in its parent, which
    # waits for it meanwhile.
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
        # It may just have ended. A process may have any name, also one that is not UTF-8.
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            children.setdefault(int(fields[1]), []).append(pid)
            ticks[pid] = sum(map(int, fields[11:15]))
    pids = [os.getpid()]
    for pid in pids:
        pids += children.get(pid, [])
    return {pid: ticks[pid] for pid in pids[1:]}


def can_run(pids):
    """Returns whether a thread of these processes runs, or waits for a CPU or a disk."""
    for pid in pids:
        with suppress(OSError):  # it may just have ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                    if file.read().rpartition(b")")[2].split()[0] in b"RD":
                        return True
    return False


def main(config):
    """Sets the sandbox up and serves until the owner is gone. The first request is "state"."""
    runner = Runner(config)
    atexit.register(runner.leave)  # also after an unexpected error, which Python prints first
    with suppress(BrokenPipeError, ConnectionResetError):  # the owner is gone
        try:
            runner.set_up()
        except OSError as error:  # no isolation
            problem = {"error": error.strerror or str(error)}
            runner.answer({"state": lambda blob: (problem, b"")})
        else:
            runner.serve()
