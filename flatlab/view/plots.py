"""Plots of training runs, and what all plots share: style, panels, figures, files.

Every panel takes groups. A group of one run is drawn thin with a bold running mean. Several runs
in a group become their mean and a band of one standard deviation. matplotlib is imported inside
functions.
"""

from __future__ import annotations

import io
import re
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flatlab.files import write_whole
from flatlab.runs.reader import RunData, count, duration, number, plus_minus

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
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}
PAGE_WIDTH = 16.0  # inches; no picture is wider
STEPS = "training step"


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
    """The steps at which some run has this key, shape (steps,), and its values, (runs, steps)."""
    import pandas

    curves = [
        pandas.Series(series(run.rows, key), [row["step"] for row in run.rows])
        for run in group.runs
    ]
    frame = pandas.DataFrame(curves).sort_index(axis=1).dropna(axis=1, how="all")
    return frame.columns.to_numpy(), frame.to_numpy()


def score_key(run: RunData) -> str:
    """ "score", or "improvement" for a run on several tasks, whose scores have different units."""
    return "score" if "score_mean" in run.rows[0] else "improvement"


# ------------------------------------------------------------------ panels of a training run


def draw_key(axis, groups, key, label="", colour=GREY, style="-"):
    """One quantity per step. `colour` is for a single group; several have their own."""
    alone = len(groups) == 1
    for group in groups:
        steps, columns = by_step(group, key)
        if not len(steps):
            continue
        draw_group(axis, steps, columns, colour if alone else group.colour, style)
        if label:  # several groups are named below the figure
            axis.plot([], [], style, color=colour if alone else GREY, label=label)
            label = ""


def draw_group(axis, steps, columns, colour, style):
    """Mean and band; of a single run its running mean and, thin, its values.

    Dotted where not all runs went on, so that none vanishes without a trace.
    """
    if len(columns) == 1:
        marker = "." if len(steps) < 40 else None
        axis.plot(steps, columns[0], style, marker=marker, color=colour, alpha=0.3, linewidth=1)
    window = window_of(steps)
    middle, low, high = (running_mean(curve, window) for curve in spread(columns))
    complete = np.flatnonzero(np.isfinite(columns).all(0))
    count = complete[-1] + 1 if len(complete) else 0
    rest = slice(max(0, count - 1), None)
    axis.plot(steps[rest], middle[rest], ":", color=colour, linewidth=1, alpha=0.6)
    band = {"color": colour, "alpha": 0.15, "linewidth": 0}
    axis.fill_between(steps[:count], low[:count], high[:count], **band)
    axis.plot(steps[:count], middle[:count], style, color=colour, linewidth=2.2)


def draw_score(axis, groups):
    key = score_key(groups[0].runs[0])
    draw_key(axis, groups, f"{key}_mean", "mean", BLUE)
    if len(groups) == 1:
        draw_key(axis, groups, "score_best", "best of the step", ORANGE)
    eval_key = "eval_score_mean" if key == "score" else "eval_improvement"
    draw_key(axis, groups, eval_key, "evaluation", PINK, "--")
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


def draw_logprob_diff(axis, groups):
    draw_key(axis, groups, "logprob_diff_max", "largest", PINK)
    axis.axhspan(1e-7, 1e-4, color=GREEN, alpha=0.08, linewidth=0, label="goal in fp32")
    axis.set_yscale("log")


def draw_shares(axis, groups):
    draw_key(axis, groups, "valid_share", "valid episodes", BLUE)
    draw_key(axis, groups, "zero_variance_share", "groups of equal rewards", RED, "--")
    axis.set_ylim(-0.03, 1.03)


def draw_overlap(axis, groups):
    draw_key(axis, groups, "lag_max", "oldest token, updates", RED)
    draw_key(axis, groups, "lag_mean", "mean lag, updates", ORANGE)
    draw_key(axis, groups, "engine_idle_share", "idle share of the engine", BLUE, "--")
    axis.set_ylim(bottom=-0.03)


def curve(key, colour):
    """A panel of a single quantity."""
    return lambda axis, groups: draw_key(axis, groups, key, "", colour)


TRAINING = [  # title, x axis, y axis, what draws it
    ("Score", STEPS, "score", draw_score),
    ("Reward", STEPS, "reward per episode", curve("reward_mean", GREEN)),
    ("Shares", STEPS, "share, 0 to 1", draw_shares),
    ("Length", STEPS, "sampled tokens per episode", curve("reply_tokens", BLUE)),
    ("Entropy", STEPS, "nats per token", curve("entropy", BLUE)),
    ("Engine against trainer", STEPS, "log-prob difference, nats", draw_logprob_diff),
]
# of runs whose later steps play while one is learned
OVERLAP = ("Lag", STEPS, "updates; share, 0 to 1", draw_overlap)

# ------------------------------------------------------------------ figures and files


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten(text, limit: int) -> str:
    """Any text as a label: one line, only characters that fonts have, and no formulas."""
    text = re.sub("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", "·", str(text))
    return cut(text, limit).replace("$", r"\$")


@contextmanager
def figure_of(width: float, height: float):
    """A matplotlib Figure without display or global state, in our style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        yield figure


def draw_panel(axis, panel, groups):
    """The legend stands above the axes, beside the title: it never covers the data."""
    title, x, y, draw = panel
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.margins(y=0.1)
    draw(axis, groups)
    if not axis.has_data():
        axis.text(0.5, 0.5, "not recorded", transform=axis.transAxes, ha="center", color=GREY)
    if x in (STEPS, "executed nodes"):
        axis.locator_params(axis="x", integer=True)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=2)


def grid_of(panels) -> tuple[int, int]:
    """(rows, columns) of a picture: up to four panels in a row, more in rows of three."""
    columns = len(panels) if len(panels) <= 4 else 3
    return -(-len(panels) // columns), columns


def draw_panels(figure, panels, groups: list[RunGroup]):
    """All panels of one kind."""
    axes = figure.subplots(*grid_of(panels), squeeze=False)
    for axis, panel in zip(axes.flat, panels):
        draw_panel(axis, panel, groups)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")


def set_title(figure, text: str):
    """The heading of a whole figure, in as many lines as it needs."""
    width = int(12 * figure.get_figwidth())
    figure.suptitle(textwrap.fill(shorten(text, 400), width), fontsize=10)


def save(figure, path: Path) -> Path:
    """Writes the whole picture or, if the disk is full, leaves the old one."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=110)
    write_whole(path, picture.getvalue())
    return path


def heading(run: RunData) -> str:
    """One line about a run: name, task, mode, rule, seed, model, length; of an evaluation its mean;
    whether its code changed.
    """
    config = run.config
    facts = [run.name, f"task {run.tasks}"]
    if run.kind == "search":
        facts += [f"mode {config['sampling_mode']}", f"rule {config.get('select')}"]
    facts.append(f"seed {config.get('seed')}")
    if config.get("model"):
        facts.append(f"model {Path(config['model']).name}")
    noun = {"grpo": "step", "search": "node", "evaluation": "episode"}[run.kind]
    seconds = np.nan_to_num(series(run.rows, "elapsed")).max()
    if run.kind == "grpo":
        seconds = np.nansum(series(run.rows, "seconds"))
    facts.append(f"{count(len(run.rows), noun)} in {duration(float(seconds))}")
    if run.kind == "evaluation":
        mean = plus_minus(run.result["node_mean"], run.result["node_stderr"])
        facts.append(f"mean {mean} ({run.result['split']})")
    if run.is_mixed:
        facts.append("mixed code")
    return "   ".join(facts)
