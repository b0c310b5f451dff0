"""Look at runs, finished or running: pictures, one offline page, transcripts in the terminal.

    python viz.py logs/<run>                 summary, pictures and report.html of one run
    python viz.py logs/*                     compare runs; those that differ by seed are a group
    python viz.py logs/<run> --list          episodes, or the tree of a search
    python viz.py logs/<run> --episode 12.3  a transcript: step 12, number 3; also before.3 and
                                             eval-9.3 (evaluations), final-best.3, a node 0.2.1
    python viz.py logs/<run> --best          the transcript with the best score

flatlab/runs/store.py describes what is in a run directory.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from flatlab.errors import UserError
from flatlab.runs.reader import RunData, fill, find_runs, observed, result_text, transcripts
from flatlab.train.metrics import final_table
from flatlab.view import compare, page, plots, search_plots
from flatlab.view.stats import align


@dataclass
class Options:
    # run directories logs/<name>; the directory of a grid stands for its cells
    runs: tyro.conf.Positional[tuple[Path, ...]]
    list: bool = False  # print one line per episode, or the tree
    episode: str = ""  # print one transcript: its id, as --list shows it
    best: bool = False  # print the transcript with the best score
    format: Literal["png", "pdf", "svg"] = "png"  # file format of the pictures
    report: bool = True  # write report.html


# ------------------------------------------------------------------ terminal

UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
FACTS = ("outcome", "score", "test_score", "status", "task", "seed", "op", "sampling_mode")
FACTS += ("parent", "second", "probability", "idea", "tokens", "seconds", "error")


def say(text: str) -> None:
    """Prints text without the characters that steer a terminal: a transcript may hold anything."""
    print(re.sub(UNSAFE, "·", text.replace("\r\n", "\n")))


def score_text(item: dict) -> str:
    return item["outcome"] if item["score"] is None else f"{item['score']:.4g}"


def show(item: dict) -> str:
    """One transcript, as a person reads it."""
    lines = [f"{item['id']}  {score_text(item)}"]
    for key in FACTS:
        if item.get(key) not in (None, "", [], {}):
            lines.append(f"{key:14} {result_text(item[key])}")
    if item.get("decision"):
        lines.append(f"{'decision':14} {item['decision'].get('reason', '')}")
    for number, turn in enumerate(item["turns"], 1):
        facts = f"{turn['status']}   {turn['seconds_env']:.1f} s"
        lines.append(f"\n── {number} of {len(item['turns'])}   {facts}")
        lines.append(turn["reply"])
        lines.append(textwrap.indent(observed(turn), "  │ ", lambda line: True))
    if item.get("diff"):
        lines.append(f"\n── difference to the parent's code\n{item['diff']}")
    return "\n".join(lines)


# ------------------------------------------------------------------ lists and single transcripts


def list_lines(run: RunData) -> list[str]:
    """All episodes by file, or the nodes as a tree with the path to the best one marked."""
    items = transcripts(run, file_filter=bool)
    if run.kind == "search":
        return node_lines(run, items)
    lines = [["episode", "score", "turns", "tokens", "sec", "status"]]
    for item in items:
        turns = str(len(item["turns"]))
        numbers = [fill("{tokens:.0f}", item), fill("{seconds:.1f}", item)]
        lines.append([item["id"], score_text(item), turns, *numbers, item["status"]])
    return align(lines, left=0)


def node_lines(run: RunData, items: list[dict]) -> list[str]:
    """Columns of equal width first, then the tree: long ids shift nothing."""
    by_id = {item["id"]: item for item in items}
    path = search_plots.best_path(run)
    lines = [f"* {run.baseline:>8.4g}  {'baseline':<9}  0"]
    for id, (depth, _) in search_plots.layout(run.rows).items():
        if id in by_id:
            item = by_id[id]
            mark = "*" if id in path else " "
            indent = "  " * min(depth, 20)
            text = " ".join((item["idea"] or item["status"]).split())
            name = f"{item['op']:<9}  {indent}{id}"
            lines.append(f"{mark} {score_text(item):>8}  {name}  {text[:60]}")
    return lines


def pick(run: RunData, id: str) -> dict:
    """The transcript with this id. Raises UserError if there is none."""
    file = id.rpartition(".")[0]
    for item in transcripts(run, file_filter=lambda name: name == file):
        if item["id"] == id:
            return item
    raise UserError(f"{run.dir} has no transcript '{id}'; --list shows them all.")


def best_of(run: RunData) -> dict:
    """The transcript of training, or the node, with the largest improvement."""
    valid = [item for item in transcripts(run) if item["score"] is not None]
    if not valid:
        raise UserError(f"{run.dir} has no transcript with a score.")
    return max(valid, key=lambda item: item["improvement"])


# ------------------------------------------------------------------ summaries


def summary(run: RunData) -> str:
    """The table that `python viz.py logs/<run>` prints."""
    lines = [plots.heading(run), ""]
    if run.kind == "grpo":
        lines += [step_summary(run.rows), *alarms(run.rows)]
        if table := final_table(run.result):
            lines += ["", table]
    else:
        lines.append(node_summary(run))
    if run.kind == "search":
        lines += ["", f"best node  {run.result['best_id']}"]
    lines.append("")
    for key, value in (run.result | {"status": run.status}).items():
        if key != "final":
            lines.append(f"{key:22} {result_text(value)}")
    return "\n".join(lines)


def step_summary(rows: list[dict]) -> str:
    """Means of the first and the last steps, and the extremes, of every number in the rows."""
    import pandas

    frame = pandas.DataFrame(rows).select_dtypes("number").dropna(axis=1, how="all")
    frame = frame.drop(columns=["step", "time", "version"], errors="ignore")
    window = plots.window_of(rows)
    means = {
        f"first {window}": frame.head(window).mean(),
        f"last {window}": frame.tail(window).mean(),
        "lowest": frame.min(),
        "highest": frame.max(),
    }
    return pandas.DataFrame(means).to_string(float_format="{:.4g}".format)


def alarms(rows: list[dict]) -> list[str]:
    """What the run itself reported as suspicious, the latest ones."""
    lines = []
    for row in rows:
        lines += [f"step {row['step']}: {text}" for text in row.get("alarms", ())]
    return ["", f"alarms: {len(lines)}", *lines[-5:]] if lines else []


def node_summary(run: RunData) -> str:
    """Operators and how their nodes ended."""
    import pandas

    nodes = pandas.DataFrame(run.rows).astype({"score": float, "counted": float})
    for outcome in ("failed", "fault"):
        nodes[outcome] = nodes["outcome"] == outcome
    table = nodes.groupby("op", sort=False).agg(
        nodes=("id", "size"),
        failed=("failed", "sum"),
        faults=("fault", "sum"),
        mean=("counted", "mean"),
        best=("score", "max" if run.higher_is_better else "min"),
        sec=("seconds", "mean"),
        tokens=("tokens", "mean"),
    )
    table = table.rename_axis(None).to_string(float_format="{:.4g}".format, na_rep="-")
    return f"{table}\nmean: of valid and failed nodes; a failed one counts as the baseline"


# ------------------------------------------------------------------ pictures and pages


def refresh(runs: list[RunData], options: Options) -> list[Path]:
    """Writes all pictures and the page: of one run into its directory, of several beside them."""
    if len(runs) == 1:
        folder = runs[0].dir
        paths = compare.plot(runs[0], options.format)
    else:
        folder = Path(os.path.commonpath([run.dir.resolve() for run in runs]))
        paths = compare.plot_many(runs, folder, options.format)
    if options.report:
        paths = [*paths, page.write(runs, folder / "report.html")]
    return paths


# ------------------------------------------------------------------ start


def main(options: Options):
    runs, errors = find_runs(options.runs)
    if not runs:
        raise UserError("\n".join(errors) or "Name run directories: python viz.py logs/<run>")
    for sentence in errors:
        print(sentence, file=sys.stderr)
    parts = texts(runs, options)
    if parts:
        return say("\n\n".join(parts))
    if len(runs) == 1:
        say(summary(runs[0]))
    else:
        say(compare.table(runs))
    print("", *(f"wrote {path}" for path in refresh(runs, options)), sep="\n")


def texts(runs: list[RunData], options: Options) -> list[str]:
    """What the terminal views print; [] if none was asked for."""
    parts = []
    for run in runs:
        if options.list:
            parts.append("\n".join([plots.heading(run), *list_lines(run)]))
        if options.episode:
            parts.append(show(pick(run, options.episode)))
        if options.best:
            parts.append(show(best_of(run)))
    return parts


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a transcript may hold lone surrogates
    try:
        main(tyro.cli(Options, description=__doc__))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (UserError, OSError) as error:  # OSError: the pictures cannot be written
        print(error, file=sys.stderr)
        sys.exit(2)
