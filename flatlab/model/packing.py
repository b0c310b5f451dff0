"""The trainer's forward pass without padding: one row holds the common prompt once, then the rest
of every sequence.

Linear layers see the row as it is. Attention runs sequence by sequence, so each one sees the
prompt and itself; positions are those it has on its own. The result equals that of a padded batch
up to rounding.

Letters: B sequences, P tokens of the common prompt, N trained tokens, T tokens of the row, H heads,
K tokens of a head, D hidden size, V vocabulary.
"""

import os
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def can_pack(model) -> bool:
    """Returns whether attention is the only layer that mixes positions, and every position sees all
    before it.
    """
    config = model.config.get_text_config()
    has_window = getattr(config, "sliding_window", None)
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return not has_window and not others and config._attn_implementation == "sdpa"


def attend(module, query, key, value, attention_mask, blocks=None, **options):
    """Attention over a packed row. query, key, value: (1, H, T, K). Returns (1, T, H, K), None.

    blocks: (tokens, mask) of the prompt and of each sequence. A mask has a row for each token of
    the sequence and a column for each of prompt and sequence; None: SDPA's own causal attention,
    which computes the prompt's queries once more. Without blocks it is plain attention.
    """
    if blocks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    lengths = [length for length, _ in blocks]
    split = [x.split(lengths, dim=2) for x in (query, key, value)]
    outputs = []
    for i, (length, mask) in enumerate(blocks):
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


AttentionInterface.register("packed", attend)


def hidden_states(trunk, batch, device: str, packed: bool = True):
    """Returns the hidden state before each trained token, (N, D), and these tokens, (N,).

    trunk: a transformers model without its head. batch: B pairs (tokens, mask), each of one length.
    packed: False computes a padded row for each sequence, for models that can_pack() refuses.
    """
    if not packed:
        return padded_hidden_states(trunk, batch, device)
    prompt = common_prompt(batch) if len(batch) > 1 else 0
    row = batch[0][0][:prompt]
    positions = list(range(prompt))
    blocks = [(prompt, None)]
    before = []
    targets = []
    for tokens, mask in batch:
        start = len(row) - prompt  # token t of this sequence is at start + t
        trained = [t for t in range(prompt + 1, len(tokens)) if mask[t]]
        before += [start + t - 1 for t in trained]
        targets += [tokens[t] for t in trained]
        row = row + tokens[prompt:]
        positions += range(prompt, len(tokens))
        own = len(tokens) - prompt
        sees = None  # which skips the masked half, so it is faster if the prompt is short
        if prompt >= own:
            everything = torch.ones(own, len(tokens), dtype=torch.bool, device=device)
            sees = everything.tril(prompt)[None, None]
        blocks.append((own, sees))
    output = trunk(
        input_ids=torch.tensor([row], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        blocks=blocks,
    )
    return output.last_hidden_state[0, before], torch.tensor(targets, device=device)


def padded_hidden_states(trunk, batch, device: str):
    """As hidden_states(). Padding follows the tokens, where causal attention never looks."""
    columns = [list(map(torch.tensor, column)) for column in zip(*batch)]
    ids, masks = [pad_sequence(column, batch_first=True).to(device) for column in columns]
    trained = masks[:, 1:].bool()
    output = trunk(input_ids=ids, use_cache=False)
    before = output.last_hidden_state[:, :-1]
    targets = ids[:, 1:]
    return before[trained], targets[trained]


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
    """Log-probabilities of tokens and entropies, without keeping logits for the backward pass."""

    @staticmethod
    def forward(ctx, hidden, targets, head, chunk, entropy_learns):
        """hidden: (N, D). targets: (N,). head: a Head. Returns two (N,) tensors in nats.

        Logits exist for `chunk` tokens at a time. entropy_learns: the entropy has a gradient, too.
        """
        learns = ctx.needs_input_grad[0]
        entropy_learns = learns and entropy_learns
        chunks = zip(hidden.split(chunk), targets.split(chunk))
        scored = [token_logprobs(h, y, head, learns, entropy_learns) for h, y in chunks]
        logps, entropies, slopes, entropy_slopes = zip(*scored)
        if learns:
            parts = [slopes, entropy_slopes] if entropy_learns else [slopes]
            ctx.save_for_backward(*map(torch.cat, parts))
        entropy = torch.cat(entropies)
        if not entropy_learns:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        slope, *entropy_slope = ctx.saved_tensors
        grad_hidden = grad_logp[:, None] * slope
        if entropy_slope:
            grad_hidden += grad_entropy[:, None] * entropy_slope[0]
        return grad_hidden.to(slope.dtype), None, None, None, None


def token_logprobs(h, target, head: Head, learns: bool, entropy_learns: bool):
    """log p = z_y - log sum exp z of tokens y with the logits z of `head`, and the entropy H.

    If they learn, also the slopes from d log p / d z_v = 1[v = y] - p_v and
    d H / d z_v = -p_v (z_v - sum_u p_u z_u), while the probabilities are there; else None.
    """
    logits = logits_of(h, head.weight)
    if head.bias is not None:
        logits += head.bias
    logits.div_(head.divisor)
    if head.cap:
        logits.div_(head.cap).tanh_().mul_(head.cap)
    log_z = logits.logsumexp(-1)
    logp = logits.gather(-1, target[:, None])[:, 0] - log_z
    p = (logits - log_z[:, None]).exp_()
    mean = torch.einsum("nv,nv->n", p, logits)
    entropy = log_z - mean
    slope = entropy_slope = None
    if entropy_learns:
        entropy_slope = -slope_of(p * (logits - mean[:, None]), logits, head)
    if learns:
        p[range(len(target)), target] -= 1
        slope = -slope_of(p, logits, head)
    return logp, entropy, slope, entropy_slope


def logits_of(h, weight):
    """h W^T in fp32. bf16 would round a logit of 20 to a multiple of 0.125, and vLLM rounds none
    either, see Policy._build_engine.
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


def common_prompt(batch: list[tuple[list[int], list[int]]]) -> int:
    """Returns how many leading tokens all sequences share before the first trained one.

    batch: pairs (tokens, mask). One token less than that, because the last token of the prompt
    predicts the first trained one, so it is computed for each sequence.
    """
    first_trained = min(mask.index(1) for _, mask in batch)
    common = os.path.commonprefix([tokens for tokens, _ in batch])
    return max(0, min(len(common), first_trained - 1))
