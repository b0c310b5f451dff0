"""Writes the tables of attacks and faults in tests/ATTACKS.md.

A row is a test that carries the mark `attack` or `fault`, with its result on this machine.
"""

import os
import platform
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
BACKENDS = ("docker", "namespaces", "landlock", "local")


class Row(NamedTuple):
    number: int  # of a fault; 0 for an attack
    what: str
    test: str


class Marked:
    """A pytest plugin that selects tests with a mark `attack` or `fault` and keeps the outcomes."""

    def __init__(self):
        self.outcomes = defaultdict(lambda: defaultdict(list))  # row -> outcome -> backends
        self.rows_of = {}  # node id -> its rows
        self.backend_of = {}  # node id -> name of its backend, or ""

    def pytest_collection_modifyitems(self, items):
        selected = []
        for item in items:
            self.rows_of[item.nodeid] = rows_of_marks(item)
            self.backend_of[item.nodeid] = backend_of(item)
            if self.rows_of[item.nodeid]:
                selected.append(item)
        items[:] = selected

    def pytest_runtest_logreport(self, report):
        is_result = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
        if not is_result:
            return
        outcome = report.outcome
        if outcome == "skipped":
            outcome = f"skipped, {report.longrepr[2].removeprefix('Skipped: ')}"
        for row in self.rows_of[report.nodeid]:
            self.outcomes[row][outcome].append(self.backend_of[report.nodeid])


def rows_of_marks(item) -> list[Row]:
    """The rows of a test: one per mark."""
    test = item.nodeid.partition("[")[0].removeprefix("tests/")
    rows = []
    for mark in item.iter_markers("attack"):
        rows += [Row(0, what, test) for what in mark.args]
    for mark in item.iter_markers("fault"):
        number, *names = mark.args
        rows += [Row(number, what, test) for what in names]
    return rows


def backend_of(item) -> str:
    """The kind of sandbox in the test's parameters, or an empty text."""
    callspec = getattr(item, "callspec", None)
    words = callspec.id.split("-") if callspec else []
    return "".join(word for word in words if word in BACKENDS)


def outcome_text(outcomes: dict[str, list[str]]) -> str:
    """For example "passed (docker, namespaces); skipped, no Landlock (landlock)"."""
    texts = []
    for outcome, backends in sorted(outcomes.items()):
        names = ", ".join(dict.fromkeys(name for name in backends if name))
        texts.append(f"{outcome} ({names})" if names else outcome)
    return "; ".join(texts)


def table(title: str, rows: list[tuple]) -> list[str]:
    """The lines of a Markdown section."""
    lines = ["", f"## {title}", "", "| what | result | test |", "|---|---|---|"]
    for row in rows:
        cells = [cell.replace("|", "/") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def marked(args):
    """Runs the marked tests and writes tests/ATTACKS.md; returns (headline, rows)."""
    import pytest

    marked_tests = Marked()
    options = ["-q", "-p", "no:cacheprovider", "--all", "--all-backends", str(HERE)]
    pytest.main(options, plugins=[marked_tests])
    attacks = []
    faults = []
    for row, outcomes in sorted(marked_tests.outcomes.items()):
        what = f"{row.number}. {row.what}" if row.number else row.what
        shown = (what, outcome_text(outcomes), f"`{row.test}`")
        (faults if row.number else attacks).append(shown)
    kernel = platform.release().partition("-")[0]
    system = f"Python {platform.python_version()}, {platform.system()} {kernel}"
    checkout = "with" if os.environ.get("MLGYM_ROOT") else "without"
    lines = [
        "# Attacks and faults that the tests try",
        "",
        f"Written by `python tests/bench table`, {date.today()}, {system}, {checkout} a",
        "checkout of MLGym. In parentheses: the kinds of sandbox.",
        *table("Attacks: none gains a point", attacks),
        *table("Faults: each is a status, never a score", faults),
    ]
    (HERE / "ATTACKS.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = attacks + faults
    return f"{len(rows)} rows, written to tests/ATTACKS.md", rows
