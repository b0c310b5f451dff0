"""search.py --learn: the model is trained while it searches (TTT-Discover, arXiv 2601.16175).

A round: the rule picks --parents nodes, each gets --children children, all in flight; they are
graded; one update of grpo.py on their episodes; sync; a row of metrics.jsonl and a checkpoint.

A group are the children of one parent. They share its files, but each has a strategy of its own in
its prompt (not with --sampling-mode none). The replies that list strategies are not trained.
"""

from dataclasses import replace
from statistics import fmean

import grpo
from flatlab.errors import UserError
from flatlab.model import memory
from flatlab.numbers import standard_error
from flatlab.task.value import value_of
from flatlab.train import batch, checkpoint
from flatlab.train.job import Job
from flatlab.tree.nodes import Node, Tree
from flatlab.view import console


def check(cfg, rule) -> None:
    """Raises UserError for an endpoint, which cannot be trained, or a rule that cannot learn."""
    if cfg.url or rule.shared_request or rule.is_evaluation:
        raise UserError(
            "--learn trains the model in this process and needs a rule that uses scores: leave "
            "out --url, and choose one such as --select puct."
        )


async def grow(t: Tree, decide, start, play) -> None:
    """Grows a tree until its budget is spent or the rule has nothing to start.

    decide, start: those of search.py. play: starts the episode of a node once a slot is free;
    returns its task.
    """
    # The row's kl is against this adapter, or the base model. The loss has no KL term.
    if t.policy.path.adapter:
        t.policy.set_reference(t.policy.path.adapter)
    optimizer = t.policy.make_optimizer(t.cfg.lr)
    cfg = update_config(t)
    job = Job(run=t.run)
    resume(t, optimizer, job)
    while groups := start_round(t, decide, start):
        nodes = sum(groups, [])
        playing = [await play(node) for node in nodes]
        episodes = {node.id: await task for node, task in zip(nodes, playing)}
        row = row_of(t, nodes, list(episodes.values()))
        row |= update(t, optimizer, groups, episodes, cfg, job)
        t.policy.sync()
        row["alarms"] = alarms(row, t.run.rows())
        checkpoint.write_step(t.policy, optimizer, job, row)
        # The last adapter is the best one, because no evaluation compares them.
        checkpoint.save_adapter(t.policy, job, "best")
        print(console.round_line(row), flush=True)


def start_round(t: Tree, decide, start) -> list[list[Node]]:
    """Starts the nodes of a round, a group of children for each parent that the rule picks."""
    groups = []
    for _ in range(t.cfg.parents):
        choice = decide(t)
        if choice is None:
            break
        notes = choice.notes | {"round": t.policy.version, "group": t.started}
        children = []
        while len(children) < t.cfg.children and not t.spent():
            children.append(start(t, replace(choice, notes=notes)))
        groups.append(children)
    return groups


def update_config(t: Tree) -> grpo.Config:
    """The options of an update. There is no KL term, and replies that were cut at the length limit
    carry no gradient.
    """
    cfg = grpo.Config(credit="complete", kl=0.0, episode=t.cfg.episode)
    cfg.micro_tokens = memory.fit_micro_tokens(t.policy, False)
    return cfg


def update(t: Tree, optimizer, groups: list[list[Node]], episodes: dict, cfg, job) -> dict:
    """One update of grpo.py on the episodes of a round, by id of their nodes; its numbers."""
    compared = []
    for number, nodes in enumerate(groups):
        rewards = [value_of(node.improvement) for node in nodes if node.status != "fault"]
        own = [episodes[node.id] for node in nodes]
        compared.append(batch.Group(number, t.task, own, rewards))
    sequences = grpo.make_batch(t.policy, compared, cfg, job)
    return grpo.update(t.policy, optimizer, sequences, cfg, job)


# ------------------------------------------------------------------ what a round leaves


def resume(t: Tree, optimizer, job: Job) -> None:
    """Loads the adapter and the optimizer of the last whole round. The nodes of a round that was
    cut stay in the tree; nothing is learned from them.
    """
    number, folder = checkpoint.newest(t.run)
    t.run.truncate_rows(number)
    if folder:
        checkpoint.load(t.policy, optimizer, folder)
        checkpoint.save_adapter(t.policy, job, "best")
        job.say(f"resumed after round {number}")
    t.policy.sync()
    t.policy.version = number + 1  # the number of updates


def row_of(t: Tree, nodes: list[Node], episodes: list) -> dict:
    """The row of a round, without that of the update. Shares are of its nodes without faults."""
    graded = [node for node in nodes if node.status != "fault"]
    count = max(1, len(graded))
    gains = [
        node.improvement - (t.nearest_kept(node.parent).improvement or 0.0)
        for node in graded
        if node.valid
    ]
    lineages = [node.id.split(".")[1] for node in nodes]
    codes = [str(node.code) for node in t.finished if node.code]
    new = sum(bool(node.code) for node in nodes)
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "step": t.policy.version,
        "nodes": len(t.finished),
        "tokens": t.tokens(),
        "elapsed": t.elapsed(),
        "best_score": t.best().score if t.scored else None,
        "valid_share": len(gains) / count,
        "improved_share": sum(gain > 0 for gain in gains) / count,
        "gain_mean": fmean(gains) if gains else None,  # over the parent, of the valid ones
        "gain_stderr": standard_error(gains),
        "largest_lineage_share": max(map(lineages.count, lineages)) / len(nodes),
        "live_lineages": len(set(lineages)),
        "depth": max(node.depth for node in t.finished),
        # share of this round's programs that repeat an earlier one, of this round or before
        "duplicate_share": (new - len(set(codes) - set(codes[:-new]))) / new if new else 0.0,
        "cut_share": fmean(turn["stop_reason"] == "length" for turn in turns) if turns else 0.0,
        "faults": len(nodes) - len(graded),
    }


def alarms(row: dict, rows: list[dict]) -> list[str]:
    """Sentences about what is wrong with a round. rows: those before it. A policy that decays
    shows in the share of valid nodes first.
    """
    shares = [r["valid_share"] for r in [*rows, row]]
    if len(shares) > 2 and max(shares[-2:]) < shares[0] / 2:
        return [
            f"valid share {shares[-1]:.0%}, below half of the first round's {shares[0]:.0%} for "
            "two rounds: the policy decays"
        ]
    return []
