"""From finished episodes to what the loss sees: groups, training sequences, micro-batches of
tensors. No formulas here.
"""

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flatlab.model.packing import common_prompt
from flatlab.runs.store import packed_tokens
from flatlab.task.definition import Task
from flatlab.world.episode import Episode

ALIKE = 128  # tokens: sequences that differ in these are in different micro-batches


@dataclass
class Group:
    """Episodes of one task that are compared with each other. A fault stays in the record and has
    no reward.
    """

    number: int
    task: Task
    episodes: list[Episode]
    rewards: list[float]  # of the episodes that are not faults, in their order
    tokens: bytes = b""  # packed_tokens of all its episodes, once it is gathered

    @property
    def played(self) -> list[Episode]:
        return [e for e in self.episodes if e.status != "fault"]

    @property
    def informative(self) -> bool:
        """Whether the rewards differ. Compared exactly: a standard deviation would take rounding
        for a difference.
        """
        return len(set(self.rewards)) > 1


@dataclass
class TrainSequence:
    """One segment of one episode. The lists after `mask` have one entry per trained token."""

    tokens: list[int]
    mask: list[int]  # 1: trained
    old: list[float]  # log-probability of the token when it was sampled
    advantage: list[float]
    version: list[int]  # syncs before the token was sampled
    target: list[float] = field(default_factory=list)  # of the value head; ppo only
    weight: float = 0.0  # of each of its tokens in the mean over the batch


def choose_tasks(tasks: list[Task], weights: list[float], groups: int, seed: str):
    """The tasks of a step's groups, in proportion to the weights; the remainder is drawn
    (systematic sampling).
    """
    ends = np.cumsum(weights) / sum(weights) * groups
    positions = np.arange(groups) + random.Random(seed).random()
    numbers = np.searchsorted(ends[:-1], positions, side="right")
    return [tasks[number] for number in numbers]


def gather_groups(groups: list[Group], job) -> list[Group]:
    """The groups of all ranks by number, on every rank, with their tokens packed."""
    copies = []
    for g in groups:
        episodes = [replace(e, segments=[]) for e in g.episodes]
        copies.append(replace(g, episodes=episodes, tokens=packed_tokens(g.episodes)))
    return sorted(flatten(job.ranks.gather(copies)), key=lambda group: group.number)


def sequences_of(episode: Episode, advantages: list[float | None]) -> list[TrainSequence]:
    """The trained segments of an episode. advantages: one number per reply, given to each of its
    tokens; a reply with None is not trained.

    Replies are told apart by the mask: an observation lies between two of them, and none is trained
    twice.
    """
    sequences, reply = [], -1
    for segment in episode.segments:
        mask, own, versions, before = [], [], [], 0
        for m in segment.mask:
            if m and not before:
                reply += 1
            before = m
            mask.append(int(m and advantages[reply] is not None))
            if mask[-1]:
                own.append(advantages[reply])
                versions.append(episode.turns[reply]["version"])
        if own:
            old = [logp for logp, m in zip(segment.logprobs, mask) if m]
            sequences.append(TrainSequence(segment.tokens, mask, old, own, versions))
    return sequences


def flatten(lists: list[list]) -> list:
    return [element for part in lists for element in part]


def micro_batches(sequences: list[TrainSequence], limit: int, packed: bool = True):
    """Yields parts that cost the trainer at most `limit` tokens, see `cost`.

    Sequences that begin alike come together, in order of length. One that is longer than the limit
    makes a part of its own.
    """

    def beginning(sequence):
        return sequence.tokens[: min(sequence.mask.index(1), ALIKE)]

    for _, alike in itertools.groupby(sorted(sequences, key=beginning), key=beginning):
        part = []
        for sequence in sorted(alike, key=lambda s: len(s.tokens)):
            if part and cost([*part, sequence], packed) > limit:
                yield part
                part = []
            part.append(sequence)
        yield part


def cost(part: list[TrainSequence], packed: bool = True) -> int:
    """Tokens of a forward pass: the common prompt once and the rest of each sequence; if not
    packed, a padded row for each sequence.
    """
    lengths = [len(s.tokens) for s in part]
    if not packed:
        return len(part) * max(lengths)
    shared = common_prompt([(s.tokens, s.mask) for s in part])
    return sum(lengths) - shared * (len(part) - 1)


@dataclass
class MicroBatch:
    """Sequences as tensors of shape (N,), N trained tokens."""

    pairs: list[tuple]  # (tokens, mask) per sequence, for policy.logprobs
    old: Any
    advantage: Any
    version: Any
    target: Any
    weight: Any
    sequence: Any  # 0, 1, ...: the sequence that the token is in


def to_tensors(part: list[TrainSequence], device) -> MicroBatch:
    import torch

    def column(values, dtype=torch.float32):
        return torch.tensor([v for row in values for v in row], dtype=dtype, device=device)

    numbers = [[i] * len(s.old) for i, s in enumerate(part)]
    return MicroBatch(
        pairs=[(s.tokens, s.mask) for s in part],
        old=column(s.old for s in part),
        advantage=column(s.advantage for s in part),
        version=column((s.version for s in part), torch.long),
        target=column(s.target or [0.0] * len(s.old) for s in part),
        weight=column([s.weight] * len(s.old) for s in part),
        sequence=column(numbers, torch.long),
    )


class Meter:
    """Sums, means and maxima of columns over the micro-batches and epochs of an update, and over
    the ranks.
    """

    def __init__(self):
        self.rows: dict[str, list] = {}  # (sum, count, maximum) of each micro-batch

    def add(self, **columns) -> None:
        for name, column in columns.items():
            if not len(column):
                continue
            column = column.detach().double()
            row = (column.sum().item(), column.numel(), column.max().item())
            self.rows.setdefault(name, []).append(row)

    def mean(self, name: str) -> float:
        """Of what this rank added; 0 if it had nothing to add."""
        totals, counts, _ = zip(*self.rows.get(name, [(0.0, 1, 0.0)]))
        return sum(totals) / sum(counts)

    def over_ranks(self, job) -> tuple[dict, dict, dict]:
        """(sums, means, maxima) by name, the same on every rank. A rank may have had nothing to
        add.
        """
        sums, means, maxima = {}, {}, {}
        parts = job.ranks.gather(self.rows)
        for name in dict.fromkeys(name for part in parts for name in part):
            rows = [row for part in parts for row in part.get(name, [])]
            totals, counts, largest = zip(*rows)
            sums[name] = sum(totals)
            means[name] = sums[name] / sum(counts)
            maxima[name] = max(largest)
        return sums, means, maxima
