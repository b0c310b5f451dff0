"""The run directory: its writer, and beside it the reader that all views use.

A run directory holds
    config.yaml command.txt git.txt env.txt   what ran, from before the first step; a resumed run appends changes
    metrics.jsonl                             one row per step of grpo.py, the source of every number shown
    journal.jsonl                             one row per node of search.py
    episodes/000012.jsonl                     all transcripts of step 12, nothing cut
    result.json                               kept current while the run goes on
    checkpoints/000012/  best/  nodes/        each appears whole or not at all
    curves.png  tree.png  report.html ...     views, safe to delete
Nothing is ever half-written: files and folders get a temporary name first and are renamed when they are on the disk.
Only jsonl logs grow in place; a last line without its newline was cut by a crash, and does not count.
"""

import errno
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
import yaml

from flatlab.errors import UserError

HERE = Path(__file__).resolve().parents[2]

# ------------------------------------------------------------------ files that are whole or absent


def plain(value, finite=False):
    """Config or row -> what YAML and JSON can hold. `finite`: NaN and infinity become None, JSON cannot say them."""
    if isinstance(value, dict):
        return {str(k): plain(v, finite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, finite) for v in value]
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if isinstance(value, float) and finite and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def json_line(row: dict) -> str:
    """ASCII on purpose: a lone surrogate or an odd line separator in a transcript cannot break the file."""
    return json.dumps(plain(row, finite=True)) + "\n"


def temporary(final: Path) -> Path:
    return final.with_name(f".tmp-{os.getpid()}-{final.name}")


def to_disk(path: Path):
    descriptor = os.open(path, os.O_RDONLY)  # also a directory: its fsync keeps the names in it
    os.fsync(descriptor)
    os.close(descriptor)


def write_whole(path: Path, content: str | bytes):
    """Readers see the old file or the new one, also after kill -9 or a power cut."""
    temp = temporary(path)
    temp.write_bytes(content.encode() if isinstance(content, str) else content)
    to_disk(temp)
    os.replace(temp, path)
    to_disk(path.parent)


def sweep(directory: Path):
    """Remove what a killed writer left. Temporary names carry its pid; a living one's (a viz.py beside us) stay."""
    for temp in [*directory.glob(".tmp-*"), *directory.glob("*/.tmp-*")]:
        pid = temp.name.split("-")[1]
        if pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists():
            shutil.rmtree(temp) if temp.is_dir() else temp.unlink()
    for old in [
        *directory.glob(".old-*"),
        *directory.glob("*/.old-*"),
    ]:  # killed between two renames
        final = old.with_name(old.name.removeprefix(".old-"))
        shutil.rmtree(old) if final.exists() else old.rename(final)


def read_mapping(path: Path, default: dict | None = None) -> dict:
    """The 'name: value' pairs of a .yaml or .json file; `default` when it is absent. UserError for anything else."""
    if default is not None and not path.exists():
        return default
    try:
        content = (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_bytes())
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold 'name: value' pairs.")
    return content


def read_rows(path) -> list[dict]:
    """All complete lines of a jsonl file; [] when it is not there. Raises UserError for a damaged line."""
    rows = []
    try:
        for line in Path(path).read_bytes().split(b"\n")[:-1]:
            rows.append(dict(json.loads(line)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, TypeError):
        raise UserError(f"{path} is damaged: line {len(rows) + 1} is not a JSON object.") from None
    return rows


# ------------------------------------------------------------------ what runs


def parse_config(config_class, argv: list[str]):
    """`script.py [preset.yaml] [--flag value ...]` -> config_class. The preset becomes flags in front of the others:
    tyro checks both the same way, and the later ones win. The script's docstring heads its --help."""
    flags = []
    if argv and not argv[0].startswith("-"):
        for key, value in read_mapping(Path(argv[0])).items():
            name = str(key).replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{name}" if value else f"--no-{name}")
            else:
                flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        argv = argv[1:]
    return tyro.cli(config_class, args=flags + argv, description=sys.modules["__main__"].__doc__)


def check_numbers(config, bounds: dict, otherwise: tuple) -> None:
    """Raises UserError for a number (NaN, too) that is out of its bounds: low, and high or None where there is none."""
    for name, value in asdict(config).items():
        low, high = bounds.get(name, otherwise)
        if isinstance(value, (int, float)) and not low <= value <= (
            math.inf if high is None else high
        ):
            wanted = f"at least {low}" if high is None else f"from {low:g} to {high:g}"
            raise UserError(f"--{name.replace('_', '-')} must be {wanted}, not {value}.")


def one_sentence(main):
    """Runs main(). What a person can mend is one sentence and exit code 2: UserError, UserError, a full disk."""
    try:
        main()
    except Exception as error:
        cause = error
        while isinstance(
            cause, ExceptionGroup
        ):  # tasks that ran side by side: the first one that broke
            cause = cause.exceptions[0]
        full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full and not isinstance(cause, UserError):
            raise
        print(
            f"{cause.strerror}; what is there is whole. The same command goes on."
            if full
            else cause,
            file=sys.stderr,
        )
        sys.exit(2)


@functools.cache
def output_of(*command) -> str:
    """Output of a short command run beside this file, or why there is none. For provenance only."""
    try:
        done = subprocess.run(
            command, cwd=HERE, stdin=subprocess.DEVNULL, capture_output=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({command[0]}: {type(error).__name__})"
    return (done.stdout or done.stderr).decode(errors="replace").strip()


def describe_git() -> str:
    """Commit, uncommitted changes, and the new scripts that git does not know yet (a copied grpo.py, say)."""
    new = output_of(
        "git", "ls-files", "--others", "--exclude-standard", "*.py", "*.yaml"
    ).splitlines()
    texts = [
        f"--- {n} (not tracked)\n{(HERE / n).read_text(errors='replace')}"
        for n in new
        if (HERE / n).is_file()
    ]
    return "\n".join(
        [
            output_of("git", "rev-parse", "HEAD"),
            output_of("git", "status", "--short"),
            output_of("git", "diff", "HEAD"),
            *texts,
        ]
    )


def describe_machine() -> str:
    packages = sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions())
    gpu = output_of(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return "\n".join(
        [
            f"python {platform.python_version()}",
            platform.platform(),
            f"{os.cpu_count()} cpus",
            f"gpu: {gpu}",
            f"docker: {output_of('docker', '--version')}",
            *packages,
        ]
    )


def record(path: Path, text: str):
    """Write once; a resumed run appends what is new, so the file tells the whole story."""
    before = path.read_text(errors="replace") if path.exists() else ""
    if text.strip() not in before:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        write_whole(
            path, before + (f"\n===== resumed {stamp}\n" if before else "") + text.strip() + "\n"
        )


# ------------------------------------------------------------------ writing a run


def difference(old: dict, new: dict, ignore=()) -> list[str]:
    """One text per key that differs: 'lr: 1e-05 there, 2e-05 now'."""
    pairs = [
        (key, old.get(key, "(absent)"), new.get(key, "(absent)"))
        for key in sorted({*old, *new} - {*ignore})
    ]
    return [f"{key}: {there} there, {now} now" for key, there, now in pairs if there != now]


def open_run(directory, config: dict, resume_ok_keys=("steps",)) -> "Run":
    """Create a run directory, or continue the one that is there when its config is the same.

    `config` is a flat dict of plain values. Keys in `resume_ok_keys` may change between starts (how long, where to).
    The directory is locked until this process ends, however it ends. Raises UserError: not writable, in use by
    another process, steps were made with another config, or something else than a run lives there.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        others = [
            p.name for p in path.iterdir() if p.name != ".lock" and not p.name.startswith(".tmp-")
        ]
        if others and not (path / "config.yaml").exists():
            raise UserError(
                f"{path} holds other things than a run ({', '.join(sorted(others)[:3])}): name a new one."
            )
        lock = open(path / ".lock", "a+")
    except OSError as error:
        raise UserError(f"Cannot write the run directory {path}: {error.strerror}.") from None
    try:
        fcntl.flock(
            lock, fcntl.LOCK_EX | fcntl.LOCK_NB
        )  # the kernel drops it with the process: no stale locks
    except BlockingIOError:
        lock.seek(0)
        pid = lock.read().strip() or "?"
        raise UserError(
            f"{path} is being written by process {pid}: wait for it, or name another directory."
        ) from None
    lock.truncate(0)
    print(os.getpid(), file=lock, flush=True)
    new = yaml.safe_load(
        yaml.safe_dump(plain(config))
    )  # through YAML, so that it compares equal to what is read back
    old = read_mapping(path / "config.yaml") if (path / "config.yaml").exists() else new
    if found := difference(old, new, resume_ok_keys):
        if any(path.glob("checkpoints/[0-9]*")) or any(map(read_rows, path.glob("*.jsonl"))):
            raise UserError(
                f"{path} was made with another config ({'; '.join(found)}): name a new directory."
            )
        (path / "result.json").unlink(
            missing_ok=True
        )  # no step was made there: nothing to protect, nothing to keep
    sweep(path)
    (path / "episodes").mkdir(exist_ok=True)
    (path / "checkpoints").mkdir(exist_ok=True)
    write_whole(path / "config.yaml", yaml.safe_dump(new, sort_keys=False, allow_unicode=True))
    record(path / "command.txt", shlex.join([Path(sys.executable).name, *sys.argv]))
    record(path / "git.txt", describe_git())
    record(path / "env.txt", describe_machine())
    return Run(path, new, lock)


class Run:
    """One run directory, open for writing. Made by open_run. Each of `sinks` gets every row and its transcripts."""

    def __init__(self, directory: Path, config: dict, lock):
        self.dir, self.config, self.lock = directory, config, lock
        self.sinks, self.episodes = [], []  # see sinks.py
        self.lines, self.seconds = (
            0,
            [],
        )  # lines printed by this process; recent seconds per step, for the ETA
        self.plot_again = 0.0

    def log(self, row: dict, file="metrics.jsonl"):
        """Append one row; it is on the disk when this returns."""
        path = self.dir / file
        with open(path, "ab+") as out:
            end = out.seek(0, os.SEEK_END)
            if (
                end and (out.seek(end - 1), out.read(1))[1] != b"\n"
            ):  # a crash cut the last line: take it away
                out.truncate(path.read_bytes().rfind(b"\n") + 1)
            out.write(json_line(row).encode())
            out.flush()
            os.fsync(out.fileno())
        for sink in self.sinks:
            sink(row, self.episodes)

    def rows(self, file="metrics.jsonl") -> list[dict]:
        return read_rows(self.dir / file)

    def truncate_after(self, step: int):
        """On resume: forget the steps after the checkpoint's `step`, they are about to be made again (-1: all)."""
        kept = [row for row in self.rows() if row.get("step", -1) <= step]
        if kept != self.rows():
            write_whole(self.dir / "metrics.jsonl", "".join(map(json_line, kept)))
        for path in (self.dir / "episodes").glob("*.jsonl"):
            if path.stem.isdigit() and int(path.stem) > step:
                path.unlink()

    def save_episodes(self, step: int, episodes: list[dict]) -> Path:
        path = self.dir / "episodes" / f"{step:06d}.jsonl"
        write_whole(path, "".join(map(json_line, episodes)))
        self.episodes = episodes if self.sinks else []
        return path

    def results(self) -> dict:
        return read_mapping(self.dir / "result.json", default={})

    def result(self, **fields):
        """Merge `fields` into result.json. The plot reads metric, higher_is_better, baseline, before, after there."""
        merged = {**self.results(), **plain(fields, finite=True)}
        write_whole(self.dir / "result.json", json.dumps(merged, indent=1, allow_nan=False) + "\n")

    @contextmanager
    def whole_directory(self, name: str):
        """Yields a scratch directory; it becomes <run>/<name> when the block ends well, else it vanishes."""
        final = self.dir / name
        temp, old = temporary(final), final.with_name(f".old-{final.name}")
        temp.mkdir(parents=True)
        try:
            yield temp
        except BaseException:  # also Ctrl-C: nothing half-made stays
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
            shutil.rmtree(
                path.rename(temporary(path))
            )  # the name goes first: never half a checkpoint under it

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder), oldest first. Every one listed is complete."""
        return sorted(
            (int(p.name), p) for p in (self.dir / "checkpoints").iterdir() if p.name.isdigit()
        )

    def step_line(self, row: dict, header_every=20) -> str:
        """step_line with a header on this process's first line, and the ETA from the recent steps."""
        self.seconds = (self.seconds + [row.get("seconds") or 0.0])[-20:]
        left = self.config.get("steps", 0) - row["step"] - 1
        self.lines += 1
        return step_line(
            row,
            self.lines % header_every == 1,
            left * sum(self.seconds) / len(self.seconds) if left > 0 else None,
        )


# ------------------------------------------------------------------ terminal

# title, width, the row's keys, how to print them; the order never changes
COLUMNS = [
    ("step", 4, ("step",), "{:.0f}"),
    ("reward", 10, ("reward_mean", "reward_std"), "{:.2f}±{:.2f}"),
    ("score", 6, ("score_mean",), "{:.4g}"),
    ("best", 6, ("score_best",), "{:.4g}"),
    ("valid", 5, ("valid_share",), "{:.0%}"),
    (
        "same",
        4,
        ("zero_variance_share",),
        "{:.0%}",
    ),  # groups whose rewards are all alike: they teach nothing
    ("fault", 5, ("faults",), "{:.0f}"),
    ("turns", 5, ("turns",), "{:.1f}"),
    ("tokens", 6, ("reply_tokens",), "{:.0f}"),
    ("kl", 7, ("kl",), "{:.1e}"),
    ("gap", 7, ("logprob_gap_max",), "{:.1e}"),
    ("grad", 5, ("grad_norm",), "{:.3f}"),
    ("tok/s", 5, ("tokens_per_second",), "{:.0f}"),
    ("GiB", 4, ("memory_gb",), "{:.1f}"),  # at most: of the GPU, else of this process
    ("sec", 5, ("seconds",), "{:.1f}"),
    (
        "smpl/env/train",
        14,
        ("seconds_sample", "seconds_env", "seconds_train"),
        "{:.1f}/{:.1f}/{:.1f}",
    ),
]


def step_line(row: dict, header=False, eta: float | None = None) -> str:
    """One aligned line for one step, under a line of titles when `header`. `eta` in seconds."""
    titles = " ".join(f"{title:>{width}}" for title, width, _, _ in COLUMNS) + "    ETA"
    values = [[row.get(key) for key in keys] for _, _, keys, _ in COLUMNS]
    cells = ["-" if None in v else form.format(*v) for v, (_, _, _, form) in zip(values, COLUMNS)]
    line = " ".join(f"{cell:>{width}}" for cell, (_, width, _, _) in zip(cells, COLUMNS))
    return (titles + "\n" if header else "") + f"{line} {duration(eta):>6}"


def duration(seconds: float | None) -> str:
    """'0m48s', '3m20s', '2h05m'; '-' for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


# ------------------------------------------------------------------ reading a run


@dataclass(frozen=True)
class Record:
    """A run as it is on the disk. kind "grpo": rows are steps; "search": rows are nodes, in order of completion."""

    dir: Path
    kind: str
    config: dict
    rows: list[dict]
    result: dict

    @property
    def name(self) -> str:
        return self.dir.resolve().name

    @property
    def running(self) -> bool:
        """A living process writes it."""
        return self.result.get("status") == "running" and locked(self.dir)

    @property
    def status(self) -> str:
        """That of result.json; "killed" when it says running and nobody writes it any more."""
        status = str(self.result.get("status") or "unknown")
        return "killed" if status == "running" and not self.running else status


def locked(directory) -> bool:
    """Does the process named in the lock live? Not asked of the lock itself: that would be in a writer's way."""
    try:
        return Path(f"/proc/{int((Path(directory) / '.lock').read_text())}").exists()
    except (OSError, ValueError):
        return False


def read_run(directory) -> Record:
    """A finished or running run. UserError when there is nothing to show."""
    path = Path(directory)
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path} is no run directory: it has no config.yaml.")
    config = read_mapping(path / "config.yaml")
    steps = [row for row in read_rows(path / "metrics.jsonl") if isinstance(row.get("step"), int)]
    nodes = [
        node_row(row)
        for row in read_rows(path / "journal.jsonl")
        if row.get("id") and isinstance(row["id"], str)
    ]
    if not steps and not nodes:
        what = "node" if "sampling_mode" in config else "step"
        raise UserError(f"{path} has no finished {what} yet: nothing to show.")
    result = read_mapping(path / "result.json", default={})
    return Record(path, "search" if nodes else "grpo", config, nodes or steps, result)


def find_runs(paths) -> tuple[list[Record], list[str]]:
    """Runs in these directories, the cells of grids included, and one sentence for each that cannot be shown.
    Among several paths, plain files do not count: logs/* also names our own pictures."""
    found, wrong = [], []
    paths = [path for path in map(Path, paths) if len(paths) == 1 or not path.is_file()]
    for path in paths:
        cells = (
            []
            if (path / "config.yaml").is_file()
            else sorted(c.parent for c in path.glob("*/config.yaml"))
        )
        for directory in cells or [path]:
            try:
                found.append(read_run(directory))
            except UserError as error:
                wrong.append(str(error))
    return found, wrong


def node_row(row: dict) -> dict:
    """A row of the journal with the types that the views count on. score: None for all failures."""
    texts = {
        key: str(row.get(key) or "")
        for key in ("parent", "op", "mode", "idea", "status", "error", "diff")
    }
    containers = {
        key: row[key] if isinstance(row.get(key), kind) else kind()
        for key, kind in (("code", dict), ("decision", dict), ("actions", list), ("ideas", list))
    }
    second = row["second"] if isinstance(row.get("second"), str) else None
    return (
        row
        | texts
        | containers
        | {
            "second": second,
            "score": None if row.get("valid") is False else number(row.get("score")),
        }
    )


def number(value) -> float | None:
    """A finite number, or None: a row may hold anything."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def transcripts(record: Record, step: int | None = None) -> list[dict]:
    """All episodes or nodes, in one form for both kinds: id ("12.3": step and place; "0.2.1": the node), parent,
    outcome ("valid", "failed", "fault"), status, score (None unless valid), tokens, seconds, error, prompt, turns; and
    what only nodes have: op, mode, idea, code, diff, decision, ... `step`: only the episodes of that step."""
    if record.kind == "search":
        return [node_item(row, record.dir) for row in record.rows]
    paths = sorted((record.dir / "episodes").glob("*.jsonl"), key=lambda path: path.stem)
    return [
        episode_item(row, f"{int(path.stem)}.{index}", int(path.stem))
        for path in paths
        if path.stem.isdigit() and step in (None, int(path.stem))
        for index, row in enumerate(read_rows(path))
    ]


def episode_item(row: dict, id: str, step: int) -> dict:
    score = row.get("score") if isinstance(row.get("score"), dict) else {}
    status, turns = (
        str(row.get("status") or ""),
        [t for t in row.get("turns") or [] if isinstance(t, dict)],
    )
    outcome = "fault" if status == "fault" else "valid" if score.get("valid") else "failed"
    return {
        "id": id,
        "step": step,
        "group": row.get("group"),
        "task": str(row.get("task") or ""),
        "outcome": outcome,
        "status": status,
        "score": number(score.get("value")) if outcome == "valid" else None,
        "turns": turns,
        "tokens": number(row.get("reply_tokens")),
        "seconds": number(row.get("seconds")),
        "error": str(
            row.get("fault") or (score.get("message") if outcome == "failed" else "") or ""
        ),
        "prompt": str(row.get("prompt") or ""),
    }


def node_item(row: dict, directory: Path) -> dict:
    outcome = "fault" if row["status"] == "fault" else "failed" if row["score"] is None else "valid"
    copied = {
        key: row[key]
        for key in (
            "id",
            "parent",
            "second",
            "op",
            "mode",
            "idea",
            "status",
            "error",
            "diff",
            "score",
            "code",
            "decision",
            "ideas",
        )
    }
    numbers = {
        key: number(row.get(key))
        for key in ("order", "gain", "tokens", "seconds", "elapsed", "probability")
    }
    return (
        copied
        | numbers
        | {
            "outcome": outcome,
            "turns": [turn for turn in row["actions"] if isinstance(turn, dict)],
            "prompt": prompt_of(
                directory / "episodes" / f"{int(numbers['order'] or 0):06d}.jsonl", row["id"]
            ),
        }
    )


def prompt_of(path: Path, node: str) -> str:
    """What the model was told, from the node's own transcript; "" where that is not there."""
    return next(
        (str(row.get("prompt") or "") for row in read_rows(path) if row.get("node") == node), ""
    )
