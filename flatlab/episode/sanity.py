"""The sanity check of a task: rules that need no idea, and whether one of them is at the top."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from flatlab.cache import cache_dir, content_key
from flatlab.episode.task import Task, improvement
from flatlab.episode.task_files import TASKS_DIR

AT_THE_TOP = 0.98  # improvement towards the reference, or towards a perfect score
PERFECT = {"accuracy": 1.0, "validation_accuracy": 100.0, "r2": 1.0}


def degenerate(task: Task) -> str | None:
    """Why the scores of a task say little: known, or found by its sanity check. None if neither."""
    reasons = [task.degenerate]
    stored = sanity_file(task)
    if stored.exists():
        reasons.append(json.loads(stored.read_text(encoding="utf-8"))["degenerate"])
    return "; ".join(reason for reason in reasons if reason) or None


def sanity_file(task: Task) -> Path:
    """Where the result of the sanity check is kept. The name changes with anything in the task."""
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
    """Name of a rule -> its artefacts.

    The rules are the task's own ones, the public files as they are, the sample submission, and
    for data/train.csv and data/test.csv those of configs/tasks/trivial_csv.py.
    """
    rules = {}
    for name, text in task.trivial.items():
        rules[name] = {task.artefacts[0]: text.encode()}
    if set(task.artefacts) <= set(task.public):
        rules["as given"] = {name: task.public[name].read_bytes() for name in task.artefacts}
    if task.artefacts != ("submission.csv",):
        return rules
    for path, file in task.public.items():
        if Path(path).name == "sample_submission.csv":
            rules[path] = {"submission.csv": file.read_bytes()}
    if {"data/train.csv", "data/test.csv"} <= set(task.public):
        files = task.public["data/train.csv"], task.public["data/test.csv"]
        argv = [sys.executable, TASKS_DIR / "trivial_csv.py", *files]
        done = subprocess.run(argv, capture_output=True, text=True)
        for name, text in json.loads(done.stdout or "{}").items():
            rules[name] = {"submission.csv": text.encode()}
    return rules


def at_the_top(score: float, task: Task) -> bool:
    """Whether the score of a trivial rule leaves no room above it."""
    if task.reference is not None and improvement(score, task) >= AT_THE_TOP:
        return True
    perfect = PERFECT.get(task.metric)
    if perfect is None:
        return False
    return improvement(score, (task.baseline, task.higher_is_better, perfect)) >= AT_THE_TOP
