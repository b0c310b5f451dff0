"""The section `rules`: selection rules in a simulation.

The decisions are those of search.py, made by search.decide() on a real Tree. The researcher is
simulated: model families with a start and a ceiling, steps that improve or not, failures, copies of
earlier nodes, noise of the validation score, and costs. All its rates are the assumptions below, so
the result says how the rules treat such a world, and nothing about a model. Nodes run one at a
time.
"""

import asyncio
import itertools
import random
import statistics
import time
from dataclasses import dataclass
from types import SimpleNamespace

import search
from flatlab.tree import prompts
from flatlab.tree.tree import Tree, stable
from helpers import search_config

NODES = 24  # of a budget; the budget of minutes pays for as many nodes of average cost
MINUTES = 24.0
RULES = [name for name in search.SELECT if name != "scientist"]
# Rates of the researcher by sampling mode: (copies, skew of the families; 0 is uniform)
MODES = {"none": (0.35, 2.0), "sequence": (0.2, 1.0), "tail": (0.1, 0.0)}
FAILS = 0.2
IMPROVES = 0.35
REPAIRS = 0.5
MERGES = 0.4  # share of the crossovers that are better than both parents
NOISE = 0.05  # of a validation score, in improvements


@dataclass
class World:
    """What the families of one seed are worth. An improvement of 0 is the baseline, 1 good."""

    start: dict
    ceiling: dict
    cost: dict  # minutes
    order: list  # the most typical family first


def world(kind: str, seed: int) -> World:
    """kind: "even" (ceilings close together) or "rugged" (one family far above the others)."""
    rng = random.Random(stable("world", kind, seed))
    order = list(prompts.FAMILIES)
    rng.shuffle(order)
    start = {name: rng.uniform(-0.2, 0.4) for name in order}
    ceiling = {name: start[name] + rng.uniform(0.3, 0.6) for name in order}
    if kind == "rugged":
        far = rng.choice(order[2:])
        ceiling[far] = start[far] + 1.5
    cost = {name: min(5.0, rng.lognormvariate(-0.25, 0.7)) for name in order}
    return World(start, ceiling, cost, order)


class SimulatedTree(Tree):
    """A tree whose clock shows the simulated time."""

    clock = 0.0

    def elapsed(self):
        return self.clock


class NoRun:
    def rows(self, file):
        return []


def draft_family(t, rng, copies_skew):
    weights = [1 / (rank + 1) ** copies_skew for rank in range(len(t.world.order))]
    return rng.choices(t.world.order, weights)[0]


def attempt(t, node, rng):
    """Draws (family, true value or None, is a copy) of one attempt at a node."""
    copies, skew = MODES[t.sampling_mode]
    parent = t.nearest_kept(node.parent)
    if node.op != "debug" and rng.random() < copies:
        known = [other for other in [parent, *t.children(node.parent)] if other in t.finished]
        if known:
            twin = rng.choice(known)
            return twin.idea, twin.truth, twin
    explores = node.decision["phase"] == "explore" and rng.random() < 0.5
    family = parent.idea
    if node.op == "draft" or explores or not family:
        family = draft_family(t, rng, skew)
    if rng.random() < (1 - REPAIRS if node.op == "debug" else FAILS):
        return family, None, None
    ceiling = t.world.ceiling[family]
    if node.op in ("draft", "debug") or family != parent.idea:
        return family, t.world.start[family] + rng.uniform(-0.1, 0.1), None
    value = parent.truth
    if node.op == "crossover":
        other = t.nodes[node.second]
        value = max(value, other.truth)
        top = max(ceiling, t.world.ceiling[other.idea]) + 0.1
        if rng.random() < MERGES:
            return family, value + rng.uniform(0.1, 0.5) * max(0.0, top - value), None
    elif rng.random() < IMPROVES:
        return family, value + rng.uniform(0.1, 0.5) * max(0.0, ceiling - value), None
    return family, value - rng.expovariate(10), None


def play(t, node):
    """Runs a node in the simulated world. Copies keep the score of what they copy."""
    rng = random.Random(stable(t.seed, node.id, "play"))
    family, truth, twin = attempt(t, node, rng)
    cost = t.world.cost[family]
    if node.second:
        cost += t.world.cost[t.nodes[node.second].idea]
    cost *= rng.uniform(0.7, 1.3)
    node.idea, node.truth, node.kept, node.status = family, truth, True, "submit"
    if truth is not None:
        node.valid = True
        node.improvement = twin.improvement if twin else truth + rng.gauss(0, NOISE)
        node.score = node.improvement
    node.seconds = 60 * cost
    t.clock += node.seconds
    t.finished.append(node)


async def regret(kind, mode, seed, select, **budget):
    """How far the best node by validation stays below the best possible value."""
    task = SimpleNamespace(baseline=0.0, name="simulated")
    cfg = search_config(select=select, branching=3, depth=5, **budget)
    t = SimulatedTree(task, mode, seed, cfg, NoRun(), search.SELECT[select])
    t.world = world(kind, seed)
    t.root.truth = 0.0
    while node := await search.decide(t):
        play(t, node)
    return max(t.world.ceiling.values()) + 0.1 - t.best().truth


BUDGETS = {"nodes": {"nodes": NODES}, "cost": {"nodes": 10**6, "minutes": MINUTES}}
KINDS = ("even", "rugged")


def cell(mode, select, budget, seeds):
    """The regret of each world and seed."""

    async def run():
        worlds = itertools.product(KINDS, seeds)
        return [await regret(kind, mode, s, select, **BUDGETS[budget]) for kind, s in worlds]

    return asyncio.run(run())


def interval(values):
    """Mean and half of its 95 % interval, by the normal approximation."""
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):+.3f} ± {half:.3f}"


def mean_of(lists):
    """The mean per world and seed of lists of regrets: only these are independent."""
    return [statistics.fmean(values) for values in zip(*lists)]


def minus(values, others):
    return [a - b for a, b in zip(values, others)]


def rules(args):
    """All rules, and the sampling modes as controls."""
    seeds = range(args.count)
    start = time.perf_counter()
    rows = []
    for budget in BUDGETS:
        rows += rows_of(budget, seeds)
    seconds = time.perf_counter() - start
    headline = f"{args.count} seeds of two simulated worlds, {NODES} nodes; {seconds:.0f} s"
    return headline, rows


def rows_of(budget, seeds):
    by_rule = {select: cell("tail", select, budget, seeds) for select in RULES}
    tail = mean_of(by_rule.values())
    rows = []
    for mode in ("none", "sequence"):
        values = mean_of(cell(mode, select, budget, seeds) for select in RULES)
        note = f"{interval(minus(values, tail))} against tail"
        rows.append((f"{budget}: {mode}, all rules", interval(values), note))
    rows.append((f"{budget}: tail, all rules", interval(tail), ""))
    for select, values in by_rule.items():
        note = f"{interval(minus(values, by_rule['bfs']))} against bfs"
        rows.append((f"{budget}: {select}", interval(values), note))
    return rows
