"""flatlab/model/memory.py: a micro-batch that fits, before the first episode."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from flatlab.model import memory
from helpers import python, user_error

GIB = 2**30
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152
)


class Trainer:
    """As much of a Policy as the probe uses; passes over more than `most` tokens fail."""

    device = "cpu"
    dtype = torch.float32
    context = 2048

    def __init__(self, most=10**9, error="DefaultCPUAllocator: can't allocate memory"):
        self.model = SimpleNamespace(config=SMOLLM2)
        self.most = most
        self.error = error
        self.tried = []
        self.weight = torch.zeros(1, requires_grad=True)

    def parameters(self):
        return [self.weight]

    def logprobs(self, batch):
        tokens = sum(len(tokens) for tokens, _ in batch)
        self.tried.append(tokens)
        if tokens > self.most:
            raise RuntimeError(self.error)
        return self.weight * torch.ones(tokens), None


@pytest.fixture(autouse=True)
def sixteen_gib(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes: 16 * GIB // processes)


def test_the_estimate_agrees_with_what_was_measured():
    """135 M parameters in fp32: 2048 tokens trained in 8 GiB, engine included; 16384 took > 24."""
    assert 3 * GIB < memory.bytes_needed(2048, SMOLLM2, 4, False) < 8 * GIB
    assert memory.bytes_needed(16384, SMOLLM2, 4, False) > 24 * GIB
    assert memory.bytes_needed(2048, SMOLLM2, 4, True) < 2.5 * GIB


def test_the_size_is_derived_from_model_and_memory(capsys):
    trainer = Trainer()
    assert memory.fit_micro_tokens(trainer, None, False) == 2048
    assert trainer.weight.grad is None
    assert memory.fit_micro_tokens(trainer, None, True) == memory.MOST_TOKENS
    assert capsys.readouterr().err == ""
    assert memory.fit_micro_tokens(trainer, None, False, processes=4) == 512
    assert trainer.tried == [2048, memory.MOST_TOKENS, 512]
    assert "an episode of 2048 tokens needs about" in capsys.readouterr().err


def test_a_small_part_of_the_memory_is_not_tried(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes: 1024 * GIB)
    trainer = Trainer()
    assert memory.fit_micro_tokens(trainer, None, False) == memory.MOST_TOKENS
    assert trainer.tried == []


def test_a_size_that_cannot_fit_is_halved_with_a_sentence(capsys):
    assert memory.fit_micro_tokens(Trainer(), 16384, False) == 2048
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("micro_tokens: 16384 tokens need about 39.9 GiB")
    assert lines[0].endswith("of 16.0 free; trying half as many")


def test_the_probe_halves_until_it_fits(capsys):
    trainer = Trainer(most=600)
    assert memory.fit_micro_tokens(trainer, None, False) == 512
    assert trainer.tried == [2048, 1024, 512]
    assert capsys.readouterr().err.count("runs out of memory; trying half as many") == 2


def test_a_model_that_does_not_fit_is_one_sentence():
    with user_error("The model does not fit"):
        memory.fit_micro_tokens(Trainer(most=0), None, False)


@pytest.mark.parametrize(
    "error", ["shape mismatch", "CUDA error: an illegal memory access was encountered"]
)
def test_other_errors_are_not_taken_for_full_memory(error):
    with pytest.raises(RuntimeError, match=error):
        memory.fit_micro_tokens(Trainer(most=0, error=error), None, False)


def test_the_limits_of_control_groups_count(tmp_path):
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert memory.left_in_cgroup(tmp_path) == 5 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.left_in_cgroup(tmp_path) == sys.maxsize
    assert memory.left_in_cgroup(tmp_path / "elsewhere") == sys.maxsize


def test_the_kernel_says_how_much_is_free(monkeypatch):
    monkeypatch.undo()
    free = memory.free_bytes("cpu")
    assert 0 < memory.free_bytes("cpu", processes=4) < free < 2**50


def test_the_kv_cache_gets_what_the_weights_leave(random_model):
    """Two numbers (k, v) of 2 bytes for 4 layers of 2 heads of 32: 1 KiB a token."""
    total = 8 << 30
    left = memory.kv_cache_bytes(random_model, 0.5, total, 2048)
    weights = (4 << 30) - memory.ENGINE_OWN - memory.CUDA_GRAPHS - left
    assert 1_400_000 < weights < 2_000_000  # 0.8 M parameters in bf16
    with user_error("one context of 4000000 tokens needs 3.8"):
        memory.kv_cache_bytes(random_model, 0.5, total, 4_000_000)
    room = left // 1024  # tokens; one block of them is vLLM's own
    assert memory.kv_cache_bytes(random_model, 0.5, total, room - memory.GPU_BLOCK) == left
    with user_error("one context of"):
        memory.kv_cache_bytes(random_model, 0.5, total, room)


def test_the_kv_cache_on_a_cpu_holds_all_requests_if_they_fit(random_model, monkeypatch):
    """Four bytes a number: 2 KiB a token, so 2 MiB for a context of 1024, and vLLM's own block."""
    block = memory.CPU_BLOCK * 2048
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 * GIB)
    assert memory.cpu_kv_cache_bytes(random_model, 1024, 64, 4) == 128 * 2**20 + block
    assert memory.cpu_kv_cache_bytes(random_model, 1024, 10**6, 4) == 2 * GIB
    assert memory.cpu_kv_cache_bytes(random_model, 4 * 2**20, 64, 4) == 8 * GIB + block


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it():
    ballast = torch.ones(GIB // 16)  # 256 MiB
    code = "from flatlab.model.memory import peak_bytes; print(peak_bytes())"
    assert 2**20 < int(python("-c", code).stdout) < 4 * len(ballast) / 2
    assert memory.peak_bytes() > 4 * len(ballast)
