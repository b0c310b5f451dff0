"""Tiny random models of many families: each one trains, or one sentence says why it does not.

Each model has a process of its own, forked from one that has done the imports: the end of one vLLM
engine breaks the next.
"""

import asyncio
import json
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import pytest

from flatlab.errors import UserError
from flatlab.options import ModelOptions
from helpers import PROJECT

TINY = PROJECT / "configs" / "tiny"
# after which Policy keeps two copies of the base weights
SHARING_ERRORS = (AttributeError, KeyError, RuntimeError, ValueError)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
HEAD = {"head_dim": 32}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GRANITE = {
    "logits_scaling": 8.0,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "q_lora_rank": 64,
}
# name -> class of the transformers config, its fields beside SIZES
FAMILIES = {
    "Qwen 2.5": ("Qwen2Config", {}),
    "Qwen 3": ("Qwen3Config", HEAD),
    "Llama 3": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", HEAD | {"sliding_window": 32}),
    "Gemma 2": ("Gemma2Config", GEMMA),
    "Gemma 3": ("Gemma3TextConfig", GEMMA),
    "Gemma 4": ("Gemma4TextConfig", HEAD),
    "Phi 2": ("PhiConfig", {}),
    "Phi 3 and 4": ("Phi3Config", {}),
    "Granite 3": ("GraniteConfig", GRANITE),
    "Command R": ("CohereConfig", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3": ("Olmo3Config", {}),
    "SmolLM 3": ("SmolLM3Config", {}),
    "GLM 4": ("Glm4Config", HEAD),
    "GPT-2": ("GPT2Config", {}),
    "GPT-NeoX": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "StarCoder 2": ("Starcoder2Config", {}),
    "Qwen 3 MoE": ("Qwen3MoeConfig", HEAD | EXPERTS),
    "Mixtral": ("MixtralConfig", LOCAL_EXPERTS),
    "gpt-oss": ("GptOssConfig", HEAD | LOCAL_EXPERTS),
    "DeepSeek 3": ("DeepseekV3Config", DEEPSEEK),
    "Qwen 3 Next": ("Qwen3NextConfig", HEAD | EXPERTS),
}


ATTENTION_ONLY = {"Qwen 3 MoE", "Mixtral", "gpt-oss"}
TWO_COPIES = {"Gemma 2", "Gemma 3", "Gemma 4", "GPT-2", *ATTENTION_ONLY}
REFUSED = {
    "DeepSeek 3": "Engine and trainer disagree by .* on the probe with no adapter",
    "Qwen 3 Next": "The model .* .vLLM; .* Assertion failed, Chunk",
}


CASES = [
    *product(["float32"], FAMILIES),
    *product(["bfloat16"], ["Qwen 3", "Llama 3", "OLMo 2", "Granite 3", "Gemma 2"]),
]
LIMITS = {"float32": 2e-5, "bfloat16": 0.2}


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
IMPORTS = ("peft", "vllm.model_executor.models.transformers", "vllm.v1.worker.cpu_worker")


@pytest.fixture(scope="module")
def answers(request, tmp_path_factory):
    """(dtype, family) -> a Future of its answer, for the selected tests; two run at a time."""
    selected = [item for item in request.session.items if "answers" in item.fixturenames]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
            found = {}
            for item in selected:
                case = item.callspec.params["dtype"], item.callspec.params["name"]
                found[case] = pool.submit(answer, *case, str(tmp_path_factory.mktemp("model")))
            yield found


@pytest.mark.slow
@pytest.mark.parametrize("dtype, name", CASES)
def test_engine_and_trainer_agree_before_and_after_training_or_one_sentence_says_why(
    answers, dtype, name
):
    """And with the base weights of the engine, where docs/models.md says that these are shared. In
    bf16 with autocast, a rounded copy of the adapter and logits in fp32, as on a GPU.
    """
    answer = answers[dtype, name].result(900)
    if name in REFUSED:
        assert re.match(REFUSED[name], answer["refused"])
        return
    assert answer["largest"] <= LIMITS[dtype]
    assert answer["mean"] <= 0.03
    assert answer["moved"] > 0.01
    assert answer["attention only"] == (name in ATTENTION_ONLY)
    if name not in ATTENTION_ONLY:
        assert answer["without adapter"] in (["lm_head"], ["embed_out"])
    if name in TWO_COPIES:
        assert "not shared" in answer
    else:
        assert answer["shared"] <= LIMITS[dtype]
        assert answer["copies"] == []


PLAIN_NORM = set(FAMILIES) - {"Gemma 2", "Gemma 3", "Gemma 4", "Phi 2", "Command R", "GPT-2"}
PLAIN_NORM -= {"GPT-NeoX", "StarCoder 2", "Qwen 3 Next"}  # LayerNorm, or 1 + w


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in sorted({*FAMILIES} - {"Qwen 3", "Gemma 3"})
]


@pytest.mark.parametrize("name", ["Qwen 3", "Gemma 3", *SLOW])
def test_a_fused_norm_is_that_of_the_family(name):
    """Log-probs and gradients, with weights that are not one."""
    import torch

    from flatlab.model.packing import fuse_norms

    model = untrained(name, vocab_size=64, eos_token_id=1, pad_token_id=0).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(torch.rand_like(p) + 0.5)
    found = []
    for _ in range(2):
        inputs = model.get_input_embeddings()(torch.arange(32)[None]).detach().requires_grad_()
        logp = model(inputs_embeds=inputs, use_cache=False).logits.log_softmax(-1)
        (logp * torch.linspace(-1, 1, 64)).sum().backward()
        found.append((logp.detach(), inputs.grad))
        fuse_norms(model)
    (logp, grad), (fused_logp, fused_grad) = found
    assert (fused_logp - logp).abs().max() < 1e-4
    assert (fused_grad - grad).norm() < 1e-4 * grad.norm()
    assert any("forward" in vars(m) for m in model.modules()) == (name in PLAIN_NORM)


def untrained(name: str, **tokens):
    """A model of the family. tokens: the fields of its config about the vocabulary."""
    import torch
    import transformers

    config_class, fields = FAMILIES[name]
    config = getattr(transformers, config_class)(bos_token_id=None, **tokens, **SIZES | fields)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# ---------------------------------------------------------------------------- in a process


def save(name: str, folder: str) -> None:
    """An untrained model of the family, with the tokenizer of the stand-in."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = untrained(
        name,
        vocab_size=json.loads((TINY / "config.json").read_text())["vocab_size"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


async def train(policy) -> dict:
    """verify(), three updates with syncs, verify() again."""
    optimizer = policy.make_optimizer(1e-2)
    before = await policy.verify()
    prompt = policy.render([{"role": "user", "content": "hello there"}])
    for _ in range(3):
        samples = await asyncio.gather(*(policy.sample(prompt, 24, seed=i) for i in range(4)))
        batch = [(prompt + s.tokens, [0] * len(prompt) + [1] * len(s.tokens)) for s in samples]
        logp, _ = policy.logprobs(batch)
        (-logp.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        policy.sync()
    after = await policy.verify()
    agreements = [*before.values(), *after.values()]
    return {
        "mean": max(a.mean for a in agreements),
        "largest": max(a.largest for a in agreements),
        "moved": (logp - policy.logprobs(batch, base=True)[0]).abs().mean().item(),
        "attention only": policy.adapts_attention_only,
        "without adapter": linear_layers_left(policy.model.get_base_model()),
    }


def linear_layers_left(model) -> list[str]:
    """Names of the linear layers that have no adapter and are not part of one."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    names = [name for name, m in model.named_modules() if isinstance(m, (Linear, Conv1D))]
    return [name for name in names if "lora_" not in name and "base_layer" not in name]


async def share_weights(policy) -> dict:
    """verify() with a trainer whose base weights are those of the engine, or why there is none."""
    from flatlab.model.lora_sync import served_model, shared_base

    try:
        base = shared_base(policy.engine, policy.config, policy.dtype, "cpu")
    except SHARING_ERRORS as error:
        return {"not shared": repr(error)}
    lora = {"r": 16, "lora_alpha": 32, "target_modules": None}
    policy._build_trainer(base, lora)
    served = served_model(policy.engine)
    of_the_engine = {p.untyped_storage().data_ptr() for p in served.parameters()}
    copies = []
    for name, p in base.named_parameters():
        if "lora_" not in name and p.untyped_storage().data_ptr() not in of_the_engine:
            copies.append(name)
    agreements = await policy.verify()
    return {"shared": max(a.largest for a in agreements.values()), "copies": copies}


def keep_weights(method, layer) -> None:
    """As on a GPU: on a CPU vLLM would pack the weights in a way that nothing else can read."""
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def answer(dtype: str, name: str, folder: str) -> dict:
    """The numbers of the whole circle of training, or the sentence that refuses the model."""
    import torch

    from flatlab.model.lora_sync import LoraLinear
    from flatlab.model.path import resolve_model
    from policy import Policy

    torch.set_num_threads(1)
    LoraLinear.process_weights_after_loading = keep_weights
    save(name, folder)
    Policy.dtype = dtype
    try:
        policy = Policy(resolve_model(folder), ModelOptions(context=256), max_batch=8)
        return asyncio.run(train(policy)) | asyncio.run(share_weights(policy))
    except UserError as error:
        return {"refused": str(error)}
