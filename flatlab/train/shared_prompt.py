"""The trainer's forward pass: a prompt that several sequences share is computed once.

The episodes of a group share their prompt, and so do all groups of one task. The prompt runs
through the model as a single row; its keys and values are then expanded to all sequences, whose
remaining tokens run as a padded batch. Gradients flow back through the expanded keys and values,
so the result equals that of the padded batch up to rounding.

Letters: B sequences, P tokens of the common prompt, R tokens after it (padded), N loss positions,
D hidden size.
"""

import os

WORTH_IT = 16  # tokens: a shorter common prompt is not split off


def common_prompt(batch: list[tuple[list[int], list[int]]]) -> int:
    """Returns P: how many leading tokens all sequences share before the first trained one.

    One token less than that, because the last token of the prompt predicts the first trained one,
    so it is computed for each sequence.
    """
    first_trained = min(mask.index(1) for _, mask in batch)
    texts = [tokens for tokens, _ in batch]
    common = os.path.commonprefix(texts)
    shared = min(len(common), first_trained - 1)
    return max(0, shared)


def hidden_states(trunk, batch, device: str, share: bool = True):
    """Returns the hidden state before each trained token, (N, D), and these tokens, (N,).

    trunk: a transformers model without its head. batch: B pairs (tokens, mask) of equal lengths.
    share: False computes every sequence whole, as gradient checkpointing requires.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    start = 0
    if share and len(batch) > 1:
        start = common_prompt(batch)
    if start < WORTH_IT:
        start = 0
    # padding follows the tokens, where causal attention never looks
    texts = []
    masks = []
    for tokens, mask in batch:
        texts.append(torch.tensor(tokens[start:]))
        masks.append(torch.tensor(mask[start:], dtype=torch.bool))
    ids = pad_sequence(texts, batch_first=True).to(device)  # (B, R)
    where = pad_sequence(masks, batch_first=True).to(device)
    cache = None
    if start:
        prompt = torch.tensor([batch[0][0][:start]], device=device)
        output = trunk(input_ids=prompt, use_cache=True)
        cache = output.past_key_values
        for layer in cache.layers:
            layer.keys = layer.keys.expand(len(batch), -1, -1, -1)
            layer.values = layer.values.expand(len(batch), -1, -1, -1)
    output = trunk(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
    before = output.last_hidden_state[:, :-1]
    targets = ids[:, 1:]
    trained = where[:, 1:]
    return before[trained], targets[trained]
