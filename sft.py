"""Imitation (supervised fine-tuning): train a model with LoRA on the best episodes of stored runs.

    python sft.py --runs logs/search-titanic-none-tiny-0 --task titanic
    python grpo.py --task titanic --model logs/sft-titanic-tiny-0/best         train from there

The same command again resumes a run. Of each task the best --share of the different episodes that
beat the baseline is imitated; evaluations of training runs are left out, because their seeds select
and compare adapters. Replies are tokenised once, here, from their text. The loss is on the tokens
that the model sampled, as in grpo.py, and only on replies that were complete, not rejected and not
stopped. This script evaluates nothing: evaluate.py does.
"""

import asyncio
import functools
import random
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated

from flatlab import options
from flatlab.errors import UserError
from flatlab.files import absent, content_key
from flatlab.model.chat import Sample
from flatlab.numbers import counted
from flatlab.options import Count, Le, Positive, Resumable, derived
from flatlab.runs import cli, start, store
from flatlab.runs.store import EPISODES
from flatlab.train import checkpoint, metrics
from flatlab.train.batch import TrainSequence, column, micro_batches, pairs_of, sequences_of
from flatlab.train.job import TrainingRun
from flatlab.view import console
from flatlab.world.episode import Episode, History
from policy import Policy, lora_settings, token_counter
from tasks import load_task

EPISODES_PER_UPDATE = 8
MOST_EPISODES = 1024  # of a task
MAX_GRAD_NORM = 1.0  # a larger gradient is scaled down to this norm


@dataclass(frozen=True)
class Config(options.RunOptions):
    """Options of a run. None: computed as written here, or as the comment says. 0 never means
    "default".
    """

    runs: tuple[str, ...] = ()  # run directories of grpo.py or search.py, logs/<run>, to imitate
    # fraction of the episodes above the baseline, best first
    share: Annotated[Positive, Le(1)] = 0.25
    updates: Resumable[Count] = 32  # optimizer steps, on up to 8 episodes each
    # learning rate of AdamW
    lr: Positive | None = derived(lambda cfg, model: 1e-3 if model.stand_in else 2e-4)
    # rank of the LoRA matrices, that of --model's adapter if there is one. Alpha is twice the rank
    lora_rank: Count | None = derived(lambda cfg, model: lora_settings(model)["r"])
    # tokens per training pass; default: what fits, at most 8192 (CPU) or 32768
    micro_tokens: Resumable[Count | None] = None

    tasks: options.TaskOptions = options.TaskOptions()
    model: options.ModelOptions = options.ModelOptions()
    episode: options.HistoryOptions = options.HistoryOptions()


# ------------------------------------------------------------------------------ episodes


def best_episodes(cfg: Config, tasks: list) -> list[dict]:
    """The best cfg.share of the different episodes of each task that beat the baseline.

    Raises UserError if there is none, or if a run does not exist.
    """
    by_task = {task.name: {} for task in tasks}  # task -> replies -> (improvement, transcript)
    for run in cfg.runs:
        if not Path(run).is_dir():
            raise absent(run)
        for file in sorted(Path(run).rglob(EPISODES)):
            # the names of evaluations begin with a letter
            rows = [row for row in store.read_episodes(file.parent) if row["when"].isdigit()]
            rows = [row for row in rows if (row["improvement"] or 0) > 0]
            transcript_of = store.transcript_reader(file.parent)
            for row in sorted(rows, key=lambda row: int(row["when"])):
                if row["task"] in by_task:
                    transcript = transcript_of(row)
                    replies = replies_of(transcript)
                    new = row["improvement"], transcript
                    old = by_task[row["task"]].get(replies, new)
                    by_task[row["task"]][replies] = max(new, old, key=itemgetter(0))
    chosen = []
    for episodes in by_task.values():
        ranked = sorted(episodes.values(), key=lambda pair: -pair[0])
        kept = min(MOST_EPISODES, max(1, round(cfg.share * len(ranked))))
        chosen += [transcript for _, transcript in ranked[:kept]]
    if not chosen:
        names, runs = " ".join(by_task), " ".join(cfg.runs)
        raise UserError(f"--runs: no episode of {names} in {runs or 'no run'} beats the baseline.")
    return chosen


def replies_of(transcript: dict) -> str:
    return "\n".join(turn["reply"] for turn in transcript["turns"])


def sequences_from(transcript: dict, policy, cfg: Config) -> list[TrainSequence]:
    """The transcript as it would have been sampled, cut where the context ends. Advantage 1:
    imitated.
    """
    history = History(policy, cfg.episode, transcript["prompt"], transcript.get("system", ""))
    episode = Episode("", 0)
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
        history.add(sample, turn["observation"], turn.get("note", ""), turn.get("restarts", False))
        episode.add(before, sample, turn)
        wanted.append(float(has_ended and turn["status"] not in ("rejected", "timeout")))
    return sequences_of(episode, wanted)


def batches(episodes: list, cfg: Config):
    """Yields the sequences of each update: the next episodes, in a new order after every pass."""
    rng = random.Random(cfg.seed)
    waiting = []
    for _ in range(cfg.updates):
        waiting = waiting or rng.sample(episodes, len(episodes))
        yield sum(waiting[:EPISODES_PER_UPDATE], [])
        waiting = waiting[EPISODES_PER_UPDATE:]


# ------------------------------------------------------------------------------ train


def update(policy, optimizer, sequences: list[TrainSequence]) -> float:
    """One optimizer step on the mean of -log p over the tokens of the replies. Returns this mean,
    in nats.
    """
    import torch

    mean = policy.within_memory(add_gradients, sequences)
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return mean


def add_gradients(policy, sequences: list[TrainSequence]) -> float:
    """The gradients of the mean, which is returned."""
    total = sum(a for s in sequences for a in s.advantage) or 1.0
    mean = 0.0
    for micro_batch in micro_batches(sequences, policy):
        logp, _ = policy.logprobs(pairs_of(micro_batch))
        loss = -(logp * column(micro_batch, "advantage", policy.device)).sum() / total
        loss.backward()
        mean += loss.item()
    return mean


def episodes_from(transcripts: list[dict], counter, cfg: Config) -> list[list[TrainSequence]]:
    """The sequences of each episode of which something fits into the context. Raises UserError
    without any. counter: as of token_counter.
    """
    made_of = (sequences_from(transcript, counter, cfg) for transcript in transcripts)
    episodes = list(filter(None, made_of))
    if not episodes:
        raise UserError(f"--runs: no episode fits into --context {counter.context}.")
    return episodes


def imitate(policy, episodes: list[list[TrainSequence]], cfg: Config, run) -> None:
    """All updates, with a row and a checkpoint after each; the last adapter is best/."""
    print(f"imitate  {counted(len(episodes), 'episode')}, {counted(cfg.updates, 'update')}")
    run.update_result(episodes=len(episodes))
    job = TrainingRun(run=run)
    optimizer = policy.make_optimizer(cfg.lr)
    rows = checkpoint.resume(policy, optimizer, job)
    for step, sequences in enumerate(batches(episodes, cfg)):
        if step < job.step:
            continue
        began, micro_tokens = time.perf_counter(), policy.micro_tokens
        loss = update(policy, optimizer, sequences)
        row = {"step": step, "loss": loss, "seconds": time.perf_counter() - began}
        if policy.micro_tokens < micro_tokens:
            row["micro_tokens"] = policy.micro_tokens
        checkpoint.write_step(policy, optimizer, job, row)
        rows.append(row)
        console.update_made(rows, cfg.updates)
    checkpoint.save_adapter(policy, job, "best")
    run.update_result(status="finished")


# ------------------------------------------------------------------------------ start

SCRIPT = Path(__file__).stem  # a copy of this file makes runs of its own


def main() -> None:
    cfgs, model = start.configs(Config, SCRIPT)
    lora_settings(model, cfgs[0].lora_rank)  # checks the rank
    console.model_line(cfgs[0], model)
    tasks = [load_task(name) for name in cfgs[0].tasks.task]
    opened = [(cfg, *prepare(cfg, model, tasks)) for cfg in cfgs]
    policy = None  # one engine for all of them
    for cfg, run, transcripts in opened:
        if not run.finished:
            with start.recorded([run], metrics.first_results(tasks, "imitation")):
                episodes = episodes_from(transcripts, policy or token_counter(cfg, model), cfg)
                policy = policy or Policy(model, cfg.model, 0, 8, cfg.lora_rank)
                policy.reset(cfg.seed)
                policy.fit_micro_tokens(cfg.micro_tokens)
                agreement = asyncio.run(policy.verify())["trained adapter"]
                print(f"engine   agrees with the trainer: {agreement}")
                imitate(policy, episodes, cfg, run)
        print(f"{run.dir}/best is the adapter: python grpo.py --model {run.dir}/best")


def prepare(cfg: Config, model, tasks: list):
    """Opens the run of a seed. Returns it and the episodes to imitate: none if it is finished."""
    is_finished = functools.partial(checkpoint.is_finished, steps=cfg.updates)
    run = start.begin_run(cfg, tasks, model, is_finished)
    if run.finished:
        return run, []
    transcripts = best_episodes(cfg, tasks)
    imitated = content_key(*map(replies_of, transcripts))
    if run.rows() and run.result.get("imitated") != imitated:
        raise UserError(
            f"{run.dir}/result.json names other episodes than the best of --runs, or none: give "
            f"the same --runs. {store.WAY_OUT}"
        )
    run.update_result(imitated=imitated)
    return run, transcripts


if __name__ == "__main__":
    cli.run(main)
