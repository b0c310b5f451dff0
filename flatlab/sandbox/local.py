"""Local sandboxes: processes of this machine, shut in by namespaces or by Landlock (see isolate.py)."""

from __future__ import annotations

import glob
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from flatlab.errors import SandboxFault
from flatlab.sandbox.boot import (
    LIFE,
    NURSERY,
    PACKAGES,
    RUNNER,
    WORKSPACE,
    boot_texts,
    runner_config,
)


def local_view(hide: tuple[str, ...], network: bool) -> list[tuple[str, str]]:
    """(path, real path) of what a local sandbox sees of this machine, read-only; an empty real path hides a folder."""
    paths = {"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"}
    paths |= {
        f"/etc/{name}"
        for name in (
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
            *(["resolv.conf"] if network else []),
        )
    }
    for prefix in (sys.prefix, sys.base_prefix):
        paths |= {prefix, os.path.realpath(prefix)}
    link = sys.executable
    while os.path.islink(
        link
    ):  # a virtual environment's python may reach its own place over several links
        paths.add(link)
        link = os.path.join(os.path.dirname(link), os.readlink(link))
    hidden = (
        {str(Path(path).resolve()) for path in (Path(__file__).parents[2], Path.home(), *hide)}
        - {"/"}
        - paths
    )
    shown = [(path, path if os.path.islink(path) else os.path.realpath(path)) for path in paths]
    return shown + [(path, "") for path in hidden]


def package_folders(names: tuple[str, ...]) -> list[str]:
    """Where folders of Python packages lie in what a local sandbox sees of this machine."""
    prefixes = {
        place
        for prefix in (sys.prefix, sys.base_prefix)
        for place in (prefix, os.path.realpath(prefix))
    }
    places = [
        *PACKAGES,
        *(
            f"{glob.escape(prefix)}/{part}lib/python3*/site-packages"
            for prefix in prefixes
            for part in ("", "envs/*/", "pkgs/*/")
        ),
    ]
    return sorted(
        {path for name in names for place in places for path in glob.glob(f"{place}/{name}")}
    )


def start_local(
    mode: str,
    memory: int,
    disk: int,
    processes: int,
    env: dict,
    hide: tuple[str, ...],
    network: bool,
    mounts: dict[str, Path],
    forget: tuple[str, ...],
    **_,
):
    """A process sandbox. Returns (connection, function that ends it, function that tells what it wrote on stderr)."""
    uid = 65534 if os.geteuid() == 0 else 1000
    view, more = local_view(hide, network), {}
    view += [(f"{WORKSPACE}/{path}", os.path.realpath(source)) for path, source in mounts.items()]
    if mode == "namespaces":  # Landlock cannot hide what lies in a visible folder
        view += [(path, "") for path in package_folders(forget)]
    if mode == "landlock":
        for path, real in view:
            if not real and any(
                path.startswith(other.rstrip("/") + "/") for _, other in view if other
            ):
                raise SandboxFault(
                    f"Landlock cannot hide {path}, which lies in a folder that commands may read"
                )
        home = tempfile.mkdtemp(prefix="flatlab-")
        os.chmod(home, 0o755)
        places = [*Path(sys.prefix).resolve().parents, *Path(sys.base_prefix).resolve().parents]
        if not all(folder.stat().st_mode & 1 for folder in places):
            uid = 0  # our Python lies where no other user can go: stay root, without capabilities
        more = {"workspace": f"{home}/agent/workspace", "tools": f"{home}/agent/.bin"}
        env = {"TMPDIR": f"{home}/agent", **env}
    config = runner_config(
        mode,
        env,
        uid=uid,
        gid=uid,
        view=view,
        disk=disk,
        network=network,
        path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
        limits={"AS": memory, "FSIZE": disk, "NOFILE": 1024, "CORE": 0, "CPU": LIFE}
        | ({"NPROC": processes} if mode == "namespaces" else {}),
        **more,
    )
    ours, theirs = socket.socketpair()
    errors, their_errors = os.pipe()
    try:
        spawn(theirs.fileno(), their_errors, json.dumps(config).encode())
    except OSError as error:
        if mode == "landlock":
            shutil.rmtree(home, ignore_errors=True)
        ours.close()
        os.close(errors)
        raise SandboxFault(f"no process can be started: {error}") from error
    finally:
        theirs.close()
        os.close(their_errors)
    os.set_blocking(errors, False)
    said = open(errors, "rb", buffering=0)

    def stop():  # the runner has seen the end of the connection; with it ends its stderr
        poll, deadline = select.poll(), time.monotonic() + 10
        poll.register(said, select.POLLIN)
        while poll.poll(max(0, 1000 * (deadline - time.monotonic()))) and said.read(1 << 16):
            pass
        said.close()

    return ours, stop, lambda: (said.read() or b"").decode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------- nursery

nursery, one_at_a_time = None, threading.Lock()  # (its socket, its process)


def spawn(connection: int, errors: int, config: bytes) -> None:
    """Has the nursery start a sandbox with these files; starts the nursery when there is none. Raises OSError."""
    global nursery
    fd = os.memfd_create("flatlab")
    try:
        os.write(fd, config)
        with one_at_a_time:
            nursery = nursery or start_nursery()
            try:
                socket.send_fds(nursery[0], [b"!"], [connection, errors, fd])
            except OSError:  # somebody has killed it
                nursery[0].close()
                nursery[1].kill()
                nursery[1].wait()
                nursery = start_nursery()
                socket.send_fds(nursery[0], [b"!"], [connection, errors, fd])
    finally:
        os.close(fd)


def start_nursery():
    """A process of nursery.py; it ends when nobody holds its socket any more: this process, and what it has forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    boot, text = boot_texts({"program": RUNNER}, NURSERY)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", boot],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    theirs.close()
    ours.sendall(text)
    return ours, process
