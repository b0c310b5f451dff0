"""What a search prints: what is about to run, a line per node, and the table at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

from flatlab.runs.reader import count, plus_minus, read_run
from flatlab.task.sanity import degenerate
from flatlab.tree.nodes import Node, Tree


def banner(cfg, trees: list[Tree], where: Path, path, why: str) -> None:
    """Prints the first lines. path: of the model, None for an endpoint. why: of the sandbox."""
    for task in {t.task.name: t.task for t in trees}.values():
        if degenerate(task):
            print(f"warning  {task.name}: {degenerate(task)}")
    print(
        f"tasks    {', '.join(cfg.tasks.task)}   modes {', '.join(cfg.sampling_mode)}\n"
        f"model    {cfg.model.model}{path.note if path else ''}\n"
        f"sandbox  {why}\n"
        f"plan     {count(len(trees), 'tree')} of {count(cfg.nodes, 'node')}\n"
        f"rule     {cfg.select}, {count(cfg.workers, 'node')} at once"
    )
    for t in trees:
        if t.finished and not t.closed:
            print(f"resumed  {t.run.dir} after {count(len(t.finished), 'node')}")
        if t.test_reads() and not t.closed:
            print(
                f"note     {t.run.dir} has read the test part before and will read it again if "
                "another node becomes the best"
            )
    print(f"run      {where}")
    print(ROW.format(*TITLES), flush=True)


ROW = "{:<14} {:<8} {:>4} {:>7} {:<10} {:<9} {:>9} {:>9} {:>6}  {}"
TITLES = ("task", "mode", "seed", "nodes", "node", "op", "score", "best", "sec", "strategy")


def node_line(t: Tree, node: Node) -> str:
    """One line of the terminal. mode: the sampling mode that was used for this node."""
    score = "fault" if node.status == "fault" else "failed"
    if node.valid:
        score = f"{node.score:.4f}"
    note = "  (fell back to the root)" if node.decision.get("fell_back") else ""
    if t.task.exact and node.valid and node.improvement > 1:
        note += f"  ({node.score:.12g} is better than the reference)"
    return ROW.format(
        t.task.name[:14],
        node.sampling_mode,
        t.seed,
        f"{len(t.finished)}/{t.cfg.nodes}",
        node.id[-10:],
        node.op,
        score,
        "-" if t.rule.is_evaluation else f"{t.best().score:.4f}",
        f"{node.seconds:.1f}",
        node.idea[:60] + note,
    )


def report(trees: list[Tree], where: Path) -> None:
    """The table of a finished search, and for a single tree its pictures and its best node.

    where: directory of the run or grid.
    """
    from flatlab.view import compare, page  # slow: matplotlib and pandas follow

    runs = [read_run(t.run.dir) for t in trees]
    print(f"\n{compare.table(runs)}\n")
    for run in runs:
        if number := run.result["without_strategy"]:
            print(
                f"note     {run.dir}: {number} of {run.result['nodes']} nodes got no strategy, so "
                "their mode is none: the replies held too few that could be read"
            )
    if where == runs[0].dir:  # viz.py draws the pictures of a grid; they take minutes
        compare.plot_now_and_then(trees[0].run, always=True)
        page.write(runs, where / "report.html")
        print_best(trees[0], runs[0].result)
        print(f"pictures: {where}/*.png   page: {where}/report.html", end="   ")
    print(f"everything: {where}   (python viz.py {shlex.quote(str(where))})")


def print_best(t: Tree, result: dict) -> None:
    """The best node, whose scores are in the table, and the mean over all nodes or episodes."""
    noun = "episode"
    if not t.rule.is_evaluation:
        noun = "node"
        best = t.best()
        print(f"best     {best.id}, baseline {result['baseline']:.4f}   {best.idea}")
    mean = plus_minus(result["node_mean"], result["node_stderr"])
    graded = count(result["nodes"] - result["faults"], noun)
    print(f"mean     {mean} over {graded} ({result['split']}; failed ones count as the baseline)")
