"""Docker sandboxes: a container whose main process is the program of guest/."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from flatlab.errors import SandboxFault
from flatlab.sandbox.backend import (
    PACKAGE_FOLDERS,
    Backend,
    Connection,
    Spec,
    boot_program,
    guest_config,
)

STARTS = threading.Semaphore(8)  # a daemon that is asked for more at once only gets slower
GONE_BY = 30  # seconds in which an ended container removes itself; after that it is removed here
CACHE = "/opt/flatlab/huggingface"  # where the Hugging Face cache of this machine is mounted
CACHE_LINKS = "/home/agent/.cache/huggingface"  # a writable folder with links into it
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]

# Uses the first python3 of the image; MLGym's image has its packages in this environment.
FIND_PYTHON = (
    "p=/home/agent/miniconda3/envs/mlgym_generic/bin; [ -d $p ] && PATH=$p:$PATH; export PATH; "
    'exec python3 -I -S -c "$0"'
)
ended: deque[tuple[float, str]] = deque()  # (when, name) of closed or failed containers


def conda_folders() -> tuple[str, ...]:
    """Patterns of package folders in images with conda."""
    folders = []
    for conda in ("/home/agent/miniconda3", "/opt/conda"):
        for part in ("", "envs/*/", "pkgs/*/"):
            folders.append(f"{conda}/{part}lib/python3*/site-packages")
    return tuple(folders)


class AttachedStream:
    """The attached socket of a container: stdout as a plain stream, stderr kept aside.

    Docker puts 8 bytes before each piece of data: 1 (stdout) or 2 (stderr), three zeros, length.
    """

    def __init__(self, response):
        self.response = response  # holds a reference to the socket
        self.socket = response._sock
        self.raw = bytearray()
        self.stderr = bytearray()
        self.settimeout = self.socket.settimeout
        self.sendall = self.socket.sendall
        self.shutdown = self.socket.shutdown

    def recv(self, most: int) -> bytes:
        """Data of stdout, of any length; b"" at the end."""
        while True:
            data = self.socket.recv(most)
            if not data:
                return b""
            self.raw += data
            stdout = self.split()
            if stdout:
                return stdout

    def split(self) -> bytes:
        """Takes the complete pieces out of `raw`. Returns those of stdout."""
        stdout = bytearray()
        while len(self.raw) >= 8:
            end = 8 + int.from_bytes(self.raw[4:8], "big")
            if len(self.raw) < end:
                break
            target = stdout if self.raw[0] == 1 else self.stderr
            target += self.raw[8:end]
            del self.raw[:end]
        return bytes(stdout)

    def close(self) -> None:
        self.socket.close()
        self.response.close()

    def errors(self) -> str:
        return self.stderr.decode("utf-8", "replace")


def start_docker(spec: Spec) -> Connection:
    """Starts a container that removes itself when the program in it ends. Raises SandboxFault."""
    from docker.errors import APIError, DockerException

    api = docker_api()
    name = f"flatlab-{secrets.token_hex(8)}"
    remove_ended(api)
    env = spec.env
    if spec.hf_cache:
        env = {"HF_HOME": CACHE_LINKS, "HF_HUB_OFFLINE": "1", **env}
    config = guest_config(
        "docker",
        env,
        limits={"CORE": 0, "FSIZE": spec.disk},
        hidden_data=spec.hide_package_data,
        package_folders=PACKAGE_FOLDERS + conda_folders(),
        copies=[[CACHE, CACHE_LINKS]] if spec.hf_cache else [],
    )
    boot, text = boot_program(config)
    try:
        with STARTS:
            container = api.create_container(
                spec.image,
                [boot],
                name=name,
                entrypoint=["/bin/sh", "-c", FIND_PYTHON],
                user="0",
                stdin_open=True,
                hostname="sandbox",
                working_dir="/",
                labels={"flatlab.owner": owner_label()},
                host_config=host_config(api, spec),
                # An empty network namespace, without half a second of CPU time.
                network_disabled=not spec.network,
            )["Id"]
            # Attached before the start, so that nothing is missed.
            params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            stream = AttachedStream(api.attach_socket(container, params=params))
            api.start(container)
        stream.sendall(text)
    except (APIError, DockerException, OSError) as error:
        ended.appendleft((0.0, name))  # created but not started, it would stay
        reason = " ".join(str(error).split())[:300]
        raise SandboxFault(f"Docker did not start a container: {reason}") from error

    def stop():  # the program inside has seen the end of the connection; its end ends the container
        ended.append((time.monotonic(), name))

    return Connection(stream, stop, stream.errors, container)


def host_config(api, spec: Spec):
    from docker.types import DeviceRequest, LogConfig

    binds = None
    if spec.hf_cache:
        binds = [f"{Path(spec.hf_cache).expanduser().resolve()}:{CACHE}:ro"]
    gpus = None
    if spec.gpu:
        gpus = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    return api.create_host_config(
        auto_remove=True,
        # The daemon would write everything that goes over the connection to its disk.
        log_config=LogConfig(type="none"),
        mem_limit=spec.memory,
        memswap_limit=spec.memory,
        pids_limit=spec.processes,
        nano_cpus=int(min(spec.cpus, os.cpu_count()) * 1e9),
        shm_size=256 << 20,
        security_opt=["no-new-privileges"],
        network_mode="bridge" if spec.network else "none",
        binds=binds,
        device_requests=gpus,
        cap_drop=["ALL"],
        cap_add=CAPABILITIES,
    )


def remove_ended(api) -> None:
    """Removes containers that failed to start, and those that should have removed themselves."""
    from docker.errors import APIError, DockerException

    while ended and ended[0][0] < time.monotonic() - GONE_BY:
        try:
            when, name = ended.popleft()
            api.remove_container(name, force=True)
        except (IndexError, APIError):  # another thread was quicker; it is gone, as usual
            continue
        except (DockerException, OSError):  # no daemon: later
            ended.append((when, name))
            return


def owner_label(pid: int | None = None) -> str:
    """host:pid:start time of a process; the start time tells a reused pid from the same process."""
    pid = pid or os.getpid()
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{pid}:{started}"


def owner_is_dead(owner: str) -> bool:
    """Whether the label names a process of this machine that has ended."""
    host, pid, _ = owner.rsplit(":", 2)
    if host != socket.gethostname():
        return False
    try:
        return owner_label(int(pid)) != owner
    except OSError:
        return True


@functools.cache
def docker_api():
    """The connection to the daemon. Removes containers whose owners on this machine are dead."""
    import docker

    api = docker.APIClient(
        **docker.utils.kwargs_from_env(), version="auto", timeout=5, max_pool_size=64
    )
    for box in api.containers(all=True, filters={"label": "flatlab.owner"}):
        if owner_is_dead(box["Labels"]["flatlab.owner"]):
            with suppress(docker.errors.APIError):  # it is removing itself right now
                api.remove_container(box["Id"], force=True)
    api.timeout = 120
    return api


def docker_problem(image: str) -> str:
    """Why Docker cannot be used with this image, as one sentence; empty if it can."""
    try:
        import docker
    except ImportError:
        return "The Python package docker is not installed."
    where = os.environ.get("DOCKER_HOST", "/var/run/docker.sock")
    try:
        docker_api().inspect_image(image)
    except docker.errors.ImageNotFound:
        return f"Docker runs but has no image {image}; get it with `docker pull {image}`."
    except (docker.errors.DockerException, OSError) as error:
        if "PermissionError" in str(error) or "Permission denied" in str(error):
            return (
                f"This user has no permission on the Docker socket {where}; "
                "add it to the group docker and log in."
            )
        return f"No Docker daemon answers at {where}."
    return ""


DOCKER = Backend(
    start_docker,
    "docker: own files, processes and users, no network, memory and processes limited in total",
    is_container=True,
    writable=None,
)
