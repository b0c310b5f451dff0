"""Grading: the artefacts out of the agent's sandbox, a fresh sandbox with the pristine files, one number out of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from flatlab.episode.task import Task, parse_grade, parse_position
from flatlab.errors import ArtefactError, SandboxFault
from flatlab.sandbox.sandbox import ARTEFACT_BYTES, COPY_BYTES

MODEL_BYTES = 2 << 30  # of one artefact of a task that needs a GPU, say the weights of a model
MOST_FILES = 20_000  # in a workspace whose folders are artefacts


@dataclass(frozen=True)
class Score:
    value: float | None
    metric: str
    split: str
    valid: bool
    message: str  # why it is not valid; safe to show the agent
    position: float | None = None  # MLE-Dojo: share of the leaderboards that is not better


def collect(task: Task, sandbox) -> dict[str, bytes]:
    """What the agent wrote, path -> content. Raises ArtefactError with the reason when that is no submission.

    A plain name must be there, a folder must not be empty, a pattern may match nothing. Files that are still as they
    were given count as part of a submission, but not alone.
    """
    paths = [artefact for artefact in task.artefacts if is_plain(artefact)]
    if len(paths) < len(task.artefacts):
        reply = sandbox.call("listing", most=MOST_FILES)[0]
        if reply["count"] > MOST_FILES:
            raise ArtefactError(f"the workspace holds more than {MOST_FILES} files")
        paths += [
            path for path, _ in reply["files"] if task.is_artefact(path) and path not in paths
        ]
        for folder in task.artefacts:
            if folder.endswith("/") and not any(path.startswith(folder) for path in paths):
                raise ArtefactError(f"{folder} is not there or empty")
    left, most, found = COPY_BYTES, ARTEFACT_BYTES, {}
    if task.needs_gpu:
        left = most = MODEL_BYTES
    for path in paths:
        found[path] = sandbox.get(path, min(left, most))
        left -= len(found[path])
    given = [
        path
        for path in found
        if path in task.public and Path(task.public[path]).read_bytes() == found[path]
    ]
    if given and len(given) == len(found):
        raise ArtefactError(f"{given[0]} is still as it was given")
    return found


def is_plain(artefact: str) -> bool:
    """Whether an artefact is the name of one file, neither a folder nor a pattern."""
    return not artefact.endswith("/") and not any(sign in artefact for sign in "*?[")


grades: dict[
    tuple, Score
] = {}  # a score is found once for an artefact; also pins the luck of a random grader


def grade(task: Task, artefacts: dict[str, bytes], split: str, make_sandbox) -> Score:
    """Grades artefacts in a fresh sandbox that holds the pristine files. Raises SandboxFault when that breaks twice."""
    digest = hashlib.sha256()
    for path, data in sorted(artefacts.items()):
        digest.update(b"%r %d " % (path.encode("utf-8", "surrogateescape"), len(data)) + data)
    key = (task.name, task.grader, str(task.hidden), split, digest.digest())
    if key in grades:
        return grades[key]
    try:
        value, message, position = run_grader(task, artefacts, split, make_sandbox)
    except SandboxFault:
        value, message, position = run_grader(task, artefacts, split, make_sandbox)
    if value is None:  # perhaps it was the load of the machine: the next grading may end in time
        return Score(None, task.metric, split, False, message)
    if len(grades) >= 10_000:
        grades.clear()
    return grades.setdefault(key, Score(value, task.metric, split, True, "", position))


def run_grader(
    task: Task, artefacts: dict[str, bytes], split: str, make_sandbox
) -> tuple[float | None, str, float | None]:
    """(score, "", position on leaderboards) or (None, why there is none, None), in a sandbox of its own."""
    sandbox = make_sandbox()
    try:
        files = task.grading_files(artefacts)
        stale = [
            path for path in sandbox.premounted if path not in files
        ]  # premounted, and the agent has removed it
        if stale:
            sandbox.remove(stale)
        sandbox.put(
            {
                path: source
                for path, source in files.items()
                if path not in sandbox.premounted or source != task.public.get(path)
            },
            user="root",
            mode=0o600,
        )
        stdout, reply = sandbox.program(task.grader_argv(split), task.grade_timeout, user="root")
        if (
            reply["code"] in (126, 127) and not stdout
        ):  # what was handed in may have ended it like that, too
            if sandbox.program(
                ["/bin/sh", "-c", 'command -v "$0"', task.grader[0]], 20, user="root"
            )[1]["code"]:
                raise SandboxFault(f"the grader does not start: {' '.join(task.grader)}")
    finally:
        sandbox.close()
    if reply["timed_out"]:
        return None, f"The grading took longer than {task.grade_timeout:.0f} seconds.", None
    said = stdout.decode("utf-8", "replace")
    return *parse_grade(said, task), parse_position(said, task)
