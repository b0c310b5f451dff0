"""Tables that fit into the terminal."""

import shutil

# Titles of columns that a narrow terminal loses, in this order; then the last ones but one go
SPARE = (
    "seed|rows ±|seconds_env|seconds|tokens|loss on|best of 8|pairs|of|faults|from|turns|N|exact|"
    "best submission|place|best attempt|valid|better|baseline|reference"
).split("|")
LEAST = 20  # characters that stay of the last column, which often is a long text


def fitted(columns: list[list[str]], limit: int | None = None) -> list[str]:
    """The lines of a table as wide as the limit at most, and one that names the columns that are
    left out. None: the width of the terminal; into a file or a pipe all columns fit.

    columns: texts of equal length, the title first.
    """
    limit = limit or shutil.get_terminal_size((10**6, 0)).columns
    lost = []
    middle = [column[0].rstrip() for column in columns[-2:0:-1]]
    for title in [*SPARE, *middle]:
        width = sum(len(column[0]) + 2 for column in columns[:-1]) + LEAST
        kept = [column for column in columns if column[0].rstrip() != title]
        if width > limit and len(kept) < len(columns):
            columns = kept
            lost.append(title)
    lines = ["  ".join(texts).rstrip() for texts in zip(*columns)]
    lines = [line if len(line) <= limit else line[: limit - 1] + "…" for line in lines]
    if lost:
        lines.append(f"left out, because the terminal is narrow: {', '.join(lost)}")
    return lines
