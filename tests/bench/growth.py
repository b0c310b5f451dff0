"""Costs of a run beside its model and its sandboxes, and their growth with its length.

python -m bench.growth search RULE NODES      a search with a fake model and fake episodes
python -m bench.growth training STEPS         rows and transcripts of training, and their page
"""

import asyncio
import contextlib
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.measure import ENVIRONMENT, PROJECT, print_result, result_of, this_machine

GROUPS, GROUP = 8, 5  # of training
TURNS = 4


def growth(args):
    """A row for each rule, then those of training: args.count nodes and twice as many steps."""
    from search import SELECT

    rows = []
    for what in args.only.split(",") if args.only else [*SELECT, "training"]:
        if what == "training":
            rows += training_rows(2 * args.count)
        else:
            rows.append(search_row(what, args.count))
        print(rows[-1], file=sys.stderr, flush=True)
    return this_machine(), rows


def search_row(rule, nodes):
    result, error = result_of("growth", "search", rule, nodes, timeout=900)
    if error:
        return rule, "failed", error
    few, many = result["ms"]
    value = (
        f"{few:.1f} ms a node at {nodes // 10} nodes, {many:.1f} at {nodes}: {many / few:.2f} times"
    )
    cpu = "of CPU {:.1f} and {:.1f} ms".format(*result["cpu_ms"])
    return rule, value, f"{cpu}; {result['kb']:.1f} kB a node; depth {result['depth']}"


def resident():
    """Bytes of memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def training_rows(steps):
    result, error = result_of("growth", "training", steps, timeout=3000)
    if error:
        return [("training", "failed", error)]
    few, many = result["ms"]
    cpu = "of CPU {:.1f} and {:.1f} ms".format(*result["cpu_ms"])
    step = f"{few:.1f} ms at step {steps // 10}, {many:.1f} at {steps}: {many / few:.2f} times"
    disk = f"of {result['disk'] / 1e6:.0f} MB of transcripts"
    return [
        ("books of a training step", step, f"{cpu}; {result['kb']:.2f} kB an episode"),
        ("viz.py", f"{result['viz']:.1f} s", f"{steps} steps of {GROUPS * GROUP} episodes"),
        ("its page", f"{result['page'] / 1e6:.1f} MB", disk),
    ]


def fake_turn(rng, words):
    """A turn with so many random numbers in its reply and in its observation."""
    words = " ".join(str(rng.random()) for _ in range(words))
    return {
        "reply": words,
        "action": words[:100],
        "observation": words,
        "note": "",
        "status": "ok",
        "score": None,
        "stop_reason": "stop",
        "reply_tokens": 100,
        "seconds_env": 0.1,
        "version": 0,
    }


# ------------------------------------------------------------------ searches


class FakeModel:
    """Answers every request of a search at once, with the same kind of text."""

    def render(self, messages):
        return [0] * 10

    async def sample(self, tokens, limit, seed=0):
        from flatlab.model.chat import Sample

        rng = random.Random(seed)
        lines = [f"Strategy: plan {rng.random()}\nProbability: 0.0{i}" for i in range(1, 6)]
        return Sample([0] * 50, [0.0] * 50, "\n".join(lines), "stop", 0)


async def fake_play(t, node, parents):
    """An episode without a sandbox. A third of the nodes fail, the others change their parent's
    score a little."""
    from flatlab.task.grading import Score

    rng = random.Random(node.seed)
    for _ in range(rng.randrange(20)):  # so that nodes end in another order than they started
        await asyncio.sleep(0)
    node.tokens += 100
    node.turns = [fake_turn(rng, 40) for _ in range(TURNS)]
    node.status = "submit"
    score = Score(None, t.task.metric, "validation", False, "no submission")
    if rng.random() > 0.3:
        parent = t.nearest_kept(node.parent)
        value = parent.score if parent.valid else t.task.baseline
        score = replace(score, value=value + rng.gauss(0, 0.01), valid=True, message="")
    node.judge(t.task, score)
    return b"\0" * 10240 + b"{}"  # an empty tar and its notes


class NoSandbox(contextlib.nullcontext):
    """The environment in which the finalists are scored."""

    def __init__(self, *_):
        super().__init__(self)

    def restore(self, *_):
        pass

    def score(self, split):
        from flatlab.task.grading import Score

        return Score(0.7, "accuracy", split, True, "")


def search(rule, nodes):
    """Prints the ms and the memory of a node, over the tenth of the nodes that ends with
    number nodes / 10, and over the last tenth."""
    import search
    from flatlab.runs.store import open_run
    from flatlab.tree.nodes import Tree
    from helpers import MADE_BY, search_config
    from tasks import load_task

    search.play_node = fake_play
    search.env.Env = NoSandbox
    config = {"context": 100_000, "max_reply_tokens": 1000}
    config |= {"sampling_mode": "tail", "backend": "local", "workers": 4}
    cfg = search_config(select=rule, nodes=nodes, **config)
    marks = {}
    ends = []  # of the nodes: seconds, seconds of CPU
    run_node = search.run_node

    async def timed(t, node, slots):
        await run_node(t, node, slots)
        ends.append((time.perf_counter(), time.process_time()))
        if len(ends) in (nodes // 3, nodes):
            marks[len(ends)] = resident()

    search.run_node = timed
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        run = open_run(Path(folder, "run"), {}, MADE_BY)
        (run.dir / "nodes").mkdir()
        tree = Tree(load_task("titanic", "", ""), cfg, run, search.SELECT[rule])
        asyncio.run(search.search([tree], FakeModel(), cfg.workers))
    window = nodes // 10
    few, many = window_ms(ends, window, window), window_ms(ends, nodes, window)
    low, high = sorted(marks)
    print_result(
        ms=(few[0], many[0]),
        cpu_ms=(few[1], many[1]),
        kb=(marks[high] - marks[low]) / (high - low) / 1000,
        depth=max(node.depth for node in tree.finished),
    )


def window_ms(ends, last, window):
    """Mean duration and CPU time of the `window` nodes that end with number `last`."""
    begin, end = ends[max(0, last - 1 - window)], ends[last - 1]
    return [1000 * (after - before) / window for before, after in zip(begin, end)]


# ------------------------------------------------------------------ training


class FakeTrainer:
    """State that a checkpoint takes from the policy and from the optimizer."""

    device = "cpu"

    def save(self, folder):
        (folder / "adapter.bin").write_bytes(b"\0" * 100_000)

    def state_dict(self):
        return {}


def fake_groups(task, seed):
    """The groups of a step."""
    from flatlab.task.grading import Score
    from flatlab.train.batch import Group, gather_groups
    from flatlab.train.job import TrainingRun
    from flatlab.world.episode import Episode, Segment, packed_tokens

    rng = random.Random(seed)
    groups = []
    for number in range(GROUPS):
        episodes = []
        for _ in range(GROUP):
            episode = Episode(task.name, seed, status="submit")
            episode.judge(task, Score(rng.gauss(0.7, 0.05), task.metric, "validation", True, ""))
            episode.reward = episode.improvement
            episode.turns = [fake_turn(rng, 10) for _ in range(TURNS)]
            episode.segments = [Segment([1] * 500, [-1] * 100 + [0] * 400, [0.0] * 500, [0] * 500)]
            episode.packed = packed_tokens(episode.segments)
            episodes.append(episode)
        groups.append(Group(number, task, episodes))
    return gather_groups(groups, TrainingRun())


def training(steps):
    """Prints the ms that a step costs beside sampling and learning, and what viz.py makes of it."""
    from flatlab.runs.store import open_run
    from flatlab.train import metrics
    from flatlab.train.job import TrainingRun
    from helpers import MADE_BY
    from tasks import load_task

    task = load_task("titanic", "", "")
    trainer = FakeTrainer()
    rows, seconds, marks = [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        config = {"task": ["titanic"], "model": "fake", "seed": 0, "steps": steps}
        job = TrainingRun(run=open_run(Path(folder, "run"), config, MADE_BY))
        job.update_result(**metrics.first_results([task], "training"))
        with contextlib.redirect_stdout(None):
            made = [fake_groups(task, seed) for seed in range(20)]
            for step in range(steps):
                groups = made[step % len(made)]
                begin = time.perf_counter(), time.process_time()
                books(trainer, job, rows, groups, task, step)
                end = time.perf_counter(), time.process_time()
                seconds.append([after - before for before, after in zip(begin, end)])
                if step + 1 in (steps // 3, steps):
                    marks[step + 1] = resident()
        job.update_result(status="finished")
        run = job.run.dir
        begin = time.perf_counter()
        subprocess.run([sys.executable, PROJECT / "viz.py", run], env=ENVIRONMENT, check=True)
        viz = time.perf_counter() - begin
        few, many = [
            [
                1000 * statistics.median(column)
                for column in zip(*seconds[last - steps // 10 : last])
            ]
            for last in (steps // 10, steps)
        ]
        low, high = sorted(marks)
        print_result(
            ms=(few[0], many[0]),
            cpu_ms=(few[1], many[1]),
            kb=(marks[high] - marks[low]) / (high - low) / (GROUPS * GROUP) / 1000,
            viz=viz,
            page=(run / "report.html").stat().st_size,
            disk=sum(path.stat().st_size for path in (run / "transcripts").glob("*.jsonl")),
        )


def books(trainer, job, rows, groups, task, step):
    """Work of grpo.train in a step beside sampling, learning and sync."""
    from flatlab.task.value import evaluation_columns
    from flatlab.train import checkpoint, metrics
    from flatlab.view import page

    row = {"step": step, **metrics.step_metrics(groups, [task]), "lr": 1e-5, "loss": 0.1}
    job.step = step + 1
    if job.step % 10 == 0:
        checkpoint.save_groups(job.run, f"eval-{step}", groups)
        result = metrics.evaluation(metrics.episode_rows(groups), [task])
        row |= evaluation_columns(result)
        checkpoint.keep_best(trainer, job, result | {"step": step})
    row["alarms"] = metrics.alarms(row, rows)
    rows.append(row)
    metrics.collapse(rows, job.best)
    row |= metrics.timing(trainer, [0.0, 10.0, 20.0, 20.1, 20.1], groups)
    checkpoint.write_step(trainer, trainer, job, row, groups)
    page.plot_now_and_then(job.run.dir)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "search":
        search(arguments[0], int(arguments[1]))
    else:
        training(int(arguments[0]))
