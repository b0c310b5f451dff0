"""Plots of searches: the tree, best so far, scores, outcomes, diversity. Panels take groups, as in plots.py."""

import math
import random
import re
from statistics import median

from flatlab.runs.plots import (
    BLACK,
    BLUE,
    COLOURS,
    ORANGE,
    PINK,
    RED,
    draw_baseline,
    mean,
    shorten,
    spread,
)
from flatlab.runs.reader import RunData, number

# ------------------------------------------------------------------ numbers


def is_better(record: RunData, a: float, b: float) -> bool:
    return a > b if record.result.get("higher_is_better") is not False else a < b


def best_so_far(record: RunData, axis: str) -> list[tuple[float, float]]:
    """(x, best score up to there), the baseline at 0 first. axis: "nodes", "tokens" or "minutes"."""
    best, tokens = number(record.result.get("baseline")), 0.0
    points = [] if best is None else [(0.0, best)]
    for count, item in enumerate(record.rows, 1):
        tokens += number(item.get("tokens")) or 0.0
        score = item["score"]
        if score is not None and (best is None or is_better(record, score, best)):
            best = score
        if best is not None:
            minutes = (number(item.get("elapsed")) or 0.0) / 60
            points.append(
                ({"nodes": float(count), "tokens": tokens, "minutes": minutes}[axis], best)
            )
    return sorted(points, key=lambda point: point[0])


def value_at(points: list[tuple[float, float]], x: float) -> float:
    """The last y at or before x: what a step curve shows there. A run that has ended keeps its value."""
    return next((y for at, y in reversed(points) if at <= x), math.nan)


# ------------------------------------------------------------------ panels of a search


def draw_best(axis_name):
    def draw(axis, groups):
        for group in groups:
            curves = [best_so_far(run, axis_name) for run in group.runs]
            xs = sorted({x for points in curves for x, _ in points})
            mids, stds = spread([[value_at(points, x) for x in xs] for points in curves])
            many = len(group.runs) > 1
            axis.step(
                xs,
                mids,
                where="post",
                color=group.colour,
                linewidth=2.2,
                label="best so far" if len(groups) == 1 else None,
            )
            if many:
                axis.fill_between(
                    xs,
                    [m - s for m, s in zip(mids, stds)],
                    [m + s for m, s in zip(mids, stds)],
                    step="post",
                    color=group.colour,
                    alpha=0.15,
                    linewidth=0,
                )
        draw_baseline(axis, groups)

    return draw


def draw_distribution(axis, groups):
    """Scores of all nodes: by mode where there are several, else by operator. Failures are counted under each name."""
    many = len(groups) > 1
    modes = {row.get("sampling_mode") for group in groups for run in group.runs for row in run.rows}
    field = "group" if many else "mode" if len(modes) > 1 else "op"
    parts = {}
    for group in groups:
        for run in group.runs:
            for row in run.rows:
                parts.setdefault(group.label if many else row[field] or "none", []).append(
                    (group, row)
                )
    rng = random.Random(0)
    for place, (name, rows) in enumerate(parts.items()):
        scores = [row["score"] for _, row in rows if row["score"] is not None]
        colour = rows[0][0].colour if many else COLOURS[place % len(COLOURS)]
        axis.scatter(
            [place + rng.uniform(-0.22, 0.22) for _ in scores],
            scores,
            s=16,
            alpha=0.5,
            color=colour,
            linewidths=0,
        )
        if scores:
            axis.hlines(median(scores), place - 0.32, place + 0.32, color=colour, linewidth=2.5)
    names = [
        f"{shorten(name, 22)}\nN={len(rows)}, {sum(row['score'] is None and row.get('status') != 'fault' for _, row in rows)} failed"
        for name, rows in parts.items()
    ]
    slanted = {"rotation": 25, "ha": "right"} if len(names) > 4 else {}
    axis.set_xticks(range(len(names)), names, fontsize=9, **slanted)
    axis.set_xlim(-0.6, len(names) - 0.4)
    axis.set_title(
        {"group": "Scores of the nodes", "mode": "Scores by mode", "op": "Scores by operator"}[
            field
        ]
    )
    draw_baseline(axis, groups)
    axis.plot([], [], color="#888888", linewidth=2.5, label="median")


def draw_outcomes(axis, groups):
    """How nodes ended: by operator for one group, else by group."""
    parts = {}
    for group in groups:
        for run in group.runs:
            for row in run.rows:
                outcome = (
                    "fault"
                    if row.get("status") == "fault"
                    else "failed"
                    if row["score"] is None
                    else "valid"
                )
                counts = parts.setdefault(
                    group.label if len(groups) > 1 else row["op"] or "?",
                    {"valid": 0, "failed": 0, "fault": 0},
                )
                counts[outcome] += 1
    left = [0] * len(parts)
    for outcome, colour, hatch in (
        ("valid", BLUE, ""),
        ("failed", ORANGE, "///"),
        ("fault", "#999999", "xxx"),
    ):
        counts = [part[outcome] for part in parts.values()]
        if sum(counts):
            axis.barh(
                range(len(parts)),
                counts,
                left=left,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                height=0.6,
                label=outcome,
            )
        for place, count in enumerate(counts):
            if count:
                axis.text(
                    left[place] + count / 2,
                    place,
                    count,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if colour == BLUE else BLACK,
                    fontweight="bold",
                    bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.5},
                )
        left = [a + b for a, b in zip(left, counts)]
    axis.set_yticks(range(len(parts)), [shorten(name, 26) for name in parts])
    axis.invert_yaxis()


def draw_diversity(axis, groups):
    """How many model families and libraries a tree has tried after so many nodes."""
    from flatlab.tree import prompts

    for group in groups:
        for dashed in False, True:
            curves = []
            for run in group.runs:
                seen, counts = set(), [0.0]
                for row in run.rows:
                    seen |= (
                        imports(row["code"])
                        if dashed
                        else prompts.families(row["idea"])
                        if row["idea"]
                        else set()
                    )
                    counts.append(float(len(seen)))
                curves.append(counts)
            longest = max(map(len, curves))
            mids, _ = spread([counts + [counts[-1]] * (longest - len(counts)) for counts in curves])
            name = "imported modules" if dashed else "model families named by ideas"
            colour = group.colour if len(groups) > 1 else (ORANGE if dashed else BLUE)
            text = name if group is groups[0] else None
            axis.plot(
                range(longest),
                mids,
                color=colour,
                linestyle="--" if dashed else "-",
                linewidth=2,
                label=text,
                drawstyle="steps-post",
            )
        distances = [
            d
            for run in group.runs
            if isinstance(run.result.get("diversity"), dict)
            and (d := number(run.result["diversity"].get("idea_distance"))) is not None
        ]
        if distances:
            what = f"{shorten(group.label, 16)}: " if len(groups) > 1 else ""
            axis.plot([], [], " ", label=f"{what}mean distance of ideas {mean(distances):.2f}")
    axis.yaxis.get_major_locator().set_params(integer=True)


def imports(code: dict) -> set[str]:
    """Modules that a node's files import."""
    return {
        name
        for text in code.values()
        for name in re.findall(r"^\s*(?:import|from)\s+(\w+)", str(text), re.M)
    }


SEARCH = [
    ("Best so far", "executed nodes", "score", draw_best("nodes")),
    ("Best so far", "sampled tokens", "score", draw_best("tokens")),
    ("Best so far", "minutes", "score", draw_best("minutes")),
    ("Scores", "", "score", draw_distribution),
    ("Outcomes", "nodes", "", draw_outcomes),
    ("Diversity", "executed nodes", "distinct so far", draw_diversity),
]

# ------------------------------------------------------------------ the tree

SHAPES = {
    "draft": ("o", "draft"),
    "improve": ("^", "improve"),
    "debug": ("s", "debug"),
    "crossover": ("D", "crossover"),
}


def layout(items: list[dict]) -> dict[str, tuple[float, int, str]]:
    """id -> (place among siblings and leaves, depth, parent id); the root is "0". Works for any set of lineage ids:
    a node whose parent is missing hangs on the next one above that is there."""
    ids = {"0": ""}
    for item in sorted(items, key=lambda item: item["id"].count(".")):
        above = item["id"].rpartition(".")[0]
        while above and above not in ids:
            above = above.rpartition(".")[0]
        if item["id"] != "0":
            ids[item["id"]] = above or "0"
    children = {id: [] for id in ids}
    for id, parent in ids.items():
        if parent:
            children[parent].append(id)
    order, stack = [], ["0"]
    while stack:  # not recursive: a chain may be long
        order.append(stack.pop())
        stack += sorted(
            children[order[-1]],
            key=lambda id: [int(p) if p.isdigit() else 0 for p in id.split(".")],
            reverse=True,
        )
    depth, place, leaves = {"0": 0}, {}, 0
    for id in order[1:]:
        depth[id] = depth[ids[id]] + 1
    for id in order:
        if not children[id]:
            place[id], leaves = float(leaves), leaves + 1
    for id in reversed(order):
        if children[id]:
            place[id] = (place[children[id][0]] + place[children[id][-1]]) / 2
    return {id: (place[id], depth[id], ids[id]) for id in order}


def best_path(record: RunData) -> list[str]:
    """From the root to the best node; recomputed, so that it is right while the run goes on."""
    best_id, best = "0", number(record.result.get("baseline"))
    for row in record.rows:
        score = row["score"]
        if score is not None and (best is None or is_better(record, score, best)):
            best_id, best = row["id"], score
    parts = best_id.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def colour_limits(record: RunData, scores: list[float]) -> tuple[float, float]:
    """Range of the colours. The worst tenth of the scores may lie outside: one wild node cannot hide the rest."""
    ordered = sorted(scores, reverse=record.result.get("higher_is_better") is False)
    worst, best = ordered[len(ordered) // 10], ordered[-1]
    low, high = min(worst, best), max(worst, best)
    return (
        (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))
    )


def tree_size(record: RunData) -> tuple[float, float]:
    """Width and height in inches."""
    places = layout(record.rows)
    leaves, depth = (
        max(y for y, _, _ in places.values()) + 1,
        max(x for _, x, _ in places.values()) + 1,
    )
    return min(30.0, max(9.0, 1.5 * depth)), min(
        40.0, max(4.0, (0.5 if len(places) <= 90 else 0.2) * leaves + 1.5)
    )


def draw_tree(figure, record: RunData):
    """Depth to the right, siblings below each other; colour: score, shape: operator, red cross: failed."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve
    from matplotlib.patheffects import withStroke

    rows, places, path = (
        {row["id"]: row for row in record.rows},
        layout(record.rows),
        best_path(record),
    )
    axis, baseline = figure.subplots(), number(record.result.get("baseline"))
    scores = {id: row["score"] for id, row in rows.items() if row["score"] is not None}
    everything = list(scores.values()) + ([] if baseline is None else [baseline])
    norm = Normalize(*colour_limits(record, everything or [0.0, 1.0]))
    shade = ScalarMappable(
        norm, "viridis_r" if record.result.get("higher_is_better") is False else "viridis"
    )
    modes = sorted({row["sampling_mode"] for row in record.rows} - {"", "none"})
    edges = (
        {mode: COLOURS[place % len(COLOURS)] for place, mode in enumerate(modes)}
        if len(modes) > 1
        else {}
    )
    crowded = len(places) > 90
    size = 45 if crowded else 110
    for id, (y, x, parent) in places.items():
        if parent:
            y0, x0, _ = places[parent]
            bold, curve = id in path, [(x0, y0), ((x0 + x) / 2, y0), ((x0 + x) / 2, y), (x, y)]
            axis.add_patch(
                PathPatch(
                    Curve(curve, [Curve.MOVETO] + 3 * [Curve.CURVE4]),
                    fill=False,
                    capstyle="round",
                    edgecolor=BLACK if bold else "#bbbbbb",
                    linewidth=2.6 if bold else 1,
                    zorder=1,
                )
            )
        second = rows.get(id, {}).get("second")
        if second in places:
            axis.plot(
                [places[second][1], x],
                [places[second][0], y],
                color=PINK,
                linewidth=1,
                linestyle=":",
                zorder=1,
            )
    for id, (y, x, _) in places.items():
        row, score = rows.get(id, {}), scores.get(id, baseline if id == "0" else None)
        shape = "*" if id == "0" else SHAPES.get(row.get("op"), ("o", ""))[0]
        if score is None:
            axis.scatter(
                x,
                y,
                s=size * 0.7,
                marker="x" if row.get("status") != "fault" else "+",
                color=RED,
                linewidths=1.8,
                zorder=3,
            )
        else:
            axis.scatter(
                x,
                y,
                s=size * (2.4 if id == "0" else 1),
                marker=shape,
                color=shade.to_rgba(score),
                zorder=3,
                edgecolors=edges.get(row.get("sampling_mode"), BLACK),
                linewidths=1.8 if id in path or edges else 0.5,
            )
        if not crowded or id in path:
            text = (
                "baseline" if id == "0" else id if len(id) < 9 else f"node {row.get('order', '?')}"
            )
            value = "" if score is None else f"  {score:.4g}"
            axis.annotate(
                f"{shorten(text, 12)}{value}",
                (x, y),
                (0, 8 if id != "0" else 11),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                fontweight="bold" if id in path else "normal",
                zorder=4,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )  # readable on an edge
    axis.set(xticks=range(max(x for _, x, _ in places.values()) + 1), yticks=[], xlabel="depth")
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.invert_yaxis()
    axis.margins(x=0.06, y=0.08 if len(places) < 30 else 0.03)
    metric = shorten(record.result.get("metric", "score"), 40)
    better = "lower" if record.result.get("higher_is_better") is False else "higher"
    figure.colorbar(
        shade, ax=axis, label=f"{metric}, {better} is better", shrink=0.8, aspect=30, pad=0.01
    )
    for mark, label in [
        SHAPES[op] for op in SHAPES if any(row.get("op") == op for row in record.rows)
    ]:
        axis.scatter([], [], marker=mark, color="white", edgecolors=BLACK, label=label)
    for mode, colour in edges.items():
        axis.scatter(
            [],
            [],
            marker="o",
            color="white",
            edgecolors=colour,
            linewidths=1.8,
            label=f"mode {shorten(mode, 10)}",
        )
    axis.scatter(
        [],
        [],
        marker="x",
        color=RED,
        label=f"failed: {sum(r.get('status') != 'fault' for r in rows.values() if r['id'] not in scores)}",
    )
    if any(row.get("status") == "fault" for row in rows.values()):
        axis.scatter([], [], marker="+", color=RED, label="fault (sandbox broke)")
    if any(row.get("second") in places for row in rows.values()):
        axis.plot([], [], color=PINK, linestyle=":", label="second parent")
    axis.plot([], [], color=BLACK, linewidth=2.6, label="path to the best")
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08 if len(places) > 20 else -0.2),
        ncols=7,
        frameon=False,
    )
