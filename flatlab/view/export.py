"""Writes runs as a folder for the datasets library; TRL's trainers read its tables as they are.

    DIR/episodes.jsonl   a row per episode or node: the messages, which of them to imitate, reward
    DIR/sft.jsonl        a row per reply of an episode with a reward above 0: prompt, completion
    DIR/dpo.jsonl        a row per group with different rewards: prompt, chosen, rejected
    DIR/tokens.jsonl     searches only, a row per sequence: input_ids, assistant_masks, logprobs
    DIR/README.md        the names and types of the columns, for load_dataset(DIR, TABLE)

Faults are left out. A table without rows is not written. No tool is declared: agents act through
code blocks in their replies, so `tools` is the JSON text of an empty list.
"""

from __future__ import annotations

import copy  # YAML would write a shared object as a reference
import json
from itertools import chain
from pathlib import Path

import yaml

from flatlab.episode.episode import worth_imitating
from flatlab.errors import UserError
from flatlab.files import write_whole
from flatlab.runs.reader import RunData, segments_of, transcripts
from flatlab.runs.store import plain

MESSAGES = {"list": [{"name": "role", "dtype": "string"}, {"name": "content", "dtype": "string"}]}
SOURCE = {"run": "string", "id": "string", "task": "string", "reward": "float64"}
# Types of the columns. Without them, datasets would guess from the first 10 MB of a table.
TABLES = {
    "episodes": SOURCE
    | {"messages": MESSAGES, "mask": {"list": "int64"}, "tools": "string"}
    | {"outcome": "string", "score": "float64"},
    "sft": SOURCE | {"prompt": MESSAGES, "completion": MESSAGES, "tools": "string"},
    "dpo": {"run": "string", "task": "string", "chosen_id": "string", "rejected_id": "string"}
    | {"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES, "tools": "string"},
    "tokens": SOURCE
    | {"input_ids": {"list": "int64"}, "assistant_masks": {"list": "int64"}}
    | {"logprobs": {"list": "float64"}},
}


def export(runs: list[RunData], folder: Path) -> dict[str, int]:
    """Writes all tables of these runs to a new folder. Returns table -> number of rows.

    Raises UserError if the folder is not empty or if a run recorded no rewards.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name a new folder for --export.")
    rows = {table: [] for table in TABLES}
    for run in runs:
        items = graded(run)
        rows["episodes"] += map(episode_row, items)
        rows["sft"] += sft_rows(items)
        rows["dpo"] += dpo_rows(items)
        rows["tokens"] += token_rows(run, items)
    folder.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        if rows[table]:
            write_whole(folder / f"{table}.jsonl", b"".join(map(json_line, rows[table])))
    write_whole(folder / "README.md", card([table for table in TABLES if rows[table]]))
    return {table: len(rows[table]) for table in TABLES}


def json_line(row: dict) -> bytes:
    """A line of UTF-8. A lone surrogate, which no reader of datasets accepts, becomes '?'."""
    text = json.dumps(plain(row, finite=True), ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"


def card(tables: list[str]) -> str:
    """The README.md of a dataset: its head names tables and types."""
    configs, types = [], []
    for table in tables:
        features = []
        for column, kind in TABLES[table].items():
            kind = {"dtype": kind} if isinstance(kind, str) else copy.deepcopy(kind)
            features.append({"name": column, **kind})
        configs.append({"config_name": table, "data_files": f"{table}.jsonl"})
        types.append({"config_name": table, "features": features})
    head = yaml.safe_dump({"configs": configs, "dataset_info": types}, sort_keys=False)
    return f"---\n{head}---\n\nEpisodes of flatlab, written by `python viz.py --export`.\n"


# ------------------------------------------------------------------ rows


def graded(run: RunData) -> list[dict]:
    """The transcripts of a run without faults, with run, task, reward, messages and group.

    reward: of training, as recorded; of a node, its improvement clipped to [-1, 1], or -1 if it
    failed. group: equal for episodes that answered the same prompt and are compared.
    """
    items = []
    for item in transcripts(run):
        if item["outcome"] == "fault":
            continue
        item |= {"run": run.name, "messages": conversation(item)}
        if run.kind == "search":
            clipped = max(-1.0, min(1.0, item["improvement"] or 0.0))
            reward = clipped if item["outcome"] == "valid" else -1.0
            item |= {"task": run.tasks, "group": item["prompt"], "reward": reward}
        if item.get("reward") is None:
            raise UserError(
                f"{run.dir} recorded no rewards, because an older version made it: "
                "--export needs a run of this version."
            )
        item["reward"] = float(item["reward"])
        items.append(item)
    return items


def conversation(item: dict) -> list[dict]:
    """The messages from the prompt to the last reply. Observations are whole; the model may have
    seen less of them.
    """
    messages = [{"role": "user", "content": item["prompt"]}]
    for turn in item["turns"]:
        messages.append({"role": "assistant", "content": turn["reply"]})
        messages.append({"role": "user", "content": turn["observation"]})
    return messages[: max(1, 2 * len(item["turns"]))]


def source(item: dict) -> dict:
    return {column: item[column] for column in SOURCE}


def episode_row(item: dict) -> dict:
    """mask has a number per message: 1 for a reply that was complete and not rejected."""
    mask = [0] * len(item["messages"])
    for place, turn in enumerate(item["turns"]):
        mask[2 * place + 1] = int(worth_imitating(turn))
    row = source(item) | {"messages": item["messages"], "mask": mask, "tools": "[]"}
    return row | {"outcome": item["outcome"], "score": item["score"]}


def sft_rows(items: list[dict]):
    """The replies to imitate of the different episodes with a reward above 0."""
    seen = set()
    for item in items:
        replies = (item["prompt"], *(turn["reply"] for turn in item["turns"]))
        if item["reward"] <= 0 or replies in seen:
            continue
        seen.add(replies)
        for place, turn in enumerate(item["turns"]):
            if worth_imitating(turn):
                prompt = item["messages"][: 2 * place + 1]
                reply = item["messages"][2 * place + 1]
                yield source(item) | {"prompt": prompt, "completion": [reply], "tools": "[]"}


def dpo_rows(items: list[dict]):
    """The best against the worst episode of each group, at the first reply that differs.

    Only that reply is compared, since DPO's loss has no mask for the observations that follow. A
    group has no row if its rewards are equal or if the same replies led to other observations.
    """
    groups = {}
    for item in items:
        groups.setdefault(item["group"], []).append(item)
    for members in groups.values():
        best = max(members, key=lambda item: item["reward"])
        worst = min(members, key=lambda item: item["reward"])
        pairs = enumerate(zip(best["messages"], worst["messages"]))
        place = next((place for place, (a, b) in pairs if a != b), None)
        if best["reward"] == worst["reward"] or place is None or place % 2 == 0:
            continue
        yield {
            "run": best["run"],
            "task": best["task"],
            "chosen_id": best["id"],
            "rejected_id": worst["id"],
            "prompt": best["messages"][:place],
            "chosen": [best["messages"][place]],
            "rejected": [worst["messages"][place]],
            "tools": "[]",
        }


def token_rows(run: RunData, items: list[dict]):
    """The sequences of a search as they were sampled."""
    if run.kind != "search":
        return
    for item in items:
        for segment in chain(*segments_of(run.dir, f"{item['order']:06d}")):
            yield source(item) | {
                "input_ids": segment["tokens"],
                "assistant_masks": segment["mask"],
                "logprobs": segment["logprobs"],
            }
