"""Grades submission.csv with a competition's metric.py from MLE-Dojo and prints one JSON line.

The folder holds metric.py, submission.csv and private/ with test_answer.csv and the leaderboards.
The answers fall into two halves, validation and test, by a hash of their id (the first column), so
a row is always in the same half; `--split all` grades them all. `score` is the metric's value;
`position` is the share of the private and the public leaderboard, averaged, that is not better.
`--describe` prints what flatlab/episode/mledojo.py has to know about the competition.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import statistics
import sys
import types
from pathlib import Path

import pandas

SEED = "1"
FEW = 20  # with fewer ids than this there are no halves


class CompetitionMetrics:
    """Replaces the one class that a metric.py imports from MLE-Dojo."""

    def __init__(self, higher_is_better=True):
        self.higher_is_better = higher_is_better


class InvalidSubmissionError(Exception):
    """Replaces MLE-Dojo's class. The author of the submission reads the text."""


def load_metric(path):
    """An instance of the metric's class."""
    for name in ("mledojo", "mledojo.metrics", "mledojo.metrics.base"):
        module = sys.modules[name] = types.ModuleType(name)
    module.CompetitionMetrics = CompetitionMetrics
    module.InvalidSubmissionError = InvalidSubmissionError
    spec = importlib.util.spec_from_file_location("metric", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return CompetitionMetrics.__subclasses__()[-1]()


def half(key):
    """ "validation" or "test", always the same for the same id."""
    return ("validation", "test")[hashlib.sha256(f"{SEED}:{key}".encode()).digest()[0] % 2]


def evaluate(metric, answers, submission, split):
    """The metric's value on one half. Checks the whole submission first.

    Raises InvalidSubmissionError.
    """
    check(metric, answers, submission)
    if split != "all":
        key = answers.columns[0]
        if key not in submission:
            raise InvalidSubmissionError(f"submission.csv needs the column {key}")
        answers = answers[answers[key].map(half) == split]
        same_value = submission[key].isin(answers[key])
        same_text = submission[key].astype(str).isin(answers[key].astype(str))
        submission = submission[same_value | same_text].reset_index(drop=True)
        answers = answers.reset_index(drop=True)
        check(metric, answers, submission)
    try:
        score = float(metric.evaluate(answers.copy(), submission.copy()))
    except Exception as error:  # its text could hold answers
        name = type(error).__name__
        raise InvalidSubmissionError(f"the metric cannot be computed ({name})") from error
    if not math.isfinite(score):
        raise InvalidSubmissionError("the metric is not a finite number")
    return score


def check(metric, answers, submission):
    """The metric's own check. Metrics change their arguments, so they get copies."""
    try:
        metric.validate_submission(submission.copy(), answers.copy())
    except InvalidSubmissionError:
        raise
    except Exception as error:  # a foreign metric meets foreign data: anything can be raised
        name = type(error).__name__
        raise InvalidSubmissionError(f"submission.csv cannot be checked ({name})") from error


def read_submission():
    """The submission as a data frame. Raises InvalidSubmissionError."""
    try:
        return pandas.read_csv("submission.csv")
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        reason = str(error).splitlines()[0]
        raise InvalidSubmissionError(f"submission.csv cannot be read: {reason}") from error


def leaderboards():
    """The scores of each leaderboard that exists: its second column."""
    boards = []
    for name in ("private", "public"):
        path = Path("private", f"{name}_leaderboard.csv")
        if path.exists():
            boards.append(pandas.read_csv(path).iloc[:, 1].dropna().tolist())
    return boards


def position(score, board, higher_is_better):
    """Share of the leaderboard that is not better: 1 in first place, 0 behind the last."""
    passed = [other for other in board if (score >= other if higher_is_better else score <= other)]
    return len(passed) / len(board)


def grade(metric, split):
    """The result for one half as a dict."""
    answers = pandas.read_csv("private/test_answer.csv")
    try:
        score = evaluate(metric, answers, read_submission(), split)
    except InvalidSubmissionError as error:
        return {"error": str(error)}
    places = [position(score, board, metric.higher_is_better) for board in leaderboards()]
    if not places:
        return {"score": score}
    return {"score": score, "position": statistics.fmean(places)}


def describe(metric):
    """Direction, halves, median and last place of the leaderboards, grade of the submission."""
    ids = pandas.read_csv("private/test_answer.csv").iloc[:, 0]
    columns = pandas.read_csv("submission.csv", nrows=0).columns
    has_halves = ids.name in columns and ids.nunique() >= FEW
    boards = leaderboards()
    scores = [score for board in boards for score in board]
    worst = min if metric.higher_is_better else max
    return {
        "higher_is_better": bool(metric.higher_is_better),
        "halves": has_halves,
        "median": statistics.fmean(map(statistics.median, boards)) if boards else None,
        "last": worst(scores, default=None),
        **grade(metric, "validation" if has_halves else "all"),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--split", choices=["validation", "test", "all"])
    parser.add_argument("--describe", action="store_true")
    args = parser.parse_args()
    metric = load_metric("metric.py")
    print(json.dumps(describe(metric) if args.describe else grade(metric, args.split)))


if __name__ == "__main__":
    main()
