"""Search that learns: a tree search in rounds, with an update of the model (LoRA) after each one
(TTT-Discover, arXiv 2601.16175).

    python examples/learn.py --task erdosOverlap --nodes 256 --parents 4 --children 8
    python viz.py logs/learn-erdosOverlap-none-tiny-0

The same command again resumes it. A round: the rule picks --parents nodes, each gets --children
children, all in flight; they are graded; one update of grpo.py on their episodes; sync; a row of
metrics.jsonl and a checkpoint.

A group are the children of one parent. They share its files; with a --sampling-mode each has a
strategy of its own in its prompt. The replies that list strategies are not trained.
"""

import asyncio
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo  # noqa: E402
import search  # noqa: E402
from flatlab.errors import UserError  # noqa: E402
from flatlab.heartbeat import heartbeat  # noqa: E402
from flatlab.numbers import standard_error  # noqa: E402
from flatlab.options import Count, Ge, Positive, Resumable, derived  # noqa: E402
from flatlab.runs import cli  # noqa: E402
from flatlab.runs.store import Run  # noqa: E402
from flatlab.train import batch, checkpoint, metrics  # noqa: E402
from flatlab.train.job import TrainingRun, in_trainer  # noqa: E402
from flatlab.tree.nodes import Node, Tree  # noqa: E402
from flatlab.view import console  # noqa: E402


@dataclass(frozen=True)
class Config(search.Config):
    """The options of search.py, and those of the updates."""

    nodes: Resumable[Count] = 256  # executed nodes per tree, failed ones too
    parents: Count = 4  # nodes that the rule picks in a round
    # children of each parent in a round, compared with each other
    children: Annotated[Count, Ge(2)] = 8
    # learning rate of AdamW
    lr: Positive | None = derived(lambda cfg, model: 1e-3 if model.stand_in else 4e-5)

    select: Literal[*search.SELECT] = "puct"  # rule that picks the nodes to build on
    # nodes that run at the same time: parents x children
    workers: Resumable[Count | None] = derived(lambda cfg, model: cfg.parents * cfg.children)
    url: None = field(default=None, init=False)  # no option: an endpoint cannot be trained


# ------------------------------------------------------------------ rounds


async def learn(trees: list[Tree], policy, workers: int) -> None:
    """Grows one tree after the other, each from the adapter that is there at the start."""
    slots = asyncio.Semaphore(workers)
    policy.fit_micro_tokens()
    await policy.verify()
    for t in trees:
        await search.prepare_tree(t, policy)
        policy.reset(t.cfg.seed)
        if policy.path.adapter:  # the row's kl is against it; the loss has no KL term
            policy.set_reference(policy.path.adapter)
        await grow(t, slots)


async def grow(t: Tree, slots: asyncio.Semaphore) -> None:
    """Grows a tree until its budget is spent or the rule has nothing to start."""
    policy = t.policy
    optimizer = policy.make_optimizer(t.cfg.lr)
    job = TrainingRun(run=t.run)
    await in_trainer(checkpoint.resume, policy, optimizer, job, Run.truncate_rows)
    policy.sync(job.step)
    # There is no KL term, and replies that were cut at the length limit carry no gradient.
    cfg = grpo.Config(seed=t.seed, credit="complete", kl=0.0, episode=t.cfg.episode)
    while started := start_round(t):
        with heartbeat(lambda: f"round {policy.version:3}: {len(t.finished)} nodes have ended"):
            async with asyncio.TaskGroup() as together:
                playing = [together.create_task(play(t, node, slots)) for node in started]
        nodes = [task.result() for task in playing]
        for node in nodes:
            node.reward = node.value
        siblings = itertools.groupby(nodes, lambda node: node.group)
        groups = [batch.Group(number, t.task, [*children]) for number, children in siblings]
        row = round_row(t, nodes)
        job.step = policy.version
        row |= await in_trainer(grpo.update, policy, optimizer, groups, cfg, job)
        policy.sync(job.step + 1)
        if row.get("skipped"):
            await policy.check_sync()
        row["alarms"] = metrics.alarms(row, t.run.rows())
        # The last adapter is the best one, because no evaluation compares them.
        await in_trainer(checkpoint.save_adapter, policy, job, "best")
        await in_trainer(checkpoint.write_step, policy, optimizer, job, row)
        t.run.save_again(nodes)  # now with rewards and advantages
        print(console.round_line(row))
    await search.close(t)


def start_round(t: Tree) -> list[Node]:
    """Starts the nodes of a round, a group of children for each parent that the rule picks."""
    nodes = []
    for _ in range(t.cfg.parents):
        choice = search.decide(t)
        if choice is None:
            break
        group = t.started
        for _ in range(t.cfg.children):
            if not t.spent():
                node = search.add_node(t, choice)
                node.step, node.group = t.policy.version, group
                nodes.append(node)
    return nodes


async def play(t: Tree, node: Node, slots: asyncio.Semaphore):
    """Plays the episode of a node once a slot is free."""
    await slots.acquire()
    return await search.run_node(t, node, slots)


# ------------------------------------------------------------------ numbers of a round


def round_row(t: Tree, nodes: list[Node]) -> dict:
    """The row of a round, without that of the update. nodes: with their turns. Shares are of those
    without faults.
    """
    graded = [node for node in nodes if node.status != "fault"]
    count = max(1, len(graded))
    gains = [
        node.improvement - (t.nearest_kept(node.parent).improvement or 0.0)
        for node in graded
        if node.valid
    ]
    lineages = [node.id.split(".")[1] for node in nodes]
    codes = [str(node.code) for node in nodes if node.code]
    new = set(codes) - {str(node.code) for node in t.finished[: -len(nodes)]}
    turns = [turn for node in nodes for turn in node.turns]
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
        "duplicate_share": (len(codes) - len(new)) / max(1, len(codes)),
        "cut_share": fmean(turn["stop_reason"] == "length" for turn in turns) if turns else 0.0,
    }


# ------------------------------------------------------------------ start

SCRIPT = Path(__file__).stem  # a copy of this file makes runs of its own


def check(cfg: Config) -> None:
    """Raises UserError for a rule that cannot learn, and as in search.py."""
    if search.SELECT[cfg.select].shared_request:
        raise UserError("learn.py needs a rule that uses scores: choose one such as --select puct.")
    search.check(cfg)


if __name__ == "__main__":
    cli.run(lambda: search.main(Config, SCRIPT, check, learn, trains=True))
