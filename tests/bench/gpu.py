"""The section `gpu`: experiments on a GPU that is lent, by parts in processes of their own.

    python tests/bench gpu --only first             ten minutes
    python tests/bench gpu --only second            what is left
    python tests/bench gpu --only update,decode     some of the parts
    python -m bench.gpu PART                        one part in this process, a line per result

Each mend of the trainer is switched off and on, alone and together. A line is printed as a result
comes; a part that reaches its limit is cut, and the table says so. The numbers that have a bound
stand beside it and beside what was measured last. Without a GPU all of it runs with small shapes.

Rank, context and number of requests are those of configs/grpo-80gb.yaml in all parts: they are in
the key of vLLM's compile cache, so the first part compiles for the others.
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import MethodType

from bench.measure import ENVIRONMENT, PROJECT, last_error
from tools import gpu_check as check
from tools.gpu_sums import config_of

ROW = "row: "  # begins the line of a result
LARGE = "Qwen/Qwen3-4B-Instruct-2507"
LAYERS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
RANK = 32
CONTEXT = 16384  # tokens; without a GPU that of the check
LORA = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": LAYERS}
# A result -> its bound, and its last value: 2026-11-26, one H200, torch 2.11, before the mends.
BOUNDS = {
    "update, all mends, ": ("0.48 s of matrix products without recomputation", "3.67 s"),
    "update, no mends, ": ("0.63 s of matrix products with it", "3.67 s"),
    "decode with the adapter": ("2.4 ms to read the weights; goal 5.5 ms", "7.4 to 8 ms"),
    "decode without an adapter": ("2.4 ms to read the weights", "not measured"),
    "sync": ("less than 1 ms to copy 0.4 GB", "5.5 ms"),
    "first start": ("goal 60 s", "119 s"),
    "second start": ("goal 25 s", "not measured"),
    "difference of log-probs": ("goal 0.05 nats", "0.031 to 0.035 nats"),
}


# ---- the section


def gpu(args):
    """Runs the parts one after the other, each in a process of its own."""
    calls = {"": PARTS, "first": FIRST, "second": SECOND}
    names = [*calls.get(args.only, args.only.split(","))]
    if unknown := {*names} - {*PARTS}:
        raise SystemExit(f"--only: there is no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    rows = []
    for name in names:
        begin = time.monotonic()
        rows += run_part(name)
        print(f"{name} took {time.monotonic() - begin:.0f} s", flush=True)
    return check.describe(), [with_bound(*row) for row in rows]


def run_part(name: str) -> list:
    """The rows of a part; the last one says whether it was cut or failed."""
    _, limit, environment = PARTS[name]
    limit = size_of(limit, 3 * limit)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", name],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=ENVIRONMENT | environment,
            start_new_session=True,  # its own children end with it
        )
        late = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        rows = []
        for line in process.stdout:
            if line.startswith(ROW):
                rows.append(json.loads(line.removeprefix(ROW)))
                print(name, *rows[-1], sep=" | ", flush=True)
        is_late = not late.is_alive()
        late.cancel()
        if process.wait():
            errors.seek(0)
            why = f"the rest was cut after {limit} s" if is_late else last_error(errors.read())
            rows.append((name, "cut" if is_late else "failed", why))
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def with_bound(what: str, value: str, note: str) -> tuple:
    for name, (bound, last) in BOUNDS.items():
        if what.startswith(name):
            note = f"{bound}; last {last}; {note}"
    return what, value, note


# ---- models and batches


def size_of(large, small):
    return large if check.has_gpu() else small


def model_path() -> str:
    """A random model in the shape of Qwen3-4B; on a CPU the stand-in."""
    if not check.has_gpu():
        return "tiny"
    return check.random_model(check.FOLDER.absolute() / "qwen3-4b", LARGE)


def make_policy(**options):
    return check.make_policy(model_path(), lora_rank=RANK, **options)


def bare_trainer():
    """A trainer without an engine, in the shape of Qwen3-4B; on a CPU in that of the stand-in."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from policy import Trainer

    gc.collect()  # the layers of the one before refer to themselves
    config = AutoConfig.from_pretrained(PROJECT / "configs" / "tiny")
    if check.has_gpu():
        config = config_of(LARGE)
    torch.manual_seed(0)
    with torch.device(size_of("cuda", "cpu")):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, p in base.named_parameters():
            if "norm" in name:  # a trained one is not 1
                p.uniform_(0.5, 1.5)
    trainer = Trainer(base, dict(LORA), 1.0)
    move_adapter(trainer, 1e-2)
    return trainer


def move_adapter(policy, size: float) -> None:
    """Adds normal noise of this standard deviation to the trained weights."""
    import torch

    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn_like(p) * size)


def group_of(trainer, lengths: list[int]) -> list:
    """Random sequences with a common prompt and ends of these lengths, as pairs (tokens, mask)."""
    prompt = size_of(2048, 64)
    rng = random.Random(0)
    vocabulary = range(trainer.model.config.vocab_size)
    tokens = rng.choices(vocabulary, k=prompt + sum(lengths))
    batch = []
    for length in lengths:
        end = [tokens.pop() for _ in range(length)]
        batch.append((tokens[:prompt] + end, [0] * prompt + [1] * length))
    return batch


def equal_group(trainer) -> list:
    return group_of(trainer, [size_of(1920, 48)] * check.EPISODES)


def layers_of(trainer) -> int:
    return trainer.model.config.get_text_config().num_hidden_layers


# ---- switches: each computes the same with and without


def compile_layers(trainer, on: bool = True) -> None:
    """Compiles the decoder layers, once for all of them and for all lengths. It stays so. They
    cannot be recomputed: torch refuses a recomputation that takes another graph.
    """
    import torch
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer

    from flatlab.model import packing

    if not on:
        return
    torch._dynamo.config.disable = False
    backend = size_of("inductor", "eager")  # which traces alone
    # Python lengths in a compiled layer would compile it anew for each batch.
    AttentionInterface.register("packed", torch.compiler.disable(packing.attend))
    for kind in {type(layer) for layer in trainer.model.modules()}:
        if issubclass(kind, GradientCheckpointingLayer):
            kind.forward = torch.compile(kind.forward, dynamic=True, backend=backend)


def use_peft(trainer, on: bool = True) -> None:
    """Computes with peft's own layers in autocast, without which they would be in fp32 and keep an
    fp32 copy of each input. It stays so.
    """
    import torch

    if not on:
        return
    for layer in trainer.adapter_layers:
        del layer.forward
        layer.cast_input_dtype_enabled = False
    is_half = trainer.model.dtype == torch.bfloat16
    autocast = torch.autocast(trainer.model.device.type, torch.bfloat16, enabled=is_half)
    trainer.hidden_states = autocast(trainer.hidden_states)


def thin_first(ctx, x, weight, bias, a, b, scale, is_unused):
    """LoRA's part first; the base product adds to it in its epilogue."""
    a, b = a.to(x.dtype), b.to(x.dtype)
    reduced = x @ a.T
    y = reduced @ (b * scale).T
    y = y.addmm_(x, weight.T) if bias is None else y.add_(bias).addmm_(x, weight.T)
    ctx.save_for_backward(x, weight, a, b, reduced)
    ctx.scale = scale
    return y


def order(trainer, on: bool) -> None:
    from flatlab.model import packing

    packing.LoraProduct.forward = staticmethod(thin_first if on else ORIGINAL["order"])


def swiglu(trainer, on: bool) -> None:
    """SwiGLU as one compiled function, which keeps gate and up alone for the backward pass."""
    import torch
    import torch.nn.functional as F

    backend = size_of("inductor", "eager")

    @torch.compile(dynamic=True, backend=backend)
    def product(gate, up):
        return F.silu(gate) * up

    def forward(mlp, x):
        return mlp.down_proj(product(mlp.gate_proj(x), mlp.up_proj(x)))

    for module in trainer.model.modules():
        if hasattr(module, "gate_proj"):
            vars(module).pop("forward", None)
            if on:
                module.forward = MethodType(forward, module)


def flash_attention_3(trainer, on: bool) -> None:
    """varlen_attn by the kernels of the package flash_attn_interface. Raises ImportError or
    ValueError if they are not there.
    """
    if on:
        from torch.nn.attention import activate_flash_attention_impl

        return activate_flash_attention_impl("FA3")
    with contextlib.suppress(ImportError):  # an older torch
        from torch.nn.attention import restore_flash_attention_impl

        restore_flash_attention_impl()


def varlen(trainer, on: bool) -> None:
    from flatlab.model.packing import has_varlen

    trainer.uses_varlen = on and has_varlen(trainer.model)


def norms(trainer, on: bool) -> None:
    """RMSNorm in one kernel."""
    from flatlab.model.packing import fuse_norms, fused_norm

    for module in trainer.model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is fused_norm:
            del module.forward
    if on:
        fuse_norms(trainer.model)


def down_proj(trainer, on: bool) -> None:
    """The last product of a layer is not repeated."""
    from flatlab.model import packing

    packing.last_product = ORIGINAL["down_proj"] if on else lambda layer: None


def head(trainer, on: bool) -> None:
    """Chunks of whole tiles of logits."""
    from flatlab.model import memory

    memory.TILE = 128 if on else 1


def pinned(trainer, on: bool) -> None:
    """Rows of tokens are copied to the GPU without waiting for it."""
    import torch

    from flatlab.model import packing

    def waits(numbers, device):
        return torch.from_numpy(numbers).to(device)

    packing.on_device = ORIGINAL["pinned"] if on else waits


# in the product
MENDS = {"varlen": varlen, "norms": norms, "down_proj": down_proj, "head": head, "pinned": pinned}
IDEAS = {  # not yet measured
    "order": order,
    "swiglu": swiglu,
    "FA3": flash_attention_3,
    "peft": use_peft,
    "compiled": compile_layers,
}
STAYING = {"peft", "compiled"}  # ideas that a new trainer is without
ORIGINAL = {}  # what a switch replaces


def remember() -> None:
    from flatlab.model import packing

    ORIGINAL["order"] = packing.LoraProduct.forward
    ORIGINAL["down_proj"] = packing.last_product
    ORIGINAL["pinned"] = packing.on_device


# ---- parts: each yields rows (what, value, note)


def update_cases(layers: int) -> list[tuple]:
    """Name, switches, recomputed layers and episodes of each update, most important first. All of
    them fit on 80 GB. Of 36 layers, default flags recompute 17 there, and the preset 25.
    """
    mends, group = (*MENDS,), check.EPISODES
    cases = [("all mends", mends, count, group) for count in (layers, layers * 17 // 36)]
    cases += [("all mends", mends, layers * 25 // 36, group), ("no mends", (), layers, group)]
    cases += [(name, (name,), layers, group) for name in MENDS]
    alone = [name for name in IDEAS if name != "compiled"]
    cases += [(f"all mends and {name}", (*MENDS, name), layers, group) for name in alone]
    half = group // 2
    cases += [(f"all mends, {half} episodes", mends, 0, half)]
    return [*cases, (f"all mends and compiled, {half} episodes", (*MENDS, "compiled"), 0, half)]


def update():
    """The group of 8 x (2,048 common + 1,920 own) tokens with each mend, alone and together; half
    of it for compiled layers, which cannot be recomputed.
    """
    import torch

    from flatlab.model import memory
    from flatlab.model.packing import row_tokens

    trainer = bare_trainer()
    remember()
    batch, previous, first = equal_group(trainer), (), {}
    layers, config = layers_of(trainer), trainer.model.config.get_text_config()
    for name, on, count, episodes in update_cases(layers):
        if STAYING & {*previous, *on}:
            trainer = None
            trainer = bare_trainer()
        previous = on
        what = f"update, {name}, {'all' if count == layers else count} recomputed"
        try:
            for switch, mend in (MENDS | IDEAS).items():
                mend(trainer, switch in on)
        except (ImportError, ValueError) as error:
            yield what, "skipped", str(error)[:200]
            continue
        trainer.recompute_layers(count)
        part = batch[:episodes]
        try:
            found, seconds, peak = check.timed_update(trainer, part)
        except torch.OutOfMemoryError:
            yield what, "out of memory", ""
            continue
        first.setdefault(episodes, found)
        tokens = row_tokens(part)
        estimate = memory.bytes_needed(tokens, config, 2, trainer.uses_varlen, count)
        note = f"{tokens} tokens; peak {check.gib(peak)}, of a pass {check.gib(estimate)}"
        yield what, f"{seconds:.3f} s", f"{note}; {check.apart_text(found, first[episodes])}"


def lengths():
    """Unequal lengths, new in each round; the KL pass; padded rows; the largest kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    trainer = bare_trainer()
    trainer.recompute_layers(layers_of(trainer))
    own, rng = size_of(1920, 48), random.Random(0)
    equal = equal_group(trainer)
    found, seconds, _ = check.timed_update(trainer, equal)
    yield "equal lengths", f"{seconds:.3f} s", ""
    times = []
    for _ in range(4):
        drawn = [rng.randint(own // 4, own) for _ in range(check.EPISODES)]
        unequal = group_of(trainer, drawn)
        begin = time.perf_counter()
        check.one_update(trainer, unequal)
        times.append((time.perf_counter() - begin) / sum(drawn))
    ratio = median(times[1:]) / (seconds / (own * check.EPISODES))
    yield "unequal lengths", f"{ratio:.2f} x", "seconds an own token"
    with torch.no_grad():
        trainer.logprobs(equal, base=True)[0].sum().item()
        begin = time.perf_counter()
        trainer.logprobs(equal, base=True)[0].sum().item()
    yield "KL pass", f"{time.perf_counter() - begin:.3f} s", "of a quarter of the micro-batches"
    activity = size_of(ProfilerActivity.CUDA, ProfilerActivity.CPU)
    with profile(activities=[activity]) as measured:
        check.one_update(trainer, equal)
    kernels = measured.key_averages()
    kernels = sorted(kernels, key=lambda event: event.self_device_time_total, reverse=True)
    for kernel in kernels[: size_of(12, 1)]:
        took = kernel.self_device_time_total / 1e6
        yield "kernel", f"{took:.3f} s", f"{kernel.count} x {kernel.key[:60]}".replace("|", " ")
    trainer.packs = False
    padded, seconds, _ = check.timed_update(trainer, equal)
    yield "padded rows", f"{seconds:.3f} s", check.apart_text(padded, found)


def passes():
    """The group in passes of at most so many tokens, all layers recomputed: a group that is split
    computes its common prompt once more. Waits: as for .item() after each pass.
    """
    from flatlab.model.packing import row_tokens
    from flatlab.train.batch import TrainSequence, micro_batches, pairs_of

    trainer = bare_trainer()
    trainer.recompute_layers(layers_of(trainer))
    sequences = [TrainSequence(*pair, [], [], []) for pair in equal_group(trainer)]
    for most in size_of((8192, 16384, 32768), (128, 256, 512)):
        trainer.micro_tokens = most
        parts = [pairs_of(part) for part in micro_batches(sequences, trainer)]
        tokens = f"{len(parts)} passes, {sum(map(row_tokens, parts))} tokens"
        for waits in (False, True):
            for _ in range(2):
                begin = time.perf_counter()
                for part in parts:
                    logp, _ = trainer.logprobs(part)
                    logp.sum().backward()
                    if waits:
                        logp.sum().item()
                trainer.parameters()[0].grad.sum().item()
                seconds = time.perf_counter() - begin
            what = f"passes of {most} tokens{' with waits' * waits}"
            yield what, f"{seconds:.3f} s", tokens


def stream(own: bool):
    """Engine steps beside updates in the trainer's thread, on two CUDA streams or on one."""
    import torch

    from flatlab.train.job import in_trainer
    from policy import Policy

    Policy.own_stream = own
    if check.has_gpu() and not own:
        # The engine keeps the stream that it finds; vLLM's import takes note of it.
        importlib.import_module("vllm.utils.torch_utils")
        torch.cuda.set_stream(torch.cuda.default_stream())
    name = "a stream of the engine's own" if own else "one stream"
    policy, row = started(f"second start, {name}")
    yield row
    batch = check.update_batch(policy)
    steps, plain_step = [], policy.step_engine

    def timed_step():
        begin = time.perf_counter()
        outputs = plain_step()
        steps.append(time.perf_counter() - begin)
        return outputs

    policy.step_engine = timed_step

    async def go():
        await sample_all(policy, 0)
        steps.clear()
        begin = time.perf_counter()
        await sample_all(policy, 1)
        alone, step = time.perf_counter() - begin, median(steps)
        await in_trainer(check.one_update, policy, batch)
        begin = time.perf_counter()
        await in_trainer(check.one_update, policy, batch)
        learn = time.perf_counter() - begin
        beside = asyncio.create_task(sample_all(policy, 2))
        await asyncio.sleep(0.05)
        steps.clear()
        begin, count = time.perf_counter(), 0
        while not beside.done():
            await in_trainer(check.one_update, policy, batch)
            count += 1
        both = time.perf_counter() - begin
        note = f"alone {1000 * step:.1f} ms; longest {1000 * max(steps, default=0):.0f} ms; "
        note += f"{both / (count * learn + alone):.2f} of taking turns"
        return f"{1000 * median(steps or [0]):.1f} ms", note

    yield f"engine step beside updates, {name}", *asyncio.run(go())
    found = asyncio.run(policy.verify())["random adapter"]
    yield (
        f"difference of log-probs, {name}",
        f"{found.mean:.2g} nats",
        f"at most {found.largest:.2g}",
    )


async def sample_all(policy, number: int) -> list:
    requests = []
    for i in range(check.REQUESTS):
        prompt = check.prompt_of(policy, i)
        requests.append(policy.sample(prompt, check.TOKENS, seed=1000 * number + i))
    return await asyncio.gather(*requests)


def started(what: str, **options) -> tuple:
    """A policy and the row of its start; vLLM's own cache is empty on a bare machine."""
    from vllm.compilation.counter import compilation_counter

    model_path()
    begin = time.perf_counter()
    policy = make_policy(**options)
    seconds = time.perf_counter() - begin
    loaded = compilation_counter.num_aot_artifacts_loaded
    return policy, (what, f"{seconds:.1f} s", f"{loaded} artifacts from the cache")


def decode(start: str):
    """A start, and decoding steps with the adapter, with and without log-probs."""
    policy, row = started(start, trains=False)
    yield row
    prompts = prompts_of(policy)
    yield decode_row("decode with the adapter", policy.engine, prompts)
    yield decode_row("the same without log-probs", policy.engine, prompts, logprobs=None)


def decode_folded():
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
    policy = make_policy()
    found = asyncio.run(policy.verify())["random adapter"]
    yield decode_row("decode, A folded into the base product", policy.engine, prompts_of(policy))
    yield (
        "difference of log-probs, folded",
        f"{found.mean:.2g} nats",
        f"at most {found.largest:.2g}",
    )


def decode_plain():
    """The same by vLLM without our linear method and without an adapter: the bound."""
    import torch
    from transformers import AutoConfig
    from vllm import EngineArgs, LLMEngine

    from flatlab.model import memory
    from flatlab.model.chat import ChatTokens
    from flatlab.model.path import resolve_model
    from policy import cpu_engine_options, gpu_engine_options

    options = cpu_engine_options(check.CONTEXT)
    torch._dynamo.config.disable = True  # as in Engine, where a CPU would compile for minutes
    if check.has_gpu():
        torch._dynamo.config.disable = False
        options = gpu_engine_options(check.REQUESTS)
    base = resolve_model(model_path()).base
    config = AutoConfig.from_pretrained(base).get_text_config()
    episode = int(memory.TYPICAL_EPISODE * check.CONTEXT)
    arguments = EngineArgs(
        model=base,
        dtype=torch.bfloat16,
        hf_overrides={"head_dtype": "float32"},
        max_model_len=check.CONTEXT,
        max_num_seqs=check.REQUESTS,
        kv_cache_memory_bytes=memory.cache_bytes(config, 2, episode, check.REQUESTS),
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **options,
    )
    engine = LLMEngine.from_engine_args(arguments)
    yield decode_row("decode without an adapter", engine, prompts_of(ChatTokens(base)))


def prompts_of(policy) -> list:
    return [check.prompt_of(policy, i) for i in range(check.REQUESTS)]


def add_requests(engine, prompts: list, name: str, logprobs: int | None = 0, adapter=None) -> None:
    """Sends requests of TOKENS tokens each. name: another one for each round."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=check.TOKENS,
            ignore_eos=True,
            seed=i,
            logprobs=logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = {"prompt_token_ids": prompt, "cache_salt": name}
        engine.add_request(f"{name} {i}", request, params, lora_request=adapter)


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
    for _ in range(check.TOKENS // 2):
        engine.step()
    activity = size_of(ProfilerActivity.CUDA, ProfilerActivity.CPU)
    with profile(activities=[activity]) as measured:
        for _ in range(8):
            engine.step()
        if check.has_gpu():
            torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step()
    seconds = median(after - before for before, after in pairwise(ends[len(ends) // 2 :]))
    busy = sum(event.self_device_time_total for event in measured.key_averages()) / 8
    note = f"{len(prompts)} requests"
    if check.has_gpu():
        note += f"; the GPU works {busy / 1000:.2f} ms of it"
    return what, f"{1000 * seconds:.2f} ms a step", note


def prompts(graphs: bool):
    """Steps that read a prompt of 100 to 400 tokens beside decoding, with graphs of their sizes and
    without.
    """
    import policy as module

    options = module.gpu_engine_options

    def only_decoding(max_batch):
        found = options(max_batch)
        sizes = found["compilation_config"]["cudagraph_capture_sizes"]
        sizes[:] = [size for size in sizes if size <= max_batch]
        return found

    if not graphs:
        module.gpu_engine_options = only_decoding
    policy = make_policy(trains=False)
    engine = policy.engine
    add_requests(engine, prompts_of(policy)[: check.REQUESTS // 2], "decoding")
    for _ in range(8):
        engine.step()
    seconds = []
    for number in range(16):
        prompt = check.prompt_of(policy, 100 + number)[: 100 + 300 * number // 16]
        add_requests(engine, [prompt], f"turn {number}")
        begin = time.perf_counter()
        engine.step()
        engine.step()  # the output of the first one arrives
        seconds.append((time.perf_counter() - begin) / 2)
    name = "with" if graphs else "without"
    value = f"{1000 * median(seconds):.2f} ms"
    yield f"a step that reads a prompt, {name} graphs of its size", value, ""


def sync():
    """20 syncs while requests are in flight."""
    policy = make_policy()
    took = []

    async def go():
        running = asyncio.ensure_future(sample_all(policy, 0))
        for _ in range(20):
            await asyncio.sleep(0.02)
            move_adapter(policy, 1e-3)
            begin = time.perf_counter()
            policy.sync()
            took.append(time.perf_counter() - begin)
        await running
        return await policy.agreement()

    found = asyncio.run(go())
    yield "sync", f"{1000 * median(took):.1f} ms", "median of 20, requests running"
    note = f"after 20 syncs; at most {found.largest:.2g}"
    yield "difference of log-probs", f"{found.mean:.2g} nats", note


# A random model submits nothing, and equal rewards teach nothing.
REWARDED = f"""
import sys
sys.path.insert(0, {str(PROJECT)!r})
import grpo
grpo.reward_of = lambda episode, cfg: float(episode.seed)
grpo.main()
"""


def preset():
    """Two steps of the preset for 80 GB with short episodes and rewards by number; on a CPU of
    smaller groups of the stand-in.
    """
    flags = size_of(
        [PROJECT / "configs/grpo-80gb.yaml", "--model", model_path(), "--max-groups", "8"],
        "--model tiny --groups 1 --group-size 4 --context 2048".split(),
    )
    flags += size_of("--max-turns 4 --max-reply-tokens 256", "--max-turns 2").split()
    flags += "--task titanic --steps 2 --eval-episodes 0 --ahead 0 --name bench".split()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        Path(folder, "rewarded.py").write_text(REWARDED)
        process = subprocess.Popen(
            [sys.executable, "rewarded.py", *flags, "--backend", "local"],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=folder,
            env=ENVIRONMENT,
        )
        for row in rows_as_written(Path(folder, "logs/bench/metrics.jsonl"), process):
            keys = "sample train sync".split()
            keys = [f"seconds_{key}" for key in keys]
            keys += ["grad_norm", "memory_gb", "logprob_diff_mean"]
            note = ", ".join(f"{key} {row[key]:.3g}" for key in keys if key in row)
            what = f"step {row['step']} of the preset, --ahead 0"
            yield what, f"{row['seconds']:.1f} s", note
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(last_error(errors.read()))


def rows_as_written(path: Path, process):
    """Yields the rows of a file that this process appends to, until it ends."""
    count, is_over = 0, False
    while not is_over:
        time.sleep(0.5)
        is_over = process.poll() is not None
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        yield from map(json.loads, lines[count:])
        count = len(lines)


# A cache of its own: the key does not know that the code of a layer is replaced.
CACHE = {"VLLM_CACHE_ROOT": f"{tempfile.gettempdir()}/flatlab-bench-{os.getpid()}"}
# vLLM in the process of a part, where the profiler sees it
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "CRITICAL"}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # is in the key of the cache, so it compiles
# name -> (generator, limit in seconds, environment), in the order of what is learned a minute:
# FIRST for a command of ten minutes, SECOND for another one on the same machine. The first start
# compiles (about 110 s) and makes the model (20 s); so do other engines than ours.
FIRST = {
    "decode": (partial(decode, "first start"), 210, {}),
    "update": (update, 100, {}),
    "stream": (partial(stream, own=True), 65, {}),
    "one-stream": (partial(stream, own=False), 65, {}),
    "preset": (preset, 120, {}),
    "passes": (passes, 40, {}),
}
SECOND = {
    "lengths": (lengths, 60, {}),
    "sync": (sync, 60, {}),
    "prompts": (partial(prompts, graphs=True), 60, {}),
    "prompts-no-graphs": (partial(prompts, graphs=False), 150, {}),
    "decode-plain": (decode_plain, 150, ALONE),
    "decode-v1": (partial(decode, "first start, V1"), 150, V1),
    "decode-folded": (decode_folded, 170, CACHE),
}
PARTS = FIRST | SECOND


def main(name: str) -> None:
    from flatlab import threads

    threads.configure()
    check.DTYPE = "bfloat16"
    check.CONTEXT = size_of(CONTEXT, check.CONTEXT)
    if not check.has_gpu():
        check.REQUESTS, check.TOKENS = 8, 32
    for row in PARTS[name][0]():
        print(ROW + json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
