"""The options that grpo.py and search.py share. Each class is one box in `--help`; flags stay flat.

None stands for the default that the comment names; `derive` fills in those that depend on the
model. 0 is only ever zero.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from flatlab.errors import UserError
from flatlab.sandbox.backend import IMAGE


@dataclass
class TaskOptions:
    task: tuple[str, ...] = ("titanic",)  # names, see `python tasks.py`, or Harbor task folders
    mlgym_root: str | None = None  # MLGym checkout; default: $MLGYM_ROOT
    # folder of prepared MLE-Dojo competitions; default: $MLEDOJO_ROOT
    mledojo_root: str | None = None


@dataclass
class ModelOptions:
    # Hugging Face name, folder, logs/<run>/best, or tiny (the stand-in); default: Qwen3-4B with a
    # GPU, else tiny
    model: str | None = None
    # tokens of prompt and reply together; default: 16384 or what the model can, stand-in 2048
    context: int | None = None
    # tokens per reply; default: 2048, at most a quarter of the context; stand-in 160
    max_reply_tokens: int | None = None
    # longer command outputs keep head and tail; default: as max_reply_tokens; stand-in 256
    max_observation_tokens: int | None = None
    temperature: float = 1.0  # sampling temperature
    # compile the engine on a CPU, too: needs g++ and up to a minute at the start
    compile: bool = False
    exact: bool = False  # GPU: the same seeds give the same episodes in any batch; slower


@dataclass
class SandboxOptions:
    # auto: docker if the daemon and the image are there, else local
    backend: Literal["auto", "docker", "local"] = "auto"
    image: str = IMAGE  # Docker image of the sandboxes
    network: bool = False  # give network access to tasks that ask for it
    # docker: Hugging Face cache, mounted read-only, with which a task needs no network; a folder of
    # the machine that runs Docker
    hf_cache: str | None = None
    episode_minutes: float = 30.0  # time limit of one episode, in minutes


@dataclass
class TrackerOptions:
    tensorboard: bool = False  # also write rows and transcripts to logs/<run>/tensorboard
    wandb: bool = False  # also send them to Weights & Biases; WANDB_MODE=offline needs no account


def flat(config) -> dict:
    """The fields of a Config with its nested groups as one flat dict, as in config.yaml and in the
    flags.
    """
    values = {}
    for name, value in asdict(config).items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def derive(model: ModelOptions, is_tiny: bool, positions: int | None = None) -> None:
    """Fills in the options that depend on the model. positions: of the model; None: no limit.

    Raises UserError if the model has fewer positions than the context, or if a reply may be as long
    as the whole context.
    """
    positions = positions or math.inf
    set_defaults(model, {"context": min(2048 if is_tiny else 16384, positions)})
    if model.context > positions:
        raise UserError(
            f"--context {model.context} is more than {model.model} has positions: use {positions}."
        )
    quarter = model.context // 4
    defaults = {
        "max_reply_tokens": min(160 if is_tiny else 2048, quarter),
        "max_observation_tokens": min(256 if is_tiny else 2048, quarter),
    }
    set_defaults(model, defaults)
    if model.max_reply_tokens >= model.context:
        raise UserError(
            f"--max-reply-tokens {model.max_reply_tokens} leaves no room for a prompt in "
            f"--context {model.context}."
        )


def set_defaults(options, defaults: dict) -> None:
    """Replaces the options that are None by their defaults (name -> value)."""
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
