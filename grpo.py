"""GRPO for agents: train a language model with LoRA on whole episodes of a research task.

    python grpo.py --task titanic                 laptop: the stand-in model, a few minutes
    python grpo.py --task titanic --model Qwen/Qwen3-4B-Instruct-2507              one GPU
    torchrun --nproc-per-node 4 grpo.py --task titanic ...   each rank plays some groups
    python viz.py logs/grpo-titanic-tiny-0        table and curves

The same command again resumes a run. One step, in reading order (flatlab/ left out):
1. train: plan_step (train/batch.py) chooses the tasks of P groups; play_groups plays G episodes of
   each, all in flight on one engine; with --ahead those of the next steps, too
2. run_episode, play (world/episode.py): Policy.sample (policy.py), Env.step, Env.score (env.py)
3. reward_of: a function of the episode, of its improvement over the baseline on the validation
   part; equal rewards teach nothing, so another group is sampled instead
4. make_batch: advantages and credit of each token; sequences_of, weighted (train/batch.py)
5. optimize, micro_loss: clipped policy gradient + KL; Policy.logprobs (policy.py); one AdamW step
6. Policy.sync: these weights into the running engine (model/lora_sync.py)
7. judge: now and then an evaluation on held-out seeds, the same ones each time; keep_best
   (train/checkpoint.py); alarms and collapse (train/metrics.py)
8. write_step (train/checkpoint.py): the row, all transcripts and a checkpoint

At the end the untrained, the last and the best adapter play the same fresh seeds.

How it departs from the textbook (GRPO: arXiv 2402.03300):
1. pi_old is what the engine reported while sampling: no extra forward pass, and its difference to
   the trainer's log-probs is measured.
2. The default loss is DAPO's (2503.14476): the mean runs over all tokens of the batch, and the
   upper clip is wider.
3. The ratio has an upper bound (IS_CAP): where A < 0 the clip does not bound it.
4. A sandbox that breaks by itself is a fault: the episode leaves its group and is counted. It is
   never a reward of 0.

Letters: P groups, G episodes each, N trained tokens of a micro-batch.
"""

import asyncio
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Literal

import env
from flatlab import options, threads
from flatlab.errors import UserError, finite, finite_list
from flatlab.heartbeat import heartbeat, stoppable
from flatlab.options import Count, Ge, Le, Number, Positive, Resumable, Whole, derived
from flatlab.runs import cli, start
from flatlab.task.value import evaluation_columns, summary_text
from flatlab.train import checkpoint, metrics
from flatlab.train.batch import (
    Group,
    Meter,
    Plan,
    column,
    draw_kl_weights,
    gather_groups,
    micro_batches,
    pairs_of,
    plan_step,
    sequence_numbers,
    sequences_of,
    weighted,
)
from flatlab.train.job import Slots, TrainingRun, in_trainer, join_ranks, stop_if_interrupted
from flatlab.view import console
from flatlab.world.episode import play, run_episode
from policy import Policy, lora_settings, token_counter

# ================================== the idea: edit here ==================================

NO_SUBMISSION = -1.0  # reward without a valid submission; no reward may fall below it
SKIP_GRAD_NORM = 100.0  # an update with a larger gradient norm, or with NaN, is skipped
IS_CAP = 2.0  # upper bound on a token's importance weight (truncated importance sampling)
WARMUP = 4  # steps until the full learning rate
ADAMW = {"betas": (0.9, 0.99), "weight_decay": 0.0}
# Passes over the batch of a step, an update after each. With one the ratio is 1 up to rounding, so
# clips act only with --ahead.
EPOCHS = 1
MAX_GRAD_NORM = 1.0  # a larger gradient is scaled down to this norm
KL_SHARE = 0.25  # random share of the micro-batches with a KL term; its weight is 1 / KL_SHARE
TASK_WEIGHTS = {}  # share of the groups by name of the task, {"titanic": 2}; others have 1


# Rewards of an episode with a valid submission. episode.improvement: 0 at the task's baseline, 1 at
# its reference. Other terms may use all that came of it, see Episode in world/episode.py.


def continuous(episode):
    """The improvement, clipped to [-1, 1]."""
    return max(-1.0, min(1.0, episode.improvement))


def tiered(episode):
    """1 from the reference on, 0.2 above the baseline, 0 otherwise."""
    if episode.improvement >= 1:
        return 1.0
    return 0.2 if episode.improvement > 0 else 0.0


def binary(episode):
    """1 above the baseline, else 0."""
    return float(episode.improvement > 0)


def reward_of(episode, cfg):
    """The reward of an episode that is not a fault."""
    if not episode.valid:
        return NO_SUBMISSION
    return finite(f"The reward {cfg.reward}", REWARDS[cfg.reward](episode), NO_SUBMISSION)


# Advantages of a group's episodes.


def standardized(rewards):
    """A_i = (r_i - mean(r)) / std(r): GRPO, arXiv 2402.03300, section 4.1.2."""
    return [(r - fmean(rewards)) / stdev(rewards) for r in rewards]


def group_nostd(rewards):
    """A_i = r_i - mean(r): Dr. GRPO, arXiv 2503.20783. Dividing by std would amplify groups that
    hardly differ.
    """
    return [r - fmean(rewards) for r in rewards]


def rloo(rewards):
    """A_i = r_i - mean of the other r_j = G / (G - 1) (r_i - mean(r)): leave-one-out REINFORCE,
    arXiv 2402.14740.
    """
    scale = len(rewards) / (len(rewards) - 1)
    return [scale * (r - fmean(rewards)) for r in rewards]


# Credit: the advantage of each reply of an episode. turns: as in transcripts/. A reply with
# None is not trained: no loss and no KL on its tokens, and the mean over tokens leaves them out.


def whole_episode(advantage, turns):
    """Every reply gets the advantage of its episode."""
    return [advantage] * len(turns)


def runnable(advantage, turns):
    """Replies from which nothing could be run share the blame, not the praise."""
    return [min(advantage, 0.0) if turn["status"] == "rejected" else advantage for turn in turns]


def complete(advantage, turns):
    """Replies that were cut at the length limit are not trained (DAPO's overlong filtering)."""
    return [None if turn["stop_reason"] == "length" else advantage for turn in turns]


# Losses. All arguments have shape (N,). Return the loss per token and whether the token was
# clipped.


def clipped(logp, old, advantage, sequence, cfg):
    """max(-r A, -clip(r, 1 - low, 1 + high) A), r = exp(logp - old): PPO, arXiv 1707.06347, eq. 7.
    DAPO: high > low.

    r is truncated: with A < 0 nothing else bounds it.
    """
    return larger_loss(truncated_ratio(logp, old), advantage, cfg)


def masked(logp, old, advantage, sequence, cfg):
    """-r A, or 0 for a token whose probability has risen by more than high (A > 0) or fallen by
    more than low (A < 0): DPPO with the binary total variation, arXiv 2602.04879.

    A bound on the ratio holds rare tokens back and lets likely ones move far.
    """
    moved = (logp.exp() - old.exp()).detach()
    rose = (advantage > 0) & (moved > cfg.clip_high)
    fell = (advantage < 0) & (moved < -cfg.clip_low)
    is_masked = rose | fell
    loss = -truncated_ratio(logp, old) * advantage
    return loss.masked_fill(is_masked, 0.0), is_masked


def sequence_clipped(logp, old, advantage, sequence, cfg):
    """`clipped` with one ratio per sequence, s = exp(mean_t(logp - old)): GSPO, arXiv 2507.18071,
    in its token form s_t = stop(s) pi_t / stop(pi_t), which has the same gradient and takes an
    advantage per token.
    """
    current = logp.detach()
    ratio = geometric_mean(current - old, sequence).exp() * (logp - current).exp()
    return larger_loss(ratio, advantage, cfg)


def clipped_weight(logp, old, advantage, sequence, cfg):
    """-stop(clip(r, 1 - low, 1 + high)) A logp: CISPO, arXiv 2506.13585. Clipped tokens keep their
    gradient.
    """
    ratio = (logp - old).exp().detach()
    clipped_ratio = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -clipped_ratio * advantage * logp, clipped_ratio != ratio


def truncated_ratio(logp, old):
    """r = exp(logp - old). Above IS_CAP it counts as IS_CAP and keeps its gradient."""
    ratio = (logp - old).exp()
    return ratio * (IS_CAP / ratio.detach()).clamp(max=1)


def larger_loss(ratio, advantage, cfg):
    """max(-r A, -clip(r, 1 - low, 1 + high) A), and whether it is that of the clipped ratio."""
    clipped_ratio = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    is_clipped = clipped_ratio * advantage < ratio * advantage
    return -(ratio * advantage).minimum(clipped_ratio * advantage), is_clipped


def kl_to_base(logp, base):
    """k3 = exp(d) - d - 1, d = base - logp: unbiased for KL(policy || reference), never negative
    (GRPO, eq. 4).
    """
    return (base - logp).exp() - (base - logp) - 1


def geometric_mean(log_ratio, sequence):
    """Mean of the log-ratios of each token's sequence, (N,): the log of the geometric mean of its
    ratios.
    """
    means = sequence.bincount(log_ratio) / sequence.bincount()
    return means[sequence].to(log_ratio.dtype)


# Weight of a token in the mean. length: trained tokens of its episode; tokens, episodes: of the
# whole batch.


def per_token(length, tokens, episodes, cfg):
    """All tokens of the batch weigh the same (DAPO)."""
    return 1 / tokens


def per_episode(length, tokens, episodes, cfg):
    """All episodes weigh the same, so a token of a long one weighs less (GRPO, GSPO)."""
    return 1 / (episodes * length)


def per_budget(length, tokens, episodes, cfg):
    """All tokens weigh the same: one over the most tokens an episode may have (Dr. GRPO)."""
    return 1 / (episodes * cfg.episode.max_turns * cfg.episode.max_reply_tokens)


def learning_rate(step, cfg):
    """--lr after a linear warm-up."""
    return cfg.lr * min(1.0, (step + 1) / (WARMUP + 1))


@dataclass(frozen=True)
class Loss:
    function: Callable
    weight: Callable
    clip_low: float  # lower and upper bound, see the function
    clip_high: float
    supports_off_policy: bool = True  # whether these bounds suit samples of an older policy


REWARDS = {
    "continuous": continuous,
    "tiered": tiered,
    "binary": binary,
}
ADVANTAGES = {"group": standardized, "group_nostd": group_nostd, "rloo": rloo}
CREDITS = {"episode": whole_episode, "runnable": runnable, "complete": complete}
LOSSES = {
    "grpo": Loss(clipped, per_episode, 0.2, 0.2),
    "dr_grpo": Loss(clipped, per_budget, 0.2, 0.2),
    "dapo": Loss(clipped, per_token, 0.2, 0.28),
    "dppo": Loss(masked, per_token, 0.2, 0.2),
    "gspo": Loss(sequence_clipped, per_episode, 3e-4, 4e-4, supports_off_policy=False),
    "cispo": Loss(clipped_weight, per_token, 1.0, 4.0),  # 1 - 1 = 0: no lower bound
}

# =========================================================================================


@dataclass(frozen=True)
class Config(options.RunOptions):
    """Options of a run. None: computed as written here, or as the comment says. 0 never means
    "default".
    """

    steps: Resumable[Whole] = 30  # training steps; a larger number continues a finished run

    groups: Count = 4  # P: groups per step
    # G: episodes per group, compared with each other
    group_size: Annotated[Count, Ge(2)] = 8
    reward: Literal[*REWARDS] = "continuous"  # function of the improvement over the baseline
    # learning rate of AdamW
    lr: Positive | None = derived(lambda cfg, model: 1e-3 if model.stand_in else 2e-5)
    kl: Number = 0.05  # weight of the KL to the policy before the first step

    # upper bound on the groups per step, when groups with equal rewards are replaced: 2 P
    max_groups: Whole | None = derived(lambda cfg, model: 2 * cfg.groups)
    # steps sampled ahead of the update; bounds the lag of an episode's first token
    ahead: Whole = 0
    # episodes in flight at once in each process: 32 for each of the 1 + ahead steps
    concurrency: Resumable[Count | None] = derived(lambda cfg, model: 32 * (1 + cfg.ahead))
    ends_at_score: bool = False  # the first valid score ends an episode, as it ends a search's node

    advantage: Literal[*ADVANTAGES] = "group"  # what an episode is compared with
    # runnable: a reply that could not be run gets no positive advantage; complete: no loss on
    # replies that reached the length limit
    credit: Literal[*CREDITS] = "episode"
    loss: Literal[*LOSSES] = "dapo"  # policy-gradient loss; LOSSES shows what each one consists of

    # rank of the LoRA matrices, that of --model's adapter if there is one. Alpha is twice the rank
    lora_rank: Count | None = derived(lambda cfg, model: lora_settings(model)["r"])

    # tokens per training pass; default: what fits, at most 8192 (CPU) or 32768
    micro_tokens: Resumable[Count | None] = None

    # episodes per evaluation, on seeds never trained on; 0: none, and best/ is the last adapter
    eval_episodes: Annotated[Whole, Le(100_003)] = 64
    # steps between evaluations; also before the first and after the last
    eval_every: Count = 10

    tasks: options.TaskOptions = options.TaskOptions()
    model: options.ModelOptions = options.ModelOptions()
    sandbox: options.SandboxOptions = options.SandboxOptions()
    episode: options.EpisodeOptions = options.EpisodeOptions()
    # other places that get the rows; WANDB_MODE=offline needs no account
    trackers: options.Trackers = ()

    @property
    def clip_low(self) -> float:
        return LOSSES[self.loss].clip_low

    @property
    def clip_high(self) -> float:
        return LOSSES[self.loss].clip_high


# ------------------------------------------------------------------------------ sample


async def play_groups(policy, plan: Plan, cfg: Config, job) -> list[Group]:
    """Plays the groups of a plan; returns those of this rank by number.

    A group of equal rewards is followed by the next replacement. Up to cfg.concurrency episodes are
    in flight at once, those of other plans included. Every rank plays its part of both kinds.
    """
    job.slots = slots = job.slots or Slots(cfg.concurrency)  # for all plans of the run
    numbers = range(len(plan.tasks))
    mine = slice(job.ranks.rank, None, job.ranks.world_size)
    spare = iter(numbers[plan.groups :][mine])
    groups = []

    async def one(task, number):
        seed = plan.seed * 100_003 + number
        world = env.Env(task, cfg.sandbox, seed, ends_at_score=cfg.ends_at_score)
        async with slots.slot(plan.order), world:
            episode = await run_episode(world, policy, cfg.episode, None, plan.test, job.play)
        plan.ended += 1
        if episode.status != "fault":
            episode.reward = reward_of(episode, cfg)
        return episode

    async def fill(number):
        while number is not None:
            # If one episode is cancelled or raises, the others are cancelled too, and every sandbox
            # is closed.
            async with asyncio.TaskGroup() as together:
                task = plan.tasks[number]
                plan.started += plan.size
                places = range(number * plan.size, (number + 1) * plan.size)
                plays = [together.create_task(one(task, i)) for i in places]
            group = Group(number, task, [playing.result() for playing in plays])
            groups.append(group)
            number = None if group.informative else next(spare, None)

    async with asyncio.TaskGroup() as together:
        for number in numbers[: plan.groups][mine]:
            together.create_task(fill(number))
    return sorted(groups, key=lambda group: group.number)


async def evaluate(policy, cfg: Config, job, name: str, seed: int, test=False) -> list[Group]:
    """Plays cfg.eval_episodes episodes, one per group, the same ones for the same seed.

    They are saved under this name. No update happens meanwhile. Returns the groups.
    """
    tasks = itertools.islice(itertools.cycle(job.tasks), cfg.eval_episodes)
    plan = Plan([*tasks], cfg.eval_episodes, 1, seed, test=test)
    with heartbeat(plan.progress("evaluating ")):
        groups = await play_groups(policy, plan, cfg, job)
    groups = await in_trainer(gather_groups, groups, job)
    checkpoint.save_groups(job.run, name, groups)
    return groups


async def judge(policy, cfg: Config, job, name: str) -> dict:
    """Evaluates the adapter, and keeps it as best/ if it is better than the best one so far.

    Without evaluations the last adapter is the best, and the result is {}.
    """
    result = {}
    if cfg.eval_episodes:
        seed = -1 - 2 * cfg.seed  # seeds of training are not negative
        begun = time.perf_counter()
        groups = await evaluate(policy, cfg, job, name, seed)
        job.evaluation_seconds = time.perf_counter() - begun
        result = metrics.evaluation(metrics.episode_rows(groups), job.tasks)
        when = f"after step {job.step - 1}" if job.step else "before training"
        print(
            f"{when}: {summary_text(result)} ({metrics.split_of(job.tasks)} part, the "
            f"{result['n']} seeds for selection)"
        )
    await in_trainer(checkpoint.keep_best, policy, job, result | {"step": job.step - 1})
    return result


# ------------------------------------------------------------------------------ learn


def update(policy, optimizer, groups: list[Group], cfg: Config, job) -> dict:
    """Learns from the groups of a step, see optimize."""
    return optimize(policy, optimizer, make_batch(groups, cfg, job), micro_loss, cfg, job)


def make_batch(groups: list[Group], cfg: Config, job) -> list:
    """Every trained token of the groups with different rewards, with its advantage and its weight
    in the mean: a list of TrainSequence.
    """
    batch = []  # the sequences of each episode
    for g in groups:
        if not g.informative:
            continue
        advantages = ADVANTAGES[cfg.advantage](g.rewards)
        name = f"The advantage {cfg.advantage}"
        advantages = finite_list(name, advantages, len(g.played), "reward")
        for e, advantage in zip(g.played, advantages):
            credit = CREDITS[cfg.credit](advantage, e.turns)
            credit = finite_list(f"The credit {cfg.credit}", credit, len(e.turns), "turn", True)
            for turn, credited in zip(e.turns, credit):
                turn["advantage"] = credited  # for the transcripts
            batch.append(sequences_of(e, credit))
    return weighted(batch, LOSSES[cfg.loss].weight, cfg, job)


def optimize(policy, optimizer, batch: list, loss_of: Callable, cfg: Config, job) -> dict:
    """Makes EPOCHS passes over the batch, one optimizer step each. Returns numbers for the row.

    Every rank takes part, also one without sequences. Samples about which engine and trainer
    disagree are not trained on: the update is skipped, on every rank.
    """
    import torch

    if not job.ranks.sum(len(batch))[0]:
        return {}
    meter, skipped, grad_norms = Meter(), 0, []
    micro_tokens = policy.micro_tokens
    for epoch in range(EPOCHS):
        pass_meter = policy.within_memory(add_gradients, batch, loss_of, cfg, job, epoch)
        meter.rows += pass_meter.rows
        # That of the first pass, before the first update: later the two differ by design.
        difference = meter.numbers().get("logprob_diff_mean", 0.0)
        agrees = difference <= policy.diff_limit
        agrees = job.ranks.sum_gradients(policy.parameters(), agrees)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM).item()
        if agrees and grad_norm <= SKIP_GRAD_NORM:  # False for NaN
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad()
        grad_norms.append(grad_norm)
    row = meter.numbers(job.ranks)
    row["loss"] /= EPOCHS
    if policy.micro_tokens < micro_tokens:
        row["micro_tokens"] = policy.micro_tokens
    return row | {"grad_norm": fmean(grad_norms), "skipped": skipped}


def add_gradients(policy, batch: list, loss_of: Callable, cfg: Config, job, epoch: int) -> Meter:
    """The gradients of a pass over the batch, micro-batch by micro-batch. Returns their numbers."""
    parts = list(micro_batches(batch, policy))
    # In expectation the KL of every token has the weight cfg.kl.
    kl_weights = draw_kl_weights(len(parts), KL_SHARE, cfg.kl, f"{cfg.seed} {job.step} kl")
    meter = Meter()
    for micro_batch, kl_weight in zip(parts, kl_weights):
        loss_of(policy, micro_batch, cfg, meter, epoch, kl_weight).backward()
        stop_if_interrupted()
    return meter


def micro_loss(
    policy, micro_batch: list, cfg: Config, meter: Meter, epoch: int, kl_weight: float | None
):
    """The loss of a micro-batch, a scalar with gradient; its numbers go to the meter."""
    import torch

    pairs = pairs_of(micro_batch)
    advantage = column(micro_batch, "advantage", policy.device)
    old = column(micro_batch, "old", policy.device)
    sequence = sequence_numbers(micro_batch, policy.device)
    base = old
    if kl_weight is not None:
        with torch.no_grad():
            base, _ = policy.logprobs(pairs, base=True)
    logp, entropy = policy.logprobs(pairs)

    # A token whose log-prob is not finite is left out.
    lost = ~(logp.isfinite() & old.isfinite() & base.isfinite())
    logp, old, base = (values.masked_fill(lost, 0.0) for values in (logp, old, base))

    loss, is_clipped = LOSSES[cfg.loss].function(logp, old, advantage, sequence, cfg)
    if kl_weight is not None:
        kl = kl_to_base(logp, base)
        meter.add("mean", kl=kl, base_diff=(logp - base).abs())
        loss = loss + kl_weight * kl
    loss = loss.masked_fill(lost, 0.0) * column(micro_batch, "weight", policy.device)
    meter.add("sum", loss=loss, lost_tokens=lost)
    meter.add("mean", entropy=entropy, clip_share=is_clipped & ~lost)
    if epoch == 0:
        # The engine's log-probs are those of the trainer for tokens of the current version only.
        lag = policy.version - column(micro_batch, "version", policy.device)
        is_current = lag == 0
        difference = (logp - old).abs()
        meter.add("sum", compared_tokens=is_current)
        meter.add("mean", lag_mean=lag)
        meter.add("mean", is_current, logprob_diff_mean=difference)
        meter.add("max", lag_max=lag)
        meter.add("max", is_current, logprob_diff_max=difference)
    return loss.sum()


# ------------------------------------------------------------------------------ train


async def train(policy, cfg: Config, job, update=update, play=play) -> None:
    """All steps and evaluations. Episodes of later steps go on while the trainer's thread computes.

    update: the function that learns. play: the loop of an episode, see run_episode. Only rank 0
    has a run to write.
    """
    job.play = play
    job.start_clock()
    optimizer = policy.make_optimizer(cfg.lr, **ADAMW)
    rows = await begin(policy, optimizer, cfg, job)
    weights = [TASK_WEIGHTS.get(task.name, 1) for task in job.tasks]
    playing = {}  # step -> its plan, and its groups as they are being played
    recording = None  # of the step before
    async with asyncio.TaskGroup() as together:
        while job.step < cfg.steps and not job.stopped:
            step = job.step
            times = [time.perf_counter()]

            # sample: P groups of G episodes from the current policy, or from one that is at most
            # cfg.ahead updates older; faults leave their group
            for later in range(step, min(step + cfg.ahead + 1, cfg.steps)):
                if later not in playing:
                    plan = plan_step(job.tasks, weights, cfg, later)
                    groups = together.create_task(play_groups(policy, plan, cfg, job))
                    playing[later] = plan, groups
            plan, groups = playing.pop(step)
            with heartbeat(plan.progress(f"step {step:3}")):
                groups = await groups
            if recording:
                await recording  # reads the weights, which change now
            times.append(time.perf_counter())

            # learn: from the groups whose rewards differ
            lr = learning_rate(step, cfg)
            for setting in optimizer.param_groups:
                setting["lr"] = lr
            learned = await in_trainer(update, policy, optimizer, groups, cfg, job)
            gathered = await in_trainer(gather_groups, groups, job)
            row = {"step": step, **metrics.step_metrics(gathered, job.tasks)}
            row |= {"lr": lr, **learned}
            times.append(time.perf_counter())

            # sync: the trained adapter into the running engine
            policy.sync(step + 1)
            if row.get("skipped"):
                await policy.check_sync()
            times.append(time.perf_counter())

            # judge: an evaluation now and then, alarms, and a collapse
            job.step = step + 1
            is_due = job.step % cfg.eval_every == 0 or job.step >= cfg.steps
            if is_due or not cfg.eval_episodes:
                result = await judge(policy, cfg, job, f"eval-{step}")
                row |= evaluation_columns(result)
            row["alarms"] = metrics.alarms(row, rows)
            rows.append(row)
            job.stopped = metrics.collapse(rows, job.best)
            times.append(time.perf_counter())

            # record: row, transcripts, checkpoint, plot, while the next step is sampled; a step
            # counts once its checkpoint is there
            if job.run:
                row |= metrics.timing(policy, times, gathered)
                recording = together.create_task(
                    in_trainer(record, policy, optimizer, gathered, rows, cfg, job)
                )

        for _, groups in playing.values():  # of steps after a collapse
            groups.cancel()
    await finish(policy, cfg, job)


def record(policy, optimizer, groups: list[Group], rows: list[dict], cfg: Config, job) -> None:
    """Writes the last step, and prints its line."""
    checkpoint.write_step(policy, optimizer, job, rows[-1], groups)
    job.update_result()
    console.step_made(job, rows, cfg)


async def begin(policy, optimizer, cfg: Config, job) -> list[dict]:
    """Resumes the run, or evaluates what training starts from. Returns the rows that are there."""
    micro_tokens = policy.fit_micro_tokens(cfg.micro_tokens)
    print(f"memory   a training pass takes up to {micro_tokens} tokens")
    if cfg.ahead:
        await in_trainer(threads.use_all, policy.decode_threads)  # the engine keeps its own
    resume = functools.partial(checkpoint.resume, compared=("untrained", "best"))
    rows = await in_trainer(resume, policy, optimizer, job)
    agreement = await policy.verify(job.step)
    print(f"engine   agrees with the trainer: {agreement['random adapter']}")
    if job.step:
        job.stopped = metrics.collapse(rows, job.best)
    else:
        await in_trainer(checkpoint.save_adapter, policy, job, "untrained")
        if cfg.eval_episodes:
            result = await judge(policy, cfg, job, "before")
            job.update_result(before=result)
            if job.run:
                job.run.track({"step": -1} | evaluation_columns(result))
    if policy.path.adapter:  # else the reference of the KL term is the base model
        policy.set_reference(Path("logs", cfg.name, "untrained"))
    return rows


async def finish(policy, cfg: Config, job) -> None:
    """Compares the adapters, and says in result.json how the run ended."""
    if cfg.eval_episodes:
        seed = -2 - 2 * cfg.seed  # never used for selection
        play_adapter = functools.partial(evaluate, policy, cfg, job, seed=seed)
        final = {"n": cfg.eval_episodes, "steps": job.step}
        final |= await checkpoint.compare_adapters(policy, play_adapter, job)
        best = final["best"]
        job.update_result(final=final, value=best.get("test_value_mean", best["value_mean"]))
    elif job.best:
        print(f"best/ of logs/{cfg.name} is the last adapter: nothing was evaluated")
    status = "finished"
    if job.stopped:
        which = "best" if cfg.eval_episodes else "last"
        status = (
            f"stopped: {job.stopped}. logs/{cfg.name}/best is the {which} adapter, that of step "
            f"{job.best['step']}: a new run starts from it with --model"
        )
    job.update_result(status=status)


# ------------------------------------------------------------------------------ start

SCRIPT = Path(__file__).stem  # a copy of this file makes runs of its own


def check(cfg: Config, model) -> None:
    """Raises UserError for settings that are wrong. model: a ModelPath."""
    lora_settings(model, cfg.lora_rank)
    if cfg.eval_episodes == 1:
        raise UserError("--eval-episodes must be 0 or at least 2: one has no standard error.")
    if cfg.max_groups < cfg.groups:
        raise UserError(f"--max-groups {cfg.max_groups} is less than --groups {cfg.groups}.")
    if cfg.ahead and not LOSSES[cfg.loss].supports_off_policy:
        raise UserError(
            f"With --ahead, the bounds of --loss {cfg.loss} would clip most of what is sampled: "
            "choose another loss, or wider bounds in LOSSES."
        )


def main(config_class=Config, script=SCRIPT, policy_class=Policy, train=train, check=check) -> None:
    join_ranks()  # before anything touches CUDA: a rank of torchrun sees only its own GPU
    cfgs, model = start.configs(config_class, script)
    check(cfgs[0], model)
    console.model_line(cfgs[0], model)
    tasks, sandbox = env.open_tasks(cfgs[0].tasks.task, cfgs[0].sandbox, model.stand_in)
    cfgs = [replace(cfg, sandbox=sandbox) for cfg in cfgs]
    jobs = [open_job(cfg, model, tasks) for cfg in cfgs]
    policy = None  # one engine for all of them
    for cfg, job in zip(cfgs, jobs):
        if not job.finished:
            with start.recorded([job.run], metrics.first_results(tasks, "training")):
                console.banner(cfg)
                env.check_context(tasks, cfg, policy or token_counter(cfg, model))
                policy = policy or load_policy(policy_class, cfg, model)
                policy.reset(cfg.seed)
                asyncio.run(stoppable(train(policy, cfg, job)))
        if job.run:
            console.farewell(job.run)
    end_runs([job.run for job in jobs if job.run])


def open_job(cfg: Config, model, tasks: list) -> TrainingRun:
    """Opens the run of a seed, on rank 0; all ranks learn whether it is finished."""
    job = TrainingRun(tasks)
    if job.ranks.rank == 0:
        is_finished = functools.partial(
            checkpoint.is_finished, steps=cfg.steps, n=cfg.eval_episodes
        )
        bounds = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
        job.run = start.begin_run(cfg, tasks, model, is_finished, **bounds)
    job.finished = job.ranks.first(bool(job.run and job.run.finished))
    return job


def load_policy(policy_class, cfg: Config, model) -> Policy:
    """Starts the engine and loads the model."""
    policy = policy_class(model, cfg.model, cfg.seed, cfg.concurrency, cfg.lora_rank)
    if policy.device == "cuda" and not policy.uses_varlen:
        print("attention is computed sequence by sequence: see has_varlen in model/packing.py")
    if policy.adapts_attention_only:
        print("adapter  is on the attention layers alone: the experts are not trained")
    return policy


def end_runs(runs: list) -> None:
    """Compares several seeds. A run that a collapse stopped ends the program with exit code 1."""
    with_steps = [run.dir for run in runs if run.rows()]
    if len(with_steps) > 1:
        console.print_outcome(*with_steps)
    statuses = [run.result["status"] for run in runs]
    stopped = [status for status in statuses if status.startswith("stopped: ")]
    if stopped and "WORLD_SIZE" not in os.environ:  # torchrun would restart a job that failed
        print("\n".join(stopped), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main)
