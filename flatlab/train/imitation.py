"""Warm start: before the first RL step, imitate the best episodes of earlier runs of grpo.py or
search.py.

    python grpo.py --task titanic --sft logs/search-titanic-tail-tiny-0
    python search.py --task titanic --model logs/grpo-titanic-tiny-0/best       search with it

Replies are tokenised once, here, from their text. The masks are those of RL: only replies of the
model are learned, and of these only the ones that were complete, not rejected and not timed out. In
the steps that follow, the KL term and the guard compare the policy with the imitated one, see
Policy.set_reference.
"""

import random
import time
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_rows
from flatlab.model.chat import Sample
from flatlab.numbers import duration
from flatlab.options import EpisodeOptions
from flatlab.task.definition import Task
from flatlab.task.value import improvement
from flatlab.train.batch import TrainSequence, column, micro_batches, sequences_of
from flatlab.train.job import stop_if_interrupted
from flatlab.world.episode import Episode, History

EPISODES_PER_UPDATE = 8
MOST_EPISODES = 1024  # of a task
MAX_GRAD_NORM = 1.0  # a larger gradient is scaled down to this norm


def best_episodes(runs: list[str], tasks: list[Task], share: float) -> list[dict]:
    """For each task the best `share` of the different episodes that beat the baseline.

    Raises UserError if there is none, or if a run does not exist.
    """
    by_name = {task.name: task for task in tasks}
    found = {name: {} for name in by_name}  # task -> replies -> (improvement, episode)
    for run in runs:
        if not Path(run).is_dir():
            raise UserError(f"--sft: there is no run directory {run}.")
        # the names of evaluations begin with a letter: their seeds select and compare adapters
        for file in sorted(Path(run).rglob("episodes/[0-9]*.jsonl")):
            for episode in read_rows(file):
                score, task = episode.get("score"), by_name.get(episode.get("task"))
                if not task or not score or not score["valid"]:
                    continue
                value = improvement(score["value"], task)
                if value > 0:
                    replies = "\n".join(turn["reply"] for turn in episode["turns"])
                    found[task.name][replies] = (value, episode)
    chosen = []
    for episodes in found.values():
        ranked = sorted(episodes.values(), key=lambda pair: -pair[0])
        count = min(MOST_EPISODES, max(1, round(share * len(ranked))))
        chosen += [episode for _, episode in ranked[:count]]
    if not chosen:
        names = " ".join(by_name)
        raise UserError(f"--sft: no episode of {names} in {' '.join(runs)} beats the baseline.")
    return chosen


def sequences_from(transcript: dict, policy, options: EpisodeOptions) -> list[TrainSequence]:
    """The transcript as it would have been sampled, cut where the context ends. Advantage 1:
    imitated.
    """
    history = History(policy, options, transcript["prompt"], transcript.get("system", ""))
    episode = Episode(transcript["task"], 0)
    wanted = []
    for turn in transcript["turns"]:
        has_ended = turn["stop_reason"] == "stop"
        tokens = policy.encode(turn["reply"])
        if has_ended:
            tokens.append(policy.end_of_turn)
        try:
            before = history.fit(policy.context - len(tokens))
        except OverflowError:
            break
        sample = Sample(tokens, [0.0] * len(tokens), turn["reply"], turn["stop_reason"], 0)
        history.add(sample, turn["observation"], turn.get("note", ""))
        episode.add(before, sample, turn)
        wanted.append(float(has_ended and turn["status"] not in ("rejected", "timeout")))
    return sequences_of(episode, wanted)


def warm_start(policy, tasks: list[Task], cfg, job) -> None:
    """Minimises the mean of -log p over the tokens of the replies with cfg.sft_updates steps of
    AdamW at cfg.sft_lr; prints a line per step.

    Each step takes the next EPISODES_PER_UPDATE episodes, in a new order after every pass. Every
    rank does the same.
    """
    import torch

    chosen = best_episodes(cfg.sft, tasks, cfg.sft_share)
    episodes = [sequences_from(transcript, policy, cfg.episode) for transcript in chosen]
    episodes = [sequences for sequences in episodes if sequences]
    if not episodes:
        raise UserError(f"--sft: no episode fits into --context {policy.context}.")
    job.say(f"imitate  {len(episodes)} episodes, {cfg.sft_updates} updates")
    optimizer = policy.make_optimizer(cfg.sft_lr)
    rng = random.Random(cfg.seed)
    waiting = []
    start = time.perf_counter()
    for number in range(1, cfg.sft_updates + 1):
        waiting = waiting or rng.sample(episodes, len(episodes))
        sequences = sum(waiting[:EPISODES_PER_UPDATE], [])
        waiting = waiting[EPISODES_PER_UPDATE:]
        total = sum(a for s in sequences for a in s.advantage) or 1.0
        mean = 0.0
        for part in micro_batches(sequences, cfg.micro_tokens, policy.packs):
            logp, _ = policy.logprobs([(s.tokens, s.mask) for s in part])
            loss = -(logp * column(part, "advantage", policy.device)).sum() / total
            loss.backward()
            mean += loss.item()
            stop_if_interrupted()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        eta = (time.perf_counter() - start) / number * (cfg.sft_updates - number)
        count = f"imitate  {number} of {cfg.sft_updates}"
        job.say(f"{count}: {mean:.3f} nats per token, ETA {duration(eta)}")
