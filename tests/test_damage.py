"""Damaged files of runs: the run goes on from what is whole, or one sentence names the file."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import evaluate
import sft
from flatlab.errors import UserError
from flatlab.files import load_tensors, save_tensors
from flatlab.runs import store
from flatlab.train import checkpoint
from flatlab.train.job import TrainingRun
from flatlab.world.episode import Episode
from helpers import MADE_BY, episode, user_error
from test_search import opened, run
from training import TASK, valid

WHOLE = Path("logs/whole")


@pytest.fixture
def trained(play):
    """A run of three steps, of which the last two have checkpoints."""
    play(name="whole", steps=3)


def write(name, change):
    """Changes a file in a copy of the run."""
    return lambda run: (run / name).write_bytes(change((run / name).read_bytes()))


def state(change):
    """Changes the optimizer's state in the newest checkpoint."""

    def damage(run):
        file = run / NEWEST / "trainer.pt"
        saved = load_tensors(file)
        change(saved["optimizer"]["state"])
        save_tensors(saved, file)

    return damage


def set_nan(state):
    state[1]["exp_avg"][0, 0] = torch.nan


def other_rank(state):
    state[1]["exp_avg_sq"] = state[1]["exp_avg_sq"][:, :-1].clone()


NEWEST = "checkpoints/000002"
WAYS = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: b"\xff\x00garbage\n" * 50,
}
CHECKPOINT = {"trainer.pt": "trainer.pt", "adapter_model.safetensors": "the adapter in"}
SKIPPED = {
    **{
        f"{f} {w}": (words, write(f"{NEWEST}/{f}", WAYS[w]))
        for f, words in CHECKPOINT.items()
        for w in WAYS
    },
    **{
        f"{f} gone": (words, lambda run, f=f: (run / NEWEST / f).unlink())
        for f, words in CHECKPOINT.items()
    },
    "NaN": ("exp_avg of parameter 1 holds NaN", state(set_nan)),
    "other rank": ("exp_avg_sq of parameter 1 has the shape", state(other_rank)),
    "other content": ("trainer.pt", lambda run: save_tensors([1], run / NEWEST / "trainer.pt")),
    "a row less": (
        "lacks steps",
        write("metrics.jsonl", lambda data: b"".join(data.splitlines(True)[:2])),
    ),
    "a cut row": ("lacks steps", write("metrics.jsonl", lambda data: data[:-5])),
}
REFUSED = {
    **{
        f"{name} {way}": (name, write(f"{name}/adapter_model.safetensors", change))
        for name in ("untrained", "best")
        for way, change in WAYS.items()
    },
    "no untrained/": ("untrained", lambda run: shutil.rmtree(run / "untrained")),
    "no best/": ("best", lambda run: shutil.rmtree(run / "best")),
    "no evaluation.json": ("evaluation.json", lambda run: (run / "best/evaluation.json").unlink()),
    "no metrics.jsonl": ("lacks steps", lambda run: (run / "metrics.jsonl").unlink()),
    **{f"metrics {w}": ("metrics.jsonl", write("metrics.jsonl", WAYS[w])) for w in WAYS},
    **{f"result {w}": ("result.json", write("result.json", WAYS[w])) for w in WAYS},
    **{f"config {w}": ("", write("config.yaml", WAYS[w])) for w in WAYS},
}


def resumed(policy, damage):
    """Resumes a damaged copy of the run: its job and its rows."""
    copy = Path("logs/copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(WHOLE, copy)
    damage(copy)
    config = {"task": ["titanic"], "steps": 9}
    run = store.open_run(copy, config, MADE_BY, {"steps"}, lambda run: "no" in run.result)
    job = TrainingRun(run=run)
    compared = ("untrained", "best")
    try:
        return job, checkpoint.resume(policy, policy.make_optimizer(1), job, compared=compared)
    finally:
        run.lock.close()


def test_every_damaged_file_is_skipped_or_one_sentence(policy, trained, capsys):
    for name, (words, damage) in SKIPPED.items():
        job, rows = resumed(policy, damage)
        said = capsys.readouterr().out
        assert [row["step"] for row in rows] == [0, 1], name
        assert job.step == 2, name
        assert words in said and "is skipped" in said, name
        assert "resumed after step 1" in said, name
    for name, (words, damage) in REFUSED.items():
        with pytest.raises(UserError) as caught:
            resumed(policy, damage)
        assert words in str(caught.value), name
        assert "choose another --name" in str(caught.value), name
        assert "\n" not in str(caught.value), name
    job, rows = resumed(policy, lambda run: None)
    assert job.step == len(rows) == 3


def test_a_damaged_file_of_a_search_is_one_sentence(tmp_path, monkeypatch, quick_provenance):
    monkeypatch.chdir(tmp_path)
    tree = run(nodes=3, score_of=lambda node: 0.6)
    for file in (tree.run.dir / "journal.jsonl", tree.run.dir / "result.json"):
        whole = file.read_bytes()
        for change in (*WAYS.values(), lambda data: data.partition(b"\n")[2], lambda data: b"[]\n"):
            file.write_bytes(change(whole))
            with user_error(f"{file} .*choose another --name"):
                opened(nodes=3)
        file.write_bytes(whole)
    file = tree.run.dir / "journal.jsonl"
    file.unlink()
    with user_error(f"{file} is damaged: it holds 0 nodes of 3"):
        opened(nodes=3)
    node = tree.finished[0]
    file = tree.tar_of(node)
    for change in (*WAYS.values(), None):
        file.unlink() if change is None else file.write_bytes(change(file.read_bytes()))
        with user_error(f"{file} is missing or damaged: .*node {node.id}.*choose another --name"):
            tree.files_of(node)


def test_a_damaged_episode_of_an_evaluation_is_one_sentence(tmp_path):
    evaluation = store.open_run(tmp_path / "a", {}, MADE_BY)
    evaluation.save_episodes(0, [Episode("titanic", 1, score=valid(0.7, TASK)).to_dict()])
    assert [*evaluate.stored_episodes(evaluation, [TASK])] == [0]
    [file] = evaluation.dir.glob("episodes/*")
    whole = file.read_bytes()
    for change in (*WAYS.values(), lambda data: 2 * data, lambda data: b'{"seed": 1}\n'):
        file.write_bytes(change(whole))
        with user_error(f"{file} is damaged: remove it, and its episode is played again"):
            evaluate.stored_episodes(evaluation, [TASK])
    file.unlink()
    assert not evaluate.stored_episodes(evaluation, [TASK])
    evaluation.lock.close()


def test_damaged_episodes_are_not_imitated(tmp_path):
    file = tmp_path / "000000.jsonl"
    line = json.dumps(episode(0.7)).encode() + b"\n"
    file.write_bytes(3 * line)
    assert len(sft.read_episodes(file)) == 3
    for change in (*WAYS.values(), lambda data: data[:-5], lambda data: b'{"seed": 1}\n'):
        file.write_bytes(change(3 * line))
        with user_error(f"{file} is damaged"):
            sft.read_episodes(file)
