"""Two more selection rules for search.py. Both were no better than bfs in simulated worlds.

To use one, paste it into the marked block of a copy of search.py and add it to SELECT:

    "softmax": rules.Rule(softmax),
"""

import math
from statistics import stdev

from flatlab.tree import rules
from flatlab.tree.nodes import Choice


def softmax(t, rng, drafts=3, c=1.41, trend_weight=0.5, visit_alpha=0.5, tau=0.5):
    """Draws a candidate with probability ~ exp(S / tau).

    S = Q + c sqrt(ln N / (n + 1)) + trend_weight max(trend, 0) - visit_alpha ln(n + 1)
    """
    parts = rules.values_and_bonuses(t, drafts, c, trend_weight)
    for id, (value, bonus) in parts.items():
        visits = len(t.nodes[id].children) + 1
        parts[id] = value, bonus - visit_alpha * math.log(visits)

    def pick(scores):
        highest = max(scores.values())
        weights = {id: math.exp((score - highest) / tau) for id, score in scores.items()}
        return rules.draw(rng, weights)

    return rules.explore_or_exploit(parts, pick)


def spread_of_children(q, node):
    """Standard deviation of Q over the children; 1 with fewer than two scored ones."""
    values = [q(child) for child in node.children if child.valid]
    return stdev(values) if len(values) > 1 else 1.0


def regret(q, node):
    """The best Q of the tree, which is 1, minus the best below the node."""
    return 1 - q(rules.best_child(node))


def shallowness(q, node):
    """1 / (depth (n + 1) + 1): large near the root, with few children."""
    return 1 / (node.depth * (len(node.children) + 1) + 1)


def signals(t, rng, drafts=3, spread_weight=0.0, regret_weight=1.0, depth_weight=1.0):
    """Takes the arg-max of a weighted sum of signals, each min-max normalised over the candidates.
    The larger a signal, the more the node deserves a child.
    """
    options = rules.candidates(t, drafts)
    if not options:
        return None
    q = rules.quality(t)
    scores = {node.id: 0.0 for node in options}
    weights = {spread_of_children: spread_weight, regret: regret_weight, shallowness: depth_weight}
    for signal, weight in weights.items():
        values = {node.id: signal(q, node) for node in options}
        low = min(values.values())
        width = max(values.values()) - low
        for id, value in values.items():
            scores[id] += weight * ((value - low) / width if width else 0.5)
    return Choice(rules.arg_max(scores), reason="largest sum of signals", scores=scores)
