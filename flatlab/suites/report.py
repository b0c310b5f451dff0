"""The tables and the performance profile of models over the tasks of a suite."""

import itertools
from pathlib import Path

import numpy as np

from flatlab.errors import UserError
from flatlab.files import write_whole
from flatlab.suites.attempts import BASELINE, KINDS, attempts_of
from flatlab.suites.statistics import (
    bootstrap_text,
    mean_value,
    performance_profiles,
    probability_of_improvement,
)
from flatlab.view import plots
from flatlab.view.columns import aligned, legend
from flatlab.view.compare import RunGroup
from flatlab.view.reader import RunData, folder_of

MEANS = ["value", "valid", "position", "tokens", "seconds_env", "seconds"]  # of our attempts
# looks of the published models: twenty different ones
GREYS = ["0", "0.6", "0.3", "0.8", "0.45"] * 4
LINES = ["-", "--", "-.", ":"] * 5


def suite_report(suite: dict, runs: list[RunData]) -> str:
    """Text of the tables. Writes profile.png into folder_of(runs) if there are several models.

    Raises UserError if there is no task that all models have, or for a run of something else.
    """
    import pandas

    attempts = [*suite["attempts"]]
    for run in runs:
        attempts += attempts_of(run, Path(suite["name"]).stem)
    frame = pandas.DataFrame(attempts, columns=["model", "task", "sign", *KINDS, *MEANS])
    if frame.position.any():  # there are leaderboards
        frame.loc[frame.valid.eq(False), "position"] = 0
    models = frame.groupby("task").model.transform("nunique")
    frame = frame[models == frame.model.nunique()]
    if frame.empty:
        raise UserError("None of these evaluations played a task of the suite.")
    groups = frame.groupby(["task", "model"])
    gains = groups[KINDS].max()
    means = groups[MEANS].mean()
    sign = frame.groupby("task").sign.first()
    cells = gains.mul(sign, axis=0, level=0).join(means[["value", "valid"]])
    ranked = gains.drop(BASELINE, level=1, errors="ignore").groupby("task")
    cells["place"] = ranked[KINDS[0]].rank(ascending=False, method="min")
    totals = means.groupby("model").mean()
    totals.insert(0, "value [95 %]", "-")
    values = groups.value.agg(list)
    ours = {}
    for run in runs:
        name = str(run.dir)
        ours[name] = values.xs(name, level=1)
        totals.loc[name, "value [95 %]"] = bootstrap_text(mean_value, *ours[name])
    order, figure = ["value"], None
    if suite["attempts"]:
        scores = np.array([cells[kind].unstack(0) for kind in KINDS])
        baseline = totals.index.get_loc(BASELINE)
        tau, rho, areas = performance_profiles(scores, baseline, sign.to_numpy())
        figure = draw_profile(tau, rho, [*totals.index], ours)
        order = [f"AUP, {kind}" for kind in KINDS]
        totals[order] = areas.T
    elif len(runs) > 1:
        figure = plots.draw_panels([RunGroup(runs=[run]) for run in runs])
    if figure:
        picture = folder_of(runs) / "profile.png"
        picture.parent.mkdir(exist_ok=True)
        write_whole(picture, plots.encoded(figure, "png"))
        print(f"wrote {picture}\n")
    totals = totals.sort_values(order, ascending=False).drop(columns="value")
    frames = cells.dropna(subset="value"), totals  # cells of ours alone
    tables = [frame.reset_index().to_dict("records") for frame in frames if len(frame)]
    parts = [*map(aligned, tables)]
    for name, other in itertools.combinations(ours, 2):
        chance = bootstrap_text(probability_of_improvement, *ours[name], *ours[other])
        parts.append(f"probability that {name} is better than {other}: {chance}")
    parts.append(f"over the tasks that all models have: {', '.join(sign.index)}")
    return "\n\n".join([*parts, legend(*tables), suite_notes(suite, runs)])


def suite_notes(suite: dict, runs: list[RunData]) -> str:
    """Lines about the settings, the tasks that were left out and the published attempts."""
    lines = []
    if not suite["attempts"]:
        lines.append(
            f"no AUP: the suite {suite['name']} has no published attempts to compare with; of "
            "several models, profile.png compares the values"
        )
    for run in runs:
        lines.append(
            f"{run.dir}: {len(run.rows)} episodes of at most {run.config['max_turns']} turns at "
            f"temperature {run.config['temperature']}"
        )
        for task, why in run.result["left_out"].items():
            lines.append(f"{run.dir}: without {task}. {why}")
    for text in dict.fromkeys(run.result.get("degenerate") for run in runs):
        if text:
            lines.append(f"a score says little: {text}")
    return "\n".join([*lines, suite["notes"]])


def draw_profile(tau, rho, models: list[str], ours: list[str]):
    """A Figure with a panel for each kind: our runs in colour, the others grey."""
    figure = plots.new_figure(7, 4.4)
    axes = figure.subplots(1, len(KINDS), sharey=True)
    for axis, kind, lines in zip(axes, KINDS, rho):
        axis.set(title=kind, xlabel="log10(best score / score)", ylabel="share of the tasks")
        axis.set_xscale("symlog", linthresh=0.01)
        axis.set_prop_cycle(color=GREYS, linestyle=LINES)
        curves = axis.step(tau, lines.T, where="post")
        for name, colour in zip(ours, plots.COLOURS):
            curves[models.index(name)].set(color=colour, linewidth=3)
    figure.legend(curves, models, loc="outside lower center", ncols=3)
    return figure
