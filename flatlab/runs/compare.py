"""Compares many runs: overlaid curves, a table, heat map, ranks and performance profiles.

Runs with the same config but for the seed are one group. No run is dropped: every table and picture
says how many runs and failures are in each of its cells.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np

from flatlab.runs import search_plots, stats
from flatlab.runs.plots import (
    BLUE,
    COLOURS,
    GREY,
    PAGE_WIDTH,
    TRAINING,
    Group,
    adapter_results,
    best_is_untrained,
    draw_panels,
    evaluated_score,
    figure_of,
    mean,
    save,
    score_key,
    series,
    shorten,
    window_of,
    wrapped,
)
from flatlab.runs.reader import RunData, number

# Settings that do not change what is measured
NOT_OF_THE_GROUP = {
    "seed",
    "name",
    "workers",
    "concurrency",
    "keep_checkpoints",
    "price",
    "url",
    "eval_episodes",
    "backend",
    "mlgym_root",
    "mledojo_root",
    "tensorboard",
    "wandb",
    "sandboxes",
    "checkpoints",
}
# Settings that follow from another one unless the user sets them: key -> the other one
DERIVED_FROM = {
    "clip_low": "loss",
    "clip_high": "loss",
    "max_groups": "groups",
    "task_weights": "task",
    "lr": "model",
    "context": "model",
    "max_reply_tokens": "model",
    "max_observation_tokens": "model",
    "micro_tokens": "model",
}
FIRST = ("loss", "reward", "advantage", "select", "sampling_mode", "model")  # in labels
SAY_THE_VALUE = {"loss", "select", "sampling_mode", "model"}  # clear without "key="
PANELS = {"grpo": (TRAINING, 4), "search": (search_plots.SEARCH, 3)}  # and columns

# ------------------------------------------------------------------ groups


def groups_of(runs: list[RunData]) -> dict[tuple[str, str], list[Group]]:
    """(kind, task) -> groups, named by the settings in which they differ."""
    places = {}
    for run in runs:
        config = {key: run.config[key] for key in sorted({*run.config} - NOT_OF_THE_GROUP)}
        groups = places.setdefault((run.kind, run.tasks), {})
        groups.setdefault(repr(config), []).append(run)
    found = {}
    for place, groups in places.items():
        members = list(groups.values())
        labels = zip(names(members), colours(len(members)), members)
        found[place] = [Group(*parts) for parts in labels]
    return found


def colours(count: int) -> list[str]:
    """Colours that can be told apart; beyond the palette, equal steps through a colour map."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colour) for colour in colormaps["turbo"](np.linspace(0.03, 0.97, count))]


def names(groups: list[list[RunData]]) -> list[str]:
    """A unique name for each group: the settings in which they differ, the important ones first."""
    configs = [runs[0].config for runs in groups]
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
    """Settings that are not the same in all configs, without those that follow from another one.

    A setting that some configs do not have is not one either: another version wrote them.
    """
    found = []
    for key in configs[0]:
        if not all(key in config for config in configs):
            continue
        values = {repr(config[key]) for config in configs}
        if key not in NOT_OF_THE_GROUP and len(values) > 1 and not follows(key, configs):
            found.append(key)
    return sorted(found, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))


def follows(key: str, configs: list[dict]) -> bool:
    """True if `key` has one value for each value of the setting that it is derived from."""
    if key not in DERIVED_FROM:
        return False
    values = {}
    for config in configs:
        source = repr(config.get(DERIVED_FROM[key]))
        values.setdefault(source, set()).add(repr(config.get(key)))
    return all(len(each) == 1 for each in values.values())


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def value_text(value) -> str:
    """The last part of a path; numbers short."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rstrip("/").removesuffix("/best").split("/")[-1]


# ------------------------------------------------------------------ the table


def cell_of(run: RunData, method: str) -> dict:
    """A run as stats.grid_table() wants it."""
    cell = {
        "task": run.tasks,
        "method": method,
        "higher_is_better": run.higher_is_better,
        "baseline": run.baseline or 0.0,
        "reference": number(run.result.get("reference")),
        "selected_on_test": bool(run.result.get("selected_on_test")),
    }
    return cell | (search_cell(run) if run.kind == "search" else training_cell(run))


def search_cell(run: RunData) -> dict:
    curve = search_plots.best_so_far(run, "nodes")
    outcomes = [search_plots.outcome_of(row) for row in run.rows]
    return {
        "best_score": curve[-1][1] if curve else math.nan,
        "test_score": number(run.result.get("test_score")),
        "test_minus_validation": number(run.result.get("test_minus_validation")),
        "best_id": run.result.get("best_id", "0"),
        "sampling_modes_used": run.result.get("sampling_modes_used"),
        "nodes": len(run.rows),
        "failed": outcomes.count("failed"),
        "faults": outcomes.count("fault"),
        "tokens": int(np.nansum(series(run.rows, "tokens"))),
        "seconds": float(np.nan_to_num(series(run.rows, "elapsed")).max()),
    }


def training_cell(run: RunData) -> dict:
    """The best adapter of a finished run, or the mean of the last steps of one that is not."""
    group = Group("", BLUE, [run])
    results = adapter_results([run])
    chosen = results.get("best") or results.get("after")
    if chosen:
        score = evaluated_score(chosen[0])[0]
        test = evaluated_score(chosen[0], test=True)[0]
        adapter = "untrained" if best_is_untrained(run.result) else "best"
    else:
        last = series(run.rows, f"{score_key([group])}_mean")[-window_of(run.rows) :]
        score, test, adapter = mean(last), None, "last steps"
    score = math.nan if score is None else score
    return training_counts(run) | {
        "best_score": score,
        "test_score": test,
        "test_minus_validation": None if test is None else test - score,
        "best_id": adapter,
        "adapter": adapter,
    }


def training_counts(run: RunData) -> dict:
    """Sums over the steps; the row of a step holds means over its episodes."""
    groups = number(run.config.get("groups")) or 1
    sizes = series(run.rows, "episodes")
    sizes[np.isnan(sizes)] = groups * (number(run.config.get("group_size")) or 1)
    valid = np.nan_to_num(series(run.rows, "valid_share"))
    return {
        "nodes": round(sizes.sum()),
        "failed": round(((1 - valid) * sizes).sum()),
        "faults": round(np.nansum(series(run.rows, "faults"))),
        "tokens": round(np.nansum(series(run.rows, "reply_tokens") * sizes)),
        "seconds": float(np.nansum(series(run.rows, "seconds"))),
    }


def comparison(runs: list[RunData], kind: str) -> list[dict]:
    """A row per task and group, see stats.grid_table()."""
    cells = []
    for (found_kind, _), groups in groups_of(runs).items():
        if found_kind == kind:
            cells += [cell_of(run, group.label) for group in groups for run in group.runs]
    return stats.grid_table(cells)


def table(runs: list[RunData]) -> str:
    """What `python viz.py logs/*` prints."""
    parts = []
    for kind, what, done in (("grpo", "trained", "episodes"), ("search", "searched", "nodes")):
        rows = comparison(runs, kind)
        if rows:
            parts.append(stats.text_of(rows, what, done))
    return "\n\n".join(parts)


# ------------------------------------------------ performance profiles (MLGym, arXiv 2502.14499)


def ratios(
    scores: dict[str, float | None], higher_is_better: bool, baseline: float
) -> dict[str, float]:
    """One task: method -> how many times worse than the best, 1 for the best.

    A method is infeasible if it has no score, a negative one, or one worse than the baseline. It
    gets 1.05 times the worst ratio of the others. By this published rule a task with negative
    scores hardly tells methods apart.
    """

    def feasible(score):
        if score is None or score < 0:
            return False
        return score >= baseline if higher_is_better else score <= baseline

    there = {method: score for method, score in scores.items() if feasible(score)}
    best = (max if higher_is_better else min)(there.values(), default=1.0)
    found = {}
    for method, score in there.items():
        above, below = (best, score) if higher_is_better else (score, best)
        if below:
            found[method] = above / below
        else:
            found[method] = 1.0 if above == below else math.inf
    worst = max((ratio for ratio in found.values() if math.isfinite(ratio)), default=1.0)
    for method in scores:
        if not math.isfinite(found.get(method, math.inf)):
            found[method] = 1.05 * worst
    return found


def profiles(
    table: dict[str, dict[str, float | None]],
    higher_is_better: dict[str, bool],
    baseline="baseline",
    end=None,
    points=500,
):
    """rho(tau), the share of tasks whose log10 ratio is at most tau.

    table: task -> method -> score; the method `baseline` is among them. end: the largest tau, to
    compare with other tables. Returns taus, shape (points,), and method -> rho, shape (points,).
    """
    by_task = {}
    for task, scores in table.items():
        by_task[task] = ratios(scores, higher_is_better[task], scores[baseline])
    largest = math.ceil(1.05 * max(max(found.values()) for found in by_task.values()))
    end = end or math.ceil(10 * math.log10(largest) - 1e-9) / 10 or 0.1
    taus = np.linspace(0, end, points)
    methods = dict.fromkeys(method for scores in table.values() for method in scores)
    rhos = {}
    for method in methods:
        logs = np.log10([found[method] for found in by_task.values()])
        rhos[method] = (logs[:, None] <= taus).mean(0)
    return taus, rhos


def aup(taus, rho) -> float:
    """Area under a performance profile: a step function that holds its left value."""
    return float(np.sum(np.diff(taus) * rho[:-1]))


# ------------------------------------------------------------------ pictures


def methods_by_rank(rows) -> list[str]:
    """Best mean place first: the order of the heat map and of the ranks beside it."""
    rank = {row["method"]: row["rank"] for row in rows}
    return sorted(rank, key=lambda method: rank[method])


def draw_heat_map(axis, figure, rows, done):
    """Methods down, tasks to the right; colour: improvement; text: mean score, N, failures."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = methods_by_rank(rows)
    values = np.full((len(methods), len(tasks)), np.nan)
    for row in rows:
        values[methods.index(row["method"]), tasks.index(row["task"])] = row["improvement"]
    limit = max(0.1, np.nanmax(np.abs(values), initial=0.0))
    image = axis.imshow(values, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
    for row in rows:
        spread = "" if row["std"] is None else f" ± {row['std']:.3g}"
        faults = f", {row['faults']} faults" if row["faults"] else ""
        adapter = f", {row['adapter']}" if row["adapter"] else ""
        lines = [
            f"{row['mean']:.4g}{spread}   N={row['n']}{adapter}",
            f"{row['failed']} of {row['nodes']} {done} failed{faults}",
        ]
        axis.text(
            tasks.index(row["task"]),
            methods.index(row["method"]),
            "\n".join(lines),
            ha="center",
            va="center",
            fontsize=8 if len(tasks) < 3 else 6.5,
            color="white" if abs(row["improvement"]) > 0.7 * limit else "black",
        )
    axis.set_xticks(range(len(tasks)), [wrapped(task, 24) for task in tasks])
    labels = [wrapped(method, 36) for method in methods]
    axis.set_yticks(range(len(methods)), labels, fontsize=9 if len(methods) < 13 else 7)
    axis.grid(False)
    axis.set_title("Mean score ± standard deviation, N runs, failures", loc="left")
    label = "improvement (0 baseline, 1 reference)"
    figure.colorbar(image, ax=axis, label=label, shrink=0.9)


def draw_ranks(axis, rows):
    """Mean place of each group over the tasks; 1 is best."""
    rank = {row["method"]: (row["rank"], row["rank_tasks"]) for row in rows}
    methods = methods_by_rank(rows)
    for place, method in enumerate(methods):
        value, count = rank[method]
        axis.hlines(place, 1, value, color="#cccccc", linewidth=2)
        axis.scatter(value, place, s=60, color=BLUE, zorder=3)
        text = f"{value:.2f} (N={count})"
        axis.annotate(text, (value, place), (7, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(methods)), [""] * len(methods))
    axis.set(title="Average rank", xlabel="mean place over N tasks, 1 is best")
    axis.set_xlim(0.8, len(methods) * 1.3 + 0.5)
    axis.set_ylim(len(methods) - 0.5, -0.5)


def draw_profiles(axis, rows, cells):
    """Performance profiles of the groups and of the baseline over the tasks, AUP in the legend."""
    methods = methods_by_rank(rows)
    scores, higher = {}, {}
    for cell in cells:
        empty = dict.fromkeys(methods)
        scores.setdefault(cell["task"], empty | {"baseline": cell["baseline"]})
        higher[cell["task"]] = cell["higher_is_better"]
    for row in rows:
        scores[row["task"]][row["method"]] = row["mean"]
    taus, rhos = profiles(scores, higher)
    ordered = sorted(rhos, key=lambda method: -aup(taus, rhos[method]))
    for place, (method, colour) in enumerate(zip(ordered, colours(len(ordered)))):
        is_baseline = method == "baseline"
        axis.step(
            taus,
            rhos[method],
            where="post",
            linewidth=2,
            color=GREY if is_baseline else colour,
            linestyle=":" if is_baseline else "-",
            label=wrapped(f"{method}: AUP {aup(taus, rhos[method]):.3f}", 36)
            if place < 12
            else None,
        )
    axis.set(
        title=f"Performance profiles (N={len(scores)} tasks)",
        xlabel="log10 of the ratio to the best",
        ylabel="share of tasks",
        ylim=(-0.03, 1.05),
    )
    axis.legend(title="the best 12" if len(ordered) > 12 else None, fontsize=8)


def sheet_size(rows) -> tuple[float, float]:
    """Width and height in inches of what draw_sheet() draws."""
    return PAGE_WIDTH, max(4.5, 0.55 * len({row["method"] for row in rows}) + 1.5)


def draw_sheet(figure, runs, kind):
    """Heat map of all runs of a kind; with several tasks also ranks and performance profiles."""
    rows = comparison(runs, kind)
    done = "episodes" if kind == "grpo" else "nodes"
    tasks = len({row["task"] for row in rows})
    if tasks == 1:
        return draw_heat_map(figure.subplots(), figure, rows, done)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.2 + 0.4 * tasks, 0.8, 1.1])
    draw_heat_map(left, figure, rows, done)
    draw_ranks(middle, rows)
    draw_profiles(right, rows, [cell_of(run, "") for run in runs if run.kind == kind])


def draw_group_legend(figure, groups: list[Group], columns=3):
    """The names of the groups below a figure."""
    from matplotlib.lines import Line2D

    handles = []
    for group in groups:
        count = len(group.runs)
        label = wrapped(f"{group.label} (N={count} run{'s' * (count > 1)})", 56)
        handles.append(Line2D([], [], color=group.colour, linewidth=3, label=label))
    size = 10 if len(groups) <= 9 else 8
    columns = min(columns, len(groups))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=size)


def overlay_size(kind: str, groups: list[Group]) -> tuple[float, float]:
    """Width and height in inches: room for the legend below the panels."""
    lines = sum(1 + len(group.label) // 56 for group in groups) / 3
    return PAGE_WIDTH, (11 if kind == "grpo" else 8) + 0.2 * lines


def plot_many(runs: list[RunData], folder: Path, format="png") -> list[Path]:
    """Overlays per kind and task, and per kind a sheet that compares across tasks."""
    paths = []
    grouped = groups_of(runs)
    for (kind, task), groups in grouped.items():
        panels, columns = PANELS[kind]
        title = f"{shorten(task, 60)}: mean over seeds, band: ± standard deviation of the seeds"
        if kind == "grpo":
            title += ", running mean of a sixth of the steps; dotted: not all runs went on"
        with figure_of(*overlay_size(kind, groups)) as figure:
            draw_panels(figure, panels, groups, columns)
            figure.suptitle(title)
            draw_group_legend(figure, groups)
            name = re.sub(r"[^A-Za-z0-9_.-]", "-", task)
            paths.append(save(figure, folder / f"compare-{kind}-{name}.{format}"))
    for kind in sorted({kind for kind, _ in grouped}):
        rows = comparison(runs, kind)
        if len(rows) > 1:
            with figure_of(*sheet_size(rows)) as figure:
                draw_sheet(figure, runs, kind)
                paths.append(save(figure, folder / f"grid-{kind}.{format}"))
    return paths
