"""What watches a run: the choice of the best adapter, alarms about a step, and the reasons to stop.
No torch.
"""

from math import hypot, isnan
from statistics import median

from flatlab.numbers import number

KL_LIMIT = 1.0  # nats per token; three steps above it are a collapse
STUCK = 5  # steps in a row without anything to learn, or with almost nothing valid


def better(new: dict, best: dict | None) -> bool:
    """Whether an evaluation has a larger mean than the best one so far, in the number that the
    tables show (see metrics.headline).

    An adapter without any valid submission counts as the baseline. It is never better than one with
    some, because a policy that submits nothing would then beat a poor one. Without evaluations the
    last adapter is the best.
    """
    if not best or "improvement" not in new:
        return True
    if bool(new["valid_share"]) != bool(best["valid_share"]):
        return new["valid_share"] > 0
    return new["improvement"] > best["improvement"]


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
