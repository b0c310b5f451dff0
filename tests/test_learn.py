"""examples/learn.py: a real model and its trainer, with episodes of one reply.

The script itself runs in test_search.py.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import search
import viz
from examples import learn
from flatlab.files import read_rows
from flatlab.options import changed
from flatlab.runs.start import complete_configs
from flatlab.runs.store import EPISODES
from flatlab.tree.nodes import open_trees
from flatlab.view.reader import read_run, transcripts_of
from helpers import TINY_TEXTS, graded, parsed, user_error
from training import TASK, has_weights, one_reply, weights_of


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, quick_provenance):
    monkeypatch.chdir(tmp_path)


def grown(policy, change=lambda node: None, seeds=(0,), **config):
    """Grows a tree for each seed, over episodes of one reply.

    change(node): alters the node that was played.
    """
    options = {"name": "a", "parents": 2, "children": 3, "workers": 6, "lr": 0.01}
    options |= {"max_reply_tokens": 6, "context": 2048, "prompts": TINY_TEXTS, "backend": "local"}
    cfg = changed(learn.Config(), **options | config)
    cfgs = search.named([replace(cfg, seed=seed) for seed in seeds], "learn")
    tasks = {"titanic": replace(TASK, splits=("test",))}
    trees, _ = open_trees(cfgs, tasks, search.SELECT[cfg.select], None)

    async def one(t, node, parents):
        world = SimpleNamespace(task=t.task, seed=node.seed)
        await one_reply(world, t.policy, t.cfg.episode, node)
        node.turns[0]["stop_reason"] = "stop"
        change(node)
        return b"\0" * 10240 + b"{}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "play_node", one)
        try:
            asyncio.run(learn.learn(trees, policy, cfg.workers))
        finally:
            for t in trees:
                t.run.lock.close()
    return trees


def test_a_round_is_picked_played_learned_and_written(policy):
    before = weights_of(policy)
    [t] = grown(policy, nodes=14)
    rows = t.run.rows()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["nodes"] for row in rows] == [6, 12, 14]  # the last round has what was left
    groups = Counter((n.step, n.group, n.parent) for n in t.finished)
    assert sorted(groups.values()) == [2, 3, 3, 3, 3]  # nobody has another parent than its group
    assert not has_weights(policy, before)
    assert rows[0]["logprob_diff_max"] < 1e-3  # the trainer saw what the engine sampled
    assert rows[0]["base_diff"] == 0
    assert rows[1]["base_diff"] > 0
    for row in rows:
        assert row["valid_share"] == 1
        assert row["grad_norm"] > 0
    run = read_run(t.run.dir)
    assert [row["id"] for row in run.rows] == [node.id for node in t.finished]
    for row in run.rows:
        [turn] = transcripts_of(run)(row)["turns"]
        assert (turn["version"], turn["advantage"]) == (row["step"], row["advantage"])
        assert (row["reward"], row["trained"]) == (row["value"], 1)
    groups = viz.list_text(run, step=1).split("\n\n")
    assert len(groups) == 2
    for group in groups:
        assert group.startswith("round 1, group ")
        assert "3 of 3 trained" in group.splitlines()[0]
        assert "1 of 1" in group.splitlines()[-1]  # replies with a loss
    trained = weights_of(policy)
    policy.load_adapter(t.run.dir / "best")
    assert has_weights(policy, trained)


def test_a_run_that_was_cut_in_a_round_goes_on_with_the_adapter_of_its_last_whole_round(policy):
    first = weights_of(policy)

    def cut(node):
        if node.order == 9:
            raise RuntimeError("cut")

    with pytest.raises(ExceptionGroup):
        grown(policy, cut, nodes=18, workers=1)
    assert len(read_rows(Path("logs/a", EPISODES))) == 9
    trained = weights_of(policy)
    assert not has_weights(policy, first)
    for parameter, values in zip(policy.parameters(), first):
        parameter.data.copy_(values)
    loaded = []

    def look(node):
        loaded.append(has_weights(policy, trained))

    [t] = grown(policy, look, nodes=18, workers=1)
    assert loaded[:6] == [True] * 6  # those of the round that came after the cut one
    assert [row["step"] for row in t.run.rows()] == [0, 1, 2]
    assert len(t.finished) == 18


def test_each_tree_of_a_grid_begins_with_the_untrained_adapter_of_its_seed(policy):
    first = {}
    for seed in (1, 0):
        policy.reset(seed)
        first[seed] = weights_of(policy)
    begun = []

    def look(node):
        begun.append([has_weights(policy, first[seed]) for seed in (0, 1)])

    trees = grown(policy, look, seeds=(0, 1), parents=1, nodes=3)
    assert begun == [[True, False]] * 3 + [[False, True]] * 3
    assert all((t.run.dir / "best").is_dir() for t in trees)


def test_the_row_of_a_round_counts_gains_lineages_and_duplicates(policy):
    def scored(node):
        scores = {"0.0": 0.8, "0.1": None, "0.2": 0.9}
        node.judge(TASK, graded(scores.get(node.id, 0.85)))

    [t] = grown(policy, scored, nodes=6, parents=1)
    first, second = t.run.rows()
    assert first["valid_share"] == first["improved_share"] == pytest.approx(2 / 3)
    assert first["live_lineages"] == 3
    assert second.get("grad_norm") is None  # nothing to learn from equal scores
    assert (second["improved_share"], second["largest_lineage_share"]) == (0, 1)
    assert second["gain_mean"] < 0
    for node, text in zip(t.finished, "xyzxaa"):
        node.code = {"a.py": text}
    row = learn.round_row(t, t.finished[3:])
    assert row["duplicate_share"] == pytest.approx(2 / 3)  # x is known, and a comes twice


def test_replies_that_were_cut_carry_no_gradient(policy):
    def cut(node):
        node.turns[0]["stop_reason"] = "length"

    before = weights_of(policy)
    [t] = grown(policy, cut, nodes=6)
    [row] = t.run.rows()
    assert row["cut_share"] == 1
    assert has_weights(policy, before)


BAD_INPUT = {
    "--select bfs": "choose one such as --select puct",
    "--children 1": "--children: Input should be greater than or equal to 2",
    "--parents 0": "--parents: Input should be greater than or equal to 1",
}


def test_bad_input_is_one_sentence_and_all_nodes_of_a_round_run_at_once():
    for flags, sentence in BAD_INPUT.items():
        with user_error(sentence):
            learn.check(parsed(learn.Config, flags))
    [cfg], _ = complete_configs([parsed(learn.Config, "--children 16 --name a --model tiny")])
    assert cfg.workers == 64
    with pytest.raises(SystemExit, match="2"):
        parsed(learn.Config, "--url x")
