"""The table of a grid of runs: means, intervals, failures, tests of differences.

No run is dropped. A run without any valid node counts as the baseline, and every mean says how many
runs are in it. search.py and viz.py print this table.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, stdev

import numpy as np

from flatlab.runs.reader import fill
from flatlab.task.definition import improvement

SPLITS = 200_000  # permutation test: all splits up to this number, else this many random ones


def mean_interval(values) -> tuple[float, float] | None:
    """95 % confidence interval of the mean as (low, high); None for fewer than 3 values.

    Student's t: mean +- t(0.975, N - 1) * std / sqrt(N). In a simulation with normal, uniform,
    exponential and partly failed scores it covers the mean at least as often as the percentile
    bootstrap at every N.
    """
    from scipy import stats

    if len(values) < 3:
        return None
    middle = fmean(values)
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return middle - half, middle + half


def permutation_p(a, b) -> float | None:
    """Two-sided p-value of a difference of means; None if a or b has a single value.

    The share of all ways to split a + b whose difference is at least as large.
    """
    from scipy import stats

    if min(len(a), len(b)) < 2:
        return None

    def difference(x, y, axis):
        return np.abs(np.mean(x, axis=axis) - np.mean(y, axis=axis))

    test = stats.permutation_test(
        (a, b), difference, n_resamples=SPLITS, batch=20_000, alternative="greater", rng=0
    )
    return float(test.pvalue)


# ------------------------------------------------------------------ the table of a grid


def final_score(cell: dict) -> float:
    """What a run is worth: of an evaluation the mean over its episodes (NaN if all are faults),
    else the test score of the best node or adapter, or its validation score without one.
    """
    if cell.get("evaluation"):
        return math.nan if cell["node_mean"] is None else cell["node_mean"]
    return cell["best_score"] if cell["test_score"] is None else cell["test_score"]


def grid_table(cells: list[dict]) -> list[dict]:
    """One row per task and method; p and rank compare the methods within a task.

    cells: contents of result.json with the keys that compare.comparison() adds. `method` is the
    label of the group a run belongs to.
    """
    groups = {}
    for cell in cells:
        groups.setdefault((cell["task"], cell["method"]), []).append(cell)
    rows = []
    for (task, method), group in groups.items():
        unaided = groups.get((task, "none"), []) if method != "none" else []
        rows.append({"task": task, "method": method} | row_of(group, unaided))
    add_ranks(rows)
    return rows


def add_ranks(rows: list[dict]) -> None:
    """Adds `rank`, the mean place of the method over its tasks; None if it is alone on them.

    The largest improvement of a task has place 1; equal ones share the mean of their places.
    """
    import pandas

    frame = pandas.DataFrame(rows, columns=["task", "method", "improvement"])
    tasks = frame.groupby("task")["improvement"]
    frame["place"] = tasks.rank(ascending=False).where(tasks.transform("size") > 1)
    ranks = frame.dropna().groupby("method")["place"].mean()
    for row in rows:
        row["rank"] = ranks.get(row["method"])


def row_of(group: list[dict], unaided: list[dict]) -> dict:
    """The numbers of one task and method. unaided: the cells of sampling mode none."""
    first = group[0]
    scores = list(map(final_score, group))
    scale = first["baseline"], first["higher_is_better"], first["reference"]
    improvements = [improvement(score, scale) for score in scores]
    error = "node_stderr" if first.get("evaluation") else "test_stderr"
    adapters = Counter(cell["adapter"] for cell in group if "adapter" in cell)
    row = {
        "n": len(group),
        "mean": fmean(scores),
        "std": stdev(scores) if len(scores) > 1 else None,
        "interval": mean_interval(scores),
        "validation": None if has_one_part(first) else mean_of(group, "best_score"),
        "selection": mean_of(group, "selection_score"),
        "stderr": mean_of(group, error),
        "improvement": fmean(improvements),
        "p": permutation_p(scores, list(map(final_score, unaided))),
        "untested": sum(map(is_untested, group)),
        "test_reads": max(cell.get("test_reads") or 0 for cell in group),
        "empty": sum(cell["nodes"] == cell["failed"] + cell["faults"] for cell in group),
        "selected_on_test": first["selected_on_test"],
        "exact": first.get("exact", False),
        "adapter": ", ".join(f"{count} {name}" for name, count in adapters.items()) or None,
        "modes_used": sum((Counter(cell.get("sampling_modes_used")) for cell in group), Counter()),
    }
    for key in ("nodes", "failed", "faults", "tokens", "ungraded"):
        row[key] = sum(cell.get(key) or 0 for cell in group)
    return row


def mean_of(cells: list[dict], key: str) -> float | None:
    """The mean over the cells that have this number; None if none does."""
    values = [cell[key] for cell in cells if cell.get(key) is not None]
    return fmean(values) if values else None


def has_one_part(cell: dict) -> bool:
    return cell["selected_on_test"] or cell.get("exact", False)


def is_untested(cell: dict) -> bool:
    """True if the best node is not the baseline and was not scored on the test part."""
    if cell.get("evaluation") or has_one_part(cell):
        return False
    return cell["test_score"] is None and cell.get("best_id") != "0"


# ------------------------------------------------------------------ as text


def align(lines: list[list[str]], left: int = 2) -> list[str]:
    """Rows of cells as lines of equal width; the first `left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    signs = ["<" if place < left else ">" for place in range(len(widths))]
    return [
        "  ".join(f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths))
        for line in lines
    ]


COLUMNS = {  # of the table for people: title -> how a row is printed, see fill()
    "task": "{task}",
    "method": "{method}",
    "N": "{n}",
    "mean": "{mean:.4f}",
    "std": "{std:.4f}",
    "95 % interval": "{interval[0]:.4f} to {interval[1]:.4f}",
    "improvement": "{improvement:+.2f}",
    "validation": "{validation:.4f}",
    "selection": "{selection:.4f}",
    "s.e.": "{stderr:.4f}",
    "p": "{p:.3f}",
    "rank": "{rank:.2f}",
    "adapter": "{adapter:s}",
    "empty": "{empty}",
    "failed": "{failed} of {nodes}",
    "faults": "{faults}",
    "tokens": "{tokens}",
}
MEANINGS = {
    "mean": "the test score, or without one the score that was selected on; of evaluations "
    "the mean over the episodes, none of which was chosen",
    "95 % interval": "of the mean, Student's t; none below N = 3",
    "improvement": "of the mean: 0 baseline, 1 reference (or |baseline| without one)",
    "s.e.": "standard error of a test score over the rows or games of that part, of an evaluation "
    "over its episodes",
    "p": "permutation test against none, two-sided",
    "rank": "mean place by improvement over the tasks of several methods",
    "adapter": "the one whose score is shown; last steps: the run is not finished",
    "empty": "runs without any valid submission",
    "failed": "nodes or episodes without a valid submission; each counts as the baseline",
}


def text_of(rows: list[dict]) -> str:
    """The table for people, without columns in which nothing is known, and its notes."""
    columns = {title: [fill(form, row) for row in rows] for title, form in COLUMNS.items()}
    columns = {title: cells for title, cells in columns.items() if set(cells) != {"-"}}
    lines = align([[*columns], *zip(*columns.values())])
    lines += [f"  {title}: {MEANINGS[title]}" for title in columns if title in MEANINGS]
    return "\n".join(lines + [f"  {note}" for note in notes(rows)])


def notes(rows: list[dict]) -> list[str]:
    """What the means do not say, one sentence each."""
    sentences = []
    for row in rows:
        if "local" in row["modes_used"] and row["method"] != "local":
            used = ", ".join(f"{mode} {count}" for mode, count in row["modes_used"].items())
            sentences.append(
                f"{row['task']} {row['method']}: the selection rule replaced the sampling mode of "
                f"some nodes; used {used}"
            )
    if ungraded := sum(row["ungraded"] for row in rows):
        sentences.append(
            f"the grader gave no result for {ungraded} failed nodes: what it printed is in the "
            "journal (grader_output)"
        )
    reads = max(row["test_reads"] for row in rows)
    if reads > 1:
        sentences.append(
            f"a search that went on with more --nodes has read the test part {reads} times"
        )
    if untested := sum(row["untested"] for row in rows):
        sentences.append(
            f"runs without a test score: {untested}; the mean has their validation score"
        )
    if chosen := sorted({row["task"] for row in rows if row["selected_on_test"]}):
        sentences.append(
            f"{', '.join(chosen)}: this task has only a test part, so the best was chosen on it "
            "and the mean is optimistic"
        )
    if exact := sorted({row["task"] for row in rows if row["exact"]}):
        sentences.append(f"{', '.join(exact)}: the score is exact")
    return sentences
