"""Grades submission.csv against answers.csv (both in the current folder) and prints one JSON line.

answers.csv has the columns id, part (validation, selection or test) and the target; submission.csv
has id and the target, for the ids of all parts. The whole file is checked whichever part is graded,
and a message never depends on an answer. `stderr` is the standard error of the score. Several tasks
share this file; it needs only Python. A metric is a function and a check of one value in METRICS.
Arguments: --metric NAME [--labels VALUE ...] --split PART, in this order. The labels are the legal
values for accuracy; without them, any text is legal.
"""

import csv
import io
import json
import math
import random
import statistics
import sys
from contextlib import suppress

MAX_BYTES = 1_000_000
RESAMPLES = 100  # of the bootstrap: its standard error is then exact to about 7 %
LARGEST = 1e40  # bound of a predicted number: its square is far from an overflow


class Invalid(Exception):
    """The submission cannot be graded. The agent reads the text."""


def accuracy(truth, predicted):
    """Share of equal values."""
    return sum(a == b for a, b in zip(truth, predicted)) / len(truth)


def number_of(text):
    """The number that a text of ASCII stands for, or None."""
    with suppress(ValueError):
        value = float(text) if text.isascii() else math.nan
        return value if math.isfinite(value) else None


def same_labels(labels, predicted):
    """The predictions with 1.0 as the label 1, if all labels are different numbers."""
    by_number = {number_of(label): label for label in labels}
    if None in by_number or len(by_number) < len(labels):
        return predicted
    return {key: by_number.get(number_of(value), value) for key, value in predicted.items()}


def r2(truth, predicted):
    """1 - squared error / squared deviation from the mean of the truth."""
    truth = [float(value) for value in truth]
    predicted = [float(value) for value in predicted]
    mean = sum(truth) / len(truth)
    error = sum((a - b) ** 2 for a, b in zip(truth, predicted))
    return 1 - error / sum((a - mean) ** 2 for a in truth)


def standard_error(metric, truth, predicted):
    """The standard error of a score: sqrt(p (1 - p) / n) for an accuracy p, else by bootstrap.

    The bootstrap (Efron 1979) scores rows drawn with replacement. None for fewer than two rows.
    """
    count = len(truth)
    if count < 2:
        return None
    if metric is accuracy:
        share = accuracy(truth, predicted)
        return math.sqrt(share * (1 - share) / count)
    rng = random.Random(0)
    found = []
    while len(found) < RESAMPLES:
        rows = rng.choices(range(count), k=count)
        with suppress(ZeroDivisionError):  # all rows drawn have the same answer
            found.append(metric([truth[i] for i in rows], [predicted[i] for i in rows]))
    return statistics.stdev(found)


def read_answers(split):
    """(name of the target, {id: (part, value)}), all as text. Ends the grader, with a sentence for
    the user, if the file is damaged or has no row of this part.
    """
    with open("answers.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            sys.exit(f"answers.csv: line {number} has {len(row)} values, not id, part and target")
    answers = {key: (part, value) for key, part, value in rows[1:]}
    parts = sorted({part for part, _ in answers.values()})
    if split not in parts:
        sys.exit(f"answers.csv has no row of the part {split}; its parts: {', '.join(parts)}")
    return rows[0][2], answers


def read_rows():
    """Rows of submission.csv as lists of text, the header first. Raises Invalid."""
    try:
        with open("submission.csv", "rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        rows = [row for row in csv.reader(text, strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Invalid(f"submission.csv is not a CSV text file: {error}") from error
    if len(data) > MAX_BYTES:
        raise Invalid(f"submission.csv is larger than {MAX_BYTES} bytes")
    return rows


def wrong_label(value, labels):
    """Returns a sentence about a wrong value, or None. Without labels, any text is legal."""
    if not labels or value in labels or same_labels(labels, {0: value})[0] in labels:
        return None
    *most, last = labels
    return f"must be {', '.join(most)} or {last}"


def wrong_number(value, _):
    """Returns a sentence about a wrong value, or None."""
    with suppress(ValueError):
        if abs(float(value)) < LARGEST:  # not nan
            return None
    return f"must be a finite number below {LARGEST:g} in size"


METRICS = {"accuracy": (accuracy, wrong_label), "r2": (r2, wrong_number)}


def read_submission(target, ids, wrong):
    """{id: value} for exactly these ids. Raises Invalid. wrong(value): what is wrong with it."""
    rows = read_rows()
    if rows[:1] != [["id", target]]:
        raise Invalid(f"the first line of submission.csv must be: id,{target}")
    predicted = {}
    for row in rows[1:]:
        if len(row) != 2:
            text = ",".join(row)[:60]
            raise Invalid(f"every line needs 2 values, but one has {len(row)}: {text!r}")
        key, value = row
        if key not in ids:
            raise Invalid(f"id {key[:20]!r} is not in data/test.csv")
        if key in predicted:
            raise Invalid(f"id {key} is there twice")
        if reason := wrong(value):
            raise Invalid(f"{target} {reason}, but id {key} has {value[:20]!r}")
        predicted[key] = value
    missing = ids - predicted.keys()
    if missing:
        raise Invalid(f"{len(missing)} ids of data/test.csv are missing, such as {min(missing)}")
    return predicted


def main():
    name = sys.argv[2]
    labels = sys.argv[4:-2]
    split = sys.argv[-1]
    metric, wrong = METRICS[name]
    target, answers = read_answers(split)
    try:
        predicted = read_submission(target, set(answers), lambda value: wrong(value, labels))
    except Invalid as error:
        print(json.dumps({"error": str(error)}))
        return
    if metric is accuracy:
        predicted = same_labels({value for _, value in answers.values()}, predicted)
    pairs = []
    for key, (part, value) in answers.items():
        if part == split:
            pairs.append((value, predicted[key]))
    truth, values = zip(*pairs)
    score = metric(truth, values)
    error = standard_error(metric, truth, values)
    print(json.dumps({name: round(score, 6), "stderr": error}))


if __name__ == "__main__":
    main()
