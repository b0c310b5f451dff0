"""policy.Transformers (`search.py --engine hf`) samples from the same distribution as vLLM."""

import asyncio

import pytest

from policy import ModelPath, Transformers


def test_it_agrees_with_the_engine(policy, random_model):
    hf = Transformers(ModelPath(random_model, None, False), context=2048)
    prompt = hf.render([{"role": "user", "content": "hi <|im_end|> there"}])
    assert prompt == policy.render([{"role": "user", "content": "hi <|im_end|> there"}])
    assert hf.observation_tokens("x", True) == policy.observation_tokens("x", True)
    ours = asyncio.run(hf.sample(prompt, 20, temperature=0.0))
    theirs = asyncio.run(policy.sample(prompt, 20, temperature=0.0))
    assert ours.tokens == theirs.tokens
    sampled = [asyncio.run(hf.sample(prompt, 20, temperature=0.7, seed=s)) for s in (1, 1, 2)]
    assert sampled[0].tokens == sampled[1].tokens != sampled[2].tokens
    at_one = asyncio.run(hf.sample(prompt, 20, temperature=1.0, seed=3))
    logp, _ = policy.logprobs(
        [(prompt + at_one.tokens, [0] * len(prompt) + [1] * len(at_one.tokens))]
    )
    assert at_one.logprobs == pytest.approx(logp.tolist(), abs=1e-4)
    with pytest.raises(ValueError, match="context"):
        asyncio.run(hf.sample(prompt, 5000))
