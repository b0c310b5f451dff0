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
NO_BLOCK = "There is no ```bash block in the reply."
NOT_CLOSED = "The ``` block is not closed; it may have been cut off at the length limit."


class Fence(NamedTuple):
    line: int
    ticks: int
    language: str  # empty for a fence that may close a block


def act_bash(env, reply: str, timeout: float) -> tuple[str | None, str, str, Score | None]:
    """Runs the bash block of a reply: (action, observation, status, score of a grading or None).

    env: an Env whose sandbox runs. timeout: seconds.
    """
    action, problem = extract_action(reply)
    if action is None:
        return None, f"Nothing was run. {problem}", "rejected", None
    return act_command(env, action, timeout)


def act_command(env, action: str, timeout: float) -> tuple[str, str, str, Score | None]:
    """Runs commands without a block around them; returns the same as act_bash."""
    if action_name(action) == "submit":
        return action, "Submitted.", "submit", None
    if action_name(action) == "validate":
        score = env.score()
        status = "validate" if score.valid else "invalid"
        return action, score_text(score, env.task), status, score
    result = env.sandbox.run(action, timeout)
    return action, *run_text(env, result, timeout), None


def action_name(action: str | None) -> str:
    """ "validate", "submit", or "bash" for any other action."""
    word = (action or "").strip()
    return word if word in ("validate", "submit") else "bash"


def extract_action(reply: str) -> tuple[str | None, str]:
    """(text of the bash block, "") or (None, why there is no action to run). Never raises."""
    text = without_thought(reply)
    if text is None:
        return None, NO_BLOCK
    fences = find_fences(text)
    start, problem = find_start(fences)
    if start is None:
        return None, problem
    ends = []
    for fence in fences:
        if fence.line > start.line and fence.ticks >= start.ticks and not fence.language:
            ends.append(fence.line)
    if not ends:
        return None, NOT_CLOSED
    lines = text.split("\n")
    if len(ends) > 1 and "<<" not in "\n".join(lines[start.line : ends[0]]):
        return None, "There are several code blocks in the reply; write one."
    action = "\n".join(lines[start.line + 1 : ends[-1]])
    if not action.strip():
        return None, "The block is empty."
    return action, ""


def find_fences(text: str) -> list[Fence]:
    """The lines of the text that are fences."""
    fences = []
    for number, line in enumerate(text.split("\n")):
        if match := FENCE.match(line):
            fences.append(Fence(number, len(match[1]), match[2].lower()))
    return fences


def find_start(fences: list[Fence]) -> tuple[Fence | None, str]:
    """(the fence that opens the action, "") or (None, why there is none)."""
    starts = [fence for fence in fences if fence.language in SHELLS]
    if len(starts) == 1:
        return starts[0], ""
    if starts:
        return None, (
            f"There are {len(starts)} code blocks in the reply; write one. "
            "(A ```bash line inside a heredoc counts, too.)"
        )
    if not fences:
        return None, NO_BLOCK
    languages = [fence.language for fence in fences if fence.language]
    if languages:
        return None, f"The block is marked {languages[0][:20]!r}; it must be bash."
    if len(fences) > 2:
        return None, "There are several code blocks in the reply; write one, marked ```bash."
    return fences[0], ""  # a block without a language


def without_thought(reply: str) -> str | None:
    """The reply after its thought; None if it never stopped thinking.

    The prompt may have opened the thought, so `</think>` alone ends one. Inside the block, where
    only the closing fence follows, `</think>` is text.
    """
    _, mark, rest = reply.rpartition("</think>")
    inside_block = [fence.language for fence in find_fences(rest)] == [""]
    text = reply if mark and inside_block else rest
    begin, mark, _ = text.partition("<think>")
    if mark and not find_fences(begin):
        return None
    return text


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
