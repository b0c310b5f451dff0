"""The pictures and the page of runs: files beside the numbers, which anyone may delete.

report.html opens without a server and asks for nothing. What a model or a command wrote is escaped
by jinja2; the security policy of the page names a secret of its one script, so no other can run.
"""

import base64
import secrets
import time
from pathlib import Path

from flatlab.errors import UserError, nearest
from flatlab.files import write_whole
from flatlab.heartbeat import heartbeat
from flatlab.view import columns, compare, episodes, plots, reader, results
from flatlab.view.reader import RunData, folder_of, read_run

TEMPLATE = Path(__file__).with_name("page.html")
MOST_NODES = 300  # transcripts of a search or an evaluation on the page
LAST_STEPS, LAST_EVALUATIONS = 3, 6  # of a training run, with transcripts on the page
LISTED_STEPS = 30  # steps whose groups are on the page

# ------------------------------------------------------------------ pictures


def draw(runs: list[RunData], folder: Path, format="png", keys=()) -> dict[Path, str]:
    """Writes the picture of one run and its tree, or a picture for each table of several; with keys
    plot-KEY for each, and prints the runs that lack it. Returns paths and what they show. Raises
    UserError if all do.
    """
    compared = compare.groups_of(runs)
    figures, missing = {}, []
    for (kind, task), groups in compared.items():
        ending = f"-{kind}-{task}"[:150].replace(" ", "+")
        for key in keys:
            own = [group for group in groups if key in plots.number_keys(group)]
            missing += [f"{group.label} ({key})" for group in groups if group not in own]
            if own:
                name = f"plot-{key}" + ending * (len(compared) > 1)
                figures[name] = plots.draw_panels(own, [key])
        if not keys:
            name = "curves" if len(runs) == 1 else "compare" + ending
            figures[name] = plots.draw_panels(groups)
            if name == "curves" and kind == "search":
                figures["tree"] = plots.draw_tree(*runs)
    if not figures:
        hint = nearest(keys[0], sorted(plots.number_keys(groups[0])))
        raise UserError(f"No run has numbers {keys[0]!r}; {hint}.")
    if missing:
        print(f"not drawn, because the rows lack the key: {', '.join(missing)}")
    paths = {}
    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        for kind in sorted({"png", format}):
            path = folder / f"{name}.{kind}"
            write_whole(path, plots.encoded(figure, kind))
            paths[path] = figure.get_label()
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


@heartbeat("drawing")
def write(runs: list[RunData], format="png") -> list[Path]:
    """Writes the pictures and report.html into folder_of(runs). format: pdf for pictures as PDF,
    too.
    """
    from jinja2 import StrictUndefined, Template

    text = TEMPLATE.read_text(encoding="utf-8")
    template = Template(text, autoescape=True, undefined=StrictUndefined)
    folder = folder_of(runs)
    paths = draw(runs, folder, format)
    html = template.render(
        runs=runs,
        made=time.strftime("%Y-%m-%d %H:%M"),
        nonce=secrets.token_hex(),
        paths=paths,
        base64=base64,
        columns=columns,
        compare=compare,
        episodes=episodes,
        reader=reader,
        results=results,
        sample=sample,
        tree=tree,
    )
    page = folder / "report.html"
    write_whole(page, html.encode("utf-8", "replace"))  # a reply may hold lone surrogates
    return [*paths, page]


def tree(run: RunData, prefix: str):
    """The tree as SVG. prefix: of the ids of its nodes on the page."""
    svg = plots.encoded(plots.draw_tree(run, f"#{prefix}"), "svg").decode()
    # matplotlib's links would open another tab
    return svg[svg.index("<svg") :].replace(' target="_blank"', "")


def sample(run: RunData) -> tuple[list[dict], dict[str, dict]]:
    """The rows of the episodes or nodes listed on the page, newest first, and the transcripts that
    are shown, by id. Those that are missing or damaged are left out, which is printed.

    Search: the path to the best node and the best nodes have transcripts; all are listed, because
    the tree leads to them. Evaluation: the last episodes. Training: the last steps and evaluations;
    more steps are listed. The best one of the list has its transcript.
    """
    names = list(reversed(dict.fromkeys(row["when"] for row in run.episodes)))
    whole = names[:MOST_NODES]
    if run.kind == "training":
        steps = [name for name in names if name.isdigit()]
        evaluations = [name for name in names if name not in steps][:LAST_EVALUATIONS]
        whole = steps[:LAST_STEPS] + evaluations
        names = steps[:LISTED_STEPS] + evaluations
    by_name = {name: [] for name in names}
    for row in run.episodes:
        by_name.get(row["when"], []).append(row)
    rows = sum(by_name.values(), [])
    ids = {row["id"] for row in rows if row["when"] in whole}
    if run.kind == "search":
        ids = {*plots.best_nodes(run, MOST_NODES)}
    if best := episodes.best_row(rows):
        ids.add(best["id"])
    transcript_of, texts, lost = reader.transcripts_of(run), {}, ""
    for row in rows:
        if row["id"] in ids:
            try:
                texts[row["id"]] = transcript_of(row)
            except UserError as error:
                lost = f"The page lacks transcripts: {error}"
    if lost:
        print(lost)
    return rows, texts
