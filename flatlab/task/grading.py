"""Sandboxes for a task, and grading in a fresh one that holds the pristine files.

A grader gives a score or a reason why there is none, and exits with 0. If it does neither, the
artefact is no submission, and Score.grader_output is what the grader said, for the user. Before a
run, sanity.check_grader finds out whether the grader works at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from flatlab.errors import ArtefactError, SandboxFault, UserError
from flatlab.numbers import number
from flatlab.options import SandboxOptions
from flatlab.sandbox import snapshot
from flatlab.sandbox.client import (
    ARTEFACT_BYTES,
    COPY_BYTES,
    KINDS,
    Sandbox,
    get_backend,
    pick_backend,
    plain_text,
)
from flatlab.sandbox.images import check_requirements, found_images, prepared_image
from flatlab.task.definition import (
    WHOLE_WORKSPACE,
    Task,
    last_json_object,
    parse_grade,
    refusal,
)
from flatlab.task.value import improvement

MOUNT_BYTES = 16 << 20  # larger public files are mounted into a local sandbox, not copied
MODEL_BYTES = 2 << 30  # limit of the artefacts of a task that needs a GPU: weights of a model
MOST_FILES = 20_000  # in a workspace whose folders are artefacts
WALL_FACTOR = 10  # a grading is stopped after this many timeouts, whatever it does
IDLE_SECONDS = 10  # or a sixth of its limit: a grading that uses no CPU for so long is stopped
PRINTED_BYTES = 1 << 20  # of a grader's stdout: its tail
OUTPUT_CHARS = 4000  # of stdout and of stderr in Score.grader_output
CANNOT_START = 127  # exit code of a program that is missing
KILLED = 137  # exit code of a process that got SIGKILL, from the kernel if memory is short

# ------------------------------------------------------------------ sandboxes


def resolve_backend(task: Task, options: SandboxOptions) -> SandboxOptions:
    """The options as they hold for this task: a concrete kind of sandbox in place of "auto", and a
    network only if the task needs one.

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
    return replace(options, backend=kind, network=options.network and task.needs_network)


def open_sandbox(task: Task, options: SandboxOptions, seed: int = 0, **limits) -> Sandbox:
    """Opens a sandbox for an agent or for a grading. options: as resolve_backend returns them.

    It holds none of the task's hidden files. Public files may be in place already (see
    Sandbox.premounted). limits: memory, disk, cpus, processes. Raises SandboxFault, and UserError
    if the task's requirements are missing.
    """
    is_container = get_backend(options.backend).is_container
    image = task.image or options.image
    mounted = {}
    if is_container:
        prepared = prepared_image(task, image)
        if prepared != image:
            mounted = task.public
            image = prepared
    else:
        for path, file in task.public.items():
            # A file that is mounted could not be removed, so an artefact is never mounted.
            if file.stat().st_size > MOUNT_BYTES and not task.is_artefact(path):
                mounted[path] = file
    try:
        box = Sandbox(
            options.backend,
            image=image,
            premounted=mounted,
            env={"PYTHONHASHSEED": str(seed % 2**32)},
            network=options.network,
            gpu=task.needs_gpu,
            hf_cache=options.hf_cache,
            hide=tuple({str(path.resolve().parent) for path in task.hidden.values()}),
            hide_package_data=task.hide_package_data,
            **limits,
        )
    except SandboxFault:
        found_images.clear()  # somebody may have removed the image: the next call looks again
        raise
    if task.requirements and not is_container:
        check_requirements(box, task)
    return box


@dataclass(frozen=True)
class Software:
    """Software that every sandbox of an image has."""

    python: str  # version
    packages: dict[str, str]  # name in lower case -> version
    cores: int  # of the machine


LOOK = """
import importlib.metadata, json, os, platform
names = {}
for one in importlib.metadata.distributions():
    if one.metadata and one.metadata["Name"]:
        names[one.metadata["Name"].lower()] = one.version
print(json.dumps([platform.python_version(), names, len(os.sched_getaffinity(0))]))
"""
looking = threading.Lock()
looked_up: dict[tuple, Software] = {}  # by backend and image


def software_of(box: Sandbox) -> Software:
    """Python's packages in a sandbox, looked up once per image. Raises SandboxFault."""
    key = (box.backend, box.image)
    with looking:
        if key not in looked_up:
            result = box.run(["python3", "-I", "-c", LOOK], 60)
            if result.exit_code:
                raise SandboxFault(f"python3 cannot list its packages: {result.output[-500:]}")
            looked_up[key] = Software(*json.loads(result.output))
    return looked_up[key]


# ------------------------------------------------------------------ grading


@dataclass(frozen=True)
class Score:
    value: float | None
    metric: str
    split: str
    valid: bool
    message: str  # why it is not valid; safe to show the agent
    position: float | None = None  # share of the leaderboards that is not better, if there are any
    stderr: float | None = None  # standard error of the value; None: unknown
    # How a grader ended and what it printed if it gave neither a score nor a reason. Answers may be
    # in it, so no agent reads it.
    grader_output: str = ""
    # The artefact of an exact score that is better than the reference, so that a transcript or a
    # journal keeps it.
    record: str = ""


def collect(task: Task, sandbox) -> dict[str, bytes]:
    """Collects what the agent wrote: path -> content. Raises ArtefactError if it is no submission.

    A plain name must exist, a folder must not be empty, a pattern may match nothing. Public files
    that are unchanged count as part of a submission, but not alone. For WHOLE_WORKSPACE, see
    snapshot.take_workspace.
    """
    if task.artefacts == WHOLE_WORKSPACE:
        return snapshot.take_workspace(sandbox)
    paths = [name for name in task.artefacts if name[-1:] != "/" and not set(name) & set("*?[")]
    if len(paths) < len(task.artefacts):
        reply = sandbox.call("listing", most=MOST_FILES)[0]
        if reply["count"] > MOST_FILES:
            raise ArtefactError(f"the workspace holds more than {MOST_FILES} files")
        listed = [path for path, _ in reply["files"] if task.is_artefact(path)]
        paths = list(dict.fromkeys(paths + listed))
    for folder in task.artefacts:
        if folder.endswith("/") and not any(path.startswith(folder) for path in paths):
            raise ArtefactError(f"{folder} is not there or empty")
    limit, left = (MODEL_BYTES, MODEL_BYTES) if task.needs_gpu else (ARTEFACT_BYTES, COPY_BYTES)
    files = {}
    for path in paths:
        files[path] = sandbox.get(path, min(left, limit))
        left -= len(files[path])
    public = task.public
    if files and all(path in public and public[path].read_bytes() == files[path] for path in files):
        raise ArtefactError(f"{next(iter(files))} is still as it was given")
    return files


# Equal artefacts are graded once. That also fixes the luck of a grader that draws random numbers.
grades: dict[bytes, Score] = {}


def grade(task: Task, artefacts: dict[str, bytes], split: str, make_sandbox) -> Score:
    """Grades artefacts in a fresh sandbox that holds the pristine files.

    make_sandbox() opens one. Raises SandboxFault if the sandbox breaks twice, and ArtefactError if
    the artefacts do not fit into it.
    """
    facts = task.name, task.grader, task.hidden, split
    digest = hashlib.sha256(ascii(facts).encode())
    for path, data in sorted(artefacts.items()):
        digest.update(f"{path!a} {len(data)} ".encode() + data)
    key = digest.digest()
    if key in grades:
        return grades[key]
    try:
        score = run_grader(task, artefacts, split, make_sandbox)
    except SandboxFault:
        score = run_grader(task, artefacts, split, make_sandbox)
    if not score.valid:  # not kept: a grading that was killed may succeed when it is repeated
        return score
    if task.exact and improvement(score.value, task) > 1:
        score = replace(score, record=artefacts[task.artefacts[0]].decode())
    return grades.setdefault(key, score)


def run_grader(task: Task, artefacts: dict, split: str, make_sandbox) -> Score:
    """See grade."""
    sandbox = make_sandbox()
    limit = task.grade_timeout
    wall = WALL_FACTOR * limit
    idle = max(IDLE_SECONDS, limit / 6)
    try:
        lay_out(task, artefacts, sandbox)
        argv = [part.replace("{split}", split) for part in task.grader]
        keep = 0, PRINTED_BYTES
        reply, stdout = sandbox.program(argv, wall, keep=keep, cpu=limit, idle=idle)
        # An artefact may have ended the grader with this code, so the program is looked up.
        if reply["code"] == CANNOT_START and not stdout:
            look_up = ["/bin/sh", "-c", 'command -v "$0"', argv[0]]
            if sandbox.program(look_up, 20)[0]["code"]:
                raise SandboxFault(f"the grader does not start: {' '.join(argv)}")
    finally:
        sandbox.close()
    printed = last_json_object(stdout.decode("utf-8", "replace"))
    value, message = parse_grade(printed, task)
    has_answer = value is not None or refusal(printed, task)
    how = f"exit code {reply['code']}"
    if reply["stopped"]:
        how = "stopped at the time limit"
        message = (
            f"The grading took longer than {limit:g} seconds of CPU time, or than {wall:g} seconds "
            "in all."
        )
        if reply["stopped"] == "idle":
            how = "stopped because it waited"
            message = f"The grading waited: it used no CPU for {idle:g} seconds."
    elif reply["code"] and value is not None:
        message = "The grader failed after it had printed a score."
    stderr = number(printed.get("stderr"))
    if stderr and stderr < 0:
        stderr = None
    output = ""
    if reply["code"] or reply["stopped"] or not has_answer:
        value = None
        output = f"{how}\nstdout: {tail(stdout)}\nstderr: {tail(reply['stderr'].encode())}"
    return Score(
        value,
        task.metric,
        split,
        value is not None,
        message,
        number(printed.get("position")),
        stderr,
        output,
    )


def tail(printed: bytes) -> str:
    return plain_text(printed).strip()[-OUTPUT_CHARS:] or "(nothing)"


def lay_out(task: Task, artefacts: dict[str, bytes], sandbox) -> None:
    """Puts the agent's artefacts and the host's version of all other files into the workspace."""
    if task.artefacts == WHOLE_WORKSPACE and artefacts:
        snapshot.put_workspace(sandbox, artefacts)
        sandbox.remove([path.split("/")[0] for path in task.hidden])  # what the agent has put there
        artefacts = {}
    files = task.grading_files(artefacts)
    stale = [path for path in sandbox.premounted if path not in files]  # removed by the agent
    if stale:
        sandbox.remove(stale)
    missing = {}
    for path, source in files.items():
        if path not in sandbox.premounted or source != task.public.get(path):
            missing[path] = source
    sandbox.put(missing, user="root", mode=0o600)
