"""Compares many runs: overlaid curves and a table.

Runs with the same config but for the seed are one group. No run is dropped: every table and picture
says how many runs and failures are in each of its cells.
"""

from __future__ import annotations

import math
import re
from itertools import cycle
from pathlib import Path
from statistics import fmean

import numpy as np

from flatlab.runs.reader import RunData
from flatlab.view import search_plots, stats
from flatlab.view.plots import (
    COLOURS,
    PAGE_WIDTH,
    TRAINING,
    Group,
    cut,
    draw_panels,
    figure_of,
    grid_of,
    save,
    score_key,
    series,
    shorten,
    window_of,
    wrapped,
)

# Settings that do not change what is measured
NOT_OF_THE_GROUP = set(
    """task seed name workers concurrency price url eval_episodes backend mlgym_root mledojo_root
    tensorboard wandb""".split()
)
# Settings that follow from another one unless the user sets them: key -> the other one
DERIVED_FROM = {
    "clip_low": "loss",
    "clip_high": "loss",
    "max_groups": "groups",
    "lr": "model",
    "context": "model",
    "max_reply_tokens": "model",
    "max_observation_tokens": "model",
    "micro_tokens": "model",
}
FIRST = ("loss", "reward", "advantage", "select", "sampling_mode", "model")  # in labels
SAY_THE_VALUE = {"loss", "select", "sampling_mode", "model"}  # clear without "key="
PANELS = {"grpo": TRAINING, "search": search_plots.SEARCH}

# ------------------------------------------------------------------ groups


def groups_of(runs: list[RunData]) -> dict[tuple[str, str], list[Group]]:
    """(kind, task) -> groups, named by the settings in which they differ.

    A group has the same name and colour on every task, because ranks are means over tasks.
    """
    methods = {}
    for run in runs:
        same = methods.setdefault(run.kind, {})
        same.setdefault(repr(sorted(method_of(run.config).items())), []).append(run)
    places = {}
    for kind, same in methods.items():
        members = list(same.values())
        for name, colour, found in zip(names(members), cycle(COLOURS), members):
            by_task = {}
            for run in found:
                by_task.setdefault(run.tasks, []).append(run)
            for task, group in by_task.items():
                places.setdefault((kind, task), []).append(Group(name, colour, group))
    return places


def method_of(config: dict) -> dict:
    """The settings that tell groups apart, whatever their task."""
    found = {key: value for key, value in config.items() if key not in NOT_OF_THE_GROUP}
    if len({*found.get("task_weights", ())}) < 2:  # equal ones, as many as there are tasks
        found.pop("task_weights", None)
    return found


def names(groups: list[list[RunData]]) -> list[str]:
    """A unique name for each group: the settings in which they differ, the important ones first."""
    configs = [method_of(runs[0].config) for runs in groups]
    keys = differing_keys(configs)
    found = []
    for config, runs in zip(configs, groups):
        parts = []
        for key in keys:
            value = value_text(config.get(key))
            parts.append(value if key in SAY_THE_VALUE else f"{key}={value}")
        default = config.get("sampling_mode") or config.get("model") or runs[0].name
        name = cut(" ".join(parts), 90) or value_text(default)
        found.append(name if name not in found else f"{cut(name, 50)} ({runs[0].name})")
    return found


def differing_keys(configs: list[dict]) -> list[str]:
    """Settings that are not the same in all configs, without those that follow from another one."""
    keys = []
    for key in configs[0]:
        values = {repr(config.get(key)) for config in configs}
        if len(values) > 1:
            keys.append(key)
    found = [key for key in keys if DERIVED_FROM.get(key) not in keys]
    return sorted(found, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))


def value_text(value) -> str:
    """The last part of a path; numbers short."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rstrip("/").removesuffix("/best").split("/")[-1]


# ------------------------------------------------------------------ the table


def cell_of(run: RunData, method: str) -> dict:
    """A run as stats.grid_table() wants it; the result of a search is such a cell already."""
    cell = run.result if run.kind == "search" else run.result | training_cell(run)
    return cell | {"task": run.tasks, "method": method}


def training_cell(run: RunData) -> dict:
    """The best adapter of a finished run, or the mean of the last steps of one that is not.

    Counts are sums over the steps; the row of a step holds means over its episodes.
    """
    final = run.result.get("final")
    if final:
        score = final["best"].get("score_mean", final["best"]["improvement"])
        test = final["best"].get("test_score_mean")
        adapter = "untrained" if final["best_is_untrained"] else "best"
    else:
        last = series(run.rows, f"{score_key(run)}_mean")[-window_of(run.rows) :]
        known = last[~np.isnan(last)]
        score = fmean(known) if len(known) else math.nan
        test, adapter = None, "last steps"
    sizes = series(run.rows, "episodes")
    valid = series(run.rows, "valid_share")
    return {
        "best_score": score,
        "test_score": test,
        "test_minus_validation": None if test is None else test - score,
        "adapter": adapter,
        "nodes": round(np.nansum(sizes)),
        "failed": round(np.nansum((1 - valid) * sizes)),
        "faults": round(np.nansum(series(run.rows, "faults"))),
        "tokens": round(np.nansum(series(run.rows, "reply_tokens") * sizes)),
    }


def comparison(runs: list[RunData], kind: str) -> list[dict]:
    """A row per task and group, see stats.grid_table()."""
    cells = []
    for (found_kind, _), groups in groups_of(runs).items():
        if found_kind == kind:
            cells += [cell_of(run, group.label) for group in groups for run in group.runs]
    return stats.grid_table(cells)


def table(runs: list[RunData]) -> str:
    """What `python viz.py logs/*` prints: training runs first, then searches."""
    tables = [comparison(runs, kind) for kind in PANELS]
    return "\n\n".join(stats.text_of(rows) for rows in tables if rows)


# ------------------------------------------------------------------ pictures


def draw_group_legend(figure, groups: list[Group]):
    """The names of the groups below a figure."""
    from matplotlib.patches import Patch

    handles = []
    for group in groups:
        label = wrapped(f"{group.label} (N={len(group.runs)})", 56)
        handles.append(Patch(color=group.colour, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(groups)))


def plot_groups(groups: list[Group], title: str, path: Path) -> Path:
    """All panels of one kind in one picture."""
    panels = PANELS[groups[0].runs[0].kind]
    lines = sum(1 + len(group.label) // 56 for group in groups) / 3  # of the legend
    height = 1 + 3.8 * grid_of(panels)[0] + 0.2 * lines
    with figure_of(PAGE_WIDTH, height) as figure:
        draw_panels(figure, panels, groups)
        figure.suptitle(title)
        if sum(len(group.runs) for group in groups) > 1:
            draw_group_legend(figure, groups)
        return save(figure, path)


def plot_many(runs: list[RunData], folder: Path, format="png") -> list[Path]:
    """Overlays per kind and task."""
    paths = []
    for (kind, task), groups in groups_of(runs).items():
        title = f"{shorten(task, 60)}: mean over seeds, band: ± standard deviation of the seeds"
        if kind == "grpo":
            title += ", running mean of a sixth of the steps; dotted: not all runs went on"
        if len(groups) > len(COLOURS):
            title += f"; colours repeat after {len(COLOURS)} groups"
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", task)
        paths.append(plot_groups(groups, title, folder / f"compare-{kind}-{name}.{format}"))
    return paths
