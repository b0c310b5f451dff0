"""Results as text: a sentence about a run, and the table that compares several.

A result is a mean of values: of the episodes of an evaluation, or of one score per seed. Every ± is
the standard error of a mean. Values of two results that belong to the same seed are compared in
pairs, which takes out what the seed has in common.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

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

# ------------------------------------------------------------------ results


@dataclass(frozen=True)
class Result:
    """The score of a run, or of several that differ by their seeds only.

    what: whose score it is. part: of the data. values: a pandas.Series by seed. error: standard
    error of their mean; of a single value, that over the rows or games of the part; None if it is
    unknown.
    """

    what: str
    part: str
    values: Any
    mean: float
    error: float | None
    improvement: float


def result_of(runs: list[RunData]) -> Result:
    """The result of a run, whose values are its own, or of several: a value for each."""
    import pandas

    first = runs[0]
    read = training_values if first.kind == "training" else search_values
    what, part, values, error = read(first)
    if len(runs) > 1:
        values = {f"run {run.config['seed']}": pandas.Series(read(run)[2]).mean() for run in runs}
    values = pandas.Series(values, dtype=float).rename(str)
    if len(values) > 1:
        error = values.sem()
    mean = values.mean()
    scale = (first.baseline, first.higher_is_better, first.result["reference"])
    return Result(what, part, values, mean, error, improvement(mean, scale))


def training_values(run: RunData) -> tuple[str, str, dict, None]:
    """The best adapter on the fresh seeds at the end of the run, or the last steps before that."""
    key = plots.headline_key(run)
    final = run.result.get("final")
    if not final:
        last = run.rows[-plots.window_of(run.rows) :]
        values = {row["step"]: row[f"{key}_mean"] for row in last}
        return f"mean of the last {count(len(last), 'step')}", "training", values, None
    best = final["best"]
    what = "untrained adapter"
    if not final["best_is_untrained"]:
        what = f"best adapter (step {best['step']})"
    values = {}
    for row in read_rows(run.dir / best["file"]):
        score = row.get("test_score") or row["score"]
        if key == "improvement" and row["status"] != "fault":
            values[row["seed"]] = clipped_improvement(row["improvement"] or 0.0)
        elif score:
            values[row["seed"]] = score["value"] if score["valid"] else run.baseline
    part = "test" if "test_score_mean" in best else final["split"]
    return what, part, values, None


def search_values(run: RunData) -> tuple[str, str, dict, float | None]:
    """Of a search the best node: its test score, or without one the score that it was chosen by.
    Of an evaluation all episodes but the faults; none of them was chosen.
    """
    result = run.result
    part = result.get("split", "validation")
    if run.kind == "evaluation":
        values = {row["seed"]: row["counted"] for row in run.rows if row["counted"] is not None}
        return "mean of all episodes", part, values, None
    score, error = result["best_score"], result.get("best_stderr")
    if result["test_score"] is not None and not result.get("exact"):
        score, error, part = result["test_score"], result.get("test_stderr"), "test"
    return f"best node ({result['best_id']})", part, {run.config["seed"]: score}, error


def failures(run: RunData) -> np.ndarray:
    """How many episodes or nodes were played, how many of them failed, how many were faults."""
    if run.has_nodes:
        return np.array([run.result[key] for key in ("nodes", "failed", "faults")])
    keys = ("episodes", "valid_share", "faults")
    episodes, valid, faults = (series(run.rows, key) for key in keys)
    counts = [sum(episodes + faults), sum(episodes * (1 - valid)), sum(faults)]
    return np.rint(counts).astype(int)


# ------------------------------------------------------------------ sentences about one run

NOUNS = {"training": "step", "search": "node", "evaluation": "episode"}  # for a row of a run


def heading(run: RunData) -> str:
    """One line about what ran: name, task, mode, rule, seed, model, length."""
    config = run.config
    keys = ("sampling_mode", "select", "seed", "model")
    facts = [value_text(config[key]) for key in keys if key in config]
    seconds = run.rows[-1].get("elapsed") or np.nansum(series(run.rows, "seconds"))
    size = count(len(run.rows), NOUNS[run.kind])
    return f"{run.name}: {run.tasks}, {', '.join(facts)}, {size} in {duration(seconds)}"


def headline(run: RunData) -> str:
    """What came out in words: score, against what, how sure, how many failed."""
    result = result_of([run])
    played, failed, faults = failures(run)
    score = plus_minus(result.mean, result.error)
    if run.result.get("exact"):
        score = f"{result.mean:.6f}"
    drawn = None
    if result.part != "training":
        drawn = expected_best(BEST_OF, list(result.values), run.higher_is_better)
    text = (
        f"{result.what}: {run.result['metric']} {score} ({result.part} part; {run.direction})"
        f"{best_text(drawn)}, baseline {run.baseline:.4f}, improvement {result.improvement:+.2f}. "
        f"{failed} of {played} failed and count as the baseline, {count(faults, 'fault')}. "
        f"Status: {run.status}."
    )
    text = " ".join([text, *notes([run])])
    return text[0].upper() + text[1:]


def notes(runs: list[RunData]) -> list[str]:
    """What the numbers do not say, a sentence for each thing with the names of its runs."""
    names = {}
    for run in runs:
        for sentence in notes_of(run):
            names.setdefault(sentence, []).append(run.name)
    return [f"{', '.join(same)}: {sentence}." for sentence, same in names.items()]


def notes_of(run: RunData) -> list[str]:
    result = run.result
    has_one_part = result["selected_on_test"] or result.get("exact")
    is_untested = run.kind == "search" and not has_one_part and result["test_score"] is None
    reads = result.get("test_reads", 0)
    ungraded = result.get("ungraded")
    without_strategy = result.get("without_strategy")
    alarms = [text for row in run.rows + run.rounds for text in row.get("alarms", ())]
    applies = {
        "the task has a test part only, so the best was chosen on it and its score is "
        "optimistic": result["selected_on_test"],
        "the score is exact": result.get("exact"),
        "the best node was not scored on the test part": is_untested and result["best_id"] != "0",
        f"a search that went on with more --nodes has read the test part {reads} times": reads > 1,
        f"the grader gave no result for {ungraded} failed nodes: see grader_output in the "
        "journal": ungraded,
        f"{without_strategy} of {result.get('nodes')} nodes got no strategy, so their mode is "
        "none: the replies held too few that could be read": without_strategy,
        "the selection rule replaced the sampling mode of some nodes: see sampling_modes_used in "
        "result.json": "local" in result.get("sampling_modes_used", ()),
        "its code changed while it went on": len(run.fingerprint.get("code", ())) > 1,
        f"the last alarms: {' '.join(alarms[-3:])}": alarms,
    }
    return [sentence for sentence, does_apply in applies.items() if does_apply]


# ------------------------------------------------------------------ rounds

# Keys of metrics.jsonl that are shown, as docs/runs.md explains them: on a terminal the first ones.
ROUNDS = (
    "step nodes best_score valid_share improved_share gain_mean live_lineages kl "
    "tokens elapsed gain_stderr largest_lineage_share depth duplicate_share cut_share"
).split()
ON_TERMINAL = 8


def rounds(run: RunData, columns: int | None = ON_TERMINAL) -> str:
    """A line for each round of a search that learns; "" of other runs. columns: None: all."""
    import pandas

    if not run.rounds:
        return ""
    frame = pandas.DataFrame(run.rounds, columns=ROUNDS[:columns])
    return frame.to_string(index=False, float_format="{:.5g}".format, na_rep="-")


# ------------------------------------------------------------------ groups

# Settings that do not change what is measured
NOT_OF_THE_GROUP = set(
    "seed name workers concurrency price url eval_episodes backend trackers".split()
)


def groups_of(runs: list[RunData]) -> dict[tuple, list[RunGroup]]:
    """(kind, task, baseline, digest of the task) -> groups of runs that differ by their seed only.

    A group is named after its first run. It has one run of each seed; further ones are another
    group. Scores on different versions of a task cannot be compared.
    """
    groups, seen = {}, Counter()
    for run in sorted(runs, key=lambda run: run.name):
        settings = [pair for pair in run.config.items() if pair[0] not in NOT_OF_THE_GROUP]
        made_by = repr((settings, run.fingerprint))
        seed = (made_by, run.config.get("seed"))
        seen[seed] += 1
        version = (run.kind, run.tasks, run.baseline, run.fingerprint.get("task"))
        comparable = groups.setdefault(version, {})
        group = RunGroup(str(run.dir), COLOURS[len(comparable) % len(COLOURS)], [])
        comparable.setdefault((made_by, seen[seed]), group).runs.append(run)
    return {version: [*comparable.values()] for version, comparable in groups.items()}


# ------------------------------------------------------------------ the table

LEGEND = """\
run: its directory; runs that differ by their seed only are one row, named after the first; a second
    run of a seed is in another row
N: runs in the row
score: mean ± standard error, over the runs if there are several, else over the episodes of the
    evaluation or over the rows of the part
of: what has this score, and on which part of the data
difference: to the best row of the task ± standard error; paired: over the seeds that both have
improvement: of the score: 0 at the baseline, 1 at the reference
failed: episodes or nodes without a valid submission; each counts as the baseline"""


def table(runs: list[RunData]) -> str:
    """What `python viz.py logs/*` prints: a table per kind of run and task, then what it means."""
    parts = []
    for (kind, task, *_), groups in groups_of(runs).items():
        parts.append(f"{task}, {kind}\n{aligned(rows_of(groups))}")
    return "\n\n".join([*parts, "\n".join([LEGEND, *notes(runs)])])


def rows_of(groups: list[RunGroup]) -> list[dict]:
    """A row of texts per group of the same kind and task, the best one first."""
    pairs = [(result_of(group.runs), group) for group in groups]
    pairs.sort(key=lambda pair: -np.nan_to_num(pair[0].improvement, nan=-math.inf))
    best, _ = pairs[0]
    return [row_of(result, group, best) for result, group in pairs]


def row_of(result: Result, group: RunGroup, best: Result) -> dict:
    played, failed, faults = sum(map(failures, group.runs))
    what, *_ = result.what.split(" (")  # without its step or its id
    return {
        "run": group.label,
        "N": len(group.runs),
        "score": plus_minus(result.mean, result.error),
        "of": f"{what}, {result.part}",
        "difference": "" if result is best else difference(result, best),
        "improvement": f"{result.improvement:+.2f}",
        "failed": f"{failed} of {played}, {count(faults, 'fault')}",
    }


def difference(result: Result, best: Result) -> str:
    """The difference of the means with its standard error."""
    pairs = (result.values - best.values).dropna()
    if len(pairs) > 1:
        return f"{plus_minus(pairs.mean(), pairs.sem(), '+')} ({len(pairs)} paired)"
    errors = (result.error, best.error)
    error = None if None in errors else math.hypot(*errors)
    return plus_minus(result.mean - best.mean, error, "+")


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
    rows = []
    for name in ADAPTERS:
        played = final.get(name)
        if not played:
            continue
        step = played.get("step", -1)  # an adapter from before the first step has none
        error = played.get("difference_stderr")
        row = {
            "adapter": name if step < 0 else f"{name} (step {step})",
            result["metric"]: mean_text(played).partition(" ")[2],
            f"best of {BEST_OF}": plus_minus(played.get(f"score_best_of_{BEST_OF}"), None),
            "valid": f"{played['valid_share']:.0%}",
            "difference to the untrained": plus_minus(played.get("difference"), error, "+"),
            "pairs": played.get("difference_n", "-"),
        }
        rows.append(row)
    lines = [
        f"{final['split']} part, {final['n']} fresh seeds that were never used for selection, the "
        "same ones for every adapter",
        aligned(rows),
    ]
    for key, value in final["best"].items():
        task, found, _ = key.partition("test_score_mean")
        if found:
            score = plus_minus(value, final["best"][f"{task}test_score_stderr"])
            lines.append(f"best adapter on the test part: {task.replace('.', ' ')}{score}")
    if final["best_is_untrained"]:
        lines.append("best is the untrained adapter: no evaluation during training was better.")
    return "\n".join(lines)
