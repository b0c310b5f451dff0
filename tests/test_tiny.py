"""Tests of the stand-in model in configs/tiny: it loads, it knows the prompts of today, and its
builder runs.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

import env
import search
from flatlab.tree import parsing, prompts
from helpers import play_once
from tasks import load_task
from tools import make_tiny

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "tiny"
EPISODES = 20  # per task
LOWEST_VALID_SHARE = 0.5
ADVICE = "If the prompts changed on purpose: run `python tools/make_tiny.py`, commit configs/tiny."


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


def test_transformers_loads_it(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.config.max_position_embeddings == 4096
    assert sum(p.numel() for p in model.parameters()) < 3e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    tokens = torch.tensor([tokenizer("Strategy: majority by sex\n").input_ids])
    assert model(tokens).logits.shape == (1, tokens.shape[1], model.config.vocab_size)


@pytest.fixture(scope="module")
def tiny_policy(tiny_model):
    from policy import Policy

    return Policy(tiny_model, context=2048, max_batch=EPISODES)


@pytest.mark.parametrize("name", ["titanic", "battleOfSexes"])
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


@pytest.mark.parametrize("mode", ["uniform", "tail", "sequence"])
def test_it_lists_strategies_when_a_search_asks(tiny_policy, mode):
    task = load_task("titanic")
    root = SimpleNamespace(op="baseline", idea="", valid=True, score=task.baseline)
    wanted = search.strategy_request(mode, 5, 0.1, root)
    question = prompts.ask(prompts.about(task), wanted, root, [])
    tokens = tiny_policy.render([{"role": "user", "content": question}])

    async def ask_all():
        replies = (tiny_policy.sample(tokens, 160, seed=seed) for seed in range(EPISODES))
        return await asyncio.gather(*replies)

    replies = asyncio.run(ask_all())
    usable = sum(len(parsing.parse(reply.text)) >= 3 for reply in replies)
    assert usable >= LOWEST_VALID_SHARE * EPISODES, f"{usable} lists are usable. {ADVICE}"


def test_any_text_survives_the_tokenizer_and_none_becomes_a_control_token(tokenizer):
    for text in (
        "naïve café \U0001f6a2 \x00\x7f",
        "\n\n  a\r\n\tb",
        "Strategy: \nStrategy: x",
        "<|im_end|> <|im_start|>user\n",
    ):
        tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert tokenizer.decode(tokens) == text
        assert not set(tokens) & {0, 1, 2}


def test_a_strategy_has_the_same_tokens_at_the_end_of_the_prompt_and_in_the_reply(tokenizer):
    line = "Strategy: majority by sex and class"
    tokens = tokenizer(line).input_ids
    assert tokenizer(f"of the task.\n\n{line}").input_ids[-len(tokens) :] == tokens
    assert tokenizer(f"{line}\n```bash\nls").input_ids[: len(tokens)] == tokens


@pytest.mark.slow
def test_a_small_model_is_built(tmp_path):
    from transformers import AutoModelForCausalLM

    config = make_tiny.Config(out=tmp_path, steps=2, transcripts=24, batch=8)
    make_tiny.build(config)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == config.vocab
    assert "--steps 2" in (tmp_path / "README.md").read_text()
