"""What is asked and how it is scored: find a task by its name, and check what its score can say.

python tasks.py                 list all tasks
python tasks.py titanic         score the trivial rules of a task; is one of them at the top?
python tasks.py rlMetaMaze --build-image        make a Docker image with the task's requirements
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import indent

from flatlab.errors import UserError
from flatlab.files import content_key, store
from flatlab.options import SandboxOptions
from flatlab.sandbox.images import install_requirements
from flatlab.task.builtin import builtin_names, load_builtin
from flatlab.task.definition import Task, improvement
from flatlab.task.grading import Score, check_grader, grade
from flatlab.task.machine import open_sandbox, resolve_backend
from flatlab.task.mledojo import load_mledojo, mledojo_names
from flatlab.task.mlgym import load_mlgym, mlgym_names
from flatlab.task.sanity import at_the_top, degenerate, sanity_file, trivial_rules
from flatlab.task.task_files import TASKS_DIR, nearest


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
    all_names = []
    for names, load, root in task_sources(mlgym_root, mledojo_root):
        if name in names(root):
            return load(root, name)
        all_names += names(root)
    raise UserError(f"Unknown task {name!r}; {nearest(name, sorted(set(all_names)))}.")


def task_sources(mlgym_root: str | Path | None, mledojo_root: str | Path | None) -> Iterator[tuple]:
    """(function that lists names, function that loads one, root) of each place tasks come from."""
    for names, load, root, variable in (
        (mlgym_names, load_mlgym, mlgym_root, "MLGYM_ROOT"),
        (mledojo_names, load_mledojo, mledojo_root, "MLEDOJO_ROOT"),
    ):
        if root is None:
            root = os.environ.get(variable)
        if root:
            yield names, load, Path(root).expanduser().resolve()
    yield builtin_names, load_builtin, TASKS_DIR


def list_tasks() -> None:
    """Prints one line per task. Only built-in ones are loaded: others may be large."""
    for names, load, root in task_sources(None, None):
        for name in names(root):
            text = root
            if load is load_builtin:
                try:
                    task = load(root, name)
                    text = f"{task.metric}, {task.direction}, baseline {task.baseline:.4g}"
                except UserError as error:  # the other tasks are listed
                    text = f"cannot be used: {error}"
            print(f"{name:40} {text}")


def print_row(task: Task, name: str, score: float | None, note: str = "") -> None:
    numbers = f"{'-':>12}"
    if score is not None:
        numbers = f"{score:12.4f}{improvement(score, task):13.2f}"
    print(f"{name:32}{numbers:25}  {note}".rstrip())


def print_score(task: Task, rule: str, score: Score) -> None:
    print_row(task, rule, score.value, score.message)
    if score.grader_output:
        print(indent(score.grader_output, "    "))


def check(task: Task, options: SandboxOptions) -> None:
    """Scores the trivial rules of a task, prints them, and keeps the result for `degenerate`.

    The first rule is scored on all parts. Names public files that are copies of hidden ones. Raises
    UserError if the grader is broken, or if the sandbox lacks something that the task needs.
    """
    options = resolve_backend(task, options)
    make_sandbox = partial(open_sandbox, task, options)
    check_grader(task, make_sandbox)
    split = task.splits[0]
    print(f"{task.name} ({task.source}): {task.metric}, {task.direction}, on the {split} part\n")
    print(f"{'':32}{'score':>12}{'improvement':>13}")
    print_row(task, "baseline", task.baseline)
    if task.reference is not None:
        print_row(task, "reference", task.reference)
    verdict = "No rule has a score: give the task a `trivial:` one."
    reason = None
    rules = list(trivial_rules(task))
    for rule, artefacts in rules:
        score = grade(task, artefacts, split, make_sandbox)
        print_score(task, rule, score)
        if score.valid:
            verdict = "not degenerate, as far as these rules tell"
            if not reason and at_the_top(score.value, task):
                reason = f"the rule {rule!r} scores {score.value:.4g}"
    rule, artefacts = rules[0]
    for split in task.splits[1:]:
        print_score(task, f"{rule}, {split}", grade(task, artefacts, split, make_sandbox))
    store(sanity_file(task), {"degenerate": reason})
    if reason := degenerate(task):
        verdict = f"degenerate: {reason}"
    print(f"\n{verdict}")
    for public, hidden in copies_of_hidden(task):
        print(f"warning  The agent can read {public}: it has the content of the hidden {hidden}.")


def copies_of_hidden(task: Task) -> list[tuple[str, str]]:
    """Workspace paths of public files that are not empty and equal a hidden one, with its path."""
    hidden = {content_key(file): path for path, file in task.hidden.items() if file.stat().st_size}
    pairs = []
    for path, file in task.public.items():
        if content_key(file) in hidden:
            pairs.append((path, hidden[content_key(file)]))
    return pairs


def install(task: Task, options: SandboxOptions) -> None:
    """Makes a Docker image with the task's requirements from the one of --image."""
    if not task.requirements:
        raise UserError(f"Task {task.name} has no requirements: it needs no image of its own.")
    tag = install_requirements(task, options.image)
    print(f"{task.name}: from now on image {tag} is used instead of {options.image}.")


# ------------------------------------------------------------------ start


def main(
    task: str = "",
    /,
    sandbox: SandboxOptions = SandboxOptions(),  # noqa: B008
    build_image: bool = False,
) -> None:
    """List all tasks, or score the trivial rules of one: is one of them already at the top?

    Args:
        task: Name of the task, or a Harbor task folder. Without one, all tasks are listed.
        sandbox: The kind of sandbox and what it offers.
        build_image: Install the task's requirements.txt in --image; later runs use the result.
    """
    if not task:
        list_tasks()
        return
    loaded = load_task(task)
    if build_image:
        install(loaded, sandbox)
    else:
        check(loaded, sandbox)


if __name__ == "__main__":
    import tyro

    from flatlab.runs.cli import one_sentence

    one_sentence(lambda: tyro.cli(main, config=(tyro.conf.OmitArgPrefixes,)))
