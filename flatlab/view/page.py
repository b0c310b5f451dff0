"""The pictures and the page of runs: files beside the numbers, which anyone may delete.

report.html opens without a server and asks for nothing. What a model or a command wrote is escaped
by jinja2; the security policy of the page names the hash of its one script, so no other can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from pathlib import Path

import numpy as np

from flatlab.files import write_whole
from flatlab.runs.reader import RunData, observed, read_part, read_run, transcript_parts
from flatlab.train.metrics import final_table
from flatlab.view import plots, tables
from flatlab.view.plots import RunGroup
from flatlab.view.tables import KINDS

TEMPLATE = Path(__file__).with_name("page.html")
PAGE_BYTES = 12_000_000  # of transcripts: a page of longer runs holds a sample

# ------------------------------------------------------------------ pictures


def curves(runs: list[RunData]) -> dict:
    """name of the file -> matplotlib Figure: of one run, or one per kind and task of several."""
    if len(runs) == 1:
        kind = KINDS[runs[0].kind]
        group = RunGroup(runs[0].name, plots.BLUE, runs)
        return {kind.picture: plots.draw_panels(kind.panels, [group], tables.heading(runs[0]))}
    figures = {}
    for (kind, task, _), groups in tables.groups_of(runs).items():
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", f"compare-{kind}-{task}")
        title = f"{task}, {KINDS[kind].title}: mean over runs, band: ± standard deviation"
        figures[name] = plots.draw_panels(KINDS[kind].panels, groups, title)
    return figures


def draw(runs: list[RunData], folder: Path, format: str = "png") -> list[Path]:
    """Writes all pictures of one run, or those that compare several."""
    figures = curves(runs)
    if len(runs) == 1 and KINDS[runs[0].kind].is_tree:
        figures["tree"] = plots.draw_tree(runs[0])
    return [plots.save(figure, folder / f"{name}.{format}") for name, figure in figures.items()]


def plot_now_and_then(run, always: bool = False) -> None:
    """Refreshes the pictures of an open Run, but spends at most a twentieth of the time on it."""
    start = time.monotonic()
    if always or start > run.plot_again:
        draw([read_run(run.dir)], run.dir)
        now = time.monotonic()
        run.plot_again = now + 20 * (now - start)


# ------------------------------------------------------------------ the page


def write(runs: list[RunData], path: Path) -> Path:
    """Writes the page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["observed"] = observed
    template = environment.get_template("page.html")
    script = re.search("<script>(.*?)</script>", TEMPLATE.read_text(), re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pictures = [base64.b64encode(plots.encoded(f, "png")).decode() for f in curves(runs).values()]
    parts = []
    for number, run in enumerate(runs):
        prefix = f"{number}/" if len(runs) > 1 else ""
        tree = ""
        if KINDS[run.kind].is_tree:
            svg = plots.encoded(plots.draw_tree(run, f"#{prefix}"), "svg").decode()
            # matplotlib's links would open another tab
            tree = Markup(svg[svg.index("<svg") :].replace(' target="_blank"', ""))
        items, note = sample(run, PAGE_BYTES / len(runs))
        about = {"name": run.name, "headline": tables.headline(run), "tree": tree, "note": note}
        about |= {"heading": tables.heading(run), "final": final_table(run.result)}
        parts.append(about | {"items": items, "prefix": prefix})
    html = template.render(
        runs=parts,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        made=time.strftime("%Y-%m-%d %H:%M"),
        digest=digest,
        pictures=pictures,
        table=tables.table(runs) if len(runs) > 1 else "",
    )
    # a reply may hold lone surrogates
    write_whole(path, html.encode("utf-8", "replace"))
    return path


def sample(run: RunData, limit: float) -> tuple[list[dict], str]:
    from markupsafe import escape

    """The transcripts that the page shows, in order, and a sentence if some are missing.

    Those that matter most come first until about `limit` bytes are reached: of a search the path
    to the best node, then by score; of training the last step, the one with the best score, the
    evaluations, then from the last step back. All nodes of a search are listed, because the tree
    leads to them.
    """
    parts = transcript_parts(run, bool)
    steps = [place for place, part in enumerate(parts) if isinstance(part, tuple)]
    if steps:
        order = order_of_steps(run, parts)
    else:
        path = plots.best_path(run)
        scores = plots.series(run.rows, "improvement")
        worst = np.where(np.isnan(scores), -np.inf, scores)
        order = sorted(range(len(parts)), key=lambda i: (parts[i]["id"] not in path, -worst[i]))
    shown, left, missing = {}, limit, 0
    for place in order:
        items = read_part(run, parts[place]) if left > 0 or not steps else []
        missing += left <= 0
        for item in items:
            item["is_whole"] = left > 0
            left -= len(escape(json.dumps(item)))
        shown[place] = items
    note = ""
    if missing:
        noun = "files of episodes" if steps else "nodes"
        note = (
            f"This page holds the transcripts of {len(parts) - missing} of {len(parts)} {noun}; "
            f"python viz.py {run.dir} --list lists all, and --episode prints one."
        )
    return [item for place in sorted(shown) for item in shown[place]], note


def order_of_steps(run: RunData, parts: list) -> list[int]:
    """Places of the files: last step, step with the best score, evaluations, earlier steps."""
    names = [name for name, _ in parts]
    scores = plots.series(run.rows, "score_best")
    first = [str(run.rows[-1]["step"])]
    if not np.isnan(scores).all():
        best = np.nanargmax(scores if run.higher_is_better else -scores)
        first.append(str(run.rows[best]["step"]))
    wanted = [names.index(name) for name in first if name in names]
    return [*dict.fromkeys([*wanted, *reversed(range(len(parts)))])]
