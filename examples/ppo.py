"""PPO for agents (arXiv 1707.06347): grpo.py's loop, copied and edited.

    python examples/ppo.py --task titanic
    python viz.py logs/ppo-titanic-tiny-0

A value head on the policy's last hidden states estimates the reward before each token, and the
advantage of a token is what was better than the estimate. What differs from grpo.py:
1. ActorCritic is a Policy with a value head, which is trained, saved and loaded with the adapter
2. make_batch: all episodes count, also of groups with equal rewards; advantages are per token
3. micro_loss: the squared error of the values is a term of the loss
4. left out: EPOCHS, ENTROPY_BONUS, --ahead, and the mask of tokens whose log-probs are not finite

Everything else is imported from grpo.py, with its options. The same command again resumes a run.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
from flatlab.files import save_tensors  # noqa: E402
from flatlab.runs import cli  # noqa: E402
from flatlab.train import checkpoint, metrics  # noqa: E402
from flatlab.train.batch import (  # noqa: E402
    Meter,
    column,
    gather_groups,
    micro_batches,
    plan_step,
    sequences_of,
)
from flatlab.train.job import in_trainer, stop_if_interrupted  # noqa: E402
from flatlab.view import console  # noqa: E402
from policy import Policy  # noqa: E402

VALUE_WEIGHT = 0.1  # weight of the value head's squared error in the loss
LAMBDA = 1.0  # 1: the advantage is the return minus the value; 0.95 forgets after twenty tokens
HEAD_FILE = "value_head.pt"


@dataclass
class Config(grpo.Config):
    """The options of grpo.py. Advantages are per token, so there is no other credit."""

    advantage: Literal["gae"] = "gae"  # how much better a token was than expected
    credit: Literal["episode"] = "episode"
    ahead: Literal[0] = 0  # this loop samples a step when the one before is learned


def gae(reward, values):
    """A_t = sum_k lam^k d_(t+k), d_t = V_(t+1) - V_t, at the last token r - V_t (arXiv 1506.02438,
    eq. 16, gamma 1).

    values: V before each trained token of an episode.
    """
    advantages, advantage, following = [], 0.0, reward
    for value in reversed(values):
        advantage = following - value + LAMBDA * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


class ActorCritic(Policy):
    """A Policy with a value head. V = 0 at the start: the first advantages are plain returns."""

    head = None

    def __init__(self, path, options, seed, *sizes, **more):
        super().__init__(path, options, seed, *sizes, **more)
        import torch

        self.head = torch.nn.Linear(self.model.config.hidden_size, 1, device=self.device)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        for p in self.head.parameters() if self.head else ():
            p.data.zero_()
        super().reset(seed)

    def parameters(self) -> list:
        return [*super().parameters(), *(self.head.parameters() if self.head else ())]

    def values(self, hidden):
        """Estimates of the reward, (N,), after these hidden states (N, D)."""
        return self.head(hidden.float())[:, 0]

    def save(self, folder) -> None:
        super().save(folder)
        save_tensors(self.head.state_dict(), Path(folder) / HEAD_FILE)

    def load_adapter(self, folder) -> None:
        import torch

        super().load_adapter(folder)
        file = Path(folder) / HEAD_FILE
        if self.head and file.is_file():
            state = torch.load(file, map_location=self.device, weights_only=True)
            self.head.load_state_dict(state)


# ------------------------------------------------------------------------------ learn


def make_batch(policy, groups: list, cfg: Config, job) -> list:
    """Every trained token with its advantage, whitened over the batch, its weight, and the target
    of its value: a list of TrainSequence.
    """
    import torch

    episodes = [(e, r) for g in groups for e, r in zip(g.played, g.rewards)]
    batch = [sequences_of(e, [r] * len(e.turns)) for e, r in episodes]
    trained = sum(batch, [])
    tokens, count = job.ranks.sum(sum(len(s.old) for s in trained), len(batch))
    for part in micro_batches(trained, cfg.micro_tokens, policy.packs):
        with torch.no_grad():
            hidden, _ = policy.hidden_states([(s.tokens, s.mask) for s in part])
            found = iter(policy.values(hidden).tolist())
        for s in part:
            s.values = [next(found) for _ in s.old]
    for sequences, (_, reward) in zip(batch, episodes):
        length = sum(len(s.old) for s in sequences)
        advantages = iter(gae(reward, sum((s.values for s in sequences), [])))
        for s in sequences:
            s.weight = grpo.LOSSES[cfg.loss].weight(length, tokens, count, cfg)
            s.advantage = [next(advantages) for _ in s.old]
            s.target = [a + value for a, value in zip(s.advantage, s.values)]
    everything = [a for s in trained for a in s.advantage]
    total, squares = job.ranks.sum(sum(everything), sum(a * a for a in everything))
    mean = total / max(tokens, 1)
    deviation = max(squares / max(tokens, 1) - mean**2, 0.0) ** 0.5
    for s in trained:
        s.advantage = [(a - mean) / (deviation + 1e-8) for a in s.advantage]
    return trained


def update(policy, optimizer, groups: list, cfg: Config, job) -> dict:
    """One optimizer step. Returns numbers for the row; see grpo.update."""
    import torch

    batch = make_batch(policy, groups, cfg, job)
    if not job.ranks.sum(len(batch))[0]:
        return {}
    meter = Meter()
    for part in micro_batches(batch, cfg.micro_tokens, policy.packs):
        micro_loss(policy, part, cfg, meter).backward()
        stop_if_interrupted()
    agrees = all(job.ranks.gather(meter.mean("logprob_diff") <= policy.diff_limit))
    job.ranks.sum_gradients(policy.parameters())
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), grpo.MAX_GRAD_NORM).item()
    is_sound = agrees and norm <= grpo.SKIP_GRAD_NORM  # False for NaN
    if is_sound:
        optimizer.step()
    optimizer.zero_grad()
    total, mean, largest = meter.over_ranks(job)
    return {
        "loss": total["loss"],
        "value_loss": mean["value_loss"],
        "grad_norm": norm,
        "skipped": int(not is_sound),
        "logprob_diff_mean": mean["logprob_diff"],
        "logprob_diff_max": largest["logprob_diff"],
        **{name: mean[name] for name in ("kl", "entropy", "clip_share")},
    }


def micro_loss(policy, part: list, cfg: Config, meter: Meter):
    """The loss of a micro-batch, a scalar with gradient; its numbers go to the meter."""
    import torch

    pairs = [(s.tokens, s.mask) for s in part]
    with torch.no_grad():
        base, _ = policy.logprobs(pairs, base=True)
    hidden, tokens = policy.hidden_states(pairs)
    logp, entropy = policy.logprobs_of(hidden, tokens)
    old = column(part, "old", policy.device)
    advantage = column(part, "advantage", policy.device)
    sequence = [number for number, s in enumerate(part) for _ in s.old]
    sequence = torch.tensor(sequence, device=policy.device)
    loss, is_clipped = grpo.LOSSES[cfg.loss].function(logp, old, advantage, sequence, cfg)

    value_loss = (policy.values(hidden) - column(part, "target", policy.device)) ** 2 / 2
    kl = grpo.kl_to_base(logp, base)
    loss = loss + cfg.kl * kl + VALUE_WEIGHT * value_loss
    loss = loss * column(part, "weight", policy.device)
    meter.add(loss=loss, value_loss=value_loss, kl=kl, entropy=entropy, clip_share=is_clipped)
    meter.add(logprob_diff=(logp.detach() - old).abs())
    return loss.sum()


# ------------------------------------------------------------------------------ train


async def train(policy, tasks: list, cfg: Config, job) -> None:
    """All steps and evaluations, as in grpo.py."""
    optimizer = policy.make_optimizer(cfg.lr, **grpo.ADAMW)
    rows = await grpo.begin(policy, optimizer, tasks, cfg, job)
    weights = [grpo.TASK_WEIGHTS.get(task.name, 1) for task in tasks]
    while job.step < cfg.steps and not job.stopped:
        step = job.step
        times = [time.perf_counter()]

        # sample
        plan = plan_step(tasks, weights, cfg, step)
        groups = await grpo.play_groups(policy, plan, cfg, job)
        times.append(time.perf_counter())
        played = await in_trainer(gather_groups, groups, job)
        row = {"step": step, **metrics.step_metrics(played, tasks)}

        # learn, and copy the adapter into the running engine
        row["lr"] = grpo.learning_rate(step, cfg)
        for setting in optimizer.param_groups:
            setting["lr"] = row["lr"]
        row |= await in_trainer(update, policy, optimizer, groups, cfg, job)
        times.append(time.perf_counter())
        policy.sync()
        if row.get("skipped"):
            await policy.check_sync()
        times.append(time.perf_counter())

        # judge and record
        await grpo.judge_step(policy, tasks, cfg, job, row, rows)
        times.append(time.perf_counter())
        if job.run:
            row |= metrics.timing(policy, times, played)
            await in_trainer(checkpoint.write_step, policy, optimizer, job, row, played)
            await in_trainer(console.step_made, job.run, rows, cfg.steps)
    await grpo.finish(policy, tasks, cfg, job)


if __name__ == "__main__":
    cli.one_sentence(lambda: grpo.main(Config, Path(__file__).stem, ActorCritic, train))
