"""Plots of searches: the tree, best so far, scores.

Panels take groups, as in plots.py.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import cycle
from statistics import fmean

import numpy as np

from flatlab.runs.reader import RunData, standard_error
from flatlab.view import plots
from flatlab.view.plots import BLACK, COLOURS, PINK, RED, draw_baseline, series

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
            middle, low, high = plots.spread(frame.T)
            axis.step(frame.index, middle, where="post", color=group.colour, linewidth=2.2)
            band = {"color": group.colour, "alpha": 0.15, "linewidth": 0}
            axis.fill_between(frame.index, low, high, step="post", **band)
        draw_baseline(axis, groups)

    return draw


def draw_distribution(axis, groups):
    """Scores of all nodes by the number of their group, those of a single search by operator.

    The cross is the mean of valid and failed nodes with its standard error; failed ones count as
    the baseline.
    """
    columns = []  # (name, colour, rows)
    by_operator = len(groups) == 1 and groups[0].runs[0].kind == "search"
    if by_operator:
        operators = {}
        for row in rows_of(groups[0]):
            operators.setdefault(row["op"], []).append(row)
        for (op, rows), colour in zip(operators.items(), cycle(COLOURS)):
            columns.append((op, colour, rows))
    else:
        for number, group in enumerate(groups, 1):
            columns.append((str(number), group.colour, rows_of(group)))
    rng = random.Random(0)
    names = []
    for x, (name, colour, rows) in enumerate(columns):
        xs = [x + rng.uniform(-0.22, 0.22) for _ in rows]
        scores = series(rows, "score")
        axis.scatter(xs, scores, s=16, alpha=0.5, color=colour, linewidths=0)
        counted = [row["counted"] for row in rows if row["counted"] is not None]
        if counted:
            error = standard_error(counted) or 0.0
            axis.errorbar(x, fmean(counted), error, 0.32, color=colour, linewidth=2.5)
        failed = sum(row["outcome"] == "failed" for row in rows)
        names.append(f"{plots.shorten(name, 12)}\nN={len(rows)}\n{failed} failed")
    rotation = 0 if len(names) < 6 else 90  # so that they do not overlap
    axis.set_xticks(range(len(names)), names, fontsize=8, rotation=rotation)
    axis.set_xlim(-0.6, len(names) - 0.4)
    draw_baseline(axis, groups)


def rows_of(group) -> list[dict]:
    """The nodes of all runs of a group."""
    return [row for run in group.runs for row in run.rows]


def draw_diversity(axis, groups):
    """A line per run."""
    for group in groups:
        for run in group.runs:
            axis.plot(different_programs(run), color=group.colour)


COMMENT = re.compile(r"(^|\s)#.*", re.M)


def different_programs(run: RunData) -> list[int]:
    """How many different programs there are after 0, 1, 2, ... nodes.

    Blanks and comments make no program different.
    """
    programs = set()
    counts = [0]
    for row in run.rows:
        text = COMMENT.sub("", "\n".join(row["code"].values()))
        if program := "".join(text.split()):
            programs.add(program)
        counts.append(len(programs))
    return counts


SCORES = ("Scores", "cross: mean ± s.e., failed = baseline", "score", draw_distribution)
EVALUATION = [SCORES]
SEARCH = [
    ("Best so far", "executed nodes", "score", draw_best("nodes")),
    ("Best so far", "sampled tokens", "score", draw_best("tokens")),
    SCORES,
    ("Diversity", "executed nodes", "different programs", draw_diversity),
]

# ------------------------------------------------------------------ the tree

CROWDED = 90  # nodes; from there on only the path to the best has names
FAILURES = {"failed": "x", "fault": "+"}  # outcome -> mark
PATH = {"color": BLACK, "linewidth": 2.6}
SECOND = {"color": PINK, "linestyle": ":", "linewidth": 1}


def lineage(id: str) -> list[int]:
    """Sorts ids as numbers: 0.2 before 0.10."""
    return [int(part) for part in id.split(".")]


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


def parent_of(id: str) -> str:
    return id.rpartition(".")[0]


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


def colour_limits(run: RunData) -> tuple[float, float]:
    """Range of the colours for the scores and the baseline.

    The worst tenth of the scores may lie outside, so that one wild node cannot hide the rest.
    """
    scores = [run.baseline, *series(run.rows, "score")]
    ends = (0.1, 1.0) if run.higher_is_better else (0.0, 0.9)
    low, high = np.nanquantile(scores, ends).tolist()
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def tree_size(run: RunData) -> tuple[float, float]:
    """Width and height in inches."""
    xs, ys = zip(*layout(run.rows).values())
    line = 0.5 if len(ys) <= CROWDED else 0.2
    width = max(9.0, 1.5 * (max(xs) + 1))
    height = max(4.0, line * (max(ys) + 1) + 1.5)
    return min(plots.PAGE_WIDTH, width), min(40.0, height)


def draw_tree(figure, run: RunData):
    """Depth to the right, siblings in a column; colour: score, shape: operator, cross: failed."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axis = figure.subplots()
    root = {"id": "0", "parent": "", "mark": "*", "score": run.baseline, "second": None}
    positions = layout(run.rows)
    path = best_path(run)
    low, high = colour_limits(run)
    colour_map = "viridis" if run.higher_is_better else "viridis_r"
    shade = ScalarMappable(Normalize(low, high), colour_map)
    for row in [root, *run.rows]:
        at = positions[row["id"]]
        on_path = row["id"] in path
        if row["parent"]:
            look = PATH if on_path else {"color": "#bbbbbb", "linewidth": 1}
            draw_edge(axis, positions[row["parent"]], at, look)
        if row["second"]:
            draw_edge(axis, positions[row["second"]], at, SECOND)
        draw_node(axis, row, at, shade, on_path)
        if len(positions) <= CROWDED or on_path:
            draw_name(axis, row, at, on_path)
    axis.set(yticks=[], xlabel="depth")
    axis.locator_params(axis="x", integer=True)
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()
    axis.margins(x=0.06, y=0.05)
    worse = "min" if run.higher_is_better else "max"  # scores beyond the limit may lie there
    figure.colorbar(shade, ax=axis, label=plots.score_label(run), pad=0.01, extend=worse)
    draw_tree_legend(figure, axis, run.rows)


def draw_edge(axis, start, end, look):
    axis.plot(*zip(start, end), zorder=1, **look)


def draw_node(axis, row, at, shade, on_path):
    if row["score"] is None:
        mark = FAILURES[row["outcome"]]
        axis.scatter(*at, marker=mark, color=RED, linewidths=1.8, s=75, zorder=3)
        return
    axis.scatter(
        *at,
        marker=marker_of(row["mark"]),
        color=shade.to_rgba(row["score"]),
        edgecolors=BLACK,
        linewidths=1.8 if on_path else 0.5,
        s=260 if row["id"] == "0" else 110,
        zorder=3,
    )


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


def draw_tree_legend(figure, axis, rows):
    marks = {row["op"]: row["mark"] for row in rows}
    look = {"color": "white", "edgecolors": BLACK}
    for op, mark in marks.items():
        axis.scatter([], [], marker=marker_of(mark), label=op, **look)
    outcomes = Counter(row["outcome"] for row in rows)
    for outcome, mark in FAILURES.items():
        label = f"{outcome}: {outcomes[outcome]}"
        axis.scatter([], [], marker=mark, color=RED, label=label)
    if any(row["second"] for row in rows):
        axis.plot([], [], label="second parent", **SECOND)
    axis.plot([], [], label="path to the best", **PATH)
    figure.legend(loc="outside lower center", ncols=8)
