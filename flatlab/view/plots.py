"""Pictures of runs: curves of training, of searches and of evaluations, and the tree of a search.

Every panel takes groups of runs. A single run is drawn thin, under a bold running mean; several
runs become their mean and a band of one standard deviation. matplotlib is imported inside
functions, because it is slow.
"""

from __future__ import annotations

import io
import random
import re
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np

from flatlab.files import write_whole
from flatlab.runs.reader import RunData, number, standard_error

# The colours of Okabe and Ito: distinct with any kind of colour vision, and in grey print
BLACK = "#000000"
ORANGE = "#E69F00"
GREEN = "#009E73"
BLUE = "#0072B2"
RED = "#D55E00"
PINK = "#CC79A7"
SKY = "#56B4E9"
GREY = "#888888"
COLOURS = [BLUE, RED, GREEN, ORANGE, PINK, SKY, BLACK]
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 20,  # the legend stands between the title and the axes
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


@dataclass
class RunGroup:
    """Runs that differ by their seeds only: one of each seed, the first by name.

    repeated: further runs of the same seeds. They do not count.
    """

    label: str
    colour: str
    runs: list[RunData]
    repeated: list[RunData] = field(default_factory=list)


# ------------------------------------------------------------------ numbers


def series(rows: list[dict], key: str) -> np.ndarray:
    """One number per row, shape (rows,); NaN where a row has none."""
    return np.array([number(row.get(key)) for row in rows], float)


def running_mean(values, window: int) -> np.ndarray:
    """Mean of the `window` values around each one, fewer at both ends; NaN counts as absent."""
    import pandas

    return pandas.Series(values).rolling(window, center=True, min_periods=1).mean().to_numpy()


def window_of(rows) -> int:
    """Steps to average over: a sixth of the run, at most 20."""
    return max(1, min(20, len(rows) // 6))


def spread(columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over runs at each place, and the lower and upper end of a band around it.

    columns: shape (runs, places), NaN where a run has no number. The band is one standard deviation
    (N - 1) wide on each side, and clipped to the range of the runs' values: it never shows a value
    that is impossible.
    """
    import pandas

    frame = pandas.DataFrame(columns)
    middle = frame.mean()
    deviation = frame.std().fillna(0.0)
    low = (middle - deviation).clip(lower=frame.min())
    high = (middle + deviation).clip(upper=frame.max())
    return middle.to_numpy(), low.to_numpy(), high.to_numpy()


def by_step(group: RunGroup, key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which some run has this key, shape (steps,), and its values, (runs, steps).

    The evaluation before training has step -1.
    """
    import pandas

    curves = []
    for run in group.runs:
        before = run.result.get("before") or {}
        rows = [{f"eval_{name}": value for name, value in before.items()} | {"step": -1}]
        rows += run.rows
        curves.append(pandas.Series(series(rows, key), [row["step"] for row in rows]))
    frame = pandas.DataFrame(curves).sort_index(axis=1).dropna(axis=1, how="all")
    return frame.columns.to_numpy(), frame.to_numpy()


def headline_key(run: RunData) -> str:
    """ "score", or "improvement" where the mean of raw scores says little."""
    return "score" if "score_mean" in run.rows[0] else "improvement"


# ------------------------------------------------------------------ panels of a training run


def draw_key(axis, groups, key, label="", colour=GREY, style="-"):
    """One quantity per step. `colour` is for a single group; several have their own.

    Dotted where not all runs of a group went on, so that none vanishes without a trace.
    """
    alone = len(groups) == 1
    for group in groups:
        steps, columns = by_step(group, key)
        if not len(steps):
            continue
        look = {"color": colour if alone else group.colour}
        if len(columns) == 1:
            axis.plot(steps, columns[0], style, marker=".", alpha=0.3, linewidth=1, **look)
        window = window_of(steps)
        middle, low, high = (running_mean(curve, window) for curve in spread(columns))
        complete = np.flatnonzero(np.isfinite(columns).all(0))
        end = complete[-1] + 1 if len(complete) else 0
        rest = slice(max(0, end - 1), None)
        axis.plot(steps[rest], middle[rest], ":", linewidth=1, alpha=0.6, **look)
        axis.fill_between(steps[:end], low[:end], high[:end], alpha=0.15, linewidth=0, **look)
        axis.plot(steps[:end], middle[:end], style, linewidth=2.2, **look)
        if label:
            axis.plot([], [], style, color=colour if alone else GREY, label=label)
            label = ""


def draw_score(axis, groups):
    """Training episodes and evaluations over the number of updates before them."""
    key = headline_key(groups[0].runs[0])
    draw_key(axis, groups, f"{key}_mean", "training episodes", BLUE)
    names = ("eval_score_mean", "eval_score_stderr")
    if key == "improvement":
        names = ("eval_improvement", "eval_improvement_stderr")
    label = "evaluations"
    for group in groups:
        steps, means = by_step(group, names[0])
        if not len(steps):
            continue
        middle, low, high = spread(means)
        error = np.array([middle - low, high - middle])
        if len(means) == 1:
            label = "evaluations ± s.e."
            _, [error] = by_step(group, names[1])
        error = error if np.shape(error)[-1] == len(steps) else None  # one episode has none
        colour = PINK if len(groups) == 1 else group.colour
        look = {"fmt": "s--", "color": colour, "markersize": 6, "capsize": 3, "linewidth": 1.2}
        axis.errorbar(steps + 1, middle, error, label=label, **look)
        label = "_"  # one entry in the legend
    draw_baseline(axis, groups)


def score_label(run: RunData) -> str:
    """The metric and its direction."""
    better = "higher is better" if run.higher_is_better else "lower is better"
    return f"{shorten(run.result['metric'], 40)}, {better}"


def draw_baseline(axis, groups):
    run = groups[0].runs[0]
    axis.set_ylabel(score_label(run))
    name = f"baseline {run.baseline:.4g}"
    axis.axhline(run.baseline, color=GREY, linestyle=":", linewidth=1.5, label=name)


def draw_shares(axis, groups):
    draw_key(axis, groups, "valid_share", "valid episodes", BLUE)
    draw_key(axis, groups, "zero_variance_share", "groups of equal rewards", RED, "--")
    axis.set_ylim(-0.03, 1.03)


def draw_agreement(axis, groups):
    draw_key(axis, groups, "logprob_diff_max", "", PINK)
    axis.axhspan(1e-7, 1e-4, color=GREEN, alpha=0.08, linewidth=0, label="goal in fp32")
    axis.set_yscale("log")


def curve(key, colour):
    """A panel of a single quantity."""
    return lambda axis, groups: draw_key(axis, groups, key, "", colour)


UPDATES = "updates"
NODES = "executed nodes"
TRAINING = [  # title, x axis, y axis, what draws it
    ("Does the score rise?", UPDATES, "score", draw_score),
    ("Do the episodes carry a signal?", UPDATES, "share, 0 to 1", draw_shares),
    ("How far has the policy moved?", UPDATES, "KL, nats per token", curve("kl", RED)),
    ("Does it still explore?", UPDATES, "entropy, nats per token", curve("entropy", BLUE)),
    (
        "Do engine and trainer agree?",
        UPDATES,
        "largest log-prob difference, nats",
        draw_agreement,
    ),
]

# ------------------------------------------------------------------ panels of a search


def best_so_far(run: RunData, axis: str):
    """The best score after each number of nodes or tokens, first the baseline, as pandas.Series."""
    import pandas

    rows = [{"score": run.baseline, "tokens": 0}, *run.rows]
    better = np.fmax if run.higher_is_better else np.fmin
    best = better.accumulate(series(rows, "score"))
    xs = range(len(rows))
    if axis == "tokens":
        xs = np.cumsum(series(rows, "tokens"))
    # a fault may have sampled nothing
    return pandas.Series(best, xs).groupby(level=0).last()


def draw_best(axis_name):
    def draw(axis, groups):
        import pandas

        for group in groups:
            curves = [best_so_far(run, axis_name) for run in group.runs]
            # a run that has ended keeps its value
            frame = pandas.concat(curves, axis=1).sort_index().ffill()
            middle, low, high = spread(frame.T)
            axis.step(frame.index, middle, where="post", color=group.colour, linewidth=2.2)
            band = {"color": group.colour, "alpha": 0.15, "linewidth": 0}
            axis.fill_between(frame.index, low, high, step="post", **band)
        draw_baseline(axis, groups)

    return draw


def draw_scores(axis, groups):
    """Scores of all nodes or episodes, of several groups by their number in the legend.

    The cross is the mean of valid and failed ones with its standard error; failed ones count as the
    baseline.
    """
    rng = random.Random(0)
    names = []
    for x, group in enumerate(groups):
        rows = [row for run in group.runs for row in run.rows]
        xs = [x + rng.uniform(-0.22, 0.22) for _ in rows]
        scores = series(rows, "score")
        axis.scatter(xs, scores, s=16, alpha=0.5, color=group.colour, linewidths=0)
        counted = [row["counted"] for row in rows if row["counted"] is not None]
        if counted:
            error = standard_error(counted) or 0.0
            axis.errorbar(x, fmean(counted), error, 0.32, color=BLACK, linewidth=2)
        failed = sum(row["outcome"] == "failed" for row in rows)
        name = f"{x + 1}\n" if len(groups) > 1 else ""
        names.append(f"{name}N={len(rows)}\n{failed} failed")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_xlim(-0.6, len(names) - 0.4)
    draw_baseline(axis, groups)


MEANS = "cross: mean ± s.e., a failure counts as the baseline"
SEARCH = [
    ("How good is the best node so far?", NODES, "score", draw_best("nodes")),
    ("What does it cost?", "sampled tokens", "score", draw_best("tokens")),
    ("What do the nodes score?", MEANS, "score", draw_scores),
]
EVALUATION = [("What do the episodes score?", MEANS, "score", draw_scores)]

# ------------------------------------------------------------------ the tree

CROWDED = 90  # nodes; from there on only the path to the best has names
FAILURES = {"failed": "x", "fault": "+"}  # outcome -> mark
PATH = {"color": BLACK, "linewidth": 2.6}
EDGE = {"color": "#bbbbbb", "linewidth": 1}
SECOND = {"color": PINK, "linestyle": ":", "linewidth": 1}


def lineage(id: str) -> list[int]:
    """Sorts ids as numbers: 0.2 before 0.10."""
    return [int(part) for part in id.split(".")]


def parent_of(id: str) -> str:
    return id.rpartition(".")[0]


def layout(rows: list[dict]) -> dict[str, tuple[int, float]]:
    """id -> (depth, place from top to bottom), in the order of a printed tree.

    Leaves have the positions 0, 1, 2 ...; a parent stands in the middle of its children.
    """
    ids = sorted(["0", *(row["id"] for row in rows)], key=lineage)
    children = {id: [] for id in ids}
    for id in ids[1:]:
        children[parent_of(id)].append(id)
    leaves = [id for id in ids if not children[id]]
    y = dict(zip(leaves, range(len(leaves))))
    for id in reversed(ids):
        if children[id]:
            first, last = children[id][0], children[id][-1]
            y[id] = (y[first] + y[last]) / 2
    return {id: (id.count("."), y[id]) for id in ids}


def best_path(run: RunData) -> list[str]:
    """From the root to the node that was chosen, or to the best one while the run goes on; [] of a
    run that is no search.
    """
    path = []
    id = run.result.get("best_id")
    while id:
        path.insert(0, id)
        id = parent_of(id)
    return path


def draw_tree(run: RunData, link: str = ""):
    """A Figure: depth to the right, siblings in a column; colour: score, shape: operator.

    link: address of a node before its id; the nodes in an SVG lead there.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import LineCollection
    from matplotlib.colors import Normalize

    at = layout(run.rows)
    path = best_path(run)
    depth, leaves = np.max(list(at.values()), axis=0)
    line = 0.5 if len(at) <= CROWDED else 0.2  # inches per leaf
    height = max(4.0, min(40.0, line * (leaves + 1) + 1.5))
    size = min(110, 5000 * height / (leaves + 10) ** 1.2)  # of a mark, in square points
    with figure_of(max(9.0, min(16.0, 1.5 * (depth + 1))), height) as figure:
        axis = figure.subplots()
        edges = {"path to the best": PATH, "_tree": EDGE, "second parent": SECOND}
        lines = {name: [] for name in edges}
        for row in run.rows:
            name = "path to the best" if row["id"] in path else "_tree"
            lines[name].append((at[row["parent"]], at[row["id"]]))
            if row.get("second_parent"):
                lines["second parent"].append((at[row["second_parent"]], at[row["id"]]))
        for name, look in edges.items():
            if lines[name]:
                axis.add_collection(LineCollection(lines[name], label=name, zorder=1, **look))
        limits = Normalize(*colour_limits(run), clip=True)
        shade = ScalarMappable(limits, "viridis" if run.higher_is_better else "viridis_r")
        root = {"id": "0", "op": "baseline", "mark": "*", "outcome": "valid"}
        looks = {}
        for row in [root | {"score": run.baseline}, *run.rows]:
            look = (row["op"], marker_of(row["mark"]))
            if row["score"] is None:
                look = (row["outcome"], FAILURES[row["outcome"]])
            looks.setdefault(look, []).append(row)
        for (name, mark), rows in looks.items():
            colours = RED
            if name not in FAILURES:
                colours = shade.to_rgba([row["score"] for row in rows])
            marks = axis.scatter(
                *zip(*(at[row["id"]] for row in rows)),
                marker=mark,
                c=colours,
                edgecolors=None if name in FAILURES else BLACK,
                linewidths=1.8 if name in FAILURES else 0.5,
                s=2.4 * size if name == "baseline" else size,
                label=f"{shorten(name, 20)}: {len(rows)}",
                zorder=3,
            )
            marks.set_urls([f"{link}{row['id']}" for row in rows] if link else None)
        for row in [root | {"score": run.baseline}, *run.rows]:
            if len(at) <= CROWDED or row["id"] in path:
                draw_name(axis, row, at[row["id"]], row["id"] in path)
        axis.set(yticks=[], xlabel="depth", title="How did the search get to its best node?")
        axis.locator_params(axis="x", integer=True)
        axis.grid(False)
        axis.spines["left"].set_visible(False)
        axis.invert_yaxis()
        axis.margins(x=0.06, y=0.05)
        worse = "min" if run.higher_is_better else "max"  # scores beyond the limit may lie there
        figure.colorbar(shade, ax=axis, label=score_label(run), pad=0.01, extend=worse)
        figure.legend(loc="outside lower center", ncols=6, markerscale=0.8)
    return figure


def colour_limits(run: RunData) -> tuple[float, float]:
    """Range of the colours for the scores and the baseline.

    The worst tenth of the scores may lie outside, so that one wild node cannot hide the rest.
    """
    scores = [run.baseline, *series(run.rows, "score")]
    ends = (0.1, 1.0) if run.higher_is_better else (0.0, 0.9)
    low, high = np.nanquantile(scores, ends).tolist()
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def marker_of(mark: str) -> str:
    """A hexagon instead of a mark that matplotlib does not have."""
    from matplotlib.markers import MarkerStyle

    return mark if mark in MarkerStyle.markers else "h"


def draw_name(axis, row, at, on_path):
    """Id and score above a node, on white: no line crosses them."""
    name = "baseline" if row["id"] == "0" else row["id"]
    name = name if len(name) < 12 else f"…{name[-8:]}"
    if row["score"] is not None:
        name += f"  {row['score']:.4g}"
    axis.annotate(
        name,
        at,
        (0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        fontweight="bold" if on_path else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        zorder=2,
    )


# ------------------------------------------------------------------ figures and files


def shorten(text, limit: int) -> str:
    """Any text as a label: one line, only characters that fonts have, and no formulas."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "·", str(text))
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("$", r"\$")


@contextmanager
def figure_of(width: float, height: float):
    """A matplotlib Figure of this size in inches, without display or global state."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        yield figure


def draw_panels(panels, groups: list[RunGroup], title: str):
    """A Figure with all panels, in rows of three. Panels of updates share their x axis."""
    from matplotlib.patches import Patch

    lines = -(-len(panels) // 3)
    width = 16.0 if len(panels) > 1 else 10.0
    with figure_of(width, 1 + 3.8 * lines + 0.1 * len(groups)) as figure:
        axes = list(figure.subplots(lines, min(3, len(panels)), squeeze=False).flat)
        for axis, (name, x, y, draw) in zip(axes, panels):
            axis.set(title=name, xlabel=x, ylabel=y)
            axis.margins(y=0.1)
            draw(axis, groups)
            if not axis.has_data():
                axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center")
            if x == UPDATES:
                axis.sharex(axes[0])
            if x in (UPDATES, NODES):
                axis.locator_params(axis="x", integer=True)
            if axis.get_legend_handles_labels()[1]:
                axis.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=3)
        for axis in axes[len(panels) :]:
            axis.axis("off")
        handles = []
        for place, group in enumerate(groups, 1):
            label = shorten(f"{place}: {group.label} (N={len(group.runs)})", 80)
            handles.append(Patch(color=group.colour, label=label))
        if sum(len(group.runs) for group in groups) > 1:
            figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(groups)))
        set_title(figure, title)
    return figure


def set_title(figure, text: str):
    """The heading of a whole figure, in as many lines as it needs."""
    width = int(12 * figure.get_figwidth())
    figure.suptitle(textwrap.fill(shorten(text, 400), width), fontsize=10)


def encoded(figure, format: str) -> bytes:
    """The picture as the content of a file of this format: png, pdf or svg."""
    from matplotlib import rc_context

    picture = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(picture, format=format, dpi=110)
    return picture.getvalue()


def save(figure, path: Path) -> Path:
    """Writes the whole picture or, if the disk is full, leaves the old one."""
    write_whole(path, encoded(figure, path.suffix[1:]))
    return path
