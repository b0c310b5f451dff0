"""Tests of flatlab/model/memory.py: estimates that are made before the first episode."""

import sys
from types import SimpleNamespace

import torch
from transformers import AutoConfig, LlamaConfig

from flatlab.model import memory
from helpers import python, user_error

GIB = 2**30
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152
)


def test_the_estimate_agrees_with_what_was_measured():
    """135 M parameters in fp32: 2048 tokens trained in 8 GiB, engine included; 16384 took > 24."""
    assert 3 * GIB < memory.bytes_needed(2048, SMOLLM2, 4, False) < 8 * GIB
    assert memory.bytes_needed(16384, SMOLLM2, 4, False) > 24 * GIB
    assert memory.bytes_needed(2048, SMOLLM2, 4, True) < 2.5 * GIB


def test_the_tokens_of_a_training_pass_follow_from_model_and_memory(monkeypatch):
    policy = SimpleNamespace(
        device="cpu", dtype=torch.float32, model=SimpleNamespace(config=SMOLLM2)
    )
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes: 16 * GIB // processes)
    assert memory.fit_micro_tokens(policy, False) == 2048
    assert memory.fit_micro_tokens(policy, True) == memory.MOST_TOKENS
    assert memory.fit_micro_tokens(policy, False, processes=4) == 512
    with user_error("The model does not fit: a training pass over 256 tokens needs about 0.8 GiB"):
        memory.fit_micro_tokens(policy, False, processes=64)


def test_the_limits_of_control_groups_count(tmp_path):
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert memory.left_in_cgroup(tmp_path) == 5 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.left_in_cgroup(tmp_path) == sys.maxsize
    assert memory.left_in_cgroup(tmp_path / "elsewhere") == sys.maxsize
    assert 0 < memory.free_bytes("cpu", processes=4) < memory.free_bytes("cpu") < 2**50


def test_the_kv_cache_holds_all_requests_if_they_fit(random_model):
    """Two numbers (k, v) of 2 bytes for 4 layers of 2 heads of 32: 1 KiB a token."""
    config = AutoConfig.from_pretrained(random_model)
    block = memory.BLOCK * 1024  # vLLM's own
    assert memory.kv_cache_bytes(config, 2, 1024, 64, GIB) == 64 * 2**20 + block
    assert memory.kv_cache_bytes(config, 2, 1024, 10**6, GIB) == GIB
    assert memory.kv_cache_bytes(config, 2, 1024, 64, 2**20 + block) == 2**20 + block
    with user_error("One context of 1048576 tokens needs 1.0 GiB of KV cache, and 1.0 are left"):
        memory.kv_cache_bytes(config, 2, 2**20, 64, GIB)


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it():
    ballast = torch.ones(GIB // 16)  # 256 MiB
    code = "from flatlab.model.memory import peak_bytes; print(peak_bytes())"
    assert 2**20 < int(python("-c", code).stdout) < 4 * len(ballast) / 2
    assert memory.peak_bytes() > 4 * len(ballast)
