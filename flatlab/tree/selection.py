"""Which node gets the next child: the selection rules of search.py, each a pure function in the dict SELECT.

A rule is (tree, config, random generator) -> Choice, or None: nothing to start before another node has ended (and if none
is running, the tree is complete). Everything random comes from the generator, everything known from the tree, so a
decision can be repeated from the journal.

Rules see `improvement`, which is 0 at the baseline and grows with better scores whatever the metric's direction; Q is improvement,
min-max normalised over the root and all scored nodes, 0.5 when all are equal. Nodes in flight count as children.
What is new against the textbook: a failed node is not worth 0 by accident (a good loss!) but worth the least Q, and it is
no dead end: bfs, mcts and the scientist may build on it, the others debug a failed leaf now and then (`failed_leaf`).

Letters: N executed nodes, n children of a candidate, q its value.
"""

from __future__ import annotations

import math
from statistics import stdev

from flatlab.tree import prompts
from flatlab.tree.tree import Choice, Node, Tree


def normalised(values: dict) -> dict:
    """Min-max to [0, 1]; all equal: 0.5."""
    low, high = min(values.values()), max(values.values())
    return {
        key: (value - low) / (high - low) if high > low else 0.5 for key, value in values.items()
    }


def quality(t: Tree) -> dict[str, float]:
    """Q of the root and of every scored node."""
    return normalised({node.id: node.improvement for node in [t.nodes["0"], *t.scored()]})


def best_child_value(t: Tree, q: dict, id: str) -> float:
    """Best Q among the scored children, own Q without any."""
    return max((q[child.id] for child in t.children(id) if child.id in q), default=q[id])


def candidates(t: Tree, first: int) -> list[Node]:
    """First `first` children of the root, then any scored node whose files are kept; the root again only while there is none."""
    if len(t.children("0")) < first:
        return [t.nodes["0"]]
    return [n for n in t.scored() if n.kept] or ([] if t.running() else [t.nodes["0"]])


def failed_leaf(t: Tree, cfg, rng) -> Choice | None:
    leaves = [
        n
        for n in t.finished
        if not n.valid and n.kept and not t.children(n.id) and t.failures(n) <= cfg.debug_depth
    ]
    if leaves and rng.random() < cfg.debug_prob:
        return Choice(
            rng.choice(leaves).id, reason=f"one of {len(leaves)} failed leaves, drawn for debugging"
        )
    return None


def bfs(t, cfg, rng):
    """Level by level, `branching` children each. Failed nodes get theirs too (debugging): the set of nodes is fixed beforehand."""
    level, left = ["0"], cfg.nodes
    for _ in range(cfg.depth):
        below = [f"{id}.{i}" for id in level for i in range(cfg.branching)][:left]
        for id in below:
            parent = t.nodes.get(id.rpartition(".")[0])
            if id not in t.nodes and parent and parent.status:
                return Choice(parent.id, reason="next in level order")
        level, left = below, left - len(below)
    return None


def uniform_choice(t, cfg, rng):
    options = candidates(t, cfg.breadth)
    scores = {n.id: 1 / len(options) for n in options}
    return (
        Choice(rng.choice(options).id, scores=scores, reason=f"drawn from {len(options)}")
        if options
        else None
    )


def greedy(t, cfg, rng):
    """Drafts first, then always the best node (AIDE, arXiv 2502.13138)."""
    options = candidates(t, cfg.drafts)
    scores = {n.id: n.improvement for n in options}
    return (
        Choice(
            max(scores, key=scores.get),
            scores=scores,
            reason="best so far" if t.scored() else "draft",
        )
        if options
        else None
    )


def visit_bonus(t, c: float, id: str) -> float:
    """C sqrt(ln N / (n + 1)): N executed nodes, n children; the + 1 is the node itself."""
    return c * math.sqrt(math.log(max(1, t.executed())) / (len(t.children(id)) + 1))


def trend(t, q: dict, id: str) -> float:
    """sum(i delta_i) / sum(i) over the steps of Q on the way from the root: later steps weigh more."""
    known = [q[node.id] for node in t.path(id) if node.id in q]
    steps = [b - a for a, b in zip(known, known[1:])]
    return (
        sum(i * d for i, d in enumerate(steps, 1)) / sum(range(1, len(steps) + 1)) if steps else 0.0
    )


def explore_or_exploit(value: dict, bonus: dict, chosen: str | None = None) -> Choice | None:
    """arg-max of value + bonus unless one is given; it explores where the bonus is the larger part."""
    if not value:
        return None
    scores = {id: value[id] + bonus[id] for id in value}
    id = chosen or max(scores, key=scores.get)
    phase = "explore" if bonus[id] > value[id] else "exploit"
    return Choice(id, phase, f"bonus {bonus[id]:.3g} against value {value[id]:.3g}", scores)


def ucb(t, cfg, rng):
    """Q + C sqrt(ln N / (n + 1))."""
    q, ids = quality(t), [n.id for n in candidates(t, cfg.breadth)]
    return explore_or_exploit(
        {i: best_child_value(t, q, i) for i in ids}, {i: visit_bonus(t, cfg.ucb_c, i) for i in ids}
    )


def open_ended(t, cfg, rng):
    """ucb + W max(trend, 0); a path that gets better is followed for `commitment` further nodes, until a child is worse or fails."""
    last = max(
        (n for n in t.nodes.values() if "commit" in n.decision), key=lambda n: n.order, default=None
    )
    left = last.decision["commit"] if last else 0
    if (
        left
        and last.valid
        and last.kept
        and last.improvement >= (t.nearest_kept(last.parent).improvement or 0.0)
    ):
        return Choice(
            last.id,
            "explore",
            f"committed to this path for {left} more",
            notes={"commit": left - 1},
        )
    q, ids = quality(t), [n.id for n in candidates(t, cfg.breadth)]
    rise = {i: max(0.0, trend(t, q, i)) for i in ids}
    bonus = {i: visit_bonus(t, cfg.ucb_c, i) + cfg.trend_weight * rise[i] for i in ids}
    choice = explore_or_exploit({i: best_child_value(t, q, i) for i in ids}, bonus)
    if (
        choice and rise[choice.parent] > 0 and not (left and not last.status)
    ):  # at most one commitment, also in flight
        choice.notes = {"commit": cfg.commitment}
    return choice


def softmax(t, cfg, rng):
    """Drawn by exp(S / tau), S = Q + C sqrt(ln N / (n + 1)) + W max(trend, 0) - alpha ln(1 + n)."""
    q, ids = quality(t), [n.id for n in candidates(t, cfg.breadth)]
    value = {i: best_child_value(t, q, i) for i in ids}
    bonus = {
        i: visit_bonus(t, cfg.ucb_c, i)
        + cfg.trend_weight * max(0.0, trend(t, q, i))
        - cfg.visit_alpha * math.log(1 + len(t.children(i)))
        for i in ids
    }
    top = max((value[i] + bonus[i] for i in ids), default=0.0)
    weights = [math.exp((value[i] + bonus[i] - top) / cfg.softmax_tau) for i in ids]
    return explore_or_exploit(value, bonus, rng.choices(ids, weights)[0] if ids else None)


def used_families(t, id: str) -> set:
    return {
        family for child in t.children(id) if child.idea for family in prompts.families(child.idea)
    }


SIGNALS = {  # (tree, Q, candidate) -> the larger, the more it deserves a child
    "variance": lambda t, q, v: (
        stdev(known) if len(known := [q[c.id] for c in t.children(v.id) if c.id in q]) > 1 else 1.0
    ),
    "regret": lambda t, q, v: max(q.values()) - best_child_value(t, q, v.id),
    "coverage": lambda t, q, v: 1 - len(used_families(t, v.id)) / (len(prompts.FAMILIES) + 1),
    "depth": lambda t, q, v: 1 / (v.depth * (len(t.children(v.id)) + 1) + 1),
}


def signals(t, cfg, rng):
    """The sum of the chosen signals, each normalised over the candidates; the best quarter of the nodes is exploited."""
    q, options = quality(t), candidates(t, cfg.breadth)
    if not options:
        return None
    parts = [normalised({v.id: SIGNALS[name](t, q, v) for v in options}) for name in cfg.signals]
    scores = {v.id: sum(part[v.id] for part in parts) for v in options}
    id = max(scores, key=scores.get)
    ranked = sorted(q[n.id] for n in t.scored())
    high = (
        bool(ranked)
        and q[id] >= ranked[min(len(ranked) - 1, int(cfg.exploit_quantile * len(ranked)))]
    )
    return Choice(id, "exploit" if high else "explore", " + ".join(cfg.signals), scores)


def uct(total: float, visits: int, parent_visits: int, c: float) -> float:
    """Mean value + c sqrt(ln N_parent / N); a child that was never visited comes first."""
    return total / visits + c * math.sqrt(math.log(parent_visits) / visits) if visits else math.inf


def mcts(t, cfg, rng):
    """Down by UCT to the first node with fewer than `branching` children. Nodes that failed or still run are visits of value 0."""
    q, id, scores = quality(t), "0", {}
    below = lambda id: [n for n in t.nodes.values() if n.id == id or n.id.startswith(id + ".")]
    while len(t.children(id)) >= cfg.branching:
        options = [
            c for c in t.children(id) if c.kept and (c.valid or t.failures(c) <= cfg.debug_depth)
        ]
        if not options:
            if t.running():
                return None
            break  # all children are given up: widen
        visits = len(below(id))
        level = {
            c.id: uct(
                sum(q.get(n.id, 0.0) for n in below(c.id)), len(below(c.id)), visits, cfg.uct_c
            )
            for c in options
        }
        scores |= level
        id = max(level, key=level.get)
    return Choice(id, scores=scores, reason=f"reached by UCT at depth {t.nodes[id].depth}")


def evolution(t, cfg, rng):
    """Drafts, then parents drawn from the best `population` nodes by exp(Q); two of them cross with probability crossover_prob."""
    options = candidates(t, cfg.drafts)
    pool = sorted((n for n in options if n.id != "0"), key=lambda n: -n.improvement)[
        : cfg.population
    ]
    if not pool:
        return Choice("0", reason="draft") if options else None
    q = quality(t)
    fitness = {n.id: math.exp(q[n.id]) for n in pool}
    first = rng.choices(list(fitness), list(fitness.values()))[0]
    others = {id: weight for id, weight in fitness.items() if id != first}
    cross = bool(others) and rng.random() < cfg.crossover_prob
    second = rng.choices(list(others), list(others.values()))[0] if cross else None
    return Choice(first, scores=fitness, second=second, reason="crossover" if cross else "mutation")


def linear(t, cfg, rng):
    """No tree: each node goes on where the one before ended, with the same total of actions."""
    return (
        None
        if t.running()
        else Choice(t.finished[-1].id if t.finished else "0", "exploit", "goes on")
    )


SELECT = {
    "bfs": bfs,
    "random": uniform_choice,
    "greedy": greedy,
    "ucb": ucb,
    "open_ended": open_ended,
    "softmax": softmax,
    "signals": signals,
    "mcts": mcts,
    "evolution": evolution,
    "linear": linear,
}
DEBUGS_ITSELF = {"bfs", "mcts", "linear"}


def select(t: Tree, cfg, rng) -> Choice | None:
    """The rule that cfg.select names; most of them debug a failed leaf instead with probability cfg.debug_prob."""
    debug = None if cfg.select in DEBUGS_ITSELF else failed_leaf(t, cfg, rng)
    return debug or SELECT[cfg.select](t, cfg, rng)
