"""The value of an episode or node: the one number that selects, ranks, is compared in pairs and
heads every table.

    value = max(-1, improvement) up to the reference, 2 - 1 / improvement above it,
            and -1 without a valid submission

A fault has no value: it is left out and counted. Because no value is below that of a failure,
failing never pays, also where a policy is below the baseline. Above the reference the value still
grows, but stays below 2, so that one submission cannot outweigh many failures in a mean.

A `task` is anything with baseline, higher_is_better and reference.
"""

from math import ceil, floor, log10
from statistics import fmean

from flatlab.numbers import BEST_OF, expected_best, plus_minus, standard_error

WORST = -1.0  # lowest value
LOST = 0.1  # a fall of the valid share by less than this may be chance


def unit(task) -> float:
    """The difference in score that makes an improvement of 1: negative if lower is better.

    |reference - baseline|, or |baseline| without a reference, or 1 if that is 0.
    """
    width = task.baseline if task.reference is None else task.reference - task.baseline
    size = abs(width) or 1.0
    return size if task.higher_is_better else -size


def improvement(score: float, task) -> float:
    """(score - baseline) / unit: 0 at the baseline, 1 at the reference, unbounded."""
    return (score - task.baseline) / unit(task)


def score_at(reached: float, task) -> float:
    """The score of this improvement, in the task's unit."""
    return task.baseline + reached * unit(task)


def places(score: float, task=None, least: int = 4) -> int:
    """Decimals of a score: four digits of its distance from the baseline, or of unit() if that is
    more. Without a task, four digits of the score, and at least `least` decimals.
    """
    size = max(abs(unit(task)), abs(score - task.baseline)) if task else abs(score) or 1
    digits = 4 - ceil(log10(size))
    return digits if task else max(least, digits)


def score_text(score: float, task=None, least: int = 4) -> str:
    """A score as people read it, see places."""
    return rounded(score, places(score, task, least))


def rounded(score: float, digits: int) -> str:
    return f"{round(score, digits):z.{max(0, digits)}f}"


COUNTED = {"accuracy"}  # metrics in which each row is right or wrong, so none can outweigh others


def validation_text(score: float, task, stderr: float | None) -> str:
    """A score as an agent reads it: at most as in score_text, and its last digit is the first one
    of its standard error. With more, one prediction far off would spell out a hidden answer.

    A COUNTED metric keeps its digits. Without a standard error, a task of several parts loses two.
    """
    digits = places(score, task)
    if task.metric not in COUNTED:
        if stderr:
            digits = min(digits, -floor(log10(stderr)))
        elif stderr is None and len(task.splits) > 1:
            digits -= 2
    return rounded(score, digits)


def value_of(reached: float | None) -> float:
    """The value of an improvement, None without a valid submission."""
    if reached is None:
        return WORST
    bounded = reached if reached <= 1 else 2 - 1 / reached
    return max(WORST, bounded)


def judged(score, task) -> dict:
    """Numbers of an episode or node by one grading: the score in the task's unit with its standard
    error, the improvement (both None unless valid), and the value. score: a Score.
    """
    reached = improvement(score.value, task) if score.valid else None
    return {
        "score": score.value,
        "stderr": score.stderr,
        "improvement": reached,
        "value": value_of(reached),
    }


def on_test_part(rows: list[dict]) -> list[dict]:
    """The rows of episodes with the numbers of the test part in place of those of the first part,
    where it was scored.
    """
    names = ("score", "stderr", "improvement", "value")
    tested = []
    for row in rows:
        if row["test_value"] is not None:
            row = row | {name: row[f"test_{name}"] for name in names}
            is_valid = row["improvement"] is not None
            row["outcome"] = "valid" if is_valid else "failed"
            row["reason"] = "" if is_valid else row["reason"] or "no score on the test part"
        tested.append(row)
    return tested


def summary(rows: list[dict], task=None) -> dict:
    """Means and standard errors over episodes or nodes that are not faults.

    rows: of Episode.row(). Scores are means over the valid ones, in the task's unit; None without
    any. The expected best of 8 counts a failure as the score of value -1. task: None leaves out the
    scores.
    """
    values = [row["value"] for row in rows]
    valid = [row for row in rows if row["improvement"] is not None]
    result = {
        "value_mean": fmean(values) if values else None,
        "value_stderr": standard_error(values),
        "valid_share": len(valid) / max(1, len(values)),
    }
    if task:
        scores = [row["score"] for row in valid]
        reached = [max(WORST, row["improvement"]) for row in valid]
        reached += [WORST] * (len(rows) - len(valid))
        best = expected_best(BEST_OF, reached) if valid else None
        result["score_mean"] = fmean(scores) if scores else None
        result["score_stderr"] = standard_error(scores)
        result[f"score_best_of_{BEST_OF}"] = None if best is None else score_at(best, task)
    return result


def evaluation_columns(result: dict) -> dict:
    """An evaluation as columns of the row of a step."""
    return {f"eval_{key}": number for key, number in result.items()}


def fell_by_half(share: float, before: float) -> bool:
    """Returns whether the share of valid submissions fell by more than half."""
    return share < before / 2 and before - share > LOST


def summary_text(result: dict, metric: str = "score", least: int = 4) -> str:
    """'value +0.1200 ± 0.0310, 89% valid, accuracy 0.7012 ± 0.0101, best of 8: 0.7698'.

    least: decimals of the scores.
    """
    value = plus_minus(result["value_mean"], result.get("value_stderr"), "+")
    text = f"value {value}"
    if result["valid_share"] is not None:
        text += f", {result['valid_share']:.0%} valid"
    if result.get("score_mean") is None:
        return text
    digits = places(result["score_mean"], least=least)
    score = plus_minus(result["score_mean"], result.get("score_stderr"), digits=digits)
    text += f", {metric} {score}"
    best = result.get(f"score_best_of_{BEST_OF}")
    return text if best is None else f"{text}, best of {BEST_OF}: {score_text(best)}"
