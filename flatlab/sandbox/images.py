"""Sandboxes for a task: with its requirements, and with its large public files already in place."""

from __future__ import annotations

import re
import threading
from contextlib import suppress

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


def task_sandbox(backend: str, task, image: str, env: dict[str, str], **options) -> Sandbox:
    """A new sandbox for a Task; Sandbox.premounted says which of its files are in place.

    env: variables that differ between sandboxes. options: fields of Spec. Raises UserError if the
    sandbox lacks packages that the task requires.
    """
    if get_backend(backend).is_container:
        prepared = prepared_image(task, image)
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
    try:
        check_requirements(box, task)
    except UserError:
        box.close()
        raise
    return box


def prepared_image(task, image: str) -> str:
    """An image with the task's large files in it, made from `image` if needed.

    It is made once and found later; older ones of the task are removed. Raises UserError if the
    image lacks packages that the task requires.
    """
    asked = (task.name, image, str(task.public), str(task.requirements))
    with building:
        prepared = found_images.get(asked) or find_image(task, image)
        found_images[asked] = prepared
    return prepared


def find_image(task, image: str) -> str:
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
        build_image(api, task, files, image, f"{repository}:{key}")
        remove_others(api, repository, key)
    return f"{repository}:{key}"


def build_image(api, task, files: dict, image: str, name: str) -> None:
    """Commits a container that has the packages and got the files."""
    box = Sandbox("docker", image=image, disk=MOST_DISK)
    try:
        check_requirements(box, task)
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


def check_requirements(box: Sandbox, task) -> None:
    """Raises UserError if the Python in a sandbox has no version of a required package."""
    if not task.requirements:
        return
    argv = ["python3", "-c", PRINT_MISSING]
    missing = box.program(argv, 60, task.requirements.read_bytes())[0].decode().split()
    if missing:
        raise UserError(
            f"Task {task.name} needs packages that its sandbox lacks: {', '.join(missing)}. "
            f"Install {task.requirements} in a Docker image and name it with --image."
        )
