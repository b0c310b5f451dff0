"""Write train.csv, test.csv and answers.csv: 1,797 handwritten digits of 8 x 8 pixels, split with a fixed seed.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (1998), UCI Machine Learning Repository,
CC BY 4.0; its test part, as bundled with scikit-learn. Usage: python make_data.py [folder]
"""

import csv
import random
import sys
from pathlib import Path

from sklearn.datasets import load_digits

SEED = 1998
DEAL = (
    "train",
    "validation",
    "train",
    "test",
)  # images of one digit are dealt out in turn: 50 / 25 / 25 %


def images():
    """[id, 64 pixels, label, part], sorted by id. The ids are shuffled, so that they tell nothing."""
    data = load_digits()
    rng = random.Random(SEED)
    ids = rng.sample(range(1, len(data.target) + 1), len(data.target))
    order = sorted(range(len(ids)), key=lambda i: (data.target[i], ids[i]))
    return sorted(
        [ids[i], [int(x) for x in data.data[i]], int(data.target[i]), DEAL[place % len(DEAL)]]
        for place, i in enumerate(order)
    )


def write(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main(folder):
    names, rows = [f"p{place}" for place in range(64)], images()
    train, rest = (
        [row for row in rows if row[3] == "train"],
        [row for row in rows if row[3] != "train"],
    )
    write(folder / "train.csv", ["id", *names, "label"], [[i, *x, y] for i, x, y, _ in train])
    write(folder / "test.csv", ["id", *names], [[i, *x] for i, x, *_ in rest])
    write(folder / "answers.csv", ["id", "part", "label"], [[i, part, y] for i, _, y, part in rest])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
