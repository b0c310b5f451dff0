"""Results as text: a sentence about a run, and the table that compares several.

A result is a mean of values (see task/value.py): of the episodes of an evaluation, or of one value
per seed. Every ± is the standard error of a mean. Where seeds are the unit, a mean over fewer than
three has no interval, and each value is shown instead. Values of two results that belong to the
same seed are compared in pairs, which takes out what the seed has in common.
"""

import math
import textwrap
from collections import Counter
from statistics import fmean

from flatlab.numbers import BEST_OF, counted, duration, plus_minus, standard_error, value_text
from flatlab.task.value import summary, summary_text
from flatlab.train.metrics import fell_by_half
from flatlab.view.plots import FEW_SEEDS, STYLES, RunGroup, failure, series, window_of
from flatlab.view.reader import (
    NOUNS,
    RunData,
    episode_items,
    read_all,
    score_text,
    transcript_files,
)
from flatlab.view.terminal import fitted

# ------------------------------------------------------------------ results


def result_of(run: RunData) -> dict:
    """The value of a run. Training: of the best adapter on the fresh seeds at the end, or of the
    last steps before that.

    Keys: those of summary(), except that valid_share is over all nodes of a search. what: the
    adapter, node or episodes that have the value. part: of the data. values: by seed; one for each
    episode, or a single one for the best node of a search. rows_error: the standard error of a
    score over the rows or games of the part, mean over the episodes.
    """
    if run.kind == "search":
        return best_node(run)
    if run.kind == "evaluation":
        return result_of_episodes(run, "all episodes", run.rows, run.result["split"])
    if final := run.result.get("final"):
        best = final["best"]
        what = f"best adapter (step {best['step']})"
        if final["best_is_untrained"]:
            what = "untrained adapter"
        items = episode_items(run.dir / best["file"])
        return best | result_of_episodes(run, what, items, final["split"])
    last = run.rows[-window_of(run.rows) :]
    means = {key: fmean(series(last, key)) for key in ("value_mean", "valid_share")}
    return means | {"what": f"last {counted(len(last), 'step')}", "part": "training", "values": {}}


def result_of_episodes(run: RunData, what: str, items: list[dict], split: str) -> dict:
    """split: the part that was scored, unless the test part was scored, too."""
    graded = [item for item in items if item["outcome"] != "fault"]
    task = None if " " in run.task else run
    errors = found(graded, "stderr")
    return summary([item["improvement"] for item in graded], task) | {
        "what": what,
        "part": "test" if any(item["is_tested"] for item in graded) else split,
        "values": {(item["task"], item["seed"]): item["value"] for item in graded},
        "rows_error": fmean(errors) if errors and task else None,
    }


def best_node(run: RunData) -> dict:
    """The best node: its test score, or without one the score that it was chosen by."""
    result = run.result
    scored = "test" if result["tested_id"] else "best"
    return {
        "what": f"best node ({result['best_id']})" if result["best_id"] else "no valid node",
        "part": "test" if scored == "test" and not result["exact"] else result["split"],
        "values": {run.config["seed"]: result["value"]},
        "value_mean": result["value"],
        "valid_share": result["valid_share"],
        "score_mean": result[f"{scored}_score"],
        "rows_error": result[f"{scored}_stderr"],
    }


def faults(run: RunData) -> int:
    return sum(row.get("faults", 0) or row.get("outcome") == "fault" for row in run.rows)


# ------------------------------------------------------------------ sentences about one run


def heading(run: RunData) -> str:
    """One line about the run: name, task, mode, rule, seed, model, length."""
    config = run.config
    keys = "sampling_mode select model".split()
    facts = [value_text(config[key]) for key in keys if key in config]
    seconds = run.result.get("seconds") or sum(row.get("seconds", 0) for row in run.rows)
    size = counted(len(run.rows), NOUNS[run.kind])
    end = f"seed {config.get('seed')}, {size} in {duration(seconds)}"
    return f"{run.name}: {', '.join([run.task, *facts, end])}"


def headline(run: RunData) -> str:
    """The outcome of a run: value, share valid, score, part, uncertainty, and failures."""
    if run.kind == "imitation":
        loss = plus_minus(run.rows[-1]["loss"], None)
        text = f"imitation of {counted(run.result['episodes'], 'episode')}: last loss {loss}."
    else:
        text = f"{value_sentence(run)}. {ends(run)}."
    text = " ".join([text, f"Status: {run.status}.", *notes([run])])
    return text[0].upper() + text[1:]


def run_answer(run: RunData) -> str:
    """The outcome of a run in its shortest form."""
    if run.kind == "imitation":
        return headline(run)
    final = run.result.get("final")
    best = final["best"] if final else {}
    if best.get("difference") is None:
        text = value_sentence(run)
        end = "" if run.status == "finished" else f" Status: {run.status}."
        return f"{text[0].upper()}{text[1:]}.{end}"
    gain = plus_minus(best["difference"], best.get("difference_stderr"), "+")
    text = f"Best adapter: {gain} over the untrained one on {best['difference_n']} paired seeds"
    if final["best_is_untrained"]:
        text = "No adapter was better than the untrained one"
    if "test_value_mean" in best:
        value = plus_minus(best["test_value_mean"], best.get("test_value_stderr"), "+")
        text += f"; its value on the test part is {value}"
    return f"{text}."


def value_sentence(run: RunData) -> str:
    result = result_of(run)
    if result["what"] == "no valid node":
        return f"no valid node: {why_none(run)}"
    if run.kind == "search":
        result |= {"valid_share": None}  # of all nodes: ends() has it
    digits = 6 if run.result.get("exact") else 4
    text = summary_text(result, run.result["metric"], digits)
    direction = "higher is better" if run.higher_is_better else "lower is better"
    scale = f"{result['part']} part"
    if " " not in run.task:  # several tasks have several metrics
        scale += f"; {direction}, baseline {run.baseline:.4f}"
    if error := result.get("rows_error"):
        scale += f"; a single score has the standard error {error:.4f}"
    return f"{result['what']}: {text} ({scale})"


def ends(run: RunData) -> str:
    """Numbers of failed nodes or episodes, and of faults."""
    text = counted(faults(run), "fault")
    if NOUNS[run.kind] == "step":
        return text
    failed = sum(row["outcome"] == "failed" for row in run.rows)
    return f"{failed} of {len(run.rows)} failed (value -1), {text}"


def why_none(run: RunData) -> str:
    """The reasons why no node is valid: how they ended, and the most frequent error."""
    ends = Counter(row["status"].replace("_", " ") for row in run.rows)
    parts = [f"{number} x {status}" for status, number in ends.most_common()]
    turns = [turn for item in read_all(transcript_files(run)) for turn in item["turns"]]
    wrong = [turn for turn in turns if turn["status"] in ("rejected", "invalid")]
    said = Counter(turn["observation"].partition("\n")[0] for turn in wrong)
    for text, number in said.most_common(1):
        parts.append(f"{number} of {len(turns)} replies: {text.rstrip('.')}")
    return "; ".join(parts)


# Keys of result.json and of states() -> sentences for runs where they are neither 0, false nor
# empty
NOTES = {
    "selected_on_test": "the task has a test part only, so the best was chosen on it and its score "
    "is optimistic",
    "exact": "the score is exact",
    "degenerate": "a score says little: {degenerate}",
    "ungraded": "the grader gave no result for {ungraded} failed nodes: see grader_output in the "
    "journal",
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
    has_one_part = result.get("selected_on_test") or result.get("exact")
    is_tested = result.get("tested_id")
    alarms = [text for row in run.rows + run.rounds for text in row.get("alarms", ())]
    return {
        "is_invalid_on_test": is_tested and result["test_score"] is None,
        "is_untested": result.get("best_id") and not is_tested and not has_one_part,
        "is_read_again": result.get("test_reads", 0) > 1,
        "is_local": "local" in result.get("sampling_modes_used", ()),
        "is_mixed": len(run.fingerprint.get("code", ())) > 1,
        "last_alarms": "; ".join(alarms[-3:]),
    }


# ------------------------------------------------------------------ rounds

# Keys of metrics.jsonl that are shown, as docs/runs.md explains them: on a terminal the first ones.
ROUNDS = (
    "step nodes best_score valid_share improved_share gain_mean live_lineages kl "
    "tokens elapsed gain_stderr largest_lineage_share depth duplicate_share cut_share"
).split()
ON_TERMINAL = 8


def rounds(run: RunData) -> str:
    """A line for each round of a search that learns; "" of other runs."""
    return aligned(round_rows(run, ON_TERMINAL)) if run.rounds else ""


def round_rows(run: RunData, columns: int | None = None) -> list[dict]:
    """The first columns of the rounds; all of them without a number."""
    return [{key: row.get(key) for key in ROUNDS[:columns]} for row in run.rounds]


# ------------------------------------------------------------------ episodes and their groups


def facts_of(item: dict, width: int = 70) -> dict[str, str]:
    """The columns about an episode or a node: what was learned from it, and how it went; at the
    end in at most `width` characters what it is about, and why it failed.
    """
    replies = item.get("advantages", ())
    trained = [advantage for advantage in replies if advantage is not None]
    reason = "" if item["outcome"] == "valid" else failure(item)
    parts = [item.get("op") or item.get("task"), reason, item.get("idea")]
    text = "; ".join(filter(None, parts))
    return {
        "id": item["id"],
        "seed": item.get("seed", "-"),
        "reward": plus_minus(item.get("reward"), None, "+", 3),
        "advantage": plus_minus(fmean(trained) if trained else None, None, "+", 3),
        "loss on": f"{len(trained)} of {len(replies)}" if replies else "-",
        "turns": len(item.get("turns", ())) or "-",
        "score": score_text(item),
        "status": item["status"],
        "tokens": item["tokens"],
        "seconds": f"{item['seconds']:.1f}",
        "what": " ".join(text.split())[:width],
    }


def sections(run: RunData, items: list[dict]) -> dict[str, list[dict]]:
    """Heading -> the episodes of a group that were compared with each other, or of an evaluation;
    one for runs without groups.
    """
    if run.kind != "training" and "round" not in run.rows[0]:
        return {run.name: items}
    groups = {}
    for item in items:
        if "round" in item:
            name = f"round {item['round']}, group {item['group']}, children of {item['parent']}"
        elif item["when"].isdigit():
            name = f"step {item['when']}, group {item['group']}"
        else:
            name = f"evaluation {item['when']}"
        groups.setdefault(name, []).append(item)
    return {f"{name}: {learned(own)}": own for name, own in groups.items()}


def learned(items: list[dict]) -> str:
    """The task and the rewards of a group, and how many of its episodes were trained."""
    rewards = found(items, "reward") or [math.nan]
    low, high = min(rewards), max(rewards)
    text = f"{items[0]['task']}, rewards {low:+.3f} to {high:+.3f}"
    if not all("advantages" in item for item in items):  # some transcripts were not read
        return text
    trained = sum(bool(item["advantages"]) for item in items)
    how = f"{trained} of {len(items)} trained"
    if low == high:
        how = "equal rewards, none trained"
    elif not trained:
        how = "no advantages stored"
    return f"{text}, {how}"


# ------------------------------------------------------------------ groups of runs


def groups_of(runs: list[RunData]) -> dict[tuple[str, str], list[RunGroup]]:
    """(kind, task) -> groups of runs that differ by their seed only, for each table.

    A group has one run of each seed; further ones are another group. Runs of one folder are kept
    together.
    """
    compared = {}
    for run in sorted(runs, key=lambda run: run.name):
        table = compared.setdefault((run.kind, run.task), [])
        settings, seed = settings_of(run), run.config.get("seed")
        same = [g for g in table if g.settings == settings and seed not in g.seeds]
        same.sort(key=lambda group: group.runs[0].dir.parent != run.dir.parent)
        if same:
            group = same[0]
        else:
            group = RunGroup(STYLES[len(table) % len(STYLES)], settings)
            table.append(group)
        group.runs.append(run)
    for table in compared.values():
        frequency = Counter(pair for group in table for pair in group.settings.items())
        for group in table:
            pairs = [pair for pair in group.settings.items() if frequency[pair] <= len(table) / 2]
            group.differs = ", ".join(f"{key}={value}" for key, value in pairs if value)
    return compared


def settings_of(run: RunData) -> dict[str, str]:
    """All that makes a run besides its seed: setting -> text; 'my.yaml@1a2b3c' with a digest."""
    settings = run.config.items()
    texts = {key: value_text(value) for key, value in settings if key not in ("seed", "name")}
    for part, digest in run.fingerprint.items():
        texts[part] = f"{texts.get(part, '')}@{digest[-1] if part == 'code' else digest:.6}"
    return texts


# ------------------------------------------------------------------ the table

# Column -> its meaning
EXPLAINED = {
    "run": "its name; runs that differ by their seed only are one row; a second run of a seed has "
    "a row of its own",
    "N": f"runs in the row; a mean over fewer than {FEW_SEEDS} runs has no interval, each value is "
    "shown",
    "value": "mean improvement, 0 at the baseline, 1 at the reference; without a valid submission "
    "-1. Every ± is a standard error: over the runs, or over the episodes of a single run",
    "valid": "share of the episodes, or of the nodes, with a valid submission",
    "score": "mean of the valid ones, or the score of the best node, in the unit of the task",
    f"best of {BEST_OF}": f"expected best score of {BEST_OF} episodes",
    "gain over untrained": "of the value of the best adapter, in pairs on the same fresh seeds",
    "rows ±": "standard error of one score over the rows or games of the part",
    "of": "what has this value, and on which part of the data",
    "difference": "of the value to the best row, over the seeds that both have; ± is one standard "
    "error, 95 % the interval by Student's t: 4.3 standard errors with 3 seeds, 2.3 with 10",
    "differs in": "settings that at most half of the rows have, @ digests of prompts, task, model "
    "and code; values on two versions of a task cannot be compared",
}


def table(runs: list[RunData], limit: int | None = None) -> str:
    """Text of `python viz.py logs/*`: for each kind of run and task the answer and a table, then
    what the columns mean.
    """
    parts, said = [], set()
    for heading, sentence, rows in comparisons(runs):
        parts.append(f"{heading}: {sentence}")
        if rows:
            parts[-1] += f"\n{aligned(rows, limit)}"
            said |= {*columns_of(rows)}
    legend = [f"{key}: {text}" for key, text in EXPLAINED.items() if key in said]
    return "\n\n".join([*parts, "\n".join(wrapped(legend)), *notes(runs)])


def comparisons(runs: list[RunData]) -> list[tuple[str, str, list[dict]]]:
    """For each kind of run and task a heading, the answer, and the rows of the table."""
    found = []
    for (kind, task), groups in groups_of(runs).items():
        sentence, rows = "An imitation has no value: evaluate its adapter to compare it.", []
        if kind != "imitation":
            rows = rows_of(groups)
            sentence = answer(groups)
        found.append((f"{task}, {kind}", sentence, rows))
    return found


def wrapped(lines: list[str]) -> list[str]:
    """Lines of at most 100 characters; those that continue one are indented."""
    return [part for line in lines for part in textwrap.wrap(line, 100, subsequent_indent="    ")]


def answer(groups: list[RunGroup]) -> str:
    """The comparison of the best group of runs with the next one in a sentence. groups: with their
    results, see rows_of.
    """
    ranked = sorted(groups, key=mean_value, reverse=True)
    best = ranked[0]
    if len(ranked) == 1:
        seeds = counted(len(best.runs), "run")
        return f"{seeds} of one setting, value {cell(best.results, 'value_mean', '+')}."
    other = ranked[1]
    pairs = paired(best, other)
    names = f"{best.label} and {other.label}"
    if len(pairs) < FEW_SEEDS:
        values = " and ".join(plus_minus(mean_value(group), None, "+") for group in (best, other))
        pairs = counted(len(pairs), "paired seed")
        return f"{names}: {values}; {pairs}: too few for an interval."
    low, high = interval(pairs)
    verdict = f"{names} do not differ"
    if low > 0:
        verdict = f"{best.label} is better than {other.label}"
    elif high < 0:
        verdict = f"On the common seeds {best.label} is worse than {other.label}"
    return (
        f"{verdict}: {mean_or_each(pairs, '+')}, 95 % interval {low:+.4f} to {high:+.4f}, "
        f"{len(pairs)} paired seeds."
    )


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of these values by Student's t."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * standard_error(values)
    return fmean(values) - half, fmean(values) + half


def rows_of(groups: list[RunGroup]) -> list[dict]:
    """A row of texts per group of the same kind and task, the largest value first."""
    for group in groups:
        group.results = [result_of(run) for run in group.runs]
    ranked = sorted(groups, key=mean_value, reverse=True)
    return [row_of(group, ranked[0]) for group in ranked]


def mean_value(group: RunGroup) -> float:
    return fmean(found(group.results, "value_mean") or [-math.inf])


def row_of(group: RunGroup, best: RunGroup) -> dict:
    results = group.results
    what, *_ = results[0]["what"].split(" (")  # without its step or its id
    return {
        "run": group.label,
        "N": len(results),
        **columns(results, "score"),
        "gain over untrained": cell(results, "difference", "+"),
        "rows ±": cell(results, "rows_error"),
        "of": f"{what}, {results[0]['part']}",
        "difference": "" if group is best else difference(group, best),
        "faults": sum(map(faults, group.runs)),
        "differs in": group.differs,
    }


def columns(results: list[dict], metric: str) -> dict:
    """results: of summary() for each run."""
    return {
        "value": cell(results, "value_mean", "+"),
        "valid": f"{fmean(one['valid_share'] for one in results):.0%}",
        metric: cell(results, "score_mean"),
        f"best of {BEST_OF}": cell(results, f"score_best_of_{BEST_OF}"),
    }


def cell(results: list[dict], key: str, sign: str = "") -> str:
    """A number of a single run with its own standard error, or its mean over several runs."""
    if len(results) > 1:
        return mean_or_each(found(results, key), sign)
    error = f"{key.removesuffix('_mean')}_stderr"
    return plus_minus(results[0].get(key), results[0].get(error), sign)


def found(rows: list[dict], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def mean_or_each(values: list[float], sign: str) -> str:
    """The mean ± its standard error; of fewer than FEW_SEEDS, each value."""
    if len(values) < FEW_SEEDS:
        return ", ".join(f"{value:{sign}.4f}" for value in values) or "-"
    return plus_minus(fmean(values), standard_error(values), sign)


def difference(group: RunGroup, best: RunGroup) -> str:
    """The difference of the values to the best ones, over the seeds that both have; without such
    seeds the difference of the means.
    """
    if pairs := paired(group, best):
        facts = f"{len(pairs)} paired"
        if len(pairs) >= FEW_SEEDS:
            low, high = interval(pairs)
            facts += f", 95 %: {low:+.4f} to {high:+.4f}"
        return f"{mean_or_each(pairs, '+')} ({facts})"
    if not (values_of(group) and values_of(best)):
        return "-"
    return plus_minus(mean_value(group) - mean_value(best), None, "+")


def paired(group: RunGroup, other: RunGroup) -> list[float]:
    """The differences of the values, for the seeds that both have."""
    values, others = values_of(group), values_of(other)
    return [values[seed] - others[seed] for seed in values if seed in others]


def values_of(group: RunGroup) -> dict:
    """The values by seed of one run, or of several the mean of each."""
    if len(group.runs) == 1:
        return group.results[0]["values"]
    seeds = zip(group.seeds, group.results)
    return {seed: result["value_mean"] for seed, result in seeds if result["values"]}


def aligned(rows: list[dict], limit: int | None = None) -> str:
    """Rows of texts and numbers as lines of equal width, all columns aligned to the left; without
    columns in which nothing is said.
    """
    columns = []
    for key, texts in columns_of(rows).items():
        width = max(map(len, [key, *texts]))
        columns.append([text.ljust(width) for text in [key, *texts]])
    return "\n".join(fitted(columns, limit))


def columns_of(rows: list[dict]) -> dict[str, list[str]]:
    """Title -> texts of a column, without columns in which nothing is said. Its fractions have one
    number of decimals: as many as show four digits of the largest.
    """
    columns = {}
    for key in rows[0]:
        values = [row.get(key) for row in rows]
        sizes = [abs(value) for value in values if isinstance(value, float) and value]
        largest = max(filter(math.isfinite, sizes), default=1.0)
        digits = min(9, max(0, 3 - math.floor(math.log10(largest))))
        texts = [
            f"{value:.{digits}f}" if isinstance(value, float) else str(value) for value in values
        ]
        texts = ["-" if text in ("None", "nan") else text for text in texts]
        if {*texts} - {"", "-"}:
            columns[key] = texts
    return columns


# ------------------------------------------------------------------ at the end


def final_table(result: dict, limit: int | None = None) -> str:
    """The comparison at the end of a training run, or the tasks of an evaluation of several; "" for
    other runs. result: of result.json.
    """
    rows, lines = final_rows(result)
    if rows:
        lines.insert(1, aligned(rows, limit))
    return "\n".join(lines)


def final_rows(result: dict) -> tuple[list[dict], list[str]]:
    """The rows of final_table(), and sentences about them: the first stands above it."""
    final = result.get("final")
    if not final:
        return by_task(result, "score") if " " in result["task"] else [], []
    best, untrained = final["best"], final["untrained"]
    metric = result["metric"] if "score_mean" in best else "score"
    rows, marks = [], []
    for name in ("untrained", "last", "best"):
        facts = final[name]
        step = facts.get("step", -1)  # an adapter from before the first step has none
        label = name if step < 0 else f"{name} (step {step})"
        if fell_by_half(facts["valid_share"], untrained["valid_share"]):
            label += " !"
            shares = f"{untrained['valid_share']:.0%} to {facts['valid_share']:.0%}"
            marks.append(f"! {name}: the share of valid submissions fell from {shares}.")
        difference = cell([facts], "difference", "+")
        if name == "best" and final["best_is_untrained"]:
            difference = "the same adapter"
        rows.append(
            {
                "adapter": label,
                **columns([facts], metric),
                "difference to the untrained": difference,
                "pairs": facts.get("difference_n", "-"),
            }
        )
    lines = [
        f"{final['split']} part, {final['n']} fresh seeds that were never used for selection, the "
        "same ones for every adapter",
        *marks,
    ]
    if "test_value_mean" in best:
        for row in by_task(best, metric):
            which = f" ({row['task']})" if " " in result["task"] else ""
            rows.append(row | {"adapter": f"best, test part{which}"})
    if final["best_is_untrained"]:
        lines.append("best is the untrained adapter: no evaluation during training was better.")
    return rows, lines


def by_task(facts: dict, metric: str) -> list[dict]:
    """A row for all episodes, and one for each of several tasks; on the test part if it was
    scored.
    """
    part = "test_" if "test_value_mean" in facts else ""
    rows = []
    for key in facts:
        task, found, _ = key.partition(f"{part}value_mean")
        if found:
            prefix = task + part
            own = {name.removeprefix(prefix): facts[name] for name in facts if prefix in name}
            rows.append({"task": task.rstrip(".") or "all"} | columns([own], metric))
    return rows
