"""The numbers of a training run: the row of a step, evaluations, the comparison of adapters at the
end; alarms about a step, and the reasons to stop. No torch.

One number chooses the best adapter and is shown in every table, line and curve: see headline(). A
failed episode counts as the baseline in it.
"""

import itertools
import re
import time
from functools import partial
from math import hypot, isnan
from pathlib import Path
from statistics import fmean, median, stdev

from flatlab.errors import UserError
from flatlab.numbers import (
    BEST_OF,
    best_text,
    expected_best,
    number,
    plus_minus,
    standard_error,
)
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
        "memory_gb": peak_bytes(policy.device) / 2**30,
        "time": time.time(),
    }


def peak_bytes(device: str = "cpu") -> int:
    """Peak memory: of the GPU since the last call, engine included; without one of this process,
    from /proc, because getrusage() would report the parent's peak.
    """
    if device != "cpu":
        import torch

        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


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


def better(new: dict, best: dict | None) -> bool:
    """Whether an evaluation has a larger mean than the best one so far, in the number that the
    tables show (see headline).

    An adapter without any valid submission counts as the baseline. It is never better than one with
    some, because a policy that submits nothing would then beat a poor one. Without evaluations the
    last adapter is the best.
    """
    if not best or "improvement" not in new:
        return True
    if bool(new["valid_share"]) != bool(best["valid_share"]):
        return new["valid_share"] > 0
    return new["improvement"] > best["improvement"]


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


# ------------------------------------------------------------------------------ alarms

ALARMS = (  # key of the row, predicate of (value, median of the twenty steps before), message
    (
        "entropy",
        lambda x, usual: x < usual / 4,
        "the entropy collapsed: the samples of a group are nearly the same",
    ),
    (
        "entropy",
        lambda x, usual: x > 2 * usual + 0.2,
        "the entropy explodes: lower --lr or raise --kl",
    ),
    (
        "clip_share",
        lambda x, usual: x > 0.5 or x > 0.2 and x > 2 * usual,
        "many tokens are clipped: the update is too large",
    ),
    (
        "logprob_diff_mean",
        lambda x, usual: x > 10 * usual + 1e-6,
        "engine and trainer drift apart",
    ),
    (
        "grad_norm",
        lambda x, usual: isnan(x) or x > 10 * usual > 0,
        "the gradient is much larger than usual",
    ),
    (
        "lost_tokens",
        lambda x, usual: x > 0,
        "some log-probs are not finite: their tokens were left out",
    ),
    ("skipped", lambda x, usual: x > 0, "the update was skipped"),
    (
        "records",
        lambda x, usual: x > 0,
        "better than the reference: the file is in episodes/, under record",
    ),
    (
        "zero_variance_share",
        lambda x, usual: x == 1,
        "all groups had equal rewards: there is nothing to compare",
    ),
    ("fault_share", lambda x, usual: x > 0.2, "many sandboxes broke"),
    (
        "ungraded_share",
        lambda x, usual: x > 0.2,
        "the grader often gives no result: grader_output in episodes/ is what it printed",
    ),
)


def alarms(row: dict, rows: list[dict]) -> list[str]:
    """What is suspicious in a row, one sentence each. rows: the ones before it."""
    sentences = []
    for key, suspicious, text in ALARMS:
        if key not in row:
            continue
        earlier = [r[key] for r in rows[-20:] if number(r.get(key)) is not None]
        usual = median(earlier or [row[key]])
        if suspicious(row[key], usual):
            comparison = f", usually {usual:.3g}" if earlier else ""
            sentences.append(f"{text} ({key} {row[key]:.3g}{comparison})")
    return sentences


# ------------------------------------------------------------------------------ reasons to stop

KL_LIMIT = 1.0  # nats per token; three steps above it are a collapse
STUCK = 5  # steps in a row without anything to learn, or with almost nothing valid


def collapse(rows: list[dict], best: dict | None = None) -> str:
    """Why the policy counts as collapsed after the last row, or "".

    best: the evaluation of the adapter in best/.
    """
    if len(rows) >= 3 and all(row.get("skipped") for row in rows[-3:]):
        return "three updates in a row were skipped"
    if len(rows) >= 3 and all((row.get("kl") or 0) > KL_LIMIT for row in rows[-3:]):
        return f"KL to the reference was above {KL_LIMIT:g} nats per token for three steps"
    return is_stuck(rows) or evaluation_fell(rows[-1], best)


def is_stuck(rows: list[dict]) -> str:
    latest = rows[-STUCK:]
    if len(latest) < STUCK:
        return ""
    if not any("loss" in row for row in latest):
        return (
            f"there was nothing to learn in {STUCK} steps in a row, because the rewards of each "
            "group were equal"
        )
    before, share = [max(row["valid_share"] for row in part) for part in (rows, latest)]
    if share > before / 10:
        return ""
    return (
        f"at most {share:.1%} of the episodes were valid in {STUCK} steps in a row, after up to "
        f"{before:.0%}"
    )


def evaluation_fell(row: dict, best: dict | None) -> str:
    """Scores also fall by chance, so a fall counts from three standard errors on."""
    if not best or "eval_improvement" not in row or best["step"] > row["step"]:
        return ""  # a killed run may have saved a better adapter after this row
    last = row["eval_improvement"]
    fall = best["improvement"] - last
    errors = [best["improvement_stderr"] or 0.0, row["eval_improvement_stderr"] or 0.0]
    error = max(0.02, hypot(*errors))  # equal scores have no error of their own
    if fall <= 3 * error:
        return ""
    return (
        f"held-out improvement fell from {best['improvement']:.3f} (step {best['step']}) to "
        f"{last:.3f}, {fall / error:.1f} standard errors"
    )
