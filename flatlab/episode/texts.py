"""What the agent reads: the first message, the output of a command, the answer to `validate`."""

from __future__ import annotations

from flatlab.episode.grading import Score
from flatlab.episode.task import Task
from flatlab.sandbox.sandbox import Result


def first_message(
    task: Task, workspace: str, files: list, count: int, network: bool = False
) -> str:
    """The prompt: task, way to reply, and what really lies in the workspace."""
    names = [f"{path} ({size} bytes)" for path, size in files]
    more = [f"... and {count - len(files)} more"] if count > len(files) else []
    return "\n".join(
        [
            task.prompt.rstrip(),
            "",
            "Reply with one block of bash commands:",
            "```bash",
            "ls",
            "```",
            f"They run in {workspace}{'' if network else ' without network'}, and you see what they print.",
            f"A block with only the word validate scores your {' and '.join(task.artefacts)}; "
            "one with only submit ends the task.",
            "",
            "Files:",
            *names,
            *more,
        ]
    )


def run_text(result: Result, timeout: float, memory: int) -> str:
    """What the agent sees after a command."""
    notes = [result.output.rstrip("\n") or "(no output)"]
    if result.timed_out:
        notes.append(
            f"[stopped at the time limit of {timeout:.0f} s, with all background processes]"
        )
    elif result.exit_code == 137:
        notes.append(f"[exit code 137: killed, perhaps over the memory limit of {memory >> 20} MB]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    return "\n".join(notes)


def score_text(score: Score, task: Task) -> str:
    """What the agent sees after `validate`."""
    if not score.valid:
        return f"No score: {score.message}"
    way = "higher" if task.higher_is_better else "lower"
    return f"{score.split} {score.metric}: {score.value:.4f} (baseline {task.baseline:.4f}, {way} is better)"


def position_text(score: Score) -> str:
    """A line more for a competition with leaderboards."""
    return (
        ""
        if score.position is None
        else f"\nposition: {score.position:.4f} (share of the leaderboards that is not better)"
    )
