"""Writes the run directory. flatlab/view/reader.py reads it.

A run directory holds
    config.yaml command.txt git.txt env.txt   what ran; a resumed run appends what changed.
                                              config.yaml also holds digests, see fingerprint.py
    metrics.jsonl                             a row per step of grpo.py, update of sft.py, round of
                                              learn.py
    episodes.jsonl                            a row per episode or node, without its texts; of a
                                              search it is also the checkpoint
    transcripts/000012.jsonl                  the texts of step 12, of node 12 or of episode 12 of
                                              evaluate.py, a line per row, nothing cut
    transcripts/before.jsonl                  those of the evaluation before the first step,
    transcripts/eval-000012.jsonl             of the evaluation after the update of step 12,
    transcripts/final-best.jsonl ...          and of the adapters that are compared at the end
    transcripts/000012.tokens.jsonl.gz ...    the sampled sequences of each of these files
    result.json                               kept current while the run goes on
    checkpoints/000012/  best/  untrained/    each appears complete or not at all; also the nodes/
                                              of a search
    curves.png  tree.png  report.html ...     views, safe to delete

No file is ever half-written: files and folders get a temporary name first and are renamed once they
are on the disk. Only jsonl logs grow in place. A last line without a newline was cut by a crash. It
is ignored, and removed when the run continues.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from flatlab.errors import UserError, shown
from flatlab.files import ROOT, read_mapping, read_rows, temporary, to_disk, write_whole
from flatlab.runs.fingerprint import code_files

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # answers of NFS and Lustre without locks
EPISODES = "episodes.jsonl"
# Keys of its rows that the code reads
ROW_KEYS = set(
    "id when step group task seed status outcome score stderr improvement value test_score "
    "test_value reward advantage trained reason tokens turns seconds ungraded".split()
)
WAY_OUT = "Restore it from a copy, or choose another --name."

# ------------------------------------------------------------------ complete files or none


def plain(value):
    """A config or row as YAML and JSON can hold it. NaN and infinity become None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (int, str)) else str(value)


def json_lines(rows: Iterable[dict]) -> str:
    """A line of ASCII for each row: no lone surrogate or odd line separator can break the file."""
    return "".join(json.dumps(plain(row)) + "\n" for row in rows)


def sweep(directory: Path) -> None:
    """Removes what a killed writer left."""
    for temp in [*directory.glob(".tmp-*"), *directory.glob("*/.tmp-*")]:
        if temp.is_dir():
            shutil.rmtree(temp)
        else:
            temp.unlink()
    # whole_directory() was killed between its two renames
    for old in [*directory.glob(".old-*"), *directory.glob("*/.old-*")]:
        final = old.with_name(old.name.removeprefix(".old-"))
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)


# ------------------------------------------------------------------ provenance


@functools.cache
def output_of(*command) -> str:
    """The output of a short command in the repository, or the reason why there is none."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({command[0]}: {type(error).__name__})"
    return (done.stdout or done.stderr).decode(errors="replace").strip()


def describe_git() -> str:
    """The commit, uncommitted changes, and the files of the code that git does not track yet."""
    commands = ("git rev-parse HEAD", "git status --short", "git diff HEAD")
    parts = [output_of(*command.split()) for command in commands]
    files = [str(file) for file in code_files() if file.is_relative_to(ROOT)]
    for name in output_of("git", "ls-files", "--others", "--", *files).splitlines():
        if (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            parts.append(f"--- {name} (not tracked)\n{text}")
    return "\n".join(parts)


def describe_machine() -> str:
    gpu_query = "--query-gpu=name,memory.total,driver_version"
    parts = [
        f"python {platform.python_version()}",
        platform.platform(),
        f"{os.cpu_count()} cpus",
        f"gpu: {output_of('nvidia-smi', gpu_query, '--format=csv,noheader')}",
    ]
    packages = [f"{d.name}=={d.version}" for d in importlib.metadata.distributions()]
    return "\n".join(parts + sorted(packages))


def write_provenance(path: Path, text: str) -> None:
    """Writes `text`. A resumed run appends it if it is new: the file tells the whole story."""
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if f"\n{before}".endswith(f"\n{text}\n"):
        return
    if before:
        before += time.strftime("\n===== resumed %Y-%m-%d %H:%M:%S\n")
    write_whole(path, f"{before}{text}\n")


# ------------------------------------------------------------------ writing a run


def lock_directory(path: Path):
    """Creates and locks a run directory; the kernel drops the lock when this process ends.

    Returns the open lock file. Raises UserError if the directory cannot be written, is in use, or
    holds something else than a run.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(entry.name for entry in path.iterdir() if entry.name[0] != ".")
        if others and not (path / "config.yaml").exists():
            raise UserError(
                f"{path} is not a run directory: it holds {', '.join(others[:3])}. "
                "Choose another --name."
            )
        lock = open(path / ".lock", "a+", encoding="utf-8")
        take_lock(lock, path)
        lock.truncate(0)
        print(os.getpid(), file=lock, flush=True)
    except OSError as error:
        raise UserError(f"Cannot write the run directory {path}: {error.strerror}.") from None
    return lock


def take_lock(lock, path: Path) -> None:
    """Locks an open file. On a file system without locks a warning is printed instead."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        pid = lock.read().strip() or "?"
        raise UserError(
            f"{path} is being written by process {pid}: wait for it to end, "
            "or choose another --name."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning  {path} cannot be locked ({error.strerror}): start no second process with "
            "this --name."
        )


def run_directory(name: str) -> Path:
    """logs/<name>. Raises UserError for a name that leads out of logs/ or into a run, is empty or
    too long.
    """
    path = Path(name)
    # file systems allow 255 bytes
    if not path.parts or path.is_absolute() or ".." in path.parts or len(name) > 200:
        raise UserError(
            "--name must be the name of a folder in logs/, with at most 200 characters, not "
            f"{name:.30}."
        )
    for folder in path.parents:
        if Path("logs", folder, "config.yaml").exists():
            raise UserError(f"--name {name} lies in the run logs/{folder}: choose another one.")
    return Path("logs", path)


def transcript_path(directory: Path, when: str) -> Path:
    """The file of the transcripts of a step, an evaluation or a node. when: see Episode."""
    name = re.sub(r"\d+$", lambda number: number[0].zfill(6), when)
    return directory / "transcripts" / f"{name}.jsonl"


def read_episodes(directory: Path, keys: Collection[str] = ROW_KEYS) -> list[dict]:
    """The rows of episodes.jsonl. Raises UserError if the file is damaged, or a row lacks one of
    the keys.
    """
    path = directory / EPISODES
    rows = read_own(read_rows, path)
    for row in rows:
        if missing := keys - row.keys():
            raise UserError(f"{path} is damaged: a row has no {min(missing)!r}. {WAY_OUT}")
    return rows


def transcript_reader(directory: Path) -> Callable:
    """A function that returns the transcript of a row of episodes.jsonl. It raises UserError if the
    file is missing or damaged.
    """

    @functools.lru_cache(8)  # rows of a file follow each other
    def read(path: Path) -> dict[str, dict]:
        return {line.get("id"): line for line in read_own(read_rows, path)}

    def transcript(row: dict) -> dict:
        path = transcript_path(directory, row["when"])
        texts = read(path).get(row["id"], {})
        if "turns" not in texts:
            raise UserError(f"{path} is missing or damaged: it lacks {row['id']}. {WAY_OUT}")
        return texts

    return transcript


def refuse_old(path: Path) -> None:
    """Raises UserError for a run directory of a version that had other files."""
    if (path / "journal.jsonl").exists() or (path / "episodes").exists():
        raise UserError(
            f"{path} was made by a version before 2026-11-28, which wrote other files: use the "
            "commit that its git.txt names, or choose another --name."
        )


def read_own(read, file: Path, **options):
    """read(file) of a file of a run; a UserError also says what to do."""
    try:
        return read(file, **options)
    except UserError as error:
        text = str(error)
        between = "\n" if "\n" in text else " "  # of YAML the last line is a caret
        raise UserError(f"{text}{between}{WAY_OUT}") from None


def open_run(
    directory,
    config: dict,
    made_by: dict,
    may_change: Collection[str] = ("steps",),
    is_finished=lambda run: False,
) -> Run:
    """Creates a run directory, or continues the one that is there if the same made it.

    config: a flat dict of plain values. Keys in `may_change` may differ between starts, and so may
    the name: a run that was renamed or copied goes on. made_by: see fingerprint(). Other code is
    refused if the run is finished; otherwise it continues the run with a warning.
    is_finished: a function of the Run. Nothing is written into a finished run.

    Raises UserError if the directory cannot be written, is in use by another process, holds
    something else than a run, or holds steps or nodes that were made by something else.
    """
    path = Path(directory)
    lock = lock_directory(path)
    refuse_old(path)
    sweep(path)
    new = plain(config)
    if new.get("url"):
        new["url"] = shown(new["url"])  # without a password
    old = read_own(read_mapping, path / "config.yaml", default=dict(new))
    before = old.pop("fingerprint", None) or {}
    if not isinstance(before, dict):
        raise UserError(f"{path}/config.yaml is damaged: it ends too early. {WAY_OUT}")
    differing = [
        f"{key}: {old.get(key)} there, {new.get(key)} now"
        for key in sorted({*old, *new} - {"name", *may_change})
        if old.get(key) != new.get(key)
    ]
    run = Run(path, new, lock, read_own(read_mapping, path / "result.json", default={}))
    run.finished = not differing and is_finished(run)  # which knows runs of its own script alone
    has_rows = any(row["when"][:1].isdigit() for row in read_episodes(path)) or bool(run.rows())
    codes = [made_by["code"]]
    if run.finished or has_rows or run.checkpoints():
        if differing:
            if len(differing) > 5:  # another script made it
                differing[5:] = [f"and {len(differing) - 5} more"]
            raise UserError(
                f"{path} was made with another config ({'; '.join(differing)}): "
                "choose another --name."
            )
        codes = continued_by(run, before, made_by)
        if run.finished:
            return run
    elif differing:
        for name in ("result.json", EPISODES):  # no step was made: nothing to keep
            (path / name).unlink(missing_ok=True)
        run.result = {}
    new["fingerprint"] = plain(made_by | {"code": codes})
    # First, because a directory without it is not a run directory.
    text = yaml.safe_dump(new, sort_keys=False, allow_unicode=True)
    write_whole(path / "config.yaml", text)
    for log in path.glob("*.jsonl"):  # a crash may have cut its last line
        os.truncate(log, log.read_bytes().rfind(b"\n") + 1)
    (path / "transcripts").mkdir(exist_ok=True)
    (path / "checkpoints").mkdir(exist_ok=True)
    command = shown(shlex.join([Path(sys.executable).name, *sys.argv]))
    write_provenance(path / "command.txt", command)
    write_provenance(path / "git.txt", describe_git())
    write_provenance(path / "env.txt", describe_machine())
    return run


def continued_by(run: Run, before: dict, now: dict) -> list[str]:
    """The digests of each code that has worked on the run, today's last.

    before: the fingerprint in config.yaml. Raises UserError if the prompts, the task or the model
    are others, and if the run is finished and the code is another one.
    """
    codes = before.get("code") or [""]
    last = before | {"code": codes[-1]}
    parts = ["prompts", "task", "model", *["code"] * run.finished]
    changed = [part for part in parts if last.get(part) != now[part]]
    if changed:
        raise UserError(
            f"{run.dir} was made with another version of the {' and the '.join(changed)}: choose "
            "another --name."
        )
    if codes[-1] == now["code"]:
        return codes
    print(f"warning  {run.dir} was begun by other code, see git.txt. Today's code continues it.")
    return [*codes, now["code"]]


@dataclass
class Run:
    """One run directory, open for writing; made by open_run()."""

    dir: Path
    config: dict
    lock: object  # open file
    result: dict  # the content of result.json
    finished: bool = False  # before this start: nothing is left to do
    trackers: list = field(default_factory=list)  # functions that get every row, see trackers.py

    def log(self, row: dict):
        """Appends a row to metrics.jsonl."""
        self.append("metrics.jsonl", [row])
        self.track(row)

    def append(self, file: str, rows: list[dict]):
        """Appends rows, which are on the disk when this returns."""
        with open(self.dir / file, "ab") as out:
            out.write(json_lines(rows).encode())
            out.flush()
            os.fsync(out.fileno())

    def track(self, row: dict):
        """Hands a row to the trackers."""
        for tracker in self.trackers:
            tracker(row)

    def rows(self, file="metrics.jsonl") -> list[dict]:
        return read_own(read_rows, self.dir / file)

    def keep_rows(self, file: str, is_kept: Callable):
        """Removes the other rows of a file. is_kept: a function of a row."""
        write_whole(self.dir / file, json_lines(filter(is_kept, self.rows(file))))

    def truncate_rows(self, step: int):
        """Removes the rows after the checkpoint's `step`."""
        self.keep_rows("metrics.jsonl", lambda row: row["step"] <= step)

    def truncate_after(self, step: int):
        """On resume: removes the steps after the checkpoint's `step` (-1: all of them), with their
        episodes, and those of the comparison at the end.
        """

        def is_kept(when: str) -> bool:
            number = when.removeprefix("eval-")
            is_later = number.isdigit() and int(number) > step
            return not (step < 0 or is_later or when.startswith("final-"))

        self.truncate_rows(step)
        self.keep_rows(EPISODES, lambda row: is_kept(row["when"]))
        for path in (self.dir / "transcripts").iterdir():
            if not is_kept(path.name.partition(".")[0]):
                path.unlink()

    def save_episodes(self, when: str, episodes: list):
        """Writes the transcripts of these episodes, and appends their rows. when: see Episode."""
        self.save_transcripts(when, episodes)
        self.append(EPISODES, [episode.row() for episode in episodes])

    def save_again(self, episodes: list):
        """Replaces the transcripts and rows of these episodes, one in each file of transcripts."""
        for episode in episodes:
            self.save_transcripts(episode.when, [episode])
        new = {episode.id: episode.row() for episode in episodes}
        rows = [new.get(row["id"], row) for row in self.rows(EPISODES)]
        write_whole(self.dir / EPISODES, json_lines(rows))

    def save_transcripts(self, when: str, episodes: list):
        """Writes the texts of these episodes to transcripts/, and their tokens if they have any."""
        path = transcript_path(self.dir, when)
        tokens = b"".join(episode.packed for episode in episodes)
        if tokens:
            write_whole(path.with_suffix(".tokens.jsonl.gz"), tokens)
        write_whole(path, json_lines(episode.transcript() for episode in episodes))

    def update_result(self, **fields):
        """Merges `fields` into result.json."""
        merged = self.result | plain(fields)
        write_whole(self.dir / "result.json", json.dumps(merged, indent=1, allow_nan=False) + "\n")
        self.result = merged

    @contextmanager
    def whole_directory(self, name: str):
        """Yields a scratch directory that becomes <run>/<name> if the block ends without error."""
        final = self.dir / name
        temp = temporary(final)
        old = final.with_name(f".old-{final.name}")
        temp.mkdir()
        try:
            yield temp
        except BaseException:  # also Ctrl-C
            shutil.rmtree(temp)
            raise
        for path in [*temp.rglob("*"), temp]:
            to_disk(path)
        if final.exists():
            final.rename(old)
        temp.rename(final)
        to_disk(final.parent)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def checkpoint(self, step: int, keep=2):
        """`with run.checkpoint(12) as folder: policy.save(folder)`; the newest `keep` stay."""
        with self.whole_directory(f"checkpoints/{step:06d}") as folder:
            yield folder
        for _, path in self.checkpoints()[:-keep]:
            hidden = path.rename(temporary(path))  # no half checkpoint under a valid name
            shutil.rmtree(hidden)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder), oldest first. Every one listed is complete."""
        folders = [p for p in self.dir.glob("checkpoints/*") if p.name.isdigit()]
        return sorted((int(folder.name), folder) for folder in folders)
