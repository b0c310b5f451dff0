"""Grades submission.csv with a competition's metric.py from MLE-Dojo and prints one JSON line.

The folder holds metric.py, submission.csv and private/ with test_answer.csv and the leaderboards.
The answers fall into parts by a hash of their id (the first column): a half is for validation, a
quarter for selection and a quarter for the test, and an id is always in the same part; `--split
all` grades them all. `score` is the metric's value, `stderr` its standard error; `position` is the
share of the private and the public leaderboard, averaged, that is not better. Arguments: --split
PART, or --describe, which prints what flatlab/task/mledojo.py has to know about the competition.
"""

import hashlib
import json
import random
import statistics
import sys
import time
import types
from pathlib import Path

import pandas

SEED = "1"
PARTS = ("validation", "test", "validation", "selection")
LARGEST = 1e100  # a score beyond it is none, as in flatlab/numbers.py
FEW = 40  # with fewer ids than this there are no parts
RESAMPLES = 20  # for the standard error, which is then exact to about 16 %
RESAMPLE_SECONDS = 10.0  # no further resample is started after this time


class CompetitionMetrics:
    """Replaces the one class that a metric.py imports from MLE-Dojo."""

    def __init__(self, higher_is_better=True):
        self.higher_is_better = higher_is_better


class InvalidSubmissionError(Exception):
    """Replaces MLE-Dojo's class. The author of the submission reads the text."""


def load_metric():
    """An instance of the metric's class in metric.py."""
    for name in ("mledojo", "mledojo.metrics", "mledojo.metrics.base"):
        module = sys.modules[name] = types.ModuleType(name)
    module.CompetitionMetrics = CompetitionMetrics
    module.InvalidSubmissionError = InvalidSubmissionError
    sys.path.append(".")
    import metric  # noqa: F401

    return CompetitionMetrics.__subclasses__()[-1]()


def part_of(key):
    """ "validation", "selection" or "test", always the same for the same id."""
    return PARTS[hashlib.sha256(f"{SEED}:{key}".encode()).digest()[0] % len(PARTS)]


def restricted(answers, submission, chosen):
    """The answers where `chosen` is true, and the rows of the submission with their ids."""
    key = answers.columns[0]
    answers = answers[chosen]
    same_value = submission[key].isin(answers[key])
    same_text = submission[key].astype(str).isin(answers[key].astype(str))
    submission = submission[same_value | same_text].reset_index(drop=True)
    return answers.reset_index(drop=True), submission


def complaint(metric, answers, submission):
    """Text of the metric's own check, or "". It gets copies: metrics change their arguments."""
    try:
        metric.validate_submission(submission.copy(), answers.copy())
    except InvalidSubmissionError as error:
        return str(error)
    except Exception as error:  # anything can be raised, and its text could hold answers
        return f"submission.csv cannot be checked ({type(error).__name__})"
    return ""


def check_submission(metric, answers, submission):
    """The metric's own check. What it says is shown if it says the same without the answers.

    Raises InvalidSubmissionError.
    """
    if said := complaint(metric, answers, submission):
        blank = answers.copy()
        blank[blank.columns[1:]] = 0
        if said != complaint(metric, blank, submission):
            said = "submission.csv cannot be checked"
        raise InvalidSubmissionError(said)


def metric_value(metric, answers, submission):
    """The metric's value. Raises InvalidSubmissionError."""
    try:
        score = float(metric.evaluate(answers.copy(), submission.copy()))
    except Exception as error:  # InvalidSubmissionError as well: its text could hold answers
        text = f"the metric cannot be computed ({type(error).__name__})"
        raise InvalidSubmissionError(text) from error
    if not abs(score) <= LARGEST:  # nan, too
        raise InvalidSubmissionError(f"the metric is no number below {LARGEST:g} in size")
    return score


def standard_error(metric, answers, submission):
    """The standard deviation of the score over random halves of the ids; None if there is none.

    A half drawn without replacement varies around the whole as the whole does around the truth
    (Shao and Wu 1989, the delete-d jackknife with d = n / 2). A bootstrap would repeat ids, which
    many metrics refuse.
    """
    key = answers.columns[0]
    ids = sorted(set(answers[key]), key=str)
    rng = random.Random(0)
    deadline = time.monotonic() + RESAMPLE_SECONDS
    found = []
    for _ in range(RESAMPLES):
        if time.monotonic() > deadline:
            break
        half = answers[key].isin(rng.sample(ids, len(ids) // 2))
        try:
            found.append(metric_value(metric, *restricted(answers, submission, half)))
        except InvalidSubmissionError:  # an AUC of answers that are all equal, say
            continue
    return statistics.stdev(found) if len(found) >= RESAMPLES // 2 else None


def leaderboards():
    """The scores of each leaderboard that exists: its second column."""
    paths = [Path("private", f"{name}_leaderboard.csv") for name in ("private", "public")]
    return [pandas.read_csv(path).iloc[:, 1].dropna() for path in paths if path.exists()]


def score_split(metric, split):
    """The metric's value on one part and its standard error.

    Checks the whole submission first, which has a score on validation and test or on neither.
    Raises InvalidSubmissionError.
    """
    answers = pandas.read_csv("private/test_answer.csv")
    try:
        submission = pandas.read_csv("submission.csv")
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        reason = str(error).splitlines()[0]
        raise InvalidSubmissionError(f"submission.csv cannot be read: {reason}") from error
    check_submission(metric, answers, submission)
    if split == "all":
        return metric_value(metric, answers, submission), None
    key = answers.columns[0]
    if key not in submission:
        raise InvalidSubmissionError(f"submission.csv needs the column {key}")
    parts = answers[key].map(part_of)
    for part in ("validation", "test", split):
        rows = restricted(answers, submission, parts == part)
        check_submission(metric, *rows)
        score = metric_value(metric, *rows)
    return score, standard_error(metric, *rows)


def grade(metric, split):
    """The result for one part as a dict."""
    try:
        score, error = score_split(metric, split)
    except InvalidSubmissionError as wrong:
        return {"error": str(wrong)}
    found = {"score": score, "stderr": error}
    up = metric.higher_is_better
    places = [(board <= score if up else board >= score).mean() for board in leaderboards()]
    return found | {"position": statistics.fmean(places)} if places else found


def describe(metric):
    """Direction, parts, median and last place of the leaderboards, grade of the submission."""
    ids = pandas.read_csv("private/test_answer.csv").iloc[:, 0]
    columns = pandas.read_csv("submission.csv", nrows=0).columns
    has_parts = ids.name in columns and ids.nunique() >= FEW
    boards = leaderboards()
    scores = [score for board in boards for score in board]
    worst = min if metric.higher_is_better else max
    return {
        "higher_is_better": bool(metric.higher_is_better),
        "parts": has_parts,
        "median": statistics.fmean(map(statistics.median, boards)) if boards else None,
        "last": worst(scores, default=None),
        **grade(metric, "validation" if has_parts else "all"),
    }


def main():
    metric = load_metric()
    print(json.dumps(grade(metric, sys.argv[2]) if sys.argv[2:] else describe(metric)))


if __name__ == "__main__":
    main()
