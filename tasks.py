"""What is asked and how it is scored: find a task by its name, and check what its score can say.

python tasks.py                 list all tasks
python tasks.py titanic         score the trivial rules of a task; is one of them at the top?
"""

from __future__ import annotations

from functools import partial

from flatlab.cache import store
from flatlab.episode.builtin import load_builtin
from flatlab.episode.grading import grade
from flatlab.episode.loaders import load_task, task_sources
from flatlab.episode.machine import open_sandbox, sandbox_kind
from flatlab.episode.sanity import at_the_top, degenerate, sanity_file, trivial_rules
from flatlab.episode.task import Task, improvement
from flatlab.errors import UserError

__all__ = ["Task", "UserError", "degenerate", "improvement", "load_task"]


def list_tasks(mlgym_root: str | None, mledojo_root: str | None) -> None:
    """Prints one line per task. Only built-in ones are loaded: others may be large."""
    for names, load, root in task_sources(mlgym_root, mledojo_root):
        for name in names(root):
            if load is not load_builtin:
                print(f"{name:40} {root}")
                continue
            task = load(root, name)
            way = "higher" if task.higher_is_better else "lower"
            print(f"{name:40} {task.metric}, {way} is better, baseline {task.baseline:.4g}")


def print_row(task: Task, name: str, score: float | None, note: str = "") -> None:
    numbers = f"{'-':>12}"
    if score is not None:
        numbers = f"{score:12.4f}{improvement(score, task):13.2f}"
    print(f"{name:32}{numbers:25}  {note}".rstrip())


def check(task: Task, backend: str) -> None:
    """Scores the trivial rules of a task, prints them, and keeps the result for `degenerate`."""
    split = task.splits[0]
    way = "higher" if task.higher_is_better else "lower"
    print(f"{task.name} ({task.source}): {task.metric}, {way} is better, on the {split} part\n")
    print(f"{'':32}{'score':>12}{'improvement':>13}")
    print_row(task, "baseline", task.baseline)
    if task.reference is not None:
        is_median = task.source == "mledojo"
        name = "median of the leaderboards" if is_median else "reference"
        print_row(task, name, task.reference)
    make_sandbox = partial(open_sandbox, task, sandbox_kind(backend))
    reason = None
    for rule, artefacts in trivial_rules(task).items():
        score = grade(task, artefacts, split, make_sandbox)
        print_row(task, rule, score.value, score.message)
        if not reason and score.valid and at_the_top(score.value, task):
            reason = f"the rule {rule!r} scores {score.value:.4g}"
    store(sanity_file(task), {"degenerate": reason})
    found = degenerate(task)
    print(f"\ndegenerate: {found}" if found else "\nnot degenerate, as far as these rules tell")


def main(
    task: str = "",
    /,
    mlgym_root: str | None = None,
    mledojo_root: str | None = None,
    backend: str = "auto",
) -> None:
    """List all tasks, or score the trivial rules of one: is one of them already at the top?

    Args:
        task: Name of the task. Without one, all tasks are listed.
        mlgym_root: MLGym checkout; default: $MLGYM_ROOT.
        mledojo_root: Folder of competitions prepared by MLE-Dojo; default: $MLEDOJO_ROOT.
        backend: docker, local or auto.
    """
    if task:
        check(load_task(task, mlgym_root, mledojo_root), backend)
    else:
        list_tasks(mlgym_root, mledojo_root)


if __name__ == "__main__":
    import tyro

    from flatlab.runs.cli import one_sentence

    one_sentence(lambda: tyro.cli(main))
