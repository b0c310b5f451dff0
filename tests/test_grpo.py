"""grpo.py around its maths: the update, alarms, guard, evaluation, resume; on a random model with
the real engine.
"""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch

import env
import grpo
from flatlab.errors import sentence_of
from flatlab.files import read_mapping, read_rows
from flatlab.model.path import ModelPath
from flatlab.options import SandboxOptions, changed, filled
from flatlab.runs import start
from flatlab.task.value import LOST, evaluation_columns, fell_by_half, summary_text
from flatlab.train import metrics
from flatlab.train.batch import Group, TrainSequence, draw_kl_weights, gather_groups
from flatlab.train.job import Ranks, TrainingRun
from flatlab.view.results import final_table
from flatlab.world.episode import Episode, Segment, packed_tokens
from helpers import attempts_of, segments_of, slow, step_row, user_error
from tasks import load_task
from training import (
    CFG,
    TASK,
    all_close,
    episodes_of,
    has_weights,
    one_reply,
    pair,
    randomise,
    result_of,
    scored_group,
    valid,
    versions_of,
    weights_of,
)


def random_pieces(policy, **advantages):
    """A sequence for each of n12=1.0: of 12 tokens, of which 8 are trained with advantage 1."""
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for length, advantage in advantages.items():
        tokens = torch.randint(0, 250, (int(length[1:]),), generator=generator).tolist()
        tokens, mask = pair(tokens[:4], tokens[4:])
        with torch.no_grad():
            old = policy.logprobs([(tokens, mask)])[0].tolist()
        count = len(old)
        piece = TrainSequence(tokens, mask, old, [advantage] * count, [0] * count, [0.02] * count)
        pieces.append(piece)
    return pieces


@pytest.fixture
def update(policy, monkeypatch):
    """update(batch, cfg) -> (the row of an update on these sequences, its gradients)."""

    def update(batch, cfg=CFG, optimizer=None):
        grads = []

        def keep():
            for p in policy.parameters():
                grads.append(p.grad)
                p.grad = None

        optimizer = optimizer or SimpleNamespace(step=keep, zero_grad=lambda: None)
        monkeypatch.setattr(grpo, "make_batch", lambda *_: batch)
        return grpo.update(policy, optimizer, [], cfg, TrainingRun()), grads

    return update


@pytest.mark.parametrize("loss", list(grpo.LOSSES))
def test_the_gradient_does_not_depend_on_the_micro_batches(policy, update, loss, monkeypatch):
    randomise(policy)
    batch = random_pieces(policy, n12=1.0, n30=-0.5, n21=0.7, n8=-1.2)
    randomise(policy, 2, 0.005)  # now the ratios are not all 1
    monkeypatch.setattr(policy, "diff_limit", 9.0)
    monkeypatch.setattr(grpo, "MAX_GRAD_NORM", 1e9)
    monkeypatch.setattr(grpo, "KL_SHARE", 1.0)
    cfg = changed(CFG, loss=loss, kl=0.05)
    a, whole = update(batch, cfg)
    monkeypatch.setattr(policy, "micro_tokens", 30)
    b, parts = update(batch, cfg)
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    assert a["kl"] == pytest.approx(b["kl"], abs=1e-6)
    assert all_close(whole, parts, 1e-6)
    assert max(g.abs().max() for g in whole) > 1e-4


@pytest.mark.parametrize("epochs", [1, 2])
def test_memory_that_runs_out_in_an_update_halves_its_passes(policy, update, monkeypatch, epochs):
    """Once for an update, in its last pass: the gradients are those without the failure."""
    randomise(policy)
    pieces = random_pieces(policy, n12=1.0, n30=-0.5, n21=0.7)
    batch = [replace(piece, tokens=[1, 2, 3, 4, *piece.tokens[4:]]) for piece in pieces]
    monkeypatch.setattr(policy, "diff_limit", 9.0)
    monkeypatch.setattr(grpo, "EPOCHS", epochs)
    whole_row, whole = update(batch)
    for name in ("micro_tokens", "room"):
        monkeypatch.setattr(policy, name, 0)  # set again now, and as it was afterwards
    assert policy.fit_micro_tokens(40) == policy.micro_tokens == 40
    room = policy.room
    calls, plain = [], grpo.micro_loss

    def fails(*args):
        calls.append(len(args[1]))
        loss = plain(*args)
        if len(calls) in failing:
            loss.register_hook(lambda grad: out_of_memory())
        return loss

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(grpo, "micro_loss", fails)
    failing = {2 * epochs}
    row, parts = update(batch)
    assert calls == [2, 1] * epochs + [1, 1, 1]
    assert (policy.micro_tokens, policy.room) == (20, room / 2)
    assert all_close(whole, parts, 1e-6)
    for key in ("loss", "entropy", "compared_tokens"):
        assert row[key] == pytest.approx(whole_row[key], abs=1e-5), key
    assert row["micro_tokens"] == 20
    assert "training passes are smaller" in " ".join(metrics.alarms(row, []))
    assert "micro_tokens" not in whole_row
    failing = {len(calls) + 2, len(calls) + 3}  # again, with smaller passes, too
    with pytest.raises(torch.OutOfMemoryError) as error:
        update(batch)
    policy.model.zero_grad()
    assert "again with a lower --micro-tokens or --concurrency" in sentence_of(error.value)
    assert sentence_of(RuntimeError("a bug")) == ""


def test_a_token_whose_log_prob_is_no_number_is_left_out(policy, update):
    """NaN from the engine: the update is that of the other tokens, and the row says so."""
    randomise(policy)
    first, second = random_pieces(policy, n12=1.0, n20=-0.5)
    damaged = replace(first, old=[*first.old[:-1], math.nan])
    shorter = replace(first, advantage=[*first.advantage[:-1], 0.0])
    row, with_damage = update([damaged, second])
    _, without = update([shorter, second])
    assert (row["lost_tokens"], row["skipped"]) == (1, 0)
    assert math.isfinite(row["grad_norm"])
    assert all_close(with_damage, without, 1e-7)
    assert "not finite" in " ".join(metrics.alarms(row, []))


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_kl_of_a_share_of_the_micro_batches_weighs_as_all(count):
    draws = [draw_kl_weights(count, 1 / 4, 0.05, str(seed)) for seed in range(2000)]
    for weights in draws:
        assert sum(w is not None for w in weights) == math.ceil(count / 4)
    for column in zip(*draws):
        assert fmean(w or 0.0 for w in column) == pytest.approx(0.05, rel=0.15)
    assert sum(w == 0 for w in draw_kl_weights(count, 1 / 4, 0.0, "")) == 1


def test_an_update_with_a_wild_gradient_or_of_ranks_that_disagree_is_skipped(
    policy, update, monkeypatch
):
    batch = random_pieces(policy, n12=1.0)
    before = weights_of(policy)
    optimizer = policy.make_optimizer(1.0)
    real = policy.logprobs

    def broken(*args, **kwargs):
        logp, entropy = real(*args, **kwargs)
        return logp * torch.tensor([math.nan, *[1.0] * (len(logp) - 1)]), entropy

    for owner, name, value, lost in (
        (grpo, "SKIP_GRAD_NORM", 1e-9, 0),
        (Ranks, "sum_gradients", lambda *_: False, 0),
        (policy, "logprobs", broken, 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            row, _ = update(batch, optimizer=optimizer)
        assert (row["skipped"], row["lost_tokens"]) == (1, lost), name
        assert has_weights(policy, before)
    for p in policy.parameters():
        assert p.grad is None or not p.grad.abs().max()


# ------------------------------------------------------------------------------ alarms and guard


def row(step, **values):
    usual = {"loss": 0.1, "entropy": 0.3, "kl": 0.01, "grad_norm": 0.1, "clip_share": 0.0}
    usual |= {"zero_variance_share": 0.2, "logprob_diff_mean": 1e-7}
    return step_row(step, valid_share=0.9) | usual | values


HEALTHY = [row(i) for i in range(12)]


def test_alarms():
    """Their bounds are below."""
    assert metrics.alarms(row(12), HEALTHY) == []
    for entropy, words in ((0.05, "collapsed"), (1.5, "explodes")):
        [alarm] = metrics.alarms(row(12, entropy=entropy), HEALTHY)
        assert words in alarm
    assert metrics.alarms({"grad_norm": 5.0}, [{"grad_norm": 0.0}]) == []
    assert not fell_by_half(0.0, LOST)


@pytest.mark.parametrize(
    "key, usual, quiet, loud",
    [
        ("entropy", 0.4, 0.1, 0.09),
        ("entropy", 0.4, 1.0, 1.01),
        ("clip_share", 0.0, 0.2, 0.21),
        ("clip_share", 0.3, 0.5, 0.51),
        ("clip_share", 0.125, 0.25, 0.26),
        ("logprob_diff_mean", 1e-7, 1.99e-6, 2.01e-6),
        ("grad_norm", 0.25, 2.5, 2.51),
        ("grad_norm", 0.25, 2.5, math.nan),
        ("lost_tokens", 0, 0, 1),
        ("skipped", 0, 0, 1),
        ("records", 0, 0, 1),
        ("zero_variance_share", 0.5, 0.99, 1),
        ("valid_share", 0.5, 0.25, 0.24),
        ("valid_share", 0.15, 0.06, 0.04),
        ("fault_share", 0.0, 0.2, 0.21),
        ("ungraded_share", 0.0, 0.2, 0.21),
    ],
)
def test_bounds_of_the_alarms(key, usual, quiet, loud):
    rows = [{key: 100.0}] * 21 + [{key: usual}] * 18  # the last twenty count
    rows += [{}, {key: math.nan}]  # without a number
    assert metrics.alarms({key: quiet}, rows) == []
    [alarm] = metrics.alarms({key: loud}, rows)
    assert f"({key} {loud:.3g}, usually {usual:.3g})" in alarm


def test_the_row_counts_faults_graders_without_a_result_and_records():
    group = scored_group(TASK, 0.7, None, 0.8, 0.0)
    _, second, third, fourth = group.episodes
    second.grader_output = "exit code 1"
    third.record = "the file"
    fourth.status = "fault"
    row = metrics.step_metrics([group], [TASK])
    expected = {"episodes": 3, "faults": 1, "fault_share": 1 / 4, "ungraded_share": 1 / 3}
    expected |= {"records": 1, "valid_share": 2 / 3, "zero_variance_share": 0}
    assert row.items() >= expected.items()
    assert row["reward_std"] == pytest.approx(stdev(group.rewards))
    alone = scored_group(TASK, 0.7)
    assert metrics.step_metrics([alone], [TASK])["reward_std"] == 0


def evaluated(gain, step=19, valid=0.8):
    """Healthy steps, and an evaluation after the last one."""
    numbers = {"value_mean": gain, "value_stderr": 0.05, "valid_share": valid}
    return [*HEALTHY, row(step) | evaluation_columns(numbers)]


UNLEARNED = [row(i, zero_variance_share=1.0) for i in range(5)]  # all groups had equal rewards
for made in UNLEARNED:
    del made["loss"]
NOTHING_LEFT = [row(i, valid_share=0.02) for i in range(5)]
FELL = "held-out value fell from 0.500 (step 9) to 0.100, 5.7 standard errors"
COLLAPSES = (
    (HEALTHY, ""),
    (evaluated(0.35), ""),  # 2.1 standard errors
    (evaluated(0.1), FELL),
    (evaluated(0.1, valid=0.2), f"{FELL}, and the share of valid submissions from 80% to 20%"),
    (evaluated(0.9), ""),
    (evaluated(0.1, step=8), ""),
    ([row(0, kl=2.0), row(1, kl=2.0)], ""),
    ([row(i, kl=2.0) for i in range(3)], "KL to the reference"),
    ([row(i, skipped=1) for i in range(3)], "three updates"),
    ([row(0, skipped=1), row(1), row(2, skipped=1)], ""),
    ([*HEALTHY, *UNLEARNED[1:]], ""),
    ([row(0), *UNLEARNED], "there was nothing to learn in 5 steps in a row"),
    (NOTHING_LEFT, ""),  # it was never better
    ([row(0), *NOTHING_LEFT], "at most 2.0% of the episodes were valid in 5 steps in a row"),
    ([row(0), *NOTHING_LEFT[:4], row(5)], ""),
    ([row(0, valid_share=0.2), *NOTHING_LEFT], "at most 2.0%"),
    ([row(i, kl=1.0) for i in range(3)], ""),
    ([row(i, skipped=1) for i in range(2)], ""),
)


@pytest.mark.parametrize("rows, reason", COLLAPSES)
def test_what_counts_as_a_collapse(rows, reason):
    best = {"step": 9, "value_mean": 0.5, "value_stderr": 0.05, "valid_share": 0.8}
    collapse = metrics.collapse(rows, best)
    assert collapse.startswith(reason)
    assert bool(collapse) == bool(reason)


def judged(task, *values):
    """An evaluation of episodes with these scores, None: nothing valid."""
    return metrics.evaluation(metrics.episode_rows([scored_group(task, *values)]), [task])


def test_best_is_the_adapter_with_the_largest_mean_value():
    """Failing never pays: a failure has the value -1, also where a policy is below the baseline."""
    nothing = judged(TASK, *[None] * 64)
    worst = judged(TASK, *[0.60] * 2, *[None] * 62)
    bad = judged(TASK, *[0.63] * 60, *[None] * 4)  # the baseline is 0.678
    risky = judged(TASK, *[0.79] * 48, *[None] * 16)
    steady = judged(TASK, *[0.742] * 64)
    assert nothing["score_mean"] is nothing["score_best_of_8"] is None
    assert (nothing["value_mean"], nothing["valid_share"]) == (-1, 0)
    assert not [key for key in nothing if "." in key]  # those of several tasks
    assert summary_text(nothing) == "value -1.0000 ± 0.0000, 0% valid"
    assert risky["score_mean"] == pytest.approx(0.79)
    assert metrics.better(nothing, None)
    for worse, better in pairwise([nothing, worst, bad, risky, steady]):
        assert metrics.better(better, worse)
        assert not metrics.better(worse, better)
        assert not metrics.better(better, better)  # the earlier one stays


def test_an_exact_task_beside_others_counts_on_both_parts():
    exact = load_task("hadamard29")
    group = scored_group(TASK, 0.7, 0.8)
    for episode in group.episodes:
        episode.judge(TASK, valid(0.7), valid(0.6))
    groups = [group, scored_group(exact, exact.baseline)]
    result = metrics.evaluation(metrics.episode_rows(groups), [TASK, exact])
    assert result["hadamard29.test_value_mean"] == result["hadamard29.value_mean"] == 0
    assert result["titanic.test_value_mean"] < 0 < result["titanic.value_mean"]
    assert result["test_value_mean"] == pytest.approx(2 / 3 * result["titanic.test_value_mean"])
    assert "test_value_mean" not in metrics.evaluation(metrics.episode_rows(groups[1:]), [exact])


# ------------------------------------------------------------ whole runs, played episodes
# The model, the engine and the updates are real; the episode is one reply, and its score a function
# of that reply. With concurrency=1 every bit of a run is a function of the seed; batches change the
# rounding.


def numbers_of(rows):
    """The rows without times and memory."""
    timed = re.compile("time|seconds|tokens_per_second|memory_gb")
    return [{k: v for k, v in row.items() if not timed.match(k)} for row in rows]


@pytest.mark.parametrize("options", [{}, slow({"eval_episodes": 4, "eval_every": 2})])
def test_4_steps_are_2_and_2_steps(play, policy, options):
    """Bit for bit: adapter, rows, replies; also if the first try of the second half ends in the
    middle of a step, and with an evaluation in between.
    """
    calls = count()

    async def dies(*args, **kwargs):
        if next(calls) == 5:
            raise ZeroDivisionError
        return await one_reply(*args, **kwargs)

    def replies(name):
        return [e["turns"][0]["reply"] for episodes in episodes_of(4, name) for e in episodes]

    options = {"concurrency": 1, **options}
    whole = play("whole", steps=4, **options)
    weights = weights_of(policy)
    first = play("halves", steps=2, **options)
    with pytest.raises(ZeroDivisionError):
        play("halves", steps=4, episode=dies, **options)
    halves = play("halves", steps=4, **options)
    assert [row["step"] for row in halves] == [0, 1, 2, 3]
    assert [row["lr"] for row in halves] == pytest.approx([0.002, 0.004, 0.006, 0.008])  # warm-up
    assert halves[:2] == first
    assert has_weights(policy, weights)
    assert numbers_of(whole) == numbers_of(halves)
    assert replies("whole") == replies("halves")
    assert [*map(versions_of, episodes_of(4, "halves"))] == [{0}, {1}, {2}, {3}]


@pytest.mark.slow
def test_letters_are_learned(play):
    rows = play(steps=12)
    assert max(r["score_mean"] for r in rows[-3:]) > rows[0]["score_mean"] + 0.02


class Watched:
    """Episodes whose scores in the evaluations of a run are given, one number per evaluation. The
    scores in training and at the end are functions of the reply.
    """

    def __init__(self, *scores):
        self.scores = scores
        self.trained, self.selection, self.final, self.tested = [], [], [], []

    async def __call__(self, world, policy, options, episode, score_test, loop):
        score, seed = None, world.seed
        if seed >= 0:
            self.trained.append(seed)
        elif seed > -150_000:
            score = self.scores[len(self.selection) // 4]
            self.selection.append(seed)
        else:
            self.final.append(seed)
            self.tested.append(score_test)
        assert not score_test or seed < -150_000
        return await one_reply(world, policy, options, None, score_test, score=score)


def test_the_end_of_a_run_compares_the_adapters_and_a_longer_run_does_anew(play, policy):
    """On the same fresh seeds. A run that starts from a trained adapter compares with that one."""

    def files():
        return " ".join(sorted(path.stem for path in Path("logs/a/transcripts").glob("*.jsonl")))

    randomise(policy)
    start = weights_of(policy)
    episodes = Watched(0.6, 0.8, 0.7)
    tracked = []
    options = {"eval_episodes": 4, "eval_every": 1, "guarded": False, "begin": start}
    play(steps=2, episode=episodes, trackers=[tracked.append], **options)
    assert [row["step"] for row in tracked] == [-1, 0, 1]
    assert "eval_score_mean" in tracked[0]
    seeds = set(episodes.final)
    assert (len(episodes.final), len(seeds)) == (12, 4)  # best, untrained, last
    assert not seeds & {*episodes.trained, *episodes.selection}
    assert episodes.tested == [True] * 4 + [False] * 8
    final = result_of()["final"]
    assert result_of()["best"]["step"] == final["best"]["step"] == 0
    assert (final["n"], final["steps"], final["last"]["step"]) == (4, 2, 1)
    assert "best (step 0)" in final_table(result_of())
    judged = "before eval-000000 eval-000001"
    assert files() == f"000000 000001 {judged} final-best final-last final-untrained"

    before = Path("logs/a/transcripts/before.jsonl").read_bytes()
    play(steps=3, episode=Watched(0.85), **options)  # best is the last adapter now
    assert files() == f"000000 000001 000002 {judged} eval-000002 final-best final-untrained"
    assert Path("logs/a/transcripts/before.jsonl").read_bytes() == before
    final = result_of()["final"]
    assert (final["steps"], final["last"]["step"], final["best_is_untrained"]) == (3, 2, False)
    assert final["last"]["when"] == final["best"]["when"] == "final-best"
    policy.load_adapter(Path("logs/a/untrained"))
    assert has_weights(policy, start)


@pytest.mark.parametrize("steps, adapters", [(0, 1), (2, 2)])
def test_where_best_is_the_untrained_adapter_it_is_played_once(play, steps, adapters, capsys):
    """Also without a step."""
    episodes = Watched(0.8, 0.6)
    play(steps=steps, episode=episodes, eval_episodes=4, eval_every=2, guarded=False)
    final = result_of()["final"]
    assert (result_of()["status"], final["steps"]) == ("finished", steps)
    assert len(episodes.final) == 4 * adapters
    assert final["best_is_untrained"]
    assert final["best"]["difference"] == 0
    assert "the same adapter" in final_table(result_of())
    evaluations = re.findall(
        r"^(before training|after step \d): value .*", capsys.readouterr().out, re.M
    )
    assert evaluations == ["before training", "after step 1"][: steps // 2 + 1]
    assert result_of()["seconds"] > 0


def test_paired_differences_by_hand():
    """Faults leave their pair; a failure has the value -1; pairs take out what the seeds share."""
    task = replace(TASK, baseline=0.6, reference=1.6)
    group = scored_group(task, 0.7, 0.8, 0.0, 0.9, 0.9)
    group.episodes[2].status = "fault"
    paired = metrics.paired_difference([group], [scored_group(task, 0.6, 0.6, 0.5, 0.9)])
    assert paired["difference"] == pytest.approx(0.1)
    assert paired["difference_n"] == 3
    assert paired["difference_stderr"] == pytest.approx(stdev([0.1, 0.2, 0.0]) / 3**0.5)
    nothing, baseline = scored_group(task, None), scored_group(task, task.baseline)
    paired = metrics.paired_difference([nothing], [baseline])
    assert paired == {"difference": -1, "difference_stderr": None, "difference_n": 1}
    assert metrics.paired_difference([nothing], [])["difference"] is None


def test_paired_runs_are_compared_with_the_untrained_adapter_and_best_alone_shows_the_test():
    played = {}
    for name, score in {"untrained": 0.7, "last": 0.6, "best": 0.8}.items():
        group = scored_group(TASK, score)
        group.episodes[0].judge(TASK, valid(score), valid(score))
        played[name] = ([group], f"final-{name}")
    final = metrics.comparison(played, [TASK], {"last": 9, "best": 4})
    assert (final["split"], final["best_is_untrained"]) == ("validation", False)
    assert [final[name]["when"] for name in played] == [when for _, when in played.values()]
    assert "difference" not in final["untrained"]
    assert final["last"]["difference"] < 0 < final["best"]["difference"]
    assert (final["last"]["step"], final["best"]["step"]) == (9, 4)
    assert [name for name in played if "test_value_mean" in final[name]] == ["best"]
    assert not metrics.is_test_number("contest_a.value_mean")  # of one of several tasks
    assert metrics.is_test_number("contest_a.test_value_mean")
    group.episodes[0].status = "fault"
    with user_error("Every sandbox broke"):
        metrics.evaluation(metrics.episode_rows([group]), [TASK])


def test_a_row_has_times_and_memory():
    group = scored_group(TASK, 0.7)
    group.episodes[0].tokens = 30
    row = metrics.timing(SimpleNamespace(device="cpu"), [0.0, 1.0, 3.0, 6.0, 10.0], [group])
    assert (row["seconds"], row["tokens_per_second"]) == (6.0, 5.0)
    assert [row[phase] for phase in metrics.PHASES] == [1.0, 2.0, 3.0, 4.0]
    assert 0.01 < row["memory_gb"] < 1000
    assert metrics.peak_bytes("cpu") % 1024 == 0


def test_the_first_results_in_a_row_of_tasks():
    results = metrics.first_results([TASK, load_task("hadamard29")], "training")
    scale = {"metric": "value", "higher_is_better": True, "baseline": 0.0, "reference": 1.0}
    assert results.items() >= (scale | {"kind": "training", "status": "running"}).items()
    assert metrics.first_results([TASK], "training")["baseline"] == TASK.baseline
    assert metrics.split_of([replace(TASK, splits=("test",))]) == "test"


def test_a_resumed_run_knows_the_adapter_of_its_start_and_the_evaluation_of_the_best(
    play, policy, monkeypatch
):
    """The KL is measured against the former; with lr=0 nothing is learned. best/ is written before
    the checkpoint: after kill -9 it may be newer.
    """
    randomise(policy)
    options = {"begin": weights_of(policy), "lr": 0.0, "eval_every": 1, "guarded": False}
    monkeypatch.setattr(policy, "path", replace(policy.path, adapter="of the start"))
    play(steps=1, eval_episodes=2, **options)
    file = Path("logs/a/best/evaluation.json")
    newer = read_mapping(file) | {"step": 7, "value_mean": 9.0}
    file.write_text(json.dumps(newer))
    rows = play(steps=2, eval_episodes=2, **options)
    assert [row["kl"] for row in rows] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert result_of()["final"]["best"]["step"] == 7


@pytest.fixture
def small_disk(tmp_path):
    """The folder logs, on a file system of its own."""
    logs = tmp_path / "logs"
    logs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", logs]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted")
    yield logs
    subprocess.run(["umount", "-l", logs], check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full(small_disk, play):
    """torch.save and safetensors have errors of their own for it; here it is one error, nothing is
    half-written, and the run goes on with room.
    """
    play(steps=1)
    checkpoint = sum(file.stat().st_size for file in small_disk.glob("a/checkpoints/000000/*"))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - checkpoint // 2))
    with pytest.raises(OSError, match="No space left"):
        play(steps=9)
    steps = [row["step"] for row in read_rows("logs/a/metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert not list(small_disk.rglob(".tmp-*"))
    filler.unlink()
    assert [row["step"] for row in play(steps=3)] == [0, 1, 2]


def test_without_evaluation_best_is_the_last_adapter_and_says_so(play, policy, capsys):
    for steps in (1, 3):
        first, *others = play(steps=steps, kl=0.0)
        assert result_of()["best"] == {"step": steps - 1}
    assert first["kl"] == 0  # which is measured when it is not in the loss
    assert min(row["kl"] for row in others) > 0
    last = weights_of(policy)
    policy.load_adapter(Path("logs/a/best"))
    assert has_weights(policy, last)
    assert "best/ of logs/a is the last adapter: nothing was" in capsys.readouterr().out


def test_a_run_without_anything_to_learn_changes_nothing_and_stops(play, policy):
    before = weights_of(policy)
    episode = partial(one_reply, score=0.7)
    rows = play(steps=12, episode=episode, eval_episodes=2, eval_every=4)
    assert len(rows) == metrics.STUCK
    for row in rows:
        assert row["groups"] == 3  # filled to the bound
        assert row["zero_variance_share"] == 1
        assert "loss" not in row
        assert "all groups had equal rewards" in row["alarms"][0]
    assert has_weights(policy, before)
    assert result_of()["status"].startswith("stopped: there was nothing to learn in 5 steps")


@pytest.mark.parametrize("lost", [{3}, {3, 4}], ids=["once", "for good"])
def test_a_sync_that_does_not_arrive_skips_a_step_or_ends_the_run(play, policy, monkeypatch, lost):
    """The self-test's three syncs arrive, that after step 0 does not, so the samples of step 1 are
    of the old weights.
    """
    calls, real = count(), policy.adapter_copy.push
    push = lambda: None if next(calls) in lost else real()  # noqa: E731
    monkeypatch.setattr(policy.adapter_copy, "push", push)
    if len(lost) == 1:
        assert [row["skipped"] for row in play(steps=4)] == [0, 1, 0, 0]
    else:
        with user_error("Engine and trainer disagree by .* after a skipped update"):
            play(steps=4)
        assert [r["step"] for r in read_rows("logs/a/metrics.jsonl")] == [0]


def test_two_tasks_have_their_own_numbers_and_a_common_scale(play):
    other = replace(load_task("battleOfSexes"), baseline=0.0, reference=1.0)
    rows = play(steps=2, tasks=(TASK, other), eval_episodes=4, eval_every=2)
    for episodes in episodes_of(2):
        assert {e["task"] for e in episodes} == {"titanic", "battleOfSexes"}
    assert "eval_value_mean" not in rows[0]
    assert "eval_score_mean" not in rows[-1]  # units differ
    assert {"eval_titanic.score_mean", "eval_battleOfSexes.value_mean"} <= rows[-1].keys()
    before = attempts_of("logs/a", "before")
    values = [max(-1, e["improvement"]) for e in before]
    assert fmean(values) == result_of()["before"]["value_mean"]
    assert [e["task"] for e in before] == [TASK.name, other.name] * 2


def test_none_is_derived_and_zero_is_zero(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = changed(grpo.Config(loss="gspo"), model="tiny", kl=0.0, backend="local")
    cfg = replace(cfg, name=start.run_name(cfg, "copy", False))
    [cfg], _ = start.complete_configs([cfg])
    assert (cfg.kl, cfg.lr) == (0, 1e-3)
    assert (cfg.clip_low, cfg.clip_high) == (3e-4, 4e-4)
    assert cfg.max_groups == 8
    assert cfg.model.context == 2048
    assert cfg.name == "copy-titanic-tiny-0"


def test_the_lengths_fit_a_model_of_few_positions():
    cfg = filled(grpo.Config(), ModelPath("m", None, False, 512))
    lengths = (cfg.episode.max_reply_tokens, cfg.episode.max_observation_tokens)
    assert (cfg.model.context, *lengths) == (512, 128, 128)


def test_a_run_on_a_degenerate_task_begins_with_a_warning(capsys, monkeypatch):
    task = replace(TASK, degenerate="the sex rule is the label")
    monkeypatch.setattr(env, "load_task", lambda name: task)
    env.open_tasks(["titanic"], SandboxOptions("local"))
    assert "warning  a score says little on titanic: the sex rule" in capsys.readouterr().out
    assert "the sex rule is the label" in metrics.first_results([task], "training")["degenerate"]


def test_groups_travel_without_the_sequences_to_train_on(tmp_path):
    """The bytes were packed when an episode ended; one after the other, they are a file."""
    logprob = -0.1234567890123456789
    sampled = Segment([1, 2, 3], [-1, 0, 1], [0.0, logprob, math.nan], [-1, 4, 5])
    episode = Episode("t", 0, segments=[sampled], packed=packed_tokens([sampled]))
    played = [Group(1, TASK, []), Group(0, TASK, [episode])]
    group, last = gather_groups(played, TrainingRun())
    assert (group.number, last.number) == (0, 1)
    [copy] = group.episodes
    assert (copy.segments, episode.segments) == ([], [sampled])
    (tmp_path / "transcripts").mkdir()
    (tmp_path / "transcripts/before.tokens.jsonl.gz").write_bytes(2 * copy.packed)
    kept = vars(sampled) | {"logprobs": [0.0, logprob, None]}  # JSON has no NaN
    assert segments_of(tmp_path, "before") == [[kept], [kept]]
