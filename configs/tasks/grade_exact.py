"""Scores solution.json exactly and prints one JSON line: {metric: score} or {"error": sentence}.

The file holds a construction, never a claim: the score is computed from it in integers and
fractions, and only the result is rounded, to the nearest double. A number with a point or an
exponent is the binary fraction that a double stores. What is infeasible is refused; nothing is
rescaled, rounded or tolerated. A metric is a function in SCORES. Needs only Python. Argument:
--metric NAME.
"""

import json
import math
import sys
from fractions import Fraction
from operator import mul

MAX_BYTES = 200_000
UNIT = 10**9  # largest height; a height of the overlap counts in units of 1 / UNIT
MOST_STEPS = 2048


class Invalid(Exception):
    """The solution cannot be scored. The agent reads the text."""


def fraction(text):
    """The binary fraction that a double stores. Raises OverflowError if it is not finite."""
    return Fraction(float(text))


def read_solution():
    """Content of solution.json, which is read once. Raises Invalid."""
    try:
        with open("solution.json", "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Invalid(f"it is larger than {MAX_BYTES} bytes")
        return json.loads(data.decode("utf-8-sig"), parse_float=fraction, parse_constant=fraction)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(f"it is not JSON with finite numbers: {str(error)[:200]}") from error


def items(values, least, most, what):
    """`values` if it is a list of `least` to `most` elements. Raises Invalid."""
    if type(values) is not list or not least <= len(values) <= most:
        count = f"{least} to {most}" if least < most else most
        raise Invalid(f"there must be a list of {count} {what}")
    return values


def checked_numbers(values, low, high, kinds=(int,)):
    """`values` if each is of these types and from low to high. Raises Invalid."""
    for value in values:
        if type(value) not in kinds or not low <= value <= high:
            what = "an integer" if kinds == (int,) else "a number"
            text = float(value) if type(value) is Fraction else value
            raise Invalid(f"each must be {what} from {low} to {high}, not {str(text)[:40]}")
    return values


def ratio(solution):
    """log(|A + A| / |A|) / log(|A - A| / |A|) of a set A of integers."""
    found = set(checked_numbers(items(solution, 2, 512, "integers"), -(10**6), 10**6))
    if len(found) < len(solution):
        raise Invalid("an integer is there twice")
    sums = {a + b for a in found for b in found}
    differences = {a - b for a in found for b in found}
    return math.log(len(sums) / len(found)) / math.log(len(differences) / len(found))


def determinant(solution):
    """|det| / 29^(29/2) of a matrix of 1 and -1, by Gaussian elimination in fractions."""
    size = 29
    rows = []
    for row in items(solution, size, size, "rows"):
        rows.append(checked_numbers(items(row, size, size, "integers in each row"), -1, 1))
        if 0 in row:
            raise Invalid("each must be 1 or -1, not 0")
    product = Fraction(1)  # of the pivots
    while rows:
        rows.sort(key=lambda row: row[0] == 0)
        (pivot, *top), *rest = rows
        product *= pivot
        if not pivot:
            break
        rows = []
        for first, *row in rest:
            factor = Fraction(first) / pivot
            rows.append([x - factor * y for x, y in zip(row, top)])
    return float(abs(product) / 29**14) / math.sqrt(29)


def correlations(a, b):
    """The sum of a[i] * b[i + k] for every shift k at which the two lists overlap."""
    for k in range(len(a)):
        yield sum(map(mul, a, b[k:]))
        yield sum(map(mul, a[k:], b))


def overlap(solution):
    """max over k of sum h[i] (1 - h[i + k]) 2 / n, of n heights in [0, 1] with mean 1/2."""
    heights = checked_numbers(items(solution, 1, MOST_STEPS, "integers"), 0, UNIT)
    count = len(heights)
    if 2 * sum(heights) != count * UNIT:
        raise Invalid(f"the sum must be {count * UNIT // 2}, but it is {sum(heights)}")
    rest = [UNIT - height for height in heights]
    return 2 * max(correlations(heights, rest)) / (count * UNIT**2)


def autoconvolution(solution):
    """2 n max(f * f) / (sum f)^2 of n heights f >= 0."""
    heights = checked_numbers(items(solution, 1, MOST_STEPS, "integers"), 0, UNIT)
    if not any(heights):
        raise Invalid("one height at least must be positive")
    highest = max(correlations(heights, heights[::-1]))
    return 2 * len(heights) * highest / sum(heights) ** 2


def radii(solution):
    """The sum of the radii of 26 disjoint circles [x, y, r] in the unit square."""
    circles = []
    for row in items(solution, 26, 26, "circles"):
        x, y, r = checked_numbers(
            items(row, 3, 3, "numbers for each circle"), 0, 1, (int, Fraction)
        )
        name = f"circle {len(circles)}"
        if not 0 < r <= min(x, y, 1 - x, 1 - y):
            raise Invalid(f"{name} has no positive radius or does not lie in the square")
        for other, (a, b, c) in enumerate(circles):
            if (x - a) ** 2 + (y - b) ** 2 < (r + c) ** 2:
                raise Invalid(f"{name} overlaps circle {other}")
        circles.append((x, y, r))
    return float(sum(r for _, _, r in circles))


SCORES = {
    "ratio": ratio,
    "determinant": determinant,
    "overlap": overlap,
    "autoconvolution": autoconvolution,
    "radii": radii,
}


def main():
    metric = sys.argv[2]
    try:
        print(json.dumps({metric: SCORES[metric](read_solution())}))
    except Invalid as error:
        print(json.dumps({"error": f"solution.json: {error}"}))


if __name__ == "__main__":
    main()
