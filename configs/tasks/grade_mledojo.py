"""Grade submission.csv with a competition's metric.py from MLE-Dojo and print one JSON line.

The folder holds metric.py, submission.csv and private/ with test_answer.csv and the leaderboards. The answers fall into
two halves, validation and test, by a hash of their id (the first column), so that the same row is always in the same
half; --split all grades them all. score is the metric's value; position is the share of the private and the public
leaderboard, averaged, that is not better. --describe prints what tasks.py has to know about the competition.
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
    """Takes the place of the one class that a metric.py imports from MLE-Dojo."""

    def __init__(self, higher_is_better=True):
        self.higher_is_better = higher_is_better


class InvalidSubmissionError(Exception):
    """Takes the place of MLE-Dojo's: the text is for the author of the submission."""


def load_metric(path):
    """An instance of the metric's class."""
    for name in ("mledojo", "mledojo.metrics", "mledojo.metrics.base"):
        module = sys.modules[name] = types.ModuleType(name)
    module.CompetitionMetrics, module.InvalidSubmissionError = (
        CompetitionMetrics,
        InvalidSubmissionError,
    )
    spec = importlib.util.spec_from_file_location("metric", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return CompetitionMetrics.__subclasses__()[-1]()


def half(key):
    """ "validation" or "test", always the same for the same id."""
    return ("validation", "test")[hashlib.sha256(f"{SEED}:{key}".encode()).digest()[0] % 2]


def evaluate(metric, answers, submission, split):
    """The metric's value on one half. The whole submission is checked first. Raises InvalidSubmissionError."""

    def check(answers, submission):
        try:
            metric.validate_submission(
                submission.copy(), answers.copy()
            )  # metrics change what they are given
        except InvalidSubmissionError:
            raise
        except Exception as error:  # a foreign metric meets foreign data: anything can be raised
            raise InvalidSubmissionError(
                f"submission.csv cannot be checked ({type(error).__name__})"
            ) from error

    check(answers, submission)
    if split != "all":
        key = answers.columns[0]
        if key not in submission:
            raise InvalidSubmissionError(f"submission.csv needs the column {key}")
        answers = answers[answers[key].map(half) == split]
        inside = submission[key].isin(answers[key]) | submission[key].astype(str).isin(
            answers[key].astype(str)
        )
        submission = submission[inside]
        answers, submission = answers.reset_index(drop=True), submission.reset_index(drop=True)
        check(answers, submission)
    try:
        score = float(metric.evaluate(answers.copy(), submission.copy()))
    except Exception as error:  # its text could hold answers
        raise InvalidSubmissionError(
            f"the metric cannot be computed ({type(error).__name__})"
        ) from error
    if not math.isfinite(score):
        raise InvalidSubmissionError("the metric is not a finite number")
    return score


def read_submission():
    try:
        return pandas.read_csv("submission.csv")
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise InvalidSubmissionError(
            f"submission.csv cannot be read: {str(error).splitlines()[0]}"
        ) from error


def leaderboards():
    """Lists of scores, the second columns of the leaderboards that are there."""
    paths = [Path("private", f"{name}_leaderboard.csv") for name in ("private", "public")]
    return [pandas.read_csv(path).iloc[:, 1].dropna().tolist() for path in paths if path.exists()]


def position(score, board, higher_is_better):
    """Share of the leaderboard that is not better than the score: 1 in the first place, 0 behind the last one."""
    return sum(score >= other if higher_is_better else score <= other for other in board) / len(
        board
    )


def grade(metric, split):
    """The result for one half as a dict."""
    try:
        score = evaluate(
            metric, pandas.read_csv("private/test_answer.csv"), read_submission(), split
        )
    except InvalidSubmissionError as error:
        return {"error": str(error)}
    boards = [position(score, board, metric.higher_is_better) for board in leaderboards()]
    return {"score": score} | ({"position": statistics.fmean(boards)} if boards else {})


def describe(metric):
    """Direction, whether there are halves, median and last place of the leaderboards, score of the submission."""
    key, ids = pandas.read_csv("private/test_answer.csv").iloc[:, 0].name, None
    columns = pandas.read_csv("submission.csv", nrows=0).columns
    if key in columns:
        ids = pandas.read_csv("private/test_answer.csv")[key].nunique()
    split = "validation" if ids and ids >= FEW else "all"
    boards = leaderboards()
    scores = [score for board in boards for score in board]
    return {
        "higher_is_better": bool(metric.higher_is_better),
        "halves": split != "all",
        "median": statistics.fmean(map(statistics.median, boards)) if boards else None,
        "last": ((min if metric.higher_is_better else max)(scores) if scores else None),
        **grade(metric, split),
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
