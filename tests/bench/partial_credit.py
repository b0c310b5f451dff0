"""grpo.py with a reward for failures, too: for what the sandbox saw. See bench/learning.py.

A valid submission has its improvement from -1 to 1, and every failure is below: -2, and SIGN more
for each of SIGNS that the sandbox showed. No word of the agent counts. For tasks with data.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpo  # noqa: E402
from flatlab.errors import ArtefactError  # noqa: E402
from flatlab.runs.cli import one_sentence  # noqa: E402
from flatlab.world.episode import in_thread, play  # noqa: E402

SIGN = 0.15
RAN = {"ok", "error", "timeout"}  # statuses of replies whose commands were run


def signs(env, turns):
    """Names of what the sandbox shows at the end of an episode."""
    statuses = {turn["status"] for turn in turns}
    listed = [path for path, _ in env.sandbox.call("listing", most=1000)[0]["files"]]
    made = [path for path in listed if path not in env.task.public]
    [artefact] = env.task.artefacts
    found = {
        "a command ran": statuses & RAN,
        "one ended with 0": "ok" in statuses,
        "data was read": any(was_read(env, path) for path in env.task.public),
        "a file was written": made,
        "the artefact is there": artefact in listed,
        "it has the right rows": artefact in listed and has_rows(env, artefact),
    }
    return [name for name, seen in found.items() if seen]


def was_read(env, path):
    """Returns whether a file was read after it was written, by its times."""
    made = env.sandbox.run(["stat", "-c", "%.9X %.9Y", path], 10, 10)
    times = made.output.split()
    return len(times) == 2 and times[0] > times[1]


def has_rows(env, artefact):
    """Returns whether the artefact has a line for each line of data/test.csv."""
    try:
        lines = env.sandbox.get(artefact, 1 << 20).count(b"\n")
    except ArtefactError:  # it is too large
        return False
    return lines == env.task.public["data/test.csv"].read_bytes().count(b"\n")


async def play_and_look(env, policy, episode, options, history):
    # The first message has read the files, so their times are set again.
    await in_thread(env.sandbox.run, ["touch", *env.task.public], 10, 10)
    status = await play(env, policy, episode, options, history)
    if episode.turns:
        episode.turns[-1]["signs"] = await in_thread(signs, env, episode.turns)
    return status


def reward_of(episode, cfg):
    """The reward of an episode that is not a fault."""
    if episode.valid:
        return grpo.continuous(episode)
    seen = episode.turns[-1]["signs"] if episode.turns else ()
    return -2 + SIGN * len(seen)


def is_stuck(rows):
    """A run without valid submissions goes on: that is where it begins."""
    return ""


if __name__ == "__main__":
    grpo.reward_of = reward_of
    grpo.metrics.is_stuck = is_stuck
    one_sentence(lambda: grpo.main(train=partial(grpo.train, play=play_and_look)))
