"""The maths of grpo.py by hand: rewards, advantages, credit, losses, weights; and what the
predecessor's agents exploited.
"""

import asyncio
import copy
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import env
import grpo
import helpers
import training
from flatlab.model.packing import row_tokens
from flatlab.numbers import expected_best
from flatlab.options import changed
from flatlab.task.value import summary, summary_text, unit, value_of
from flatlab.train.batch import (
    Group,
    Meter,
    Plan,
    TrainSequence,
    choose_tasks,
    micro_batches,
    pairs_of,
    plan_step,
    sequences_of,
)
from flatlab.train.job import TrainingRun
from flatlab.world.episode import Episode, Segment, play
from helpers import TINY_TEXTS, FakePolicy, block, half_break
from tasks import load_task
from training import TASK, scored_group, valid

CFG = changed(training.CFG, max_turns=4, max_reply_tokens=10)
ONE = torch.zeros(4, dtype=torch.long)  # all tokens in one sequence


def floats(text):
    return [float(word) for word in text.split()]


def numbers(text):
    return torch.tensor(floats(text))


def logs(text):
    return numbers(text).log()


def approx(text):
    return pytest.approx(floats(text))


def bits(text):
    return [int(bit) for bit in text]


# ------------------------------------------------------------------------------ rewards


def rewards(name, task, *scores):
    """The rewards of a group with these scores, None: nothing valid."""
    cfg = changed(CFG, reward=name)
    return [grpo.reward_of(e, cfg) for e in scored_group(task, *scores).episodes]


NO_REWARD = "The reward continuous is .*: .* finite number of at least -1"
WRONG = (  # what a function of the user returns, and the sentence
    ("reward", -1.5, NO_REWARD),
    ("reward", math.nan, NO_REWARD),
    ("advantage", [0.5], "The advantage group returned 1 number for 2 rewards."),
    ("advantage", None, "The advantage group returned None: it must return a list of numbers."),
    ("advantage", [0.5, None], "The advantage group is None: it must be a finite number."),
)


@pytest.mark.parametrize("name, value, sentence", WRONG)
def test_a_wrong_value_of_a_function_is_one_sentence(monkeypatch, task, name, value, sentence):
    group = scored_group(task, 0.7, 0.8)
    monkeypatch.setitem(grpo.REWARDS, "continuous", lambda episode: value)
    monkeypatch.setitem(grpo.ADVANTAGES, "group", lambda rewards: value)
    with helpers.user_error(sentence):
        if name == "reward":
            grpo.reward_of(group.episodes[0], CFG)
        else:
            grpo.make_batch([group], CFG, TrainingRun())


@pytest.fixture
def task():
    return replace(load_task("titanic"), baseline=0.6, reference=0.8)


def test_rewards_by_hand(task):
    improvements = floats("-1.75 -0.5 0 0.5 1 1.75")
    by_hand = {
        "continuous": "-1 -0.5 0 0.5 1 1",
        "tiered": "0 0 0 0.2 1 1",
        "binary": "0 0 0 1 1 1",
    }
    exact = replace(task, baseline=0.0, reference=1.0)
    lower = replace(task, baseline=0.0, reference=-1.0, higher_is_better=False)
    for name, expected in by_hand.items():
        assert rewards(name, exact, *improvements) == approx(expected), name
        assert rewards(name, lower, *(-x for x in improvements)) == approx(expected), name
        assert rewards(name, task, None) == [grpo.NO_SUBMISSION]


def test_validate_then_submit_is_not_paid():
    """The predecessor's runs collapsed into `validate`, `submit`: a shared workspace still held a
    sibling's file. Here the short episode gets what nothing is worth, also right after a sibling
    has written a good file, and is pushed down.
    """
    task = load_task("titanic")
    rule = 'NR == 1 {print "id,survived"} NR > 1 {print $1 "," ($3 == "SEX")}'
    write = f"awk -F, '{rule}' data/test.csv > submission.csv"

    def play(*replies):
        policy = FakePolicy(*map(block, replies))
        world = env.Env(task, "local")
        return asyncio.run(helpers.play_once(world, policy, max_turns=len(replies)))

    good = play(write.replace("SEX", "female"), "validate", "submit")
    bad = play(write.replace("SEX", "male"), "validate", "submit")
    exploits = [
        play("validate", "submit"),
        play("submit"),
        play("validate"),
        play("echo validation score: 1.0", "submit"),
    ]
    assert good.score > task.baseline > bad.score
    for name in grpo.REWARDS:
        cfg = changed(CFG, reward=name)
        paid = [grpo.reward_of(e, cfg) for e in (good, bad, *exploits)]
        assert set(paid[2:]) == {grpo.NO_SUBMISSION}
        assert min(paid[:2]) >= grpo.NO_SUBMISSION
        for estimate in grpo.ADVANTAGES.values():
            first, _, *others = estimate(paid)
            assert max(others) < 0 < first, (name, estimate)


# ------------------------------------------------------------------------------ advantages


def test_group_advantages_by_hand():
    scores = floats("0 1 5")
    standardized = grpo.standardized
    assert standardized(floats("0 1 2")) == approx("-1 0 1")  # mean 1, std 1
    assert standardized(floats("0 4")) == approx("-0.7071068 0.7071068")  # mean 2, std 2 root 2
    assert grpo.group_nostd(scores) == approx("-2 -1 3")
    assert grpo.rloo(scores) == approx("-3 -1.5 4.5")  # 0 - 3, 1 - 2.5, 5 - 0.5


def test_credit_by_hand():
    turns = [{"status": status} for status in ("ok", "rejected", "submit")]
    assert grpo.whole_episode(0.5, turns) == [0.5] * 3
    assert grpo.runnable(0.5, turns) == [0.5, 0.0, 0.5]
    assert grpo.runnable(-0.5, turns) == [-0.5] * 3


def finished(*replies, stop=("stop", "stop", "stop")):
    """An episode whose segments have these numbers of replies; a dot: a token that was read."""
    segments = []
    for numbers in replies:
        reply = [-1 if number == "." else int(number) for number in numbers]
        tokens = list(range(len(reply)))
        old = [-0.1 * token for token in tokens]
        segments.append(Segment(tokens, reply, old, [0] * len(reply)))
    turns = [{"stop_reason": reason, "status": "ok", "version": 0} for reason in stop]
    return Episode("t", 0, segments=segments, turns=turns)


TWO_SEGMENTS = (".00.1", "....22")


def test_tokens_get_the_advantage_of_their_reply_across_segments():
    first, second = sequences_of(finished(*TWO_SEGMENTS), [1.0, 2.0, 3.0])
    assert first.advantage == [1, 1, 2]
    assert second.advantage == [3, 3]
    assert first.old == approx("-0.1 -0.2 -0.4")
    assert second.mask == bits("000011")
    [only] = sequences_of(finished(".001"), [1.0, 2.0])  # no token between the replies
    assert only.advantage == [1, 1, 2]


def test_replies_that_reached_the_length_limit_can_be_left_out():
    episode = finished(*TWO_SEGMENTS, stop=("stop", "length", "stop"))
    credit = grpo.complete(2.0, episode.turns)
    assert credit == [2.0, None, 2.0]
    first, second = sequences_of(episode, credit)
    assert first.mask == bits("01100")
    assert first.advantage == second.advantage == [2, 2]
    assert episode.segments[0].mask == bits("01101")  # the episode itself stays as it was
    assert sequences_of(finished(".00"), [None]) == []


# ------------------------------------------------------------------------------ losses


def bounds(low, high):
    """Bounds, as a loss reads them from a Config."""
    return SimpleNamespace(clip_low=low, clip_high=high)


def test_the_clipped_loss_by_hand():
    old = logs("0.5 0.5 0.5 0.5")
    new = logs("0.5 0.75 0.75 0.25")  # ratios 1, 1.5, 1.5, 0.5
    advantage = numbers("2 1 -1 -1")
    loss, is_clipped = grpo.clipped(new, old, advantage, ONE, CFG)
    # min(rA, clip(r, .8, 1.28) A): 2; min(1.5, 1.28); min(-1.5, -1.28); min(-0.5, -0.8)
    assert loss.tolist() == approx("-2 -1.28 1.5 0.8")
    assert is_clipped.tolist() == bits("0101")
    even = bounds(0.2, 0.2)  # GRPO clips as far above as below
    low, _ = grpo.clipped(new, old, advantage, ONE, even)
    assert low.tolist() == approx("-2 -1.2 1.5 0.8")


@pytest.mark.parametrize("function", [grpo.clipped, grpo.masked])
def test_a_ratio_is_truncated_but_keeps_its_gradient(function, monkeypatch):
    old = logs("0.1")
    new = logs("0.9").requires_grad_()
    negative = numbers("-1")  # nothing clips the ratio of 9
    loss, _ = function(new, old, negative, ONE[:1], CFG)
    loss.sum().backward()
    assert loss.item() == new.grad.item() == pytest.approx(2.0)
    monkeypatch.setattr(grpo, "IS_CAP", 100.0)
    loss, _ = function(new, old, negative, ONE[:1], CFG)
    assert loss.item() == pytest.approx(9.0)


def test_gspo_by_hand_and_its_gradient_is_that_of_the_sequence_form():
    cfg = bounds(3.0, 3.0)  # no clipping yet
    old = logs("0.5 0.5 0.5 0.2")
    new = logs("0.5 0.25 0.5 0.4").requires_grad_()
    sequence = numbers("0 0 0 1").long()
    advantage = numbers("1 1 1 -2")
    loss, _ = grpo.sequence_clipped(new, old, advantage, sequence, cfg)
    s = 0.5 ** (1 / 3)  # (1 * 1/2 * 1)^(1/3); that of the other sequence is 2
    assert loss.tolist() == pytest.approx([-s, -s, -s, 4])
    (loss[:3].mean() + loss[3]).backward()  # per episode
    # eq. 5: - sum_i s_i A_i, differentiated as it stands
    free = new.detach().clone().requires_grad_()
    ratio = (free - old).exp()
    (2 * ratio[3] - ratio[:3].prod() ** (1 / 3)).backward()
    assert torch.allclose(new.grad, free.grad)
    # s below 1 with A > 0, above 1 with A < 0: the pessimistic side counts
    tight = bounds(0.1, 0.1)
    for sign in (1, -1):
        _, is_clipped = grpo.sequence_clipped(new, old, sign * advantage, sequence, tight)
        assert set(is_clipped.tolist()) == {sign < 0}


def test_cispo_by_hand():
    """A clipped token still has a gradient."""
    old = logs("0.1 0.5 0.5")
    new = logs("0.9 0.25 0.5").requires_grad_()  # ratios 9, 0.5, 1
    cfg = bounds(1.0, 4.0)
    advantage = numbers("1 -1 2")
    loss, is_clipped = grpo.clipped_weight(new, old, advantage, ONE[:3], cfg)
    weights = numbers("-5 0.5 -2")
    assert torch.allclose(loss, weights * new)
    loss.sum().backward()
    assert torch.allclose(new.grad, weights)
    assert is_clipped.tolist() == bits("100")


def test_dppo_by_hand():
    """Only a probability that moved too far in the direction of its advantage is masked."""
    old = logs("0.5 0.5 0.5 0.5 0.001")
    new = logs("0.75 0.75 0.25 0.25 0.0015").requires_grad_()
    advantage = numbers("1 -1 1 -1 1")
    sequence = torch.zeros(5)
    cfg = bounds(0.2, 0.2)
    loss, is_masked = grpo.masked(new, old, advantage, sequence, cfg)
    assert is_masked.tolist() == bits("10010")
    assert loss.tolist() == approx("0 1.5 -0.5 0 -1.5")
    loss.sum().backward()
    assert new.grad.tolist() == approx("0 1.5 -0.5 0 -1.5")
    wide = bounds(0.3, 0.2)
    for signs, masked in ((advantage, "10000"), (0 * advantage, "00000")):
        _, is_masked = grpo.masked(new, old, signs, sequence, wide)
        assert is_masked.tolist() == bits(masked)


def test_kl_by_hand_and_its_gradient_pulls_towards_the_base():
    logp = logs("0.5").requires_grad_()
    k3 = grpo.kl_to_base(logp, logs("0.25"))
    assert k3.item() == pytest.approx(0.5 - math.log(0.5) - 1)
    k3.sum().backward()
    assert logp.grad.item() > 0  # descent lowers logp: it is above the base's
    p = numbers("0.7 0.3")
    q = numbers("0.4 0.6")
    k3 = grpo.kl_to_base(p.log(), q.log())
    exact = (p * (p / q).log()).sum()
    assert torch.allclose((p * k3).sum(), exact)  # unbiased


def test_weights_by_hand():
    """Two episodes of 2 and 6 tokens with losses 3 and 7: every kind of mean over them."""
    means = {
        grpo.per_token: (2 * 3 + 6 * 7) / 8,
        grpo.per_episode: (3 + 7) / 2,
        grpo.per_budget: (2 * 3 + 6 * 7) / (2 * 40),
    }
    for weight, mean in means.items():
        short = 2 * 3 * weight(2, 8, 2, CFG)
        long = 6 * 7 * weight(6, 8, 2, CFG)
        assert short + long == pytest.approx(mean)


BOUNDS = """
grpo 0.2 0.2 True
dr_grpo 0.2 0.2 True
dapo 0.2 0.28 True
dppo 0.2 0.2 True
gspo 0.0003 0.0004 False
cispo 1.0 4.0 True
"""


def test_bounds_of_the_losses_and_constants_of_the_update():
    """Results of runs depend on them: a change is a decision."""
    lines = BOUNDS.split("\n")[1:-1]
    for line, (name, loss) in zip(lines, grpo.LOSSES.items(), strict=True):
        found = (name, loss.clip_low, loss.clip_high, loss.supports_off_policy)
        assert " ".join(map(str, found)) == line
    constants = (grpo.NO_SUBMISSION, grpo.SKIP_GRAD_NORM, grpo.IS_CAP)
    constants += (grpo.WARMUP, grpo.EPOCHS, grpo.MAX_GRAD_NORM, grpo.KL_SHARE)
    assert constants == (-1, 100, 2, 4, 1, 1, 0.25)
    assert grpo.ADAMW == {"betas": (0.9, 0.99), "weight_decay": 0.0}


def test_the_learning_rate_rises_for_four_steps():
    cfg = changed(CFG, lr=0.5)
    rates = [grpo.learning_rate(step, cfg) for step in range(7)]
    assert rates == approx("0.1 0.2 0.3 0.4 0.5 0.5 0.5")


@pytest.mark.parametrize("name", grpo.LOSSES)
def test_on_samples_of_the_current_policy_every_loss_has_the_policy_gradient(name):
    torch.manual_seed(0)
    loss = grpo.LOSSES[name]
    cfg = changed(CFG, loss=name)
    logp = torch.randn(5).requires_grad_()
    advantage = torch.randn(5)
    sequence = numbers("0 0 1 1 1").long()
    value, is_clipped = loss.function(logp, logp.detach(), advantage, sequence, cfg)
    value.sum().backward()
    assert torch.allclose(logp.grad, -advantage)
    assert not is_clipped.any()


# ------------------------------------------------------------------------------ the batch of a step


@pytest.mark.attack("a broken sandbox after a bad result, in half of a group")
def test_an_episode_that_breaks_its_sandbox_stays_in_its_group(hasty):
    policy = FakePolicy(half_break)
    cfg = changed(CFG, max_turns=3, max_reply_tokens=1000, prompts=TINY_TEXTS)
    job = TrainingRun(play=play)
    [group] = asyncio.run(grpo.play_groups(policy, Plan([TASK], 1, 4, 0), cfg, job))
    assert [e.status for e in group.episodes] == ["submit", "crashed"] * 2
    assert group.rewards[1::2] == [-1, -1]
    assert min(group.rewards[::2]) > 0
    assert len(policy.samples) == 12


def played(task, *rewards):
    """A group of equal episodes with these rewards; a reward of None: a fault."""
    episode = finished(".00.1")
    fault = replace(episode, status="fault")
    episodes = [copy.deepcopy(fault if reward is None else episode) for reward in rewards]
    for e, reward in zip(episodes, rewards):
        e.reward = reward
    return Group(0, task, episodes)


def test_faults_and_equal_rewards_are_not_in_the_batch(task):
    equal = played(task, 0.3, 0.3, None)
    different = played(task, 1.0, None, 0.0)
    assert not equal.informative
    assert different.informative
    assert not played(task, None).informative
    cfg = changed(CFG, loss="dapo", advantage="group_nostd")
    batch = grpo.make_batch([equal, different], cfg, TrainingRun())
    assert [p.advantage for p in batch] == [[0.5] * 3, [-0.5] * 3]  # mean 0.5 of two, not of three
    assert {*sum((p.weight for p in batch), [])} == {1 / 6}
    assert grpo.make_batch([equal], CFG, TrainingRun()) == []
    # what the transcripts keep
    stored = [e.turns[0].get("advantage") for e in equal.played + different.played]
    assert stored == [None, None, 0.5, -0.5]
    different.episodes[0].turns[1]["stop_reason"] = "length"
    batch = grpo.make_batch([different], changed(cfg, credit="complete"), TrainingRun())
    assert [len(s.advantage) for s in batch] == [2, 3]


def test_groups_are_filled_up_to_the_bound(monkeypatch, task):
    """Equal rewards: another group, until P informative ones or the bound; seeds never repeat."""
    seeds = []

    async def run_episode(world, policy, options, episode, score_test, loop):
        seed = world.seed
        seeds.append(seed)
        number = (seed - 7 * 100_003) // 4
        score = valid(0.7 if number < 3 else 0.6 + 0.1 * (seed % 2))
        episode = Episode(world.task.name, seed)
        episode.judge(world.task, score)
        return episode

    def play(*more):
        plan = Plan([task, task, *more], 2, 4, 7)
        assert plan.order < 0  # before any step
        return asyncio.run(grpo.play_groups(None, plan, CFG, TrainingRun()))

    monkeypatch.setattr(grpo, "run_episode", run_episode)
    assert [g.number for g in play()] == [0, 1]
    assert [g.number for g in play(task, task)] == [0, 1, 2, 3]
    seeds.clear()
    other = replace(task, name="other")
    groups = play(other, *[task] * 7)
    assert [g.number for g in groups if g.informative] == [3, 4]
    assert [g.number for g in groups if g.task is other] == [2]
    assert len(seeds) == len(set(seeds)) == 20


def test_tasks_share_the_groups_by_weight():
    def chosen(count, step, **weights):
        return "".join(choose_tasks([*weights], [*weights.values()], count, str(step)))

    for step in range(50):
        plan = chosen(4, step, a=2, b=1, c=1)
        assert (len(plan), plan.count("a")) == (4, 2)
    few = "".join(chosen(2, step, a=3, b=1) for step in range(200))
    assert 0.17 < few.count("b") / 400 < 0.33
    assert set(chosen(8, 1, a=1, b=0, c=1)) == {"a", "c"}


def test_a_plan_has_a_seed_and_replacements_of_its_own():
    cfg = changed(CFG, groups=2, max_groups=5, group_size=4, seed=3)
    plan = plan_step(["a", "b"], [1, 1], cfg, 7)
    assert (plan.seed, plan.size, plan.order, plan.test) == (3 * 10_007 + 7, 4, 7, False)
    assert sorted(plan.tasks[: plan.groups]) == ["a", "b"]
    assert len(plan.tasks) == 5


def sequence(tokens, prompt=0):
    """Without log-probs; all tokens after the prompt are trained on."""
    mask = [0] * prompt + [1] * (len(tokens) - prompt)
    return TrainSequence(tokens, mask, [], [], [])


def passes_of(limit, *how):
    """A stand-in for a policy with passes of so many tokens. how: see row_tokens."""
    return SimpleNamespace(micro_tokens=limit, pass_tokens=lambda batch: row_tokens(batch, *how))


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_keep_everything_and_the_limit(packed):
    lengths = [5, 7, 10, 40, 41, 90, 100]
    batch = [sequence([0] * length) for length in lengths]
    made = []
    for part in micro_batches(batch, passes_of(100, packed)):
        sizes = [len(s.tokens) for s in part]
        assert (sum(sizes) if packed else len(part) * max(sizes)) <= 100
        made.append(sizes)
    assert sorted(sum(made, [])) == lengths
    assert len(made) < len(batch)


def test_micro_batches_count_a_common_prompt_once_and_copies_of_its_keys_by_their_weight():
    prompt = list(range(200))
    same = [sequence([*prompt, n, n], 200) for n in range(8)]
    assert row_tokens(pairs_of(same)) == 199 + 8 * 3
    assert [len(part) for part in micro_batches(same, passes_of(223))] == [8]
    other = [sequence([9, *prompt], 200)] * 2
    assert sorted(map(len, micro_batches(same + other, passes_of(1000)))) == [2, 8]
    assert row_tokens(pairs_of(same), True, 1 / 16) == 223 + 8 * 199 // 16
    assert row_tokens(pairs_of(same[:1]), True, 1 / 16) == 202  # it sees its own keys
    assert [len(part) for part in micro_batches(same, passes_of(300, True, 1 / 16))] == [6, 2]


def test_a_meter_sums_and_averages_over_micro_batches():
    meter = Meter()
    meter.add("mean", loss_mean=torch.tensor([1.0, 2.0]), lag=torch.tensor([]))
    meter.add("sum", loss=torch.tensor([1.0, 2.0]))
    meter.add("max", most=torch.tensor([1.0, 2.0]))
    meter.add("mean", where=torch.tensor([False]), nothing=torch.tensor([1.0]))
    other = Meter()
    other.add("mean", loss_mean=torch.tensor([6.0]))
    other.add("sum", loss=torch.tensor([6.0]))
    other.add("max", most=torch.tensor([0.0]))
    assert Meter(meter.rows + other.rows).numbers() == {"loss_mean": 3, "loss": 9, "most": 2}


def test_expected_best_is_the_mean_over_all_draws():
    values = [0.3, -1.0, 0.7, 0.7, 0.1]
    draws = [max(draw) for draw in itertools.combinations(values, 3)]
    assert expected_best(3, values) == pytest.approx(sum(draws) / len(draws))
    assert expected_best(6, values) is None


def test_values_and_their_summary_by_hand(task):
    assert [value_of(x) for x in (None, -3.0, -0.5, 2.0)] == [-1.0, -1.0, -0.5, 1.5]
    assert unit(replace(task, baseline=0.0, reference=None)) == 1.0
    assert unit(replace(task, baseline=-4.0, reference=None, higher_is_better=False)) == -4.0

    def summary_of(*scores):
        return summary([e.row() for e in scored_group(task, *scores).episodes], task)

    some = summary_of(0.7, None, 1.0, 0.0)  # a unit is 0.2, the baseline 0.6
    assert (some["value_mean"], some["valid_share"]) == (pytest.approx(0.0), 0.75)
    assert some["score_mean"] == pytest.approx((0.7 + 1.0 + 0.0) / 3)
    assert some["score_best_of_8"] is None
    assert summary_text(some, "accuracy").endswith("75% valid, accuracy 0.5667 ± 0.2963")
    best = summary_of(*[0.7] * 8)
    assert best["score_best_of_8"] == pytest.approx(0.7)
    text = "value +0.5000 ± 0.0000, 100% valid, score 0.7000 ± 0.0000, best of 8: 0.7000"
    assert summary_text(best) == text
    none = summary_of()
    assert (none["value_mean"], none["score_mean"], none["valid_share"]) == (None, None, 0)
    assert summary_of(*[None] * 8)["score_best_of_8"] is None
    assert summary_text({"value_mean": 0.5, "valid_share": None}) == "value +0.5000"
