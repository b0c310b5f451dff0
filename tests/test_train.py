"""flatlab/train: sampling ahead of the update, and imitation. With the real engine; an episode is
two replies with waits between them.
"""

import asyncio
import gc
import json
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
import torch

import grpo
import helpers
import training
from flatlab.files import read_rows
from flatlab.model.chat import ChatTokens, Sample
from flatlab.options import EpisodeOptions
from flatlab.train import imitation, job, metrics
from flatlab.train.job import Job
from flatlab.world.episode import Episode, History
from helpers import PROJECT, configure, turn, user_error
from training import TASK, randomise, waiting_reply


def episodes_of(steps, name="a"):
    return [read_rows(f"logs/{name}/episodes/{step:06d}.jsonl") for step in range(steps)]


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_lag_is_bounded_and_every_planned_group_is_trained_once(play, policy, ahead):
    """And an evaluation is of one version, while later steps are sampled.

    Engine and trainer are compared on current tokens only. On others, the check would end the run:
    an update moves the log-probs by more than its limit.
    """
    options = {"eval_episodes": 6, "eval_every": 3, "concurrency": 32, "guarded": False}
    rows = play(episode=waiting_reply, steps=6, ahead=ahead, lr=0.05, **options)
    assert [row["step"] for row in rows] == list(range(6))
    assert max(row["lag_max"] for row in rows) == ahead
    versions = []
    for step, episodes in enumerate(episodes_of(6)):
        assert len(episodes) >= 8
        assert [e["seed"] for e in episodes] == [step * 100_003 + i for i in range(len(episodes))]
        versions.append({turn["version"] for e in episodes for turn in e["turns"]})
    for step, sampled in enumerate(versions):
        assert sampled <= set(range(max(0, step - ahead), step + 1))
    for name in ("eval-000002", "eval-000005"):
        episodes = read_rows(f"logs/a/episodes/{name}.jsonl")
        assert len({turn["version"] for e in episodes for turn in e["turns"]}) == 1
    stale = [row for row in rows if row["judged_tokens"] == 0]
    assert bool(stale) == bool(ahead)
    assert all("logprob_diff_mean" not in row for row in stale)
    fresh = [row["logprob_diff_max"] for row in rows if row["judged_tokens"]]
    assert fresh and max(fresh) < policy.diff_limit


def test_faults_and_equal_rewards_change_nothing_about_the_plan(play):
    """Replacement groups are played for the step whose groups they replace."""
    scores = count()

    async def episode(world, policy, options, seed, *more):
        equal = 0.7 if next(scores) % 3 else None
        faulty = lambda seed: seed % 7 == 0  # noqa: E731
        return await waiting_reply(world, policy, options, seed, *more, faulty=faulty, score=equal)

    rows = play(episode=episode, steps=4, ahead=2, concurrency=12)
    seeds = Counter(e["seed"] for episodes in episodes_of(4) for e in episodes)
    assert set(seeds.values()) == {1}
    assert sum(row["faults"] for row in rows) > 0
    assert max(row["groups"] for row in rows) == 3
    assert max(row["lag_max"] for row in rows) <= 2


def test_a_collapse_ends_the_run_and_the_episodes_of_later_steps(play, monkeypatch):
    monkeypatch.setattr(metrics, "KL_LIMIT", 0)
    cancelled = []

    async def episode(world, policy, options, seed, *more):
        if seed // 100_003 < 4:
            return await waiting_reply(world, policy, options, seed, *more)
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.append(seed)

    rows = play(episode=episode, steps=9, ahead=2, concurrency=32)
    assert len(rows) == 4
    assert {seed // 100_003 for seed in cancelled} <= {4, 5}
    assert cancelled, "the episodes of the steps after the collapse"
    assert len(play(episode=waiting_reply, steps=9)) == 4  # also if it was killed before the end


def test_ctrl_c_in_an_update_and_the_same_command_again(play, monkeypatch):
    micro_loss, calls = grpo.micro_loss, count()

    def interrupted(*args):
        if next(calls) == 2:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)  # the main thread handles the signal
        return micro_loss(*args)

    monkeypatch.setattr(grpo, "micro_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(episode=waiting_reply, steps=4, ahead=2)
    done = len(read_rows("logs/a/metrics.jsonl"))
    assert done < 4
    # the update ended after the micro-batch, or after the next one on a busy machine
    assert next(calls) in (3, 4)
    rows = play(episode=waiting_reply, steps=4, ahead=2)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert not job.INTERRUPTED.is_set()


def test_ctrl_c_between_two_waits_leaves_no_coroutine_behind(play, monkeypatch, recwarn):
    def update(*args):
        signal.raise_signal(signal.SIGINT)
        assert job.INTERRUPTED.wait(30)
        return {}

    monkeypatch.setattr(grpo, "update", update)
    with pytest.raises(KeyboardInterrupt):
        play(episode=waiting_reply, steps=2)
    gc.collect()
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


def test_a_failed_later_step_ends_the_run_and_all_episodes(play):
    begun, ended = [], []

    async def episode(world, policy, options, seed, *more):
        begun.append(seed)
        try:
            if seed // 100_003 == 2:  # a group of step 2
                raise ZeroDivisionError
            return await waiting_reply(world, policy, options, seed, *more)
        finally:
            ended.append(seed)

    with pytest.raises(ExceptionGroup):
        play(episode=episode, steps=6, ahead=2)
    assert [row["step"] for row in read_rows("logs/a/metrics.jsonl")] == [0, 1]
    assert any(seed // 100_003 > 2 for seed in begun)
    assert sorted(ended) == sorted(begun), "the episodes in flight were cancelled"


def test_a_sync_while_a_reply_is_sampled(policy, monkeypatch):
    """The tokens before it are those of the old adapter, the ones after it are not."""
    prompt = policy.render([{"role": "user", "content": "count"}])
    steps = []
    step_engine = policy.step_engine
    monkeypatch.setattr(policy, "step_engine", lambda: steps.append(1) or step_engine())

    async def sample(changes):
        reply = asyncio.ensure_future(policy.sample(prompt, 60, seed=3))
        steps.clear()
        while len(steps) < 20:
            await asyncio.sleep(0)
        if changes:
            assert not reply.done()
            randomise(policy, std=0.3)
            policy.sync()
            assert (await policy.sample(prompt, 4, seed=3)).version == policy.version
        return await reply

    undisturbed = asyncio.run(sample(False))
    changed = asyncio.run(sample(True))
    pairs = zip(undisturbed.logprobs, changed.logprobs)
    same = [a == pytest.approx(b, abs=1e-5) for a, b in pairs]
    assert all(same[:5])
    assert not all(same)
    assert changed.version == undisturbed.version == policy.version - 1


def test_free_slots_go_to_the_earliest_step():
    slots, order = job.Slots(1), []

    async def hold(step):
        async with slots.slot(step):
            order.append(step)
            await asyncio.sleep(0.01)

    async def main():
        first = asyncio.create_task(hold(5))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(hold(step)) for step in (3, 2, -1, 2)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.gather(first, *waiting, return_exceptions=True)

    asyncio.run(main())
    assert order == [5, -1, 2, 3]
    assert slots.free == 1


# ------------------------------------------------------------------ imitation

LIMITS = EpisodeOptions(max_observation_tokens=64)
CFG = configure(training.CFG, micro_tokens=4096, sft_lr=3e-3, sft_updates=6)


def episode(value, *turns, **more):
    return helpers.episode(value) | {"prompt": "Do it.", "turns": turns} | more


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
        episode(None, turn("nothing")),
        episode(0.79, turn("x"), task="other"),
        episode(0.75, turn("c")),
        episode(0.74, turn("d")),
        episode(None, turn("e"), score=None, status="fault"),
    )
    assert chosen_replies(where, 1.0) == ["a", "c", "d", "b"]
    assert chosen_replies(where, 0.5) == ["a", "c"]
    assert chosen_replies(where, 0.01) == ["a"]
    node = episode(0.79, turn("a node of a search"), node="0.1", segments=[])
    deeper = run(node, file="a/tail-0/episodes/000001.jsonl")
    assert chosen_replies(deeper, 0.01) == ["a node of a search"]
    # the seeds of evaluations select and compare adapters
    run(episode(0.79, turn("judged")), file="a/episodes/eval-000009.jsonl")
    assert "judged" not in chosen_replies(deeper, 1.0)


def test_nothing_to_imitate_is_one_sentence(policy, run, tmp_path, monkeypatch):
    with user_error("no run directory"):
        imitation.best_episodes([str(tmp_path / "nowhere")], [TASK], 0.5)
    with user_error("beats the baseline"):
        imitation.best_episodes([run(episode(0.5, turn("a")))], [TASK], 0.5)
    cfg = configure(CFG, sft=(run(episode(0.78, turn("a"))),))
    monkeypatch.setattr(policy, "context", 8)
    with user_error("--sft: no episode fits into --context 8"):
        imitation.warm_start(policy, [TASK], cfg, Job())


def test_tokens_and_masks_are_those_of_rl(policy):
    """The same turns, once as the episode loop records them and once from the transcript."""
    turns = [
        turn("first", "one"),
        turn("cut off", "two", stop_reason="length"),
        turn("third", "y" * 500),
        turn("no block", status="rejected"),
        turn("too slow", status="timeout"),
        turn("last", "four"),
    ]
    history = History(policy, LIMITS, "Do it.")
    played = Episode("titanic", 0)
    advantage = []
    for t in turns:
        has_ended = t["stop_reason"] == "stop"
        tokens = policy.encode(t["reply"]) + [policy.tokenizer.eos_token_id] * has_ended
        sample = Sample(tokens, [0.0] * len(tokens), t["reply"], t["stop_reason"], 0)
        played.add(history.tokens(), sample, t)
        history.add(sample, t["observation"])
        advantage += [float(has_ended and t["status"] == "ok")] * len(tokens)
    [piece] = imitation.sequences_from(episode(0.78, *turns), policy, LIMITS)
    [segment] = played.segments
    assert piece.tokens == segment.tokens
    assert piece.mask == segment.mask
    assert piece.advantage == advantage


def test_both_end_tokens_end_a_reply(tmp_path):
    """A fine-tuned model may keep the generation_config.json of its base model."""
    folder = shutil.copytree(PROJECT / "configs/tiny", tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert ChatTokens(str(folder)).stop_tokens == {0, 2}


def test_a_small_limit_of_observations_holds(policy):
    for limit in (0, 1, 2):
        history = History(policy, replace(LIMITS, max_observation_tokens=limit), "Do it.")
        assert history.cap("0123456789" * 3).endswith("left out ...]\n")


def test_an_episode_that_does_not_fit_is_cut(policy):
    turns = [turn(c * 700, "o" * 50) for c in "abcd"]
    pieces = imitation.sequences_from(episode(0.78, *turns), policy, LIMITS)
    assert pieces
    assert all(len(p.tokens) <= policy.context for p in pieces)
    assert sum(len(p.old) for p in pieces) < 4 * 701


def test_imitation_raises_the_probability_of_the_replies(policy, run, capsys):
    first = turn("```bash\npython3 best.py\n```", "ok")
    where = run(*(episode(0.78, first, turn(f"submit {i}")) for i in range(8)))
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
