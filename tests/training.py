"""Shared parts of the tests of grpo.py: a small config, and an episode of one reply whose score is
a function of that reply.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import torch

import grpo
from flatlab.files import read_mapping
from flatlab.options import changed
from flatlab.task.grading import Score
from flatlab.train.batch import Group
from flatlab.world.episode import Episode, packed_tokens
from helpers import attempts_of, turn
from tasks import load_task

TASK = load_task("titanic", "", "")


def randomise(policy, seed=0, std=0.05):
    """Adds noise to the adapter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * std)


def weights_of(policy):
    return [p.detach().clone() for p in policy.parameters()]


def all_close(tensors, others, atol):
    return all(torch.allclose(a, b, atol=atol) for a, b in zip(tensors, others, strict=True))


def pair(prompt, reply):
    """Tokens and mask of a sequence whose last part is trained on."""
    return [*prompt, *reply], [0] * len(prompt) + [1] * len(reply)


def has_weights(policy, weights):
    return all(map(torch.equal, weights, policy.parameters()))


CFG = changed(
    grpo.Config(seed=0),
    kl=0.0,
    lr=0.01,
    micro_tokens=10_000,
    concurrency=32,
    max_groups=3,
    max_reply_tokens=6,
    max_observation_tokens=64,
    context=2048,
    backend="local",
)


def result_of(name="a"):
    return read_mapping(Path("logs", name, "result.json"))


def episodes_of(steps, name="a"):
    return [attempts_of(f"logs/{name}", f"{step}") for step in range(steps)]


def versions_of(episodes):
    return {turn["version"] for e in episodes for turn in e["turns"]}


def valid(value, task=TASK):
    return Score(value, task.metric, "validation", True, "")


def scored_group(task, *scores):
    """A group of episodes with these scores, None: nothing valid."""
    episodes = []
    for i, value in enumerate(scores):
        episode = Episode(task.name, i, status="submit")
        episode.judge(task, replace(valid(value, task), valid=value is not None))
        episode.reward = grpo.reward_of(episode, CFG)
        episodes.append(episode)
    return Group(0, task, episodes)


async def one_reply(
    world, policy, options, episode=None, score_test=False, loop=None, *, faulty=None, score=None
):
    """Replaces run_episode: the more letters in the reply, the higher the score."""
    seed = world.seed
    episode = episode or Episode(world.task.name, seed)
    episode.prompt, episode.status = "say something", "submit"
    if faulty and faulty(seed):
        episode.status = "fault"
        episode.fault = "the container died"
        episode.judge(world.task, None)
        return episode
    prompt = policy.render([{"role": "user", "content": episode.prompt}])
    sample = await policy.sample(prompt, options.max_reply_tokens, seed=seed % 2**31)
    episode.tokens += sample.reply_tokens
    said = {"reply_tokens": len(sample.tokens), "version": sample.version}
    episode.add(prompt, sample, turn(sample.text, "", stop_reason=sample.stop_reason, **said))
    episode.packed = packed_tokens(episode.segments)
    text = sample.text.encode().decode("latin1")
    letters = sum(map(str.isalpha, text)) / max(1, len(text))
    graded = valid(score or 0.5 + letters / 2, world.task)
    episode.judge(world.task, graded, graded if score_test else None)
    return episode


WAITS = (0.0, 0.05, 0.3)  # seconds


async def waiting_reply(world, policy, options, *more, waits=WAITS, **others):
    """An episode of one reply, before and after which the agent waits."""
    rng = random.Random(world.seed)
    await asyncio.sleep(rng.choice(waits))
    episode = await one_reply(world, policy, options, *more, **others)
    await asyncio.sleep(rng.choice(waits))
    return episode
