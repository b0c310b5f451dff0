"""Grades strategy.py: plays many games against the partner and prints one JSON line.

The strategy comes from the agent and is not trusted. It runs in a child process, which gets its
text and the partner's moves through a pipe and answers with moves. The partner, the random numbers
and the score stay on this side. Run this in a copy of the task's files: it deletes its own source
before any foreign code starts.
"""

import argparse
import json
import os
import random
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from proxy import Invalid, hide_process, read_source, start_child, stop  # noqa: E402

GAMES = 8000  # standard error of the score of always-0: 0.24 / sqrt(8000) = 0.003
ROUNDS = 10
LOYALTY = 0.8  # probability that the partner copies the row player's first move
# (own move, partner's move) -> points of the row player
PAYOFF = {
    (0, 0): 2,
    (1, 1): 1,
    (0, 1): 0,
    (1, 0): 0,
}
TIME_LIMIT = 10  # seconds for the strategy in all games together
MAX_BYTES = 100_000  # of strategy.py
ERROR_CHARS = 300

# Runs in the child. The channel is moved away from fds 0 and 1, so that print() and input() cannot
# disturb it. A request is the partner's last move in every game (nothing in the first round), a
# reply is the own moves: "0110...".
CHILD = r"""
import json, os, sys, traceback, types
requests, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)

def one_move(strategy, history):
    move = strategy(history)
    if move not in (0, 1):
        raise ValueError(f"row_strategy returned {str(move)[:40]!r}, not 0 or 1")
    return str(int(move))

def play(setup):
    module = sys.modules["strategy"] = types.ModuleType("strategy")
    exec(compile(setup["strategy"], "strategy.py", "exec"), module.__dict__)
    histories, own = [[] for _ in range(setup["games"])], ""
    for line in requests:
        for history, move, partner in zip(histories, own, json.loads(line)):
            history.append((int(move), int(partner)))
        own = "".join([one_move(module.row_strategy, list(history)) for history in histories])
        print(json.dumps({"moves": own}), file=replies, flush=True)

def describe(error):
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "strategy.py"]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    text = traceback.format_exception_only(error)[-1].strip()
    return f"strategy.py line {lines[-1]}: {text}" if lines else f"strategy.py: {text}"

try:
    play(json.loads(requests.readline()))
except BaseException as error:      # SystemExit, too: its author reads whatever it raises
    print(json.dumps({"error": describe(error)}), file=replies, flush=True)
"""


def ask(child, message):
    """Sends one message and returns the reply as a dict. Raises Invalid."""
    try:
        child.stdin.write(json.dumps(message).encode() + b"\n")
        child.stdin.flush()
        reply = json.loads(child.stdout.readline(GAMES + 10_000))
    except (BrokenPipeError, ValueError) as error:
        raise Invalid("strategy.py ended the process that plays it") from error
    if not isinstance(reply, dict):
        raise Invalid("strategy.py disturbed the process that plays it")
    if "error" in reply:
        raise Invalid(str(reply["error"])[:ERROR_CHARS])
    return reply


def partner_moves(first_moves, rng):
    """The partner's moves in a later round: with probability LOYALTY the row player's first."""
    return [first if rng.random() < LOYALTY else 1 - first for first in first_moves]


def play(next_moves, rng):
    """Mean points per round of the row player.

    next_moves(partner's last moves) returns the own moves of all games.
    """
    points, first, partner = 0, None, []
    for _ in range(ROUNDS):
        own = next_moves(partner)
        first = first or own
        partner = partner_moves(first, rng) if partner else [1] * GAMES
        points += sum(PAYOFF[pair] for pair in zip(own, partner))
    return points / (GAMES * ROUNDS)


def grade(text, child):
    """Mean points per round of the strategy with this text. Raises Invalid."""

    def next_moves(partner):
        moves = ask(child, "".join(map(str, partner))).get("moves")
        if not isinstance(moves, str) or len(moves) != GAMES or set(moves) - {"0", "1"}:
            raise Invalid("strategy.py disturbed the process that plays it")
        return [int(move) for move in moves]

    def out_of_time(*_):
        raise Invalid(f"strategy.py took longer than {TIME_LIMIT} seconds for {GAMES} games")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(TIME_LIMIT)
    child.stdin.write(json.dumps({"strategy": text, "games": GAMES}).encode() + b"\n")
    score = play(next_moves, random.Random(os.urandom(32)))
    signal.alarm(0)
    return score


def main():
    parser = argparse.ArgumentParser()
    # Both parts are new random games.
    parser.add_argument("--split", required=True, choices=["validation", "test"])
    parser.parse_args()
    child = None
    try:
        text = read_source("strategy.py", "strategy.py", MAX_BYTES)
        child = start_child(CHILD)
        hide_process()
        os.unlink(__file__)  # before the strategy starts: nothing is left to read or change
        os.unlink("proxy.py")
        print(json.dumps({"Score": round(grade(text, child), 6)}))
    except Invalid as error:
        print(json.dumps({"error": str(error)}))
    finally:
        stop(child)


if __name__ == "__main__":
    main()
