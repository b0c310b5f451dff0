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
LAST_STEPS, LAST_EVALUATIONS = 3, 6  # files of a training run on the page

# ------------------------------------------------------------------ pictures


def draw(runs: list[RunData], folder: Path) -> list[Path]:
    """Writes the picture of one run, or one per kind and task of several, and the tree of one."""
    comparable = tables.groups_of(runs)
    figures = {}
    if len(runs) == 1:
        [run], [groups] = runs, comparable.values()
        figures["curves"] = plots.draw_panels(groups, tables.heading(run))
        if run.kind == "search":
            figures["tree"] = plots.draw_tree(run)
        return save(figures, folder)
    for (kind, task, *_), groups in comparable.items():
        title = f"{task}, {kind}: mean over runs, band: ± standard error"
        figures[f"compare-{kind}-{task}"[:200]] = plots.draw_panels(groups, title)
    return save(figures, folder)


def plot(runs: list[RunData], keys: Sequence[str], folder: Path) -> list[Path]:
    """Writes plot-KEY.png for each key. Raises UserError if the runs are not comparable."""
    [groups, *others] = tables.groups_of(runs).values()
    if others:
        raise UserError("--plot draws runs of one kind and one version of a task.")
    return save({f"plot-{key}": plots.draw_plot(groups, key) for key in keys}, folder, 150)


def save(figures: dict, folder: Path, dpi: int = 110) -> list[Path]:
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        write_whole(paths[-1], plots.encoded(figure, "png", dpi))
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


def write(runs: list[RunData], folder: Path) -> list[Path]:
    """Writes the pictures and report.html."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    views = {"reader": reader, "tables": tables, "sample": sample, "tree": tree}
    template = environment.from_string(TEMPLATE.read_text(), views)
    paths = draw(runs, folder)
    pictures = [path.read_bytes() for path in paths if path.stem != "tree"]
    html = template.render(
        runs=runs,
        title=folder.resolve().name,
        made=time.strftime("%Y-%m-%d %H:%M"),
        nonce=secrets.token_hex(),
        pictures=[base64.b64encode(picture).decode() for picture in pictures],
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
    """The transcripts on the page, in order, and how many files or nodes have theirs on it.

    Search: the path to the best node and the best nodes; the others are listed without a
    transcript, because the tree leads to them. Evaluation: the first episodes. Training: the last
    steps and evaluations.
    """
    import pandas

    files = transcript_files(run)
    whole = {*list(files)[:MOST_NODES]}
    if run.kind == "training":
        steps = [name for name in files if name.isdigit()]
        evaluations = [name for name in files if not name.isdigit()]
        whole = {*steps[-LAST_STEPS:], *evaluations[-LAST_EVALUATIONS:]}
    if run.kind == "search":
        best_first = pandas.DataFrame(run.rows).sort_values("improvement", ascending=False)
        whole = {*plots.best_path(run)[1:], *best_first["id"][:MOST_NODES]}
        items = [files[row["id"]]()[0] if row["id"] in whole else row for row in run.rows]
    else:
        items = [item for name in files if name in whole for item in files[name]()]
    return {"items": items, "shown": len(whole), "files": len(files)}
