"""Built-in tasks: configs/tasks/<name>/task.yaml. Its folder's name is the task's name."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from flatlab.errors import UserError, nearest
from flatlab.files import TextLoader, read_mapping, validated
from flatlab.task.definition import Task
from flatlab.task.listing import joined, tree_files


@dataclass
class TaskYaml:
    """The keys of a task.yaml that Task has not, or that name files relative to its folder."""

    description: str  # prompt
    grader: str  # a Python file, called with grader_args and --split <name>
    grader_args: tuple[str, ...] = ()  # as they stand in the file: yes is no boolean
    data: tuple[str, ...] = ()  # files that go to data/ in the workspace
    starter_code: tuple[str, ...] = ()  # files that go to the root of the workspace
    hidden: tuple[str, ...] = ()  # files that only a grading sandbox gets


# The keys that go to Task as they are
TASK_KEYS = """metric higher_is_better baseline reference artefacts splits exact
step_timeout idle_timeout grade_timeout needs_gpu needs_network hide_package_data degenerate trivial
imported""".split()


def builtin_names(root: Path) -> list[str]:
    """Names of the tasks in configs/tasks: every folder there with a task.yaml."""
    return sorted(path.parent.name for path in root.glob("*/task.yaml"))


def load_builtin(root: Path, name: str) -> Task:
    """Loads <root>/<name>/task.yaml. Raises UserError naming what is wrong or missing."""
    folder = root / name
    path = folder / "task.yaml"
    spec = read_mapping(path)
    keys = [*TASK_KEYS, *(field.name for field in fields(TaskYaml))]
    for key in spec:
        if key not in keys:
            raise UserError(f"{path}: unknown key {key!r}; {nearest(str(key), keys)}.")
    texts = read_mapping(path, loader=TextLoader)
    given = validated(TaskYaml, spec | {"grader_args": texts.get("grader_args", [])}, path)
    if spec.get("exact"):
        spec["splits"] = ["exact"]
    public = joined(
        name, find_files(folder, given.starter_code), find_files(folder, given.data, "data/")
    )
    # -I: Python imports nothing from the workspace.
    grader = ["python3", "-I", Path(given.grader).name, *given.grader_args]
    more = {
        "name": name,
        "prompt": given.description.strip(),
        "public": public,
        "hidden": find_files(folder, (given.grader, *given.hidden)),
        "grader": [*grader, "--split", "{split}"],
    }
    task = validated(Task, spec | more, path)
    if any(map(task.is_artefact, task.hidden)):
        raise UserError(f"Task {name} needs artefacts that are not hidden files.")
    return task


def find_files(folder: Path, names: tuple[str, ...], prefix: str = "") -> dict[str, Path]:
    """Maps workspace paths to files of the task's folder. Raises UserError if one is missing, or if
    two names would have one place.
    """
    parts = []
    hint = f"task.yaml in {folder} names it"
    for name in names:
        source = Path(os.path.normpath(folder / name))
        parts.append(tree_files(source, prefix + source.name, hint))
    return joined(folder.name, *parts)
