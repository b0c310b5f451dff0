"""Reads run directories. Their layout is described in runs/store.py."""

import difflib
import os
import re
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_mapping, read_rows
from flatlab.task.value import value_of

# Kinds of runs, and the noun for a row of each
NOUNS = {"training": "step", "search": "node", "evaluation": "episode", "imitation": "step"}
SCALE = ("baseline", "reference", "higher_is_better")
# Name of a file of transcripts, or id of a node -> function that reads its transcripts
Files = dict[str, Callable[[], list[dict]]]
# Keys that result.json has from the start on, and those of each kind
NEEDED = {"kind", "task", "metric", "value", *SCALE}
NEEDED_OF = {
    "evaluation": {"split"},
    "search": {"split", "best_id", "best_score", "best_stderr", "tested_id", "valid_share"},
}
COMPARED = "compare-"  # beginning of the folder of a comparison


@dataclass(frozen=True)
class RunData:
    """A run as it is on the disk, finished or not.

    kind: a key of NOUNS. task: its name, or several names with a space between. rows: steps, nodes
    in order of completion, or episodes. rounds: rows of metrics.jsonl of a search that learns.
    fingerprint: digests of code, prompts, task and model; {} if they were not recorded.
    """

    dir: Path
    kind: str
    task: str
    config: dict
    rows: list[dict]
    rounds: list[dict]
    result: dict
    fingerprint: dict
    baseline: float
    reference: float | None
    higher_is_better: bool

    @property
    def name(self) -> str:
        return self.dir.resolve().name

    @property
    def status(self) -> str:
        """The status in result.json; "killed" if it is "running" but the process that holds the
        lock has ended. Taking the lock could stop a writer.
        """
        lock = self.dir / ".lock"
        pid = lock.read_text(encoding="utf-8").strip() if lock.exists() else "none"
        status = self.result.get("status", "unknown")
        return "killed" if status == "running" and not Path("/proc", pid).exists() else status


def read_run(directory) -> RunData:
    """A finished or running run. Raises UserError if there is nothing to show."""
    path = Path(directory)
    if not path.exists():
        raise UserError(f"There is no folder {path}.")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml.")
    config = read_mapping(path / "config.yaml")
    fingerprint = config.pop("fingerprint", {})
    not_begun = None if has_rows(path) else {"status": "not begun"}
    result = read_mapping(path / "result.json", not_begun)
    kind = result.get("kind")
    status = f"Its status: {result.get('status', 'unknown')}"
    if kind and kind not in NOUNS:
        raise UserError(f"{path} is of a kind that viz.py does not know: {kind}.")
    missing = (NEEDED | NEEDED_OF.get(kind, set())) - result.keys()
    if missing and not has_rows(path):
        raise UserError(f"{path} has nothing to show. {status}")
    if missing:
        raise UserError(
            f"{path} was made by another version: its result.json has no {min(missing)}. git.txt "
            "names the commit."
        )
    rows, rounds = rows_of(path, kind, result["task"])
    if not rows:
        raise UserError(f"{path} has no finished {NOUNS[kind]}: nothing to show. {status}")
    scale = {key: result[key] for key in SCALE}
    return RunData(path, kind, result["task"], config, rows, rounds, result, fingerprint, **scale)


@contextmanager
def all_keys(path: Path):
    """Raises UserError if the block misses a key in a row of the run."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{path} cannot be shown: one of its rows has no {error}.") from None


def has_rows(path: Path) -> bool:
    """Returns whether a run has a step, a node or an episode."""
    return any(file.stat().st_size for file in path.rglob("*.jsonl"))


def rows_of(path: Path, kind: str, task: str) -> tuple[list[dict], list[dict]]:
    """The rows and the rounds of a run, see RunData."""
    rows = read_rows(path / "metrics.jsonl")
    if kind == "search":
        nodes = read_rows(path / "journal.jsonl")
        with all_keys(path):
            return [node_row(node, task) for node in nodes], rows
    if kind == "evaluation":
        return read_all(episode_files(path)), []
    return rows, []


def find_runs(paths) -> tuple[list[RunData], list[str]]:
    """The runs in these directories and one sentence for each that cannot be shown.

    A folder stands for all runs in it, as that of a grid for its cells. Among several paths plain
    files and comparisons are skipped, because logs/* also names what viz.py wrote there.
    """
    runs, errors = [], []
    if len(paths) > 1:
        paths = [path for path in paths if path.is_dir() or not path.exists()]
        paths = [path for path in paths if not path.name.startswith(COMPARED)]
    for path in paths:
        inside = sorted(result.parent for result in path.glob("**/result.json"))
        for directory in inside or [path]:
            try:
                runs.append(read_run(directory))
            except UserError as error:
                errors.append(str(error))
    return runs, errors


def folder_of(runs: list[RunData]) -> Path:
    """The folder of the views: of one run its directory, of all runs in a folder this one, of other
    runs <folder>/compare-<names>; logs/ without any.
    """
    if len(runs) == 1:
        return runs[0].dir
    directories = [run.dir.resolve() for run in runs]
    folder = Path(os.path.commonpath(directories or ["logs"]))
    inside = {result.parent.resolve() for result in folder.rglob("result.json")}
    if runs and inside != {*directories}:
        names = "+".join(str(path.relative_to(folder)) for path in directories).replace("/", "-")
        if len(names) > 100:
            names = f"{names[:90]}-{zlib.crc32(names.encode()):08x}"
        folder /= f"{COMPARED}{names}"
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def node_row(row: dict, task: str) -> dict:
    """A row of the journal with its outcome; of a search that learns with its reward, too."""
    decision = row["decision"]
    row = with_outcome(row | {"task": task, "reason": decision["reason"]})
    if "round" in decision:
        row |= {"round": decision["round"], "group": decision["group"], "reward": row["value"]}
    return row


def with_outcome(row: dict) -> dict:
    """Adds the outcome ("valid", "failed" or "fault") and the value, None for a fault."""
    if row["status"] == "fault":
        return row | {"outcome": "fault", "value": None}
    outcome = "failed" if row["improvement"] is None else "valid"
    return row | {"outcome": outcome, "value": value_of(row["improvement"])}


def score_text(item: dict) -> str:
    """The score of a node or episode, or its outcome if it has none."""
    return item["outcome"] if item["score"] is None else f"{item['score']:.4f}"


# ------------------------------------------------------------------ transcripts


def transcript_files(run: RunData) -> Files:
    """The transcripts of a run, of a function for each node or each file of episodes.

    Names: "12" (a step of training), "before", "eval-9", "final-best", "0.2.1" (a node).
    Keys of a transcript: id ("12/3": number 3 of a file; the name alone if the file holds one),
    outcome, status, score (None unless valid), improvement, value, tokens, seconds, error, system
    and prompt (the first messages), turns,
    advantages: one per reply, None for one that was not trained; [] if the group was not trained or
    they were not stored. With groups also group and reward (None for a fault).
    Episodes also have seed, test_score and when (the name of the file). Nodes also have parent, op,
    sampling_mode, reason (of the selection), idea, code and diff; those of learn.py round.
    """
    if run.kind != "search":
        return episode_files(run.dir)
    nodes = {row["id"]: row for row in run.rows}
    return {id: partial(node_items, id, nodes, run.dir) for id in nodes}


def read_all(files: Files) -> list[dict]:
    return [item for read in files.values() for item in read()]


def episode_files(directory: Path) -> Files:
    files = {}
    for path in sorted((directory / "episodes").glob("*.jsonl")):
        name = re.sub(r"0*(\d+)$", r"\1", path.stem)
        files[name] = partial(episode_items, path, name)
    return files


def episode_items(path: Path, name: str = "") -> list[dict]:
    """The transcripts in a file. Their improvement, stderr, position, outcome and value are of
    the test part if it was scored.
    """
    rows = read_rows(path)
    with all_keys(path.parents[1]):
        return [episode_item(row, name, index, len(rows)) for index, row in enumerate(rows)]


def episode_item(row: dict, name: str, index: int, size: int) -> dict:
    """The transcript in one row of a file of this size."""
    score = row["score"] or {"value": None, "stderr": None, "message": row["fault"]}
    test = row.get("test_score")
    item = {
        "id": name if size == 1 else f"{name}/{index}",
        "score": score["value"],
        "test_score": test["value"] if test else None,
        "is_tested": bool(test),
        "improvement": row["test_improvement" if test else "improvement"],
        "stderr": (test or score)["stderr"],
        "position": (test or score).get("position"),
        "tokens": row["reply_tokens"],
        "error": joined(score["message"], score.get("grader_output")),
        "when": name,
        "advantages": advantages_of(row["turns"]),
    }
    return with_outcome(row | item)


def node_items(id: str, nodes: dict[str, dict], directory: Path) -> list[dict]:
    """A list of one. Without a transcript it has no turns."""
    row = nodes[id]
    episodes = read_rows(directory / "episodes" / f"{row['order']:06d}.jsonl")
    above = nodes.get(row["parent"])
    while above and not above["kept"]:
        above = nodes.get(above["parent"])
    transcript = {"turns": []} | dict(*episodes)
    item = {
        "diff": difference(above["code"], row["code"]) if above else "",
        # a grader may print text but neither score nor reason
        "error": joined(row["error"], row.get("grader_output")),
        "advantages": advantages_of(transcript["turns"]),
    }
    return [transcript | row | item]


def advantages_of(turns: list[dict]) -> list[float | None]:
    return [turn["advantage"] for turn in turns if "advantage" in turn]


def difference(old: dict, new: dict) -> str:
    """A unified diff of the files in `new` against the files of the same name in `old`."""
    lines = []
    for name, text in new.items():
        before = old.get(name, "").splitlines(keepends=True)
        lines += difflib.unified_diff(before, text.splitlines(keepends=True), name, name)
    return "".join(lines)


def observed(turn: dict) -> str:
    """Text that the model read after a reply, without a limit of its length."""
    return joined(turn["observation"], turn.get("note"))


def joined(*texts: str | None) -> str:
    return "\n".join(filter(None, texts))
