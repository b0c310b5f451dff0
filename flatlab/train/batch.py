"""From finished episodes to what the loss sees: groups, pieces, micro-batches, columns of tensors. No maths in here."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from flatlab.episode.episode import Episode
from flatlab.episode.task import Task


@dataclass
class Group:
    """Episodes of one task that are compared with each other. A fault is kept for the record and has no reward."""

    number: int
    task: Task
    episodes: list[Episode]
    rewards: list[float]  # of the episodes that are no faults, in their order

    @property
    def played(self) -> list[Episode]:
        return [e for e in self.episodes if e.status != "fault"]

    @property
    def informative(self) -> bool:
        """Equal rewards teach nothing. Compared exactly: a standard deviation would see noise as a difference."""
        return len(set(self.rewards)) > 1


@dataclass
class Piece:
    """One segment of one episode. The lists after `mask` have one entry per trained token."""

    tokens: list[int]
    mask: list[int]  # 1: trained
    old: list[float]  # log-probability of the token when it was sampled
    advantage: list[float]
    target: list[float] = field(
        default_factory=list
    )  # what the value head should have said; only with ppo
    weight: float = 0.0  # of each of its tokens in the mean over the batch


def choose_tasks(tasks: list[Task], weights: list[float], groups: int, seed: str) -> list[Task]:
    """The tasks of a step's groups: shares by weight, what is left over by chance."""
    start, unit = random.Random(seed).random(), sum(weights) / max(groups, 1)
    ends = [sum(weights[: i + 1]) for i in range(len(tasks))]
    return [
        next(t for t, end in zip(tasks, ends) if (i + start) * unit < end or t is tasks[-1])
        for i in range(groups)
    ]


def light(groups: list[Group]) -> list[Group]:
    """Without the tokens: for the record, and to travel between ranks."""
    return [replace(g, episodes=[replace(e, segments=[]) for e in g.episodes]) for g in groups]


def everyones(groups: list[Group], job) -> list[Group]:
    """The groups of all ranks by number, on every rank, without the tokens."""
    return sorted((g for part in job.gather(light(groups)) for g in part), key=lambda g: g.number)


def pieces_of(episode: Episode, advantages: list[float], cut_replies: bool = True) -> list[Piece]:
    """The trained segments of an episode; each token has its reply's advantage (one number per reply).

    Replies are told apart by the mask: an observation lies between two of them, and none is trained twice.
    cut_replies: train on replies that were cut at the length limit, too.
    """
    pieces, reply = [], -1
    for segment in episode.segments:
        mask, numbers, before = list(segment.mask), [], 0
        for i, m in enumerate(segment.mask):
            reply += m and not before
            before = m
            if m and not cut_replies and episode.turns[reply]["stop_reason"] == "length":
                mask[i] = 0
            elif m:
                numbers.append(reply)
        if numbers:
            old = [logp for logp, m in zip(segment.logprobs, mask) if m]
            pieces.append(Piece(segment.tokens, mask, old, [advantages[i] for i in numbers]))
    return pieces


def flat(batch: list[list[Piece]]) -> list[Piece]:
    return [piece for pieces in batch for piece in pieces]


def use_values(policy, batch: list[list[Piece]], gae, cfg, job) -> None:
    """PPO: puts gae(reward, values, lambda) where the episode's reward was, whitened over the batch of all ranks, and
    advantage + value as the value head's target. batch: the pieces of each episode."""
    import torch

    values = {}
    with torch.no_grad():
        for part in micro_batches(flat(batch), cfg.micro_tokens, cfg.packing):
            found = iter(
                policy.logprobs([(p.tokens, p.mask) for p in part], values=True)[2].tolist()
            )
            values |= {id(p): [next(found) for _ in p.old] for p in part}
    for pieces in batch:
        before = [v for p in pieces for v in values[id(p)]]
        found = iter(gae(pieces[-1].advantage[-1], before, cfg.gae_lambda) if pieces else ())
        for p in pieces:
            p.advantage = [next(found) for _ in p.old]
            p.target = [a + v for a, v in zip(p.advantage, values[id(p)])]
    everything = [a for p in flat(batch) for a in p.advantage]
    n, total, squares = job.sum(len(everything), sum(everything), sum(a * a for a in everything))
    deviation = max(squares / max(n, 1) - (total / max(n, 1)) ** 2, 0.0) ** 0.5
    for p in flat(batch):
        p.advantage = [(a - total / n) / (deviation + 1e-8) for a in p.advantage]


def micro_batches(pieces: list[Piece], limit: int, packing: bool = False):
    """Splits by size, at most `limit` tokens: their sum when packing, else with the padding, count x longest. Sequences
    of similar length are together."""
    part = []
    for piece in sorted(pieces, key=lambda piece: len(piece.tokens)):
        whole = (
            sum(len(p.tokens) for p in (*part, piece))
            if packing
            else (len(part) + 1) * len(piece.tokens)
        )
        if part and whole > limit:
            yield part
            part = []
        part.append(piece)
    if part:
        yield part


@dataclass
class Columns:
    """A micro-batch as tensors, (N,) each, N trained tokens."""

    pairs: list[tuple]  # (tokens, mask) per sequence, for policy.logprobs
    old: Any
    advantage: Any
    target: Any
    weight: Any
    sequence: Any  # 0, 1, ...: which sequence of the micro-batch the token is in


def columns(part: list[Piece], device) -> Columns:
    import torch

    def column(values, dtype=torch.float32):
        return torch.tensor([v for row in values for v in row], dtype=dtype, device=device)

    return Columns(
        pairs=[(p.tokens, p.mask) for p in part],
        old=column(p.old for p in part),
        advantage=column(p.advantage for p in part),
        target=column(p.target or [0.0] * len(p.old) for p in part),
        weight=column([p.weight] * len(p.old) for p in part),
        sequence=column(([i] * len(p.old) for i, p in enumerate(part)), torch.long),
    )


class Tally:
    """Sums, means and maxima of columns over the micro-batches and epochs of an update, and over the ranks."""

    def __init__(self):
        self.seen: dict[str, list] = {}  # name -> [sum, count, maximum]

    def add(self, **columns) -> None:
        for name, column in columns.items():
            column = column.detach().double()
            s, n, m = self.seen.get(name, (0.0, 0, 0.0))
            self.seen[name] = [
                s + column.sum().item(),
                n + column.numel(),
                max(m, column.max().item()),
            ]

    def over(self, job) -> tuple[dict, dict, dict]:
        """(sums, means, maxima) by name, on every rank the same."""
        parts = [
            seen for seen in job.gather(self.seen) if seen
        ]  # a rank may have had nothing to learn from
        total = {name: sum(seen[name][0] for seen in parts) for name in parts[0]}
        return (
            total,
            {name: total[name] / sum(seen[name][1] for seen in parts) for name in total},
            {name: max(seen[name][2] for seen in parts) for name in total},
        )
