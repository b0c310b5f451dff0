"""search.py --learn: the model is trained while it searches (TTT-Discover, arXiv 2601.16175).

A round: the rule picks --parents nodes, each gets --children children, all in flight; they are
graded; one update of grpo.py on their episodes; sync; a row of metrics.jsonl and a checkpoint.
"""

from dataclasses import replace
from statistics import fmean

import grpo
from flatlab.errors import UserError
from flatlab.model import memory
from flatlab.train import batch
from flatlab.train.job import Job
from flatlab.tree import rounds
from flatlab.tree.nodes import Node, Tree
from flatlab.view import console


def check(cfg, rule) -> None:
    """Raises UserError for an endpoint, which cannot be trained, or a rule that cannot learn."""
    if cfg.url:
        raise UserError("--learn trains the model here: leave out --url.")
    if rule.shared_request or rule.is_evaluation:
        raise UserError(
            f"--learn needs a rule that decides by what was learned, such as --select puct: "
            f"{cfg.select} does not."
        )


async def grow(t: Tree, decide, start, play) -> None:
    """Grows a tree until its budget is spent or the rule has nothing to start.

    decide, start: those of search.py. play: starts the episode of a node once a slot is free;
    returns its task.
    """
    if t.policy.path.adapter:  # else the reference of the KL is the base model
        t.policy.set_reference(t.policy.path.adapter)
    optimizer = t.policy.make_optimizer(t.cfg.lr)
    cfg = update_config(t)
    number, rows = rounds.resume(t, optimizer)
    while groups := start_round(t, number, decide, start):
        nodes = sum(groups, [])
        playing = [await play(node) for node in nodes]
        episodes = {node.id: await task for node, task in zip(nodes, playing)}
        row = rounds.row_of(t, number, nodes, list(episodes.values()))
        row |= update(t, optimizer, groups, episodes, cfg)
        t.policy.sync()
        row["alarms"] = rounds.alarms(row, rows)
        rows.append(row)
        rounds.save(t, optimizer, row)
        print(console.round_line(row), flush=True)
        number += 1


def start_round(t: Tree, number: int, decide, start) -> list[list[Node]]:
    """Starts the nodes of a round, a group of children for each parent that the rule picks."""
    groups = []
    for _ in range(t.cfg.parents):
        choice = decide(t)
        if choice is None:
            break
        notes = choice.notes | {"round": number, "group": t.started}
        children = []
        while len(children) < t.cfg.children and not t.spent():
            children.append(start(t, replace(choice, notes=notes)))
        groups.append(children)
    return groups


def update_config(t: Tree) -> grpo.Config:
    """The options of an update. There is no KL term, and replies that were cut at the length limit
    carry no gradient.
    """
    cfg = grpo.Config(advantage=t.cfg.advantage, credit="complete", kl=0.0, episode=t.cfg.episode)
    cfg.micro_tokens = memory.fit_micro_tokens(t.policy, False)
    return cfg


def update(t: Tree, optimizer, groups: list[list[Node]], episodes: dict, cfg) -> dict:
    """One update of grpo.py on the episodes of a round, by id of their nodes; its numbers."""
    compared = []
    for number, nodes in enumerate(groups):
        rewards = [reward(node) for node in nodes if node.status != "fault"]
        own = [episodes[node.id] for node in nodes]
        compared.append(batch.Group(number, t.task, own, rewards))
    job = Job()
    sequences = grpo.make_batch(t.policy, compared, cfg, job)
    row = {"zero_variance_share": 1 - fmean(g.informative for g in compared)}
    return row | grpo.update(t.policy, optimizer, sequences, cfg, job)


def reward(node: Node) -> float:
    """Not clipped above: an improvement may exceed 1."""
    return max(grpo.NO_SUBMISSION, node.improvement) if node.valid else grpo.NO_SUBMISSION
