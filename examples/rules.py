"""Two more selection rules for search.py. Both were no better than bfs in simulated worlds.

To use one, paste it into the marked block of a copy of search.py and add it to SELECT:

    "softmax": rules.Rule(softmax),
"""

import math

from flatlab.tree import rules
from flatlab.tree.nodes import Choice


def softmax(t, rng, drafts=3, c=1.41, trend_weight=0.5, visit_alpha=0.5, tau=0.5):
    """Draws a candidate with probability ~ exp(S / tau).

    S = Q + c sqrt(ln N / (n + 1)) + trend_weight max(trend, 0) - visit_alpha ln(n + 1)
    """
    scores = {}
    for id, parts in rules.values_and_bonuses(t, drafts, c, trend_weight).items():
        visits = len(t.nodes[id].children) + 1
        scores[id] = sum(parts) - visit_alpha * math.log(visits)
    if not scores:
        return None
    highest = max(scores.values())
    weights = {id: math.exp((score - highest) / tau) for id, score in scores.items()}
    return Choice(rules.draw(rng, weights), reason="drawn by exp(S / tau)", scores=scores)


def regret(q, node):
    """The best Q of the tree, which is 1, minus the best below the node."""
    return 1 - q(rules.best_child(node))


def shallowness(q, node):
    """1 / (depth (n + 1) + 1): large near the root, with few children."""
    return 1 / (node.depth * (len(node.children) + 1) + 1)


def signals(t, rng, drafts=3, regret_weight=1.0, depth_weight=1.0):
    """Takes the arg-max of a weighted sum of signals, each min-max normalised over the candidates.
    The larger a signal, the more the node deserves a child.
    """
    options = rules.candidates(t, drafts)
    if not options:
        return None
    q = rules.quality(t)
    scores = {node.id: 0.0 for node in options}
    for signal, weight in ((regret, regret_weight), (shallowness, depth_weight)):
        values = {node.id: signal(q, node) for node in options}
        low = min(values.values())
        width = max(values.values()) - low
        for id, value in values.items():
            scores[id] += weight * ((value - low) / width if width else 0.5)
    return Choice(rules.arg_max(scores), reason="largest sum of signals", scores=scores)
