"""What a training run does beside its steps: evaluations, also before the first step, and the
comparison of the adapters after the last one.

Every rank calls these functions. job.play is play_groups of the script.
"""

from tqdm import tqdm

from flatlab.train import checkpoint, imitation, metrics
from flatlab.train.batch import Group, Plan, gather_groups


def begin(policy, tasks, cfg, job, state) -> None:
    """Before the first step: imitates the runs of --sft, then evaluates what training starts from.

    The adapter before an imitation is evaluated once, in the comparison at the end.
    """
    checkpoint.save_adapter(policy, job, "untrained")
    when = "before training"
    if cfg.sft:
        imitation.warm_start(policy, tasks, cfg, job)
        job.ranks.broadcast(policy.parameters())
        job.loop.call(policy.sync)
        policy.version = 0
        checkpoint.save_adapter(policy, job, "imitated")
        when = "after imitation"
    if cfg.eval_episodes:
        result = judge(policy, tasks, cfg, job, state, "before")
        job.result(before=result)
        if job.run:
            job.run.track({"step": -1} | metrics.evaluation_columns(result))
        job.say(metrics.evaluation_line(when, result, metrics.split_of(tasks)))


def evaluate(policy, tasks, cfg, job, name: str, seed: int, test=False) -> list[Group]:
    """cfg.eval_episodes episodes at the sampling temperature, one per group, the same ones for the
    same seed. They are saved as episodes/<name>.jsonl.

    No update happens meanwhile, so all of them are of one policy.
    """
    planned = [tasks[i % len(tasks)] for i in range(cfg.eval_episodes)]
    plan = Plan(planned, 1, seed, test=test)
    total = len(planned[job.ranks.rank :: job.ranks.world])
    with tqdm(total=total, desc="evaluate", delay=8, mininterval=8, disable=not job.run) as bar:
        groups = job.loop.wait(job.play, policy, plan, cfg, job, bar.update)
    assert {turn["version"] for g in groups for e in g.episodes for turn in e.turns} <= {
        policy.version
    }
    groups = gather_groups(groups, job)
    checkpoint.save_groups(job, name, groups)
    return groups


def judge(policy, tasks, cfg, job, state, name: str) -> dict:
    """Evaluates the adapter, and keeps it if it is better than the best one so far."""
    seed = -1 - 2 * cfg.seed  # seeds of training are not negative
    groups = evaluate(policy, tasks, cfg, job, name, seed)
    result = metrics.evaluation(groups, tasks)
    checkpoint.keep_best(policy, job, state, result | {"step": state.step - 1})
    return result


def after_step(policy, tasks, cfg, job, state) -> dict:
    """Every cfg.eval_every steps and at the end an evaluation, as columns of the row. Without
    evaluations best/ is the last adapter.
    """
    if not cfg.eval_episodes:
        checkpoint.keep(policy, job, state, {"step": state.step - 1})
        return {}
    if state.step % cfg.eval_every and state.step < cfg.steps:
        return {}
    result = judge(policy, tasks, cfg, job, state, f"eval-{state.step - 1:06d}")
    return metrics.evaluation_columns(result)


def compare_adapters(policy, tasks, cfg, job, state) -> dict:
    """Plays the same fresh seeds with the untrained, the imitated, the last and the best adapter.

    Adapters with equal weights are played once: `file` in the results names their episodes. The
    test part is scored for the best one alone.
    """
    folders, weights = job.ranks.first(checkpoint.final_adapters(job.run) if job.run else None)
    steps = {"last": state.step, "best": state.best["step"] + 1}
    seed = -2 - 2 * cfg.seed  # never used for selection
    played, files = {}, {}  # by digest of the weights
    for name in ("best", *folders):
        if weights[name] not in played:
            policy.load_adapter(folders[name])
            job.loop.call(policy.sync)
            policy.version = steps.get(name, 0)
            file = f"final-{name}"
            groups = evaluate(policy, tasks, cfg, job, file, seed, test=name == "best")
            played[weights[name]] = groups
            files[weights[name]] = f"episodes/{file}.jsonl"
    results = metrics.final_comparison({name: played[weights[name]] for name in folders}, tasks)
    for name, result in results.items():
        result["file"] = files[weights[name]]
        if name in steps:
            result["step"] = steps[name] - 1
    return {
        "n": cfg.eval_episodes,
        "split": metrics.split_of(tasks),
        "steps": state.step,
        "best_is_untrained": weights["best"] == weights["untrained"],
        **results,
    }


def finish(policy, tasks, cfg, job, state) -> None:
    """After the last step: compares the adapters, and says in result.json how the run ended."""
    job.loop.cancel()  # the episodes of the steps that a collapse leaves out
    if cfg.eval_episodes:
        final = compare_adapters(policy, tasks, cfg, job, state)
        job.result(final=final)
        if job.run:
            job.run.track(metrics.final_row(final))
    elif state.best:
        job.say(f"best/ of logs/{cfg.name} is the last adapter: nothing was evaluated")
    status = "finished"
    if state.stopped:
        status = f"stopped: {state.stopped}. "
        if cfg.eval_episodes:
            status += (
                f"A new run goes on from the best adapter, that of step {state.best['step']}, with "
                f"--model logs/{cfg.name}/best"
            )
        else:
            status += "best/ is the last adapter, because --eval-episodes is 0: start a new run"
    job.result(status=status)
