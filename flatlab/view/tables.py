"""Results as text: a sentence about a run, and the table that compares several.

A result is a mean of values: of the episodes of an evaluation, or of one score per seed. Every ± is
the standard error of a mean. Values of two results that belong to the same seed are compared in
pairs, which takes out what the seed has in common.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from flatlab.files import read_rows
from flatlab.numbers import (
    BEST_OF,
    best_text,
    count,
    duration,
    expected_best,
    plus_minus,
    value_text,
)
from flatlab.task.definition import clipped_improvement, improvement
from flatlab.train.metrics import mean_text
from flatlab.view import plots
from flatlab.view.plots import COLOURS, RunGroup, series
from flatlab.view.reader import RunData

# Settings that do not change what is measured
NOT_OF_THE_GROUP = set(
    "task seed name workers concurrency price url eval_episodes backend trackers".split()
)


@dataclass(frozen=True)
class Result:
    """What a run is worth. values: by seed. error: standard error of a single value, over the rows
    or games of that part. played: episodes or nodes, the failed and the faults included.
    """

    what: str
    part: str
    values: dict
    error: float | None
    played: int
    failed: int
    faults: int


def training_result(run: RunData) -> Result:
    """The best adapter on the fresh seeds at the end of the run, or the last steps before that."""
    keys = ("episodes", "valid_share", "faults")
    episodes, valid, faults = (np.nan_to_num(series(run.rows, key)) for key in keys)
    sums = [sum(episodes + faults), sum(episodes * (1 - valid)), sum(faults)]
    counts = [round(number) for number in sums]
    key = plots.headline_key(run)
    final = run.result.get("final")
    if not final:
        last = run.rows[-plots.window_of(run.rows) :]
        values = {row["step"]: row[f"{key}_mean"] for row in last if f"{key}_mean" in row}
        what = f"mean of the last {count(len(last), 'step')}"
        return Result(what, "training", values, None, *counts)
    best = final["best"]
    is_tested = "test_score_mean" in best
    values = {}
    for row in read_rows(run.dir / best["file"]):
        score = row["test_score" if is_tested else "score"]
        if key == "improvement" and row["status"] != "fault":
            values[row["seed"]] = clipped_improvement(row["improvement"] or 0.0)
        elif score:
            values[row["seed"]] = score["value"] if score["valid"] else run.baseline
    what = f"best adapter (step {best.get('step', -1)})"
    if final["best_is_untrained"]:
        what = "untrained adapter"
    part = "test" if is_tested else final["split"]
    return Result(what, part, values, None, *counts)


def search_result(run: RunData) -> Result:
    """Of a search the best node: its test score, or without one the score that it was chosen by.
    Of an evaluation all episodes but the faults; none of them was chosen.
    """
    result = run.result
    counts = [result[key] for key in ("nodes", "failed", "faults")]
    part = result.get("split", "validation")
    if result.get("evaluation"):
        values = {row["seed"]: row["counted"] for row in run.rows if row["counted"] is not None}
        return Result("mean of all episodes", part, values, None, *counts)
    score, error = result["best_score"], result.get("best_stderr")
    if result["test_score"] is not None and not result.get("exact"):
        score, error, part = result["test_score"], result.get("test_stderr"), "test"
    values = {run.config["seed"]: score}
    return Result(f"best node ({result['best_id']})", part, values, error, *counts)


@dataclass(frozen=True)
class Kind:
    """What sets training runs, searches and evaluations apart when they are shown."""

    noun: str  # of a row
    result: Callable  # RunData -> Result
    panels: list
    is_tree: bool = False


KINDS = {
    "training": Kind("step", training_result, plots.TRAINING),
    "search": Kind("node", search_result, plots.SEARCH, is_tree=True),
    "evaluation": Kind("episode", search_result, plots.EVALUATION),
}

# ------------------------------------------------------------------ sentences about one run


def heading(run: RunData) -> str:
    """One line about what ran: name, task, mode, rule, seed, model, length."""
    config = run.config
    keys = ("sampling_mode", "select", "seed", "model")
    facts = [value_text(config[key]) for key in keys if config.get(key) is not None]
    seconds = run.rows[-1].get("elapsed") or np.nansum(series(run.rows, "seconds"))
    size = count(len(run.rows), KINDS[run.kind].noun)
    return f"{run.name}: {run.tasks}, {', '.join(facts)}, {size} in {duration(float(seconds))}"


def headline(run: RunData) -> str:
    """What came out in words: score, against what, how sure, how many failed."""
    result = KINDS[run.kind].result(run)
    (row,) = rows_of([RunGroup("", "", [run])])
    score = plus_minus(row["mean"], row["error"])
    if run.result.get("exact"):
        score = f"{row['mean']:.6f}"
    drawn = None
    if run.result.get("evaluation") or run.result.get("final"):  # episodes of one policy
        drawn = expected_best(BEST_OF, list(row["values"]), run.higher_is_better)
    sentences = [
        f"{result.what}: {run.result['metric']} {score} ({result.part} part; {run.direction})"
        f"{best_text(drawn)}, baseline {run.baseline:.4f}, improvement {row['improvement']:+.2f}.",
        f"{result.failed} of {result.played} failed and count as the baseline, "
        f"{count(result.faults, 'fault')}. Status: {run.status}.",
    ]
    text = " ".join(sentences + notes([run]))
    return text[0].upper() + text[1:]


NOTES = {  # what is said, with values of result.json, if facts() has this
    "selected_on_test": "the task has a test part only, so the best was chosen on it and its score "
    "is optimistic",
    "exact": "the score is exact",
    "untested": "the best node was not scored on the test part",
    "read_again": "a search that went on with more --nodes has read the test part {test_reads} "
    "times",
    "ungraded": "the grader gave no result for {ungraded} failed nodes: see grader_output in the "
    "journal",
    "without_strategy": "{without_strategy} of {nodes} nodes got no strategy, so their mode is "
    "none: the replies held too few that could be read",
    "replaced": "the selection rule replaced the sampling mode of some nodes: {modes}",
    "mixed": "its code changed while it went on",
    "alarms": "the last alarms: {alarms}",
}


def facts(run: RunData) -> dict:
    """result.json and what follows from it."""
    result = run.result
    has_one_part = result["selected_on_test"] or result.get("exact") or result.get("evaluation")
    alarms = [text for row in [*run.rows, *run.rounds] for text in row.get("alarms", ())]
    is_tested = has_one_part or result.get("test_score") is not None
    modes = result.get("sampling_modes_used", {})
    return result | {
        "modes": ", ".join(f"{mode} {nodes}" for mode, nodes in modes.items()),
        "untested": not is_tested and result.get("best_id", "0") != "0",
        "read_again": (result.get("test_reads") or 0) > 1,
        "replaced": "local" in modes,
        "mixed": len(run.fingerprint.get("code", ())) > 1,
        "alarms": " ".join(alarms[-3:]),
    }


def notes(runs: list[RunData]) -> list[str]:
    """What the numbers do not say, a sentence for each thing."""
    names = {}
    for key, form in NOTES.items():
        for run in runs:
            known = facts(run)
            if known.get(key):
                names.setdefault(form.format_map(known), []).append(run.name)
    return [f"{', '.join(same)}: {sentence}." for sentence, same in names.items()]


# ------------------------------------------------------------------ rounds

# Keys of metrics.jsonl that are shown, as docs/runs.md explains them.
ROUNDS = (
    "step nodes tokens elapsed best_score valid_share improved_share gain_mean gain_stderr "
    "live_lineages largest_lineage_share depth duplicate_share cut_share kl"
).split()


def rounds(run: RunData) -> str:
    """A line for each round of a search that learns; "" of other runs."""
    import pandas

    if not run.rounds:
        return ""
    frame = pandas.DataFrame(run.rounds, columns=ROUNDS)
    frame.columns = [short(key) for key in ROUNDS]
    return frame.to_string(index=False, float_format="{:.5g}".format, na_rep="-")


def short(key: str) -> str:
    return key.removesuffix("_share").removesuffix("_score")


# ------------------------------------------------------------------ groups


def groups_of(runs: list[RunData]) -> dict[tuple, list[RunGroup]]:
    """(kind, task, version of the task) -> groups of runs that differ by their seed only.

    A group is named after its first run. It has one run of each seed; further ones are another
    group. Scores on different versions of a task cannot be compared.
    """
    root = os.path.commonpath([run.dir.resolve().parent for run in runs])
    colours = cycle(COLOURS)
    counts, by_settings, groups = Counter(), {}, {}
    for run in sorted(runs, key=lambda run: run.name):
        seed = run.config.get("seed")
        settings = [pair for pair in sorted(run.config.items()) if pair[0] not in NOT_OF_THE_GROUP]
        key = repr((run.kind, run.tasks, run.baseline, settings, run.fingerprint))
        counts[key, seed] += 1
        key += str(counts[key, seed])
        if key not in by_settings:
            label = os.path.relpath(run.dir.resolve(), root)
            by_settings[key] = RunGroup(label, next(colours), [])
            version = (run.baseline, run.fingerprint.get("task"))
            groups.setdefault((run.kind, run.tasks, version), []).append(by_settings[key])
        by_settings[key].runs.append(run)
    return groups


# ------------------------------------------------------------------ the table

COLUMNS = {
    "task": "its name",
    "run": "its directory; runs that differ by their seed only are one row, named after the first; "
    "a second run of a seed is in another row",
    "N": "runs in the row",
    "score": "mean ± standard error, over the runs if there are several, else over the episodes of "
    "the evaluation or over the rows of the part",
    "of": "what has this score, and on which part of the data",
    "difference": "to the best row of the task ± standard error; paired: over the seeds that both "
    "have",
    "improvement": "of the score: 0 at the baseline, 1 at the reference",
    "failed": "episodes or nodes without a valid submission; each counts as the baseline",
}


def rows_of(groups: list[RunGroup]) -> list[dict]:
    """A row of numbers per group of the same kind and task, the best one first."""
    import pandas

    rows = []
    for group in groups:
        first = group.runs[0]
        results = [KINDS[run.kind].result(run) for run in group.runs]
        values = pandas.Series(results[0].values, dtype=float).rename(str)
        error = results[0].error
        if len(results) > 1:
            means = {}
            for run, result in zip(group.runs, results):
                means[f"run {run.config['seed']}"] = pandas.Series(result.values).mean()
            values = pandas.Series(means)
        if len(values) > 1:
            error = values.sem()
        scale = (first.baseline, first.higher_is_better, first.result["reference"])
        rows.append(
            {
                "task": first.tasks,
                "run": group.label,
                "N": len(results),
                "mean": values.mean(),
                "error": error,
                "of": f"{re.sub(' [(].*', '', results[0].what)}, {results[0].part}",
                "values": values,
                "improvement": improvement(values.mean(), scale),
                "played": sum(result.played for result in results),
                "failed": sum(result.failed for result in results),
                "faults": sum(result.faults for result in results),
            }
        )
    return sorted(rows, key=lambda row: -np.nan_to_num(row["improvement"], nan=-math.inf))


def difference(row: dict, best: dict) -> str:
    """The difference of the means with its standard error."""
    pairs = (row["values"] - best["values"]).dropna()
    if len(pairs) > 1:
        return f"{plus_minus(pairs.mean(), pairs.sem(), '+')} ({len(pairs)} paired)"
    errors = (row["error"], best["error"])
    error = None if None in errors else math.hypot(*errors)
    return plus_minus(row["mean"] - best["mean"], error, "+")


def table(runs: list[RunData]) -> str:
    """What `python viz.py logs/*` prints: a table per kind of run and task, then what it means."""
    parts = []
    for (kind, *_), groups in groups_of(runs).items():
        rows = rows_of(groups)
        parts.append(f"{kind}\n{aligned([cells(row, rows[0]) for row in rows])}")
    legend = [f"{name}: {meaning}" for name, meaning in COLUMNS.items()]
    return "\n\n".join([*parts, "\n".join(legend + notes(runs))])


def cells(row: dict, best: dict) -> dict:
    """A row of the table as text."""
    texts = {
        "score": plus_minus(row["mean"], row["error"]),
        "difference": "" if row is best else difference(row, best),
        "improvement": f"{row['improvement']:+.2f}",
        "failed": f"{row['failed']} of {row['played']}, {count(row['faults'], 'fault')}",
    }
    return {name: texts.get(name, row.get(name)) for name in COLUMNS}


def aligned(rows: list[dict]) -> str:
    """Rows of texts and numbers as lines of equal width, all columns aligned to the left."""
    lines = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)) for line in lines)


# ------------------------------------------------------------------ adapters

ADAPTERS = ("untrained", "imitated", "last", "best")


def final_table(result: dict) -> str:
    """The comparison at the end of a training run, for the terminal. result: of result.json.

    "" for searches and for runs that are not finished.
    """
    final = result.get("final")
    if not final:
        return ""
    lines = [
        f"{final['split']} part, {final['n']} fresh seeds that were never used for selection, the "
        "same ones for every adapter",
        f"{'adapter':30} {result['metric']:>17} {f'best of {BEST_OF}':>10}  valid   "
        "difference to the untrained adapter",
    ]
    for name in ADAPTERS:
        if name in final:
            played = final[name]
            value = mean_text(played).partition(" ")[2]
            step = played.get("step", -1)  # an adapter from before the first step has none
            label = name if step < 0 else f"{name} (step {step})"
            best = played.get(f"score_best_of_{BEST_OF}")
            drawn = "" if best is None else f"{best:.4f}"
            line = f"{label:30} {value:>17} {drawn:>10} {played['valid_share']:>6.0%}"
            if name != "untrained":
                difference = plus_minus(played["difference"], played["difference_stderr"], "+")
                line += f"   {difference} (N = {played['difference_n']})"
            lines.append(line)
    for key, value in final["best"].items():
        if key.endswith("test_score_mean"):
            error = final["best"][key.removesuffix("mean") + "stderr"]
            task = key.removesuffix("test_score_mean").replace(".", " ")
            lines.append(f"best adapter on the test part: {task}{plus_minus(value, error)}")
    if final["best_is_untrained"]:
        lines.append("best is the untrained adapter: no evaluation during training was better.")
    return "\n".join(lines)
