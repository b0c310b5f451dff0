"""Numbers as people read them."""

import math
from statistics import stdev

LARGEST = 1e100  # the squares and sums of larger numbers would be infinite


def number(value) -> float | None:
    """`value` as a float if it is a number of at most LARGEST in size, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= LARGEST else None


def standard_error(values: list[float]) -> float | None:
    """Standard error of the mean; None below two values."""
    if len(values) < 2:
        return None
    return stdev(values) / math.sqrt(len(values))


BEST_OF = 8  # k of expected_best in evaluations


def expected_best(k: int, values: list[float]) -> float | None:
    """Expected best of k values that are drawn without replacement; None with fewer than k.

    max@k = sum_i C(i - 1, k - 1) x_i / C(n, k) over x_1 <= ... <= x_n: the unbiased estimate of
    Chen et al. (2021, arXiv 2107.03374, eq. 1) for values instead of passes.
    """
    if len(values) < k:
        return None
    weighted = [math.comb(i, k - 1) * x for i, x in enumerate(sorted(values))]
    return sum(weighted) / math.comb(len(values), k)


def plus_minus(mean: float | None, error: float | None, sign: str = "", digits: int = 4) -> str:
    """A mean with its error: '0.7512 ± 0.0101'; "-" without a mean."""
    if mean is None:
        return "-"
    text = f"{mean:{sign}z.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def duration(seconds: float) -> str:
    """A time as '0m48s', '3m20s' or '2h05m'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, of_hour = divmod(minutes, 60)
    return f"{hours}h{of_hour:02d}m" if hours else f"{minutes}m{rest:02d}s"


def counted(count: float, noun: str) -> str:
    """A number with its noun: '1 node', '2 nodes', '0.5 nodes'."""
    ending = "" if count == 1 else "s"
    return f"{count:.9g} {noun}{ending}"


def value_text(value) -> str:
    """A setting as part of a name: the last part of a path; of several with + between."""
    if isinstance(value, (list, tuple)):
        return "+".join(map(value_text, value))
    return str(value).rstrip("/").removesuffix("/best").split("/")[-1]
