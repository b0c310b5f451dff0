"""Compares many runs: overlaid curves and a table.

Runs of the same code, model and config are one group if they differ by their seeds; one run of each
seed counts. No run is dropped in silence: every table and picture says how many runs and failures
are in each of its cells, and the table names the runs that do not count.
"""

from __future__ import annotations

import math
import re
import textwrap
from itertools import cycle
from pathlib import Path
from statistics import fmean

import numpy as np

from flatlab.runs.reader import RunData
from flatlab.view import search_plots, stats
from flatlab.view.plots import (
    BLUE,
    COLOURS,
    PAGE_WIDTH,
    STEPS,
    TRAINING,
    Group,
    cut,
    draw_panels,
    figure_of,
    grid_of,
    keys,
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
PANELS = {
    "grpo": TRAINING,
    "search": search_plots.SEARCH,
    "evaluation": search_plots.EVALUATION,
}

# ------------------------------------------------------------------ groups


def groups_of(runs: list[RunData]) -> dict[tuple[str, str], list[Group]]:
    """(kind, task) -> groups, named by what they differ in.

    A group has the same name and colour on every task, because ranks are means over tasks. Versions
    of a task that differ are tasks of their own: their scores cannot be compared.
    """
    tasks = task_names(runs)
    methods = {}
    for run in runs:
        made_by = method_of(run.config), code_of(run), run.fingerprint.get("model")
        methods.setdefault(run.kind, {}).setdefault(repr(made_by), []).append(run)
    places = {}
    for kind, same in methods.items():
        members = list(same.values())
        for name, colour, found in zip(names(members), cycle(COLOURS), members):
            by_task = {}
            for run in sorted(found, key=lambda run: run.name):
                by_seed = by_task.setdefault(tasks[run.dir], {})
                by_seed.setdefault(run.config["seed"], []).append(run)
            for task, by_seed in by_task.items():
                runs_of_seeds = list(by_seed.values())
                group = Group(name, colour, [first for first, *_ in runs_of_seeds], runs_of_seeds)
                places.setdefault((kind, task), []).append(group)
    return places


def method_of(config: dict) -> dict:
    """The settings that tell groups apart, whatever their task."""
    found = {key: config[key] for key in sorted(config) if key not in NOT_OF_THE_GROUP}
    if len({*found.get("task_weights", ())}) < 2:  # equal ones, as many as there are tasks
        found.pop("task_weights", None)
    return found


def names(groups: list[list[RunData]]) -> list[str]:
    """A unique name for each group: the settings in which they differ, the important ones first,
    and then what differs in their code and their model.
    """
    firsts = [runs[0] for runs in groups]
    configs = [method_of(run.config) for run in firsts]
    keys = differing_keys(configs)
    codes = version_names(firsts, [code_of(run) for run in firsts])
    models = [""] * len(firsts)
    if "model" not in keys:
        models = version_names(firsts, [run.fingerprint.get("model", {}) for run in firsts])
    found = []
    for run, config, code, model in zip(firsts, configs, codes, models):
        parts = []
        for key in keys:
            value = value_text(config.get(key))
            parts.append(value if key in SAY_THE_VALUE else f"{key}={value}")
        mode = config.get("sampling_mode") if run.kind == "search" else None
        default = mode or config.get("model") or run.name
        parts += dict.fromkeys((code, model))
        name = " ".join(filter(None, parts)) or value_text(default)
        if run.changed_files:
            name += " mixed"
        name = cut(name, 90)
        found.append(name if name not in found else f"{cut(name, 50)} ({run.name})")
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


def code_of(run: RunData) -> dict[str, str]:
    """File -> digest; a mixed run has all digests of a file, joined."""
    files = {}
    for version in run.fingerprint.get("code", []):
        for file, digest in version.items():
            files.setdefault(file, {})[digest] = None
    return {file: " ".join(digests) for file, digests in files.items()}


def task_of(run: RunData) -> dict[str, str]:
    """Part -> digest of the run's tasks. The baseline of a single one stands with its value."""
    tasks = run.fingerprint.get("tasks", {})
    parts = {}
    for task, digests in tasks.items():
        prefix = f"{task} " if len(tasks) > 1 else ""
        parts |= {f"{prefix}{part}": digest for part, digest in digests.items()}
    parts.pop("baseline", None)
    return parts | {f"baseline {run.baseline:.4g}": repr(run.baseline)}


def task_names(runs: list[RunData]) -> dict[Path, str]:
    """Run directory -> name of its task, with what differs if the task has several versions."""
    names = {}
    for task in {run.tasks: None for run in runs}:
        same = [run for run in runs if run.tasks == task]
        for run, text in zip(same, version_names(same, list(map(task_of, same)))):
            names[run.dir] = f"{task} ({text})" if text else task
    return names


def version_names(runs: list[RunData], fingerprints: list[dict[str, str]]) -> list[str]:
    """What tells the fingerprint of each run from the others; "" if all are equal.

    These are the parts that are not the same in all. If different versions of the same parts are
    left, the name of a run says which: "mine.py", but "search.py of run-1", "search.py of run-2".
    """
    shared = set.intersection(*(set(version.items()) for version in fingerprints))
    differing = {part for version in fingerprints for part in dict(version.items() - shared)}
    if not differing:
        return [""] * len(runs)
    texts, owners = [], {}
    for run, version in zip(runs, fingerprints):
        text = list_parts(differing & version.keys())
        if not text:
            text = f"without {list_parts(differing)}" if run.fingerprint else "no fingerprint"
        texts.append(text)
        owners.setdefault(text, {}).setdefault(repr(version), run.name)
    names = []
    for text, version in zip(texts, fingerprints):
        is_unique = len(owners[text]) == 1
        names.append(text if is_unique else f"{text} of {owners[text][repr(version)]}")
    return names


def list_parts(parts: set[str]) -> str:
    """At most two names and the number of the others; files of the main folder come first."""
    names = sorted(parts, key=lambda part: (part.count("/"), part))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def value_text(value) -> str:
    """The last part of a path; numbers short."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rstrip("/").removesuffix("/best").split("/")[-1]


# ------------------------------------------------------------------ the table


def cell_of(run: RunData, task: str, method: str) -> dict:
    """A run as stats.grid_table() wants it."""
    numbers = training_cell(run) if run.kind == "grpo" else {}
    return run.result | numbers | {"task": task, "method": method}


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
    for (found_kind, task), groups in groups_of(runs).items():
        if found_kind == kind:
            cells += [cell_of(run, task, group.label) for group in groups for run in group.runs]
    return stats.grid_table(cells)


def table(runs: list[RunData]) -> str:
    """What `python viz.py logs/*` prints: training runs, searches, evaluations."""
    tables = [comparison(runs, kind) for kind in PANELS]
    parts = [stats.text_of(rows) for rows in tables if rows]
    return "\n\n".join(parts + ["\n".join(remarks(runs))]).rstrip()


def remarks(runs: list[RunData]) -> list[str]:
    """The runs that do not count because of their seed, and those whose code changed."""
    found = []
    for (_, task), groups in groups_of(runs).items():
        for group in groups:
            for first, *others in group.runs_of_seeds:
                if others:
                    found.append(
                        f"{task} {group.label}: seed {first.config['seed']} counts once, as "
                        f"{first.name}; not counted: {', '.join(run.name for run in others)}"
                    )
    for run in runs:
        if run.changed_files:
            files = ", ".join(run.changed_files)
            found.append(f"{run.name} is mixed: while it went on, its code changed ({files})")
    return found


# ------------------------------------------------------------------ pictures


def draw_group_legend(figure, groups: list[Group]):
    """The numbers and names of the groups below a figure."""
    from matplotlib.patches import Patch

    handles = []
    for number, group in enumerate(groups, 1):
        label = wrapped(f"{number}: {group.label} (N={len(group.runs)})", 56)
        handles.append(Patch(color=group.colour, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(groups)))


def plot_groups(groups: list[Group], title: str, path: Path) -> Path:
    """All panels of one kind in one picture."""
    panels = list(PANELS[groups[0].runs[0].kind])
    shown = [key for group in groups for run in group.runs for key in run.result.get("shown", ())]
    panels += [(key, STEPS, key, keys((key, "", BLUE))) for key in dict.fromkeys(shown)]
    lines = sum(1 + len(group.label) // 56 for group in groups) / 3  # of the legend
    height = 1 + 3.8 * grid_of(panels)[0] + 0.2 * lines
    width = PAGE_WIDTH if len(panels) > 1 else 10.0
    with figure_of(width, height) as figure:
        draw_panels(figure, panels, groups)
        figure.suptitle(textwrap.fill(title, int(12 * width)))
        if sum(len(group.runs) for group in groups) > 1:
            draw_group_legend(figure, groups)
        return save(figure, path)


def plot_many(runs: list[RunData], folder: Path, format="png") -> list[Path]:
    """Overlays per kind and task."""
    paths = []
    for (kind, task), groups in groups_of(runs).items():
        title = f"{shorten(task, 60)}: mean over seeds, band: ± standard deviation of the seeds"
        if kind == "evaluation":
            title = f"{shorten(task, 60)}: episodes of evaluations"
        if kind == "grpo":
            title += ", running mean of a sixth of the steps; dotted: not all runs went on"
        if len(groups) > len(COLOURS):
            title += f"; colours repeat after {len(COLOURS)} groups"
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", task)
        paths.append(plot_groups(groups, title, folder / f"compare-{kind}-{name}.{format}"))
    return paths
