"""What is asked and how it is scored: a task, the reading of a grade, and the one measure of improvement."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

MESSAGE_CHARS = 500  # an error message of a grader is cut here: it goes into the agent's context


@dataclass(frozen=True)
class Task:
    """One task. Paths on the left of `public` and `hidden` are relative to the workspace of the sandbox."""

    name: str
    prompt: str  # what is asked; how to reply and what lies in the workspace is added by env.py
    metric: str  # key of the score in the grader's JSON line
    higher_is_better: bool
    baseline: float  # score of doing nothing clever, on splits[0]
    reference: (
        float | None
    )  # a good known score; improvement is measured in units of |reference - baseline|
    artefacts: tuple[
        str, ...
    ]  # what the agent has to write: "a.csv", "folder/" (all in it), "*.yaml" (if there)
    public: dict[
        str, Path
    ]  # goes into the agent's sandbox; one that is an artefact is a starter for it
    hidden: dict[str, Path]  # answers and the pristine grader: only ever in a grading sandbox
    grader: tuple[str, ...]  # argv in the grading sandbox's workspace; "{split}" is replaced
    splits: tuple[str, ...]  # validate shows the first; the last one is scored once, at the end
    step_timeout: float  # seconds for one action of the agent
    grade_timeout: float  # seconds for one grading
    needs_gpu: bool = False
    needs_network: bool = False
    source: str = "built-in"  # "built-in" | "mlgym" | "mledojo"
    requirements: Path | None = (
        None  # pip requirements of agent and grader, beyond what the image holds
    )
    # Folders of Python packages, such as sklearn/datasets/data, that the agent's sandbox shows as empty: answers lie there.
    forget: tuple[str, ...] = ()
    degenerate: str = (
        ""  # a known reason why the score says little; degenerate(task) knows measured ones too
    )
    trivial: dict[str, str] = field(
        default_factory=dict
    )  # name -> text of the artefact: rules that need no idea
    # artefact -> (proxy, name): the grading sandbox holds the proxy under the artefact's name, and what the agent wrote
    # under the other name. For graders that import the agent's code; the proxy runs that code in a child process.
    proxies: dict[str, tuple[Path, str]] = field(default_factory=dict)

    def is_artefact(self, path: str) -> bool:
        """Whether the workspace path belongs to an artefact. The grading sandbox gets the agent's version of such a
        path and the host's version of any other one, so that a public file can be changed, but not for the grader."""
        return any(
            path.startswith(artefact)
            if artefact.endswith("/")
            else path.count("/") == artefact.count("/") and fnmatchcase(path, artefact)
            for artefact in self.artefacts
        )

    def grading_files(self, artefacts: dict[str, bytes]) -> dict[str, bytes | Path]:
        """What the grading sandbox's workspace holds: the agent's version of the artefacts, the host's of all else."""
        files = {path: source for path, source in self.public.items() if not self.is_artefact(path)}
        for path, data in artefacts.items():
            proxy, name = self.proxies.get(path, (data, path))
            files |= {path: proxy, name: data}
        return files | self.hidden

    def grader_argv(self, split: str) -> list[str]:
        """The grading command for one of `splits`. Raises ValueError for any other split."""
        if split not in self.splits:
            raise ValueError(
                f"task {self.name} has the splits {', '.join(self.splits)}, not {split!r}"
            )
        return [part.replace("{split}", split) for part in self.grader]


def parse_grade(stdout: str, task: Task) -> tuple[float | None, str]:
    """Read the score out of a grader's stdout: its last line that is a JSON object.

    Returns (score, "") or, when there is no usable score, (None, one sentence that is safe to show the agent).
    """
    grade = last_json_object(stdout)
    if grade is None:
        return None, "The grader printed no result."
    if "error" in grade:
        return None, str(grade["error"])[:MESSAGE_CHARS]
    by_lower_case = {key.lower(): value for key, value in grade.items()}
    value = grade.get(task.metric, by_lower_case.get(task.metric.lower()))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None, f"The grader's result has no number called {task.metric}."
    try:
        value = float(value)
    except OverflowError:  # an integer beyond all floats
        value = math.inf
    if not math.isfinite(value):
        return None, f"The {task.metric} is not a finite number."
    return value, ""


def parse_position(stdout: str, task: Task) -> float | None:
    """The place on the leaderboards, 0 to 1, that grade_mledojo.py prints beside the score; None for other tasks."""
    value = (last_json_object(stdout) or {}).get("position") if task.source == "mledojo" else None
    return float(value) if isinstance(value, (int, float)) else None


def last_json_object(text: str) -> dict | None:
    for line in reversed(text.splitlines()):
        if line.strip().startswith("{"):
            try:
                return json.loads(line)
            except (ValueError, RecursionError):
                continue
    return None


def improvement(score: float, task: Task | tuple[float, bool, float | None]) -> float:
    """How much better than the baseline: 0 at the baseline, 1 at the reference, negative below, unbounded above.

    `task` is a Task or (baseline, higher_is_better, reference). Without a reference the unit is |baseline|, or 1
    where that is 0. This is the only place that knows about the direction of a metric: rewards, selection, tables
    and plots all call it.
    """
    baseline, higher_is_better, reference = (
        (task.baseline, task.higher_is_better, task.reference) if isinstance(task, Task) else task
    )
    gain = score - baseline if higher_is_better else baseline - score
    unit = abs(baseline) if reference is None else abs(reference - baseline)
    return gain / (unit or 1.0)
