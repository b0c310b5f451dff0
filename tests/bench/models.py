"""A policy on an untrained model, and the section `sync`."""

import tempfile
from pathlib import Path

from bench.measure import median_seconds, ms, this_machine


def random_policy(folder, context=2048, sizes=None, **options):
    """A Policy on an untrained model, whose replies always reach their limit; and its folder."""
    from flatlab.model.path import ModelPath
    from flatlab.options import ModelOptions
    from helpers import make_model
    from policy import Policy

    model = make_model(Path(folder) / "model", **(sizes or {}))
    policy = Policy(ModelPath(model, None, False), ModelOptions(context=context), **options)
    make_endless(policy)
    return policy, model


def make_endless(policy):
    """From now on every reply of the policy reaches its limit."""
    policy.stop_tokens = set()
    add_request = policy.engine.add_request

    def endless(request_id, prompt, params):
        params.ignore_eos = True
        add_request(request_id, prompt, params)

    policy.engine.add_request = endless


# ---- sync

LARGER = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
}


def sync(args):
    """The trained adapter into the engine: in place and through files."""
    rows = []
    for name, sizes in (("stand-in size", {}), ("36 M parameters", LARGER)):
        with tempfile.TemporaryDirectory() as folder:
            rows += sync_rows(name, sizes, folder)
    return f"{this_machine()}, medians", rows


def sync_rows(name, sizes, folder):
    import torch
    from vllm import EngineArgs, LLMEngine
    from vllm.lora.request import LoRARequest

    policy, _ = random_policy(folder, sizes=sizes, lora_rank=16, context=512)
    options = {"enable_lora": True, "max_lora_rank": 16, "enforce_eager": True}
    options["kv_cache_memory_bytes"] = 2**28
    model = policy.path.base
    vllm = LLMEngine.from_engine_args(EngineArgs(model, dtype="float32", **options))
    adapter = f"{folder}/adapter"
    with torch.no_grad():
        for p in policy.parameters():
            p.normal_(std=0.02)

    def through_files():
        policy.save(adapter)
        vllm.remove_lora(1)
        vllm.add_lora(LoRARequest("policy", 1, adapter))

    count = sum(p.numel() for p in policy.parameters()) / 1e6
    in_place = median_seconds(policy.sync, 20)
    note = f"{count:.2f} M LoRA parameters"
    files = median_seconds(through_files, 5)
    return [
        (f"{name}: in place", ms(in_place), note),
        (f"{name}: save and reload", ms(files), f"{files / in_place:.0f} x"),
    ]
