"""GRPO for agents from scratch: the stand-in model learns titanic on a CPU, in a minute or two.

    python examples/minimal.py

This file is to be read: it computes rewards, advantages and loss itself. It leaves out, of grpo.py:
1. the KL to the starting policy, the upper bound on the ratio, and another group in place of one
   whose rewards are all equal
2. micro-batches: here all tokens of a step go through one forward pass
3. warm-up, evaluations, alarms, checkpoints, transcripts, several GPUs, --ahead, Policy.verify

The formulas, for episode i of a group with rewards r (GRPO, arXiv 2402.03300; the mean over all
tokens and the wider upper bound come from DAPO, arXiv 2503.14476):

    A_i   = (r_i - mean(r)) / std(r)
    ratio = pi(token) / pi_old(token)
    loss  = mean over tokens of max(-ratio A_i, -clip(ratio, 1 - LOW, 1 + HIGH) A_i)
"""

import asyncio
import sys
from pathlib import Path
from statistics import fmean, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flatlab import threads  # noqa: E402

threads.configure()  # before torch is imported
import torch  # noqa: E402

from env import Env  # noqa: E402
from flatlab.model.path import resolve_model  # noqa: E402
from flatlab.options import EpisodeOptions  # noqa: E402
from flatlab.world.episode import run_episode  # noqa: E402
from policy import Policy  # noqa: E402
from tasks import load_task  # noqa: E402

STEPS = 12
GROUPS = 4
GROUP_SIZE = 8  # episodes that are compared with each other
LEARNING_RATE = 1e-3
LOW, HIGH = 0.2, 0.28  # the ratio is clipped to [1 - LOW, 1 + HIGH]
PROMPTS = str(ROOT / "configs/prompts/tiny.yaml")  # the texts that the stand-in knows
OPTIONS = EpisodeOptions(max_reply_tokens=160, max_observation_tokens=256, prompts=PROMPTS)


async def play(policy, task, seed):
    """One episode in a sandbox of its own."""
    async with Env(task, "local", seed) as world:
        return await run_episode(world, policy, OPTIONS)


async def play_group(policy, task, number):
    """The episodes of a group, all at once. Episodes whose sandbox broke are dropped."""
    seeds = range(number * GROUP_SIZE, (number + 1) * GROUP_SIZE)
    episodes = await asyncio.gather(*(play(policy, task, seed) for seed in seeds))
    return [episode for episode in episodes if episode.status != "fault"]


def reward_of(episode):
    """The improvement over the baseline in [-1, 1]; -1 without a valid submission."""
    if not episode.valid:
        return -1.0
    return max(-1.0, min(1.0, episode.improvement))


def advantages_of(rewards):
    """A_i = (r_i - mean(r)) / std(r). Equal rewards teach nothing."""
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    return [(r - fmean(rewards)) / stdev(rewards) for r in rewards]


def update(policy, optimizer, batch):
    """One optimizer step on a batch of (segment, advantage). Returns the loss."""
    pairs, old, advantage = [], [], []  # the last two have one entry per sampled token
    for segment, value in batch:
        pairs.append((segment.tokens, segment.mask))
        sampled = [logp for logp, mask in zip(segment.logprobs, segment.mask) if mask]
        old += sampled  # log pi_old, as the engine reported it
        advantage += [value] * len(sampled)
    old = torch.tensor(old, device=policy.device)
    advantage = torch.tensor(advantage, device=policy.device)

    # The loss of every sampled token, and its mean. Prompts and observations are not trained.
    logp, _ = policy.logprobs(pairs)
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - LOW, 1 + HIGH)
    loss = torch.maximum(-ratio * advantage, -clipped * advantage).mean()

    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


async def train(task, policy):
    optimizer = policy.make_optimizer(LEARNING_RATE)
    for step in range(STEPS):
        # Sample: all groups at once, on one engine.
        numbers = range(step * GROUPS, (step + 1) * GROUPS)
        groups = await asyncio.gather(*(play_group(policy, task, n) for n in numbers))
        # Score: rewards are compared inside of their group.
        rewards, batch = [], []
        for episodes in groups:
            group = [reward_of(episode) for episode in episodes]
            rewards += group
            for episode, advantage in zip(episodes, advantages_of(group)):
                batch += [(s, advantage) for s in episode.segments if advantage]
        # Learn, and copy the adapter into the running engine.
        loss = update(policy, optimizer, batch) if batch else 0.0
        policy.sync()
        print(f"step {step:2}  reward {fmean(rewards):+.2f}  loss {loss:+.3f}", flush=True)


if __name__ == "__main__":
    policy = Policy(resolve_model("tiny"))  # before the event loop starts
    asyncio.run(train(load_task("titanic"), policy))
