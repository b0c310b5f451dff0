"""Writes train.csv, test.csv and answers.csv of a built-in task, with a fixed split.

    python make_data.py <titanic, diabetes or digits> [folder]

titanic: 2,201 persons, from the counts in the British Board of Trade's report of 1912.
diabetes: 442 persons, from Efron, Hastie, Johnstone and Tibshirani, "Least Angle Regression"
(2004), in the units of the measurements, as shipped with scikit-learn.
digits: 1,797 images of 8 x 8 pixels, from E. Alpaydin and C. Kaynak, "Optical Recognition of
Handwritten Digits" (1998), UCI Machine Learning Repository, CC BY 4.0; its test part, as shipped
with scikit-learn.
"""

import csv
import random
import sys
from pathlib import Path

PARTS = ("train", "validation", "train", "test")  # 50 / 25 / 25 %
# survived, age, class, number of males, number of females
TITANIC = """
0 child 3rd 35 17
0 adult 1st 118 4
0 adult 2nd 154 13
0 adult 3rd 387 89
0 adult crew 670 3
1 child 1st 5 1
1 child 2nd 11 13
1 child 3rd 13 14
1 adult 1st 57 140
1 adult 2nd 14 80
1 adult 3rd 75 76
1 adult crew 192 20
"""

# Each function returns (columns, [(id, values, part)]). The last column is the target. Ids are
# shuffled, so that they tell nothing.


def titanic():
    rng = random.Random(1912)
    people = []
    for line in TITANIC.strip().splitlines():
        survived, age, group, males, females = line.split()
        people += [[group, "male", age, survived]] * int(males)
        people += [[group, "female", age, survived]] * int(females)
    ids = shuffled_ids(rng, len(people))
    # Persons of one kind are dealt out in turn.
    rows = [(ids[i], person, PARTS[i % len(PARTS)]) for i, person in enumerate(people)]
    return ["class", "sex", "age", "survived"], rows


def diabetes():
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    # The seed of twenty whose parts are most alike: ridge regression scores 0.478 and 0.481.
    rng = random.Random(2009)
    ids = shuffled_ids(rng, len(data.target))
    # Every four neighbours in the order of the target are dealt out at random.
    parts = []
    while len(parts) < len(ids):
        parts += rng.sample(PARTS, len(PARTS))
    rows = []
    for i, part in zip(by_target(data.target, ids), parts):
        values = [f"{value:g}" for value in (*data.data[i], data.target[i])]
        rows.append((ids[i], values, part))
    return [*data.feature_names, "progression"], rows


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    ids = shuffled_ids(random.Random(1998), len(data.target))
    rows = []
    # Images of one digit are dealt out in turn.
    for place, i in enumerate(by_target(data.target, ids)):
        values = [int(value) for value in (*data.data[i], data.target[i])]
        rows.append((ids[i], values, PARTS[place % len(PARTS)]))
    return [*(f"p{place}" for place in range(64)), "label"], rows


def shuffled_ids(rng, count):
    return rng.sample(range(1, count + 1), count)


def by_target(target, ids):
    """Row numbers in the order of the target, then of the id."""
    return sorted(range(len(ids)), key=lambda i: (target[i], ids[i]))


def write(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def main(name, folder=None):
    folder = Path(folder or Path(__file__).resolve().parent / name)
    columns, rows = {"titanic": titanic, "diabetes": diabetes, "digits": digits}[name]()
    rows.sort()
    train = [[key, *values] for key, values, part in rows if part == "train"]
    rest = [row for row in rows if row[2] != "train"]
    test = [[key, *values[:-1]] for key, values, _ in rest]
    answers = [[key, part, values[-1]] for key, values, part in rest]
    write(folder / "train.csv", ["id", *columns], train)
    write(folder / "test.csv", ["id", *columns[:-1]], test)
    write(folder / "answers.csv", ["id", "part", columns[-1]], answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
