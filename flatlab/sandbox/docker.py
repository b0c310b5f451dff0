"""Docker sandboxes: a container whose main process is the program of guest/."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from flatlab.errors import SandboxFault
from flatlab.sandbox.backend import Backend, Connection, Spec, boot_program
from flatlab.sandbox.ssh import open_tunnel

STARTS = 8  # at once; a daemon that is asked for more only gets slower
LEFTOVER = "5m"  # older containers that do not run, and images without a name, are leftovers
CACHE = "/opt/flatlab/huggingface"  # where the Hugging Face cache is mounted
CACHE_LINKS = "/home/agent/.cache/huggingface"  # a writable folder with links into it
LIMITS = {"cpu": "CpuCfsQuota", "memory": "MemoryLimit", "pids": "PidsLimit"}  # in `docker info`
SHARED_PROCESSES = 16  # how many times Spec.processes, where all containers share one limit
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]

# Uses the first python3 of the image; MLGym's image has its packages in this environment.
SET_PATH = (
    "p=/home/agent/miniconda3/envs/mlgym_generic/bin; [ -d $p ] && PATH=$p:$PATH; export PATH; "
)
FIND_PYTHON = SET_PATH + 'exec python3 -I -S -c "$0"'


class AttachedStream:
    """The attached socket of a container: stdout as a plain stream, stderr kept aside.

    Docker puts 8 bytes before each piece of data: 1 (stdout) or 2 (stderr), three zeros, length.
    """

    def __init__(self, response):
        self.response = response  # holds a reference to the socket, or with TLS is the socket
        self.socket = getattr(response, "_sock", response)
        self.raw = bytearray()
        self.stderr = bytearray()
        self.settimeout = self.socket.settimeout
        self.sendall = self.socket.sendall
        self.shutdown = self.socket.shutdown

    def recv(self, most: int) -> bytes:
        """Data of stdout, of any length; b"" at the end."""
        while data := self.socket.recv(most):
            self.raw += data
            if stdout := self.split():
                return stdout
        return b""

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
    from docker.errors import DockerException

    api = docker_api(spec.host)
    name = f"flatlab-{secrets.token_hex(8)}"
    env = spec.env
    if spec.hf_cache:
        env = {"HF_HOME": CACHE_LINKS, "HF_HUB_OFFLINE": "1", **env}
    try:
        boot, text = boot_program(
            "docker",
            env,
            limits={"CORE": 0, "FSIZE": spec.disk, **process_limits(api, spec)},
            hidden_data=spec.hide_package_data,
            copies=[[CACHE, CACHE_LINKS]] if spec.hf_cache else [],
        )
        with starts(api):
            container = api.create_container(
                spec.image,
                [boot],
                name=name,
                entrypoint=["/bin/sh", "-c", FIND_PYTHON],
                user="0",
                stdin_open=True,
                hostname="sandbox",
                working_dir="/",
                labels={"flatlab.owner": owner()},
                host_config=host_config(api, spec),
                # An empty network namespace, without half a second of CPU time.
                network_disabled=not spec.network,
            )["Id"]
            # Attached before the start, so that nothing is missed.
            params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            stream = AttachedStream(api.attach_socket(container, params=params))
            api.start(container)
        stream.sendall(text)
    except (DockerException, OSError) as error:
        with suppress(DockerException, OSError):  # it may not be there, or no daemon is
            api.remove_container(name, force=True)
        raise SandboxFault(f"Docker did not start a container: {short_text(error)}") from error

    # The program inside sees the end of the connection; its end ends and removes the container.
    return Connection(stream, stream.close, stream.errors, container)


def short_text(error: Exception) -> str:
    """The text of an error as one line, cut if it is long."""
    return " ".join(str(error).split())[:300]


def owner() -> str:
    """The label of this process's containers."""
    return f"{socket.gethostname()}:{os.getpid()}"


@functools.cache
def starts(api) -> threading.Semaphore:
    return threading.Semaphore(STARTS)


def process_limits(api, spec: Spec) -> dict[str, int]:
    """Resource limits in place of those that the engine cannot set for a whole container."""
    missing = missing_limits(api)
    limits = {}
    if "memory" in missing:
        limits["AS"] = spec.memory
    if "pids" in missing:  # the kernel counts the processes of a user in all containers
        limits["NPROC"] = SHARED_PROCESSES * spec.processes
    return limits


def host_config(api, spec: Spec):
    from docker.types import DeviceRequest, LogConfig

    missing = missing_limits(api)
    options = {}
    if "memory" not in missing:
        options |= {"mem_limit": spec.memory, "memswap_limit": spec.memory}
    if "pids" not in missing:
        options["pids_limit"] = spec.processes
    if "cpu" not in missing:
        options["nano_cpus"] = int(min(spec.cpus, engine_info(api)["NCPU"]) * 1e9)
    if spec.hf_cache:
        options["binds"] = [f"{Path(spec.hf_cache).expanduser().resolve()}:{CACHE}:ro"]
    if spec.gpu:
        options["device_requests"] = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    return api.create_host_config(
        auto_remove=True,
        # The daemon would write everything that goes over the connection to its disk.
        log_config=LogConfig(type="none"),
        **options,
        shm_size=256 << 20,
        security_opt=["no-new-privileges"],
        network_mode="bridge" if spec.network else "none",
        cap_drop=["ALL"],
        cap_add=CAPABILITIES,
    )


def engine_options(host: str) -> dict:
    """Where the daemon is, as arguments of docker-py's clients; ssh:// becomes a tunnel.

    host: its address; "": that of $DOCKER_HOST, or the default.
    """
    import docker

    environment = os.environ | ({"DOCKER_HOST": host} if host else {})
    options = docker.utils.kwargs_from_env(environment)
    if options.get("base_url", "").startswith("ssh://"):
        options = {"base_url": open_tunnel(options["base_url"])}
    return options


@functools.cache
def docker_api(host: str):
    """The connection to a daemon, see engine_options.

    Removes what killed processes left: containers that were never started, images without a name.
    """
    import docker

    api = docker.APIClient(**engine_options(host), version="auto", timeout=5, max_pool_size=64)
    ours = {"label": "flatlab.owner", "until": LEFTOVER}
    with suppress(docker.errors.APIError):  # another process does the same right now
        api.prune_containers(ours)
    api.timeout = 120
    with suppress(docker.errors.APIError):
        api.prune_images(ours)
    return api


@contextmanager
def engine_faults():
    """Turns what docker-py and ssh raise in the block into a SandboxFault."""
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError) as error:
        raise SandboxFault(f"Docker cannot start a sandbox: {error}") from error


@functools.cache
def engine_info(api) -> dict:
    """What `docker info` shows of the machine that runs the containers."""
    return api.info()


@functools.cache
def missing_limits(api) -> set[str]:
    """Which of the limits "cpu", "memory" and "pids" the engine cannot set for a container.

    A rootless engine sets those that the system has delegated to its user.
    """
    info = engine_info(api)
    missing = {name for name, flag in LIMITS.items() if info.get(flag) is False}
    engine = api.version()["Components"][0]
    if engine["Name"] == "Podman Engine":  # only its own interface tells which ones it can set
        version = engine["Details"]["APIVersion"]
        reply = api.get(f"{api.base_url}/v{version}/libpod/info", timeout=api.timeout)
        host = reply.json().get("host", {})
        missing |= LIMITS.keys() - set(host.get("cgroupControllers", []))
    return missing


def docker_problem(image: str, host: str = "") -> str:
    """Why Docker cannot be used with this image, as one sentence; empty if it can."""
    import docker

    where = host or os.environ.get("DOCKER_HOST", "/var/run/docker.sock")
    try:
        docker_api(host).inspect_image(image)
    except docker.errors.ImageNotFound:
        if host:
            return f"Docker at {host} has no image {image}: `docker --host {host} pull {image}`."
        return f"Docker runs but has no image {image}; get it with `docker pull {image}`."
    except (docker.errors.DockerException, OSError) as error:
        if where.startswith("ssh://"):
            return f"No Docker daemon answers at {where} ({error})."
        if "PermissionError" in str(error) or "Permission denied" in str(error):
            return (
                f"This user has no permission on the Docker socket {where}; "
                "add it to the group docker and log in."
            )
        return f"No Docker daemon answers at {where}."
    return ""


def docker_note(host: str) -> str:
    """What the engine's sandboxes lack, for the line about the choice; empty if nothing."""
    missing = missing_limits(docker_api(host))
    if not missing:
        return ""
    return f", without limits on {', '.join(sorted(missing))} in total (see docs/sandboxes.md)"


DOCKER = Backend(
    start_docker,
    "docker: own files, processes and users, no network, memory and processes limited in total",
    is_container=True,
    writable=None,
)
