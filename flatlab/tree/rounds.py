"""What a search that learns writes after each round: a row of metrics.jsonl, the adapter, and its
checkpoint, from which a killed run goes on.
"""

from __future__ import annotations

from statistics import fmean

from flatlab.files import save_tensors, write_whole
from flatlab.numbers import standard_error
from flatlab.runs.store import json_line
from flatlab.tree.nodes import Node, Tree


def resume(t: Tree, optimizer) -> tuple[int, list[dict]]:
    """Loads the adapter and the optimizer of the last whole round.

    Returns the number of the next round and the rows before it. The nodes of a round that was cut
    stay in the tree; nothing is learned from them.
    """
    import torch

    number, folder = [(-1, None), *t.run.checkpoints()][-1]
    if folder:
        saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        t.policy.load_adapter(folder)
        save_best(t)
        print(f"resumed after round {number} from {folder}", flush=True)
    t.policy.sync()
    t.policy.version = number + 1  # the number of updates
    rows = [row for row in t.run.rows() if row["step"] <= number]
    write_whole(t.run.dir / "metrics.jsonl", "".join(map(json_line, rows)))
    return number + 1, rows


def save(t: Tree, optimizer, row: dict) -> None:
    """Writes the row, the checkpoint and best/. A round counts once its checkpoint is there."""
    t.run.log(row)
    with t.run.checkpoint(row["step"]) as folder:
        t.policy.save(folder)
        save_tensors({"optimizer": optimizer.state_dict()}, folder / "trainer.pt")
    save_best(t)


def save_best(t: Tree) -> None:
    """Saves the adapter as best/: the last one, because no evaluation compares them."""
    with t.run.whole_directory("best") as folder:
        t.policy.save(folder)


def row_of(t: Tree, number: int, nodes: list[Node], episodes: list) -> dict:
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
    best = t.best()
    return {
        "step": number,
        "nodes": len(t.finished),
        "tokens": t.tokens(),
        "elapsed": t.elapsed(),
        "best_score": best.score,
        "best_improvement": best.improvement,
        "valid_share": len(gains) / count,
        "improved_share": sum(gain > 0 for gain in gains) / count,
        "gain_mean": fmean(gains) if gains else None,  # over the parent, of the valid ones
        "gain_stderr": standard_error(gains),
        "largest_lineage_share": max(map(lineages.count, lineages)) / len(nodes),
        "live_lineages": len(set(lineages)),
        "depth": max(node.depth for node in t.finished),
        # share of this round's programs that the tree has more than once
        "duplicate_share": (new - len(set(codes) - set(codes[:-new]))) / new if new else 0.0,
        "cut_share": fmean(turn["stop_reason"] == "length" for turn in turns) if turns else 0.0,
        "faults": len(nodes) - len(graded),
    }


def alarms(row: dict, rows: list[dict]) -> list[str]:
    """What is wrong with a round; rows: those before it. A policy that decays shows in the share
    of valid nodes first.
    """
    shares = [r["valid_share"] for r in [*rows, row]]
    if len(shares) > 2 and max(shares[-2:]) < shares[0] / 2:
        return [
            f"valid share {shares[-1]:.0%}, below half of the first round's {shares[0]:.0%} for "
            "two rounds: the policy decays"
        ]
    return []
