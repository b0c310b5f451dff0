"""Columns of tables, the same ones on a terminal and on the page: format, side and meaning.

A table is a list of rows, each a dict of title -> text or number. The columns stand in the order of
their weight: a narrow terminal loses those on the right, but not the last one, which often is a
long text.
"""

import math
import re
import shutil
import textwrap
from dataclasses import dataclass

from flatlab.numbers import BEST_OF

FEW_SEEDS = 3  # a mean over fewer runs has no interval
LEAST = 20  # characters that stay of the last column
# Title -> format of its numbers; those of other columns show four digits of the largest
FORMATS = {
    "reward": "+z.3f",
    "advantage": "+z.3f",
    "seconds": ".1f",
    "valid": ".0%",
    "AUP, best attempt": ".3f",
    "AUP, best submission": ".3f",
    "place": ".0f",
    "tokens": ".0f",
} | dict.fromkeys(("value", "position", "best attempt", "best submission"), ".4f")
MEANINGS = {  # of titles
    "run": "its name; runs that differ by their seed only are one row; a second run of a seed has "
    "a row of its own",
    "runs": f"number of runs in the row; a mean over fewer than {FEW_SEEDS} runs has no interval, "
    "each value is shown",
    "value": "mean over the episodes, or of the best node: 0 is the task's baseline, 1 a good "
    "known score, -1 no valid submission. Every ± is one standard error: over the runs, or over "
    "the episodes of a single run",
    "value [95 %]": "mean over the tasks; the episodes of each task are resampled (bootstrap). The "
    "± in the outcome of a run is one standard error over all its episodes",
    "AUP, best attempt": "area under the performance profile, larger is better",
    "best attempt": "best score of all attempts at the task",
    "best submission": "best of the last scores of the attempts",
    "place": "rank of the best attempt among the models",
    "position": "share of the leaderboard that is not better",
    "valid": "share of the episodes, or of the nodes, with a valid submission",
    "score": "in the unit of the task: mean of the valid ones, or that of the best node",
    f"best of {BEST_OF}": f"expected best score of {BEST_OF} episodes",
    "gain over untrained": "value of the best adapter minus that of the untrained one, in pairs on "
    "the same fresh seeds",
    "last adapter": "its value on the part for selection, where the best adapter of a run is the "
    "untrained one",
    "measured on": "what has this value, and the part of the data",
    "difference": "value of the row minus value of the best row, over the seeds that both have",
    "95 % interval": "of the difference, by Student's t: ± 4.3 standard errors with 3 seeds, 2.3 "
    "with 10. If it holds 0, the runs do not differ",
    "pairs": "number of seeds that both have",
    "differs in": "settings that at most half of the rows have, @ digests of prompts, task, model "
    "and code; values on two versions of a task cannot be compared",
    "reward": "what the episode was trained on",
    "advantage": "mean over its replies; more than 0: they were made more likely",
    "trained": "replies that were trained, of all",
    "turns": "replies of the model",
    "end": "how the episode ended: submit, validated, or the limit that it reached",
}


@dataclass
class Column:
    """is_number: it stands on the right."""

    title: str
    texts: list[str]
    is_number: bool

    @property
    def meaning(self) -> str:
        return MEANINGS.get(self.title, "")

    @property
    def width(self) -> int:
        return max(map(len, [self.title, *self.texts]))

    def lines(self) -> list[str]:
        """The title and the texts, equally long."""
        form = f"{'>' if self.is_number else '<'}{self.width}"
        return [f"{text:{form}}" for text in [self.title, *self.texts]]


def columns_of(rows: list[dict]) -> list[Column]:
    """The columns of a table without those in which nothing is said."""
    columns = []
    for title in rows[0]:
        texts = texts_of([row.get(title) for row in rows], FORMATS.get(title))
        said = {*texts} - {"", "-"}
        is_number = any(re.fullmatch(r"[-+\d][-+\d.,e%± to/]*", text) for text in said)
        if said:
            columns.append(Column(title, texts, is_number and title != next(iter(rows[0]))))
    return columns


def texts_of(values: list, form: str | None = None) -> list[str]:
    """Texts of the values of a column; its fractions have one number of decimals."""
    sizes = [abs(value) for value in values if isinstance(value, float) and value]
    largest = max(filter(math.isfinite, sizes), default=1.0)
    form = form or f"z.{min(9, max(0, 3 - math.floor(math.log10(largest))))}f"
    texts = [f"{value:{form}}" if isinstance(value, float) else str(value) for value in values]
    return ["-" if text in ("None", "nan", "nan%") else text for text in texts]


def terminal_width() -> int:
    """Characters of a line; into a file or a pipe any number fits."""
    return shutil.get_terminal_size((10**6, 0)).columns


def fitting(rows: list[dict], limit: int) -> tuple[list[Column], list[str]]:
    """The columns that fit into `limit` characters, and the titles of those which are left out."""
    columns = columns_of(rows)
    lost = []
    while len(columns) > 2 and LEAST + sum(c.width + 2 for c in columns[:-1]) > limit:
        lost.append(columns.pop(-2).title)
    return columns, lost


def aligned(rows: list[dict]) -> str:
    """A table as text that fits into the terminal, with a line that names the columns which are
    left out.
    """
    limit = terminal_width()
    columns, lost = fitting(rows, limit)
    lines = ["  ".join(texts).rstrip() for texts in zip(*(c.lines() for c in columns))]
    lines = [line if len(line) <= limit else line[: limit - 1] + "…" for line in lines]
    if lost:
        lines.append(f"left out, because the terminal is narrow: {', '.join(lost)}")
    return "\n".join(lines)


def legend(*tables: list[dict]) -> str:
    """Lines about what the columns of these tables mean, those that the terminal shows."""
    shown = [column for rows in tables for column in fitting(rows, terminal_width())[0]]
    columns = {column.title: column.meaning for column in shown}
    lines = []
    for title, meaning in columns.items():
        if meaning:
            lines += textwrap.wrap(f"{title}: {meaning}", 100, subsequent_indent="    ")
    return "\n".join(lines)
