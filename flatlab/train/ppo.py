"""PPO's part (arXiv 1707.06347): a value head estimates the reward before each token, and the
advantage of a token is what was better than the estimate.
"""

from flatlab.train.batch import TrainSequence, column, micro_batches

VALUE_WEIGHT = 0.1  # weight of the value head's squared error in the loss


def gae(reward, values, lam=1.0):
    """A_t = sum_k lam^k d_(t+k), d_t = V_(t+1) - V_t, at the last token r - V_t (arXiv 1506.02438,
    eq. 16, gamma 1).

    values: V before each trained token of an episode. lam: 1 is the return minus V; 0.95 forgets
    after twenty tokens.
    """
    advantages, advantage, following = [], 0.0, reward
    for value in reversed(values):
        advantage = following - value + lam * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def use_values(policy, batch: list[list[TrainSequence]], cfg, job) -> None:
    """Replaces the reward of each episode by gae(reward, values), whitened over the batch of all
    ranks.

    batch: the sequences of each episode. The value head's target is advantage + value, before the
    whitening.
    """
    import torch

    trained = sum(batch, [])
    for part in micro_batches(trained, cfg.micro_tokens, policy.packs):
        pairs = [(s.tokens, s.mask) for s in part]
        with torch.no_grad():
            values = iter(policy.logprobs(pairs, values=True)[2].tolist())
        for s in part:
            s.target = [next(values) for _ in s.old]
    for sequences in filter(None, batch):
        values = [value for s in sequences for value in s.target]
        advantages = iter(gae(sequences[-1].advantage[-1], values))
        for s in sequences:
            s.advantage = [next(advantages) for _ in s.old]
            s.target = [a + value for a, value in zip(s.advantage, s.target)]
    everything = [a for s in trained for a in s.advantage]
    squares = sum(a * a for a in everything)
    n, total, squares = job.ranks.sum(len(everything), sum(everything), squares)
    n = max(n, 1)
    mean = total / n
    deviation = max(squares / n - mean**2, 0.0) ** 0.5
    for s in trained:
        s.advantage = [(a - mean) / (deviation + 1e-8) for a in s.advantage]


def value_loss(values, part: list[TrainSequence]):
    """The weighted squared error of the value head's estimates, (N,)."""
    target = column(part, "target", values.device)
    return VALUE_WEIGHT * (values - target) ** 2 / 2
