"""Evaluation: N episodes of a model or an endpoint, on one task, several tasks or a suite.

    python evaluate.py --task titanic                                          the stand-in model
    python evaluate.py --task titanic --model logs/grpo-titanic-tiny-0/best    a trained adapter
    python evaluate.py --task titanic --url http://localhost:8000/v1 --model Qwen/Qwen3-8B
    python evaluate.py --suite builtin --model tiny --model logs/my-run/best   a suite, two models
    python viz.py logs/evaluate-*                                              compare them

The same command again resumes an evaluation. Every episode has a sandbox of its own and a seed that
no training uses; the same --seed means the same episodes for every model, which are compared in
pairs. Nothing is selected, so both the validation and the test part are scored. A broken sandbox is
replaced once; after that the episode is a fault, which is left out and counted.

A suite is a preset in configs/suites: tasks, attempts, limits. Tasks that this machine cannot play
are left out. Several models are evaluated one after the other, each in a run of its own.
"""

import asyncio
import sys
import time
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path

import env
from flatlab import options
from flatlab.errors import UserError
from flatlab.files import read_rows
from flatlab.numbers import value_text
from flatlab.runs import cli, store
from flatlab.suites.attempts import read_suite
from flatlab.suites.report import report
from flatlab.task.builtin import validated
from flatlab.train import checkpoint, metrics
from flatlab.train.batch import Group
from flatlab.view import console
from flatlab.view.reader import read_run
from flatlab.world.episode import Episode, run_episode
from policy import choose_models, model_name, open_engine

FIRST_SEED = -(10**12)  # of the episodes with --seed 0; those of training are never that low


@dataclass
class Config:
    """None stands for the default that the comment names; 0 is zero."""

    # run directory logs/<name>, with several seeds logs/<name>-<seed>; default:
    # <script>-<task>-<model>-<seed>
    name: str | None = None
    seed: tuple[int, ...] = (0,)  # seeds of sampling: a run each, one after the other
    suite: str | None = None  # name in configs/suites or a file: its values replace the defaults
    attempts: int | None = None  # episodes of each task, in place of --episodes
    episodes: int = 64  # of all tasks together, which take turns
    concurrency: int = 32  # episodes in flight at once
    # OpenAI-compatible endpoint to sample from, as http://localhost:8000/v1; key: $OPENAI_API_KEY
    url: str | None = None

    tasks: options.TaskOptions = field(default_factory=options.TaskOptions)
    model: options.ModelOptions = field(default_factory=options.ModelOptions)
    sandbox: options.SandboxOptions = field(default_factory=options.SandboxOptions)
    episode: options.EpisodeOptions = field(default_factory=options.EpisodeOptions)

    RESUMABLE = options.RESUMABLE | {"attempts", "episodes", "concurrency", "url"}
    BOUNDS = options.BOUNDS | dict.fromkeys(("attempts", "episodes", "concurrency"), options.COUNT)


async def evaluate(policy, tasks: list, numbers: list[int], cfg: Config, run) -> None:
    """Plays the episodes of these numbers that are not stored yet, and records each as it ends."""
    slots = asyncio.Semaphore(cfg.concurrency)
    played = stored_episodes(run, tasks)
    start = time.monotonic()
    before = len(played)
    earlier = run.result.get("seconds", 0)

    async def one(number: int) -> None:
        task = tasks[number % len(tasks)]
        seed = FIRST_SEED * (1 + cfg.seed) + number
        async with slots:
            for _ in range(2):
                async with env.Env(task, cfg.sandbox, seed) as world:
                    episode = await run_episode(world, policy, cfg.episode, seed, score_test=True)
                if episode.status != "fault":
                    break
        if cfg.url:
            episode.packed = b""  # tokens of an endpoint are not the model's
        group = Group(number, task, [episode], [])
        played[number] = group
        checkpoint.save_groups(run, number, [group])
        spent = time.monotonic() - start
        statuses = [group.episodes[0].status for group in played.values()]
        if {*statuses} != {"fault"}:
            run.update_result(**results(played, tasks), seconds=earlier + spent)
        left = spent / (len(played) - before) * (len(numbers) - len(played))
        console.episode_made(group, len(played), len(numbers), left)
        if statuses[-3:] == ["fault"] * 3:
            raise UserError(
                "Three sandboxes in a row broke, so the evaluation stops. Run the same command "
                f"again to continue. The last one: {episode.fault}"
            )

    async with asyncio.TaskGroup() as together:
        for number in numbers:
            if number not in played:
                together.create_task(one(number))
    run.update_result(**results(played, tasks), status="finished")


def stored_episodes(run, tasks: list) -> dict[int, Group]:
    """Groups of one episode that this run has played before, by number. Faults are played again."""
    played = {}
    for file in sorted((run.dir / "episodes").glob("[0-9]*.jsonl")):
        number = int(file.stem)
        try:
            [row] = read_rows(file)
            episode = validated(Episode, row, file)
        except (UserError, ValueError):  # ValueError: none or several rows
            raise UserError(
                f"{file} is damaged: remove it, and its episode is played again."
            ) from None
        if episode.status != "fault":
            played[number] = Group(number, tasks[number % len(tasks)], [episode], [])
    return played


def results(played: dict[int, Group], tasks: list) -> dict:
    """The numbers of result.json. value: on the test part if there is one."""
    groups = [*played.values()]
    found = metrics.evaluation(groups, tasks)
    return found | {
        "value": found.get("test_value_mean", found["value_mean"]),
        "tokens": sum(episode.reply_tokens for group in groups for episode in group.episodes),
    }


# ------------------------------------------------------------------------------ start

SCRIPT = Path(__file__).stem  # a copy of this file makes runs of its own


def is_finished(run, tasks: list, cfg: Config) -> bool:
    """Returns whether all episodes are played that can be."""
    result = run.result
    numbers = numbers_of(tasks, cfg, result.get("left_out", ()))
    return result.get("status") == "finished" and result["n"] + result["faults"] >= len(numbers)


def numbers_of(tasks: list, cfg: Config, left_out) -> list[int]:
    """The numbers of the episodes: tasks take turns, and those whose names are in left_out are
    skipped. Raises UserError if no task is left.
    """
    numbers = [n for n in range(cfg.episodes) if tasks[n % len(tasks)].name not in left_out]
    if not numbers:
        raise UserError("The first message of every task is too long: choose a larger --context.")
    return numbers


def leave_out_long(policy, tasks: list, cfg: Config, left_out: dict) -> None:
    """Adds the tasks whose first message does not fit into the context to left_out: name -> why."""
    for task in tasks:
        with env.Env(task, cfg.sandbox) as world:
            try:
                world.reset(cfg.episode, policy)
            except UserError as error:
                left_out[task.name] = str(error)
                print(f"left out {task.name}: {error}")


def seeds_of(cfg: Config, model: str | None, models: int, part: str) -> list[tuple]:
    """The config of each seed, with the name of its run, and the path of the model. models: their
    number. part: name of the suite, and of its tasks if it is not the whole suite.
    """
    configs = options.each_seed(cfg)
    for own in configs:
        own.model.model = model
        if cfg.suite:
            own.name = own.name or f"{SCRIPT}-{part}-{own.seed}"
        if cfg.suite or own.name and models > 1:
            own.name += f"/{model_name(own)}"
    return list(zip(configs, choose_models(SCRIPT, configs)))


def evaluate_model(cfg: Config, path, policy, roots: dict):
    """Makes or resumes the run of a seed. path: of the model; None for an endpoint. policy: the
    engine of an earlier seed, or None. roots: see read_suite. Returns the directory and the engine.
    """
    is_tiny = bool(path and path.is_tiny)
    left_out = {}
    may_lack = left_out if cfg.suite else None
    tasks, why = env.open_tasks(cfg.tasks, cfg.sandbox, is_tiny, may_lack, roots)
    for name, reason in left_out.items():
        print(f"left out {name}: {reason}")
    cfg.tasks.task = tuple(name for name in cfg.tasks.task if name not in left_out)
    if cfg.attempts:
        cfg.episodes = cfg.attempts * len(tasks)
    digests = env.digests(tasks, cfg.episode)
    run = store.begin_run(cfg, digests, path, lambda run: is_finished(run, tasks, cfg))
    if not run.finished:
        with store.recorded_end([run], run.dir):
            first = metrics.first_results(tasks, "evaluation")
            run.update_result(
                **first | {"selected_on_test": False, "split": metrics.split_of(tasks)},
                larger_is_better={task.name: task.higher_is_better for task in tasks},
                left_out=left_out,
            )
            console.print_facts(cfg, tasks, path, why)
            most = cfg.episodes * cfg.episode.max_turns
            tokens = most * cfg.episode.max_reply_tokens
            print(f"plan     {cfg.episodes} episodes, at most {most} replies and {tokens} tokens")
            if cfg.url or not policy:  # connections of an endpoint are of one event loop
                policy = open_engine(cfg, path, cfg.seed, cfg.concurrency)
            if cfg.suite:
                leave_out_long(policy, tasks, cfg, left_out)
                run.update_result(left_out=left_out)
            numbers = numbers_of(tasks, cfg, left_out)
            asyncio.run(evaluate(policy, tasks, numbers, cfg, run))
    console.outcome(run.dir)
    return run.dir, policy


def main() -> None:
    argv = sys.argv[1:]
    cfg = cli.parse_config(Config, argv)
    part, roots = "", {}
    if cfg.suite:
        given = read_suite(cfg.suite)
        cfg = cli.parse_config(Config, argv, given["settings"])
        roots = given["roots"]
        part = Path(cfg.suite).stem
        if [*cfg.tasks.task] != given["settings"].get("task"):
            part += f"-{value_text(cfg.tasks.task)[:100]}"
    options.check_values(cfg)
    parser = ArgumentParser(add_help=False)  # tyro keeps the last --model only
    parser.add_argument("--model", action="append")
    models = parser.parse_known_args(argv)[0].model or [cfg.model.model]
    plans = [seeds_of(cfg, model, len(models), part) for model in models]
    names = {own.name for plan in plans for own, _ in plan}
    if len(names) < len(models) * len(cfg.seed):
        raise UserError("Two models have the same name: give each a command and a --name.")
    directories = []
    for plan in plans:
        policy = None  # one engine for all seeds of a model
        for own, path in plan:
            where, policy = evaluate_model(own, path, policy, roots)
            directories.append(where)
        if policy and path:
            policy.close()
    if cfg.suite:
        print(report(given, [read_run(where) for where in directories]))
    elif len(directories) > 1:
        console.outcome(*directories)


if __name__ == "__main__":
    cli.one_sentence(main)
