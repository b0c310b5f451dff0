"""Numbers as people read them."""

from __future__ import annotations

import math
from statistics import stdev


def number(value) -> float | None:
    """`value` as a float if it is a finite number, else None: a row may hold anything."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def standard_error(values: list[float]) -> float | None:
    """Standard error of the mean; None below two values."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def plus_minus(mean: float | None, error: float | None, sign: str = "") -> str:
    """'0.7512 ± 0.0101'; "-" without a mean."""
    if mean is None:
        return "-"
    return f"{mean:{sign}.4f}" + ("" if error is None else f" ± {error:.4f}")


def duration(seconds: float | None) -> str:
    """'0m48s', '3m20s', '2h05m'; '-' for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def count(number: float, noun: str) -> str:
    """'1 node', '2 nodes'."""
    ending = "" if number == 1 else "s"
    return f"{number:g} {noun}{ending}"


def value_text(value) -> str:
    """A setting in a name: the last part of a path."""
    return str(value).rstrip("/").removesuffix("/best").split("/")[-1]
