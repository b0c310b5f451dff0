"""The loop of grpo.py: sampling ahead of the update, and Ctrl-C. With the real engine; an episode
is one reply between two waits.
"""

import asyncio
import errno
import gc
import signal
import threading
from collections import Counter
from itertools import count

import pytest

import env
import grpo
from flatlab.files import read_rows
from flatlab.train import checkpoint, job, metrics
from flatlab.world.episode import in_thread
from helpers import attempts_of, slow
from training import (
    episodes_of,
    has_weights,
    randomise,
    result_of,
    versions_of,
    waiting_reply,
    weights_of,
)


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
    for step, episodes in enumerate(episodes_of(6)):
        assert len(episodes) >= 8
        assert [e["seed"] for e in episodes] == [step * 100_003 + i for i in range(len(episodes))]
        assert versions_of(episodes) <= set(range(max(0, step - ahead), step + 1))
    for name in ("eval-2", "eval-5"):
        assert len(versions_of(attempts_of("logs/a", name))) == 1
    stale = [row for row in rows if row["compared_tokens"] == 0]
    assert bool(stale) == bool(ahead)
    assert not any("logprob_diff_mean" in row for row in stale)
    assert 0 < max(row.get("logprob_diff_max", 0) for row in rows) < policy.diff_limit


def test_faults_and_equal_rewards_change_nothing_about_the_plan(play):
    """Replacement groups are played for the step whose groups they replace."""

    async def episode(world, *more):
        fixed = {"score": 0.7 if world.seed % 3 else None, "faulty": lambda seed: seed % 7 == 0}
        return await waiting_reply(world, *more, **fixed)

    rows = play(episode=episode, steps=4, ahead=2, concurrency=12)
    seeds = Counter(e["seed"] for episodes in episodes_of(4) for e in episodes)
    assert set(seeds.values()) == {1}
    assert sum(row["faults"] for row in rows) > 0
    assert max(row["groups"] for row in rows) == 3
    assert max(row["lag_max"] for row in rows) <= 2


def test_a_collapse_ends_the_run_and_the_episodes_of_later_steps(play, monkeypatch):
    monkeypatch.setattr(metrics, "KL_LIMIT", 0)
    cancelled = []

    async def episode(world, *more):
        if world.seed // 100_003 < 4:
            return await waiting_reply(world, *more)
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.append(world.seed)

    rows = play(episode=episode, steps=9, ahead=2, concurrency=32)
    assert len(rows) == 4
    assert {seed // 100_003 for seed in cancelled} <= {4, 5}
    assert cancelled, "the episodes of the steps after the collapse"
    assert len(play(episode=waiting_reply, steps=9)) == 4  # also if it was killed before the end


def test_a_step_is_recorded_while_the_next_one_is_sampled(play, monkeypatch):
    """And before the next update, which changes the weights; an error of writing ends the run."""
    begun, write_step, are_equal = threading.Event(), checkpoint.write_step, []

    async def episode(world, *more):
        if world.seed >= 100_003:
            begun.set()
        return await waiting_reply(world, *more)

    def slow_write(policy, optimizer, job, row, groups):
        before = weights_of(policy)
        assert begun.wait(30)
        write_step(policy, optimizer, job, row, groups)
        are_equal.append(has_weights(policy, before))
        if row["step"] == 1:
            raise OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr(checkpoint, "write_step", slow_write)
    with pytest.raises(OSError, match="No space"):
        play(episode=episode, steps=4)
    assert are_equal == [True, True]


PHASES = {  # function that is interrupted, at its first call 0
    "evaluate": (env, "Env", 1),
    "sample": (env, "Env", 12),
    "learn": (grpo, "micro_loss", 2),
    "judge": (checkpoint, "keep_best", 1),
    "record": (checkpoint, "write_step", 1),
    "compare": (checkpoint, "final_adapters", 0),
}


@pytest.mark.parametrize(
    "phase", ["learn", *map(slow, "sample evaluate judge record compare".split())]
)
def test_ctrl_c_in_a_phase_and_the_same_command_again(play, monkeypatch, recwarn, phase):
    owner, name, last = PHASES[phase]
    function, calls = getattr(owner, name), count()

    def interrupted(*args, **options):
        if next(calls) == last:
            signal.raise_signal(signal.SIGINT)
            if threading.current_thread() is not threading.main_thread():
                assert job.INTERRUPTED.wait(30)
        return function(*args, **options)

    options = {"episode": waiting_reply, "steps": 3, "ahead": 1, "eval_episodes": 2}
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(**options, eval_every=2)
    if phase == "learn":
        assert next(calls) == 3  # the update ended after the micro-batch
    rows = play(**options, eval_every=2)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert result_of()["status"] == "finished"
    assert not job.INTERRUPTED.is_set()
    gc.collect()
    assert not [w for w in recwarn if "never awaited" in str(w.message)]


def test_a_failed_later_step_ends_the_run_and_all_episodes(play):
    begun, ended = [], []

    async def episode(world, *more):
        begun.append(world.seed)
        try:
            if world.seed // 100_003 == 3:  # its groups begin when step 0 is made
                raise ZeroDivisionError
            return await waiting_reply(world, *more)
        finally:
            ended.append(world.seed)

    with pytest.raises(ZeroDivisionError):
        play(episode=episode, steps=6, ahead=2)
    steps = [row["step"] for row in read_rows("logs/a/metrics.jsonl")]
    assert steps and steps == list(range(len(steps)))
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
    assert changed.logprobs[:5] == pytest.approx(undisturbed.logprobs[:5], abs=1e-5)
    assert changed.logprobs != pytest.approx(undisturbed.logprobs, abs=1e-5)
    assert changed.version == undisturbed.version == policy.version - 1


def test_free_slots_go_to_the_earliest_step():
    slots, order = job.Slots(1), []

    async def hold(step):
        async with slots.slot(step):
            order.append(step)
            await asyncio.sleep(0.01)

    async def main():
        holders = [asyncio.create_task(hold(step)) for step in (5, 3, 2, -1, 2)]
        await asyncio.sleep(0)
        holders[2].cancel()
        await asyncio.wait(holders)

    asyncio.run(main())
    assert order == [5, -1, 2, 3]
    assert slots.free == 1


def test_an_iterator_without_a_next_value_in_a_thread_ends_the_run():
    for waits in (in_thread, job.in_trainer):
        with pytest.raises(RuntimeError, match="no next value"):
            asyncio.run(asyncio.wait_for(waits(next, iter(())), 10))
