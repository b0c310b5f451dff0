"""Prints the MiB that a forward and backward pass adds to a process, and its seconds.

    python tests/bench_peak.py MODEL TOKENS WAY     bench.py runs this in a process of its own

WAY: "chunked" (ours) or "whole" (all logits at once) on sequences of 1024 tokens; "packed",
"padded" or "recomputed" (packed, with gradient checkpointing) on four sequences of different
lengths that share a prompt.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from flatlab.train.memory import peak_bytes
from policy import ModelPath, Policy


def main(model, tokens, way):
    torch.manual_seed(0)
    policy = Policy.__new__(Policy)  # the trainer without an engine
    policy.device = "cpu"
    policy.dtype = torch.float32
    policy.temperature = 1.0
    policy.value_head = None
    policy.path = ModelPath(model, None, False)
    policy._build_trainer(8, 16, way == "recomputed", False, "cpu")
    lengths = [1024] * (tokens // 1024)
    shared = 1
    if way not in ("chunked", "whole"):
        lengths = [tokens // 16 * k for k in (1, 2, 3, 4)]
        shared = tokens // 32
        policy.packs = way != "padded"
    prompt = torch.randint(0, 250, (shared,)).tolist()
    batch = []
    for length in lengths:
        mask = [0] * shared + [1] * (length - shared)
        batch.append((prompt + torch.randint(0, 250, (length - shared,)).tolist(), mask))
    policy.logprobs(batch[:1])[0].sum().backward()
    before = peak_bytes()
    begin = time.perf_counter()
    if way == "whole":
        ids = torch.tensor([tokens for tokens, _ in batch])
        logits = policy.model(ids).logits[:, :-1].float()
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    else:
        logp, _ = policy.logprobs(batch)
    logp.sum().backward()
    print((peak_bytes() - before) / 2**20, time.perf_counter() - begin)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
