"""viz.py --export: tables of whole runs, read by datasets and trained on by TRL's trainers."""

import copy
import json

import pytest

import viz
from flatlab.episode.episode import Episode, Segment
from flatlab.errors import UserError
from flatlab.runs import store
from flatlab.runs.store import packed_tokens
from helpers import (
    CONFIG,
    PROJECT,
    RESULT,
    episode,
    node,
    python,
    search_result,
    step_row,
    turn,
)

pytestmark = pytest.mark.usefixtures("quick_provenance")
SEGMENT = {"tokens": [5, 6, 7], "mask": [0, 1, 1], "logprobs": [0.0, -0.5, -1.0]}
HOSTILE = "a \ud800 lone surrogate and a\u2028line"


def played(reward, *replies, group=0, outputs=("out",), **more):
    """A row of episodes/*.jsonl of a training run."""
    outputs = [*outputs, "out", "out"]
    is_valid = reward is not None and reward > -1
    row = episode(0.7 if is_valid else None, **more)
    row["turns"] = [turn(*texts) for texts in zip(replies, outputs)]
    row["group"] = group
    row["reward"] = reward
    return row


STEP = [
    played(0.5, "look", "good"),
    played(-1.0, "look", "bad"),
    played(0.2, "other", "bad"),
    played(None, "look", group=0, status="fault"),
    played(0.3, "same", group=1),
    played(0.3, "same", group=1),
    played(0.4, "time", "good", group=2, outputs=["1.1 s"]),
    played(0.1, "time", "bad", group=2, outputs=["1.2 s"]),
]


@pytest.fixture
def training(tmp_path):
    run = store.open_run(tmp_path / "training", CONFIG)
    run.result(**RESULT)
    run.save_episodes(0, STEP)
    run.log(step_row(0))
    return run


@pytest.fixture
def tree(tmp_path):
    """Two nodes that answered the same prompt, a third that answered another."""
    run = store.open_run(tmp_path / "tree", CONFIG | {"sampling_mode": "none"})
    rows = [
        node("0.0", 0.7, order=0),
        node("0.1", None, order=1),
        node("0.2", 0.9, order=2),
    ]
    rows[2]["improvement"] = 7.5
    run.result(**search_result(rows))
    for row in rows:
        prompt = "Improve." if row["id"] == "0.2" else "Predict."
        tokens = packed_tokens([Episode("titanic", 0, segments=[Segment(**SEGMENT)])])
        run.save_episodes(row["order"], [{"node": row["id"], "prompt": prompt}], tokens)
        run.log(row, "journal.jsonl")
    return run


def table(folder, name):
    lines = (folder / f"{name}.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def export(tmp_path, *runs):
    folder = tmp_path / "out" / "export"
    viz.main(viz.Options(tuple(run.dir for run in runs), export=folder))
    return folder


def texts(messages):
    return [message["content"] for message in messages]


def test_episodes_hold_messages_masks_and_rewards_but_no_fault(tmp_path, training, capsys):
    step = copy.deepcopy(STEP)
    step[0]["turns"][0]["status"] = "rejected"
    training.save_episodes(0, step)
    rows = table(export(tmp_path, training), "episodes")
    assert "episodes       7 rows" in capsys.readouterr().out
    assert [row["id"] for row in rows] == ["0.0", "0.1", "0.2", "0.4", "0.5", "0.6", "0.7"]
    assert texts(rows[0]["messages"]) == ["Predict who survived.", "look", "out", "good"]
    assert [m["role"] for m in rows[0]["messages"]] == ["user", "assistant"] * 2
    assert rows[0]["mask"] == [0, 0, 0, 1]  # a rejected reply is nothing to imitate
    assert [row["reward"] for row in rows][:3] == [0.5, -1.0, 0.2]
    assert [row["score"] for row in rows][:3] == [0.7, None, 0.7]


def test_replies_to_imitate_are_those_of_different_episodes_with_a_reward(tmp_path, training):
    rows = table(export(tmp_path, training), "sft")
    assert texts(rows[0]["prompt"]) == ["Predict who survived."]
    assert texts(rows[0]["completion"]) == ["look"]
    assert texts(rows[1]["prompt"]) == ["Predict who survived.", "look", "out"]
    assert texts(rows[1]["completion"]) == ["good"]
    assert [row["id"] for row in rows] == [
        "0.0",
        "0.0",
        "0.2",
        "0.2",
        "0.4",
        *["0.6"] * 2,
        *["0.7"] * 2,
    ]


def test_pairs_begin_at_the_first_reply_that_differs(tmp_path, training):
    """No pair: equal rewards (group 1), and the same replies with other observations (group 2)."""
    (row,) = table(export(tmp_path, training), "dpo")
    assert row["chosen_id"] == "0.0" and row["rejected_id"] == "0.1"
    assert texts(row["prompt"]) == ["Predict who survived.", "look", "out"]
    assert texts(row["chosen"]) == ["good"]
    assert texts(row["rejected"]) == ["bad"]


def test_nodes_of_a_search_with_their_tokens(tmp_path, tree, training):
    folder = export(tmp_path, tree, training)
    nodes = [row for row in table(folder, "episodes") if row["run"] == "tree"]
    assert [row["reward"] for row in nodes] == [0.7, -1.0, 1.0]  # clipped; -1: failed
    assert all(row["task"] == "titanic" for row in nodes)
    tokens = table(folder, "tokens")
    assert [row["id"] for row in tokens] == ["0.0", "0.1", "0.2"]
    assert tokens[0]["input_ids"] == SEGMENT["tokens"]
    assert tokens[0]["assistant_masks"] == SEGMENT["mask"]
    assert tokens[0]["logprobs"] == SEGMENT["logprobs"]
    (pair,) = [row for row in table(folder, "dpo") if row["run"] == "tree"]
    assert pair["chosen_id"] == "0.0" and pair["rejected_id"] == "0.1"


def test_any_text_is_one_line_of_utf_8(tmp_path, training):
    training.save_episodes(0, [played(1.0, HOSTILE)])
    folder = export(tmp_path, training)
    (row,) = table(folder, "sft")
    assert texts(row["completion"]) == [HOSTILE.replace("\ud800", "?")]
    assert not (folder / "dpo.jsonl").exists()
    assert "dpo" not in (folder / "README.md").read_text()


def test_what_cannot_be_exported_is_one_sentence(tmp_path, training):
    with pytest.raises(UserError, match="is not empty: name a new folder"):
        viz.main(viz.Options((training.dir,), export=training.dir))
    training.save_episodes(0, [episode(0.7)])
    with pytest.raises(UserError, match="recorded no rewards, because an older version"):
        export(tmp_path, training)
    assert not (tmp_path / "out").exists()


def test_it_needs_neither_torch_nor_datasets(tmp_path, training):
    done = python("-X", "importtime", "viz.py", training.dir, "--export", tmp_path / "new")
    assert done.returncode == 0
    assert (tmp_path / "new" / "sft.jsonl").exists()
    for package in ("torch", "datasets"):
        assert f"| {package}\n" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "episodes", "tokens"])
def test_trl_trains_a_step(name, tmp_path, tree, training, monkeypatch):
    """The loss is on the replies alone; no column was renamed and no row was changed."""
    datasets = pytest.importorskip("datasets", reason="optional: pip install trl")
    trl = pytest.importorskip("trl", reason="optional: pip install trl")
    from transformers import AutoTokenizer

    folder = export(tmp_path, tree, training)
    cache = str(tmp_path / "cache")
    rows = datasets.load_dataset(str(folder), name, split="train", cache_dir=cache)
    assert [row["task"] for row in rows] == ["titanic"] * len(table(folder, name))
    model = str(PROJECT / "configs" / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(model)
    config, trainer_class = trl.SFTConfig, trl.SFTTrainer
    if name == "dpo":
        config, trainer_class = trl.DPOConfig, trl.DPOTrainer
    args = config(
        output_dir=str(tmp_path / "trained"),
        max_steps=1,
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = trainer_class(model, args=args, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    if name == "dpo":
        trained = batch["input_ids"][batch["completion_mask"] == 1]
    else:
        trained = batch["labels"][batch["labels"] != -100]
    text = tokenizer.decode(trained)
    if name == "tokens":
        assert sorted(trained.tolist()) == [6, 6, 6, 7, 7, 7]
    else:
        assert "good" in text and ("Predict" in text) == (name == "episodes")
    assert trainer.train().training_loss > 0
