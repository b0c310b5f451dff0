"""The weights of a max-seeking objective: TTT-Discover, arXiv 2601.16175."""

from math import exp, log, sqrt


def max_seeking_terms(rewards):
    """(n w_i - 1) / sqrt(n - 1) of n rewards, w of max_seeking(): the best count most."""
    n = len(rewards)
    _, weights = max_seeking(rewards)
    return [(n * weight - 1) / sqrt(n - 1) for weight in weights]


def max_seeking(rewards):
    """(beta, w): w = softmax(beta r) with KL(w || uniform) = min(ln 2, ln(n / k) / 2), k of the n
    rewards are the best. So the target can be reached; a group of equal rewards has beta 0.
    """
    n, best = len(rewards), max(rewards)
    target = min(log(2), log(n / rewards.count(best)) / 2)

    def softmax(beta):
        weights = [exp(beta * (reward - best)) for reward in rewards]
        return [weight / sum(weights) for weight in weights]

    def kl(beta):
        return sum(w * log(n * w) for w in softmax(beta) if w > 0)

    low, high = 0.0, 1.0
    while target and kl(high) < target:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(middle) < target else (low, middle)
    return low, softmax(low)
