"""Opens the run directories of a search, one for each of its trees."""

from __future__ import annotations

import itertools
from pathlib import Path

from flatlab import options
from flatlab.errors import UserError
from flatlab.runs import trackers
from flatlab.runs.fingerprint import fingerprint
from flatlab.runs.reader import value_text
from flatlab.runs.store import Run, open_run, run_directory
from flatlab.tree.nodes import Tree, spent
from flatlab.world.texts import load_prompts


def open_trees(cfg, tasks: list, rule, path, kind: str) -> tuple[list[Tree], Path]:
    """One tree for each task, sampling mode and seed, and the directory of the run or grid.

    cfg: the Config of search.py. rule: a Rule. path: a ModelPath, or None for an endpoint. kind:
    how the default name of the directory begins.
    """
    trackers.check_packages(cfg.trackers)
    cells = list(itertools.product(tasks, cfg.sampling_mode, cfg.seed))
    is_grid = len(cells) > 1
    model = value_text(cfg.model.model)
    name = f"{kind}-grid-{model}"
    if not is_grid:
        [(task, mode, seed)] = cells
        name = f"{kind}-{task.name}-{mode}-{model}-{seed}"
    where = run_directory(cfg.name or name)
    if is_grid and (where / "config.yaml").exists():
        raise UserError(f"{where} is a single run, not a grid: choose another --name.")
    trees = []
    for task, mode, seed in cells:
        directory = where
        if is_grid:
            directory = where / f"{task.name}-{mode}-{seed}"
        cell = {"task": task.name, "sampling_mode": mode, "seed": seed, "name": directory.name}
        run = open_run(
            directory,
            options.flat(cfg) | cell,
            fingerprint([load_prompts(cfg.episode.prompts).digest, task.digest()], path),
            options.may_change(cfg),
            lambda run: is_finished(run, cfg),
        )
        t = Tree(task, mode, seed, cfg, run, rule)
        if not t.closed:
            (run.dir / "nodes").mkdir(exist_ok=True)
            run.trackers = trackers.open_trackers(run)
        trees.append(t)
    return trees, where


def is_finished(run: Run, cfg) -> bool:
    """Whether a search has scored its best node and has nothing left of its budget."""
    result = run.results()
    if result.get("status") != "finished":
        return False
    used = result["nodes"], result["tokens"], result["seconds"]
    return result["stopped_by"] == "tree" or spent(cfg, *used) != ""
