"""Pictures of runs: curves of training, imitation, searches and evaluations, and trees.

Every panel takes groups of runs. Each run is drawn thin; the mean of a group is bold, and of three
runs or more it has a band of one standard error. Sizes are those of a paper: a page is 7 inches
wide, a column 3.4. matplotlib and pandas are imported inside functions, because they are slow.
"""

import io
import re
import textwrap
from itertools import accumulate, cycle, product

import numpy as np

from flatlab.numbers import counted
from flatlab.task.value import WORST, evaluation_columns, score_text
from flatlab.view.columns import FEW_SEEDS
from flatlab.view.compare import RunGroup
from flatlab.view.reader import NOUNS, RunData, score_or_outcome
from flatlab.view.results import window_of

# Okabe and Ito: distinct with any kind of colour vision; marks and dashes are for grey print
COLOURS = "#0072B2 #D55E00 #009E73 #E69F00 #CC79A7 #56B4E9 #000000".split()
STYLES = [{"color": colour, "marker": mark} for colour, mark in zip(COLOURS, "os^DvPX")]
DASHES = ("-", "--", ":")
GREY = "#888888"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.fontsize": 7,
    "legend.labelspacing": 0.2,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
ABOVE = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "frameon": False}  # an axis
PAGE, COLUMN = 7.0, 3.4  # inches
# Kind of run -> keys of each panel; with *: a function of its own; gain_mean: of learn.py
PANELS = {
    "training": (
        "value_mean eval_value_mean",
        "reward_mean",
        "valid_share zero_variance_share",
        "reply_tokens",
        "turns",
        "seconds seconds_sample",
        "kl",
        "entropy",
        "logprob_diff_max logprob_diff_mean",
    ),
    "imitation": ("loss",),
    "search": ("*nodes", "valid_share", "gain_mean", "kl", "entropy", "live_lineages"),
    "evaluation": ("*episodes",),
}
NAMES = {  # of keys, the words of the terminal first; others are written with spaces
    "nodes": "values of the nodes and the best so far",
    "episodes": "values of the episodes of each task",
    "value_mean": "value",
    "eval_value_mean": "value, evaluations",
    "reward_mean": "reward",
    "valid_share": "valid",
    "zero_variance_share": "no signal: equal rewards",
    "reply_tokens": "tokens of an episode",
    "turns": "replies of an episode",
    "seconds": "duration of a step",
    "seconds_sample": "sampling alone",
    "kl": "kl from the untrained model",
    "entropy": "entropy of the replies",
    "logprob_diff_max": "engine and trainer differ, at most",
    "logprob_diff_mean": "on average",
    "gain_mean": "gain over the parent",
}
UNITS = {  # the first part that a key contains counts
    "value": "0: baseline, 1: reference",
    "seconds": "seconds",
    "share": "share, 0 to 1",
    "kl": "nats per token",
    "entropy": "nats per token",
    "loss": "nats per token",
    "logprob": "nats",
    "gain": "value, over the parent",
}


# ------------------------------------------------------------------ numbers


def by_step(group: RunGroup, key: str):
    """A DataFrame with a column for each run; index: updates before the rows in which one of them
    has this key, or the numbers of rows that have no step.

    An evaluation comes after the update of its step; the one before training has step -1.
    """
    import pandas

    curves = []
    for run in group.runs:
        before = evaluation_columns(run.result.get("before") or {})
        rows = enumerate([before, *(run.rounds or run.rows)], -1)
        curves.append({x_of(row, number): row.get(key) for number, row in rows})
    frame = pandas.DataFrame(curves, dtype=float).T.sort_index().dropna(how="all")
    frame.index += key.startswith("eval_")
    return frame


def x_of(row: dict, number: int) -> int:
    """The step of a row, or its number if it has none."""
    return number if row.get("step") is None else row["step"]


# ------------------------------------------------------------------ curves over steps


def draw_keys(axis, groups: list[RunGroup], keys: list[str]) -> None:
    """Quantities per step, averaged over the steps that all runs of a group have.

    The dashes tell keys apart; colours and marks tell groups apart, or the keys of a single one.
    The legend of the keys is the title of the axis, so that it covers no data.
    """
    several = len(groups) > 1
    alone = len(groups) == len(groups[0].runs) == 1
    for key, colour, dash in zip(keys, COLOURS, DASHES):
        for group, style in zip(groups, cycle(STYLES)):
            frame = by_step(group, key)
            style = style if several else style | {"color": colour}
            axis.plot(frame, dash, color=style["color"], alpha=0.3, linewidth=0.7)
            windows = frame.dropna().rolling(window_of(frame), center=True, min_periods=1)
            draw_mean(axis, windows.mean(), linestyle=dash, **style)
            if key.startswith("eval_") and alone:
                errors = by_step(group, key.replace("_mean", "_stderr"))
                errors = errors[0].reindex(frame.index)  # NaN where a row has none
                axis.errorbar(frame.index, frame[0], errors, color=colour, fmt="none")
        if len(keys) > 1:
            label = words_of(key)
            if key.startswith("eval_"):
                label += f", N = {groups[0].runs[0].config.get('eval_episodes')}"
            axis.plot([], [], label=label, color=GREY if several else colour, ls=dash)
    if "eval_value_mean" in keys and alone:
        draw_ends(axis, groups[0].runs[0])
    if len(keys) > 1:
        axis.legend(**ABOVE)
    else:
        axis.set_title(words_of(key))
    if "logprob" in key:
        axis.set_yscale("log")
    if "value" in key:
        axis.axhline(0, color=GREY, linestyle=":")
    axis.locator_params(axis="x", integer=True)
    axis.set_ylabel(next((UNITS[part] for part in UNITS if part in key), ""))


def words_of(key: str) -> str:
    return NAMES.get(key, key.replace("_", " "))


def draw_ends(axis, run: RunData) -> None:
    """A line for the evaluation before training, and a star for the test part at the end of the
    run, which has other seeds.
    """
    before, final = (run.result.get(key) for key in ("before", "final"))
    if before:
        label = "before training, same seeds"
        axis.axhline(before["value_mean"], color=GREY, linewidth=0.8, label=label)
    if final and "test_value_mean" in final["best"]:
        best = final["best"]
        point = (best["step"] + 1, best["test_value_mean"], best["test_value_stderr"])
        label = f"best/, test part, {final['n']} fresh seeds"
        axis.errorbar(*point, fmt="k*", markersize=8, label=label)


def draw_mean(axis, frame, **style):
    """The mean over the runs, and of FEW_SEEDS runs or more a band of one standard error on each
    side.

    frame: a DataFrame with a column for each run.
    """
    middle = frame.mean(axis=1)
    axis.plot(middle, markevery=len(frame) // 5 or 1, **style)
    if len(frame.columns) >= FEW_SEEDS:
        error = frame.sem(axis=1)
        axis.fill_between(
            frame.index, middle - error, middle + error, color=style["color"], alpha=0.15
        )


# ------------------------------------------------------------------ nodes


def valid_values(run: RunData):
    """The values of the valid nodes by their number from 1 on, NaN for the others: pandas.Series
    with a first row before all nodes.
    """
    import pandas

    values = [row["value"] if row["outcome"] == "valid" else None for row in run.rows]
    return pandas.Series([None, *values], dtype=float)


def draw_nodes(axis, groups: list[RunGroup]) -> None:
    """Nodes without the faults: a mark for each valid one, a cross at the lower edge for a failure,
    and a line for the best one so far. In a mean over runs, one without a valid node counts -1.
    """
    import pandas

    for group, style in zip(groups, cycle(STYLES)):
        marks = style | {"alpha": 0.5, "linestyle": ""}
        crosses = marks | {"marker": "x", "transform": axis.get_xaxis_transform()}
        for one in group.runs:
            axis.plot(valid_values(one), markersize=2, **marks)
            outcomes = enumerate([row["outcome"] for row in one.rows], 1)
            failed = np.array([number for number, outcome in outcomes if outcome == "failed"])
            # the layout would take an empty line for one at the lower left corner of the figure
            axis.plot(failed, 0 * failed, clip_on=False, in_layout=False, **crosses)
        # a run that has ended keeps its value
        frame = pandas.concat(map(valid_values, group.runs), axis=1).cummax().ffill()
        if len(group.runs) > 1:
            frame = frame.fillna(WORST)
        draw_mean(axis, frame, drawstyle="steps-post", **style)
    axis.axhline(0, color=GREY, linestyle=":", label="baseline")
    for style, label in {".": "a node", "x": "a failed node", "-": "best so far"}.items():
        axis.plot([], [], style, color=GREY, label=label)
    axis.legend(**ABOVE, ncols=2)
    axis.locator_params(axis="x", integer=True)
    axis.set(xlabel="nodes", ylabel="value (1: reference; -1: that or less)")


# ------------------------------------------------------------------ episodes

GOLDEN = 0.618  # multiples of it, modulo 1, spread marks evenly


def draw_episodes(axis, groups: list[RunGroup]) -> None:
    """A strip for each task and group: a mark for the value of each valid episode, the mean of all
    with its standard error, and beside it the number of failures.
    """
    import pandas

    labels = []
    tasks = groups[0].runs[0].task.split()
    for task, (group, style) in product(tasks, zip(groups, cycle(STYLES))):
        rows = [row for run in group.runs for row in run.rows if row["task"] == task]
        if not rows:  # of a suite, left out or not played yet
            continue
        own = pandas.DataFrame(rows)
        strip = -len(labels)
        values = own["value"].astype(float)
        valid = values[own["outcome"] == "valid"]
        heights = strip + 0.6 * (np.arange(len(valid)) * GOLDEN % 1 - 0.5)
        axis.plot(valid, heights, alpha=0.5, markersize=3, linestyle="", **style)
        axis.errorbar(values.mean(), strip, xerr=values.sem(), fmt="kD", capsize=3)
        ends = own["outcome"].value_counts()
        labels.append(f"{task}: {ends.get('failed', 0)} of {len(own)} failed")
        if "fault" in ends:
            labels[-1] += f", {counted(ends['fault'], 'fault')}"
    axis.set_yticks(-np.arange(len(labels)), labels)
    axis.axvline(0, color=GREY, linestyle=":")
    axis.set(
        title="each valid episode; diamond: mean of all ± standard error, a failure counts -1",
        xlabel=f"value ({UNITS['value']}; at -1: -1 or less)",
    )


# ------------------------------------------------------------------ the tree

LINES = 64  # nodes, a line each
TREE_WIDTH = 6.3  # inches beside the colour bar
INDENT = 0.2  # inches from a parent to its child, at most
LETTER = 0.057  # inches of a character, on average


def depth_first(rows: list[dict]) -> list[dict]:
    """The nodes in the order of a printed tree: 0.2 before 0.10."""
    return sorted(rows, key=lambda row: [*map(int, row["id"].split("."))])


def best_path(run: RunData) -> list[str]:
    """From the root to the node that was chosen, or to the best one while the run goes on; [] of a
    run that is no search.
    """
    best = run.result.get("best_id")
    return list(accumulate(best.split("."), "{}.{}".format)) if best else []


def best_nodes(run: RunData, most: int) -> list[str]:
    """The path to the best node without the root, then the nodes with the largest values."""
    import pandas

    by_value = pandas.DataFrame(run.rows).sort_values("value", ascending=False)
    ids = dict.fromkeys([*best_path(run)[1:], *by_value["id"]])
    return [*ids][:most]


def draw_tree(run: RunData, link: str = "#"):
    """A Figure of the best nodes, depth first, as a tree of folders is printed. Each line has the
    id, the score and the strategy of a node, or why it failed. Colour: value, shape: operator,
    hollow: failed. The path to the best is bold; a short line comes from a node that is left out.

    link: address of a node before its id; the nodes in an SVG lead there.
    """
    shown, path = best_nodes(run, LINES), best_path(run)
    rows = depth_first([row for row in run.rows if row["id"] in shown])
    longest = max(row["id"].count(".") * INDENT + LETTER * len(line_of(row)) for row in rows)
    width = min(TREE_WIDTH, max(COLUMN, longest + 0.5))
    figure = new_figure(PAGE - TREE_WIDTH + width, 1.0 + 0.18 * max(6, len(rows)))
    figure.set_label(f"tree of {run.name}: the nodes with their scores and strategies")
    axis = figure.subplots()
    indent = min(INDENT, TREE_WIDTH / 3 / max(id.count(".") for id in shown))
    values = np.array([row["value"] for row in rows], float)  # NaN of a fault
    scale = {"vmin": WORST, "vmax": max(0.0, np.nanmax(values))}
    at, marks = {"0": (0.0, 1)}, {}
    axis.scatter(*at["0"], c="black", marker="|", s=28)
    axis.text(*at["0"], f"\xa0  baseline  {score_text(run.baseline, run)}", va="center")
    for number, row in enumerate(rows):
        id = row["id"]
        x, y = at[id] = id.count(".") * indent, -number
        start = at.get(row["parent"], (x - 0.7 * indent, y))
        edge = {"color": GREY, "linewidth": 0.7}
        if id in path:
            edge = {"color": "black", "linewidth": 2, "zorder": 2.5}
        corner = (start[0], y)
        axis.plot(*zip(start, corner, (x, y)), **edge)
        marks[shorten(row["op"], 20)] = row["mark"]
        if row["outcome"] == "valid":
            shade = scale | {"c": [values[number]], "edgecolors": "black"}
        else:
            shade = {"c": "white", "edgecolors": GREY}
        axis.scatter(x, y, s=28, zorder=3, marker=row["mark"], urls=[link + id], **shade)
        # an SVG drops spaces at the start of a text, but not \xa0
        room = int((TREE_WIDTH - x) / LETTER) - 6
        axis.text(x, y, f"\xa0  {shorten(line_of(row), room)}", va="center")
    axis.set_axis_off()
    title = f"{len(rows)} of {len(run.rows)} nodes; hollow: failed; bold: the path to the best one"
    if len(rows) < len(run.rows):
        title += "; all of them: viz.py --list"
    axis.set(xlim=(-0.1, width), ylim=(0.5 - len(rows), 1.5), title=title)
    shades = axis.scatter([], [], c=[], **scale)
    figure.colorbar(shades, label="value", aspect=40, pad=0.01, fraction=0.05)
    handles = [axis.scatter([], [], c=GREY, marker=mark, label=op) for op, mark in marks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure


def line_of(row: dict) -> str:
    """A node in one line: id, score and strategy, or why it failed."""
    id = row["id"]
    text = f"{'…' * (len(id) > 12)}{id[-12:]}  {score_or_outcome(row)}"
    if row["outcome"] == "valid":
        return f"{text}  {row['idea']}"
    return f"{text}: {row['reason']}"


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


def number_keys(group: RunGroup) -> set:
    """The keys of its rows that hold numbers."""
    import pandas

    rows = [row for run in group.runs for row in run.rounds or run.rows]
    return {*pandas.DataFrame(rows).select_dtypes("number")}


def draw_panels(groups: list[RunGroup], panels=()):
    """A Figure with all panels of a kind of run, in rows of three; the last one takes what is left
    of its row. panels: others than those of PANELS.
    """
    runs = [run for group in groups for run in group.runs]
    kind = runs[0].kind
    x = "round" if any(run.rounds for run in runs) else NOUNS[kind]
    window = window_of(runs[0].rounds or runs[0].rows)
    x += "s" if window == 1 else f"s (means over {window})"
    drawn = {"*nodes": draw_nodes, "*episodes": draw_episodes}
    has = {*drawn, "value_mean"}.union(*map(number_keys, groups))  # one panel at least
    panels = panels or [keys for keys in PANELS[kind] if has & {*keys.split()}]
    columns = min(3, len(panels))
    # the last one takes what is left of its row
    cells = [*panels, *panels[-1:] * (-len(panels) % columns)]
    mosaic = np.reshape(cells, (-1, columns))
    width = PAGE if columns > 1 else COLUMN
    height = 0.6 + 1.8 * len(mosaic)
    if panels == ["*episodes"]:
        width, height = PAGE, 1 + 0.3 * len(groups) * len(runs[0].task.split())
    figure = new_figure(width, height)
    axes = figure.subplot_mosaic(mosaic)
    for keys, axis in axes.items():
        if keys in drawn:
            drawn[keys](axis, groups)
        else:
            axis.set_xlabel(x)
            axis.sharex(axes[panels[-1]])
            draw_keys(axis, groups, keys.split())
    shown = "; ".join(words_of(key.strip("*")) for keys in axes for key in keys.split())
    figure.set_label(f"{kind}, {', '.join(group.label for group in groups)}: {shown}")
    if len(runs) > 1:
        handles = []
        for group, style in zip(groups, cycle(STYLES)):
            text = shorten(f"{group.label} {group.differs}", 200)
            text = textwrap.fill(text, int(15 * width))
            handles += axis.plot([], [], label=text, **style)
        title = "mean over runs, band (three or more): ± standard error"
        title *= kind != "evaluation"
        legend = figure.legend(handles=handles, title=title, loc="outside lower center")
        figure.set_figheight(height + legend.get_window_extent().height / figure.dpi)
    return figure


def encoded(figure, format: str) -> bytes:
    """The picture as the content of a file."""
    picture = io.BytesIO()
    figure.savefig(picture, format=format, dpi=200)
    return picture.getvalue()
