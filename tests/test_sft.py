"""flatlab/train/imitation.py: which episodes are imitated, that their tokens are those of RL, and
that imitation works.
"""

import asyncio
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import training
from flatlab.chat import ChatTokens
from flatlab.episode.episode import History
from flatlab.errors import UserError
from flatlab.train import imitation
from flatlab.train.distributed import SingleProcess
from helpers import PROJECT, configure
from training import TASK, randomise

CFG = configure(training.CFG, micro_tokens=4096, sft_lr=3e-3, sft_updates=6)


def turn(reply, observation="done", status="ok", stop_reason="stop"):
    return {
        "reply": reply,
        "observation": observation,
        "status": status,
        "stop_reason": stop_reason,
        "action": "x",
    }


def episode(score, *turns, task="titanic", prompt="Do it.", valid=True, **more):
    return {
        "task": task,
        "seed": 0,
        "prompt": prompt,
        "turns": list(turns),
        "status": "submit",
        "score": {
            "value": score,
            "metric": "accuracy",
            "split": "validation",
            "valid": valid,
            "message": "",
        },
        **more,
    }


@pytest.fixture
def run(tmp_path):
    def write(*episodes, file="a/episodes/000000.jsonl"):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(e) + "\n" for e in episodes))
        return str(tmp_path / "a")

    return write


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
        {**episode(0.9, turn("e")), "score": None, "status": "fault"},
    )
    chosen = imitation.best_episodes([where], [TASK], 0.5)
    assert [e["turns"][0]["reply"] for e in chosen] == ["a", "c"]
    assert [e["turns"][0]["reply"] for e in imitation.best_episodes([where], [TASK], 0.01)] == ["a"]
    deeper = run(
        episode(0.79, turn("a node of a search"), node="0.1", segments=[]),
        file="a/tail-0/episodes/000001.jsonl",
    )
    assert imitation.best_episodes([deeper], [TASK], 0.01)[0]["node"] == "0.1"


def test_evaluations_are_not_imitated(run):
    """Their seeds select the best adapter and compare adapters at the end."""
    trained = run(episode(0.75, turn("trained")))
    for name in ("before", "eval-000009", "final-untrained", "final-best"):
        run(episode(0.79, turn(name)), file=f"a/episodes/{name}.jsonl")
    (chosen,) = imitation.best_episodes([trained], [TASK], 1.0)
    assert chosen["turns"][0]["reply"] == "trained"


def test_nothing_to_imitate_is_one_sentence(run, tmp_path):
    with pytest.raises(UserError, match="no run directory"):
        imitation.best_episodes([str(tmp_path / "nowhere")], [TASK], 0.5)
    with pytest.raises(UserError, match="beats the baseline"):
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
    for t in turns:
        tokens = policy.encode(t["reply"]) + [policy.tokenizer.eos_token_id] * (
            t["stop_reason"] == "stop"
        )
        history.add(
            SimpleNamespace(
                tokens=tokens, logprobs=[0.0] * len(tokens), stop_reason=t["stop_reason"]
            ),
            t["observation"],
        )
    [piece] = imitation.sequences_from(episode(0.78, *turns), policy, 64)
    assert piece.tokens == history.segment.tokens[: len(piece.tokens)]
    assert piece.mask == history.segment.mask[: len(piece.mask)]
    assert sum(piece.mask) == sum(history.segment.mask)
    wanted = [
        a
        for t in turns
        for a in [float(t["status"] == "ok" and t["stop_reason"] == "stop")]
        * (len(t["reply"]) + (t["stop_reason"] == "stop"))
    ]
    assert piece.advantage == wanted


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
    with pytest.raises(UserError, match="--sft: no episode fits into --context 8"):
        imitation.warm_start(policy, [TASK], cfg, SingleProcess())


def test_an_episode_that_does_not_fit_is_cut(policy):
    turns = [turn(c * 700, "o" * 50) for c in "abcd"]
    pieces = imitation.sequences_from(episode(0.78, *turns), policy, 64)
    assert pieces
    assert all(len(p.tokens) <= policy.context for p in pieces)
    assert sum(len(p.old) for p in pieces) < 4 * 701


def test_imitation_raises_the_probability_of_the_replies(policy, run, capsys):
    where = run(
        *(
            episode(
                0.78, turn("```bash\npython3 best.py\n```", "ok"), turn(f"```bash\nsubmit\n``` {i}")
            )
            for i in range(8)
        )
    )
    cfg = configure(CFG, sft=(where,))
    [piece] = imitation.sequences_from(
        episode(0.78, turn("```bash\npython3 best.py\n```")), policy, 64
    )
    with torch.no_grad():
        before = policy.logprobs([(piece.tokens, piece.mask)])[0].mean()
    imitation.warm_start(policy, [TASK], cfg, SingleProcess())
    with torch.no_grad():
        after = policy.logprobs([(piece.tokens, piece.mask)])[0].mean()
    assert after > before + 0.1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "imitate  2 episodes, 6 updates"
    assert len(lines) == 7
    assert lines[1].startswith("imitate  1 of 6: ")
    assert "nats per token, ETA 0m" in lines[1]


def test_the_whole_share_is_all_that_beat_the_baseline(run):
    scores = (0.5, 0.7, 0.72, 0.74, 0.76)
    where = run(*(episode(score, turn(str(score))) for score in scores))
    assert len(imitation.best_episodes([where], [TASK], 1.0)) == 4
    assert len(imitation.best_episodes([where], [TASK], 0.5)) == 2


def some_logprobs(policy, base):
    tokens = policy.render([{"role": "user", "content": "one two three"}])
    with torch.no_grad():
        return policy.logprobs([(tokens, [0] + [1] * (len(tokens) - 1))], base=base)[0]


def test_the_reference_is_the_imitated_adapter_not_the_base_model(policy, tmp_path):
    raw = some_logprobs(policy, base=True)
    randomise(policy, 1)
    policy.save(tmp_path)
    imitated = some_logprobs(policy, base=False)
    randomise(policy, 2)
    policy.set_reference(tmp_path)
    trained = some_logprobs(policy, base=False)
    assert torch.equal(some_logprobs(policy, base=True), imitated)
    assert torch.equal(some_logprobs(policy, base=False), trained)
    assert not torch.allclose(imitated, raw)
    assert not torch.allclose(imitated, trained)
    found = asyncio.run(policy.verify()).values()
    assert max(a.largest for a in found) <= policy.max_diff_limit
