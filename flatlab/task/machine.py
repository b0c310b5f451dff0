"""The machine of a task: its kind of sandbox, an open sandbox, and the software in it."""

import json
import os
import re
import shlex
import stat
import threading
from dataclasses import replace
from pathlib import Path

from flatlab.errors import SandboxFault, UserError
from flatlab.options import SandboxOptions
from flatlab.sandbox.client import KINDS, Sandbox, get_backend, pick_backend
from flatlab.task.definition import Task

MOUNT_BYTES = 16 << 20  # size above which a public file is mounted, not copied


def resolve_backend(task: Task, options: SandboxOptions) -> SandboxOptions:
    """The options with a concrete kind of sandbox in place of "auto".

    Raises UserError if such a sandbox lacks an image, a network, a cache or a GPU for the task.
    """
    kind = options.backend
    if kind not in KINDS:
        kind = pick_backend(kind, task.image or options.image)[0]
    is_container = get_backend(kind).is_container
    if (task.image or task.needs_gpu) and not is_container:
        raise UserError(
            f"Task {task.name} needs a GPU or a Docker image of its own: use --backend docker."
        )
    hf_cache = options.hf_cache
    if task.needs_network and not options.network and not (hf_cache and is_container):
        raise UserError(
            f"Task {task.name} takes data from the network while it runs: allow it with "
            "--network, or in Docker mount what it needs with --hf-cache."
        )
    if hf_cache and not os.path.isdir(os.path.expanduser(hf_cache)):
        raise UserError(f"There is no folder {hf_cache} to mount as the Hugging Face cache.")
    if task.needs_gpu and not (Path("/dev/nvidiactl").exists() or os.environ.get("DOCKER_HOST")):
        raise UserError(
            f"Task {task.name} needs a GPU, and this machine has none that works "
            "(no /dev/nvidiactl)."
        )
    return replace(options, backend=kind)


def open_sandbox(task: Task, options: SandboxOptions, seed: int = 0, **limits) -> Sandbox:
    """Opens a sandbox for an agent or for a grading, with a network only if the task needs one.
    options: as resolve_backend returns them.

    It holds none of the task's hidden files. Large public files may be in place already (see
    Sandbox.mounts). limits: memory, disk, cpus, processes. Raises SandboxFault, and UserError
    if the task's requirements are missing.
    """
    # A file that is mounted could not be removed, so an artefact is never mounted. It keeps its
    # permissions, too: one that the agent's user could not read is copied.
    mounts = {}
    for path, file in task.fixed.items():
        info = file.stat()
        if info.st_size > MOUNT_BYTES and info.st_mode & stat.S_IROTH:
            mounts[path] = file
    box = Sandbox(
        options.backend,
        image=task.image or options.image,
        mounts=mounts,
        env={"PYTHONHASHSEED": str(seed % 2**32)},
        network=options.network and task.needs_network,
        gpu=task.needs_gpu,
        hf_cache=options.hf_cache,
        hide=tuple({str(path.resolve().parent) for path in task.hidden.values()}),
        hide_package_data=task.hide_package_data,
        **limits,
    )
    if task.requirements:
        check_requirements(box, task)
    return box


LIST_SOFTWARE = """
import importlib.metadata, json, os, platform
names = {}
for one in importlib.metadata.distributions():
    if one.metadata and one.metadata["Name"]:
        names[one.metadata["Name"].lower()] = one.version
print(json.dumps([platform.python_version(), names, len(os.sched_getaffinity(0))]))
"""
looking = threading.Lock()
looked_up: dict[tuple, list] = {}  # (backend, image) -> software


def software_of(box: Sandbox) -> list:
    """[version of Python, {package in lower case: version}, cores of the machine] of a sandbox,
    looked up once per image. Raises SandboxFault.
    """
    key = (box.backend, box.spec.image)
    with looking:
        if key not in looked_up:
            result = box.run(["python3", "-I", "-c", LIST_SOFTWARE], 60)
            if result.exit_code:
                raise SandboxFault(f"python3 cannot list its packages: {result.output[-500:]}")
            looked_up[key] = json.loads(result.output)
    return looked_up[key]


# Only sandboxes use the image, so pip may change the Python of its system.
DOCKERFILE = """\
docker build --tag flatlab-packages --file - {folder} <<'END'
FROM {image}
USER root
COPY {file} /tmp/requirements.txt
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir -r /tmp/requirements.txt
END"""


def check_requirements(box: Sandbox, task: Task) -> None:
    """Closes the sandbox and raises UserError if it lacks a package that the task requires."""
    there = {plain_name(name) for name in software_of(box)[1]}
    text = task.requirements.read_text(encoding="utf-8")
    needed = re.findall(r"^[ \t]*([A-Za-z0-9][\w.-]*)", text, re.MULTILINE)
    missing = [name for name in needed if plain_name(name) not in there]
    if missing:
        box.close()
        folder = shlex.quote(str(task.requirements.parent))
        file = task.requirements.name
        command = DOCKERFILE.format(folder=folder, file=file, image=box.spec.image)
        raise UserError(
            f"Task {task.name} needs packages that its sandbox lacks: {', '.join(missing)}. This "
            f"makes an image for --backend docker --image flatlab-packages:\n{command}"
        )


def plain_name(package: str) -> str:
    """A name of a package as pip compares it."""
    return re.sub("[-_.]+", "-", package).lower()
