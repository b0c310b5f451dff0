"""The pictures and the page of runs: files beside the numbers, which anyone may delete.

report.html opens without a server and asks for nothing. What a model or a command wrote is escaped
by jinja2; the security policy of the page names the hash of its one script, so no other can run.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from pathlib import Path

import numpy as np

from flatlab.files import write_whole
from flatlab.train.metrics import final_table
from flatlab.view import plots, tables
from flatlab.view.plots import RunGroup
from flatlab.view.reader import RunData, observed, read_run, transcript_files
from flatlab.view.tables import KINDS

TEMPLATE = Path(__file__).with_name("page.html")
MOST_NODES = 300  # of a search: transcripts on the page
LAST_STEPS, LAST_EVALUATIONS = 3, 6  # of a training run: the files of episodes on the page

# ------------------------------------------------------------------ pictures


def draw(runs: list[RunData], folder: Path) -> list[Path]:
    """Writes the picture of one run, or one per kind and task of several, and the tree of one."""
    figures = {}
    if len(runs) == 1:
        [run] = runs
        kind = KINDS[run.kind]
        group = RunGroup(run.name, plots.BLUE, runs)
        figures[kind.picture] = plots.draw_panels(kind.panels, [group], tables.heading(run))
        if kind.is_tree:
            figures["tree"] = plots.draw_tree(run)
    else:
        for (kind, task, _), groups in tables.groups_of(runs).items():
            name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"compare-{kind}-{task}")
            title = f"{task}, {KINDS[kind].title}: mean over runs, band: ± standard deviation"
            figures[name] = plots.draw_panels(KINDS[kind].panels, groups, title)
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        write_whole(paths[-1], plots.encoded(figure, "png"))
    return paths


def plot_now_and_then(run) -> None:
    """Refreshes the pictures of an open Run, but spends at most a twentieth of the time on it."""
    start = time.monotonic()
    if start > run.plot_again:
        draw([read_run(run.dir)], run.dir)
        now = time.monotonic()
        run.plot_again = now + 20 * (now - start)


# ------------------------------------------------------------------ the page


def write(runs: list[RunData], folder: Path) -> list[Path]:
    """Writes the pictures and report.html."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html", globals={"observed": observed})
    script = re.search("<script>(.*?)</script>", TEMPLATE.read_text(), re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = []
    for number, run in enumerate(runs):
        prefix = f"{number}/" if len(runs) > 1 else ""
        tree = ""
        if KINDS[run.kind].is_tree:
            svg = plots.encoded(plots.draw_tree(run, f"#{prefix}"), "svg").decode()
            # matplotlib's links would open another tab
            tree = Markup(svg[svg.index("<svg") :].replace(' target="_blank"', ""))
        items, note = sample(run)
        about = {"name": run.name, "headline": tables.headline(run), "tree": tree, "note": note}
        about |= {"heading": tables.heading(run), "final": final_table(run.result)}
        parts.append(about | {"items": items, "prefix": prefix})
    paths = draw(runs, folder)
    pictures = [path.read_bytes() for path in paths if path.name != "tree.png"]
    html = template.render(
        runs=parts,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        made=time.strftime("%Y-%m-%d %H:%M"),
        digest=digest,
        pictures=[base64.b64encode(picture).decode() for picture in pictures],
        table=tables.table(runs) if len(runs) > 1 else "",
    )
    paths.append(folder / "report.html")
    # a reply may hold lone surrogates
    write_whole(paths[-1], html.encode("utf-8", "replace"))
    return paths


def sample(run: RunData) -> tuple[list[dict], str]:
    """The transcripts that the page shows, in order, and a sentence if some are missing.

    Of a search: the path to the best node and the best nodes; the others are listed without a
    transcript, because the tree leads to them. Of training: the last steps, the one with the best
    score, and the last evaluations.
    """
    files = transcript_files(run)
    goodness = plots.series(run.rows, "improvement" if run.has_nodes else "score_best")
    if not (run.has_nodes or run.higher_is_better):
        goodness = -goodness
    best_first = np.argsort(-np.nan_to_num(goodness, nan=-np.inf))
    if run.has_nodes:
        whole = {*plots.best_path(run), *(run.rows[i]["id"] for i in best_first[:MOST_NODES])}
    else:
        steps = [str(row["step"]) for row in run.rows]
        evaluations = [name for name in files if not name.isdigit()]
        whole = {steps[best_first[0]], *steps[-LAST_STEPS:], *evaluations[-LAST_EVALUATIONS:]}
    items = []
    for name, read in files.items():
        if run.has_nodes or name in whole:
            items += [item | {"is_whole": name in whole} for item in read()]
    missing = len({*files} - whole)
    noun = "nodes" if run.has_nodes else "files of episodes"
    note = (
        f"This page holds the transcripts of {len(files) - missing} of {len(files)} {noun}; "
        f"python viz.py {run.dir} --list lists all, and --episode prints one."
    )
    return items, note if missing else ""
