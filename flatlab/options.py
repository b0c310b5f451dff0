"""The options that scripts share. Each class is one box in `--help`; flags stay flat.

An option that is None gets its value from DERIVED, or is not used. 0 is only ever zero. RESUMABLE
is for open_run(), BOUNDS for check_bounds().
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, is_dataclass
from typing import Literal

from flatlab.errors import UserError
from flatlab.sandbox.backend import IMAGE

COUNT = (1, 1_000_000)
# options that may change when a run is resumed; each script adds its own
RESUMABLE = {"gpu_memory", "trackers"}
# lowest and highest value of a number, by default 0 and 1e9; each script adds its own
BOUNDS = {
    "seed": (0, 2**32 - 1),
    "gpu_memory": (0.01, 1),
    "temperature": (0.01, 1e9),
    "max_turns": COUNT,
    "max_reply_tokens": COUNT,
    "episode_minutes": (0.01, 1e9),
}
# default of an option that is None, from the config and its ModelPath, in this order; each script
# adds its own
DERIVED = {
    "context": lambda cfg, model: min(2048 if model.stand_in else 16384, model.positions or 16384),
    "max_reply_tokens": lambda cfg, model: min(160 if model.stand_in else 2048, quarter(cfg)),
    "max_observation_tokens": lambda cfg, model: min(256 if model.stand_in else 2048, quarter(cfg)),
    "prompts": lambda cfg, model: f"configs/prompts/{'tiny' if model.stand_in else 'agent'}.yaml",
}

Trackers = tuple[Literal["tensorboard", "wandb"], ...]


@dataclass
class TaskOptions:
    # names, see `python tasks.py`; $MLGYM_ROOT and $MLEDOJO_ROOT add names, MODULE:PLACE is a task
    # of a Python module, as integrations.harbor:FOLDER
    task: tuple[str, ...] = ("titanic",)


@dataclass
class ModelOptions:
    # Hugging Face name, folder, logs/<run>/best, or tiny (the stand-in); default: Qwen3-4B with a
    # GPU, else tiny
    model: str | None = None
    # tokens of prompt and reply together; at most what the model can
    context: int | None = None
    temperature: float = 1.0  # sampling temperature
    # compile the engine on a CPU, too: needs g++ and up to a minute at the start
    compile: bool = False
    # upper bound on the engine's share of a GPU; default: what it needs, see docs/models.md
    gpu_memory: float | None = None


@dataclass
class SandboxOptions:
    # auto: docker if the daemon and the image are there, else local
    backend: Literal["auto", "docker", "local"] = "auto"
    image: str = IMAGE  # Docker image of the sandboxes
    network: bool = False  # give network access to tasks that ask for it
    # docker: Hugging Face cache, mounted read-only, with which a task needs no network; a folder of
    # the machine that runs Docker
    hf_cache: str | None = None


@dataclass
class EpisodeOptions:
    max_turns: int = 8  # replies per episode
    # tokens per reply; unless given, at most a quarter of the context
    max_reply_tokens: int | None = None
    # longer command outputs keep head and tail; unless given, at most a quarter of the context
    max_observation_tokens: int | None = None
    episode_minutes: float = 30.0  # time limit of one episode, in minutes
    # YAML file of all that an agent reads and a search asks
    prompts: str | None = None
    # <think> parts of earlier replies. keep: an episode is one sequence; drop: later replies do not
    # see them, and each reply after one is trained as a sequence of its own
    thoughts: Literal["keep", "drop"] = "keep"


def flat(config) -> dict:
    """The fields of a Config with its nested groups as one flat dict, as in config.yaml and in the
    flags.
    """
    values = {}
    for name, value in asdict(config).items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def check_bounds(config) -> None:
    """Raises UserError for a number out of the config's BOUNDS, and for a list without values whose
    default has some. NaN is always out of bounds; None never is.
    """
    defaults = flat(type(config)())
    bounds = getattr(config, "BOUNDS", {})
    for name, value in flat(config).items():
        flag = "--" + name.replace("_", "-")
        low, high = bounds.get(name, (0, 1e9))
        if value == () and defaults[name]:
            raise UserError(f"{flag} needs at least one value.")
        numbers = value if isinstance(value, tuple) else (value,)
        if len(set(numbers)) < len(numbers):
            raise UserError(f"{flag} has a value twice.")
        for number in numbers:
            if isinstance(number, (int, float)) and not low <= number <= high:
                most = f"{high:.10g}".replace("0" * 9, " billion").replace("0" * 6, " million")
                raise UserError(f"{flag} must be from {low:g} to {most}, not {number:.6g}.")


def quarter(cfg) -> int:
    """A quarter of the context, in tokens."""
    return cfg.model.context // 4


def fill_in(cfg, model) -> None:
    """Gives each option that is None its default of cfg.DERIVED. model: a ModelPath."""
    groups = [cfg, *filter(is_dataclass, vars(cfg).values())]
    for name, default in getattr(cfg, "DERIVED", {}).items():
        for group in groups:
            if getattr(group, name, 0) is None:
                setattr(group, name, default(cfg, model))
