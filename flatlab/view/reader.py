"""Reads run directories. Their layout is described in runs/store.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_mapping, read_rows
from flatlab.task.value import value_of

# What result.json holds from the first step or node on
NEEDED = {"metric", "higher_is_better", "baseline", "reference", "selected_on_test", "value"}


@dataclass(frozen=True)
class RunData:
    """A run as it is on the disk.

    kind: "training", "search" or "evaluation". rows: training steps, or nodes in order of
    completion; the nodes of an evaluation are independent episodes. rounds: of a search that
    learns. fingerprint: of the code, the tasks and the model that made the run; {} if it was not
    recorded.
    """

    dir: Path
    kind: str
    has_nodes: bool
    config: dict
    rows: list[dict]
    rounds: list[dict]
    result: dict
    fingerprint: dict

    @property
    def name(self) -> str:
        return self.dir.resolve().name

    @property
    def status(self) -> str:
        """The status in result.json; "killed" if it is "running" but the process that holds the
        lock has ended. Taking the lock could stop a writer.
        """
        lock = self.dir / ".lock"
        pid = lock.read_text().strip() if lock.exists() else "none"
        status = self.result.get("status", "unknown")
        return "killed" if status == "running" and not Path("/proc", pid).exists() else status

    @property
    def tasks(self) -> str:
        """The name of the task, or several joined by "+"."""
        task = self.config["task"]
        return "+".join(task) if isinstance(task, list) else task

    @property
    def higher_is_better(self) -> bool:
        return self.result["higher_is_better"]

    @property
    def direction(self) -> str:
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def baseline(self) -> float:
        return self.result["baseline"]

    @property
    def reference(self) -> float | None:
        return self.result["reference"]

    @property
    def has_one_task(self) -> bool:
        """True if its scores have one unit."""
        return isinstance(self.config["task"], str) or len(self.config["task"]) == 1


def read_run(directory) -> RunData:
    """A finished or running run. Raises UserError if there is nothing to show."""
    path = Path(directory)
    if not path.exists():
        raise UserError(f"There is no {path}.")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml.")
    config = read_mapping(path / "config.yaml")
    fingerprint = config.pop("fingerprint", {})
    has_nodes = "sampling_mode" in config
    rows, rounds = read_rows(path / "metrics.jsonl"), []
    if has_nodes:
        rows, rounds = read_rows(path / "journal.jsonl"), rows
    if not rows:
        what = "node" if has_nodes else "step"
        raise UserError(f"{path} has no finished {what} yet: nothing to show.")
    result = read_mapping(path / "result.json")
    if missing := NEEDED - result.keys():
        raise UserError(
            f"{path} was made by another version: its result.json has no {min(missing)}. git.txt "
            "names the commit."
        )
    kind = "training"
    if has_nodes:
        rows = [node_row(row) for row in rows]
        kind = "evaluation" if result.get("evaluation") else "search"
    return RunData(path, kind, has_nodes, config, rows, rounds, result, fingerprint)


def find_runs(paths: Sequence[Path]) -> tuple[list[RunData], list[str]]:
    """The runs in these directories and one sentence for each that cannot be shown.

    The directory of a grid stands for its cells. Among several paths plain files are skipped,
    because logs/* also names the pictures that viz.py wrote there.
    """
    runs, errors = [], []
    paths = [path for path in paths if len(paths) == 1 or not path.is_file()]
    for path in paths:
        cells = sorted(config.parent for config in path.glob("*/config.yaml"))
        for directory in cells or [path]:
            try:
                runs.append(read_run(directory))
            except UserError as error:
                errors.append(str(error))
    return runs, errors


def node_row(row: dict) -> dict:
    """A row of the journal with its outcome and its value, None for a fault."""
    outcome = outcome_of(row["status"], row["valid"])
    value = None if outcome == "fault" else value_of(row["improvement"])
    return row | {"outcome": outcome, "value": value}


def outcome_of(status: str, is_valid: bool) -> str:
    if status == "fault":
        return "fault"
    return "valid" if is_valid else "failed"


def score_text(item: dict) -> str:
    """The score of a node or episode, or what it has instead of one."""
    return item["outcome"] if item["score"] is None else f"{item['score']:.4g}"


# ------------------------------------------------------------------ transcripts


def transcript_files(run: RunData) -> dict[str, Callable[[], list[dict]]]:
    """The name of each file of episodes, as ids show it, or of each node -> reads its transcripts.

    A name is "12" (a step of training), "before", "eval-9", "final-best" or "0.2.1" (a node).
    Keys of a transcript: id ("12/3", "eval-9/3" = file and number; "0.2.1" = node), outcome
    ("valid", "failed", "fault"), status, score (None unless valid), tokens, seconds, error, system
    and prompt (the first messages), turns.
    Episodes also have seed, test_score (as score) and reward (None for a fault); nodes also parent,
    op, sampling_mode, reason (of the selection), idea, code, diff.
    """
    if run.has_nodes:
        return {row["id"]: partial(node_items, row, run.dir) for row in run.rows}
    files = {}
    for path in sorted((run.dir / "episodes").glob("*.jsonl")):
        name = re.sub(r"0*(\d+)$", r"\1", path.stem)
        files[name] = partial(episode_items, path, name)
    return files


def episode_items(path: Path, name: str) -> list[dict]:
    items = []
    for index, row in enumerate(read_rows(path)):
        score = row["score"] or {"valid": False, "value": None, "message": row["fault"]}
        test_score = row.get("test_score") or {"value": None}
        item = {
            "id": f"{name}/{index}",
            "outcome": outcome_of(row["status"], score["valid"]),
            "score": score["value"],
            "test_score": test_score["value"],
            "tokens": row["reply_tokens"],
            "error": joined(score["message"], score.get("grader_output")),
        }
        items.append(row | item)
    return items


def node_items(row: dict, directory: Path) -> list[dict]:
    """A list of one. system, prompt: what the model was told; "" if the transcript is missing."""
    episodes = read_rows(directory / "episodes" / f"{row['order']:06d}.jsonl") or [{}]
    told = {key: episodes[0].get(key, "") for key in ("system", "prompt")}
    # with what a grader printed that gave neither score nor reason
    error = joined(row["error"], row.get("grader_output"))
    reason = row["decision"]["reason"]
    return [row | told | {"turns": row["actions"], "error": error, "reason": reason}]


def observed(turn: dict) -> str:
    """Text that the model read after a reply, without a limit of its length."""
    return joined(turn["observation"], turn.get("note"))


def joined(*texts: str | None) -> str:
    return "\n".join(filter(None, texts))
