"""What is asked and how it is scored: find a task by its name, and check what its score can say.

python tasks.py                 list all tasks
python tasks.py titanic         score the trivial rules of a task; is one of them at the top?
python tasks.py titanic --shrink 200      make titanic-200, a task with fewer rows
python tasks.py titanic --export harbor DIR     write the task as a Harbor task folder
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from flatlab.cache import store
from flatlab.episode.builtin import builtin_names, load_builtin
from flatlab.episode.grading import grade
from flatlab.episode.machine import open_sandbox, sandbox_kind
from flatlab.episode.mledojo import load_mledojo, mledojo_names
from flatlab.episode.mlgym import load_mlgym, mlgym_names
from flatlab.episode.sanity import at_the_top, csv_rules, degenerate, sanity_file, trivial_rules
from flatlab.episode.task import Task, improvement
from flatlab.episode.task_files import TASKS_DIR, nearest
from flatlab.errors import UserError


def load_task(
    name: str, mlgym_root: str | Path | None = None, mledojo_root: str | Path | None = None
) -> Task:
    """Loads a Harbor task folder if `name` is the path of one, else the task called `name`.

    Looks in the MLGym checkout, then in the folder that MLE-Dojo prepared, then in configs/tasks.
    A root of None means $MLGYM_ROOT or $MLEDOJO_ROOT; "" means none. Raises UserError, which says
    what to do.
    """
    if (Path(name) / "task.toml").is_file():
        from integrations.harbor.load import load_harbor

        return load_harbor(Path(name))
    known = []
    for names, load, root in task_sources(mlgym_root, mledojo_root):
        if name in names(root):
            return load(root, name)
        known += names(root)
    raise UserError(f"Unknown task {name!r}; {nearest(name, sorted(set(known)))}.")


def task_sources(mlgym_root: str | Path | None, mledojo_root: str | Path | None) -> list[tuple]:
    """(function that lists names, function that loads one, root) of each place tasks come from."""
    sources = []
    for names, load, root, variable in (
        (mlgym_names, load_mlgym, mlgym_root, "MLGYM_ROOT"),
        (mledojo_names, load_mledojo, mledojo_root, "MLEDOJO_ROOT"),
    ):
        if root is None:
            root = os.environ.get(variable)
        if root:
            sources.append((names, load, Path(root).expanduser().resolve()))
    sources.append((builtin_names, load_builtin, TASKS_DIR))
    return sources


def list_tasks(mlgym_root: str | None, mledojo_root: str | None) -> None:
    """Prints one line per task. Only built-in ones are loaded: others may be large."""
    for names, load, root in task_sources(mlgym_root, mledojo_root):
        for name in names(root):
            if load is not load_builtin:
                print(f"{name:40} {root}")
                continue
            task = load(root, name)
            print(f"{name:40} {task.metric}, {task.direction}, baseline {task.baseline:.4g}")


def print_row(task: Task, name: str, score: float | None, note: str = "") -> None:
    numbers = f"{'-':>12}"
    if score is not None:
        numbers = f"{score:12.4f}{improvement(score, task):13.2f}"
    print(f"{name:32}{numbers:25}  {note}".rstrip())


def check(task: Task, backend: str) -> None:
    """Scores the trivial rules of a task, prints them, and keeps the result for `degenerate`."""
    split = task.splits[0]
    print(f"{task.name} ({task.source}): {task.metric}, {task.direction}, on the {split} part\n")
    print(f"{'':32}{'score':>12}{'improvement':>13}")
    print_row(task, "baseline", task.baseline)
    if task.reference is not None:
        is_median = task.source == "mledojo"
        name = "median of the leaderboards" if is_median else "reference"
        print_row(task, name, task.reference)
    make_sandbox = partial(open_sandbox, task, sandbox_kind(backend))
    reason = None
    for rule, artefacts in trivial_rules(task).items():
        score = grade(task, artefacts, split, make_sandbox)
        print_row(task, rule, score.value, score.message)
        if not reason and score.valid and at_the_top(score.value, task):
            reason = f"the rule {rule!r} scores {score.value:.4g}"
    store(sanity_file(task), {"degenerate": reason})
    found = degenerate(task)
    print(f"\ndegenerate: {found}" if found else "\nnot degenerate, as far as these rules tell")


# ------------------------------------------------------------------ a small version

CSV_TASK = {"data/train.csv", "data/test.csv", "answers.csv", "grade_csv.py"}


def make_small(task: Task, rows: int, backend: str) -> Task:
    """Writes the task <name>-<rows> beside the folder of `task` and returns it.

    train.csv and test.csv have at most `rows` rows each; all parts of the answers shrink alike.
    The baseline is what a constant scores on the first split: the most frequent label or the mean
    of the new train.csv. Raises UserError for a task with other files, for too few rows, and if the
    folder exists.
    """
    if rows < 1:
        raise UserError(f"--shrink must be at least 1, not {rows}.")
    if CSV_TASK != {*task.public, *task.hidden}:
        raise UserError(f"--shrink needs a task with {', '.join(sorted(CSV_TASK))} and no more.")
    folder = task.hidden["answers.csv"].parent
    small = folder.with_name(f"{task.name}-{rows}")
    if (small / "task.yaml").exists():
        raise UserError(f"{small} exists already: remove it to make it again.")
    tables = small_tables(folder, rows, task.metric)
    small.mkdir(exist_ok=True)
    for name, table in tables.items():
        table.to_csv(small / name, index=False, lineterminator="\n")
    rule, text = next(iter(csv_rules(small / "train.csv", small / "test.csv").items()))
    graded = replace(task, hidden=task.hidden | {"answers.csv": small / "answers.csv"})
    make_sandbox = partial(open_sandbox, graded, sandbox_kind(backend))
    score = grade(graded, {"submission.csv": text.encode()}, task.splits[0], make_sandbox)
    if not score.valid:
        raise UserError(f"The rule {rule!r} has no score on {small}: {score.message}")
    lines = (folder / "task.yaml").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("baseline:")]
    lines.append(f"baseline: {score.value}  # {rule}\n")
    # With this file it is a task.
    (small / "task.yaml").write_text("\n".join(lines), encoding="utf-8")
    print(f"made {small}\n")
    return load_builtin(small.parent, small.name)


def small_tables(folder: Path, rows: int, metric: str) -> dict:
    """File name -> table with fewer rows. Raises UserError if a label would be left out."""
    import pandas

    names = ("train.csv", "test.csv", "answers.csv")
    read = partial(pandas.read_csv, dtype=str, keep_default_na=False)
    train, test, answers = [read(folder / name) for name in names]
    key, part, target = answers.columns
    kept = evenly(answers, rows, [part, target])
    if metric == "accuracy" and set(kept[target]) != set(answers[target]):
        raise UserError(f"--shrink {rows} leaves out a label of {folder.name}: keep more rows.")
    train = evenly(train, rows, [target])
    test = test[test[key].isin(kept[key])]
    return dict(zip(names, (train, test, kept)))


def evenly(table, rows: int, columns: list[str]):
    """At most `rows` rows, spread evenly over the table's order by `columns` (systematic sampling).

    So every label keeps its share. The rows stay in the order of the file.
    """
    count = min(rows, len(table))
    places = [i * len(table) // count for i in range(count)]
    return table.sort_values(columns, kind="stable").iloc[places].sort_index()


# ------------------------------------------------------------------ start


def main(
    task: str = "",
    /,
    mlgym_root: str | None = None,
    mledojo_root: str | None = None,
    backend: str = "auto",
    shrink: int | None = None,
    export: tuple[Literal["harbor"], str] | None = None,
) -> None:
    """List all tasks, or score the trivial rules of one: is one of them already at the top?

    Args:
        task: Name of the task, or a Harbor task folder. Without one, all tasks are listed.
        mlgym_root: MLGym checkout; default: $MLGYM_ROOT.
        mledojo_root: Folder of competitions prepared by MLE-Dojo; default: $MLEDOJO_ROOT.
        backend: docker, local or auto.
        shrink: Rows of train.csv and of test.csv in a small version of a CSV task, which is made.
        export: Write the task to a new folder instead, in Harbor's format: `harbor DIR`.
    """
    if export:
        from integrations.harbor.export import export_harbor

        export_harbor(load_task(task, mlgym_root, mledojo_root), Path(export[1]))
    elif task:
        loaded = load_task(task, mlgym_root, mledojo_root)
        if shrink is not None:
            loaded = make_small(loaded, shrink, backend)
        check(loaded, backend)
    else:
        list_tasks(mlgym_root, mledojo_root)


if __name__ == "__main__":
    import tyro

    from flatlab.runs.cli import one_sentence

    one_sentence(lambda: tyro.cli(main))
