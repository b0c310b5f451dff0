"""Reads run directories. Their layout is described in store.py, which writes them."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

from flatlab.errors import UserError
from flatlab.files import read_mapping


def read_rows(path) -> list[dict]:
    """All complete lines of a jsonl file, also of one with gzip; [] without a file. UserError if a
    line is damaged.
    """
    rows = []
    try:
        content = Path(path).read_bytes()
        if Path(path).suffix == ".gz":
            content = gzip.decompress(content)
        for line in content.split(b"\n")[:-1]:
            rows.append(dict(json.loads(line)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged: line {len(rows) + 1} is not a JSON object.") from None
    return rows


def number(value) -> float | None:
    """`value` as a float if it is a finite number, else None: a row may hold anything."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def duration(seconds: float | None) -> str:
    """'0m48s', '3m20s', '2h05m'; '-' for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def count(number: float, noun: str) -> str:
    """'1 node', '2 nodes', '0.5 nodes'."""
    return f"{number:.9g} {noun}" if number == 1 else f"{number:.9g} {noun}s"


def value_text(value) -> str:
    """A setting in a name: the last part of a path; numbers short; of a list all parts."""
    if isinstance(value, list):
        return " ".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rstrip("/").removesuffix("/best").split("/")[-1]


def result_text(value) -> str:
    """A value of result.json for people; nested ones as "key value  key value"."""
    if isinstance(value, dict):
        return "  ".join(f"{key} {result_text(part)}" for key, part in value.items())
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def standard_error(values: list[float]) -> float | None:
    """Standard error of the mean; None below two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def plus_minus(mean: float | None, error: float | None, sign: str = "") -> str:
    """'0.7512 ± 0.0101'; "-" without a mean."""
    if mean is None:
        return "-"
    return f"{mean:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def fill(form: str, row: dict) -> str:
    """The form with the numbers of a row; "-" if one of them is missing or None."""
    try:
        return form.format_map(row)
    except (KeyError, TypeError):
        return "-"


# ------------------------------------------------------------------ runs

# What result.json holds from the first step or node on
NEEDED = {"metric", "higher_is_better", "baseline", "reference", "selected_on_test"}


@dataclass(frozen=True)
class RunData:
    """A run as it is on the disk.

    kind "grpo": rows are training steps; "search": rows are nodes, in order of completion;
    "evaluation": the same, but the nodes are independent episodes. fingerprint: of the code, the
    tasks and the model that made the run; {} if it was not recorded.
    """

    dir: Path
    kind: str
    config: dict
    rows: list[dict]
    result: dict
    fingerprint: dict

    @property
    def name(self) -> str:
        return self.dir.resolve().name

    @property
    def status(self) -> str:
        """The status in result.json; "killed" if it is "running" but no process writes."""
        status = str(self.result.get("status") or "unknown")
        return "killed" if status == "running" and not locked(self.dir) else status

    @property
    def tasks(self) -> str:
        """The name of the task, or several joined by "+"."""
        task = self.config["task"]
        return "+".join(task) if isinstance(task, list) else task

    @property
    def higher_is_better(self) -> bool:
        return self.result["higher_is_better"]

    @property
    def baseline(self) -> float:
        return self.result["baseline"]

    @property
    def is_mixed(self) -> bool:
        """Whether its code changed while it went on."""
        return len(self.fingerprint.get("code", [])) > 1


def locked(directory: Path) -> bool:
    """True if the process named in the lock file lives. Taking the lock could stop a writer."""
    try:
        pid = int((directory / ".lock").read_text())
    except (OSError, ValueError):
        return False
    return Path(f"/proc/{pid}").exists()


def read_run(directory) -> RunData:
    """A finished or running run. Raises UserError if there is nothing to show."""
    path = Path(directory)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml.")
    config = read_mapping(path / "config.yaml")
    fingerprint = config.pop("fingerprint", {})
    kind, rows = "grpo", read_rows(path / "metrics.jsonl")
    if "sampling_mode" in config:
        kind, rows = "search", read_rows(path / "journal.jsonl")
    if not rows:
        what = "step" if kind == "grpo" else "node"
        raise UserError(f"{path} has no finished {what} yet: nothing to show.")
    result = read_mapping(path / "result.json")
    missing = ", ".join(sorted(NEEDED - {*result}))
    if missing:
        raise UserError(
            f"{path} was made by another version: its result.json has no {missing}. "
            "git.txt names the commit."
        )
    if kind == "search":
        rows = [node_row(row, result["baseline"]) for row in rows]
        kind = "evaluation" if result.get("evaluation") else "search"
    return RunData(path, kind, config, rows, result, fingerprint)


def find_runs(paths: Sequence[Path]) -> tuple[list[RunData], list[str]]:
    """The runs in these directories and one sentence for each that cannot be shown.

    The directory of a grid stands for its cells. Among several paths plain files are skipped,
    because logs/* also names the pictures that viz.py wrote there.
    """
    runs, errors = [], []
    paths = [path for path in paths if len(paths) == 1 or not path.is_file()]
    for path in paths:
        directories = [path]
        if not (path / "config.yaml").is_file():
            directories = sorted(cell.parent for cell in path.glob("*/config.yaml")) or [path]
        for directory in directories:
            try:
                runs.append(read_run(directory))
            except UserError as error:
                errors.append(str(error))
    return runs, errors


def node_row(row: dict, baseline: float) -> dict:
    """A row of the journal with its outcome and the score that tables count.

    counted: a failed node has the baseline's score, a fault None.
    """
    outcome = outcome_of(row["status"], row["valid"])
    counted = {"valid": row["score"], "failed": baseline, "fault": None}[outcome]
    return row | {"outcome": outcome, "counted": counted}


def outcome_of(status: str, is_valid: bool) -> str:
    if status == "fault":
        return "fault"
    return "valid" if is_valid else "failed"


# ------------------------------------------------------------------ transcripts


def transcripts(run: RunData, file_filter: Callable = str.isdigit) -> list[dict]:
    """The episodes or nodes of a run in one form, in the order of the files and of nodes.

    file_filter: predicate of the names of the files as ids show them: "12" (a step of training),
    "before", "eval-9", "final-best"; by default the steps. A search has nodes alone.

    Keys: id ("12/3", "eval-9/3" = file and number; "0.2.1" = node), outcome ("valid",
    "failed", "fault"), status, score (None unless valid), tokens, seconds, error, system and
    prompt (the first messages), turns.
    Episodes also have seed, group ("12/0" = file and number), test_score (as score) and reward
    (None for a fault); nodes also parent, op, sampling_mode, idea, code, diff, decision.
    """
    return [item for part in transcript_parts(run, file_filter) for item in read_part(run, part)]


def transcript_parts(run: RunData, file_filter: Callable = str.isdigit) -> list:
    """What transcripts() reads one after the other: rows of nodes, or files as (name, path)."""
    if run.kind != "grpo":
        return run.rows
    paths = sorted((run.dir / "episodes").glob("*.jsonl"))
    files = [(re.sub(r"0*(\d+)$", r"\1", path.stem), path) for path in paths]
    return [(name, path) for name, path in files if file_filter(name)]


def read_part(run: RunData, part) -> list[dict]:
    """The transcripts of one of transcript_parts()."""
    if run.kind != "grpo":
        return [node_item(part, run.dir)]
    name, path = part
    return [episode_item(row, name, index) for index, row in enumerate(read_rows(path))]


def episode_item(row: dict, name: str, index: int) -> dict:
    score = row["score"] or {"valid": False, "value": None, "message": row["fault"]}
    test_score = row.get("test_score") or {"value": None}
    return row | {
        "id": f"{name}/{index}",
        "group": f"{name}/{row.get('group')}",
        "outcome": outcome_of(row["status"], score["valid"]),
        "score": score["value"] if score["valid"] else None,
        "test_score": test_score["value"],
        "tokens": row["reply_tokens"],
        "error": "" if score["valid"] else with_grader_output(score["message"], score),
    }


def node_item(row: dict, directory: Path) -> dict:
    """system, prompt: what the model was told; "" if the node's transcript is missing."""
    told = {"system": "", "prompt": ""}
    for episode in read_rows(directory / "episodes" / f"{row['order']:06d}.jsonl"):
        if episode["node"] == row["id"]:
            told = {key: episode.get(key, "") for key in told}
    error = with_grader_output(row["error"], row)
    return row | told | {"turns": row["actions"], "error": error}


def observed(turn: dict) -> str:
    """What the model read after a reply, without a limit of its length."""
    return "\n".join(filter(None, [turn["observation"], turn.get("note")]))


def with_grader_output(error: str, row: dict) -> str:
    """The error for the user: with what a grader printed that gave neither score nor reason."""
    return "\n".join(filter(None, [error, row.get("grader_output")]))
