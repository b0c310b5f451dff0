"""The section `learned-search`: searches that learn against frozen ones, paired by seed.

Runs are in logs/ of this folder; a finished one is read and not repeated.
"""

import subprocess
import sys

from bench.measure import PROJECT, TESTS
from flatlab.task.value import score_at
from flatlab.view import plots
from flatlab.view.reader import read_run

NODES = 1024
ARMS = {
    "learn": "examples/learn.py --lr 1e-3",
    "frozen": "search.py --select puct --workers 32",
}
TASKS = {"erdosOverlap": "", "autocorrelation": "--model logs/tiny-autocorrelation"}
FIRST = 64  # nodes where the curves begin: earlier differences are large and of chance
SHOWN = (128, 256, 512, NODES)  # numbers of nodes in the table


def best_scores(task, arm, seed):
    """The best score after each number of nodes, from 1 on: a pandas.Series."""
    name = f"{task}-{arm}-{seed}"
    flags = f"--task {task} --nodes {NODES} --seed {seed} --name {name} --backend local"
    script, *command = f"{ARMS[arm]} {flags} {TASKS[task]}".split()
    subprocess.run([sys.executable, PROJECT / script, *command], check=True)
    run = read_run(f"logs/{name}")
    return plots.valid_values(run).cummax().ffill()[1:].map(lambda value: score_at(value, run))


def learned_search(args):
    """(headline, rows) and a picture of the paired difference against nodes."""
    import pandas

    figure = plots.new_figure(10, 4)
    rows = []
    for place, task in enumerate(TASKS, 1):
        gains = {}
        for seed in args.seeds.split(","):
            learned, frozen = [best_scores(task, arm, seed) for arm in ARMS]
            gains[seed] = frozen - learned  # both metrics: lower is better
        frame = pandas.DataFrame(gains).loc[FIRST:]
        axis = figure.add_subplot(1, 2, place, title=task, xlabel="nodes")
        axis.plot(frame, color=plots.GREY, linewidth=0.8)
        plots.draw_mean(axis, frame, color=plots.COLOURS[0])
        axis.axhline(0, color="black", linewidth=0.8)
        for nodes in SHOWN:
            by_seed = frame.loc[nodes]
            value = f"{by_seed.mean():+.4f} ± {by_seed.sem():.4f}"
            rows.append((f"{task}, {nodes} nodes", value, ", ".join(f"{x:+.4f}" for x in by_seed)))
    figure.axes[0].set_ylabel("best score: frozen - learned")
    (TESTS / "learned-search.png").write_bytes(plots.encoded(figure, "png"))
    return f"{NODES} nodes, frozen - learned, positive where learning is better", rows
