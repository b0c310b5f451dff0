"""Reads a task.yaml. It imports pydantic, which takes long, so that --help does without it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flatlab.errors import UserError
from flatlab.files import read_mapping
from flatlab.task.task_files import nearest


class TaskYaml(BaseModel):
    """The keys of a task.yaml. Files are relative to its folder."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    description: str = Field(min_length=1)  # the prompt
    metric: str = Field(min_length=1)  # key of the score in the grader's JSON line
    higher_is_better: bool
    baseline: float  # score of doing nothing clever, on the first of `splits`
    reference: float | None = None  # a good known score: an improvement of 1
    artefacts: list[str] = Field(min_length=1)  # what the agent has to write, see Task
    grader: str  # a Python file, called with grader_args and --split <name>
    grader_args: list[str | int | float] = []
    splits: list[str] = Field(["validation", "test"], min_length=1)  # see Task
    exact: bool = False  # the score is exact, see Task; replaces `splits`
    data: list[str] = []  # files that go to data/ in the workspace
    starter_code: list[str] = []  # files that go to the root of the workspace
    hidden: list[str] = []  # files that only a grading sandbox gets
    imported: list[str] = []  # Python artefacts that the grader imports, see Task.proxies
    hide_package_data: list[str] = []  # folders of Python packages with answers, see Task
    step_timeout: float = Field(60.0, gt=0)  # seconds for one action
    grade_timeout: float = Field(60.0, gt=0)  # seconds of CPU time for one grading
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
    keys = list(TaskYaml.model_fields)
    for key in spec:
        if key not in keys:
            raise UserError(f"{path}: unknown key {key!r}; {nearest(str(key), keys)}.")
    try:
        return TaskYaml(**spec)
    except ValidationError as error:
        first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        raise UserError(f"{path} lacks the key {where}.")
    raise UserError(f"{path}: {where}: {first['msg']}, not {str(first['input'])[:100]!r}.")
