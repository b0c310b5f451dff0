"""What an agent's reply asks for, the text of its one bash block, and what comes of it.

The block starts at a line ```bash and ends at the last closing fence of the reply, so a heredoc
inside it may hold fences of its own, as a README does.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from flatlab.sandbox.client import Result
from flatlab.task.definition import Task
from flatlab.task.grading import KILLED, Score

FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([^`]*?)[ \t]*$")
SHELLS = ("bash", "sh", "shell")


class Fence(NamedTuple):
    line: int
    ticks: int
    language: str  # empty for a fence that may close a block


def act_bash(env, reply: str, timeout: float) -> tuple[str | None, str, str, Score | None]:
    """Runs the bash block of a reply: (action, observation, status, score of a grading or None).

    env: an Env whose sandbox runs. timeout: seconds.
    """
    try:
        action = extract_action(reply)
    except ValueError as problem:
        return None, f"Nothing was run. {problem}", "rejected", None
    return act_command(env, action, timeout)


def act_command(env, action: str, timeout: float) -> tuple[str, str, str, Score | None]:
    """Runs commands without a block around them; returns the same as act_bash."""
    word = action.strip()
    if word == "submit":
        return action, "Submitted.", "submit", None
    if word == "validate":
        score = env.score()
        status = "validate" if score.valid else "invalid"
        return action, score_text(score, env.task), status, score
    result = env.sandbox.run(action, timeout)
    return action, *run_text(env, result, timeout), None


def extract_action(reply: str) -> str:
    """The text of the bash block. Raises ValueError, with a sentence for the agent, if there is not
    exactly one.
    """
    text = without_thought(reply)
    fences = find_fences(text)
    start = find_start(fences)
    ends = []
    for fence in fences:
        if fence.line > start.line and fence.ticks >= start.ticks and not fence.language:
            ends.append(fence.line)
    if not ends:
        raise ValueError(
            "The ``` block is not closed; it may have been cut off at the length limit."
        )
    lines = text.split("\n")
    if len(ends) > 1 and "<<" not in "\n".join(lines[start.line : ends[0]]):
        raise ValueError("There are several code blocks in the reply; write one.")
    action = "\n".join(lines[start.line + 1 : ends[-1]])
    if not action.strip():
        raise ValueError("The block is empty.")
    return action


def find_fences(text: str) -> list[Fence]:
    """The lines of the text that are fences."""
    fences = []
    for number, line in enumerate(text.split("\n")):
        if match := FENCE.match(line):
            fences.append(Fence(number, len(match[1]), match[2].lower()))
    return fences


def find_start(fences: list[Fence]) -> Fence:
    """The fence that opens the action. Raises as extract_action."""
    starts = [fence for fence in fences if fence.language in SHELLS]
    languages = [fence.language for fence in fences if fence.language]
    if len(starts) > 1:
        raise ValueError(
            f"There are {len(starts)} code blocks in the reply; write one. "
            "(A ```bash line inside a heredoc counts, too.)"
        )
    if starts:
        return starts[0]
    if not fences:
        raise ValueError("There is no ```bash block in the reply.")
    if languages:
        raise ValueError(f"The block is marked {languages[0][:20]!r}; it must be bash.")
    if len(fences) > 2:
        raise ValueError("There are several code blocks in the reply; write one, marked ```bash.")
    return fences[0]  # a block without a language


def without_thought(reply: str) -> str:
    """The reply after its thought; "" if it never stopped thinking.

    The prompt may have opened the thought, so `</think>` alone ends one. Inside the block, where
    only the closing fence follows, `</think>` is text.
    """
    _, mark, rest = reply.rpartition("</think>")
    inside_block = [fence.language for fence in find_fences(rest)] == [""]
    text = reply if mark and inside_block else rest
    begin, mark, _ = text.partition("<think>")
    return "" if mark and not find_fences(begin) else text


# ------------------------------------------------------------------ observations


def run_text(env, result: Result, timeout: float) -> tuple[str, str]:
    """(what the agent sees after a command, status of the turn). timeout: seconds."""
    output = result.output.rstrip("\n") or "(no output)"
    if result.timed_out:
        note = f"[stopped at the time limit of {timeout:.0f} s, with all background processes]"
        return f"{output}\n{note}", "timeout"
    if not result.exit_code:
        return output, "ok"
    note = f"[exit code {result.exit_code}]"
    if result.exit_code == KILLED:
        most = env.limits["memory"] >> 20
        note = f"[exit code 137: killed, perhaps over the memory limit of {most} MB]"
    return f"{output}\n{note}", "error"


def score_text(score: Score, task: Task) -> str:
    """What the agent sees after `validate`."""
    if not score.valid:
        return f"No score: {score.message}"
    value = f"{score.split} {score.metric}: {score.value:.4f}"
    text = f"{value} (baseline {task.baseline:.4f}, {task.direction})"
    if score.position is not None:  # a competition with leaderboards
        text += f"\nposition: {score.position:.4f} (share of the leaderboards that is not better)"
    return text
