"""Writes the replies of runs as JSON lines, for the datasets library and TRL's SFTTrainer.

    run, id, task   where the reply is from
    turn            its number in the episode, from 0
    group           the same for episodes that are compared: a group of training; of a search the
                    nodes with the same prompt
    reward          of the episode; of a node its improvement clipped to [-1, 1], or -1 if it failed
    imitate         whether the reply was complete, was not rejected, and its command did not time
                    out
    prompt          the messages before it. Observations are whole, the model may have seen less
    completion      the reply, as a list of one message

Faults are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import write_whole
from flatlab.runs.reader import RunData, observed, transcripts
from flatlab.task.definition import clipped_improvement
from flatlab.world.episode import worth_imitating


def export(runs: list[RunData], path: Path) -> int:
    """Writes a new file and returns the number of its lines. Raises UserError if it exists."""
    if path.exists():
        raise UserError(f"{path} exists already: name a new file for --export.")
    rows = [row for run in runs for item in transcripts(run) for row in reply_rows(run, item)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    # A lone surrogate, which no reader of datasets accepts, becomes "?".
    write_whole(path, "".join(lines).encode("utf-8", "replace"))
    return len(lines)


def reply_rows(run: RunData, item: dict):
    """The rows of a transcript."""
    if item["outcome"] == "fault":
        return
    reward = item.get("reward")
    if run.kind != "grpo":
        reward = clipped_improvement(item["improvement"])
    messages = [{"role": "user", "content": item["prompt"]}]
    if item.get("system"):
        messages.insert(0, {"role": "system", "content": item["system"]})
    for number, turn in enumerate(item["turns"]):
        reply = {"role": "assistant", "content": turn["reply"]}
        yield {
            "run": run.name,
            "id": item["id"],
            "task": item.get("task", run.tasks),
            "turn": number,
            "group": item.get("group", item["prompt"]),
            "reward": reward,
            "imitate": worth_imitating(turn),
            "prompt": list(messages),
            "completion": [reply],
        }
        messages += [reply, {"role": "user", "content": observed(turn)}]
