"""The socket of a Docker daemon on another machine, forwarded to this one by the ssh client."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

SOCKET = "/var/run/docker.sock"
SECONDS = 15  # to connect
# The remote command ends at the end of its stdin, and with it the tunnel: also after `kill -9`.
WAIT = "echo ready; exec cat >/dev/null"
OPTIONS = {
    "BatchMode": "yes",  # no password is asked for
    "ConnectTimeout": SECONDS,
    "ControlMaster": "no",
    "ControlPath": "none",  # a shared connection would outlive this one
    "ExitOnForwardFailure": "yes",
    "ServerAliveInterval": 30,
}


clients: dict[str, subprocess.Popen] = {}  # by url
connecting = threading.Lock()


@functools.cache
def local_socket(url: str) -> Path:
    folder = tempfile.mkdtemp(prefix="flatlab-ssh-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "docker.sock"


def open_tunnel(url: str) -> str:
    """A local address for ssh://[user@]host[:port][/path/of/the/socket], always the same one.

    All requests share one connection of the ssh client, which reads ~/.ssh/config. If it has ended,
    the next call connects again. Raises OSError with the client's last line if it does not connect.
    """
    local = local_socket(url)
    with connecting:
        if url not in clients or clients[url].poll() is not None:
            local.unlink(missing_ok=True)
            clients[url] = start_client(url, local)
    return f"unix://{local}"


def start_client(url: str, local: Path) -> subprocess.Popen:
    """Starts the ssh client that forwards the socket, until this process ends."""
    parts = urlsplit(url)
    command = ["ssh", "-T", "-L", f"{local}:{parts.path.rstrip('/') or SOCKET}"]
    for name, value in OPTIONS.items():
        command += ["-o", f"{name}={value}"]
    if parts.port:
        command += ["-p", str(parts.port)]
    user = f"{parts.username}@" if parts.username else ""
    command += ["--", f"{user}{parts.hostname}", WAIT]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # A session of its own: Ctrl-C must not close the tunnel before the containers are gone.
    client = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    if client.stdout.readline() != "ready\n":
        lines = client.communicate()[1].strip().splitlines() or ["it ended without a message"]
        raise OSError(f"ssh: {lines[-1]}")
    atexit.register(client.terminate)
    return client
