"""The table of a grid of runs: means, intervals, failures, tests of differences.

No run is dropped. A run without any valid node counts as the baseline, and every mean says how many
runs are in it. search.py and viz.py print this table.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from itertools import zip_longest
from statistics import fmean, stdev

import numpy as np

from flatlab.episode.task import improvement
from flatlab.runs.reader import filled

SPLITS = 200_000  # permutation test: all splits up to this number, else this many random ones
WIDTH = 36  # characters of a cell; longer names go on in the next line


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

    found = stats.permutation_test(
        (a, b), difference, n_resamples=SPLITS, batch=20_000, alternative="greater", rng=0
    )
    return float(found.pvalue)


# ------------------------------------------------------------------ the table of a grid


def final_score(cell: dict) -> float:
    """What a run is worth: of an evaluation the mean over its episodes (NaN if all are faults),
    else the test score of the best node or adapter, or its validation score without one.
    """
    if cell.get("evaluation"):
        return math.nan if cell["node_mean"] is None else cell["node_mean"]
    return cell["best_score"] if cell["test_score"] is None else cell["test_score"]


def cell_improvement(cell: dict) -> float:
    task = cell["baseline"], cell["higher_is_better"], cell["reference"]
    return improvement(final_score(cell), task)


def grid_table(cells: list[dict]) -> list[dict]:
    """One row per task and method; p and rank compare the methods within a task.

    cells: contents of result.json with the keys that compare.cell_of() adds. `method` is the label
    of the group a run belongs to.
    """
    groups = {}
    for cell in cells:
        groups.setdefault((cell["task"], cell["method"]), []).append(cell)
    scores = {place: list(map(final_score, group)) for place, group in groups.items()}
    rows = []
    for (task, method), group in groups.items():
        row = row_of(task, method, group)
        plain = scores.get((task, "none"))
        if plain and method != "none":
            row["p"] = permutation_p(scores[task, method], plain)
        rows.append(row)
    add_ranks(rows)
    return rows


def add_ranks(rows: list[dict]) -> None:
    """Adds `rank`, the mean place of the method over its tasks.

    The largest improvement of a task has place 1; equal ones share the mean of their places.
    """
    import pandas

    frame = pandas.DataFrame(rows, columns=["task", "method", "improvement"])
    frame["place"] = frame.groupby("task")["improvement"].rank(ascending=False)
    ranks = frame.groupby("method")["place"].mean()
    for row in rows:
        row["rank"] = ranks[row["method"]]


def row_of(task: str, method: str, group: list[dict]) -> dict:
    """The row of one task and method. Keys: see COLUMNS."""
    scores = [final_score(cell) for cell in group]
    is_evaluation = bool(group[0].get("evaluation"))
    chosen_on_test = any(cell["selected_on_test"] for cell in group)
    adapters = Counter(cell["adapter"] for cell in group if "adapter" in cell)
    known = ", ".join(f"{count} {name}" for name, count in adapters.items())
    row = {
        "task": task,
        "method": method,
        "n": len(group),
        "mean": fmean(scores),
        "std": stdev(scores) if len(scores) > 1 else None,
        "interval": mean_interval(scores),
        "validation": None if chosen_on_test else mean_of(group, "best_score"),
        "selection": mean_of(group, "selection_score"),
        "stderr": mean_of(group, "node_stderr" if is_evaluation else "test_stderr"),
        "test_minus_validation": mean_of(group, "test_minus_validation"),
        "improvement": fmean(map(cell_improvement, group)),
        "per_minute": None,
        "p": None,
        "untested": sum(map(is_untested, group)),
        "ungraded": sum(cell.get("ungraded") or 0 for cell in group),
        "test_reads": max(cell.get("test_reads") or 0 for cell in group),
        "empty": sum(cell["nodes"] == cell["failed"] + cell["faults"] for cell in group),
        "selected_on_test": chosen_on_test,
        "evaluation": is_evaluation,
        "adapter": known or None,
        "modes_used": modes_of(group),
    }
    seconds = sum(cell.get("seconds", 0) for cell in group)  # not known of training runs
    if seconds and not is_evaluation:
        row["per_minute"] = 60 * len(group) * row["improvement"] / seconds
    for key in ("nodes", "failed", "faults", "tokens"):
        row[key] = sum(cell[key] for cell in group)
    return row


def mean_of(cells: list[dict], key: str) -> float | None:
    """The mean over the cells that know this number; None if none does."""
    known = [cell[key] for cell in cells if cell.get(key) is not None]
    return fmean(known) if known else None


def is_untested(cell: dict) -> bool:
    """True if the best node is not the baseline and was not scored on the test part."""
    if cell.get("evaluation") or cell["selected_on_test"]:
        return False
    return cell["test_score"] is None and cell.get("best_id") != "0"


def modes_of(group: list[dict]) -> dict:
    """Sampling mode -> number of nodes whose ideas were really asked for in this mode."""
    counts = Counter()
    for cell in group:
        counts.update(cell.get("sampling_modes_used"))
    return dict(counts)


# ------------------------------------------------------------------ as text


def aligned(lines: list[list[str]], left: int = 2) -> list[str]:
    """Rows of cells as lines of equal width; the first `left` columns are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    found = []
    for line in lines:
        cells = [cell.ljust(w) for cell, w in zip(line[:left], widths)]
        cells += [cell.rjust(w) for cell, w in zip(line[left:], widths[left:])]
        found.append("  ".join(cells))
    return found


def wrapped_row(cells: list[str]) -> list[list[str]]:
    """A row of cells as several rows of cells that are at most WIDTH wide."""
    columns = [textwrap.wrap(cell, WIDTH, break_on_hyphens=False) for cell in cells]
    return [list(row) for row in zip_longest(*columns, fillvalue="")]


def shown(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


COLUMNS = {  # of the table for people: title -> how a row is printed, see filled()
    "task": "{task}",
    "method": "{method}",
    "N": "{n}",
    "mean": "{mean:.4f}",
    "std": "{std:.4f}",
    "95 % interval": "{interval[0]:.4f} to {interval[1]:.4f}",
    "improvement": "{improvement:+.2f}",
    "per minute": "{per_minute:+.3f}",
    "validation": "{validation:.4f}",
    "selection": "{selection:.4f}",
    "s.e.": "{stderr:.4f}",
    "test-valid.": "{test_minus_validation:+.4f}",
    "p": "{p:.3f}",
    "rank": "{rank:.2f}",
    "adapter": "{adapter:s}",
    "empty": "{empty}",
    "failed": "{failed} of {nodes}",
    "faults": "{faults}",
    "tokens": "{tokens}",
}


def text_of(rows: list[dict]) -> str:
    """The table for people, without columns in which nothing is known, and its notes."""
    columns = []
    for title, form in COLUMNS.items():
        cells = [filled(form, row) for row in rows]
        if set(cells) != {"-"}:
            columns.append([title, *cells])
    lines = []
    for cells in zip(*columns):
        lines += wrapped_row(cells)
    return "\n".join(aligned(lines) + [f"  {note}" for note in notes(rows)])


def notes(rows: list[dict]) -> list[str]:
    """What the columns mean and what the means do not say, one sentence each."""
    mean = "mean: the test score if there is one, else the score that was selected on"
    stderr = "s.e.: standard error of a test score over the rows or games of that part"
    improvement = "improvement of the mean: 0 baseline, 1 reference (or |baseline| without one)"
    if rows[0]["evaluation"]:
        mean = "mean: over the episodes, on the part that validate shows; no episode was chosen"
        stderr = "s.e.: standard error of that mean over the episodes"
    else:
        improvement += "; per minute: divided by the minutes of a search"
    found = [
        mean,
        improvement,
        "95 % interval of the mean: Student's t; none below N = 3",
        "rank: mean place of the method over its tasks, by improvement",
        "failed: nodes or episodes without a valid submission, each counts as the baseline; "
        "empty: runs with no valid one",
    ]
    if any(row["adapter"] for row in rows):
        found.append("adapter: the one whose score is shown; last steps: the run is not finished")
    if any(row["stderr"] is not None for row in rows):
        found.append(stderr)
    if any(row["p"] is not None for row in rows):
        found.append("p: permutation test against none, two-sided")
    for row in rows:
        if "local" in row["modes_used"] and row["method"] != "local":
            used = ", ".join(f"{mode} {count}" for mode, count in row["modes_used"].items())
            found.append(
                f"{row['task']} {row['method']}: the selection rule replaced the sampling mode of "
                f"some nodes; used {used}"
            )
    ungraded = sum(row["ungraded"] for row in rows)
    if ungraded:
        found.append(
            f"the grader gave no result for {ungraded} failed nodes: what it printed is in the "
            "journal (grader_output)"
        )
    reads = max(row["test_reads"] for row in rows)
    if reads > 1:
        found.append(
            f"a search that went on with more --nodes has read the test part {reads} times"
        )
    untested = sum(row["untested"] for row in rows)
    if untested:
        found.append(f"runs without a test score: {untested}; the mean has their validation score")
    chosen = sorted({row["task"] for row in rows if row["selected_on_test"]})
    if chosen:
        found.append(
            f"{', '.join(chosen)}: this task has only a test part, so the best was chosen on it "
            "and the mean is optimistic"
        )
    return found
