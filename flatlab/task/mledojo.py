"""Competitions that MLE-Dojo prepared: <root>/<name>/data/public and data/private."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from flatlab.errors import UserError
from flatlab.task.definition import TASKS_DIR, Task, last_json_object
from flatlab.task.listing import tree_files

PROMPT_CHARS = 8000  # limit of a description; the whole text is in the workspace
ERROR_CHARS = 300  # end of the output of a metric that cannot be run
NEEDED = ("public/description.txt", "public/sample_submission.csv", "private/test_answer.csv")


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
        tree_files(data / needed, "", hint)
    # Without $MLEDOJO_REPO, `root` is taken for a folder like data/prepared in a checkout.
    repo = Path(os.environ.get("MLEDOJO_REPO") or root.parent.parent).resolve()
    metric = repo / "mledojo/competitions" / name / "utils/metric.py"
    hidden |= tree_files(metric, "metric.py", "set $MLEDOJO_REPO to a checkout of MLE-Dojo")
    hidden["grade_mledojo.py"] = TASKS_DIR / "grade_mledojo.py"
    facts = describe(hidden | {"submission.csv": public["data/sample_submission.csv"]})
    up = facts["higher_is_better"]
    baseline = facts.get("score", facts["last"])
    if baseline is None:
        raise UserError(
            f"The sample submission of {name} cannot be graded ({facts['error']}); {hint}."
        )
    reference = facts["median"]
    if reference is not None and (reference <= baseline if up else reference >= baseline):
        reference = None
    split = "{split}" if facts["parts"] else "all"
    text = public["data/description.txt"].read_text(encoding="utf-8", errors="replace").strip()
    if len(text) > PROMPT_CHARS:
        text = f"{text[:PROMPT_CHARS]}\n[the rest is in data/description.txt]"
    return Task(
        name=name,
        prompt=f"{text}\n\nThe data is in data/. Write submission.csv in the form of "
        f"data/sample_submission.csv. {'Higher' if up else 'Lower'} scores are better.",
        metric="score",
        higher_is_better=up,
        baseline=baseline,
        reference=reference,
        artefacts=("submission.csv",),
        public=public,
        hidden=hidden,
        grader=("python3", "-I", "grade_mledojo.py", "--split", split),
        splits=("validation", "selection", "test") if facts["parts"] else ("test",),
        step_timeout=600.0,
        grade_timeout=600.0,
        source="mledojo",
    )


def describe(files: dict[str, Path]) -> dict:
    """Reads what `grade_mledojo.py --describe` says about a competition.

    All files are the user's own, so it runs without a sandbox. Raises UserError if the metric
    cannot be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        for path, source in files.items():
            link = Path(folder, path)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)
        argv = [sys.executable, "-I", "grade_mledojo.py", "--describe"]
        done = subprocess.run(argv, cwd=folder, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise UserError(
            f"The metric {files['metric.py']} cannot be run by {sys.executable}: "
            f"{' '.join(done.stderr.split())[-ERROR_CHARS:]}"
        )
    return last_json_object(done.stdout)
