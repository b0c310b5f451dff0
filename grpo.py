"""GRPO for agents: train a language model with LoRA on whole episodes of a machine-learning research task.

    python grpo.py --task titanic                           laptop: the stand-in model, a few minutes
    python grpo.py --task titanic --model Qwen/Qwen3-4B-Instruct-2507     one GPU
    torchrun --nproc-per-node 4 grpo.py --task titanic ...  several: each rank plays its share of the groups
    python viz.py logs/grpo-titanic-tiny-0                  table and curves; the same command again resumes a run

One step:
1. sample P groups of G episodes: each in its own sandbox, all of them in flight at once on one engine
2. score every finished episode on the validation part; the reward is a function of its improvement over the baseline
3. advantage = how much better than the own group; equal rewards teach nothing: another group is sampled instead
4. loss = clipped policy gradient + KL to the base model, averaged over all sampled tokens of the step
5. one AdamW step on the LoRA weights, which are then copied into the running engine
6. at times an evaluation on seeds never trained on: the best adapter is kept, a collapsed policy goes back to it
7. one row of metrics, all transcripts and a checkpoint go to the run directory

How it departs from the textbook (GRPO: arXiv 2402.03300):
1. pi_old is what the engine reported while sampling: no extra forward pass, and the gap to the trainer is measured.
2. The default loss is DAPO's (2503.14476): the mean runs over all tokens of the batch, and the upper clip is wider.
3. A broken sandbox is a fault: the episode leaves its group and is counted. It is never a reward of 0.

Letters: P groups, G episodes each, N trained tokens of a micro-batch.
"""

import asyncio
import signal
import sys
import time
from dataclasses import asdict, dataclass
from math import exp, log1p
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import env
import viz
from flatlab import threads
from flatlab.episode.task import Task, improvement
from flatlab.errors import UserError
from flatlab.runs import trackers
from flatlab.train import distributed, imitation, metrics
from flatlab.train.batch import (
    Group,
    Piece,
    Tally,
    choose_tasks,
    columns,
    everyones,
    flat,
    micro_batches,
    pieces_of,
    use_values,
)
from flatlab.train.checkpoint import (
    banner,
    begin,
    farewell,
    keep_best,
    record,
    restore,
    resume,
    say,
)
from policy import ENGINE_RANKS, Policy, resolve_model
from tasks import load_task


@dataclass
class Config:
    # run
    task: tuple[str, ...] = (
        "titanic",
    )  # one or more, from an MLGym checkout, an MLE-Dojo folder, or configs/tasks
    task_weights: tuple[float, ...] = ()  # share of the groups for each task; empty: equal
    curriculum: bool = False  # more groups for tasks whose groups had different rewards lately
    mlgym_root: str = ""  # MLGym checkout; empty: $MLGYM_ROOT
    mledojo_root: str = ""  # folder of prepared MLE-Dojo competitions; empty: $MLEDOJO_ROOT
    model: str = "auto"  # Hugging Face name, folder, logs/<run>/best, or tiny; auto: tiny without a GPU, else Qwen3-4B
    sft: tuple[
        str, ...
    ] = ()  # runs whose best episodes are imitated first: logs/<run> of grpo.py or search.py
    sft_share: float = 0.25  # that part of their episodes better than the baseline
    sft_updates: int = 16  # optimiser steps on up to 32 of them each
    name: str = ""  # run directory logs/<name>; empty: grpo-<task>-<model>-<seed>
    seed: int = 0  # of sampling, initial adapter and tasks
    steps: int = 30  # optimiser steps; more of them continue a finished run
    # episodes
    groups: int = 4  # P: groups per step
    max_groups: int = (
        0  # while there are fewer than P groups with different rewards, up to this many; 0: twice P
    )
    group_size: int = 8  # G: episodes per group, compared with each other
    max_turns: int = 8  # replies per episode
    max_reply_tokens: int = 0  # per reply; 0: 160 for the stand-in, else 2048
    max_observation_tokens: int = (
        0  # longer command outputs keep head and tail; 0: 256 for the stand-in, else 2048
    )
    context: int = 0  # tokens of prompt and reply together; 0: 2048 for the stand-in, else 16384
    temperature: float = 1.0  # of sampling
    episode_minutes: float = 30.0  # time limit of one episode
    # sandbox
    backend: Literal["auto", "docker", "local"] = (
        "auto"  # auto: docker when daemon and image are there
    )
    image: str = env.IMAGE  # Docker image of the sandboxes
    network: bool = False  # tasks that ask for the network get it
    hf_cache: str = (
        ""  # Hugging Face cache of this machine to mount for them instead, read-only (docker)
    )
    sandboxes: int = 32  # most episodes in flight at once
    # objective
    reward: Literal["continuous", "tiered", "percentile", "binary"] = (
        "continuous"  # of the improvement over the baseline
    )
    advantage: Literal["group", "group_nostd", "rloo", "ppo"] = (
        "group"  # what an episode is compared with
    )
    credit: Literal["episode", "runnable"] = (
        "episode"  # runnable: a reply that could not be run is never praised
    )
    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"] = (
        "dapo"  # each with its paper in LOSSES
    )
    cut_replies: Literal["train", "mask"] = (
        "train"  # mask: no loss on replies that were cut at the length limit
    )
    clip_low: float = 0.0  # the ratio is clipped below 1 - this; 0: the loss's own, see LOSSES
    clip_high: float = 0.0  # and above 1 + this
    max_ratio: float = (
        2.0  # a token counts at most so many times (truncated importance weight; not gspo, cispo)
    )
    max_drift: float = 0.0  # sequences whose geometric mean ratio leaves [1 / (1 + this), 1 + this] are dropped; 0: off
    kl: float = 0.05  # weight of the KL to the base model
    gae_lambda: float = 1.0  # ppo: 1 is the whole return minus the value; steps are tokens: 0.95 forgets after twenty
    value_weight: float = 0.1  # ppo: weight of the value head's squared error
    # learning
    lr: float = 0.0  # AdamW; 0: 1e-3 for the stand-in (with 2e-3 its replies run away), else 2e-5
    warmup: int = 4  # steps until the full rate
    epochs: int = 1  # passes over each step's batch
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm
    skip_grad_norm: float = 100.0  # an update with a larger gradient, or one with NaN, is skipped
    lora_rank: int = 16  # 8, 16, 32, 64, 128 or 256
    lora_alpha: int = 32  # LoRA is scaled by alpha / rank
    # memory
    micro_tokens: int = (
        0  # tokens per forward pass of the trainer, padding included; 0: 8192 (stand-in) or 16384
    )
    checkpointing: bool = (
        False  # recompute activations layer by layer: less memory, a third more time
    )
    packing: bool = False  # sequences one after the other in a row instead of padded rows
    gpu_memory: float = 0.45  # share of the GPU for the engine: its weights and its KV cache
    share_base: bool = (
        False  # one copy of the base weights for engine and trainer; not yet tried on a GPU
    )
    # evaluation
    eval_episodes: int = (
        64  # on seeds never trained on, at the sampling temperature; 0: no evaluation
    )
    eval_every: int = 10  # steps; also before the first and after the last one
    guard: Literal["restore", "stop", "off"] = (
        "restore"  # after a collapse: best adapter and half the rate, or the end
    )
    restores: int = 3  # so often; after that the run stops
    kl_limit: float = 1.0  # nats per token: three steps above it are a collapse
    checkpoints: int = 2  # newest ones that are kept, besides best/
    # also to
    tensorboard: bool = (
        False  # rows and some transcripts to logs/<run>/tensorboard (pip install tensorboard)
    )
    wandb: bool = False  # the same to Weights & Biases (pip install wandb); $WANDB_MODE=offline needs no account


# ================================================ the idea: edit here ================================================

NO_ARTEFACT = -1.0  # no reward below is smaller: handing in nothing, or doing less, is never paid


def continuous(gain, recent):
    """The improvement (0 at the task's baseline, 1 at its reference), clipped to [-1, 1]."""
    return max(-1.0, min(1.0, gain))


def tiered(gain, recent):
    """1 from the reference on, 0.2 above the baseline, 0 otherwise."""
    return 1.0 if gain >= 1 else 0.2 if gain > 0 else 0.0


def percentile(gain, recent):
    """Share of the task's latest valid results (earlier steps) that are worse; equal ones count half. 0.5 at first."""
    return fmean((g < gain) + 0.5 * (g == gain) for g in recent) if recent else 0.5


def binary(gain, recent):
    """1 above the baseline, else 0."""
    return float(gain > 0)


def group(rewards):
    """A_i = (r_i - mean(r)) / std(r): GRPO, arXiv 2402.03300, section 4.1.2."""
    return [(r - fmean(rewards)) / stdev(rewards) for r in rewards]


def group_nostd(rewards):
    """A_i = r_i - mean(r): Dr. GRPO, arXiv 2503.20783. The std would enlarge groups that hardly differ."""
    return [r - fmean(rewards) for r in rewards]


def rloo(rewards):
    """A_i = r_i - mean of the other r_j = G / (G - 1) (r_i - mean(r)): leave-one-out REINFORCE, arXiv 2402.14740."""
    return [(r - fmean(rewards)) * len(rewards) / (len(rewards) - 1) for r in rewards]


def gae(reward, values, lam):
    """A_t = sum_k lam^k d_(t+k), d_t = V_(t+1) - V_t and at the last token r - V_t (arXiv 1506.02438, eq. 16, gamma 1).

    values: V before each trained token of an episode. Returns as many advantages; plus V they are the head's targets.
    """
    advantages, advantage, following = [], 0.0, reward
    for value in reversed(values):
        advantage = following - value + lam * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def episode(advantage, turns):
    """Every reply of an episode gets its advantage. turns: as in episodes/*.jsonl, the hook for finer credit."""
    return [advantage] * len(turns)


def runnable(advantage, turns):
    """Replies from which nothing could be run share the blame, not the praise."""
    return [min(advantage, 0.0) if turn["status"] == "rejected" else advantage for turn in turns]


def clipped(logp, old, advantage, sequence, cfg):
    """max(-r A, -clip(r, 1 - low, 1 + high) A), r = exp(logp - old): PPO, arXiv 1707.06347, eq. 7. DAPO: high > low.

    r above cfg.max_ratio counts as cfg.max_ratio but keeps its gradient: with A < 0 nothing else bounds it.
    All arguments (N,). Returns the loss per token and where it was clipped.
    """
    ratio = (logp - old).exp()
    ratio = ratio * (cfg.max_ratio / ratio.detach()).clamp(max=1)
    outside = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -(ratio * advantage).minimum(
        outside * advantage
    ), outside * advantage < ratio * advantage


def sequence_clipped(logp, old, advantage, sequence, cfg):
    """The same with one ratio per sequence, s = exp(mean_t(logp - old)): GSPO, arXiv 2507.18071, in its token form
    s_t = stop(s) pi_t / stop(pi_t), which has the same gradient and takes an advantage per token."""
    s = geometric_mean(logp.detach() - old, sequence).exp() * (logp - logp.detach()).exp()
    outside = s.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -(s * advantage).minimum(outside * advantage), outside * advantage < s * advantage


def clipped_weight(logp, old, advantage, sequence, cfg):
    """-stop(clip(r, 1 - low, 1 + high)) A logp: CISPO, arXiv 2506.13585. Clipped tokens keep their gradient."""
    ratio = (logp - old).exp().detach()
    outside = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return -outside * advantage * logp, outside != ratio


def kl_to_base(logp, base):
    """k3 = exp(d) - d - 1, d = base - logp: unbiased for KL(policy || base), never negative (GRPO, eq. 4)."""
    return (base - logp).exp() - (base - logp) - 1


def geometric_mean(log_ratio, sequence):
    """Mean of the log-ratios of each token's sequence, (N,): the log of the geometric mean of its ratios."""
    return (sequence.bincount(log_ratio) / sequence.bincount())[sequence].to(log_ratio.dtype)


def per_token(length, tokens, episodes, cfg):
    """All tokens of the batch weigh the same (DAPO)."""
    return 1 / tokens


def per_episode(length, tokens, episodes, cfg):
    """All episodes weigh the same, a token of a long one less (GRPO, GSPO)."""
    return 1 / (episodes * length)


def per_budget(length, tokens, episodes, cfg):
    """All tokens the same, by a constant: the most tokens an episode may have (Dr. GRPO)."""
    return 1 / (episodes * cfg.max_turns * cfg.max_reply_tokens)


REWARDS = {"continuous": continuous, "tiered": tiered, "percentile": percentile, "binary": binary}
ADVANTAGES = {
    "group": group,
    "group_nostd": group_nostd,
    "rloo": rloo,
    "ppo": list,
}  # ppo: gae() of the reward itself
CREDITS = {"episode": episode, "runnable": runnable}
LOSSES = {  # loss of a token, its weight in the mean, clip_low and clip_high where the flags leave them open
    "grpo": (clipped, per_episode, 0.2, 0.2),
    "dr_grpo": (clipped, per_budget, 0.2, 0.2),
    "dapo": (clipped, per_token, 0.2, 0.28),
    "gspo": (sequence_clipped, per_episode, 3e-4, 4e-4),
    "cispo": (clipped_weight, per_token, 1.0, 4.0),  # 1 - 1 = 0: no lower bound
}

# =====================================================================================================================


def reward(score: env.Score, task: Task, cfg: Config, recent: list[float]) -> float:
    """Computed once, from the finished episode's score alone."""
    return (
        REWARDS[cfg.reward](improvement(score.value, task), recent) if score.valid else NO_ARTEFACT
    )


async def play_groups(
    policy, plan, size, cfg, seed, job, recent=None, spares=(), test=False
) -> list[Group]:
    """Plays a group of `size` episodes per task of `plan`, and for each group of equal rewards the next one of `spares`.
    All in flight at once, as far as there are sandboxes. Several ranks: each its share."""
    slots, planned = asyncio.Semaphore(cfg.sandboxes), [*plan, *spares]
    spare = iter(range(len(plan), len(planned))[job.rank :: job.world])

    async def play(task, number):
        async with slots:
            return await env.run_episode(
                env.Env(
                    task,
                    cfg.backend,
                    seed * 100_003 + number,
                    cfg.image,
                    cfg.network,
                    cfg.hf_cache,
                ),
                policy,
                seed=seed * 100_003 + number,
                score_test=test,
                max_turns=cfg.max_turns,
                time_limit=60 * cfg.episode_minutes,
                max_reply_tokens=cfg.max_reply_tokens,
                max_observation_tokens=cfg.max_observation_tokens,
            )

    async def fill(number):
        task = planned[number]
        async with (
            asyncio.TaskGroup() as together
        ):  # one cancelled or broken: all are, and every sandbox is closed
            plays = [together.create_task(play(task, number * size + i)) for i in range(size)]
        group = Group(number, task, [p.result() for p in plays], [])
        group.rewards = [
            reward(e.score, task, cfg, (recent or {}).get(task.name, [])) for e in group.played
        ]
        more = None if group.informative else next(spare, None)
        return [group] if more is None else [group, *await fill(more)]

    async with asyncio.TaskGroup() as together:
        mine = [
            together.create_task(fill(number)) for number in range(len(plan))[job.rank :: job.world]
        ]
    return sorted(
        (group for done in mine for group in done.result()), key=lambda group: group.number
    )


def make_batch(policy, groups: list[Group], cfg: Config, job) -> list[Piece]:
    """Every trained token of the groups that teach something, with its advantage and its weight in the mean."""
    batch = []
    for g in groups:
        if g.informative or cfg.advantage == "ppo":
            for e, advantage in zip(g.played, ADVANTAGES[cfg.advantage](g.rewards)):
                batch.append(
                    pieces_of(
                        e, CREDITS[cfg.credit](advantage, e.turns), cfg.cut_replies == "train"
                    )
                )
    lengths = [sum(len(piece.old) for piece in pieces) for pieces in batch]
    tokens, episodes = job.sum(
        sum(lengths), len(lengths)
    )  # before any split into ranks and micro-batches
    for pieces, length in zip(batch, lengths):
        for piece in pieces:
            piece.weight = LOSSES[cfg.loss][1](length, tokens, episodes, cfg)
    if cfg.advantage == "ppo":
        use_values(policy, batch, gae, cfg, job)
    return flat(batch)


def update(policy, optimizer, batch: list[Piece], cfg: Config, job=distributed.Alone()) -> dict:
    """cfg.epochs passes over the batch; every rank takes part, also one without pieces. Returns numbers for the row."""
    import torch

    if not job.sum(len(batch))[0]:
        return {}
    tally, skipped = Tally(), 0
    for epoch in range(cfg.epochs):
        for n, part in enumerate(micro_batches(batch, cfg.micro_tokens, cfg.packing)):
            c, base = columns(part, policy.device), None
            if cfg.kl or n == epoch == 0:  # --kl 0: the guard still wants to know it
                with torch.no_grad():
                    base = policy.logprobs(c.pairs, base=True)[0]
            logp, entropy, *value = policy.logprobs(c.pairs, values=cfg.advantage == "ppo")
            known = torch.stack([x.isfinite() for x in (c.old, logp, base) if x is not None]).all(
                0
            )  # NaN: left out
            logp, old = logp.masked_fill(~known, 0.0), c.old.masked_fill(~known, 0.0)
            gap = (logp.detach() - old).abs()
            if epoch == 0 and gap.mean() > policy.mean_gap_limit:  # before the weights are touched
                raise UserError(
                    f"Engine and trainer disagree by {gap.mean():.2g} nats per token (limit {policy.mean_gap_limit:g}"
                    "): the last sync did not arrive. Not training on samples of another policy."
                )
            drift = geometric_mean(logp.detach() - old, c.sequence).abs()
            kept = known & (drift <= log1p(cfg.max_drift)) if cfg.max_drift else known
            loss, outside = LOSSES[cfg.loss][0](logp, old, c.advantage, c.sequence, cfg)
            if base is not None:
                k3 = kl_to_base(logp, base).masked_fill(~known, 0.0)
                loss = loss + cfg.kl * k3 if cfg.kl else loss
                tally.add(kl=k3)
            error = sum((v - c.target) ** 2 / 2 for v in value)
            loss = (loss + cfg.value_weight * error) * c.weight * kept
            loss.sum().backward()
            tally.add(
                loss=loss,
                entropy=entropy,
                clip_share=outside & kept,
                dropped_share=known & ~kept,
                lost_tokens=~known,
                log_ratio=gap,
                **({"logprob_gap": gap, "clip_share_first": outside & kept} if epoch == 0 else {}),
            )
        job.sum_gradients(policy.parameters())
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm).item()
        if grad_norm <= cfg.skip_grad_norm:  # not so for NaN
            optimizer.step()
        else:
            skipped += 1
        optimizer.zero_grad()
    total, mean, most = tally.over(job)
    return {
        "loss": total["loss"] / cfg.epochs,
        "lost_tokens": total["lost_tokens"],
        "grad_norm": grad_norm,
        "logprob_gap_mean": mean["logprob_gap"],
        "logprob_gap_max": most["logprob_gap"],
        "skipped": skipped,
        "ratio_max": exp(min(most["log_ratio"], 50.0)),
        **{
            name: mean[name]
            for name in ("kl", "entropy", "clip_share", "clip_share_first", "dropped_share")
        },
    }


async def evaluate(policy, tasks: list[Task], cfg: Config, job, seed: int, test=False) -> dict:
    """Mean score over cfg.eval_episodes at the sampling temperature; no valid artefact counts as the baseline."""
    plan = [tasks[i % len(tasks)] for i in range(cfg.eval_episodes)]
    return metrics.judge(
        everyones(await play_groups(policy, plan, 1, cfg, seed, job, test=test), job),
        len(tasks) > 1,
    )


async def train(policy, tasks: list[Task], cfg: Config, run: viz.Run | None, job) -> str:
    """All steps and evaluations. Only rank 0 has a run to write. Returns why the guard ended it, or ""."""
    import torch

    best = Path("logs", cfg.name, "best")
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.lr, betas=(0.9, 0.99), weight_decay=0.0
    )
    state, rows = resume(policy, optimizer, run, job)
    job.share(policy.parameters())
    gap = await policy.verify()
    say(
        job,
        f"engine and trainer agree: log-probs differ by at most {gap:.1g} nats (limit {policy.gap_limit:g})",
    )
    held_out = -1 - 2 * cfg.seed
    if state.step == 0 and cfg.eval_episodes:
        begin(
            policy,
            run,
            job,
            state,
            "before training",
            await evaluate(policy, tasks, cfg, job, held_out),
        )
    if state.step == 0 and cfg.sft:
        say(job, imitation.warm_start(policy, tasks, cfg))
        job.share(policy.parameters())
        policy.sync()
        if cfg.eval_episodes:
            begin(
                policy,
                run,
                job,
                state,
                "after imitation",
                await evaluate(policy, tasks, cfg, job, held_out),
            )

    while state.step < cfg.steps and not state.stopped:
        step, clock, busy = state.step, [time.perf_counter()], policy.engine_seconds

        # sample: P groups of G episodes from the current policy, faults leave their group
        shares = [
            w * metrics.signal(rows, t.name, cfg.curriculum)
            for w, t in zip(cfg.task_weights, tasks)
        ]
        plan = choose_tasks(tasks, shares, cfg.groups, seed=f"{cfg.seed} {step}")
        spares = choose_tasks(
            tasks, shares, cfg.max_groups - cfg.groups, seed=f"{cfg.seed} {step} spares"
        )
        groups = await play_groups(
            policy,
            plan,
            cfg.group_size,
            cfg,
            cfg.seed * 10_007 + step,
            job,
            state.recent,
            spares if cfg.advantage != "ppo" else (),
        )  # which learns from equal rewards, too
        clock.append(time.perf_counter())
        busy = policy.engine_seconds - busy
        played = everyones(groups, job)
        row = {"step": step, **metrics.describe(played, tasks)}
        if (
            not cfg.eval_episodes
        ):  # then the sampled episodes tell, of the adapter before its update
            keep_best(policy, run, job, state, metrics.by_gain([*rows, row]))

        # learn: from the groups whose rewards differ; meanwhile the next step's sandboxes start
        if step + 1 < cfg.steps:
            env.WARM_POOL.expect(min(cfg.sandboxes, len(plan) * cfg.group_size // job.world))
        for setting in optimizer.param_groups:
            setting["lr"] = (
                cfg.lr * state.lr_scale * min(1.0, (step - state.since + 1) / (cfg.warmup + 1))
            )
        learned = update(policy, optimizer, make_batch(policy, groups, cfg, job), cfg, job)
        clock.append(time.perf_counter())

        # sync: the trained adapter into the running engine
        policy.sync()
        clock.append(time.perf_counter())

        # judge: held-out episodes now and then, alarms, a way back from a collapse
        row |= {**learned, "lr": optimizer.param_groups[0]["lr"], "bytes_between_ranks": job.sent()}
        state.step, state.recent = step + 1, metrics.remember(state.recent, played)
        if cfg.eval_episodes and (state.step % cfg.eval_every == 0 or state.step == cfg.steps):
            result = await evaluate(policy, tasks, cfg, job, held_out)
            row |= {
                f"eval_{'score_' * (key in ('mean', 'stderr'))}{key}": value
                for key, value in result.items()
            }
            keep_best(policy, run, job, state, result | {"step": step})
        row["alarms"] = metrics.alarms(row, rows)
        rows.append(row)
        if cfg.guard != "off" and (
            reason := metrics.collapse(
                rows[state.since :], cfg.kl_limit, cfg.eval_episodes and state.best
            )
        ):
            row["alarms"].append(restore(policy, optimizer, cfg, state, best, reason))

        # record: row, transcripts, checkpoint, plot; a step counts when its checkpoint is there, see resume()
        if run:
            record(policy, optimizer, cfg, run, state, played, row, clock, busy)

    done = job.gather(run.results().get("after", {}).get("steps") if run else None)[0]
    if (
        cfg.eval_episodes and done != state.step
    ):  # what best/ is worth on new seeds, and on the test part
        policy.load(best)
        policy.sync()
        after = await evaluate(policy, tasks, cfg, job, held_out - 1, test=True)
        if run:
            run.result(after=after | {"steps": state.step, "adapter_of_step": state.best["step"]})
    if run:
        run.result(status=f"stopped: {state.stopped}" if state.stopped else "finished")
    return state.stopped


# -------------------------------------------------------------------------------------------------------------- start


MAY_CHANGE = ("steps", "checkpoints", "sandboxes", "tensorboard", "wandb")
AT_LEAST = {
    "groups": 1,
    "group_size": 2,
    "max_turns": 1,
    "temperature": 0.01,
    "episode_minutes": 0.01,
    "sandboxes": 1,
    "sft_updates": 1,
    "max_ratio": 1,
    "epochs": 1,
    "max_grad_norm": 1e-6,
    "skip_grad_norm": 1e-6,
    "lora_alpha": 1,
    "eval_every": 1,
    "checkpoints": 1,
}  # all other numbers: 0


def prepare(cfg: Config, job):
    """Fills what is left open in the config and finds everything that can be wrong, before any model is loaded."""
    tasks = [load_task(name, cfg.mlgym_root or None, cfg.mledojo_root or None) for name in cfg.task]
    for wrong, text in (
        (
            cfg.lora_rank not in ENGINE_RANKS,
            f"--lora-rank must be one of {', '.join(map(str, ENGINE_RANKS))}, not {cfg.lora_rank}.",
        ),
        (
            cfg.task_weights
            and not (
                len(cfg.task_weights) == len(tasks)
                and min(cfg.task_weights) >= 0 < sum(cfg.task_weights)
            ),
            "--task-weights needs one number per task, none below 0 and not all 0.",
        ),
        (
            cfg.advantage == "ppo" and cfg.credit != "episode",
            "--advantage ppo finds the credit of every token itself: leave out --credit.",
        ),
    ):
        if wrong:
            raise UserError(text)
    viz.check_numbers(cfg, {name: (least, None) for name, least in AT_LEAST.items()}, (0, None))
    if cfg.model == "auto":
        import torch

        cfg.model = "Qwen/Qwen3-4B-Instruct-2507" if torch.cuda.is_available() else "tiny"
    path = None if cfg.model == "tiny" else resolve_model(cfg.model)
    tiny = path is None or path.is_tiny
    cfg.backend, why = env.pick_backend(cfg.backend, cfg.image, tiny)
    for task in tasks:
        env.check_needs(task, cfg.backend, cfg.network, cfg.hf_cache)
    _, _, low, high = LOSSES[cfg.loss]
    left_open = {
        "max_reply_tokens": 160 if tiny else 2048,
        "max_observation_tokens": 256 if tiny else 2048,
        "context": 2048 if tiny else 16384,
        "lr": 1e-3 if tiny else 2e-5,
        "micro_tokens": 8192 if tiny else 16384,
        "clip_low": low,
        "clip_high": high,
        "max_groups": 2 * cfg.groups,
        "task_weights": (1.0,) * len(tasks),
        "name": f"grpo-{'+'.join(cfg.task)}-{cfg.model.strip('/').removesuffix('/best').split('/')[-1]}-{cfg.seed}",
    }
    for key, value in left_open.items():
        setattr(cfg, key, getattr(cfg, key) or value)
    if cfg.max_reply_tokens >= cfg.context:
        raise UserError(
            f"--max-reply-tokens {cfg.max_reply_tokens} leaves no room for a prompt in --context {cfg.context}."
        )
    run = None
    if job.rank == 0:
        run = viz.open_run(f"logs/{cfg.name}", asdict(cfg), resume_ok_keys=MAY_CHANGE)
        if len(run.rows()) > 1 and not run.checkpoints():
            raise UserError(
                f"{run.dir} has steps but no checkpoint to go on from, and starting anew would erase them: "
                "take another --name, or remove it."
            )
        run.trackers = trackers.opened(run.dir, run.config, cfg.tensorboard, cfg.wandb)
    return (
        tasks,
        path or resolve_model("tiny"),
        why,
        run,
    )  # building the stand-in takes minutes: last


def main() -> None:
    threads.configure()
    cfg = viz.parse_config(Config, sys.argv[1:])
    job = distributed.join(
        timeout=24 * 3600
    )  # of waiting for the slowest; a dead one is noticed at once
    run = None
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # `nohup ... &` has it ignored, and the next line needs it
    signal.signal(
        signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)
    )  # an orderly end, as with Ctrl-C
    try:
        tasks, path, why, run = prepare(cfg, job)
        if run:
            banner(cfg, tasks, path, why, run)
        policy = Policy(
            path,
            cfg.context,
            cfg.temperature,
            cfg.lora_rank,
            cfg.lora_alpha,
            cfg.seed,
            cfg.sandboxes,
            cfg.gpu_memory,
            cfg.advantage == "ppo",
            cfg.checkpointing,
            cfg.packing,
            cfg.share_base,
        )
        stopped = asyncio.run(train(policy, tasks, cfg, run, job))
    except KeyboardInterrupt:
        if run:
            run.result(status="interrupted")
            print(
                f"\ninterrupted; the same command continues {run.dir} after its last whole step",
                file=sys.stderr,
            )
        sys.exit(130)
    if run:
        farewell(run)
    if stopped and job.world == 1:  # torchrun would start a job again that has failed
        sys.exit(f"Stopped: {stopped}. The best adapter so far is in best/.")


if __name__ == "__main__":
    viz.one_sentence(main)
