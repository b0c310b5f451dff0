"""What outlives a step of training: the row, the transcripts, checkpoints and adapters; and how a
run resumes from them.

Every rank calls these functions with its job, see ranks.py, but timing, write_step, final_adapters
and is_finished are for rank 0: only that has a run to write.
"""

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import file_digest, save_tensors
from flatlab.model import memory
from flatlab.train import guard
from flatlab.train.batch import Group

EVALUATION = "evaluation.json"  # beside the adapter in best/


@dataclass
class State:
    """What a checkpoint holds besides adapter and optimizer. A field that is added here outlives
    kill -9. All randomness is a function of seed and step, so there is no generator to save.
    """

    step: int = 0  # the next one; as many steps of training are in the weights
    stopped: str = ""  # why the guard ended the run
    best: dict | None = None  # evaluation of the adapter in best/


def resume(policy, optimizer, job) -> tuple[State, list[dict]]:
    """Loads the newest checkpoint and removes what was written after it. Returns the state and the
    rows up to it.

    Raises UserError for a checkpoint with other fields.
    """
    import torch

    run = job.run
    newest = run.checkpoints()[-1:] if run else []
    step, folder = job.ranks.first(newest[0] if newest else (-1, None))
    saved = None
    if folder is not None:
        saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        if set(saved.get("state", {})) != {f.name for f in fields(State)}:
            raise UserError(
                f"The checkpoint {folder} was written by another version of grpo.py: "
                "choose another --name, or continue it with that version."
            )
    if run:
        run.truncate_after(step)
    rows = job.ranks.first(run.rows() if run else None)
    if saved is None:
        return State(), rows
    policy.load_adapter(folder)
    optimizer.load_state_dict(saved["optimizer"])
    job.say(f"resumed after step {step} from {folder}")
    state = State(**saved["state"])
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
        tokens = b"".join(episode.packed for group in groups for episode in group.episodes)
        job.run.save_episodes(name, lines, tokens)


def transcripts(group: Group) -> list[dict]:
    """The episodes of a group with its number and what is made of their scores: reward (None for a
    fault), baseline, and improvement (None unless valid).
    """
    made = zip(group.rewards, group.improvements)
    lines = []
    for episode in group.episodes:
        line = episode.to_dict() | {"group": group.number, "baseline": group.task.baseline}
        reward, improvement = (None, None) if episode.status == "fault" else next(made)
        lines.append(line | {"reward": reward, "improvement": improvement})
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
        "memory_gb": memory.peak_bytes(policy.device) / 2**30,
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


def final_adapters(run) -> tuple[dict[str, Path], dict[str, str]]:
    """The folders of the adapters that are compared at the end of a run, and the digests of their
    weights, by name.
    """
    names = [name for name in ("untrained", "imitated") if (run.dir / name).is_dir()]
    folders = {name: run.dir / name for name in names}
    checkpoints = [folder for _, folder in run.checkpoints()]
    last = [*folders.values(), *checkpoints][-1]
    folders |= {"last": last, "best": run.dir / "best"}
    files = {name: next(folder.glob("*.safetensors")) for name, folder in folders.items()}
    weights = {name: file_digest(file) for name, file in files.items()}
    return folders, weights


def is_finished(run, cfg) -> bool:
    """Whether nothing is left to do: all steps are made and the adapters compared, or the guard
    stopped the run.

    Raises UserError if there are steps, but no checkpoint to go on from.
    """
    result = run.results()
    status = result.get("status", "")
    steps = len(run.rows())
    if steps and not run.checkpoints():
        raise UserError(
            f"{run.dir} has steps but no checkpoint to continue from, and starting anew would "
            "erase them: choose another --name, or remove it."
        )
    if cfg.eval_episodes and (result.get("final") or {}).get("steps") != steps:
        return False
    return status.startswith("stopped: ") or status == "finished" and steps >= cfg.steps
