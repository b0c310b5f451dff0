"""The maths of grpo.py by hand: rewards, advantages, credit, losses, weights; and what the
predecessor's agents exploited.
"""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

import env
import grpo
import helpers
import training
from flatlab.train.batch import Group, TrainSequence, sequences_of
from flatlab.train.distributed import SingleProcess
from helpers import FakePolicy, block, configure
from tasks import load_task
from training import NOTHING, group_of, valid

CFG = configure(training.CFG, max_turns=4, max_reply_tokens=10)
ONE = torch.zeros(4, dtype=torch.long)  # all tokens in one sequence


# ------------------------------------------------------------------------------ rewards


def rewards(name, task, recent, *scores):
    """The rewards of a group with these scores, None: nothing valid."""
    scores = [NOTHING if s is None else valid(s, task) for s in scores]
    return grpo.rewards_of(group_of(task, *scores), configure(CFG, reward=name), recent)


@pytest.fixture
def task():
    return replace(load_task("titanic"), baseline=0.6, reference=0.8)


def test_rewards_by_hand(task):
    by_hand = {  # improvements -0.5, 0, 0.5, 1, 1.75
        "continuous": [-0.5, 0, 0.5, 1, 1],
        "tiered": [0, 0, 0.2, 1, 1],
        "binary": [0, 0, 1, 1, 1],
        "percentile": [0.125, 0.5, 0.75, 1, 1],  # among -0.5, 0, 0, 0.7; equal ones count half
    }
    exact = replace(task, baseline=0.0, reference=1.0)
    for name, expected in by_hand.items():
        found = rewards(name, exact, [-0.5, 0.0, 0.0, 0.7], -0.5, 0.0, 0.5, 1.0, 1.75)
        assert found == pytest.approx(expected), name


def test_rewards_rise_with_the_improvement_and_nothing_is_never_better(task):
    """In either direction of the metric."""
    recent = [0.1, -2.0, 0.4, 0.9]
    mirrored = replace(task, baseline=-0.6, reference=-0.8, higher_is_better=False)
    scores = [s / 50 for s in range(51)]
    for name in grpo.REWARDS:
        found = rewards(name, task, recent, *scores)
        assert found == sorted(found) and found[0] < found[-1], name
        assert rewards(name, mirrored, recent, *(-s for s in scores)) == pytest.approx(found)
        assert rewards(name, task, recent, None)[0] <= min(found), name
        low, high = rewards(name, task, recent, task.baseline, task.reference)
        assert low < high, name


def test_percentile_compares_within_the_group_where_nothing_else_is_known(task):
    """The first step teaches something, also without an evaluation before it."""
    assert rewards("percentile", task, [], 0.1, 0.9, None, 0.9) == pytest.approx(
        [1 / 6, 2 / 3, grpo.NO_SUBMISSION, 2 / 3]
    )
    assert rewards("percentile", task, [0.0], 0.1, 0.9) == [0.0, 1.0]


def test_validate_then_submit_is_not_paid():
    """The predecessor's runs collapsed into `validate`, `submit`: a shared workspace still held a
    sibling's file. Here the short episode gets what nothing is worth, also right after a sibling
    has written a good file, and is pushed down.
    """
    task = load_task("titanic")
    rule = (
        "python3 -c \"import csv; rows = list(csv.DictReader(open('data/test.csv'))); "
        "print('id,survived'); "
        "[print(r['id'] + ',' + str(int({}))) for r in rows]\" > submission.csv"
    )

    def play(*replies):
        policy = FakePolicy(*map(block, replies))
        world = env.Env(task, "local")
        return asyncio.run(helpers.play_once(world, policy, max_turns=len(replies)))

    good = play(rule.format("r['sex'] == 'female'"), "validate", "submit")
    bad = play(rule.format("r['sex'] == 'male'"), "validate", "submit")
    exploits = [
        play("validate", "submit"),
        play("submit"),
        play("validate"),
        play("echo validation score: 1.0", "submit"),
    ]
    assert good.score.valid
    assert bad.score.valid
    assert good.score.value > task.baseline > bad.score.value
    assert not any(e.score.valid for e in exploits)
    played = Group(0, task, [good, bad, *exploits], [])
    for name in grpo.REWARDS:
        found = grpo.rewards_of(played, configure(CFG, reward=name), [0.0, 0.5])
        assert all(r == grpo.NO_SUBMISSION for r in found[2:])
        assert min(found[:2]) >= max(found[2:])
        for estimate in (grpo.group, grpo.group_nostd, grpo.rloo, grpo.max_rl):
            advantages = estimate(found)
            assert advantages[0] > 0 and all(a < 0 for a in advantages[2:]), (name, estimate)


# ------------------------------------------------------------------------------ advantages


def test_group_advantages_by_hand():
    assert grpo.group([0.0, 1.0, 2.0]) == pytest.approx([-1, 0, 1])  # mean 1, std 1
    assert grpo.group([0.0, 4.0]) == pytest.approx(
        [-1 / 2**0.5, 1 / 2**0.5]
    )  # mean 2, std 2 sqrt 2
    assert grpo.group_nostd([0.0, 1.0, 5.0]) == pytest.approx([-2, -1, 3])
    assert grpo.rloo([0.0, 1.0, 5.0]) == pytest.approx([-3, -1.5, 4.5])  # 0 - 3, 1 - 2.5, 5 - 0.5
    assert grpo.ADVANTAGES["ppo"].function([0.3, -1.0]) == [0.3, -1.0]


def test_max_rl_advantages_by_hand():
    """From -1 on, the rewards are 0, 1 and 2 with mean 1; a rare success weighs more."""
    assert grpo.max_rl([-1.0, 0.0, 1.0]) == pytest.approx([-1, 0, 1])
    assert grpo.max_rl([1.0, -1.0, -1.0, -1.0]) == pytest.approx([3, -1, -1, -1])
    assert grpo.max_rl([1.0, 1.0, 1.0, -1.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])


def test_gae_by_hand():
    assert grpo.gae(1.0, [0.2, 0.5, 0.4], 0.0) == pytest.approx(
        [0.3, -0.1, 0.6]
    )  # one step: V' - V, at the end r - V
    assert grpo.gae(1.0, [0.2, 0.5, 0.4], 1.0) == pytest.approx(
        [0.8, 0.5, 0.6]
    )  # the whole return minus V
    assert grpo.gae(1.0, [0.2, 0.5, 0.4], 0.5) == pytest.approx(
        [0.3 + 0.5 * 0.2, -0.1 + 0.5 * 0.6, 0.6]
    )
    assert grpo.gae(1.0, [], 0.9) == []


def test_credit_by_hand():
    turns = [{"status": "ok"}, {"status": "rejected"}, {"status": "submit"}]
    assert grpo.whole_episode(0.5, turns) == [0.5] * 3
    assert grpo.runnable(0.5, turns) == [0.5, 0.0, 0.5]
    assert grpo.runnable(-0.5, turns) == [-0.5] * 3


def finished(masks, stop=("stop", "length", "stop")):
    segments = [
        env.Segment(list(range(len(m))), list(m), [-0.1 * i for i in range(len(m))]) for m in masks
    ]
    return env.Episode(
        "t", 0, segments=segments, turns=[{"stop_reason": s, "status": "ok"} for s in stop]
    )


def test_tokens_get_the_advantage_of_their_reply_across_segments():
    episode = finished([[0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]])
    first, second = sequences_of(episode, [1.0, 2.0, 3.0])
    assert first.advantage == [1, 1, 2]
    assert second.advantage == [3, 3]
    assert first.old == pytest.approx([-0.1, -0.2, -0.4])
    assert second.mask == [0, 0, 0, 0, 1, 1]


def test_replies_that_reached_the_length_limit_can_be_left_out():
    episode = finished([[0, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1]])
    credit = grpo.complete(2.0, episode.turns)
    assert credit == [2.0, None, 2.0]
    first, second = sequences_of(episode, credit)
    assert first.mask == [0, 1, 1, 0, 0]
    assert first.advantage == [2, 2]
    assert second.advantage == [2, 2]
    assert episode.segments[0].mask == [0, 1, 1, 0, 1]  # the episode itself stays as it was
    assert sequences_of(finished([[0, 1, 1]], ["length"]), [None]) == []


# ------------------------------------------------------------------------------ losses


def logs(*values):
    return torch.log(torch.tensor(values))


def test_the_clipped_loss_by_hand():
    old, new = logs(0.5, 0.5, 0.5, 0.5), logs(0.5, 0.75, 0.75, 0.25)  # ratios 1, 1.5, 1.5, 0.5
    advantage = torch.tensor([2.0, 1.0, -1.0, -1.0])
    loss, is_clipped = grpo.clipped(new, old, advantage, ONE, CFG)
    # min(rA, clip(r, .8, 1.28) A): 2; min(1.5, 1.28); min(-1.5, -1.28); min(-0.5, -0.8)
    assert loss.tolist() == pytest.approx([-2.0, -1.28, 1.5, 0.8])
    assert is_clipped.tolist() == [False, True, False, True]
    # GRPO clips as far above as below.
    low, _ = grpo.clipped(new, old, advantage, ONE, configure(CFG, clip_high=0.2))
    assert low.tolist() == pytest.approx([-2.0, -1.2, 1.5, 0.8])


@pytest.mark.parametrize("function", [grpo.clipped, grpo.masked])
def test_a_ratio_is_truncated_but_keeps_its_gradient(function):
    new, old, negative = logs(0.9).requires_grad_(), logs(0.1), torch.tensor([-1.0])
    loss, _ = function(new, old, negative, ONE[:1], CFG)  # ratio 9, A < 0: nothing clips it
    loss.sum().backward()
    assert loss.item() == pytest.approx(2.0)
    assert new.grad.item() == pytest.approx(2.0)
    loss, _ = function(new, old, negative, ONE[:1], configure(CFG, is_cap=100.0))
    assert loss.item() == pytest.approx(9.0)


def test_gspo_by_hand_and_its_gradient_is_that_of_the_sequence_form():
    cfg = configure(CFG, clip_low=3.0, clip_high=3.0)  # no clipping yet
    old = logs(0.5, 0.5, 0.5, 0.2)
    new = logs(0.5, 0.25, 0.5, 0.4).requires_grad_()
    sequence, advantage = torch.tensor([0, 0, 0, 1]), torch.tensor([1.0, 1.0, 1.0, -2.0])
    loss, _ = grpo.sequence_clipped(new, old, advantage, sequence, cfg)
    s = [0.5 ** (1 / 3), 2.0]  # (1 * 1/2 * 1)^(1/3), 2
    assert loss.tolist() == pytest.approx([-s[0]] * 3 + [2 * s[1]])
    weight = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0]) / 2  # per episode, two of them
    (loss * weight).sum().backward()
    # eq. 5: -1/2 sum_i s_i A_i, differentiated as it stands
    free = new.detach().clone().requires_grad_()
    (-((free - old)[:3].mean().exp() * 1.0 + (free - old)[3].exp() * -2.0) / 2).backward()
    assert torch.allclose(new.grad, free.grad)
    tight = configure(cfg, clip_low=0.1, clip_high=0.1)
    # s below 1 with A > 0, above 1 with A < 0: the pessimistic side counts
    _, is_clipped = grpo.sequence_clipped(new, old, advantage, sequence, tight)
    assert not is_clipped.any()
    _, is_clipped = grpo.sequence_clipped(new, old, -advantage, sequence, tight)
    assert is_clipped.all()


def test_cispo_by_hand():
    """A clipped token still has a gradient."""
    old, new = logs(0.1, 0.5, 0.5), logs(0.9, 0.25, 0.5).requires_grad_()  # ratios 9, 0.5, 1
    cfg = configure(CFG, clip_low=1.0, clip_high=4.0)
    advantage = torch.tensor([1.0, -1.0, 2.0])
    loss, is_clipped = grpo.clipped_weight(new, old, advantage, ONE[:3], cfg)
    expected = [-5 * math.log(0.9), 0.5 * math.log(0.25), -2 * math.log(0.5)]
    assert loss.tolist() == pytest.approx(expected)
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-5.0, 0.5, -2.0])
    assert is_clipped.tolist() == [True, False, False]


def test_dppo_by_hand():
    """Only a probability that moved too far in the direction of its advantage is masked."""
    old = logs(0.5, 0.5, 0.5, 0.5, 0.001)
    new = logs(0.75, 0.75, 0.25, 0.25, 0.0015).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    cfg = configure(CFG, clip_low=0.2, clip_high=0.2)
    loss, is_masked = grpo.masked(new, old, advantage, torch.zeros(5), cfg)
    assert is_masked.tolist() == [True, False, False, True, False]
    assert loss.tolist() == pytest.approx([0, 1.5, -0.5, 0, -1.5])
    loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([0, 1.5, -0.5, 0, -1.5])
    _, is_clipped = grpo.clipped(new, old, advantage, torch.zeros(5), CFG)
    assert is_clipped.tolist() == [True, False, False, True, True]  # the rare token, too
    wide = configure(cfg, clip_low=0.3, clip_high=0.2)
    _, is_masked = grpo.masked(new, old, advantage, torch.zeros(5), wide)
    assert is_masked.tolist() == [True, False, False, False, False]


def test_kl_by_hand_and_its_gradient_pulls_towards_the_base():
    logp = logs(0.5).requires_grad_()
    k3 = grpo.kl_to_base(logp, logs(0.25))
    assert k3.item() == pytest.approx(0.5 - math.log(0.5) - 1)
    k3.sum().backward()
    assert logp.grad.item() > 0  # descent lowers logp: it is above the base's
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    mean = (p * grpo.kl_to_base(p.log(), q.log())).sum()
    assert mean.item() == pytest.approx((p * (p / q).log()).sum().item())  # unbiased


def test_weights_by_hand():
    """Two episodes of 2 and 6 tokens: every kind of mean over the same losses."""
    losses, lengths = [3.0, 7.0], [2, 6]
    for weight, expected in (
        (grpo.per_token, (2 * 3 + 6 * 7) / 8),
        (grpo.per_episode, (3 + 7) / 2),
        (grpo.per_budget, (2 * 3 + 6 * 7) / (2 * 40)),
    ):
        assert sum(
            n * loss * weight(n, 8, 2, CFG) for n, loss in zip(lengths, losses)
        ) == pytest.approx(expected)


def test_on_samples_of_the_current_policy_every_loss_has_the_policy_gradient():
    torch.manual_seed(0)
    for loss in grpo.LOSSES.values():
        logp, advantage = torch.randn(5).requires_grad_(), torch.randn(5)
        value, is_clipped = loss.function(
            logp,
            logp.detach(),
            advantage,
            torch.tensor([0, 0, 1, 1, 1]),
            configure(CFG, clip_low=loss.clip_low, clip_high=loss.clip_high),
        )
        value.sum().backward()
        assert torch.allclose(logp.grad, -advantage)
        assert not is_clipped.any()


# ------------------------------------------------------------------------------ the batch of a step


def played(task, *episodes_and_rewards):
    rewards = [r for e, r in episodes_and_rewards if e.status != "fault"]
    return Group(0, task, [e for e, _ in episodes_and_rewards], rewards)


def test_faults_and_equal_rewards_are_not_in_the_batch(task):
    episode = finished([[0, 1, 1, 0, 1]], ["stop", "stop"])
    fault = replace(episode, status="fault")
    equal = played(task, (episode, 0.3), (episode, 0.3), (fault, None))
    different = played(task, (episode, 1.0), (fault, None), (episode, 0.0))
    assert not equal.informative
    assert different.informative
    assert not played(task, (fault, None)).informative
    batch = grpo.make_batch(
        None,
        [equal, different],
        configure(CFG, loss="dapo", advantage="group_nostd"),
        SingleProcess(),
    )
    assert [p.advantage for p in batch] == [[0.5] * 3, [-0.5] * 3]  # mean 0.5 of two, not of three
    assert [p.weight for p in batch] == pytest.approx([1 / 6, 1 / 6])
    assert grpo.make_batch(None, [equal], CFG, SingleProcess()) == []


def test_ppo_whitens_its_advantages_and_sets_targets(task):
    episode = finished([[0, 1, 1, 0, 1]], ["stop", "stop"])

    class Values:
        packs = True

        def logprobs(self, pairs, values):
            return None, None, torch.tensor([0.1, 0.2, 0.3] * len(pairs))

    cfg = configure(CFG, loss="dapo", advantage="ppo", micro_tokens=100)
    batch = grpo.make_batch(
        Values(), [played(task, (episode, 1.0), (episode, 1.0))], cfg, SingleProcess()
    )
    for p in batch:  # returns minus values: 0.9 0.8 0.7, mean 0.8
        assert p.target == pytest.approx([1, 1, 1])
        assert p.advantage == pytest.approx(
            [0.1 / (0.02 / 3) ** 0.5, 0, -0.1 / (0.02 / 3) ** 0.5], abs=1e-5
        )


def test_groups_are_filled_up_to_the_bound(monkeypatch, task):
    """Equal rewards: another group, until P informative ones or the bound; seeds never repeat."""
    seeds = []

    async def run_episode(world, policy, options, seed, score_test):
        seeds.append(seed)
        number = (seed - 7 * 100_003) // 4
        await asyncio.sleep(0)
        return env.Episode(
            world.task.name,
            seed,
            turns=[],
            score=valid(0.7 if number < 3 else 0.6 + 0.1 * (seed % 2)),
        )

    monkeypatch.setattr(grpo, "run_episode", run_episode)
    cfg = configure(CFG, group_size=4)

    def play(*more):
        seeds.clear()
        return asyncio.run(
            grpo.play_groups(None, grpo.Plan([task] * 2, 4, 7, more), cfg, SingleProcess())
        )

    assert [g.number for g in play()] == [0, 1]
    assert len(seeds) == 8
    other = replace(task, name="other")
    groups = play(other, *[task] * 7)
    assert [g.informative for g in groups] == [False, False, False, True, True]
    assert len(set(seeds)) == 20
    assert [g.task.name for g in groups] == ["titanic", "titanic", "other", "titanic", "titanic"]
    assert [g.number for g in play(task, task)] == [0, 1, 2, 3]


def test_tasks_share_the_groups_by_weight():
    from flatlab.train.batch import choose_tasks

    a, b, c = (replace(load_task("titanic"), name=name) for name in "abc")

    def names(tasks, weights, count, seed):
        return [task.name for task in choose_tasks(tasks, weights, count, seed)]

    plans = [names([a, b, c], [2, 1, 1], 4, str(step)) for step in range(50)]
    assert {len(plan) for plan in plans} == {4}
    assert {plan.count("a") for plan in plans} == {2}
    few = [name for step in range(200) for name in names([a, b], [3, 1], 2, str(step))]
    assert 0.17 < few.count("b") / 400 < 0.33
    assert set(names([a, b, c], [1, 0, 1], 8, "1")) == {"a", "c"}
    assert names([a, b], [3, 1], 0, "0") == []


def test_micro_batches_keep_everything_and_the_limit():
    from flatlab.train.batch import micro_batches

    batch = [TrainSequence([0] * n, [1] * n, [], []) for n in (5, 90, 10, 40, 41, 100, 7)]
    for packed, size in ((True, sum), (False, lambda lengths: len(lengths) * max(lengths))):
        parts = [[len(s.tokens) for s in part] for part in micro_batches(batch, 100, packed)]
        assert sorted(n for part in parts for n in part) == [5, 7, 10, 40, 41, 90, 100]
        assert all(size(part) <= 100 for part in parts)
        assert len(parts) < len(batch)
        assert list(micro_batches([], 100, packed)) == []


def test_micro_batches_count_a_common_prompt_once():
    from flatlab.train.batch import cost, micro_batches

    prompt = list(range(200))
    batch = [TrainSequence([*prompt, n, n], [0] * 200 + [1, 1], [], []) for n in range(8)]
    assert cost(batch) == 199 + 8 * 3
    assert [len(part) for part in micro_batches(batch, 230)] == [8]
    other = [TrainSequence([9, *prompt], [0] * 200 + [1], [], []) for _ in range(2)]
    assert sorted(len(part) for part in micro_batches([*batch, *other], 1000)) == [2, 8]


def test_an_interrupted_update_ends_after_the_micro_batch():
    from flatlab.train.batch import stop_if_interrupted

    done = []

    async def update():
        done.append("first")
        asyncio.current_task().cancel()  # as asyncio does after Ctrl-C
        stop_if_interrupted()
        done.append("second")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(update())
    assert done == ["first"]
    stop_if_interrupted()  # without a loop nothing happens
