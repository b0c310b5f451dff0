"""The tables and the performance profile of models over the tasks of a suite.

Our runs and published results become records of the same form, one for each attempt at a task. The
score of an attempt is the best of its validates; that of its submission is the last one.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np

from flatlab.errors import UserError, nearest
from flatlab.files import read_mapping
from flatlab.runs.fingerprint import ROOT
from flatlab.view import page, plots
from flatlab.view.reader import RunData

SUITES = ROOT / "configs" / "suites"
KINDS = ["best attempt", "best submission"]
MEANS = ["value", "valid", "position", "tokens", "seconds_env", "seconds"]  # of the attempts
BASELINE = "baseline"  # name of its row
RESAMPLES = 1000  # of a bootstrap
STEPS = 500  # of a profile
NAMED = ("--", "-.", (0, (1, 1)))  # lines of the best published models, which have a name


def read_suite(name: str) -> dict:
    """The file configs/suites/<name>.yaml, or the one at this path; mlgym.yaml explains its keys.

    Raises UserError if there is none, or if it needs an environment variable that is not set.
    """
    path = Path(name) if name.endswith(".yaml") else SUITES / f"{name}.yaml"
    if not path.exists():
        names = sorted(file.stem for file in SUITES.glob("*.yaml"))
        raise UserError(f"Unknown suite {name!r}; {nearest(name, names)}.")
    suite = read_mapping(path)
    variable = suite.get("needs")
    if variable and not os.environ.get(variable):
        raise UserError(f"The suite {name} needs ${variable}, the folder that holds its tasks.")
    return suite


# ------------------------------------------------------------------ records


def record(model: str, task: str, larger: bool, scores: list) -> dict:
    """An attempt. larger: whether larger scores are better. scores: in order, the last one of the
    submission; None: not valid. Its gains are the scores, times -1 if smaller ones are better.
    """
    sign = 1 if larger else -1
    gains = sign * np.array(scores, float)
    best = np.fmax.reduce(gains), gains[-1]
    return {"model": model, "task": task, "sign": sign} | dict(zip(KINDS, best))


def played(run: RunData) -> list[dict]:
    """The records of a run, with MEANS. A fault is no attempt."""
    records = []
    for item in run.rows:
        if item["outcome"] != "fault":
            larger = run.result["larger_is_better"][item["task"]]
            scores = [*(turn["score"] for turn in item["turns"]), item["score"]]
            item["valid"] = item["outcome"] == "valid"
            item["seconds_env"] = sum(turn["seconds_env"] for turn in item["turns"])
            records.append(item | record(run.name, item["task"], larger, scores))
    return records


def published(suite: dict) -> list[dict]:
    """The records of the published models and the baseline. Raises UserError without any."""
    facts = suite["published"]
    root = Path(os.environ[suite["needs"]])
    records = []
    for model, (task, own) in itertools.product(facts["models"], facts["tasks"].items()):
        larger, metric = own["higher_is_better"], own["metric"]
        files = facts["files"].format(model=model, id=own.get("id", task))
        for file in sorted(root.glob(files)):
            found = read_mapping(file)
            for name, entries in ((model, found.get("agent")), (BASELINE, [found["baseline"]])):
                scores = [entry.get(metric) for entry in entries or [{}]]
                records.append(record(name, task, larger, scores))
    if not records:
        raise UserError(f"{root} holds no published results ({facts['files']}).")
    return records


# ------------------------------------------------------------------ numbers


def performance_ratios(scores, sign) -> tuple:
    """Ratio of each score to the best one of its task, a DataFrame (models, tasks), and the largest
    one possible.

    r = cost / min cost, where cost is 1 / score if larger is better (Dolan and More 2002, sec. 2).
    Scores that are not above 0 or worse than the baseline get 1.05 times the largest ratio of the
    others (MLGym, arXiv 2502.14499). sign: of each task, 1 if larger is better, else -1.
    """
    is_feasible = (scores > 0) & ((scores - scores.loc[BASELINE]) * sign >= 0)
    costs = scores.where(is_feasible) ** -sign
    ratios = costs / costs.min()
    worst = 1.05 * ratios.max()
    return ratios.fillna(worst), worst.max()


def profile(ratios, end: float):
    """rho(tau) = share of tasks with log10 r <= tau; a DataFrame (STEPS from 0 to end, models)."""
    import pandas

    tau = np.linspace(0, end, STEPS)
    within = np.log10(ratios.to_numpy()) <= tau[:, None, None]
    return pandas.DataFrame(within.mean(2), tau, ratios.index)


def area(rho):
    """AUP of each model: the sum of step width times left height (AutoML Decathlon)."""
    return (rho.iloc[:-1].sum() * rho.index[1]).round(3)


def mean_value(tasks: list[np.ndarray]) -> np.ndarray:
    """Mean over the tasks of their mean value. tasks: values of shape (..., attempts)."""
    return np.mean([values.mean(-1) for values in tasks], axis=0)


def probability_of_improvement(tasks: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
    """Mean over the tasks of P(X > Y), an equal pair counts half (arXiv 2108.13264, sec. 4.3)."""
    pairs = [np.sign(x[..., None] - y[..., None, :]) for x, y in zip(tasks, others)]
    return (np.mean([signs.mean((-1, -2)) for signs in pairs], axis=0) + 1) / 2


def interval(statistic, *models: list[np.ndarray]) -> str:
    """A 95 % interval: attempts are resampled within their task (arXiv 2108.13264, sec. 4.1)."""
    rng = np.random.default_rng(0)
    drawn = [[rng.choice(v, (RESAMPLES, len(v))) for v in tasks] for tasks in models]
    low, high = np.quantile(statistic(*drawn), [0.025, 0.975])
    return f"{statistic(*models):.3f} [{low:.3f}, {high:.3f}]"


# ------------------------------------------------------------------ tables and picture


def compare(suite: dict, runs: list[RunData]) -> tuple[str, dict]:
    """Text of the tables, and the profile of each kind; {} without published results.

    Raises UserError if there is no task that all models have.
    """
    import pandas

    records = [one for run in runs for one in played(run)]
    if "published" in suite:
        records += published(suite)
    frame = pandas.DataFrame(records, columns=["model", "task", "sign", *KINDS, *MEANS])
    models = frame.groupby("task").model.transform("nunique")
    frame = frame[models == frame.model.nunique()]
    if frame.empty:
        raise UserError("Name evaluations that have a task in common with the suite.")
    cells = frame.groupby(["task", "model"])
    gains, means = cells[KINDS].max(), cells[MEANS].mean()
    sign = frame.groupby("task").sign.first()
    by_task = gains.mul(sign, axis=0, level=0)
    profiles = profiles_of(by_task, sign) if "published" in suite else {}
    ranked = gains[KINDS[0]].drop(BASELINE, level=1, errors="ignore").groupby("task")
    by_task["place"] = ranked.rank(ascending=False, method="min")
    by_task = by_task.join(means[["value", "valid"]])
    by_model = means.groupby("model").mean()
    for kind, rho in profiles.items():
        by_model[f"AUP, {kind}"] = area(rho)
    values, chances = {}, []
    for run in runs:
        own = frame[frame.model == run.name].groupby("task").value
        values[run.name] = [part.to_numpy() for _, part in own]
        by_model.loc[run.name, "value [95 %]"] = interval(mean_value, values[run.name])
    for name, other in itertools.combinations(values, 2):
        chance = interval(probability_of_improvement, values[name], values[other])
        chances.append(f"P({name} is better than {other}) = {chance}")
    own = by_task[by_task.index.isin(values, level=1)]
    tables = [own, by_model.sort_values(by_model.columns[-1], ascending=False)]
    texts = [
        table.dropna(axis=1, how="all").to_string(float_format="{:.4g}".format, na_rep="-")
        for table in tables
        if len(table)
    ]
    below = "\n".join([*chances, *notes(suite, runs)])
    return "\n\n".join(filter(None, [*texts, below])), profiles


def profiles_of(scores, sign) -> dict:
    """Kind -> profile, up to the same tau for all kinds. scores: by task and model."""
    found = {kind: performance_ratios(scores[kind].unstack(0), sign) for kind in KINDS}
    most = np.ceil(max(worst for _, worst in found.values()))
    end = np.ceil(10 * np.log10(most)) / 10
    return {kind: profile(ratios, end) for kind, (ratios, _) in found.items()}


def notes(suite: dict, runs: list[RunData]) -> list[str]:
    """Sentences about how these runs differ from what was published."""
    facts = suite.get("published", {"settings": {}, "notes": []})
    lines = []
    for run in runs:
        for key, there in facts["settings"].items():
            if run.config[key] != there:
                lines.append(
                    f"{key}: {run.config[key]} in {run.name}, {there} in the published runs"
                )
        for task, why in run.result["left_out"].items():
            lines.append(f"{run.name} left out {task}: {why}")
    return [*lines, *facts["notes"]] if runs else []


def draw(profiles: dict, ours: list[str]):
    """A Figure with a panel for each kind. Our runs have colours, the best published ones names."""
    models = area(profiles[KINDS[0]]).sort_values(ascending=False).index
    others = [name for name in models if name not in (BASELINE, *ours)]
    looks = {name: {"color": "#cccccc", "linewidth": 1} for name in others}
    looks[others[-1]]["label"] = "other published models"
    for name, style in zip(others, NAMED):
        looks[name] = {"color": "#555555", "linestyle": style, "label": name}
    looks[BASELINE] = {"color": plots.BLACK, "linestyle": ":", "label": BASELINE}
    for name, colour in zip(ours, plots.COLOURS):
        looks[name] = {"color": colour, "linewidth": 2.2, "label": plots.shorten(name, 40)}
    figure = plots.new_figure(7, 3.8)
    axes = figure.subplots(1, len(profiles), sharey=True)
    for axis, (kind, rho) in zip(axes, profiles.items()):
        for name, look in looks.items():
            axis.plot(rho[name], drawstyle="steps-post", **look)
        axis.set(title=kind.capitalize(), xlabel="tau = log10(best score / score)")
    axes[0].set(ylabel="share of the tasks within tau", ylim=(0, 1.02))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def report(name: str, runs: list[RunData]) -> str:
    """Text of the tables. Published results come with profile.png in the folder of all runs."""
    suite = read_suite(name)
    text, profiles = compare(suite, runs)
    if not profiles:
        return text
    folder = Path(os.path.commonpath([run.dir.resolve() for run in runs] or [Path()]))
    figure = draw(profiles, [run.name for run in runs])
    [path] = page.save({"profile": figure}, folder, 150)
    return f"{text}\n\nwrote {path}"
