"""The trainer's forward pass: a prompt that several sequences share is computed once.

The episodes of a group share their prompt, and so do all groups of one task. The prompt runs
through the model as a single row; its keys and values are then expanded to all sequences, whose
remaining tokens run as a padded batch. Gradients flow back through the expanded keys and values,
so the result equals that of the padded batch up to rounding.

Letters: B sequences, P tokens of the common prompt, R tokens after it (padded), N loss positions,
D hidden size.
"""

WORTH_IT = 16  # tokens: a shorter common prompt is not split off


def common_prompt(batch: list[tuple[list[int], list[int]]]) -> int:
    """Returns P: how many leading tokens all sequences share before the first trained one.

    One token less than that, because the last token of the prompt predicts the first trained one,
    so it is computed for each sequence.
    """
    first, _ = batch[0]
    shared = len(first)
    for tokens, mask in batch:
        usable = mask.index(1) - 1
        shared = max(0, min(shared, usable))
        if tokens[:shared] != first[:shared]:
            different = (i for i in range(shared) if tokens[i] != first[i])
            shared = next(different)
    return shared


def padded(batch, start: int, device: str):
    """Returns the tokens from `start` on, (B, R), and where the loss is, (B, R) bool.

    Padding follows the tokens, where causal attention never looks.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(tokens[start:]) for tokens, _ in batch]
    where = [torch.tensor(mask[start:], dtype=torch.bool) for _, mask in batch]
    padded_ids = pad_sequence(ids, batch_first=True)
    padded_where = pad_sequence(where, batch_first=True)
    return padded_ids.to(device), padded_where.to(device)


def hidden_states(trunk, batch, device: str, share: bool = True):
    """Returns the hidden state before each trained token, (N, D), and these tokens, (N,).

    trunk: a transformers model without its head. batch: B pairs (tokens, mask) of equal lengths.
    share: False computes every sequence whole, as gradient checkpointing requires.
    """
    import torch

    start = 0
    if share and len(batch) > 1:
        start = common_prompt(batch)
    if start < WORTH_IT:
        start = 0
    ids, where = padded(batch, start, device)
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
