"""The section `memory`: the MiB that a forward and backward pass adds to a process.

    python -m bench.peak MODEL TOKENS WAY     prints the MiB and the seconds of one pass

WAY: "chunked" (ours) or "whole" (all logits at once) on sequences of 1024 tokens; "packed",
"padded" or "recomputed" (packed, with gradient checkpointing) on four sequences of different
lengths that share a prompt.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import run_module, this_machine
from helpers import make_model


def peak(folder, tokens, vocabulary, way):
    """(MiB, seconds) of a forward and backward pass in a process of its own."""
    model = Path(folder) / str(vocabulary)
    if not model.exists():
        make_model(model, vocabulary)
    line, error = run_module("peak", model, tokens, way, timeout=600)
    if error:
        raise RuntimeError(error)
    mib, seconds = line.split()
    return float(mib), float(seconds)


def memory(args):
    """MiB that a forward and backward pass adds to the process, and its seconds."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary, tokens in itertools.product((2048, 32768), (2048, 4096, 8192)):
            mib, took = peak(folder, tokens, vocabulary, "chunked")
            try:
                whole_mib, whole_took = peak(folder, tokens, vocabulary, "whole")
                note = f"all logits at once: {whole_mib:.0f} MiB, {whole_took:.1f} s"
            except RuntimeError as error:
                note = f"all logits at once: fails, {error}"
            what = f"{tokens} tokens, vocabulary {vocabulary}"
            rows.append((what, f"{mib:.0f} MiB, {took:.1f} s", note))
        for way in ("packed", "padded", "recomputed"):
            mib, took = peak(folder, 8192, 2048, way)
            what = f"4 sequences of 512 to 2048 tokens, the first 256 in common, {way}"
            rows.append((what, f"{mib:.0f} MiB, {took:.1f} s", ""))
    return f"{this_machine()}; random Qwen3, hidden size 128, 4 layers, float32", rows


# ---- one pass


def main(model, tokens, way):
    import torch
    from transformers import AutoModelForCausalLM

    from flatlab.train.memory import peak_bytes
    from policy import Policy

    torch.manual_seed(0)
    policy = Policy.__new__(Policy)  # the trainer without an engine
    policy.device = "cpu"
    policy.dtype = torch.float32
    policy.temperature = 1.0
    policy.value_head = None
    policy._base_model = lambda *_: AutoModelForCausalLM.from_pretrained(model)
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    policy._build_trainer(lora, way == "recomputed", False, "cpu")
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
