"""Built-in tasks: configs/tasks/<name>/task.yaml. The folder's name is the task's name."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flatlab.episode.task import Task
from flatlab.episode.task_files import TASKS_DIR, nearest, proxies, tree_files
from flatlab.errors import UserError
from flatlab.files import read_mapping


class TaskYaml(BaseModel):
    """The keys of a task.yaml. Files are relative to its folder."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    description: str = Field(min_length=1)  # the prompt
    metric: str = Field(min_length=1)  # key of the score in the grader's JSON line
    higher_is_better: bool
    baseline: float  # score of doing nothing clever, on the first of `splits`
    reference: float | None = None  # a good known score: an improvement of 1
    artefacts: list[str] = Field(min_length=1)  # what the agent has to write, see Task
    grader: str  # a Python file, called with grader_args and --split <name>
    grader_args: list[str | int | float] = []
    splits: list[str] = Field(["validation", "test"], min_length=1)  # see Task
    data: list[str] = []  # files that go to data/ in the workspace
    starter_code: list[str] = []  # files that go to the root of the workspace
    hidden: list[str] = []  # files that only a grading sandbox gets
    imported: list[str] = []  # Python artefacts that the grader imports, see Task.proxies
    hide_package_data: list[str] = []  # folders of Python packages with answers, see Task
    step_timeout: float = Field(60.0, gt=0)  # seconds for one action
    grade_timeout: float = Field(60.0, gt=0)  # seconds for one grading
    needs_gpu: bool = False
    needs_network: bool = False
    trivial: dict[str, str] = {}  # rules that need no idea: name -> text of the artefact
    degenerate: str = ""  # a known reason why the score says little

    @field_validator("artefacts")
    @classmethod
    def inside_the_workspace(cls, artefacts: list[str]) -> list[str]:
        for artefact in artefacts:
            if artefact.startswith("/") or ".." in artefact.split("/"):
                raise ValueError(f"{artefact!r} does not lie in the workspace")
        return artefacts


def read_task_yaml(path: Path) -> TaskYaml:
    """Reads and checks a task.yaml. Raises UserError naming the file and the first wrong key."""
    spec = read_mapping(path)
    known = list(TaskYaml.model_fields)
    for key in spec:
        if key not in known:
            raise UserError(f"{path}: unknown key {key!r}; {nearest(str(key), known)}.")
    try:
        return TaskYaml(**spec)
    except ValidationError as error:
        first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        raise UserError(f"{path} lacks the key {where}.")
    raise UserError(f"{path}: {where}: {first['msg']}, not {str(first['input'])[:100]!r}.")


def builtin_names(root: Path = TASKS_DIR) -> list[str]:
    """Names of the tasks in configs/tasks: every folder there with a task.yaml."""
    return sorted(path.parent.name for path in root.glob("*/task.yaml"))


def load_builtin(root: Path, name: str) -> Task:
    """Loads <root>/<name>/task.yaml. Raises UserError naming what is wrong or missing."""
    folder = root / name
    spec = read_task_yaml(folder / "task.yaml")
    public = find_files(folder, spec.starter_code, "") | find_files(folder, spec.data, "data/")
    hidden = find_files(folder, [spec.grader, *spec.hidden], "")
    # -I: Python imports nothing from the workspace.
    grader = ["python3", "-I", Path(spec.grader).name, *map(str, spec.grader_args)]
    renamed = ("description", "grader", "grader_args", "data", "starter_code", "hidden", "imported")
    fields = spec.model_dump(exclude=set(renamed))
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
