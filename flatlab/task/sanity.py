"""Checks a task: does the grader work, and what do trivial baselines score?"""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from flatlab.errors import ArtefactError, SandboxFault, UserError
from flatlab.files import cache_dir, recall
from flatlab.task.definition import Task
from flatlab.task.grading import grade, read_artefacts

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
    """Grades the first trivial rule on each part; without one, grade_csv.py gets an empty file.

    Raises UserError if the grader gives neither a score nor a reason, or if it refuses a rule of
    task.trivial, or grade_csv.py one of csv_rules: it would not score any episode. Also if the
    sandbox lacks required packages, if an agent could not hand in the artefacts, or could read what
    task.hide_package_data should hide.
    """
    check_artefacts(task, make_sandbox)
    rules = [*islice(trivial_rules(task), 1)]
    needed = {*task.trivial}
    if "grade_csv.py" in task.hidden:
        needed.update(name for name, _ in rules if name.startswith("always "))
        rules = rules or [("an empty file", {task.artefacts[0]: b""})]
    for name, artefacts in rules:
        for split in task.splits:
            score = grade(task, artefacts, split, make_sandbox)
            if score.grader_output or name in needed and not score.valid:
                output = " ".join(score.grader_output.split())[-SENTENCE_CHARS:]
                raise UserError(
                    f"The grader of task {task.name} is broken: it gives the rule {name!r} no "
                    f"score on the {split} part: {score.message} {output}"
                )


WRITE_SECONDS = 20
WRITE = 'mkdir -p -- "${0%/*}" && echo x > "$0"'
# Prints the names that are no empty folders although their package is there
CHECK_HIDDEN = """
import os, sys
for name in sys.argv[1:]:
    for path in sys.path:
        package = os.path.join(path, name.split("/")[0])
        folder = os.path.join(path, name)
        if os.path.exists(package) and (not os.path.isdir(folder) or os.listdir(folder)):
            print(name)
"""


def check_artefacts(task: Task, make_sandbox) -> None:
    """Writes each artefact as an agent does, and collects them. Raises UserError if an agent may
    not write one, or if it is missing then. Also if a sandbox that can hide the data of packages
    does not hide that of task.hide_package_data.
    """
    folders = [f"{name}file" for name in task.artefacts if name.endswith("/")]
    names = [] if task.collect else task.named_artefacts + folders
    box = make_sandbox()
    try:
        for name in names:
            written = box.run(["bash", "-c", WRITE, f"./{name}"], WRITE_SECONDS)
            if written.exit_code:
                raise ArtefactError(f"{name} cannot be written: {written.output.strip()}")
        read_artefacts(task, box)
        seen = []
        if task.hide_package_data and box.backend.is_complete:
            program = ["python3", "-c", CHECK_HIDDEN, *task.hide_package_data]
            printed = box.run(program, WRITE_SECONDS).output.splitlines()
            seen = [name for name in task.hide_package_data if name in printed]
    except (ArtefactError, SandboxFault) as error:
        raise UserError(f"Task {task.name}: no agent can hand in its artefacts: {error}.") from None
    finally:
        box.close()
    if seen:
        raise UserError(
            f"Task {task.name}: an agent can read {seen[0]}, which hide_package_data should hide. "
            "It must be a folder of a package."
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
    ranks = ("the most frequent", "the second most frequent", "the third most frequent")
    frequent = zip(ranks, counts.most_common(3))
    constants = {f"{rank}, {value}": value for rank, (value, _) in frequent}
    with suppress(ValueError):  # not all of them are numbers
        numbers = list(map(float, counts.elements()))
        for name, middle in (("mean", fmean(numbers)), ("median", median(numbers))):
            constants[f"the {name}, {middle:.6g}"] = middle
    for name, value in constants.items():
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([header[0], targets[0]])
        table.writerows([row[0], value] for row in body if row)
        yield f"always {name}", text.getvalue()
