"""Numbers of models over tasks: the area under the performance profile (AUP), and intervals."""

import numpy as np


def performance_profiles(scores: np.ndarray, baseline: int, sign: np.ndarray) -> tuple:
    """rho(tau) = share of tasks with log10 r <= tau, at 500 tau (Dolan and More 2002, sec. 2).

    r = cost / least cost, where cost is 1 / score if larger is better. A score that is not above 0
    or worse than the baseline has 1.05 times the largest r of the others (MLGym, arXiv 2502.14499,
    whose AUP is the area of all steps, see AutoML Decathlon).
    scores: (kinds, models, tasks), NaN if missing. baseline: number of its model. sign: (tasks,),
    -1 if smaller is better, else 1. Returns tau, rho (kinds, models, 500) and AUP (kinds, models).
    """
    is_feasible = (scores > 0) & ((scores - scores[:, [baseline]]) * sign >= 0)
    costs = np.where(is_feasible, scores, np.nan) ** -sign
    ratios = costs / np.nanmin(costs, axis=1, keepdims=True)
    worst = 1.05 * np.nanmax(ratios, axis=1, keepdims=True)
    distance = np.log10(np.where(is_feasible, ratios, worst))
    end = np.ceil(10 * np.log10(np.ceil(np.nanmax(worst)))) / 10
    tau = np.linspace(0, end, 500)
    rho = (distance[..., None] <= tau).mean(axis=2)
    areas = rho[..., :-1].sum(axis=-1) * tau[1]
    return tau, rho, areas.round(3)


def mean_value(*tasks) -> float:
    """Mean over the tasks of the mean of their values, each of shape (attempts,)."""
    return np.mean([np.mean(values) for values in tasks])


def probability_of_improvement(*tasks) -> float:
    """Mean over the tasks of P(X > Y), an equal pair counts half (arXiv 2108.13264, sec. 4.3).

    tasks: the values of a model at each task, then those of the other one.
    """
    shares = []
    half = len(tasks) // 2
    for x, y in zip(tasks, tasks[half:]):
        signs = np.sign(np.subtract.outer(x, y))
        shares.append(signs.mean() / 2 + 0.5)
    return np.mean(shares)


def bootstrap_text(statistic, *tasks) -> str:
    """A 95 % interval: attempts are resampled within their task (arXiv 2108.13264, sec. 4.1). There
    is none if a task has a single attempt.
    """
    from scipy.stats import bootstrap

    middle = f"{statistic(*tasks):.4f}"
    if min(map(len, tasks)) < 2:
        return middle
    drawn = bootstrap(tasks, statistic, n_resamples=1000, method="percentile", rng=0)
    low, high = drawn.confidence_interval
    return f"{middle} [{low:.4f}, {high:.4f}]"
