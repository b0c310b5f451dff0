"""Warm start: before the first RL step, imitate the best episodes of earlier runs of grpo.py or search.py.

    python grpo.py --task titanic --sft logs/search-titanic-tail-tiny-0
    python search.py --task titanic --model logs/grpo-titanic-tiny-0/best        and back: search with what was learned

Replies are tokenised once, here, from their text; the masks are those of RL: only what the model said is learned, and
of that only replies that could be run. The KL of the steps to come stays that to the base model: it pulls back what was
imitated, and --kl 0 leaves it out.
"""

import random
from pathlib import Path

from flatlab.episode.episode import Episode, History, Sample, trimmed
from flatlab.episode.task import Task
from flatlab.errors import UserError
from flatlab.runs.store import read_rows
from flatlab.train.batch import Piece, columns, flat, micro_batches, pieces_of
from flatlab.train.metrics import gain

EPISODES = 32  # per update, or all when there are fewer


def best_episodes(runs: list[str], tasks: list[Task], share: float, most: int = 1024) -> list[dict]:
    """For each task the best `share` of the different episodes that beat the baseline. Raises UserError for none."""
    found = {task.name: {} for task in tasks}
    by_name = {task.name: task for task in tasks}
    for run in runs:
        if not Path(run).is_dir():
            raise UserError(f"--sft: there is no run directory {run}.")
        for file in sorted(Path(run).rglob("episodes/*.jsonl")):
            for episode in read_rows(file):
                score, task = episode.get("score"), by_name.get(episode.get("task"))
                if (
                    task
                    and score
                    and score["valid"]
                    and (value := gain(type("Score", (), score), task)) > 0
                ):
                    found[task.name]["\n".join(turn["reply"] for turn in episode["turns"])] = (
                        value,
                        episode,
                    )
    chosen = []
    for episodes in found.values():
        ranked = sorted(episodes.values(), key=lambda pair: -pair[0])
        chosen += [
            episode for _, episode in ranked[: min(most, max(1, round(share * len(ranked))))]
        ]
    if not chosen:
        raise UserError(
            f"--sft: no episode of {' '.join(by_name)} in {' '.join(runs)} beats the baseline."
        )
    return chosen


def pieces_from(record: dict, policy, cfg) -> list[Piece]:
    """The transcript as it would have been sampled, cut where the context ends; advantage 1: imitated."""
    history, segments, kept = History(policy, record["prompt"], cfg.max_observation_tokens), [], []
    for turn in record["turns"]:
        tokens = policy.encode(turn["reply"])
        if turn["stop_reason"] == "stop":
            tokens.append(policy.tokenizer.eos_token_id)
        try:
            if ended := history.fit(policy.context - len(tokens)):
                segments.append(ended)
        except OverflowError:
            break
        history.add(
            Sample(tokens, [0.0] * len(tokens), turn["reply"], turn["stop_reason"], 0),
            turn["observation"],
        )
        kept.append(turn)
    segments = [trimmed(s) for s in [*segments, history.segment] if any(s.mask)]
    wanted = [
        float(turn["status"] not in ("rejected", "timeout") and turn["stop_reason"] == "stop")
        for turn in kept
    ]
    return pieces_of(Episode(record["task"], 0, segments=segments, turns=kept), wanted)


def warm_start(policy, tasks: list[Task], cfg) -> str:
    """Minimises -log p of the replies with cfg.sft_updates steps of AdamW at cfg.lr, each on the next EPISODES of them, in
    a new order after every pass. Returns one line about it."""
    import torch

    episodes = [
        pieces_from(record, policy, cfg) for record in best_episodes(cfg.sft, tasks, cfg.sft_share)
    ]
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=cfg.lr, betas=(0.9, 0.99), weight_decay=0.0
    )
    chance, waiting, losses = random.Random(cfg.seed), [], []
    while len(losses) < cfg.sft_updates:
        if not waiting:
            waiting = chance.sample(episodes, len(episodes))
        pieces, waiting, loss = flat(waiting[:EPISODES]), waiting[EPISODES:], 0.0
        total = sum(a for p in pieces for a in p.advantage) or 1.0
        for part in micro_batches(pieces, cfg.micro_tokens, cfg.packing):
            c = columns(part, policy.device)
            part_loss = -(policy.logprobs(c.pairs)[0] * c.advantage).sum() / total
            part_loss.backward()
            loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return (
        f"imitated {len(episodes)} episodes in {len(losses)} updates: {losses[0]:.3f} nats per token before, "
        f"{losses[-1]:.3f} in the last update"
    )
