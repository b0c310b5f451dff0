"""Sandboxes for a task: with its requirements, and with its large public files already in place."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flatlab.cache import content_key
from flatlab.errors import SandboxFault, UserError
from flatlab.sandbox.docker import docker_api
from flatlab.sandbox.sandbox import Sandbox, get_backend
from flatlab.sandbox.warm_pool import WARM_POOL

BAKE_BYTES = 8 << 20  # public files beyond this total are baked into an image once
MOUNT_BYTES = 16 << 20  # larger public files are mounted into a local sandbox, not copied


@dataclass(frozen=True)
class Needs:
    """What a task brings into its sandboxes."""

    name: str
    files: dict[str, Path] = field(default_factory=dict)  # workspace path -> public file
    replaceable: frozenset[str] = frozenset()  # those that the agent may replace: never mounted
    requirements: Path | None = None  # requirements.txt beyond what the image holds


def task_sandbox(
    backend: str, needs: Needs, image: str, install: bool, env: dict[str, str], **options
) -> Sandbox:
    """A new sandbox for a task; Sandbox.premounted says which of its files are in place.

    install: whether missing requirements may be downloaded, once, into an image for the task.
    env: variables that differ between sandboxes. options: fields of Spec. Raises UserError if
    requirements are missing.
    """
    if not get_backend(backend).is_container:
        large = {
            path: file
            for path, file in needs.files.items()
            if file.stat().st_size > MOUNT_BYTES and path not in needs.replaceable
        }
        box = Sandbox(backend, env=env, premounted=large, **options)
        if needs.requirements and missing_requirements(box, needs.requirements):
            box.close()
            raise UserError(needs_packages(needs))
        return box

    def make(network: bool) -> Sandbox:
        plain = {name: options[name] for name in LIMITS if name in options}
        return Sandbox(backend, image=image, network=network, **plain)

    prepared = prepared_image(needs, image, install, make)
    premounted = needs.files if prepared != image else {}
    try:
        return WARM_POOL.take(backend, env, image=prepared, premounted=premounted, **options)
    except SandboxFault:
        found_images.clear()  # somebody may have removed the image: the next call looks again
        raise


LIMITS = ("memory", "disk", "cpus", "processes")
building = threading.Lock()
found_images: dict[tuple, str] = {}  # saves reading the files and asking the daemon again


def prepared_image(needs: Needs, image: str, install: bool, make: Callable[[bool], Sandbox]) -> str:
    """An image with the task's large files and requirements in it, made from `image` if needed.

    It is made once and found later; older ones of the task are removed. make(network) starts a
    sandbox of `image`. Raises UserError if packages are missing and `install` is False.
    """
    asked = (needs.name, image, str(needs.files), str(needs.requirements), install)
    if asked not in found_images:
        found_images[asked] = find_image(needs, image, install, make)
    return found_images[asked]


def find_image(needs: Needs, image: str, install: bool, make: Callable[[bool], Sandbox]) -> str:
    """See prepared_image."""
    is_large = sum(path.stat().st_size for path in needs.files.values()) > BAKE_BYTES
    files = needs.files if is_large else {}
    if not files and not needs.requirements:
        return image
    api = docker_api()
    sources = [*files.values()]
    if needs.requirements:
        sources.append(needs.requirements)
    key = content_key(api.inspect_image(image)["Id"], *files, *sources)
    name = re.sub(r"[^a-z0-9]+", "-", needs.name.lower()).strip("-") or "task"
    repository = f"flatlab/{name}"
    with building:
        if not api.images(f"{repository}:{key}"):
            build_image(api, needs, files, repository, key, install, make)
            remove_others(api, repository, key)
    return f"{repository}:{key}"


def build_image(api, needs: Needs, files: dict, repository: str, key: str, install, make) -> None:
    """Commits a container that got the files and the requirements."""
    box = make(False)
    try:
        if needs.requirements and missing_requirements(box, needs.requirements):
            box.close()
            if not install:
                raise UserError(needs_packages(needs))
            box = make(True)
            install_requirements(box, needs.requirements)
        box.put(files)
        api.commit(box.container, repository=repository, tag=key)
    finally:
        box.close()


def remove_others(api, repository: str, key: str) -> None:
    from docker.errors import APIError

    for old in api.images(repository):
        for tag in set(old["RepoTags"] or []) - {f"{repository}:{key}"}:
            with suppress(APIError):  # a running container still uses it
                api.remove_image(tag)


def requirement_names(path: Path) -> list[str]:
    """Names of the packages in a requirements.txt, without versions and options."""
    names = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
        if match:
            names.append(match[1])
    return names


PRINT_MISSING = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(name)
"""


def missing_requirements(box: Sandbox, requirements: Path) -> list[str]:
    """Required packages that the Python in a sandbox lacks."""
    argv = ["python3", "-c", PRINT_MISSING, *requirement_names(requirements)]
    return box.program(argv, 60)[0].decode().split()


def needs_packages(needs: Needs) -> str:
    return (
        f"Task {needs.name} needs the packages in {needs.requirements}; with --network they are "
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
