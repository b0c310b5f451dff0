"""Pictures of runs: curves of training, of searches and of evaluations, and the tree of a search.

Every panel takes groups of runs. Each run is drawn thin; the mean of a group is bold, with a band
of one standard deviation. matplotlib and pandas are imported inside functions, because they are
slow.
"""

from __future__ import annotations

import io
import re
import textwrap
from dataclasses import dataclass, field

import numpy as np

from flatlab.numbers import number
from flatlab.train.metrics import evaluation_columns
from flatlab.view.reader import RunData

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
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 20,  # the legend stands between the title and the axes
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
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


def window_of(rows) -> int:
    """Steps to average over: a sixth of the run, at most 20."""
    return max(1, min(20, len(rows) // 6))


def spread(frame):
    """Mean over the runs, and the lower and upper end of a band around it.

    frame: a DataFrame with a column for each run. The band is one standard deviation (N - 1) wide
    on each side, and clipped to the range of the runs' values: it never shows a value that is
    impossible.
    """
    middle = frame.mean(axis=1)
    deviation = frame.std(axis=1).fillna(0.0)
    low = (middle - deviation).clip(lower=frame.min(axis=1))
    high = (middle + deviation).clip(upper=frame.max(axis=1))
    return middle, low, high


def by_step(group: RunGroup, key: str):
    """A DataFrame with a column for each run; index: the steps at which one of them has this key.

    The evaluation before training has step -1.
    """
    import pandas

    curves = []
    for run in group.runs:
        before = evaluation_columns(run.result.get("before") or {})
        rows = [before | {"step": -1}, *run.rows]
        curves.append(pandas.Series(series(rows, key), [row["step"] for row in rows]))
    return pandas.concat(curves, axis=1).sort_index().dropna(how="all")


def headline_key(run: RunData) -> str:
    """ "score", or "improvement" where the mean of raw scores says little."""
    return "score" if "score_mean" in run.rows[0] else "improvement"


# ------------------------------------------------------------------ panels of a training run


def draw_key(axis, groups, key, label=None, colour=GREY, style="-"):
    """One quantity per step, averaged over the steps that all runs of a group have.

    colour: of a single group; several have their own.
    """
    for group in groups:
        frame = by_step(group, key)
        if frame.empty:
            continue
        look = {"color": colour if len(groups) == 1 else group.colour}
        axis.plot(frame.index, frame, style, alpha=0.3, linewidth=1, **look)
        smooth = frame.dropna().rolling(window_of(frame), center=True, min_periods=1).mean()
        middle, low, high = spread(smooth)
        axis.fill_between(smooth.index, low, high, alpha=0.15, linewidth=0, **look)
        axis.plot(smooth.index, middle, style, linewidth=2.2, label=label, **look)
        label = None  # one entry in the legend


def draw_score(axis, groups):
    """Training episodes and evaluations over the number of updates before them."""
    key = headline_key(groups[0].runs[0])
    draw_key(axis, groups, f"{key}_mean", "training episodes", BLUE)
    names = ("eval_score_mean", "eval_score_stderr")
    if key == "improvement":
        names = ("eval_improvement", "eval_improvement_stderr")
    label = "evaluations"
    for group in groups:
        frame = by_step(group, names[0])
        if frame.empty:
            continue
        middle, low, high = spread(frame)
        error = [middle - low, high - middle]
        if len(group.runs) == 1:
            label = "evaluations ± s.e."
            error = by_step(group, names[1]).reindex(frame.index)[0]
        look = {"color": PINK if len(groups) == 1 else group.colour, "capsize": 3}
        axis.errorbar(frame.index + 1, middle, error, fmt="s--", label=label, **look)
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
    axis.set(ylabel="share, 0 to 1", ylim=(-0.03, 1.03))


def draw_agreement(axis, groups):
    draw_key(axis, groups, "logprob_diff_max", None, PINK)
    axis.axhspan(1e-7, 1e-4, color=GREEN, alpha=0.08, linewidth=0, label="goal in fp32")
    axis.set(yscale="log", ylabel="largest log-prob difference, nats")


def curve(key, colour):
    """A panel of a single quantity."""

    def draw(axis, groups):
        draw_key(axis, groups, key, None, colour)
        axis.set_ylabel(f"{key}, nats per token")

    return draw


UPDATES = "updates"
TRAINING = [  # title, x axis, what draws it
    ("Does the score rise?", UPDATES, draw_score),
    ("Do the episodes carry a signal?", UPDATES, draw_shares),
    ("How far has the policy moved?", UPDATES, curve("kl", RED)),
    ("Does it still explore?", UPDATES, curve("entropy", BLUE)),
    ("Do engine and trainer agree?", UPDATES, draw_agreement),
]

# ------------------------------------------------------------------ panels of a search


def best_so_far(run: RunData):
    """The best score after each number of nodes, first the baseline, as pandas.Series."""
    import pandas

    scores = pandas.Series([run.baseline, *series(run.rows, "score")])
    return (scores.cummax() if run.higher_is_better else scores.cummin()).ffill()


def draw_scores(axis, groups):
    """A dot for the score of each node or episode."""
    for group in groups:
        for run in group.runs:
            scores = series(run.rows, "score")
            numbers = range(1, len(scores) + 1)
            axis.scatter(numbers, scores, s=16, alpha=0.5, color=group.colour, linewidths=0)
    draw_baseline(axis, groups)


def draw_best(axis, groups):
    import pandas

    draw_scores(axis, groups)
    for group in groups:
        # a run that has ended keeps its value
        frame = pandas.concat(map(best_so_far, group.runs), axis=1).ffill()
        middle, low, high = spread(frame)
        look = {"color": group.colour}
        axis.step(frame.index, middle, where="post", linewidth=2.2, **look)
        axis.fill_between(frame.index, low, high, step="post", alpha=0.15, linewidth=0, **look)


def draw_means(axis, groups):
    """The mean over valid and failed episodes and a band of its standard error."""
    import pandas

    draw_scores(axis, groups)
    for group in groups:
        rows = [row for run in group.runs for row in run.rows]
        counted = pandas.Series(series(rows, "counted"))
        mean, error = counted.mean(), counted.sem()
        axis.axhline(mean, color=group.colour, linewidth=2.2)
        axis.axhspan(mean - error, mean + error, color=group.colour, alpha=0.15, linewidth=0)


SEARCH = [("How good is the best node so far?", "executed nodes", draw_best)]
MEANS = "episodes; line: mean ± s.e., a failure counts as the baseline"
EVALUATION = [("What do the episodes score?", MEANS, draw_means)]

# ------------------------------------------------------------------ the tree

FAILURES = {"failed": "x", "fault": "+"}  # outcome -> mark
EDGES = {
    "path to the best": {"color": BLACK, "linewidth": 2.6},
    "_tree": {"color": "#bbbbbb", "linewidth": 1},
    "second parent": {"color": PINK, "linestyle": ":", "linewidth": 1},
}


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
    from matplotlib.markers import MarkerStyle

    at = layout(run.rows)
    path = best_path(run)
    depth, leaves = np.max(list(at.values()), axis=0) + 1
    width, height = np.clip([1.5 * depth, 0.4 * leaves + 1.5], [9, 4], [16, 40])
    size = min(110, (50 * height / leaves) ** 2)  # of a mark, in square points
    figure = new_figure(width, height)
    axis = figure.subplots()
    lines = {name: [] for name in EDGES}
    for row in run.rows:
        name = "path to the best" if row["id"] in path else "_tree"
        lines[name].append((at[row["parent"]], at[row["id"]]))
        if row["second"]:
            lines["second parent"].append((at[row["second"]], at[row["id"]]))
    for name, look in EDGES.items():
        if lines[name]:
            axis.add_collection(LineCollection(lines[name], label=name, zorder=1, **look))
    root = {"id": "0", "op": "baseline", "mark": "*", "outcome": "valid", "score": run.baseline}
    looks = {}
    for row in [root, *run.rows]:
        mark = row["mark"] if row["mark"] in MarkerStyle.markers else "h"
        look = (row["op"], mark)
        if row["score"] is None:
            look = (row["outcome"], FAILURES[row["outcome"]])
        looks.setdefault(look, []).append(row)
    # the worst tenth of the scores may lie beyond the colours: one wild node hides no others
    ends = (0.1, 1.0) if run.higher_is_better else (0.0, 0.9)
    limits = np.nanquantile([run.baseline, *series(run.rows, "score")], ends)
    colours = "viridis" if run.higher_is_better else "viridis_r"
    shade = ScalarMappable(Normalize(*limits, clip=True), colours)
    for (name, mark), rows in looks.items():
        look = {"color": RED, "linewidths": 1.8}
        if name not in FAILURES:
            scores = [row["score"] for row in rows]
            look = {"color": shade.to_rgba(scores), "edgecolors": BLACK, "linewidths": 0.5}
        marks = axis.scatter(
            *zip(*(at[row["id"]] for row in rows)),
            marker=mark,
            s=2.4 * size if name == "baseline" else size,
            label=f"{shorten(name, 20)}: {len(rows)}",
            zorder=3,
            **look,
        )
        marks.set_urls([f"{link}{row['id']}" for row in rows] if link else None)
    axis.set(yticks=[], xlabel="depth", title="How did the search get to its best node?")
    axis.locator_params(axis="x", integer=True)
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()
    axis.margins(x=0.06, y=0.05)
    worse = "min" if run.higher_is_better else "max"
    figure.colorbar(shade, ax=axis, label=score_label(run), pad=0.01, extend=worse)
    figure.legend(loc="outside lower center", ncols=6, markerscale=0.8)
    return figure


# ------------------------------------------------------------------ figures


def shorten(text, limit: int) -> str:
    """Any text as a label: one line, only characters that fonts have, and no formulas."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "·", str(text))
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("$", r"\$")


def new_figure(width: float, height: float):
    """A matplotlib Figure of this size in inches, without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def draw_panels(panels, groups: list[RunGroup], title: str):
    """A Figure with all panels, in rows of three."""
    from matplotlib.patches import Patch

    lines = -(-len(panels) // 3)
    width = 16.0 if len(panels) > 1 else 10.0
    figure = new_figure(width, 1 + 3.8 * lines + 0.1 * len(groups))
    axes = list(figure.subplots(lines, min(3, len(panels)), squeeze=False).flat)
    for axis, (name, x, draw) in zip(axes, panels):
        axis.set(title=name, xlabel=x)
        draw(axis, groups)
        axis.locator_params(axis="x", integer=True)
        if not axis.has_data():
            axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center")
        if axis.get_legend_handles_labels()[1]:
            axis.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=3)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    if sum(len(group.runs) for group in groups) > 1:
        handles = []
        for group in groups:
            label = f"{shorten(group.label, 80)} (N={len(group.runs)})"
            handles.append(Patch(color=group.colour, label=label))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(2, len(groups)))
    figure.suptitle(textwrap.fill(shorten(title, 400), int(12 * width)), fontsize=10)
    return figure


def encoded(figure, format: str = "png") -> bytes:
    """The picture as the content of a file."""
    picture = io.BytesIO()
    figure.savefig(picture, format=format, dpi=110)
    return picture.getvalue()
