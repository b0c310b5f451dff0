"""Grading: the artefacts leave the agent's sandbox; a fresh one with pristine files grades them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from flatlab.episode.task import (
    WHOLE_WORKSPACE,
    Task,
    finite_number,
    last_json_object,
    parse_grade,
    standard_error,
)
from flatlab.errors import ArtefactError, SandboxFault
from flatlab.sandbox import snapshot
from flatlab.sandbox.sandbox import ARTEFACT_BYTES, COPY_BYTES

MODEL_BYTES = 2 << 30  # limit of the artefacts of a task that needs a GPU: weights of a model
MOST_FILES = 20_000  # in a workspace whose folders are artefacts
KEPT_GRADES = 10_000
CANNOT_START = (126, 127)  # exit codes of a shell


@dataclass(frozen=True)
class Score:
    value: float | None
    metric: str
    split: str
    valid: bool
    message: str  # why it is not valid; safe to show the agent
    position: float | None = None  # MLE-Dojo: share of the leaderboards that is not better
    stderr: float | None = None  # standard error of the value; None: unknown


def collect(task: Task, sandbox) -> dict[str, bytes]:
    """What the agent wrote: path -> content. Raises ArtefactError if that is no submission.

    A plain name must exist, a folder must not be empty, a pattern may match nothing. Public files
    that are unchanged count as part of a submission, but not alone. For WHOLE_WORKSPACE, see
    snapshot.take_workspace.
    """
    if task.artefacts == WHOLE_WORKSPACE:
        return snapshot.take_workspace(sandbox)
    limit, left = (MODEL_BYTES, MODEL_BYTES) if task.needs_gpu else (ARTEFACT_BYTES, COPY_BYTES)
    found = {}
    for path in artefact_paths(task, sandbox):
        found[path] = sandbox.get(path, min(left, limit))
        left -= len(found[path])
    public = task.public
    if found and all(path in public and public[path].read_bytes() == found[path] for path in found):
        raise ArtefactError(f"{next(iter(found))} is still as it was given")
    return found


def artefact_paths(task: Task, sandbox) -> list[str]:
    """The artefacts as paths of files; folders and patterns are looked up in the workspace."""
    paths = [artefact for artefact in task.artefacts if is_plain(artefact)]
    if len(paths) == len(task.artefacts):
        return paths
    reply = sandbox.call("listing", most=MOST_FILES)[0]
    if reply["count"] > MOST_FILES:
        raise ArtefactError(f"the workspace holds more than {MOST_FILES} files")
    for path, _ in reply["files"]:
        if task.is_artefact(path) and path not in paths:
            paths.append(path)
    for folder in task.artefacts:
        if folder.endswith("/") and not any(path.startswith(folder) for path in paths):
            raise ArtefactError(f"{folder} is not there or empty")
    return paths


def is_plain(artefact: str) -> bool:
    """Whether an artefact is the name of one file, neither a folder nor a pattern."""
    return not artefact.endswith("/") and not any(sign in artefact for sign in "*?[")


# Equal artefacts are graded once. That also fixes the luck of a grader that draws random numbers.
grades: dict[tuple, Score] = {}


def grade(task: Task, artefacts: dict[str, bytes], split: str, make_sandbox) -> Score:
    """Grades artefacts in a fresh sandbox that holds the pristine files.

    make_sandbox() opens one. Raises SandboxFault if the sandbox breaks twice, and ArtefactError if
    the artefacts do not fit into it.
    """
    digest = hashlib.sha256()
    for path, data in sorted(artefacts.items()):
        digest.update(b"%r %d " % (path.encode("utf-8", "surrogateescape"), len(data)) + data)
    key = (task.name, task.grader, str(task.hidden), split, digest.digest())
    if key in grades:
        return grades[key]
    try:
        score = run_grader(task, artefacts, split, make_sandbox)
    except SandboxFault:
        score = run_grader(task, artefacts, split, make_sandbox)
    if not score.valid:  # not kept: a grading that was too slow may be in time when it is repeated
        return score
    if len(grades) >= KEPT_GRADES:
        grades.clear()
    return grades.setdefault(key, score)


def run_grader(task: Task, artefacts: dict[str, bytes], split: str, make_sandbox) -> Score:
    """The score of one run of the grader, in a sandbox of its own. Raises SandboxFault."""
    sandbox = make_sandbox()
    try:
        lay_out(task, artefacts, sandbox)
        stdout, reply = sandbox.program(task.grader_argv(split), task.grade_timeout)
        # An artefact may have ended the grader with the same exit code, so this is checked.
        if (
            reply["code"] in CANNOT_START
            and not stdout
            and not has_program(task.grader[0], sandbox)
        ):
            raise SandboxFault(f"the grader does not start: {' '.join(task.grader)}")
    finally:
        sandbox.close()
    if reply["timed_out"]:
        message = f"The grading took longer than {task.grade_timeout:.0f} seconds."
        return Score(None, task.metric, split, False, message)
    found = last_json_object(stdout.decode("utf-8", "replace"))
    value, message = parse_grade(found, task)
    position = finite_number(found, "position") if task.source == "mledojo" else None
    stderr = standard_error(found)
    return Score(value, task.metric, split, value is not None, message, position, stderr)


def lay_out(task: Task, artefacts: dict[str, bytes], sandbox) -> None:
    """Puts the agent's artefacts and the host's version of all other files into the workspace."""
    if task.artefacts == WHOLE_WORKSPACE:
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


def has_program(name: str, sandbox) -> bool:
    argv = ["/bin/sh", "-c", 'command -v "$0"', name]
    return sandbox.program(argv, 20)[1]["code"] == 0
