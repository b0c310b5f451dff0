"""Local sandboxes: processes of this machine, isolated by namespaces or by Landlock."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from glob import escape, glob
from pathlib import Path

from flatlab.errors import SandboxFault
from flatlab.files import user_home
from flatlab.sandbox.backend import (
    WORKSPACE,
    Backend,
    Connection,
    Spec,
    boot_program,
    package_patterns,
)

SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
USER = 65534 if os.geteuid() == 0 else 1000  # user of the commands
PREFIXES = {sys.prefix, sys.base_prefix}  # folders of our Python
PREFIXES |= set(map(os.path.realpath, PREFIXES))
ETC = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)


def local_view(spec: Spec) -> list[tuple[str, str]]:
    """(path, real path) of what a local sandbox sees of this machine, read-only.

    An empty real path hides a folder.
    """
    paths = PREFIXES.union(SYSTEM_FOLDERS)
    paths.update(f"/etc/{name}" for name in ETC)
    if spec.network:
        paths.add("/etc/resolv.conf")
    for link in (sys.prefix, sys.executable):  # of a virtual environment: maybe chains of links
        while os.path.islink(link):
            paths.add(link)
            link = os.path.join(os.path.dirname(link), os.readlink(link))
    private = filter(os.path.isdir, (Path(__file__).parents[2], user_home(), *spec.hide))
    hidden = {os.path.realpath(path) for path in private} - {"/"} - paths
    view = [(path, "") for path in hidden]
    for path in paths:
        is_link = os.path.islink(path)  # is shown as the link that it is
        view.append((path, path if is_link else os.path.realpath(path)))
    return view


def start_namespaces(spec: Spec) -> Connection:
    view = local_view(spec)
    for path, source in spec.mounts.items():
        view.append((f"{WORKSPACE}/{path}", os.path.realpath(source)))
    for pattern in package_patterns(spec.hide_package_data, map(escape, PREFIXES)):
        view += [(path, "") for path in glob(pattern)]
    return start_process("namespaces", spec, view, USER, {}, {"NPROC": spec.processes})


def start_landlock(spec: Spec) -> Connection:
    view = local_view(spec)
    for path, real in view:
        for other, visible in view:
            if not real and visible and path.startswith(other.rstrip("/") + "/"):
                raise SandboxFault(
                    f"Landlock cannot hide {path}, which lies in a folder that commands may read"
                )
    user = USER
    for prefix in PREFIXES:
        for folder in Path(prefix).resolve().parents:
            if not folder.stat().st_mode & 1:
                user = 0  # no other user can reach our Python: stay root, without capabilities
    folder = tempfile.mkdtemp(prefix="flatlab-")
    os.chmod(folder, 0o755)
    agent_home = f"{folder}/agent"
    paths = {"workspace": f"{agent_home}/workspace", "tools": f"{agent_home}/.bin"}
    spec = replace(spec, mounts={})  # it can mount nothing
    return start_process("landlock", spec, view, user, {"TMPDIR": agent_home}, {}, **paths)


def start_process(isolation, spec: Spec, view, user, env, limits, **paths):
    """Starts a Python that isolates itself. Raises SandboxFault if there can be no process."""
    boot, text = boot_program(
        isolation,
        spec,
        env,
        {"AS": spec.memory, "NOFILE": 1024} | limits,
        uid=user,
        gid=user,
        view=view,
        path=f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
        **paths,
    )
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", boot],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise SandboxFault(f"no process can be started: {error}") from error
    finally:
        theirs.close()
    os.set_blocking(process.stderr.fileno(), False)
    with suppress(OSError):  # it has ended; the first answer will not come, `errors` says why
        ours.sendall(text)
    stop, errors = partial(end, ours, process), partial(read_errors, process)
    return Connection(ours, stop, errors, spec.mounts)


def read_errors(process) -> str:
    data = b"" if process.stderr.closed else process.stderr.read()
    return (data or b"").decode("utf-8", "replace")


def end(stream, process) -> None:
    """Ends the connection and waits for the process, which sees that; kills it after 10 s."""
    stream.close()
    process.stderr.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


NAMESPACES = Backend(
    start_namespaces,
    "namespaces: own files, processes and users, no network, memory limited per process",
    writable=("/tmp", "/dev/shm"),
)
LANDLOCK = Backend(
    start_landlock,
    "Landlock: only the workspace is writable, project and home hidden, no TCP, no "
    "shared memory; not covered: processes are visible, UDP and local sockets are open, no limits "
    "in total, and hidden data of Python packages",
    is_complete=False,
)
