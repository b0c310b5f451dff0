"""Sends the numbers of a run to TensorBoard or Weights & Biases, too. Both packages are optional.

A tracker is a function of a row. The ones in `run.trackers` get every row while it is made.
Transcripts stay in the run directory: viz.py shows them.
"""

import importlib.util
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import usable, write_whole
from flatlab.numbers import number


def check_packages(names: Iterable[str]) -> None:
    """Raises UserError, with the pip command, if a tracker was asked for that is not installed.

    The scripts call this before they create a run directory.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--trackers {name} needs a missing package: pip install {name}")


def open_tensorboard(run):
    """A tracker that writes <run>/tensorboard. To look at it: tensorboard --logdir logs"""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.dir / "tensorboard"))

    def tracker(row: dict):
        for name, value in scalars(row).items():
            writer.add_scalar(name, value, step_of(row))
        writer.flush()

    return tracker


def open_wandb(run):
    """A tracker that logs to Weights & Biases. WANDB_MODE=offline needs no account.

    A resumed run continues the same W&B run. Every cell of a grid has one of its own, which
    `sync_tensorboard` cannot do: it follows one run per process.
    """
    import wandb

    path = run.dir.resolve()
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")  # seconds; W&B's own default is 90
    with usable("--trackers wandb"):  # a wrong key, no network
        logged = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flatlab"),
            name=f"{path.parent.name}/{path.name}".removeprefix("logs/"),
            config=run.config,
            dir=str(run.dir),
            reinit="create_new",
            id=wandb_id(path),
            resume="allow",
        )
    logged.define_metric("*", step_metric="step")  # nodes end in another order than they start

    def tracker(row: dict):
        logged.log(scalars(row) | {"step": step_of(row)})

    return tracker


OPEN = {"tensorboard": open_tensorboard, "wandb": open_wandb}


def wandb_id(directory: Path) -> str:
    """The id of a run at W&B, drawn once. Two grids have cells of the same name."""
    path = directory / "wandb_id.txt"
    if not path.exists():
        write_whole(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8")


def step_of(row: dict) -> int:
    """The x axis: the training step, or the order in which nodes were started."""
    return row.get("order", row.get("step"))


def scalars(row: dict) -> dict[str, float]:
    """The numbers of a row that can be drawn as curves. Those of a node in a search that learns,
    whose rounds have curves of the same names, begin with node/.
    """
    is_node = "order" in row and row.get("step") is not None
    return {
        f"node/{key}" if is_node else key: value
        for key, value in row.items()
        if key not in ("step", "order") and number(value) is not None
    }
