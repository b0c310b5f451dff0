"""The trainer's forward pass without padding: one row holds the common prompt once, then the rest
of every sequence.

Linear layers see the row as it is. Attention runs sequence by sequence, so each one sees the
prompt and itself; positions are those it has on its own. The result equals that of a padded batch
up to rounding.

Letters: B sequences, P tokens of the common prompt, N trained tokens, T tokens of the row, H heads,
K tokens of a head, D hidden size, V vocabulary.
"""

import inspect
import os
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.pytorch_utils import Conv1D

from flatlab.model.memory import head_sizes


def can_pack(model) -> bool:
    """Returns whether attention is the only layer that mixes positions, and every position sees all
    before it.
    """
    config = model.config.get_text_config()
    has_window = getattr(config, "sliding_window", None)
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return not has_window and not others and config._attn_implementation == "sdpa"


def has_varlen(model) -> bool:
    """Returns whether one call of varlen_attn can attend to a packed row: a GPU, 16-bit numbers,
    and heads of at most 256 numbers, a multiple of 8, in keys as in values.
    """
    config = model.config.get_text_config()
    *_, size = head_sizes(config)
    is_even = getattr(config, "v_head_dim", size) == size  # not in DeepSeek
    fits = model.dtype.itemsize == 2 and size <= 256 and size % 8 == 0
    return is_even and model.device.type == "cuda" and fits


class Layout(NamedTuple):
    """The parts of a packed row: the common prompt and the rest of each sequence."""

    lengths: list[int]  # of the prompt and of each rest
    # One for each length, of a row for each token of the rest and a column for each of prompt and
    # rest; None: SDPA's own causal attention, which computes the prompt's queries once more.
    masks: list
    varlen: Callable | None  # varlen_attn without query, key, value and scale


def attend(module, query, key, value, attention_mask, layout: Layout | None = None, **options):
    """Attention over a packed row. query: (1, H, T, K); key, value: (1, G, T, K), G heads for H.

    Returns (1, T, H, K), None. Without a layout it is plain attention.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if layout.varlen:
        return attend_varlen(query, key, value, layout, options.get("scaling"))
    split = [x.split(layout.lengths, dim=2) for x in (query, key, value)]
    outputs = []
    for i, (length, mask) in enumerate(zip(layout.lengths, layout.masks)):
        if length == 0:
            continue
        q, k, v = [parts[i] for parts in split]
        if i > 0:
            k, v = [torch.cat([parts[0], parts[i]], dim=2) for parts in split[1:]]
            if mask is None:
                q = torch.cat([split[0][0], q], dim=2)
        output, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
        outputs.append(output[:, -length:])
    return torch.cat(outputs, dim=1), None


def attend_varlen(query, key, value, layout: Layout, scale: float | None):
    """The same as attend() in one call: each sequence gets a copy of the prompt's keys and values.

    The causal mask is aligned at the bottom right: query i of n sees the first m - n + i + 1 of m
    keys. One shape serves every batch, and the masked half is never computed.
    """
    queries = query[0].transpose(0, 1)
    copied = []
    for x in (key, value):
        prompt, *rests = x[0].transpose(0, 1).split(layout.lengths)
        parts = [prompt]
        for rest in rests:
            parts += [prompt, rest]
        copied.append(torch.cat(parts))
    return layout.varlen(queries, *copied, scale=scale)[None], None


AttentionInterface.register("packed", attend)


def varlen_of(lengths: list[int], device: str) -> Callable:
    """varlen_attn of a packed row without query, key, value and scale, see Layout."""
    prompt, *rests = lengths
    keys = [prompt, *(prompt + rest for rest in rests)]
    arguments = {"window_size": (-1, 0)}
    for name, counts in (("q", lengths), ("k", keys)):
        ends = on_device(np.array([0, *accumulate(counts)], np.int32), device)
        arguments |= {f"cu_seq_{name}": ends, f"max_{name}": max(counts)}
    # torch 2.11 has no such argument: heads may share keys there without it
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        arguments["enable_gqa"] = True
    return partial(varlen.varlen_attn, **arguments)


def hidden_states(trunk, batch, device: str, packed: bool, uses_varlen: bool):
    """Returns the hidden state before each trained token, (N, D), and these tokens, (N,).

    trunk: a transformers model without its head. batch: B pairs (tokens, mask), each of one length.
    packed: False computes a padded row for each sequence, for models that can_pack() refuses.
    uses_varlen: attention is one call for the whole row, see has_varlen.
    """
    if not packed:
        return padded_hidden_states(trunk, batch, device)
    prompt = common_prompt(batch) if len(batch) > 1 else 0
    row = [np.array(batch[0][0][:prompt], np.int64)]
    positions = [np.arange(prompt)]
    lengths = [prompt]
    masks = [None]
    before = []
    targets = []
    for tokens, mask in batch:
        tokens = np.array(tokens)
        last = np.flatnonzero(mask[1:])  # before a trained token
        before.append(sum(lengths) - prompt + last)
        targets.append(tokens[last + 1])
        row.append(tokens[prompt:])
        positions.append(np.arange(prompt, len(tokens)))
        rest = len(tokens) - prompt
        sees = None  # which skips the masked half, so it is faster if the prompt is short
        if prompt >= rest and not uses_varlen:
            everything = torch.ones(rest, len(tokens), dtype=torch.bool, device=device)
            sees = everything.tril(prompt)[None, None]
        lengths.append(rest)
        masks.append(sees)
    layout = Layout(lengths, masks, varlen_of(lengths, device) if uses_varlen else None)
    columns = (row, positions, before, targets)
    row, positions, before, targets = [on_device(np.concatenate(c), device) for c in columns]
    output = trunk(
        input_ids=row[None], position_ids=positions[None], use_cache=False, layout=layout
    )
    return output.last_hidden_state[0].index_select(0, before), targets


def on_device(numbers: np.ndarray, device: str):
    """A tensor of these numbers. The copy of pinned memory to a GPU does not wait for its work."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor


def padded_hidden_states(trunk, batch, device: str):
    """As hidden_states(). Padding follows the tokens, where causal attention never looks."""
    columns = [list(map(torch.tensor, column)) for column in zip(*batch)]
    ids, masks = [pad_sequence(column, batch_first=True).to(device) for column in columns]
    trained = masks[:, 1:].bool()
    output = trunk(input_ids=ids, use_cache=False)
    before = output.last_hidden_state[:, :-1]
    targets = ids[:, 1:]
    return before[trained], targets[trained]


class LoraProduct(torch.autograd.Function):
    """y = x W^T + b + s (x A^T) B^T (LoRA, arXiv:2106.09685, equation 3). As separate layers the
    sum would be written to memory three times more.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale, is_unused):
        """x: (N, in). weight: (out, in), frozen. a: (r, in); b: (out, r); both are rounded to the
        type of x. is_unused: nobody reads y, only what is saved.
        """
        a = a.to(x.dtype)
        b = b.to(x.dtype)
        reduced = x @ a.T
        if is_unused:
            y = x.new_empty(len(x), len(weight))
        else:
            y = F.linear(x, weight, bias)
            y.addmm_(reduced, b.T, alpha=scale)
        ctx.save_for_backward(x, weight, a, b, reduced)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b, reduced = ctx.saved_tensors
        grad_reduced = (grad @ b) * ctx.scale
        grad_b = (grad.T @ reduced) * ctx.scale
        grad_a = grad_reduced.T @ x
        grad_x = None
        if ctx.needs_input_grad[0]:  # not in the first decoder layer
            grad_x = (grad @ weight).addmm_(grad_reduced, a)
        return grad_x, None, None, grad_a, grad_b, None, None


def lora_forward(layer, x):
    """The forward pass of a linear layer of peft, as one product."""
    base = layer.base_layer
    if layer.disable_adapters:
        return base(x)
    weight = base.weight.T if isinstance(base, Conv1D) else base.weight
    a = layer.lora_A["default"].weight
    b = layer.lora_B["default"].weight
    scale = layer.scaling["default"]
    # A view made inside of the function could not be changed in place, as Falcon does.
    is_unused = getattr(layer, "is_repeated", False)
    y = LoraProduct.apply(x.flatten(0, -2), weight, base.bias, a, b, scale, is_unused)
    return y.unflatten(0, x.shape[:-1])


def fused_norm(norm, x):
    """The forward pass of an RMSNorm in one kernel of torch's; transformers makes seven calls."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def fuse_norms(model) -> None:
    """Uses fused_norm() in every plain RMSNorm. Those of Gemma, with 1 + w, have no
    variance_epsilon.
    """
    for module in model.modules():
        is_plain = type(module).__name__.endswith("RMSNorm")
        if is_plain and hasattr(module, "variance_epsilon"):
            module.forward = MethodType(fused_norm, module)


def recomputed_forward(layer, *args, **kwargs):
    """The forward pass of a decoder layer, which is repeated in the backward pass."""
    forward = partial(type(layer).forward, layer)
    kwargs |= {"use_reentrant": False, "preserve_rng_state": False}
    if last := last_product(layer):
        kwargs["context_fn"] = lambda: (nullcontext(), without_output(last))
    return checkpoint(forward, *args, **kwargs)


def last_product(layer):
    """The linear layer whose output is added to the residual stream and used by nothing else of its
    decoder layer, in models that are built like Llama; or None.
    """
    parts = {name for name, _ in layer.named_children()}
    if parts != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    last = getattr(layer.mlp, "down_proj", None)
    return last if hasattr(last, "lora_A") else None


@contextmanager
def without_output(last):
    """Inside, the output of the linear layer `last` is not computed again."""
    last.is_repeated = True
    try:
        yield
    finally:
        last.is_repeated = False


class Head(NamedTuple):
    """Map from a hidden state h to logits: z = (W h + b) / s, or c tanh((W h + b) / (s c))."""

    weight: torch.Tensor  # W: (V, D), frozen
    bias: torch.Tensor | None  # b: (V,)
    divisor: float  # s: of the model times the sampling temperature
    cap: float | None  # c: of the model divided by the temperature (arXiv:2408.00118, section 2)


def head_of(causal_lm, temperature: float) -> Head:
    """The head of a transformers model. Granite divides its logits, Cohere multiplies them, and
    Gemma 2 caps them.
    """
    config = causal_lm.config.get_text_config()
    output = causal_lm.get_output_embeddings()
    divisor = getattr(config, "logits_scaling", None) or 1.0
    factor = getattr(config, "logit_scale", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(
        output.weight,
        getattr(output, "bias", None),
        temperature * divisor / factor,
        cap / temperature if cap else None,
    )


class TokenLogProbs(torch.autograd.Function):
    """Log-probabilities of tokens, and entropies, which have no gradient. No logits are kept for
    the backward pass.
    """

    @staticmethod
    def forward(ctx, hidden, targets, head, chunk):
        """hidden: (N, D). targets: (N,). head: a Head. Returns two (N,) tensors in nats; without
        gradient the entropy is None. Logits exist for `chunk` tokens at a time.
        """
        learns = ctx.needs_input_grad[0]
        chunks = zip(hidden.split(chunk), targets.split(chunk))
        logps, entropies, slopes = zip(*(token_logprobs(h, y, head, learns) for h, y in chunks))
        if not learns:
            return torch.cat(logps), None
        ctx.save_for_backward(torch.cat(slopes))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx, grad_logp, _):
        [slope] = ctx.saved_tensors
        return (grad_logp[:, None] * slope).to(slope.dtype), None, None, None


def token_logprobs(h, target, head: Head, learns: bool):
    """log p = z_y - log sum exp z of tokens y with the logits z of `head`. If they learn, also the
    entropy and the slope from d log p / d z_v = 1[v = y] - p_v, while the probabilities are there;
    else None.
    """
    logits = logits_of(h, head.weight)
    if head.bias is not None:
        logits += head.bias
    if head.divisor != 1:
        logits.div_(head.divisor)
    if head.cap:
        logits.div_(head.cap).tanh_().mul_(head.cap)
    log_z = logits.logsumexp(-1)
    logp = logits.gather(-1, target[:, None])[:, 0] - log_z
    if not learns:
        return logp, None, None
    p = (logits - log_z[:, None]).exp_()
    entropy = log_z - torch.einsum("nv,nv->n", p, logits)
    p.scatter_add_(1, target[:, None], p.new_full((len(p), 1), -1.0))
    return logp, entropy, -slope_of(p, logits, head)


def logits_of(h, weight):
    """h W^T in fp32. bf16 would round a logit of 20 to a multiple of 0.125, and vLLM rounds none
    either, see Engine.open_vllm.
    """
    if weight.dtype == torch.float32:
        return h @ weight.T
    if h.is_cuda:
        return torch.mm(h, weight.T, out_dtype=torch.float32)
    return h.float() @ weight.float().T


def slope_of(weights, logits, head: Head):
    """sum_v w_v d z_v / d h, with d z_v / d h = (1 - (z_v / c)^2) W_v / s. weights: (N, V)."""
    if head.cap:
        weights = weights * (1 - (logits / head.cap) ** 2)
    return weights.to(head.weight.dtype) @ head.weight / head.divisor


def row_tokens(batch, packed: bool = True, copy_weight: float = 0.0) -> int:
    """Tokens of a forward pass: the common prompt once and the rest of each sequence; if not
    packed, a padded row for each sequence. copy_weight: of each sequence's copies of the prompt's
    keys in attend_varlen(), in tokens of equal memory.
    """
    lengths = [len(tokens) for tokens, _ in batch]
    if not packed:
        return len(batch) * max(lengths)
    prompt = common_prompt(batch) if len(batch) > 1 else 0
    copied = int(copy_weight * prompt * len(batch))
    return sum(lengths) - prompt * (len(batch) - 1) + copied


def common_prompt(batch) -> int:
    """Returns how many leading tokens all sequences share before the first trained one.

    batch: pairs (tokens, mask). One token less than that, because the last token of the prompt
    predicts the first trained one, so it is computed for each sequence.
    """
    first_trained = min(mask.index(1) for _, mask in batch)
    common = os.path.commonprefix([tokens for tokens, _ in batch])
    return max(0, min(len(common), first_trained - 1))
