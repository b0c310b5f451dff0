"""The pictures and the page of runs: files beside the numbers, which anyone may delete.

report.html opens without a server and asks for nothing. What a model or a command wrote is escaped
by jinja2; the security policy of the page names a secret of its one script, so no other can run.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import write_whole
from flatlab.view import plots, reader, tables
from flatlab.view.reader import RunData, read_run, transcript_files

TEMPLATE = Path(__file__).with_name("page.html")
MOST_NODES = 300  # transcripts of a search or an evaluation on the page
LAST_STEPS, LAST_EVALUATIONS = 3, 6  # files of a training run with transcripts on the page
LISTED_STEPS = 30  # steps whose groups are on the page

# ------------------------------------------------------------------ pictures


def draw(runs: list[RunData], folder: Path, formats=("png",)) -> list[Path]:
    """Writes the picture of one run, or one for each table of several, and the tree of one."""
    tables_of = tables.groups_of(runs)
    figures = {}
    for key, groups in tables_of.items():
        name = "curves" if len(runs) == 1 else name_of("compare", *key)
        figures[name] = plots.draw_panels(groups)
    if len(runs) == 1 and runs[0].kind == "search":
        figures["tree"] = plots.draw_tree(runs[0])
    return save(figures, folder, formats)


def name_of(*parts: str) -> str:
    return "-".join(parts)[:200]


def plot(runs: list[RunData], keys: Sequence[str], folder: Path, formats=("png",)) -> list[Path]:
    """Writes plot-KEY.png for each key, one for each table that has it. Raises UserError if no run
    has it.
    """
    figures = {}
    tables_of = tables.groups_of(runs)
    for key in keys:
        drawn = {table: plots.draw_plot(tables_of[table], key) for table in tables_of}
        drawn = {table: figure for table, figure in drawn.items() if figure}
        if not drawn:
            has = ", ".join(plots.numbers_of(runs[0]))
            raise UserError(f"{runs[0].dir} has no numbers '{key}'; it has {has}.")
        for table, figure in drawn.items():
            more = table if len(drawn) > 1 else ()
            figures[name_of(f"plot-{key}", *more)] = figure
    return save(figures, folder, formats)


def save(figures: dict, folder: Path, formats: Sequence[str]) -> list[Path]:
    paths = []
    for name, figure in figures.items():
        for format in formats:
            paths.append(folder / f"{name}.{format}")
            write_whole(paths[-1], plots.encoded(figure, format))
    return paths


next_plots = {}  # run directory -> time of the next refresh


def plot_now_and_then(directory: Path) -> None:
    """Refreshes the pictures of a run, but spends at most a twentieth of the time on it."""
    start = time.monotonic()
    if start > next_plots.get(directory, 0):
        draw([read_run(directory)], directory)
        now = time.monotonic()
        next_plots[directory] = now + 20 * (now - start)


# ------------------------------------------------------------------ the page


def write(runs: list[RunData], folder: Path, formats=("png",)) -> list[Path]:
    """Writes the pictures and report.html. formats: png, and maybe pdf."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    views = {"reader": reader, "tables": tables, "sample": sample, "tree": tree}
    template = environment.from_string(TEMPLATE.read_text(), views)
    paths = draw(runs, folder, formats)
    shown = [path for path in paths if path.suffix == ".png" and path.stem != "tree"]
    html = template.render(
        runs=runs,
        title=folder.resolve().name,
        made=time.strftime("%Y-%m-%d %H:%M"),
        nonce=secrets.token_hex(),
        pictures=[base64.b64encode(path.read_bytes()).decode() for path in shown],
    )
    paths.append(folder / "report.html")
    # a reply may hold lone surrogates
    write_whole(paths[-1], html.encode("utf-8", "replace"))
    return paths


def tree(run: RunData, prefix: str):
    """The tree as SVG. prefix: of the ids of its nodes on the page."""
    from markupsafe import Markup

    svg = plots.encoded(plots.draw_tree(run, f"#{prefix}"), "svg").decode()
    # matplotlib's links would open another tab
    return Markup(svg[svg.index("<svg") :].replace(' target="_blank"', ""))


def sample(run: RunData) -> dict:
    """The groups of transcripts on the page, newest first, and how many files or nodes have theirs
    on it, how many are listed, and how many there are.

    Search: the path to the best node and the best nodes have transcripts; all are listed, because
    the tree leads to them. Evaluation: the first episodes. Training: the last steps and
    evaluations; more steps are listed.
    """
    files = transcript_files(run)
    whole = listed = [*files][:MOST_NODES]
    if run.kind == "training":
        steps = [name for name in files if name.isdigit()]
        evaluations = [name for name in files if not name.isdigit()][-LAST_EVALUATIONS:]
        whole = [*steps[-LAST_STEPS:], *evaluations]
        listed = [*steps[: -LISTED_STEPS - 1 : -1], *evaluations]
    if run.kind == "search":
        ids = [row["id"] for row in reader.best_first(run.rows)]
        whole = {*plots.best_path(run)[1:], *ids[:MOST_NODES]}
        newest = sorted(run.rows, key=lambda row: row.get("when", 0), reverse=True)
        listed = [row["id"] for row in newest]
    rows = {row["id"]: row for row in run.rows if run.kind == "search"}
    items = []
    for name in listed:
        found = [rows[name]] if name in rows and name not in whole else files[name]()
        for item in found:
            is_whole = name in whole
            items.append(item | {"facts": tables.facts_of(item), "is_whole": is_whole})
    return {
        "groups": tables.sections(run, items),
        "shown": len(whole),
        "listed": len(listed),
        "files": len(files),
    }
