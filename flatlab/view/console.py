"""What a training run prints: before its first step, a line per step, and at its end."""

import shlex
from statistics import fmean

from flatlab.runs.reader import count, duration, fill, read_run
from flatlab.task.definition import Task
from flatlab.task.sanity import degenerate
from flatlab.train.metrics import final_table
from flatlab.view import page
from flatlab.view.compare import plot_now_and_then, remarks


def banner(cfg, tasks: list[Task], path, why: str, run) -> None:
    """Prints the first lines of the run and writes what its result.json begins with."""
    warnings = [f"{task.name}: {degenerate(task)}" for task in tasks if degenerate(task)]
    scale = {"metric": "improvement", "higher_is_better": True, "baseline": 0.0, "reference": 1.0}
    if len(tasks) == 1:
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


def print_step(run, row: dict) -> None:
    print(step_line(run, row))
    for alarm in row["alarms"]:
        print(f"      ! {alarm}")
    print(end="", flush=True)
    plot_now_and_then(run)


def step_line(run, row: dict) -> str:
    """One aligned line for one step, now and then under a line of titles. The ETA is from the
    latest steps.
    """
    columns = COLUMNS
    if "score_mean" not in row:
        columns = [*COLUMNS[:2], IMPROVEMENT, *COLUMNS[4:]]
    if run.config.get("ahead"):
        columns = [*columns, *OVERLAP]
    for key in run.results().get("shown", ()):
        columns = [*columns, (f"{key:>8}", f"{{{key}:.4g}}")]
    run.seconds.append(row["seconds"])
    steps = run.config["steps"] - row["step"] - 1
    eta = steps * fmean(run.seconds[-20:]) if steps > 0 else None
    cells = [f"{fill(form, row):>{len(title)}}" for title, form in columns]
    line = " ".join([*cells, f"{duration(eta):>6}"])
    if len(run.seconds) % 20 != 1:
        return line
    return " ".join([*dict(columns), "   ETA"]) + f"\n{line}"


# title, as wide as its column, and how a row is printed, see fill(); the order never changes
COLUMNS = [
    ("step", "{step:.0f}"),
    ("    reward", "{reward_mean:.2f}±{reward_std:.2f}"),
    (" score", "{score_mean:.4g}"),
    ("  best", "{score_best:.4g}"),
    ("valid", "{valid_share:.0%}"),
    ("same", "{zero_variance_share:.0%}"),  # groups of equal rewards: no signal
    ("fault", "{faults:.0f}"),
    ("turns", "{turns:.1f}"),
    ("tokens", "{reply_tokens:.0f}"),
    ("     kl", "{kl:.1e}"),
    ("lp diff", "{logprob_diff_max:.1e}"),
    (" grad", "{grad_norm:.3f}"),
    ("tok/s", "{tokens_per_second:.0f}"),
    (" GiB", "{memory_gb:.1f}"),  # peak memory of the GPU, or of this process without one
    ("  sec", "{seconds:.1f}"),
    ("smpl/env/train", "{seconds_sample:.1f}/{seconds_env:.1f}/{seconds_train:.1f}"),
]
# several tasks have scores in different units: this stands instead of score and best
IMPROVEMENT = ("  improvement", "{improvement_mean:+.4f}")
# of a run whose later steps play while one is learned
OVERLAP = [("    lag", "{lag_mean:.1f} {lag_max:.0f}"), ("idle", "{engine_idle_share:.0%}")]


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
