"""Look at runs, finished or running: pictures, one offline page, transcripts in the terminal.

    python viz.py logs/<run>                      summary, pictures and page.html of one run
    python viz.py logs/*                          compare runs: grouped by config without seed, mean and spread
    python viz.py logs/<run> --list               episodes, or the tree of a search; with --status only some
    python viz.py logs/<run> --episode 12.3       a transcript: step 12, number 3; of a search: --episode 0.2.1
    python viz.py logs/<run> --best               or --worst, or --compare 12.3 0.7
    python viz.py logs/<run> --watch              again and again while it goes on

The other scripts write their run directories through this module as well; flatlab/runs/store.py describes them.
"""

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
    duration,
    find_runs,
    number,
    read_mapping,
    read_rows,
    read_run,
    transcripts,
)
from flatlab.runs.store import (  # noqa: F401
    Run,
    json_line,
    open_run,
    plain,
    step_line,
    temporary,
    to_disk,
    write_whole,
)
from flatlab.runs.views import plot


@dataclass
class Options:
    runs: tyro.conf.Positional[
        tuple[Path, ...]
    ]  # logs/<name>; a grid's directory stands for its cells
    list: bool = False  # one line per episode, or the tree
    status: str = ""  # with --list: only this status or outcome (valid, failed, fault)
    episode: str = ""  # print one transcript: STEP.INDEX, or the node's id
    best: bool = False  # print the transcript with the best score
    worst: bool = False  # print the worst: a failed one where there is any, the last of them
    compare: tuple[str, str] | None = None  # two transcripts side by side; of two runs, one each
    watch: bool = False  # refresh until the runs have ended
    every: float = 5.0  # seconds between two looks of --watch
    format: Literal["png", "pdf", "svg"] = "png"  # of the pictures
    report: bool = True  # write page.html
    tensorboard: bool = False  # also send rows and transcripts to TensorBoard, in <run>/tensorboard
    wandb: bool = False  # also send them to Weights & Biases; WANDB_MODE=offline works


# ------------------------------------------------------------------ terminal


def clean(text) -> str:
    """Transcripts may hold anything: no character of theirs steers the terminal."""
    return re.sub(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]",
        "·",
        str(text).replace("\r\n", "\n"),
    )


def paint(text: str, colour: str) -> str:
    """Coloured on a terminal, plain in a pipe or with NO_COLOR."""
    codes = {"green": 32, "red": 31, "yellow": 33, "cyan": 36, "grey": 90, "bold": 1}
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{codes[colour]}m{text}\x1b[0m"


COLOUR_OF = {"valid": "green", "failed": "red", "fault": "yellow"}


def score_text(item: dict) -> str:
    return item["outcome"] if item["score"] is None else f"{item['score']:.4g}"


def facts(item: dict) -> list[tuple[str, str]]:
    """What is said about an episode or node besides its texts."""
    pairs = [
        ("outcome", item["outcome"]),
        ("score", "-" if item["score"] is None else f"{item['score']:.6g}"),
        ("status", item["status"]),
        ("turns", str(len(item["turns"]))),
        ("tokens", "-" if item["tokens"] is None else f"{item['tokens']:.0f}"),
        ("seconds", "-" if item["seconds"] is None else f"{item['seconds']:.1f}"),
    ]
    more = "task", "op", "sampling_mode", "parent", "second", "probability", "idea"
    pairs += [(key, str(item[key])) for key in more if item.get(key) not in (None, "")]
    reason = str((item.get("decision") or {}).get("reason") or "")
    return (
        pairs
        + [("decision", reason)] * bool(reason)
        + [("error", item["error"])] * bool(item["error"])
    )


def show(item: dict) -> str:
    """One transcript, as a person reads it."""
    lines = [paint(f"{clean(item['id'])}  {score_text(item)}", "bold")]
    lines += [
        f"{name:12} {paint(clean(text), COLOUR_OF.get(text, 'bold')) if name == 'outcome' else clean(text)}"
        for name, text in facts(item)
    ]
    for turn_number, turn in enumerate(item["turns"], 1):
        seconds = number(turn.get("seconds_env"))
        head = f"── {turn_number} of {len(item['turns'])}   {clean(turn.get('status', ''))}"
        head += "" if seconds is None else f"   {seconds:.1f} s"
        lines += ["", paint(head, "cyan"), clean(turn.get("reply") or turn.get("action") or "")]
        lines.append(
            textwrap.indent(
                paint(clean(turn.get("observation") or ""), "grey"), "  │ ", lambda line: True
            )
        )
    if item.get("diff"):
        lines += ["", paint("── difference to the parent's code", "cyan")]
        for line in clean(item["diff"]).splitlines():
            lines.append(paint(line, {"+": "green", "-": "red"}.get(line[:1], "grey")))
    return "\n".join(lines)


def side_by_side(a: dict, b: dict) -> str:
    """Two transcripts in two columns: facts, then turn by turn."""
    width = (min(240, shutil.get_terminal_size((120, 40)).columns) - 3) // 2

    def columns(left: str, right: str, colour=None):
        cells = [
            [
                piece
                for line in clean(text).splitlines() or [""]
                for piece in textwrap.wrap(
                    line.expandtabs(4), width, drop_whitespace=False, replace_whitespace=False
                )
                or [""]
            ]
            for text in (left, right)
        ]
        for i in range(max(map(len, cells))):
            line = [cell[i] if i < len(cell) else "" for cell in cells]
            out = f"{line[0]:<{width}} │ {line[1]}".rstrip()
            lines.append(paint(out, colour) if colour else out)

    lines = []
    columns(clean(a["id"]), clean(b["id"]), "bold")
    names = dict.fromkeys(name for item in (a, b) for name, _ in facts(item))
    for name in names:
        left, right = dict(facts(a)).get(name, "-"), dict(facts(b)).get(name, "-")
        columns(f"{name:12} {left}", f"{name:12} {right}", None if left == right else "yellow")
    for place in range(max(len(a["turns"]), len(b["turns"]))):
        turns = [item["turns"][place] if place < len(item["turns"]) else {} for item in (a, b)]
        columns(
            *(f"── {place + 1}   {turn.get('status', '')}" if turn else "" for turn in turns),
            "cyan",
        )
        columns(*(str(turn.get("reply") or turn.get("action") or "") for turn in turns))
        columns(*(str(turn.get("observation") or "") for turn in turns), "grey")
    return "\n".join(lines)


def list_lines(record: RunData, status: str) -> list[str]:
    """Episodes by step, or the nodes as a tree with the path to the best marked."""
    items = transcripts(record)
    known = sorted({item[key] for item in items for key in ("status", "outcome")})
    if status and status not in known:
        raise UserError(
            f"No transcript of {record.dir} has the status '{status}'; there are: {', '.join(known)}."
        )
    wanted = [item for item in items if status in ("", item["status"], item["outcome"])]
    if record.kind == "grpo":
        lines = [f"{'episode':>8} {'score':>10} {'turns':>5} {'tokens':>6} {'sec':>6}  status"]
        return lines + [
            f"{item['id']:>8} {paint(f'{score_text(item):>10}', COLOUR_OF[item['outcome']])} "
            f"{len(item['turns']):>5} "
            f"{item['tokens'] or 0:>6.0f} {item['seconds'] or 0:>6.1f}  {clean(item['status'])}"
            for item in wanted
        ]
    by_id, path = {item["id"]: item for item in wanted}, search_plots.best_path(record)
    baseline = number(record.result.get("baseline"))
    lines = [f"* 0  baseline {'?' if baseline is None else f'{baseline:.4g}'}"]
    for id, (_, depth, _) in search_plots.layout(record.rows).items():
        if id in by_id:
            item = by_id[id]
            line = (
                f"{'* ' if id in path else '  '}{'  ' * (0 if status else min(depth, 20))}{clean(id):<10} "
                f"{paint(f'{score_text(item):>8}', COLOUR_OF[item['outcome']])}  {clean(item['op']):<9} "
                f"{clean(item['idea'] or item['status'])}"
            )
            lines.append(line[:160])
    return lines


def pick(record: RunData, id: str) -> dict:
    """The transcript with this id. UserError names some that are there."""
    step = id.partition(".")[0]
    items = transcripts(record, int(step) if record.kind == "grpo" and step.isdigit() else None)
    found = next((item for item in items if item["id"] == id), None)
    if found is None:
        near = items or transcripts(record)
        there = (
            f"there are {near[0]['id']} to {near[-1]['id']}" if near else "no transcript is there"
        )
        raise UserError(f"{record.dir} has no transcript '{id}'; {there}.")
    return found


def extreme(record: RunData, worst: bool) -> dict:
    """The best or the worst of all transcripts; failures are worse than any score, and faults do not count."""
    items = [item for item in transcripts(record) if item["outcome"] != "fault"]
    failed = [item for item in items if item["score"] is None]
    valid = [item for item in items if item["score"] is not None]
    if worst and failed:
        return failed[-1]
    if not valid:
        raise UserError(f"{record.dir} has no transcript with a score.")
    lowest = worst != (record.result.get("higher_is_better") is False)
    return (min if lowest else max)(valid, key=lambda item: item["score"])


# ------------------------------------------------------------------ summaries


def summary(directory) -> str:
    """The table that `python viz.py logs/<run>` prints. Raises UserError when there is nothing to show."""
    record = directory if isinstance(directory, RunData) else read_run(directory)
    lines = [plots.heading(record), ""]
    lines += (
        [*step_summary(record.rows), *alarms(record.rows)]
        if record.kind == "grpo"
        else node_summary(record)
    )
    lines.append("")
    for key, value in (record.result | {"status": record.status}).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        lines.append(
            f"{key:20} "
            + "  ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else clean(f"{k} {v}") for k, v in parts
            ).strip()
        )
    return "\n".join(lines)


def step_summary(rows: list[dict]) -> list[str]:
    window = plots.window_of(rows)
    titles = f"first {window}", f"last {window}", "lowest", "highest"
    lines = [f"{'mean of steps':20} " + " ".join(f"{t:>10}" for t in titles)]
    for key in {key: None for row in rows for key in row}:  # in the order of their first appearance
        values = [v for v in plots.series(rows, key) if v == v]
        if values and key not in ("step", "time", "version"):
            numbers = (
                plots.mean(values[:window]),
                plots.mean(values[-window:]),
                min(values),
                max(values),
            )
            lines.append(f"{key:20} " + " ".join(f"{v:>10.4g}" for v in numbers))
    return lines


def alarms(rows: list[dict]) -> list[str]:
    """What the run itself found suspicious, the latest ones."""
    found = [
        f"step {row['step']}: {clean(text)}"
        for row in rows
        if isinstance(row.get("alarms"), list)
        for text in row["alarms"]
    ]
    return ["", f"alarms: {len(found)}", *found[-5:]] if found else []


def node_summary(record: RunData) -> list[str]:
    """Operators and how their nodes ended."""
    lines = [
        f"{'operator':12} {'nodes':>6} {'valid':>6} {'failed':>6} {'fault':>6} {'mean score':>11} "
        f"{'best':>9} {'sec':>7} {'tokens':>8}"
    ]
    pick_best = min if record.result.get("higher_is_better") is False else max
    for op in dict.fromkeys(str(row.get("op")) for row in record.rows):
        rows = [row for row in record.rows if str(row.get("op")) == op]
        scores = [v for v in (number(row.get("score")) for row in rows) if v is not None]
        faults = sum(row.get("status") == "fault" for row in rows)
        mean, best = (
            (f"{plots.mean(scores):.4g}", f"{pick_best(scores):.4g}") if scores else ("-", "-")
        )
        seconds, tokens = (
            plots.mean([v for v in plots.series(rows, key) if v == v])
            for key in ("seconds", "tokens")
        )
        lines.append(
            f"{clean(op):12} {len(rows):>6} {len(scores):>6} {len(rows) - len(scores) - faults:>6} "
            f"{faults:>6} {mean:>11} {best:>9} {seconds:>7.1f} {tokens:>8.0f}"
        )
    return [*lines, "", "best path            " + " > ".join(search_plots.best_path(record))]


# ------------------------------------------------------------------ pictures and pages


def refresh(records: list[RunData], options: Options) -> list[Path]:
    """All pictures and pages of these runs: one run in its own directory, several in the one that holds them."""
    paths, several = [], options.runs[0] if len(options.runs) == 1 else folder_of(options.runs)
    folder = records[0].dir if len(records) == 1 else several
    if len(records) == 1:
        paths += plot(records[0], options.format)
    else:
        from flatlab.runs import compare

        paths += compare.plot_many(records, folder, options.format)
    if options.report:
        from flatlab.runs import page

        paths.append(page.write(records, folder / "report.html", watching=options.watch))
    return paths


def watch(options: Options):
    """Prints what is new and refreshes the views, until no process writes these runs any more."""
    printed, stamp, said = {}, None, set()
    while True:
        records, wrong = find_runs(options.runs)
        for sentence in {*wrong} - said:
            print(paint(f"waiting: {sentence}", "grey"), flush=True)
            said.add(sentence)
        now = [(record.dir, len(record.rows), record.status) for record in records]
        if records and now != stamp:
            stamp = now
            for record in records:
                for row in record.rows[printed.get(record.dir, 0) :]:
                    print(row_line(record, row, header=record.dir not in printed), flush=True)
                    printed[record.dir] = printed.get(record.dir, 0) + 1
            start = time.monotonic()
            send(records, options)
            paths = refresh(records, options)
            time.sleep(
                min(60.0, 2 * (time.monotonic() - start))
            )  # at most a third of one processor
        elif (
            records
            and (not wrong or len(options.runs) > 1)
            and not any(record.running for record in records)
        ):
            print(*(f"wrote {path}" for path in paths), sep="\n")
            return
        else:
            time.sleep(options.every)


def row_line(record: RunData, row: dict, header: bool) -> str:
    if record.kind == "grpo":
        return step_line(row, header)
    score = number(row.get("score"))
    result = "failed" if score is None else f"{score:.4g}"
    return f"{record.name}  {clean(row['id']):<10} {clean(row['op']):<9} {result:>8}  {clean(row['idea'])}"[
        :140
    ]


def send(records: list[RunData], options: Options):
    """Optional sinks, from the same rows; what was sent before is not sent again by this process."""
    if options.tensorboard or options.wandb:
        from flatlab.runs import trackers

        for record in records:
            trackers.send(record, options.tensorboard, options.wandb)


# ------------------------------------------------------------------ start


def main(options: Options):
    if not options.runs:
        raise UserError("Name one or more run directories: python viz.py logs/<run>")
    if options.watch:
        return watch(options)
    records, wrong = find_runs(options.runs)
    if not records or wrong and len(options.runs) == 1:
        raise UserError("\n".join(wrong) or "No run there.")
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    if (
        options.episode
        or options.best
        or options.worst
        or options.compare
        or options.list
        or options.status
    ):
        return print("\n\n".join(texts(records, options)))
    send(records, options)
    if len(records) == 1:
        print(summary(records[0]))
    else:
        from flatlab.runs import compare

        print(compare.table(records))
    print("", *(f"wrote {path}" for path in refresh(records, options)), sep="\n")


def texts(records: list[RunData], options: Options) -> list[str]:
    """What the terminal views print, a text per run."""
    if options.compare:
        return [
            side_by_side(
                pick(records[0], options.compare[0]),
                pick(records[min(1, len(records) - 1)], options.compare[1]),
            )
        ]
    parts = []
    for record in records:
        if options.list or options.status:
            parts.append(
                "\n".join(
                    [paint(plots.heading(record), "bold"), *list_lines(record, options.status)]
                )
            )
        if options.episode:
            parts.append(show(pick(record, options.episode)))
        parts += [
            show(extreme(record, worst))
            for worst, wanted in ((False, options.best), (True, options.worst))
            if wanted
        ]
    return parts


def folder_of(paths: tuple[Path, ...]) -> Path:
    """Where the views of several runs go: the directory that holds them all."""
    return Path(os.path.commonpath([Path(path).resolve().parent for path in paths]))


if __name__ == "__main__":
    sys.stdout.reconfigure(
        errors="replace"
    )  # a lone surrogate in a transcript is no reason to stop
    try:
        main(tyro.cli(Options, description=__doc__))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (UserError, OSError) as error:  # OSError: no right to write the plot, no room left
        print(error, file=sys.stderr)
        sys.exit(2)
