"""What is asked and how it is scored: find a task by its name, and check how much its score can say.

python tasks.py                 list all tasks
python tasks.py titanic         score the trivial rules of a task, and say whether one of them is at the top
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flatlab.cache import store
from flatlab.episode.grading import grade
from flatlab.episode.loaders import (
    TASKS_DIR,
    builtin_names,
    load_builtin,
    load_mledojo,
    load_mlgym,
    mledojo_names,
    mlgym_names,
    nearest,
)
from flatlab.episode.sanity import at_the_top, degenerate, sanity_file, trivial_rules
from flatlab.episode.task import Task, improvement
from flatlab.errors import SandboxFault, UserError

__all__ = ["Task", "UserError", "degenerate", "improvement", "load_task"]


def load_task(
    name: str, mlgym_root: str | Path | None = None, mledojo_root: str | Path | None = None
) -> Task:
    """Find the task called `name` in an MLGym checkout, a folder prepared by MLE-Dojo, or configs/tasks, in this order.
    Without an argument the roots are $MLGYM_ROOT and $MLEDOJO_ROOT; "" is none. Raises UserError, with what to do."""
    known = []
    for names, load, root in task_sources(mlgym_root, mledojo_root):
        if name in names(root):
            return load(root, name)
        known += names(root)
    raise UserError(f"Unknown task {name!r}; {nearest(name, sorted(set(known)))}.")


def task_sources(mlgym_root: str | Path | None, mledojo_root: str | Path | None) -> list[tuple]:
    """(function that lists names, function that loads one, root) of each place tasks come from."""
    sources = [(builtin_names, load_builtin, TASKS_DIR)]
    for given, variable, names, load in (
        (mledojo_root, "MLEDOJO_ROOT", mledojo_names, load_mledojo),
        (mlgym_root, "MLGYM_ROOT", mlgym_names, load_mlgym),
    ):
        root = os.environ.get(variable, "") if given is None else given
        if root:
            sources.insert(0, (names, load, Path(root).expanduser().resolve()))
    return sources


def list_tasks(mlgym_root: str | Path | None, mledojo_root: str | Path | None) -> None:
    """Prints one line per task. Only built-in ones are loaded: others may be large."""
    for names, load, root in task_sources(mlgym_root, mledojo_root):
        for name in names(root):
            if load is not load_builtin:
                print(f"{name:40} {root}")
                continue
            task = load(root, name)
            way = "higher" if task.higher_is_better else "lower"
            print(f"{name:40} {task.metric}, {way} is better, baseline {task.baseline:.4g}")


def main(
    task: str = "",
    /,
    mlgym_root: str | None = None,
    mledojo_root: str | None = None,
    backend: str = "auto",
):
    """Check a task: score its trivial rules, and say whether one of them is already at the top. The result is kept.

    Args:
        task: Name of the task. Without one, all tasks are listed.
        mlgym_root: A checkout of MLGym; $MLGYM_ROOT by default.
        mledojo_root: A folder of competitions prepared by MLE-Dojo; $MLEDOJO_ROOT by default.
        backend: docker, local or auto.
    """
    if not task:
        list_tasks(mlgym_root, mledojo_root)
        return
    from env import Env

    task = load_task(task, mlgym_root, mledojo_root)
    world, split, rows = Env(task, backend), task.splits[0], []
    print(
        f"{task.name} ({task.source}): {task.metric}, {'higher' if task.higher_is_better else 'lower'} is better, "
        f"on the {split} part\n\n{'':32}{'score':>12}{'improvement':>13}"
    )

    def show(name, score, note=""):
        numbers = (
            f"{'-':>12}" if score is None else f"{score:12.4f}{improvement(score, task):13.2f}"
        )
        print(f"{name:32}{numbers:25}  {note}".rstrip())

    show("baseline", task.baseline)
    if task.reference is not None:
        show(
            "median of the leaderboards" if task.source == "mledojo" else "reference",
            task.reference,
        )
    for name, artefacts in trivial_rules(task).items():
        score = grade(task, artefacts, split, world.make_sandbox)
        show(name, score.value, score.message)
        rows.append({"rule": name, "score": score.value, "message": score.message})
    top = [row for row in rows if row["score"] is not None and at_the_top(row["score"], task)]
    reason = f"the rule {top[0]['rule']!r} scores {top[0]['score']:.4g}" if top else None
    store(sanity_file(task), {"split": split, "rows": rows, "degenerate": reason})
    found = degenerate(task)
    print(f"\n{'degenerate: ' + found if found else 'not degenerate, as far as these rules tell'}")


if __name__ == "__main__":
    import tyro

    try:
        tyro.cli(main)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except SandboxFault as fault:
        print(f"The sandbox broke: {fault}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
