"""Tables that fit into the terminal."""

import shutil

# Titles of columns that a narrow terminal loses, in this order; then the last ones but one go
SPARE = (
    "seed|rows ±|seconds_env|seconds|tokens|loss on|best of 8|pairs|of|faults|from|turns|N|exact|"
    "best submission|place|best attempt|valid"
).split("|")
LEAST = 20  # characters that stay of the last column, which often is a long text


def fitted(columns: list[list[str]]) -> tuple[list[list[str]], str]:
    """The columns that fit into the terminal, and a sentence that names the others. Into a file or
    a pipe all of them fit.

    columns: texts of equal length, two spaces apart; the title comes first.
    """
    limit = shutil.get_terminal_size((10**6, 0)).columns
    kept, dropped = [*columns], []
    while len(kept) > 2 and width_of(kept[:-1]) + min(LEAST, len(kept[-1][0])) > limit:
        titles = [column[0].strip() for column in kept]
        order = [title for title in SPARE if title in titles[1:]] + titles[-2:0:-1]
        dropped.append(order[0])
        kept.pop(titles.index(order[0]))
    room = max(LEAST, limit - width_of(kept[:-1]))
    last = [text.rstrip() for text in kept[-1]]
    kept[-1] = [text if len(text) <= room else text[: room - 1] + "…" for text in last]
    if not dropped:
        return kept, ""
    return kept, f"left out, because the terminal is narrow: {', '.join(dropped)}"


def width_of(columns: list[list[str]]) -> int:
    return sum(len(column[0]) + 2 for column in columns)
