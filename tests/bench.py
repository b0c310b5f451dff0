"""Measures what the design promises; `--write` also puts the table into tests/BENCHMARKS.md.

    python tests/bench.py env         sandboxes: steps, resets, forks, gradings, many episodes;
                                      MLGym's own shell too if $MLGYM_ROOT is a checkout
    python tests/bench.py soak        1,000 episodes in a row: memory, threads, files, containers
    python tests/bench.py train       a GRPO step beside TRL's at the same tokens (pip install trl)
    python tests/bench.py engine      tokens per second of the engine with an adapter, three ways
    python tests/bench.py agent       agents of several turns beside TRL's (pip install trl)
    python tests/bench.py sync        the trained adapter into the running engine, three ways
    python tests/bench.py rollout     episodes of several turns: continuous, lock-step, serial
    python tests/bench.py search      a grid of trees on one engine beside the same trees in turn
    python tests/bench.py rules       selection rules in a simulated world (--count: seeds)
    python tests/bench.py selection   the choice at the end of a search, simulated
    python tests/bench.py memory      peak memory of the loss; padding, recomputed layers
    python tests/bench.py objectives  every loss and advantage on the built-in tasks; an hour
    python tests/bench.py stability   200 steps with the defaults and without guard and KL; hours
    python tests/bench.py pretrained  SmolLM2 imitates, then GRPO, on two tasks; hours
    python tests/bench.py table       runs the tests of attacks and faults, writes tests/README.md

A section is a function in SECTIONS that returns (headline, rows); a row is (what, value, note).
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


def median_seconds(call, times=1, pause=0.0):
    """Median duration of a call; `pause` seconds before each are not counted."""
    found = []
    for _ in range(times):
        time.sleep(pause)
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def ms(value):
    return f"{1000 * value:.1f} ms"


def this_machine():
    threads = os.environ.get("OMP_NUM_THREADS")
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, OMP_NUM_THREADS={threads}, load {load:.1f}"


def run_script(script, *args, **options):
    """Runs a script of this folder in its own process: (its last line, None) or (None, why)."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        **options,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if "Error" in line] or lines
        return None, errors[-1][:200]
    return done.stdout.strip().splitlines()[-1], None


RESULT = "result: "  # begins the lines that `ask` waits for


class Contestant:
    """A script of this folder that runs on command; `last_error` says why it ended."""

    def __init__(self, script, *args):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        )
        self.results = []
        self.start = self.next_result()

    def run(self, what):
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self.results.append(self.next_result())

    def next_result(self):
        for line in self.process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        raise RuntimeError(self.last_error())

    def last_error(self):
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line] or lines or ["no message"]
        return errors[-1][:200]

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def compete(commands, rounds):
    """Runs the scripts of `commands` ({name: argv}) in turn, so that all see the same machine.

    rounds: a line of input for each. The first one warms up and is left out. Returns the results,
    {name: (start, [result, ...])}, and the errors of those that failed, {name: text}.
    """
    running = {}
    failed = {}
    try:
        for name, command in commands.items():
            try:
                running[name] = Contestant(*command)
            except RuntimeError as error:
                failed[name] = str(error)
        for what in rounds:
            for name in list(running):
                try:
                    running[name].run(what)
                    print(name, what, running[name].results[-1], file=sys.stderr, flush=True)
                except (RuntimeError, BrokenPipeError):
                    failed[name] = running[name].last_error()
                    running.pop(name).close()
        return {name: (c.start, c.results[1:]) for name, c in running.items()}, failed
    finally:
        for contestant in running.values():
            contestant.close()


def spread(values, digits=2):
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


# ---- env

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


def block(command):
    return f"```bash\n{command}\n```"


def play(task, backend, n, commands=EPISODE):
    """Plays an episode of EPISODE, or of other commands, without a model; returns its score."""
    from env import Env

    with Env(task, backend) as world:
        world.reset()
        for command in commands:
            world.step(block(command.format(n=n)))
        return world.score().value


def working_backends():
    """(names of the backends that work here, rows about the others)."""
    from flatlab.errors import UserError
    from flatlab.sandbox.sandbox import IMAGE, docker_problem, get_backend

    backends = []
    rows = []
    try:
        if get_backend("local").is_complete:
            backends.append("local")
    except UserError as error:
        rows.append(("local", "skipped", str(error)))
    if docker_problem(IMAGE):
        rows.append(("docker", "skipped", docker_problem(IMAGE)))
    else:
        backends.append("docker")
    return backends, rows


def sandbox_times(task, backend, numbers):
    """(seconds of a step, rows) of one sandbox and of 32 at once."""
    from env import Env
    from flatlab.episode.grading import grades

    grades.clear()
    world = Env(task, backend)
    first = median_seconds(world.reset)
    step = median_seconds(lambda: world.step(block("true")), 200, 0.02)
    reset = median_seconds(world.reset, 7, 1.0)
    world.step(block("echo a > a; mkdir b; echo c > b/c"))
    fork = median_seconds(lambda: world.fork().close(), 7, 1.0)

    def grade():
        world.step(block(EPISODE[2].format(n=next(numbers))))
        said = world.step(block("validate"))
        assert said.status == "validate", said.observation

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
        (f"{backend}: reset", ms(reset), "median of 7, a second apart"),
        (f"{backend}: fork", ms(fork), "median of 7"),
        (f"{backend}: write and validate", ms(grading), "two steps, one of them a grading"),
        (f"{backend}: 32 episodes at once", f"{many:.1f} s", busy),
    ]
    return step, rows


def env(args):
    """Overhead of the sandboxes that work here, and of MLGym's."""
    from flatlab.sandbox.sandbox import IMAGE
    from tasks import load_task

    task = load_task("titanic", "", "")
    numbers = itertools.count(3)
    backends, rows = working_backends()
    step = {}
    for backend in backends:
        step[backend], more = sandbox_times(task, backend, numbers)
        rows += more
    root = os.environ.get("MLGYM_ROOT")
    if "docker" in backends and root and shutil.which("docker"):
        said, why = run_script("bench_mlgym.py", root, IMAGE, timeout=120)
        if why:
            rows.append(("MLGym: one communicate(), `true`", "fails", why))
        else:
            theirs = float(said)
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


def our_containers():
    from flatlab.sandbox.backend import IMAGE
    from flatlab.sandbox.docker import docker_api, docker_problem

    if docker_problem(IMAGE):
        return []
    boxes = docker_api().containers(all=True, filters={"label": "flatlab.owner"})
    return [box for box in boxes if box["Labels"]["flatlab.owner"].endswith(f":{os.getpid()}")]


def disk_use(folders):
    """kB in folders, and kB that Docker holds in images and containers."""
    from flatlab.sandbox.backend import IMAGE
    from flatlab.sandbox.docker import docker_api, docker_problem

    blocks = 0
    for folder in folders:
        blocks += sum(path.lstat().st_blocks for path in folder.rglob("*"))
    found = {"kB in /tmp": blocks // 2}
    if not docker_problem(IMAGE):
        usage = docker_api().df()
        written = sum(box.get("SizeRw") or 0 for box in usage["Containers"] or [])
        found["kB in Docker"] = (usage["LayersSize"] + written) // 1024
    return found


def resources(disk=False):
    """What this process can leak: memory, threads, file descriptors, containers, folders."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    folders = list(Path("/tmp").glob("flatlab-*"))
    found = {
        "memory (kB)": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "containers": len(our_containers()),
        "folders in /tmp": len(folders),
    }
    if disk:
        found |= disk_use(folders)
    return found


def episodes_in_a_row(backend, count, say=lambda done: None, disk=False):
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
        say(n + 1)
    time.sleep(1)
    return begin, resources(disk)


def soak(args):
    """args.count episodes in a row without growth."""
    from flatlab.sandbox.sandbox import pick_backend

    def say(done):
        if done % 100 == 0:
            print(f"{done} episodes", file=sys.stderr, flush=True)

    backend, _ = pick_backend(args.backend, model_is_tiny=True)
    begin = time.perf_counter()
    before, after = episodes_in_a_row(backend, args.count, say, disk=True)
    took = time.perf_counter() - begin
    rows = []
    for name, value in before.items():
        rows.append((name, f"{value} -> {after[name]}", "after the first tenth, at the end"))
    return f"{args.count} episodes in {backend} sandboxes, {took:.0f} s", rows


# ---- train


def random_policy(folder, context=2048, sizes=None, **options):
    """A Policy on an untrained model, whose replies always reach their limit; and its folder."""
    import conftest
    from policy import ModelPath, Policy

    model = conftest.make_model(Path(folder) / "model", **(sizes or {}))
    policy = Policy(ModelPath(model, None, False), context=context, **options)
    make_endless(policy)
    return policy, model


def make_endless(policy):
    """From now on every reply of the policy reaches its limit."""
    policy.stop_tokens = set()
    add_request = policy.engine.add_request

    def endless(request_id, prompt, params):
        params.ignore_eos = True
        add_request(request_id, prompt, params)

    policy.engine.add_request = endless


STEP_EPISODES = 16
STEP_PROMPTS = 2
STEP_TOKENS = 256  # of a reply


def letter_share(text):
    return sum(c.isalpha() for c in text) / max(1, len(text))


async def one_reply(env, policy, *, seed, max_reply_tokens, **_):
    """Stands in for run_episode: one reply; its score is the share of letters in it."""
    from flatlab.episode.episode import Episode, Segment
    from flatlab.episode.grading import Score

    question = f"Write. {seed // 8 % 2}"
    prompt = policy.render([{"role": "user", "content": question}])
    reply = await policy.sample(prompt, max_reply_tokens, seed=seed)
    score = Score(0.5 + letter_share(reply.text), env.task.metric, "validation", True, "")
    segment = Segment(
        prompt + reply.tokens,
        [0] * len(prompt) + [1] * len(reply.tokens),
        [0.0] * len(prompt) + reply.logprobs,
    )
    turns = [{"status": "ok", "stop_reason": "length"}]
    return Episode(
        env.task.name, seed, status="submit", score=score, turns=turns, segments=[segment]
    )


def our_steps(folder, steps, compile):
    """(seconds of each step, of its sampling, log-prob difference, GiB) of grpo.py's functions."""
    import torch

    import grpo
    from flatlab.train.distributed import SingleProcess
    from tasks import load_task

    policy, _ = random_policy(folder, lora_rank=16, lora_alpha=32, context=512, compile=compile)
    task = load_task("titanic", "", "")
    dist = SingleProcess()
    cfg = grpo.Config()
    cfg.model.max_reply_tokens = STEP_TOKENS
    cfg = replace(
        cfg,
        group_size=STEP_EPISODES // STEP_PROMPTS,
        clip_low=0.2,
        clip_high=0.28,
        kl=0.05,
        micro_tokens=8192,
        lr=1e-4,
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr)
    grpo.run_episode = one_reply
    took = []
    sampling = []
    difference = 0.0

    async def run():
        nonlocal difference
        for step in range(steps):
            begin = time.perf_counter()
            plan = [task] * STEP_PROMPTS
            groups = await grpo.play_groups(policy, plan, cfg.group_size, cfg, step, dist)
            sampling.append(time.perf_counter() - begin)
            batch = grpo.make_batch(policy, groups, cfg, dist)
            row = grpo.update(policy, optimizer, batch, cfg, dist)
            policy.sync()
            took.append(time.perf_counter() - begin)
            difference = max(difference, row["logprob_diff_max"])

    asyncio.run(run())
    return took, sampling, difference, policy.peak_memory()


def train(args):
    """A step at equal tokens, without the first: ours, TRL with generate(), TRL with vLLM.

    With --only compiled our engine is compiled; vLLM within TRL is compiled as it is.
    """
    steps = args.steps + 1
    with tempfile.TemporaryDirectory() as folder:
        compiled = args.only == "compiled"
        took, sampling, difference, memory = our_steps(folder, steps, compiled)
        label = "ours, engine compiled" if compiled else "ours"
        ours = statistics.median(took[1:])
        share = statistics.median(s / t for s, t in zip(sampling[1:], took[1:]))
        rate = STEP_EPISODES * STEP_TOKENS / ours
        note = f"sampling {share:.0%}; {rate:.0f} tokens per second; peak memory {memory:.1f} GiB"
        rows = [
            (f"{label}: a step", f"{ours:.2f} s", note),
            ("ours: largest log-prob difference", f"{difference:.1g} nats", "all sampled tokens"),
        ]
        sizes = (steps, STEP_PROMPTS, STEP_EPISODES, STEP_TOKENS)
        for name, vllm in (("TRL with generate()", 0), ("TRL with vLLM in its process", 1)):
            model = Path(folder) / "model"
            said, why = run_script("bench_trl.py", model, *sizes, vllm, timeout=900, cwd=folder)
            if why:
                rows.append((name, "fails", why))
                continue
            result = json.loads(said)
            theirs = statistics.median(result["took"][1:])
            rows.append((f"{name}: a step", f"{theirs:.2f} s", result["note"]))
            rows.append(("ratio to ours", f"{theirs / ours:.1f} x", ""))
    sizes = f"{STEP_PROMPTS} groups of {STEP_EPISODES // STEP_PROMPTS}, {STEP_TOKENS} tokens each"
    model = "random Qwen3 of 0.8 M parameters, LoRA rank 16"
    return f"{this_machine()}; {model}, {sizes}, median of {args.steps} steps", rows


# ---- engine

ENGINES = {
    "vllm": "vLLM's own LoRA, from adapter files, eager",
    "eager": "ours, eager",
    "compiled": "ours, compiled",
}


def engine(args):
    """Tokens per second of the engine with an adapter: vLLM's own LoRA, ours, ours compiled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        import conftest
        from policy import TINY

        models = {
            "stand-in": TINY,
            "random, 0.8 M": conftest.make_model(Path(folder) / "model"),
        }
        for label, model in models.items():
            commands = {way: ("bench_engine.py", model, way) for way in ENGINES}
            done, failed = compete(commands, ["run"] * (args.steps + 1))
            rows += engine_rows(label, done, failed)
    sizes = "16 requests of 128 tokens"
    return f"{this_machine()}; {sizes}; median (range) of {args.steps} rounds in turn", rows


def engine_rows(label, done, failed):
    rows = [(f"{label}: {ENGINES[way]}", "fails", why) for way, why in failed.items()]
    for way, (start, results) in done.items():
        rates = [r["tokens"] / r["seconds"] for r in results]
        cpu = statistics.median(r["cpu_seconds"] for r in results)
        note = f"started in {start['start']:.0f} s; {cpu:.2f} CPU seconds a run"
        if way != "vllm" and "vllm" in done:
            ratios, cpu_ratio = compared(done["vllm"][1], results)
            note += f"; {spread(ratios)} x, {cpu_ratio:.2f} x in CPU seconds"
        rows.append((f"{label}: {ENGINES[way]}", f"{spread(rates, 0)} tokens/s", note))
    return rows


def compared(others, ours):
    """How many times slower the others' rounds are, one by one; the ratio of CPU seconds."""
    ratios = [theirs["seconds"] / own["seconds"] for theirs, own in zip(others, ours)]
    cpu = [theirs["cpu_seconds"] / own["cpu_seconds"] for theirs, own in zip(others, ours)]
    return ratios, statistics.median(cpu)


# ---- agent

AGENTS = {
    "ours": "ours",
    "compiled": "ours, engine compiled",
    "factory": "TRL environment_factory, a tool",
    "factory-async": "TRL environment_factory, an async tool",
    "rollout": "TRL rollout_func, commands in threads",
    "continuous": "TRL rollout_func, continuous batching",
}
AGENT_GOALS = {"factory": 4.0, "rollout": 1.5}


def agent(args):
    """A training step of agents with several turns whose commands wait: ours and TRL's."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        model = args.model
        if model == "tiny":
            import conftest

            model = conftest.make_model(Path(folder) / "model")
        floor = Contestant("bench_agent.py", model, 0, "floor")
        floor.close()
        least = floor.start
        parts = f"sampling {least['sampling']:.2f} s, training {least['training']:.2f} s"
        rows.append(("matrix products", f"{least['seconds']:.2f} s", f"{parts}; {least['note']}"))
        rounds = ["even"] * (args.steps + 1) + ["uneven"] * args.steps
        chosen = args.only.split(",") if args.only else AGENTS
        commands = {name: ("bench_agent.py", model, len(rounds), name) for name in chosen}
        done, failed = compete(commands, rounds)
        for name, why in failed.items():
            rows.append((AGENTS[name], "fails", why))
        even = {name: results[: args.steps] for name, (_, results) in done.items()}
        uneven = {name: results[args.steps :] for name, (_, results) in done.items()}
        rows += agent_rows("even", even, least["seconds"])
        rows += agent_rows("uneven", uneven, least["seconds"])
    shown = "random Qwen3 of 0.8 M parameters" if args.model == "tiny" else Path(model).name
    work = "16 rollouts of 4 turns of 24 tokens, then a step"
    return f"{this_machine()}; {shown}, {work}; median (range) of {args.steps} rounds in turn", rows


def agent_rows(waits, done, least):
    rows = []
    work = {(r["calls"], r["trained"]) for results in done.values() for r in results}
    for name, results in done.items():
        seconds = [r["seconds"] for r in results]
        cpu = statistics.median(r["cpu_seconds"] for r in results)
        last = results[-1]
        note = f"{cpu:.2f} CPU seconds, of them matrix products {least / cpu:.0%}"
        note += f"; {last['calls']} commands, {last['trained']} of {last['tokens']} tokens trained"
        if "sampling" in last:
            sampling = statistics.median(r["sampling"] for r in results)
            note += f"; sampling {sampling:.2f} s"
        elif len(work) > 1:
            note += "; no ratio: not the same work"
        elif "ours" in done:
            ratios, cpu_ratio = compared(results, done["ours"])
            note += f"; {spread(ratios)} x ours, {cpu_ratio:.1f} x in CPU seconds"
            goal = AGENT_GOALS.get(name)
            if goal:
                reached = "reached" if statistics.median(ratios) >= goal else "missed"
                note += f"; goal {goal:g} x {reached}"
        rows.append((f"{waits} waits: {AGENTS[name]}", f"{spread(seconds)} s", note))
    return rows


# ---- sync

LARGER = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
}


def sync(args):
    """The trained adapter into the engine: in place, through files, and merging alone."""
    rows = []
    for name, sizes in (("stand-in size", {}), ("36 M parameters", LARGER)):
        with tempfile.TemporaryDirectory() as folder:
            rows += sync_rows(name, sizes, folder)
    return f"{this_machine()}, medians", rows


def sync_rows(name, sizes, folder):
    import torch
    from vllm import EngineArgs, LLMEngine
    from vllm.lora.request import LoRARequest

    policy, _ = random_policy(folder, sizes=sizes, lora_rank=16, lora_alpha=32, context=512)
    options = {"enable_lora": True, "max_lora_rank": 16, "enforce_eager": True}
    model = policy.path.base
    vllm = LLMEngine.from_engine_args(EngineArgs(model, dtype="float32", **options))
    adapter = f"{folder}/adapter"
    with torch.no_grad():
        for p in policy.parameters():
            p.normal_(std=0.02)

    def through_files():
        policy.save(adapter)
        vllm.remove_lora(1)
        vllm.add_lora(LoRARequest("policy", 1, adapter))

    def merge():
        policy.model.merge_adapter()
        policy.model.unmerge_adapter()

    count = sum(p.numel() for p in policy.parameters()) / 1e6
    in_place = median_seconds(policy.sync, 20)
    note = (
        f"{count:.2f} M LoRA parameters; bit-exact: {policy.adapter_copy.largest_difference() == 0}"
    )
    files = median_seconds(through_files, 5)
    merging = median_seconds(merge, 5)
    return [
        (f"{name}: in place", ms(in_place), note),
        (f"{name}: save and reload", ms(files), f"{files / in_place:.0f} x"),
        (f"{name}: merge and unmerge", ms(merging), f"{merging / in_place:.0f} x"),
    ]


# ---- rollout

EPISODES = 16
TURNS = 4
TOKENS = 24  # of a turn


class Rollout:
    """16 episodes of 4 turns of 24 tokens. Commands are waits of 0.02 to 0.4 s without CPU use."""

    def __init__(self, policy):
        self.policy = policy
        self.start = policy.render([{"role": "user", "content": "x" * 300}])
        rng = random.Random(0)
        self.waits = []
        for _ in range(EPISODES):
            self.waits.append([rng.choice((0.02, 0.05, 0.4)) for _ in range(TURNS)])

    async def turn(self, tokens, e, t):
        sample = await self.policy.sample(tokens, TOKENS, seed=100 * e + t)
        return tokens + sample.tokens + self.policy.observation_tokens("result " * 4, False)

    async def episode(self, e, waits):
        tokens = [*self.start, e]
        for t in range(TURNS):
            tokens = await self.turn(tokens, e, t)
            await asyncio.sleep(self.waits[e][t] if waits else 0)

    async def continuous(self, episodes, waits):
        await asyncio.gather(*(self.episode(e, waits) for e in episodes))

    async def lock_step(self, combine):
        """All episodes take each turn together; combine: `max` or `sum` of their waits."""
        histories = [[*self.start, e] for e in range(EPISODES)]
        for t in range(TURNS):
            turns = [self.turn(tokens, e, t) for e, tokens in enumerate(histories)]
            histories = await asyncio.gather(*turns)
            await asyncio.sleep(combine(waits[t] for waits in self.waits))

    async def one_turn(self):
        """As many tokens in a single turn."""
        samples = []
        for e in range(EPISODES):
            samples.append(self.policy.sample([*self.start, e], TURNS * TOKENS, seed=e))
        await asyncio.gather(*samples)

    def seconds(self, function, *args):
        def once():
            self.policy.sync()  # a new version empties the prefix cache
            asyncio.run(function(*args))

        once()
        return median_seconds(once, 3)


def rollout(args):
    """Episodes of several turns whose commands take time, played in three ways."""
    with tempfile.TemporaryDirectory() as folder:
        policy, _ = random_policy(folder, lora_rank=8)
        runs = Rollout(policy)
        everyone = range(EPISODES)
        slowest = max(everyone, key=lambda e: sum(runs.waits[e]))
        batch = runs.seconds(runs.one_turn)
        engine = runs.seconds(runs.continuous, everyone, False)
        ours = runs.seconds(runs.continuous, everyone, True)
        together = runs.seconds(runs.lock_step, max)
        serial = runs.seconds(runs.lock_step, sum)
        alone = runs.seconds(runs.continuous, [slowest], True)
    rate = EPISODES * TURNS * TOKENS / ours
    bound = ours / max(engine, alone)
    idle = max(0.0, 1 - engine / ours)
    idle_together = max(0.0, 1 - engine / together)
    rows = [
        ("continuous, as grpo.py does it", f"{ours:.2f} s", f"{rate:.0f} tokens per second"),
        ("lock-step, commands at once", f"{together:.2f} s", f"{together / ours:.1f} x"),
        ("lock-step, commands in turn", f"{serial:.2f} s", f"{serial / ours:.1f} x"),
        ("the same turns, no waits", f"{engine:.2f} s", "model time"),
        ("as many tokens in one turn", f"{batch:.2f} s", f"{batch / engine:.0%} of model time"),
        (
            "the slowest episode alone",
            f"{alone:.2f} s",
            f"continuous takes {bound:.2f} x the bound",
        ),
        ("engine idle", f"{idle:.0%}", f"in lock-step {idle_together:.0%}"),
    ]
    return f"{this_machine()}; random Qwen3 of 0.8 M parameters, medians of 3", rows


# ---- memory


def peak(folder, tokens, vocabulary, way):
    """(MiB, seconds) of a forward and backward pass in a process of its own; see bench_peak.py."""
    import conftest

    model = Path(folder) / str(vocabulary)
    if not model.exists():
        conftest.make_model(model, vocabulary)
    said, why = run_script("bench_peak.py", model, tokens, way, timeout=600)
    if why:
        raise RuntimeError(why)
    mib, took = said.split()
    return float(mib), float(took)


def memory(args):
    """MiB that a forward and backward pass adds to the process, and its seconds."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary, tokens in itertools.product((2048, 32768), (2048, 4096, 8192)):
            mib, took = peak(folder, tokens, vocabulary, "chunked")
            try:
                whole_mib, whole_took = peak(folder, tokens, vocabulary, "whole")
                note = f"all logits at once: {whole_mib:.0f} MiB, {whole_took:.1f} s"
            except RuntimeError as error:
                note = f"all logits at once: fails, {error}"
            what = f"{tokens} tokens, vocabulary {vocabulary}"
            rows.append((what, f"{mib:.0f} MiB, {took:.1f} s", note))
        for way in ("packed", "padded", "recomputed"):
            mib, took = peak(folder, 8192, 2048, way)
            what = f"4 sequences of 512 to 2048 tokens, the first 256 in common, {way}"
            rows.append((what, f"{mib:.0f} MiB, {took:.1f} s", ""))
    return f"{this_machine()}; random Qwen3, hidden size 128, 4 layers, float32", rows


# ---- search


def search_grid(args):
    """A grid of trees on one engine beside the same trees in turn; each action waits a second."""
    import search

    class Waits(search.Attempt):
        def step(self, reply, timeout=None):
            self.sandbox.run("sleep 1", 10)
            return super().step(reply, timeout)

    search.Attempt = Waits
    tasks = ("titanic", "battleOfSexes")
    modes = ("none", "tail")

    def config(**changes):
        made = search.Config(nodes=6, **changes)
        made.model.model = "tiny"
        made.sandbox.backend = "local"
        return made

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        whole = config(sampling_mode=modes, name="grid", workers=4)
        whole.tasks.task = tasks
        grid, _, path, *_ = search.prepare(whole)
        policy = search.make_policy(whole, path)

        def run(trees, workers):
            begin = time.perf_counter()
            asyncio.run(search.search(trees, policy, workers))
            return time.perf_counter() - begin

        one = 0.0
        for task, mode in itertools.product(tasks, modes):
            single = config(sampling_mode=(mode,), workers=1)
            single.tasks.task = (task,)
            one += run(search.prepare(single)[0], 1)
        together = run(grid, 4)
        nodes = f"{sum(len(tree.finished) for tree in grid)} nodes"
    rows = [
        ("4 trees in turn, one node at a time", f"{one:.1f} s", nodes),
        ("the same grid, --workers 4", f"{together:.1f} s", nodes),
        ("ratio", f"{one / together:.1f} x", ""),
    ]
    return f"{this_machine()}; stand-in, local sandboxes, every action waits for a second", rows


# ---- objectives and stability

OBJECTIVES = {
    "grpo": "--loss grpo",
    "dr_grpo": "--loss dr_grpo --advantage group_nostd",
    "dapo": "--loss dapo",
    "gspo": "--loss gspo --epochs 2",
    "cispo": "--loss cispo",
    "rloo": "--advantage rloo",
    "ppo": "--advantage ppo",
    "tiered": "--reward tiered",
    "percentile": "--reward percentile",
    "binary": "--reward binary",
}
PRETRAINED = ("battleOfSexes", "titanic")
STABILITY = {
    "defaults": "",
    "no-guard-no-kl": "--guard off --kl 0",
    "no-guard-no-kl-twice-the-rate": "--guard off --kl 0 --lr 2e-3",
    "twice-the-rate": "--lr 2e-3",
}


def trained(name, flags):
    """Runs grpo.py in this folder, or finds it finished: (result.json, rows), or an error text."""
    command = [sys.executable, str(HERE.parent / "grpo.py"), *flags]
    command += ["--name", name, "--backend", "local"]
    done = subprocess.run(command, capture_output=True, text=True)
    folder = Path("logs") / name
    if done.returncode or not (folder / "result.json").exists():
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "result.json").read_text()), rows


def compare(variants, args, tasks):
    """A row per task and variant: untrained and last adapter on the same fresh seeds."""
    chosen = variants
    if args.only:
        chosen = {name: variants[name] for name in args.only.split(",")}
    cells = list(itertools.product(tasks, chosen))
    runs = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for task, label in cells:
            flags = f"--task {task} --model {args.model} --steps {args.steps} {chosen[label]}"
            for seed in args.seeds.split(","):
                words = f"{flags} --seed {seed} {args.flags}".split()
                job = pool.submit(trained, f"bench-{task}-{label}-{seed}", words)
                runs.setdefault((task, label), []).append(job)
    return [row_of_runs(*cell, [job.result() for job in runs[cell]]) for cell in cells]


def row_of_runs(task, label, found):
    done = [pair for pair in found if not isinstance(pair, str) and pair[0].get("final")]
    if not done:
        return f"{task}, {label}", "fails", str(found[0])[:200]
    finals = [result["final"] for result, _ in done]
    untrained = statistics.mean(final["untrained"]["score_mean"] for final in finals)
    last = statistics.mean(final["last"]["score_mean"] for final in finals)
    best = statistics.mean(final["best"]["score_mean"] for final in finals)
    differences = [final["last"]["difference"] for final in finals]
    spread = f" ± {statistics.stdev(differences):.3f}" if len(differences) > 1 else ""
    history = [row for _, rows in done for row in rows]
    alarms = [alarm for row in history for alarm in row["alarms"]]
    restores = sum("back to the adapter" in alarm for alarm in alarms)
    stops = sum(result["status"].startswith("stopped") for result, _ in done)
    highest_kl = max(row.get("kl", 0) for row in history)
    value = f"{untrained:.3f} -> {last:.3f} ({last - untrained:+.3f}{spread})"
    note = (
        f"{len(done)} of {len(found)} seeds; best adapter {best:.3f}; {restores} restores, "
        f"{stops} stops; highest KL {highest_kl:.2f}"
    )
    return f"{task}, {label}", value, note


def objectives(args):
    """Every loss and estimator, --steps steps, on both built-in tasks."""
    headline = f"{args.steps} steps, seeds {args.seeds}, {args.model}"
    return headline, compare(OBJECTIVES, args, ("titanic", "battleOfSexes"))


def stability(args):
    """The defaults, and the same without what holds a policy together."""
    headline = f"{args.steps} steps, seeds {args.seeds}, {args.model}"
    return headline, compare(STABILITY, args, ("titanic",))


# ---- a pretrained model


def pretrained(args):
    """The recipe of configs/grpo-cpu.yaml on two tasks, in this folder: imitation, then GRPO."""
    tool = HERE.parent / "tools"
    fetch = [sys.executable, str(tool / "get_smollm2.py")]
    model = subprocess.run(fetch, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    rows = []
    for task in PRETRAINED:
        if not Path(f"logs/demonstrations-{task}").exists():
            subprocess.run([sys.executable, tool / "demonstrations.py", "--task", task], check=True)
        gains = []
        for seed in args.seeds.split(","):
            words = f"{HERE.parent}/configs/grpo-cpu.yaml --task {task} --seed {seed}"
            words += f" --model {model} --sft logs/demonstrations-{task} {args.flags}"
            name = f"real-{task}-{seed}"
            found = trained(name, words.split())
            if isinstance(found, str):
                rows.append((f"{task}, seed {seed}", "fails", found))
                continue
            final = found[0]["final"]
            gains.append(final["best"]["score_mean"] - final["imitated"]["score_mean"])
            rows.append(row_of_pretrained(task, seed, final, *cost_of(name)))
        if len(gains) > 1:
            mean = statistics.mean(gains)
            error = statistics.stdev(gains) / len(gains) ** 0.5
            value = f"{mean:+.3f} ± {error:.3f}"
            note = f"{mean / error:.1f} standard errors over {len(gains)} seeds"
            rows.append((f"{task}, best - imitated", value, note))
    return f"SmolLM2-135M-Instruct, seeds {args.seeds}", rows


def row_of_pretrained(task, seed, final, minutes, tokens):
    def text(name):
        mean, error = final[name]["score_mean"], final[name]["score_stderr"]
        return f"{mean:.3f} ± {error:.3f} ({final[name]['valid_share']:.0%} valid)"

    value = " -> ".join(text(name) for name in ("untrained", "imitated", "best"))
    best = final["best"]
    note = (
        f"test {best['test_score_mean']:.3f} ± {best['test_score_stderr']:.3f}; best is step "
        f"{best['step']}; N = {final['n']}; {minutes:.0f} minutes, {tokens} tokens sampled by GRPO"
    )
    return f"{task}, seed {seed}", value, note


def cost_of(name):
    """(minutes from the first to the last file of a run, tokens of the replies of its steps)."""
    folder = Path("logs") / name
    seconds = (folder / "result.json").stat().st_mtime - (folder / "env.txt").stat().st_mtime
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = sum(row["tokens_per_second"] * row["seconds_sample"] for row in rows)
    return seconds / 60, round(tokens)


def selection(args):
    """The choice at the end of a search: by validation alone, or with the selection part."""
    import bench_selection

    return bench_selection.measured()


def attacks_and_faults(args):
    """The tests of attacks and faults; writes tests/README.md."""
    import marked

    return marked.marked(args)


def rules(args):
    """Selection rules in a simulation."""
    import bench_rules

    return bench_rules.rules(args)


# ---- main

SECTIONS = {
    "env": env,
    "soak": soak,
    "train": train,
    "engine": engine,
    "agent": agent,
    "sync": sync,
    "rollout": rollout,
    "search": search_grid,
    "rules": rules,
    "memory": memory,
    "objectives": objectives,
    "stability": stability,
    "pretrained": pretrained,
    "selection": selection,
    "table": attacks_and_faults,
}


def write(section, command, headline, lines):
    """Replaces the section in tests/BENCHMARKS.md, or adds it."""
    path = HERE / "BENCHMARKS.md"
    text = "# Benchmarks\n\nWritten by `python tests/bench.py <section> --write`.\n"
    if path.exists():
        text = path.read_text(encoding="utf-8")
    title = f"\n## {section}\n"
    about = f"`{command}`, {date.today()}, {platform.machine()}, {headline}"
    body = "\n".join(lines)
    before, _, rest = text.partition(title)
    _, mark, after = rest.partition("\n## ")
    path.write_text(f"{before}{title}\n{about}\n\n{body}\n{mark}{after}", encoding="utf-8")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    runs = "for objectives, stability and pretrained:"
    add("section", choices=SECTIONS)
    add("--write", action="store_true", help="write the table into tests/BENCHMARKS.md")
    add("--backend", default="auto", help="for soak")
    add("--count", type=int, default=1000, help="for soak: episodes; for rules: seeds")
    steps = "for train, engine, agent, objectives (5 if not given) and stability (200)"
    add("--steps", type=int, help=steps)
    add("--seeds", default="0,1,2", help=f"{runs} comma-separated seeds")
    add(
        "--model",
        default="tiny",
        help="not for pretrained; agent: instead of a random one",
    )
    add("--jobs", type=int, default=1, help=f"{runs} number of runs at a time")
    only = f"{runs} comma-separated names of variants; also for agent; train: compiled"
    add("--only", default="", help=only)
    add("--flags", default="", help=f"{runs} more flags of grpo.py")
    args = parser.parse_args()
    if args.steps is None:
        args.steps = 200 if args.section == "stability" else 5

    from flatlab import threads

    threads.configure()
    headline, rows = SECTIONS[args.section](args)
    lines = ["| what | measured | note |", "|---|---|---|"]
    for row in rows:
        lines.append(f"| {' | '.join(map(str, row))} |")
    print(f"{args.section}: {headline}")
    print("\n".join(lines))
    if args.write:
        write(args.section, "python tests/bench.py " + " ".join(sys.argv[1:]), headline, lines)


if __name__ == "__main__":
    main()
