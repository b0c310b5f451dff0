"""Reads strategies and decisions out of a model's replies. Nothing here raises an error."""

from __future__ import annotations

import json
import math
import re

REPLY_CHARS = 20_000  # what follows in a reply is not read
IDEA_CHARS = 300

# ------------------------------------------------------------------ strategies


def parse(text: str) -> list[tuple[str, float | None]]:
    """(strategy, stated probability or None) of each strategy in a reply.

    Reads JSON objects or, if these hold no strategies, lines. A reply without strategies gives [].
    Duplicates and repeated templates ("<one sentence>") are dropped.
    """
    text = text.rsplit("</think>", 1)[-1][:REPLY_CHARS]
    for read in (in_json, in_lines):
        ideas = {}
        for idea, stated in read(text):
            idea = " ".join(idea.split())[:IDEA_CHARS].strip("*\"' ")
            key = same(idea)
            if key and not idea.startswith("<"):
                ideas.setdefault(key, (idea, probability(stated)))
        if ideas:
            return list(ideas.values())
    return []


def same(idea: str) -> str:
    """A key that is equal for two ideas with the same letters and digits."""
    return re.sub(r"\W", "", idea.lower())


def in_json(text):
    """Flat JSON objects, one by one: this also reads a list that was cut off."""
    for blob in re.findall(r"\{[^{}]*\}", text):
        try:
            item = json.loads(blob)
        except (ValueError, RecursionError):
            continue
        idea = item.get("text") or item.get("strategy")
        if isinstance(idea, str):
            yield idea, item.get("probability")


LABEL = re.compile(r"(?:[-*•]|\d{1,3}[.)])?\s*(?:strategy|idea)\s*\d{0,3}\s*:\s*(.+)", re.I)
ITEM = re.compile(r"(?:[-*•]|\d{1,3}[.)])\s+(.+)")
NO_ITEM = re.compile(r"(probability|reasoning)\b", re.I)
SAME_LINE = re.compile(
    r"[\[(,;]?\s*\b(?:p|probability)\s*[:=≈~]\s*([^\s,;)\]]+)[)\]]?$"
    r"|[\[(]\s*([<~≈]?\s*[\d.]+\s*%?)\s*[)\]]$",
    re.I,
)
NEXT_LINE = re.compile(r"(?:[-*•]\s*)?p(?:robability)?\s*[:=]\s*(.+)", re.I)


def in_lines(text):
    """`Strategy: ...`, with `Probability: ...` behind it or on the next line; else list items."""
    lines = [line.replace("**", " ").strip()[:1000] for line in text.splitlines()]
    lines = [line for line in lines if line]
    items = [LABEL.match(line) for line in lines]
    if not any(items):
        items = [ITEM.match(line) for line in lines]
    for item, next_line in zip(items, [*lines[1:], ""]):
        if not item or NO_ITEM.match(item[1]):
            continue
        behind = SAME_LINE.search(item[1])
        below = NEXT_LINE.match(next_line)
        if behind:
            yield item[1][: behind.start()], behind[1] or behind[2]
        else:
            yield item[1], below[1] if below else None


NUMBER_OR_RATIO = re.compile(
    r"[<>~≈=≤p(\s]*(\d+\.?\d*(?:e-?\d{1,2})?|\.\d+)\s*(%|/\s*(\d+\.?\d*))?"
)


def probability(stated) -> float | None:
    """0.05, "5%", "<0.1", "1/20", "~ .07" -> a number from 0 to 1; anything else -> None."""
    text = str(stated).strip().lower()[:40].replace(",", ".")
    parts = NUMBER_OR_RATIO.match(text)
    if not parts:
        return None
    value = float(parts[1])
    if parts[2] == "%":
        value /= 100
    elif parts[3]:
        value /= float(parts[3]) or math.inf
    return value if value <= 1 else None


# ------------------------------------------------------------------ decisions

NUMBER = re.compile(r"\d{1,6}")
FIELD = re.compile(r"\W{0,4}(inspect|parent|strategy|mode|memory)\W{0,3}:\s*(.+)", re.I)


def fields(text: str) -> dict[str, str]:
    """The `Name: value` lines of a reply; names in lower case, the last one wins."""
    values = {}
    for line in text[:REPLY_CHARS].splitlines():
        if match := FIELD.match(line):
            values[match[1].lower()] = match[2].strip("* ")[:IDEA_CHARS]
    return values
