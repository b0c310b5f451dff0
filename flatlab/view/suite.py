"""The tables and the performance profile of models over the tasks of a suite.

Our runs and published results become the same table with a row for each attempt at a task. Its best
score is the best of all validates; the score of its submission is the last one.
"""

import itertools
import os
from pathlib import Path

import numpy as np

from flatlab.errors import UserError
from flatlab.files import read_mapping, write_whole
from flatlab.runs.fingerprint import ROOT
from flatlab.task.mledojo import mledojo_names
from flatlab.view import plots
from flatlab.view.reader import RunData, folder_of

KINDS = ["best attempt", "best submission"]
MEANS = ["value", "valid", "position", "tokens", "seconds_env", "seconds"]  # of our attempts
BASELINE = "baseline"  # name of its row
# looks of the published models: twenty different ones
GREYS = ["0", "0.6", "0.3", "0.8", "0.45"] * 4
LINES = ["-", "--", "-.", ":"] * 5


def read_suite(name: str) -> dict:
    """The file configs/suites/<name>.yaml, or the one at this path; mlgym.yaml explains its keys.
    Adds its name and the published attempts.

    Raises UserError if there is no such file, or if it needs a root that is not set or is empty.
    """
    path = Path(name) if name.endswith(".yaml") else ROOT / f"configs/suites/{name}.yaml"
    suite = {"name": name, "needs": "", "settings": {}, "notes": ""} | read_mapping(path)
    needs = suite["needs"]
    for variable in {"MLGYM_ROOT", "MLEDOJO_ROOT"} - {needs}:
        if os.environ.pop(variable, None):  # it may hold other tasks of the same names
            print(f"note     the suite {name} does not use ${variable}")
    root = os.environ.get(needs, "")
    if needs and not root:
        raise UserError(f"The suite {name} needs ${needs}, the folder of its tasks.")
    root = Path(root)
    if needs == "MLEDOJO_ROOT":
        suite["settings"].setdefault("task", mledojo_names(root))
    suite["attempts"] = published(root, suite["published"]) if "published" in suite else []
    return suite


# ------------------------------------------------------------------ attempts


def attempt(model: str, task: str, larger: bool, scores: list) -> dict:
    """An attempt with its scores in order, None if not valid. larger: whether larger ones are
    better; if not, their sign is -1, so that the largest is the best.
    """
    sign = 1 if larger else -1
    gains = sign * np.array(scores, float)
    best = dict(zip(KINDS, (np.fmax.reduce(gains), gains[-1])))
    return best | {"model": model, "task": task, "sign": sign}


def played(run: RunData, suite: str) -> list[dict]:
    """The attempts of a run, with MEANS. A fault is none. Raises UserError if there are none, or if
    the run is an evaluation of something else than the suite of this name.
    """
    if Path(run.config.get("suite") or "").stem != suite:
        raise UserError(f"{run.dir} is no evaluation of the suite {suite}.")
    found = []
    for item in run.rows:
        task, turns = item["task"], item["turns"]
        if item["outcome"] != "fault":
            scores = [*(turn["score"] for turn in turns), item["score"]]
            item["valid"] = item["outcome"] == "valid"
            item["seconds_env"] = sum(turn["seconds_env"] for turn in turns)
            larger = run.result["larger_is_better"][task]
            found.append(item | attempt(str(run.dir), task, larger, scores))
    if not found:
        raise UserError(f"{run.dir} has faults only.")
    return found


def published(root: Path, facts: dict) -> list[dict]:
    """The published attempts, and those of the baseline. Raises UserError if there are none."""
    found = []
    for model, own in itertools.product(facts["models"], facts["tasks"]):
        for file in sorted(root.glob(facts["files"].format(model=model, **own))):
            results = read_mapping(file)
            entries = {model: results.get("agent") or [{}], BASELINE: [results["baseline"]]}
            for name in entries:
                scores = [entry.get(own["metric"]) for entry in entries[name]]
                found.append(attempt(name, own["task"], own["higher_is_better"], scores))
    if not found:
        raise UserError(f"{root} holds no published results: there is no {facts['files']}.")
    return found


# ------------------------------------------------------------------ numbers


def performance_profiles(scores: np.ndarray, baseline: int, sign: np.ndarray) -> tuple:
    """rho(tau) = share of tasks with log10 r <= tau, at 500 tau (Dolan and More 2002, sec. 2).

    r = cost / least cost, where cost is 1 / score if larger is better. A score that is not above 0
    or worse than the baseline has 1.05 times the largest r of the others (MLGym, arXiv 2502.14499,
    whose AUP is the area of all steps, see AutoML Decathlon).
    scores: (kinds, models, tasks), NaN if missing. baseline: number of its model. sign: (tasks,),
    -1 if smaller is better, else 1. Returns tau, rho (kinds, models, 500) and AUP (kinds, models).
    """
    is_feasible = (scores > 0) & ((scores - scores[:, [baseline]]) * sign >= 0)
    costs = np.where(is_feasible, scores, np.nan) ** -sign
    ratios = costs / np.nanmin(costs, axis=1, keepdims=True)
    worst = 1.05 * np.nanmax(ratios, axis=1, keepdims=True)
    distance = np.log10(np.where(is_feasible, ratios, worst))
    end = np.ceil(10 * np.log10(np.ceil(np.nanmax(worst)))) / 10
    tau = np.linspace(0, end, 500)
    rho = (distance[..., None] <= tau).mean(axis=2)
    areas = rho[..., :-1].sum(axis=-1) * tau[1]
    return tau, rho, areas.round(3)


def mean_value(*tasks) -> float:
    """Mean over the tasks of the mean of their values, each of shape (attempts,)."""
    return np.mean([np.mean(values) for values in tasks])


def probability_of_improvement(*tasks) -> float:
    """Mean over the tasks of P(X > Y), an equal pair counts half (arXiv 2108.13264, sec. 4.3).

    tasks: the values of a model at each task, then those of the other one.
    """
    shares = []
    half = len(tasks) // 2
    for x, y in zip(tasks, tasks[half:]):
        signs = np.sign(np.subtract.outer(x, y))
        shares.append(signs.mean() / 2 + 0.5)
    return np.mean(shares)


def interval(statistic, *tasks) -> str:
    """A 95 % interval: attempts are resampled within their task (arXiv 2108.13264, sec. 4.1). There
    is none if a task has a single attempt.
    """
    from scipy.stats import bootstrap

    middle = f"{statistic(*tasks):.3f}"
    if min(map(len, tasks)) < 2:
        return middle
    drawn = bootstrap(tasks, statistic, n_resamples=1000, method="percentile", rng=0)
    low, high = drawn.confidence_interval
    return f"{middle} [{low:.3f}, {high:.3f}]"


# ------------------------------------------------------------------ tables and picture


def report(suite: dict, runs: list[RunData]) -> str:
    """Text of the tables. Writes profile.png into folder_of(runs) if there are published results.

    Raises UserError if there is no task that all models have, or for a run of something else.
    """
    import pandas

    attempts = [*suite["attempts"]]
    for run in runs:
        attempts += played(run, Path(suite["name"]).stem)
    frame = pandas.DataFrame(attempts, columns=["model", "task", "sign", *KINDS, *MEANS])
    if frame.position.any():  # there are leaderboards
        frame.loc[frame.valid.eq(False), "position"] = 0
    models = frame.groupby("task").model.transform("nunique")
    frame = frame[models == frame.model.nunique()]
    if frame.empty:
        raise UserError("Name evaluations that have a task in common with the suite.")
    groups = frame.groupby(["task", "model"])
    gains = groups[KINDS].max()
    means = groups[MEANS].mean()
    sign = frame.groupby("task").sign.first()
    cells = gains.mul(sign, axis=0, level=0).join(means[["value", "valid"]])
    ranked = gains.drop(BASELINE, level=1, errors="ignore").groupby("task")
    cells["place"] = ranked[KINDS[0]].rank(ascending=False, method="min")
    totals = means.groupby("model").mean()
    values = groups.value.agg(list)
    ours = {}
    for run in runs:
        name = str(run.dir)
        ours[name] = values.xs(name, level=1)
        totals.loc[name, "value [95 %]"] = interval(mean_value, *ours[name])
    order = ["value"]
    if suite["attempts"]:
        scores = np.array([cells[kind].unstack(0) for kind in KINDS])
        baseline = totals.index.get_loc(BASELINE)
        tau, rho, areas = performance_profiles(scores, baseline, sign.to_numpy())
        picture = folder_of(runs) / "profile.png"
        picture.parent.mkdir(exist_ok=True)
        figure = draw(tau, rho, [*totals.index], ours)
        write_whole(picture, plots.encoded(figure, "png"))
        print(f"wrote {picture}\n")
        order = [f"AUP, {kind}" for kind in KINDS]
        totals[order] = areas.T
    totals = totals.sort_values(order, ascending=False)
    shown = cells.dropna(subset="value"), totals.dropna(axis=1, how="all")  # cells of ours alone
    look = {"float_format": "{:.4g}".format, "na_rep": "-"}
    parts = [table.to_string(**look) for table in shown if len(table)]
    for name, other in itertools.combinations(ours, 2):
        chance = interval(probability_of_improvement, *ours[name], *ours[other])
        parts.append(f"probability that {name} is better than {other}: {chance}")
    parts.append(f"over the tasks that all models have: {', '.join(sign.index)}")
    return "\n\n".join([*parts, notes(suite, runs)])


def notes(suite: dict, runs: list[RunData]) -> str:
    """Lines about the settings, the tasks that were left out and the published attempts."""
    lines = []
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


def draw(tau, rho, models: list[str], ours: list[str]):
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
