"""Evaluation: N episodes of a model or an endpoint, on one task, several tasks or a suite.

    python evaluate.py --task titanic                                          the stand-in model
    python evaluate.py --task titanic --model logs/grpo-titanic-tiny-0/best    a trained adapter
    python evaluate.py --task titanic --url http://localhost:8000/v1 --model Qwen/Qwen3-8B
    python evaluate.py --suite builtin --model logs/my-run/best                a suite
    python viz.py logs/evaluate-*                                              compare evaluations

The same command again resumes an evaluation. Every episode has a sandbox of its own and a seed that
no training uses; the same --seed means the same episodes for every model, which are compared in
pairs. Nothing is selected, so both the validation and the test part are scored. A broken sandbox is
replaced once; after that the episode is a fault, which is left out and counted.

A suite is a preset in configs/suites: tasks, attempts, limits. Tasks that this machine cannot play
are left out. viz.py --suite compares models.
"""

import asyncio
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import env
from flatlab import options
from flatlab.errors import UserError
from flatlab.heartbeat import heartbeat, stoppable
from flatlab.model.path import model_name
from flatlab.numbers import value_text
from flatlab.options import Count, Resumable
from flatlab.runs import cli, start
from flatlab.runs.store import EPISODES
from flatlab.suites.attempts import read_suite
from flatlab.suites.report import suite_report
from flatlab.train import metrics
from flatlab.view import console
from flatlab.view.reader import read_run
from flatlab.world.episode import run_episode, stop_after_faults
from policy import open_engine, token_counter

FIRST_SEED = -(10**12)  # of the episodes with --seed 0; those of training are never that low


@dataclass(frozen=True)
class Config(options.RunOptions):
    """Options of a run. None: computed as written here, or as the comment says. 0 never means
    "default".
    """

    suite: str | None = None  # name in configs/suites or a file: its values replace the defaults
    attempts: Resumable[Count | None] = None  # episodes of each task, in place of --episodes
    episodes: Resumable[Count] = 64  # of all tasks together, which take turns
    concurrency: Resumable[Count] = 32  # episodes in flight at once
    ends_at_score: bool = False  # the first valid score ends an episode, as it ends a search's node
    # OpenAI-compatible endpoint to sample from, as http://localhost:8000/v1; key: $OPENAI_API_KEY
    url: Resumable[str | None] = None

    tasks: options.TaskOptions = options.TaskOptions()
    model: options.ModelOptions = options.ModelOptions()
    sandbox: options.SandboxOptions = options.SandboxOptions()
    episode: options.EpisodeOptions = options.EpisodeOptions()


async def evaluate(policy, tasks: list, numbers: list[int], cfg: Config, run) -> None:
    """Plays the episodes of these numbers that are not stored yet, and records each as it ends."""
    slots = asyncio.Semaphore(cfg.concurrency)
    rows = stored_rows(run)
    begun = time.monotonic()
    before = len(rows)
    earlier = run.result.get("seconds", 0)

    async def one(number: int) -> None:
        task = tasks[number % len(tasks)]
        seed = FIRST_SEED * (1 + cfg.seed) + number
        async with slots:
            for _ in range(2):
                world = env.Env(task, cfg.sandbox, seed, ends_at_score=cfg.ends_at_score)
                async with world:
                    episode = await run_episode(world, policy, cfg.episode, score_test=True)
                if episode.status != "fault":
                    break
        if cfg.url:
            episode.packed = b""  # tokens of an endpoint are not the model's
        episode.id = episode.when = f"{number}"
        run.save_episodes(episode.when, [episode])
        rows[number] = episode.row()
        spent = time.monotonic() - begun
        statuses = [row["status"] for row in rows.values()]
        if {*statuses} != {"fault"}:
            run.update_result(**result_json(rows, tasks), seconds=earlier + spent)
        done, planned = len(rows) - before, len(numbers) - before
        eta = spent / done * (planned - done) if 10 * done >= planned else None
        console.episode_made(episode, len(rows), len(numbers), eta)
        stop_after_faults(statuses, episode.fault)

    with heartbeat(lambda: f"episode  {len(rows)} of {len(numbers)} played"):
        async with asyncio.TaskGroup() as together:
            for number in numbers:
                if number not in rows:
                    together.create_task(one(number))
    run.update_result(**result_json(rows, tasks), status="finished")


def stored_rows(run) -> dict[int, dict]:
    """The rows of the episodes that this run has played before, by number. Faults are played
    again, so their rows are removed.
    """
    run.keep_rows(EPISODES, lambda row: row["status"] != "fault")
    return {int(row["id"]): row for row in run.rows(EPISODES)}


def result_json(rows: dict[int, dict], tasks: list) -> dict:
    """The numbers of result.json. value: on the test part if there is one."""
    numbers = metrics.evaluation([*rows.values()], tasks)
    return numbers | {"value": numbers.get("test_value_mean", numbers["value_mean"])}


# ------------------------------------------------------------------------------ start

SCRIPT = Path(__file__).stem  # a copy of this file makes runs of its own


def is_finished(run, tasks: list, cfg: Config) -> bool:
    """Returns whether all episodes are played that can be."""
    result = run.result
    numbers = episode_numbers(tasks, cfg, result.get("left_out", ()))
    return result.get("status") == "finished" and result["n"] + result["faults"] >= len(numbers)


def episode_numbers(tasks: list, cfg: Config, left_out) -> list[int]:
    """The numbers of the episodes: tasks take turns, and those whose names are in left_out are
    skipped. Raises UserError if no task is left.
    """
    numbers = [n for n in range(cfg.episodes) if tasks[n % len(tasks)].name not in left_out]
    if not numbers:
        raise UserError("The first message of every task is too long: choose a larger --context.")
    return numbers


def run_name(cfg: Config, suite_name: str, is_one_of_several: bool) -> str:
    """Name of a run; with a suite it ends with the model. suite_name: that of the suite, and of
    its tasks if it is not the whole suite.
    """
    name = start.run_name(cfg, SCRIPT, is_one_of_several)
    if not cfg.suite:
        return name
    if not cfg.name:
        name = f"{SCRIPT}-{suite_name}-{cfg.seed}"
    return f"{name}/{model_name(cfg)}"


def evaluate_seeds(cfgs: list[Config], model, roots: dict | None) -> list[Path]:
    """Makes or resumes the run of each seed. Returns their directories. model: a ModelPath. roots:
    see read_suite; None without a suite.
    """
    first = cfgs[0]
    console.model_line(first, model)
    left_out = {}
    may_lack = None if roots is None else left_out
    names, stand_in = first.tasks.task, model.stand_in
    tasks, sandbox = env.open_tasks(names, first.sandbox, stand_in, may_lack, roots)
    changes = {"task": tuple(name for name in names if name not in left_out)}
    changes |= {"backend": sandbox.backend}
    if first.attempts:
        changes |= {"episodes": first.attempts * len(tasks)}
    directories = []
    policy = None  # one engine for all seeds
    for cfg in (options.changed(cfg, **changes) for cfg in cfgs):
        has_ended = partial(is_finished, tasks=tasks, cfg=cfg)
        run = start.begin_run(cfg, tasks, model, has_ended)
        if not run.finished:
            with start.recorded([run], first_results(tasks, left_out)):
                most = cfg.episodes * cfg.episode.max_turns
                tokens = most * cfg.episode.max_reply_tokens
                print(f"plan     {cfg.episodes} episodes, at most {most} replies, {tokens} tokens")
                if cfg.url:  # connections of an endpoint are of one event loop
                    policy = open_engine(cfg, model, cfg.concurrency)
                counter = policy or token_counter(cfg, model)
                env.check_context(tasks, cfg, counter, may_lack)
                run.update_result(left_out=left_out)
                policy = policy or open_engine(cfg, model, cfg.concurrency)
                numbers = episode_numbers(tasks, cfg, left_out)
                asyncio.run(stoppable(evaluate(policy, tasks, numbers, cfg, run)))
        console.print_outcome(run.dir)
        directories.append(run.dir)
    return directories


def first_results(tasks: list, left_out: dict) -> dict:
    """The first content of result.json. left_out: name of a task -> why it is not played."""
    return metrics.first_results(tasks, "evaluation") | {
        "selected_on_test": False,
        "larger_is_better": {task.name: task.higher_is_better for task in tasks},
        "left_out": left_out,
    }


def main() -> None:
    argv = sys.argv[1:]
    cfgs = cli.parse_configs(Config, argv)
    suite, suite_name = {"roots": None}, ""
    if name := cfgs[0].suite:
        suite = read_suite(name)
        cfgs = cli.parse_configs(Config, argv, suite["settings"])
        suite_name = Path(name).stem
        names = cfgs[0].tasks.task
        if [*names] != suite["settings"].get("task"):
            suite_name += f"-{value_text(names)[:100]}"
    cfgs = [replace(cfg, name=run_name(cfg, suite_name, len(cfgs) > 1)) for cfg in cfgs]
    directories = evaluate_seeds(*start.complete_configs(cfgs), suite["roots"])
    if name:
        print(suite_report(suite, [read_run(where) for where in directories]))
    elif len(directories) > 1:
        console.print_outcome(*directories)


if __name__ == "__main__":
    cli.run(main)
