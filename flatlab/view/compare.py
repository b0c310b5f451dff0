"""Groups of runs: a table that compares them, and their pictures; a single run is a group as well.

Runs of the same code, model and config are one group if they differ by their seeds; one run of each
seed counts. No run is dropped in silence: every table and picture says how many runs and failures
are in each of its cells, and the table names the runs that do not count.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np

from flatlab.runs.reader import RunData, read_run, value_text
from flatlab.view import plots, search_plots, stats
from flatlab.view.plots import COLOURS, RunGroup, cut, series, shorten

# Settings that do not change what is measured
NOT_OF_THE_GROUP = set(
    """task seed name workers concurrency price url eval_episodes backend
    trackers""".split()
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
    "weights": "model",
}
FIRST = ("loss", "reward", "advantage", "select", "sampling_mode", "model")  # in labels
SAY_THE_VALUE = {"loss", "select", "sampling_mode", "model", "rule_args"}  # clear without "key="
PANELS = {
    "grpo": plots.TRAINING,
    "search": search_plots.SEARCH,
    "evaluation": search_plots.EVALUATION,
}

TITLES = {
    "grpo": "mean over seeds, running mean of a sixth of the steps, band: ± standard deviation of "
    "the seeds; dotted: not all runs went on",
    "search": "mean over seeds, band: ± standard deviation of the seeds",
    "evaluation": "episodes of evaluations",
}

# ------------------------------------------------------------------ groups


def groups_of(runs: list[RunData]) -> dict[tuple[str, str], list[RunGroup]]:
    """(kind, task) -> groups, labelled by what they differ in.

    A group has the same label and colour on every task, because ranks are means over tasks.
    Versions of a task that differ are tasks of their own: their scores cannot be compared.
    """
    tasks = {}
    for name in dict.fromkeys(run.tasks for run in runs):
        versions = distinguish([run for run in runs if run.tasks == name], task_facts)
        for label, same in versions.items():
            tasks |= {run.dir: f"{name} ({label})" if label else name for run in same}
    groups = {}
    for kind in PANELS:
        methods = distinguish([run for run in runs if run.kind == kind], method_facts)
        for (label, same), colour in zip(methods.items(), cycle(COLOURS)):
            setting = same[0].config.get("sampling_mode" if kind == "search" else "model")
            label = label or value_text(setting or same[0].name)
            if same[0].is_mixed:
                label += " mixed"
            by_task = {}
            for run in sorted(same, key=lambda run: run.name):
                group = by_task.setdefault(tasks[run.dir], RunGroup(label, colour, []))
                seeds = [other.config["seed"] for other in group.runs]
                counted = group.repeated if run.config["seed"] in seeds else group.runs
                counted.append(run)
            for task, group in by_task.items():
                groups.setdefault((kind, task), []).append(group)
    return groups


def distinguish(runs: list[RunData], facts_of: Callable) -> dict[str, list[RunData]]:
    """Label -> the runs that have the same facts. The label names the facts that are not the same
    in all runs; "" if there are none.
    """
    by_facts = {}
    for run in runs:
        by_facts.setdefault(repr(facts_of(run)), []).append(run)
    facts = [facts_of(same[0]) for same in by_facts.values()]
    keys = differing_keys(facts)
    labelled = {}
    for fact, same in zip(facts, by_facts.values()):
        parts = []
        for key in keys:
            if fact.get(key) not in (None, []):
                value = value_text(fact[key])
                parts.append(value if key in SAY_THE_VALUE else f"{key}={value}")
        label = cut(" ".join(parts), 60)
        if label in labelled:
            label = f"{cut(label, 40)} ({same[0].name})".lstrip()
        labelled[label] = same
    return labelled


def differing_keys(facts: list[dict]) -> list[str]:
    """The keys that are not equal in all, without those that follow from another one.

    The settings of FIRST come first, then the others, then files, those of the main folder first.
    """
    keys = []
    for key in dict.fromkeys(key for fact in facts for key in fact):
        if len({repr(fact.get(key)) for fact in facts}) > 1:
            keys.append(key)

    def rank(key):
        return FIRST.index(key) if key in FIRST else len(FIRST) + key.count("/")

    return sorted([key for key in keys if DERIVED_FROM.get(key) not in keys], key=rank)


def method_facts(run: RunData) -> dict:
    """What tells groups apart, whatever their task: settings, and the first digits of the digests
    of code and model; a mixed run has several of the code.
    """
    facts = {key: run.config[key] for key in sorted(run.config) if key not in NOT_OF_THE_GROUP}
    if len({*facts.get("task_weights", ())}) < 2:  # equal ones, as many as there are tasks
        facts.pop("task_weights", None)
    facts["code"] = " ".join(code[:6] for code in run.fingerprint.get("code", []))
    facts["weights"] = run.fingerprint.get("model", "")[:6]
    return facts


def task_facts(run: RunData) -> dict:
    """What the tasks of a run consist of: the first digits of their digest, and the baseline."""
    return {"baseline": run.baseline, "version": run.fingerprint.get("task", "")[:6]}


# ------------------------------------------------------------------ the table


def training_cell(run: RunData) -> dict:
    """The best adapter of a finished run, or the mean of the last steps of one that is not.

    Counts are sums over the steps; the row of a step holds means over its episodes.
    """
    import pandas

    final = run.result.get("final")
    if final:
        score = final["best"].get("score_mean", final["best"]["improvement"])
        test = final["best"].get("test_score_mean")
        adapter = "untrained" if final["best_is_untrained"] else "best"
    else:
        last = series(run.rows, f"{plots.score_key(run)}_mean")[-plots.window_of(run.rows) :]
        score = pandas.Series(last).mean()
        test, adapter = None, "last steps"
    episodes = series(run.rows, "episodes")
    failed = episodes * (1 - series(run.rows, "valid_share"))
    tokens = episodes * series(run.rows, "reply_tokens")
    return {
        "best_score": score,
        "test_score": test,
        "adapter": adapter,
        "nodes": round(np.nansum(episodes)),
        "failed": round(np.nansum(failed)),
        "faults": round(np.nansum(series(run.rows, "faults"))),
        "tokens": round(np.nansum(tokens)),
    }


def comparison(runs: list[RunData], kind: str) -> list[dict]:
    """A row per task and group, see stats.grid_table()."""
    cells = []
    for (group_kind, task), groups in groups_of(runs).items():
        for group in groups if group_kind == kind else ():
            for run in group.runs:
                numbers = training_cell(run) if kind == "grpo" else {}
                cells.append(run.result | numbers | {"task": task, "method": group.label})
    return stats.grid_table(cells)


def table(runs: list[RunData]) -> str:
    """What `python viz.py logs/*` prints: training runs, searches, evaluations."""
    tables = [comparison(runs, kind) for kind in PANELS]
    parts = [stats.text_of(rows) for rows in tables if rows]
    return "\n\n".join(parts + ["\n".join(remarks(runs))]).rstrip()


def remarks(runs: list[RunData]) -> list[str]:
    """The runs that do not count because of their seed, and those whose code changed."""
    sentences = []
    for (_, task), groups in groups_of(runs).items():
        for group in groups:
            if repeated := ", ".join(run.name for run in group.repeated):
                sentences.append(
                    f"{task} {group.label}: every seed counts once; not counted: {repeated}"
                )
    for run in runs:
        if run.is_mixed:
            sentences.append(f"{run.name} is mixed: while it went on, its code changed")
    return sentences


# ------------------------------------------------------------------ pictures


def draw_group_legend(figure, groups: list[RunGroup]):
    """The numbers and labels of the groups below a figure."""
    from matplotlib.patches import Patch

    handles = []
    for number, group in enumerate(groups, 1):
        label = shorten(f"{number}: {group.label} (N={len(group.runs)})", 80)
        handles.append(Patch(color=group.colour, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(groups)))


def plot_groups(groups: list[RunGroup], title: str, path: Path) -> Path:
    """All panels of one kind in one picture."""
    runs = [run for group in groups for run in group.runs]
    panels = list(PANELS[runs[0].kind])
    if any(run.config.get("ahead") for run in runs):
        panels.append(plots.OVERLAP)
    height = 1 + 3.8 * plots.grid_of(panels)[0] + 0.1 * len(groups)
    width = plots.PAGE_WIDTH if len(panels) > 1 else 10.0
    with plots.figure_of(width, height) as figure:
        plots.draw_panels(figure, panels, groups)
        plots.set_title(figure, title)
        if len(runs) > 1:
            draw_group_legend(figure, groups)
        return plots.save(figure, path)


def plot_many(runs: list[RunData], folder: Path, format="png") -> list[Path]:
    """Overlays per kind and task."""
    paths = []
    for (kind, task), groups in groups_of(runs).items():
        title = f"{cut(task, 60)}: {TITLES[kind]}"
        if len(groups) > len(COLOURS):
            title += f"; colours repeat after {len(COLOURS)} groups"
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", task)
        paths.append(plot_groups(groups, title, folder / f"compare-{kind}-{name}.{format}"))
    return paths


# ------------------------------------------------------------------ pictures of one run


def plot(run: RunData, format="png") -> list[Path]:
    """Draws the pictures of one run into its directory: curves, or the tree and search."""
    curves = "curves" if run.kind == "grpo" else "search"
    paths = [plot_curves(run, run.dir / f"{curves}.{format}")]
    if run.kind != "search":
        return paths
    with plots.figure_of(*search_plots.tree_size(run)) as figure:
        search_plots.draw_tree(figure, run)
        plots.set_title(figure, plots.heading(run))
        return [plots.save(figure, run.dir / f"tree.{format}"), *paths]


def plot_curves(run: RunData, path: Path) -> Path:
    """All panels of one run."""
    group = RunGroup(run.name, plots.BLUE, [run])
    title = plots.heading(run)
    if run.kind == "grpo":
        title += f"   (bold: running mean of {plots.window_of(run.rows)} steps)"
    return plot_groups([group], title, path)


def plot_now_and_then(run, always: bool = False) -> None:
    """Refreshes the pictures of an open Run, but spends at most a twentieth of the time on it."""
    start = time.monotonic()
    if always or start > run.plot_again:
        plot(read_run(run.dir))
        now = time.monotonic()
        run.plot_again = now + 20 * (now - start)
