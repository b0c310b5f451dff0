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

# Tokens of a training pass. On a CPU a larger one is hardly faster; on a GPU a group that is split
# computes its common prompt once more.
MOST_TOKENS = {"cpu": 8192, "cuda": 32768}
LEAST_TOKENS = 256
# Ratio of the sizes of a pass that are tried. On a CPU a run that is repeated with a little more or
# less free memory mostly has passes of the same size, so the same rounding.
NEXT_SMALLER = {"cpu": 1 / 2, "cuda": 7 / 8}
# Share of the free memory for a training pass. On a CPU the rest is for the optimizer, the episodes
# and other programs; on a GPU for what this module does not count.
SHARE_OF_FREE = {"cpu": 0.5, "cuda": 0.9}
PREFILL_TOKENS = 8192  # of an engine's step on a GPU; with vLLM's 2048 a prefill takes many steps
# Share of the context that a typical episode in flight holds in the KV cache: few episodes use the
# whole context, and most are in the middle. An assumption; with more, some requests wait.
TYPICAL_EPISODE = 1 / 4
# Bytes of a CUDA graph for each layer x hidden size: 0.13 GiB for about 11 graphs of Qwen3-0.6B, 28
# layers of size 1024
GRAPH = 0.13 * 2**30 / (28 * 1024 * 11)
PROMPT_GRAPHS = (128, 256, 512)  # tokens of steps that decode and read a prompt, too
CUDA_OWN = 3 << 29  # 1.5 GiB: CUDA's context, kernels, workspaces and fragmentation; an estimate
BLOCK = 64  # tokens of a block of the KV cache, at most
MOST_LOGITS = 2**26  # at a time, in Policy.logprobs: 256 MiB
LOGITS_BUFFERS = 5  # of the size of these
TILE = 128  # rows: a matrix product on a GPU computes multiples of it

# Activations that the backward pass of one decoder layer keeps, in numbers per token: inputs and
# outputs of the norms, q, k, v and the attention's output are of the hidden size, those of the MLP
# are of its intermediate size. Measured with LoRA on all linear layers, rounded up.
HIDDEN_BUFFERS = 18
MLP_BUFFERS = 7


def layer_numbers(config, is_lean: bool) -> int:
    """Numbers per token that a layer keeps for its backward pass.

    is_lean: with varlen_attn and fused norms, as on a GPU. These are the residual stream before and
    after each norm; q before its norm and turned, and the attention's output; k likewise, and v;
    gate, up, its activation and their product.
    """
    hidden, inner = config.hidden_size, inner_size(config)
    if not is_lean:
        return HIDDEN_BUFFERS * hidden + MLP_BUFFERS * inner
    heads, kv_heads, head_dim = head_sizes(config)
    return 4 * hidden + 3 * head_dim * (heads + kv_heads) + 4 * inner


def bytes_needed(tokens: int, config, element_size: int, is_lean: bool, recomputed: int) -> int:
    """Estimated peak memory of one forward and backward pass over `tokens` tokens.

    is_lean: see layer_numbers. recomputed: number of layers of which only the input is kept
    (gradient checkpointing). They are the first ones: when one of them has its activations, those
    of the others are free again. LoRA's own activations are small.
    """
    layer = layer_numbers(config, is_lean)
    whole = max(config.num_hidden_layers - recomputed, min(recomputed, 1))
    kept = whole * layer + recomputed * config.hidden_size
    if is_lean:
        kept += 3 * inner_size(config)  # gradients of an MLP
    logits = min(tokens * config.vocab_size, MOST_LOGITS)
    return tokens * kept * element_size + LOGITS_BUFFERS * logits * 4


def copy_weight(config) -> float:
    """Share of a token's memory that a copied key takes, in a pass that recomputes all layers. The
    copy is of key and value; the backward pass of the attention makes one gradient of both for
    each head, and their sums.
    """
    heads, kv_heads, head_dim = head_sizes(config)
    layers = config.num_hidden_layers
    token = layers * config.hidden_size + layer_numbers(config, True) + 3 * inner_size(config)
    return head_dim * (2 * heads + 4 * kv_heads) / token


def head_sizes(config) -> tuple[int, int, int]:
    """Number of heads of the queries, and of the keys; numbers of a head."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def inner_size(config) -> int:
    """Intermediate size of a layer's MLP."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def prefill_bytes(config, element_size: int) -> int:
    """Estimated peak of an engine's step over PREFILL_TOKENS tokens: 12 buffers of the hidden size,
    5 of the intermediate size, and the logits of its requests.
    """
    token = 12 * config.hidden_size + 5 * inner_size(config)
    return PREFILL_TOKENS * token * element_size + 4 * MOST_LOGITS


def graph_sizes(max_batch: int) -> list[int]:
    """Tokens of the steps that have a CUDA graph: 1, 2, 4, multiples of 8, max_batch (vLLM would
    go on to twice as many) and PROMPT_GRAPHS.
    """
    return sorted({1, 2, 4, *range(8, max_batch, 8), max_batch, *PROMPT_GRAPHS})


def gpu_needs(
    config, element_size: int, weights: int, rank: int, tokens: int, requests: int
) -> dict[str, int]:
    """Estimated bytes that a run takes on a GPU beside the KV cache.

    weights: number of parameters; trainer and engine share them. rank: of the adapter that is
    trained; 0: none. tokens: of a training pass that recomputes all layers. requests: in a step
    of the engine.
    LoRA on all linear layers of a model has rank x (11 hidden + 3 intermediate) numbers a layer
    (4 hidden for the outputs of q and o and of k and v), of 16 bytes: weight, gradient and the two
    moments of AdamW in fp32.
    """
    layers, hidden = config.num_hidden_layers, config.hidden_size
    needs = {
        "base weights": element_size * weights,
        "CUDA graphs": int(GRAPH * len(graph_sizes(requests)) * layers * hidden),
        "prefill": prefill_bytes(config, element_size),
        "CUDA's own": CUDA_OWN,
    }
    if rank:
        needs["LoRA with AdamW"] = 16 * rank * layers * (11 * hidden + 3 * inner_size(config))
        needs["training pass"] = bytes_needed(tokens, config, element_size, True, layers)
    return needs


def cache_bytes(config, element_size: int, tokens: int, requests: int = 1) -> int:
    """Bytes of a KV cache for `requests` sequences of so many tokens: 2 x KV heads x head size
    numbers for each token and layer. vLLM keeps one block for itself.
    """
    numbers = 0
    for layer in config.per_layer_config:  # they differ in Gemma 4
        _, kv_heads, head_dim = head_sizes(layer)
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
    path = Path("/proc/self/cgroup").read_text(encoding="utf-8").partition("0::/")[2].strip()
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


def fit_micro_tokens(free: int, most: int, device: str, sizes: tuple, recomputed: int) -> int:
    """The number of tokens of a training pass, at most `most`, that fits into the device's share of
    the free memory. sizes: the arguments of bytes_needed() between tokens and recomputed.

    Raises UserError if not even LEAST_TOKENS fit.
    """

    def needed(tokens):
        return bytes_needed(tokens, *sizes, recomputed)

    tokens = most
    while tokens > LEAST_TOKENS and needed(tokens) > SHARE_OF_FREE[device] * free:
        tokens = max(LEAST_TOKENS, int(tokens * NEXT_SMALLER[device]))
    if needed(tokens) > free:
        raise UserError(
            f"The model does not fit: a training pass over {tokens} tokens needs about "
            f"{needed(tokens) / 2**30:.1f} GiB, and {free / 2**30:.1f} are free; try a smaller "
            "model."
        )
    return tokens


def layers_to_recompute(tokens: int, sizes: tuple, free: float) -> int:
    """The fewest layers whose recomputation makes a pass over `tokens` tokens fit; all if none
    does.
    """
    layers = sizes[0].num_hidden_layers
    for count in range(layers):
        if bytes_needed(tokens, *sizes, count) <= free:
            return count
    return layers
