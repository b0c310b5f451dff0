"""Grading in a fresh sandbox that holds the pristine files.

A grader gives a score or a reason why there is none, and exits with 0. If it does neither, the
artefact is no submission, and Score.grader_output is what the grader said, for the user. Before a
run, sanity.check_grader finds out whether the grader works at all.
"""

import hashlib
from dataclasses import dataclass, replace

from flatlab.errors import ArtefactError, SandboxFault
from flatlab.numbers import number
from flatlab.sandbox.client import ARTEFACT_BYTES, COPY_BYTES, plain_text
from flatlab.task.definition import Task, last_json_object, parse_grade
from flatlab.task.value import improvement

MODEL_BYTES = 2 << 30  # limit of the artefacts of a task that needs a GPU: weights of a model
MOST_FILES = 20_000  # limit of a workspace whose folders are artefacts
WALL_FACTOR = 10  # a grading is stopped after this many timeouts, whatever it does
IDLE_SECONDS = 10  # or a sixth of its limit: a grading that uses no CPU for so long is stopped
PRINTED_BYTES = 1 << 20  # bytes kept of a grader's stdout: its tail
OUTPUT_CHARS = 4000  # characters of stdout and of stderr in Score.grader_output
CANNOT_START = 127  # exit code of a program that is missing


@dataclass(frozen=True)
class Score:
    value: float | None
    metric: str
    split: str
    valid: bool
    message: str  # reason why it is not valid; safe to show the agent
    position: float | None = None  # share of the leaderboards that is not better, if there are any
    stderr: float | None = None  # standard error of the value; None: unknown
    # End and output of a grader that gave neither a score nor a reason. It may hold answers, so no
    # agent reads it.
    grader_output: str = ""
    # The artefacts of an exact score that is better than the reference, for the transcript
    record: str = ""


def given_work(task: Task, sandbox) -> bytes:
    """Digest of the artefact that the task's collect command makes of a workspace in which an agent
    starts: it is no submission. b"" without such a command or artefact.
    """
    if not task.collect:
        return b""
    try:
        return digest_of(read_artefacts(task, sandbox))
    except ArtefactError:
        return b""


def read_artefacts(task: Task, sandbox, given: bytes = b"") -> dict[str, bytes]:
    """Reads what the agent hands in: path -> content. Raises ArtefactError without a submission.

    A plain name must exist, a folder must not be empty, a pattern may match nothing. Public files
    that are unchanged count as part of a submission, but not alone. given: see given_work.
    """
    if task.collect:
        # A program, because the agent's shell keeps its folder and variables.
        command = f"cd {sandbox.workspace} || exit\n{task.collect}"
        made = sandbox.run(["bash", "-c", command], task.grade_timeout)
        if made.exit_code:
            raise ArtefactError(f"the workspace cannot be copied: {made.output[-OUTPUT_CHARS:]}")
    paths = task.named_artefacts
    if len(paths) < len(task.artefacts):
        reply = sandbox.call("listing", most=MOST_FILES)[0]
        if reply["count"] > MOST_FILES:
            raise ArtefactError(f"the workspace holds more than {MOST_FILES} files")
        listed = [path for path, _ in reply["files"] if task.is_artefact(path)]
        paths = list(dict.fromkeys(paths + listed))
    for folder in task.artefacts:
        if folder.endswith("/") and not any(path.startswith(folder) for path in paths):
            raise ArtefactError(f"{folder} is not there or empty")
    left = MODEL_BYTES if task.needs_gpu else COPY_BYTES
    limit = ARTEFACT_BYTES if not (task.needs_gpu or task.collect) else left
    files = {}
    try:
        for path in paths:
            files[path] = sandbox.get(path, min(left, limit))
            left -= len(files[path])
    finally:
        if task.collect:
            sandbox.remove(paths)
    public = task.public
    if files and all(path in public and public[path].read_bytes() == files[path] for path in files):
        raise ArtefactError(f"{next(iter(files))} is still as it was given")
    if given and digest_of(files) == given:
        raise ArtefactError("the workspace is still as it was given")
    return files


def digest_of(artefacts: dict[str, bytes]) -> bytes:
    """Digest of the names and contents."""
    digest = hashlib.sha256()
    for path, data in sorted(artefacts.items()):
        digest.update(f"{path!a} {len(data)} ".encode() + data)
    return digest.digest()


# Scores are cached by content, so a random grader returns one score per artefact.
grades: dict[tuple, Score] = {}


def grade(task: Task, artefacts: dict[str, bytes], split: str, make_sandbox) -> Score:
    """Grades artefacts in a fresh sandbox that holds the pristine files.

    make_sandbox() opens one. Raises SandboxFault if the sandbox breaks twice.
    """
    key = (task.name, task.grader, str(task.hidden), split, digest_of(artefacts))
    if key in grades:
        return grades[key]
    try:
        score = run_grader(task, artefacts, split, make_sandbox)
    except SandboxFault:
        score = run_grader(task, artefacts, split, make_sandbox)
    if not score.valid:  # a grading that was killed may succeed when it is repeated
        return score
    is_known = task.exact and task.reference is not None
    if is_known and improvement(score.value, task) > 1:
        texts = [data.decode(errors="replace") for data in artefacts.values()]
        score = replace(score, record="\n".join(texts))
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
    value, message, works = parse_grade(printed, task)
    stopped = reply["stopped"]
    if stopped == "idle":
        message = f"The grader was stopped: it used no CPU for {idle:g} seconds."
    elif stopped:
        message = (
            f"The grading took longer than {limit:g} seconds of CPU time, or than {wall:g} seconds "
            "in all."
        )
    elif reply["code"] and value is not None:
        message = "The grader failed after it had printed a score."
    stderr = number(printed.get("stderr"))
    output = ""
    if stopped or reply["code"] or not works:
        value = None
        how = f"exit code {reply['code']} {stopped}".strip()
        output = f"{how}\nstdout: {tail(stdout)}\nstderr: {tail(reply['stderr'].encode())}"
    return Score(
        value,
        task.metric,
        split,
        value is not None,
        plain_text(message.encode("utf-8", "replace")),
        position=number(printed.get("position")),
        stderr=None if stderr is None or stderr < 0 else stderr,
        grader_output=output,
    )


def tail(printed: bytes) -> str:
    return plain_text(printed).strip()[-OUTPUT_CHARS:] or "(nothing)"


def lay_out(task: Task, artefacts: dict[str, bytes], sandbox) -> None:
    """Puts the agent's artefacts and the host's version of all other files into the workspace."""
    files = task.grading_files(artefacts).items()
    there = sandbox.mounts
    missing = {path: source for path, source in files if there.get(path) != source}
    sandbox.put(missing, user="root")
