"""The sanity check of a task: rules that need no idea, and whether one of them is at the top."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flatlab.files import cache_dir, content_key
from flatlab.task.definition import Task, improvement, is_plain

if TYPE_CHECKING:
    from pandas import DataFrame, Series

AT_THE_TOP = 0.98  # improvement towards the reference, or towards a perfect score
PERFECT = {"accuracy": 1.0, "validation_accuracy": 100.0, "r2": 1.0}
FEW = 20  # a numeric target with more values is a regression
LEAVES = 10  # of the decision tree that sees one column
EMPTY = "an empty submission"  # stands in for the rules of a task that has none


def degenerate(task: Task) -> str | None:
    """Why the scores of a task say little: known, or found by its sanity check. None if neither."""
    reasons = [task.degenerate]
    stored = sanity_file(task)
    if stored.exists():
        reasons.append(json.loads(stored.read_text(encoding="utf-8"))["degenerate"])
    return "; ".join(reason for reason in reasons if reason) or None


def sanity_file(task: Task) -> Path:
    """Where the result of the sanity check is kept. The name changes with anything in the task."""
    facts = (
        task.metric,
        task.higher_is_better,
        task.baseline,
        task.reference,
        task.artefacts,
        task.grader,
        task.trivial,
    )
    key = content_key(repr(facts), *task.public.values(), *task.hidden.values())
    return cache_dir() / "sanity" / f"{task.name}-{key}.json"


def trivial_rules(task: Task) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields the name and the artefacts of each rule; of an empty submission if there is none."""
    rule = None
    for rule in rules_of(task):
        yield rule
    if rule is None:
        yield EMPTY, {name: b"" for name in task.artefacts if is_plain(name)}


def rules_of(task: Task) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The task's own rules, the public files as they are, the sample submission, and csv_rules."""
    for name, text in task.trivial.items():
        yield name, {task.artefacts[0]: text.encode()}
    if set(task.artefacts) <= set(task.public):
        yield "as given", {name: task.public[name].read_bytes() for name in task.artefacts}
    for path, file in task.public.items():
        if Path(path).name == f"sample_{task.artefacts[0]}":
            yield path, {task.artefacts[0]: file.read_bytes()}
    if task.artefacts != ("submission.csv",):
        return
    if {"data/train.csv", "data/test.csv"} <= set(task.public):
        # These are no tables (pandas' own errors), or pandas is missing (integrations/verifiers).
        with suppress(ValueError, ImportError):
            files = task.public["data/train.csv"], task.public["data/test.csv"]
            for name, text in csv_rules(*files):
                yield name, {"submission.csv": text.encode()}


def csv_rules(train_file: Path, test_file: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the submission of constants, and of a small tree on the best column.

    The target is the column that only train.csv has, the id is the first column of test.csv. With
    more or fewer such columns there are no rules.
    """
    import pandas

    train = pandas.read_csv(train_file, dtype=str, keep_default_na=False)
    test = pandas.read_csv(test_file, dtype=str, keep_default_na=False)
    targets = train.columns.difference(test.columns)
    if len(targets) != 1:
        return
    ids = test.iloc[:, :1]
    truth = train[targets[0]]
    numbers = pandas.to_numeric(truth, errors="coerce")
    is_number = numbers.notna().all() and numbers.nunique() > FEW
    if is_number:
        truth = numbers
        constants = {f"always {value:.6g}": value for value in (truth.mean(), truth.median())}
    else:
        constants = {f"always {value}": value for value in truth.value_counts().index[:3]}

    def submission(values) -> str:
        return ids.assign(**{targets[0]: values}).to_csv(index=False, lineterminator="\n")

    for name, value in constants.items():
        yield name, submission(value)
    name, values = best_column(train, test, truth, is_number)
    if name:
        yield f"by {name} alone", submission(values)


def best_column(train: DataFrame, test: DataFrame, truth: Series, is_number: bool) -> tuple:
    """(name of the column on which a small tree fits the truth best, its predictions for test).

    ("", None) without a common column.
    """
    import numpy
    import pandas
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    tree = DecisionTreeRegressor if is_number else DecisionTreeClassifier
    best_fit = -math.inf
    best = "", None
    for name in test.columns[1:].intersection(train.columns):
        column = pandas.concat([train[name], test[name]])
        inputs = pandas.to_numeric(column, errors="coerce").to_numpy()
        if numpy.isnan(inputs).mean() > 0.5:
            inputs = column.factorize()[0]
        seen, new = numpy.split(inputs.reshape(-1, 1), [len(train)])
        fitted = tree(max_leaf_nodes=LEAVES, random_state=0).fit(seen, truth)
        fit = fitted.score(seen, truth)
        if fit > best_fit:
            best_fit = fit
            best = name, fitted.predict(new)
    return best


def at_the_top(score: float, task: Task) -> bool:
    """Whether the score of a trivial rule leaves no room above it."""
    for top in (task.reference, PERFECT.get(task.metric)):
        measure = (task.baseline, task.higher_is_better, top)
        if top is not None and improvement(score, measure) >= AT_THE_TOP:
            return True
    return False
