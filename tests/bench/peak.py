"""The MiB that a forward and backward pass adds to a process, for two tests.

    python -m bench.peak MODEL TOKENS WAY     prints the MiB of one pass

WAY: "chunked" on sequences of 1024 tokens; "packed" or "padded" on four sequences of different
lengths that share a prompt.
"""

import sys
from pathlib import Path

from bench.measure import run_module
from helpers import make_model


def peak(folder, tokens, vocabulary, way):
    """The MiB of a forward and backward pass in a process of its own."""
    model = Path(folder) / str(vocabulary)
    if not model.exists():
        make_model(model, vocabulary)
    line, error = run_module("peak", model, tokens, way, timeout=600)
    if error:
        raise RuntimeError(error)
    return float(line)


# ---- one pass


def main(model, tokens, way):
    import torch
    from transformers import AutoModelForCausalLM

    from flatlab.train.metrics import peak_bytes
    from policy import Trainer

    torch.manual_seed(0)
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    policy = Trainer(AutoModelForCausalLM.from_pretrained(model), lora, temperature=1.0)
    lengths = [1024] * (tokens // 1024)
    shared = 1
    if way != "chunked":
        lengths = [tokens // 16 * k for k in (1, 2, 3, 4)]
        shared = tokens // 32
        policy.packs = way != "padded"
    prompt = torch.randint(0, 250, (shared,)).tolist()
    batch = []
    for length in lengths:
        reply = torch.randint(0, 250, (length - shared,)).tolist()
        batch.append((prompt + reply, [0] * shared + [1] * len(reply)))
    policy.logprobs(batch[:1])[0].sum().backward()
    before = peak_bytes()
    policy.logprobs(batch)[0].sum().backward()
    print((peak_bytes() - before) / 2**20)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
