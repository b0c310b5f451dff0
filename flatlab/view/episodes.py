"""Episodes and nodes in lists: their columns, and the groups that were compared with each other."""

import math
import re
from statistics import fmean

from flatlab.view.reader import RunData, score_text
from flatlab.view.results import found


def facts_of(item: dict, width: int = 70) -> dict:
    """The columns about an episode or a node: what was learned from it, and how it went; at the
    end in at most `width` characters what it is about, and why it failed.
    """
    replies = item.get("advantages", ())
    trained = [advantage for advantage in replies if advantage is not None]
    reason = "" if item["outcome"] == "valid" else failure(item)
    parts = [item.get("op") or item.get("task"), reason, item.get("idea")]
    text = "; ".join(part.rstrip(".") for part in parts if part)
    return {
        "id": item["id"],
        "score": score_text(item),
        "end": item["status"].replace("_", " "),
        "reward": item.get("reward"),
        "advantage": fmean(trained) if trained else None,
        "trained": f"{len(trained)} of {len(replies)}" if replies else None,
        "turns": len(item.get("turns", ())) or None,
        "seed": item.get("seed"),
        "tokens": item["tokens"],
        "seconds": item["seconds"],
        "what": " ".join(text.split())[:width],
    }


def best_item(items: list[dict]) -> dict | None:
    """The episode of training, or the node, with the largest improvement; None if none is valid."""
    # the names of evaluations begin with a letter
    valid = [x for x in items if x["id"][0].isdigit() and x["improvement"] is not None]
    return max(valid, key=lambda item: item["improvement"], default=None)


def failure(item: dict) -> str:
    """The line of the error that says why a node or episode failed, or how it ended."""
    lines = item["error"].strip().split("\n")
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return [*named, *lines][0] or item["status"]


def sections(run: RunData, items: list[dict]) -> dict[str, list[dict]]:
    """Heading -> the episodes of a group that were compared with each other, or of an evaluation;
    one for runs without groups.
    """
    if run.kind != "training" and "round" not in run.rows[0]:
        return {run.name: items}
    groups = {}
    for item in items:
        if "round" in item:
            name = f"round {item['round']}, group {item['group']}, children of {item['parent']}"
        elif item["when"].isdigit():
            name = f"step {item['when']}, group {item['group']}"
        else:
            name = f"evaluation {item['when']}"
        groups.setdefault(name, []).append(item)
    return {f"{name}: {learned(own)}": own for name, own in groups.items()}


def learned(items: list[dict]) -> str:
    """The task and the rewards of a group, and how many of its episodes were trained."""
    rewards = found(items, "reward") or [math.nan]
    low, high = min(rewards), max(rewards)
    text = f"{items[0]['task']}, rewards {low:+.3f} to {high:+.3f}"
    if not all("advantages" in item for item in items):  # some transcripts were not read
        return text
    trained = sum(bool(item["advantages"]) for item in items)
    how = f"{trained} of {len(items)} trained"
    if low == high:
        how = "equal rewards, none trained"
    elif not trained:
        how = "no advantages stored"
    return f"{text}, {how}"
