"""The action of a reply, and the observation that the agent reads after it.

`env` is an Env of env.py whose sandbox runs; `timeout` is in seconds.
"""

import re

from flatlab.numbers import counted
from flatlab.sandbox.client import Result
from flatlab.task.definition import Task
from flatlab.task.grading import Score
from flatlab.task.value import score_text, validation_text
from flatlab.world.blocks import extract_action, is_program

LIBRARIES = ("/site-packages/", "/dist-packages/", '.pyx", ', '.pxi", ')  # in a line of a frame
WARNING = re.compile(r"/\S*/(site|dist)-packages/\S+:\d+: \w*Warning: ")  # begins a line
KILLED = 137  # exit code of a process that got SIGKILL, from the kernel if memory is short


def act_bash(env, reply: str, timeout: float) -> tuple[str | None, str, str, Score | None]:
    """Runs the block of a reply: (action, observation, status, score of a grading or None).

    A whole program runs in the workspace. If it ends without an error, what it wrote is graded at
    once, but not if the task collects the whole workspace. timeout: seconds.
    """
    where = env.sandbox.workspace, env.task.program
    try:
        action = extract_action(reply, *where)
    except ValueError as problem:
        return None, f"Nothing was run. {problem}", "rejected", None
    action, observation, status, score = act_command(env, action, timeout)
    if status == "ok" and is_program(action, *where) and not env.task.collect:
        score = env.score()
        observation += f"\n{score_sentence(score, env.task)}"
        status = "validate" if score.valid else "ok"
    return action, observation, status, score


def act_command(env, action: str, timeout: float) -> tuple[str, str, str, Score | None]:
    """Runs commands without a block around them; returns the same as act_bash."""
    word = action.strip()
    if word == "submit":
        return action, "Submitted.", "submit", None
    if word == "validate":
        score = env.score()
        status = "validate" if score.valid else "invalid"
        return action, score_sentence(score, env.task), status, score
    result = env.sandbox.run(action, timeout, env.task.idle_timeout)
    return action, *run_text(env, result, timeout), None


# ------------------------------------------------------------------ observations


def run_text(env, result: Result, timeout: float) -> tuple[str, str]:
    """(what the agent sees after a command, status of the turn). timeout: seconds."""
    output = fold_warnings(fold_tracebacks(result.output.rstrip("\n"))) or "(no output)"
    if result.stopped:
        note = f"[stopped at the time limit of {timeout:.0f} s, with all background processes]"
        if result.stopped == "idle":
            note = (
                f"[stopped: it used no CPU and printed nothing for {env.task.idle_timeout:g} s; "
                "all background processes were stopped, too]"
            )
        return f"{output}\n{note}", "timeout"
    if not result.exit_code:
        return output, "ok"
    note = f"[exit code {result.exit_code}]"
    if result.exit_code == KILLED:
        most = env.sandbox.spec.memory >> 20
        note = f"[exit code 137: killed, perhaps over the memory limit of {most} MB]"
    return f"{output}\n{note}", "error"


def fold_tracebacks(output: str) -> str:
    """The output with a count in place of the frames of Python packages, so that the agent's own
    line stands beside the error.
    """
    lines = []
    folded = 0  # frames in a row that were left out
    is_inside = False  # of such a frame
    for line in output.split("\n"):
        is_frame = line.startswith('  File "')
        if is_frame:
            is_inside = any(place in line for place in LIBRARIES)
        elif not line.startswith("    "):
            is_inside = False
        if not is_inside:
            folded = 0
            lines.append(line)
        elif is_frame:
            folded += 1
            lines[len(lines) - (folded > 1) :] = [
                f"  [{counted(folded, 'library frame')} left out]"
            ]
    return "\n".join(lines)


def fold_warnings(output: str) -> str:
    """The output with each warning of a Python package once, and the number of its repetitions: one
    for each tree of a forest would leave no room for anything else.
    """
    lines = []
    seen = set()
    folded = 0
    place = 0  # of the first one that was left out
    is_repeated = False
    for line in output.split("\n"):
        is_source = is_repeated and line.startswith("  ")  # the line of code that warned
        is_repeated = line in seen
        if WARNING.match(line):
            seen.add(line)
        if is_repeated and not folded:
            place = len(lines)
        folded += is_repeated
        if not is_repeated and not is_source:
            lines.append(line)
    if folded:
        lines.insert(place, f"[{counted(folded, 'repeated warning')} left out]")
    return "\n".join(lines)


def score_sentence(score: Score, task: Task) -> str:
    """Text that the agent sees after `validate`."""
    if not score.valid:
        return f"No score: {score.message}"
    value = f"{score.split} {score.metric}: {validation_text(score.value, task, score.stderr)}"
    text = f"{value} (baseline {score_text(task.baseline, task)}, {task.direction})"
    if score.position is not None:  # a competition with leaderboards
        text += f"\nposition: {score.position:.1f} (share of the leaderboards that is not better)"
    return text
