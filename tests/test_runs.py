"""A run directory is whole after kill -9, has one writer, and refuses another config."""

import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest

import helpers
from flatlab import files, options
from flatlab.errors import SandboxFault, UserError
from flatlab.options import Bounds, EpisodeOptions, Positive, Resumable
from flatlab.runs import cli, reader, store
from helpers import MADE_BY, python, slow, step_row, user_error

ROOT = Path(store.__file__).parents[2]
CONFIG = helpers.CONFIG | {"hidden": (8, 16)}
pytestmark = pytest.mark.usefixtures("quick_provenance")


# ------------------------------------------------------------------ resume and refuse


def test_new_run_says_what_ran_before_the_first_step(tmp_path):
    run = store.open_run(tmp_path / "a" / "run", CONFIG, MADE_BY)
    assert reader.read_mapping(run.dir / "config.yaml") == {
        **CONFIG,
        "hidden": [8, 16],
        "fingerprint": MADE_BY | {"code": [MADE_BY["code"]]},
    }
    assert (run.dir / "command.txt").exists()
    git = (run.dir / "git.txt").read_text()
    for command in ("git rev-parse HEAD", "git status --short", "git diff HEAD"):
        assert command in git
    assert "tyro==" in (run.dir / "env.txt").read_text()


def test_same_config_resumes_and_keeps_the_rows(begun):
    again = store.open_run(begun, CONFIG | {"steps": 9}, MADE_BY)
    assert again.rows() == [step_row(0, made_by=0)]
    assert again.config["steps"] == 9
    assert reader.read_mapping(begun / "config.yaml")["steps"] == 9


@pytest.fixture
def begun(tmp_path):
    """The directory of a run with one step."""
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    run.log(step_row(0))
    run.lock.close()
    return tmp_path


def test_other_config_is_refused_with_the_difference(begun):
    difference = r"lr: 1e-05 there, 2e-05 now; new: \(absent\) there, 1 now"
    with user_error(difference):
        store.open_run(begun, CONFIG | {"lr": 2e-5, "new": 1, "steps": 9}, MADE_BY)
    assert reader.read_mapping(begun / "config.yaml")["lr"] == 1e-5


def test_other_config_may_take_a_directory_without_a_step(tmp_path):
    run = store.open_run(tmp_path, CONFIG | {"model": "typo"}, MADE_BY)
    run.result(before={"mean": 0.5})
    run.truncate_after(-1)
    run.lock.close()
    assert store.open_run(tmp_path, CONFIG, MADE_BY).results() == {}  # nothing of the other model's


def test_checkpoint_alone_also_protects_its_config(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    with run.checkpoint(0):
        pass
    run.lock.close()
    with user_error("another config"):
        store.open_run(tmp_path, CONFIG | {"lr": 1.0}, MADE_BY)


def test_second_writer_is_refused_and_lock_dies_with_its_process(tmp_path):
    code = (
        "import sys, time; from flatlab.runs import store; "
        f"run = store.open_run(sys.argv[1], {{'a': 1}}, {MADE_BY}); "
        "print(1, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, tmp_path / "run"]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "1\n"
        with user_error(f"being written by process {other.pid}"):
            store.open_run(tmp_path / "run", {"a": 1}, MADE_BY)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    store.open_run(tmp_path / "run", {"a": 1}, MADE_BY)


def test_two_writers_in_one_process_are_refused_too(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    with user_error(f"process {os.getpid()}"):
        store.open_run(run.dir, CONFIG, MADE_BY)


def test_unwritable_place_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with user_error("Cannot write the run directory .*: Not a directory"):
        store.open_run(tmp_path / "file" / "run", CONFIG, MADE_BY)  # holds for root as well


def test_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with user_error("thesis.tex"):
        store.open_run(tmp_path, CONFIG, MADE_BY)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_provenance_of_a_resumed_run_is_new_unless_it_is_that_of_the_last_start(tmp_path):
    path = tmp_path / "git.txt"
    for text in ("abc\nchanged: x.py", "abc", "abc", "abc\nchanged: x.py"):
        store.write_provenance(path, text)
    assert path.read_text().count("abc") == 3
    assert path.read_text().count("changed") == 2


def test_git_txt_holds_the_untracked_files_of_the_code_and_no_others(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "mine.py").write_text("made_this_run = 1")
    (tmp_path / "other.py").write_text("has_nothing_to_do_with_it = 1")
    monkeypatch.undo()  # what git says, see quick_provenance
    monkeypatch.setattr(store, "ROOT", tmp_path)
    store.output_of.cache_clear()
    text = store.describe_git(["mine.py", "flatlab/gone.py"])
    store.output_of.cache_clear()
    assert "made_this_run" in text
    assert "?? other.py" in text
    assert "has_nothing_to_do_with_it" not in text


def test_a_start_that_was_killed_at_once_can_be_repeated(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            store.open_run(tmp_path, CONFIG, MADE_BY)
    store.open_run(tmp_path, CONFIG, MADE_BY).lock.close()


# ------------------------------------------------------------------ rows


def test_cut_last_line_does_not_count_and_is_replaced(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    run.log(step_row(0))
    with open(tmp_path / "metrics.jsonl", "a") as out:
        out.write('{"step": 1, "rew')
    assert run.rows() == [step_row(0, made_by=0)]
    run.lock.close()
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    run.log(step_row(1))
    assert run.rows() == [step_row(0, made_by=0), step_row(1, made_by=0)]


def test_resume_drops_what_is_newer_than_the_checkpoint_and_the_final_comparison(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    for name in [0, 1, "before", "eval-000000", "eval-000001", "final-best", "final-last"]:
        run.save_episodes(name, [{}], tokens=b"x")
    for step in (0, 1):
        run.log(step_row(step))
    run.truncate_after(0)
    assert [row["step"] for row in run.rows()] == [0]
    kept = []
    for name in ("000000", "before", "eval-000000"):
        kept += [f"{name}.jsonl", f"{name}.tokens.jsonl.gz"]
    assert sorted(path.name for path in (tmp_path / "episodes").iterdir()) == kept
    run.truncate_after(-1)  # the run begins anew
    assert not any((tmp_path / "episodes").iterdir())


def test_numbers_and_texts_survive_the_way_through_json(tmp_path):
    import numpy as np

    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    numbers = {"step": np.int64(3), "a": np.float32(0.5)}
    run.log(numbers | {"nan": math.nan, "inf": math.inf})
    assert run.rows() == [{"step": 3, "a": 0.5, "nan": None, "inf": None, "made_by": 0}]
    text = "line\nline\u2028 \ud800 é \x00"
    run.save_episodes(7, [{"text": text}, {"text": "b"}])
    episodes = reader.read_rows(tmp_path / "episodes/000007.jsonl")
    assert episodes == [{"text": text}, {"text": "b"}]


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    run.result(status="running")
    monkeypatch.setattr(files, "to_disk", full_disk)
    with pytest.raises(OSError, match="No space left"):
        run.result(status="finished")
    assert run.results() == {"status": "running"}
    assert not list(tmp_path.rglob(".tmp-*"))


def test_result_json_keeps_what_was_written_before(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    run.result(status="running", nodes=1)
    run.result(nodes=2)
    assert run.results() == {"status": "running", "nodes": 2}


ENDS = {
    "failed: Take another name.": UserError("Take another name."),
    "failed: The sandbox broke: gone": ExceptionGroup("tasks", [SandboxFault("gone")]),
    "failed: No space left on device. Ev": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "failed: ZeroDivisionError('a bug')": ZeroDivisionError("a bug"),
    "interrupted": KeyboardInterrupt(),
}


@pytest.mark.parametrize("status", ENDS)
def test_a_run_says_what_ended_it(tmp_path, status, monkeypatch):
    runs = [store.open_run(tmp_path / name, CONFIG, MADE_BY) for name in "ab"]
    runs[0].result(status="running")
    runs[1].result(status="finished")
    with pytest.raises(type(ENDS[status])), cli.recorded_end(runs, tmp_path):
        raise ENDS[status]
    assert runs[0].results()["status"].startswith(status)
    assert runs[1].results()["status"] == "finished"
    monkeypatch.setattr(files, "to_disk", full_disk)  # no room for that either
    with user_error("another"), cli.recorded_end(runs[:1], tmp_path):
        raise UserError("another")
    assert runs[0].results()["status"].startswith(status)


@pytest.mark.parametrize(
    "write",
    [
        lambda run: run.log({"step": 0}),
        lambda run: run.save_episodes(0, []),
        lambda run: run.result(status="finished"),
        lambda run: run.whole_directory("best").__enter__(),
        lambda run: run.checkpoint(0).__enter__(),
    ],
)
def test_a_directory_that_was_removed_ends_the_run_in_a_sentence(tmp_path, write):
    run = store.open_run(tmp_path / "a", CONFIG, MADE_BY)
    shutil.rmtree(run.dir)
    removed = "a was removed while the run went on"
    with user_error(removed), cli.recorded_end([run], run.dir):
        write(run)
    assert not run.dir.exists()


# ------------------------------------------------------------------ whole or absent


def test_checkpoint_appears_whole_and_old_ones_go(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    for step in range(4):
        with run.checkpoint(step, keep=2) as folder:
            (folder / "weights").write_text(str(step))
    with pytest.raises(RuntimeError), run.checkpoint(4) as folder:
        (folder / "weights").write_text("half")
        raise RuntimeError
    weights = {step: (path / "weights").read_text() for step, path in run.checkpoints()}
    assert weights == {2: "2", 3: "3"}
    assert not list(tmp_path.rglob(".tmp-*"))


def test_best_is_replaced_and_restored_after_a_crash_between_the_renames(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    for text in "old", "new":
        with run.whole_directory("best") as folder:
            (folder / "weights").write_text(text)
    assert (tmp_path / "best" / "weights").read_text() == "new"
    run.lock.close()
    (tmp_path / "best").rename(tmp_path / ".old-best")
    store.open_run(tmp_path, CONFIG, MADE_BY)
    assert (tmp_path / "best" / "weights").read_text() == "new"


WRITER = """
import itertools, os, shutil, sys
from pathlib import Path
from flatlab.runs import store
store.output_of = lambda *command: ""
run = store.open_run(sys.argv[1], {"a": 1}, MADE_BY)
# writes, renames and fsyncs until this process is killed in one of them
left = itertools.count(int(sys.argv[2]), -1)

def deadly(function, half=lambda *arguments: None):
    def wrapped(*arguments, **options):
        if next(left) == 0:
            half(*arguments)
            os.kill(os.getpid(), 9)
        return function(*arguments, **options)
    return wrapped

write = Path.write_bytes

def write_half(path, content):
    write(path, content[:len(content) // 2])

def remove_one(path):
    if path.exists():
        next(path.iterdir()).unlink()

Path.write_bytes = deadly(write, write_half)
shutil.rmtree = deadly(shutil.rmtree, remove_one)
Path.rename = deadly(Path.rename)
os.replace = deadly(os.replace)
store.to_disk = deadly(store.to_disk)
for step in itertools.count():
    run.save_episodes(0, [{"text": "x" * 9_000, "step": step}] * 5)
    with run.checkpoint(step, keep=1) as folder:
        for name in "ab":
            (folder / name).write_bytes(b"x" * 5_000)
    with run.whole_directory("best") as folder:
        (folder / "a").write_bytes(b"x" * 5_000)
    run.log({"step": step})
    run.result(step=step)
""".replace("MADE_BY", repr(MADE_BY))


FAST_MOMENTS = (7, 31, 37, 43, 49)
ALL_MOMENTS = (0, 7, 14, *range(30, 54))  # one turn of the loop has 24 moments


@pytest.mark.parametrize(
    "moment",
    [n if n in FAST_MOMENTS else slow(n) for n in ALL_MOMENTS],
)
def test_kill_9_leaves_only_whole_files(tmp_path, moment):
    done = python("-c", WRITER, tmp_path, moment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = store.open_run(tmp_path, {"a": 1}, MADE_BY)  # the lock is gone, leftovers are swept
    if moment > 20:
        episodes = reader.read_rows(tmp_path / "episodes/000000.jsonl")
        assert [len(episode["text"]) for episode in episodes] == [9_000] * 5
        assert (tmp_path / "best/a").stat().st_size == 5_000
        assert run.checkpoints()
        assert run.rows()[0] == {"step": 0, "made_by": 0}
    for _, folder in run.checkpoints():
        assert [path.stat().st_size for path in folder.iterdir()] == [5_000] * 2
    run.results()
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]


# ------------------------------------------------------------------ config


@dataclass
class Nested:
    episode: EpisodeOptions = field(default_factory=EpisodeOptions)
    tau: Annotated[float, Bounds(0, 1)] = 0.5
    steps: Resumable[int] = 1
    minutes: Resumable[Positive | None] = None
    names: tuple[str, ...] = ("x",)


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "preset.yaml"
    path.write_text("tau: 0.1\nmax_turns: 3\nsteps: 4\nnames: [a, b]\n")
    return path


def test_preset_first_and_flags_win_and_nested_options_are_flat(preset):
    config = cli.parse_config(Nested, [str(preset), "--episode-minutes", "5", "--steps", "2"])
    assert config == Nested(EpisodeOptions(3, episode_minutes=5.0), 0.1, 2, names=("a", "b"))
    assert cli.parse_config(Nested, ["--steps", "2"]) == Nested(steps=2)


def test_bad_presets(preset, capsys):
    with user_error("Cannot read .*nothing.yaml: No such file"):
        cli.parse_config(Nested, [str(preset.with_name("nothing.yaml"))])
    damaged = {
        "just words": "'name: value'",
        "tau: 1\ntau: 2": "damaged: the key tau is given twice",
        "tau: " + "[" * 5_000: "nested too deeply",
        'names: ["a\\0"]': "no valid text: 'a",
    }
    for text, sentence in damaged.items():
        preset.write_text(text)
        with user_error(sentence):
            cli.parse_config(Nested, [str(preset)])
    preset.write_text("taw: 1")
    with pytest.raises(SystemExit) as caught:
        cli.parse_config(Nested, [str(preset)])
    assert caught.value.code == 2
    assert "--tau" in capsys.readouterr().err


def test_an_argument_that_is_no_text_is_refused():
    with user_error("no valid text: 'a"):
        cli.parse_config(Nested, ["--names", os.fsdecode(b"a\xff")])


def long_name():
    Path("a" * 5_000).exists()


def parallel():
    raise ExceptionGroup("tasks", [ExceptionGroup("more", [UserError("Take another name.")])])


def full():
    open("/dev/full", "w").write("x" * 10**6)


def broken():
    raise SandboxFault("no daemon")


@pytest.mark.parametrize(
    "main, code, sentence",
    [
        (parallel, 2, "Take another name.\n"),
        (full, 2, "No space left on device. Everything"),
        (long_name, 2, f"File name too long: {'a' * 80}...\n"),
        (broken, 1, "The sandbox broke: no daemon\n"),
    ],
)
def test_what_a_person_can_mend_is_one_sentence_wherever_it_happened(main, code, sentence, capsys):
    with pytest.raises(SystemExit) as end:
        cli.one_sentence(main)
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(sentence)


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        cli.one_sentence(lambda: 1 / 0)


WRONG = {
    "--episode-minutes must be from 0.01": {"episode": EpisodeOptions(1, 1, 1, 0.0)},
    "--max-turns must be from 1 to 1000000, not 0": {"episode": EpisodeOptions(0)},
    "--tau must be from 0 to 1, not nan": {"tau": math.nan},
    "--minutes must be from 1e-06 to 1000000000, not inf": {"minutes": math.inf},
    "--steps must be from 0 to 1000000000, not 100000000000000000000": {"steps": 10**20},
    "--names needs at least one value": {"names": ()},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_the_bounds_beside_an_option_hold(sentence):
    with user_error(re.escape(sentence)):
        options.check_values(Nested(**WRONG[sentence]))


def test_the_marks_beside_an_option_hold():
    options.check_values(Nested())  # None is derived later
    assert options.may_change(Nested()) == {"steps", "minutes"}
