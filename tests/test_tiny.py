"""The stand-in model in configs/tiny knows the prompts of today."""

import asyncio

import pytest

import env
from flatlab.tree import prompts
from flatlab.world.texts import load_prompts
from helpers import TINY_TEXTS, play_once
from tasks import load_task
from tools import expert, make_tiny

EPISODES = 20  # per task
LOWEST_VALID_SHARE = 0.5
ADVICE = "If the prompts changed on purpose: run `python tools/make_tiny.py`, commit configs/tiny."


@pytest.fixture(scope="session")
def tiny_policy(tiny_model):
    """Of the session: an engine that ends takes the process groups of all engines with it."""
    from policy import Policy

    return Policy(tiny_model, context=2048, max_batch=EPISODES)


@pytest.mark.parametrize("name", expert.TABLES)
def test_it_solves_the_tasks_with_the_prompts_of_today(tiny_policy, name):
    """vLLM plays episodes in real sandboxes. A changed prompt is what makes this fail."""
    task = load_task(name)
    backend = make_tiny.any_backend()

    limits = {"max_reply_tokens": 160, "max_observation_tokens": 256}

    async def play_all():
        episodes = []
        for seed in range(EPISODES):
            world = env.Env(task, backend, seed=seed)
            episodes.append(play_once(world, tiny_policy, seed, **limits))
        return await asyncio.gather(*episodes)

    episodes = asyncio.run(play_all())
    assert [episode.fault for episode in episodes if episode.status == "fault"] == []
    valid_share = sum(episode.score.valid for episode in episodes) / EPISODES
    assert valid_share >= LOWEST_VALID_SHARE, f"{name}: {valid_share:.0%} are valid. {ADVICE}"


@pytest.mark.parametrize("name", expert.TABLES)
@pytest.mark.parametrize("mode", ["uniform", "tail", "sequence"])
def test_it_lists_strategies_when_a_search_asks(tiny_policy, mode, name):
    task = load_task(name)
    texts = load_prompts(TINY_TEXTS)
    about = prompts.about(texts, task, {})
    question = prompts.ask(texts, about, None, [], mode=mode, k=5, tau=0.1)
    tokens = tiny_policy.render([{"role": "user", "content": question}])

    async def ask_all():
        replies = (tiny_policy.sample(tokens, 160, seed=seed) for seed in range(EPISODES))
        return await asyncio.gather(*replies)

    replies = asyncio.run(ask_all())
    usable = sum(len(prompts.parse(reply.text)) >= 3 for reply in replies)
    assert usable >= LOWEST_VALID_SHARE * EPISODES, f"{usable} lists are usable. {ADVICE}"
