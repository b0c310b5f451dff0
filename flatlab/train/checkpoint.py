"""What outlives a step of training: row, transcripts, checkpoint, the best adapter; and the way back to them.

Every rank calls these functions; only rank 0 has a `run` and writes.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flatlab.episode.sanity import degenerate
from flatlab.episode.task import Task
from flatlab.runs.views import plot_now_and_then
from flatlab.train import metrics
from flatlab.train.batch import Group
from flatlab.train.tensors import save_tensors


@dataclass
class State:
    """What a checkpoint holds besides adapter and optimiser. All chance is a function of seed and step: there is no
    generator to save."""

    step: int = 0  # the next one
    version: int = 0  # syncs so far
    lr_scale: float = 1.0
    since: int = 0  # step of the last restore: warm-up and guard count from there
    restores: int = 0
    stopped: str = ""  # why the guard ended the run
    best: dict | None = None  # evaluation of the adapter in best/
    recent: dict = field(default_factory=dict)  # for `percentile`, see metrics.remember


def banner(cfg, tasks: list[Task], path, why: str, run) -> None:
    """First lines of the run, and what its result.json begins with."""
    one = tasks[0] if len(tasks) == 1 else None
    run.result(
        status="running",
        task=" ".join(cfg.task),
        metric=one.metric if one else "improvement",
        higher_is_better=one.higher_is_better if one else True,
        baseline=one.baseline if one else 0.0,
        reference=one.reference if one else 1.0,
        selected_on_test=any(len(t.splits) == 1 for t in tasks),
        degenerate="; ".join(filter(None, map(degenerate, tasks))) or None,
    )
    for t in tasks:
        way = "higher" if t.higher_is_better else "lower"
        print(f"task     {t.name}: {t.metric}, {way} is better, baseline {t.baseline:.4g}")
    stand_in = (
        "  (a stand-in: it knows only the built-in tasks; for trials, not for results)"
        if path.is_tiny
        else ""
    )
    print(
        f"model    {short(path.adapter or path.base)}{stand_in}\n"
        f"sandbox  {why}\n"
        f"plan     {cfg.steps} steps x {cfg.groups} groups x {cfg.group_size} episodes, {cfg.advantage} advantage, "
        f"{cfg.loss} loss\n"
        f"run      {run.dir}   (python viz.py {run.dir})",
        flush=True,
    )


def short(path) -> str:
    return str(path).replace(str(Path.home()), "~", 1)


def farewell(run) -> None:
    for when in [key for key in ("before", "after") if key in run.results()]:
        print(metrics.show(f"{when:6} training", run.results()[when]))
    plot_now_and_then(run, always=True)
    print(
        f"curves: {run.dir}/curves.png   transcripts: {run.dir}/episodes/   adapter: {run.dir}/best"
    )


def begin(policy, run, job, state: State, when: str, result: dict) -> None:
    """Notes an evaluation before the first step: in result.json, as the best so far, in a line."""
    keep_best(policy, run, job, state, result | {"step": -1})
    if run:
        run.result(**{{"before training": "before", "after imitation": "imitated"}[when]: result})
    say(job, metrics.show(when, result))


def say(job, text: str) -> None:
    if job.rank == 0:
        print(text, flush=True)


def keep_best(policy, run, job, state: State, result: dict) -> None:
    if metrics.better(result, state.best):
        state.best = result
        if run:
            with run.whole_directory("best") as folder:
                policy.save(folder)
            run.result(best=result)
    job.gather(None)  # from here on every rank finds it


def restore(policy, optimizer, cfg, state: State, best: Path, reason: str) -> str:
    """Back to the best adapter with half the rate; the end when that is not wanted or did not help. Says what."""
    if cfg.guard == "stop" or state.restores == cfg.restores or not best.is_dir():
        state.stopped = reason
        return f"stopped: {reason}"
    policy.load(best)
    policy.sync()
    optimizer.state.clear()
    state.restores, state.lr_scale, state.since = state.restores + 1, state.lr_scale / 2, state.step
    return f"{reason}: back to the adapter of step {state.best['step']}, the rate is halved"


def record(
    policy,
    optimizer,
    cfg,
    run,
    state: State,
    groups: list[Group],
    row: dict,
    clock: list[float],
    engine_seconds: float,
) -> None:
    """Writes a step. clock: when it began, when it had sampled, learned, and synced; engine_seconds: of the sampling."""
    sampling, training, syncing = (b - a for a, b in zip(clock, clock[1:]))
    row |= {
        "version": policy.version,
        "seconds": sampling + training + syncing,
        "seconds_sample": sampling,
        "seconds_train": training,
        "seconds_sync": syncing,
        "seconds_judge": time.perf_counter() - clock[-1],
        "engine_idle_share": 1 - engine_seconds / sampling,
        "env_wait_share": row["seconds_env"]
        / max(1e-9, sum(e.seconds for g in groups for e in g.played)),
        "tokens_per_second": sum(e.reply_tokens for g in groups for e in g.episodes) / sampling,
        "memory_gb": policy.peak_memory(),
        "time": time.time(),
    }
    run.save_episodes(
        row["step"], [e.to_dict() | {"group": g.number} for g in groups for e in g.episodes]
    )
    run.log(row)
    state.version = policy.version
    with run.checkpoint(row["step"], keep=cfg.checkpoints) as folder:
        policy.save(folder)
        save_tensors(
            {"optimizer": optimizer.state_dict(), "state": asdict(state)}, folder / "trainer.pt"
        )
    if row["bytes_between_ranks"] and not run.lines:
        print(
            f"ranks    each sends {row['bytes_between_ranks'] / 1e6:.1f} MB in a step: gradients of the LoRA weights, transcripts"
        )
    print(
        run.step_line(row), *(f"      ! {alarm}" for alarm in row["alarms"]), sep="\n", flush=True
    )
    plot_now_and_then(run)


def resume(policy, optimizer, run, job) -> tuple[State, list[dict]]:
    """Loads the newest checkpoint, forgets what came after it. Returns the state and the rows so far, on every rank."""
    import torch

    step, folder = job.gather((run.checkpoints() or [(-1, None)])[-1] if run else None)[0]
    if run:
        run.truncate_after(step)
    rows = job.gather(run.rows() if run else None)[0]
    if folder is None:
        return State(), rows
    policy.load(folder)
    saved = torch.load(folder / "trainer.pt", map_location=policy.device, weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    policy.version = saved["state"]["version"]
    say(job, f"resumed after step {step} from {folder}")
    return State(**saved["state"]), rows
