"""The start of every script: its configs, complete and checked, and its runs.

    cfgs, model = start.configs(Config, SCRIPT)                     # all checked before one runs
    tasks = env.open_tasks(cfgs[0].tasks, cfgs[0].sandbox, model.stand_in)
    prompts = load_prompts(cfgs[0].episode.prompts)
    for cfg in cfgs:
        run = start.begin_run(cfg, tasks, model, is_finished, prompts.digest)
        if not run.finished:
            with start.recorded([run], metrics.first_results(tasks, kind)):
                ...
                run.update_result(status="finished")

A Config has the fields name, seed (a tuple), model, episode and tasks, and may have sandbox, url
and trackers; see options.py. Its DERIVED computes options that are None, and --help shows these
values. RESUMABLE names the options that may change when a run goes on. complete() alone completes a
config.
"""

import re
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace

from flatlab import options
from flatlab.errors import UserError, first_cause, sentence_of, shown
from flatlab.files import read_mapping
from flatlab.model import endpoint
from flatlab.model.path import ModelPath, default_model, model_name, resolve_model
from flatlab.numbers import value_text
from flatlab.runs import cli, store, trackers
from flatlab.runs.fingerprint import fingerprint

# ------------------------------------------------------------------ configs


def configs(config_class, script: str) -> tuple[list, ModelPath]:
    """Parses the command line into the config of each --seed, and their model, see each_seed."""
    cfg = cli.parse_config(config_class, sys.argv[1:])
    return each_seed(cfg, lambda cfg, seed: run_name(cfg, seed, script))


def run_name(cfg, seed: int, script: str) -> str:
    """Name of the run of a seed: --name, which ends with the seed if there are several, or
    <script>-<tasks>-<model>-<seed>.
    """
    if not cfg.name:
        return f"{script}-{value_text(cfg.tasks.task)}-{model_name(cfg)}-{seed}"
    return f"{cfg.name}-{seed}" if len(cfg.seed) > 1 else cfg.name


def each_seed(cfg, name_of: Callable) -> tuple[list, ModelPath]:
    """A list of a complete config for each --seed, which is a number there, and the path of their
    model. The configs share all else.

    name_of: (cfg, seed) -> name of the run.
    """
    cfgs = []
    for seed in cfg.seed:
        cfgs.append(replace(cfg, seed=seed, name=name_of(cfg, seed)))
        model = complete(cfgs[-1])
    return cfgs, model


def complete(cfg) -> ModelPath:
    """Fills in the options that are None. Returns the path of the model; that of an endpoint has
    its name alone. Raises UserError for settings that are wrong.
    """
    url = getattr(cfg, "url", None)  # grpo.py and sft.py have none
    if url and not re.fullmatch(r"https?://\S+", url):  # not quoted: it may hold a password
        raise UserError("--url needs an address with its scheme, as http://localhost:8000/v1.")
    if url and not cfg.model.model:
        raise UserError("--url needs --model: the name that the endpoint knows.")
    keep_choices(cfg)
    cfg.model.model = cfg.model.model or default_model()
    model = ModelPath(cfg.model.model, None, False) if url else resolve_model(cfg.model.model)
    options.fill_in(cfg, model)
    if model.positions and cfg.model.context > model.positions:
        raise UserError(
            f"--context {cfg.model.context} is more than the model can: {model.positions}."
        )
    if cfg.episode.max_reply_tokens >= cfg.model.context:
        raise UserError(
            f"--max-reply-tokens {cfg.episode.max_reply_tokens} leaves no room for a prompt in "
            f"--context {cfg.model.context}."
        )
    return model


def keep_choices(cfg) -> None:
    """Gives --model and --backend, where they are left open, the values that the run or grid
    logs/<cfg.name> has used: what is found on this machine may differ from start to start.
    """
    where = store.run_directory(cfg.name)
    for file in [where / "config.yaml", *sorted(where.glob("*/config.yaml"))][:2]:
        old = store.read_own(read_mapping, file, default={})
        cfg.model.model = cfg.model.model or old.get("model")
        sandbox = getattr(cfg, "sandbox", None)  # sft.py has none
        if sandbox and sandbox.backend == "auto":
            sandbox.backend = old.get("backend", "auto")


# ------------------------------------------------------------------ runs


def begin_run(cfg, tasks, model, is_finished, prompts="", where=None, **cell) -> store.Run:
    """Opens the run directory of a complete config and its trackers, see store.open_run. Prints a
    line if the run is finished; the caller must then skip it.

    model: a ModelPath. is_finished: a function of the Run. prompts: Prompts.digest. where: the
    directory, default logs/<cfg.name>. cell: values of a cell, in place of those of its grid.
    """
    config = options.flat(cfg) | cell
    trackers.check_packages(config.get("trackers", ()))
    made_by = fingerprint(tasks, prompts, None if config.get("url") else model)
    where = where or store.run_directory(cfg.name)
    if config.get("url") and not where.exists():
        endpoint.check_url(config["url"])
    run = store.open_run(where, config, made_by, cfg.RESUMABLE, is_finished)
    if run.finished:
        print(f"{where} was finished before: nothing is left to run.")
    else:
        run.trackers = trackers.open_trackers(run)
    return run


@contextmanager
def recorded(runs: list, first: dict | None = None, where=None):
    """Writes `first` into the result.json of the runs. If the block raises, also writes the status
    "interrupted" or "failed: <why>"; the block itself writes "finished". A full disk may leave the
    status as it was.

    runs: None among them is that of another rank. where: directory of a grid of runs.
    """
    runs = [run for run in runs if run]
    try:
        for run in runs if first else ():
            run.update_result(**first)
        yield
    except BaseException as error:
        cause = first_cause(error)
        status = f"failed: {sentence_of(cause) or shown(repr(cause))}"
        if isinstance(cause, KeyboardInterrupt):
            status = "interrupted"
            if runs:
                where = where or runs[0].dir
                print(f"\ninterrupted; the same command continues {where}", file=sys.stderr)
        for run in runs:
            with suppress(OSError):
                if run.result.get("status") != "finished":
                    run.update_result(status=status)
        raise
