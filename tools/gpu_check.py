"""The first hour on a GPU: checks and measures what a machine without one cannot.

    python tools/gpu_check.py                        all parts, one after the other
    python tools/gpu_check.py --parts parity sync    some of them
    python tools/gpu_check.py --dtype bfloat16       on a CPU: with the precision of a GPU
    python tools/gpu_check.py --parts budget --total 24    the sums for a card of 24 GB

Each part runs in a process of its own, so that it survives the crash of another. The table is
printed and written to logs/gpu-check/table.md after every part; paste it into tests/BENCHMARKS.md.
Without a GPU the same code runs with the small stand-in model, as a test of itself. Parts that need
what is not there (vLLM, a GPU) say so.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatlab import threads
from flatlab.errors import UserError
from flatlab.files import read_mapping, write_whole
from flatlab.runs.cli import one_sentence, parse_config

ROOT = Path(__file__).resolve().parents[1]
DTYPE = None  # that of --dtype
MINUTES = 15  # time limit of a part
REQUESTS = 64  # without a GPU 8 of 32 tokens
TOKENS = 128  # of a request
PROMPT = 256  # tokens
EPISODES = 8
FOLDER = Path("logs/gpu-check")
# hidden size, layers, heads, intermediate size, one matrix for both embeddings
SHAPES = {
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 12288, False),
}
GIB_PER_GB = 22.2 / 24  # what an A10G shows
LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
LORA = {"r": 32, "lora_alpha": 64, "target_modules": LAYERS}
# vLLM in the process of a part, where the profiler sees it
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "CRITICAL"}


@dataclass
class Config:
    parts: tuple[str, ...] = ()  # names of parts; default: all
    model: str | None = None  # default: a random model with the shape of Qwen3-0.6B; CPU: tiny
    # of model and engine; default: bfloat16 on a GPU, float32 on a CPU
    dtype: Literal["bfloat16", "float32"] | None = None
    total: float | None = None  # GB of a card, for which budget prints the sums
    part: str = ""  # runs one part in this process and prints its rows as JSON


# ------------------------------------------------------------------------------ models


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def config_of(name: str, **options):
    """The config of one of SHAPES."""
    from transformers import Qwen3Config

    hidden, layers, heads, inner, tied = SHAPES[name]
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        **options,
    )


def random_model(folder: Path) -> str:
    """A random model with the shape of Qwen3-0.6B and the tokenizer of the stand-in. It stays: the
    path of a model is a part of the key of vLLM's compile cache.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    if folder.is_dir():
        return str(folder)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "tiny")
    config = config_of(
        "Qwen/Qwen3-0.6B",
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_policy(model: str, kind=None, **options):
    from flatlab.model.path import resolve_model
    from flatlab.options import ModelOptions
    from policy import Policy

    Policy.dtype = DTYPE
    path = resolve_model(model)
    return (kind or Policy)(path, ModelOptions(context=2048), max_batch=REQUESTS, **options)


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def allocated() -> int:
    """Bytes of GPU memory in use; 0 without a GPU."""
    import torch

    return torch.cuda.memory_allocated() if has_gpu() else 0


def move_adapter(policy, size: float) -> None:
    """Adds normal noise of this standard deviation to the trained weights."""
    import torch

    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn_like(p) * size)


def prompt_of(policy, number: int) -> list[int]:
    """Different prompts of about PROMPT tokens."""
    text = f"{number} " + "x" * 20 * PROMPT
    return policy.render([{"role": "user", "content": text}])[:PROMPT]


def prompts_of(policy) -> list:
    return [prompt_of(policy, i) for i in range(REQUESTS)]


def difference_text(found) -> str:
    return f"mean {found.mean:.2g}, largest {found.largest:.2g} nats"


async def sample_all(policy, tokens: int, round_number: int) -> list:
    requests = []
    for i in range(REQUESTS):
        seed = 1000 * round_number + i
        requests.append(policy.sample(prompt_of(policy, i), tokens, seed=seed))
    return await asyncio.gather(*requests)


def engine_rate(engine, prompts: list) -> float:
    """Tokens per second of an LLMEngine: median of three rounds after a warm-up."""
    rates = []
    for number in range(4):
        begin = time.perf_counter()
        add_requests(engine, prompts, str(number))
        while engine.has_unfinished_requests():
            engine.step()
        rates.append(TOKENS * len(prompts) / (time.perf_counter() - begin))
    return median(rates[1:])


def add_requests(engine, prompts: list, name: str, logprobs: int | None = 0, adapter=None) -> None:
    """Sends requests of TOKENS tokens each. name: another one for each round."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=TOKENS,
            ignore_eos=True,
            seed=i,
            logprobs=logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"prompt_token_ids": prompt, "cache_salt": name}
        engine.add_request(f"{name} {i}", request, params, lora_request=adapter)


def update_batch(policy, lengths=None) -> list:
    """EPISODES sequences with a common prompt, as pairs (tokens, mask). lengths: of their ends;
    default: TOKENS each.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    prompt = prompt_of(policy, 0)
    batch = []
    for length in lengths or [TOKENS] * EPISODES:
        reply = torch.randint(0, len(policy.tokenizer), (length,), generator=generator).tolist()
        batch.append((prompt + reply, [0] * len(prompt) + [1] * len(reply)))
    return batch


def one_update(policy, batch) -> tuple:
    """(log-probs, gradients) of one forward and backward pass."""
    import torch

    policy.model.zero_grad()
    logp = policy.logprobs(batch)[0]
    logp.mean().backward()
    if has_gpu():
        torch.cuda.synchronize()
    grads = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return logp.detach(), grads


def apart_text(one: tuple, other: tuple) -> str:
    """Compare two updates of one_update(): the distance of their log-probs and gradients."""
    (logp, grads), (other_logp, other_grads) = one, other
    apart = (logp - other_logp).abs().max().item()
    relative = ((grads - other_grads).norm() / other_grads.norm()).item()
    return f"log-probs {apart:.1g}, gradients {relative:.1g} apart"


def timed_update(policy, batch) -> tuple:
    """(log-probs, gradients, seconds, peak bytes) of the second of two updates."""
    import torch

    one_update(policy, batch)
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    logp, grads = one_update(policy, batch)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if has_gpu() else 0
    return logp, grads, seconds, peak


# ------------------------------------------------------------------------------ parts
# Each returns rows (what, value, note).


def parity(model: str) -> list:
    """Engine against trainer, and what the engine does per second."""
    before = allocated()
    policy = make_policy(model)
    used = allocated() - before
    rows = []
    for name, found in asyncio.run(policy.verify()).items():
        rows.append((f"log-prob difference, {name}", difference_text(found), ""))
    rate = engine_rate(policy.engine, prompts_of(policy))
    note = f"{REQUESTS} requests of {TOKENS} tokens; memory {gib(used)}"
    return [*rows, ("sampling with the adapter", f"{rate:.0f} tokens/s", note)]


def pretrained(model: str) -> list:
    """The same with a pretrained model, whose weights are not random."""
    from tools.get_smollm2 import model_folder

    folder = model_folder()
    if not folder.is_dir():
        return [("SmolLM2", "skipped", "fetch it with python tools/get_smollm2.py")]
    return parity(str(folder))


def runner(model: str) -> list:
    """The same with one of vLLM's two model runners. If the default (version 2) fails, start with
    VLLM_USE_V2_MODEL_RUNNER=0.
    """
    if not has_gpu():
        return [("model runner", "skipped", "needs a GPU")]
    return parity(model)


def decode(model: str, rank: int = 32) -> list:
    """Decoding steps of the engine with the adapter, with and without log-probs."""
    policy = make_policy(model, lora_rank=rank, trains=False)
    prompts = prompts_of(policy)
    rows = [decode_row(f"adapter of rank {rank}", policy.engine, prompts)]
    if rank == 32:
        rows.append(decode_row("the same without log-probs", policy.engine, prompts, logprobs=None))
    return rows


def decode_folded(model: str) -> list:
    """The same with A as the last rows of the base weights: one product gives x W^T and x A^T."""
    import torch
    import torch.nn.functional as F

    from flatlab.model.lora_sync import LoraLinear

    create_weights = LoraLinear.create_weights

    def create_folded(self, layer, *args, **kwargs):
        create_weights(self, layer, *args, **kwargs)
        count = len(layer.weight)
        layer.folded = torch.cat([layer.weight.data, layer.lora_a])
        layer.weight.data = layer.folded[:count]
        layer.lora_a = layer.folded[count:]

    def apply(self, layer, x, bias=None):
        sizes = [len(layer.lora_b), len(layer.lora_a)]
        y, reduced = F.linear(x, layer.folded).split(sizes, dim=-1)
        y = y + reduced @ layer.lora_b.T
        return y if bias is None else y + bias

    LoraLinear.create_weights = create_folded
    LoraLinear.apply = apply
    policy = make_policy(model, lora_rank=32)
    found = asyncio.run(policy.verify())["random adapter"]
    row = decode_row("A folded into the base product", policy.engine, prompts_of(policy))
    return [row, ("log-prob difference, folded", difference_text(found), "random adapter")]


def decode_plain(model: str) -> list:
    """The same without an adapter: the bound."""
    engine, prompts = other_engine(model)
    return [decode_row("without an adapter", engine, prompts)]


def decode_vllm_lora(model: str) -> list:
    """The same with vLLM's own LoRA, which reads the adapter from files."""
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    from flatlab.model.path import resolve_model
    from policy import Trainer

    base = AutoModelForCausalLM.from_pretrained(resolve_model(model).base)
    folder = FOLDER.absolute() / "adapter"
    folder.mkdir(parents=True, exist_ok=True)
    Trainer(base, dict(LORA), 1.0).save(folder)
    engine, prompts = other_engine(model, enable_lora=True, max_lora_rank=32, max_loras=1)
    adapter = LoRARequest("adapter", 1, str(folder))
    return [decode_row("vLLM's own LoRA, rank 32", engine, prompts, adapter=adapter)]


def other_engine(model: str, **lora) -> tuple:
    """vLLM without our linear method, and prompts for it."""
    import torch
    from transformers import AutoConfig
    from vllm import EngineArgs, LLMEngine

    from flatlab.model import memory
    from flatlab.model.chat import ChatTokens
    from flatlab.model.path import resolve_model
    from policy import cpu_engine_options, gpu_engine_options

    options = gpu_engine_options(REQUESTS) if has_gpu() else cpu_engine_options(2048)
    base = resolve_model(model).base
    config = AutoConfig.from_pretrained(base).get_text_config()
    dtype = getattr(torch, DTYPE or ("bfloat16" if has_gpu() else "float32"))
    arguments = EngineArgs(
        model=base,
        dtype=dtype,
        hf_overrides={"head_dtype": "float32"},
        max_model_len=2048,
        max_num_seqs=REQUESTS,
        kv_cache_memory_bytes=memory.cache_bytes(config, dtype.itemsize, 2048, REQUESTS),
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **options,
        **lora,
    )
    return LLMEngine.from_engine_args(arguments), prompts_of(ChatTokens(base))


def decode_row(what: str, engine, prompts: list, logprobs=0, adapter=None) -> tuple:
    """Median time of a step in which every request gets a token, of the second of two rounds, and
    how long of it the GPU works, of a third one: a profiler takes time.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    for number in range(2):
        add_requests(engine, prompts, f"{what} {number}", logprobs, adapter)
        ends = []
        while engine.has_unfinished_requests():
            engine.step()
            ends.append(time.perf_counter())
    add_requests(engine, prompts, f"{what} profiled", logprobs, adapter)
    for _ in range(TOKENS // 2):
        engine.step()
    activity = ProfilerActivity.CUDA if has_gpu() else ProfilerActivity.CPU
    with profile(activities=[activity]) as measured:
        for _ in range(8):
            engine.step()
        if has_gpu():
            torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = median(after - before for before, after in pairwise(ends[len(ends) // 2 :]))
    busy = sum(event.self_device_time_total for event in measured.key_averages()) / 8
    note = f"{len(prompts)} requests"
    if has_gpu():
        note += f"; the GPU works {busy / 1000:.2f} ms of it"
    return what, f"{1000 * seconds:.2f} ms a step", note


def sync(model: str) -> list:
    """20 syncs while requests are in flight, under CUDA graphs on a GPU."""
    policy = make_policy(model)
    took = []

    async def go():
        running = asyncio.ensure_future(sample_all(policy, 4 * TOKENS, 0))
        for _ in range(20):
            await asyncio.sleep(0.02)
            move_adapter(policy, 1e-3)
            begin = time.perf_counter()
            policy.sync()
            took.append(time.perf_counter() - begin)
        await running
        return await policy.agreement()

    found = asyncio.run(go())
    text = difference_text(found)
    return [
        ("sync", f"{1000 * median(took):.1f} ms", "median of 20, requests running"),
        ("log-prob difference after 20 syncs", text, f"limit of the mean {policy.diff_limit}"),
    ]


def shared_base(model: str) -> list:
    """One copy of the base weights for engine and trainer."""
    return base_weights(model, share_base=True)


def own_base(model: str) -> list:
    """A copy of the base weights for each."""
    return base_weights(model, share_base=False)


def base_weights(model: str, share_base: bool) -> list:
    from policy import Policy

    if share_base and not has_gpu():
        return [("base weights", "skipped", "needs a GPU")]
    before = allocated()
    Policy.share_base = share_base
    policy = make_policy(model)
    used = allocated() - before
    if policy.shares_base != share_base:
        raise UserError("The engine's base weights cannot be shared.")
    found = asyncio.run(policy.verify())["random adapter"]
    return [("difference", difference_text(found), f"memory {gib(used)}")]


def bare_trainer():
    """A trainer without an engine, in the shape of Qwen3-4B; on a CPU in that of the stand-in."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from policy import Trainer

    config = AutoConfig.from_pretrained(ROOT / "configs" / "tiny")
    if has_gpu():
        config = config_of("Qwen/Qwen3-4B-Instruct-2507")
    half = has_gpu() or DTYPE == "bfloat16"
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu() else "cpu"):
        dtype = torch.bfloat16 if half else torch.float32
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    trainer = Trainer(base, dict(LORA), 1.0)
    move_adapter(trainer, 1e-2)
    return trainer


def group_of(trainer, lengths: list[int]) -> list:
    """Random sequences with a common prompt and ends of these lengths, as pairs (tokens, mask)."""
    prompt = 2048 if has_gpu() else 64
    rng = random.Random(0)
    tokens = rng.choices(range(trainer.model.config.vocab_size), k=prompt + sum(lengths))
    batch = []
    for length in lengths:
        end = [tokens.pop() for _ in range(length)]
        batch.append((tokens[:prompt] + end, [0] * prompt + [1] * length))
    return batch


def median_update(trainer, batches: list) -> tuple[float, float]:
    """Seconds of the first update, and the median of the others."""
    seconds = []
    for batch in batches:
        begin = time.perf_counter()
        one_update(trainer, batch)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], median(seconds[1:])


def base_pass(trainer, batch) -> None:
    """The log-probs of the reference, as the KL term needs them."""
    import torch

    with torch.no_grad():
        trainer.logprobs(batch, base=True)
    if has_gpu():
        torch.cuda.synchronize()


def update_4b(model: str, way: str = "one product a layer") -> list:
    """Update of a group of 8 x (2048 common + 1920 own) tokens in the shape of Qwen3-4B, with equal
    and with unequal lengths, which are new in each round; its KL pass, its largest kernels, and the
    same with padded rows.
    """
    from torch.profiler import ProfilerActivity, profile

    from flatlab.model import memory

    trainer = bare_trainer()
    config = trainer.model.config
    own = 1920 if has_gpu() else 48
    rng = random.Random(0)
    equal = group_of(trainer, [own] * EPISODES)
    unequal = []
    for _ in range(4):
        lengths = [rng.randint(own // 4, own) for _ in range(EPISODES)]
        unequal.append(group_of(trainer, lengths))
    tokens = len(equal[0][0]) + (EPISODES - 1) * own  # of the packed row
    if way == "peft's layers":
        use_peft(trainer)
    elif way == "compiled layers":
        compile_layers(trainer)
    element_size = trainer.model.dtype.itemsize
    free = memory.free_bytes(trainer.model.device.type)
    recomputed = memory.layers_to_recompute(tokens, config, element_size, free)
    if recomputed:
        trainer.recompute_layers(recomputed)
    first, seconds = median_update(trainer, [equal] * 4)
    new_first, new = median_update(trainer, unequal)
    row = sum(len(group[0][0]) + sum(sum(mask) for _, mask in group[1:]) for group in unequal[1:])
    ratio = new / (row / 3) / (seconds / tokens)
    note = f"the first {first:.1f} s; {recomputed} layers recomputed"
    rows = [
        (f"update of {tokens} tokens, {way}", f"{seconds:.3f} s", note),
        ("unequal lengths", f"{ratio:.2f} x a token", f"{new:.3f} s, the first {new_first:.1f} s"),
    ]
    if way != "one product a layer":
        return rows
    for _ in range(2):
        begin = time.perf_counter()
        base_pass(trainer, equal)
        took = time.perf_counter() - begin
    rows.append(("KL pass", f"{took:.3f} s", f"with a quarter of it {seconds + took / 4:.3f} s"))
    activity = ProfilerActivity.CUDA if has_gpu() else ProfilerActivity.CPU
    with profile(activities=[activity]) as measured:
        one_update(trainer, equal)
    kernels = sorted(measured.key_averages(), key=lambda e: e.self_device_time_total, reverse=True)
    for kernel in kernels[: 8 * has_gpu()]:
        time_of = f"{kernel.self_device_time_total / 1e6:.3f} s"
        rows.append(("kernel", time_of, f"{kernel.count} x {kernel.key[:60]}".replace("|", " ")))
    packed = one_update(trainer, equal)
    trainer.recompute_layers(config.num_hidden_layers)
    trainer.packs = False
    _, padded = median_update(trainer, [equal] * 2)
    note = f"{padded / seconds:.2f} x; {apart_text(packed, one_update(trainer, equal))}"
    return [*rows, ("padded rows", f"{padded:.3f} s", note)]


def use_peft(trainer) -> None:
    """Computes with peft's own layers in autocast, without which they would be in fp32 and keep an
    fp32 copy of each input.
    """
    import torch

    for layer in trainer.adapter_layers:
        del layer.forward
        layer.cast_input_dtype_enabled = False
    is_half = trainer.model.dtype == torch.bfloat16
    autocast = torch.autocast(trainer.model.device.type, torch.bfloat16, enabled=is_half)
    trainer.hidden_states = autocast(trainer.hidden_states)


def compile_layers(trainer) -> None:
    """Compiles the decoder layers, once for all of them and for all lengths."""
    import torch
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer

    from flatlab.model import packing

    backend = "inductor" if has_gpu() else "aot_eager"  # which generates no code
    # Python lengths in a compiled layer would compile it anew for each batch.
    AttentionInterface.register("packed", torch.compiler.disable(packing.attend))
    for kind in {type(layer) for layer in trainer.model.modules()}:
        if issubclass(kind, GradientCheckpointingLayer):
            kind.forward = torch.compile(kind.forward, dynamic=True, backend=backend)


def attention(model: str) -> list:
    """One varlen call a layer against attention sequence by sequence: the same numbers, and seconds
    for sequences of equal lengths and of unequal ones, which are new in each round.
    """
    policy = make_policy(model)
    if not policy.uses_varlen:
        return [("varlen attention", "not here", "see has_varlen in flatlab/model/packing.py")]
    rng = random.Random(0)
    rows = []
    for name, low in (("equal", TOKENS), ("unequal", TOKENS // 8)):
        seconds = {True: [], False: []}
        for _ in range(4):
            batch = update_batch(policy, [rng.randint(low, TOKENS) for _ in range(EPISODES)])
            found = {}
            for way in seconds:
                policy.uses_varlen = way
                begin = time.perf_counter()
                found[way] = one_update(policy, batch)
                seconds[way].append(time.perf_counter() - begin)
        varlen, apiece = [median(times[1:]) for times in seconds.values()]
        note = f"sequence by sequence {apiece:.3f} s; {apart_text(*found.values())}"
        rows.append((f"update, {name} lengths", f"{varlen:.3f} s", note))
    return rows


def budget(model: str) -> list:
    """Free memory after the engine, after the trainer and at the peak of a step, beside the
    estimate of what that step needs; and whether the largest training pass fits.
    """
    from flatlab.model import memory
    from flatlab.train import metrics
    from policy import Policy

    class Watched(Policy):
        def open_vllm(self, *arguments):
            engine = super().open_vllm(*arguments)
            free["the engine"] = memory.free_bytes(self.device)
            return engine

    device = "cuda" if has_gpu() else "cpu"
    free = {"nothing": memory.free_bytes(device)}
    policy = make_policy(model, Watched)
    free["the trainer"] = memory.free_bytes(device)
    rows = [(f"free after {what}", gib(left), "") for what, left in free.items()]
    batch = update_batch(policy)
    tokens = sum(len(tokens) for tokens, _ in batch)
    before = allocated() if has_gpu() else metrics.peak_bytes()
    _, _, _, peak = timed_update(policy, batch)
    used = (peak or metrics.peak_bytes()) - before
    config = policy.model.config.get_text_config()
    estimate = memory.bytes_needed(tokens, config, policy.dtype.itemsize, 0)
    at_peak = gib(free["the trainer"] - used)
    note = f"a step of {tokens} tokens took {gib(used)}, estimated {gib(estimate)}"
    rows.append(("free at the peak of a step", at_peak, note))
    most = policy.fit_micro_tokens()
    length = min(most, policy.context)
    sequence = ([0] * length, [0] + [1] * (length - 1))
    policy.logprobs([sequence] * (most // length))[0].mean().backward()
    return [*rows, ("tokens of a training pass", str(most), "such a pass fits")]


# scripts and presets -> what differs from DEFAULTS
DEFAULTS = {
    "model": "Qwen/Qwen3-4B-Instruct-2507",
    "context": 16384,
    "concurrency": 32,
    "lora_rank": 16,
    "micro_tokens": 0,
}
CASES = {
    "grpo.py, learn.py": {},
    "the same, Qwen3-0.6B": {"model": "Qwen/Qwen3-0.6B"},
    "the same, Qwen3-8B": {"model": "Qwen/Qwen3-8B"},
    "sft.py": {"concurrency": 8},
    "search.py": {"concurrency": 8, "lora_rank": 0},
    "evaluate.py": {"lora_rank": 0},
    "configs/grpo-24gb.yaml": read_mapping(ROOT / "configs/grpo-24gb.yaml"),
    "configs/grpo-80gb.yaml": read_mapping(ROOT / "configs/grpo-80gb.yaml"),
}


def sums(room: int) -> list:
    """Sums of each of CASES on a GPU with so many bytes, and whether it runs there."""
    import torch
    from transformers import Qwen3ForCausalLM

    from flatlab.model import memory

    rows = []
    for name, given in CASES.items():
        case = DEFAULTS | given
        config = config_of(case["model"])
        with torch.device("meta"):
            weights = Qwen3ForCausalLM(config).num_parameters()
        context, requests = case["context"], case["concurrency"]
        tokens = max(context, case["micro_tokens"])
        needs = memory.gpu_needs(config, 2, weights, case["lora_rank"], tokens)
        episode = int(memory.TYPICAL_EPISODE * context)
        least = memory.cache_bytes(config, 2, context)
        wanted = memory.cache_bytes(config, 2, episode, requests)
        try:
            cache = memory.fit_cache(least, wanted, needs, room)
        except UserError as error:
            rows.append((name, "does not fit", str(error)))
            continue
        fit = min(requests, cache * requests // wanted)
        needs |= {f"KV cache of {fit} of {requests} episodes": cache}
        needs |= {"left": room - sum(needs.values())}
        parts = [f"{what} {size / 2**30:.2f}" for what, size in needs.items()]
        rows.append((name, "runs", ", ".join(parts)))
    return rows


def start(model: str) -> list:
    """Seconds of the engine's start, and whether its code came from vLLM's cache. With GRAPHS_ONLY
    in the environment there are CUDA graphs for decoding steps, but nothing is compiled.
    """
    from vllm.compilation.counter import compilation_counter

    from policy import Policy

    class Started(Policy):
        def open_vllm(self, *arguments):
            if has_gpu() and "GRAPHS_ONLY" in os.environ:
                compilation = arguments[-1]["compilation_config"]
                compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            return super().open_vllm(*arguments)

    begin = time.perf_counter()
    policy = make_policy(model, Started, trains=False)
    seconds = time.perf_counter() - begin
    loaded = compilation_counter.num_aot_artifacts_loaded
    rate = engine_rate(policy.engine, prompts_of(policy))
    note = f"{loaded} compiled artifacts from the cache; {rate:.0f} tokens/s"
    return [("start", f"{seconds:.1f} s", note)]


def start_twice(model: str) -> list:
    """Two starts with a cache that is empty before, each in a process of its own: compiled, and on
    a GPU with graphs alone.
    """
    cache = FOLDER.absolute() / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["VLLM_CACHE_ROOT"] = str(cache)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "inductor")
    names = ["first start", "second start"]
    if has_gpu():
        names += ["first start, graphs alone", "second start, graphs alone"]
    global MINUTES
    MINUTES /= len(names)
    rows = []
    for name in names:
        if "alone" in name:
            os.environ["GRAPHS_ONLY"] = "1"
        rows += [(name, *row[1:]) for row in run_part("start", model, DTYPE)]
    return rows


def ahead(model: str) -> list:
    """Sampling beside updates in the trainer's thread, as with grpo.py --ahead."""
    from flatlab.train.job import in_trainer

    policy = make_policy(model)
    batch = update_batch(policy)
    rates, updates, peaks = [], [], []

    async def sampling_rate(number: int) -> float:
        begin = time.perf_counter()
        samples = await sample_all(policy, TOKENS, number)
        return sum(len(s.tokens) for s in samples) / (time.perf_counter() - begin)

    async def learn():
        for number in range(3):
            rates.append(await sampling_rate(number))
        updates.append(timed_update(policy, batch)[2])
        beside = asyncio.create_task(sampling_rate(3))
        while not beside.done():
            _, _, seconds, peak = await in_trainer(timed_update, policy, batch)
            updates.append(seconds)
            peaks.append(peak)
        rates.append(beside.result())

    asyncio.run(learn())
    alone, *during = updates
    found = asyncio.run(policy.verify())["random adapter"]
    return [
        ("sampling beside updates", f"{rates[3]:.0f} tokens/s", f"alone {median(rates[1:3]):.0f}"),
        ("update beside sampling", f"{median(during):.3f} s", f"alone {alone:.3f}"),
        ("both", f"peak {gib(max(peaks))}", f"afterwards {difference_text(found)}"),
    ]


def training(model: str) -> list:
    """Three steps of examples/ppo.py, end to end. A random model's episodes all get the same
    reward, from which only PPO learns.
    """
    flags = """--task titanic --steps 3 --groups 2 --eval-episodes 8 --eval-every 3
        --context 2048 --max-turns 3 --max-reply-tokens 128 --backend local""".split()
    with tempfile.TemporaryDirectory() as folder:
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import grpo; "
        start += "from examples import ppo; "
        start += f"ppo.ActorCritic.dtype = {DTYPE!r}; "
        start += "grpo.main(ppo.Config, 'ppo', ppo.ActorCritic, ppo.train)"
        if Path(model).is_dir():
            model = str(Path(model).absolute())
        done = subprocess.run(
            [sys.executable, "-c", start, *flags, "--model", model, "--name", "check"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UserError(last_line(done.stderr))
        text = Path(folder, "logs/check/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.strip().split("\n")]
    trained = [row["logprob_diff_mean"] for row in rows if "logprob_diff_mean" in row]
    if not trained:
        raise UserError("No step had anything to learn from.")
    worst = max(trained)
    seconds = ", ".join(f"{row['seconds']:.1f}" for row in rows)
    return [("3 steps of titanic", f"{seconds} s", f"log-prob difference {worst:.2g} on average")]


# name -> (function, environment variables)
PARTS = {
    "parity": (parity, {}),
    "pretrained": (pretrained, {}),
    "runner-v1": (runner, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "runner-v2": (runner, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "decode": (decode, {}),
    "decode-r8": (partial(decode, rank=8), {}),
    "decode-v1": (decode, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "decode-folded": (decode_folded, {}),
    "decode-plain": (decode_plain, ALONE),
    "decode-vllm-lora": (decode_vllm_lora, ALONE),
    "sync": (sync, {}),
    "shared-base": (shared_base, {}),
    "own-base": (own_base, {}),
    "attention": (attention, {}),
    "update-4b": (update_4b, {}),
    "update-4b-peft": (partial(update_4b, way="peft's layers"), {}),
    "update-4b-compiled": (partial(update_4b, way="compiled layers"), {}),
    "budget": (budget, {}),
    "ahead": (ahead, {}),
    "training": (training, {}),
    "start": (start, {}),
    "start-twice": (start_twice, {}),
}


# ------------------------------------------------------------------------------ start


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()] or ["no message"]
    return lines[-1][:300]


def run_part(name: str, model: str, dtype: str | None) -> list:
    """The rows of a part, from a process of its own; one row with the reason if it fails."""
    command = [sys.executable, __file__, "--part", name, "--model", model]
    if dtype:
        command += ["--dtype", dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        return [(name, "failed", f"took longer than {MINUTES:g} minutes")]
    if done.returncode:
        return [(name, "failed", last_line(done.stderr))]
    return json.loads(done.stdout.strip().splitlines()[-1])


def table_of(rows: list) -> str:
    lines = ["| part | what | value | note |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def describe() -> str:
    import torch
    import vllm

    name = torch.cuda.get_device_name() if has_gpu() else "no GPU: small shapes on the CPU"
    return f"{name}, torch {torch.__version__}, vLLM {vllm.__version__}"


def main() -> None:
    threads.configure()
    cfg = parse_config(Config, sys.argv[1:])
    if cfg.part:
        global DTYPE, REQUESTS, TOKENS
        DTYPE = cfg.dtype
        function, environment = PARTS[cfg.part]
        os.environ.update(environment)
        if not has_gpu():
            REQUESTS, TOKENS = 8, 32
        print("\n" + json.dumps(function(cfg.model)))
        return
    unknown = set(cfg.parts) - set(PARTS)
    if unknown:
        raise UserError(f"Unknown part {sorted(unknown)[0]}; there are {', '.join(PARTS)}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    heading = describe()
    print(heading, flush=True)
    model = cfg.model or (random_model(FOLDER / "qwen3-0.6b") if has_gpu() else "tiny")
    rows = []
    for name in cfg.parts or PARTS:
        begin = time.monotonic()
        if cfg.total and name == "budget":
            found = sums(int(cfg.total * GIB_PER_GB * 2**30))
        else:
            found = run_part(name, model, cfg.dtype)
        rows += [(name, *row) for row in found]
        write_whole(FOLDER / "table.md", f"{heading}\n\n{table_of(rows)}")
        for what, value, note in found:
            print(f"{name:16} {what}: {value}   ({note})")
        print(f"{name:16} took {time.monotonic() - begin:.0f} s", flush=True)
    print(f"\nPaste {FOLDER}/table.md into tests/BENCHMARKS.md, with the date and the command.")


if __name__ == "__main__":
    one_sentence(main)
