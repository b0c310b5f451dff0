"""Look at runs, finished or running: pictures, one offline page, transcripts in the terminal.

    python viz.py logs/<run>                 summary, pictures and report.html of one run
    python viz.py logs/*                     compare runs; those that differ by seed are a group
    python viz.py logs/<run> --list          episodes, or the tree of a search; with --status some
    python viz.py logs/<run> --episode 12.3  a transcript: step 12, number 3; of a search: 0.2.1
    python viz.py logs/<run> --best          or --worst, or --compare 12.3 0.7
    python viz.py logs/<run> --watch         again and again while the run goes on

flatlab/runs/store.py describes what is in a run directory.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from flatlab.errors import UserError
from flatlab.runs import plots, search_plots
from flatlab.runs.cli import check_numbers, one_sentence, parse_config  # noqa: F401
from flatlab.runs.reader import (  # noqa: F401
    RunData,
    find_runs,
    number,
    read_rows,
    read_run,
    transcripts,
)
from flatlab.runs.stats import aligned, shown
from flatlab.runs.store import Run, open_run, step_line  # noqa: F401
from flatlab.runs.views import final_table, plot


@dataclass
class Options:
    # run directories logs/<name>; the directory of a grid stands for its cells
    runs: tyro.conf.Positional[tuple[Path, ...]]
    list: bool = False  # print one line per episode, or the tree
    status: str = ""  # with --list: only this status or outcome (valid, failed, fault)
    episode: str = ""  # print one transcript: STEP.INDEX, or the id of the node
    best: bool = False  # print the transcript with the best score
    worst: bool = False  # print the worst one: the last failed one if any failed
    compare: tuple[str, str] | None = None  # two transcripts side by side; of two runs, one each
    watch: bool = False  # refresh until the runs have ended
    every: float = 5.0  # with --watch: seconds between two refreshes
    format: Literal["png", "pdf", "svg"] = "png"  # file format of the pictures
    report: bool = True  # write report.html
    tensorboard: bool = False  # also write rows and transcripts to <run>/tensorboard
    wandb: bool = False  # also send them to Weights & Biases; WANDB_MODE=offline needs no account


# ------------------------------------------------------------------ terminal

UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
COLOURS = {"green": 32, "red": 31, "yellow": 33, "cyan": 36, "grey": 90, "bold": 1}
COLOUR_OF = {"valid": "green", "failed": "red", "fault": "yellow"}
ID_WIDTH = 24  # characters of a node's id in a list; of longer ones the end is shown


def clean(text) -> str:
    """Without the characters that steer a terminal: a transcript may hold anything."""
    return re.sub(UNSAFE, "·", str(text).replace("\r\n", "\n"))


def paint(text: str, colour: str) -> str:
    """Coloured on a terminal, plain in a pipe or with NO_COLOR."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def score_text(item: dict) -> str:
    return item["outcome"] if item["score"] is None else f"{item['score']:.4g}"


def facts(item: dict) -> dict[str, str]:
    """What is said about an episode or node besides its texts."""
    found = {
        "outcome": item["outcome"],
        "score": shown(item["score"], ".6g"),
        "status": item["status"],
        "turns": str(len(item["turns"])),
        "tokens": shown(item["tokens"], ".0f"),
        "seconds": shown(item["seconds"], ".1f"),
    }
    more = {key: item.get(key) for key in ("task", "op", "sampling_mode", "parent", "second")}
    more |= {key: item.get(key) for key in ("probability", "idea")}
    more["decision"] = (item.get("decision") or {}).get("reason")
    more["error"] = item["error"]
    return found | {key: str(value) for key, value in more.items() if value not in (None, "")}


def show(item: dict) -> str:
    """One transcript, as a person reads it."""
    lines = [paint(f"{clean(item['id'])}  {score_text(item)}", "bold")]
    for name, text in facts(item).items():
        text = clean(text)
        lines.append(f"{name:14} {paint(text, COLOUR_OF[text]) if name == 'outcome' else text}")
    for place, turn in enumerate(item["turns"], 1):
        seconds = number(turn.get("seconds_env"))
        head = f"── {place} of {len(item['turns'])}   {clean(turn.get('status', ''))}"
        head += "" if seconds is None else f"   {seconds:.1f} s"
        seen = paint(clean(turn.get("observation") or ""), "grey")
        lines += ["", paint(head, "cyan"), clean(turn.get("reply") or turn.get("action") or "")]
        lines.append(textwrap.indent(seen, "  │ ", lambda line: True))
    if item.get("diff"):
        lines += ["", paint("── difference to the parent's code", "cyan")]
        for line in clean(item["diff"]).splitlines():
            lines.append(paint(line, {"+": "green", "-": "red"}.get(line[:1], "grey")))
    return "\n".join(lines)


def side_by_side(a: dict, b: dict) -> str:
    """Two transcripts in two columns: facts, then turn by turn."""
    width = (min(240, shutil.get_terminal_size((120, 40)).columns) - 3) // 2
    lines = two_columns(a["id"], b["id"], width, "bold")
    left, right = facts(a), facts(b)
    for name in left | right:
        texts = left.get(name, "-"), right.get(name, "-")
        colour = None if texts[0] == texts[1] else "yellow"
        lines += two_columns(f"{name:14} {texts[0]}", f"{name:14} {texts[1]}", width, colour)
    for place in range(max(len(a["turns"]), len(b["turns"]))):
        turns = [item["turns"][place] if place < len(item["turns"]) else {} for item in (a, b)]
        heads = [f"── {place + 1}   {turn.get('status', '')}" if turn else "" for turn in turns]
        replies = [str(turn.get("reply") or turn.get("action") or "") for turn in turns]
        observations = [str(turn.get("observation") or "") for turn in turns]
        lines += two_columns(*heads, width, "cyan")
        lines += two_columns(*replies, width)
        lines += two_columns(*observations, width, "grey")
    return "\n".join(lines)


def two_columns(left: str, right: str, width: int, colour=None) -> list[str]:
    """Two texts beside each other, both wrapped to `width` characters."""
    cells = [wrap(left, width), wrap(right, width)]
    height = max(map(len, cells))
    lines = []
    for a, b in zip(*(cell + [""] * (height - len(cell)) for cell in cells)):
        line = f"{a:<{width}} │ {b}".rstrip()
        lines.append(paint(line, colour) if colour else line)
    return lines


def wrap(text: str, width: int) -> list[str]:
    lines = []
    for line in clean(text).splitlines() or [""]:
        line = line.expandtabs(4)
        pieces = textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False)
        lines += pieces or [""]
    return lines


# ------------------------------------------------------------------ lists and single transcripts


def list_lines(run: RunData, status: str) -> list[str]:
    """Episodes by step, or the nodes as a tree with the path to the best one marked."""
    items = transcripts(run)
    known = sorted({item[key] for item in items for key in ("status", "outcome")})
    if status and status not in known:
        raise UserError(
            f"No transcript of {run.dir} has the status '{status}'; there are: {', '.join(known)}."
        )
    wanted = [item for item in items if status in ("", item["status"], item["outcome"])]
    if run.kind == "grpo":
        return episode_lines(wanted)
    return node_lines(run, wanted, indented=not status)


def episode_lines(items: list[dict]) -> list[str]:
    width = max([8] + [len(item["id"]) for item in items])
    lines = [f"{'episode':>{width}} {'score':>10} {'turns':>5} {'tokens':>6} {'sec':>6}  status"]
    for item in items:
        score = paint(f"{score_text(item):>10}", COLOUR_OF[item["outcome"]])
        tokens, seconds = item["tokens"] or 0, item["seconds"] or 0
        lines.append(
            f"{item['id']:>{width}} {score} {len(item['turns']):>5} {tokens:>6.0f} "
            f"{seconds:>6.1f}  {clean(item['status'])}"
        )
    return lines


def node_lines(run: RunData, items: list[dict], indented: bool) -> list[str]:
    """Columns of equal width first, then the tree: long ids shift nothing."""
    by_id = {item["id"]: item for item in items}
    path = search_plots.best_path(run)
    lines = [f"* {shown(run.baseline, '.4g'):>8}  {'baseline':<9}  0"]
    for id, (_, depth, _) in search_plots.layout(run.rows).items():
        if id in by_id:
            item = by_id[id]
            mark = "*" if id in path else " "
            score = paint(f"{score_text(item):>8}", COLOUR_OF[item["outcome"]])
            indent = "  " * min(depth, 20) if indented else ""
            text = " ".join(clean(item["idea"] or item["status"]).split())
            line = f"{mark} {score}  {clean(item['op']):<9}  {indent}{clean(id)}"
            lines.append(f"{line}  {text[:60]}")
    return lines


def pick(run: RunData, id: str) -> dict:
    """The transcript with this id. The UserError for an unknown one names the range."""
    step = id.partition(".")[0]
    items = transcripts(run, int(step) if run.kind == "grpo" and step.isdigit() else None)
    for item in items:
        if item["id"] == id:
            return item
    near = items or transcripts(run)
    ids = sorted((item["id"] for item in near), key=search_plots.lineage)
    there = f"there are {ids[0]} to {ids[-1]}" if ids else "there is none at all"
    raise UserError(f"{run.dir} has no transcript '{id}'; {there}.")


def extreme(run: RunData, worst: bool) -> dict:
    """The best or the worst transcript. Failures are worse than any score; faults do not count."""
    items = [item for item in transcripts(run) if item["outcome"] != "fault"]
    failed = [item for item in items if item["score"] is None]
    valid = [item for item in items if item["score"] is not None]
    if worst and failed:
        return failed[-1]
    if not valid:
        raise UserError(f"{run.dir} has no transcript with a score.")
    pick_extreme = max if worst != run.higher_is_better else min
    return pick_extreme(valid, key=lambda item: item["score"])


# ------------------------------------------------------------------ summaries


def summary(directory) -> str:
    """The table that `python viz.py logs/<run>` prints. UserError if there is nothing to show."""
    run = directory if isinstance(directory, RunData) else read_run(directory)
    lines = [plots.heading(run), ""]
    if run.kind == "grpo":
        lines += step_summary(run.rows)
        lines += alarms(run.rows)
        table = final_table(run)
        lines += ["", table] if table else []
    else:
        lines += node_summary(run)
    lines.append("")
    for key, value in (run.result | {"status": run.status}).items():
        if key != "final":
            lines.append(clean(f"{key:22} {result_text(value)}"))
    return "\n".join(lines)


def result_text(value) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {result_text(part)}" for key, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def step_summary(rows: list[dict]) -> list[str]:
    """Means of the first and the last steps, and the extremes, of every number in the rows."""
    import pandas

    frame = pandas.DataFrame(rows).select_dtypes(["number"])
    frame = frame.drop(columns=["step", "time", "version"], errors="ignore").dropna(
        axis=1, how="all"
    )
    window = plots.window_of(rows)
    columns = {
        f"first {window}": frame.head(window).mean(),
        f"last {window}": frame.tail(window).mean(),
        "lowest": frame.min(),
        "highest": frame.max(),
    }
    lines = [["mean of steps", *columns]]
    for key in frame.columns:
        lines.append([key, *(f"{values[key]:.4g}" for values in columns.values())])
    return aligned(lines, left=1)


def alarms(rows: list[dict]) -> list[str]:
    """What the run itself found suspicious, the latest ones."""
    found = []
    for row in rows:
        texts = row.get("alarms")
        for text in texts if isinstance(texts, list) else ():
            found.append(f"step {row['step']}: {clean(text)}")
    return ["", f"alarms: {len(found)}", *found[-5:]] if found else []


def node_summary(run: RunData) -> list[str]:
    """Operators and how their nodes ended."""
    titles = ["operator", "nodes", "valid", "failed", "fault", "mean", "best", "sec", "tokens"]
    lines = [titles]
    best_of = max if run.higher_is_better else min
    for op in dict.fromkeys(row["op"] for row in run.rows):
        rows = [row for row in run.rows if row["op"] == op]
        outcomes = [search_plots.outcome_of(row) for row in rows]
        counts = [outcomes.count(outcome) for outcome in ("valid", "failed", "fault")]
        scores = [row["score"] for row in rows if row["score"] is not None]
        counted = search_plots.counted_scores(run, rows)
        lines.append([clean(op), str(len(rows)), *map(str, counts)])
        lines[-1] += [
            f"{plots.mean(counted):.4g}" if counted else "-",
            f"{best_of(scores):.4g}" if scores else "-",
            f"{plots.mean(plots.series(rows, 'seconds')):.1f}",
            f"{plots.mean(plots.series(rows, 'tokens')):.0f}",
        ]
    note = "mean: of valid and failed nodes; a failed one counts as the baseline"
    return [*aligned(lines, left=1), note, "", f"best path  {best_path_text(run)}"]


def best_path_text(run: RunData) -> str:
    """The ids from the root to the best node; of a long path only its end."""
    return " > ".join(short_id(id) for id in search_plots.best_path(run)[-12:])


def short_id(id: str) -> str:
    return id if len(id) <= ID_WIDTH else f"…{id[1 - ID_WIDTH :]}"


# ------------------------------------------------------------------ pictures and pages


def refresh(runs: list[RunData], options: Options) -> list[Path]:
    """Writes all pictures and pages: of one run into its directory, of several beside them."""
    drawn = []
    if len(runs) == 1:
        folder = runs[0].dir
        paths = plot(runs[0], options.format)
    else:
        from flatlab.runs import compare

        folder = options.runs[0] if len(options.runs) == 1 else folder_of(options.runs)
        paths = compare.plot_many(runs, folder, options.format)
        drawn = paths if options.format == "png" else []
    if options.report:
        from flatlab.runs import page

        paths = [*paths, page.write(runs, folder / "report.html", options.watch, drawn)]
    return paths


def folder_of(paths: tuple[Path, ...]) -> Path:
    """The directory that holds all of these."""
    return Path(os.path.commonpath([Path(path).resolve().parent for path in paths]))


def watch(options: Options):
    """Prints what is new and refreshes the views until no process writes these runs any more."""
    printed = {}  # run directory -> rows
    seen, said = None, set()
    while True:
        runs, errors = find_runs(options.runs)
        for sentence in sorted({*errors} - said):
            print(paint(f"waiting: {sentence}", "grey"), flush=True)
            said.add(sentence)
        now = [(run.dir, len(run.rows), run.status) for run in runs]
        complete = runs and (not errors or len(options.runs) > 1)
        if runs and now != seen:
            seen = now
            print_new_rows(runs, printed)
            start = time.monotonic()
            send(runs, options)
            paths = refresh(runs, options)
            # at most a third of one processor
            time.sleep(min(60.0, 2 * (time.monotonic() - start)))
        elif complete and not any(run.running for run in runs):
            print(*(f"wrote {path}" for path in paths), sep="\n")
            return
        else:
            time.sleep(options.every)


def print_new_rows(runs: list[RunData], printed: dict) -> None:
    for run in runs:
        for row in run.rows[printed.get(run.dir, 0) :]:
            if run.kind == "grpo":
                line = step_line(row, header=run.dir not in printed)
            else:
                line = node_line(run, row)
            print(line, flush=True)
            printed[run.dir] = printed.get(run.dir, 0) + 1


def node_line(run: RunData, row: dict) -> str:
    result = "failed" if row["score"] is None else f"{row['score']:.4g}"
    id = short_id(clean(row["id"]))
    line = f"{run.name}  {result:>8}  {clean(row['op']):<9}  {id:<{ID_WIDTH}}  {clean(row['idea'])}"
    return line[:140]


def send(runs: list[RunData], options: Options):
    """Sends rows to the trackers; this process sends none twice."""
    if options.tensorboard or options.wandb:
        from flatlab.runs import trackers

        for run in runs:
            trackers.send(run, options.tensorboard, options.wandb)


# ------------------------------------------------------------------ start


def main(options: Options):
    if not options.runs:
        raise UserError("Name one or more run directories: python viz.py logs/<run>")
    if options.watch:
        return watch(options)
    runs, errors = find_runs(options.runs)
    if not runs or errors and len(options.runs) == 1:
        raise UserError("\n".join(errors) or "No run directory was found.")
    for sentence in errors:
        print(sentence, file=sys.stderr)
    parts = texts(runs, options)
    if parts:
        return print("\n\n".join(parts))
    send(runs, options)
    if len(runs) == 1:
        print(summary(runs[0]))
    else:
        from flatlab.runs import compare

        print(compare.table(runs))
    print("", *(f"wrote {path}" for path in refresh(runs, options)), sep="\n")


def texts(runs: list[RunData], options: Options) -> list[str]:
    """What the terminal views print; [] if none was asked for."""
    parts = []
    if options.compare:
        first, second = options.compare
        parts.append(side_by_side(pick(runs[0], first), pick(runs[:2][-1], second)))
    for run in runs:
        if options.list or options.status:
            head = paint(plots.heading(run), "bold")
            parts.append("\n".join([head, *list_lines(run, options.status)]))
        if options.episode:
            parts.append(show(pick(run, options.episode)))
        if options.best:
            parts.append(show(extreme(run, worst=False)))
        if options.worst:
            parts.append(show(extreme(run, worst=True)))
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
