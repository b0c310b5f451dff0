"""What a search says to the model and what it reads out of the replies: prompts for strategies, a tolerant parser.

Verbalized sampling (arXiv 2510.01171): a model that is asked for one answer gives the typical one; asked for several
answers with their probabilities it describes its distribution, and its tail can be asked for. `tail`, `uniform` and
`local` do that in three ways; `sequence` is the plain list without probabilities that this has to be compared with.

All texts of search.py are here. They are short and made of lines: a model with a context of 2048 tokens gets the same
ones. `node` is a search node or anything with the same fields (idea, score, op, valid, status, code, error, id, parent).
"""

from __future__ import annotations

import json
import math
import random
import re
from itertools import combinations
from statistics import fmean

from flatlab.episode.task import Task

# ------------------------------------------------------------------------------------------ asking for strategies

ASK = {
    "uniform": "List {k} reasonable strategies, all equally probable.",
    "tail": "List {k} unusual strategies, each with a probability below {tau:g}.",
    "local": "List {k} variations of {what}, with their probabilities.",
    "sequence": "List {k} different strategies.",
}
THINK = 'First think in one line that begins with "Reasoning:".'
FORM = "Answer with these two lines for each:\nStrategy: <one sentence>\nProbability: <number from 0 to 1>"
LIST_FORM = "Answer with this line for each:\nStrategy: <one sentence>"
MORE = "List {k} more, different from all above, in the same form."  # --vs-variant multi, and when too few came


def ask(
    task: Task,
    mode: str,
    k: int,
    tau: float,
    variant: str,
    parent,
    siblings: list,
    summary: str = "",
) -> str:
    """The prompt for k strategies that build on `parent`, the root included; siblings: its other children."""
    root = parent.op == "baseline"
    what = "the most common strategy" if root else "the strategy so far"
    request = ASK[mode].format(k=2 if variant == "multi" else k, tau=tau, what=what)
    so_far = (
        ""
        if root
        else f"The strategy so far: {score_of(parent)}\nStrategy: {parent.idea or 'not named'}"
    )
    tried = [
        f"Strategy: {node.idea}\nScore: {short_score(node)}" for node in siblings if node.idea
    ][-8:]
    known = [summary, so_far, "\n".join(["Tried already, do not repeat:", *tried]) if tried else ""]
    lines = [
        request,
        *([THINK] if variant == "cot" else []),
        LIST_FORM if mode == "sequence" else FORM,
    ]
    return "\n\n".join(
        filter(None, [about(task), "\n".join(filter(None, known)), "\n".join(lines)])
    )


def about(task: Task) -> str:
    """The task with the first line of each of its files, for calls that have no sandbox."""

    def first_line(path):
        head = path.open("rb").read(400).split(b"\n")[0]
        return "" if b"\0" in head else head.decode(errors="replace")[:80].strip()

    files = "\n".join(
        f"{name}: {first_line(path)}" for name, path in list(task.public.items())[:20]
    )
    return (f"{task.prompt}\n\nFiles:\n{files}\n" if files else f"{task.prompt}\n\n") + measure(
        task
    )


def measure(task: Task) -> str:
    return f"Metric: {task.metric}, {'higher' if task.higher_is_better else 'lower'} is better. Baseline: {task.baseline:.4g}"


def score_of(node) -> str:
    return f"score {node.score:.4g}" if node.valid else "no valid score"


def short_score(node) -> str:
    if node.valid:
        return f"{node.score:.4g}"
    last = (node.error.strip().splitlines() or [""])[-1][:100]
    return f"none, {last}" if last else "none" if node.status else "not known yet"


def clip(text: str, limit: int) -> str:
    """Head and tail of a long text."""
    return text if len(text) <= limit else f"{text[: limit // 2]}\n[...]\n{text[-limit // 2 :]}"


# ------------------------------------------------------------------------------------------ the first message of a node


def situation(node, parents: list, limit: int, summary: str = "") -> str:
    """What a node is told after the task: about the nodes it builds on (none for a draft), and its strategy as the last line.

    At most about `limit` characters of the parents' code and error, never their conversations.
    """
    parts = [summary] if summary else []
    for parent in parents:
        where = (
            "An earlier attempt left its files here."
            if parent is parents[0]
            else "Another attempt, whose files are not here."
        )
        lines = [f"{where} Score: {f'{parent.score:.4g}' if parent.valid else 'none'}"]
        lines += [f"Its strategy: {parent.idea}"] if parent.idea else []
        share = limit // (len(parents) * (len(parent.code) + (not parent.valid)) or 1)
        lines += [f"Its {name}:\n{clip(text.strip(), share)}" for name, text in parent.code.items()]
        lines += [] if parent.valid else [f"Its error:\n{clip(parent.error, share)}"]
        parts.append("\n".join(lines))
    if parents:
        parts[-1] += "\n" + {
            "debug": "Fix the error and keep the strategy.",
            "crossover": "Combine both.",
        }.get(
            node.op,
            "Try something different."
            if node.decision.get("phase") == "explore"
            else "Improve on it.",
        )
    strategy = f"Strategy: {node.idea}" if node.idea else ""
    return "\n".join(filter(None, ["\n\n".join(parts), strategy]))


def summary_of_tree(nodes: list, unused: set[str], better) -> str:
    """--scope global: the best three, the last failures and the families nobody tried. better: key for sorting, best last."""
    scored = sorted((node for node in nodes if node.valid), key=better)
    failed = [node for node in nodes if not node.valid and node.status]
    lines = [
        f"{len(nodes)} experiments so far, {len(failed)} of them without a score. The best and the worst:"
    ]
    lines += [
        f"- {score_of(node)}: {node.idea or 'no strategy named'}"
        for node in (scored[:-4:-1] + scored[:-3][:2])
    ]
    lines += [f"- failed: {node.idea or 'no strategy named'}" for node in failed[-2:]]
    return (
        "\n".join(lines + ([f"Not tried yet: {', '.join(sorted(unused))}."] if unused else []))
        if nodes
        else ""
    )


REFLECT = "{about}\n\n{tree}\n\nWhat worked, what failed and why, and what should be tried next? Answer in at most five short sentences."

# ------------------------------------------------------------------------------------------ the scientist

LOOK = """{about}
The tree:
{tree}
{notes}{left} experiments are left. Which of them do you want to look at? Answer with one line:
Inspect: <numbers, or none>"""
CHOOSE = """{details}
Now choose the next experiment. Answer with these lines:
Parent: <number>
Strategy: <one sentence>
Mode: <explore or exploit>
Memory: <one sentence to remember>"""


def tree_lines(nodes: list) -> str:
    """One line per node; the numbers are the positions in the list, the root is 0."""
    number = {node.id: i for i, node in enumerate(nodes)}
    return "\n".join(
        f"{i}: {score_of(node)}, parent {number.get(node.parent, 0)}, {node.idea or 'no strategy named'}"
        if i
        else f"{i}: {score_of(node)}, baseline"
        for i, node in enumerate(nodes)
    )


def details(nodes: list, chosen: list[int], limit: int) -> str:
    """Code and errors of the chosen nodes."""
    share = limit // max(1, len(chosen))
    texts = [
        f"{i}: " + clip("\n".join([*nodes[i].code.values(), nodes[i].error]).strip(), share)
        for i in chosen
        if i
    ]
    return "\n".join(texts) or "Nothing to look at."


NUMBER = re.compile(r"\d{1,6}")


def fields(text: str) -> dict[str, str]:
    """`Name: value` lines of a reply; names in lower case, the last one wins."""
    lines = (
        re.match(r"\W{0,4}(inspect|parent|strategy|mode|memory)\W{0,3}:\s*(.+)", line, re.I)
        for line in text[:20_000].splitlines()
    )
    return {line[1].lower(): line[2].strip("* ")[:300] for line in lines if line}


# ------------------------------------------------------------------------------------------ reading strategies


def parse(text: str) -> list[tuple[str, float | None]]:
    """(strategy, stated probability or None) of each idea in a reply: JSON objects, tags, or lines, as the model likes.

    Never raises and never invents: a reply without ideas gives []. Duplicates and echoed templates are dropped.
    """
    text = text.rsplit("</think>", 1)[-1][:20_000]
    for read in (in_json, in_tags, in_lines):
        found = {}
        for idea, stated in read(text):
            idea = " ".join(idea.split())[:300].strip("*\"' ")
            if (key := same(idea)) and not idea.startswith("<"):
                found.setdefault(key, (idea, probability(stated)))
        if found:
            return list(found.values())
    return []


def same(idea: str) -> str:
    """Two ideas with the same letters and digits are the same idea."""
    return re.sub(r"\W", "", idea.lower())


def in_json(text):
    for blob in re.findall(
        r"\{[^{}]*\}", text
    ):  # flat objects one by one: also those of a list that was cut off
        try:
            item = json.loads(blob)
        except (ValueError, RecursionError):
            continue
        idea = next(
            (
                item[key]
                for key in ("text", "strategy", "idea", "response")
                if isinstance(item.get(key), str)
            ),
            None,
        )
        if idea:
            yield (
                idea,
                next(
                    (item[key] for key in ("probability", "p", "confidence") if key in item), None
                ),
            )


def in_tags(text):
    for start in re.finditer(r"<(response|idea|strategy)\b([^<>]{0,80})>", text, re.I):
        body = re.split(
            rf"</?{start[1]}\b", text[start.end() : start.end() + 2000], maxsplit=1, flags=re.I
        )[0]
        stated = re.search(r"<probability>([^<]*)", body, re.I) or re.search(
            r"\bp(?:robability)?\s*=\s*[\"']?([^\"'\s>]+)", start[2], re.I
        )
        inner = re.search(r"<text>([^<]*)", body, re.I)
        yield (
            inner[1] if inner else re.sub(r"<probability>[^<]*|<[^<>]*>", " ", body, flags=re.I),
            stated and stated[1],
        )


LABEL = re.compile(r"(?:[-*•]|\d{1,3}[.)])?\s*(?:strategy|idea)\s*\d{0,3}\s*:\s*(.+)", re.I)
ITEM = re.compile(r"(?:[-*•]|\d{1,3}[.)])\s+(.+)")
BEHIND = re.compile(
    r"[\[(,;]?\s*\b(?:p|probability)\s*[:=≈~]\s*([^\s,;)\]]+)[)\]]?$|[\[(]\s*([<~≈]?\s*[\d.]+\s*%?)\s*[)\]]$",
    re.I,
)
BELOW = re.compile(r"(?:[-*•]\s*)?p(?:robability)?\s*[:=]\s*(.+)", re.I)


def in_lines(text):
    """`Strategy: ...` with `Probability: ...` behind it or on the next line; without such a label, the items of a list."""
    lines = [line for raw in text.splitlines() if (line := raw.replace("**", " ").strip()[:1000])]
    items = [LABEL.match(line) for line in lines]
    items = items if any(items) else [ITEM.match(line) for line in lines]
    for item, line_below in zip(items, [*lines[1:], ""]):
        if item and not re.match(r"(probability|reasoning)\b", item[1], re.I):
            behind, below = BEHIND.search(item[1]), BELOW.match(line_below)
            yield (
                item[1][: behind.start()] if behind else item[1],
                (behind[1] or behind[2]) if behind else below and below[1],
            )


def probability(stated) -> float | None:
    """0.05, "5%", "<0.1", "1/20", "~ .07" -> a number from 0 to 1; anything else -> None."""
    text = str(stated).strip().lower()[:40]
    found = re.match(
        r"[<>~≈=≤p(\s]*(\d+\.?\d*(?:e-?\d{1,2})?|\.\d+)\s*(%|/\s*(\d+\.?\d*))?",
        text.replace(",", "."),
    )
    if isinstance(stated, bool) or not found:
        return None
    value = float(found[1])
    if found[2]:
        value /= 100 if found[2] == "%" else float(found[3]) or math.inf
    return value if value <= 1 else None


def in_order(ideas: list, use: str, rng: random.Random) -> list:
    """--use-probability: as listed, the most probable first, or drawn by probability without replacement.

    Without a stated probability: last, or the mean of the others.
    """
    if use == "order":
        return sorted(ideas, key=lambda idea: -1.0 if idea[1] is None else idea[1], reverse=True)
    if (
        use == "sample"
    ):  # the largest u^(1/w) first is drawing by weight (Efraimidis and Spirakis 2006)
        known = [p for _, p in ideas if p is not None]
        weight = {
            id(idea): max(1e-6, idea[1] if idea[1] is not None else fmean(known) if known else 1.0)
            for idea in ideas
        }
        return sorted(
            ideas,
            key=lambda idea: math.log(max(rng.random(), 1e-300)) / weight[id(idea)],
            reverse=True,
        )
    return list(ideas)


# ------------------------------------------------------------------------------------------ how different they are

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


def families(text: str) -> set[str]:
    """Model families that a strategy names, {"other"} for none; whole words only: "planner" is no "nn"."""
    return {
        name for name, words in FAMILIES.items() if re.search(rf"\b({words})\b", text.lower())
    } or {"other"}


def diversity(nodes: list) -> dict:
    """Distinct families and imports of a tree, and the mean distance of its ideas (1 - shared words / all words)."""
    words = [set(re.findall(r"\w+", node.idea.lower())) for node in nodes if node.idea]
    distances = [1 - len(a & b) / len(a | b) for a, b in combinations(words, 2) if a | b]
    imports = {
        name
        for node in nodes
        for text in node.code.values()
        for name in re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.M)
    }
    return {
        "families": len(set().union(*(families(node.idea) for node in nodes if node.idea))),
        "imports": len(imports),
        "idea_distance": fmean(distances) if distances else None,
    }
