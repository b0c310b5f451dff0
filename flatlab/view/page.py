"""The pictures and the page of runs: files beside the numbers, which anyone may delete.

report.html opens without a server and asks for nothing. What a model or a command wrote is escaped
by jinja2; the security policy of the page names a secret of its one script, so no other can run.
"""

from __future__ import annotations

import base64
import secrets
import time
from pathlib import Path

from flatlab.files import write_whole
from flatlab.view import plots, reader, tables
from flatlab.view.reader import RunData, read_run, transcript_files

TEMPLATE = Path(__file__).with_name("page.html")
MOST_NODES = 300  # of a search: transcripts on the page
LAST_STEPS, LAST_EVALUATIONS = 3, 6  # of a training run: the files of episodes on the page

# ------------------------------------------------------------------ pictures


def draw(runs: list[RunData], folder: Path) -> list[Path]:
    """Writes the picture of one run, or one per kind and task of several, and the tree of one."""
    figures = {}
    for (kind, task, *_), groups in tables.groups_of(runs).items():
        name = f"compare-{kind}-{task}".replace("/", "-")  # the task may be a path
        title = f"{task}, {kind}: mean over runs, band: ± standard error"
        if len(runs) == 1:
            name, title = "curves", tables.heading(runs[0])
        figures[name] = plots.draw_panels(kind, groups, title)
    if len(runs) == 1 and runs[0].kind == "search":
        figures["tree"] = plots.draw_tree(runs[0])
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        write_whole(paths[-1], plots.encoded(figure, "png"))
    return paths


again = {}  # directory -> clock of its next refresh


def plot_now_and_then(directory: Path) -> None:
    """Refreshes the pictures of a run, but spends at most a twentieth of the time on it."""
    start = time.monotonic()
    if start > again.get(directory, 0.0):
        draw([read_run(directory)], directory)
        now = time.monotonic()
        again[directory] = now + 20 * (now - start)


# ------------------------------------------------------------------ the page


def write(runs: list[RunData], folder: Path) -> list[Path]:
    """Writes the pictures and report.html."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    views = {"reader": reader, "tables": tables}
    template = environment.from_string(TEMPLATE.read_text(), views)
    parts = []
    for number, run in enumerate(runs):
        prefix = f"{number}/" if len(runs) > 1 else ""
        tree = ""
        if run.kind == "search":
            svg = plots.encoded(plots.draw_tree(run, f"#{prefix}"), "svg").decode()
            # matplotlib's links would open another tab
            tree = Markup(svg[svg.index("<svg") :].replace(' target="_blank"', ""))
        parts.append({"run": run, "prefix": prefix, "tree": tree, **sample(run)})
    paths = draw(runs, folder)
    html = template.render(
        parts=parts,
        title=folder.resolve().name,
        made=time.strftime("%Y-%m-%d %H:%M"),
        nonce=secrets.token_hex(),
        pictures=[
            base64.b64encode(path.read_bytes()).decode() for path in paths if path.stem != "tree"
        ],
        runs=runs,
    )
    paths.append(folder / "report.html")
    # a reply may hold lone surrogates
    write_whole(paths[-1], html.encode("utf-8", "replace"))
    return paths


def sample(run: RunData) -> dict:
    """The transcripts that the page shows, in order, and how many files or nodes have theirs on it.

    Of a search: the path to the best node and the best nodes; the others are listed without a
    transcript, because the tree leads to them. Of training: the last steps and evaluations.
    """
    import pandas

    files = transcript_files(run)
    if run.has_nodes:
        best_first = pandas.DataFrame(run.rows).sort_values("improvement", ascending=False)
        whole = {*plots.best_path(run), *best_first["id"][:MOST_NODES]}
    else:
        steps = [name for name in files if name.isdigit()]
        evaluations = [name for name in files if not name.isdigit()]
        whole = {*steps[-LAST_STEPS:], *evaluations[-LAST_EVALUATIONS:]}
    items = []
    for name, read in files.items():
        if run.has_nodes or name in whole:
            items += [item | {"is_whole": name in whole} for item in read()]
    return {"items": items, "shown": len(whole.intersection(files)), "files": len(files)}
