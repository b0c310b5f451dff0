"""Attempts at the tasks of a suite: those of our runs, and published ones.

Both become the same table with a row for each attempt at a task. Its best score is the best of all
validates; the score of its submission is the last one.
"""

import itertools
import os
from pathlib import Path
from typing import Literal

import numpy as np
from typing_extensions import TypedDict  # of Python before 3.12, pydantic takes this one only

from flatlab.errors import UserError, nearest
from flatlab.files import ROOT, read_mapping, usable, validated
from flatlab.task.mledojo import mledojo_names
from flatlab.view.reader import RunData

ROOTS = {"mlgym_root": "MLGYM_ROOT", "mledojo_root": "MLEDOJO_ROOT"}  # arguments of load_task
KINDS = ["best attempt", "best submission"]
BASELINE = "baseline"  # name of its row


class Source(TypedDict):
    """A task of the published results; further keys are for the name of their files."""

    __pydantic_config__ = {"extra": "allow"}
    task: str
    metric: str
    higher_is_better: bool


class Published(TypedDict):
    files: str
    models: list[str]
    tasks: list[Source]


class SuiteYaml(TypedDict, total=False):
    """The keys of a suite, which mlgym.yaml explains."""

    __pydantic_config__ = {"extra": "forbid"}
    needs: Literal["", *ROOTS.values()]
    settings: dict
    notes: str
    published: Published


def read_suite(name: str) -> dict:
    """The file configs/suites/<name>.yaml, or the one at this path; mlgym.yaml explains its keys.
    Adds its name, the published attempts, and "roots": arguments of load_task that keep other tasks
    out.

    Raises UserError if there is no such file, if it is damaged, or if it needs a root that is not
    set or is empty.
    """
    path = Path(name) if name.endswith(".yaml") else ROOT / f"configs/suites/{name}.yaml"
    if not path.exists():
        known = sorted(file.stem for file in (ROOT / "configs/suites").glob("*.yaml"))
        raise UserError(f"There is no suite {name}; {nearest(name, known)}.")
    content = read_mapping(path)
    validated(SuiteYaml, content, path)
    suite = {"name": name, "needs": "", "settings": {}, "notes": ""} | content
    needs = suite["needs"]
    suite["roots"] = {}
    for option, variable in ROOTS.items():
        if variable != needs and os.environ.get(variable):
            suite["roots"][option] = ""  # it may hold other tasks of the same names
            print(f"note     the suite {name} does not use ${variable}")
    root = os.environ.get(needs, "")
    if needs and not root:
        raise UserError(f"The suite {name} needs ${needs}, the folder of its tasks.")
    root = Path(root)
    if needs == "MLEDOJO_ROOT":
        suite["settings"].setdefault("task", mledojo_names(root))
    with usable(path):
        suite["attempts"] = published(root, suite["published"]) if "published" in suite else []
    return suite


def attempt(model: str, task: str, larger: bool, scores: list) -> dict:
    """An attempt with its scores in order, None if not valid. larger: whether larger ones are
    better; if not, their sign is -1, so that the largest is the best.
    """
    sign = 1 if larger else -1
    gains = sign * np.array(scores, float)
    best = dict(zip(KINDS, (np.fmax.reduce(gains), gains[-1])))
    return best | {"model": model, "task": task, "sign": sign}


def attempts_of(run: RunData, suite: str) -> list[dict]:
    """The attempts of a run, with MEANS. A fault is none. Raises UserError if there are none, or if
    the run is an evaluation of something else than the suite of this name.
    """
    if Path(run.config.get("suite") or "").stem != suite:
        raise UserError(f"{run.dir} is no evaluation of the suite {suite}.")
    attempts = []
    for row, first_part in zip(run.rows, run.episodes):
        if row["outcome"] != "fault":
            scores = [*row["scores"], first_part["score"]]
            larger = run.result["larger_is_better"][row["task"]]
            means = {"valid": row["improvement"] is not None}
            attempts.append(row | means | attempt(str(run.dir), row["task"], larger, scores))
    if not attempts:
        raise UserError(f"In {run.dir} every episode was a fault.")
    return attempts


def published(root: Path, sources: dict) -> list[dict]:
    """The published attempts, and those of the baseline. Raises UserError if there are none."""
    attempts = []
    for model, source in itertools.product(sources["models"], sources["tasks"]):
        for file in sorted(root.glob(sources["files"].format(model=model, **source))):
            content = read_mapping(file)
            with usable(file):
                entries = {model: content.get("agent") or [{}], BASELINE: [content["baseline"]]}
                for name in entries:
                    scores = [entry.get(source["metric"]) for entry in entries[name]]
                    larger = source["higher_is_better"]
                    attempts.append(attempt(name, source["task"], larger, scores))
    if not attempts:
        raise UserError(f"{root} holds no published results: there is no {sources['files']}.")
    return attempts
