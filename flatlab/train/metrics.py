"""How a run is doing: the numbers of a step, evaluations, alarms, the guard against collapse. Pure functions, no torch.

Scores of several tasks are averaged as improvements (0 at each task's baseline, 1 at its reference); of one as they are.
"""

from math import isfinite, sqrt
from statistics import fmean, median, stdev

from flatlab.episode.task import Task, improvement
from flatlab.errors import UserError
from flatlab.train.batch import Group


def gain(score, task: Task) -> float:
    """The improvement as tables count it: whoever hands in nothing valid has the baseline, 0."""
    return improvement(score.value, task) if score.valid else 0.0


def counted(score, task: Task, several: bool = False) -> float:
    """The score as tables count it, likewise; with several tasks the improvement."""
    return gain(score, task) if several else score.value if score.valid else task.baseline


def worth(score, task: Task) -> float:
    """What guard and selection go by: the improvement clipped to [-1, 1], and -1 with nothing valid. As in tables, a
    policy that hands in nothing would be better than a bad one; unclipped, one wild score would decide."""
    return max(-1.0, min(1.0, improvement(score.value, task))) if score.valid else -1.0


def standard_error(values: list[float]) -> float:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0


# ---------------------------------------------------------------------------------------------- rows


def describe(groups: list[Group], tasks: list[Task]) -> dict:
    """The row's numbers about the episodes of a step; with several tasks the main ones for each, too."""
    if not any(g.played for g in groups):
        raise UserError(f"Every sandbox of this step broke: {groups[0].episodes[0].fault}")
    row = numbers(groups, len(tasks) > 1)
    for task in tasks if len(tasks) > 1 else ():
        own = [g for g in groups if g.task is task or g.task.name == task.name]
        if any(g.played for g in own):
            keys = (
                "groups",
                "episodes",
                "reward_mean",
                "score_mean",
                "gain_mean",
                "gain_std",
                "valid_share",
                "zero_variance_share",
            )
            row |= {
                f"{task.name}.{key}": value
                for key, value in numbers(own, False).items()
                if key in keys
            }
    return row


def numbers(groups: list[Group], several: bool) -> dict:
    episodes, rewards = (
        [e for g in groups for e in g.played],
        [r for g in groups for r in g.rewards],
    )
    scores = [counted(e.score, g.task, several) for g in groups for e in g.played]
    gains = [worth(e.score, g.task) for g in groups for e in g.played]
    best = max if several or groups[0].task.higher_is_better else min
    turns = [t for e in episodes for t in e.turns]
    faults = sum(len(g.episodes) - len(g.played) for g in groups)
    return {
        "reward_mean": fmean(rewards),
        "reward_std": stdev(rewards) if len(rewards) > 1 else 0.0,
        "gain_mean": fmean(gains),
        "gain_std": stdev(gains) if len(gains) > 1 else 0.0,
        "episodes": len(episodes),
        "score_mean": fmean(scores),
        "score_best": best(scores),
        "valid_share": fmean(e.score.valid for e in episodes),
        "groups": len(groups),
        "zero_variance_share": fmean(not g.informative for g in groups),
        "turns": fmean(len(e.turns) for e in episodes),
        "reply_tokens": fmean(e.reply_tokens for e in episodes),
        "cut_share": fmean(t["stop_reason"] == "length" for t in turns) if turns else 0.0,
        "rejected_share": fmean(t["status"] == "rejected" for t in turns) if turns else 0.0,
        "faults": faults,
        "fault_share": faults / (faults + len(episodes)),
        "seconds_env": sum(e.seconds_env for e in episodes),
    }


def judge(groups: list[Group], several: bool) -> dict:
    """An evaluation: the mean score with its standard error, and the same as improvement ("gain", see `worth`); with
    several tasks the scores of each, too."""
    played = [(e, g.task) for g in groups for e in g.played]
    if not played:
        raise UserError(f"Every sandbox of the evaluation broke: {groups[0].episodes[0].fault}")
    scores, gains = (
        [counted(e.score, t, several) for e, t in played],
        [worth(e.score, t) for e, t in played],
    )
    result = {
        "mean": fmean(scores),
        "stderr": standard_error(scores),
        "n": len(scores),
        "gain": fmean(gains),
        "gain_stderr": standard_error(gains),
        "faults": sum(len(g.episodes) for g in groups) - len(played),
        "valid_share": fmean(e.score.valid for e, _ in played),
    }
    if all(e.test_score for e, _ in played):
        result["test_mean"] = fmean(counted(e.test_score, t, several) for e, t in played)
    for task in {t.name: t for _, t in played}.values() if several else ():
        own = [counted(e.score, t) for e, t in played if t.name == task.name]
        result |= {f"{task.name}.mean": fmean(own), f"{task.name}.stderr": standard_error(own)}
    return result


def show(when: str, result: dict) -> str:
    test = f", test part {result['test_mean']:.4f}" if "test_mean" in result else ""
    each = "".join(
        f", {key.removesuffix('.mean')} {value:.4f}"
        for key, value in result.items()
        if key.endswith(".mean")
    )
    return (
        f"{when}: score {result['mean']:.4f} ± {result['stderr']:.4f} (validation, n={result['n']}, "
        f"{result['valid_share']:.0%} valid{test}){each}"
    )


def better(new: dict, best: dict | None) -> bool:
    """With confidence: by mean improvement minus one standard error, so that a lucky evaluation does not win easily."""
    return best is None or new["gain"] - new["gain_stderr"] > best["gain"] - best["gain_stderr"]


# ---------------------------------------------------------------------------------------------- alarms


ALARMS = (  # key of the row, when (value, its median in the twenty steps before), what to say
    (
        "entropy",
        lambda x, usual: x < usual / 4,
        "entropy has collapsed: the samples of a group are all alike",
    ),
    (
        "entropy",
        lambda x, usual: x > 2 * usual + 0.2,
        "entropy explodes: lower the rate or raise --kl",
    ),
    ("reply_tokens", lambda x, usual: x > 2.5 * usual, "replies run away"),
    (
        "reply_tokens",
        lambda x, usual: x < usual / 3,
        "replies shrink: does the reward pay for doing less?",
    ),
    (
        "ratio_max",
        lambda x, usual: x > 20,
        "a token's ratio to its sampling probability is far off",
    ),
    (
        "clip_share",
        lambda x, usual: x > 0.5 or x > 0.2 and x > 2 * usual,
        "many tokens are clipped: too large an update",
    ),
    (
        "clip_share_first",
        lambda x, usual: x > 0.2,
        "tokens are clipped before anything was learned from them: the clip range is narrower than the engine's rounding",
    ),
    ("logprob_gap_mean", lambda x, usual: x > 10 * usual + 1e-6, "engine and trainer drift apart"),
    ("grad_norm", lambda x, usual: not x < 10 * usual, "the gradient is far larger than usual"),
    (
        "lost_tokens",
        lambda x, usual: x > 0,
        "log-probs that are no numbers; these tokens were left out",
    ),
    ("skipped", lambda x, usual: x > 0, "the update was skipped"),
    (
        "zero_variance_share",
        lambda x, usual: x == 1,
        "all groups had equal rewards: nothing to compare",
    ),
    ("fault_share", lambda x, usual: x > 0.2, "many sandboxes broke"),
)


def alarms(row: dict, rows: list[dict]) -> list[str]:
    """What is suspicious in a row, each with its number. rows: the ones before it."""
    found = []
    for key, suspicious, text in ALARMS:
        lately = [
            r[key] for r in rows[-20:] if isinstance(r.get(key), (int, float)) and isfinite(r[key])
        ]
        if key in row and suspicious(row[key], median(lately) if lately else row[key]):
            found.append(
                f"{text} ({key} {row[key]:.3g}{f', usually {median(lately):.3g}' if lately else ''})"
            )
    for name in [key.removesuffix(".gain_mean") for key in row if key.endswith(".gain_mean")]:
        own = [
            {k.removeprefix(f"{name}."): v for k, v in r.items()}
            for r in [*rows, row]
            if f"{name}.gain_mean" in r
        ]
        if fall := gain_fell(own):
            found.append(f"{name}: {fall}")
    return found


# ---------------------------------------------------------------------------------------------- guard


def collapse(rows: list[dict], kl_limit: float, best: dict | None = None) -> str:
    """Why the policy counts as collapsed after the last row, or "". rows: since the last restore; best: the evaluation
    of the adapter that a restore would go back to (the untrained one's at first).

    Scores of episodes fall by chance, too: a fall counts from four standard errors on (windows overlap and there are
    many of them), for the held-out score from three. With several tasks it may be their mixture that has changed:
    then only the held-out score counts.
    """
    reason = broken_updates(rows[-3:], kl_limit) or score_fell(rows, best)
    if not reason and not any("." in key for key in rows[-1]):
        reason = gain_fell(rows) or replies_ran_away(rows)
    return reason


def broken_updates(rows: list[dict], kl_limit: float) -> str:
    if len(rows) == 3 and all(r.get("skipped") for r in rows):
        return "three updates in a row had to be skipped"
    if len(rows) == 3 and all((r.get("kl") or 0) > kl_limit for r in rows):
        return f"KL to the base was above {kl_limit:g} nats per token for three steps"
    return ""


def score_fell(rows: list[dict], best: dict | None) -> str:
    last, evaluated = rows[-1], [r for r in rows if "eval_gain" in r]
    if "eval_gain" not in last:
        return ""
    if best:
        evaluated.append(
            {f"eval_{key}": best[key] for key in ("gain", "gain_stderr")} | {"step": best["step"]}
        )
    top = max(evaluated, key=lambda r: r["eval_gain"])
    fall = top["eval_gain"] - last["eval_gain"]
    error = max(
        0.02, sqrt(top["eval_gain_stderr"] ** 2 + last["eval_gain_stderr"] ** 2)
    )  # equal scores: 0
    return (
        (
            f"held-out improvement fell from {top['eval_gain']:.3f} (step {top['step']}) to {last['eval_gain']:.3f}, "
            f"{fall / error:.1f} standard errors"
        )
        if fall > 3 * error
        else ""
    )


def gain_fell(rows: list[dict], window: int = 5) -> str:
    ends = range(window, len(rows) + 1)
    means = [mean_gain(rows[end - window : end]) for end in ends]
    top = max(range(len(means)), key=lambda i: means[i][0], default=0)
    if (
        len(rows) < 2 * window
        or not means[top][0] - means[-1][0] > 4 * sqrt(means[top][1] + means[-1][1]) > 0
    ):
        return ""
    return (
        f"mean improvement of {window} steps fell from {means[top][0]:.3f} (steps to {rows[ends[top] - 1]['step']}) "
        f"to {means[-1][0]:.3f}"
    )


def replies_ran_away(rows: list[dict], window: int = 5) -> str:
    """Replies may grow, but then they have to score more than the best mean of short ones (the best of many)."""
    windows = [rows[end - window : end] for end in range(window, len(rows) + 1)]
    usual = median(r["reply_tokens"] for r in rows[: 2 * window])
    short = [mean_gain(w)[0] for w in windows if all(r["reply_tokens"] < 2 * usual for r in w)]
    if (
        len(rows) < 2 * window
        or not short
        or not all(r["reply_tokens"] > 3 * usual for r in windows[-1])
        or mean_gain(windows[-1])[0] > max(short)
    ):
        return ""
    return (
        f"replies were more than three times as long as usual ({usual:.0f} tokens) for {window} steps, and no better "
        "for it"
    )


def mean_gain(rows: list[dict]) -> tuple[float, float]:
    """(mean improvement over the rows, variance of that mean)."""
    variance = sum(r["gain_std"] ** 2 / r["episodes"] for r in rows) / len(rows) ** 2
    return fmean(r["gain_mean"] for r in rows), variance


def by_gain(rows: list[dict]) -> dict:
    """Stands for an evaluation where there is none: the mean improvement of the last four steps. Their episodes are of
    the adapter before the last of these steps, or of older ones."""
    mean, variance = mean_gain(rows[-4:])
    return {"step": rows[-1]["step"] - 1, "gain": mean, "gain_stderr": sqrt(variance)}


def signal(rows: list[dict], name: str, wanted: bool = True, window: int = 10) -> float:
    """Curriculum: 0.1 + share of a task's groups that taught something, lately; one not played yet counts in full."""
    seen = [r[f"{name}.zero_variance_share"] for r in rows if f"{name}.zero_variance_share" in r][
        -window:
    ]
    return 1.1 - fmean(seen) if seen and wanted else 1.1


def remember(recent: dict, groups: list[Group], most: int = 256) -> dict:
    """The improvements of the latest valid episodes by task, with those of `groups`."""
    new = {name: list(values) for name, values in recent.items()}
    for g in groups:
        values = new.setdefault(g.task.name, [])
        values += [gain(e.score, g.task) for e in g.played if e.score.valid]
        del values[:-most]
    return new
