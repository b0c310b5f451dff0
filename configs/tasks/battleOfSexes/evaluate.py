"""Grades strategy.py: its expected points against the partner, as one JSON line.

The strategy comes from the agent and is not trusted. `strategy` is proxy.py here, which runs the
agent's file in a child process; the partner and the score stay on this side. There are no random
numbers to guess: every answer that the partner may give is followed, with its probability, so the
score is an exact expectation, and no choice of moves is worth more than the optimum.
"""

import json
import math
import statistics
import sys

sys.path.insert(0, ".")
import strategy  # noqa: E402

# Times that all games are played. The plays of a strategy without chance are the same; of another
# one each is a sample.
PLAYS = 32
ROUNDS = 10
LOYALTY = 0.8  # probability that the partner copies the row player's first move
PAYOFF = {(0, 0): 2, (1, 1): 1}  # (own move, partner's move) -> points of the row player, else 0


def answers(history):
    """The partner's moves with their probabilities: 1 in the first round; later the row player's
    first move with probability LOYALTY.
    """
    if not history:
        return {1: 1.0}
    first = history[0][0]
    return {first: LOYALTY, 1 - first: 1 - LOYALTY}


def expected_points():
    """Expected points per round in each play."""
    points = [0.0] * PLAYS
    games = [(play, 1.0, []) for play in range(PLAYS)]  # (play, probability, history)
    for _ in range(ROUNDS):
        moves = strategy.call_many("row_strategy", [(history,) for _, _, history in games])
        longer = []
        for (play, probability, history), move in zip(games, moves):
            if move not in (0, 1):
                strategy.fail(f"row_strategy returned {str(move)[:40]!r}, not 0 or 1")
            for answer, chance in answers(history).items():
                pair = (int(move), answer)
                points[play] += probability * chance * PAYOFF.get(pair, 0) / ROUNDS
                longer.append((play, probability * chance, [*history, pair]))
        games = longer
    return points


def main():
    points = expected_points()
    error = statistics.stdev(points) / math.sqrt(PLAYS)
    print(json.dumps({"Score": round(statistics.fmean(points), 6), "stderr": round(error, 6)}))


if __name__ == "__main__":
    main()
