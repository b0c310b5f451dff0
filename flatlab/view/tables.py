"""Results as text: a sentence about a run, and the table that compares several.

A result is a mean of values (see task/value.py): of the episodes of an evaluation, or of one value
per seed. Every ± is the standard error of a mean. Where seeds are the unit, a mean over fewer than
three has no interval, and each value is shown instead. Values of two results that belong to the
same seed are compared in pairs, which takes out what the seed has in common.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from flatlab.numbers import BEST_OF, count, duration, plus_minus, standard_error, value_text
from flatlab.task.value import improvement, summary, summary_text, value_of
from flatlab.train.metrics import fell_by_half
from flatlab.view import plots
from flatlab.view.plots import COLOURS, FEW_SEEDS, RunGroup, series
from flatlab.view.reader import NOUNS, RunData, episode_items, transcript_files

# ------------------------------------------------------------------ results


@dataclass(frozen=True)
class Result:
    """The value of a run.

    what: the adapter, node or episodes that have it. part: of the data. values: by seed; one for
    each episode, or a single one for the best node of a search. facts: of summary(), except that
    valid_share is over all nodes of a search; rows_error is the standard error of a score over the
    rows or games of the part, mean over the episodes. seed: of the run.
    """

    what: str
    part: str
    values: dict
    facts: dict
    seed: int


def result_of(run: RunData) -> Result:
    items_of = {"training": training_items, "evaluation": all_items, "search": best_item}
    what, part, items = items_of[run.kind](run)
    has_scores = part != "training" and " " not in run.task
    facts = summary([reached for _, reached, _ in items], run if has_scores else None)
    if run.kind == "search":
        facts["valid_share"] = run.result["valid_share"]
    if part == "training":  # items are means over the episodes of a step
        facts["valid_share"] = fmean(series(run.rows, "valid_share")[-len(items) :])
    values = {seed: value_of(reached) for seed, reached, _ in items}
    errors = [error for *_, error in items if error is not None]
    if errors and has_scores:
        facts["rows_error"] = fmean(errors)
    return Result(what, part, values, facts, run.config["seed"])


# Functions that return what has the value, the part of the data, and (seed, improvement, standard
# error of the score) of each episode, step or node.


def training_items(run: RunData) -> tuple[str, str, list]:
    """The best adapter on the fresh seeds at the end of the run, or the last steps before that."""
    final = run.result.get("final")
    if not final:
        last = run.rows[-plots.window_of(run.rows) :]
        items = [(row["step"], row["value_mean"], None) for row in last]
        return f"last {count(len(last), 'step')}", "training", items
    best = final["best"]
    what = "untrained adapter"
    if not final["best_is_untrained"]:
        what = f"best adapter (step {best['step']})"
    return what, *played(episode_items(run.dir / best["file"]), final["split"])


def all_items(run: RunData) -> tuple[str, str, list]:
    """All episodes of an evaluation: none of them was chosen."""
    return "all episodes", *played(run.rows, run.result["split"])


def played(episodes: list[dict], split: str) -> tuple[str, list]:
    """Leaves out the faults. split: the part that was scored, unless the test part was, too."""
    graded = [item for item in episodes if item["outcome"] != "fault"]
    part = "test" if any(item["part"] for item in graded) else split
    values = [
        ((item["task"], item["seed"]), item["improvement"], item["stderr"]) for item in graded
    ]
    return part, values


def best_item(run: RunData) -> tuple[str, str, list]:
    """The best node: its test score, or without one the score that it was chosen by."""
    result, seed = run.result, run.config["seed"]
    if not result["best_id"]:
        return "no valid node", result["split"], [(seed, None, None)]
    what = f"best node ({result['best_id']})"
    if result["tested_id"]:
        part = result["split"] if result["exact"] else "test"
        return what, part, [(seed, result["test_improvement"], result["test_stderr"])]
    reached = improvement(result["best_score"], run)
    return what, result["split"], [(seed, reached, result["best_stderr"])]


def failures(run: RunData) -> tuple[int, int, int]:
    """Numbers of episodes or nodes that were played, that failed, and that were faults."""
    if run.kind != "training":
        outcomes = [row["outcome"] for row in run.rows]
        return len(outcomes), outcomes.count("failed"), outcomes.count("fault")
    keys = ("episodes", "valid_share", "faults")
    episodes, valid, faults = (series(run.rows, key) for key in keys)
    failed = np.sum(episodes * (1 - valid))
    return round(sum(episodes + faults)), round(failed), round(sum(faults))


# ------------------------------------------------------------------ sentences about one run


def heading(run: RunData) -> str:
    """One line about the run: name, task, mode, rule, seed, model, length."""
    config = run.config
    keys = ("sampling_mode", "select", "seed", "model")
    facts = [value_text(config[key]) for key in keys if key in config]
    seconds = run.result.get("seconds") or np.nansum(series(run.rows, "seconds"))
    size = count(len(run.rows), NOUNS[run.kind])
    return f"{run.name}: {run.task}, {', '.join(facts)}, {size} in {duration(seconds)}"


def headline(run: RunData) -> str:
    """The outcome of a run: value, share valid, score, part, uncertainty, and failures."""
    if run.kind == "imitation":
        loss = plus_minus(run.rows[-1]["loss"], None)
        text = f"imitation of {count(run.result['episodes'], 'episode')}: last loss {loss}."
    else:
        text = value_sentence(run)
    text = " ".join([text, f"Status: {run.status}.", *notes([run])])
    return text[0].upper() + text[1:]


def value_sentence(run: RunData) -> str:
    result = result_of(run)
    number, failed, faults = failures(run)
    digits = 6 if run.result.get("exact") else 4
    scale = f"{result.part} part; {run.direction}, baseline {run.baseline:.4f}"
    if "rows_error" in result.facts:
        scale += f"; ± {result.facts['rows_error']:.4f} over its rows"
    text = f"{summary_text(result.facts, run.result['metric'], digits)} ({scale})."
    if result.what == "no valid node":
        text = why_none(run)
    ends = f"{failed} of {number} failed (value -1), {count(faults, 'fault')}."
    return f"{result.what}: {text} {ends}"


def why_none(run: RunData) -> str:
    """The reasons why no node is valid: how they ended, and the most frequent error."""
    ends = Counter(row["status"].replace("_", " ") for row in run.rows)
    parts = [f"{number} x {status}" for status, number in ends.most_common()]
    items = [item for read in transcript_files(run).values() for item in read()]
    turns = [turn for item in items for turn in item["turns"]]
    wrong = [turn for turn in turns if turn["status"] in ("rejected", "invalid")]
    said = Counter(turn["observation"].partition("\n")[0] for turn in wrong)
    for text, number in said.most_common(1):
        text = text.removeprefix("Nothing was run. ").rstrip(".")
        parts.append(f"{text}, in {number} of {len(turns)} replies")
    return "; ".join(parts) + "."


def notes(runs: list[RunData]) -> list[str]:
    """Sentences about what the numbers do not say, with the names of their runs."""
    names = {}
    for run in runs:
        for sentence in notes_of(run):
            names.setdefault(sentence, []).append(run.name)
    return [f"{', '.join(same)}: {sentence}." for sentence, same in names.items()]


def notes_of(run: RunData) -> list[str]:
    fact = run.result.get
    has_test = not (fact("selected_on_test") or fact("exact"))
    alarms = [text for row in run.rows + run.rounds for text in row.get("alarms", ())]
    applies = {
        "the task has a test part only, so the best was chosen on it and its score is "
        "optimistic": fact("selected_on_test"),
        "the score is exact": fact("exact"),
        "the best node was not scored on the test part": fact("best_id")
        and has_test
        and not fact("tested_id"),
        "the best node is not valid on the test part": fact("tested_id")
        and fact("test_score") is None,
        f"a search that went on with more --nodes has read the test part {fact('test_reads')} "
        "times": (fact("test_reads") or 0) > 1,
        f"the grader gave no result for {fact('ungraded')} failed nodes: see grader_output in the "
        "journal": fact("ungraded"),
        f"{fact('without_strategy')} of {fact('nodes')} nodes got no strategy, so their mode is "
        "none: the replies held too few that could be read": fact("without_strategy"),
        f"{fact('unread_strategies')} strategies in replies could not be read: their JSON was "
        "damaged or cut off": fact("unread_strategies"),
        "the selection rule replaced the sampling mode of some nodes: see sampling_modes_used in "
        "result.json": "local" in (fact("sampling_modes_used") or ()),
        "its code changed while it went on": len(run.fingerprint.get("code", ())) > 1,
        f"the last alarms: {'; '.join(alarms[-3:])}": alarms,
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
    """A line for each round of a search that learns; "" of other runs. columns: None for all."""
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
        version = (run.kind, run.task, run.baseline, run.fingerprint.get("task"))
        comparable = groups.setdefault(version, {})
        group = RunGroup(str(run.dir), COLOURS[len(comparable) % len(COLOURS)], [])
        comparable.setdefault((made_by, seen[seed]), group).runs.append(run)
    return {version: [*comparable.values()] for version, comparable in groups.items()}


# ------------------------------------------------------------------ the table

LEGEND = f"""\
run: its directory; runs that differ by their seed only are one row, named after the first; a second
    run of a seed is in another row
N: runs in the row; a mean over fewer than {FEW_SEEDS} runs has no interval, each value is shown
value: mean improvement, 0 at the baseline and 1 at the reference; without a valid submission -1.
    Every ± is a standard error: over the runs, or over the episodes of a single run
valid: share of the episodes, or of the nodes, with a valid submission
score: mean of the valid ones, or the score of the best node, in the unit of the task
best of {BEST_OF}: expected best score of {BEST_OF} episodes
rows ±: standard error of one score over the rows or games of the part
of: what has this value, and on which part of the data
difference: of the value to the best row; paired: over the seeds that both have"""


def table(runs: list[RunData]) -> str:
    """Text of `python viz.py logs/*`: a table per kind of run and task, then what it means."""
    parts = []
    for (kind, task, *_), groups in groups_of(runs).items():
        text = "An imitation has no value: evaluate its adapter to compare it."
        if kind != "imitation":
            text = aligned(rows_of(groups))
        parts.append(f"{task}, {kind}\n{text}")
    return "\n\n".join([*parts, "\n".join([LEGEND, *notes(runs)])])


def rows_of(groups: list[RunGroup]) -> list[dict]:
    """A row of texts per group of the same kind and task, the largest value first."""
    results = [(group, [result_of(run) for run in group.runs]) for group in groups]
    results.sort(key=lambda pair: mean_value(pair[1]), reverse=True)
    best = results[0][1]
    return [row_of(group, found, best) for group, found in results]


def mean_value(results: list[Result]) -> float:
    return fmean(values_of(results).values() or [-math.inf])


def row_of(group: RunGroup, results: list[Result], best: list[Result]) -> dict:
    first = results[0]
    what, *_ = first.what.split(" (")  # without its step or its id
    return {
        "run": group.label,
        "N": len(results),
        "value": cell(results, "value_mean", "value_stderr", "+"),
        "valid": f"{fmean(one.facts['valid_share'] for one in results):.0%}",
        "score": cell(results, "score_mean", "score_stderr"),
        f"best of {BEST_OF}": cell(results, f"score_best_of_{BEST_OF}"),
        "rows ±": cell(results, "rows_error"),
        "of": f"{what}, {first.part}",
        "difference": "" if results is best else difference(results, best),
        "faults": sum(failures(run)[2] for run in group.runs),
    }


def cell(results: list[Result], key: str, error_key: str = "", sign: str = "") -> str:
    """A fact about a single run with its own standard error, or its mean over several runs."""
    if len(results) == 1:
        facts = results[0].facts
        return plus_minus(facts.get(key), facts.get(error_key), sign)
    found = [one.facts.get(key) for one in results]
    return mean_or_each([value for value in found if value is not None], sign)


def mean_or_each(values: list[float], sign: str) -> str:
    """The mean ± its standard error; of fewer than FEW_SEEDS, each value."""
    if len(values) < FEW_SEEDS:
        return ", ".join(f"{value:{sign}.4f}" for value in values) or "-"
    return plus_minus(fmean(values), standard_error(values), sign)


def values_of(results: list[Result]) -> dict:
    """The values by seed of one run, or of several the mean of each."""
    if len(results) == 1:
        return results[0].values
    return {f"run {one.seed}": one.facts["value_mean"] for one in results if one.values}


def difference(results: list[Result], best: list[Result]) -> str:
    """The difference of the mean values with its standard error."""
    values, others = values_of(results), values_of(best)
    pairs = [values[seed] - others[seed] for seed in values if seed in others]
    if len(pairs) > 1:
        return f"{mean_or_each(pairs, '+')} ({len(pairs)} paired)"
    if not values:
        return "-"
    errors = [standard_error([*side.values()]) for side in (values, others)]
    error = None if None in errors else math.hypot(*errors)
    return plus_minus(mean_value(results) - mean_value(best), error, "+")


def aligned(rows: list[dict]) -> str:
    """Rows of texts and numbers as lines of equal width, all columns aligned to the left."""
    lines = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)) for line in lines)


# ------------------------------------------------------------------ at the end

ADAPTERS = ("untrained", "last", "best")


def final_table(result: dict) -> str:
    """The comparison at the end of a training run, or the tasks of an evaluation of several; "" for
    other runs. result: of result.json.
    """
    final = result.get("final")
    if not final:
        is_evaluation = result.get("kind") == "evaluation"
        return "\n".join(by_task(result)) if is_evaluation and " " in result["task"] else ""
    before = final["untrained"]["valid_share"]
    rows, marks = [], []
    for name in ADAPTERS:
        if name not in final:
            continue
        numbers = final[name]
        step = numbers.get("step", -1)  # an adapter from before the first step has none
        label = name if step < 0 else f"{name} (step {step})"
        share = numbers["valid_share"]
        if fell_by_half(share, before):
            label += " !"
            shares = f"{before:.0%} to {share:.0%}"
            marks.append(f"! {name}: the share of valid submissions fell from {shares}.")
        error = numbers.get("difference_stderr")
        row = {
            "adapter": label,
            "value": plus_minus(numbers["value_mean"], numbers["value_stderr"], "+"),
            "valid": f"{share:.0%}",
            "score": plus_minus(numbers.get("score_mean"), numbers.get("score_stderr")),
            f"best of {BEST_OF}": plus_minus(numbers.get(f"score_best_of_{BEST_OF}"), None),
            "difference to the untrained": plus_minus(numbers.get("difference"), error, "+"),
            "pairs": numbers.get("difference_n", "-"),
        }
        rows.append(row)
    lines = [
        f"{final['split']} part, {final['n']} fresh seeds that were never used for selection, the "
        "same ones for every adapter",
        aligned(rows),
        *marks,
    ]
    if "test_value_mean" in final["best"]:
        lines += [f"best adapter on the test part: {text}" for text in by_task(final["best"])]
    if final["best_is_untrained"]:
        lines.append("best is the untrained adapter: no evaluation during training was better.")
    return "\n".join(lines)


def by_task(facts: dict) -> list[str]:
    """A line for all episodes, and one for each of several tasks; on the test part if it was
    scored.
    """
    part = "test_" if "test_value_mean" in facts else ""
    lines = []
    for key in facts:
        task, found, _ = key.partition(f"{part}value_mean")
        if found:
            prefix = task + part
            own = {name.removeprefix(prefix): facts[name] for name in facts if prefix in name}
            lines.append(f"{task.replace('.', ' ')}{summary_text(own)}")
    return lines
