"""Plots of searches: the tree, best so far, scores.

Panels take groups, as in plots.py.
"""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np

from flatlab.runs.reader import RunData
from flatlab.train.metrics import standard_error
from flatlab.view.plots import (
    BLACK,
    COLOURS,
    GREY,
    PAGE_WIDTH,
    PINK,
    RED,
    draw_baseline,
    score_label,
    series,
    spread,
    wrapped,
)

# ------------------------------------------------------------------ panels of a search


def best_so_far(run: RunData, axis: str):
    """The best score after each number of nodes or tokens, first the baseline, as pandas.Series."""
    import pandas

    rows = [{"score": run.baseline, "tokens": 0}, *run.rows]
    better = np.fmax if run.higher_is_better else np.fmin
    best = better.accumulate(series(rows, "score"))
    xs = np.arange(len(rows))
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
            label = "best so far" if len(groups) == 1 else None
            look = {"color": group.colour, "linewidth": 2.2, "label": label}
            axis.step(frame.index, middle, where="post", **look)
            shade = {"color": group.colour, "alpha": 0.15, "linewidth": 0}
            axis.fill_between(frame.index, low, high, step="post", **shade)
        draw_baseline(axis, groups)

    return draw


def draw_distribution(axis, groups):
    """Scores of all nodes by the number of their group, those of a single search by operator.

    The line is the mean of valid and failed nodes, in a band of one standard error; failed ones
    count as the baseline.
    """
    by_operator = len(groups) == 1 and groups[0].runs[0].kind == "search"
    parts = {}
    for number, group in enumerate(groups, 1):
        label = str(number) if len(groups) > 1 else group.label
        for row in sum((run.rows for run in group.runs), []):
            name = row["op"] if by_operator else label
            parts.setdefault(name, []).append(row)
    colours = COLOURS if by_operator else [group.colour for group in groups]
    rng = random.Random(0)
    names = []
    for place, (name, rows) in enumerate(parts.items()):
        colour = colours[place % len(colours)]
        xs = [place + rng.uniform(-0.22, 0.22) for _ in rows]
        scores = series(rows, "score")
        axis.scatter(xs, scores, s=16, alpha=0.5, color=colour, linewidths=0)
        counted = series(rows, "counted")
        known = counted[~np.isnan(counted)]
        if len(known):
            ends = place - 0.32, place + 0.32
            mean = np.mean(known)
            error = standard_error(known.tolist()) or 0.0
            axis.hlines(mean, *ends, color=colour, linewidth=2.5)
            axis.fill_between(ends, mean - error, mean + error, color=colour, alpha=0.2)
        failed = sum(row["outcome"] == "failed" for row in rows)
        names.append(f"{wrapped(name, 10)}\nN={len(rows)}\n{failed} failed")
    rotation = 0 if len(names) < 6 else 90  # so that they do not overlap
    axis.set_xticks(range(len(names)), names, fontsize=8, rotation=rotation)
    axis.set_xlim(-0.6, len(names) - 0.4)
    draw_baseline(axis, groups)
    axis.plot([], [], color=GREY, linewidth=2.5, label="mean ± standard error, failed = baseline")


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


SCORES = ("Scores", "", "score", draw_distribution)
EVALUATION = [SCORES]
SEARCH = [
    ("Best so far", "executed nodes", "score", draw_best("nodes")),
    ("Best so far", "sampled tokens", "score", draw_best("tokens")),
    SCORES,
    ("Diversity", "executed nodes", "different programs", draw_diversity),
]

# ------------------------------------------------------------------ the tree

CROWDED = 90  # nodes; from there on only the path to the best has names


def lineage(id: str) -> list[int]:
    """Sorts ids as numbers: 0.2 before 0.10."""
    return [int(part) for part in id.split(".")]


def layout(rows: list[dict]) -> dict[str, tuple[float, int, str]]:
    """id -> (place from top to bottom, depth, parent id), in the order of a printed tree."""
    ids = sorted(["0", *(row["id"] for row in rows)], key=lineage)
    children = {id: [] for id in ids}
    for id in ids[1:]:
        children[parent_of(id)].append(id)
    leaves = [id for id in ids if not children[id]]
    place = {id: float(index) for index, id in enumerate(leaves)}
    for id in reversed(ids):
        if children[id]:
            first, last = children[id][0], children[id][-1]
            place[id] = (place[first] + place[last]) / 2
    return {id: (place[id], id.count("."), parent_of(id)) for id in ids}


def parent_of(id: str) -> str:
    return id.rpartition(".")[0]


def best_path(run: RunData) -> list[str]:
    """From the root to the node that was chosen, or to the best one while the run goes on."""
    valid = [row for row in run.rows if row["score"] is not None]
    pick = max if run.higher_is_better else min
    root = {"id": "0", "score": run.baseline}
    best = pick([root, *valid], key=lambda row: row["score"])
    path = [run.result.get("tested_id") or best["id"]]
    while path[0] != "0":
        path.insert(0, parent_of(path[0]))
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
    places = layout(run.rows).values()
    leaves = max(y for y, _, _ in places) + 1
    depth = max(x for _, x, _ in places) + 1
    line = 0.5 if len(places) <= CROWDED else 0.2
    width = max(9.0, 1.5 * depth)
    height = max(4.0, line * leaves + 1.5)
    return min(PAGE_WIDTH, width), min(40.0, height)


def draw_tree(figure, run: RunData):
    """Depth to the right, siblings in a column; colour: score, shape: operator, cross: failed."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axis = figure.subplots()
    root = {"id": "0", "mark": "*", "score": run.baseline, "second": None}
    rows = {row["id"]: row for row in [root, *run.rows]}
    places = layout(run.rows)
    path = best_path(run)
    colour_map = "viridis" if run.higher_is_better else "viridis_r"
    low, high = colour_limits(run)
    shade = ScalarMappable(Normalize(low, high), colour_map)
    for id, (y, x, parent) in places.items():
        row = rows[id]
        if parent:
            look = {"color": "#bbbbbb", "linewidth": 1}
            if id in path:
                look = {"color": BLACK, "linewidth": 2.6}
            draw_edge(axis, places[parent], places[id], look)
        if row["second"]:
            look = {"color": PINK, "linestyle": ":", "linewidth": 1}
            draw_edge(axis, places[row["second"]], places[id], look)
        draw_node(axis, row, (x, y), shade, id in path)
        if len(places) <= CROWDED or id in path:
            draw_name(axis, row, (x, y), id in path)
    depth = max(x for _, x, _ in places.values())
    axis.set(xticks=range(depth + 1), yticks=[], xlabel="depth")
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()
    axis.margins(x=0.06, y=0.08 if len(places) < 30 else 0.03)
    scores = [run.baseline, *series(run.rows, "score")]
    arrow = "min" if np.nanmin(scores) < low else "neither"
    if np.nanmax(scores) > high:
        arrow = "max"
    figure.colorbar(shade, ax=axis, label=score_label(run), pad=0.01, extend=arrow)
    draw_tree_legend(figure, axis, run.rows)


def draw_edge(axis, start, end, look):
    ys, xs, _ = zip(start, end)
    axis.plot(xs, ys, zorder=1, **look)


def draw_node(axis, row, at, shade, on_path):
    if row["score"] is None:
        mark = "+" if row["outcome"] == "fault" else "x"
        look = {"color": RED, "linewidths": 1.8}
        axis.scatter(*at, s=75, marker=mark, zorder=3, **look)
        return
    axis.scatter(
        *at,
        s=260 if row["id"] == "0" else 110,
        marker=row["mark"],
        color=shade.to_rgba(row["score"]),
        edgecolors=BLACK,
        linewidths=1.8 if on_path else 0.5,
        zorder=3,
    )


def draw_name(axis, row, at, on_path):
    """Id and score above a node, on white: no line crosses them."""
    name = "baseline" if row["id"] == "0" else row["id"]
    name = name if len(name) < 12 else f"…{name[-8:]}"
    value = "" if row["score"] is None else f"  {row['score']:.4g}"
    axis.annotate(
        name + value,
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
    look = {"color": "white", "edgecolors": BLACK}
    for op, mark in {row["op"]: row["mark"] for row in rows}.items():
        axis.scatter([], [], marker=mark, label=op, **look)
    outcomes = Counter(row["outcome"] for row in rows)
    axis.scatter([], [], marker="x", color=RED, label=f"failed: {outcomes['failed']}")
    if outcomes["fault"]:
        label = f"fault (sandbox broke): {outcomes['fault']}"
        axis.scatter([], [], marker="+", color=RED, label=label)
    if any(row["second"] for row in rows):
        axis.plot([], [], color=PINK, linestyle=":", label="second parent")
    axis.plot([], [], color=BLACK, linewidth=2.6, label="path to the best")
    figure.legend(loc="outside lower center", ncols=7, frameon=False)
