"""Tests of policy.py with a random Qwen3 and the real engine."""

import asyncio
import contextlib
import copy
import json
import math
import re
import shutil
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import grpo
from bench.peak import peak
from flatlab.errors import UserError
from flatlab.model import memory, packing
from flatlab.model.fields import check_fields
from flatlab.model.packing import (
    Head,
    TokenLogProbs,
    can_pack,
    common_prompt,
    lora_forward,
)
from flatlab.model.path import STAND_IN, resolve_model
from flatlab.train.batch import Meter, TrainSequence
from helpers import PROJECT, TINY_TEXTS, make_model, output_of, python, user_error
from policy import Agreement, Engine, Policy, Trainer, lora_settings
from training import all_close, has_weights, pair, randomise, weights_of

CHAT = [
    {"role": "system", "content": "You are a test."},
    {"role": "user", "content": "List 3 files.\n\n  - a"},
]


def samples(policy, prompts, tokens):
    """A reply to each prompt, with the number of the prompt as its seed."""

    async def go():
        asked = (policy.sample(p, tokens, seed=i) for i, p in enumerate(prompts))
        return await asyncio.gather(*asked)

    return asyncio.run(go())


def gap(policy, prompt, reply):
    """Distance of the log-probs of a reply from the trainer's."""
    with torch.no_grad():
        logprobs = policy.logprobs([pair(prompt, reply.tokens)])[0]
    return (logprobs - torch.tensor(reply.logprobs)).abs().max().item()


def largest_gap(policy, prompts, tokens=24):
    return max(map(partial(gap, policy), prompts, samples(policy, prompts, tokens)))


def test_engine_and_trainer_agree_before_and_after_syncs(policy, monkeypatch):
    monkeypatch.setattr(policy, "temperature", 0.6)
    texts = ("a", "b" * 300, "c\n" * 80)
    prompts = [policy.render([{"role": "user", "content": text}]) for text in texts]
    assert largest_gap(policy, prompts) < 1e-4
    for seed in range(2):
        randomise(policy, seed)
        policy.sync()
        # the same prompts: a prefix cached under old weights would show
        assert largest_gap(policy, prompts) < 1e-4


def test_a_sync_with_a_request_in_flight_leaves_no_stale_prefix(policy):
    """The blocks of a running request cannot be freed, so its prefix must not be found again."""
    prompt = policy.render([{"role": "user", "content": "b" * 300}])

    async def go():
        running = asyncio.ensure_future(policy.sample(prompt, 200, seed=1))
        await policy.sample(prompt, 1, seed=2)  # the prefix is in the cache
        randomise(policy)
        policy.sync()
        assert not running.done()
        after = await policy.sample(prompt, 24, seed=3)
        await running
        return after

    assert gap(policy, prompt, asyncio.run(go())) < 1e-4


def test_requests_that_arrive_together_begin_together(policy, monkeypatch):
    """A step costs much the same for one request as for many, so an idle engine waits a moment."""
    batches = []
    step = policy.step_engine

    def counted():
        batches.append(policy.engine.get_num_unfinished_requests())
        return step()

    async def after(turns):
        for _ in range(turns):  # of the event loop, as an episode makes between two requests
            await asyncio.sleep(0)
        return await policy.sample(policy.render(CHAT), 1)

    async def go():
        now = 0.0  # the clock of the loop, which stands still until all requests are there
        asyncio.get_running_loop().time = lambda: now
        requests = asyncio.gather(*map(after, range(6)))
        while len(policy._futures) < 6 and not batches:
            await asyncio.sleep(0)
        now = 1.0
        await requests

    monkeypatch.setattr(policy, "step_engine", counted)
    asyncio.run(go())
    assert batches == [6]


def test_norms_of_the_engine_round_in_bf16_as_those_of_the_trainer(policy):
    """vLLM's CPU kernel rounds elsewhere, and towards zero where the CPU has no bf16 instructions:
    over many layers that shrinks the residual stream.
    """
    from flatlab.model.lora_sync import served_model  # imports vLLM

    name = "model.layers.0.post_attention_layernorm"
    models = served_model(policy.engine), policy.model.get_base_model()
    engine, trainer = [copy.deepcopy(m.get_submodule(name)).bfloat16() for m in models]
    torch.manual_seed(0)
    weight = torch.rand(len(trainer.weight)) + 0.5
    with torch.no_grad():
        engine.weight.copy_(weight)
        trainer.weight.copy_(weight)
        x, residual = torch.randn(2, 50, len(weight)).bfloat16()
        assert torch.equal(engine(x), trainer(x))
        total = x + residual
        expected = trainer(total).float()
        y, stream = engine(x.clone(), residual.clone())
        assert torch.equal(stream, total)
        # vLLM normalises the sum before it is rounded
        shrink = (y.float() * expected).sum() / (expected * expected).sum() - 1
        assert abs(shrink) < 5e-4


def test_verify_passes_and_leaves_the_adapter_alone(policy):
    randomise(policy)
    before = weights_of(policy)
    agreement = asyncio.run(policy.verify())["random adapter"]
    assert agreement.mean <= agreement.largest < 1e-4
    assert has_weights(policy, before)
    assert largest_gap(policy, [policy.render(CHAT)]) < 1e-4


def swapped(views: list) -> list:
    """A and B of two layers of equal shape change places."""
    first, second = slice(0, 2), slice(14, 16)  # the first q of two of the stand-in's blocks
    views = list(views)
    views[first], views[second] = views[second], views[first]
    return views


BROKEN = {
    "a layer less": lambda copy: {name: getattr(copy, name)[:-2] for name in LAYERS},
    "layers swapped": lambda copy: {"engine": swapped(copy.engine)},
    "no scaling": lambda copy: {"scalings": [1.0] * len(copy.scalings)},
    "nothing": lambda copy: {"push": lambda: None},
}
LAYERS = ("engine", "trainer", "scalings")


@pytest.mark.parametrize("what", BROKEN)
def test_verify_refuses_a_broken_sync(policy, what):
    with pytest.MonkeyPatch.context() as patch, user_error("disagree by .* on the probe with"):
        for name, value in BROKEN[what](policy.adapter_copy).items():
            patch.setattr(policy.adapter_copy, name, value)
        asyncio.run(policy.verify())


def test_log_probs_that_are_no_numbers_are_refused(policy):
    with user_error("Engine and trainer disagree"):
        policy.check(Agreement(math.nan, math.nan, 1.0), "probe", 1.0)


BF16 = """
import asyncio
from flatlab.model.path import resolve_model
from policy import Policy
from test_policy import BROKEN, test_verify_refuses_a_broken_sync

Policy.dtype = "bfloat16"
policy = Policy(resolve_model("tiny"))
rounding = asyncio.run(policy.verify())["no adapter"].mean
assert 1e-3 < rounding < policy.diff_limit / 2
assert policy.diff_limit >= 0.05
for what in list(BROKEN)[1:]:  # the last layer moves less than rounding
    test_verify_refuses_a_broken_sync(policy, what)
    policy.sync()  # each begins with an engine that is right
asyncio.run(policy.verify())
"""


@pytest.mark.slow
def test_verify_refuses_a_broken_sync_in_bf16(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROJECT / "tests"))
    output_of("-c", BF16)


def test_a_sync_on_a_gpu_waits_before_and_after_the_copy(monkeypatch):
    """Engine and trainer have a stream each."""
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    engine = SimpleNamespace(reset_prefix_cache=lambda: True)
    copy = SimpleNamespace(push=lambda: calls.append("copy"))
    for device in ("cpu", "cuda"):
        trained = SimpleNamespace(device=device, adapter_copy=copy, engine=engine, _syncs=0)
        Policy.sync(trained, 3)
    assert calls == ["copy", "wait", "copy", "wait"]


def test_the_engine_works_on_streams_of_high_priority_that_are_set_before_it(monkeypatch):
    """Its graphs, too: vLLM captures on a new stream of priority 0."""
    from vllm import LLMEngine
    from vllm.distributed import parallel_state

    calls = []
    group = SimpleNamespace(graph_capture=contextlib.nullcontext)
    for name in ("get_tp_group", "get_pp_group", "get_dp_group"):
        monkeypatch.setattr(parallel_state, name, lambda: group)
    context = parallel_state.GraphCaptureContext
    monkeypatch.setattr(parallel_state, "GraphCaptureContext", context)  # restored at the end
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: priority)
    monkeypatch.setattr(torch.cuda, "set_stream", calls.append)
    monkeypatch.setattr(LLMEngine, "from_engine_args", lambda args: calls.append("engine"))
    sizes = {"path": resolve_model("tiny"), "dtype": torch.bfloat16, "context": 2048}

    def captures_on():
        with parallel_state.graph_capture("cuda") as captured:
            return captured.stream

    for device, own_stream, expected in (
        ("cpu", True, ["engine"]),
        ("cuda", False, ["engine"]),
        ("cuda", True, [-1, "engine"]),
        ("cuda", True, [-1, "engine"]),  # a second engine of this process
    ):
        engine = SimpleNamespace(device=device, own_stream=own_stream, **sizes)
        Engine.open_vllm(engine, 16, 0, 8, 2**20, {})
        assert calls == expected
        assert captures_on() == (-1 if -1 in expected else 0)
        calls.clear()


def test_a_full_card_is_not_taken_for_weights_that_cannot_be_shared(policy, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("flatlab.model.lora_sync.shared_base", full)
    with pytest.raises(torch.OutOfMemoryError):
        policy._build_on_shared_base({})
    assert "cannot be shared" not in capsys.readouterr().err


ADAPTER_ONLY = """
from flatlab.model.path import resolve_model
from policy import Policy

policy = Policy(resolve_model("tiny"), trains=False)
kinds = {"lora_" in name: p.device.type for name, p in policy.model.named_parameters()}
assert kinds == {True: "cpu", False: "meta"}, kinds
policy.sync()
"""


@pytest.mark.slow
def test_search_and_evaluation_hold_no_second_model():
    output_of("-c", ADAPTER_ONLY)


def test_verify_refuses_a_stale_prefix_cache(policy, monkeypatch):
    """Without the salt and the reset, the engine would continue from keys of the old weights."""
    real = policy.engine.add_request

    def without_salt(name, prompt, *rest, **options):
        tokens = {"prompt_token_ids": prompt["prompt_token_ids"]}
        return real(name, tokens, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(policy.engine, "add_request", without_salt)
        patch.setattr(policy.engine, "reset_prefix_cache", lambda: True)
        with user_error("disagree by .* on the probe with the random adapter"):
            asyncio.run(policy.verify())
    policy.engine.reset_prefix_cache()


def test_the_base_is_never_touched(policy):
    base = [p for p in policy.model.parameters() if not p.requires_grad]
    before = [p.clone() for p in base]
    prompt = policy.render(CHAT)
    fresh = samples(policy, [prompt], 16)
    for seed in range(5):
        randomise(policy, seed)
        policy.sync()
    assert all(map(torch.equal, before, base))
    policy.reset(0)  # B = 0
    again = samples(policy, [prompt], 16)  # of the engine's base model alone
    assert [s.logprobs for s in again] == [s.logprobs for s in fresh]


@pytest.mark.slow
def test_memory_does_not_grow_with_tokens_times_vocabulary(tmp_path):
    """From 2,048 to 5,120 tokens, each tensor of all logits would grow by 375 MiB.

    The vocabulary has 32,768 tokens. The activations of this model grow by about 300 MiB with any
    vocabulary.
    """
    short = peak(tmp_path, 2048, 32768, "chunked")
    long = peak(tmp_path, 5120, 32768, "chunked")
    assert long - short < 450, (short, long)


@pytest.mark.slow
def test_a_packed_row_needs_less_memory_than_padded_ones(tmp_path):
    packed = peak(tmp_path, 4096, 2048, "packed")
    padded = peak(tmp_path, 4096, 2048, "padded")
    assert packed < 0.9 * padded, (packed, padded)


def of_logits(logits, targets):
    """Log-probs and entropies, by autograd."""
    full = logits.log_softmax(-1)
    logp = full.gather(-1, targets[:, None])[:, 0]
    return logp, -(full.exp() * full).sum(-1)


def loss_and_grads(logprobs, policy, batch):
    policy.model.zero_grad()
    logp, entropy = logprobs(batch)
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    grads = [p.grad.clone() for p in policy.parameters()]
    policy.model.zero_grad()
    return logp.detach(), entropy.detach(), grads


BATCH = [
    (list(range(5, 11)), [0, 0, 1, 1, 0, 1]),
    ([11, 12, 13], [0, 1, 1]),
    pair([3, 4] * 10, [3, 4] * 10),
]
PROMPT = list(range(5, 45))
COMMON = [
    ([*PROMPT, *range(7, 12)], [0] * 40 + [1, 1, 0, 1, 1]),
    pair(PROMPT, [12]),
    pair([*PROMPT, 7], [20, 21]),
    # longer than the prompt: another way through the attention
    pair([*PROMPT, *range(9, 14)], range(14, 59)),
]


def varlen_by_hand(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """Stands in for varlen_attn of torch 2.11, which needs a GPU: a loop over the segments."""
    assert window_size == (-1, 0)
    assert (max_q, max_k) == (max(cu_seq_q.diff()), max(cu_seq_k.diff()))
    outputs = []
    for a, b, c, d in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        part = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        output = torch.nn.functional.scaled_dot_product_attention(
            *part, attn_mask=mask, scale=scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def later_varlen_by_hand(*args, enable_gqa=False, **options):
    """That of torch 2.13, which has to be told that heads share keys."""
    assert enable_gqa
    return varlen_by_hand(*args, **options)


VARLEN = {"varlen": later_varlen_by_hand, "varlen, torch 2.11": varlen_by_hand}


@pytest.mark.parametrize("batch", [BATCH, COMMON])
@pytest.mark.parametrize("way", ["packed", "padded", *VARLEN])
def test_logprobs_are_those_of_a_forward_pass_per_sequence(policy, monkeypatch, batch, way):
    """Entropies and gradients, too; a common prompt is computed once."""

    def by_hand(batch):
        parts = []
        for tokens, mask in batch:
            trained = torch.tensor(mask[1:], dtype=torch.bool)
            ids = torch.tensor(tokens)
            logits = policy.model(ids[None]).logits[0, :-1]
            parts.append(of_logits(logits[trained], ids[1:][trained]))
        return map(torch.cat, zip(*parts))

    randomise(policy)
    monkeypatch.setattr(policy, "packs", way != "padded")
    monkeypatch.setattr(policy, "uses_varlen", way in VARLEN)
    monkeypatch.setattr(packing.varlen, "varlen_attn", VARLEN.get(way))
    assert common_prompt(COMMON) == 39
    # four positions at a time
    monkeypatch.setattr(memory, "MOST_LOGITS", 4 * policy.model.config.vocab_size)
    logp, entropy, grads = loss_and_grads(policy.logprobs, policy, batch)
    expected, spread, wanted = loss_and_grads(by_hand, policy, batch)
    assert torch.allclose(logp, expected, atol=1e-5)
    assert torch.allclose(entropy, spread, atol=1e-5)
    for a, b in zip(wanted, grads):
        assert (a - b).norm() <= 1e-5 * a.norm() + 1e-6


def test_a_packed_row_holds_the_common_prompt_once(monkeypatch):
    rows = []

    def trunk(input_ids, layout=None, **_):
        rows.append((tuple(input_ids.shape), layout))
        return SimpleNamespace(last_hidden_state=torch.zeros(*input_ids.shape, 2))

    monkeypatch.setattr(packing.varlen, "varlen_attn", varlen_by_hand)
    batch = [([1, 2, 3, 4, n, n], [0] * 4 + [1, 1]) for n in (7, 8)]
    for way in ((True, False), (True, True), (False, False)):
        packing.hidden_states(trunk, batch, "cpu", *way)
    (packed, plain), (_, called), (padded, _) = rows
    assert (packed, padded) == ((1, 3 + 2 * 3), (2, 6))
    assert (plain.lengths, plain.varlen) == ([3, 3, 3], None)
    assert called.varlen


@pytest.mark.parametrize("kind", [partial(Linear, bias=False), Linear, lambda i, o: Conv1D(o, i)])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
def test_a_layer_with_an_adapter_is_that_of_peft(kind, dtype, error):
    """Output and gradients, with the adapter on and off."""
    torch.manual_seed(0)
    base = kind(32, 48).to(dtype)
    settings = LoraConfig(r=4, lora_alpha=12, target_modules=["0"], init_lora_weights=False)
    settings.fan_in_fan_out = isinstance(base, Conv1D)
    layer = get_peft_model(torch.nn.Sequential(base), settings).base_model.model[0]
    x = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)
    slope = torch.randn(2, 5, 48, dtype=dtype)
    leaves = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = layer(x)
    output = lora_forward(layer, x)
    pairs = [(output, expected)]
    pairs += zip(*(torch.autograd.grad(y, leaves, slope) for y in (output, expected)))
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= error * theirs.norm()
    assert (output - base(x)).norm() > 0.1 * output.norm()
    layer.enable_adapters(False)
    assert torch.equal(lora_forward(layer, x), base(x))


@pytest.mark.parametrize(
    "name, divisor, cap",
    [
        ("logits_scaling", 5.6, None),
        ("logit_scale", 0.7 / 8, None),
        ("final_logit_softcapping", 0.7, 8 / 0.7),
    ],
)
def test_the_head_of_a_family(name, divisor, cap):
    config = SimpleNamespace(**{name: 8.0})
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: torch.nn.Linear(2, 3))
    head = packing.head_of(model, temperature=0.7)
    assert (head.divisor, head.cap) == (pytest.approx(divisor), cap)


@pytest.mark.parametrize(
    "dtype, atol, error", [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-4, 0.01)]
)
def test_log_probs_of_capped_logits_and_their_gradients(dtype, atol, error):
    """A head with bias, divisor and cap (Phi 2, Granite, Gemma 2) against plain autograd in fp32.

    Logits of a bf16 head are fp32, too, and the gradient is rounded once, at its end.
    """
    torch.manual_seed(0)
    weight, bias = torch.randn(300, 64).to(dtype), torch.randn(300).to(dtype)
    head = Head(weight, bias, divisor=1.7, cap=2.5)
    targets = torch.randint(0, 300, (12,))

    def by_hand(hidden):
        logits = (hidden @ weight.float().T + bias.float()) / head.divisor
        return of_logits(head.cap * torch.tanh(logits / head.cap), targets)

    def ours(hidden):
        return TokenLogProbs.apply(hidden, targets, head, 5)

    start = (0.2 * torch.randn(12, 64)).to(dtype)
    results = []
    for function, precision in ((ours, dtype), (by_hand, torch.float32)):
        hidden = start.to(precision, copy=True).requires_grad_()
        logp, entropy = function(hidden)
        (logp * torch.arange(12)).sum().backward()
        results.append([logp.detach(), entropy.detach(), hidden.grad])
    (*values, gradient), (*expected, exact) = results
    assert all_close(values, expected, atol)
    assert (gradient - exact).norm() < error * exact.norm()


@pytest.mark.parametrize(
    "family, options, is_one_call",
    [
        ("gpt2", {}, True),
        ("qwen3", {"head_dim": 20}, False),
        ("deepseek_v3", {}, False),  # values have smaller heads than keys
    ],
)
def test_attention_is_one_call_where_its_kernel_takes_the_heads(family, options, is_one_call):
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **options)
    model = SimpleNamespace(config=config, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert packing.has_varlen(model) == is_one_call


@pytest.mark.parametrize("window", [None, 4])
def test_a_sliding_window_is_not_packed(window):
    """Packed attention would look past the window."""
    from transformers import AutoConfig, AutoModelForCausalLM

    names = "hidden_size intermediate_size num_hidden_layers vocab_size num_attention_heads"
    sizes = dict.fromkeys(names.split(), 8)
    config = AutoConfig.for_model("mistral", sliding_window=window, num_key_value_heads=2, **sizes)
    assert can_pack(AutoModelForCausalLM.from_config(config)) == (window is None)


@pytest.fixture
def layers(policy, monkeypatch):
    """The layers of a trainer that recomputes none of them unless it is told to."""
    monkeypatch.setattr(policy, "room", 0.0)  # else each pass chooses its layers
    randomise(policy)
    yield policy.model.get_base_model().base_model.layers
    policy.recompute_layers(0)


def test_recomputed_layers_change_no_number(policy, layers):
    logp, _, grads = loss_and_grads(policy.logprobs, policy, BATCH)
    policy.recompute_layers(1)
    again, _, again_grads = loss_and_grads(policy.logprobs, policy, BATCH)
    assert torch.equal(logp, again)
    assert all_close(grads, again_grads, 1e-6)


class Products(TorchDispatchMode):
    """Counts matrix products with frozen weights, those of one decoder layer."""

    def __init__(self, layer):
        weights = [m.base_layer.weight for m in layer.modules() if hasattr(m, "base_layer")]
        self.storages = {w.untyped_storage()._cdata for w in weights}
        self.count = 0
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            storages = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
            self.count += bool(storages & self.storages)
        return function(*args, **kwargs or {})


def test_a_recomputed_layer_repeats_no_product_that_nobody_reads(policy, layers):
    """7 products forward, 6 once more, 7 backward."""
    policy.recompute_layers(2)
    for number, count in ((1, 20), (2, 14)):
        with Products(layers[number]) as products:
            loss_and_grads(policy.logprobs, policy, BATCH)
        assert products.count == count


class NoWaiting(TorchDispatchMode):
    """Refuses the calls that would wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), name
        return function(*args, **kwargs or {})


def test_micro_batches_are_learned_without_waiting_for_the_gpu(policy, monkeypatch):
    """.item(), .tolist() and nonzero() come before the first and after the last one."""

    def sequence(tokens, mask):
        numbers = [0.1] * sum(mask)
        return TrainSequence(tokens, mask, numbers, numbers, [0] * len(numbers), numbers)

    meter = Meter()
    for batch in (COMMON, BATCH):
        part = [sequence(*one) for one in batch]
        with NoWaiting():
            grpo.micro_loss(policy, part, grpo.Config(), meter, 0, 0.1).backward()
    policy.model.zero_grad()
    assert meter.numbers()["compared_tokens"] == sum(sum(mask) for _, mask in COMMON + BATCH)


@pytest.mark.parametrize("family", ["opt", "falcon"])
def test_no_layer_drops_out_and_an_output_may_be_changed_in_place(family):
    """Also in recomputed layers. Falcon cannot be packed, though its config does not say so."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"ffn_dim": 64, "word_embed_proj_dim": 32, "hidden_dropout": 0.5, "dropout": 0.5}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    alone = []
    for tokens, mask in COMMON:
        with torch.no_grad():
            logp = base.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)
        alone += [logp[i - 1, tokens[i]] for i, trained in enumerate(mask) if trained]
    trainer = Trainer(base, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, 1.0)
    assert trainer.packs == (family == "opt")
    for count in (0, 1, 2):
        trainer.recompute_layers(count)
        logp, _ = trainer.logprobs(COMMON)
        logp.sum().backward()
        assert all_close([logp], [torch.stack(alone)], 1e-5)


def test_requests_enter_a_running_batch_and_can_be_cancelled(policy, monkeypatch):
    monkeypatch.setattr(policy, "temperature", 0.0)
    prompt = policy.render(CHAT)

    async def go():
        first = asyncio.ensure_future(policy.sample(prompt, 200))
        doomed = asyncio.ensure_future(policy.sample(prompt, 200))
        await policy.sample(prompt, 2)  # joins, finishes while they go on
        assert not first.done()
        doomed.cancel()
        await asyncio.gather(doomed, return_exceptions=True)
        assert policy.engine.get_num_unfinished_requests() == 1
        await first

    asyncio.run(go())
    assert not policy.engine.has_unfinished_requests()


def test_a_small_model_decodes_on_one_thread(policy, monkeypatch):
    threads = torch.get_num_threads()
    step = policy.engine.step
    seen = []

    def recorded():
        seen.append(torch.get_num_threads())
        return step()

    monkeypatch.setattr(policy.engine, "step", recorded)
    asyncio.run(policy.sample(policy.render(CHAT), 4, seed=1))
    assert seen == [threads, 1, 1, 1]
    assert torch.get_num_threads() == threads


def test_a_request_that_cannot_fit_is_refused(policy):
    with pytest.raises(ValueError, match="context 2048"):
        asyncio.run(policy.sample([1] * 2000, 100))
    assert not policy.engine.has_unfinished_requests()


def test_a_broken_engine_reaches_every_waiting_episode(policy, monkeypatch):
    prompt = policy.render(CHAT)

    def broken():
        raise RuntimeError("engine on fire")

    async def go():
        waiting = [policy.sample(prompt, 8) for _ in range(3)]
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)

    monkeypatch.setattr(policy.engine, "step", broken)
    assert [str(error) for error in asyncio.run(go())] == ["engine on fire"] * 3
    monkeypatch.undo()
    samples(policy, [prompt], 4)  # what was left in the queue is worked off, nothing hangs


def test_rank_alpha_and_layers_are_those_of_the_adapter(policy, tmp_path):
    assert lora_settings(policy.path, 4) == {"r": 4, "lora_alpha": 8, "target_modules": None}
    policy.save(tmp_path)
    change_json(tmp_path / "adapter_config.json", target_modules=["q_proj"])
    path = resolve_model(str(tmp_path))
    own = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    assert lora_settings(path) == lora_settings(path, rank=8) == own
    with user_error("--lora-rank 4 differs from that of the adapter .*, 8"):
        lora_settings(path, rank=4)


COMPILED = """
import asyncio, sys
from flatlab.options import ModelOptions
from flatlab.model.path import resolve_model
from policy import Policy
policy = Policy(resolve_model(sys.argv[1]), ModelOptions(context=512, compile=True), lora_rank=8)
agreement = asyncio.run(policy.verify())["random adapter"]
assert agreement.largest < 1e-4, agreement
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_a_compiled_engine_agrees_with_the_trainer(tmp_path):
    output_of("-c", COMPILED, make_model(tmp_path / "model", num_hidden_layers=2))


def test_a_compiled_engine_is_of_one_rank(policy, monkeypatch):
    """vLLM keeps compiled models on the disk, and the rank is a shape in them."""
    config = policy.engine.vllm_config
    rank = policy.adapter_layers[0].r["default"]
    assert config.additional_config == {"lora_rank": rank}
    of_this_rank = config.compute_hash()
    monkeypatch.setattr(config, "additional_config", {"lora_rank": rank + 1})
    assert config.compute_hash() != of_this_rank


def test_more_new_prompts_than_fit_into_one_step(policy):
    """vLLM would split a prompt over two steps, and fail on a CPU if the request has a seed."""
    prompts = [[number] + [7] * 600 for number in range(5, 25)]
    assert largest_gap(policy, prompts, tokens=4) < 1e-4


def change_json(path, **fields):
    """Overwrites fields of a JSON file; those that are None are removed."""
    values = json.loads(path.read_text()) | fields
    kept = {name: value for name, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))


def refused(folder):
    """Sentence about the folder of a model or an adapter before the engine starts, one line."""
    with pytest.raises(UserError) as error:
        Policy(resolve_model(str(folder)))
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_a_model_that_cannot_be_used_is_one_sentence(random_model, tmp_path):
    said = (
        "The model no/such-model (huggingface_hub; see docs/models.md) cannot be used: LocalEntry"
    )
    assert said in refused("no/such-model")
    assert "Local models: did you mean tiny? the names are tiny" in refused("tinny")
    for name in "logs/no ./no ../no ~no/m no/such/model /no".split():
        assert refused(name).startswith(f"There is no file or folder {name}; ")
    (tmp_path / "best").mkdir()
    (tmp_path / "best/adapter_config.json").touch()
    assert refused(str(tmp_path)) == f"{tmp_path} is a run: its adapter is {tmp_path}/best."
    folder = tmp_path / "model"
    shutil.copytree(random_model, folder)
    assert resolve_model(str(folder)).positions == 4096
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "file not fully covered" in refused(folder)
    weights.write_bytes(whole)
    for name, text in (("config.json", '{"model_type": "qwen3"}'), ("generation_config.json", "{")):
        (folder / name).write_text(text)
        assert str(folder) in refused(folder)
        shutil.copy(f"{random_model}/{name}", folder)
    change_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    assert "are quantised (mxfp4)" in refused(folder)
    change_json(folder / "config.json", quantization_config=None)
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template" in refused(folder)
    (folder / "config.json").write_text("{no json")
    assert "config.json cannot be used: JSONDecodeError" in refused(folder)


WRONG_FIELDS = {
    "max_position_embeddings n_positions": ([384], 0, "4k", True),
    "eos_token_id": ("2", -1, [2, "x"], True, 2.5),
    "stand_in": (1, "yes"),
    "quantization_config text_config": ("mxfp4", []),
}


def test_wrong_fields_of_a_models_config_are_named():
    whole = json.loads((STAND_IN / "config.json").read_text())
    for names, values in WRONG_FIELDS.items():
        for name, value in product(names.split(), values):
            with user_error(f"^c: .*{name}[.\\w-]*: Input should be"):
                check_fields(whole | {name: value}, "c")
    with user_error("^c: .*n_positions"):
        check_fields(whole | {"text_config": {"n_positions": "x"}}, "c")
    for name, value in product(("rms_norm_eps", "rope_theta"), (math.nan, math.inf, 0, -1, "x")):
        for change in ({name: value}, {"rope_parameters": {"full_attention": {name: value}}}):
            with user_error(f"^c: {name}: Input should be .*, not '?{value}'?.$"):
                check_fields(whole | change, "c")
            with user_error(f"^c: {name}: Input should be"):
                check_fields(whole | {"text_config": change}, "c")
    check_fields({"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 2}, "c")
    check_fields({"model_type": "gemma3", "text_config": {"hidden_size": 8}}, "c")


@pytest.mark.slow
def test_a_model_that_the_first_step_of_the_engine_refuses_is_one_sentence(tmp_path):
    """In a process of its own: an engine that ends takes the process groups of all others."""
    model = make_model(tmp_path, head_dim=16)
    script = PROJECT / "search.py"
    flags = "--task titanic --backend local --nodes 1 --context 2048 --max-reply-tokens 32".split()
    done = python(script, *flags, "--model", model, "--prompts", PROJECT / TINY_TEXTS, cwd=tmp_path)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert re.match("The model .* .vLLM; .* RuntimeError: Unsupported .*head_dim=16", last)


def test_a_model_without_one_of_its_tensors_is_refused(tmp_path):
    """vLLM does not notice: the rows of k and v count as the whole of qkv_proj."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(STAND_IN, folder)
    lost = "model.layers.1.self_attn.q_proj.weight"
    model = AutoModelForCausalLM.from_pretrained(STAND_IN)
    weights = {name: values for name, values in model.state_dict().items() if name != lost}
    model.save_pretrained(folder, state_dict=weights)
    assert refused(folder).endswith(f"lack {lost}: fetch the model again.")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, state_dict=weights, max_shard_size="1MB")
    assert (folder / "model.safetensors.index.json").is_file()
    assert refused(folder).endswith(f"lack {lost}: fetch the model again.")
    min(folder.glob("model-*.safetensors")).unlink()
    assert "model-00001-of" in refused(folder)


FOREIGN = {
    "base_model_name_or_path": (None, 5, "", "/nowhere/else", "no-such/model"),
    "r": (None, "8.5", 0),
    "lora_alpha": (None, "x", math.nan),
    "target_modules": (None, [], [1], {"q_proj": 1}),
    "peft_type": (None, "LOHA"),
    "init_lora_weights": ("pissa", "olora", "loftq"),
    "bias": ("all", "lora_only"),
    # those of which only an empty value is plain
    """alora_invocation_tokens layers_to_transform exclude_modules modules_to_save use_rslora
    trainable_token_indices layer_replication alpha_pattern lora_bias a_field_of_tomorrow""": (1,),
}


def test_an_adapter_that_cannot_be_used_is_one_sentence(policy, tmp_path):
    file = tmp_path / "adapter_config.json"
    policy.save(tmp_path)
    kept = file.read_text()
    for names, values in FOREIGN.items():
        for name, value in product(names.split(), values):
            file.write_text(kept)
            change_json(file, **{name: value})
            said = refused(tmp_path)
            assert str(tmp_path) in said and name in said
    for name in ("lm_head", "embed_tokens"):
        file.write_text(kept)
        change_json(file, target_modules=["q_proj", name])
        assert f"the engine has no adapter for {name}" in refused(tmp_path)
    file.write_text("{no json")
    assert "adapter_config.json cannot be used: JSONDecodeError" in refused(tmp_path)
    file.unlink()
    file.symlink_to("gone")
    assert "adapter_config.json cannot be used: FileNotFoundError" in refused(tmp_path)
    file.unlink()
    file.write_text(kept)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors cannot be used: " in refused(tmp_path)


def test_an_adapter_of_peft_with_all_of_its_fields_is_plain(random_model, tmp_path):
    from transformers import AutoModelForCausalLM

    for more in ({}, {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "revision": "main"}):
        config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **more)
        config.target_modules = {"q_proj", "v_proj"}
        base = AutoModelForCausalLM.from_pretrained(random_model)
        get_peft_model(base, config).save_pretrained(tmp_path)
        lora = resolve_model(str(tmp_path)).lora
        assert lora["r"] == 4 and sorted(lora["target_modules"]) == ["q_proj", "v_proj"]


def test_an_adapter_with_other_tensors_is_refused_and_that_in_use_stays(policy, tmp_path):
    from safetensors.torch import load_file, save_file

    randomise(policy)
    before = weights_of(policy)
    policy.save(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    name, second, *_ = sorted(weights)
    only = {name: weights[name]}
    more = weights | {"base_model.model.layers.9.z.lora_A.weight": torch.zeros(1)}
    for tensors in (only, more, weights | {name: torch.zeros(2, 3)}):
        save_file(tensors, file)
        with user_error("has other layers or another rank"):
            policy.load_adapter(tmp_path)
    for value in (math.nan, -math.inf):
        wrong = weights[second].clone()
        wrong[-1, -1] = value
        save_file(weights | {second: wrong}, file)
        assert (
            refused(tmp_path)
            == f"{file} cannot be used: ValueError: the tensor {second} holds NaN or infinity."
        )
        with user_error(f"{file} cannot be used: .* holds NaN or infinity"):
            policy.load_adapter(tmp_path)
    # also for a target_modules that is a pattern
    for layer in ("lm_head.lora_A.weight", "model.odd_proj.lora_B.weight", "model.layers.0.bias"):
        other = f"base_model.model.{layer}"
        save_file(weights | {other: torch.zeros(1)}, file)
        assert f"the tensor {other} is no A or B" in refused(tmp_path)
    assert has_weights(policy, before)
