"""Reads strategies and decisions out of a model's replies. Nothing here raises an error."""

from __future__ import annotations

import json
import math
import random
import re
from statistics import fmean

REPLY_CHARS = 20_000  # what follows in a reply is not read
IDEA_CHARS = 300

# ------------------------------------------------------------------ strategies


def parse(text: str) -> list[tuple[str, float | None]]:
    """(strategy, stated probability or None) of each strategy in a reply.

    Reads JSON objects, tags, or lines, whichever is found first. A reply without strategies gives
    []. Duplicates and repeated templates ("<one sentence>") are dropped.
    """
    text = text.rsplit("</think>", 1)[-1][:REPLY_CHARS]
    for read in (in_json, in_tags, in_lines):
        found = {}
        for idea, stated in read(text):
            idea = " ".join(idea.split())[:IDEA_CHARS].strip("*\"' ")
            key = same(idea)
            if key and not idea.startswith("<"):
                found.setdefault(key, (idea, probability(stated)))
        if found:
            return list(found.values())
    return []


def same(idea: str) -> str:
    """A key that is equal for two ideas with the same letters and digits."""
    return re.sub(r"\W", "", idea.lower())


def first_of(item: dict, keys: tuple, kind=object):
    """The first value of that type among `keys`, or None."""
    for key in keys:
        if key in item and isinstance(item[key], kind):
            return item[key]
    return None


def in_json(text):
    """Flat JSON objects, one by one: this also reads a list that was cut off."""
    for blob in re.findall(r"\{[^{}]*\}", text):
        try:
            item = json.loads(blob)
        except (ValueError, RecursionError):
            continue
        idea = first_of(item, ("text", "strategy", "idea", "response"), str)
        if idea:
            yield idea, first_of(item, ("probability", "p", "confidence"))


TAG = re.compile(r"<(response|idea|strategy)\b([^<>]{0,80})>", re.I)
PROBABILITY_TAG = re.compile(r"<probability>([^<]*)", re.I)
PROBABILITY_ATTRIBUTE = re.compile(r"\bp(?:robability)?\s*=\s*[\"']?([^\"'\s>]+)", re.I)
TEXT_TAG = re.compile(r"<text>([^<]*)", re.I)
OTHER_TAGS = re.compile(r"<probability>[^<]*|<[^<>]*>", re.I)


def in_tags(text):
    """<response><text>...</text><probability>...</probability>, or <idea p="0.1">...</idea>."""
    for start in TAG.finditer(text):
        body = text[start.end() : start.end() + 2000]
        body = re.split(rf"</?{start[1]}\b", body, maxsplit=1, flags=re.I)[0]
        stated = PROBABILITY_TAG.search(body) or PROBABILITY_ATTRIBUTE.search(start[2])
        inner = TEXT_TAG.search(body)
        idea = inner[1] if inner else OTHER_TAGS.sub(" ", body)
        yield idea, stated[1] if stated else None


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
    if isinstance(stated, bool):
        return None
    text = str(stated).strip().lower()[:40].replace(",", ".")
    found = NUMBER_OR_RATIO.match(text)
    if not found:
        return None
    value = float(found[1])
    if found[2] == "%":
        value /= 100
    elif found[3]:
        value /= float(found[3]) or math.inf
    return value if value <= 1 else None


def in_order(ideas: list, use: str, rng: random.Random) -> list:
    """The ideas in the order in which they are used (--use-probability).

    no: as listed. order: the most probable first, those without a stated probability last. sample:
    drawn by probability without replacement; without a stated one, with the mean of the others.
    """
    if use == "order":
        stated = [-1.0 if p is None else p for _, p in ideas]
        places = sorted(range(len(ideas)), key=lambda i: -stated[i])
        return [ideas[i] for i in places]
    if use == "sample":
        # Sorting by u^(1/w), largest first, draws by weight (Efraimidis and Spirakis 2006).
        known = [p for _, p in ideas if p is not None]
        missing = fmean(known) if known else 1.0
        weights = [max(1e-6, missing if p is None else p) for _, p in ideas]
        keys = [math.log(max(rng.random(), 1e-300)) / weight for weight in weights]
        places = sorted(range(len(ideas)), key=lambda i: -keys[i])
        return [ideas[i] for i in places]
    return list(ideas)


# ------------------------------------------------------------------ decisions

NUMBER = re.compile(r"\d{1,6}")
FIELD = re.compile(r"\W{0,4}(inspect|parent|strategy|mode|memory)\W{0,3}:\s*(.+)", re.I)


def fields(text: str) -> dict[str, str]:
    """The `Name: value` lines of a reply; names in lower case, the last one wins."""
    found = {}
    for line in text[:REPLY_CHARS].splitlines():
        match = FIELD.match(line)
        if match:
            found[match[1].lower()] = match[2].strip("* ")[:IDEA_CHARS]
    return found
