"""Finding a task by its name, in an MLGym checkout, among MLE-Dojo's competitions, or built in."""

from __future__ import annotations

import os
from pathlib import Path

from flatlab.episode.builtin import builtin_names, load_builtin
from flatlab.episode.mledojo import load_mledojo, mledojo_names
from flatlab.episode.mlgym import load_mlgym, mlgym_names
from flatlab.episode.task import Task
from flatlab.episode.task_files import TASKS_DIR, nearest
from flatlab.errors import UserError


def load_task(
    name: str, mlgym_root: str | Path | None = None, mledojo_root: str | Path | None = None
) -> Task:
    """Loads the task called `name`.

    Looks in the MLGym checkout, then in the folder that MLE-Dojo prepared, then in configs/tasks.
    A root of None means $MLGYM_ROOT or $MLEDOJO_ROOT; "" means none. Raises UserError, which says
    what to do.
    """
    known = []
    for names, load, root in task_sources(mlgym_root, mledojo_root):
        if name in names(root):
            return load(root, name)
        known += names(root)
    raise UserError(f"Unknown task {name!r}; {nearest(name, sorted(set(known)))}.")


def task_sources(mlgym_root: str | Path | None, mledojo_root: str | Path | None) -> list[tuple]:
    """(function that lists names, function that loads one, root) of each place tasks come from."""
    sources = []
    for names, load, root, variable in (
        (mlgym_names, load_mlgym, mlgym_root, "MLGYM_ROOT"),
        (mledojo_names, load_mledojo, mledojo_root, "MLEDOJO_ROOT"),
    ):
        if root is None:
            root = os.environ.get(variable)
        if root:
            sources.append((names, load, Path(root).expanduser().resolve()))
    sources.append((builtin_names, load_builtin, TASKS_DIR))
    return sources
