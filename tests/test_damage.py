"""Damaged files of runs: the run goes on from what is whole, or one sentence names the file."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

import evaluate
import sft
from flatlab.files import load_tensors, save_tensors
from flatlab.options import changed
from flatlab.runs import store
from flatlab.train import checkpoint
from flatlab.train.job import TrainingRun
from helpers import MADE_BY, episode, user_error
from test_search import opened, run
from training import TASK

WHOLE = Path("logs/whole")


@pytest.fixture
def trained(play):
    """A run of three steps, of which the last two have checkpoints."""
    play(name="whole", steps=3)


def rewrite(change):
    """A damage of a file: other bytes."""
    return lambda file: file.write_bytes(change(file.read_bytes()))


def state(change):
    """A damage of trainer.pt: another state of the optimizer."""

    def damage(file):
        saved = load_tensors(file)
        change(saved["optimizer"]["state"])
        save_tensors(saved, file)

    return damage


def set_nan(state):
    state[1]["exp_avg"][0, 0] = torch.nan


def other_rank(state):
    state[1]["exp_avg_sq"] = state[1]["exp_avg_sq"][:, :-1].clone()


WAYS = (  # truncated, empty, garbage
    rewrite(lambda data: data[: len(data) // 2]),
    rewrite(lambda data: b""),
    rewrite(lambda data: b"\xff\x00garbage\n" * 50),
)
OTHER_KEYS = rewrite(lambda data: b'{"seed": 1}\n')
GONE = Path.unlink
TRAINER = "checkpoints/000002/trainer.pt"
ADAPTER = "adapter_model.safetensors"
# (file, damage, words)
SKIPPED = (
    *product([TRAINER], [*WAYS, GONE], ["trainer.pt"]),
    *product([f"checkpoints/000002/{ADAPTER}"], [*WAYS, GONE], [ADAPTER]),
    (TRAINER, state(set_nan), "exp_avg of parameter 1 holds NaN"),
    (TRAINER, state(other_rank), "exp_avg_sq of parameter 1 has another shape"),
    (TRAINER, lambda file: save_tensors([1], file), "trainer.pt"),
    ("metrics.jsonl", rewrite(lambda data: b"".join(data.splitlines(True)[:2])), "lacks steps"),
    ("metrics.jsonl", rewrite(lambda data: data[:-5]), "lacks steps"),
)
REFUSED = (
    *product([f"untrained/{ADAPTER}"], [*WAYS, GONE], ["untrained"]),
    *product([f"best/{ADAPTER}"], [*WAYS, GONE], ["best"]),
    *product(["metrics.jsonl"], WAYS, ["metrics.jsonl"]),
    *product(["result.json"], WAYS, ["result.json"]),
    *product(["config.yaml"], WAYS, [""]),
    ("untrained", shutil.rmtree, "untrained"),
    ("best", shutil.rmtree, "best"),
    ("best/evaluation.json", GONE, "evaluation.json"),
    ("metrics.jsonl", GONE, "lacks steps"),
)


def resumed(policy, name="", damage=lambda file: None):
    """Resumes a copy of the run with a damaged file: its job and its rows."""
    copy = Path("logs/copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(WHOLE, copy)
    damage(copy / name)
    config = {"task": ["titanic"], "steps": 9}
    run = store.open_run(copy, config, MADE_BY, {"steps"}, lambda run: "no" in run.result)
    job = TrainingRun(run=run)
    compared = ("untrained", "best")
    try:
        return job, checkpoint.resume(policy, policy.make_optimizer(1), job, compared=compared)
    finally:
        run.lock.close()


def test_the_settings_of_the_optimizer_are_those_of_today(policy, tmp_path):
    """Moments and number of steps are those of the checkpoint, also of one made on a CPU."""

    def learn(optimizer):
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()

    then = torch.optim.AdamW(policy.parameters(), 1.0, (0.5, 0.6), weight_decay=0.7)
    learn(then)
    learn(then)
    policy.save(tmp_path)
    save_tensors({"optimizer": then.state_dict()}, tmp_path / "trainer.pt")
    today = torch.optim.AdamW(policy.parameters(), 1e-3, (0.8, 0.9), weight_decay=0, fused=True)
    checkpoint.restore(policy, today, tmp_path)
    [group] = today.param_groups
    assert (group["fused"], group["lr"], group["betas"]) == (True, 1e-3, (0.8, 0.9))
    assert group["weight_decay"] == 0
    for p in policy.parameters():
        assert torch.equal(today.state[p]["exp_avg"], then.state[p]["exp_avg"])
    learn(today)
    assert {int(state["step"]) for state in today.state.values()} == {3}


def test_every_damaged_file_is_skipped_or_one_sentence(policy, trained, capsys):
    for name, damage, words in SKIPPED:
        job, rows = resumed(policy, name, damage)
        said = capsys.readouterr().out
        assert job.step == len(rows) == 2, (name, words)
        assert words in said and "is skipped" in said, (name, words)
        assert "resumed after step 1" in said, (name, words)
    for name, damage, words in REFUSED:
        with user_error("choose another --name") as caught:
            resumed(policy, name, damage)
        assert words in str(caught.value), (name, words)
        assert "\n" not in str(caught.value), (name, words)
    job, rows = resumed(policy)
    assert job.step == len(rows) == 3


def refused_when_damaged(file, call, sentence, ways):
    """Each damage of a file makes call() raise a UserError with this sentence."""
    whole = file.read_bytes()
    for damage in ways:
        damage(file)
        with user_error(sentence):
            call()
        file.write_bytes(whole)


def test_a_damaged_file_of_a_search_is_one_sentence(tmp_path, monkeypatch, quick_provenance):
    monkeypatch.chdir(tmp_path)
    tree = run(nodes=3, score_of=lambda node: 0.6)

    def again():
        opened(nodes=3)

    rows, result, texts = (
        tree.run.dir / name
        for name in ("episodes.jsonl", "result.json", "transcripts/000001.jsonl")
    )
    ways = *WAYS, rewrite(lambda data: data.partition(b"\n")[2]), rewrite(lambda data: b"[]\n")
    for file in (rows, result):
        refused_when_damaged(file, again, f"{file}.* .*choose another --name", ways)
    other_key = rewrite(lambda data: data.replace(b'"sampling_mode"', b'"mode"'))
    refused_when_damaged(rows, again, f"{rows} cannot be used: ", [other_key])
    refused_when_damaged(texts, again, f"{texts} is missing or damaged: it lacks 0.1", [GONE])
    node = tree.finished[0]
    file = tree.tar_of(node)
    sentence = f"{file} is missing or damaged: .*node {node.id}.*choose another --name"
    refused_when_damaged(file, lambda: tree.files_of(node), sentence, (*WAYS, GONE))
    refused_when_damaged(rows, again, f"{rows} is damaged: it holds 0 nodes of 3", [GONE])
    for name, make in (("journal.jsonl", Path.touch), ("episodes", Path.mkdir)):
        old = tree.run.dir / name
        make(old)
        with user_error("logs/a was made by a version before 2026-11-28"):
            again()
        old.rename(tmp_path / name)


def test_damaged_episodes_are_neither_counted_nor_imitated(tmp_path, quick_provenance):
    run = store.open_run(tmp_path, {}, MADE_BY)
    run.save_episodes("0", [episode(0.7, f"{i}", id=f"{i}", when="0") for i in range(3)])
    run.lock.close()
    cfg = changed(sft.Config(), runs=(f"{tmp_path}",), share=1.0)

    def opened():
        run = store.open_run(tmp_path, {}, MADE_BY)
        run.lock.close()
        return evaluate.stored_rows(run)

    def chosen():
        return sft.best_episodes(cfg, [TASK])

    assert len(opened()) == len(chosen()) == 3
    for name, call, ways in (
        ("episodes.jsonl", opened, (WAYS[2], OTHER_KEYS)),
        ("episodes.jsonl", chosen, (WAYS[2], OTHER_KEYS)),
        ("transcripts/000000.jsonl", chosen, (*WAYS, OTHER_KEYS, GONE)),
    ):
        damaged = "(cannot be used|is damaged|missing or damaged)"
        sentence = f"{tmp_path}/{name}.* {damaged}: .*choose another --name"
        refused_when_damaged(tmp_path / name, call, sentence, ways)
