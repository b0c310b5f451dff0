"""The sections `env` and `soak`: episodes without a model in real sandboxes."""

import itertools
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backends import containers_of, missing
from bench.measure import median_seconds, ms, run_module, this_machine
from helpers import block

# The sex rule with one mistake in row {n}, so that no artefact has been graded before.
EPISODE = [
    "ls",
    "head -3 data/train.csv",
    'awk -F, \'NR==1 {{print "id,survived"; next}} {{v = $3 == "female"; '
    'print $1 "," (NR == {n} ? 1 - v : v)}}\' data/test.csv > submission.csv',
    "validate",
    "submit",
]

# An agent that fails: exit codes, a background process that stays, and nothing to score.
FAILING = [
    "echo half > submission.part; exit 3",
    "python3 -c 'raise ValueError'",
    "sleep 3600 & kill -9 $$",
    "no_such_command",
    "validate",
    "submit",
]


def play(task, backend, n, commands=EPISODE):
    """Plays an episode of EPISODE, or of other commands, without a model; returns its score."""
    from env import Env

    with Env(task, backend) as world:
        world.reset()
        for command in commands:
            world.step(block(command.format(n=n)))
        return world.score().value


# ---- env


def sandbox_times(task, backend, numbers):
    """(seconds of a step, rows) of one sandbox and of 32 at once."""
    from env import Env
    from flatlab.task.grading import grades

    grades.clear()
    world = Env(task, backend)
    first = median_seconds(world.reset)
    step = median_seconds(lambda: world.step(block("true")), 200, 0.02)
    reset = median_seconds(world.reset, 7, 0.2)
    world.step(block("echo a > a; mkdir b; echo c > b/c"))

    def copy():
        with Env(task, backend) as twin:
            twin.restore(world.snapshot())

    copied = median_seconds(copy, 7, 0.2)

    def grade():
        world.step(block(EPISODE[2].format(n=next(numbers))))
        graded = world.step(block("validate"))
        assert graded.status == "validate", graded.observation

    grading = median_seconds(grade, 7, 0.5)
    world.close()
    grades.clear()
    cpu = machine_cpu()
    begin = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda n: play(task, backend, n), itertools.islice(numbers, 32)))
    many = time.perf_counter() - begin
    busy = f"5 steps and a grading each; {machine_cpu() - cpu:.1f} CPU seconds"
    rows = [
        (f"{backend}: first reset", ms(first), "to the first prompt"),
        (f"{backend}: one step, `true`", ms(step), "median of 200, 20 ms apart"),
        (f"{backend}: reset", ms(reset), "median of 7, 0.2 s apart"),
        (f"{backend}: copy to another sandbox", ms(copied), "median of 7"),
        (f"{backend}: write and validate", ms(grading), "two steps, one of them a grading"),
        (f"{backend}: 32 episodes at once", f"{many:.1f} s", busy),
    ]
    return step, rows


def env(args):
    """Overhead of the sandboxes that work here, and of MLGym's."""
    from flatlab.sandbox.client import IMAGE
    from tasks import load_task

    task = load_task("titanic", "", "")
    numbers = itertools.count(3)
    step = {}
    rows = []
    for backend in ("local", "docker"):
        if missing(backend):
            rows.append((backend, "skipped", missing(backend)))
            continue
        step[backend], more = sandbox_times(task, backend, numbers)
        rows += more
    root = os.environ.get("MLGYM_ROOT")
    if "docker" in step and root and shutil.which("docker"):
        seconds, error = run_module("mlgym_step", root, IMAGE, timeout=120)
        if error:
            rows.append(("MLGym: one communicate(), `true`", "fails", error))
        else:
            theirs = float(seconds)
            note = "median of 20, MLGym's own class and container"
            rows.append(("MLGym: one communicate(), `true`", ms(theirs), note))
            rows.append(("ratio to ours in docker", f"{theirs / step['docker']:.0f} x", ""))
    return this_machine(), rows


def machine_cpu():
    """CPU seconds that this machine has worked since it started."""
    first_line = Path("/proc/stat").read_text().split("\n")[0]
    values = [int(word) for word in first_line.split()[1:9]]
    idle, waiting = values[3:5]
    return (sum(values) - idle - waiting) / os.sysconf("SC_CLK_TCK")


# ---- soak


def disk_use(folders):
    """kB in folders, and kB that Docker holds in images and containers."""
    from flatlab.sandbox.backend import IMAGE
    from flatlab.sandbox.docker import docker_api, docker_problem

    blocks = 0
    for folder in folders:
        blocks += sum(path.lstat().st_blocks for path in folder.rglob("*"))
    used = {"kB in /tmp": blocks // 2}
    if not docker_problem(IMAGE):
        usage = docker_api().df()
        written = sum(box.get("SizeRw") or 0 for box in usage["Containers"] or [])
        used["kB in Docker"] = (usage["LayersSize"] + written) // 1024
    return used


def resources(disk=False):
    """Things that this process can leak: memory, threads, file descriptors, containers, folders."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    folders = list(Path("/tmp").glob("flatlab-*"))
    used = {
        "memory (kB)": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "containers": len(containers_of(os.getpid())),
        "folders in /tmp": len(folders),
    }
    if disk:
        used |= disk_use(folders)
    return used


def episodes_in_a_row(backend, count, report=lambda done: None, disk=False):
    """Plays `count` episodes, every tenth with an agent that fails.

    Returns the resources after the first tenth of the episodes and at the end.
    """
    from tasks import load_task

    task = load_task("titanic", "", "")
    for n in range(count):
        if n == max(1, count // 10):
            resources(disk)  # the measurement itself allocates (the docker package, ...)
            begin = resources(disk)
        play(task, backend, 3 + n % 300, FAILING if n % 10 == 5 else EPISODE)
        report(n + 1)
    time.sleep(1)
    return begin, resources(disk)


def soak(args):
    """args.count episodes in a row without growth."""
    from flatlab.sandbox.client import pick_backend

    def report(done):
        if done % 100 == 0:
            print(f"{done} episodes", file=sys.stderr, flush=True)

    backend, _ = pick_backend(args.backend, stand_in=True)
    begin = time.perf_counter()
    before, after = episodes_in_a_row(backend, args.count, report, disk=True)
    seconds = time.perf_counter() - begin
    rows = []
    for name, value in before.items():
        rows.append((name, f"{value} -> {after[name]}", "after the first tenth, at the end"))
    return f"{args.count} episodes in {backend} sandboxes, {seconds:.0f} s", rows
