"""Requests of a search to the model, and the parser of the replies. The prompts are in
configs/prompts/.

A `node` is a search node or anything with the same fields (idea, score, stderr, op, valid, ended,
code, error, decision); `prompts` are the Prompts of the file.
"""

import asyncio
import copy
import html
import json
import math
import re

from flatlab.errors import Refusal
from flatlab.task.definition import Task
from flatlab.world.episode import clip

SIBLINGS = 8  # largest number of strategies of siblings in a prompt
FILES = 20  # of the task, in a request
NAMED_PACKAGES = 12


def task_text(
    prompts, task: Task, machine: dict, nodes_left: int | None = None, nodes: int = 0
) -> str:
    """The task, with the first line of each of its files: for calls that have no sandbox.

    machine: what machine_facts() tells about one; {} if the prompts do not use it.
    """
    files = []
    for name, path in list(task.public.items())[:FILES]:
        with path.open(encoding="utf-8", errors="replace") as file:
            line = file.readline(400)
        files.append((name, "" if "\0" in line else line[:80].strip()))
    limits = ""
    if machine:
        packages = machine["packages"][:NAMED_PACKAGES]
        limits = prompts.fill("limits", **machine | {"packages": packages})
    return prompts.fill(
        "about", task=task, files=files, limits=limits, nodes_left=nodes_left, nodes=nodes
    )


def ask(prompts, task: Task, parent, siblings: list, summary: str = "", **wanted) -> str:
    """The request for strategies for a child of `parent`, None for the root.

    siblings: the other children of the parent. wanted: about (the text of the task), mode, k, tau.
    """
    tried = [node for node in siblings if node.idea][-SIBLINGS:]
    return prompts.fill(
        "strategies", task=task, summary=summary, parent=parent, tried=tried, **wanted
    )


def situation(prompts, task: Task, node, parents: list, limit: int, summary: str = "") -> str:
    """Text that a node is told after the task. Its strategy is the last line.

    parents: the nodes it builds on (none for a draft); of their code and errors it is shown at most
    about `limit` characters, and nothing of their conversations.
    """
    shown = []
    for parent in map(copy.copy, parents):
        count = len(parent.code) + (not parent.valid)
        share = limit // len(parents) // max(1, count)
        parent.code = {name: clip(text.strip(), share) for name, text in parent.code.items()}
        parent.error = clip(parent.error, share)
        shown.append(parent)
    return prompts.fill(
        "node",
        task=task,
        summary=summary,
        parents=shown,
        node=node,
        phase=node.decision.get("phase"),
    )


def tree_summary(t) -> str:
    """--scope global: the best three, the worst two and the last failures of a Tree; else ""."""
    nodes = t.finished
    if t.cfg.scope != "global" or not nodes:
        return ""
    scored = sorted((node for node in nodes if node.valid), key=lambda node: node.improvement)
    failed = [node for node in nodes if not node.valid]
    return t.prompts.fill(
        "summary",
        task=t.task,
        count=len(nodes),
        failed=len(failed),
        best_and_worst=[*scored[-3:][::-1], *scored[:-3][:2]],
        latest_failures=failed[-2:],
    )


# ------------------------------------------------------------------ requests

LEAST_ROOM = 32  # tokens: a request whose reply would have less room is not sent


async def reply_to(t, node, talk: list[dict], seed: int) -> str:
    """The reply to these messages; "" if the prompt leaves no room for one. t: a Tree. Raises
    Refusal, also if it takes longer than an episode may.
    """
    prompt = t.policy.render(talk)
    room = min(t.cfg.episode.max_reply_tokens, t.cfg.model.context - len(prompt))
    if room >= LEAST_ROOM:
        minutes = t.minutes_left()
        reply = t.policy.sample(prompt, room, seed=seed)
        try:
            sample = await asyncio.wait_for(reply, 60 * minutes)
        except TimeoutError:
            raise Refusal(f"no strategies within {minutes:.2g} minutes") from None
        node.tokens += sample.reply_tokens
        if sample.note:
            node.decision["refused"] = sample.note
        return sample.text
    return ""


# ------------------------------------------------------------------ replies

REPLY_CHARS = 20_000  # what follows in a reply is not read
IDEA_CHARS = 300
# A stated probability, which shows a list where no strategy could be read
STATEMENT = re.compile(r"(?<!/)\bprobability[\"'\s]*[>:=|]", re.I)


def parse(text: str) -> tuple[list[tuple[str, float | None]], int]:
    """(strategy, stated probability or None) of each strategy in a reply, and the number of those
    which cannot be read: their JSON or XML is damaged or cut off, or they have another form.

    Reads JSON objects or, if these hold no strategies, XML or lines.
    Duplicates and repeated templates ("<one sentence>") are dropped. Nothing raises an error.
    """
    text = text.rsplit("</think>", 1)[-1][:REPLY_CHARS]
    objects = list(in_json(text))
    elements = list(in_xml(text))
    unread = sum(not idea for idea, _ in objects + elements)
    for pairs in (objects, elements, in_lines(text)):
        ideas = {}
        for idea, stated in pairs:
            idea = " ".join(idea.split())[:IDEA_CHARS].strip("*\"'- ")
            key = same(idea)
            if key and not idea.startswith("<"):
                ideas.setdefault(key, (idea, probability(stated)))
        if ideas:
            break
    else:
        unread = unread or len(STATEMENT.findall(text))
    return list(ideas.values()), unread


def same(idea: str) -> str:
    """A key that is equal for two ideas with the same letters and digits."""
    return re.sub(r"\W", "", idea.lower())


DECODER = json.JSONDecoder(strict=False)  # allows line breaks inside of a text
# An escape of JSON, or a backslash alone: that of \alpha, or of \nu, which is no line break.
BACKSLASH = re.compile(
    r"""(\\(?:["\\/]|u[\da-fA-F]{4}|n(?!abla|eq|u\b)|r(?!ho|ight|angle)"""
    r"""|t(?!au|heta|ext|imes|anh|ilde|o\b)))|\\"""
)
STRATEGY = re.compile(r"""\{[^{}]*?["'](?:text|strategy)["']\s*:(?!\s*\{)""")


def in_json(text):
    """The JSON objects with a strategy, also those inside of other objects and of a list that was
    cut off. The strategy of an object that cannot be read is "".
    """
    text = BACKSLASH.sub(lambda match: match[1] or r"\\", text)
    place = text.find("{")
    while place >= 0:
        try:
            item, end = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            item = {}
        idea = item.get("text") or item.get("strategy")
        if isinstance(idea, str):
            yield idea, item.get("probability")
        else:
            end = place + 1  # what it holds comes next
            if STRATEGY.match(text, place):
                yield "", None
        place = text.find("{", end)


# Groups: name, attributes, content, end tag ("" if the element does not end), what stands behind it
RESPONSE = re.compile(
    r"<(response|strategy|idea|item)\b([^>]*)>(.*?)(</\1\s*>|\Z)"
    r"(.*?)(?=<(?:response|strategy|idea|item)\b|\Z)",
    re.I | re.S,
)
TEXT = re.compile(r"<(text|strategy|description)\b[^>]*>(.*?)</\1\s*>", re.I | re.S)
STATED = re.compile(r"<(probability|p)\b[^>]*>(.*?)</\1\s*>", re.I | re.S)
ATTRIBUTE = re.compile(r"""\b(probability|p)\s*=\s*["']([^"']*)""", re.I)


def in_xml(text):
    """The elements <response>, each with its text and its probability inside or as an attribute.
    The strategy of an element that does not end is "".
    """
    for _, attributes, content, end, behind in RESPONSE.findall(text):
        if not end:
            yield "", None
            return
        named = TEXT.search(content)
        stated = STATED.search(content + behind) or ATTRIBUTE.search(attributes)
        idea = named[2] if named else STATED.sub("", content)
        idea = html.unescape(re.sub(r"<[^>]*>", "", idea)).strip()
        yield idea, stated and stated[2]


LABEL = re.compile(r"[\s#*•+\d.()-]*(?:(?:strategy|idea)\s*#?\d{0,3}\s*(?::|$)\s*)+(.*)", re.I)
ITEM = re.compile(r"[\s#]*(?:[-*•+]|\(?\d{1,3}[.)])\s+([^{\s].*)")
SAME_LINE = re.compile(
    r"[\[(,;]?\s*\b(?:p|probability)\s*[:=≈~]\s*([^\s,;)\]]+)[)\]]?$"
    r"|[\[(]\s*([<~≈]?\s*[\d.]+\s*%?)\s*[)\]]$",
    re.I,
)
OWN_LINE = re.compile(
    r"[\s#*•+\d.()-]*(?:p(?:robability)?\s*[:=]\s*(.+)|(?:probability|reasoning)\b)", re.I
)


def in_lines(text):
    """`Strategy: ...` or, without any, list items. What is indented below one belongs to it, and
    its probability stands behind it or in a line of its own.
    """
    lines = [line.expandtabs().replace("**", " ").rstrip()[:1000] for line in text.split("\n")]
    begin = LABEL if any(map(LABEL.match, lines)) else ITEM
    ideas = []  # [strategy, probability]
    outermost = 0  # indentation of the items
    for line in filter(None, lines):
        indent = len(line) - len(line.lstrip())
        item = begin.match(line)
        other = OWN_LINE.match(line)
        if other:
            if ideas:
                ideas[-1][1] = ideas[-1][1] or other[1]
        elif ideas and (indent > outermost + 1 or not ideas[-1][0]):
            ideas[-1][0] += line
        elif item:
            outermost = indent
            idea, *stated = SAME_LINE.split(item[1])
            ideas.append([idea, next(filter(None, stated), None)])
    return ideas


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
