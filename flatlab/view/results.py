"""The outcome of a run: the numbers, sentences about them, and the tables of a single run.

A result is a mean of values (see task/value.py): of the episodes of an evaluation, or of one value
per seed. Every ± is the standard error of a mean.
"""

import re
from collections import Counter
from statistics import fmean

from flatlab.numbers import BEST_OF, counted, duration, plus_minus, standard_error, value_text
from flatlab.task.value import (
    fell_by_half,
    on_test_part,
    places,
    score_text,
    summary,
    summary_text,
)
from flatlab.view.columns import FEW_SEEDS, aligned, texts_of
from flatlab.view.reader import NOUNS, RunData
from flatlab.world.episode import EXCEPTION

REASONS = 4  # of failures, in a sentence

# ------------------------------------------------------------------ results


def result_of(run: RunData) -> dict:
    """The value of a run. Training: of the best adapter on the fresh seeds at the end, or of the
    last steps before that.

    Keys: those of summary(), except that valid_share is over all nodes of a search. what: the
    adapter, node or episodes that have the value. last_mean: the value of the last adapter, if the
    best one is the untrained. part: of the data. values: by seed; one for each
    episode, or a single one for the best node of a search. rows_error: the standard error of a
    score over the rows or games of the part, mean over the episodes.
    """
    if run.kind == "search":
        return best_node(run)
    if run.kind == "evaluation":
        return result_of_episodes(run, "all episodes", run.episodes, run.result["split"])
    if final := run.result.get("final"):
        best = final["best"]
        what = f"best adapter (step {best['step']}, {final['n']} fresh seeds)"
        if final["best_is_untrained"]:
            what = f"untrained adapter ({final['n']} fresh seeds)"
            best = best | {"difference": None}
        rows = [row for row in run.episodes if row["when"] == best["when"]]
        last = final["last"]["value_mean"] if final["best_is_untrained"] else None
        known = {"what": what, "part": final["split"], "values": {}, "last_mean": last}
        shown = result_of_episodes(run, what, rows, final["split"]) if rows else {}
        return best | known | shown
    last = run.rows[-window_of(run.rows) :]
    means = {key: fmean(found(last, key)) for key in ("value_mean", "valid_share")}
    what = f"episodes of the last {counted(len(last), 'step')}"
    return means | {"what": what, "part": run.result["split"], "values": {}}


def result_of_episodes(run: RunData, what: str, rows: list[dict], split: str) -> dict:
    """split: the part that was scored, unless the test part was scored, too."""
    is_tested = bool(found(rows, "test_value"))
    graded = on_test_part([row for row in rows if row["outcome"] != "fault"])
    task = None if " " in run.task else run
    errors = found(graded, "stderr")
    return summary(graded, task) | {
        "what": what,
        "part": "test" if is_tested else split,
        "values": {(row["task"], row["seed"]): row["value"] for row in graded},
        "rows_error": fmean(errors) if errors and task else None,
    }


def best_node(run: RunData) -> dict:
    """The best node: its test score, or without one the score that it was chosen by."""
    result = run.result
    [best] = [row for row in run.rows if row["id"] == result["best_id"]] or [{}]
    tested = numbers_on_test_part(run)
    graded = [row for row in run.rows if row["outcome"] != "fault"]
    return {
        "what": f"best node ({best['id']})" if best else "no valid node",
        "part": "test" if tested else result["split"],
        "values": {run.config["seed"]: result["value"]},
        "value_mean": result["value"],
        "valid_share": summary(graded)["valid_share"],
        "score_mean": (tested or best).get("score"),
        "rows_error": (tested or best).get("stderr"),
    }


def numbers_on_test_part(run: RunData) -> dict:
    """The numbers of the chosen node on the test part; {} if that was not scored."""
    parts = run.result.get("hidden_scores", {}).get(run.result["tested_id"], {})
    return next((numbers for part, numbers in parts.items() if part != "selection"), {})


def window_of(rows) -> int:
    """Steps to average over: a sixth of the run, at most 20."""
    return max(1, min(20, len(rows) // 6))


def found(rows: list[dict], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def faults(run: RunData) -> int:
    return sum(row.get("faults", 0) or row.get("outcome") == "fault" for row in run.rows)


# ------------------------------------------------------------------ sentences about a run


def heading(run: RunData) -> str:
    """One line about the run: name, task, mode, rule, seed, model, length."""
    config = run.config
    keys = "sampling_mode select model".split()
    facts = [value_text(config[key]) for key in keys if key in config]
    seconds = run.result.get("seconds") or sum(row.get("seconds", 0) for row in run.rows)
    size = counted(len(run.rows), NOUNS[run.kind])
    end = f"seed {config.get('seed')}, {size} in {duration(seconds)}"
    return f"{run.name}: {', '.join([run.task, *facts, end])}"


def outcome_sentences(run: RunData) -> list[str]:
    """Sentences: the answer of the run, what has which value, failures, status, and notes."""
    if run.kind == "imitation":
        loss = plus_minus(run.rows[-1]["loss"], None)
        episodes = counted(run.result["episodes"], "episode")
        sentences = [f"Imitation of {episodes}: last loss {loss}."]
    else:
        sentences = [*gain(run), *value_sentences(run), ends([run])]
    return [*sentences, f"Status: {run.status}.", *notes([run])]


def gain(run: RunData) -> list[str]:
    """A sentence about the best adapter beside the untrained one, if they were compared."""
    final = run.result.get("final")
    best = final["best"] if final else {}
    if best.get("difference") is None:
        return []
    text = "No evaluation during training was better than the untrained adapter, which is best/"
    if not final["best_is_untrained"]:
        difference = plus_minus(best["difference"], best.get("difference_stderr"), "+")
        pairs = best["difference_n"]
        text = f"Best adapter: {difference} over the untrained one on {pairs} paired seeds"
    elif final["last"]["difference"] == final["last"]["difference_stderr"] == 0:
        kl = [0.0, *found(run.steps, "kl")][-1]
        text += f"; the last one, {kl:.1e} nats per token away (KL), has the same values"
    return [f"{text}."]


def value_sentences(run: RunData) -> list[str]:
    """Sentences: what has which value, and what values mean in the unit of the task."""
    result = result_of(run)
    if result["what"] == "no valid node":
        return ["No valid node."]
    if run.kind == "search":
        result |= {"valid_share": None}  # of all nodes: ends() has it
    least = 6 if run.result.get("exact") else 4
    text = summary_text(result, run.result["metric"], least)
    value = f"{result['what'].capitalize()}: {text}, on the {result['part']} part."
    return [value, scale(run, result)]


def scale(run: RunData, result: dict) -> str:
    """A sentence about the values in the unit of the task; several tasks have several units."""
    if " " in run.task:
        return "Value 0 is the baseline of a task, 1 a good known score."
    text = f"Value 0 is the baseline {score_text(run.baseline, run)}"
    if run.reference is not None:
        text += f", 1 a good known score {score_text(run.reference, run)}"
    if error := result.get("rows_error"):
        text += f"; a single score has the standard error {score_text(error)}"
    return f"{text}; {'higher' if run.higher_is_better else 'lower'} is better."


def ends(runs: list[RunData]) -> str:
    """Numbers of failed nodes or episodes of these runs with the reasons, and of faults."""
    noun, rows = NOUNS[runs[0].kind], sum([run.rows for run in runs], [])
    if runs[0].kind == "training":
        noun = "training episode"
        rows = [row for run in runs for row in run.episodes if row["step"] is not None]
    reasons = Counter(short_reason(row) for row in rows if row["outcome"] == "failed")
    most = reasons.most_common(REASONS)
    rest = reasons.total() - sum(number for _, number in most)
    named = [f"{number} x {reason}" for reason, number in [*most, ("other", rest)] if number]
    text = f"{reasons.total()} of {counted(len(rows), noun)} failed (value -1)"
    text += f"{': ' * bool(named)}{'; '.join(named)}"
    return f"{text}; {counted(sum(map(faults, runs)), 'fault')}."


def short_reason(row: dict) -> str:
    """Why an episode failed, in a few words: the name of an exception, or the reason."""
    if row["status"] == "crashed":
        return "broke its sandbox"
    if name := EXCEPTION.search(row["reason"]):
        return name[0]
    text = re.split("[.;] ", row["reason"].removeprefix("Nothing was run. "))[0]
    return re.sub(r"\b\d+\b", "N", text.rstrip(".")[:80])  # of ids, of rows


# Keys of result.json and of states() -> sentences for runs where they are neither 0, false nor
# empty
NOTES = {
    "selected_on_test": "the task has a test part only, so the best was chosen on it and its score "
    "is optimistic",
    "exact": "the score is exact",
    "degenerate": "a score says little: {degenerate}",
    "ungraded": "the grader gave no result for {ungraded} failed nodes: see grader_output in their "
    "transcripts",
    "without_strategy": "{without_strategy} of {nodes} nodes got no strategy, so their mode is "
    "none: the replies held too few that could be read",
    "unread_strategies": "{unread_strategies} strategies in replies could not be read: their JSON "
    "was damaged or cut off",
    "is_invalid_on_test": "the best node is not valid on the test part",
    "is_untested": "the best node was not scored on the test part",
    "is_read_again": "a search that went on with more --nodes has read the test part {test_reads} "
    "times",
    "is_local": "the selection rule replaced the sampling mode of some nodes",
    "is_mixed": "its code changed while it went on",
    "last_alarms": "the last alarms: {last_alarms}",
}


def notes(runs: list[RunData]) -> list[str]:
    """Sentences about what the numbers do not say, with the names of their runs."""
    names = {}
    for run in runs:
        facts = run.result | states(run)
        for key in NOTES:
            if facts.get(key):
                names.setdefault(NOTES[key].format(**facts), []).append(run.name)
    return [f"{', '.join(same)}: {sentence}." for sentence, same in names.items()]


def states(run: RunData) -> dict:
    """The keys of NOTES that are not in result.json."""
    result = run.result
    alarms = [text for row in run.rows + run.rounds for text in row.get("alarms", ())]
    facts = {
        "is_mixed": len(run.fingerprint.get("code", ())) > 1,
        "last_alarms": "; ".join(alarms[-3:]),
    }
    if run.kind != "search":
        return facts
    has_one_part = result["selected_on_test"] or result["exact"]
    tested = numbers_on_test_part(run)
    decisions = [row["decision"] for row in run.rows]
    hidden = [{*parts} - {"selection"} for parts in result.get("hidden_scores", {}).values()]
    test_reads = sum(map(bool, hidden))
    return facts | {
        "ungraded": sum(row["ungraded"] for row in run.rows),
        "without_strategy": sum("asked" in decision for decision in decisions),
        "unread_strategies": sum(decision.get("unread", 0) for decision in decisions),
        "is_invalid_on_test": tested and tested["score"] is None,
        "is_untested": result["best_id"] and not result["tested_id"] and not has_one_part,
        "test_reads": test_reads,
        "is_read_again": test_reads > 1,
        "is_local": any(row["sampling_mode"] == "local" for row in run.rows),
    }


# ------------------------------------------------------------------ numbers of one run, or several


def value_columns(results: list[dict], metric: str) -> dict:
    """Columns of a table. results: of summary() for each run."""
    digits = max(map(places, found(results, "score_mean")), default=4)
    return {
        "value": cell(results, "value_mean", "+"),
        "valid": fmean(one["valid_share"] for one in results),
        metric: cell(results, "score_mean", digits=digits),
        f"best of {BEST_OF}": cell(results, f"score_best_of_{BEST_OF}", digits=digits),
    }


def cell(results: list[dict], key: str, sign: str = "", digits: int = 4) -> str:
    """A number of a single run with its own standard error, or its mean over several runs."""
    if len(results) > 1:
        return mean_or_each(found(results, key), sign, digits)
    error = f"{key.removesuffix('_mean')}_stderr"
    return plus_minus(results[0].get(key), results[0].get(error), sign, digits)


def mean_or_each(values: list[float], sign: str = "+", digits: int = 4) -> str:
    """The mean ± its standard error; of fewer than FEW_SEEDS, each value."""
    if len(values) < FEW_SEEDS:
        return ", ".join(plus_minus(value, None, sign, digits) for value in values) or "-"
    return plus_minus(fmean(values), standard_error(values), sign, digits)


# ------------------------------------------------------------------ tables of one run

# Keys of the rounds of a search that learns, as docs/runs.md explains them, in the order of weight
ROUNDS = (
    "step nodes best_score valid_share improved_share gain_mean live_lineages kl "
    "tokens elapsed gain_stderr largest_lineage_share depth duplicate_share cut_share"
).split()


def run_tables(run: RunData) -> list[list[dict]]:
    """The adapters at the end of a training, or the tasks of an evaluation; the rounds of a search
    that learns.
    """
    rows, _ = final_rows(run.result)
    rounds = [{key: row.get(key) for key in ROUNDS} for row in run.rounds]
    return [table for table in (rows, rounds) if table]


def final_table(result: dict) -> str:
    """The comparison at the end of a training run, or the tasks of an evaluation of several; "" for
    other runs. result: of result.json.
    """
    rows, sentences = final_rows(result)
    return "\n".join([*sentences, aligned(rows)]) if rows else ""


def final_rows(result: dict) -> tuple[list[dict], list[str]]:
    """The rows of final_table(), and sentences about them."""
    tasks = result["task"].split()
    final = result.get("final")
    if not final:
        return by_task(result, tasks, "score") if len(tasks) > 1 else [], []
    best, untrained = final["best"], final["untrained"]
    metric = result["metric"] if "score_mean" in best else "score"
    sentences = [
        f"Adapters on the {final['split']} part, {final['n']} fresh seeds that were never used for "
        "selection, the same ones for each:"
    ]
    rows = []
    for name in ("untrained", "last", "best"):
        facts = final[name]
        step = facts.get("step", -1)  # an adapter from before the first step has none
        label = name if step < 0 else f"{name} (step {step})"
        if fell_by_half(facts["valid_share"], untrained["valid_share"]):
            label += " !"
            shares = f"{untrained['valid_share']:.0%} to {facts['valid_share']:.0%}"
            sentences.append(f"! {name}: the share of valid submissions fell from {shares}.")
        difference = cell([facts], "difference", "+")
        if name == "best" and final["best_is_untrained"]:
            difference = "the same adapter"
        rows.append(
            {
                "adapter": label,
                **value_columns([facts], metric),
                "gain over untrained": difference,
                "pairs": facts.get("difference_n", "-"),
            }
        )
    if "test_value_mean" in best:
        for row in by_task(best, tasks, metric):
            which = f", {row['task']}" if len(tasks) > 1 else ""
            rows.append(row | {"adapter": f"best, test part{which}"})
    return rows, sentences


def by_task(facts: dict, tasks: list[str], metric: str) -> list[dict]:
    """A row for all episodes, and one for each of several tasks; on the test part if it was
    scored.
    """
    part = "test_" if "test_value_mean" in facts else ""
    rows = []
    for task in ["all", *tasks]:
        prefix = part if task == "all" else f"{task}.{part}"
        own = {key.removeprefix(prefix): facts[key] for key in facts if key.startswith(prefix)}
        if "value_mean" in own:
            rows.append({"task": task, **value_columns([own], metric)})
    return rows


def step_rows(rows: list[dict]) -> list[dict]:
    """The numbers in the rows at the start and at the end of the run, each in its own format."""
    import pandas

    # evaluations are rare, standard errors and the seconds of the phases are details; runs of
    # earlier versions have the time
    shown = "^(?!step$|time$|eval_|seconds_).*(?<!stderr)$"
    frame = pandas.DataFrame(rows).select_dtypes("number").filter(regex=shown)
    window = window_of(rows)
    means = {"first": frame.head(window).mean(), "last": frame.tail(window).mean()}
    titles = [f"{name} {counted(window, 'step')}" for name in means]
    return [
        {"mean of": key} | dict(zip(titles, texts_of([*pair])))
        for key, *pair in pandas.DataFrame(means).itertuples()
    ]
