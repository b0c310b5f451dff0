"""Built-in tasks: configs/tasks/<name>/task.yaml. The folder's name is the task's name."""

from __future__ import annotations

from pathlib import Path

from flatlab.errors import UserError
from flatlab.task.definition import Task
from flatlab.task.task_files import TASKS_DIR, proxies, tree_files


def builtin_names(root: Path = TASKS_DIR) -> list[str]:
    """Names of the tasks in configs/tasks: every folder there with a task.yaml."""
    return sorted(path.parent.name for path in root.glob("*/task.yaml"))


def load_builtin(root: Path, name: str) -> Task:
    """Loads <root>/<name>/task.yaml. Raises UserError naming what is wrong or missing."""
    from flatlab.task.task_yaml import read_task_yaml

    folder = root / name
    spec = read_task_yaml(folder / "task.yaml")
    public = find_files(folder, spec.starter_code, "") | find_files(folder, spec.data, "data/")
    hidden = find_files(folder, [spec.grader, *spec.hidden], "")
    # -I: Python imports nothing from the workspace.
    grader = ["python3", "-I", Path(spec.grader).name, *map(str, spec.grader_args)]
    renamed = {"description", "grader", "grader_args", "data", "starter_code", "hidden", "imported"}
    fields = spec.model_dump(exclude=renamed)
    if spec.exact:
        fields["splits"] = ["exact"]
    for key in ("artefacts", "splits", "hide_package_data"):
        fields[key] = tuple(fields[key])
    task = Task(
        name=name,
        prompt=spec.description.strip(),
        public=public,
        hidden=hidden,
        grader=(*grader, "--split", "{split}"),
        proxies=proxies(spec.imported),
        **fields,
    )
    for path in public | hidden:
        if task.is_artefact(path):  # otherwise a file that the agent did not write could be graded
            raise UserError(
                f"Task {name}: {path} is an artefact, so it cannot be one of the task's own files."
            )
    return task


def find_files(folder: Path, names: list[str], prefix: str) -> dict[str, Path]:
    """Maps workspace paths to files of the task's folder. Raises UserError if one is missing."""
    files = {}
    hint = f"task.yaml in {folder} names it"
    for name in names:
        files |= tree_files((folder / name).resolve(), prefix + Path(name).name, hint)
    return files
