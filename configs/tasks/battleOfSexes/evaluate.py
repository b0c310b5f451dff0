"""Grades strategy.py: plays many games against the partner and prints one JSON line.

The strategy comes from the agent and is not trusted. `strategy` is proxy.py here, which runs the
agent's file in a child process; the partner, the random numbers and the score stay on this side.
The random numbers of a round follow from the part and from the moves of all games so far: equal
moves have equal scores, and what was seen of them is worth nothing for other moves. Argument:
--split PART.
"""

import json
import math
import random
import statistics
import sys

sys.path.insert(0, ".")
import strategy  # noqa: E402

GAMES = 8000  # standard error of the score of always-0: 0.24 / sqrt(8000) = 0.003
ROUNDS = 10
LOYALTY = 0.8  # probability that the partner copies the row player's first move
PAYOFF = {(0, 0): 2, (1, 1): 1}  # (own move, partner's move) -> points of the row player, else 0


def partner_move(history, rng):
    """1 in the first round; later the row player's first move with probability LOYALTY."""
    if not history:
        return 1
    first = history[0][0]
    return first if rng.random() < LOYALTY else 1 - first


def play(part):
    """Points per round of the row player in each game."""
    points = [0] * GAMES
    histories = [[] for _ in range(GAMES)]
    for _ in range(ROUNDS):
        moves = strategy.call_many("row_strategy", [(history,) for history in histories])
        rng = random.Random(f"{part} {histories} {moves}")
        for game, (move, history) in enumerate(zip(moves, histories)):
            if move not in (0, 1):
                strategy.fail(f"row_strategy returned {str(move)[:40]!r}, not 0 or 1")
            pair = (int(move), partner_move(history, rng))
            points[game] += PAYOFF.get(pair, 0) / ROUNDS
            history.append(pair)
    return points


def main():
    points = play(sys.argv[2])
    error = statistics.stdev(points) / math.sqrt(GAMES)
    print(json.dumps({"Score": round(statistics.fmean(points), 6), "stderr": error}))


if __name__ == "__main__":
    main()
