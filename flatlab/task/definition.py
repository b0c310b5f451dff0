"""Tasks, and reading what a grader printed."""

import json
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import ROOT, content_key
from flatlab.numbers import LARGEST, number
from flatlab.task.listing import joined
from flatlab.task.value import improvement, score_text

MESSAGE_CHARS = 500  # limit of a grader's error message, which the agent reads

GRADE_KEYS = ("error", "stderr", "position", "higher_is_better")  # with a meaning of their own

# Fields that change neither an episode nor its score, and those that name files
NOT_SCORED = "name source degenerate trivial needs_gpu needs_network public hidden requirements"

TASKS_DIR = ROOT / "configs" / "tasks"
PROXY = TASKS_DIR / "proxy.py"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task. The keys of `public` and `hidden` are paths relative to the sandbox's workspace."""

    name: str
    prompt: str  # question; prompts.py adds how to reply, the files and the limits
    metric: str  # key of the score in the grader's JSON line
    higher_is_better: bool
    baseline: float  # score of doing nothing clever, on splits[0]
    reference: float | None = None  # a good known score: an improvement of 1
    artefacts: tuple[
        str, ...
    ]  # files to write: "a.csv", "dir/" (all in it), "*.yaml" (if any; also ?)
    # Shell command that makes the artefact of the workspace before each grading, so that the agent
    # writes none itself. A workspace that is still as it was given is no submission.
    collect: str = ""
    public: dict[str, Path]  # files of the agent's sandbox; an artefact among them is a starter
    hidden: dict[str, Path]  # answers and the pristine grader: only ever in a grading sandbox
    grader: tuple[str, ...]  # argv in the grading workspace; "{split}" is replaced
    # `validate` shows the first, search.py chooses among the best with "selection" if there is one,
    # and the last is scored once, at the end.
    splits: tuple[str, ...] = ("validation", "test")
    step_timeout: float = 60.0  # seconds for one action of the agent
    # Seconds in which a command of the agent uses no CPU and prints nothing; 0: no limit
    idle_timeout: float = 20.0
    grade_timeout: float = 60.0  # seconds of CPU time for one grading, of all its processes
    # The grader computes the score from what the agent hands in, without data or random numbers of
    # its own: there is one part, which is called "exact", and nothing to select.
    exact: bool = False
    needs_gpu: bool = False
    needs_network: bool = False
    source: str = "configs/tasks"  # where it comes from
    image: str = ""  # Docker image that only this task uses; empty: the one of --image
    requirements: Path | None = None  # pip requirements beyond what the image holds
    # Folders of Python packages that the agent's sandbox shows as empty because they hold answers,
    # such as sklearn/datasets/data.
    hide_package_data: tuple[str, ...] = ()
    # A known reason why the score says little; sanity.degenerate(task) knows measured ones, too.
    degenerate: str = ""
    trivial: dict[str, str] = field(default_factory=dict)  # rules: name -> text of the artefact
    # Python artefacts that the grader imports: the grading sandbox has PROXY under the name of such
    # a file, and the file as <name>_agent.py. The proxy runs it in a child process.
    imported: tuple[str, ...] = ()

    def __post_init__(self):
        """Raises UserError if the task makes no sense."""
        refuse_overlap(self.name, self.public.values(), self.hidden.values())
        joined(self.name, self.public, self.hidden)
        limits = self.step_timeout, self.grade_timeout
        needs = {
            "a name without spaces and slashes": re.fullmatch(r"[^\s/]+", self.name),
            "splits, each once": self.splits and len({*self.splits}) == len(self.splits),
            "hide_package_data such as sklearn/datasets/data": all(
                re.fullmatch(r"[A-Za-z_]\w*(/[^/]+)+", name) for name in self.hide_package_data
            ),
            "artefacts": self.artefacts,
            "artefacts in the workspace": not any(
                {"", ".", ".."} & {*name.removesuffix("/").split("/")} for name in self.artefacts
            ),
            "imported files that are Python artefacts": all(
                name.endswith(".py") and name in self.named_artefacts for name in self.imported
            ),
            "one artefact, a file, for its trivial rules": (
                not self.trivial or [*self.artefacts] == self.named_artefacts[:1]
            ),
            f"a metric with another name than {', '.join(GRADE_KEYS)}": (
                self.metric not in GRADE_KEYS
            ),
            "finite time limits above 0": all(0 < seconds < math.inf for seconds in limits),
            "an idle_timeout of at least 0": 0 <= self.idle_timeout < math.inf,
            "a finite baseline": math.isfinite(self.baseline),
        }
        for need, is_met in needs.items():
            if not is_met:
                raise UserError(f"Task {self.name} needs {need}.")
        if self.reference is not None and not improvement(self.reference, self) > 0:  # nan, too
            raise UserError(
                f"Task {self.name}: the reference {self.reference:g} must be better than the "
                f"baseline {self.baseline:g}, and {self.direction}."
            )

    @property
    def direction(self) -> str:
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def outline(self) -> str:
        """The name, where it comes from, the metric, its direction, the score of the baseline."""
        scores = f"{self.metric}, {self.direction}, baseline {score_text(self.baseline, self)}"
        return f"{self.name} ({self.source}): {scores}"

    @property
    def scale(self) -> dict:
        """Meaning of a score of the task, for result.json."""
        keys = ("metric", "higher_is_better", "baseline", "reference", "exact")
        return {key: getattr(self, key) for key in keys}

    @property
    def selected_on_test(self) -> bool:
        """True if it has a test part only: the best is chosen by the score that is reported."""
        return len(self.splits) == 1 and not self.exact

    def digest(self) -> str:
        """Changes with what is asked and how it is scored, the content of all files included."""
        files = self.public | self.hidden | {"the proxy": PROXY}
        if self.requirements:
            files["requirements"] = self.requirements
        parts = [repr(vars(self) | dict.fromkeys(NOT_SCORED.split()))]
        for path in sorted(files):
            parts += [path, files[path]]
        return content_key(*parts)

    def is_artefact(self, path: str) -> bool:
        """Returns whether the workspace path belongs to an artefact.

        The grading sandbox gets the agent's version of such a path and the host's version of any
        other one: an agent may change a public file, but not for the grader.
        """
        for artefact in self.artefacts:
            if artefact.endswith("/") and path.startswith(artefact):
                return True
            pattern = artefact.replace("[", "[[]")  # no wildcard: a name matches itself
            if path.count("/") == artefact.count("/") and fnmatchcase(path, pattern):
                return True
        return False

    @property
    def named_artefacts(self) -> list[str]:
        """Those that are one file each."""
        return [name for name in self.artefacts if name[-1] != "/" and not set(name) & set("*?")]

    @property
    def program(self) -> str:
        """The artefact if there is one and it is a Python program of the workspace; else ""."""
        [name, *others] = self.artefacts
        is_one = not others and name in self.named_artefacts
        is_program = is_one and name.endswith(".py") and "/" not in name
        return name if is_program else ""

    @property
    def fixed(self) -> dict[str, Path]:
        """The public files that an agent cannot hand in."""
        return {path: file for path, file in self.public.items() if not self.is_artefact(path)}

    def grading_files(self, artefacts: dict[str, bytes]) -> dict[str, bytes | Path]:
        """The grading workspace: the agent's artefacts, the host's version of everything else."""
        files = self.fixed
        for path, data in artefacts.items():
            if path in self.imported:
                files[path] = PROXY
                path = path.removesuffix(".py") + "_agent.py"
            files[path] = data
        return files | self.hidden


def refuse_overlap(task: str, public: Iterable[Path], hidden: Iterable[Path]) -> None:
    """Raises UserError if a hidden file is a public one, too, also through a link."""
    # All links to a file, hard ones included, have one device and inode.
    known = {(info.st_dev, info.st_ino) for info in map(Path.stat, public)}
    for path in hidden:
        info = path.stat()
        if (info.st_dev, info.st_ino) in known:
            raise UserError(f"Task {task}: {path} is hidden, so it cannot be a public file, too.")


def parse_grade(grade: dict, task: Task) -> tuple[float | None, str, bool]:
    """(score, "", True) of what a grader printed; or None, a sentence that is safe to show the
    agent, and whether it is the grader's own reason, so that the grader works.

    grade: see last_json_object. An error that is null, false, 0 or blank is none.
    """
    if error := str(grade.get("error") or "").strip():
        return None, error[:MESSAGE_CHARS], True
    if grade.get("higher_is_better", task.higher_is_better) != task.higher_is_better:
        return None, f"The task says that {task.direction}, and the grader the opposite.", False
    value = grade.get(task.metric)
    if number(value) is not None:
        return number(value), "", True
    if type(value) is float and math.isfinite(value):
        return None, f"The {task.metric} is no finite number below {LARGEST:g} in size.", True
    return None, f"The grader printed no finite number called {task.metric}.", False


def last_json_object(text: str) -> dict:
    """The last line of a grader's stdout that is a JSON object; {} if there is none."""
    for line in reversed(text.split("\n")):
        line = line.strip().rpartition("\r")[2]  # what overwrites a progress bar
        if line.startswith("{"):
            with suppress(ValueError, RecursionError):
                return json.loads(line, parse_int=float)  # an int has at most 4300 digits
    return {}
