"""Pictures of runs: curves of training, imitation, searches and evaluations, and trees.

Every panel takes groups of runs. Each run is drawn thin; the mean of a group is bold, and of three
runs or more it has a band of one standard error. matplotlib and pandas are imported inside
functions, because they are slow.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from flatlab.errors import UserError
from flatlab.numbers import count
from flatlab.task.value import WORST, improvement, score_at
from flatlab.train.metrics import evaluation_columns
from flatlab.view.reader import RunData, score_text

# Okabe and Ito: distinct with any kind of colour vision, and in grey print
COLOURS = "#0072B2 #D55E00 #009E73 #E69F00 #CC79A7 #56B4E9 #000000".split()
BLUE, RED, _, _, PINK, _, BLACK = COLOURS
GREY = "#888888"
STYLE = {
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
}
FEW_SEEDS = 3  # a mean over fewer runs has no interval


@dataclass
class RunGroup:
    """Runs that differ by their seeds only."""

    label: str
    colour: str
    runs: list[RunData]


# ------------------------------------------------------------------ numbers


def series(rows: list[dict], key: str) -> np.ndarray:
    """One number per row, shape (rows,); NaN where a row has none."""
    return np.array([row.get(key) for row in rows], float)


def window_of(rows) -> int:
    """Steps to average over: a sixth of the run, at most 20."""
    return max(1, min(20, len(rows) // 6))


def by_step(group: RunGroup, key: str):
    """A DataFrame with a column for each run; index: updates before the rows in which one of them
    has this key, or the numbers of rows that have no step.

    An evaluation comes after the update of its step; the one before training has step -1.
    """
    import pandas

    curves = []
    for run in group.runs:
        before = evaluation_columns(run.result.get("before") or {})
        rows = [before, *(run.rounds or run.rows)]
        steps = [row.get("step", number) for number, row in enumerate(rows, -1)]
        curves.append(pandas.Series(series(rows, key), steps))
    frame = pandas.concat(curves, axis=1).sort_index().dropna(how="all")
    frame.index += key.startswith("eval_")
    return frame


# ------------------------------------------------------------------ curves over steps


def draw_key(axis, groups, key, colour, label=None, style="-"):
    """One quantity per step, averaged over the steps that all runs of a group have.

    colour: of a single group; several have their own.
    """
    for group in groups:
        frame = by_step(group, key)
        if frame.empty:
            continue
        look = {"color": colour if len(groups) == 1 else group.colour, "linestyle": style}
        axis.plot(frame.index, frame, alpha=0.3, linewidth=1, **look)
        windows = frame.dropna().rolling(window_of(frame), center=True, min_periods=1)
        draw_mean(axis, windows.mean(), label=label, **look)
        label = None  # one entry in the legend


def draw_mean(axis, frame, **look):
    """The mean over the runs, and of FEW_SEEDS runs or more a band of one standard error on each
    side.

    frame: a DataFrame with a column for each run.
    """
    middle = frame.mean(axis=1)
    axis.plot(middle, linewidth=2.2, **look)
    if len(frame.columns) >= FEW_SEEDS:
        error = frame.sem(axis=1)
        band = middle - error, middle + error
        axis.fill_between(frame.index, *band, color=look["color"], alpha=0.15)


def draw_value(axis, groups):
    draw_key(axis, groups, "value_mean", BLUE, "training episodes")
    draw_key(axis, groups, "eval_value_mean", PINK, "evaluations", "--")
    if len(groups) == len(groups[0].runs) == 1:  # standard error over the episodes
        means, errors = [by_step(groups[0], f"eval_value_{key}")[0] for key in ("mean", "stderr")]
        axis.errorbar(means.index, means, errors, fmt="none", color=PINK, capsize=3)
    draw_baseline(axis)


def draw_baseline(axis):
    axis.set_ylabel("value")
    axis.axhline(0, color=GREY, linestyle=":", label="baseline")


def curves(ylabel, *lines, yscale="linear"):
    """A panel of quantities per step. lines: (key, colour, label, style) of each."""

    def draw(axis, groups):
        for line in lines:
            draw_key(axis, groups, *line)
        axis.set(ylabel=ylabel, yscale=yscale)

    return draw


# ------------------------------------------------------------------ panels of a search


def best_so_far(run: RunData):
    """The largest value after each number of nodes, as pandas.Series; -1 before a valid one."""
    import pandas

    return pandas.Series([WORST, *series(run.rows, "value")]).cummax().ffill()


def mean_so_far(run: RunData):
    import pandas

    return pandas.Series([np.nan, *series(run.rows, "value")]).expanding().mean()


def nodes(so_far):
    """A panel of nodes or episodes without the faults: a dot for each valid one, a cross at the
    lower edge for a failure, and a line.

    so_far: best_so_far or mean_so_far.
    """

    def draw(axis, groups):
        import pandas

        edge = {"transform": axis.get_xaxis_transform(), "clip_on": False}
        for group in groups:
            look = {"alpha": 0.5, "color": group.colour}
            for run in group.runs:
                numbers = np.arange(1, len(run.rows) + 1)
                axis.plot(numbers, reached(run.rows), ".", **look)
                failed = numbers[[row["outcome"] == "failed" for row in run.rows]]
                axis.plot(failed, 0 * failed, "x", **look, **edge)
        draw_baseline(axis)
        if so_far is best_so_far:  # its -1 before a valid node would widen the axis
            axis.set_ylim(axis.get_ylim())
        for group in groups:
            # a run that has ended keeps its value
            frame = pandas.concat(map(so_far, group.runs), axis=1).ffill()
            draw_mean(axis, frame, color=group.colour, drawstyle="steps-post")
        axis.set_xlabel(f"{axis.get_xlabel()}; dot: valid, cross: failed (value -1)")
        run = groups[0].runs[0]
        if " " not in run.task:
            axis.set_ylim(axis.get_ylim())
            convert = partial(score_at, task=run), partial(improvement, task=run)
            right = axis.secondary_yaxis("right", functions=convert)
            right.set_ylabel(shorten(run.result["metric"], 40))

    return draw


def reached(rows: list[dict]) -> np.ndarray:
    """Values of the valid nodes, shape (rows,); NaN for the others."""
    return np.maximum(WORST, series(rows, "improvement"))


PANELS = {  # kind of run -> x axis, and the functions of its panels by title
    "training": (
        "updates",
        {
            "Does the value rise?": draw_value,
            "Do the episodes carry a signal?": curves(
                "share, 0 to 1",
                ("valid_share", BLUE, "valid episodes"),
                ("zero_variance_share", RED, "groups of equal rewards", "--"),
            ),
            "How far has the policy moved?": curves("KL, nats per token", ("kl", RED)),
            "Does it still explore?": curves("entropy, nats per token", ("entropy", BLUE)),
            "Do engine and trainer agree?": curves(
                "largest log-prob difference, nats", ("logprob_diff_max", PINK), yscale="log"
            ),
        },
    ),
    "imitation": ("updates", {"Does the loss fall?": curves("nats per token", ("loss", BLUE))}),
    "search": ("nodes", {"How good is the best node so far?": nodes(best_so_far)}),
    "evaluation": ("episodes", {"What is the mean value so far?": nodes(mean_so_far)}),
}

# ------------------------------------------------------------------ the tree


def layout(rows: list[dict]) -> dict[str, tuple[int, int]]:
    """id -> (depth, -line): every node has a line of its own, as in a printed tree."""
    ids = ["0", *(row["id"] for row in rows)]
    ids.sort(key=lambda id: [int(part) for part in id.split(".")])  # 0.2 before 0.10
    return {id: (id.count("."), -line) for line, id in enumerate(ids)}


def best_path(run: RunData) -> list[str]:
    """From the root to the node that was chosen, or to the best one while the run goes on; [] of a
    run that is no search.
    """
    best = run.result.get("best_id")
    return list(accumulate(best.split("."), "{}.{}".format)) if best else []


def draw_tree(run: RunData, link: str = "#"):
    """A Figure: depth to the right, a line for each node; colour: value, shape: operator.

    link: address of a node before its id; the nodes in an SVG lead there.
    """
    from matplotlib import colormaps

    at = layout(run.rows)
    height = np.clip(0.3 * len(at) + 1.5, 4, 40)
    figure = new_figure(12, height)
    axis = figure.subplots()
    edges = [(at[row["parent"]], at[row["id"]]) for row in run.rows]
    axis.plot(*np.transpose(edges), color="#bbbbbb", zorder=1)
    if path := [at[id] for id in best_path(run)]:
        axis.plot(*zip(*path), color=BLACK, linewidth=2.6, label="path to the best")
    looks = {("baseline", "*"): [{"id": "0", "improvement": 0}]}
    for row in run.rows:
        look = (row["op"], row["mark"]) if row["outcome"] == "valid" else (row["outcome"], "X")
        looks.setdefault(look, []).append(row)
    colours = [0, *reached(run.rows)]
    for (name, mark), rows in looks.items():
        marks = axis.scatter(
            *zip(*(at[row["id"]] for row in rows)),
            c=reached(rows),
            cmap=colormaps["viridis"].with_extremes(bad=RED),
            vmin=np.nanmin(colours),
            vmax=np.nanmax(colours),
            plotnonfinite=True,  # a node without a value is red
            marker=mark,
            s=min(110, (50 * height / len(at)) ** 2),  # square points
            edgecolors=BLACK,
            linewidths=0.5,
            label=f"{shorten(name, 20)}: {len(rows)}",
            zorder=3,
        )
        marks.set_urls([f"{link}{row['id']}" for row in rows])
    for row in run.rows if len(at) < 200 else ():
        name = f"{row['id']}  {score_text(row)}"
        axis.annotate(name, at[row["id"]], (8, 4), textcoords="offset points", fontsize=9)
    axis.set(title="How did the search get to its best node?", xlabel="depth", yticks=[])
    axis.set_frame_on(False)
    axis.locator_params(axis="x", integer=True)
    figure.colorbar(marks, ax=axis, label="value", pad=0.01, aspect=5 * height)
    figure.legend(loc="outside lower center", ncols=6, markerscale=0.8)
    return figure


# ------------------------------------------------------------------ figures


def shorten(text, limit: int) -> str:
    """Any text as a label: one line, only characters that fonts have, and no formulas."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "·", str(text))
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text.replace("$", r"\$")


def new_figure(width: float, height: float):
    """A matplotlib Figure of this size in inches, without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def draw_panels(groups: list[RunGroup], title: str):
    """A Figure with all panels of a kind of run, in rows of three."""
    from matplotlib.patches import Patch

    x, panels = PANELS[groups[0].runs[0].kind]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(10 if columns == 1 else 16, 1 + 3.8 * lines)
    for place, (name, draw) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(lines, columns, place, title=name, xlabel=x)
        axis.sharex(figure.axes[0])
        draw(axis, groups)
        finish(axis)
    if len(groups) > 1:
        handles = [
            Patch(color=group.colour, label=f"{shorten(group.label, 80)} (N={len(group.runs)})")
            for group in groups
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.suptitle(shorten(title, 120), fontsize=10)
    return figure


def finish(axis):
    axis.locator_params(axis="x", integer=True)
    if axis.get_legend_handles_labels()[1]:
        axis.legend()


# Units of keys: the first part that a key contains counts; others are named after the key
UNITS = {
    "value": "value (0: baseline, 1: reference)",
    "per_second": "tokens per second",
    "seconds": "seconds",
    "share": "share, 0 to 1",
    "kl": "nats per token",
    "entropy": "nats per token",
    "logprob": "nats",
    "memory": "GB",
    "lag": "updates",
}


def draw_plot(groups: list[RunGroup], key: str):
    """A Figure with one key of the rows, legible at a width of six inches."""
    run = groups[0].runs[0]
    rows = run.rounds or run.rows
    keys = {name for row in rows for name in row if isinstance(row[name], (int, float))}
    if key not in keys:
        raise UserError(f"{run.dir} has no numbers '{key}'; it has {', '.join(sorted(keys))}.")
    figure = new_figure(6, 3.2)
    axis = figure.subplots()
    for group in groups:
        label = f"mean of {count(len(group.runs), 'run')}"
        if len(group.runs) >= FEW_SEEDS:
            label += " ± standard error"
        if len(groups) > 1:
            label = shorten(f"{group.runs[0].name}, {label}", 60)
        draw_key(axis, [group], key, group.colour, label)
    if "value" in key:
        draw_baseline(axis)
    words = re.sub("(.*)_mean$", r"mean \1", key).replace("_", " ")
    units = UNITS | {"score": shorten(run.result["metric"], 40)}
    unit = next((units[part] for part in units if part in key), words)
    x = "rounds" if run.rounds else PANELS[run.kind][0]
    title = shorten(f"{words.capitalize()}, {run.task}", 60)
    axis.set(title=title, xlabel=f"{x} (means over {window_of(rows)} rows)", ylabel=unit)
    finish(axis)
    return figure


def encoded(figure, format: str, dpi: int = 110) -> bytes:
    """The picture as the content of a file."""
    picture = io.BytesIO()
    figure.savefig(picture, format=format, dpi=dpi)
    return picture.getvalue()
