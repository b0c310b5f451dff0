"""The tables of attacks and faults: the tests that carry these marks, and what came of them on this machine."""

import os
import platform
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Marked:
    """A pytest plugin that runs only the tests with a mark `attack` or `fault`, and keeps what came of them."""

    def __init__(self):
        self.rows = {}  # (kind, number, what, test) -> {outcome: [variant, ...]}
        self.rows_of = {}  # node id -> [(row, variant), ...]

    def pytest_collection_modifyitems(self, items):
        for item in items:
            variant = getattr(item, "callspec", None) and next(
                (
                    word
                    for word in item.callspec.id.split("-")
                    if word in ("docker", "namespaces", "landlock", "local")
                ),
                "",
            )
            self.rows_of[item.nodeid] = [
                (
                    (
                        mark.name,
                        *((0, *mark.args) if mark.name == "attack" else mark.args),
                        item.nodeid.partition("[")[0].removeprefix("tests/"),
                    ),
                    variant or "",
                )
                for mark in item.iter_markers()
                if mark.name in ("attack", "fault")
            ]
        items[:] = [item for item in items if self.rows_of[item.nodeid]]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed" and report.when == "setup":
            outcome = (
                report.outcome
                if report.outcome != "skipped"
                else f"skipped, {report.longrepr[2].removeprefix('Skipped: ')}"
            )
            for row, variant in self.rows_of[report.nodeid]:
                self.rows.setdefault(row, {}).setdefault(outcome, []).append(variant)


def marked(args):
    """Attacks and faults, each with the test that tries it and what came of it here."""
    import pytest

    found = Marked()
    pytest.main(["-q", "-p", "no:cacheprovider", str(HERE)], plugins=[found])
    rows = []
    for (kind, number, what, test), outcomes in sorted(found.rows.items()):
        said = "; ".join(
            f"{outcome}{f' ({names})' if (names := ', '.join(dict.fromkeys(filter(None, variants)))) else ''}"
            for outcome, variants in sorted(outcomes.items())
        )
        rows.append((f"{number}. {what}" if number else what, said, f"`{test}`"))
    lines = [
        "# What the tests try",
        "",
        f"Written by `python tests/bench.py table`, {date.today()}, Python {platform.python_version()}, Linux {'.'.join(platform.release().split('.')[:2])}, "
        f"{'with' if os.environ.get('MLGYM_ROOT') else 'without'} a checkout of MLGym. In parentheses: the kinds of sandbox. What is not covered stands at the top of `env.py`.",
    ]
    for title, chosen in (
        ("Attacks: none gains a point", [r for r in rows if not r[0][0].isdigit()]),
        (
            "Faults: each is a status, never a score",
            sorted((r for r in rows if r[0][0].isdigit()), key=lambda r: int(r[0].split(".")[0])),
        ),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            "| what | result | test |",
            "|---|---|---|",
            *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in chosen),
        ]
    (HERE / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{len(rows)} rows, written to tests/README.md", rows
