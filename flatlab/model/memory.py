"""How many tokens one forward and backward pass of the trainer can hold, found before the first
episode.

On a CPU nothing reports that the memory is used up: the kernel kills the process without a word. So
the size is estimated first, from the model's dimensions and the memory that is free, and then tried
once.
"""

import math
import re
import sys
from pathlib import Path

import psutil

from flatlab.errors import UserError

MOST_TOKENS = 8192  # a larger micro-batch is hardly faster
LEAST_TOKENS = 256
SHARE_OF_FREE = 0.5  # the rest is for the optimizer, the episodes and other programs
SURE_OF_FREE = 0.1  # a pass that needs less is not tried
ENGINE_OWN = 5 << 29  # 2.5 GiB: activations of a prefill of 8192 tokens
# vLLM takes the graphs' memory from no budget if the size of the KV cache is given. An estimate.
CUDA_GRAPHS = 1 << 30
CPU_BLOCK = 32  # tokens of a block of the KV cache
GPU_BLOCK = 64  # the same on a GPU, at most: vLLM chooses it
CPU_KV_CACHE = 4 << 30  # 4 GiB: requests that do not fit wait, or are computed again
# What torch says when memory ran out: on a GPU, in cuBLAS, on a CPU, in oneDNN.
OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "could not create a memory",
)
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


def kv_cache_bytes(base: str, share: float, total: int, context: int) -> int:
    """Bytes of the engine's KV cache: its share of a GPU of `total` bytes, without the weights in
    bf16, ENGINE_OWN and CUDA_GRAPHS. vLLM would measure instead, which fails if anything else frees
    memory.

    Raises UserError if not even one whole context fits.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = 2 * sum(p.numel() for p in model.parameters())
    left = int(share * total) - weights - ENGINE_OWN - CUDA_GRAPHS
    per_token = kv_bytes_per_token(config, element_size=2)
    needed = (context + GPU_BLOCK) * per_token  # vLLM keeps one block for itself
    if left < needed:
        raise UserError(
            f"--gpu-memory {share:g} of {total / 2**30:.1f} GiB leaves {left / 2**30:.1f} GiB for "
            f"the KV cache, and one context of {context} tokens needs "
            f"{needed / 2**30:.1f}: raise it, or lower --context."
        )
    return left


def kv_bytes_per_token(config, element_size: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    numbers = 0
    for layer in config.get_text_config().per_layer_config:  # they differ in Gemma 4
        heads = layer.num_attention_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        numbers += 2 * kv_heads * head_dim
    return numbers * element_size


def cpu_kv_cache_bytes(base: str, context: int, requests: int, element_size: int) -> int:
    """Bytes of the engine's KV cache on a CPU: `requests` whole contexts, or as many as fit
    into CPU_KV_CACHE and a quarter of the free memory, but at least one. vLLM keeps one block for
    itself.
    """
    from transformers import AutoConfig

    per_token = kv_bytes_per_token(AutoConfig.from_pretrained(base), element_size)
    blocks = math.ceil(context / CPU_BLOCK)
    one, all_of_them = [(n * blocks + 1) * CPU_BLOCK * per_token for n in (1, requests)]
    room = min(CPU_KV_CACHE, free_bytes("cpu") // 4)
    return max(one, min(all_of_them, room))


def peak_bytes() -> int:
    """Peak memory of this process, from /proc: getrusage() would report the parent's peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


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
    limit = group / "memory.max"
    if not limit.is_file() or limit.read_text().strip() == "max":
        return sys.maxsize
    lines = (group / "memory.stat").read_text().splitlines()
    stat = dict(line.split() for line in lines)
    used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
    return int(limit.read_text()) - used


def fit_micro_tokens(
    policy,
    wanted: int | None,
    recompute_layers: bool,
    processes: int = 1,
    beside_engine: bool = False,
) -> int:
    """The number of tokens of a micro-batch that fits into memory, at most `wanted`.

    wanted: None for the largest size that is useful. beside_engine: on a GPU the engine needs
    ENGINE_OWN at the same time. Prints a sentence when `wanted` is reduced and when a pass that is
    tried runs out of memory. Raises UserError if not even LEAST_TOKENS fit.
    """
    tokens = wanted or MOST_TOKENS
    free = free_bytes(policy.device, processes)
    if beside_engine and policy.device != "cpu":
        free -= ENGINE_OWN

    def needed(count):
        return bytes_needed(count, policy.model.config, policy.dtype.itemsize, recompute_layers)

    while tokens > LEAST_TOKENS and needed(tokens) > SHARE_OF_FREE * free:
        if wanted:
            need = f"{tokens} tokens need about {needed(tokens) / 2**30:.1f} GiB"
            say(f"{need} of {free / 2**30:.1f} free")
        tokens //= 2
    if needed(tokens) < SURE_OF_FREE * free:  # no need to try
        return tokens
    while not can_train(policy, tokens):
        if tokens <= LEAST_TOKENS:
            raise UserError(
                f"The model does not fit: a training pass over {tokens} tokens runs out of memory "
                f"({free / 2**30:.1f} GiB were free); try --gradient-checkpointing, a smaller "
                "--context or a smaller model."
            )
        say(f"a training pass over {tokens} tokens runs out of memory")
        tokens //= 2
    longest = needed(policy.context)
    if longest > SHARE_OF_FREE * free:
        print(
            f"memory: an episode of {policy.context} tokens needs about {longest / 2**30:.1f} GiB "
            f"of {free / 2**30:.1f} free, in a pass of its own: --gradient-checkpointing or a "
            "smaller --context avoids that the run ends there.",
            file=sys.stderr,
        )
    return tokens


def say(reason: str) -> None:
    print(f"micro_tokens: {reason}; trying half as many", file=sys.stderr, flush=True)


def can_train(policy, tokens: int) -> bool:
    """Tries one forward and backward pass; False if the memory does not suffice."""
    import torch

    length = min(tokens, policy.context)
    sequence = ([0] * length, [0] + [1] * (length - 1))
    try:
        logprobs = policy.logprobs([sequence] * math.ceil(tokens / length))[0]
        logprobs.mean().backward()
        return True
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not any(word in text for word in OUT_OF_MEMORY):
            raise
        return False
    finally:
        for parameter in policy.parameters():
            parameter.grad = None
        if policy.device != "cpu":
            torch.cuda.empty_cache()
