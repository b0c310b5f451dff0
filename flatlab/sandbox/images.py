"""Sandboxes for a task: with its requirements, and with its large public files already in place."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from pathlib import Path

from flatlab.cache import content_key
from flatlab.errors import SandboxFault, UserError
from flatlab.sandbox.docker import docker_api
from flatlab.sandbox.sandbox import Sandbox, get_backend
from flatlab.sandbox.warm_pool import WARM_POOL

BAKE_BYTES = 8 << 20  # public files beyond this total are baked into an image once
MOST_DISK = 1 << 40  # bytes of a file while an image is built
MOUNT_BYTES = 16 << 20  # larger public files are mounted into a local sandbox, not copied


building = threading.Lock()
found_images: dict[tuple, str] = {}  # saves reading the files and asking the daemon again


def task_sandbox(
    backend: str, task, image: str, install: bool, env: dict[str, str], **options
) -> Sandbox:
    """A new sandbox for a Task; Sandbox.premounted says which of its files are in place.

    install: whether missing requirements may be downloaded, once, into an image for the task.
    env: variables that differ between sandboxes. options: fields of Spec. Raises UserError if
    requirements are missing.
    """
    if get_backend(backend).is_container:
        prepared = prepared_image(task, image, install)
        premounted = task.public if prepared != image else {}
        try:
            return WARM_POOL.take(backend, env, image=prepared, premounted=premounted, **options)
        except SandboxFault:
            found_images.clear()  # somebody may have removed the image: the next call looks again
            raise
    large = {}
    for path, file in task.public.items():
        # A file that is mounted could not be removed, so an artefact is never mounted.
        if file.stat().st_size > MOUNT_BYTES and not task.is_artefact(path):
            large[path] = file
    box = Sandbox(backend, env=env, premounted=large, **options)
    if task.requirements and missing_requirements(box, task.requirements):
        box.close()
        raise UserError(needs_packages(task))
    return box


def prepared_image(task, image: str, install: bool) -> str:
    """An image with the task's large files and requirements in it, made from `image` if needed.

    It is made once and found later; older ones of the task are removed. Raises UserError if
    packages are missing and `install` is False.
    """
    asked = (task.name, image, str(task.public), str(task.requirements), install)
    with building:
        prepared = found_images.get(asked) or find_image(task, image, install)
        found_images[asked] = prepared
    return prepared


def find_image(task, image: str, install: bool) -> str:
    """See prepared_image."""
    is_large = sum(path.stat().st_size for path in task.public.values()) > BAKE_BYTES
    files = task.public if is_large else {}
    sources = [*files.values()]
    if task.requirements:
        sources.append(task.requirements)
    if not sources:
        return image
    api = docker_api()
    key = content_key(api.inspect_image(image)["Id"], *files, *sources)
    name = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-") or "task"
    repository = f"flatlab/{name}"
    if not api.images(f"{repository}:{key}"):
        build_image(api, task, files, image, f"{repository}:{key}", install)
        remove_others(api, repository, key)
    return f"{repository}:{key}"


def build_image(api, task, files: dict, image: str, name: str, install: bool) -> None:
    """Commits a container that got the files and the requirements."""
    box = Sandbox("docker", image=image, network=install, disk=MOST_DISK)
    try:
        if task.requirements and missing_requirements(box, task.requirements):
            if not install:
                raise UserError(needs_packages(task))
            install_requirements(box, task.requirements)
        box.put(files)
        api.commit(box.container, *name.split(":"))
    finally:
        box.close()


def remove_others(api, repository: str, key: str) -> None:
    from docker.errors import APIError

    for old in api.images(repository):
        for tag in set(old["RepoTags"] or []) - {f"{repository}:{key}"}:
            with suppress(APIError):  # a running container still uses it
                api.remove_image(tag)


PRINT_MISSING = r"""
import importlib.metadata, re, sys
for line in sys.stdin:
    name = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
    try:
        name and importlib.metadata.version(name[1])
    except importlib.metadata.PackageNotFoundError:
        print(name[1])
"""


def missing_requirements(box: Sandbox, requirements: Path) -> list[str]:
    """Packages in a requirements.txt that the Python in a sandbox lacks in any version."""
    argv = ["python3", "-c", PRINT_MISSING]
    return box.program(argv, 60, stdin=requirements.read_bytes())[0].decode().split()


def needs_packages(task) -> str:
    return (
        f"Task {task.name} needs the packages in {task.requirements}; with --network they are "
        "installed once, into a Docker image for the task."
    )


def install_requirements(box: Sandbox, requirements: Path) -> None:
    """Installs for all users of the sandbox. Raises UserError with pip's last line."""
    options = ["--no-cache-dir", "--break-system-packages", "-r", "/dev/stdin"]
    argv = ["python3", "-m", "pip", "install", *options]
    result = box.run(argv, 3600, user="root", stdin=requirements.read_bytes())
    if result.exit_code:
        last = (result.output.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"The packages in {requirements} cannot be installed in the image ({last})."
        )
