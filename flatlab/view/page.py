"""The pictures and the page of runs: files beside the numbers, which anyone may delete.

report.html opens without a server and asks for nothing. What a model or a command wrote is escaped
by jinja2; the security policy of the page names a secret of its one script, so no other can run.
"""

import base64
import secrets
import time
from functools import partial
from pathlib import Path

from flatlab.files import write_whole
from flatlab.view import plots, reader, tables
from flatlab.view.reader import RunData, folder_of, read_run, transcript_files

TEMPLATE = Path(__file__).with_name("page.html")
MOST_NODES = 300  # transcripts of a search or an evaluation on the page
LAST_STEPS, LAST_EVALUATIONS = 3, 6  # files of a training run with transcripts on the page
LISTED_STEPS = 30  # steps whose groups are on the page

# ------------------------------------------------------------------ pictures


def draw(runs: list[RunData], folder: Path, format="png", keys=()) -> list[Path]:
    """Writes the picture of one run and its tree, or a picture for each table of several; with keys
    plot-KEY for each. Raises UserError if the rows have no such key.
    """
    compared = tables.groups_of(runs)
    figures = {}
    for (kind, task), groups in compared.items():
        ending = f"-{kind}-{task}"[:150]
        for key in keys:
            name = f"plot-{key}" + ending * (len(compared) > 1)
            figures[name] = plots.draw_panels(groups, [key])
        if not keys:
            name = "curves" if len(runs) == 1 else "compare" + ending
            figures[name] = plots.draw_panels(groups)
        if name == "curves" and kind == "search":
            figures["tree"] = plots.draw_tree(*runs)
    paths = []
    for name, figure in figures.items():
        for kind in dict.fromkeys(("png", format)):
            paths.append(folder / f"{name}.{kind}")
            write_whole(paths[-1], plots.encoded(figure, kind))
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


def write(runs: list[RunData], format="png") -> list[Path]:
    """Writes the pictures and report.html into folder_of(runs). format: pdf for pictures as PDF,
    too.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    views = {"reader": reader, "tables": tables, "sample": sample, "tree": tree}
    template = environment.from_string(TEMPLATE.read_text(), views)
    folder = folder_of(runs)
    paths = draw(runs, folder, format)
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
    names = [*files]
    whole = names[:MOST_NODES]
    if run.kind == "training":
        steps = [name for name in names if name.isdigit()][::-1]
        evaluations = [name for name in names if name not in steps][-LAST_EVALUATIONS:]
        whole = steps[:LAST_STEPS] + evaluations
        names = steps[:LISTED_STEPS] + evaluations
    if run.kind == "search":
        whole = plots.best_nodes(run, MOST_NODES)
        others = [row for row in run.rows if row["id"] not in whole]
        files |= {row["id"]: partial(list, [row]) for row in others}  # reading them takes long
    items = [item | {"is_whole": name in whole} for name in names for item in files[name]()]
    return {
        "groups": tables.sections(run, items),
        "whole": whole,
        "names": names,
        "files": files,
    }
