"""Look at runs, finished or running: pictures, one offline page, transcripts.

    python viz.py logs/<run>                 summary, pictures and report.html
    python viz.py logs/*                     compare runs; seeds are a group
    python viz.py logs/<run> --list          episodes, or the tree of a search
    python viz.py logs/<run> --episode 12/3  a transcript: number 3 of step 12;
                                             before/3, eval-9/3, final-best/3
                                             (evaluations), 0.2.1 (a node)
    python viz.py logs/<run> --step 12       step or round 12: rewards of groups
                                             and what was trained
    python viz.py logs/<run> --best          the transcript with the best score
    python viz.py logs/* --plot value_mean   a key of the rows, over the runs
    python viz.py --suite mlgym logs/<run>   a suite, beside published models

flatlab/runs/store.py describes what is in a run directory.
"""

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import flatlab  # noqa: F401 (says what to do without the environment)

# isort: split
import tyro

from flatlab.errors import UserError, nearest
from flatlab.runs import cli
from flatlab.suites.attempts import read_suite
from flatlab.suites.report import suite_report
from flatlab.view import compare, page, plots
from flatlab.view.columns import aligned
from flatlab.view.console import say
from flatlab.view.episodes import best_row, facts_of, sections
from flatlab.view.reader import (
    NOUNS,
    RunData,
    facts_above,
    find_runs,
    folder_of,
    observations,
    score_or_outcome,
    transcripts_of,
)
from flatlab.view.results import final_rows, heading, outcome_sentences, run_tables, step_rows


@dataclass
class Options:
    # run directories logs/<name>, or folders of them, such as that of a grid
    runs: tyro.conf.Positional[tuple[Path, ...]]
    list: bool = False  # print one line per episode, or the tree
    episode: str = ""  # print one transcript: its id, as --list shows it
    best: bool = False  # print the transcript with the best score
    # print the groups of one step, or round of learn.py, and what was learned from them
    step: int | None = None
    plot: tuple[str, ...] = ()  # draw each of these keys of the rows as plot-KEY.png
    suite: str = ""  # compare on this suite, see evaluate.py; without runs, published models alone
    format: Literal["png", "pdf"] = "png"  # pdf: each picture as a PDF, too


# ------------------------------------------------------------------ terminal


def show(run: RunData, row: dict) -> str:
    """One transcript: the programs of a node, then all that the agent read and said."""
    item = transcripts_of(run)(row)
    lines = [f"{row['id']}  {score_or_outcome(row)}"]
    for name, fact in facts_above(row, item).items():
        lines.append(f"{name:14} {f'{fact:.6g}' if isinstance(fact, float) else fact}")
    for name, text in item.get("code", {}).items():
        lines.append(f"\n── {name}\n{text}")
    if item.get("diff"):
        lines.append(f"\n── difference to the parent's code\n{item['diff']}")
    for key, title in (("system", "system message"), ("prompt", "first message")):
        if item.get(key):
            lines.append(f"\n── {title}\n{indented(item[key])}")
    turns = item["turns"]
    for number, (turn, observed) in enumerate(zip(turns, observations(turns)), 1):
        facts = f"{turn['status']}   {turn['seconds_env']:.1f} s"
        lines.append(f"\n── {number} of {len(turns)}   {facts}")
        lines += [turn["reply"], indented(observed)]
    return "\n".join(lines)


def indented(text: str) -> str:
    """Indents what the agent read, beside what it said."""
    return textwrap.indent(text, "  │ ", lambda line: True)


# ------------------------------------------------------------------ lists and single transcripts


def list_text(run: RunData, step: int | None = None) -> str:
    """A line for each episode, group by group, or for each node; stars mark the path to the best
    one. step: that of training, or the round, to list; None: everything. Raises UserError if there
    is nothing.
    """
    listed, path = run.episodes, plots.best_path(run)
    if step is not None:
        listed = [row for row in listed if row["step"] == step]
    elif run.kind == "search":
        listed = plots.depth_first(listed)
    if not listed:
        wanted = "" if step is None else f" of step {step}"
        steps = dict.fromkeys(row["step"] for row in run.episodes if row["step"] is not None)
        names = ", ".join(map(str, steps)) or "none"
        raise UserError(f"{run.dir} has no transcripts{wanted}; it has {names[:200]}.")
    groups = sections(run, listed)
    if run.kind == "search" and step is None:
        groups = {run.name: listed}  # the tree
    parts = []
    for title, own in groups.items():
        rows = []
        for row in own:
            id = f"{'*' * (row['id'] in path):2}{'  ' * row['id'].count('.')}{row['id']}"
            rows.append(facts_of(row) | {"id": id})
        parts.append(f"{title}\n{aligned(rows)}")
    return "\n\n".join(parts)


def pick(run: RunData, id: str) -> dict:
    """The row with this id. Raises UserError if there is none."""
    rows = {row["id"]: row for row in run.episodes}
    if id not in rows:
        raise UserError(f"{run.dir} has no transcript '{id}'; {nearest(id, [*rows])}.")
    return rows[id]


def best_of(run: RunData) -> dict:
    """The row of the episode of training, or of the node, with the largest improvement."""
    best = best_row(run.episodes)
    if not best:
        raise UserError(f"{run.dir} has no transcript with a score.")
    return best


# ------------------------------------------------------------------ summaries


def run_summary(run: RunData) -> str:
    """Text of `python viz.py logs/<run>` about one run."""
    _, sentences = final_rows(run.result)
    steps = aligned(step_rows(run.rows)) if NOUNS[run.kind] == "step" else ""
    tables = map(aligned, run_tables(run))
    answer = " ".join(outcome_sentences(run))  # at the end, where the prompt is
    parts = [steps, heading(run), "\n".join(sentences), *tables, answer]
    return "\n\n".join(filter(None, parts))


# ------------------------------------------------------------------ start


def main(options: Options):
    runs, errors = find_runs(options.runs)
    if not (runs or options.suite):
        raise UserError("\n".join(errors) or "Name run directories: python viz.py logs/<run>")
    texts = []
    for run in runs:
        try:
            texts += asked_texts(run, options)
        except UserError as error:
            errors.append(str(error))
    asked = options.list or options.step is not None or options.episode or options.best
    if asked and not (texts or options.suite):
        raise UserError("\n".join(errors))
    for sentence in errors:
        print(sentence, file=sys.stderr)
    if options.suite:
        texts.append(suite_report(read_suite(options.suite), runs))
    if texts and (options.plot or options.format == "pdf"):
        raise UserError("--plot and --format draw pictures: give them without --list and the like.")
    if texts:
        say("\n\n".join(texts))
    else:
        draw_runs(runs, options)


def asked_texts(run, options: Options) -> list[str]:
    """Returns what --list, --step, --episode and --best ask for; UserError if the run lacks it."""
    texts = []
    if options.list or options.step is not None:
        texts.append(f"{heading(run)}\n\n{list_text(run, options.step)}")
    if options.episode:
        texts.append(show(run, pick(run, options.episode)))
    if options.best:
        texts.append(show(run, best_of(run)))
    return texts


def draw_runs(runs: list, options: Options) -> None:
    """Draws the pictures, without --plot also the page, after a table or the summary of one run."""
    if options.plot:
        paths = page.draw(runs, folder_of(runs), options.format, options.plot)
    else:
        say(run_summary(runs[0]) if len(runs) == 1 else compare.table(runs))
        paths = page.write(runs, options.format)
    print("", *(f"wrote {path}" for path in paths), sep="\n")


if __name__ == "__main__":
    cli.one_sentence(lambda: main(cli.call(Options, sys.argv[1:], __doc__)))
