"""The numbers of a training run: the row of a step, evaluations, the comparison of adapters at the
end; alarms about a step, and the reasons to stop. No torch.

The mean value chooses the best adapter and heads every table, line and curve: see task/value.py.
"""

import itertools
import re
from math import hypot, isnan
from pathlib import Path
from statistics import fmean, median, stdev

from flatlab.errors import UserError
from flatlab.numbers import number, standard_error
from flatlab.task.definition import Task
from flatlab.task.sanity import warning
from flatlab.task.value import fell_by_half, on_test_part, summary
from flatlab.train.batch import Group

PHASES = ("seconds_sample", "seconds_train", "seconds_sync", "seconds_judge")

# ------------------------------------------------------------------------------ a run


def first_results(tasks: list[Task], kind: str) -> dict:
    """The first content of result.json. kind: of the run, see flatlab/view/reader.py."""
    scale = tasks[0].scale
    if len(tasks) > 1:
        scale = {"metric": "value", "higher_is_better": True, "baseline": 0.0, "reference": 1.0}
    return {
        "kind": kind,
        "status": "running",
        "final": None,  # of an earlier end, if the run continues
        "value": None,
        "task": " ".join(task.name for task in tasks),
        **scale,
        "split": split_of(tasks),
        "selected_on_test": any(task.selected_on_test for task in tasks),
        "degenerate": warning(tasks),
    }


# ------------------------------------------------------------------------------ the row of a step


def step_metrics(groups: list[Group], tasks: list[Task]) -> dict:
    """The row's numbers about the episodes of a step: those of an evaluation, and more."""
    row = evaluation(episode_rows(groups), tasks)
    episodes = [e for g in groups for e in g.played]
    rewards = [e.reward for e in episodes]
    return row | {
        "episodes": row.pop("n"),
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "turns": fmean(len(e.turns) for e in episodes),
        "reply_tokens": fmean(e.tokens for e in episodes),
        "fault_share": row["faults"] / (row["faults"] + len(episodes)),
        "ungraded_share": fmean(bool(e.grader_output) for e in episodes),
        "records": sum(bool(e.record) for e in episodes),
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
        "tokens_per_second": sum(e.tokens for g in groups for e in g.played) / seconds,
        "memory_gb": peak_bytes(policy.device) / 2**30,
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
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])


# ------------------------------------------------------------------------------ evaluations


def episode_rows(groups: list[Group]) -> list[dict]:
    return [e.row() for g in groups for e in g.episodes]


def evaluation(rows: list[dict], tasks: list[Task]) -> dict:
    """The summary of all episodes, see task/value.py. With several tasks it has no scores, because
    their units differ, and that of each task follows under `<task>.<key>`.

    rows: of Episode.row(). If the test part was scored, its keys begin with `test_`; exact tasks
    have one part only, which stands for both. Raises UserError if every episode was a fault.
    """
    played = [row for row in rows if row["outcome"] != "fault"]
    if not played:
        raise UserError(f"Every sandbox broke: {rows[0]['reason']}")
    result = {"n": len(played), "faults": len(rows) - len(played)}
    parts = {"": played}
    if any(row["test_value"] is not None for row in played):
        parts["test_"] = on_test_part(played)
    for prefix, graded in parts.items():
        scopes = {"": (graded, tasks[0] if len(tasks) == 1 else None)}
        if len(tasks) > 1:
            for task in tasks:
                of_task = [row for row in graded if row["task"] == task.name]
                scopes |= {f"{task.name}.": (of_task, task)} if of_task else {}
        for scope, (scoped, task) in scopes.items():
            numbers = summary(scoped, task)
            result |= {f"{scope}{prefix}{key}": numbers[key] for key in numbers}
    return result


def better(new: dict, best: dict | None) -> bool:
    """Returns whether an evaluation has a larger mean value than the best one so far. Without
    evaluations the last adapter is the best.
    """
    return not best or "value_mean" not in new or new["value_mean"] > best["value_mean"]


def split_of(tasks: list[Task]) -> str:
    """The part that evaluations are scored on: "validation", or "test" for tasks that have no
    other.
    """
    return " and ".join(dict.fromkeys(task.splits[0] for task in tasks))


# ------------------------------------------------------------------------------ the end of a run


def comparison(evaluated: dict, tasks: list[Task], steps: dict) -> dict:
    """Evaluations of adapters on the same fresh seeds, as in result.json.

    evaluated: name -> (groups, `when` of their rows), the same for adapters with equal weights.
    steps: name -> step of the adapter.
    """
    untrained = evaluated["untrained"]
    final = {"split": split_of(tasks), "best_is_untrained": evaluated["best"] is untrained}
    for name, (groups, when) in evaluated.items():
        result = evaluation(episode_rows(groups), tasks) | {"when": when}
        if name != "untrained":
            result |= paired_difference(groups, untrained[0]) | {"step": steps[name]}
        if name != "best":  # others with equal weights have read the test part, too
            result = {key: result[key] for key in result if not is_test_number(key)}
        final[name] = result
    return final


def is_test_number(key: str) -> bool:
    """True for test_value_mean and for that of one of several tasks: digits.test_value_mean."""
    return key.rpartition(".")[2].startswith("test_")


def paired_difference(groups: list[Group], reference: list[Group]) -> dict:
    """Mean and standard error of x_s - y_s, the values of the seeds s that both played without a
    fault. The pairing takes out what the seeds have in common.
    """
    values, others = map(values_by_seed, (groups, reference))
    differences = [values[seed] - others[seed] for seed in values if seed in others]
    return {
        "difference": fmean(differences) if differences else None,
        "difference_stderr": standard_error(differences),
        "difference_n": len(differences),
    }


def values_by_seed(groups: list[Group]) -> dict[int, float]:
    return {e.seed: e.value for g in groups for e in g.played}


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
        "micro_tokens",
        lambda x, usual: True,  # the column is there after a failure alone
        "memory was used up, so training passes are smaller from here on",
    ),
    (
        "records",
        lambda x, usual: x > 0,
        "better than the reference: the file is in transcripts/, under record",
    ),
    (
        "zero_variance_share",
        lambda x, usual: x == 1,
        "all groups had equal rewards: there is nothing to compare",
    ),
    (
        "valid_share",
        fell_by_half,
        "fewer than half of the valid submissions are left",
    ),
    ("fault_share", lambda x, usual: x > 0.2, "many sandboxes broke"),
    (
        "ungraded_share",
        lambda x, usual: x > 0.2,
        "the grader often gives no result: grader_output in transcripts/ is what it printed",
    ),
)


def alarms(row: dict, rows: list[dict]) -> list[str]:
    """Sentences about what is suspicious in a row. rows: the ones before it."""
    sentences = []
    for key, suspicious, text in ALARMS:
        if key not in row:
            continue
        earlier = [r[key] for r in rows[-20:] if number(r.get(key)) is not None]
        usual = median(earlier or [row[key]])
        if suspicious(row[key], usual):
            before = f", usually {usual:.3g}" if earlier else ""
            sentences.append(f"{text} ({key} {row[key]:.3g}{before})")
    return sentences


# ------------------------------------------------------------------------------ reasons to stop

KL_LIMIT = 1.0  # nats per token; three steps above it are a collapse
STUCK = 5  # steps in a row without anything to learn, or with almost nothing valid


def collapse(rows: list[dict], best: dict | None) -> str:
    """Why the policy counts as collapsed after the last row, or "".

    best: the evaluation of the adapter in best/.
    """
    latest = rows[-3:]
    if len(latest) == 3 and all(row.get("skipped") for row in latest):
        return "three updates in a row were skipped"
    if len(latest) == 3 and all((row.get("kl") or 0) > KL_LIMIT for row in latest):
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
    """Values also fall by chance, so a fall counts from three standard errors on."""
    if not best or "eval_value_mean" not in row or best["step"] > row["step"]:
        return ""  # a killed run may have saved a better adapter after this row
    last = row["eval_value_mean"]
    fall = best["value_mean"] - last
    error = hypot(best["value_stderr"] or 0.0, row["eval_value_stderr"] or 0.0)
    error = max(0.02, error)  # equal values have no error of their own
    if fall <= 3 * error:
        return ""
    text = (
        f"held-out value fell from {best['value_mean']:.3f} (step {best['step']}) to "
        f"{last:.3f}, {fall / error:.1f} standard errors"
    )
    if fell_by_half(row["eval_valid_share"], best["valid_share"]):
        shares = f"{best['valid_share']:.0%} to {row['eval_valid_share']:.0%}"
        text += f", and the share of valid submissions from {shares}"
    return text
