"""Container engines that tests start themselves, and a wire that can be cut before a socket."""

import os
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from backends import missing
from flatlab.sandbox import client, docker, hosts, images, snapshot
from flatlab.sandbox.backend import IMAGE
from helpers import SBIN, Services

# The image's Python, bash and tools without what is large: 70 MB instead of 1 GB.
LEFT_OUT = (
    "usr/include usr/share usr/lib/python3 usr/lib/python3*/dist-packages usr/lib/gcc "
    "usr/lib/git-core usr/bin/*-linux-gnu-* usr/lib/*/*.a usr/lib/*/*san.so* "
    "usr/lib/*/openblas* usr/lib/*/lapack usr/lib/*/perl"
)
KEPT = "bin sbin lib lib64 etc usr var home opt root tmp"


def lacking(*programs):
    """Which of the programs are missing, as the reason to skip a test; empty if none."""
    absent = [name for name in programs if not shutil.which(name, path=SBIN)]
    return f"{', '.join(absent)} missing" if absent else ""


class Engines(Services):
    """Services that also remove what container engines leave behind."""

    bridge = ""  # a network interface that is removed at the end

    def stop(self):
        super().stop()
        # A container that was starting when its daemon was killed.
        shims = subprocess.run(["pgrep", "-f", f"shim.*{self.folder}/"], capture_output=True)
        for pid in shims.stdout.decode().split():
            subprocess.run(["pkill", "-KILL", "-P", pid])
            os.kill(int(pid), signal.SIGKILL)
        if self.bridge:
            ip = shutil.which("ip", path=SBIN)
            subprocess.run([ip, "link", "delete", self.bridge], check=True)
        for pid in self.folder.glob("run/libpod/tmp/pause.pid"):  # keeps podman's user namespace
            os.kill(int(pid.read_text()), signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed(mounts):
            if mount.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", mount], check=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def write_rootfs(path):
    """Writes a tar of a small part of the image."""
    if missing("docker"):
        pytest.skip(missing("docker"))
    options = [f"--exclude={name}" for name in LEFT_OUT.split()]
    command = ["tar", "-C", "/", "-c", "--one-file-system", *options, *KEPT.split()]
    with open(path, "wb") as file:
        run = ["docker", "run", "--rm", "--network=none", IMAGE, *command]
        subprocess.run(run, stdout=file, check=True)
    path.chmod(0o644)
    return path


def start_dockerd(services, rootfs, *options):
    """Starts a Docker daemon of its own, with the image. Returns the path of its socket."""
    # With --bridge=none, it would remove the bridge docker0 of another daemon.
    services.bridge = services.folder.name
    ip = shutil.which("ip", path=SBIN)
    subprocess.run([ip, "link", "add", services.bridge, "type", "bridge"], check=True)
    subprocess.run([ip, "address", "add", "10.213.7.1/24", "dev", services.bridge], check=True)
    path = run_dockerd(services, *options)
    load = ["docker", "--host", f"unix://{path}", "import", rootfs, IMAGE]
    subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
    return path


def run_dockerd(services, *options):
    """Starts the daemon in the services' folder, also once more. Returns the path of its socket."""
    folder = services.folder
    services.start(
        "dockerd",
        f"--host=unix://{folder}/socket",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/pid",
        f"--bridge={services.bridge}",
        "--iptables=false",
        "--ip-forward=false",
        *options,
    )
    address = f"unix://{folder}/socket"
    info = ["docker", "--host", address, "info"]
    services.wait_for(lambda: not subprocess.run(info, capture_output=True).returncode)
    return folder / "socket"


class Wire:
    """Stands in front of Docker's socket: can cut it, as a restart of the daemon does, or hang."""

    def __init__(self, path):
        self.path, self.real, self.open, self.hang = path, "/var/run/docker.sock", [], False
        self.cut_at = b"\0never\0"
        self.swap = b"", b""  # what is replaced, and by what
        self.server = socket.socket(socket.AF_UNIX)
        self.listen()

    def listen(self):
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(self.path))
        self.server.listen(64)
        threading.Thread(target=self.accept, args=(self.server,), daemon=True).start()

    def accept(self, server):
        with suppress(OSError):
            while True:
                near = server.accept()[0]
                far = socket.socket(socket.AF_UNIX)
                far.connect(self.real)
                self.open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self.copy, args=(source, target), daemon=True).start()

    def copy(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.cut_at in data:
                    break
                if not self.hang:
                    target.sendall(data.replace(*self.swap))
            target.shutdown(socket.SHUT_WR)

    def cut(self):
        for end in (self.server, *self.open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open.clear()
        with suppress(FileNotFoundError):
            os.unlink(self.path)


def forget_engine():
    """What was found out about the engine before, or about its images, does not hold any more."""
    snapshot.roots_of.clear()
    docker.docker_api.cache_clear()
    hosts.host_of.cache_clear()
    client.pick_backend.cache_clear()
    images.found_images.clear()
