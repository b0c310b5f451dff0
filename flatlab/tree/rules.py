"""Selection of the node that gets the next child: shared parts, and the rules of search.py besides
those in its block.

A rule is called as rule(tree, rng, **constants). It returns a Choice, or None if nothing can start
before a running node has ended (if none is running, the tree is complete). Its constants are
keyword arguments with a default, which `--rule-args c=0.5` overrides. All randomness comes from rng
and all knowledge from the tree, so every decision can be repeated from the rows of its nodes.

Rules see `improvement`, which is 0 at the baseline and grows with better scores whatever the
direction of the metric. Q is the improvement, min-max normalised over the root and all scored nodes
(0.5 if all are equal). Running nodes count as children. A failed node has the lowest Q, but it is
not a dead end: bfs, mcts and linear may build on it, and the other rules but puct
debug a failed leaf with probability DEBUG_PROB (see `failed_leaf`).

Letters: N executed nodes, n children of a candidate, q its value.
"""

import heapq
import inspect
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from flatlab.errors import UserError, finite, nearest
from flatlab.tree.nodes import Choice, Node, Tree


@dataclass(frozen=True)
class Rule:
    """A selection rule, and what sets it apart from the others."""

    function: Callable  # (tree, rng, constants with defaults) -> Choice, or None to wait
    debugs: bool = True  # False: failed leaves are not drawn for debugging, see DEBUG_PROB
    shared_request: bool = False  # one request for strategies serves all children of a node
    uses_strategies: bool = True  # False: none are asked for

    def constants(self, cfg) -> dict:
        """Its keyword arguments: the defaults, or the `name=value` pairs of --rule-args.

        cfg: the Config that selects it. A value has the type of the default. Raises UserError for
        an unknown name and for a value that is not a number, negative, or 0 where a count is
        wanted.
        """
        parameters = inspect.signature(self.function).parameters.values()
        values = {p.name: p.default for p in parameters if p.default is not p.empty}
        for text in cfg.rule_args:
            key, _, value = text.partition("=")
            if key not in values:
                hint = nearest(key, [*values])
                raise UserError(f"--rule-args {text}: rule {cfg.select} has no {key!r}; {hint}.")
            kind = type(values[key])
            lowest = 1 if kind is int else 0
            with suppress(ValueError):
                value = kind(value)
            values[key] = kind(finite(f"--rule-args {key}", value, lowest))
        return values


# ------------------------------------------------------------------ what the rules share


def quality(t: Tree) -> Callable:
    """Q, a function of a node that is scored or the root."""
    values = [0.0, *(node.improvement for node in t.scored)]
    low = min(values)
    width = max(values) - low
    return lambda node: (node.improvement - low) / width if width else 0.5


def best_child(node: Node) -> Node:
    """Its scored child with the highest Q; the node itself if there is none."""
    scored = [child for child in node.children if child.valid]
    return max(scored, key=lambda child: child.improvement, default=node)


def candidates(t: Tree, drafts: int) -> list[Node]:
    """The nodes that may get a child.

    The root until it has `drafts` children, then every scored node whose files are kept. If there
    is none, the root again once nothing is running.
    """
    kept = t.kept
    if len(t.root.children) < drafts or not (kept or t.running):
        return [t.root]
    return kept


def failed_leaf(t: Tree, rng, probability: float) -> Choice | None:
    """With this probability a failed leaf, drawn at random, for debugging. Its files are kept, and
    it ends at most DEBUG_DEPTH failures in a row.
    """
    failed = [n for n in t.finished if n.kept and not n.valid]
    leaves = [n for n in failed if not (n.children or t.given_up(n))]
    if leaves and rng.random() < probability:
        reason = f"one of {len(leaves)} failed leaves, drawn for debugging"
        return Choice(rng.choice(leaves).id, reason=reason)
    return None


def values_and_bonuses(t: Tree, drafts: int, c: float, trend_weight: float = 0.0) -> dict:
    """Two numbers for the id of each candidate: the best Q among the children, and the bonus
    c sqrt(ln N / (n + 1)) + trend_weight max(trend, 0); the + 1 is the visit of the node itself.
    """
    q = quality(t)
    log_n = math.log(max(1, t.executed()))
    rising = trends(t)
    parts = {}
    for node in candidates(t, drafts):
        visits = len(node.children) + 1
        bonus = c * math.sqrt(log_n / visits)
        bonus += trend_weight * max(rising[node.id], 0.0)
        parts[node.id] = q(best_child(node)), bonus
    return parts


def trends(t: Tree) -> dict[str, float]:
    """id -> sum_i(i delta_i) / sum_i(i), delta_i the i-th step of Q on the path from the root."""
    q = quality(t)
    # id -> number of steps between scored nodes on its path, sum_i(i delta_i), Q at its end
    paths = {t.root.id: (0, 0.0, q(t.root))}
    for node in t.finished:  # a parent ends before its children start
        steps, total, last = paths[node.parent]
        if node.valid:
            steps += 1
            total += steps * (q(node) - last)
            last = q(node)
        paths[node.id] = steps, total, last
    values = {}
    for id, (steps, total, _) in paths.items():
        values[id] = total / max(1, steps * (steps + 1) / 2)
    return values


def arg_max(scores: dict[str, float]) -> str:
    return max(scores, key=scores.get)


def draw_weighted(rng, weights: dict[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def explore_or_exploit(parts: dict) -> Choice | None:
    """The candidate with the highest value + bonus. parts: what values_and_bonuses returns.

    The phase is "explore" if the bonus is larger than the value, else "exploit".
    """
    if not parts:
        return None
    scores = {id: value + bonus for id, (value, bonus) in parts.items()}
    id = arg_max(scores)
    value, bonus = parts[id]
    phase = "explore" if bonus > value else "exploit"
    return Choice(id, phase, f"bonus {bonus:.3g} against value {value:.3g}", scores)


# ------------------------------------------------------------------ the rules


def uniform_choice(t, rng, drafts=3):
    """Drafts, then any candidate with equal probability."""
    options = candidates(t, drafts)
    if not options:
        return None
    return Choice(rng.choice(options).id, reason=f"drawn from {len(options)}")


def open_ended(t, rng, drafts=3, c=1.41, trend_weight=0.5, commitment=2):
    """ucb + trend_weight max(trend, 0).

    A path that improves is followed for `commitment` further nodes, or until a child is worse or
    fails.
    """
    promised = [node for node in t.nodes.values() if "commit" in node.decision]
    last = max(promised, key=lambda node: node.order, default=t.root)
    left = last.decision.get("commit", 0)
    if left and last.valid and last.kept:
        parent = t.nearest_kept(last.parent)
        if last.improvement >= parent.improvement:
            reason = f"committed to this path for {left} more"
            return Choice(last.id, "explore", reason, notes={"commit": left - 1})
    choice = explore_or_exploit(values_and_bonuses(t, drafts, c, trend_weight))
    still_running = left and not last.ended  # at most one commitment at a time
    if choice and not still_running and trends(t)[choice.parent] > 0:
        choice.notes = {"commit": commitment}
    return choice


def below(node: Node) -> list[Node]:
    """The node and all nodes below it."""
    nodes = [node]
    for node in nodes:
        nodes += node.children
    return nodes


def mcts(t, rng, c=0.25, branching=3):
    """From the root down by UCT to the first node with fewer than `branching` children.

    UCT: mean value + c sqrt(ln N_parent / N), N visits: the node and all nodes below it. Those that
    failed or still run count as visits with value 0.
    """
    q = quality(t)

    def uct(child, total):
        visits = below(child)
        value = sum(q(node) for node in visits if node.valid) / len(visits)
        return value + c * math.sqrt(math.log(total) / len(visits))

    node = t.root
    scores = {}
    while len(node.children) >= branching:
        total = len(below(node))
        open = [child for child in node.children if child.kept and not t.given_up(child)]
        level = {child.id: uct(child, total) for child in open}
        if not level and t.running:
            return None
        if not level:
            break  # all children are given up: this node gets another one
        scores |= level
        node = t.nodes[arg_max(level)]
    return Choice(node.id, scores=scores, reason=f"reached by UCT at depth {node.depth}")


def puct(t, rng, c=1.0, siblings=2):
    """The arg-max of Q + c P sqrt(1 + T) / (1 + n) (TTT-Discover, arXiv 2601.16175).

    Q: of the best child, the node's own until it has one. P: prior, linear in the rank of the own
    Q, sums to 1. n: expansions of the node and of all nodes below it; T: of the whole tree.

    The root is a candidate, and of every node the best `siblings` children. A candidate above,
    below or equal to the parent of a running node is passed over if another one is left.
    """
    options = [t.root]
    for node in t.nodes.values():
        children = [child for child in node.children if child.valid and child.kept]
        options += heapq.nlargest(siblings, children, key=lambda child: child.improvement)
    ranked = sorted(options, key=lambda node: -node.improvement)
    sum_of_ranks = len(ranked) * (len(ranked) + 1) / 2
    visits = expansions(t)
    total = math.sqrt(1 + visits["0"])
    q = quality(t)
    parts = {}
    for place, node in enumerate(ranked):
        prior = (len(ranked) - place) / sum_of_ranks
        bonus = c * prior * total / (1 + visits[node.id])
        parts[node.id] = q(best_child(node)), bonus
    parents = {node.parent for node in t.running}
    free = {}
    for id, part in parts.items():
        if not any(same_line(id, parent) for parent in parents):
            free[id] = part
    return explore_or_exploit(free or parts)


def expansions(t: Tree) -> Counter[str]:
    """id -> how often the node or one below it was expanded. The children of a group (see learn.py)
    are one expansion.
    """
    groups = {}
    for node in t.nodes.values():
        groups[node.id if node.group is None else node.group] = node.parent
    counts = Counter(groups.values())
    for node in reversed(t.nodes.values()):  # a node comes after the one above it
        counts[node.parent] += counts[node.id]
    return counts


def same_line(id: str, other: str) -> bool:
    """Returns whether one node is the other or its ancestor. The root matches only itself."""
    if "0" in (id, other):
        return id == other
    return f"{id}.".startswith(f"{other}.") or f"{other}.".startswith(f"{id}.")


def evolution(t, rng, drafts=5, crossover_prob=0.5, population=10):
    """Drafts, then a parent drawn with probability ~ exp(Q) from the best `population` nodes.

    With probability crossover_prob a second parent is drawn, and the child combines both.
    """
    options = candidates(t, drafts)
    if not options:
        return None
    pool = heapq.nlargest(population, options, key=lambda node: node.improvement)
    q = quality(t)
    fitness = {node.id: math.exp(q(node)) for node in pool}
    choice = Choice(draw_weighted(rng, fitness), scores=fitness, reason="drawn by exp(Q)")
    others = {id: weight for id, weight in fitness.items() if id != choice.parent}
    if others and rng.random() < crossover_prob:
        choice.second_parent = draw_weighted(rng, others)
        choice.reason = "crossover, both drawn by exp(Q)"
    return choice


def linear(t, rng):
    """No tree: each node continues where the one before it ended."""
    if t.running:
        return None
    parent = t.finished[-1].id if t.finished else "0"
    return Choice(parent, "exploit", "goes on")


RULES = {
    "random": Rule(uniform_choice),
    "open_ended": Rule(open_ended),
    "mcts": Rule(mcts, debugs=False),
    "evolution": Rule(evolution),
    "puct": Rule(puct, debugs=False),
    "linear": Rule(linear, debugs=False, uses_strategies=False),
}


# ------------------------------------------------------------------ at the end

FINALISTS = 10  # nodes that are scored on the selection part, at most


def finalists(t: Tree) -> list[Node]:
    """The nodes within one standard error of the best by validation whose files are kept.

    The best ones by validation first, and of equal ones those with fewer tokens, then the earlier.
    """
    best = t.best()
    error = best.stderr or 0.0
    near = [node for node in t.kept if abs(best.score - node.score) <= error]
    near.sort(key=lambda node: (-node.improvement, node.tokens, node.order))
    return near[:FINALISTS]
