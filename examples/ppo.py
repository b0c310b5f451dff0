"""PPO for agents (arXiv 1707.06347): grpo.py with a value head.

    python examples/ppo.py --task titanic
    python viz.py logs/ppo-titanic-tiny-0

A value head on the policy's last hidden states estimates the reward before each token, and the
advantage of a token is what was better than the estimate. What differs from grpo.py:
1. ActorCritic is a Policy with a value head, which is trained, saved and loaded with the adapter
2. make_batch: all episodes count, also of groups with equal rewards; advantages are per token
3. micro_loss: the squared error of the values is a term of the loss

Everything else is imported from grpo.py, with its options. The same command again resumes a run.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
from flatlab.files import load_tensors, save_tensors, usable  # noqa: E402
from flatlab.runs import cli  # noqa: E402
from flatlab.train.batch import (  # noqa: E402
    Meter,
    column,
    micro_batches,
    pairs_of,
    sequences_of,
    weighted,
)
from policy import Policy  # noqa: E402

VALUE_WEIGHT = 0.1  # weight of the value head's squared error in the loss
LAMBDA = 1.0  # 1: the advantage is the return minus the value; 0.95 forgets after twenty tokens
HEAD_FILE = "value_head.pt"


@dataclass(frozen=True)
class Config(grpo.Config):
    """The options of grpo.py. Advantages are per token, so there is no other credit."""

    advantage: Literal["gae"] = "gae"  # how much better a token was than expected
    credit: Literal["episode"] = "episode"


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
        self.model.value_head = self.head  # parameters() has it, too
        self.reset(seed)

    def reset(self, seed: int) -> None:
        for p in self.head.parameters() if self.head else ():
            p.data.zero_()
        super().reset(seed)

    def values(self, hidden):
        """Estimates of the reward, (N,), after these hidden states (N, D)."""
        return self.head(hidden.float())[:, 0]

    def logprobs_of(self, hidden, targets):
        """Also keeps the estimates, of the same forward pass, for the loss."""
        if self.head:
            self.estimates = self.values(hidden)
        return super().logprobs_of(hidden, targets)

    def save(self, folder) -> None:
        super().save(folder)
        save_tensors(self.head.state_dict(), Path(folder) / HEAD_FILE)

    def load_adapter(self, folder) -> None:
        super().load_adapter(folder)
        file = Path(folder) / HEAD_FILE
        begins = str(folder) == self.path.adapter  # which may be trained without a value head
        if self.head and not (begins and not file.exists()):
            with usable(file):
                self.head.load_state_dict(load_tensors(file, self.device))


# ------------------------------------------------------------------------------ learn


def make_batch(policy, groups: list, cfg: Config, job) -> list:
    """Every trained token with its advantage, whitened over the batch, its weight, and the target
    of its value: a list of TrainSequence.
    """
    import torch

    episodes = [e for g in groups for e in g.played]
    batch = [sequences_of(e, [e.reward] * len(e.turns)) for e in episodes]
    trained = weighted(batch, grpo.LOSSES[cfg.loss].weight, cfg, job)
    for micro_batch in micro_batches(trained, policy):
        with torch.no_grad():
            hidden, _ = policy.hidden_states(pairs_of(micro_batch))
            estimates = iter(policy.values(hidden).tolist())
        for s in micro_batch:
            s.values = [next(estimates) for _ in s.old]
    for sequences, e in zip(batch, episodes):
        advantages = iter(gae(e.reward, sum((s.values for s in sequences), [])))
        for s in sequences:
            s.advantage = [next(advantages) for _ in s.old]
            s.target = [a + value for a, value in zip(s.advantage, s.values)]
    unscaled = [a for s in trained for a in s.advantage]
    squares = sum(a * a for a in unscaled)
    count, total, squares = job.ranks.sum(len(unscaled), sum(unscaled), squares)
    mean = total / max(count, 1)
    deviation = max(squares / max(count, 1) - mean**2, 0.0) ** 0.5
    for s in trained:
        s.advantage = [(a - mean) / (deviation + 1e-8) for a in s.advantage]
    for sequences, e in zip(batch, episodes):
        replies = [number for segment in e.segments for number in segment.reply if number >= 0]
        advantages = sum((s.advantage for s in sequences), [])
        for number in {*replies}:
            own = [a for reply, a in zip(replies, advantages) if reply == number]
            e.turns[number]["advantage"] = fmean(own)  # for the transcripts
    return trained


def micro_loss(
    policy, micro_batch: list, cfg: Config, meter: Meter, epoch: int, kl_weight: float | None
):
    """The loss of grpo.py and the squared error of the values."""
    loss = grpo.micro_loss(policy, micro_batch, cfg, meter, epoch, kl_weight)
    error = (policy.estimates - column(micro_batch, "target", policy.device)) ** 2 / 2
    value_loss = VALUE_WEIGHT * error * column(micro_batch, "weight", policy.device)
    meter.add("mean", value_loss=error)
    meter.add("sum", loss=value_loss)
    return loss + value_loss.sum()


def update(policy, optimizer, groups: list, cfg: Config, job) -> dict:
    """The update of grpo.py on this batch, with this loss."""
    batch = make_batch(policy, groups, cfg, job)
    return grpo.optimize(policy, optimizer, batch, micro_loss, cfg, job)


train = functools.partial(grpo.train, update=update)

if __name__ == "__main__":
    cli.run(lambda: grpo.main(Config, Path(__file__).stem, ActorCritic, train))
