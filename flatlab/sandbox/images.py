"""Docker images for a task: with its requirements, or with its public files already in place."""

from __future__ import annotations

import re
import threading
from contextlib import closing, suppress

from flatlab.errors import SandboxFault, UserError
from flatlab.files import content_key
from flatlab.sandbox.client import Sandbox
from flatlab.sandbox.docker import docker_api, docker_problem, short_text

BAKE_BYTES = 8 << 20  # public files beyond this total are baked into an image once
MOST_BYTES = 1 << 40  # limit of memory, and of a file, while an image is made
PIP_SECONDS = 7200
PACKAGES = "flatlab-requirements"  # repository of the images that install_requirements makes

building = threading.Lock()
found_images: dict[tuple, str] = {}  # saves reading the files and asking the daemon again


def prepared_image(task, image: str) -> str:
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


def find_image(task, image: str) -> str:
    """See prepared_image."""
    sources = [*task.fixed.values()]
    if not task.requirements and sum(path.stat().st_size for path in sources) <= BAKE_BYTES:
        return image
    api = docker_api()
    base = image
    if task.requirements:
        sources.append(task.requirements)
        tag = package_tag(task, image)
        base = tag if api.images(tag) else image
    key = content_key(api.inspect_image(base)["Id"], *task.fixed, *sources)
    name = f"{repository_name(task.name)}:{key}"
    if not api.images(name):
        with closing(Sandbox("docker", image=base, disk=MOST_BYTES)) as box:
            if task.requirements and base == image:
                check_requirements(box, task)
            box.put(task.fixed)
            commit(box, name)
        remove_others(name)
    return name


def package_tag(task, image: str) -> str:
    """Name of `image` with the task's requirements installed, whether it exists or not."""
    key = content_key(docker_api().inspect_image(image)["Id"], task.requirements)
    return f"{PACKAGES}:{key}"


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


PRINT_MISSING = r"""
import importlib.metadata, re, sys
for line in sys.stdin:
    name = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
    try:
        name and importlib.metadata.version(name[1])
    except importlib.metadata.PackageNotFoundError:
        print(name[1])
"""


def check_requirements(box: Sandbox, task) -> None:
    """Raises UserError if the Python in a sandbox lacks a package that the task requires."""
    argv = ["python3", "-c", PRINT_MISSING]
    missing = box.program(argv, 60, task.requirements.read_bytes())[1].decode().split()
    if missing:
        raise UserError(
            f"Task {task.name} needs packages that its sandbox lacks: {', '.join(missing)}. "
            f"`python tasks.py {task.name} --build-image`, with the same options, makes a Docker "
            "image that has them."
        )


def install_requirements(task, image: str) -> str:
    """Makes an image from `image` with the task's requirements, and prints what pip prints.

    It is tagged by its content, and prepared_image finds it. Returns its name. Raises UserError if
    Docker cannot make it or pip fails.
    """
    if problem := docker_problem(image):
        raise UserError(problem)
    tag = package_tag(task, image)
    # Only sandboxes use the image, so pip may change the Python of its system.
    env = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    limits = {"memory": MOST_BYTES, "disk": MOST_BYTES, "cpus": 0, "processes": 4096}
    argv = ["python3", "-m", "pip", "install", "--no-cache-dir", "-r", "/dev/stdin"]
    print(f"Installing {task.requirements} in {image}; this may take minutes.", flush=True)
    with closing(Sandbox("docker", image=image, env=env, network=True, **limits)) as box:
        reply, output = box.program(argv, PIP_SECONDS, task.requirements.read_bytes())
        print(output.decode(errors="replace"), reply["stderr"])
        if reply["code"]:
            reason = short_text(reply["stderr"][-300:])
            raise UserError(f"{task.requirements} cannot be installed in {image}: {reason}")
        commit(box, tag)
    return tag
