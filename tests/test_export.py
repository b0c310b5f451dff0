"""viz.py --export: the replies of runs, read by datasets and trained on by TRL."""

import re

import pytest

import viz
from flatlab.runs import store
from flatlab.runs.reader import read_rows
from helpers import (
    CONFIG,
    MADE_BY,
    PROJECT,
    RESULT,
    episode,
    node,
    python,
    search_result,
    step_row,
    turn,
    user_error,
)

pytestmark = pytest.mark.usefixtures("quick_provenance")
HOSTILE = "a \ud800 lone surrogate and a\u2028line"


def played(reward, *replies, group=0, **more):
    """A row of episodes/*.jsonl of a training run."""
    is_valid = reward is not None and reward > -1
    row = episode(0.7 if is_valid else None, **more)
    row["turns"] = [turn(reply, f"output of {reply}") for reply in replies]
    return row | {"group": group, "reward": reward}


STEP = [
    played(0.5, "look", "good"),
    played(-1.0, "guess", "bad"),
    played(None, "look", status="fault"),
    played(0.3, "same", group=1),
    played(0.3, "same", group=1),
]


@pytest.fixture
def training(tmp_path):
    run = store.open_run(tmp_path / "training", CONFIG, MADE_BY)
    run.result(**RESULT)
    run.save_episodes(0, STEP)
    run.log(step_row(0))
    return run


@pytest.fixture
def tree(tmp_path):
    run = store.open_run(tmp_path / "tree", CONFIG | {"sampling_mode": "none"}, MADE_BY)
    rows = []
    for order, score in enumerate((0.7, None, 0.9)):
        rows.append(node(f"0.{order}", score, order=order))
    rows[2]["improvement"] = 7.5
    run.result(**search_result(rows))
    for row in rows:
        run.save_episodes(row["order"], [{"node": row["id"], "prompt": "Predict."}])
        run.log(row, "journal.jsonl")
    return run


def export(tmp_path, *runs):
    file = tmp_path / "out.jsonl"
    viz.main(viz.Options(tuple(run.dir for run in runs), export=file))
    return file


def exported(tmp_path, *runs):
    return read_rows(export(tmp_path, *runs))


def texts(messages):
    return [message["content"] for message in messages]


def test_a_line_is_a_reply_with_what_was_said_before_it(tmp_path, training, capsys):
    rows = exported(tmp_path, training)
    assert "out.jsonl: 6 replies" in capsys.readouterr().out
    assert [row["id"] for row in rows] == "0.0 0.0 0.1 0.1 0.3 0.4".split()  # no fault
    assert [row["group"] for row in rows] == ["0.0"] * 4 + ["0.1"] * 2
    assert [row["reward"] for row in rows] == [0.5, 0.5, -1.0, -1.0, 0.3, 0.3]
    second = rows[1]
    assert second["turn"] == 1
    assert texts(second["prompt"]) == ["Predict who survived.", "look", "output of look"]
    assert [message["role"] for message in second["prompt"]] == ["user", "assistant", "user"]
    assert second["completion"] == [{"role": "assistant", "content": "good"}]


def test_a_rejected_reply_is_nothing_to_imitate(tmp_path, training):
    row = played(0.5, "look", "good")
    row["turns"][0]["status"] = "rejected"
    training.save_episodes(0, [row])
    assert [row["imitate"] for row in exported(tmp_path, training)] == [False, True]


def test_nodes_of_a_search(tmp_path, tree):
    rows = exported(tmp_path, tree)
    by_id = {row["id"]: row["reward"] for row in rows}
    assert by_id == {"0.0": 0.7, "0.1": -1.0, "0.2": 1.0}  # clipped; -1: failed
    assert {row["task"] for row in rows} == {"titanic"}
    assert {row["group"] for row in rows} == {"Predict."}


def test_any_text_is_one_line_of_utf_8(tmp_path, training):
    training.save_episodes(0, [played(1.0, HOSTILE)])
    [row] = exported(tmp_path, training)
    assert texts(row["completion"]) == [HOSTILE.replace("\ud800", "?")]


def test_a_file_is_not_overwritten(tmp_path, training):
    (tmp_path / "out.jsonl").write_text("mine")
    with user_error("exists already: name a new file"):
        export(tmp_path, training)


def test_it_needs_neither_torch_nor_datasets(tmp_path, training):
    done = python("-X", "importtime", "viz.py", training.dir, "--export", tmp_path / "new.jsonl")
    assert done.returncode == 0
    for package in ("torch", "datasets"):
        assert f"| {package}\n" not in done.stderr


def recipe(word):
    """The block of code in docs/runs.md that holds this word."""
    blocks = re.findall("```python\n(.*?)```", (PROJECT / "docs/runs.md").read_text(), re.S)
    [block] = [block for block in blocks if word in block]
    return block


def test_the_pairs_for_dpo_are_of_different_rewards_and_replies(tmp_path, training, monkeypatch):
    export(tmp_path, training).rename(tmp_path / "my-run.jsonl")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(recipe("chosen"), names)
    [pair] = names["pairs"]
    assert texts(pair["prompt"]) == ["Predict who survived."]
    assert texts(pair["chosen"]) == ["look"]
    assert texts(pair["rejected"]) == ["guess"]


@pytest.mark.slow
def test_trl_imitates_with_the_recipe_of_the_docs(tmp_path, tree, training, monkeypatch):
    """The loss is on the replies alone."""
    pytest.importorskip("datasets", reason="optional: pip install trl")
    trl = pytest.importorskip("trl", reason="optional: pip install trl")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    export(tmp_path, tree, training).rename(tmp_path / "my-run.jsonl")
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    monkeypatch.chdir(tmp_path)
    trainers = []
    quick = {
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }

    class Config(trl.SFTConfig):
        def __init__(self, **options):
            super().__init__(output_dir="trained", **options, **quick)

    class Trainer(trl.SFTTrainer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            trainers.append(self)

    monkeypatch.setattr(trl, "SFTConfig", Config)
    monkeypatch.setattr(trl, "SFTTrainer", Trainer)
    exec(recipe("SFTTrainer"), {})
    [trainer] = trainers
    assert trainer.state.global_step == 1
    batch = next(iter(trainer.get_train_dataloader()))
    text = trainer.processing_class.decode(batch["labels"][batch["labels"] != -100])
    assert "good" in text
    assert "Predict" not in text
