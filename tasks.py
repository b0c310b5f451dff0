"""Tasks and their scores: find a task by its name, and check what its score can say.

python tasks.py                 list all tasks: what is asked, how it is scored
python tasks.py titanic         score the trivial rules of a task; is one of them at the top?
"""

import importlib
import os
from functools import partial
from pathlib import Path

from flatlab.errors import UnknownTask, UserError
from flatlab.files import content_key, remember, usable
from flatlab.options import SandboxOptions
from flatlab.task.builtin import builtin_names, load_builtin, nearest
from flatlab.task.definition import TASKS_DIR, Task
from flatlab.task.grading import grade
from flatlab.task.machine import open_sandbox, resolve_backend
from flatlab.task.mledojo import load_mledojo, mledojo_names
from flatlab.task.mlgym import load_mlgym, mlgym_names
from flatlab.task.sanity import check_grader, degenerate, sanity_file, trivial_rules
from flatlab.task.value import improvement, score_text, value_of
from flatlab.view.columns import aligned

AT_THE_TOP = 0.98  # improvement of a trivial rule that leaves no room above it
FACTS = "task|metric|better|baseline|reference|exact|degenerate|from|what is asked".split("|")


def load_task(
    name: str, mlgym_root: str | Path | None = None, mledojo_root: str | Path | None = None
) -> Task:
    """Loads the task called `name`; MODULE:PLACE is load_task(PLACE) of a Python module.

    Looks in the MLGym checkout, then in the folder that MLE-Dojo prepared, then in configs/tasks.
    A root of None means $MLGYM_ROOT or $MLEDOJO_ROOT; "" means none. Raises UserError, which says
    what to do.
    """
    module, colon, place = name.partition(":")
    if colon:
        try:
            load = importlib.import_module(module).load_task
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UnknownTask(
                f"{module!r} is no Python module that loads tasks: {error}."
            ) from None
        return load(place)
    found = find_tasks(mlgym_root, mledojo_root)
    if name not in found:
        hint = nearest(name, sorted(found))
        if "," in name:
            hint = f"separate names by spaces: --task {name.replace(',', ' ')}"
        raise UnknownTask(f"Unknown task {name!r}; {hint}.")
    load, root = found[name]
    with usable(f"Task {name}"):
        return load(root, name)


def find_tasks(
    mlgym_root: str | Path | None = None, mledojo_root: str | Path | None = None
) -> dict[str, tuple]:
    """Name of each task -> (function that loads it, root). Later places replace earlier ones."""
    found = dict.fromkeys(builtin_names(TASKS_DIR), (load_builtin, TASKS_DIR))
    for root, variable, names, load in (
        (mledojo_root, "MLEDOJO_ROOT", mledojo_names, load_mledojo),
        (mlgym_root, "MLGYM_ROOT", mlgym_names, load_mlgym),
    ):
        if root is None:
            root = os.environ.get(variable)
        if root:
            root = Path(os.path.expanduser(root)).resolve()
            found |= dict.fromkeys(names(root), (load, root))
    return found


def print_row(task: Task, name: str, score: float | None, note: str = "") -> None:
    numbers = f"{'-':>12}"
    if score is not None:
        reached = improvement(score, task)
        numbers = f"{score_text(score, task):>12}{reached:z13.2f}{value_of(reached):z8.2f}"
    print(f"{name:32}{numbers:33}  {note}".rstrip())


def check_task(task: Task, options: SandboxOptions) -> None:
    """Scores the trivial rules of a task, prints them, and keeps the result for `degenerate`.

    Also names public files that have the content of a hidden one. Raises UserError if the grader is
    broken, or if the sandbox lacks something that the task needs.
    """
    options = resolve_backend(task, options)
    make_sandbox = partial(open_sandbox, task, options)
    check_grader(task, make_sandbox)
    split = task.splits[0]
    print(f"{task.name} ({task.source}): {task.metric}, {task.direction}, on the {split} part\n")
    print(f"{'':32}{'score':>12}{'improvement':>13}{'value':>8}")
    print_row(task, "baseline", task.baseline)
    if task.reference is not None:
        print_row(task, "reference", task.reference)
    verdict = "No trivial rule scores: add one under `trivial:` in task.yaml."
    reason = None
    errors = {}  # distance of a rule's score to the baseline -> standard error
    for rule, artefacts in trivial_rules(task):
        score = grade(task, artefacts, split, make_sandbox)
        print_row(task, rule, score.value, f"{score.message} {score.grader_output}")
        if score.valid:
            verdict = "not degenerate, as far as these rules tell"
            errors[abs(score.value - task.baseline)] = score.stderr or 0.0
            at_the_top = improvement(score.value, task) >= AT_THE_TOP
            if at_the_top and task.reference is not None and not reason:
                reason = f"the rule {rule!r} scores {score_text(score.value, task)}"
    remember(sanity_file(task), {"degenerate": reason})
    if reason := degenerate(task):
        verdict = f"degenerate: {reason}"
    print(f"\n{verdict}")
    if errors and task.reference is not None:
        error = errors[min(errors)]
        if abs(task.reference - task.baseline) <= 2 * error:
            print(
                f"warning  The reference {score_text(task.reference, task)} is within two standard "
                f"errors ({error:.2g} each) of the baseline {score_text(task.baseline, task)}: an "
                "improvement of 1 can be chance."
            )
    hidden = {content_key(file): path for path, file in task.hidden.items() if file.stat().st_size}
    for path, file in task.public.items():
        if same := hidden.get(content_key(file)):
            print(f"warning  The agent can read {path}: it has the content of the hidden {same}.")


def task_table() -> str:
    """A line for each task; for one that cannot be loaded the reason."""
    rows = []
    for name in sorted(find_tasks()):
        row = dict.fromkeys(FACTS, "-") | {"task": name}
        rows.append(row)
        try:
            task = load_task(name)
        except UserError as error:
            row["what is asked"] = str(error)
            continue
        row["metric"] = task.metric
        row["better"] = task.direction.split()[0]
        row["baseline"] = score_text(task.baseline, task)
        if task.reference is not None:
            row["reference"] = score_text(task.reference, task)
        row["exact"] = "yes" if task.exact else "no"
        row["degenerate"] = "yes" if degenerate(task) else "no"
        row["from"] = task.source
        row["what is asked"] = " ".join(task.prompt.split()).partition(". ")[0]
    return aligned(rows)


# ------------------------------------------------------------------ start


def main(task: str = "", sandbox: SandboxOptions = SandboxOptions()) -> None:  # noqa: B008
    """List all tasks, or score the trivial rules of one: is one already at the top?

    Args:
        task: Name of the task. Without one, all tasks are listed.
        sandbox: The kind of sandbox and what it offers.
    """
    if not task:
        return print(task_table())
    check_task(load_task(task), sandbox)


if __name__ == "__main__":
    from flatlab.runs import cli

    cli.one_sentence(lambda: cli.call(main))
