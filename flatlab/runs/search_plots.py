"""Plots of searches: the tree, best so far, scores.

Panels take groups, as in plots.py.
"""

from __future__ import annotations

import random
from collections import Counter
from statistics import median

import numpy as np

from flatlab.runs.plots import (
    BLACK,
    COLOURS,
    GREY,
    PAGE_WIDTH,
    PINK,
    RED,
    draw_baseline,
    series,
    shorten,
    spread,
    wrapped,
)
from flatlab.runs.reader import RunData

# ------------------------------------------------------------------ numbers


def best_so_far(run: RunData, axis: str) -> list[tuple[float, float]]:
    """(x, best score up to there), first the baseline. axis: "nodes" or "tokens"."""
    rows = [{"score": run.baseline, "tokens": 0}, *run.rows]
    better = np.fmax if run.higher_is_better else np.fmin
    best = better.accumulate(series(rows, "score"))
    xs = np.arange(len(rows), dtype=float)
    if axis == "tokens":
        xs = np.nancumsum(series(rows, "tokens"))
    known = np.isfinite(best)
    return list(zip(xs[known].tolist(), best[known].tolist()))


def values_at(points: list[tuple[float, float]], xs) -> np.ndarray:
    """The last y at or before each x, as a step curve shows it; NaN before the first point.

    A run that has ended keeps its value.
    """
    at = np.array([x for x, _ in points])
    values = np.array([np.nan, *(y for _, y in points)])
    return values[np.searchsorted(at, xs, side="right")]


def counted_scores(run: RunData, rows: list[dict]) -> list[float]:
    """The scores of nodes as every table counts them: a failed node has the baseline's score.

    Faults of the sandbox are left out, and so are failed nodes of a run without a baseline.
    """
    scores = []
    for row in rows:
        score = run.baseline if row["score"] is None else row["score"]
        if row["outcome"] != "fault" and score is not None:
            scores.append(score)
    return scores


# ------------------------------------------------------------------ panels of a search


def draw_best(axis_name):
    def draw(axis, groups):
        for group in groups:
            curves = [best_so_far(run, axis_name) for run in group.runs]
            xs = sorted({x for points in curves for x, _ in points})
            middle, low, high = spread([values_at(points, xs) for points in curves])
            label = "best so far" if len(groups) == 1 else None
            look = {"color": group.colour, "linewidth": 2.2, "label": label}
            axis.step(xs, middle, where="post", **look)
            if len(group.runs) > 1:
                shade = {"color": group.colour, "alpha": 0.15, "linewidth": 0}
                axis.fill_between(xs, low, high, step="post", **shade)
        draw_baseline(axis, groups)

    return draw


def draw_distribution(axis, groups):
    """Scores of all nodes by group, else by sampling mode, else by operator.

    The line is the median of valid and failed nodes; failed ones count as the baseline.
    """
    nodes = [(group, run, row) for group in groups for run in group.runs for row in run.rows]
    what = "operator"
    if len(groups) > 1:
        what = "group"
    elif len({row["sampling_mode"] for _, _, row in nodes}) > 1:
        what = "sampling mode"
    parts = {}
    for group, run, row in nodes:
        mode = row["sampling_mode"] or "none"
        names = {"group": group.label, "sampling mode": mode, "operator": row["op"]}
        parts.setdefault(names[what], []).append((group, run, row))
    rng = random.Random(0)
    names = []
    for place, (name, members) in enumerate(parts.items()):
        colour = members[0][0].colour if what == "group" else COLOURS[place % len(COLOURS)]
        scores, counted = [], []
        for _, run, row in members:
            counted += counted_scores(run, [row])
            if row["score"] is not None:
                scores.append(row["score"])
        xs = [place + rng.uniform(-0.22, 0.22) for _ in scores]
        axis.scatter(xs, scores, s=16, alpha=0.5, color=colour, linewidths=0)
        if counted:
            ends = place - 0.32, place + 0.32
            axis.hlines(median(counted), *ends, color=colour, linewidth=2.5)
        failed = sum(row["outcome"] == "failed" for _, _, row in members)
        names.append(f"{wrapped(name, 22, 66)}\nN={len(members)}, {failed} failed")
    look = {"fontsize": 8}
    if len(names) > 3:
        look = {"fontsize": 6, "rotation": 35, "ha": "right"}
    axis.set_xticks(range(len(names)), names, **look)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_title(f"Scores by {what}")
    draw_baseline(axis, groups)
    axis.plot([], [], color=GREY, linewidth=2.5, label="median, failed = baseline")


SEARCH = [
    ("Best so far", "executed nodes", "score", draw_best("nodes")),
    ("Best so far", "sampled tokens", "score", draw_best("tokens")),
    ("Scores", "", "score", draw_distribution),
]

# ------------------------------------------------------------------ the tree

SHAPES = {"draft": "o", "improve": "^", "debug": "s", "crossover": "D"}
CROWDED = 90  # nodes; from there on only the path to the best has names


def lineage(id: str) -> list[int]:
    """Sorts ids as numbers: 0.2 before 0.10."""
    return [int(part) for part in id.split(".")]


def layout(rows: list[dict]) -> dict[str, tuple[float, int, str]]:
    """id -> (place from top to bottom, depth, parent id), in the order of a printed tree."""
    parents = {"0": ""}
    for row in rows:
        parents[row["id"]] = row["id"].rpartition(".")[0]
    children = {id: [] for id in parents}
    for id, parent in parents.items():
        if parent:
            children[parent].append(id)
    order, stack = [], ["0"]
    while stack:  # not recursive: a chain may be long
        order.append(stack.pop())
        stack += sorted(children[order[-1]], key=lineage, reverse=True)
    depth = {"0": 0}
    for id in order[1:]:
        depth[id] = depth[parents[id]] + 1
    leaves = [id for id in order if not children[id]]
    place = {id: float(index) for index, id in enumerate(leaves)}
    for id in reversed(order):
        if children[id]:
            first, last = children[id][0], children[id][-1]
            place[id] = (place[first] + place[last]) / 2
    return {id: (place[id], depth[id], parents[id]) for id in order}


def best_path(run: RunData) -> list[str]:
    """From the root to the best node; recomputed, so that it is right while the run goes on."""
    rows = [{"id": "0", "score": run.baseline}, *run.rows]
    valid = [row for row in rows if row["score"] is not None]
    pick = max if run.higher_is_better else min
    path = [pick(valid, key=lambda row: row["score"], default=rows[0])["id"]]
    while "." in path[0]:
        path.insert(0, path[0].rpartition(".")[0])
    return path


def colour_limits(run: RunData, scores: list[float]) -> tuple[float, float]:
    """Range of the colours for these scores and the baseline.

    The worst tenth of the scores may lie outside, so that one wild node cannot hide the rest.
    """
    scores = scores + ([] if run.baseline is None else [run.baseline])
    ordered = sorted(scores or [0.0, 1.0], reverse=not run.higher_is_better)
    low, high = sorted([ordered[len(ordered) // 10], ordered[-1]])
    if high > low:
        return low, high
    margin = 0.5 * (abs(low) or 1)
    return low - margin, high + margin


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
    rows = {row["id"]: row for row in run.rows}
    places = layout(run.rows)
    path = best_path(run)
    colour_map = "viridis" if run.higher_is_better else "viridis_r"
    scores = [row["score"] for row in run.rows if row["score"] is not None]
    shade = ScalarMappable(Normalize(*colour_limits(run, scores)), colour_map)
    for id, (y, x, parent) in places.items():
        row = rows.get(id, {})
        if parent:
            y0, x0, _ = places[parent]
            look = {"color": "#bbbbbb", "linewidth": 1}
            if id in path:
                look = {"color": BLACK, "linewidth": 2.6}
            axis.plot([x0, x], [y0, y], zorder=1, **look)
        if row.get("second") in places:
            y0, x0, _ = places[row["second"]]
            look = {"color": PINK, "linestyle": ":", "linewidth": 1}
            axis.plot([x0, x], [y0, y], zorder=1, **look)
        score = run.baseline if id == "0" else row.get("score")
        draw_node(axis, id, row, score, (x, y), shade, id in path)
        if len(places) <= CROWDED or id in path:
            draw_name(axis, id, row, score, (x, y), id in path)
    depth = max(x for _, x, _ in places.values())
    axis.set(xticks=range(depth + 1), yticks=[], xlabel="depth")
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()
    axis.margins(x=0.06, y=0.08 if len(places) < 30 else 0.03)
    metric = shorten(run.result.get("metric", "score"), 40)
    better = "higher is better" if run.higher_is_better else "lower is better"
    figure.colorbar(shade, ax=axis, label=f"{metric}, {better}", pad=0.01)
    draw_tree_legend(figure, axis, run.rows)


def draw_node(axis, id, row, score, at, shade, on_path):
    if score is None:
        mark = "+" if row.get("status") == "fault" else "x"
        axis.scatter(*at, s=75, marker=mark, color=RED, linewidths=1.8, zorder=3)
        return
    root = id == "0"
    axis.scatter(
        *at,
        s=260 if root else 110,
        marker="*" if root else SHAPES.get(row.get("op"), "o"),
        color=shade.to_rgba(score),
        edgecolors=BLACK,
        linewidths=1.8 if on_path else 0.5,
        zorder=3,
    )


def draw_name(axis, id, row, score, at, on_path):
    """Id and score above a node."""
    name = id if len(id) < 9 else f"node {row.get('order', '?')}"
    name = "baseline" if id == "0" else shorten(name, 12)
    value = "" if score is None else f"  {score:.4g}"
    axis.annotate(
        name + value,
        at,
        (0, 11 if id == "0" else 8),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        fontweight="bold" if on_path else "normal",
        zorder=4,
    )


def draw_tree_legend(figure, axis, rows):
    for op, mark in SHAPES.items():
        if any(row["op"] == op for row in rows):
            axis.scatter([], [], marker=mark, color="white", edgecolors=BLACK, label=op)
    outcomes = Counter(row["outcome"] for row in rows)
    axis.scatter([], [], marker="x", color=RED, label=f"failed: {outcomes['failed']}")
    if outcomes["fault"]:
        label = f"fault (sandbox broke): {outcomes['fault']}"
        axis.scatter([], [], marker="+", color=RED, label=label)
    if any(row["second"] for row in rows):
        axis.plot([], [], color=PINK, linestyle=":", label="second parent")
    axis.plot([], [], color=BLACK, linewidth=2.6, label="path to the best")
    figure.legend(loc="outside lower center", ncols=7, frameon=False)
