"""Pictures of runs: curves of training, imitation, searches and evaluations, and trees.

Every panel takes groups of runs. Each run is drawn thin; the mean of a group is bold, and of three
runs or more it has a band of one standard error. Sizes are those of a paper: a page is 7 inches
wide, a column 3.4. matplotlib and pandas are imported inside functions, because they are slow.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from flatlab.task.value import WORST, improvement, score_at
from flatlab.train.metrics import evaluation_columns
from flatlab.view.reader import NOUNS, RunData, best_first, score_text

# Okabe and Ito: distinct with any kind of colour vision; the marks are for grey print
COLOURS = "#0072B2 #D55E00 #009E73 #E69F00 #CC79A7 #56B4E9 #000000".split()
MARKS = "os^Dv"  # five marks and seven colours: 35 groups look different
BLUE, RED, _, _, PINK, _, BLACK = COLOURS
GREY = "#888888"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.fontsize": 7,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
PAGE, COLUMN = 7.0, 3.4  # inches
FEW_SEEDS = 3  # a mean over fewer runs has no interval


@dataclass
class RunGroup:
    """Runs that differ by their seeds only. number: of the group in its table, from 0."""

    number: int
    runs: list[RunData]
    differs: str = ""  # settings that the other groups of the table do not have

    @property
    def colour(self) -> str:
        return COLOURS[self.number % len(COLOURS)]

    @property
    def mark(self) -> str:
        return MARKS[self.number % len(MARKS)]

    @property
    def label(self) -> str:
        """The name of its run; of several 'titanic-none (seeds 0, 1)'."""
        run, seeds = self.runs[0], [one.config.get("seed") for one in self.runs]
        if len(seeds) == 1:
            return run.name
        return f"{run.name.removesuffix(f'-{seeds[0]}')} (seeds {', '.join(map(str, seeds))})"


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
        look = {"color": colour, "linestyle": style}
        if len(groups) > 1:
            look |= {"color": group.colour, "marker": group.mark}
        axis.plot(frame.index, frame, alpha=0.3, linewidth=0.7, **look | {"marker": ""})
        windows = frame.dropna().rolling(window_of(frame), center=True, min_periods=1)
        draw_mean(axis, windows.mean(), label=label, **look)
        label = None  # one entry in the legend


def draw_mean(axis, frame, **look):
    """The mean over the runs, and of FEW_SEEDS runs or more a band of one standard error on each
    side.

    frame: a DataFrame with a column for each run.
    """
    middle = frame.mean(axis=1)
    axis.plot(middle, linewidth=1.5, markevery=0.2, **look)
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

    axis.set_xlabel("steps")


def draw_baseline(axis):
    axis.set_ylabel("value")
    axis.axhline(0, color=GREY, linestyle=":", label="baseline")


def curves(ylabel, *lines, yscale="linear", x="steps"):
    """A panel of quantities per step. lines: (key, colour, label, style) of each."""

    def draw(axis, groups):
        for line in lines:
            draw_key(axis, groups, *line)
        axis.set(xlabel=x, ylabel=ylabel, yscale=yscale)

    return draw


# ------------------------------------------------------------------ panels of a search


def best_so_far(run: RunData):
    """The largest value after each number of nodes, as pandas.Series; -1 before a valid one."""
    import pandas

    return pandas.Series([WORST, *series(run.rows, "value")]).cummax().ffill()


def mean_so_far(run: RunData):
    import pandas

    return pandas.Series([np.nan, *series(run.rows, "value")]).expanding().mean()


def nodes(so_far, noun):
    """A panel of nodes or episodes without the faults: a mark for each valid one, a cross at the
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
                axis.plot(numbers, reached(run.rows), group.mark, markersize=2, **look)
                failed = numbers[[row["outcome"] == "failed" for row in run.rows]]
                axis.plot(failed, 0 * failed, "x", **look, **edge)
        draw_baseline(axis)
        if so_far is best_so_far:  # its -1 before a valid node would widen the axis
            axis.set_ylim(axis.get_ylim())
        for group in groups:
            # a run that has ended keeps its value
            frame = pandas.concat(map(so_far, group.runs), axis=1).ffill()
            look = {"color": group.colour, "marker": group.mark, "drawstyle": "steps-post"}
            draw_mean(axis, frame, **look)
        axis.set_xlabel(f"{noun} (cross: failed, value -1)")
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


ROUNDS = {"x": "rounds"}
PANELS = {  # kind of run -> functions of its panels by title; "learning": a search that learns
    "training": {
        "Value": draw_value,
        "Reward": curves("reward", ("reward_mean", BLUE)),
        "Signal": curves(
            "share, 0 to 1",
            ("valid_share", BLUE, "valid episodes"),
            ("zero_variance_share", RED, "equal rewards", "--"),
        ),
        "Episode length": curves("tokens", ("reply_tokens", BLUE)),
        "Replies of an episode": curves("replies", ("turns", BLUE)),
        "Time of a step": curves(
            "seconds", ("seconds", BLUE, "all"), ("seconds_sample", RED, "sampling", "--")
        ),
        "Distance of the policy": curves("KL, nats per token", ("kl", BLUE)),
        "Exploration": curves("entropy, nats per token", ("entropy", BLUE)),
        "Engine and trainer": curves(
            "log-prob difference, nats",
            ("logprob_diff_max", BLUE, "largest"),
            ("logprob_diff_mean", RED, "mean", "--"),
            yscale="log",
        ),
    },
    "imitation": {"Loss": curves("nats per token", ("loss", BLUE))},
    "search": {"Best node so far": nodes(best_so_far, "nodes")},
    "learning": {
        "Best node so far": nodes(best_so_far, "nodes"),
        "Signal": curves("valid share", ("valid_share", BLUE), **ROUNDS),
        "Gain over the parent": curves("gain in value", ("gain_mean", BLUE), **ROUNDS),
        "Distance of the policy": curves("KL, nats per token", ("kl", BLUE), **ROUNDS),
        "Exploration": curves("entropy, nats per token", ("entropy", BLUE), **ROUNDS),
        "Live lineages": curves("lineages", ("live_lineages", BLUE), **ROUNDS),
    },
    "evaluation": {"Mean value so far": nodes(mean_so_far, "episodes")},
}

# ------------------------------------------------------------------ the tree

LINES = 40  # nodes of a panel
MOST_NODES = 3 * LINES  # with the root


def depth_first(rows: list[dict]) -> list[dict]:
    """The nodes in the order of a printed tree: 0.2 before 0.10."""
    return sorted(rows, key=lambda row: [int(part) for part in row["id"].split(".")])


def best_path(run: RunData) -> list[str]:
    """From the root to the node that was chosen, or to the best one while the run goes on; [] of a
    run that is no search.
    """
    best = run.result.get("best_id")
    return path_to(best) if best else []


def path_to(id: str) -> list[str]:
    """The ids from the root to this node."""
    return [*accumulate(id.split("."), "{}.{}".format)]


def shown_nodes(run: RunData) -> list[dict]:
    """The root and the nodes of the picture, depth first: all, or the path to the best one and the
    nodes with the largest values, each with its path.
    """
    root = {"id": "0", "op": "baseline", "mark": "*", "outcome": "valid", "improvement": 0}
    shown = {*best_path(run)[-MOST_NODES + 1 :]}
    for row in best_first(run.rows):
        larger = shown.union(path_to(row["id"]))
        shown = larger if len(larger) <= MOST_NODES else shown
    return depth_first([root, *(row for row in run.rows if row["id"] in shown)])


def draw_tree(run: RunData, link: str = "#"):
    """A Figure of at most three panels: depth to the right, a line for each node; colour: value,
    shape: operator.

    link: address of a node before its id; the nodes in an SVG lead there.
    """
    rows = shown_nodes(run)
    parts = [rows[start : start + LINES] for start in range(0, len(rows), LINES)]
    figure = new_figure(PAGE, 1.2 + 0.18 * max(6, len(parts[0])))
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    values = reached(rows)
    handles = {}
    for axis, part in zip(axes, parts):
        draw_edges(axis, part, best_path(run))
        marks = draw_nodes(axis, part, link, (np.nanmin(values), np.nanmax(values)))
        handles |= {mark.get_label(): mark for mark in marks}
        depths = [row["id"].count(".") for row in part]
        room = 0.5 * len(parts) / (PAGE - len(parts))  # for the names, about an inch
        axis.set_xlim(min(depths) - 1, max(depths) + 1 + room * (max(depths) - min(depths) + 2))
    if len(rows) <= len(run.rows):
        left_out = "the path to the best one, and the best of the others"
        figure.suptitle(f"{len(rows) - 1} of {len(run.rows)} nodes: {left_out}", fontsize=8)
    figure.colorbar(marks[0], ax=axes, label="value", pad=0.01, aspect=40)
    figure.legend(handles=[*handles.values()], loc="outside lower center", ncols=6)
    return figure


def draw_edges(axis, rows: list[dict], path: list[str]) -> None:
    """Lines from the parents, bold on the path; dotted if the parent is in an earlier panel."""
    at = places(rows)
    for row in rows:
        x, y = at[row["id"]]
        parent = row.get("parent", "0")
        look = {"color": GREY, "linewidth": 0.7, "zorder": 1}
        if row["id"] in path:
            look = {"color": BLACK, "linewidth": 2, "zorder": 2}
        look["linestyle"] = "-" if parent in at else ":"
        axis.plot(*zip(at.get(parent, (x - 0.7, y)), (x, y)), **look)


def places(rows: list[dict]) -> dict[str, tuple[int, int]]:
    """id -> (depth, -line)."""
    return {row["id"]: (row["id"].count("."), -line) for line, row in enumerate(rows)}


def draw_nodes(axis, rows: list[dict], link: str, values: tuple) -> list:
    """A mark and a name for each node. values: the smallest and the largest of the tree."""
    from matplotlib import colormaps

    at, looks, drawn = places(rows), {}, []
    for row in rows:
        look = (row["op"], row["mark"]) if row["outcome"] == "valid" else (row["outcome"], "X")
        looks.setdefault(look, []).append(row)
        if row["id"] != "0":
            name = f"{row['id'][-10:]}  {score_text(row)}"
            axis.annotate(name, at[row["id"]], (5, -2.5), textcoords="offset points", fontsize=7)
    for (name, mark), same in looks.items():
        marks = axis.scatter(
            *zip(*(at[row["id"]] for row in same)),
            c=reached(same),
            cmap=colormaps["viridis"].with_extremes(bad=RED),
            vmin=values[0],
            vmax=values[1],
            plotnonfinite=True,  # a node without a value is red
            marker=mark,
            s=28,
            edgecolors=BLACK,
            linewidths=0.5,
            label=shorten(name, 20),
            zorder=3,
        )
        marks.set_urls([f"{link}{row['id']}" for row in same])
        drawn.append(marks)
    axis.set(xlabel="depth", yticks=[])
    axis.set_frame_on(False)
    axis.locator_params(axis="x", integer=True)
    return drawn


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


def draw_panels(groups: list[RunGroup], panels: dict | None = None):
    """A Figure with all panels of a kind of run in rows of three; the last one is as wide as the
    rest of its row. panels: others than those of PANELS.
    """
    from matplotlib.lines import Line2D

    runs = [run for group in groups for run in group.runs]
    learns = any(run.kind == "search" and run.rounds for run in runs)
    panels = panels or PANELS["learning" if learns else runs[0].kind]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(PAGE if columns > 1 else COLUMN, 0.6 + 1.8 * lines)
    grid = figure.add_gridspec(lines, columns)
    axes = {}  # label of the x axis -> the first panel that has it
    for place, (name, draw) in enumerate(panels.items(), 1):
        line, column = divmod(place - 1, columns)
        end = columns if place == len(panels) else column + 1
        axis = figure.add_subplot(grid[line, column:end], title=name)
        draw(axis, groups)
        if axes.setdefault(axis.get_xlabel(), axis) is not axis:
            axis.sharex(axes[axis.get_xlabel()])
        axis.locator_params(axis="x", integer=True)
        if axis.get_legend_handles_labels()[1]:
            axis.legend()
    for axis in axes.values():
        axis.autoscale(axis="x")
    if len(runs) > 1:
        handles = []
        for group in groups:
            look = {"color": group.colour, "marker": group.mark if len(groups) > 1 else ""}
            handles.append(Line2D([], [], label=legend_text(group), **look))
        figure.legend(handles=handles, loc="outside lower center")
    return figure


def legend_text(group: RunGroup) -> str:
    """Name of a group, what sets it apart, and what its line and band are."""
    text = shorten(f"{group.label} {group.differs}".strip(), 64)
    if len(group.runs) > 1:
        text += f": mean of {len(group.runs)}"
    return text + (" ± standard error" if len(group.runs) >= FEW_SEEDS else "")


# Units of keys: the first part that a key contains counts
UNITS = {
    "value": "0: baseline, 1: reference",
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
    """A Figure with one key of the rows, as wide as a column; None if no row has this key."""
    run = groups[0].runs[0]
    if key not in {key for group in groups for run in group.runs for key in numbers_of(run)}:
        return None
    words = re.sub("(.*)_mean$", r"mean \1", key).replace("_", " ")
    unit = next((UNITS[part] for part in UNITS if part in key), "")
    if "score" in key:
        unit = shorten(run.result["metric"], 30)

    def draw(axis, groups):
        x = "round" if run.rounds else NOUNS[run.kind]
        window = window_of(run.rounds or run.rows)
        x += "s" if window == 1 else f"s (means over {window})"
        curves("", (key, BLUE), x=x)(axis, groups)
        if "value" in key:
            draw_baseline(axis)
        axis.set_ylabel(f"{words} ({unit})" if unit else words)

    return draw_panels(groups, {"": draw})


def numbers_of(run: RunData) -> list[str]:
    """The keys of the rows that have numbers."""
    rows = run.rounds or run.rows
    return sorted({key for row in rows for key in row if isinstance(row[key], (int, float))})


def encoded(figure, format: str, dpi: int = 200) -> bytes:
    """The picture as the content of a file."""
    picture = io.BytesIO()
    figure.savefig(picture, format=format, dpi=dpi)
    return picture.getvalue()
