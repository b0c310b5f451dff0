"""The table of a grid of runs: means, intervals, failures, ranks, tests of differences.

No run is dropped. A run without any valid node counts as the baseline, and every mean says how many
runs are in it. search.py and viz.py print this table.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from statistics import fmean, stdev

import numpy as np

from flatlab.episode.task import improvement

SPLITS = 200_000  # permutation test: up to this many splits are all tried, else so many at random


def mean_interval(values) -> tuple[float, float] | None:
    """95 % confidence interval of the mean as (low, high); None for fewer than 3 values.

    Student's t: mean +- t(0.975, N - 1) * std / sqrt(N). In a simulation with normal, uniform,
    exponential and partly failed scores it covers the mean at least as often as the percentile
    bootstrap at every N.
    """
    from scipy import stats

    values = np.asarray(values, float)
    if len(values) < 3:
        return None
    if values.std() == 0:
        return float(values[0]), float(values[0])
    found = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return float(found.low), float(found.high)


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
    """What a run is worth: the test score of its best node or adapter, else validation."""
    return cell["best_score"] if cell.get("test_score") is None else cell["test_score"]


def cell_improvement(cell: dict) -> float:
    task = cell["baseline"], cell["higher_is_better"], cell.get("reference")
    return improvement(final_score(cell), task)


def method_of(cell: dict) -> str:
    return cell.get("method") or cell.get("sampling_mode") or "none"


def grid_table(cells: list[dict]) -> list[dict]:
    """One row per task and method; p and rank compare the methods within a task.

    cells: contents of result.json of searches, or the same keys from compare.cell_of(). `method` is
    the label of the group a run belongs to, its sampling mode by default.
    """
    groups = {}
    for cell in cells:
        groups.setdefault((cell["task"], method_of(cell)), []).append(cell)
    rows = [row_of(task, method, group) for (task, method), group in groups.items()]
    for row in rows:
        plain = groups.get((row["task"], "none"))
        if plain and row["method"] != "none":
            group = groups[row["task"], row["method"]]
            row["p"] = permutation_p(list(map(final_score, group)), list(map(final_score, plain)))
    add_ranks(rows)
    return rows


def row_of(task: str, method: str, group: list[dict]) -> dict:
    """The row of one task and method. Keys: see the titles in text_of()."""
    scores = [final_score(cell) for cell in group]
    tested = [c for c in group if c.get("test_minus_validation") is not None]
    differences = [cell["test_minus_validation"] for cell in tested]
    row = {
        "task": task,
        "method": method,
        "n": len(group),
        "mean": fmean(scores),
        "std": stdev(scores) if len(scores) > 1 else None,
        "interval": mean_interval(scores),
        "validation": fmean(cell["best_score"] for cell in group),
        "test_minus_validation": fmean(differences) if differences else None,
        "improvement": fmean(map(cell_improvement, group)),
        "p": None,
        "untested": sum(map(is_untested, group)),
        "empty": sum(cell["nodes"] == cell["failed"] + cell["faults"] for cell in group),
        "selected_on_test": any(cell["selected_on_test"] for cell in group),
        "adapter": adapters_of(group),
        "modes_used": modes_of(group),
    }
    for key in ("nodes", "failed", "faults", "tokens", "seconds"):
        row[key] = sum(cell[key] for cell in group)
    return row


def is_untested(cell: dict) -> bool:
    """True if the best node is not the baseline and was not scored on the test part."""
    if cell.get("test_score") is not None or cell["selected_on_test"]:
        return False
    return cell.get("best_id", "0") != "0"


def adapters_of(group: list[dict]) -> str | None:
    """The adapters that the scores of a method belong to: '2 best, 1 untrained'."""
    counts = Counter(cell.get("adapter") for cell in group)
    if None in counts:
        return None
    if len(counts) == 1:
        return group[0]["adapter"]
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def modes_of(group: list[dict]) -> dict:
    """Sampling mode -> number of nodes whose ideas were really asked for in this mode."""
    counts = Counter()
    for cell in group:
        counts.update(cell.get("sampling_modes_used") or {})
    return dict(counts)


def add_ranks(rows: list[dict]) -> None:
    """Adds `rank`, the mean place of the method over its tasks, and `rank_tasks`, their number.

    The largest improvement of a task has place 1; equal ones share the mean of their places.
    """
    import pandas

    frame = pandas.DataFrame(rows, columns=["task", "method", "improvement"])
    frame["place"] = frame.groupby("task")["improvement"].rank(ascending=False)
    ranks = frame.groupby("method")["place"].agg(["mean", "size"]).to_dict()
    for row in rows:
        row["rank"] = ranks["mean"][row["method"]]
        row["rank_tasks"] = ranks["size"][row["method"]]


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


def shown(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def interval_text(row: dict) -> str:
    if row["interval"] is None:
        return "-"
    low, high = row["interval"]
    return f"{low:.4f} to {high:.4f}"


def text_of(rows: list[dict], what="method", done="nodes") -> str:
    """The table for people. `what` heads the column of methods; runs consist of `done`."""
    tested = any(row["test_minus_validation"] is not None for row in rows)
    columns = {
        "task": lambda row: textwrap.shorten(row["task"], 24, placeholder="…"),
        what: lambda row: row["method"],
        "N": lambda row: str(row["n"]),
        "mean": lambda row: shown(row["mean"]),
        "std": lambda row: shown(row["std"]),
        "95 % interval": interval_text,
        "improvement": lambda row: shown(row["improvement"], "+.2f"),
    }
    if tested:
        columns["test-valid."] = lambda row: shown(row["test_minus_validation"], "+.4f")
    if any(row["p"] is not None for row in rows):
        columns["p"] = lambda row: shown(row["p"], ".3f")
    if any(row["adapter"] for row in rows):
        columns["adapter"] = lambda row: row["adapter"] or "-"
    columns |= {
        "rank": lambda row: shown(row["rank"], ".2f"),
        "empty": lambda row: str(row["empty"]),
        f"failed {done}": lambda row: f"{row['failed']} of {row['nodes']}",
        "faults": lambda row: str(row["faults"]),
        "tokens": lambda row: str(row["tokens"]),
    }
    lines = [list(columns)]
    lines += [[cell(row) for cell in columns.values()] for row in rows]
    return "\n".join(aligned(lines) + [f"  {note}" for note in notes(rows)])


def notes(rows: list[dict]) -> list[str]:
    """What the columns mean and what the means do not say, one sentence each."""
    found = ["mean: the test score if there is one, else the score that was selected on"]
    if any(row["adapter"] for row in rows):
        found.append("adapter: the one whose score is shown; last steps: the run is not finished")
    else:
        found[0] += "; a run without a better node counts as the baseline"
    found.append("improvement of the mean: 0 baseline, 1 reference (without one: baseline doubled)")
    found.append("95 % interval of the mean: Student's t; none below N = 3")
    if any(row["p"] is not None for row in rows):
        found.append("p: permutation test against none, two-sided")
    if rows and rows[0]["rank_tasks"] > 1:
        found.append(f"rank: mean place of the method over {rows[0]['rank_tasks']} tasks")
    if any(row["empty"] for row in rows):
        found.append("empty: runs in which nothing was valid")
    for row in rows:
        if "local" in row["modes_used"] and row["method"] != "local":
            used = ", ".join(f"{mode} {count}" for mode, count in row["modes_used"].items())
            found.append(
                f"{row['task']} {row['method']}: the selection rule replaced the sampling mode of "
                f"some nodes; used {used}"
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
