"""The section `search`: modes of asking for strategies, and selection rules, at equal tokens.

    python tests/bench search --seeds 0,1,2,3,4,5,6,7,8,9 --jobs 24 --write

One factor is changed at a time, from mode none and rule bfs. Trees are compared by the value of
their selected node, paired by seed. A tree runs one node at a time, so that rules know all earlier
scores and a tree exceeds its tokens by at most one request; --jobs is the number of trees at a
time. Trees are in logs/ of this folder; a finished one is read and not grown again.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.measure import ENVIRONMENT, PROJECT
from flatlab.numbers import duration, value_text
from flatlab.runs.store import transcript_reader
from flatlab.tree.requests import same
from flatlab.view.reader import read_run

START = ("none", "bfs")
MODES = [(mode, "bfs") for mode in ("sequence", "uniform", "tail", "local")]
RULES = [("none", rule) for rule in ("greedy", "ucb", "puct", "linear")]
CELLS = [START, *MODES, *RULES]
TOKENS = {  # sampled for a tree, 12 to 21 nodes of START
    "titanic": 1000,
    "battleOfSexes": 500,
    "erdosOverlap": 1200,
    "autocorrelation": 1700,
}
OWN_MODELS = {"autocorrelation": "logs/tiny-autocorrelation"}  # the stand-in does not know it
PICTURE = PROJECT / "docs/pictures/search-modes.png"


def search(args):
    """(headline, rows) and a picture. --only: names of tasks, modes and rules, default all; a
    {task} in --model is replaced.
    """
    seeds = [int(seed) for seed in args.seeds.split(",")]
    only = args.only.split(",") if args.only else [*TOKENS, *sum(CELLS, ())]
    tasks = [task for task in TOKENS if task in only]
    cells = [cell for cell in CELLS if {*cell} <= {*START, *only}]
    models = {task: model_of(task, args.model) for task in tasks}
    for model in dict.fromkeys(models.values()):
        own_tasks = [task for task in tasks if models[task] == model]
        jobs = [(task, *cell, seed) for seed in seeds for task in own_tasks for cell in cells]
        grow_left(model, jobs, args)
    frame = table_of(models, cells, seeds)
    compared = comparisons(frame, tasks, cells)
    path = PICTURE if args.write else Path("logs", PICTURE.name)
    path.write_bytes(picture_of(compared, tasks))
    budgets = ", ".join(f"{task} {TOKENS[task]:,}" for task in tasks)
    headline = (
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}; tokens of a tree: {budgets}; "
        f"{len(seeds)} seeds. Value of the selected node, less that of none and bfs, ± half of a "
        "95 % t interval over seeds; p by a paired t test, after Holm"
    )
    return headline, rows_of(frame, compared, tasks, cells)


def grow_left(model, jobs, args):
    """Grows the trees that are not finished: (task, mode, rule, seed) of each."""
    left = [job for job in jobs if result_of(run_name(model, *job)).get("status") != "finished"]
    print(f"{model}: {len(left)} of {len(jobs)} trees are left", file=sys.stderr, flush=True)
    if not left:
        return
    for task, own in OWN_MODELS.items():
        if model == own and not Path(own).exists():
            make = [sys.executable, PROJECT / "tools/make_tiny.py", "--tasks", task, "--out", own]
            subprocess.run(make, check=True)
    order = json.dumps({"model": model, "trees": left, "jobs": args.jobs})
    command = [sys.executable, "-m", "bench.search", *args.flags.split()]
    subprocess.run(command, env=ENVIRONMENT, input=order, text=True, check=True)


def model_of(task, model):
    if model == "tiny":
        return OWN_MODELS.get(task, model)
    return model.format(task=task)


def run_name(model, task, mode, rule, seed):
    return f"search-{task}-{mode}-{rule}-{value_text(model)}-{seed}"


def result_of(name):
    path = Path("logs", name, "result.json")
    return json.loads(path.read_text()) if path.exists() else {}


# ---- trees, in a process of their own


def grow_all(order, flags):
    """Grows the trees of an order with one engine, and prints a line for each."""
    import search as script
    from flatlab.runs import cli
    from flatlab.runs.start import complete_configs
    from policy import open_engine

    opened = []
    for task, mode, rule, seed in order["trees"]:
        own = ["--task", task, "--sampling-mode", mode, "--select", rule, "--seed", str(seed)]
        own += ["--name", run_name(order["model"], task, mode, rule, seed)]
        own += ["--tokens", str(TOKENS[task]), "--nodes", "200", "--workers", "1"]
        own += ["--model", order["model"], "--backend", "local", *flags]
        cfgs, model = complete_configs(cli.parse_configs(script.Config, own))
        opened += cfgs
    policy = open_engine(opened[0], model, max(8, order["jobs"]))
    with contextlib.redirect_stdout(None):  # lines of nodes
        asyncio.run(grow_some(opened, model, policy, order["jobs"]))


async def grow_some(cfgs, model, policy, jobs):
    """Grows at most `jobs` trees at a time."""
    places = asyncio.Semaphore(jobs)
    tasks = {}
    begin = time.monotonic()
    done = 0

    async def grow_one(cfg):
        nonlocal done
        async with places:
            result = await grow(cfg, tasks, model, policy)
        done += 1
        seconds = time.monotonic() - begin
        print(
            f"{done}/{len(cfgs)} {cfg.name}: value {result['value']:+.4f}, {result['nodes']} nodes,"
            f" {result['tokens']} tokens, {duration(seconds)},"
            f" ETA {duration(seconds / done * (len(cfgs) - done))}",
            file=sys.stderr,
            flush=True,
        )

    async with asyncio.TaskGroup() as together:
        for cfg in cfgs:
            together.create_task(grow_one(cfg))


async def grow(cfg, tasks, model, policy):
    """Grows one tree, as search.py does; returns its result.json. tasks: those opened by now."""
    import env
    import search as script
    from flatlab.runs.start import recorded
    from flatlab.tree.nodes import open_trees

    if cfg.task not in tasks:
        [tasks[cfg.task]], _ = env.open_tasks([cfg.task], cfg.sandbox, True)
    [tree], _ = open_trees([cfg], tasks, script.SELECT[cfg.select], model)
    with recorded([tree.run]):
        async with asyncio.TaskGroup() as together:
            await script.grow(tree, policy, asyncio.Semaphore(1), together)
    return tree.run.result


# ---- numbers


def table_of(models, cells, seeds):
    """A pandas.DataFrame with a row per tree."""
    import pandas

    rows = []
    for task, model in models.items():
        for cell in cells:
            for seed in seeds:
                row = tree_row(run_name(model, task, *cell, seed))
                rows.append({"task": task, "cell": ", ".join(cell), "seed": seed} | row)
    return pandas.DataFrame(rows)


def tree_row(name):
    """Numbers of a tree. Its strategies are those that its nodes name first in their replies."""
    run = read_run(f"logs/{name}")
    transcript_of = transcript_reader(run.dir)
    strategies, timeouts = set(), 0
    for row in run.rows:
        turns = transcript_of(row)["turns"]
        said = re.search(r"^Strategy: (.*)", "\n".join(t["reply"] for t in turns), re.MULTILINE)
        strategies |= {same(said[1])} if said else set()
        timeouts += sum(turn["status"] == "timeout" for turn in turns)
    outcomes = [row["outcome"] for row in run.rows]
    faults = outcomes.count("fault")
    return {
        "value": run.result["value"],
        "failed": outcomes.count("failed") / max(1, len(outcomes) - faults),
        "strategies": len(strategies),
        "tokens": run.result["tokens"],
        "nodes": len(outcomes),
        "faults": faults,
        "without": sum("asked" in row["decision"] for row in run.rows),
        "timeouts": timeouts,
    }


def comparisons(frame, tasks, cells):
    """{cell: {task or "all tasks": (mean, half of the interval, p after Holm)}}.

    Holm over the modes, and over the rules, of the means of all tasks; and over the modes or rules
    and the tasks for single tasks.
    """
    values = {}
    for name, trees in frame.groupby("cell"):
        values[name] = trees.pivot(index="seed", columns="task", values="value")
    found = {}
    for group in (MODES, RULES):
        tests = {}
        for cell in group:
            if cell in cells:
                paired = values[", ".join(cell)] - values[", ".join(START)]
                tests |= {(cell, task): t_test(paired[task]) for task in tasks}
                tests[cell, "all tasks"] = t_test(paired.mean(axis=1))
        for family in (["all tasks"], tasks):
            keys = [key for key in tests if key[1] in family]
            for key, p in zip(keys, holm([tests[key][2] for key in keys])):
                found.setdefault(key[0], {})[key[1]] = (*tests[key][:2], p)
    return found


def t_test(differences):
    """Mean, half of the 95 % t interval, two-sided p."""
    from scipy import stats

    if np.ptp(differences) == 0:  # no variance: all pairs are equal
        return differences.mean(), 0.0, float(differences.mean() == 0)
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    return differences.mean(), (high - low) / 2, test.pvalue


def holm(p_values):
    """Adjusted p values (Holm 1979)."""
    order = np.argsort(p_values)
    steps = np.sort(p_values) * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(steps))
    return adjusted


def rows_of(frame, compared, tasks, cells):
    """A row for each cell, and one of all trees."""
    rows = []
    for cell in cells:
        trees = frame[frame.cell == ", ".join(cell)]
        if cell == START:
            by_task = trees.groupby("task").value.mean()
            texts = {task: f"{by_task[task]:+.3f}" for task in tasks}
            texts["all tasks"] = f"value {trees.value.mean():+.3f}"
        else:
            texts = {}
            for task, (mean, half, p) in compared[cell].items():
                texts[task] = f"{mean:+.3f} ± {half:.3f} (p {p:.2g})"
        means = trees.mean(numeric_only=True)
        costs = (
            f"{means.failed:.0%} failed, {means.strategies:.1f} strategies, "
            f"{means.tokens:,.0f} tokens, {means.nodes:.1f} nodes"
        )
        parts = [f"{task} {texts[task]}" for task in tasks]
        rows.append((", ".join(cell), texts["all tasks"], "; ".join([*parts, costs])))
    sums = frame[["nodes", "faults", "timeouts", "without"]].sum()
    note = (
        f"{sums.faults} faults, {sums.timeouts} commands at their time limit, "
        f"{sums.without} nodes without the strategy that was asked for"
    )
    rows.append(("all trees", f"{len(frame)} trees, {sums.nodes:,} nodes", note))
    return rows


def picture_of(compared, tasks):
    """A forest plot as wide as a column: the content of a PNG file."""
    from flatlab.view import plots

    figure = plots.new_figure(plots.COLUMN, 4.2)
    axis = figure.add_subplot(xlabel="difference in value to none and bfs")
    styles = {"all tasks": {"color": "black", "marker": "D"}}
    styles |= dict(zip(tasks, plots.STYLES))
    names = []
    for place, cell in enumerate(compared):
        names.append(cell[0] if cell[1] == START[1] else cell[1])
        for number, (task, style) in enumerate(styles.items()):
            mean, half, _ = compared[cell][task]
            height = place + 0.15 * (number - len(tasks) / 2)
            width = 1.6 if task == "all tasks" else 0.9
            label = task if place == 0 else None
            axis.errorbar(
                mean, height, xerr=half, label=label, elinewidth=width, linestyle="", **style
            )
    axis.axvline(0, color="black", linewidth=0.8)
    modes = sum(cell in MODES for cell in compared)
    if 0 < modes < len(names):
        axis.axhline(modes - 0.5, color=plots.GREY, linewidth=0.8, linestyle="--")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=3)
    return plots.encoded(figure, "png")


if __name__ == "__main__":
    grow_all(json.load(sys.stdin), sys.argv[1:])
