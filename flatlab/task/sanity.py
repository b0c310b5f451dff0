"""Checks a task: does the grader work, and what do trivial baselines score?"""

import csv
import io
import runpy
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from flatlab.errors import UserError, nearest
from flatlab.files import cache_dir, recall
from flatlab.task.definition import Task
from flatlab.task.grading import grade

SENTENCE_CHARS = 800  # end of Score.grader_output in a sentence


def degenerate(task: Task) -> str | None:
    """Returns why the scores of a task say little: known, or found by its sanity check; or None."""
    reasons = [task.degenerate, recall(sanity_file(task)).get("degenerate")]
    return "; ".join(filter(None, reasons)) or None


def warning(tasks: list[Task]) -> str:
    """'task: reason' for each degenerate one, or ""."""
    reasons = {task.name: degenerate(task) for task in tasks}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)


def sanity_file(task: Task) -> Path:
    """Where the result of the sanity check is kept. The name changes with the task."""
    return cache_dir() / "sanity" / f"{task.name}-{task.digest()}.json"


def check_grader(task: Task, make_sandbox) -> None:
    """Grades the first trivial rule, if the task has one, on each part.

    Raises UserError if the grader gives neither a score nor a reason, or if it refuses a rule of
    task.trivial: it would not score any episode. Also if the sandbox lacks required packages.
    """
    check_table(task)
    if task.requirements:
        make_sandbox().close()
    for name, artefacts in islice(trivial_rules(task), 1):
        for split in task.splits:
            score = grade(task, artefacts, split, make_sandbox)
            if score.grader_output or name in task.trivial and not score.valid:
                output = " ".join(score.grader_output.split())[-SENTENCE_CHARS:]
                raise UserError(
                    f"The grader of task {task.name} is broken: it gives the rule {name!r} no "
                    f"score on the {split} part: {score.message} {output}"
                )


def check_table(task: Task) -> None:
    """Raises UserError if grade_csv.py does not know the metric or has the other direction, if it
    cannot grade a part, or if it would leave out rows, because the task has no such part.
    """
    grader = task.hidden.get("grade_csv.py")
    rules = runpy.run_path(str(grader)) if grader and "answers.csv" in task.hidden else {}
    if "check_answers" not in rules:  # also for a grader of the user with this name
        return
    metrics = rules["METRICS"]
    if task.metric not in metrics:
        known = nearest(task.metric, sorted(metrics))
        raise UserError(f"Task {task.name}: unknown metric {task.metric!r}; {known}.")
    if metrics[task.metric][-1] != task.higher_is_better:
        word = str(not task.higher_is_better).lower()
        raise UserError(f"Task {task.name}: {task.metric} needs `higher_is_better: {word}`.")
    given = task.grader[3:-2]  # what task.yaml has as grader_args
    if given[:2] != ("--metric", task.metric) or given[2:3] not in ((), ("--labels",)):
        raise UserError(
            f"Task {task.name} needs `grader_args: [--metric, {task.metric}]`, and after that "
            "--labels with the labels, if only these are allowed."
        )
    labels = given[3:]
    try:
        answers = rules["read_answers"](task.hidden["answers.csv"])[1]
        rules["check_answers"](task.metric, labels, answers, task.splits)
    except (rules["Broken"], ValueError) as error:  # ValueError: no UTF-8
        raise UserError(f"answers.csv of task {task.name}: {error}.") from None
    unused = {part for part, _ in answers.values()} - {*task.splits}
    if unused:
        raise UserError(
            f"answers.csv of task {task.name} has rows of the part {min(unused)}, but the splits "
            f"are {', '.join(task.splits)}: add it to `splits` in task.yaml, or remove the rows."
        )


def trivial_rules(task: Task) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yields the name and the artefacts of each rule: the task's own ones, the public files as they
    are, the sample submission, and csv_rules.
    """
    first = task.artefacts[0]
    for name, text in task.trivial.items():
        yield name, {first: text.encode()}
    if set(task.artefacts) <= set(task.public):
        given = {name: task.public[name].read_bytes() for name in task.artefacts}
        yield "as given", given
    for path, file in task.public.items():
        if Path(path).name == f"sample_{first}":
            yield path, {first: file.read_bytes()}
    tables = ["data/train.csv", "data/test.csv"]
    if task.artefacts == ("submission.csv",) and set(tables) <= set(task.public):
        with suppress(ValueError, IndexError, csv.Error):  # these are no tables
            for name, text in csv_rules(*map(task.public.get, tables)):
                yield name, {first: text.encode()}


def csv_rules(train: Path, test: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and the submission of constants: the most frequent answers, and the mean and
    the median of numbers, which a metric of labels refuses.

    The target is the column that only train.csv has, the id is the first column of test.csv. With
    more or fewer such columns there are no rules.
    """
    options = {"newline": "", "encoding": "utf-8-sig"}
    with train.open(**options) as known, test.open(**options) as asked:
        rows = csv.reader(known)
        names = next(rows, [])
        header, *body = csv.reader(asked)
        targets = [name for name in names if name not in header]
        if len(targets) != 1:
            return
        place = names.index(targets[0])
        counts = Counter(row[place] for row in rows if row)
    constants = {value: value for value, _ in counts.most_common(3)}
    with suppress(ValueError):  # not all of them are numbers
        numbers = list(map(float, counts.elements()))
        for kind, middle in (("mean", fmean(numbers)), ("median", median(numbers))):
            constants[f"the {kind}, {middle:.6g}"] = middle
    for name, value in constants.items():
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([header[0], targets[0]])
        table.writerows([row[0], value] for row in body if row)
        yield f"always {name}", text.getvalue()
