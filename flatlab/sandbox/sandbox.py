"""Sandboxes: isolated machines, one for one episode or one grading. Two backends, docker and local, and one protocol.

The main process in a sandbox is isolate.py, files.py and runner.py, one program. It answers framed requests over one
connection. When the owner dies the connection ends, the program with it, and everything in the sandbox with the program.
"""

from __future__ import annotations

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
from flatlab.sandbox.boot import GRACE, readable
from flatlab.sandbox.docker import IMAGE, docker_api, docker_problem, owner_label, start_docker  # noqa: F401  some for others
from flatlab.sandbox.local import start_local

KEEP_BYTES = 32_768  # of an output: so much of its head, and of its tail
ARTEFACT_BYTES, COPY_BYTES = 64 << 20, 512 << 20
PUT_BYTES = 256 << 20  # of files in one request

# ---------------------------------------------------------------------------------------------- which one


@functools.cache
def local_isolation() -> tuple[bool, str]:
    """(complete?, one line saying what is covered and what is not), found out by starting one. Raises UserError."""
    reasons = []
    for mode, complete, line in (
        (
            "namespaces",
            True,
            "namespaces: own files, processes and users, no network, memory limited per process",
        ),
        (
            "landlock",
            False,
            "Landlock: only the workspace is writable, project and home hidden, no TCP; not "
            "covered: processes are visible, UDP and local sockets are open, no limits in sum, and what "
            "a task forgets of Python packages",
        ),
    ):
        try:
            Sandbox(mode).close()
            return complete, line
        except SandboxFault as fault:
            reasons.append(f"{mode}: {fault}")
    raise UserError(
        f"This machine cannot isolate a process ({'; '.join(reasons)}); use --backend docker."
    )


KINDS = (
    "docker",
    "local",
    "namespaces",
    "landlock",
)  # of local ones: unasked the first that works here


@functools.cache
def pick_backend(
    backend: str = "auto", image: str = IMAGE, model_is_tiny: bool = False
) -> tuple[str, str]:
    """("docker" or "local", one line that says which and why). Raises UserError when nothing is fit for the model."""
    if backend not in ("auto", "docker", "local"):
        raise UserError(f"Unknown backend {backend!r}; it is auto, docker or local.")
    problem = docker_problem(image) if backend != "local" else ""
    if backend != "local" and not problem:
        return "docker", f"docker, image {image}"
    if backend == "docker":
        raise UserError(problem)
    complete, line = local_isolation()
    if backend == "auto" and not complete and not model_is_tiny:
        raise UserError(
            f"{problem} A local sandbox is not complete here ({line}), so only the stand-in model uses it "
            "unasked; start Docker, or accept this with --backend local."
        )
    return "local", f"local, {line}" + (f" ({problem})" if problem else "")


# ---------------------------------------------------------------------------------------------- sandbox


@dataclass(frozen=True)
class Result:
    exit_code: int
    output: str  # stdout and stderr as they came, readable, head and tail of long ones
    cwd: str  # where the next command starts
    seconds: float
    timed_out: bool


class Sandbox:
    """One isolated machine. backend: "docker", "local", or a kind of local: "namespaces", "landlock".

    memory (bytes; docker in sum, local per process), disk (bytes per file; local also per tmpfs), cpus (docker only),
    processes. env: more environment variables. hide: folders of this machine that a local sandbox must not show.
    forget: folders of Python packages, relative to where packages lie, that are empty in there (not with Landlock).
    network: that of this machine (local) or a bridge (docker); none otherwise. docker only: gpu: all GPUs; hf_cache: a
    Hugging Face cache of this machine, read-only. given: workspace path -> file of this machine that is there already,
    in the image; a local sandbox mounts it, read-only, where it can. Then they are in the attribute `given`.
    Every method raises SandboxFault when the sandbox is broken or does not answer in time.
    """

    def __init__(
        self,
        backend: str,
        image: str = IMAGE,
        memory: int = 4 << 30,
        disk: int = 1 << 30,
        cpus: float = 2.0,
        processes: int = 256,
        env: dict[str, str] | None = None,
        hide: tuple[str, ...] = (),
        forget: tuple[str, ...] = (),
        network: bool = False,
        gpu: bool = False,
        hf_cache: str = "",
        given: dict[str, Path] | None = None,
    ):
        self._lock, self._raw, self._in, self._broken = (
            threading.Lock(),
            bytearray(),
            bytearray(),
            "",
        )
        if backend not in KINDS:  # anything else would be no isolation at all
            raise UserError(f"Unknown kind of sandbox {backend!r}; there are {', '.join(KINDS)}.")
        if backend == "local":
            backend = "namespaces" if local_isolation()[0] else "landlock"
        self.image, self.backend, self.given = (
            image,
            backend,
            set() if backend == "landlock" else set(given or {}),
        )
        self._framed = backend == "docker"
        self._errors, self._stderr, self.container = bytearray(), None, None
        options = {
            "memory": memory,
            "disk": disk,
            "processes": processes,
            "env": env or {},
            "network": network,
            "forget": forget,
        }
        if self._framed:
            self.container, self._wire, self._stop = start_docker(
                image=image, cpus=cpus, gpu=gpu, hf_cache=hf_cache, **options
            )
        else:
            mounts = {path: source for path, source in (given or {}).items() if path in self.given}
            self._wire, self._stop, self._stderr = start_local(
                backend, hide=hide, mounts=mounts, **options
            )
        try:
            self.workspace = self._answer("start", time.monotonic() + 60)[0]["workspace"]
        except SandboxFault:
            self.close()
            raise

    @property
    def broken(self) -> str:
        """Why no call can be answered any more; empty as long as it works, also after a call that answered an error."""
        return self._broken

    def call(
        self, name: str, blob: bytes = b"", wait: float = 60.0, **fields
    ) -> tuple[dict, bytes]:
        """One request to the runner. Raises ArtefactError when "get" answers with an error."""
        head = json.dumps({"call": name, **fields}).encode()
        with self._lock:
            if self._broken:
                raise SandboxFault(self._broken)
            deadline = time.monotonic() + wait
            try:
                self._wire.settimeout(wait)
                self._wire.sendall(struct.pack(">II", len(head), len(blob)) + head)
                self._wire.sendall(blob)
            except OSError as error:
                self._fail(error)
            return self._answer(name, deadline)

    def _answer(self, name, deadline):
        try:
            sizes = struct.unpack(">II", self._read(8, deadline))
            reply, blob = json.loads(self._read(sizes[0], deadline)), self._read(sizes[1], deadline)
        except (OSError, EOFError) as error:
            self._fail(error)
        if "error" in reply:
            raise (ArtefactError if name == "get" else SandboxFault)(reply["error"])
        return reply, blob

    def _read(self, count, deadline) -> bytes:
        while len(self._in) < count:
            self._wire.settimeout(max(0.01, deadline - time.monotonic()))
            data = self._wire.recv(1 << 18)
            if not data:
                raise EOFError("it has ended")
            if not self._framed:
                self._in += data
                continue
            self._raw += data  # Docker: 8 bytes (stream, 3 zeros, length), then data of stdout (1) or stderr (2)
            while len(self._raw) >= 8 and len(self._raw) >= 8 + (
                size := int.from_bytes(self._raw[4:8], "big")
            ):
                (self._in if self._raw[0] == 1 else self._errors).extend(self._raw[8 : 8 + size])
                del self._raw[: 8 + size]
        data = bytes(self._in[:count])
        del self._in[:count]
        return data

    def _fail(self, error):
        if self._broken:  # closed by another thread, so there is nothing left to read
            raise SandboxFault(self._broken) from error
        said = self._stderr() if self._stderr else self._errors.decode("utf-8", "replace")
        self._broken = " ".join(f"the sandbox does not answer: {error} {said[-500:]}".split())
        raise SandboxFault(self._broken)

    def run(
        self,
        command: str | list[str],
        timeout: float,
        user: str = "agent",
        stdin: bytes = b"",
        bodies: list[str] | tuple = (),
    ) -> Result:
        """A shell command (str: bash, keeps cwd and exported variables for the next one) or a program (list).
        bodies: of the command's edits, see replies.lift_bodies."""
        reply, blob = self.call(
            "run",
            stdin,
            timeout + GRACE + 20,
            command=command,
            timeout=timeout,
            user=user,
            keep=[KEEP_BYTES, KEEP_BYTES],
            **{"bodies": bodies} if bodies else {},
        )
        head, tail = blob[: reply["head"]], blob[reply["head"] :]
        gap = (
            f"\n[... {reply['dropped']} bytes left out ...]\n".encode() if reply["dropped"] else b""
        )
        return Result(
            reply["code"],
            clean(head + gap + tail),
            reply["cwd"],
            reply["seconds"],
            reply["timed_out"],
        )

    def program(
        self,
        argv: list[str],
        timeout: float,
        user: str = "agent",
        stdin: bytes = b"",
        limit: int = 1 << 20,
    ) -> tuple[bytes, dict]:
        """(stdout up to `limit` bytes, the runner's reply: code, timed_out, dropped) of a program, without stderr."""
        reply, blob = self.call(
            "run",
            stdin,
            timeout + GRACE + 20,
            command=argv,
            timeout=timeout,
            user=user,
            keep=[limit, 0],
            stderr=False,
        )
        return blob, reply

    def put(self, files: dict[str, bytes | Path], user: str = "agent", mode: int = 0o644) -> None:
        """Writes files with paths relative to the workspace, owned by "agent" or "root"."""
        sizes, data = [], bytearray()
        for path, source in files.items():
            content = source if isinstance(source, bytes) else source.read_bytes()
            if data and len(data) + len(content) > PUT_BYTES:
                self.call("put", bytes(data), files=sizes, user=user, mode=mode)
                sizes, data = [], bytearray()
            sizes.append([path, len(content)])
            data += content
        self.call("put", bytes(data), files=sizes, user=user, mode=mode)

    def remove(self, paths: list[str]) -> None:
        """Removes files and folders of the workspace, whatever their rights are."""
        names = b"".join(
            os.fsencode(f"{self.workspace}/{path.rstrip('/')}") + b"\0" for path in paths
        )  # too many for one argv
        argv = [
            "/usr/bin/xargs",
            "-0",
            "-r",
            "/bin/rm",
            "-rf",
            "--",
        ]  # absolute: root must run none of the agent's
        reply = self.program(argv, 60, user="root", stdin=names)[1]
        if reply["code"]:
            raise SandboxFault(
                f"files in the workspace cannot be removed (exit code {reply['code']})"
            )

    def get(self, path: str, max_bytes: int = ARTEFACT_BYTES) -> bytes:
        """Content of a regular file. Raises ArtefactError with the reason."""
        try:
            return self.call("get", path=path, limit=max_bytes)[1]
        except ArtefactError as error:
            raise ArtefactError(f"{readable(path)} {error}") from None

    def close(self) -> None:
        """Ends the sandbox, its processes and files; a call that waits in another thread gets a SandboxFault."""
        if self._stop is None:
            return
        self._broken, stop, self._stop = self._broken or "the sandbox is closed", self._stop, None
        with suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()
        stop()


ANSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def clean(data: bytes) -> str:
    """Terminal output as readable text: no ANSI codes and control characters, progress bars in their last state."""
    text = ANSI.sub(b"", data).decode("utf-8", "replace")
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return CONTROL.sub("", "\n".join(lines))
