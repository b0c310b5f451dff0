"""Write train.csv, test.csv and answers.csv: the 2,201 persons aboard the Titanic, split with a fixed seed.

Source: the counts in the British Board of Trade's report of 1912. Usage: python make_data.py [folder]
"""

import csv
import random
import sys
from pathlib import Path

SEED = 1912
# (survived, age, class) -> (males, females). There were no children among the crew.
COUNTS = {
    (0, "child", "1st"): (0, 0),
    (0, "child", "2nd"): (0, 0),
    (0, "child", "3rd"): (35, 17),
    (0, "adult", "1st"): (118, 4),
    (0, "adult", "2nd"): (154, 13),
    (0, "adult", "3rd"): (387, 89),
    (0, "adult", "crew"): (670, 3),
    (1, "child", "1st"): (5, 1),
    (1, "child", "2nd"): (11, 13),
    (1, "child", "3rd"): (13, 14),
    (1, "adult", "1st"): (57, 140),
    (1, "adult", "2nd"): (14, 80),
    (1, "adult", "3rd"): (75, 76),
    (1, "adult", "crew"): (192, 20),
}
DEAL = (
    "train",
    "validation",
    "train",
    "test",
)  # persons of one kind are dealt out in turn: 50 / 25 / 25 %


def people():
    """(id, class, sex, age, survived, part) for everybody, sorted by id. The ids are shuffled, so they tell nothing."""
    kinds = [
        (cls, sex, age, survived)
        for (survived, age, cls), numbers in COUNTS.items()
        for sex, number in zip(("male", "female"), numbers)
        for _ in range(number)
    ]
    rng = random.Random(SEED)
    ids = rng.sample(range(1, len(kinds) + 1), len(kinds))
    return sorted((ids[i], *kind, DEAL[i % len(DEAL)]) for i, kind in enumerate(kinds))


def write(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main(folder):
    rows = people()
    write(
        folder / "train.csv",
        ["id", "class", "sex", "age", "survived"],
        [r[:5] for r in rows if r[5] == "train"],
    )
    write(
        folder / "test.csv", ["id", "class", "sex", "age"], [r[:4] for r in rows if r[5] != "train"]
    )
    write(
        folder / "answers.csv",
        ["id", "part", "survived"],
        [(r[0], r[5], r[4]) for r in rows if r[5] != "train"],
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
