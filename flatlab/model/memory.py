"""Estimates of memory, made before the first episode: of the engine's KV cache, and of a training
pass.

On a CPU nothing reports that the memory is used up: the kernel kills the process without a word. So
the sizes are estimated from the model's dimensions and the memory that is free.
"""

import math
import re
import sys
from pathlib import Path

import psutil

from flatlab.errors import UserError

MOST_TOKENS = 8192  # of a training pass; a larger one is hardly faster
LEAST_TOKENS = 256
SHARE_OF_FREE = 0.5  # the rest is for the optimizer, the episodes and other programs
ENGINE_OWN = 5 << 29  # 2.5 GiB: activations of a prefill of 8192 tokens
# vLLM takes the graphs' memory from no budget if the size of the KV cache is given. An estimate.
CUDA_GRAPHS = 1 << 30
BLOCK = 64  # tokens of a block of the KV cache, at most
MOST_LOGITS = 2**26  # at a time, in Policy.logprobs: 256 MiB
LOGITS_BUFFERS = 5  # of the size of these

# Activations that the backward pass of one decoder layer keeps, in numbers per token: inputs and
# outputs of the norms, q, k, v and the attention's output are of the hidden size, those of the MLP
# are of its intermediate size. Measured with LoRA on all linear layers, rounded up.
HIDDEN_BUFFERS = 18
MLP_BUFFERS = 7


def bytes_needed(tokens: int, model_config, element_size: int, recompute_layers: bool) -> int:
    """Estimated peak memory of one forward and backward pass over `tokens` tokens.

    recompute_layers: gradient checkpointing, which keeps the input of each layer and one layer's
    activations. LoRA's own activations are in fp32 and small.
    """
    model_config = model_config.get_text_config()
    hidden = model_config.hidden_size
    layers = model_config.num_hidden_layers
    inner = getattr(model_config, "intermediate_size", None) or 4 * hidden
    layer = HIDDEN_BUFFERS * hidden + MLP_BUFFERS * inner
    kept = layers * hidden + layer if recompute_layers else layers * layer
    logits = min(tokens * model_config.vocab_size, MOST_LOGITS)
    return tokens * kept * element_size + LOGITS_BUFFERS * logits * 4


def engine_budget(device: str, weights: int, share: float) -> int:
    """Bytes of the KV cache, at most: what a model of so many weights, in bf16, leaves in the
    engine's share of a GPU; on a CPU a quarter of the free memory. vLLM would measure instead,
    which fails if anything else frees memory.
    """
    if device == "cpu":
        return free_bytes(device) // 4
    import torch

    total = torch.cuda.mem_get_info()[1]
    return int(share * total) - 2 * weights - ENGINE_OWN - CUDA_GRAPHS


def kv_cache_bytes(config, element_size: int, context: int, requests: int, budget: int) -> int:
    """Bytes of the engine's KV cache: `requests` whole contexts, or as many as fit into the budget.
    vLLM keeps one block for itself.

    Raises UserError if not even one context fits.
    """
    numbers = 0  # of a token's keys and values
    for layer in config.get_text_config().per_layer_config:  # they differ in Gemma 4
        heads = layer.num_attention_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        numbers += 2 * kv_heads * head_dim
    blocks = math.ceil(context / BLOCK)
    one, wanted = [(n * blocks + 1) * BLOCK * numbers * element_size for n in (1, requests)]
    if one > budget:
        raise UserError(
            f"One context of {context} tokens needs {one / 2**30:.1f} GiB of KV cache, and "
            f"{budget / 2**30:.1f} are left for it: lower --context, or raise --gpu-memory."
        )
    return min(wanted, budget)


def free_bytes(device: str, processes: int = 1) -> int:
    """Memory that one of `processes` processes on this machine may still take.

    On a CPU this is the memory of the machine or of the control group. Limits of control groups
    version 1 are not read.
    """
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info()[0]
    path = Path("/proc/self/cgroup").read_text().partition("0::/")[2].strip()
    group = Path("/sys/fs/cgroup", path)
    left = [left_in_cgroup(folder) for folder in (group, *group.parents)]
    return min(psutil.virtual_memory().available, *left) // processes


def left_in_cgroup(group: Path) -> int:
    """Limit minus usage, in bytes; the page cache that can be dropped is not counted as usage."""
    try:
        limit = int((group / "memory.max").read_text())
    except (FileNotFoundError, ValueError):  # no such group, or its limit is "max"
        return sys.maxsize
    used = int((group / "memory.current").read_text())
    cache = re.search(r"inactive_file (\d+)", (group / "memory.stat").read_text())
    return limit - used + int(cache[1])


def free_for_training(device: str, processes: int, beside_engine: bool) -> int:
    """Memory that training passes may take. beside_engine: on a GPU the engine needs ENGINE_OWN at
    the same time.
    """
    free = free_bytes(device, processes)
    return free - ENGINE_OWN if beside_engine and device != "cpu" else free


def fit_micro_tokens(free: int, model_config, element_size: int, recompute_layers: bool) -> int:
    """The number of tokens of a training pass that fits into the free memory, MOST_TOKENS at most.

    Raises UserError if not even LEAST_TOKENS fit.
    """

    def needed(tokens):
        return bytes_needed(tokens, model_config, element_size, recompute_layers)

    tokens = MOST_TOKENS
    while tokens > LEAST_TOKENS and needed(tokens) > SHARE_OF_FREE * free:
        tokens //= 2
    if needed(tokens) > free:
        raise UserError(
            f"The model does not fit: a training pass over {tokens} tokens needs about "
            f"{needed(tokens) / 2**30:.1f} GiB, and {free / 2**30:.1f} are free; try a smaller "
            "model."
        )
    return tokens
