"""Checkpoints, transcripts and adapters of a training run, and resuming from them.

Every rank calls these functions with its job, see job.py, but write_step and
is_finished are for rank 0: only that has a run to write. All randomness is a function of seed and
step, so there is no generator to save.
"""

import json
from collections.abc import Callable
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import content_key, load_tensors, read_mapping, save_tensors, usable
from flatlab.runs.store import WAY_OUT, Run, read_own
from flatlab.train import metrics
from flatlab.train.batch import Group
from flatlab.train.job import in_trainer

EVALUATION = "evaluation.json"  # beside the adapter in best/


def resume(
    policy, optimizer, job, cut: Callable = Run.truncate_after, compared: tuple = ()
) -> list[dict]:
    """Loads the newest whole checkpoint, and tells the job how far the run has come. Returns the
    rows up to it. cut: removes what was written after it, a method of Run. compared: names of the
    adapters that the end of the run reads.

    Raises UserError if there are checkpoints, but none is whole, or if such an adapter is damaged.
    """
    state = None
    if job.run:
        best = None
        if compared and job.run.checkpoints():
            for name in compared:
                read_own(policy.load_adapter, job.run.dir / name)
            # A run that was killed before its checkpoint may have saved a better adapter already.
            best = read_own(read_mapping, job.run.dir / "best" / EVALUATION)
        step, folder = newest_whole(policy, optimizer, job.run)
        cut(job.run, step)
        state = step, folder, job.run.rows(), best
    step, folder, rows, job.best = job.ranks.first(state)
    job.step = step + 1
    if folder:
        if not job.run:  # rank 0 has loaded it
            restore(policy, optimizer, folder)
        print(f"resumed after step {step} from {folder}")
    job.ranks.broadcast(policy.parameters())
    return rows


def newest_whole(policy, optimizer, run) -> tuple[int, Path | None]:
    """Loads the newest checkpoint that is not damaged and has the rows of all steps up to it, and
    says which ones were skipped. Returns its step and folder; -1 and None if there is none at all.
    """
    steps = [row.get("step") for row in run.rows()]
    skipped = []
    for step, folder in reversed(run.checkpoints()):
        try:
            if steps[: step + 1] != list(range(step + 1)):
                raise UserError(f"{run.dir}/metrics.jsonl lacks steps up to {step}.")
            restore(policy, optimizer, folder)
        except UserError as error:
            skipped.append(f"{folder} is skipped: {error}")
            continue
        for sentence in skipped:
            print(f"warning  {sentence}")
        return step, folder
    if skipped:
        raise UserError(f"{skipped[0]} No older checkpoint is whole. {WAY_OUT}")
    return -1, None


def restore(policy, optimizer, folder: Path) -> None:
    """Loads a checkpoint. Raises UserError if a file is missing, damaged, or of another model."""
    policy.load_adapter(folder)
    file = folder / "trainer.pt"
    saved = load_tensors(file)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with usable(file):
        for number, state in saved["optimizer"]["state"].items():
            for name, tensor in state.items():
                if tensor.dim() and tensor.shape != parameters[number].shape:
                    raise ValueError(f"{name} of parameter {number} has another shape")
                if not tensor.isfinite().all():
                    raise ValueError(f"{name} of parameter {number} holds NaN or infinity")
        for group, today in zip(saved["optimizer"]["param_groups"], optimizer.param_groups):
            group.update({name: today[name] for name in today if name != "params"})  # as set today
        optimizer.load_state_dict(saved["optimizer"])


def write_step(policy, optimizer, job, row: dict, groups: list[Group] = ()) -> None:
    """Writes transcripts, row and checkpoint. A step counts once it has a checkpoint."""
    if groups:
        save_groups(job.run, f"{row['step']}", groups)
    job.run.log(row)
    with job.run.checkpoint(row["step"]) as folder:
        policy.save(folder)
        save_tensors({"optimizer": optimizer.state_dict()}, folder / "trainer.pt")


def save_groups(run: Run | None, when: str, groups: list[Group]) -> None:
    """Writes the rows and the transcripts of these groups, see Run.save_episodes. when: a step, or
    the name of an evaluation.
    """
    if not run:
        return
    episodes = []
    for group in groups:
        for e in group.episodes:
            e.id = f"{when}/{len(episodes)}"
            e.when = when
            e.step = int(when) if when.isdigit() else None
            e.group = group.number
            episodes.append(e)
    run.save_episodes(when, episodes)


# ------------------------------------------------------------------------------ adapters


def save_adapter(policy, job, name: str, evaluation: dict | None = None) -> None:
    """Saves the adapter as <run>/<name>; afterwards every rank finds it there."""
    if job.run:
        with job.run.whole_directory(name) as folder:
            policy.save(folder)
            if evaluation:
                (folder / EVALUATION).write_bytes(json.dumps(evaluation).encode())
    job.ranks.gather(None)


def keep_best(policy, job, result: dict) -> None:
    """Saves the adapter as best/ if it is better than the best one so far. result: its evaluation
    and its step, or the step alone.
    """
    if metrics.better(result, job.best):
        job.best = result
        save_adapter(policy, job, "best", result)
        job.update_result(best=result)


async def compare_adapters(policy, evaluate: Callable, job) -> dict:
    """Plays the same fresh seeds with the untrained, the last and the best adapter.

    evaluate(name, test=whether to score the test part): plays and saves episodes, and returns their
    groups. Adapters with equal weights are played once. The test part is read for the
    best one alone.
    """
    adapters = await in_trainer(final_adapters, job)
    steps = {"untrained": -1, "last": job.step - 1, "best": job.best["step"]}
    evaluated = {}  # by digest of the weights
    for name in ("best", "untrained", "last"):
        folder, weights = adapters[name]
        if weights not in evaluated:
            policy.load_adapter(folder)
            policy.sync(steps[name] + 1)
            print(f"evaluating  the {name} adapter")
            when = f"final-{name}"
            evaluated[weights] = await evaluate(when, test=name == "best"), when
    same = {name: evaluated[weights] for name, (_, weights) in adapters.items()}
    return metrics.comparison(same, job.tasks, steps)


def final_adapters(job) -> dict[str, tuple[Path, str]]:
    """The folder of each adapter that is compared at the end of a run, and the digest of its
    weights, by name.
    """
    adapters = {}
    if job.run:
        untrained = job.run.dir / "untrained"
        made = [untrained, *(folder for _, folder in job.run.checkpoints())]
        folders = {"untrained": untrained, "last": made[-1], "best": job.run.dir / "best"}
        for name, folder in folders.items():
            adapters[name] = folder, content_key(next(folder.glob("*.safetensors")))
    return job.ranks.first(adapters)


def is_finished(run, steps: int, n: int = 0) -> bool:
    """Returns whether nothing is left to do: all steps are made and the adapters compared on n
    episodes each, or a collapse stopped the run.

    Raises UserError if there are steps, but no checkpoint to go on from. One step is made again: a
    run that was killed during its first checkpoint has its row already.
    """
    result = run.result
    status = result.get("status", "")
    made = len(run.rows())
    if made > 1 and not run.checkpoints():
        raise UserError(
            f"{run.dir} has steps but no checkpoint to continue from, and starting anew would "
            "erase them: choose another --name, or remove it."
        )
    if n and (result.get("final") or {}).get("steps") != made:
        return False
    return status.startswith("stopped: ") or status == "finished" and made >= steps
