"""Text that training runs and searches print: at the start, at the end, and a line per node."""

import re
import shlex
from math import ceil, nan
from pathlib import Path
from statistics import fmean

from flatlab.numbers import counted, duration, plus_minus
from flatlab.task.value import score_text
from flatlab.view import compare, page, results
from flatlab.view.reader import COMPARED, read_run

UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"

FINAL_EVALUATIONS = 3  # of the untrained, the last and the best adapter
STAND_IN = "  (the stand-in, for trials; it was made for titanic, battleOfSexes and erdosOverlap)"


def say(text: str) -> None:
    """Prints text without the characters that steer a terminal: a model may have written it."""
    print(re.sub(UNSAFE, "·", text.replace("\r\n", "\n")))


def model_line(cfg, model) -> None:
    """Prints the model. model: its ModelPath."""
    note = STAND_IN if model.stand_in else ""
    print(f"model    {cfg.model.model}{note}")


def banner(cfg) -> None:
    """Prints what a training run is about to do."""
    where = f"logs/{cfg.name}"
    print(
        f"plan     {counted(cfg.steps, 'step')} x {counted(cfg.groups, 'group')} x "
        f"{counted(cfg.group_size, 'episode')}, "
        f"{cfg.advantage} advantage, {cfg.loss} loss\n"
        f"run      {where}   (python viz.py {shlex.quote(where)})",
    )


def step_made(job, rows: list[dict], cfg) -> None:
    """Prints a line about the last step, and refreshes the pictures now and then. job: a
    TrainingRun. rows: all so far.
    """
    row = rows[-1]
    evaluations = ceil(cfg.steps / cfg.eval_every) - job.step // cfg.eval_every
    if job.step >= cfg.steps:
        evaluations = 0
    evaluations += FINAL_EVALUATIONS * (cfg.eval_episodes > 0)
    eta = fmean(r["seconds"] for r in rows[-20:]) * (cfg.steps - job.step)
    eta += evaluations * job.evaluation_seconds
    print(
        f"step {row['step']:3}  reward {row['reward_mean']:+.2f}  "
        f"value {plus_minus(row['value_mean'], row['value_stderr'], '+')}  "
        f"valid {row['valid_share']:4.0%}  no signal {row['zero_variance_share']:4.0%}  "
        f"kl {row.get('kl', nan):.1e}  grad {row.get('grad_norm', nan):.2f}  "
        f"{row['seconds']:.1f} s ({row['seconds_sample']:.1f} sampling)  "
        f"ETA {duration(eta)}",
        *(f"\n      ! {alarm}" for alarm in row["alarms"]),
        sep="",
    )
    page.plot_now_and_then(job.run.dir)


def farewell(run) -> None:
    """Prints the comparison of the adapters, and the outcome if there is a step."""
    if table := results.final_table(run.result):
        print(f"\n{table}")
    if run.rows():
        print_outcome(run.dir)
    else:
        print(f"No step was made: there are no curves. Everything: {run.dir}")


# ------------------------------------------------------------------ imitations, evaluations


def update_made(rows: list[dict], updates: int) -> None:
    """Prints a line about the last update of an imitation. rows: all so far."""
    row = rows[-1]
    eta = fmean(r["seconds"] for r in rows[-20:]) * (updates - len(rows))
    loss = f"{row['loss']:.3f} nats per token"
    print(f"imitate  {len(rows)} of {updates}: {loss}, ETA {duration(eta)}")


def episode_made(episode, played: int, episodes: int, eta: float | None) -> None:
    """Prints a line about an episode of an evaluation."""
    outcome = "fault"
    if episode.value is not None:
        score = f" ({score_text(episode.score)})" if episode.valid else ""
        outcome = f"value {plus_minus(episode.value, None, '+')}{score}"
    turns = counted(len(episode.turns), "turn")
    print(
        f"episode  {played} of {episodes}: {episode.task} {outcome}, {turns}, "
        f"{episode.status}{': ' * bool(episode.reason)}{episode.reason[:100]}, "
        f"ETA {'-' if eta is None else duration(eta)}",
    )


def print_outcome(*directories: Path) -> None:
    """Prints the outcome of one run in words, or the table of several; writes their pictures and
    page.
    """
    runs = [read_run(directory) for directory in directories]
    text = compare.table(runs)
    if len(runs) == 1:
        text = " ".join(results.outcome_sentences(runs[0]))
    say(f"\n{text}\n")
    folder = page.write(runs)[-1].parent
    shown = directories if folder.name.startswith(COMPARED) else [folder]
    again = shlex.join(map(str, shown))
    print(f"pictures: {folder}/*.png   page: {folder}/report.html   again: python viz.py {again}")


# ------------------------------------------------------------------ searches


def search_banner(trees: list, where: Path) -> None:
    """Prints what a search is about to do."""
    cfg = trees[0].cfg
    modes = dict.fromkeys(t.sampling_mode for t in trees)
    print(
        f"plan     {counted(len(trees), 'tree')} of {counted(cfg.nodes, 'node')}, "
        f"modes {', '.join(modes)}\n"
        f"rule     {cfg.select}, {counted(cfg.workers, 'node')} at once"
    )
    for t in trees:
        if t.finished and not t.closed:
            print(f"resumed  {t.run.dir} after {counted(len(t.finished), 'node')}")
        if t.test_reads() and not t.closed:
            print(
                f"note     {t.run.dir} has read the test part before and will read it again if "
                "another node becomes the best"
            )
    print(f"run      {where}")
    print(ROW.format(*TITLES))


ROW = "{:<14} {:<8} {:>4} {:>7} {:<12} {:<9} {:>9} {:>9} {:>6}  {}"
TITLES = [*"task mode seed nodes node op score best sec".split(), "strategy, or why it failed"]


def node_line(t, node) -> str:
    """One line about a Node of a Tree. mode: that of the tree, as in the name of its run."""
    least = 6 if t.task.exact else 4
    score = "fault" if node.status == "fault" else "failed"
    if node.valid:
        score = score_text(node.score, least=least)
    best = score_text(t.best().score, least=least) if t.scored else "-"
    note = ""
    if t.task.exact and node.valid and node.improvement > 1:
        note = f"  ({node.score:.12g} is better than the reference)"
    return ROW.format(
        t.task.name[:14],
        t.sampling_mode,
        t.seed,
        f"{len(t.finished)}/{t.cfg.nodes}",
        node.id,
        node.op,
        score,
        best,
        f"{node.seconds:.1f}",
        (node.idea if node.valid else node.reason)[:60] + note,
    )


def round_line(row: dict) -> str:
    """One line of the terminal after a round of a search that learns."""
    keys = [key for key in results.ROUNDS[:8] if row.get(key) is not None]
    numbers = "  ".join(f"{key} {row[key]:.5g}" for key in keys)
    return "\n      ! ".join([numbers, *row["alarms"]])


def print_end(trees: list) -> None:
    """Prints the outcome: of one search in words, of a grid as a table."""
    if len(trees) == 1 and (strategy := trees[0].best().idea):
        say(f"\nstrategy of the best node: {strategy}")
    print_outcome(*(t.run.dir for t in trees))
