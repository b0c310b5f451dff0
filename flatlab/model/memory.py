"""Estimates of memory, made before the first episode: of the engine's KV cache, and of a training
pass.

On a CPU nothing reports that the memory is used up: the kernel kills the process without a word. So
the sizes are estimated from the model's dimensions and the memory that is free. A `config` is that
of a model's text part, see get_text_config() of transformers.
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
PREFILL_TOKENS = 8192  # of an engine's step on a GPU; with vLLM's 2048 a prefill takes many steps
# Share of the context that a typical episode in flight holds in the KV cache: few episodes use the
# whole context, and most are in the middle. An assumption; with more, some requests wait.
TYPICAL_EPISODE = 1 / 4
# CUDA graphs, bytes for each layer x hidden size: 0.13 GiB with Qwen3-0.6B, 28 layers of size 1024
GRAPHS = 0.13 * 2**30 / (28 * 1024)
CUDA_OWN = 3 << 29  # 1.5 GiB: CUDA's context, kernels, workspaces and fragmentation; an estimate
BLOCK = 64  # tokens of a block of the KV cache, at most
MOST_LOGITS = 2**26  # at a time, in Policy.logprobs: 256 MiB
LOGITS_BUFFERS = 5  # of the size of these

# Activations that the backward pass of one decoder layer keeps, in numbers per token: inputs and
# outputs of the norms, q, k, v and the attention's output are of the hidden size, those of the MLP
# are of its intermediate size. Measured with LoRA on all linear layers, rounded up.
HIDDEN_BUFFERS = 18
MLP_BUFFERS = 7


def bytes_needed(tokens: int, config, element_size: int, recomputed: int) -> int:
    """Estimated peak memory of one forward and backward pass over `tokens` tokens.

    recomputed: number of layers of which only the input is kept (gradient checkpointing); one of
    them has its activations at a time. LoRA's own activations are in fp32 and small.
    """
    hidden = config.hidden_size
    layer = HIDDEN_BUFFERS * hidden + MLP_BUFFERS * inner_size(config)
    whole = config.num_hidden_layers - recomputed + min(recomputed, 1)
    kept = whole * layer + recomputed * hidden
    logits = min(tokens * config.vocab_size, MOST_LOGITS)
    return tokens * kept * element_size + LOGITS_BUFFERS * logits * 4


def inner_size(config) -> int:
    """Intermediate size of a layer's MLP."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def prefill_bytes(config, element_size: int) -> int:
    """Estimated peak of an engine's step over PREFILL_TOKENS tokens: 12 buffers of the hidden size,
    5 of the intermediate size, and the logits of its requests.
    """
    token = 12 * config.hidden_size + 5 * inner_size(config)
    return PREFILL_TOKENS * token * element_size + 4 * MOST_LOGITS


def gpu_needs(config, element_size: int, weights: int, rank: int, tokens: int) -> dict[str, int]:
    """Estimated bytes that a run takes on a GPU beside the KV cache.

    weights: number of parameters; trainer and engine share them. rank: of the adapter that is
    trained; 0: none. tokens: of a training pass that recomputes all layers.
    LoRA on all linear layers of a model has rank x (11 hidden + 3 intermediate) numbers a layer
    (4 hidden for the outputs of q and o and of k and v), of 16 bytes: weight, gradient and the two
    moments of AdamW in fp32.
    """
    layers, hidden = config.num_hidden_layers, config.hidden_size
    needs = {
        "base weights": element_size * weights,
        "CUDA graphs": int(GRAPHS * layers * hidden),
        "prefill": prefill_bytes(config, element_size),
        "CUDA's own": CUDA_OWN,
    }
    if rank:
        needs["LoRA with AdamW"] = 16 * rank * layers * (11 * hidden + 3 * inner_size(config))
        needs["training pass"] = bytes_needed(tokens, config, element_size, layers)
    return needs


def cache_bytes(config, element_size: int, tokens: int, requests: int = 1) -> int:
    """Bytes of a KV cache for `requests` sequences of so many tokens: 2 x KV heads x head size
    numbers for each token and layer. vLLM keeps one block for itself.
    """
    numbers = 0
    for layer in config.per_layer_config:  # they differ in Gemma 4
        heads = layer.num_attention_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        numbers += 2 * kv_heads * head_dim
    blocks = requests * math.ceil(tokens / BLOCK) + 1
    return blocks * BLOCK * numbers * element_size


def fit_cache(least: int, wanted: int, needs: dict[str, int], room: int) -> int:
    """Bytes of the KV cache: as wanted, or what `needs` leave of the room.

    Raises UserError if that is less than `least`, the cache of one context.
    """
    hint = ", or set --gpu-memory" if needs else ""
    needs = needs | {"KV cache of one context": least}
    total = sum(needs.values())
    if total > room:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needs.items())
        raise UserError(
            f"The model does not fit: it needs {total / 2**30:.1f} GiB ({parts}), and there are "
            f"{room / 2**30:.1f}: lower --context, choose a smaller model{hint}."
        )
    return min(max(least, wanted), room - total + least)


def free_bytes(device: str, processes: int = 1) -> int:
    """Memory that one of `processes` processes on this machine may still take.

    On a CPU this is the memory of the machine or of the control group. Limits of control groups
    version 1 are not read.
    """
    if device != "cpu":
        import torch

        torch.cuda.empty_cache()  # what earlier passes have left is free, too
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


def fit_micro_tokens(free: int, config, element_size: int, recomputed: int) -> int:
    """The number of tokens of a training pass that fits into the free memory, MOST_TOKENS at most.

    Raises UserError if not even LEAST_TOKENS fit.
    """

    def needed(tokens):
        return bytes_needed(tokens, config, element_size, recomputed)

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


def fit_pass(largest: int, wanted: int | None, sizes: tuple, free: int) -> tuple[int, int]:
    """Number of layers to recompute, and tokens of a training pass: as wanted, or what fits.

    A pass over `largest` tokens has to fit, too. sizes: config of the model and bytes of a number.
    """
    count = layers_to_recompute(largest, *sizes, free)
    if wanted:
        return count, wanted
    layers = sizes[0].num_hidden_layers
    tokens = fit_micro_tokens(free, *sizes, layers if count else 0)
    if count:
        count = max(count, layers_to_recompute(tokens, *sizes, SHARE_OF_FREE * free))
    return count, tokens


def layers_to_recompute(tokens: int, config, element_size: int, free: float) -> int:
    """The fewest layers whose recomputation makes a pass over `tokens` tokens fit; all if none
    does.
    """
    layers = config.num_hidden_layers
    for count in range(layers):
        if bytes_needed(tokens, config, element_size, count) <= free:
            return count
    return layers
