"""Writes the tables of attacks and faults in tests/ATTACKS.md.

A row is a test that carries the mark `attack` or `fault`, with its result on this machine.
"""

import os
import platform
import re
from collections import defaultdict
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
BACKENDS = {"docker", "namespaces", "landlock", "local"}


class Marked:
    """A pytest plugin that selects tests with a mark `attack` or `fault` and keeps the outcomes."""

    def __init__(self):
        # (number of a fault or 0, what, test) -> outcome -> backends
        self.outcomes = defaultdict(lambda: defaultdict(set))
        self.rows_of = {}  # node id -> its rows

    def pytest_collection_modifyitems(self, items):
        for item in items:
            test = item.nodeid.partition("[")[0].removeprefix("tests/")
            rows = [(0, what, test) for mark in item.iter_markers("attack") for what in mark.args]
            for mark in item.iter_markers("fault"):
                number, *names = mark.args
                rows += [(number, what, test) for what in names]
            self.rows_of[item.nodeid] = rows
        items[:] = [item for item in items if self.rows_of[item.nodeid]]

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and (report.when != "setup" or report.passed):
            return
        outcome = report.outcome
        if outcome == "skipped":
            outcome = f"skipped, {report.longrepr[2].removeprefix('Skipped: ')}"
        parameters = report.nodeid.partition("[")[2]
        for row in self.rows_of[report.nodeid]:
            self.outcomes[row][outcome] |= BACKENDS.intersection(re.findall(r"\w+", parameters))


def outcome_text(outcomes: dict[str, set[str]]) -> str:
    """For example "passed (docker, namespaces); skipped, no Landlock (landlock)"."""
    texts = []
    for outcome, backends in sorted(outcomes.items()):
        names = ", ".join(sorted(backends))
        texts.append(f"{outcome} ({names})" if names else outcome)
    return "; ".join(texts)


def table(rows: list[tuple]) -> str:
    """A table of Markdown."""
    lines = ["| what | result | test |", "|---|---|---|"]
    for row in rows:
        cells = [cell.replace("|", "/") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PAGE = """\
# Attacks and faults that the tests try

Written by `python tests/bench table`, {date}, Python {python}, {system}, {checkout} a
checkout of MLGym. In parentheses: the kinds of sandbox.

## Attacks: none gains a point

{attacks}

## Faults: each is a status, never a score

{faults}
"""


def marked(args):
    """Runs the marked tests and writes tests/ATTACKS.md; returns (headline, rows)."""
    import pytest

    marked_tests = Marked()
    options = ["-q", "-p", "no:cacheprovider", "--all", "--all-backends", str(HERE)]
    pytest.main(options, plugins=[marked_tests])
    attacks = []
    faults = []
    for (number, what, test), outcomes in sorted(marked_tests.outcomes.items()):
        name = f"{number}. {what}" if number else what
        (faults if number else attacks).append((name, outcome_text(outcomes), f"`{test}`"))
    page = PAGE.format(
        date=date.today(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release().partition('-')[0]}",
        checkout="with" if os.environ.get("MLGYM_ROOT") else "without",
        attacks=table(attacks),
        faults=table(faults),
    )
    (HERE / "ATTACKS.md").write_text(page, encoding="utf-8")
    rows = attacks + faults
    return f"{len(rows)} rows, written to tests/ATTACKS.md", rows
