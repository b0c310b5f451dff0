"""The start of every script: its configs, complete and checked, and its runs.

    cfgs, model = start.configs(Config, SCRIPT)                     # all checked before one runs
    tasks, sandbox = env.open_tasks(cfgs[0].tasks.task, cfgs[0].sandbox, model.stand_in)
    for cfg in (replace(cfg, sandbox=sandbox) for cfg in cfgs):
        run = start.begin_run(cfg, tasks, model, is_finished)
        if not run.finished:
            with start.recorded([run], metrics.first_results(tasks, kind)):
                ...
                run.update_result(status="finished")

A Config has the fields of RunOptions and the groups model, episode and tasks, and may have sandbox,
url and trackers; see options.py.
"""

import re
import sys
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
from flatlab.world.prompts import load_prompts

# ------------------------------------------------------------------ configs


def configs(config_class, script: str) -> tuple[list, ModelPath]:
    """The config of each run of the command line, complete, and their model."""
    cfgs = cli.parse_configs(config_class, sys.argv[1:])
    names = [run_name(cfg, script, len(cfgs) > 1) for cfg in cfgs]
    return complete_configs([replace(cfg, name=name) for cfg, name in zip(cfgs, names)])


def run_name(cfg, script: str, is_one_of_several: bool) -> str:
    """Name of a run: --name, which ends with the seed if there are several, or
    <script>-<tasks>-<model>-<seed>.
    """
    if not cfg.name:
        return f"{script}-{value_text(cfg.tasks.task)}-{model_name(cfg)}-{cfg.seed}"
    return f"{cfg.name}-{cfg.seed}" if is_one_of_several else cfg.name


def complete_configs(cfgs: list) -> tuple[list, ModelPath]:
    """The configs of a command with a value for each option that is None, and the path of their
    model; that of an endpoint has its name alone. Raises UserError for settings that are wrong.

    --model and --backend, where they are left open, are those that the runs have used before: what
    is found on this machine may differ from start to start.
    """
    first = cfgs[0]
    url = getattr(first, "url", None)  # grpo.py and sft.py have none
    if url and not re.fullmatch(r"https?://\S+", url):  # not quoted: it may hold a password
        raise UserError("--url needs an address with its scheme, as http://localhost:8000/v1.")
    if url and not first.model.model:
        raise UserError("--url needs --model: the name that the endpoint knows.")
    used = used_before(cfgs)
    name = first.model.model or used.get("model") or default_model()
    known = {"model": name}
    if options.flat(first).get("backend") == "auto":  # sft.py has none
        known["backend"] = used.get("backend", "auto")
    model = ModelPath(name, None, False) if url else resolve_model(name)
    cfgs = [options.filled(options.changed(cfg, **known), model) for cfg in cfgs]
    context = cfgs[0].model.context
    if model.positions and context > model.positions:
        raise UserError(f"--context {context} is more than the model can: {model.positions}.")
    reply = options.flat(cfgs[0]).get("max_reply_tokens", 0)
    if reply >= context:
        raise UserError(
            f"--max-reply-tokens {reply} leaves no room for a prompt in --context {context}."
        )
    return cfgs, model


def used_before(cfgs: list) -> dict:
    """The config.yaml of the first of these runs that has one; {} if none has."""
    for cfg in cfgs:
        file = store.run_directory(cfg.name) / "config.yaml"
        if file.exists():
            return store.read_own(read_mapping, file)
    return {}


# ------------------------------------------------------------------ runs


def begin_run(cfg, tasks, model, is_finished, **more) -> store.Run:
    """Opens logs/<cfg.name> and its trackers, see store.open_run. Prints a line if the run is
    finished; the caller must then skip it.

    model: a ModelPath. is_finished: a function of the Run. more: further values for config.yaml.
    """
    config = options.flat(cfg) | more
    names = config.get("trackers", ())
    trackers.check_packages(names)
    prompts = load_prompts(config["prompts"]).digest if "prompts" in config else ""
    made_by = fingerprint(tasks, prompts, None if config.get("url") else model)
    where = store.run_directory(cfg.name)
    if config.get("url") and not where.exists():
        endpoint.check_url(config["url"])
    may_change = options.marked(type(cfg), "resumable")
    run = store.open_run(where, config, made_by, may_change, is_finished)
    if run.finished:
        print(f"{where} was finished before: nothing is left to run.")
    else:
        run.trackers = [trackers.OPEN[name](run) for name in names]
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
        for run in runs:
            with suppress(OSError):
                if run.result.get("status") != "finished":
                    run.update_result(status=status)
        if runs and status == "interrupted":
            where = where or runs[0].dir
            print(f"\ninterrupted; the same command continues {where}", file=sys.stderr)
        raise
