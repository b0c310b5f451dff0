"""Plots of searches: the tree, best so far, scores, outcomes, diversity.

Panels take groups, as in plots.py.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from statistics import median

import numpy as np

from flatlab.runs.plots import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    PAGE_WIDTH,
    PINK,
    RED,
    SKY,
    draw_baseline,
    mean,
    shorten,
    spread,
    wrapped,
)
from flatlab.runs.reader import RunData, number

# ------------------------------------------------------------------ numbers


def is_better(run: RunData, a: float, b: float) -> bool:
    return a > b if run.higher_is_better else a < b


def best_so_far(run: RunData, axis: str) -> list[tuple[float, float]]:
    """(x, best score up to there), first the baseline. axis: "nodes", "tokens" or "minutes"."""
    best = run.baseline
    tokens = 0.0
    points = [] if best is None else [(0.0, best)]
    for count, row in enumerate(run.rows, 1):
        tokens += number(row.get("tokens")) or 0.0
        minutes = (number(row.get("elapsed")) or 0.0) / 60
        score = row["score"]
        if score is not None and (best is None or is_better(run, score, best)):
            best = score
        if best is not None:
            x = {"nodes": float(count), "tokens": tokens, "minutes": minutes}[axis]
            points.append((x, best))
    return sorted(points, key=lambda point: point[0])


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
        if row["status"] != "fault" and score is not None:
            scores.append(score)
    return scores


def outcome_of(row: dict) -> str:
    if row["status"] == "fault":
        return "fault"
    return "failed" if row["score"] is None else "valid"


# ------------------------------------------------------------------ panels of a search

OUTCOMES = [("valid", SKY, ""), ("failed", ORANGE, "///"), ("fault", "#999999", "xxx")]


def draw_best(axis_name):
    def draw(axis, groups):
        for group in groups:
            curves = [best_so_far(run, axis_name) for run in group.runs]
            xs = sorted({x for points in curves for x, _ in points})
            if not xs:
                continue
            middle, low, high = spread([values_at(points, xs) for points in curves])
            colour = group.colour
            label = "best so far" if len(groups) == 1 else None
            axis.step(
                xs,
                middle,
                where="post",
                color=colour,
                linewidth=2.2,
                label=label,
            )
            if len(group.runs) > 1:
                axis.fill_between(
                    xs,
                    low,
                    high,
                    step="post",
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
        draw_baseline(axis, groups)

    return draw


def draw_distribution(axis, groups):
    """Scores of all nodes by group, else by sampling mode, else by operator.

    The line is the median of valid and failed nodes; failed ones count as the baseline.
    """
    modes = {row["sampling_mode"] for group in groups for run in group.runs for row in run.rows}
    field, title = ("op", "Scores by operator")
    if len(groups) > 1:
        field, title = ("group", "Scores of the nodes")
    elif len(modes) > 1:
        field, title = ("sampling_mode", "Scores by sampling mode")
    parts = {}
    for group in groups:
        for run in group.runs:
            for row in run.rows:
                name = group.label if field == "group" else row[field] or "none"
                parts.setdefault(name, []).append((group, run, row))
    rng = random.Random(0)
    names = []
    for place, (name, members) in enumerate(parts.items()):
        colour = members[0][0].colour if field == "group" else COLOURS[place % len(COLOURS)]
        scores = [row["score"] for _, _, row in members if row["score"] is not None]
        counted = [score for _, run, row in members for score in counted_scores(run, [row])]
        xs = [place + rng.uniform(-0.22, 0.22) for _ in scores]
        axis.scatter(
            xs,
            scores,
            s=16,
            alpha=0.5,
            color=colour,
            linewidths=0,
        )
        if counted:
            middle = median(counted)
            axis.hlines(
                middle,
                place - 0.32,
                place + 0.32,
                color=colour,
                linewidth=2.5,
            )
        failed = sum(outcome_of(row) == "failed" for _, _, row in members)
        names.append(f"{wrapped(name, 22, 66)}\nN={len(members)}, {failed} failed")
    if len(names) > 10:
        names = [name.partition("\n")[0][:14] for name in names]
    look = {"fontsize": 8 if len(names) < 5 else 6}
    if len(names) > 3:
        look |= {"rotation": 35, "ha": "right"}
    axis.set_xticks(range(len(names)), names, **look)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_title(title)
    draw_baseline(axis, groups)
    axis.plot(
        [],
        [],
        color=GREY,
        linewidth=2.5,
        label="median, failed = baseline",
    )


def draw_outcomes(axis, groups):
    """How nodes ended: by operator for one group, else by group."""
    parts = {}
    for group in groups:
        for run in group.runs:
            for row in run.rows:
                name = group.label if len(groups) > 1 else row["op"] or "?"
                parts.setdefault(name, Counter())[outcome_of(row)] += 1
    few = len(parts) <= 8
    left = np.zeros(len(parts))
    for outcome, colour, hatch in OUTCOMES:
        counts = np.array([part[outcome] for part in parts.values()])
        if counts.any():
            look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": outcome}
            bars = axis.barh(range(len(parts)), counts, left=left, height=0.6, **look)
            labels = [str(count) if count and few else "" for count in counts]
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
            axis.bar_label(
                bars,
                labels,
                label_type="center",
                fontweight="bold",
                bbox=box,
            )
            left += counts
    labels = [wrapped(name, 26, 52 if few else 26) for name in parts]
    axis.set_yticks(
        range(len(parts)),
        labels,
        fontsize=8 if few else 6,
    )
    axis.invert_yaxis()


def draw_diversity(axis, groups):
    """How many model families and libraries a tree has tried after so many nodes."""
    import pandas

    alone = len(groups) == 1
    for group in groups:
        for name, found_in, dashed in (
            ("model families named by ideas", families_of, False),
            ("imported modules", imports_of, True),
        ):
            # a run that has ended keeps its last count
            curves = pandas.DataFrame([distinct_so_far(run, found_in) for run in group.runs])
            middle = curves.ffill(axis=1).mean()
            colour = group.colour if not alone else (ORANGE if dashed else BLUE)
            label = name if group is groups[0] else None
            style = "--" if dashed else "-"
            axis.step(
                range(len(middle)),
                middle,
                where="post",
                color=colour,
                linestyle=style,
                linewidth=2,
                label=label,
            )
        distances = [idea_distance(run) for run in group.runs]
        if alone and np.isfinite(distances).any():
            axis.plot([], [], " ", label=f"mean distance of ideas {mean(distances):.2f}")


def idea_distance(run: RunData) -> float:
    diversity = run.result.get("diversity")
    distance = number(diversity.get("idea_distance")) if isinstance(diversity, dict) else None
    return np.nan if distance is None else distance


def distinct_so_far(run: RunData, found_in) -> list[float]:
    """How many different things `found_in` finds in the first 0, 1, 2, ... nodes."""
    seen, counts = set(), [0.0]
    for row in run.rows:
        seen |= found_in(row)
        counts.append(float(len(seen)))
    return counts


def families_of(row: dict) -> set[str]:
    from flatlab.tree import prompts

    return prompts.families(row["idea"]) if row["idea"] else set()


def imports_of(row: dict) -> set[str]:
    """Modules that a node's files import."""
    found = set()
    for text in row["code"].values():
        found |= set(re.findall(r"^\s*(?:import|from)\s+(\w+)", str(text), re.M))
    return found


SEARCH = [
    ("Best so far", "executed nodes", "score", draw_best("nodes")),
    ("Best so far", "sampled tokens", "score", draw_best("tokens")),
    ("Best so far", "minutes", "score", draw_best("minutes")),
    ("Scores", "", "score", draw_distribution),
    ("Outcomes", "nodes", "", draw_outcomes),
    ("Diversity", "executed nodes", "distinct so far", draw_diversity),
]

# ------------------------------------------------------------------ the tree

SHAPES = {"draft": "o", "improve": "^", "debug": "s", "crossover": "D"}
CROWDED = 90  # nodes; from there on only the path to the best has names


def lineage(id: str) -> list[int]:
    """Sorts ids as numbers: 0.2 before 0.10."""
    return [int(part) if part.isdigit() else 0 for part in id.split(".")]


def parents_of(rows: list[dict]) -> dict[str, str]:
    """id -> parent id, the root "0" first; without its parent a node hangs on the next above."""
    parents = {"0": ""}
    for row in sorted(rows, key=lambda row: row["id"].count(".")):
        if row["id"] != "0":
            above = row["id"].rpartition(".")[0]
            while above and above not in parents:
                above = above.rpartition(".")[0]
            parents[row["id"]] = above or "0"
    return parents


def layout(rows: list[dict]) -> dict[str, tuple[float, int, str]]:
    """id -> (place from top to bottom, depth, parent id), in the order of a printed tree."""
    parents = parents_of(rows)
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
    best_id, best = "0", run.baseline
    for row in run.rows:
        score = row["score"]
        if score is not None and (best is None or is_better(run, score, best)):
            best_id, best = row["id"], score
    parts = best_id.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def colour_limits(run: RunData, scores: list[float]) -> tuple[float, float]:
    """Range of the colours for these scores and the baseline.

    The worst tenth of the scores may lie outside, so that one wild node cannot hide the rest.
    """
    scores = scores + ([] if run.baseline is None else [run.baseline])
    ordered = sorted(scores or [0.0, 1.0], reverse=not run.higher_is_better)
    low, high = sorted([ordered[len(ordered) // 10], ordered[-1]])
    if high > low:
        return low, high
    return low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)


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
    modes = sorted(
        {row["sampling_mode"] for row in run.rows} - {"", "none"},
    )
    edges = {}
    if len(modes) > 1:
        edges = {mode: COLOURS[place % len(COLOURS)] for place, mode in enumerate(modes)}
    crowded = len(places) > CROWDED
    for id, (y, x, parent) in places.items():
        row = rows.get(id, {})
        if parent:
            draw_edge(axis, places[parent], (y, x), bold=id in path)
        if row.get("second") in places:
            y2, x2, _ = places[row["second"]]
            axis.plot(
                [x2, x],
                [y2, y],
                ":",
                color=PINK,
                linewidth=1,
                zorder=1,
            )
        score = run.baseline if id == "0" else row.get("score")
        draw_node(axis, id, row, score, (x, y), shade, edges, crowded, id in path)
        if not crowded or id in path:
            draw_name(axis, id, row, score, (x, y), id in path)
    depth = max(x for _, x, _ in places.values())
    axis.set(
        xticks=range(depth + 1),
        yticks=[],
        xlabel="depth",
    )
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()
    axis.margins(
        x=0.06,
        y=0.08 if len(places) < 30 else 0.03,
    )
    metric = shorten(run.result.get("metric", "score"), 40)
    better = "higher is better" if run.higher_is_better else "lower is better"
    figure.colorbar(
        shade,
        ax=axis,
        label=f"{metric}, {better}",
        shrink=0.8,
        aspect=30,
        pad=0.01,
    )
    draw_tree_legend(axis, run.rows, places, edges)


def draw_edge(axis, start, end, bold: bool):
    """A curve from a parent to its child."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    y0, x0 = start[:2]
    y, x = end
    middle = (x0 + x) / 2
    points = [(x0, y0), (middle, y0), (middle, y), (x, y)]
    curve = Curve(
        points,
        [Curve.MOVETO] + 3 * [Curve.CURVE4],
    )
    colour, width = (BLACK, 2.6) if bold else ("#bbbbbb", 1)
    axis.add_patch(
        PathPatch(
            curve,
            fill=False,
            capstyle="round",
            edgecolor=colour,
            linewidth=width,
            zorder=1,
        )
    )


def draw_node(axis, id, row, score, at, shade, edges, crowded, on_path):
    size = 45 if crowded else 110
    if score is None:
        mark = "+" if row.get("status") == "fault" else "x"
        axis.scatter(
            *at,
            s=size * 0.7,
            marker=mark,
            color=RED,
            linewidths=1.8,
            zorder=3,
        )
        return
    root = id == "0"
    axis.scatter(
        *at,
        s=size * (2.4 if root else 1),
        marker="*" if root else SHAPES.get(row.get("op"), "o"),
        color=shade.to_rgba(score),
        edgecolors=edges.get(row.get("sampling_mode"), BLACK),
        linewidths=1.8 if on_path or edges else 0.5,
        zorder=3,
    )


def draw_name(axis, id, row, score, at, on_path):
    """Id and score above a node, with a white edge so that it can be read on a line."""
    from matplotlib.patheffects import withStroke

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
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
    )


def draw_tree_legend(axis, rows, places, edges):
    for op, mark in SHAPES.items():
        if any(row["op"] == op for row in rows):
            axis.scatter(
                [],
                [],
                marker=mark,
                color="white",
                edgecolors=BLACK,
                label=op,
            )
    for mode, colour in edges.items():
        label = f"mode {shorten(mode, 10)}"
        axis.scatter(
            [],
            [],
            color="white",
            edgecolors=colour,
            linewidths=1.8,
            label=label,
        )
    outcomes = Counter(map(outcome_of, rows))
    axis.scatter(
        [],
        [],
        marker="x",
        color=RED,
        label=f"failed: {outcomes['failed']}",
    )
    if outcomes["fault"]:
        label = f"fault (sandbox broke): {outcomes['fault']}"
        axis.scatter(
            [],
            [],
            marker="+",
            color=RED,
            label=label,
        )
    if any(row["second"] in places for row in rows):
        axis.plot(
            [],
            [],
            color=PINK,
            linestyle=":",
            label="second parent",
        )
    axis.plot(
        [],
        [],
        color=BLACK,
        linewidth=2.6,
        label="path to the best",
    )
    below = -0.08 if len(places) > 20 else -0.2
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, below),
        ncols=7,
        frameon=False,
    )
