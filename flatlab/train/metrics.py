"""The numbers of a training run: the row of a step, evaluations, and the comparison of adapters at
the end. No torch.

One number chooses the best adapter and is shown in every table, line and curve: see headline(). A
failed episode counts as the baseline in it.
"""

import itertools
import time
from functools import partial
from statistics import fmean, stdev

from flatlab.errors import UserError
from flatlab.model import memory
from flatlab.numbers import BEST_OF, best_text, expected_best, plus_minus, standard_error
from flatlab.task.definition import Task, clipped_improvement, improvement
from flatlab.train.batch import Group

PHASES = ("seconds_sample", "seconds_train", "seconds_sync", "seconds_judge")
UNBOUNDED = {"r2"}  # metrics where higher is better and a single bad score can be arbitrarily low


def headline(tasks: list[Task]) -> str:
    """The name of the number: "score", the mean score of one task; or "improvement", the mean
    clipped improvement.

    The latter is for several tasks, whose scores have different units, and for a loss without a
    bound, where a single episode would decide the mean.
    """
    if len(tasks) > 1:
        return "improvement"
    is_bounded = tasks[0].higher_is_better and tasks[0].metric.lower() not in UNBOUNDED
    return "score" if is_bounded else "improvement"


def counted_score(score, task: Task) -> float:
    """The score as tables count it: without a valid submission the baseline."""
    return score.value if score.valid else task.baseline


def counted_improvement(score, task: Task, tasks: list[Task]) -> float:
    """The improvement as tables count it: without a valid submission 0, the baseline. Clipped to
    [-1, 1] where it is the headline.
    """
    value = improvement(counted_score(score, task), task)
    return value if headline(tasks) == "score" else clipped_improvement(value)


# ------------------------------------------------------------------------------ the row of a step


def step_metrics(groups: list[Group], tasks: list[Task]) -> dict:
    """The row's numbers about the episodes of a step: those of an evaluation, and more."""
    row = evaluation(groups, tasks)
    episodes = [e for g in groups for e in g.played]
    rewards = [r for g in groups for r in g.rewards]
    return row | {
        "episodes": row.pop("n"),
        "improvement_mean": row.pop("improvement"),
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "turns": fmean(len(e.turns) for e in episodes),
        "reply_tokens": fmean(e.reply_tokens for e in episodes),
        "fault_share": row["faults"] / (row["faults"] + len(episodes)),
        "ungraded_share": fmean(bool(e.score.grader_output) for e in episodes),
        "records": sum(bool(e.score.record) for e in episodes),
        "seconds_env": sum(turn["seconds_env"] for e in episodes for turn in e.turns),
        "groups": len(groups),
        "zero_variance_share": fmean(not g.informative for g in groups),
    }


def timing(policy, times: list[float], groups: list[Group]) -> dict:
    """The row's numbers about time and memory. times: of the begin of the step and of the end of
    each phase; "sample" is the time in which the trainer waited for episodes.
    """
    phases = [after - before for before, after in itertools.pairwise(times)]
    seconds = sum(phases[:3])
    return {
        "seconds": seconds,
        **dict(zip(PHASES, phases)),
        "tokens_per_second": sum(e.reply_tokens for g in groups for e in g.played) / seconds,
        "engine_idle_share": policy.idle_share(),
        "memory_gb": memory.peak_bytes(policy.device) / 2**30,
        "time": time.time(),
    }


# ------------------------------------------------------------------------------ evaluations


def evaluation(groups: list[Group], tasks: list[Task]) -> dict:
    """Means and standard errors over episodes. Scores have the task's name before them where they
    are not the headline.

    For one task, improvement is the mean score in other units, so the larger one is the better one.

    Raises UserError if every episode was a fault.
    """
    played = [(e, g.task) for g in groups for e in g.played]
    if not played:
        raise UserError(f"Every sandbox broke: {groups[0].episodes[0].fault}")
    improvements = [counted_improvement(e.score, task, tasks) for e, task in played]
    result = {
        "n": len(played),
        "faults": sum(len(g.episodes) for g in groups) - len(played),
        "valid_share": fmean(e.score.valid for e, _ in played),
        "improvement": fmean(improvements),
        "improvement_stderr": standard_error(improvements),
    }
    for task in tasks:
        own = [e for e, other in played if other.name == task.name]
        prefix = "" if headline(tasks) == "score" else f"{task.name}."
        for key, value in score_summary(own, task).items():
            result[prefix + key] = value
    return result


def score_summary(episodes: list, task: Task) -> dict:
    if not episodes:
        return {}
    best = max if task.higher_is_better else min
    result = {
        "valid_share": fmean(e.score.valid for e in episodes),
        "score_best": best(counted_score(e.score, task) for e in episodes),
    }
    for name in ("score", "test_score"):
        scores = [getattr(e, name) for e in episodes]
        if all(scores):
            counted = [counted_score(score, task) for score in scores]
            result[f"{name}_mean"] = fmean(counted)
            result[f"{name}_stderr"] = standard_error(counted)
            drawn = expected_best(BEST_OF, counted, task.higher_is_better)
            if drawn is not None:
                result[f"{name}_best_of_{BEST_OF}"] = drawn
    return result


def evaluation_columns(result: dict) -> dict:
    """An evaluation as columns of a row."""
    return {f"eval_{key}": value for key, value in result.items()}


def split_of(tasks: list[Task]) -> str:
    """The part that evaluations are scored on: "validation", or "test" for tasks that have no
    other.
    """
    return " and ".join(dict.fromkeys(task.splits[0] for task in tasks))


def evaluation_line(when: str, result: dict, split: str) -> str:
    valid = f"{result['valid_share']:.0%} valid"
    drawn = best_text(result.get(f"score_best_of_{BEST_OF}"))
    return f"{when}: {mean_text(result)} ({split}, N = {result['n']}, {valid}{drawn})"


def mean_text(result: dict) -> str:
    """The headline: 'score 0.7512 ± 0.0101' or 'improvement ...'."""
    if "score_mean" in result:
        return f"score {plus_minus(result['score_mean'], result['score_stderr'])}"
    mean = result.get("improvement", result.get("improvement_mean"))  # the latter in rows
    return f"improvement {plus_minus(mean, result['improvement_stderr'])}"


# ------------------------------------------------------------------------------ the end of a run

ADAPTERS = ("untrained", "imitated", "last", "best")


def paired_difference(groups: list[Group], reference: list[Group], tasks: list[Task]) -> dict:
    """Mean and standard error of x_s - y_s over the seeds s that both played without a fault.

    x, y: scores, or improvements where these are the headline. The pairing takes out what the seeds
    have in common.
    """
    counted = partial(counted_improvement, tasks=tasks)
    if headline(tasks) == "score":
        counted = counted_score
    values, others = [
        {e.seed: counted(e.score, g.task) for g in part for e in g.played}
        for part in (groups, reference)
    ]
    differences = [values[seed] - others[seed] for seed in values if seed in others]
    return {
        "difference": fmean(differences) if differences else None,
        "difference_stderr": standard_error(differences),
        "difference_n": len(differences),
    }


def final_table(result: dict) -> str:
    """The comparison at the end of a training run, for the terminal. result: of result.json.

    "" for searches and for runs that are not finished.
    """
    final = result.get("final")
    if not final:
        return ""
    lines = [
        f"{final['split']} part, {final['n']} fresh seeds that were never used for selection, the "
        "same ones for every adapter",
        f"{'adapter':30} {result['metric']:>17} {f'best of {BEST_OF}':>10}  valid   "
        "difference to the untrained adapter",
    ]
    for name in ADAPTERS:
        if name in final:
            played = final[name]
            value = mean_text(played).partition(" ")[2]
            step = played.get("step", -1)  # an adapter from before the first step has none
            label = name if step < 0 else f"{name} (step {step})"
            best = played.get(f"score_best_of_{BEST_OF}")
            drawn = "" if best is None else f"{best:.4f}"
            line = f"{label:30} {value:>17} {drawn:>10} {played['valid_share']:>6.0%}"
            if name != "untrained":
                difference = plus_minus(played["difference"], played["difference_stderr"], "+")
                line += f"   {difference} (N = {played['difference_n']})"
            lines.append(line)
    for key, value in final["best"].items():
        if key.endswith("test_score_mean"):
            error = final["best"][key.removesuffix("mean") + "stderr"]
            task = key.removesuffix("test_score_mean").replace(".", " ")
            lines.append(f"best adapter on the test part: {task}{plus_minus(value, error)}")
    if final["best_is_untrained"]:
        lines.append("best is the untrained adapter: no evaluation during training was better.")
    return "\n".join(lines)
