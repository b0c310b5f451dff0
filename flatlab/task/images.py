"""Docker images for a task, with its public files already in place; and its requirements."""

import re
import shlex
import threading
from contextlib import closing, suppress

from flatlab.errors import SandboxFault, UserError
from flatlab.files import content_key
from flatlab.sandbox.client import Sandbox
from flatlab.sandbox.docker import docker_api
from flatlab.task.definition import Task

BAKE_BYTES = 8 << 20  # public files beyond this total are baked into an image once
MOST_BYTES = 1 << 40  # limit of a file while an image is made

building = threading.Lock()
found_images: dict[tuple, str] = {}  # saves reading the files and asking the daemon again


def prepared_image(task: Task, image: str) -> str:
    """An image with the task's fixed files in it, or `image` itself if they are small.

    It is made once and found later; older ones of the task are removed. Raises UserError if the
    image lacks packages that the task requires, and SandboxFault if Docker cannot make it.
    """
    from docker.errors import DockerException

    asked = (task.name, image, str(task.fixed), str(task.requirements))
    with building:
        if asked not in found_images:
            try:
                found_images[asked] = find_image(task, image)
            except (DockerException, OSError) as error:
                raise SandboxFault(f"Docker cannot start a sandbox: {error}") from error
        return found_images[asked]


def find_image(task: Task, image: str) -> str:
    """See prepared_image."""
    sources = [*task.fixed.values()]
    if not task.requirements and sum(path.stat().st_size for path in sources) <= BAKE_BYTES:
        return image
    api = docker_api()
    if task.requirements:
        sources.append(task.requirements)
    key = content_key(api.inspect_image(image)["Id"], *task.fixed, *sources)
    name = f"{repository_name(task.name)}:{key}"
    if not api.images(name):
        with closing(Sandbox("docker", image=image, disk=MOST_BYTES)) as box:
            if task.requirements:
                check_requirements(box, task)
            box.put(task.fixed)
            commit(box, name)
        remove_others(name)
    return name


def repository_name(task: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
    return f"flatlab/{name}"


def commit(box: Sandbox, name: str) -> None:
    """Makes an image of a sandbox in which nothing runs."""
    docker_api().commit(box.container, *name.split(":"), pause=False)


def remove_others(name: str) -> None:
    """Removes the other images of a repository, but for those that a container uses."""
    from docker.errors import APIError

    repository, key = name.split(":")
    for old in docker_api().images(repository):
        for tag in old["RepoTags"] or []:
            if not tag.endswith(f":{key}"):  # podman puts a registry before the repository
                with suppress(APIError):
                    docker_api().remove_image(tag)


# Only sandboxes use the image, so pip may change the Python of its system.
DOCKERFILE = """\
docker build --tag flatlab-packages --file - {folder} <<'END'
FROM {image}
USER root
COPY {file} /tmp/requirements.txt
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir -r /tmp/requirements.txt
END"""
PRINT_MISSING = r"""
import importlib.metadata, re, sys
for line in sys.stdin:
    name = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
    try:
        name and importlib.metadata.version(name[1])
    except importlib.metadata.PackageNotFoundError:
        print(name[1])
"""


def check_requirements(box: Sandbox, task: Task) -> None:
    """Raises UserError if the Python in a sandbox lacks a package that the task requires."""
    needed = task.requirements
    argv = ["python3", "-c", PRINT_MISSING]
    missing = box.program(argv, 60, needed.read_bytes())[1].decode().split()
    if missing:
        folder = shlex.quote(str(needed.parent))
        command = DOCKERFILE.format(folder=folder, file=needed.name, image=box.spec.image)
        raise UserError(
            f"Task {task.name} needs packages that its sandbox lacks: {', '.join(missing)}. This "
            f"makes an image for --backend docker --image flatlab-packages:\n{command}"
        )
