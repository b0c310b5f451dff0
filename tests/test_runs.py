"""A run directory is whole after kill -9, has one writer, and refuses another config."""

import asyncio
import contextlib
import errno
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Literal, get_args

import numpy as np
import pytest

import evaluate
import grpo
import helpers
import policy
import search
import sft
from examples import learn
from flatlab import files, heartbeat, options
from flatlab.errors import SandboxFault, UserError, sentence_of
from flatlab.model.path import ModelPath
from flatlab.options import EpisodeOptions, ModelOptions, Number, Positive, Whole
from flatlab.runs import cli, start, store, trackers
from flatlab.runs.fingerprint import fingerprint, model_parts
from flatlab.sandbox.client import Sandbox
from flatlab.task.sanity import degenerate
from helpers import MADE_BY, PROJECT, parsed, python, slow, step_row, user_error
from tasks import load_task

CONFIG = helpers.CONFIG | {"hidden": (8, 16)}
pytestmark = pytest.mark.usefixtures("quick_provenance")


def opened(folder, makers=MADE_BY, **changes):
    def is_finished(run):
        return run.result.get("status") == "finished"

    return store.open_run(folder, CONFIG | changes, MADE_BY | makers, is_finished=is_finished)


# ------------------------------------------------------------------ resume and refuse


def test_new_run_says_what_ran_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.undo()  # see quick_provenance
    run = opened(tmp_path / "a" / "run")
    saved = files.read_mapping(run.dir / "config.yaml")
    made_by = MADE_BY | {"code": [MADE_BY["code"]]}
    assert saved == CONFIG | {"hidden": [8, 16], "fingerprint": made_by}
    assert "tyro==" in (run.dir / "env.txt").read_text()


@pytest.fixture
def begun(tmp_path):
    """The directory of a run with one step."""
    run = opened(tmp_path / "run")
    run.log(step_row(0))
    run.lock.close()
    return run.dir


def test_other_config_is_refused_with_the_difference(begun):
    with user_error(r"\(lr: 1e-05 there, 2e-05 now; new: None there, 1 now\)"):
        opened(begun, lr=2e-5, new=1, steps=9)
    with user_error(r"d: None there, 1 now; e: None there, 1 now\): choose"):  # five are named
        opened(begun, **dict.fromkeys("abcde", 1))
    assert files.read_mapping(begun / "config.yaml")["lr"] == 1e-5


def test_run_of_another_script_is_refused_without_reading_its_results(begun):
    own = dict.fromkeys("abcdefg", 1)
    with user_error("a: None there, 1 now; .* and 7 more.: choose another --name"):
        store.open_run(begun, own, MADE_BY, is_finished=lambda run: run.result["nodes"])


def test_other_config_may_take_a_directory_without_a_step(tmp_path):
    run = opened(tmp_path, model="typo")
    run.update_result(before={"mean": 0.5})
    run.truncate_after(-1)
    run.lock.close()
    assert opened(tmp_path).result == {}  # nothing of the other model's


def test_second_writer_is_refused_and_lock_dies_with_its_process(tmp_path):
    code = (
        "import sys, time; from flatlab.runs import store; "
        f"run = store.open_run(sys.argv[1], {{}}, {MADE_BY}); print(1, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, tmp_path]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        for pid in (other.pid, r"\?"):
            with user_error(f"being written by process {pid}:"):
                opened(tmp_path)
            (tmp_path / ".lock").write_text("")
        other.kill()
    opened(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(store.fcntl, "flock", failing(number))
    run = opened(tmp_path / "run")
    run.log({"step": 0})
    warning = f"warning  {run.dir} cannot be locked ({os.strerror(number)}): start no second"
    assert warning in capsys.readouterr().out
    assert (run.dir / ".lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_broken_file_system_is_one_sentence(tmp_path, monkeypatch, number):
    monkeypatch.setattr(store.fcntl, "flock", failing(number))
    with user_error(f"^Cannot write the run directory {tmp_path}/run: {os.strerror(number)}.$"):
        opened(tmp_path / "run")
    assert "run the same command again" in sentence_of(OSError(number, "x", "metrics.jsonl"))


def failing(number):
    """A function that fails with this errno."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_a_foreign_directory_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with user_error("thesis.tex"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with user_error("Cannot write the run directory .*: Not a directory"):
        opened(tmp_path / "thesis.tex" / "run")  # holds for root as well


def test_git_txt_holds_the_untracked_files_of_the_code_and_no_others(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "mine.py").write_text("made_this_run = 1")
    (tmp_path / "other.py").write_text("has_nothing_to_do_with_it = 1")
    monkeypatch.undo()  # what git says, see quick_provenance
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(store, "code_files", lambda: [tmp_path / "mine.py", tmp_path / "gone.py"])
    store.output_of.cache_clear()
    text = store.describe_git()
    store.output_of.cache_clear()
    assert "made_this_run" in text
    assert "?? other.py" in text and "fatal: " in text  # there is no HEAD yet
    assert "has_nothing_to_do_with_it" not in text


@pytest.mark.parametrize("name", ["/tmp/x", "a/../../x", "", "a" * 201])
def test_a_name_that_is_no_folder_of_logs_is_refused(name):
    with user_error("--name"):
        store.run_directory(name)


@pytest.mark.parametrize("name", ["logs/a/b", "./logs/a/b/", "logs//a/b", "./a/b"])
def test_a_name_may_begin_with_logs(name):
    assert parsed(grpo.Config, f"--name {name}").name == "a/b"


def test_a_name_inside_another_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened("logs/grid/cell")
    for name in ("grid/cell/mine", "grid/cell/best/mine"):
        with user_error(f"^--name {name} lies in the run logs/grid/cell: "):
            store.run_directory(name)
    assert str(store.run_directory("grid/other")) == "logs/grid/other"


# ------------------------------------------------------------------ what made a run


def test_code_is_the_script_what_it_imports_and_the_package_without_views(tmp_path):
    shutil.copytree(PROJECT / "flatlab", tmp_path / "flatlab")
    (tmp_path / "my_rewards.py").write_text("BONUS = 1\n")
    (tmp_path / "mine.py").write_text(
        "import my_rewards\nfrom flatlab.runs.fingerprint import fingerprint\n"
        "print(fingerprint([])['code'])\n"
    )

    def digest_after(name, text):
        with open(tmp_path / name, "a") as file:
            file.write(text)
        return python("mine.py", cwd=tmp_path).stdout

    before = digest_after("other.py", "X = 1")
    assert len(before) == 17
    (tmp_path / "flatlab/view/plots.py").write_text("X = 1\n")
    assert digest_after("flatlab/view/page.py", "\n") == before
    names = (
        "mine.py",
        "my_rewards.py",
        "flatlab/world/prompts.py",
        "flatlab/sandbox/guest/main.py",
    )
    digests = [digest_after(name, "\n# a comment\n") for name in names]
    assert len({before, *digests}) == 5


def test_what_is_asked_and_how_it_is_scored_counts():
    task = load_task("titanic")
    changes = {
        "prompt": task.prompt + "!",
        "baseline": 0.5,
        "grader": (*task.grader, "--strict"),
        "hidden": task.hidden | {"answers.csv": PROJECT / "README.md"},
        "degenerate": "as measured here",  # does not count
    }
    digests = [replace(task, **{name: value}).digest() for name, value in changes.items()]
    assert len(set(digests)) == 5
    assert digests[-1] == task.digest()


def test_the_files_of_a_model_and_of_its_adapter_count(tmp_path):
    (tmp_path / "best").mkdir()

    def digest_with(name, text, time=1):
        helpers.write(tmp_path, {name: text})
        os.utime(tmp_path / name, (time, time))
        places = tmp_path / "model", tmp_path / "best"
        return fingerprint([], "", ModelPath(*map(str, places), False))["model"]

    digests = [digest_with("model/a.safetensors", text) for text in ("1", "22")]
    digests.append(digest_with("best/a.safetensors", "1"))
    digests.append(digest_with("model/a.safetensors", "33", time=2))
    assert len(set(digests)) == 4
    assert digest_with("model/README.md", "does not count") == digests[-1]


def test_a_model_of_the_hub_counts_with_its_revision(monkeypatch):
    path = "/hub/models--org--m/snapshots/0123456789abcdef/config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: path)
    assert model_parts(ModelPath("org/m", None, False)) == ["0123456789abcdef"]


# No home, no folder, one that cannot be written
@pytest.mark.parametrize("places", [{}, {"HOME": "/dev/null"}, {"XDG_CACHE_HOME": "/proc/nothing"}])
def test_without_a_place_for_a_cache_everything_goes_on(tmp_path, monkeypatch, places):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # has no entry in /etc/passwd
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    files.remember(files.cache_dir() / "sanity/x.json", {"degenerate": "x"})
    assert degenerate(load_task("titanic")) is None
    with contextlib.closing(Sandbox("local")) as box:
        assert box.run("echo x > /dev/null && echo written", 10).output == "written\n"
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_goes_on_with_other_code_and_is_marked(begun, capsys):
    for _ in range(2):
        run = opened(begun, {"code": "changed"})
        assert len(run.rows()) == 1
        run.lock.close()
    assert capsys.readouterr().out.count("was begun by other code") == 1
    assert files.read_mapping(begun / "config.yaml")["fingerprint"]["code"] == ["a", "changed"]


def test_a_finished_run_of_the_same_makers_is_left_alone_and_that_of_others_is_refused(begun):
    run = opened(begun)
    run.update_result(status="finished")
    run.lock.close()
    before = {path: path.read_bytes() for path in begun.glob("*.*")}
    run = opened(begun)
    assert run.finished
    run.lock.close()
    with user_error("another version of the code: choose another --name"):
        opened(begun, {"code": "changed"})
    assert before == {path: path.read_bytes() for path in before}


def test_another_task_or_model_and_a_run_without_digests_are_refused(begun):
    with user_error("another version of the prompts and the model: choose"):
        opened(begun, {"prompts": "x", "model": "x"})
    config = begun / "config.yaml"
    config.write_text(config.read_text().partition("fingerprint:")[0])
    with user_error("another version of the prompts and the task and the model"):
        opened(begun)
    config.write_text(f"{config.read_text()}fingerprint: a")
    with user_error("config.yaml is damaged: it ends too early"):
        opened(begun)


def test_a_renamed_or_copied_run_goes_on(begun):
    shutil.copytree(begun, begun.with_name("copy"))
    begun.rename(begun.with_name("renamed"))
    for name in ("copy", "renamed"):
        run = opened(begun.with_name(name), name=name)
        assert len(run.rows()) == 1
        assert files.read_mapping(run.dir / "config.yaml")["name"] == name


# ------------------------------------------------------------------ rows


def test_resume_keeps_the_rows_and_replaces_a_cut_last_line(begun):
    with open(begun / "metrics.jsonl", "a") as out:
        out.write('{"step": 1, "rew')
    run = opened(begun, steps=9)
    assert files.read_mapping(begun / "config.yaml")["steps"] == 9
    run.log(step_row(1))
    assert run.rows() == [step_row(0), step_row(1)]


def test_resume_drops_what_is_newer_than_the_checkpoint_and_the_final_comparison(tmp_path):
    run = opened(tmp_path)
    for when in "0 1 before eval-0 eval-1 final-best final-last".split():
        run.save_episodes(when, [helpers.episode(0.7, when=when, packed=b"x")])
    for step in (0, 1):
        run.log(step_row(step))
    run.truncate_after(0)
    assert [row["step"] for row in run.rows()] == [0]
    kept = Counter(path.name.partition(".")[0] for path in (tmp_path / "transcripts").iterdir())
    assert kept == {"000000": 2, "before": 2, "eval-000000": 2}
    assert [row["when"] for row in store.read_episodes(tmp_path)] == ["0", "before", "eval-0"]
    run.truncate_after(-1)  # the run begins anew
    assert not any((tmp_path / "transcripts").iterdir()) and not store.read_episodes(tmp_path)


def test_numbers_and_texts_survive_the_way_through_json(tmp_path):
    run = opened(tmp_path)
    text = "line\nline\u2028 \ud800 é \x00"
    tracked = []
    run.trackers.append(tracked.append)
    row = {"step": np.int64(3), "a": np.float32(0.5), "inf": math.inf, "text": text}
    run.log(row)
    assert tracked == [row]
    assert run.rows() == [{"step": 3, "a": 0.5, "inf": None, "text": text}]


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    run = opened(tmp_path)
    run.update_result(status="running")
    monkeypatch.setattr(files, "to_disk", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        run.update_result(status="finished")
    with user_error("another"), start.recorded([run]):  # no room to say so
        raise UserError("another")
    assert run.result == files.read_mapping(tmp_path / "result.json") == {"status": "running"}
    assert not list(tmp_path.rglob(".tmp-*"))


LONG_NAME = f"No: {'a' * 80}..."


def in_a_task(error):
    return ExceptionGroup("tasks", [ExceptionGroup("more", [error])])


@pytest.mark.parametrize(
    "error, code, said, status",
    [
        (in_a_task(UserError("Take a name.")), 2, "Take a name.", "failed: Take a name."),
        (in_a_task(SandboxFault("gone")), 1, "broke: gone", "failed: The sandbox broke: gone"),
        (OSError(errno.ENOSPC, "No space"), 2, "] No space. E", "failed: [Errno 28] No space. E"),
        (OSError(errno.ENAMETOOLONG, "No", "a" * 99), 2, LONG_NAME, f"failed: {LONG_NAME}"),
        (KeyboardInterrupt(), 130, "", "interrupted"),
        (in_a_task(ZeroDivisionError("hushhush0")), 1, "Error: $MY_KEY", "failed: ZeroDivisionErr"),
    ],
)
def test_what_ended_a_run_is_one_sentence_here_and_in_its_result(
    tmp_path, capsys, monkeypatch, error, code, said, status
):
    monkeypatch.setenv("MY_KEY", "hushhush0")
    runs = [opened(tmp_path / name) for name in "ab"]
    runs[1].update_result(status="finished")

    def main():
        with start.recorded(runs):
            raise error

    with pytest.raises(SystemExit) as end:
        cli.one_sentence(main)
    assert end.value.code == code
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert runs[0].result["status"].startswith(status) and "hushhush0" not in str(runs[0].result)
    assert runs[1].result["status"] == "finished"


# ------------------------------------------------------------------ whole or absent


def test_checkpoint_appears_whole_and_old_ones_go(tmp_path):
    run = opened(tmp_path)
    for step in range(4):
        with run.checkpoint(step):
            pass
    (tmp_path / "checkpoints/of_a_user").mkdir()
    with pytest.raises(RuntimeError), run.checkpoint(4):
        raise RuntimeError
    assert [step for step, _ in run.checkpoints()] == [2, 3]
    assert not list(tmp_path.rglob(".tmp-*"))


def test_what_a_killed_writer_left_is_removed_or_comes_back(tmp_path):
    """Between its two renames the new directory is not yet there, or the old one is still."""
    opened(tmp_path).lock.close()
    for name in (".old-best", "untrained", ".old-untrained", ".tmp-1-best", "checkpoints/.old-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "from").write_text(name)
    (tmp_path / "checkpoints/.tmp-1-4").touch()
    opened(tmp_path)
    left = {file.parent.name: file.read_text() for file in tmp_path.rglob("from")}
    assert left == {"best": ".old-best", "untrained": "untrained", "3": "checkpoints/.old-3"}
    assert not [*tmp_path.rglob(".tmp-*"), *tmp_path.rglob(".old-*")]


WRITER = """
import itertools, os, shutil, sys
from pathlib import Path
from flatlab.runs import store
from flatlab.world.episode import Episode
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
episodes = [Episode("titanic", 0, str(number), "0", prompt="x" * 9_000) for number in range(5)]
for step in itertools.count():
    run.save_episodes("0", episodes)
    with run.checkpoint(step, keep=1) as folder:
        for name in "ab":
            (folder / name).write_bytes(b"x" * 5_000)
    with run.whole_directory("best") as folder:
        (folder / "a").write_bytes(b"x" * 5_000)
    run.log({"step": step})
    run.update_result(step=step)
""".replace("MADE_BY", repr(MADE_BY))


# one turn of the loop has 21 moments
@pytest.mark.parametrize("moment", [7, 37, 49, *map(slow, (0, 14, *range(30, 51)))])
def test_kill_9_leaves_only_whole_files(tmp_path, moment):
    done = python("-c", WRITER, tmp_path, moment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = store.open_run(tmp_path, {"a": 1}, MADE_BY)  # the lock is gone, leftovers are swept
    if moment > 20:
        texts = files.read_rows(tmp_path / "transcripts/000000.jsonl")
        assert [len(each["prompt"]) for each in texts] == [9_000] * 5
        assert [row["id"] for row in store.read_episodes(tmp_path)][:5] == [*"01234"]
        assert (tmp_path / "best/a").stat().st_size == 5_000
        assert run.checkpoints()
        assert run.rows()[0] == {"step": 0}
    for _, folder in run.checkpoints():
        assert [path.stat().st_size for path in folder.iterdir()] == [5_000] * 2
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".lock"]


# ------------------------------------------------------------------ config


@dataclass(frozen=True)
class Nested:
    model: ModelOptions = ModelOptions()
    episode: EpisodeOptions = EpisodeOptions()
    tau: Number = 0.5
    steps: Whole = 1
    minutes: Positive | None = None
    names: tuple[str, ...] = ("x",)
    seeds: tuple[int, ...] = (0,)
    rule: Literal["a", "b"] | None = None
    name: str | None = None
    flag: bool = False


@pytest.fixture
def parse(tmp_path):
    """parse(text of a preset, flags): the config."""
    preset = tmp_path / "preset.yaml"

    def parse(text, *flags):
        preset.write_bytes(text.encode())
        [config] = cli.parse_configs(Nested, [str(preset), *flags])
        return config

    return parse


def test_preset_first_and_flags_win_and_nested_options_are_flat(parse):
    preset = "tau: 0.1\nmax_turns: 3\nsteps: 4\nnames: [a, b]\n"
    config = parse(preset, "--episode-minutes", "5", "--steps", "2")
    episode = EpisodeOptions(max_turns=3, episode_minutes=5.0)
    assert config == Nested(episode=episode, tau=0.1, steps=2, names=("a", "b"))
    assert parsed(Nested, "--steps 2") == Nested(steps=2)


DAMAGED = {
    "just words": "'name: value'",
    "tau: 1\ntau: 2": "cannot be used: .*the key tau is given twice",
    "tau: " + "[" * 1_000: "cannot be used: .*maximum recursion",
    "steps: 0x10": "--steps needs a whole number, not '0x10'.",
    "steps: null": "--steps needs a whole number, not 'null'.",
    "minutes: yes": "--minutes needs a number, not 'yes'.",
    "taw: 1": "A preset has the unknown key 'taw'; did you mean tau",
    "tau:\n  tau: 1": "A preset needs one value or a list for 'tau', not {'tau': '1'}",
}


def test_bad_presets(parse, tmp_path):
    with user_error("There is no file or folder .*nothing.yaml; "):
        cli.parse_configs(Nested, [str(tmp_path / "nothing.yaml")])
    for text, sentence in DAMAGED.items():
        with user_error(sentence):
            parse(text)


TEXTS = ("no", "on", "1_000", "1.50", "1e3", "0123", "2026-11-26", "1:30")


def test_a_value_of_a_preset_is_the_text_in_the_file(parse):
    for text, expected in {
        f"names: [{', '.join(TEXTS)}]": {"names": TEXTS},
        "name: on\nflag: on\nsteps: 010": {"name": "on", "flag": True, "steps": 10},
        "tau: 1e-5": {"tau": 1e-5},
        "minutes: ~\nname: null\nsteps: !!int 3\nflag: false": {"steps": 3},
        "minutes:\nflag: YES": {"flag": True},
        "\ufeffname: 12 # twelve\r\nsteps: 3\r\n": {"name": "12", "steps": 3},
        "<<: {steps: 5}\nnames: &a [1.0]": {"steps": 5, "names": ("1.0",)},
    }.items():
        assert parse(text) == Nested(**expected)


WRONG_VALUES = {
    "--tau abc": "--tau needs a number, not 'abc'.",
    "--minutes it's": '--minutes needs a number, not "it\'s".',
    "--minutes nan": "--minutes needs a number, not 'nan'.",
    "--tau -inf": "--tau needs a number, not '-inf'.",
    "--minutes=": "--minutes needs a number, not ''.",
    "--steps 1.5": "--steps needs a whole number, not '1.5'.",
    "--seeds 1 x": "--seeds needs a whole number, not 'x'.",
    "--seeds 0,1": "--seeds needs a whole number, not '0,1': separate values by spaces, as in "
    "--seeds 0 1.",
    "--seeds 0 --seeds 1": "--seeds is given twice: write its values after one --seeds.",
    "--thoughts kepe": "Unknown --thoughts 'kepe'; did you mean keep? the names are drop, keep.",
    "--rule 7": "Unknown --rule '7'; the names are a, b.",
    "--rule None": "Unknown --rule 'None'; the names are a, b.",
    "--minutes None": "--minutes needs a number, not 'None'.",
    "--names a\udcff": "This argument is no valid text: 'a\\udcff'.",
    "--names a\0": "This argument is no valid text: 'a\\x00'.",
}


def test_a_wrong_value_is_one_sentence(capsys):
    for flags, sentence in WRONG_VALUES.items():
        with pytest.raises(SystemExit, match="2"):
            cli.one_sentence(partial(cli.parse_configs, Nested, flags.split()))
        assert capsys.readouterr().err == f"{sentence}\n"


SCRIPTS = [evaluate, grpo, learn, search, sft]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_bounds(script):
    kinds = options.kinds_of(script.Config)
    for name, kind in kinds.items():
        if {int, float} & {kind, *get_args(kind)}:
            flag = f"--{name.replace('_', '-')}"
            for value in ("-1", "1e10" if float in {kind, *get_args(kind)} else "10000000000"):
                with user_error(f"{flag}: .*Input should be"):
                    parsed(script.Config, f"{flag} {value}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_assigns_to_a_config(script):
    cfg = script.Config()
    for owner in (cfg, *filter(is_dataclass, vars(cfg).values())):
        name = fields(owner)[0].name
        with pytest.raises(FrozenInstanceError):
            setattr(owner, name, getattr(owner, name))


def test_several_values_make_a_run_each_and_the_seed_varies_first():
    words = "--seed 0 1 --sampling-mode none tail"
    cfgs = cli.parse_configs(search.Config, words.split())
    found = [(cfg.sampling_mode, cfg.seed) for cfg in cfgs]
    assert found == [("none", 0), ("none", 1), ("tail", 0), ("tail", 1)]
    assert {type(cfg) for cfg in cfgs} == {search.Config}
    assert options.marked(search.Config, "several") == ["seed", "sampling_mode", "task"]
    may_change = {"steps", "concurrency", "micro_tokens", "gpu_memory", "trackers"}
    assert {*options.marked(grpo.Config, "resumable")} == may_change


@pytest.fixture
def shown(capsys):
    """shown(a Config): what --help prints."""

    def shown(config):
        with pytest.raises(SystemExit):
            cli.parse_configs(config, ["--help"])
        return capsys.readouterr().out

    return shown


def test_the_help_names_no_default_that_is_none(shown):
    """The comment of such an option tells what holds instead."""
    text = shown(Nested)
    assert "--minutes" in text
    assert "(default: 0.5)" in text
    assert not re.search("None\\)|default: \\)", text)


def test_the_help_begins_with_the_flags_that_people_use(shown):
    for config, first in {
        grpo.Config: "name seed steps groups group-size reward lr kl",
        search.Config: "name seed nodes sampling-mode select workers url",
    }.items():
        flags = re.findall(r"^. --([a-z-]+)", shown(config), re.MULTILINE)
        assert " ".join(flags).startswith(first)


def test_a_first_bare_value_has_its_flag_and_no_color_is_kept(monkeypatch):
    def start(task: str = ""):
        return task

    for words in ("titanic", "--task titanic"):
        monkeypatch.setattr(sys, "argv", ["tasks.py", *words.split()])
        assert cli.call(start) == "titanic"
        assert parsed(grpo.Config, words).tasks.task == ("titanic",)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    cli.one_sentence(lambda: None)
    assert os.environ["TERM"] == "dumb"


def test_the_help_shows_what_is_derived_for_a_model_and_for_the_stand_in(shown):
    text = " ".join(re.sub("[│╭╰─]", "", shown(grpo.Config)).split())
    assert "of AdamW (default: 2e-05, stand-in 0.001)" in text
    assert "(default: 16384, stand-in 2048)" in text
    assert "2 P (default: 8)" in text


def test_the_first_line_needs_no_torch():
    """The model and its context are read from config.json."""
    code = (
        "import sys, grpo; sys.argv = ['grpo.py', '--model', 'tiny', '--name', 'no-such-run']; "
        "[cfg], model = grpo.start.configs(grpo.Config, 'grpo'); "
        "print(cfg.model.context, model.stand_in, {'torch', 'transformers'} & {*sys.modules})"
    )
    assert python("-c", code).stdout == "2048 True set()\n"


def test_a_closed_pipe_is_no_traceback_also_during_a_search():
    command = f"{sys.executable} viz.py --help | true"
    done = subprocess.run(command, shell=True, cwd=PROJECT, capture_output=True)
    assert done.stderr == b""
    code = (
        "from flatlab.runs.cli import one_sentence\n"
        "def main(): raise ExceptionGroup('', [BrokenPipeError()])\n"
        "one_sentence(main)"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_script_ends_at_once_after_its_exit_functions():
    """Nothing is taken apart any more; the exit code is that of main()."""
    code = """
import atexit, sys
from flatlab.runs.cli import run
class Model:
    def __del__(self):
        print("taken apart")
model = Model()
atexit.register(print, "exit function")
run(lambda: sys.exit({}))
"""
    for status in (0, 3):
        done = python("-c", code.format(status))
        assert (done.returncode, done.stdout) == (status, "exit function\n")


@pytest.mark.parametrize("is_terminal, end", [(False, "\n"), (True, "\r")])
def test_what_takes_long_says_how_long(monkeypatch, capsys, is_terminal, end):
    """A terminal has one line, which ends when it is over; what is fast says nothing."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    with heartbeat.heartbeat("closing"):
        pass
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    with heartbeat.heartbeat("engine   is starting"):
        time.sleep(0.1)
    said = capsys.readouterr().out
    assert said.startswith(2 * f"engine   is starting (0 s){end}")
    played = itertools.count()
    with heartbeat.heartbeat(lambda: f"{next(played)} of 8 episodes"):
        time.sleep(0.1)
    assert f"0 of 8 episodes (0 s){end}1 of 8 episodes (0 s){end}" in capsys.readouterr().out
    monkeypatch.setattr(policy, "ChatTokens", lambda base: time.sleep(0.1) or SimpleNamespace())
    policy.token_counter(Nested(), ModelPath("m", None, False))
    assert f"tokenizer is loading (0 s){end}" in capsys.readouterr().out
    assert said.count("\n") == 1 if is_terminal else said.count("\r") == 0


def test_ctrl_c_says_at_once_that_it_stops_and_then_how_long_it_takes(monkeypatch, capsys):
    """Then the work says nothing of itself any more."""
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    said = []

    async def work():
        with heartbeat.heartbeat("2 nodes have ended"):
            await asyncio.sleep(0.1)
            try:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)
            finally:
                said.append(capsys.readouterr())
                await asyncio.sleep(0.1)  # a sandbox ends
                said.append(capsys.readouterr().out)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(heartbeat.stoppable(work()))
    before, after = said
    assert before.out.startswith("2 nodes have ended (0 s)\n2 nodes have ended (0 s)\n")
    assert before.err == "\nstopping: sandboxes and replies in flight are being ended\n"
    assert {*after.splitlines()} == {"stopping (0 s)"}


def test_a_wrong_key_of_wandb_is_one_sentence(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # settings of earlier tests
    monkeypatch.setenv("WANDB_API_KEY", "wrong-key")
    with user_error("^--trackers wandb cannot be used: "):
        trackers.open_wandb(SimpleNamespace(dir=tmp_path, config={}))
    wandb.teardown()  # its settings of this process
