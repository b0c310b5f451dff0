"""What watches a run: alarms about a step, the selection of the best adapter, the guard against
collapse. No torch.
"""

from math import hypot, isnan
from statistics import fmean, median

from flatlab.runs.reader import number

KL_LIMIT = 1.0  # nats per token; three steps above it are a collapse
MAX_RESTORES = 3  # the next collapse stops the run


# ------------------------------------------------------------------------------ selection


def better(new: dict, best: dict | None) -> bool:
    """Compares mean minus one standard error of the clipped improvement, so that a lucky evaluation
    rarely wins.
    """
    return best is None or lower_bound(new) > lower_bound(best)


def lower_bound(result: dict) -> float:
    error = result["clipped_improvement_stderr"]
    return result["clipped_improvement"] - (1.0 if error is None else error)


def latest_steps(rows: list[dict]) -> dict:
    """Replaces an evaluation in runs without any: the mean improvement of the last four steps.

    Their episodes were sampled before the update of the last of these steps, or earlier; with
    --ahead N by policies that are up to N updates older.
    """
    latest = rows[-4:]
    errors = [row["clipped_improvement_stderr"] or 0.0 for row in latest]
    return {
        "step": rows[-1]["step"] - 1,
        "clipped_improvement": fmean(row["clipped_improvement"] for row in latest),
        "clipped_improvement_stderr": hypot(*errors) / len(latest),
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
        earlier = [r for r in rows[-20:] if number(r.get(key)) is not None]
        usual = median(r[key] for r in earlier or [row])
        if suspicious(row[key], usual):
            comparison = f", usually {usual:.3g}" if earlier else ""
            sentences.append(f"{text} ({key} {row[key]:.3g}{comparison})")
    return sentences


# ------------------------------------------------------------------------------ collapse


def collapse(rows: list[dict], best: dict | None = None) -> str:
    """Why the policy counts as collapsed after the last row, or "".

    rows: since the last restore. best: the evaluation of the adapter that a restore would go back
    to.

    Scores also fall by chance, so a fall of the evaluation counts from three standard errors on.
    """
    return broken_updates(rows[-3:]) or evaluation_fell(rows, best)


def broken_updates(rows: list[dict]) -> str:
    if len(rows) < 3:
        return ""
    if all(row.get("skipped") for row in rows):
        return "three updates in a row were skipped"
    if all((row.get("kl") or 0) > KL_LIMIT for row in rows):
        return f"KL to the reference was above {KL_LIMIT:g} nats per token for three steps"
    return ""


def evaluation_fell(rows: list[dict], best: dict | None) -> str:
    if "eval_clipped_improvement" not in rows[-1]:
        return ""
    *earlier, last = [evaluation_of(row) for row in rows if "eval_clipped_improvement" in row]
    top = max([*earlier, best or last], key=lambda e: e["clipped_improvement"])
    fall = top["clipped_improvement"] - last["clipped_improvement"]
    errors = [e["clipped_improvement_stderr"] or 0.0 for e in (top, last)]
    error = max(0.02, hypot(*errors))  # equal scores have no error of their own
    if fall <= 3 * error:
        return ""
    return (
        f"held-out improvement fell from {top['clipped_improvement']:.3f} (step {top['step']}) to "
        f"{last['clipped_improvement']:.3f}, {fall / error:.1f} standard errors"
    )


def evaluation_of(row: dict) -> dict:
    return {key.removeprefix("eval_"): value for key, value in row.items()}
