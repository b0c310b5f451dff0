"""What outlives a step of training: the row, the transcripts, checkpoints and adapters; and how a
run resumes from them.

Every rank calls these functions with its job, see ranks.py, but timing, write_step and
final_adapters are for rank 0: only that has a run to write. state: the State of grpo.py.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flatlab.errors import UserError
from flatlab.files import save_tensors
from flatlab.task.definition import improvement
from flatlab.train import guard
from flatlab.train.batch import Group

EVALUATION = "evaluation.json"  # beside the adapter in best/


def resume(policy, optimizer, job, new_state: Callable) -> tuple[Any, list[dict]]:
    """Loads the newest checkpoint and removes what was written after it. Returns the state and the
    rows up to it.

    new_state: State of grpo.py. Raises UserError for a checkpoint with other fields.
    """
    import torch

    run = job.run
    newest = run.checkpoints()[-1:] if run else []
    step, folder = job.ranks.first(newest[0] if newest else (-1, None))
    saved = None
    if folder is not None:
        saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        if set(saved.get("state", {})) != {f.name for f in fields(new_state)}:
            raise UserError(
                f"The checkpoint {folder} was written by another version of grpo.py: "
                "choose another --name, or continue it with that version."
            )
    if run:
        run.truncate_after(step)
    rows = job.ranks.first(run.rows() if run else None)
    if saved is None:
        return new_state(), rows
    policy.load_adapter(folder)
    optimizer.load_state_dict(saved["optimizer"])
    job.say(f"resumed after step {step} from {folder}")
    state = new_state(**saved["state"])
    # A run that was killed before its checkpoint may have saved a better adapter already.
    evaluation = folder.parents[1] / "best" / EVALUATION
    if run and evaluation.exists():
        state.best = json.loads(evaluation.read_text())
    state.best = job.ranks.first(state.best)
    return state, rows


def write_step(policy, optimizer, job, state, groups: list[Group], row: dict) -> None:
    """Writes transcripts, row and checkpoint, in this order: a step counts once its checkpoint is
    there.
    """
    save_groups(job, row["step"], groups)
    run = job.run
    run.log(row)
    with run.checkpoint(row["step"]) as folder:
        policy.save(folder)
        tensors = {"optimizer": optimizer.state_dict(), "state": asdict(state)}
        save_tensors(tensors, folder / "trainer.pt")


def save_groups(job, name: int | str, groups: list[Group]) -> None:
    """Writes the episodes of these groups and their tokens, see Run.save_episodes."""
    if job.run:
        lines = [line for group in groups for line in transcripts(group)]
        job.run.save_episodes(name, lines, b"".join(group.tokens for group in groups))


def transcripts(group: Group) -> list[dict]:
    """The episodes of a group with its number and what is made of their scores: reward (None for a
    fault), baseline, and improvement (None unless valid).
    """
    rewards = iter(group.rewards)
    lines = []
    for episode in group.episodes:
        line = episode.to_dict() | {"group": group.number, "baseline": group.task.baseline}
        line["reward"] = None if episode.status == "fault" else next(rewards)
        is_valid = episode.score and episode.score.valid
        line["improvement"] = improvement(episode.score.value, group.task) if is_valid else None
        lines.append(line)
    return lines


def timing(policy, seconds: dict, groups: list[Group]) -> dict:
    """The row's numbers about time and memory. seconds: of each phase; of "sample" those in which
    the trainer waited for episodes.
    """
    reply_tokens = sum(e.reply_tokens for g in groups for e in g.played)
    whole = seconds["sample"] + seconds["train"] + seconds["sync"]
    return {
        "seconds": whole,
        **{f"seconds_{phase}": value for phase, value in seconds.items()},
        "tokens_per_second": reply_tokens / whole,
        "engine_idle_share": policy.idle_share(),
        "memory_gb": policy.peak_memory(),
        "time": time.time(),
    }


# ------------------------------------------------------------------------------ adapters


def save_adapter(policy, job, name: str, evaluation: dict | None = None) -> None:
    """Saves the adapter as <run>/<name>; afterwards every rank finds it there."""
    if job.run:
        with job.run.whole_directory(name) as folder:
            policy.save(folder)
            if evaluation:
                (folder / EVALUATION).write_text(json.dumps(evaluation))
    job.ranks.gather(None)


def keep_best(policy, job, state, result: dict) -> None:
    """Saves the adapter as best/ if its evaluation is better than the best one so far."""
    if guard.better(result, state.best):
        keep(policy, job, state, result)


def keep(policy, job, state, result: dict) -> None:
    """Saves the adapter as best/. result: its evaluation and its step, or the step alone."""
    state.best = result
    save_adapter(policy, job, "best", result)
    job.result(best=result)


def final_adapters(run) -> dict[str, Path]:
    """name -> folder of the adapters that are compared at the end of a run."""
    names = [name for name in ("untrained", "imitated") if (run.dir / name).is_dir()]
    folders = {name: run.dir / name for name in names}
    checkpoints = [folder for _, folder in run.checkpoints()]
    last = [*folders.values(), *checkpoints][-1]
    return folders | {"last": last, "best": run.dir / "best"}
