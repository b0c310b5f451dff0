"""The section `engine`: tokens per second of a vLLM engine with an adapter, three ways in turn.

    python -m bench.engine MODEL WAY     one contestant: a run for each line of its standard input

WAY: "vllm" (vLLM's own LoRA, from adapter files), "eager" or "compiled" (the engine of a Policy).
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import compared, compete, print_result, spread, this_machine

BEGIN = time.perf_counter()

REQUESTS = 16
PROMPT = 40
TOKENS = 128
CONTEXT = 512
RANK = 16

ENGINES = {
    "vllm": "vLLM's own LoRA, from adapter files, eager",
    "eager": "ours, eager",
    "compiled": "ours, compiled",
}


# ---- the section


def engine(args):
    """Tokens per second of the engine with an adapter: vLLM's own LoRA, ours, ours compiled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        from flatlab.model.path import STAND_IN
        from helpers import make_model

        models = {"stand-in": STAND_IN, "random, 0.8 M": make_model(Path(folder) / "model")}
        for label, model in models.items():
            ways = args.only.split(",") if args.only else ENGINES
            commands = {way: ("engine", model, way) for way in ways}
            done, failed = compete(commands, ["run"] * (args.steps + 1))
            rows += engine_rows(label, done, failed)
    sizes = "16 requests of 128 tokens"
    return f"{this_machine()}; {sizes}; median (range) of {args.steps} rounds in turn", rows


def engine_rows(label, done, failed):
    rows = [(f"{label}: {ENGINES[way]}", "fails", why) for way, why in failed.items()]
    for way, (start, results) in done.items():
        rates = [r["tokens"] / r["seconds"] for r in results]
        cpu = statistics.median(r["cpu_seconds"] for r in results)
        note = f"started in {start['start']:.0f} s; {cpu:.2f} CPU seconds a run"
        if way != "vllm" and "vllm" in done:
            ratios, cpu_ratio = compared(done["vllm"][1], results)
            note += f"; {spread(ratios)} x, {cpu_ratio:.2f} x in CPU seconds"
        rows.append((f"{label}: {ENGINES[way]}", f"{spread(rates, 0)} tokens/s", note))
    return rows


# ---- a contestant


def own_lora(model):
    """An engine with vLLM's own LoRA, its step, and the request that names the adapter's files."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from vllm import EngineArgs, LLMEngine
    from vllm.lora.request import LoRARequest

    torch._dynamo.config.disable = True  # as in Policy: nothing is compiled
    folder = tempfile.mkdtemp()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    get_peft_model(base, config, adapter_name="default").save_pretrained(folder)
    arguments = EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=64,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        enforce_eager=True,
        enable_lora=True,
        max_loras=1,
        max_lora_rank=RANK,
    )
    engine = LLMEngine.from_engine_args(arguments)
    return engine, engine.step, LoRARequest("adapter", 1, folder)


def our_engine(model, compiled):
    from flatlab.model.path import ModelPath
    from flatlab.options import ModelOptions
    from policy import Policy

    path = ModelPath(model, None, False)
    options = ModelOptions(context=CONTEXT, compile=compiled)
    policy = Policy(path, options, lora_rank=RANK, trains=False)
    return policy.engine, policy.step_engine, None


def run(engine, step, adapter, number):
    """Samples all requests; returns the number of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for i in range(REQUESTS):
        params = SamplingParams(
            max_tokens=TOKENS,
            temperature=1.0,
            seed=i,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": [5 + i] * PROMPT, "cache_salt": str(number)}
        engine.add_request(f"{number}-{i}", prompt, params, lora_request=adapter)
    tokens = 0
    while engine.has_unfinished_requests():
        for output in step():
            tokens += len(output.outputs[0].token_ids)
    return tokens


def main(model, way):
    from flatlab import threads

    threads.configure()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if way == "vllm":
        engine, step, adapter = own_lora(model)
    else:
        engine, step, adapter = our_engine(model, way == "compiled")
    print_result(start=time.perf_counter() - BEGIN)
    for number in itertools.count():
        if not sys.stdin.readline():
            return
        seconds = time.perf_counter()
        cpu_seconds = time.process_time()
        tokens = run(engine, step, adapter, number)
        print_result(
            seconds=time.perf_counter() - seconds,
            cpu_seconds=time.process_time() - cpu_seconds,
            tokens=tokens,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
