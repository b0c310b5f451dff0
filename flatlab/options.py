"""The options that scripts share, and what can be said about one. Each class is one box in
`--help`; flags stay flat.

A Config is what one run has. It is frozen: the start makes complete copies of it, and nothing
changes them. An option stands in one place: its type has its bounds and says whether it is Several
or Resumable; its comment is its help. None is computed as derived() says, or the option is not
used. 0 is only ever zero.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Literal, TypeVar, get_type_hints

from annotated_types import Ge, Interval, Le  # noqa: F401, scripts take these from here

from flatlab.sandbox.backend import IMAGE

T = TypeVar("T")
Several = Annotated[T, "several"]  # each of several values on the command line makes a run
Resumable = Annotated[T, "resumable"]  # may change when a run is resumed

Whole = Annotated[int, Interval(ge=0, le=1_000_000_000)]
Count = Annotated[int, Interval(ge=1, le=1_000_000)]
Number = Annotated[float, Interval(ge=0, le=1e9)]
Positive = Annotated[float, Interval(gt=0, le=1e9)]
Trackers = Resumable[tuple[Literal["tensorboard", "wandb"], ...]]


def derived(default: Callable):
    """An option that is None until the start computes it from the config and its ModelPath."""
    return field(default=None, metadata={"derived": default})


def quarter(cfg) -> int:
    """A quarter of the context, in tokens."""
    return cfg.model.context // 4


@dataclass(frozen=True)
class RunOptions:
    # run directory logs/<name>, with several seeds logs/<name>-<seed>, of a cell of a grid
    # logs/<name>/<cell>; the default is made of script, task, model and seed
    name: str | None = None
    # seed of all that is drawn; several: a run each, one after the other
    seed: Several[Annotated[int, Interval(ge=0, lt=2**32)]] = 0


@dataclass(frozen=True)
class TaskOptions:
    # names, see `python tasks.py`; $MLGYM_ROOT and $MLEDOJO_ROOT add names, MODULE:PLACE is a task
    # of a Python module, as integrations.harbor:FOLDER
    task: tuple[str, ...] = ("titanic",)


@dataclass(frozen=True)
class ModelOptions:
    # Hugging Face name, folder, logs/<run>/best, or tiny (the stand-in); default: Qwen3-4B with a
    # GPU, else tiny
    model: str | None = None
    # tokens of prompt and reply together; at most what the model can
    context: Whole | None = derived(
        lambda cfg, model: min(2048 if model.stand_in else 16384, model.positions or 16384)
    )
    temperature: Annotated[float, Interval(ge=0.01, le=1e9)] = 1.0  # sampling temperature
    # compile the engine on a CPU, too: needs g++ and up to a minute at the start
    compile: bool = False
    # upper bound on the engine's share of a GPU; default: what it needs, see docs/models.md
    gpu_memory: Resumable[Annotated[float, Interval(ge=0.01, le=1)] | None] = None


@dataclass(frozen=True)
class SandboxOptions:
    # auto: docker if the daemon and the image are there, else local
    backend: Literal["auto", "docker", "local"] = "auto"
    image: str = IMAGE  # Docker image of the sandboxes
    network: bool = False  # give network access to tasks that ask for it
    # docker: Hugging Face cache, mounted read-only, with which a task needs no network; a folder of
    # the machine that runs Docker
    hf_cache: str | None = None


@dataclass(frozen=True)
class HistoryOptions:
    # longer command outputs keep head and tail; unless given, at most a quarter of the context
    max_observation_tokens: Whole | None = derived(
        lambda cfg, model: min(256 if model.stand_in else 2048, quarter(cfg))
    )
    # <think> parts of earlier replies. keep: an episode is one sequence; drop: later replies do not
    # see them, and each reply after one is trained as a sequence of its own
    thoughts: Literal["keep", "drop"] = "keep"


@dataclass(frozen=True)
class EpisodeOptions(HistoryOptions):
    max_turns: Count = 8  # replies per episode
    # tokens per reply; unless given, at most a quarter of the context
    max_reply_tokens: Count | None = derived(
        lambda cfg, model: min(160 if model.stand_in else 2048, quarter(cfg))
    )
    episode_minutes: Positive = 30.0  # time limit of one episode, in minutes
    # YAML file of all that an agent reads and a search asks
    prompts: str | None = derived(
        lambda cfg, model: f"configs/prompts/{'tiny' if model.stand_in else 'agent'}.yaml"
    )


def flat(config) -> dict:
    """The fields of a Config with its nested groups as one flat dict, as in config.yaml and in the
    flags.
    """
    values = {}
    for name, value in asdict(config).items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def kinds_of(made, extras: bool = False) -> dict:
    """The type of each option of a dataclass, its nested groups included, or of a function. extras:
    with what is annotated.
    """
    kinds = {}
    for name, kind in get_type_hints(made, include_extras=extras).items():
        kinds |= kinds_of(kind, extras) if is_dataclass(kind) else {name: kind}
    return kinds


def marked(config_class, mark: str) -> list[str]:
    """The names of the options with this mark, see Several and Resumable."""
    kinds = kinds_of(config_class, extras=True)
    return [name for name, kind in kinds.items() if mark in getattr(kind, "__metadata__", ())]


def changed(config, **values):
    """A copy of a config with these values of options, also of those in its groups."""
    groups = {}
    for name, group in vars(config).items():
        if is_dataclass(group):
            own = {key: values.pop(key) for key in {*values} & vars(group).keys()}
            groups[name] = replace(group, **own)
    return replace(config, **groups, **values)


def filled(config, model):
    """A copy of a config with what derived() says in place of None. model: a ModelPath."""
    for group in (config, *filter(is_dataclass, vars(config).values())):
        for option in fields(group):
            compute = option.metadata.get("derived")
            if compute and getattr(group, option.name) is None:
                config = changed(config, **{option.name: compute(config, model)})
    return config
