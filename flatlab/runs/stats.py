"""Tables over many search runs: mean, spread, how many, what failed, and whether a difference can be chance.

Nothing is dropped. A run whose every node failed counts with the baseline; a mean says how many runs are in it.
"""

from __future__ import annotations

import random
from itertools import combinations
from math import comb
from statistics import fmean, stdev

from flatlab.episode.task import improvement

EXACT = (
    200_000  # so many ways to split two groups are tried one by one; of more, this many random ones
)
DRAWS = 10_000  # bootstrap


def final_score(cell: dict) -> float:
    """What a run is worth: the test score of its best node by validation; the baseline when nothing was better."""
    return cell["best_score"] if cell.get("test_score") is None else cell["test_score"]


def bootstrap(values: list[float], seed: int = 0) -> tuple[float, float] | None:
    """95 % percentile interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    rng = random.Random(seed)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    return means[round(0.025 * (DRAWS - 1))], means[round(0.975 * (DRAWS - 1))]


def permutation_p(a: list[float], b: list[float]) -> float:
    """Two-sided p-value of the difference of means: the share of all ways to split a + b that differ at least as much."""
    pool, size = a + b, len(a)
    total, observed = sum(pool), abs(fmean(a) - fmean(b))

    def as_far(chosen):
        part = sum(pool[i] for i in chosen)
        return abs(part / size - (total - part) / (len(pool) - size)) >= observed - 1e-12 * max(
            1.0, abs(observed)
        )

    if comb(len(pool), size) <= EXACT:
        splits = list(combinations(range(len(pool)), size))
        return sum(map(as_far, splits)) / len(splits)
    rng = random.Random(0)
    return (1 + sum(as_far(rng.sample(range(len(pool)), size)) for _ in range(EXACT))) / (1 + EXACT)


def ranks(values: dict) -> dict:
    """1 for the largest; equal values share the mean of their places."""
    return {
        key: 1
        + sum(other > value for other in values.values())
        + (sum(other == value for other in values.values()) - 1) / 2
        for key, value in values.items()
    }


def grid_table(cells: list[dict]) -> list[dict]:
    """One row per task and mode; `cells` are contents of result.json. p and rank compare modes within a task."""
    groups = {}
    for cell in cells:
        mode = cell.get("mode") or cell["sampling_mode"]
        groups.setdefault((cell["task"], mode), []).append(cell)
    gains = {
        key: fmean(
            improvement(final_score(c), (c["baseline"], c["higher_is_better"], c["reference"]))
            for c in group
        )
        for key, group in groups.items()
    }
    places = {}
    for task in {task for task, _ in groups}:
        for mode, place in ranks(
            {mode: gain for (name, mode), gain in gains.items() if name == task}
        ).items():
            places.setdefault(mode, []).append(place)
    rows = []
    for (task, mode), group in groups.items():
        scores, against = [final_score(c) for c in group], groups.get((task, "none"))
        best = [c["best_score"] for c in group]
        tested = [
            c["test_minus_validation"] for c in group if c.get("test_minus_validation") is not None
        ]
        rows.append(
            {
                "task": task,
                "mode": mode,
                "n": len(group),
                "mean": fmean(scores),
                "std": stdev(scores) if len(scores) > 1 else None,
                "interval": bootstrap(scores),
                "validation": fmean(best),
                "gap": fmean(tested) if tested else None,
                "gain": gains[task, mode],
                "p": permutation_p(scores, [final_score(c) for c in against])
                if against and mode != "none"
                else None,
                "rank": fmean(places[mode]),
                "rank_tasks": len(places[mode]),
                "untested": sum(
                    c.get("test_score") is None
                    and c.get("best_id", "0") != "0"
                    and not c["selected_on_test"]
                    for c in group
                ),
                "empty": sum(c["nodes"] == c["failed"] + c["faults"] for c in group),
                "nodes": sum(c["nodes"] for c in group),
                "failed": sum(c["failed"] for c in group),
                "faults": sum(c["faults"] for c in group),
                "tokens": sum(c["tokens"] for c in group),
                "seconds": sum(c["seconds"] for c in group),
                "selected_on_test": any(c["selected_on_test"] for c in group),
            }
        )
    return rows


def text_of(rows: list[dict]) -> str:
    """The table for people. `mean` is of the test part, `valid.` of what the search selected on."""
    form = "{:<16} {:<9} {:>2} {:>9} {:>9} {:>19} {:>9} {:>9} {:>6} {:>5} {:>6} {:>13} {:>6} {:>8}"
    titles = (
        "task",
        "mode",
        "N",
        "mean",
        "std",
        "95 % of the mean",
        "valid.",
        "gap",
        "p",
        "rank",
        "empty",
        "failed nodes",
        "faults",
        "tokens",
    )
    number = lambda value, spec=".4f": "-" if value is None else format(value, spec)
    lines = [form.format(*titles)]
    for r in rows:
        interval = "{:.4f} to {:.4f}".format(*r["interval"]) if r["interval"] else "-"
        lines.append(
            form.format(
                r["task"][:16],
                r["mode"],
                r["n"],
                number(r["mean"]),
                number(r["std"]),
                interval,
                number(r["validation"]),
                number(r["gap"]),
                number(r["p"], ".3f"),
                number(r["rank"], ".2f"),
                r["empty"],
                f"{r['failed']} of {r['nodes']}",
                r["faults"],
                r["tokens"],
            )
        )
    notes = [
        "mean: test score of the best node by validation; where no node was better than the baseline, the baseline"
    ]
    if any(r["p"] is not None for r in rows):
        notes.append("p: permutation test against mode none, two-sided")
    if rows and rows[0]["rank_tasks"] > 1:
        notes.append(f"rank: mean place of the mode over {rows[0]['rank_tasks']} tasks")
    if any(r["empty"] for r in rows):
        notes.append("empty: runs without a single valid node, in the mean with the baseline")
    return "\n".join(lines + [f"  {note}" for note in notes + reservations(rows)])


def reservations(rows: list[dict]) -> list[str]:
    """What is not a test score of a choice made on the validation part, in words."""
    found = []
    if any(r["untested"] for r in rows):
        found.append(
            f"{sum(r['untested'] for r in rows)} runs have no test score yet: in the mean with their validation score"
        )
    if chosen := sorted({r["task"] for r in rows if r["selected_on_test"]}):
        found.append(
            f"{', '.join(chosen)}: there is a test part only, what is best was chosen on it, the mean is optimistic"
        )
    return found
