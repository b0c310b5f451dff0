"""Shared parts of the tests: a random Qwen3 made on the spot, and one real engine for all tests of a session."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
sys.path.insert(0, str(Path(__file__).parents[1]))


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "attack(name, ...): what the test tries, for the table in tests/README.md"
    )
    config.addinivalue_line(
        "markers", "fault(number, name, ...): what the test lets break, for the same table"
    )


@pytest.fixture(autouse=True)
def no_checkouts(monkeypatch):
    """A test uses the checkouts that it names itself, not those of the person who runs it."""
    for name in ("MLGYM_ROOT", "MLEDOJO_ROOT", "MLEDOJO_REPO"):
        monkeypatch.delenv(name, raising=False)


def make_model(folder: Path, vocabulary=0, **sizes) -> str:
    """An untrained Qwen3 (0.8 M parameters, `sizes` change that) with a byte tokenizer and ChatML template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **{
                "vocab_size": vocabulary or len(tokenizer),
                "hidden_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 384,
                "tie_word_embeddings": True,
                "max_position_embeddings": 4096,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                **sizes,
            }
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="session")
def shared_policy(random_model):
    from policy import ModelPath, Policy

    return Policy(ModelPath(random_model, None, False), context=2048, lora_rank=8, lora_alpha=16)


@pytest.fixture
def policy(shared_policy):
    """The engine and trainer of the session, with the adapter at its initial state (B = 0)."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in shared_policy.model.named_parameters():
            if "lora_A" in name:
                torch.nn.init.kaiming_uniform_(p, a=5**0.5)
            elif "lora_B" in name:
                p.zero_()
    shared_policy.sync()
    return shared_policy


@pytest.fixture(scope="session")
def tiny_model():
    """Builds the stand-in on first use (minutes), else finds it."""
    from policy import resolve_model

    return resolve_model("tiny")
