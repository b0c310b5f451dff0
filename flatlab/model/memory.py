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
PREFILL_TOKENS = 8192  # of an engine's step on a GPU; with vLLM's 2048 a prefill takes many steps
# Share of the context that a typical episode in flight holds in the KV cache: few episodes use the
# whole context, and most are in the middle. An assumption; with more, some requests wait.
TYPICAL_EPISODE = 1 / 4
CUDA_OWN = 3 << 29  # 1.5 GiB: CUDA's context, kernels, workspaces and fragmentation; an estimate
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
    inner = inner_size(model_config)
    layer = HIDDEN_BUFFERS * hidden + MLP_BUFFERS * inner
    kept = layers * hidden + layer if recompute_layers else layers * layer
    logits = min(tokens * model_config.vocab_size, MOST_LOGITS)
    return tokens * kept * element_size + LOGITS_BUFFERS * logits * 4


def inner_size(layer) -> int:
    """Intermediate size of a layer's MLP."""
    return getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size


def attention_sizes(layer) -> tuple[int, int]:
    """Numbers of a token's queries and of its keys in one layer."""
    heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    return heads * head_dim, kv_heads * head_dim


def layers_of(model_config) -> list:
    """The config of each layer; they differ in Gemma 4."""
    return model_config.get_text_config().per_layer_config


def graph_bytes(model_config) -> int:
    """CUDA graphs of the engine: 0.13 GiB were measured with Qwen3-0.6B, which has 28 layers of
    size 1024. Scaled by layers x hidden size, as the buffers of a graph are.
    """
    model_config = model_config.get_text_config()
    size = model_config.num_hidden_layers * model_config.hidden_size
    return int(0.13 * 2**30 * size / (28 * 1024))


def prefill_bytes(model_config, element_size: int) -> int:
    """Peak of an engine's step over PREFILL_TOKENS tokens: 12 buffers of the hidden size, 5 of the
    intermediate size, and the logits of its requests. An estimate.
    """
    model_config = model_config.get_text_config()
    token = 12 * model_config.hidden_size + 5 * inner_size(model_config)
    return PREFILL_TOKENS * token * element_size + 4 * MOST_LOGITS


def adapter_bytes(model_config, rank: int) -> int:
    """LoRA on all linear layers: rank x (inputs + outputs) numbers each, of 16 bytes: weight,
    gradient and the two moments of AdamW in fp32.
    """
    numbers = 0
    for layer in layers_of(model_config):
        queries, keys = attention_sizes(layer)
        hidden = layer.hidden_size
        attention = 2 * (hidden + queries) + 2 * (hidden + keys)
        numbers += attention + 3 * (hidden + inner_size(layer))
    return 16 * rank * numbers


def engine_needs(model_config, element_size: int, weights: int) -> dict[str, int]:
    """Bytes that the engine takes on a GPU beside its KV cache. weights: number of parameters."""
    return {
        "base weights": element_size * weights,
        "CUDA graphs": graph_bytes(model_config),
        "prefill": prefill_bytes(model_config, element_size),
        "CUDA's own": CUDA_OWN,
    }


def training_needs(model_config, element_size: int, rank: int, tokens: int) -> dict[str, int]:
    """Bytes that the trainer takes beside a shared base. tokens: of a pass that recomputes."""
    return {
        "LoRA with AdamW": adapter_bytes(model_config, rank),
        "training pass": bytes_needed(tokens, model_config, element_size, True),
    }


def cache_bytes(model_config, element_size: int, tokens: int, requests: int = 1) -> int:
    """Bytes of a KV cache for `requests` sequences of so many tokens: 2 x KV heads x head size
    numbers for each token and layer. vLLM keeps one block for itself.
    """
    numbers = sum(2 * attention_sizes(layer)[1] for layer in layers_of(model_config))
    blocks = requests * math.ceil(tokens / BLOCK) + 1
    return blocks * BLOCK * numbers * element_size


def fit_cache(least: int, wanted: int, needs: dict[str, int], room: int) -> int:
    """Bytes of the KV cache: as wanted, or what `needs` leave of the room.

    Raises UserError if that is less than `least`, the cache of one context.
    """
    needs = needs | {"KV cache of one context": least}
    if sum(needs.values()) > room:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needs.items())
        raise UserError(
            f"The model does not fit: it needs {sum(needs.values()) / 2**30:.1f} GiB ({parts}), "
            f"and there are {room / 2**30:.1f}: lower --context, choose a smaller model, or set "
            "--gpu-memory."
        )
    return min(max(least, wanted), room - sum(needs.values()) + least)


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
