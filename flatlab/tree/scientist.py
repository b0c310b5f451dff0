"""The rule `scientist`: the model itself reads the tree and chooses the next parent."""

from __future__ import annotations

from flatlab.tree import parsing, prompts
from flatlab.tree.nodes import Choice, Tree
from flatlab.tree.requests import chat

NOTES = 5  # the model sees its latest ones
INSPECTED = 3  # nodes whose code and errors it may read before it decides


async def scientist(t: Tree, rng) -> Choice | None:
    """The model reads the tree, inspects some nodes, and names the next parent and strategy.

    It sees every result before it decides, and it keeps its latest notes.
    """
    if t.running:
        return None
    choice = Choice("0")
    nodes = [t.root, *t.finished]
    notes = [node.decision["memory"] for node in t.finished if node.decision.get("memory")]
    look = t.texts.fill(
        "inspect",
        about=prompts.about(t.texts, t.task, t.machine),
        tree=prompts.tree_lines(t.texts, nodes),
        notes=notes[-NOTES:],
        left=t.cfg.nodes - t.executed(),
    )
    talk = []
    reply = await chat(t, choice, talk, look, "look", t.started)
    numbers = map(int, parsing.NUMBER.findall(parsing.fields(reply).get("inspect", "")))
    inspected = [number for number in numbers if 0 < number < len(nodes)][:INSPECTED]
    details = prompts.details(nodes, inspected, prompts.summary_chars(t.cfg))
    request = t.texts.fill("choose", details=details)
    decision = parsing.fields(await chat(t, choice, talk, request, "choose", t.started))
    phase = decision.get("mode", "").lower()
    choice.phase = phase if phase in ("explore", "exploit") else ""
    choice.notes = {"memory": decision.get("memory", "")}
    parent = parsing.NUMBER.search(decision.get("parent", ""))
    if parent and int(parent[0]) < len(nodes):
        choice.parent = nodes[int(parent[0])].id
        choice.idea = decision.get("strategy", "")
        choice.reason = "chosen by the model"
    else:
        choice.reason = "fell back to the root: the reply named no experiment that exists"
        choice.notes["fell_back"] = True
    return choice
