"""Plots of training runs, and what all plots share: style, panels, figures, files.

Every panel takes groups. One group with one run is drawn thin with a bold running mean; several runs in a group become
their mean and a band of one standard deviation. matplotlib is imported inside functions: nothing else here is slow.
"""

import math
import os
import re
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

from flatlab.runs.reader import RunData, duration, number
from flatlab.runs.store import temporary

# Okabe and Ito's colours: told apart with any kind of colour vision, and in grey print
BLACK, ORANGE, GREEN, BLUE, RED, PINK, SKY = (
    "#000000",
    "#E69F00",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
)
COLOURS = [BLUE, RED, GREEN, ORANGE, PINK, SKY, BLACK]
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 9,
    "legend.framealpha": 0.7,
    "figure.dpi": 110,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


@dataclass
class Group:
    """Runs with the same config but for the seed."""

    label: str
    colour: str
    runs: list[RunData]


# ------------------------------------------------------------------ numbers


def series(rows: list[dict], key: str) -> list[float]:
    """One number per row; NaN where a row has none."""
    values = [row.get(key) for row in rows]
    return [float(v) if isinstance(v, (int, float)) else math.nan for v in values]


def mean(values: list[float]) -> float:
    """Mean of the numbers that are there; NaN for none."""
    there = [v for v in values if not math.isnan(v)]
    return sum(there) / len(there) if there else math.nan


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean of the `window` values around each one (fewer at both ends): no lag against the curve."""
    before = (window - 1) // 2
    return [mean(values[max(0, i - before) : i - before + window]) for i in range(len(values))]


def window_of(rows: list) -> int:
    """Steps to average over: a sixth of the run, at most 20."""
    return max(1, min(20, len(rows) // 6))


def spread(columns: list[list[float]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation (N - 1) at each place over runs, of those that have a number there."""
    mids, stds = [], []
    for values in zip(*columns):
        there = [v for v in values if not math.isnan(v)]
        mids.append(mean(there))
        stds.append(deviation(there))
    return mids, stds


def deviation(values: list[float]) -> float:
    """Standard deviation (N - 1); 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def by_step(group: Group, key: str) -> tuple[list[int], list[list[float]]]:
    """All steps of the group's runs, and each run's values there (NaN: none)."""
    tables = [
        dict(zip((row["step"] for row in run.rows), series(run.rows, key))) for run in group.runs
    ]
    steps = sorted(set().union(*tables))
    return steps, [[table.get(step, math.nan) for step in steps] for table in tables]


def measured(steps, mids, stds) -> tuple[list, list, list]:
    """Without the places where nothing was measured: evaluations come every few steps only."""
    kept = [place for place in zip(steps, mids, stds) if not math.isnan(place[1])]
    return tuple(list(column) for column in zip(*kept)) if kept else ([], [], [])


def task_of(record: RunData) -> str:
    """The task of a run, or several of them."""
    found = record.config.get("task") or record.result.get("task") or "?"
    return "+".join(map(str, found)) if isinstance(found, list) else str(found)


# ------------------------------------------------------------------ panels of a training run


def draw_key(axis, groups, key, label="", colour=None, dashed=False):
    """One quantity per step. `colour` counts when there is one group only; several have their own."""
    for group in groups:
        steps, columns = by_step(group, key)
        mids, stds = spread(columns)
        whole = max(
            (step for step, *values in zip(steps, *columns) if not any(map(math.isnan, values))),
            default=math.inf,
        )
        steps, mids, stds = measured(steps, mids, stds)
        if not steps:
            continue
        window = window_of(steps)
        look = {
            "color": colour if colour and len(groups) == 1 else group.colour,
            "linestyle": "--" if dashed else "-",
        }
        if len(group.runs) == 1:
            axis.plot(
                steps, mids, alpha=0.3, linewidth=1, marker="." if len(steps) < 40 else None, **look
            )
        else:
            mids, stds = running_mean(mids, window), running_mean(stds, window)
            count = sum(
                step <= whole for step in steps
            )  # from there on the mean is of the runs that went on
            axis.plot(
                steps[count - 1 :],
                mids[count - 1 :],
                linewidth=1,
                alpha=0.6,
                **look | {"linestyle": ":"},
            )
            steps, mids, stds = steps[:count], mids[:count], stds[:count]
            axis.fill_between(
                steps,
                [m - s for m, s in zip(mids, stds)],
                [m + s for m, s in zip(mids, stds)],
                color=look["color"],
                alpha=0.15,
                linewidth=0,
            )
        axis.plot(
            steps,
            mids if len(group.runs) > 1 else running_mean(mids, window),
            linewidth=2.2,
            label=label if len(groups) == 1 else None,
            **look,
        )
    if (
        len(groups) > 1 and label
    ):  # groups have their names below the figure; here only what the line style means
        axis.plot([], [], color="#888888", linestyle="--" if dashed else "-", label=label)


def draw_score(axis, groups):
    draw_key(axis, groups, "score_mean", "mean", BLUE)
    if len(groups) == 1:
        draw_key(axis, groups, "score_best", "best of the step", ORANGE)
    if any(
        number(row.get("eval_score_mean")) is not None
        for group in groups
        for run in group.runs
        for row in run.rows
    ):
        draw_key(axis, groups, "eval_score_mean", "evaluation episodes", PINK, dashed=True)
    for group in groups:
        draw_evaluations(axis, group, RED if len(groups) == 1 else group.colour, len(groups) == 1)
    draw_baseline(axis, groups)


def draw_evaluations(axis, group, colour, with_label):
    """Mean scores before training, after --sft, and after training, on the validation part and, where measured, on the held-out part."""
    steps = by_step(group, "score_mean")[0]
    for key, mark, part in ("mean", "D", "validation"), ("test_mean", "*", "held-out test"):
        texts = []
        gap = 0 if key == "mean" else max(1, len(steps) / 25)  # beside the other mark, not over it
        for when, x in (
            ("before", steps[0] - 1 - gap),
            ("imitated", steps[0] - 0.5),
            ("after", steps[-1] + 1 + gap),
        ):
            found = [
                run.result[when] for run in group.runs if isinstance(run.result.get(when), dict)
            ]
            values = [v for each in found if (v := number(each.get(key))) is not None]
            if values:
                alone = len(values) == 1
                error = (
                    deviation(values)
                    if not alone
                    else number(found[0].get("stderr"))
                    if key == "mean"
                    else None
                )
                axis.errorbar(
                    x,
                    mean(values),
                    error,
                    fmt=mark,
                    capsize=3,
                    markersize=10 if mark == "*" else 6,
                    color=colour,
                    markerfacecolor="white" if mark == "*" else colour,
                    zorder=4,
                )
                texts.append(f"{when} {mean(values):.4g}")
                count = f"N={found[0].get('n')}" if alone else f"N={len(values)} seeds"
        if texts and with_label:
            axis.errorbar(
                [],
                [],
                fmt=mark,
                color=colour,
                markerfacecolor="white" if mark == "*" else colour,
                label=f"{part} ({count})\n{textwrap.fill(', '.join(texts), 30)}",
            )


def draw_baseline(axis, groups):
    result = groups[0].runs[0].result
    better = {True: ", higher is better", False: ", lower is better"}.get(
        result.get("higher_is_better"), ""
    )
    axis.set_ylabel(shorten(result.get("metric", "score"), 40) + better)
    if number(result.get("baseline")) is not None:
        axis.axhline(
            result["baseline"],
            color="#888888",
            linestyle=":",
            linewidth=1.5,
            label=f"baseline {result['baseline']:.4g}",
        )


def draw_reward(axis, groups):
    draw_key(axis, groups, "reward_mean", "mean", GREEN)
    if len(groups) == 1 and len(groups[0].runs) == 1:
        rows = groups[0].runs[0].rows
        mid, std = series(rows, "reward_mean"), series(rows, "reward_std")
        axis.fill_between(
            [row["step"] for row in rows],
            [m - s for m, s in zip(mid, std)],
            [m + s for m, s in zip(mid, std)],
            color=GREEN,
            alpha=0.12,
            linewidth=0,
            label="± standard deviation of the episodes",
        )


def draw_logprob_diff(axis, groups):
    draw_key(axis, groups, "logprob_diff_max", "largest of the step", PINK)
    axis.axhspan(1e-7, 1e-4, color=GREEN, alpha=0.08, linewidth=0, label="goal in fp32: below 1e-4")
    axis.set_yscale("log")


def draw_seconds(axis, groups):
    draw_key(axis, groups, "seconds", "whole step", BLACK)
    if len(groups) == 1 and len(groups[0].runs) == 1:
        rows = groups[0].runs[0].rows
        phases = [
            [number(row.get(key)) or 0.0 for row in rows]
            for key in ("seconds_sample", "seconds_train", "seconds_sync")
        ]
        axis.stackplot(
            [row["step"] for row in rows],
            *phases,
            labels=["sampling and commands", "training", "sync"],
            colors=[SKY, GREEN, PINK],
            alpha=0.6,
            linewidth=0,
        )
        axis.plot(
            [row["step"] for row in rows],
            series(rows, "seconds_env"),
            color=ORANGE,
            label="commands, sum of episodes",
        )


def keys(*curves):
    """A panel of plain curves: (key, label, colour)."""

    def draw(axis, groups):
        for place, (key, label, colour) in enumerate(curves):
            draw_key(
                axis,
                groups,
                key,
                label if len(curves) > 1 else "",
                colour,
                dashed=len(groups) > 1 and place > 0,
            )

    return draw


STEPS = "training step"
TRAINING = [  # title, x axis, y axis, what draws it
    ("Validated score", STEPS, "score", draw_score),
    ("Reward", STEPS, "reward per episode", draw_reward),
    (
        "Shares",
        STEPS,
        "share, 0 to 1",
        keys(
            ("valid_share", "episodes with a valid artefact", BLUE),
            ("zero_variance_share", "groups with equal rewards", RED),
        ),
    ),
    ("Length", STEPS, "sampled tokens per episode", keys(("reply_tokens", "", BLUE))),
    ("Turns", STEPS, "replies per episode", keys(("turns", "", BLUE))),
    ("Entropy", STEPS, "nats per token", keys(("entropy", "", BLUE))),
    ("KL to the base model", STEPS, "nats per token", keys(("kl", "", RED))),
    ("Clipped tokens", STEPS, "share, 0 to 1", keys(("clip_share", "", RED))),
    ("Engine against trainer", STEPS, "log-prob difference, nats", draw_logprob_diff),
    ("Gradient norm", STEPS, "gradient norm, before clipping", keys(("grad_norm", "", GREEN))),
    ("Time per step", STEPS, "seconds", draw_seconds),
    ("Throughput", STEPS, "sampled tokens per second", keys(("tokens_per_second", "", BLACK))),
]

# ------------------------------------------------------------------ figures and files


def shorten(text, limit: int) -> str:
    """Any text as a label: one line, nothing that fonts cannot set, no formulas between dollar signs."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "·", str(text))
    return (text if len(text) <= limit else text[: limit - 1] + "…").replace("$", r"\$")


@contextmanager
def figure_of(width: float, height: float):
    """A matplotlib Figure without display or global state, in our style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        yield figure


def draw_panel(axis, panel, groups):
    from matplotlib.ticker import MaxNLocator

    title, x, y, draw = panel
    axis.set(title=title, xlabel=x, ylabel=y)
    if x in (STEPS, "executed nodes", "nodes"):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.margins(y=0.1)
    draw(axis, groups)
    if y.startswith("share"):
        axis.set_ylim(-0.03, 1.03)
    if not axis.has_data():
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color="#888888")
    labels = axis.get_legend_handles_labels()[1]
    if len(labels) > 4 or title in ("Scores", "Outcomes"):  # above the curves, not over them
        low, high = axis.get_ylim()
        axis.set_ylim(low, high + (0.45 if len(labels) > 4 else 0.16) * (high - low))
        axis.legend(
            loc="upper center",
            ncols=2 if len(labels) > 4 else 3,
            fontsize=8,
            frameon=False,
            columnspacing=0.8,
            handlelength=1.4,
        )
    elif labels:
        axis.legend()


def draw_panels(figure, panels, groups: list[Group], columns: int):
    """All panels of one kind, in rows."""
    for axis, panel in zip(figure.subplots(len(panels) // columns, columns).ravel(), panels):
        draw_panel(axis, panel, groups)


def save_panels(panels, groups: list[Group], folder: Path, format: str) -> list[Path]:
    """Each panel as a figure of its own, as wide as a column of text."""
    folder.mkdir(exist_ok=True)
    paths = []
    for place, panel in enumerate(panels, 1):
        with figure_of(4.5, 3.2) as figure:
            draw_panel(figure.subplots(), panel, groups)
            name = re.sub(r"\W+", "-", panel[0].lower())
            paths.append(save(figure, folder / f"{place:02d}-{name}.{format}"))
    return paths


def save(figure, path: Path) -> Path:
    """Under a temporary name first: a viewer never sees half a picture."""
    figure.savefig(
        temporary(path),
        format=path.suffix[1:],
        dpi=110,
        metadata={"CreationDate": None} if path.suffix == ".pdf" else None,
    )
    os.replace(temporary(path), path)
    return path


def heading(record: RunData) -> str:
    config = record.config
    facts = [f"task {task_of(record)}"] + [
        f"{name} {config[key]}"
        for key, name in (("sampling_mode", "mode"), ("select", "rule"), ("seed", "seed"))
        if config.get(key) is not None
    ]
    seconds = (
        sum(v for v in series(record.rows, "seconds") if not math.isnan(v))
        if record.kind == "grpo"
        else max([number(row.get("elapsed")) or 0.0 for row in record.rows])
    )
    model = [f"model {Path(str(config['model'])).name}"] if config.get("model") else []
    what = "steps" if record.kind == "grpo" else "nodes"
    return "   ".join(
        [record.name, *facts, *model, f"N={len(record.rows)} {what} in {duration(seconds)}"]
    )
