"""Competitions that MLE-Dojo prepared: <root>/<name>/data/public and data/private."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import cache_dir, content_key, store
from flatlab.task.definition import Task, last_json_object
from flatlab.task.task_files import TASKS_DIR, tree_files

PROMPT_CHARS = 8000  # of a competition's description; the whole text is in the workspace
NEEDED = ("data/description.txt", "data/sample_submission.csv", "private/test_answer.csv")


def mledojo_names(root: Path) -> list[str]:
    """Names of the competitions in a prepared folder. Raises UserError if there is none."""
    names = sorted(path.parent.parent.name for path in root.glob("*/data/public"))
    if not names:
        raise UserError(
            f"{root} holds no competition that MLE-Dojo prepared: "
            "there is no <name>/data/public in it."
        )
    return names


def load_mledojo(root: Path, name: str) -> Task:
    """Loads a prepared competition. private/ is hidden; answers with ids are split into parts.

    The baseline is the score of the sample submission, or the last place of the leaderboards if
    that cannot be graded. The reference is the median of the leaderboards if that is better than
    the baseline. Raises UserError.
    """
    hint = f"let MLE-Dojo prepare {name} again"
    data = root / name / "data"
    public = tree_files(data / "public", "data", hint)
    hidden = tree_files(data / "private", "private", hint)
    for needed in NEEDED:
        if needed not in public | hidden:
            raise UserError(f"{data / needed.replace('data/', 'public/')} is missing; {hint}.")
    hidden["metric.py"] = metric_file(root, name)
    hidden["grade_mledojo.py"] = TASKS_DIR / "grade_mledojo.py"
    facts = describe(hidden | {"submission.csv": public["data/sample_submission.csv"]})
    up = facts["higher_is_better"]
    baseline = facts.get("score", facts["last"])
    if baseline is None:
        raise UserError(
            f"The sample submission of {name} cannot be graded ({facts['error']}); {hint}."
        )
    median = facts["median"]
    is_better = median is not None and (median > baseline if up else median < baseline)
    split = "{split}" if facts["parts"] else "all"
    return Task(
        name=name,
        prompt=prompt(public["data/description.txt"], up),
        metric="score",
        higher_is_better=up,
        baseline=baseline,
        reference=median if is_better else None,
        artefacts=("submission.csv",),
        public=public,
        hidden=hidden,
        grader=("python3", "-I", "grade_mledojo.py", "--split", split),
        splits=("validation", "selection", "test") if facts["parts"] else ("test",),
        step_timeout=600.0,
        grade_timeout=600.0,
        source="mledojo",
    )


def prompt(description: Path, higher_is_better: bool) -> str:
    """The competition's description, cut if it is long, and what to write."""
    text = description.read_text(encoding="utf-8", errors="replace").strip()
    more = "\n[the rest is in data/description.txt]" if len(text) > PROMPT_CHARS else ""
    way = "Higher" if higher_is_better else "Lower"
    return (
        f"{text[:PROMPT_CHARS]}{more}\n\nThe data is in data/. Write submission.csv in the form of "
        f"data/sample_submission.csv. {way} scores are better."
    )


def metric_file(root: Path, name: str) -> Path:
    """The competition's metric.py.

    It is looked up in the checkout $MLEDOJO_REPO, then in every folder that `root` lies in.
    """
    places = [root, *root.parents]
    if repo := os.environ.get("MLEDOJO_REPO"):
        places.insert(0, Path(repo))
    for place in places:
        path = place / "mledojo" / "competitions" / name / "utils" / "metric.py"
        if path.is_file():
            return path.resolve()
    raise UserError(
        f"The metric of {name} is missing: set $MLEDOJO_REPO to a checkout of MLE-Dojo that has "
        f"mledojo/competitions/{name}/utils/metric.py."
    )


def describe(files: dict[str, Path]) -> dict:
    """What `grade_mledojo.py --describe` says about a competition.

    All files are the user's own, so it runs without a sandbox. The result is cached under the
    content of the files. Raises UserError if the metric cannot be run.
    """
    stored = cache_dir() / "mledojo" / f"{content_key(*files.values())}.json"
    if not stored.exists():
        with tempfile.TemporaryDirectory() as folder:
            for path, source in files.items():
                link = Path(folder, path)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
            argv = [sys.executable, "-I", "grade_mledojo.py", "--describe"]
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise UserError(
                f"The metric {files['metric.py']} cannot be run by {sys.executable}: "
                f"{lines[-1] if lines else 'no message'}"
            )
        store(stored, last_json_object(done.stdout))
    return json.loads(stored.read_text(encoding="utf-8"))
