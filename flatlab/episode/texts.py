"""What the agent reads: the first message, the output of a command, the answer to `validate`."""

from __future__ import annotations

from flatlab.episode.grading import Score
from flatlab.episode.task import Task
from flatlab.sandbox.sandbox import Result

KILLED = 137  # exit code of a process that got SIGKILL


def first_message(
    task: Task, workspace: str, files: list, count: int, network: bool = False
) -> str:
    """The prompt: the task, how to reply, and what is in the workspace.

    files: (path, size in bytes) of the files to list; count: how many there are.
    """
    prompt = [task.prompt.rstrip(), ""]
    if task.actions_text:
        prompt += [task.actions_text.rstrip(), ""]
    lines = [
        *prompt,
        "Reply with one block of bash commands:",
        "```bash",
        "ls",
        "```",
        f"They run in {workspace}{'' if network else ' without network'}, "
        "and you see what they print.",
        f"A block with only the word validate scores your {' and '.join(task.artefacts)}; "
        "one with only submit ends the task.",
        "",
        "Files:",
    ]
    lines += [f"{path} ({size} bytes)" for path, size in files]
    if count > len(files):
        lines.append(f"... and {count - len(files)} more")
    return "\n".join(lines)


def run_text(result: Result, timeout: float, memory: int) -> tuple[str, str]:
    """(what the agent sees after a command, status of the turn). Seconds and bytes."""
    output = result.output.rstrip("\n") or "(no output)"
    if result.timed_out:
        note = f"[stopped at the time limit of {timeout:.0f} s, with all background processes]"
        return f"{output}\n{note}", "timeout"
    if not result.exit_code:
        return output, "ok"
    note = f"[exit code {result.exit_code}]"
    if result.exit_code == KILLED:
        note = f"[exit code 137: killed, perhaps over the memory limit of {memory >> 20} MB]"
    return f"{output}\n{note}", "error"


def score_text(score: Score, task: Task) -> str:
    """What the agent sees after `validate`."""
    if not score.valid:
        return f"No score: {score.message}"
    value = f"{score.split} {score.metric}: {score.value:.4f}"
    return f"{value} (baseline {task.baseline:.4f}, {task.direction})"


def position_text(score: Score) -> str:
    """One more line for a competition with leaderboards, else nothing."""
    if score.position is None:
        return ""
    return f"\nposition: {score.position:.4f} (share of the leaderboards that is not better)"
