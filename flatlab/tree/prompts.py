"""What the prompts of a search tell about the task and the nodes of the tree. The requests
themselves are in search.py; parsing.py reads the replies.

All texts are short and made of lines, because a model with a context of 2048 tokens gets the same
ones. A `node` is a search node or anything with the same fields (idea, score, op, valid, status,
code, error, id, parent). The stand-in model was trained on these exact texts.
"""

from __future__ import annotations

import functools
import re

from flatlab.task.definition import Task

SIBLINGS = 8  # largest number of strategies of siblings in a prompt


def ask(about: str, request: str, parent, siblings: list, summary: str = "") -> str:
    """The prompt for strategies for a child of `parent`, which may be the root.

    about: the task. siblings: the other children of the parent.
    """
    parts = [summary]
    if parent.op != "baseline":
        idea = parent.idea or "not named"
        parts.append(f"The strategy so far: {score_of(parent)}\nStrategy: {idea}")
    tried = [node for node in siblings if node.idea][-SIBLINGS:]
    if tried:
        parts.append("Tried already, do not repeat:")
        parts += [f"Strategy: {node.idea}\nScore: {short_score(node)}" for node in tried]
    context = "\n".join(filter(None, parts))
    return "\n\n".join(filter(None, [about, context, request]))


def about(task: Task, facts: str = "") -> str:
    """The task, with the first line of each of its files: for calls that have no sandbox.

    facts: what the full form of the texts tells about one.
    """
    files = [f"{name}: {first_line(path)}" for name, path in list(task.public.items())[:20]]
    listing = "\n".join(["Files:", *files, ""]) if files else ""
    measure = f"Metric: {task.metric}, {task.direction}. Baseline: {task.baseline:.4g}"
    return "\n".join(filter(None, [f"{task.prompt}\n\n{listing}{measure}", facts]))


def first_line(path) -> str:
    with path.open("rb") as file:
        head = file.read(400).split(b"\n")[0]
    return "" if b"\0" in head else head.decode(errors="replace")[:80].strip()


def score_of(node) -> str:
    return f"score {node.score:.4g}" if node.valid else "no valid score"


def short_score(node) -> str:
    if node.valid:
        return f"{node.score:.4g}"
    lines = node.error.strip().splitlines()
    if lines:
        return f"none, {lines[-1][:100]}"
    return "none" if node.status else "not known yet"


def summary_chars(cfg) -> int:
    """Characters of other nodes' code and errors in a prompt: about a quarter of the context."""
    return min(6000, cfg.model.context * 3 // 4)


def clip(text: str, limit: int) -> str:
    """Head and tail of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}"


# ------------------------------------------------------------------ the first message of a node


def situation(node, parents: list, sentence: str, limit: int, summary: str = "") -> str:
    """What a node is told after the task. Its strategy is the last line.

    parents: the nodes it builds on (none for a draft); of their code and errors it is shown at most
    about `limit` characters, and nothing of their conversations. sentence: what to do with them.
    """
    parts = [summary]
    for parent in parents:
        parts.append(attempt(parent, parent is parents[0], limit // len(parents)))
    if parents and sentence:
        parts[-1] += f"\n{sentence}"
    text = "\n\n".join(filter(None, parts))
    strategy = f"Strategy: {node.idea}" if node.idea else ""
    return "\n".join(filter(None, [text, strategy]))


def attempt(parent, files_are_here: bool, limit: int) -> str:
    """An earlier node with its code and error, in about `limit` characters."""
    where = "Another attempt, whose files are not here."
    if files_are_here:
        where = "An earlier attempt left its files here."
    score = f"{parent.score:.4g}" if parent.valid else "none"
    lines = [f"{where} Score: {score}"]
    if parent.idea:
        lines.append(f"Its strategy: {parent.idea}")
    texts = len(parent.code) + (not parent.valid)
    share = limit // max(1, texts)
    for name, text in parent.code.items():
        lines.append(f"Its {name}:\n{clip(text.strip(), share)}")
    if not parent.valid:
        lines.append(f"Its error:\n{clip(parent.error, share)}")
    return "\n".join(lines)


def summary_of_tree(nodes: list) -> str:
    """--scope global: the best three, the worst two, the last failures, the families nobody tried.

    nodes: the finished nodes, in order of completion.
    """
    if not nodes:
        return ""
    scored = sorted((node for node in nodes if node.valid), key=lambda node: node.improvement)
    failed = [node for node in nodes if not node.valid]
    lines = [
        f"{len(nodes)} experiments so far, {len(failed)} of them without a score. "
        "The best and the worst:"
    ]
    best = scored[-3:][::-1]
    worst = scored[:-3][:2]
    lines += [f"- {score_of(node)}: {strategy_of(node)}" for node in [*best, *worst]]
    lines += [f"- failed: {strategy_of(node)}" for node in failed[-2:]]
    tried = [families(node.idea) for node in nodes if node.idea]
    unused = sorted(set(FAMILIES).difference(*tried))
    if unused:
        lines.append(f"Not tried yet: {', '.join(unused)}.")
    return "\n".join(lines)


def strategy_of(node) -> str:
    return node.idea or "no strategy named"


def tree_lines(nodes: list) -> str:
    """One line per node. The numbers are the positions in the list; 0 is the root."""
    number = {node.id: i for i, node in enumerate(nodes)}
    lines = [f"0: {score_of(nodes[0])}, baseline"]
    for i, node in enumerate(nodes[1:], 1):
        parent = number.get(node.parent, 0)
        lines.append(f"{i}: {score_of(node)}, parent {parent}, {strategy_of(node)}")
    return "\n".join(lines)


def details(nodes: list, chosen: list[int], limit: int) -> str:
    """Code and errors of the nodes at these positions, in about `limit` characters."""
    share = limit // max(1, len(chosen))
    texts = []
    for i in chosen:
        parts = [*nodes[i].code.values(), nodes[i].error]
        text = "\n".join(parts).strip()
        texts.append(f"{i}: {clip(text, share)}")
    return "\n".join(texts) or "Nothing to look at."


# ------------------------------------------------------------------ what strategies are about

FAMILIES = {
    "trees": "trees?|forests?|boost(ing|ed)?|xgboost|lightgbm|gbm|catboost",
    "linear": "linear|logistic|ridge|lasso",
    "svm": "svm|svc|svr|support vector",
    "neural": "neural|mlp|deep|networks?|transformers?|cnn|rnn",
    "ensemble": "ensembles?|stack(ing|ed)?|voting|bagging|blend(ing)?",
    "neighbours": "knn|neighbou?rs?",
    "bayes": "bayes|bayesian|gaussian process(es)?",
    "features": "features?|encod(e|ing)s?|interactions?|polynomials?",
}


@functools.lru_cache(10_000)  # a rule may ask for those of all nodes at every node
def families(text: str) -> set[str]:
    """The model families that a strategy names as whole words; {"other"} if it names none."""
    names = {name for name, words in FAMILIES.items() if re.search(rf"\b({words})\b", text, re.I)}
    return names or {"other"}
