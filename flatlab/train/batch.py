"""From finished episodes to what the loss sees: groups, training sequences, micro-batches. No
formulas here.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from flatlab.task.definition import Task
from flatlab.world.episode import Episode

PROMPT_KEY_TOKENS = 128  # tokens: sequences that differ in these are in different micro-batches


@dataclass
class Group:
    """Episodes of one task that are compared with each other. A fault stays in the record and has
    no reward.
    """

    number: int
    task: Task
    episodes: list[Episode]

    @property
    def played(self) -> list[Episode]:
        """The episodes that are not faults."""
        return [e for e in self.episodes if e.status != "fault"]

    @property
    def rewards(self) -> list[float]:
        return [e.reward for e in self.played]

    @property
    def informative(self) -> bool:
        """True if the rewards differ. Compared exactly: a standard deviation would take rounding
        for a difference.
        """
        return len(set(self.rewards)) > 1


@dataclass
class Plan:
    """Groups to play."""

    tasks: list[Task]  # of each group, then of each that replaces one with equal rewards
    groups: int  # without those replacements
    size: int  # episodes of a group
    seed: int
    test: bool = False  # whether to score the test part, too
    order: int = -1  # priority for sandboxes, lower runs first: evaluations, then step by step
    started: int = 0  # episodes so far
    ended: int = 0

    def progress(self, name: str) -> Callable:
        """A function that returns a line about its episodes, see heartbeat."""
        return lambda: f"{name}: {self.ended} of {self.started} episodes"


@dataclass
class TrainSequence:
    """A segment of an episode. The lists after `mask` have one entry per trained token."""

    tokens: list[int]
    mask: list[int]  # 1: trained
    old: list[float]  # log-probability of the token when it was sampled
    advantage: list[float]
    version: list[int]  # of the policy that sampled the token
    weight: Sequence[float] = ()  # of the token in the mean over the batch


def choose_tasks(tasks: list[Task], weights: list[float], groups: int, seed: str):
    """The tasks of a step's groups, in proportion to the weights; the remainder is drawn
    (systematic sampling).
    """
    ends = np.cumsum(weights) / sum(weights) * groups
    positions = np.arange(groups) + random.Random(seed).random()
    numbers = np.searchsorted(ends[:-1], positions, side="right")
    return [tasks[number] for number in numbers]


def plan_step(tasks: list[Task], weights: list[float], cfg, step: int) -> Plan:
    """The groups of a step, and those that replace groups from which nothing can be learned."""
    choose = partial(choose_tasks, tasks, weights)
    planned = choose(cfg.groups, f"{cfg.seed} {step}")
    more = choose(cfg.max_groups - cfg.groups, f"{cfg.seed} {step} replacements")
    seed = cfg.seed * 10_007 + step
    return Plan(planned + more, cfg.groups, cfg.group_size, seed, order=step)


def gather_groups(groups: list[Group], job) -> list[Group]:
    """The groups of all ranks by number, on every rank, without the sequences to train on."""
    copies = [replace(g, episodes=[replace(e, segments=[]) for e in g.episodes]) for g in groups]
    return sorted(sum(job.ranks.gather(copies), []), key=lambda group: group.number)


def sequences_of(episode: Episode, advantages: list[float | None]) -> list[TrainSequence]:
    """The trained segments of an episode. advantages: one number per reply, given to each of its
    tokens; a reply with None is not trained.
    """
    sequences = []
    for segment in episode.segments:
        mask = [int(r >= 0 and advantages[r] is not None) for r in segment.reply]
        old, reply, version = [
            list(itertools.compress(values, mask))
            for values in (segment.logprobs, segment.reply, segment.version)
        ]
        if reply:
            credit = [advantages[r] for r in reply]
            sequences.append(TrainSequence(segment.tokens, mask, old, credit, version))
    return sequences


def weighted(batch: list[list], weight: Callable, cfg, job) -> list[TrainSequence]:
    """The sequences of all episodes, each with the weight of its tokens in the mean. The
    denominators are those of the whole batch, before it is split into ranks and micro-batches.
    """
    lengths = [sum(len(s.old) for s in sequences) for sequences in batch]
    tokens, episodes = job.ranks.sum(sum(lengths), len(lengths))
    for sequences, length in zip(batch, lengths):
        for s in sequences:
            s.weight = [weight(length, tokens, episodes, cfg)] * len(s.old)
    return sum(batch, [])


def micro_batches(sequences: list[TrainSequence], policy):
    """Yields parts that cost the trainer at most policy.micro_tokens, see Trainer.pass_tokens.

    Sequences that begin alike come together, in order of length. One that is longer than the limit
    makes a part of its own.
    """

    def beginning(sequence):
        return sequence.tokens[: min(sequence.mask.index(1), PROMPT_KEY_TOKENS)]

    for _, alike in itertools.groupby(sorted(sequences, key=beginning), key=beginning):
        micro_batch = []
        for sequence in sorted(alike, key=lambda s: len(s.tokens)):
            larger = pairs_of([*micro_batch, sequence])
            if micro_batch and policy.pass_tokens(larger) > policy.micro_tokens:
                yield micro_batch
                micro_batch = []
            micro_batch.append(sequence)
        yield micro_batch


def pairs_of(sequences: list[TrainSequence]) -> list[tuple[list[int], list[int]]]:
    """The tokens and the mask of each of these sequences, for Trainer.logprobs."""
    return [(s.tokens, s.mask) for s in sequences]


def column(sequences: list[TrainSequence], name: str, device):
    """A field of these sequences as a tensor of shape (N,), N trained tokens."""
    from flatlab.model.packing import on_device

    values = [np.asarray(getattr(s, name), np.float32) for s in sequences]
    return on_device(np.concatenate(values), device)


def sequence_numbers(sequences: list[TrainSequence], device):
    """The number of each trained token's sequence, a tensor of shape (N,)."""
    from flatlab.model.packing import on_device

    return on_device(np.repeat(np.arange(len(sequences)), [len(s.old) for s in sequences]), device)


def draw_kl_weights(count: int, share: float, kl: float, seed: str) -> list[float | None]:
    """Weight of the KL term of each micro-batch: kl * n / k for k of the n, and None for the
    others, which need no pass of the reference. share: k / n.

    If kl is 0, one has the weight 0, because metrics.collapse reads the KL.
    """
    drawn = max(1, math.ceil(share * count)) if kl else 1
    weights = [kl * count / drawn] * drawn + [None] * (count - drawn)
    random.Random(seed).shuffle(weights)
    return weights


@dataclass
class Meter:
    """Sums, means and maxima of columns over the micro-batches of an update."""

    # (name, "sum", "mean" or "max", sum or maximum, count) of each column of each micro-batch. Some
    # are tensors: to read one waits for the GPU.
    rows: list[tuple] = field(default_factory=list)

    def add(self, reduction: str, where=None, **columns) -> None:
        """Adds tensors; an empty one changes nothing. where: a mask; the other entries count as 0
        in a sum or maximum, and not at all in a mean.
        """
        for name, values in columns.items():
            if len(values):
                values = values.detach().double()
                count = len(values)
                if where is not None:
                    values = values.masked_fill(~where, 0.0)
                    count = where.sum()
                reduced = values.max() if reduction == "max" else values.sum()
                self.rows.append((name, reduction, reduced, count))

    def numbers(self, ranks=None) -> dict[str, float]:
        """Reductions of what was added, by name. ranks: whose columns count, too."""
        rows = [(*names, float(value), int(count)) for *names, value, count in self.rows]
        rows = [row for row in rows if row[-1]]  # an empty mask changes nothing
        rows = sum(ranks.gather(rows), []) if ranks else rows
        columns = {}
        for name, reduction, *pair in rows:
            columns.setdefault((name, reduction), []).append(pair)
        numbers = {}
        for (name, reduction), pairs in columns.items():
            values, counts = zip(*pairs)
            numbers[name] = max(values) if reduction == "max" else sum(values)
            if reduction == "mean":
                numbers[name] /= sum(counts)
        return numbers
