"""Docker sandboxes: a container whose main process is the program of guest/."""

import functools
import os
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import replace

from flatlab.errors import SandboxFault
from flatlab.sandbox.backend import (
    WORKSPACE,
    Backend,
    Connection,
    Spec,
    boot_program,
    package_patterns,
)

starts = threading.Semaphore(8)  # starts at once; more only make a daemon slower
LEFTOVER = "5m"  # older containers that do not run are leftovers
CACHE = "/opt/flatlab/huggingface"  # where the Hugging Face cache is mounted
CACHE_LINKS = "/home/agent/.cache/huggingface"  # a writable folder with links into it
# No shared memory, semaphores and message queues that outlive their process
NO_SYSTEM_V = {"kernel.shmmni": "0", "kernel.sem": "0 0 0 0", "kernel.msgmni": "0"}
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]

# The shell program that a container starts with. It uses the first python3 of the image; MLGym's
# image has its packages in this environment.
FIND_PYTHON = """
p=/home/agent/miniconda3/envs/mlgym_generic/bin
[ -d $p ] && PATH=$p:$PATH && export PATH
python=$(command -v python3) || { echo "The image has no python3." >&2; exit 1; }
"""
HIDE = """
for folder in {patterns}; do
  rm -rf "$folder"/* || exit 1
done
"""
LINK_CACHE = f"""
mkdir -p {CACHE_LINKS}
cp -rs {CACHE}/. {CACHE_LINKS}
chown -hR agent: {CACHE_LINKS} || chown -hR 1000:1000 {CACHE_LINKS}
"""
START_PYTHON = 'exec python3 -I -S -c "$0"'


class AttachedStream:
    """The attached socket of a container: stdout as a plain stream, stderr kept aside.

    Docker puts 8 bytes before each piece of data: 1 (stdout) or 2 (stderr), three zeros, length.
    """

    def __init__(self, response):
        self.response = response  # holds a reference to the socket, or with TLS is the socket
        self.socket = getattr(response, "_sock", response)
        self.file = self.socket.makefile("rb")
        self.stderr = bytearray()
        self.settimeout = self.socket.settimeout
        self.sendall = self.socket.sendall
        self.shutdown = self.socket.shutdown

    def recv(self, most: int) -> bytes:
        """The next piece of stdout, of any length; b"" at the end."""
        while header := self.file.read(8):
            data = self.file.read(int.from_bytes(header[4:], "big"))
            if header[0] == 1:
                return data
            self.stderr += data
        return b""

    def close(self) -> None:
        self.file.close()
        self.socket.close()
        self.response.close()

    def errors(self) -> str:
        return self.stderr.decode("utf-8", "replace")


def shell_program(spec: Spec) -> str:
    program = FIND_PYTHON
    if spec.hide_package_data:
        prefixes = ("${python%/bin/*}", "/home/agent/miniconda3", "/opt/conda")
        patterns = package_patterns(spec.hide_package_data, prefixes)
        program += HIDE.format(patterns=" ".join(patterns))
    if spec.hf_cache:
        program += LINK_CACHE
    return program + START_PYTHON


def start_docker(spec: Spec) -> Connection:
    """Starts a container that removes itself when the program in it ends. Without the mounts of
    the spec if the daemon does not see the files, as a remote one. Raises SandboxFault.
    """
    from docker.errors import DockerException

    if not os.environ.get("DOCKER_HOST", "unix:").startswith("unix:"):
        spec = replace(spec, mounts={})  # another machine may have other files at these paths

    api = docker_api()
    name = f"flatlab-{secrets.token_hex(8)}"
    env = {"HF_HOME": CACHE_LINKS, "HF_HUB_OFFLINE": "1"} if spec.hf_cache else {}
    boot, text = boot_program("docker", spec, env, {})
    try:
        with starts:
            container = api.create_container(
                spec.image,
                [boot],
                name=name,
                entrypoint=["/bin/sh", "-c", shell_program(spec)],
                user="0",
                stdin_open=True,
                hostname="sandbox",
                working_dir="/",
                labels={"flatlab.owner": f"{socket.gethostname()}:{os.getpid()}"},
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
        if spec.mounts:
            return start_docker(replace(spec, mounts={}))
        raise SandboxFault(f"Docker did not start a container: {short_text(error)}") from error

    # The program inside sees the end of the connection; its end ends and removes the container.
    return Connection(stream, stream.close, stream.errors, spec.mounts, container)


def short_text(error: Exception) -> str:
    """The text of an error as one line, cut if it is long."""
    return " ".join(str(error).split())[:300]


def host_config(api, spec: Spec):
    from docker.types import DeviceRequest, LogConfig, Mount

    mounts = [(f"{WORKSPACE}/{path}", file) for path, file in spec.mounts.items()]
    if spec.hf_cache:
        mounts.append((CACHE, os.path.expanduser(spec.hf_cache)))
    gpus = DeviceRequest(count=-1, capabilities=[["gpu"]])
    return api.create_host_config(
        auto_remove=True,
        # The daemon would write everything that goes over the connection to its disk.
        log_config=LogConfig(type="none"),
        mounts=[
            Mount(place, os.path.realpath(source), type="bind", read_only=True)
            for place, source in mounts
        ],
        device_requests=[gpus] if spec.gpu else None,
        mem_limit=spec.memory,
        memswap_limit=spec.memory,
        pids_limit=spec.processes,
        cpu_quota=int(spec.cpus * 100_000),  # microseconds of each 100,000; nano_cpus has a maximum
        shm_size=spec.shared_memory,
        ipc_mode="private",
        sysctls=NO_SYSTEM_V,
        security_opt=["no-new-privileges"],
        network_mode="default" if spec.network else "none",
        cap_drop=["ALL"],
        cap_add=CAPABILITIES,
    )


@functools.cache
def docker_api():
    """The connection to the daemon at $DOCKER_HOST, or at the default place.

    Removes the containers that killed processes left and that were never started.
    """
    import docker

    api = docker.from_env(timeout=5, max_pool_size=64).api
    api.timeout = 120
    ours = {"label": "flatlab.owner", "until": LEFTOVER}
    with suppress(docker.errors.APIError):  # another process does the same right now
        api.prune_containers(ours)
    return api


def docker_problem(image: str) -> str:
    """Returns why Docker cannot be used with this image, as one sentence; empty if it can."""
    import docker

    where = os.environ.get("DOCKER_HOST") or "/var/run/docker.sock"
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
