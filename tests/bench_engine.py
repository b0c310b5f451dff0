"""Starts a vLLM engine with an adapter and times it, once for each line of its standard input.

    python tests/bench_engine.py MODEL WAY     bench.py runs this in a process of its own

WAY: "vllm" (vLLM's own LoRA, from adapter files), "eager" or "compiled" (the engine of a Policy).
"""

import itertools
import json
import os
import sys
import tempfile
import time

from bench import RESULT  # and the project is on sys.path

BEGIN = time.perf_counter()

REQUESTS = 16
PROMPT = 40
TOKENS = 128
CONTEXT = 512
RANK = 16


def own_lora(model):
    """An engine with vLLM's own LoRA, its step, and the request that names the adapter's files."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from vllm import EngineArgs, LLMEngine
    from vllm.lora.request import LoRARequest

    from policy import LORA_LAYERS

    torch._dynamo.config.disable = True  # as in Policy: nothing is compiled
    folder = tempfile.mkdtemp()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LORA_LAYERS)
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
    from policy import ModelPath, Policy

    path = ModelPath(model, None, False)
    policy = Policy(path, context=CONTEXT, lora_rank=RANK, compile=compiled, trains=False)
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


def print_result(**result):
    print("\n" + RESULT + json.dumps(result), flush=True)


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
