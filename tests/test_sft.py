"""flatlab/train/imitation.py: which episodes are imitated, that their tokens are those of RL, and
that imitation works.
"""

import json
import shutil

import pytest
import torch

import training
from flatlab.model.chat import ChatTokens, Sample
from flatlab.options import EpisodeOptions
from flatlab.train import imitation
from flatlab.train.ranks import Job
from flatlab.world.episode import History
from helpers import PROJECT, configure, turn, user_error
from training import TASK

LIMITS = EpisodeOptions(max_observation_tokens=64)
CFG = configure(training.CFG, micro_tokens=4096, sft_lr=3e-3, sft_updates=6)


def episode(score, *turns, task="titanic", valid=True, **more):
    result = {"value": score, "metric": "accuracy", "split": "validation", "valid": valid}
    whole = {
        "task": task,
        "seed": 0,
        "prompt": "Do it.",
        "turns": list(turns),
        "status": "submit",
        "score": result,
    }
    return whole | more


@pytest.fixture
def run(tmp_path):
    def write(*episodes, file="a/episodes/000000.jsonl"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(e) + "\n" for e in episodes))
        return str(tmp_path / "a")

    return write


def chosen_replies(where, share):
    """The first replies of the episodes that are imitated."""
    chosen = imitation.best_episodes([where], [TASK], share)
    return [e["turns"][0]["reply"] for e in chosen]


def test_the_best_different_valid_episodes_that_beat_the_baseline(run):
    where = run(
        episode(0.70, turn("b")),
        episode(0.78, turn("a")),
        episode(0.78, turn("a")),
        episode(0.5, turn("worse")),
        episode(None, turn("nothing"), valid=False),
        episode(0.79, turn("x"), task="other"),
        episode(0.75, turn("c")),
        episode(0.74, turn("d")),
        episode(None, turn("e")) | {"score": None, "status": "fault"},
    )
    assert chosen_replies(where, 1.0) == ["a", "c", "d", "b"]
    assert chosen_replies(where, 0.5) == ["a", "c"]
    assert chosen_replies(where, 0.01) == ["a"]
    node = episode(0.79, turn("a node of a search"), node="0.1", segments=[])
    deeper = run(node, file="a/tail-0/episodes/000001.jsonl")
    assert chosen_replies(deeper, 0.01) == ["a node of a search"]


def test_evaluations_are_not_imitated(run):
    """Their seeds select the best adapter and compare adapters at the end."""
    where = run(episode(0.75, turn("trained")))
    for name in ("before", "eval-000009", "final-untrained", "final-best"):
        run(episode(0.79, turn(name)), file=f"a/episodes/{name}.jsonl")
    assert chosen_replies(where, 1.0) == ["trained"]


def test_nothing_to_imitate_is_one_sentence(run, tmp_path):
    with user_error("no run directory"):
        imitation.best_episodes([str(tmp_path / "nowhere")], [TASK], 0.5)
    with user_error("beats the baseline"):
        imitation.best_episodes([run(episode(0.5, turn("a")))], [TASK], 0.5)


def test_tokens_and_masks_are_those_of_rl(policy):
    """The same turns, once as the episode loop records them and once from the transcript."""
    turns = [
        turn("first", "one"),
        turn("cut off", "two", stop_reason="length"),
        turn("third", "y" * 500),
        turn("no block", status="rejected"),
        turn("last", "four"),
    ]
    history = History(policy, "Do it.", 64)
    advantage = []
    for t in turns:
        has_ended = t["stop_reason"] == "stop"
        tokens = policy.encode(t["reply"]) + [policy.tokenizer.eos_token_id] * has_ended
        sample = Sample(tokens, [0.0] * len(tokens), t["reply"], t["stop_reason"], 0)
        history.add(sample, t["observation"])
        advantage += [float(has_ended and t["status"] == "ok")] * len(tokens)
    [piece] = imitation.sequences_from(episode(0.78, *turns), policy, LIMITS)
    assert piece.tokens == history.segment.tokens[: len(piece.tokens)]
    assert piece.mask == history.segment.mask[: len(piece.mask)]
    assert sum(piece.mask) == sum(history.segment.mask)
    assert piece.advantage == advantage


def test_both_end_tokens_end_a_reply(tmp_path):
    """A fine-tuned model may keep the generation_config.json of its base model."""
    folder = shutil.copytree(PROJECT / "configs/tiny", tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert ChatTokens(str(folder)).stop_tokens == {0, 2}


def test_a_small_limit_of_observations_holds(policy):
    for limit in (0, 1, 2):
        assert History(policy, "Do it.", limit).cap("0123456789" * 3).endswith("left out ...]\n")


def test_no_episode_that_fits_is_one_sentence(policy, run, monkeypatch):
    cfg = configure(CFG, sft=(run(episode(0.78, turn("```bash\nsubmit\n```"))),))
    monkeypatch.setattr(policy, "context", 8)
    with user_error("--sft: no episode fits into --context 8"):
        imitation.warm_start(policy, [TASK], cfg, Job())


def test_an_episode_that_does_not_fit_is_cut(policy):
    turns = [turn(c * 700, "o" * 50) for c in "abcd"]
    pieces = imitation.sequences_from(episode(0.78, *turns), policy, LIMITS)
    assert pieces
    assert all(len(p.tokens) <= policy.context for p in pieces)
    assert sum(len(p.old) for p in pieces) < 4 * 701


def test_imitation_raises_the_probability_of_the_replies(policy, run, capsys):
    first = turn("```bash\npython3 best.py\n```", "ok")
    ends = [turn(f"```bash\nsubmit\n``` {i}") for i in range(8)]
    where = run(*(episode(0.78, first, end) for end in ends))
    cfg = configure(CFG, sft=(where,))
    [piece] = imitation.sequences_from(episode(0.78, first), policy, LIMITS)

    def mean_logprob():
        with torch.no_grad():
            return policy.logprobs([(piece.tokens, piece.mask)])[0].mean()

    before = mean_logprob()
    imitation.warm_start(policy, [TASK], cfg, Job())
    assert mean_logprob() > before + 0.1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "imitate  2 episodes, 6 updates"
    assert len(lines) == 7
    assert lines[1].startswith("imitate  1 of 6: ")
    assert "nats per token, ETA 0m" in lines[1]
