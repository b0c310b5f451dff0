"""What the prompts of a search tell about the task and the nodes of the tree. The texts themselves
are in configs/prompts/; parsing.py reads the replies.

A `node` is a search node or anything with the same fields (idea, score, op, valid, status, code,
error, id, parent); `texts` are the Prompts of the file.
"""

from __future__ import annotations

import functools
import re

from flatlab.task.definition import Task

SIBLINGS = 8  # largest number of strategies of siblings in a prompt
FILES = 20  # of the task, in a request
NAMED_PACKAGES = 12


def about(texts, task: Task, machine: dict, nodes_left: int | None = None, nodes: int = 0) -> str:
    """The task, with the first line of each of its files: for calls that have no sandbox.

    machine: what machine_facts() tells about one; {} if the texts do not use it.
    """
    files = [(name, first_line(path)) for name, path in list(task.public.items())[:FILES]]
    limits = ""
    if machine:
        packages = machine["packages"][:NAMED_PACKAGES]
        limits = texts.fill("limits", **machine | {"packages": packages})
    facts = {"files": files, "limits": limits, "nodes_left": nodes_left, "nodes": nodes}
    return texts.fill("about", task=task, **facts)


def first_line(path) -> str:
    with path.open("rb") as file:
        head = file.read(400).split(b"\n")[0]
    return "" if b"\0" in head else head.decode(errors="replace")[:80].strip()


def ask(texts, about: str, parent, siblings: list, summary: str = "", **wanted) -> str:
    """The request for strategies for a child of `parent`, which may be the root.

    siblings: the other children of the parent. wanted: mode, k, tau.
    """
    tried = [node for node in siblings if node.idea][-SIBLINGS:]
    shown = None if parent.op == "baseline" else parent
    return texts.fill(
        "strategies", about=about, summary=summary, parent=shown, tried=tried, **wanted
    )


def summary_chars(cfg) -> int:
    """Characters of other nodes' code and errors in a prompt: about a quarter of the context."""
    return min(6000, cfg.model.context * 3 // 4)


def clip(text: str, limit: int) -> str:
    """Head and tail of a text that is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}"


def situation(texts, node, parents: list, sentence: str, limit: int, notes: str = "") -> str:
    """What a node is told after the task. Its strategy is the last line.

    parents: the nodes it builds on (none for a draft); of their code and errors it is shown at most
    about `limit` characters, and nothing of their conversations. sentence: what to do with them.
    """
    shown = [clipped(parent, limit // len(parents)) for parent in parents]
    facts = {"notes": notes, "parents": shown, "sentence": sentence, "strategy": node.idea}
    return texts.fill("node", **facts)


def clipped(node, limit: int) -> dict:
    """What is told about a parent, with about `limit` characters of code and error."""
    share = limit // max(1, len(node.code) + (not node.valid))
    code = {name: clip(text.strip(), share) for name, text in node.code.items()}
    facts = {name: getattr(node, name) for name in ("idea", "score", "valid")}
    return facts | {"code": code, "error": clip(node.error, share)}


def summary_of_tree(texts, nodes: list) -> str:
    """--scope global: the best three, the worst two, the last failures, the families nobody tried.

    nodes: the finished nodes, in order of completion.
    """
    if not nodes:
        return ""
    scored = sorted((node for node in nodes if node.valid), key=lambda node: node.improvement)
    failed = [node for node in nodes if not node.valid]
    tried = [families(node.idea) for node in nodes if node.idea]
    return texts.fill(
        "summary",
        count=len(nodes),
        failed=len(failed),
        best_and_worst=[*scored[-3:][::-1], *scored[:-3][:2]],
        latest_failures=failed[-2:],
        untried=sorted(set(FAMILIES).difference(*tried)),
    )


def tree_lines(texts, nodes: list) -> str:
    """One line per node. The numbers are the positions in the list; 0 is the root."""
    number = {node.id: i for i, node in enumerate(nodes)}
    return texts.fill("tree", rows=[(node, number.get(node.parent, 0)) for node in nodes])


def details(nodes: list, chosen: list[int], limit: int) -> list[tuple[int, str]]:
    """Code and errors of the nodes at these positions, in about `limit` characters."""
    share = limit // max(1, len(chosen))
    parts = {i: "\n".join([*nodes[i].code.values(), nodes[i].error]) for i in chosen}
    return [(i, clip(text.strip(), share)) for i, text in parts.items()]


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
