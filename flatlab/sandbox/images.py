"""Docker images for a task: with its requirements, with its public files already in place, or its
own one.
"""

from __future__ import annotations

import io
import re
import shlex
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import content_key
from flatlab.sandbox.backend import WORKSPACE
from flatlab.sandbox.client import Sandbox
from flatlab.sandbox.docker import SET_PATH, docker_api, docker_problem, engine_faults, short_text

BAKE_BYTES = 8 << 20  # public files beyond this total are baked into an image once
MOST_DISK = 1 << 40  # bytes of a file while an image is built
BUILD_SECONDS = 600
PACKAGES = "flatlab-requirements"  # repository of the images that install_requirements makes

building = threading.Lock()
found_images: dict[tuple, str] = {}  # saves reading the files and asking the daemon again


@engine_faults()
def prepared_image(task, image: str) -> str:
    """An image with the task's public files in it, or `image` itself if they are small.

    It is made once and found later; older ones of the task are removed. Raises UserError if the
    image lacks packages that the task requires, and SandboxFault if Docker cannot make it.
    """
    asked = (task.name, image, str(task.public), str(task.requirements))
    with building:
        if asked not in found_images:
            found_images[asked] = find_image(task, image)
        return found_images[asked]


def find_image(task, image: str) -> str:
    """See prepared_image."""
    sources = [*task.public.values()]
    if not task.requirements and sum(path.stat().st_size for path in sources) <= BAKE_BYTES:
        return image
    api = docker_api()
    base = image
    if task.requirements:
        sources.append(task.requirements)
        tag = package_tag(task, image)
        base = tag if api.images(tag) else image
    key = content_key(api.inspect_image(base)["Id"], *task.public, *sources)
    repository = repository_name(task.name)
    if not api.images(f"{repository}:{key}"):
        build_image(task, base, f"{repository}:{key}")
        remove_others(api, repository, key)
    return f"{repository}:{key}"


def repository_name(task: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
    return f"flatlab/{name}"


def build_image(task, base: str, name: str) -> None:
    """Commits a container that has the packages and got the files."""
    box = Sandbox("docker", image=base, disk=MOST_DISK)
    try:
        if task.requirements and not base.startswith(PACKAGES):
            check_requirements(box, task)
        box.put(task.public)
        docker_api().commit(box.container, *name.split(":"), pause=False)  # nothing runs in it
    finally:
        box.close()


def remove_others(api, repository: str, key: str) -> None:
    from docker.errors import APIError

    for old in api.images(repository):
        for tag in old["RepoTags"] or []:
            if tag.endswith(f":{key}"):  # podman puts a registry before the repository
                continue
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
    """Raises UserError if the Python in a sandbox lacks a package that the task requires."""
    argv = ["python3", "-c", PRINT_MISSING]
    missing = box.program(argv, 60, task.requirements.read_bytes())[1].decode().split()
    if missing:
        raise UserError(
            f"Task {task.name} needs packages that its sandbox lacks: {', '.join(missing)}. "
            f"`python tasks.py {task.name} --build-image`, with the same options, makes a Docker "
            "image that has them."
        )


# Only sandboxes use the image, so pip may change the Python of its system.
INSTALL = """
FROM {base}
LABEL flatlab.owner=requirements
USER root
COPY requirements.txt /opt/flatlab/requirements.txt
RUN {set_path} export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore; \\
    python3 -m pip install --no-cache-dir -r /opt/flatlab/requirements.txt
"""


def package_tag(task, image: str) -> str:
    """Name of `image` with the task's requirements installed, whether it exists or not."""
    key = content_key(docker_api().inspect_image(image)["Id"], task.requirements)
    return f"{PACKAGES}:{key}"


def install_requirements(task, image: str) -> str:
    """Makes an image from `image` with the task's requirements, and prints what pip prints.

    It is tagged by its content, and prepared_image finds it. Returns its name. Raises UserError if
    Docker cannot build it or pip fails.
    """
    from docker.errors import DockerException

    if problem := docker_problem(image):
        raise UserError(problem)
    api = docker_api()
    tag = package_tag(task, image)
    base = api.inspect_image(image)["Id"]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(task.requirements, Path(folder, "requirements.txt"))
        text = INSTALL.format(base=base, set_path=SET_PATH)
        Path(folder, "Dockerfile").write_text(text)
        try:
            failure = print_build(api.build(folder, tag, forcerm=True, decode=True))
        except (DockerException, OSError) as error:
            failure = short_text(error)
    if failure:
        raise UserError(f"{task.requirements} cannot be installed in {image}: {failure}")
    return tag


def print_build(events) -> str:
    """Prints the events of a build as they come. Returns why it failed, or ""."""
    errors = []
    for event in events:
        text = re.sub(r"\x1b\[[0-9;]*m", "", event.get("stream", ""))
        print(text, end="", flush=True)
        errors += re.findall(r"^ERROR.*|^error.*|.*No module named.*", text, re.MULTILINE)
        if "error" in event:
            return errors[-1] if errors else event["error"]
    return ""


# The working directory of a foreign image becomes the workspace, and its path a link to that.
PREPARE = """
FROM {base}
USER root
RUN for name in python3 bash tar; do command -v $name || exit 1; done
RUN mkdir -p {place} $(dirname {workspace}) && \\
    if ! [ {place} -ef {workspace} ]; then \\
    mv -T {place} {workspace} && ln -s {workspace} {place}; fi
RUN chown -R agent: {workspace} || chown -R 1000:1000 {workspace}
"""


def foreign_image(
    context: Path, task: str, base: str | None = None, workdir: str | None = None
) -> tuple[str, str]:
    """Prepares an image for sandboxes in which commands start in the image's working directory.

    Args:
        context: Folder with a Dockerfile, which is built unless there is a `base`.
        task: Name of the task, for the name of the image.
        base: An image that Docker has.
        workdir: The working directory, if not the image's own.

    Returns the names of the image and of the working directory in it. Raises UserError if Docker
    cannot build it, or if it has no working directory, python3, bash or tar.
    """
    import docker

    if base and (problem := docker_problem(base)):
        raise UserError(problem)
    repository = repository_name(task)
    try:
        client = docker.from_env(timeout=BUILD_SECONDS)
        if base:
            image = client.images.get(base)
        else:
            image = client.images.build(path=str(context), forcerm=True)[0]
        workdir = workdir or image.attrs["Config"]["WorkingDir"]
        if workdir in ("", "/"):
            raise UserError(f"The image of task {task} has no working directory (WORKDIR).")
        text = PREPARE.format(base=image.id, place=shlex.quote(workdir), workspace=WORKSPACE)
        file = io.BytesIO(text.encode())
        image = client.images.build(fileobj=file, forcerm=True, network_mode="none")[0]
        key = image.id.removeprefix("sha256:")[:16]
        image.tag(repository, key)
        remove_others(client.api, repository, key)
    except (docker.errors.DockerException, TypeError) as error:  # TypeError: no Dockerfile
        raise UserError(
            f"Docker cannot build the image of task {task}, which must have python3, bash and tar: "
            f"{short_text(error)}"
        ) from error
    return f"{repository}:{key}", workdir
