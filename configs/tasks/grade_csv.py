"""Grades submission.csv against answers.csv (both in the current folder) and prints one JSON line.

answers.csv has the columns id, part (validation, selection or test) and the target; submission.csv
has id and the target, for the ids of all parts. The whole file is checked whichever part is graded,
and a message never depends on an answer. `stderr` is the standard error of the score, and
`higher_is_better` its direction. Several tasks share this file; it needs only Python. METRICS has
the metrics.
Arguments: --metric NAME [--labels VALUE ...] --split PART, in this order. The labels are the legal
values for metrics of labels; without them, any text is legal.
"""

import bisect
import csv
import io
import json
import math
import random
import statistics
import sys
from contextlib import suppress

MAX_BYTES = 1_000_000  # of a submission of few rows
ROW_BYTES = 200
RESAMPLES = 100  # of the bootstrap: its standard error is then exact to about 7 %
LARGEST = 1e40  # bound of a predicted number: its square is far from an overflow
PARTS = "validation", "selection", "test"


class Invalid(Exception):
    """The submission cannot be graded. The agent reads the text."""


class Broken(Exception):
    """The arguments or answers.csv cannot be used. The author of the task reads the text."""


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


def balanced_accuracy(truth, predicted):
    """Mean over the labels of the truth of the share that was found (recall)."""
    recalls = []
    for label in sorted(set(truth)):
        found = [a == b for a, b in zip(truth, predicted) if a == label]
        recalls.append(sum(found) / len(found))
    return statistics.fmean(recalls)


def f1(truth, predicted, label="1"):
    """2 true positives / (predicted + true ones) of a label."""
    hits = sum(a == b == label for a, b in zip(truth, predicted))
    return 2 * hits / (truth.count(label) + predicted.count(label))


def f1_macro(truth, predicted):
    """Mean of f1 over all labels."""
    labels = sorted({*truth, *predicted})
    return statistics.fmean(f1(truth, predicted, label) for label in labels)


def r2(truth, predicted):
    """1 - squared error / squared deviation from the mean of the truth."""
    mean = statistics.fmean(truth)
    return 1 - squared_error(truth, predicted) / sum((a - mean) ** 2 for a in truth)


def squared_error(truth, predicted):
    return sum((a - b) ** 2 for a, b in zip(truth, predicted))


def rmse(truth, predicted):
    """Square root of the mean squared error."""
    return math.sqrt(squared_error(truth, predicted) / len(truth))


def mae(truth, predicted):
    """Mean absolute error."""
    return statistics.fmean(abs(a - b) for a, b in zip(truth, predicted))


def quadratic_kappa(truth, predicted):
    """1 - squared error / its expectation for shuffled predictions (Cohen's kappa with quadratic
    weights).
    """
    one, other = statistics.fmean(truth), statistics.fmean(predicted)
    spread = sum((a - one) ** 2 for a in truth) + sum((b - other) ** 2 for b in predicted)
    return 1 - squared_error(truth, predicted) / (spread + len(truth) * (one - other) ** 2)


def roc_auc(truth, predicted):
    """Probability that a row with 1 has a larger prediction than one with 0; equal ones count half
    (Mann and Whitney).
    """
    ones = [b for a, b in zip(truth, predicted) if a == 1]
    zeros = sorted(b for a, b in zip(truth, predicted) if a == 0)
    wins = 0.0
    for value in ones:
        wins += (bisect.bisect_left(zeros, value) + bisect.bisect_right(zeros, value)) / 2
    return wins / (len(ones) * len(zeros))


def log_loss(truth, predicted):
    """Mean of -log of the probability of the answer, in nats. A prediction is the probability of 1;
    0 and 1 count as 2.2e-16 and 1 - 2.2e-16.
    """
    losses = []
    for answer, probability in zip(truth, predicted):
        probability = min(max(probability, sys.float_info.epsilon), 1 - sys.float_info.epsilon)
        losses.append(-math.log(probability if answer == 1 else 1 - probability))
    return statistics.fmean(losses)


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


def read_answers(path="answers.csv"):
    """(name of the target, {id: (part, value)}), all as text. Raises Broken."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    answers = {}
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            raise Broken(f"line {number} has {len(row)} values, not id, part and target")
        key, part, value = row
        if key in answers:
            raise Broken(f"id {key} is there twice")
        answers[key] = part, value
    if len(answers) < 2:
        raise Broken("there are no rows")
    target = answers.pop(rows[0][0])[1]
    return target, answers


def read_arguments(argv):
    """(name of the metric, labels, part). Raises Broken."""
    flag, name, *labels, split_flag, split = argv
    flags = [flag, *labels[:1], split_flag]
    if flags not in (["--metric", "--split"], ["--metric", "--labels", "--split"]):
        raise Broken("the arguments are not --metric NAME [--labels VALUE ...] --split PART")
    if name not in METRICS:
        raise Broken(f"unknown metric {name!r}; there are {', '.join(METRICS)}")
    if name == "f1":
        return name, ["0", "1"], split
    return name, labels[1:], split


def check_answers(name, labels, answers, split):
    """Raises Broken if the metric cannot be computed on this part."""
    metric, wrong, _ = METRICS[name]
    found = set()
    for key, (part, value) in answers.items():
        if part not in PARTS:
            raise Broken(f"id {key} has the part {part}; there are {', '.join(PARTS)}")
        reason = wrong(value, labels)
        if metric in (roc_auc, log_loss) and number_of(value) not in (0, 1):
            reason = "must be 0 or 1"
        if metric is f1 and value not in ("0", "1"):
            reason = "must be 0 or 1"
        if reason:
            raise Broken(f"an answer {reason} for {name}, but that of id {key} is not")
        if part == split:
            found.add(value)
    if not found:
        raise Broken(f"no row has the part {split}")
    if wrong is wrong_label:
        check_texts({value for _, value in answers.values()})
    if metric in (f1, r2, roc_auc, quadratic_kappa) and len(set(map(float, found))) < 2:
        raise Broken(f"{name} needs different answers in the part {split}")


def check_texts(labels):
    """Raises Broken if two of the labels are one number, as 1 and 1.0."""
    texts = {}
    for label in sorted(labels):
        other = texts.setdefault(number_of(label), label)
        if other != label and number_of(label) is not None:
            raise Broken(f"{other} and {label} are one number: write it in one way")


def read_rows(limit):
    """Rows of submission.csv as lists of text, the header first. limit: bytes. Raises Invalid."""
    try:
        with open("submission.csv", "rb") as file:
            data = file.read(limit + 1)
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        rows = [row for row in csv.reader(text, strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Invalid(f"submission.csv is not a CSV text file: {error}") from error
    if len(data) > limit:
        raise Invalid(f"submission.csv is larger than {limit} bytes")
    return rows


def wrong_label(value, labels):
    """Returns a sentence about a wrong value, or None. Without labels, any text is legal."""
    if not labels or value in labels or same_labels(labels, {0: value})[0] in labels:
        return None
    *most, last = labels
    return f"must be {', '.join(most)} or {last}" if most else f"must be {last}"


def wrong_number(value, _):
    """Returns a sentence about a wrong value, or None."""
    with suppress(ValueError):
        if abs(float(value)) < LARGEST:  # not nan
            return None
    return f"must be a finite number below {LARGEST:g} in size"


def wrong_rating(value, _):
    """Returns a sentence about a wrong value, or None."""
    with suppress(ValueError):
        if float(value).is_integer() and abs(float(value)) < LARGEST:
            return None
    return "must be a whole number"


def wrong_probability(value, _):
    """Returns a sentence about a wrong value, or None."""
    with suppress(ValueError):
        if 0 <= float(value) <= 1:
            return None
    return "must be a probability from 0 to 1"


METRICS = {  # function, check of a value, whether higher is better
    "accuracy": (accuracy, wrong_label, True),
    "balanced_accuracy": (balanced_accuracy, wrong_label, True),
    "f1": (f1, wrong_label, True),
    "f1_macro": (f1_macro, wrong_label, True),
    "r2": (r2, wrong_number, True),
    "quadratic_kappa": (quadratic_kappa, wrong_rating, True),
    "roc_auc": (roc_auc, wrong_number, True),
    "rmse": (rmse, wrong_number, False),
    "mae": (mae, wrong_number, False),
    "log_loss": (log_loss, wrong_probability, False),
}


def read_submission(target, ids, wrong):
    """{id: value} for exactly these ids. Raises Invalid. wrong(value): what is wrong with it."""
    rows = read_rows(max(MAX_BYTES, ROW_BYTES * len(ids)))
    if rows[:1] != [["id", target]]:
        raise Invalid(f"the first line of submission.csv must be: id,{target}")
    predicted = {}
    for row in rows[1:]:
        if len(row) != 2:
            text = ",".join(row)[:60]
            raise Invalid(f"every line needs 2 values, but one has {len(row)}: {text!r}")
        key, value = row
        if key not in ids:
            raise Invalid(f"id {key[:20]!r} is none of the ids to predict")
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
    try:
        name, labels, split = read_arguments(sys.argv[1:])
        target, answers = read_answers()
        check_answers(name, labels, answers, split)
    except (Broken, ValueError) as error:  # ValueError: answers.csv is no UTF-8
        sys.exit(f"grader_args or answers.csv: {error}")
    metric, wrong, up = METRICS[name]
    try:
        predicted = read_submission(target, set(answers), lambda value: wrong(value, labels))
    except Invalid as error:
        print(json.dumps({"error": str(error)}))
        return
    convert = float
    if wrong is wrong_label:
        convert = str
        predicted = same_labels({value for _, value in answers.values()}, predicted)
    truth, values = [], []
    for key, (part, value) in answers.items():
        if part == split:
            truth.append(convert(value))
            values.append(convert(predicted[key]))
    score = metric(truth, values)
    error = standard_error(metric, truth, values)
    print(json.dumps({name: score, "stderr": error, "higher_is_better": up}))


if __name__ == "__main__":
    main()
