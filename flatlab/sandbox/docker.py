"""Docker: starting a container whose main process is the runner, and images prepared for a task."""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from flatlab.cache import content_key
from flatlab.episode.task import Task
from flatlab.errors import SandboxFault, UserError
from flatlab.sandbox.boot import CONDA_PACKAGES, PACKAGES, boot_texts, runner_config

IMAGE = "aigym/mlgym-agent:latest"
PREPARE_BYTES = 8 << 20  # public files of a task beyond this are baked into an image once
STARTS = threading.Semaphore(8)  # at once: a daemon that is asked for more gets slow, not quick
GONE_BY = 30  # seconds after its end by which a container has removed itself, else we do
CACHE = (
    "/opt/flatlab/huggingface"  # where a Hugging Face cache of this machine is mounted, read-only
)

# The first python3 of the image; MLGym's image has its packages in this environment.
FIND_PYTHON = (
    "p=/home/agent/miniconda3/envs/mlgym_generic/bin; [ -d $p ] && PATH=$p:$PATH; export PATH; "
    'exec python3 -I -S -c "$0"'
)
ended: deque[tuple[float, str]] = (
    deque()
)  # when a container was closed or failed to start, and its name


def start_docker(
    image: str,
    memory: int,
    disk: int,
    cpus: float,
    processes: int,
    env: dict,
    network: bool,
    gpu: bool,
    hf_cache: str,
    forget: tuple[str, ...],
    **_,
):
    """A container that removes itself when the runner in it ends: (id, connection, function that ends it)."""
    from docker.errors import APIError, DockerException
    from docker.types import DeviceRequest, LogConfig

    api, name = docker_api(), f"flatlab-{secrets.token_hex(8)}"
    remove_ended(api)
    if hf_cache:
        env = {"HF_HOME": "/home/agent/.cache/huggingface", "HF_HUB_OFFLINE": "1", **env}
    try:
        host = api.create_host_config(
            # No log: the daemon would write all that goes over the connection to its disk.
            auto_remove=True,
            log_config=LogConfig(type="none"),
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=processes,
            nano_cpus=int(min(cpus, os.cpu_count()) * 1e9),
            shm_size=256 << 20,
            security_opt=["no-new-privileges"],
            network_mode="bridge" if network else "none",
            binds=[f"{Path(hf_cache).expanduser().resolve()}:{CACHE}:ro"] if hf_cache else None,
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpu else None,
            cap_drop=["ALL"],
            cap_add=["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"],
        )
        boot, text = boot_texts(
            runner_config(
                "docker",
                env,
                limits={"CORE": 0, "FSIZE": disk},
                forget=forget,
                packages=PACKAGES + CONDA_PACKAGES,
                copies=[[CACHE, "/home/agent/.cache/huggingface"]] if hf_cache else [],
            )
        )
        with STARTS:
            box = api.create_container(
                image,
                [boot],
                name=name,
                entrypoint=["/bin/sh", "-c", FIND_PYTHON],
                user="0",
                stdin_open=True,
                hostname="sandbox",
                working_dir="/",
                labels={"flatlab.owner": owner_label()},
                host_config=host,
                network_disabled=not network,
            )["Id"]  # an empty network namespace, without half a second of CPU time
            # Before the start, so that nothing is missed.
            wire = api.attach_socket(
                box, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            )
            api.start(box)
        wire._sock.sendall(text)
    except (APIError, DockerException, OSError) as error:
        ended.appendleft((0.0, name))  # made but not started, it would stay
        raise SandboxFault(
            f"Docker did not start a container: {' '.join(str(error).split())[:300]}"
        ) from error

    def stop():
        wire.close()  # the runner sees that, and its end is that of the container
        ended.append((time.monotonic(), name))

    return box, wire._sock, stop


def remove_ended(api) -> None:
    """Removes containers that should have removed themselves long ago, and those that failed to start."""
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


@functools.cache
def docker_api():
    """The connection to the daemon, after removing containers of owners on this machine that are dead."""
    import docker

    api = docker.APIClient(
        **docker.utils.kwargs_from_env(), version="auto", timeout=5, max_pool_size=64
    )
    for box in api.containers(all=True, filters={"label": "flatlab.owner"}):
        owner = box["Labels"]["flatlab.owner"]
        host, pid, _ = owner.rsplit(":", 2)
        alive = False
        with suppress(OSError):
            alive = owner_label(int(pid)) == owner
        if host == socket.gethostname() and not alive:
            with suppress(docker.errors.APIError):  # it is removing itself right now
                api.remove_container(box["Id"], force=True)
    api.timeout = 120
    return api


def docker_problem(image: str) -> str:
    """Why Docker cannot be used with this image, as one sentence; empty when it can."""
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
            return f"This user has no permission on the Docker socket {where}; add it to the group docker and log in."
        return f"No Docker daemon answers at {where}."
    return ""


# ---------------------------------------------------------------------------------------------- prepared images

preparing = threading.Lock()
prepared: dict[
    tuple, str
] = {}  # what was asked for -> image: found without reading files and asking the daemon


def prepared_image(task: Task, image: str, network: bool, make_sandbox) -> str:
    """An image with the task's public files and requirements in it: made once, found later; older ones are removed.

    For a task with little of both it is `image` itself. Raises UserError when requirements cannot be installed. Files
    that change while this process runs are not seen.
    """
    asked = task.name, image, tuple(sorted(task.public.items())), task.requirements
    if asked not in prepared:
        prepared[asked] = find_image(task, image, network, make_sandbox)
    return prepared[asked]


def find_image(task: Task, image: str, network: bool, make_sandbox) -> str:
    """See prepared_image."""
    files = (
        task.public
        if sum(path.stat().st_size for path in task.public.values()) > PREPARE_BYTES
        else {}
    )
    if not files and not task.requirements:
        return image
    from docker.errors import APIError

    api = docker_api()
    sources = [*files.values(), *([task.requirements] if task.requirements else [])]
    key = content_key(api.inspect_image(image)["Id"], *files, *sources)
    name = "flatlab/" + (re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-") or "task")
    with preparing:
        if not api.images(f"{name}:{key}"):
            build_image(api, task, files, name, key, network, make_sandbox)
            for old in api.images(name):
                for tag in set(old["RepoTags"] or []) - {f"{name}:{key}"}:
                    with suppress(APIError):  # a running container still uses it
                        api.remove_image(tag)
    return f"{name}:{key}"


def build_image(
    api, task: Task, files: dict, name: str, key: str, network: bool, make_sandbox
) -> None:
    """Commits a container that got the files and the requirements."""
    box = make_sandbox(network=False)
    try:
        if task.requirements and missing_requirements(box, task):
            box.close()
            if not network:
                raise UserError(needs_packages(task))
            box = make_sandbox(network=True)
            install(box, task)
        box.put(files)
        api.commit(box.container, repository=name, tag=key)
    finally:
        box.close()


def requirement_names(path: Path) -> list[str]:
    """Names of the packages in a requirements.txt, without versions and options."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [match[0] for line in lines if (match := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line))]


PRESENT = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(name)
"""


def missing_requirements(box, task: Task) -> list[str]:
    """Those of the task's requirements that the Python in a sandbox lacks."""
    argv = ["python3", "-c", PRESENT, *requirement_names(task.requirements)]
    return box.program(argv, 60)[0].decode().split()


def needs_packages(task: Task) -> str:
    return (
        f"Task {task.name} needs the packages in {task.requirements}; with --network they are installed once, into "
        "a Docker image for the task."
    )


def install(box, task: Task) -> None:
    """pip install of the requirements, for all users of the sandbox. Raises UserError with pip's last line."""
    text = task.requirements.read_bytes()
    argv = [
        "python3",
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
        "--break-system-packages",
        "-r",
        "/dev/stdin",
    ]
    result = box.run(argv, 3600, user="root", stdin=text)
    if result.exit_code:
        last = (result.output.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"The packages in {task.requirements} cannot be installed in the image ({last})."
        )
