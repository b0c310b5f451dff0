"""Sandboxes: isolated machines, each for one episode or one grading.

The main process in a sandbox is the program of guest/. It answers framed requests over one
connection. When the owner dies the connection ends, and with it everything in the sandbox.
"""

import functools
import json
import os
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flatlab.errors import ArtefactError, SandboxFault, UserError
from flatlab.numbers import counted
from flatlab.sandbox.backend import IMAGE, Backend, Spec
from flatlab.sandbox.docker import DOCKER, docker_problem
from flatlab.sandbox.local import LANDLOCK, NAMESPACES

KEEP_BYTES = 32_768  # bytes kept from the head and from the tail of an output
ARTEFACT_BYTES = 64 << 20
COPY_BYTES = 512 << 20
ANSWER_SECONDS = 60  # until a request is answered, beyond the timeout of a command
PUT_BYTES = 256 << 20  # a request of more files than that is sent

# --------------------------------------------------------------------------------------- backends

BACKENDS = {"docker": DOCKER, "namespaces": NAMESPACES, "landlock": LANDLOCK}
LOCAL = ("namespaces", "landlock")  # order; the first kind that works is used
KINDS = ("local", *BACKENDS)


@functools.cache
def local_kind() -> str:
    """The kind of local sandbox that works here, found by starting one. Raises UserError."""
    reasons = []
    for kind in LOCAL:
        try:
            Sandbox(kind).close()
            return kind
        except SandboxFault as fault:
            reasons.append(f"{kind}: {fault}")
    raise UserError(
        f"This machine cannot isolate a process ({'; '.join(reasons)}); use --backend docker."
    )


def get_backend(name: str) -> Backend:
    """The backend of a kind of sandbox. Raises UserError for an unknown one."""
    if name not in KINDS:
        raise UserError(f"Unknown kind of sandbox {name!r}; there are {', '.join(KINDS)}.")
    return BACKENDS[local_kind() if name == "local" else name]


@functools.cache
def pick_backend(
    backend: str = "auto", image: str = IMAGE, stand_in: bool = False
) -> tuple[str, str]:
    """("docker" or "local", one line that says which and why).

    Raises UserError if no backend works, or only an incomplete one for a model that is not tiny.
    """
    problem = ""
    if backend in ("auto", "docker"):
        problem = docker_problem(image)
        if not problem:
            return "docker", f"docker, image {image}"
    if backend == "docker":
        raise UserError(
            f"{problem} A run that began with --backend docker goes on with it; for --backend "
            "local choose another --name."
        )
    local = get_backend("local" if backend == "auto" else backend)
    if backend == "auto" and not local.is_complete and not stand_in:
        raise UserError(
            f"{problem} The isolation of a local sandbox is not complete here ({local.covers}), "
            "so only the stand-in model uses it by default; start Docker, or accept this with "
            "--backend local."
        )
    return "local", f"local, {local.covers}" + (f" ({problem})" if problem else "")


# ---------------------------------------------------------------------------------------- sandbox


@dataclass(frozen=True)
class Result:
    exit_code: int
    output: str  # stdout and stderr in order, readable; head and tail of a long one
    stopped: str  # exceeded limit: "time" or "idle"; "" if none


class Sandbox:
    """One isolated machine.

    Args:
        backend: "docker", "local", or a kind of local: "namespaces", "landlock".
        options: Fields of `Spec`.

    The attribute `mounts` holds those of Spec.mounts that are in place. Every method raises
    SandboxFault if the sandbox is broken or does not answer in time.
    """

    def __init__(self, backend: str, **options):
        self.backend = get_backend(backend)
        self.spec = spec = Spec(**options)
        self._lock = threading.Lock()
        self._received = bytearray()
        self.broken = ""  # reason why no call can be answered any more
        self._connection = self.backend.start(spec)
        self._stream = self._connection.stream
        self.container = self._connection.container
        self.mounts = self._connection.mounts
        try:
            self.workspace = self.call("state")[0]["cwd"]
        except SandboxFault:
            self.close()
            raise

    def call(self, name: str, blob: bytes = b"", **fields) -> tuple[dict, bytes]:
        """One request to the program inside, and its answer."""
        head = json.dumps({"call": name, **fields}).encode()
        with self._lock:
            if self.broken:
                raise SandboxFault(self.broken)
            deadline = time.monotonic() + ANSWER_SECONDS + fields.get("timeout", 0)
            try:
                self._stream.settimeout(ANSWER_SECONDS)
                sizes = struct.pack(">II", len(head), len(blob))
                self._stream.sendall(sizes + head)
                self._stream.sendall(blob)
                data = bytearray()
                while piece := self._read_piece(deadline):
                    data += piece
                reply = json.loads(self._read_piece(deadline))
            except (OSError, EOFError) as error:
                text = f"the sandbox does not answer: {error} {self._connection.errors()[-500:]}"
                self.broken = self.broken or " ".join(text.split())
                raise SandboxFault(self.broken) from error
        if "error" in reply and name != "get":
            raise SandboxFault(reply["error"])
        return reply, bytes(data)

    def _read_piece(self, deadline: float) -> bytes:
        [size] = struct.unpack(">I", self._read(4, deadline))
        return self._read(size, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        while len(self._received) < count:
            self._stream.settimeout(max(0.01, deadline - time.monotonic()))
            data = self._stream.recv(1 << 18)
            if not data:
                raise EOFError("it has ended")
            self._received += data
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def run(self, command: str | list[str], timeout: float, idle: float = 0) -> Result:
        """Runs a shell command (str) or a program (list of arguments).

        Shell commands run in bash and keep cwd and exported variables for the next one. idle:
        seconds without output and without use of the CPU until it is stopped, 0: no limit.
        """
        keep = [KEEP_BYTES, KEEP_BYTES]
        reply, blob = self.call("run", command=command, timeout=timeout, keep=keep, idle=idle)
        return Result(reply["code"], plain_text(blob), reply["stopped"])

    def program(
        self,
        argv: list[str],
        timeout: float,
        stdin: bytes = b"",
        keep: tuple = (1 << 20, 0),
        **limits,
    ) -> tuple[dict, bytes]:
        """Runs a program as root, or as the user of a sandbox without one.

        keep: bytes of the head and of the tail of its stdout. limits: cpu, seconds of CPU time of
        all its processes; idle, see run. Returns the reply: code, stopped (see Result), dropped,
        and stderr (the last 8 kB of it, as text); and these bytes, with a line between them if some
        were dropped.
        """
        fields = {"command": argv, "timeout": timeout, "keep": keep, "user": "root"}
        return self.call("run", stdin, **fields, **limits)

    def put(self, files: dict[str, bytes | Path], user: str = "agent") -> None:
        """Writes files with paths relative to the workspace, owned by "agent" or "root". Only root
        can read those of root.
        """
        sizes = []
        data = bytearray()
        for path, source in files.items():
            content = source if isinstance(source, bytes) else source.read_bytes()
            sizes.append([path, len(content)])
            data += content
            if len(data) > PUT_BYTES:
                self.call("put", data, files=sizes, user=user)
                sizes = []
                data = bytearray()
        self.call("put", data, files=sizes, user=user)

    def remove(self, paths: list[str]) -> None:
        """Removes files and folders of the workspace, whatever their permissions are."""
        names = [f"{self.workspace}/{path.rstrip('/')}" for path in paths]
        # Names go through stdin: there may be too many for one argv. The programs have absolute
        # paths: root must run none of the agent's.
        argv = ["/usr/bin/xargs", "-0", "-r", "/bin/rm", "-rf", "--"]
        code = self.program(argv, 60, os.fsencode("\0".join(names)))[0]["code"]
        if code:
            raise SandboxFault(f"files in the workspace cannot be removed (exit code {code})")

    def get(self, path: str, max_bytes: int = ARTEFACT_BYTES) -> bytes:
        """Content of a regular file. Raises ArtefactError with the reason."""
        reply, data = self.call("get", path=path, limit=max_bytes)
        if "error" in reply:
            raise ArtefactError(f"{readable(path)} {reply['error']}")
        return data

    def close(self) -> None:
        """Ends the sandbox. A call that waits in another thread raises a SandboxFault."""
        self.broken = self.broken or "the sandbox is closed"
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)
        self._connection.stop()


# ------------------------------------------------------------------------------------------- text

# Escape sequences end in their line, and strings (of OSC, DCS, SOS, PM and APC) with BEL or ESC \\;
# of others only the ESC is removed, because what follows may be output.
ANSI = re.compile(
    rb"\x1b\[[0-?]{0,99}[ -/]{0,9}[@-~]|\x1b[]PX^_][^\x07\x1b\r\n]{0,4096}(?:\x07|\x1b\\)"
    rb"|\x1b[ -/]{0,9}[0-OQ-WYZ\\`-~]"
)
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def plain_text(data: bytes) -> str:
    """Terminal output as readable text, without escape sequences and control characters."""
    text = ANSI.sub(b"", data).decode("utf-8", "replace")
    return CONTROL.sub("", "\n".join(map(last_state, text.split("\n"))))


def last_state(line: str) -> str:
    """Last state of a line that was overwritten after "\\r" and "\\b", as progress bars are.

    One that does not begin with "\\r" may hold the rows of a file: their number is told.
    """
    states = [state for state in line.split("\r") if state] or [""]
    shown = []
    column = 0
    for char in states[-1]:
        if char == "\b":
            column = max(0, column - 1)
        else:
            shown[column : column + 1] = char
            column += 1
    note = ""
    if len(states) > 1 and not line.startswith("\r"):
        note = f"[{counted(len(states) - 1, 'line')} overwritten after \\r]\n"
    return note + "".join(shown)


def readable(text: str) -> str:
    """The text with ? for what cannot be encoded, as bytes in a file's name that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()
