"""What a training run prints before its first step and at its end; the steps in between are lines
of Run.step_line.
"""

import asyncio
import time

from flatlab.episode.sanity import degenerate
from flatlab.episode.task import Task
from flatlab.runs.reader import count, duration, read_run
from flatlab.train import metrics
from flatlab.view import compare, page
from flatlab.view.views import plot_now_and_then


def banner(cfg, tasks: list[Task], path, why: str, run) -> None:
    """Prints the first lines of the run and writes what its result.json begins with."""
    warnings = [f"{task.name}: {degenerate(task)}" for task in tasks if degenerate(task)]
    scale = {"metric": "improvement", "higher_is_better": True, "baseline": 0.0, "reference": 1.0}
    if len(tasks) == 1:
        scale = {key: getattr(tasks[0], key) for key in scale}
    run.result(
        status="running",
        final=None,  # of an earlier end, if the run continues
        task=" ".join(task.name for task in tasks),
        **scale,
        selected_on_test=any(task.selected_on_test for task in tasks),
        degenerate="; ".join(warnings) or None,
    )
    for warning in warnings:
        print(f"warning  {warning}")
    for task in tasks:
        measure = f"{task.metric}, {task.direction}"
        print(f"task     {task.name}: {measure}, baseline {task.baseline:.4g}")
    print(
        f"model    {cfg.model.model}{path.note}\n"
        f"sandbox  {why}\n"
        f"plan     {count(cfg.steps, 'step')} x {count(cfg.groups, 'group')} x "
        f"{count(cfg.group_size, 'episode')}, "
        f"{cfg.advantage} advantage, {cfg.loss} loss\n"
        f"run      {run.dir}   (python viz.py {run.dir})",
        flush=True,
    )


class Progress:
    """`async with Progress(job, "evaluate", 64) as progress:` prints a line every 8 seconds.

    Add 1 to progress.done when one of the `total` episodes ends.
    """

    def __init__(self, job, what: str, total: int):
        self.job = job
        self.what = what
        self.total = total
        self.done = 0

    async def __aenter__(self):
        self.start = time.monotonic()
        self.lines = asyncio.create_task(self.tell())
        return self

    async def __aexit__(self, *_):
        self.lines.cancel()

    async def tell(self):
        while True:
            await asyncio.sleep(8)
            seconds = time.monotonic() - self.start
            left = seconds / self.done * (self.total - self.done) if self.done else None
            count = f"{self.done} of {self.total} episodes"
            self.job.say(f"{self.what:8} {count}, {duration(seconds)}, ETA {duration(left)}")


def print_step(run, row: dict) -> None:
    print(run.step_line(row))
    for alarm in row["alarms"]:
        print(f"      ! {alarm}")
    print(end="", flush=True)
    plot_now_and_then(run)


def farewell(run) -> None:
    """Prints the comparison of the adapters and where everything lies; draws the curves and the
    page, if there is a step.
    """
    result = run.results()
    if result.get("final"):
        print(f"\n{metrics.final_table(result['final'], result['metric'])}\n")
    if not run.rows():
        print(f"No step was made: there are no curves. Everything: {run.dir}")
        return
    plot_now_and_then(run, always=True)
    record = read_run(run.dir)
    page.write([record], run.dir / "report.html")
    for sentence in compare.remarks([record]):
        print(sentence)
    print(
        f"curves: {run.dir}/curves.png   page: {run.dir}/report.html   "
        f"transcripts: {run.dir}/episodes/   adapter: {run.dir}/best"
    )
