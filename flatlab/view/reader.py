"""Reads run directories. Their layout is described in runs/store.py."""

import difflib
import itertools
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import absent, read_mapping, read_rows
from flatlab.runs.store import ROW_KEYS, read_episodes, refuse_old, transcript_reader
from flatlab.task.value import on_test_part, score_text

# Kinds of runs, and the noun for a row of each
NOUNS = {"training": "step", "search": "node", "evaluation": "episode", "imitation": "step"}
SCALE = ("baseline", "reference", "higher_is_better")
# Keys that result.json has from the start on, and those of each kind
NEEDED = {"kind", "task", "metric", "value", "split", *SCALE}
NEEDED_OF = {"search": {"best_id", "tested_id"}}
# Keys of the row of a node, beside those of an episode
NODE_KEYS = {"parent", "order", "op", "mark", "sampling_mode", "idea", "kept", "decision"}
COMPARED = "compare-"  # beginning of the folder of a comparison


@dataclass(frozen=True)
class RunData:
    """A run as it is on the disk, finished or not.

    kind: a key of NOUNS. task: its name, or several names with a space between. steps: rows of
    metrics.jsonl, which are rounds if a search learns. fingerprint: digests of code, prompts, task
    and model; {} if they were not recorded.
    """

    dir: Path
    kind: str
    task: str
    config: dict
    steps: list[dict]
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

    @cached_property
    def episodes(self) -> list[dict]:
        """Rows of episodes.jsonl: of a training, an evaluation, or the nodes of a search, which are
        in order of completion. Raises UserError if one of them lacks a key.
        """
        return read_episodes(self.dir, ROW_KEYS | (NODE_KEYS if self.kind == "search" else set()))

    @cached_property
    def rows(self) -> list[dict]:
        """Steps, nodes or episodes, see NOUNS. Those of an evaluation have the numbers of the test
        part if it was scored.
        """
        if NOUNS[self.kind] == "step":
            return self.steps
        return on_test_part(self.episodes) if self.kind == "evaluation" else self.episodes

    @property
    def rounds(self) -> list[dict]:
        """The steps of a search that learns."""
        return self.steps if self.kind == "search" else []


def read_run(directory) -> RunData:
    """A finished or running run. Raises UserError if there is nothing to show."""
    path = Path(directory)
    if not path.exists():
        raise absent(path)
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is not a run directory: it has no config.yaml.")
    refuse_old(path)
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
    steps = read_rows(path / "metrics.jsonl")
    scale = {key: result[key] for key in SCALE}
    run = RunData(path, kind, result["task"], config, steps, result, fingerprint, **scale)
    if not run.rows:
        raise UserError(f"{path} has no finished {NOUNS[kind]}: nothing to show. {status}")
    return run


def has_rows(path: Path) -> bool:
    """Returns whether a run has a step, a node or an episode."""
    return any(file.stat().st_size for file in path.glob("*.jsonl"))


def find_runs(paths) -> tuple[list[RunData], list[str]]:
    """The runs in these directories and one sentence for each that cannot be shown.

    A folder stands for all runs in it, as that of a grid for its cells. Among several paths plain
    files and comparisons are skipped, because logs/* also names what viz.py wrote there.
    """
    runs, errors = [], []
    if len(paths) > 1:
        paths = [p for p in paths if not (p.is_file() or p.name.startswith(COMPARED))]
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


def score_or_outcome(row: dict) -> str:
    """The score of a node or episode, or its outcome if it has none."""
    return row["outcome"] if row["score"] is None else score_text(row["score"])


# ------------------------------------------------------------------ transcripts


def transcripts_of(run: RunData) -> Callable:
    """A function that returns the transcript of a row of run.episodes, with `diff` for a node: the
    difference to the code of its parent. It raises UserError if the file is missing or damaged.
    """
    texts_of = transcript_reader(run.dir)
    rows = {row["id"]: row for row in run.episodes}

    def transcript(row: dict) -> dict:
        texts = texts_of(row)
        above = rows.get(row.get("parent"))
        while above and not above["kept"]:
            above = rows.get(above["parent"])
        if above:
            texts = texts | {"diff": code_diff(texts_of(above)["code"], texts["code"])}
        return texts

    return transcript


FACTS = (
    "outcome|score|test_score|status|task|seed|op|sampling_mode|parent|second_parent|chosen as|"
    "probability|idea|tokens|seconds|error|grader_output|record"
).split("|")


def facts_above(row: dict, transcript: dict) -> dict:
    """The facts above the turns of an episode or node that it has: name -> text or number."""
    known = row | transcript | {"chosen as": row.get("decision", {}).get("reason")}
    return {name: known[name] for name in FACTS if known.get(name) not in (None, "")}


def code_diff(old: dict, new: dict) -> str:
    """A unified diff of the files in `new` against the files of the same name in `old`."""
    lines = []
    for name, text in new.items():
        before = old.get(name, "").splitlines(keepends=True)
        lines += difflib.unified_diff(before, text.splitlines(keepends=True), name, name)
    return "".join(lines)


REPEATED = 3  # lines
BEGINS_ANEW = (
    "[Here the model read neither this output nor any earlier reply, but its first message and:]"
)


def observations(turns: list[dict]) -> list[str]:
    """Text that the model read after each reply, without a limit of its length. REPEATED lines or
    more that stood in an earlier one, as a warning does, become one line.
    """
    texts, before = [], set()
    for turn in turns:
        anew = BEGINS_ANEW if turn.get("restarts") else ""
        text = "\n".join(filter(None, (turn["observation"], anew, turn["note"])))
        lines = []
        for is_old, group in itertools.groupby(text.split("\n"), before.__contains__):
            same = [*group]
            if is_old and len(same) >= REPEATED:
                same = [f"[... {len(same)} lines as above ...]"]
            lines += same
        before = {*turn["note"].split("\n")} if anew else before.union(lines)
        texts.append("\n".join(lines))
    return texts
