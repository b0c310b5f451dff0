"""The sanity check of a task: rules that need no idea, and whether one of them is already at the top."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from flatlab.cache import cache_dir, content_key
from flatlab.episode.loaders import TASKS_DIR
from flatlab.episode.task import Task, improvement

AT_THE_TOP = (
    0.98  # a trivial rule with this improvement, or this share of the way to a perfect score
)
PERFECT = {"accuracy": 1.0, "validation_accuracy": 100.0, "r2": 1.0}


def degenerate(task: Task) -> str | None:
    """Why the scores of a task say little, as its sanity check found or as is known; None when nothing is known."""
    stored = sanity_file(task)
    found = (
        json.loads(stored.read_text(encoding="utf-8"))["degenerate"] if stored.exists() else None
    )
    return "; ".join(filter(None, (task.degenerate, found))) or None


def sanity_file(task: Task) -> Path:
    """Where the result of the sanity check is kept; another file as soon as anything in the task changes."""
    facts = (
        task.metric,
        task.higher_is_better,
        task.baseline,
        task.reference,
        task.artefacts,
        task.grader,
        task.trivial,
    )
    key = content_key(repr(facts), *task.public.values(), *task.hidden.values())
    return cache_dir() / "sanity" / f"{task.name}-{key}.json"


def trivial_rules(task: Task) -> dict[str, dict[str, bytes]]:
    """name -> artefacts: the files as given, the task's own trivial rules, the sample submission, CSV rules."""
    rules = {name: {task.artefacts[0]: text.encode()} for name, text in task.trivial.items()}
    if set(task.artefacts) <= set(task.public):
        rules["as given"] = {
            artefact: task.public[artefact].read_bytes() for artefact in task.artefacts
        }
    if task.artefacts == ("submission.csv",):
        rules |= {
            path: {"submission.csv": file.read_bytes()}
            for path, file in task.public.items()
            if Path(path).name == "sample_submission.csv"
        }
        if {"data/train.csv", "data/test.csv"} <= set(task.public):
            files = task.public["data/train.csv"], task.public["data/test.csv"]
            argv = [sys.executable, TASKS_DIR / "trivial_csv.py", *files]
            done = subprocess.run(argv, capture_output=True, text=True)
            rules |= {
                name: {"submission.csv": text.encode()}
                for name, text in json.loads(done.stdout or "{}").items()
            }
    return rules


def at_the_top(score: float, task: Task) -> bool:
    """Whether a trivial rule's score leaves no room above it."""
    perfect = PERFECT.get(task.metric)
    return (
        task.reference is not None
        and improvement(score, task) >= AT_THE_TOP
        or perfect is not None
        and improvement(score, (task.baseline, task.higher_is_better, perfect)) >= AT_THE_TOP
    )
