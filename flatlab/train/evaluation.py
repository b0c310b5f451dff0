"""Evaluations of a training run, also before the first step, and the comparison of the adapters
after the last one.

Every rank calls these functions. job.play is play_groups of the script.
"""

from flatlab.train import checkpoint, imitation, metrics
from flatlab.train.batch import Group, Plan, gather_groups


def begin(policy, tasks, cfg, job) -> None:
    """Before the first step: imitates the runs of --sft, then evaluates what training starts from.

    The adapter before an imitation is evaluated once, in the comparison at the end.
    """
    checkpoint.save_adapter(policy, job, "untrained")
    when = "before training"
    if cfg.sft:
        imitation.warm_start(policy, tasks, cfg, job)
        job.ranks.broadcast(policy.parameters())
        job.loop.wait(policy.sync)
        policy.version = 0
        checkpoint.save_adapter(policy, job, "imitated")
        when = "after imitation"
    if cfg.eval_episodes:
        result = judge(policy, tasks, cfg, job, "before")
        job.result(before=result)
        if job.run:
            job.run.track({"step": -1} | metrics.evaluation_columns(result))
        job.say(metrics.evaluation_line(when, result, metrics.split_of(tasks)))


def evaluate(policy, tasks, cfg, job, name: str, seed: int, test=False) -> list[Group]:
    """cfg.eval_episodes episodes at the sampling temperature, one per group, the same ones for the
    same seed. They are saved as episodes/<name>.jsonl.

    No update happens meanwhile, so all of them are of one policy.
    """
    job.say(f"evaluate {name}")
    planned = [tasks[i % len(tasks)] for i in range(cfg.eval_episodes)]
    plan = Plan(planned, 1, seed, test=test)
    groups = gather_groups(job.loop.wait(job.play, policy, plan, cfg, job), job)
    checkpoint.save_groups(job, name, groups)
    return groups


def judge(policy, tasks, cfg, job, name: str) -> dict:
    """Evaluates the adapter, and keeps it if it is better than the best one so far."""
    seed = -1 - 2 * cfg.seed  # seeds of training are not negative
    groups = evaluate(policy, tasks, cfg, job, name, seed)
    result = metrics.evaluation(groups, tasks)
    checkpoint.keep_best(policy, job, result | {"step": job.step - 1})
    return result


def after_step(policy, tasks, cfg, job) -> dict:
    """Every cfg.eval_every steps and at the end an evaluation, as columns of the row. Without
    evaluations best/ is the last adapter.
    """
    if not cfg.eval_episodes:
        checkpoint.keep_best(policy, job, {"step": job.step - 1})
    elif job.step % cfg.eval_every == 0 or job.step >= cfg.steps:
        result = judge(policy, tasks, cfg, job, f"eval-{job.step - 1:06d}")
        return metrics.evaluation_columns(result)
    return {}


def compare_adapters(policy, tasks, cfg, job) -> dict:
    """Plays the same fresh seeds with the untrained, the imitated, the last and the best adapter.

    Adapters with equal weights are played once: `file` in the results names their episodes. The
    test part is read for the best one alone.
    """
    adapters = job.ranks.first(checkpoint.final_adapters(job.run) if job.run else None)
    steps = {"last": job.step - 1, "best": job.best["step"]}
    seed = -2 - 2 * cfg.seed  # never used for selection
    played = {}  # by digest of the weights
    for name in ("best", *adapters):
        folder, weights = adapters[name]
        if weights not in played:
            policy.load_adapter(folder)
            job.loop.wait(policy.sync)
            policy.version = steps.get(name, -1) + 1
            file = f"final-{name}"
            groups = evaluate(policy, tasks, cfg, job, file, seed, test=name == "best")
            played[weights] = groups, f"episodes/{file}.jsonl"
    untrained = adapters["untrained"][1]
    final = {
        "n": cfg.eval_episodes,
        "split": metrics.split_of(tasks),
        "steps": job.step,
        "best_is_untrained": adapters["best"][1] == untrained,
    }
    for name, (_, weights) in adapters.items():
        groups, file = played[weights]
        result = metrics.evaluation(groups, tasks) | {"file": file}
        if name != "untrained":
            result |= metrics.paired_difference(groups, played[untrained][0])
        if name != "best":
            result = {key: result[key] for key in result if "test_" not in key}
        if name in steps:
            result["step"] = steps[name]
        final[name] = result
    return final


def finish(policy, tasks, cfg, job) -> None:
    """After the last step: compares the adapters, and says in result.json how the run ended."""
    if job.stopped:
        job.loop.cancel()  # the episodes of the steps that are left out
    if cfg.eval_episodes:
        final = compare_adapters(policy, tasks, cfg, job)
        best = final["best"]
        job.result(final=final, value=best.get("test_value_mean", best["value_mean"]))
    elif job.best:
        job.say(f"best/ of logs/{cfg.name} is the last adapter: nothing was evaluated")
    status = "finished"
    if job.stopped:
        which = "best" if cfg.eval_episodes else "last"
        status = (
            f"stopped: {job.stopped}. logs/{cfg.name}/best is the {which} adapter, that of step "
            f"{job.best['step']}: a new run starts from it with --model"
        )
    job.result(status=status)
