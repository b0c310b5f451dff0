"""Grading: the artefacts leave the agent's sandbox; a fresh one with pristine files grades them.

A grader gives a score or a reason why there is none, and exits with 0. If it does neither, the
artefact is no submission, and Score.grader_output is what the grader said, for the user. Before a
run, check_grader finds out whether the grader works at all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import islice

from flatlab.errors import ArtefactError, SandboxFault, UserError
from flatlab.sandbox import snapshot
from flatlab.sandbox.client import ARTEFACT_BYTES, COPY_BYTES, plain_text
from flatlab.task.definition import (
    WHOLE_WORKSPACE,
    Task,
    finite_number,
    improvement,
    is_plain,
    last_json_object,
    parse_grade,
    standard_error,
)
from flatlab.task.sanity import rules_of

MODEL_BYTES = 2 << 30  # limit of the artefacts of a task that needs a GPU: weights of a model
MOST_FILES = 20_000  # in a workspace whose folders are artefacts
KEPT_GRADES = 10_000
WALL_FACTOR = 10  # a grading that waits without using the CPU is stopped after this many timeouts
PRINTED_BYTES = 1 << 20  # of a grader's stdout: its tail
OUTPUT_CHARS = 4000  # of stdout and of stderr in Score.grader_output
KEYS_CHARS = 200  # of the keys of a result that has another one than the metric
SENTENCE_CHARS = 800  # of Score.grader_output in a sentence
CANNOT_START = (126, 127)  # exit codes of a shell
KILLED = 137  # exit code of a process that got SIGKILL, from the kernel if memory is short


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
    """What the agent wrote: path -> content. Raises ArtefactError if that is no submission.

    A plain name must exist, a folder must not be empty, a pattern may match nothing. Public files
    that are unchanged count as part of a submission, but not alone. For WHOLE_WORKSPACE, see
    snapshot.take_workspace.
    """
    if task.artefacts == WHOLE_WORKSPACE:
        return snapshot.take_workspace(sandbox)
    limit, left = (MODEL_BYTES, MODEL_BYTES) if task.needs_gpu else (ARTEFACT_BYTES, COPY_BYTES)
    files = {}
    for path in artefact_paths(task, sandbox):
        files[path] = sandbox.get(path, min(left, limit))
        left -= len(files[path])
    public = task.public
    if files and all(path in public and public[path].read_bytes() == files[path] for path in files):
        raise ArtefactError(f"{next(iter(files))} is still as it was given")
    return files


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
    if not score.valid:  # not kept: a grading that was killed may succeed when it is repeated
        return score
    if task.exact and improvement(score.value, task) > 1:
        score = replace(score, record=artefacts[task.artefacts[0]].decode())
    if len(grades) >= KEPT_GRADES:
        grades.clear()
    return grades.setdefault(key, score)


def check_grader(task: Task, make_sandbox) -> None:
    """Grades the first trivial rule, if the task has one, on the first and on the last part.

    Raises UserError if the grader gives neither a score nor a reason: it would not score any
    episode.
    """
    for name, artefacts in islice(rules_of(task), 1):
        for split in dict.fromkeys([task.splits[0], task.splits[-1]]):
            output = grade(task, artefacts, split, make_sandbox).grader_output
            if output:
                raise UserError(
                    f"The grader of task {task.name} is broken: it gives {name!r} no result on the "
                    f"{split} part: {' '.join(output.split())[-SENTENCE_CHARS:]}"
                )


def run_grader(task: Task, artefacts: dict, split: str, make_sandbox) -> Score:
    """See grade."""
    sandbox = make_sandbox()
    wall = WALL_FACTOR * task.grade_timeout
    try:
        lay_out(task, artefacts, sandbox)
        argv = task.grader_argv(split)
        keep = (0, PRINTED_BYTES)
        reply, stdout = sandbox.program(argv, wall, keep=keep, cpu=task.grade_timeout)
        # An artefact may have ended the grader with the same exit code, so this is checked.
        if (
            reply["code"] in CANNOT_START
            and not stdout
            and not has_program(task.grader[0], sandbox)
        ):
            raise SandboxFault(f"the grader does not start: {' '.join(task.grader)}")
    finally:
        sandbox.close()
    printed = last_json_object(stdout.decode("utf-8", "replace"))
    value, message = parse_grade(printed, task)
    if reply["timed_out"]:
        value = None
        message = (
            f"The grading took longer than {task.grade_timeout:g} seconds of CPU time, or than "
            f"{wall:g} seconds in all."
        )
    elif value is not None and reply["code"]:
        value, message = None, "The grader failed after it had printed a score."
    has_answer = not reply["code"] and (value is not None or "error" in printed)
    return Score(
        value,
        task.metric,
        split,
        value is not None,
        message,
        finite_number(printed, "position"),
        standard_error(printed),
        "" if has_answer else output_text(stdout, reply, printed, task.metric),
    )


def output_text(stdout: bytes, reply: dict, printed: dict, metric: str) -> str:
    """How a grader ended, the tails of what it printed, and which key its result lacks."""
    how = "stopped at the time limit" if reply["timed_out"] else f"exit code {reply['code']}"
    lines = [how]
    for name, data in (("stdout", stdout), ("stderr", reply["stderr"].encode())):
        tail = plain_text(data).strip()[-OUTPUT_CHARS:]
        lines.append(f"{name}: {tail or '(nothing)'}")
    if printed and metric not in printed:
        keys = ", ".join(map(repr, printed))[:KEYS_CHARS]
        lines.append(f"The result has no {metric!r}, which the task names, but {keys}.")
    return "\n".join(lines)


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


def has_program(name: str, sandbox) -> bool:
    argv = ["/bin/sh", "-c", 'command -v "$0"', name]
    return sandbox.program(argv, 20)[0]["code"] == 0
