"""What a training run prints before its first step and at its end."""

import shlex

from flatlab.runs.reader import count, read_run
from flatlab.task.definition import Task
from flatlab.task.sanity import degenerate
from flatlab.train.metrics import final_table, headline
from flatlab.view import page
from flatlab.view.compare import plot_now_and_then, remarks


def banner(cfg, tasks: list[Task], path, why: str, run) -> None:
    """Prints the first lines of the run and writes what its result.json begins with."""
    warnings = [f"{task.name}: {degenerate(task)}" for task in tasks if degenerate(task)]
    scale = {"metric": "improvement", "higher_is_better": True, "baseline": 0.0, "reference": 1.0}
    if headline(tasks) == "score":
        scale = tasks[0].scale
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
        f"run      {run.dir}   (python viz.py {shlex.quote(str(run.dir))})",
        flush=True,
    )


def farewell(run) -> None:
    """Prints the comparison of the adapters and where everything lies; draws the curves and the
    page, if there is a step.
    """
    if table := final_table(run.results()):
        print(f"\n{table}\n")
    if not run.rows():
        print(f"No step was made: there are no curves. Everything: {run.dir}")
        return
    record = read_run(run.dir)
    plot_now_and_then(run, always=True)
    page.write([record], run.dir / "report.html")
    for sentence in remarks([record]):
        print(sentence)
    print(
        f"curves: {run.dir}/curves.png   page: {run.dir}/report.html   "
        f"transcripts: {run.dir}/episodes/   adapter: {run.dir}/best"
    )
