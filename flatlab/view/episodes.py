"""Episodes and nodes in lists: their columns, and the groups that were compared with each other.
The rows are those of episodes.jsonl.
"""

import math

from flatlab.view.reader import RunData, score_or_outcome
from flatlab.view.results import found


def facts_of(row: dict, width: int = 70) -> dict:
    """The columns about an episode or a node: what was learned from it, and how it went; at the
    end in at most `width` characters what it is about, and why it failed.
    """
    parts = [row.get("op") or row["task"], row["reason"], row.get("idea")]
    text = "; ".join(part.rstrip(".") for part in parts if part)
    return {
        "id": row["id"],
        "score": score_or_outcome(row),
        "end": row["status"].replace("_", " "),
        "reward": row["reward"],
        "advantage": row["advantage"],
        "trained": None if row["trained"] is None else f"{row['trained']} of {row['turns']}",
        "turns": row["turns"] or None,
        "seed": row["seed"],
        "tokens": row["tokens"],
        "seconds": row["seconds"],
        "what": " ".join(text.split())[:width],
    }


def best_row(rows: list[dict]) -> dict | None:
    """The episode of training, or the node, with the largest improvement; None if none is valid."""
    # the names of evaluations begin with a letter
    valid = [row for row in rows if row["when"].isdigit() and row["improvement"] is not None]
    return max(valid, key=lambda row: row["improvement"], default=None)


def sections(run: RunData, rows: list[dict]) -> dict[str, list[dict]]:
    """Heading -> the episodes of a group that were compared with each other, or of an evaluation;
    one for runs without groups.
    """
    if run.kind != "training" and not run.rounds:
        return {run.name: rows}
    groups = {}
    for row in rows:
        name = f"evaluation {row['when']}"
        if row["step"] is not None:
            name = f"step {row['step']}, group {row['group']}"
        if "parent" in row:
            name = f"round {row['step']}, group {row['group']}, children of {row['parent']}"
        groups.setdefault(name, []).append(row)
    return {f"{name}: {learned(own)}": own for name, own in groups.items()}


def learned(rows: list[dict]) -> str:
    """The task and the rewards of a group, and how many of its episodes were trained. The reward of
    a node is its value.
    """
    rewards = found(rows, "reward") or found(rows, "value") or [math.nan]
    low, high = min(rewards), max(rewards)
    text = f"{rows[0]['task']}, rewards {low:+.3f} to {high:+.3f}"
    trained = sum(row["trained"] is not None for row in rows)
    if low == high and not trained:
        return f"{text}, equal rewards, none trained"
    return f"{text}, {trained} of {len(rows)} trained" if trained else text
