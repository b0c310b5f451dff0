"""Measures what the design promises. Each section prints a table; --write also puts it into tests/BENCHMARKS.md.

    python tests/bench.py env           sandboxes: steps, resets, forks, gradings, many episodes; beside MLGym's own shell
                                        when $MLGYM_ROOT is a checkout of MLGym and the docker command is there
    python tests/bench.py soak          1,000 episodes in a row: memory, threads, file descriptors, containers, disk
    python tests/bench.py train         one GRPO step beside TRL's GRPOTrainer at the same tokens (needs `pip install trl`)
    python tests/bench.py sync          the trained adapter into the running engine, three ways
    python tests/bench.py rollout       many episodes of several turns: continuous, in lock-step, one sandbox after the other
    python tests/bench.py search        a grid of trees on one engine beside the same trees one after the other
    python tests/bench.py memory        peak memory of the loss; padding, packing, recomputed layers
    python tests/bench.py objectives    every loss and advantage on the built-in tasks, before and after; an hour with 3 seeds
    python tests/bench.py stability     200 steps with the defaults, and without guard and KL, over 3 seeds; hours
    python tests/bench.py table         runs the tests of attacks and faults and writes their tables to tests/README.md

A section is a function in SECTIONS that returns (headline, rows); a row is (what, value, note).
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


# ---------------------------------------------------------------------------------------------- env


def seconds(call, times=1, pause=0.0):
    """Median seconds of a call; `pause` before each is not counted."""
    found = []
    for _ in range(times):
        time.sleep(pause)
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def ms(value):
    return f"{1000 * value:.1f} ms"


# The sex rule with one mistake in row {n}, so that every artefact is another one and no grade is known already.
EPISODE = [
    "ls",
    "head -3 data/train.csv",
    'awk -F, \'NR==1 {{print "id,survived"; next}} {{v = $3 == "female"; '
    'print $1 "," (NR == {n} ? 1 - v : v)}}\' data/test.csv > submission.csv',
    "validate",
    "submit",
]


def block(command):
    return f"```bash\n{command}\n```"


# An agent that fails: commands with exit codes, a background process that stays, and nothing to score.
FAILING = [
    "echo half > submission.part; exit 3",
    "python3 -c 'raise ValueError'",
    "sleep 3600 & kill -9 $$",
    "no_such_command",
    "validate",
    "submit",
]


def play(task, backend, n, commands=EPISODE):
    """One episode of EPISODE, or other commands, without a model; returns its score."""
    from env import Env

    with Env(task, backend) as world:
        world.reset()
        for command in commands:
            world.step(block(command.format(n=n)))
        return world.score().value


def env(args):
    """Overheads of the sandboxes that are there, and MLGym's."""
    from concurrent.futures import ThreadPoolExecutor

    from env import Env
    from flatlab.episode.grading import grades
    from flatlab.errors import UserError
    from flatlab.sandbox.sandbox import IMAGE, docker_problem, get_backend
    from tasks import load_task

    task, rows, step = load_task("titanic", "", ""), [], {}
    backends = []
    try:
        backends += ["local"] if get_backend("local").is_complete else []
    except UserError as error:
        rows.append(("local", "skipped", str(error)))
    backends += [] if docker_problem(IMAGE) else ["docker"]
    for backend in backends:
        grades.clear()
        first = Env(task, backend)
        rows.append(
            (
                f"{backend}: first reset, nothing started ahead",
                ms(seconds(first.reset)),
                "to the first prompt",
            )
        )
        step[backend] = {
            pause: seconds(lambda: first.step(block("true")), 200, pause) for pause in (0.02, 0.0)
        }
        rows.append(
            (
                f"{backend}: one step, `true`",
                ms(step[backend][0.02]),
                "median of 200, through bash, each 20 ms after the one before: a model writes that long at least",
            )
        )
        rows.append(
            (
                f"{backend}: one step, `true`, without a pause",
                ms(step[backend][0.0]),
                "median of 200",
            )
        )
        rows.append(
            (f"{backend}: reset", ms(seconds(first.reset, 7, 1.0)), "median of 7, a second apart")
        )
        first.step(block("echo a > a; mkdir b; echo c > b/c"))
        rows.append(
            (f"{backend}: fork", ms(seconds(lambda: first.fork().close(), 7, 1.0)), "median of 7")
        )
        numbers = iter(range(3, 10_000))

        def grade():
            first.step(block(EPISODE[2].format(n=next(numbers))))
            said = first.step(block("validate"))
            assert said.status == "validate", said.observation

        rows.append(
            (
                f"{backend}: write and validate",
                ms(seconds(grade, 7, 0.5)),
                "two steps, one of them a grading",
            )
        )
        first.close()
        grades.clear()
        begin, cpu = time.perf_counter(), machine_cpu()
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda n: play(task, backend, next(numbers) + n), range(32)))
        rows.append(
            (
                f"{backend}: 32 episodes at once",
                f"{time.perf_counter() - begin:.1f} s",
                f"5 steps and a grading each; the machine was busy for {machine_cpu() - cpu:.1f} CPU seconds",
            )
        )
    if "docker" in backends:
        theirs, why = mlgym_step()
        rows.append(("MLGym: one communicate(), `true`", ms(theirs) if theirs else "skipped", why))
        if theirs:
            rows.append(
                (
                    "ratio to ours in docker",
                    f"{theirs / step['docker'][0.02]:.0f} x",
                    f"without a pause {theirs / step['docker'][0.0]:.0f} x",
                )
            )
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", rows


def machine_cpu():
    """CPU seconds that this machine has worked so far."""
    values = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    return (sum(values) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


# MLGym's own class and its own container, in a process of its own. Packages that it imports and this measurement does not
# need are replaced by empty ones where they are missing.
MLGYM = r"""
import importlib, logging, statistics, sys, time, types
sys.path.insert(0, sys.argv[1])

class Empty(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__new__": lambda cls, *a, **k: object.__new__(cls)})
        setattr(self, name, made)
        return made

for name in ("gymnasium", "gymnasium.spaces", "simple_parsing", "simple_parsing.helpers", "simple_parsing.helpers.fields",
             "simple_parsing.helpers.flatten", "simple_parsing.helpers.serialization",
             "simple_parsing.helpers.serialization.serializable", "dotenv", "rich", "rich.logging"):
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = Empty(name)
from mlgym.environment import env, utils
world = env.MLGymEnv.__new__(env.MLGymEnv)
world.logger, world.returncode, world.bash_path = logging.getLogger("mlgym"), None, "/bin/bash"
world.container, _ = utils._get_non_persistent_container(f"flatlab-bench-{int(time.time())}", sys.argv[2], "docker", [], ["cpu_0"])
try:
    took = []
    for _ in range(21):
        begin = time.perf_counter()
        world.communicate("true", set_last_action=True)
        took.append(time.perf_counter() - begin)
    print(statistics.median(took[1:]))
finally:
    world.container.stdin.close()
    world.container.wait(20)
"""


def mlgym_step():
    """(median seconds of MLGymEnv.communicate, note) or (None, why not)."""
    import shutil

    from flatlab.sandbox.sandbox import IMAGE

    root = os.environ.get("MLGYM_ROOT")
    if not root or not shutil.which("docker"):
        return None, "needs $MLGYM_ROOT and the docker command"
    done = subprocess.run(
        [sys.executable, "-c", MLGYM, root, IMAGE], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["no message"])[-1]
    return float(done.stdout.split()[-1]), "median of 20, MLGym's own class and container"


# ---------------------------------------------------------------------------------------------- soak


def resources(disk=False):
    """What a process can leak: kB of memory, threads, file descriptors, containers and folders in /tmp of ours; with disk
    also kB in these folders, and kB that Docker holds in images and containers."""
    from flatlab.sandbox.backend import IMAGE
    from flatlab.sandbox.docker import docker_api, docker_problem

    memory = (
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    )
    boxes = (
        []
        if docker_problem(IMAGE)
        else docker_api().containers(all=True, filters={"label": "flatlab.owner"})
    )
    ours = [box for box in boxes if f":{os.getpid()}:" in box["Labels"]["flatlab.owner"]]
    folders, more = list(Path("/tmp").glob("flatlab-*")), {}
    if disk:
        files = [path.lstat().st_blocks // 2 for folder in folders for path in folder.rglob("*")]
        more = {"kB in /tmp": sum(files)}
        if not docker_problem(IMAGE):
            usage = docker_api().df()
            more["kB in Docker"] = (
                usage["LayersSize"]
                + sum(box.get("SizeRw") or 0 for box in usage["Containers"] or [])
            ) // 1024
    return {
        "memory (kB)": memory,
        "threads": len(os.listdir("/proc/self/task")),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "containers": len(ours),
        "folders in /tmp": len(folders),
        **more,
    }


def episodes_in_a_row(backend, count, say=lambda done: None, disk=False):
    """Plays `count` episodes, every tenth with an agent that fails; returns resources after the first tenth and at the end."""
    from tasks import load_task

    task = load_task("titanic", "", "")
    for n in range(count):
        if n == max(1, count // 10):
            resources(disk)  # what asking takes for itself (the docker package, ...) is no growth
            begin = resources(disk)
        play(task, backend, 3 + n % 300, FAILING if n % 10 == 5 else EPISODE)
        say(n + 1)
    from flatlab.sandbox.warm_pool import WARM_POOL

    WARM_POOL.close()
    time.sleep(1)
    return begin, resources(disk)


def soak(args):
    """args.count episodes in a row without growth."""
    from flatlab.sandbox.sandbox import pick_backend

    backend, begin = pick_backend(args.backend, model_is_tiny=True)[0], time.perf_counter()
    before, after = episodes_in_a_row(
        backend,
        args.count,
        lambda n: n % 100 or print(f"{n} episodes", file=sys.stderr, flush=True),
        disk=True,
    )
    rows = [
        (name, f"{before[name]} -> {after[name]}", "after the first tenth, at the end")
        for name in before
    ]
    return (
        f"{args.count} episodes in {backend} sandboxes, {time.perf_counter() - begin:.0f} s",
        rows,
    )


# ---------------------------------------------------------------------------------------------- the trainer


def random_policy(folder, context=2048, sizes=None, **options):
    """A Policy on an untrained model, and the model's folder. Replies go on to their limit: no token ends them."""
    import conftest
    from policy import ModelPath, Policy

    model = conftest.make_model(Path(folder) / "model", **(sizes or {}))
    policy = Policy(ModelPath(model, None, False), context=context, **options)
    make = policy._params

    def endless(*args):
        params = make(*args)
        params.ignore_eos, params.stop_token_ids = True, []
        return params

    policy._params = endless
    return policy, model


LETTERS, PROMPTS, REPLY = 16, 2, 256  # episodes and prompts of a step, tokens of a reply


def letters(text):
    return sum(c.isalpha() for c in text) / max(1, len(text))


def ours_step(folder, steps):
    """Seconds of each step of grpo.py's own functions: 2 groups of 8 replies of 256 tokens, reward: share of letters."""
    import asyncio
    from dataclasses import replace

    import torch

    import grpo
    from flatlab.episode.episode import Episode, Segment
    from flatlab.episode.grading import Score
    from flatlab.train.distributed import Alone
    from tasks import load_task

    policy, _ = random_policy(folder, lora_rank=16, lora_alpha=32, context=512)
    task, job = load_task("titanic", "", ""), Alone()
    cfg = replace(
        grpo.Config(),
        max_reply_tokens=REPLY,
        group_size=LETTERS // PROMPTS,
        clip_low=0.2,
        clip_high=0.28,
        kl=0.05,
        micro_tokens=8192,
        lr=1e-4,
    )

    async def reply(task, policy, *, seed, max_reply_tokens, **_):
        prompt = policy.render([{"role": "user", "content": f"Write. {seed // 8 % 2}"}])
        s = await policy.sample(prompt, max_reply_tokens, seed=seed)
        score = Score(0.5 + letters(s.text), task.metric, "validation", True, "")
        return Episode(
            task.name,
            seed,
            status="submit",
            score=score,
            turns=[{"status": "ok", "stop_reason": "length"}],
            segments=[
                Segment(
                    prompt + s.tokens,
                    [0] * len(prompt) + [1] * len(s.tokens),
                    [0.0] * len(prompt) + s.logprobs,
                )
            ],
        )

    grpo.env.run_episode = reply
    optimizer, took, gap = torch.optim.AdamW(policy.parameters(), lr=cfg.lr), [], 0.0

    async def run():
        nonlocal gap
        for step in range(steps):
            begin = time.perf_counter()
            groups = await grpo.play_groups(
                policy, [task] * PROMPTS, cfg.group_size, cfg, step, job
            )
            sampled = time.perf_counter()
            row = grpo.update(
                policy, optimizer, grpo.make_batch(policy, groups, cfg, job), cfg, job
            )
            policy.sync()
            took.append((time.perf_counter() - begin, sampled - begin))
            gap = max(gap, row["logprob_gap_max"])

    asyncio.run(run())
    return took, gap, policy.peak_memory()


# TRL in a process of its own; prints seconds per step as JSON. argv: model folder, steps, prompts, episodes, tokens, vllm?
TRL = r"""
import json, sys, time
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
model, steps, prompts, episodes, tokens, vllm = sys.argv[1], *map(int, sys.argv[2:])
lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM",
                  target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
took = []
class Clock(TrainerCallback):
    def on_step_begin(self, *a, **k): self.begin = time.perf_counter()
    def on_step_end(self, *a, **k): took.append(time.perf_counter() - self.begin)
def reward(completions, **_):
    text = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(x.isalpha() for x in t) / max(1, len(t)) for t in text]
options = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3) if vllm else {}
config = GRPOConfig(output_dir="trl", per_device_train_batch_size=episodes, num_generations=episodes // prompts, max_steps=steps,
                    max_completion_length=tokens, learning_rate=1e-4, beta=0.05, temperature=1.0, bf16=False, use_cpu=not torch.cuda.is_available(),
                    report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
                    generation_kwargs={"ignore_eos": True} if vllm else {"min_new_tokens": tokens}, **options)
data = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Write. {i}"}] for i in range(prompts * (steps + 1))]})
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, peft_config=lora)
trainer.add_callback(Clock())
trainer.train()
import resource, trl
memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("\n" + json.dumps({"took": took, "what": f"TRL {trl.__version__}; peak memory {memory / 2 ** 30:.1f} GiB"}))
"""


def trl_step(model, steps, vllm):
    """(seconds of each step, version and memory) or (None, the error's last line)."""
    import json
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                TRL,
                model,
                str(steps),
                str(PROMPTS),
                str(LETTERS),
                str(REPLY),
                str(int(vllm)),
            ],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if "Error" in line] or [
            "no message"
        ]
        return None, lines[-1][:200]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return result["took"], result["what"]


def train(args):
    """A step at equal tokens, first step left out; ours, TRL with transformers' generate, TRL with vLLM in its process."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        took, gap, memory = ours_step(folder, args.steps + 1)
        model = str(Path(folder) / "model")
        ours = statistics.median(t for t, _ in took[1:])
        share = statistics.median(s / t for t, s in took[1:])
        rows = [
            (
                "ours: a step",
                f"{ours:.2f} s",
                f"sampling {share:.0%}; {LETTERS * REPLY / ours:.0f} tokens per second; peak memory "
                f"{memory:.1f} GiB, KV cache of the engine included",
            ),
            (
                "ours: largest gap of engine and trainer",
                f"{gap:.1g} nats",
                "over all sampled tokens",
            ),
        ]
        for name, vllm in (
            ("TRL, generate of transformers", False),
            ("TRL, vLLM in its process", True),
        ):
            theirs, what = trl_step(model, args.steps + 1, vllm)
            if theirs:
                median = statistics.median(theirs[1:])
                rows += [
                    (f"{name}: a step", f"{median:.2f} s", what),
                    ("ratio to ours", f"{median / ours:.1f} x", ""),
                ]
            else:
                rows.append((name, "fails", what))
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; random Qwen3 of 0.8 M parameters, LoRA rank 16, {PROMPTS} groups "
        f"of {LETTERS // PROMPTS}, {REPLY} tokens each, median of {args.steps} steps"
    ), rows


def sync(args):
    """The trained adapter into the engine: in place, through files, and what merging alone would take."""
    import tempfile

    import torch
    from vllm.lora.request import LoRARequest

    rows = []
    for name, sizes in (
        ("stand-in size", {}),
        (
            "36 M parameters",
            {
                "hidden_size": 512,
                "num_hidden_layers": 12,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 64,
                "intermediate_size": 1536,
            },
        ),
    ):
        with tempfile.TemporaryDirectory() as folder:
            policy, _ = random_policy(folder, sizes=sizes, lora_rank=16, lora_alpha=32, context=512)
            with torch.no_grad():
                for p in policy.parameters():
                    p.normal_(std=0.02)
            count = sum(p.numel() for p in policy.parameters())
            inplace = seconds(policy.sync, 20)
            exact = all(
                torch.equal(a_slot, a) and torch.equal(b_slot, b * scale)
                for a_slot, b_slot, a, b, scale in policy._slots.copies
            )
            manager = policy.engine.model_executor.driver_worker.model_runner.lora_manager

            def through_files():
                policy.save(f"{folder}/adapter")
                manager.remove_adapter(1)
                manager.add_adapter(LoRARequest("policy", 1, f"{folder}/adapter"))

            def merge():
                policy.model.merge_adapter()
                policy.model.unmerge_adapter()

            files, merging = seconds(through_files, 5), seconds(merge, 5)
            rows += [
                (
                    f"{name}: in place",
                    ms(inplace),
                    f"{count / 1e6:.2f} M LoRA parameters; bit-exact: {exact}",
                ),
                (f"{name}: save and reload", ms(files), f"{files / inplace:.0f} x"),
                (f"{name}: merge and unmerge alone", ms(merging), f"{merging / inplace:.0f} x"),
            ]
            del policy
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians", rows


EPISODES, TURNS, TOKENS = 16, 4, 24


def rollout(args):
    """16 episodes of 4 turns, 24 tokens each; a command takes 0.02 to 0.4 s. The commands are waits: they need no core."""
    import asyncio
    import random
    import tempfile

    waits = [
        [random.Random(f"{e} {t}").choice((0.02, 0.05, 0.4)) for t in range(TURNS)]
        for e in range(EPISODES)
    ]
    with tempfile.TemporaryDirectory() as folder:
        policy, _ = random_policy(folder, lora_rank=8)
        start = policy.render([{"role": "user", "content": "x" * 300}])

        def turn(tokens, e, t):
            return policy.sample(tokens, TOKENS, seed=100 * e + t)

        def after(tokens, sample):
            return tokens + sample.tokens + policy.observation_tokens("result " * 4, False)

        async def continuous(wait=True, episodes=range(EPISODES)):
            async def episode(e):
                tokens = start + [e]
                for t in range(TURNS):
                    tokens = after(tokens, await turn(tokens, e, t))
                    await asyncio.sleep(waits[e][t] if wait else 0)

            await asyncio.gather(*map(episode, episodes))

        async def lockstep(serial):
            all_tokens = [start + [e] for e in range(EPISODES)]
            for t in range(TURNS):
                samples = await asyncio.gather(
                    *(turn(tokens, e, t) for e, tokens in enumerate(all_tokens))
                )
                all_tokens = [after(tokens, s) for tokens, s in zip(all_tokens, samples)]
                await asyncio.sleep((sum if serial else max)(w[t] for w in waits))

        async def raw():
            await asyncio.gather(
                *(policy.sample(start + [e], TURNS * TOKENS, seed=e) for e in range(EPISODES))
            )

        def measure(what, *args):
            def once():
                policy.sync()  # a new version: nothing is found in the prefix cache
                asyncio.run(what(*args))

            once()
            return seconds(once, 3)

        batch, engine = measure(raw), measure(continuous, False)
        ours, threads, serial = (
            measure(continuous),
            measure(lockstep, False),
            measure(lockstep, True),
        )
        slowest = max(range(EPISODES), key=lambda e: sum(waits[e]))
        alone = measure(continuous, True, [slowest])
    total = EPISODES * TURNS * TOKENS
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; random Qwen3 of 0.8 M parameters, medians of 3"
    ), [
        (
            "continuous, as grpo.py does it",
            f"{ours:.2f} s",
            f"{total / ours:.0f} tokens per second",
        ),
        ("lock-step, commands at once", f"{threads:.2f} s", f"{threads / ours:.1f} x"),
        (
            "lock-step, one command after the other",
            f"{serial:.2f} s",
            f"{serial / ours:.1f} x, as in TRL's GRPOTrainer",
        ),
        ("the same turns, no command waits", f"{engine:.2f} s", "model time"),
        (
            "as many tokens in one turn",
            f"{batch:.2f} s",
            f"raw batch; turns reach {batch / engine:.0%} of its throughput",
        ),
        (
            "the slowest episode alone",
            f"{alone:.2f} s",
            f"{sum(waits[slowest]):.2f} s of it commands; continuous / max(model, slowest episode) = "
            f"{ours / max(engine, alone):.2f}",
        ),
        (
            "engine idle",
            f"{max(0.0, 1 - engine / ours):.0%}",
            f"of the continuous run; the lock-step one: {max(0.0, 1 - engine / threads):.0%}",
        ),
    ]


# Peak memory in a process of its own. argv: folder, tokens, vocabulary, way
PEAK = r"""
import resource, sys, time, torch
folder, tokens, vocabulary, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import conftest
from policy import Policy
torch.manual_seed(0)
policy = Policy.__new__(Policy)
policy.device, policy.dtype, policy.temperature, policy.packing, policy.value_head = "cpu", torch.float32, 1.0, way == "packed", None
policy._build_trainer(folder, 8, 16, way == "recomputed", False, "cpu")
count = 4 if way in ("padded", "packed", "recomputed") else tokens // 1024
lengths = [tokens // 4 * k // 4 for k in (1, 2, 3, 4)] if way in ("padded", "packed", "recomputed") else [1024] * count
batch = [(torch.randint(0, 250, (n,)).tolist(), [0] + [1] * (n - 1)) for n in lengths]
policy.logprobs(batch[:1])[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
if way == "whole":
    ids = torch.tensor([tokens for tokens, _ in batch])
    logits = policy.model(ids).logits[:, :-1].float()
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
else:
    logp, _ = policy.logprobs(batch)
logp.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, time.perf_counter() - begin)
"""


def peak(folder, tokens, vocabulary, way):
    """(MiB, seconds) as text, of a forward and backward pass in a process of its own."""
    import conftest

    model = f"{folder}/{vocabulary}"
    if not Path(model).exists():
        conftest.make_model(Path(model), vocabulary)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, model, str(tokens), str(vocabulary), way],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE}", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        return f"fails: {done.stderr.strip().splitlines()[-1][:100]}", ""
    mib, took = map(float, done.stdout.split()[-2:])
    return f"{mib:.0f} MiB", f"{took:.1f} s"


def memory(args):
    """MiB that a forward and backward pass adds to the process, and its seconds."""
    import tempfile

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary in (2048, 32768):
            for tokens in (2048, 4096, 8192):
                chunked, whole = (
                    peak(folder, tokens, vocabulary, "chunked"),
                    peak(folder, tokens, vocabulary, "whole"),
                )
                rows.append(
                    (
                        f"{tokens} tokens, vocabulary {vocabulary}",
                        f"{chunked[0]}, {chunked[1]}",
                        f"all logits at once: {whole[0]}, {whole[1]}",
                    )
                )
        for way in ("padded", "packed", "recomputed"):
            found = peak(folder, 8192, 2048, way)
            rows.append(
                (f"4 sequences of 512 to 2048 tokens, {way}", f"{found[0]}, {found[1]}", "")
            )
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; random Qwen3, hidden 128, 4 layers, fp32",
        rows,
    )


def trained(name, *flags):
    """Runs grpo.py in the current folder, or finds it finished there. Returns its result.json and rows. A thread that is
    bound to some of the cores shares them with nobody: engines that spin on the same core wait for each other."""
    import json

    mine, every = sorted(os.sched_getaffinity(0)), os.sched_getaffinity(os.getpid())
    few = (
        {"OMP_NUM_THREADS": str(len(mine)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))}
        if len(mine) < len(every)
        else {}
    )
    process = subprocess.run(
        [
            sys.executable,
            str(HERE.parent / "grpo.py"),
            "--name",
            name,
            "--backend",
            "local",
            *flags,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | few,
    )
    where = Path("logs") / name
    if not (where / "result.json").exists():
        return None, process.stderr.strip().splitlines()[-1:]
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    return json.loads((where / "result.json").read_text()), rows


def table(variants, args, tasks, steps):
    """A row per task and variant: held-out score before and after (best adapter, seeds of its own), means over the seeds."""
    from concurrent.futures import ThreadPoolExecutor

    rows, chosen = [], [v for v in variants if not args.only or v[0] in args.only.split(",")]
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[n :: args.jobs]) or {cores[n % len(cores)]} for n in range(args.jobs)]
    with ThreadPoolExecutor(
        args.jobs, initializer=lambda: os.sched_setaffinity(0, shares.pop())
    ) as pool:  # of the thread
        runs = {
            (task, label): [
                pool.submit(
                    trained,
                    f"bench-{task}-{label.replace(', ', '-').replace(' ', '-')}-{seed}",
                    "--task",
                    task,
                    "--model",
                    args.model,
                    "--steps",
                    str(steps),
                    "--seed",
                    seed,
                    *flags,
                    *args.flags.split(),
                )
                for seed in args.seeds.split(",")
            ]
            for task in tasks
            for label, flags in chosen
        }
    for task in tasks:
        for label, flags in chosen:
            found = [run.result() for run in runs[task, label]]
            done = [(result, history) for result, history in found if result and "after" in result]
            if not done:
                rows.append((f"{task}, {label}", "fails", str(found[0][1])[:200]))
                continue
            before, after = ([r[when]["mean"] for r, _ in done] for when in ("before", "after"))
            last = [
                [s for s in history if "eval_score_mean" in s][-1]["eval_score_mean"]
                for _, history in done
            ]
            gains = [b - a for a, b in zip(before, after)]
            spread = f" ± {statistics.stdev(gains):.3f}" if len(gains) > 1 else ""
            restores = sum(
                "back to the adapter" in a
                for _, history in done
                for s in history
                for a in s["alarms"]
            )
            stops = sum(r["status"].startswith("stopped") for r, _ in done)
            rows.append(
                (
                    f"{task}, {label}",
                    f"{statistics.mean(before):.3f} -> {statistics.mean(after):.3f} ({statistics.mean(gains):+.3f}{spread})",
                    f"{len(done)} of {len(found)} seeds; last adapter {statistics.mean(last):.3f}; {restores} restores, {stops} stops; "
                    f"most KL {max(s.get('kl', 0) for _, history in done for s in history):.2f}",
                )
            )
    return rows


OBJECTIVES = [
    ("grpo", "--loss grpo"),
    ("dr_grpo", "--loss dr_grpo --advantage group_nostd"),
    ("dapo", "--loss dapo"),
    ("gspo", "--loss gspo --epochs 2"),
    ("cispo", "--loss cispo"),
    ("rloo", "--advantage rloo"),
    ("ppo", "--advantage ppo"),
    ("tiered", "--reward tiered"),
    ("percentile", "--reward percentile"),
    ("binary", "--reward binary"),
]


# ---------------------------------------------------------------------------------------------- the search


def search_grid(args):
    """A grid of trees on one engine beside the same trees one after the other, with the real engine, sandboxes and
    stand-in. Every action of a node waits for a second in its sandbox, as a program that loads or trains does."""
    import asyncio
    import tempfile
    from dataclasses import replace
    from itertools import product

    import search

    class Waits(search.Attempt):
        def step(self, reply, timeout=None):
            self.sandbox.run("sleep 1", 10)
            return super().step(reply, timeout)

    search.Attempt, here, took = Waits, os.getcwd(), {}
    cells = list(product(("titanic", "battleOfSexes"), ("none", "tail"), (0,)))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            config = search.Config(model="tiny", backend="local", nodes=6, max_actions=6)
            whole = replace(
                config,
                task=("titanic", "battleOfSexes"),
                sampling_mode=("none", "tail"),
                name="grid",
                workers=4,
            )
            grid, _, path, *_ = search.prepare(whole)  # which also fills in what is left open
            policy = search.make_policy(whole, path)

            def run(trees, workers):
                begin = time.perf_counter()
                asyncio.run(search.search(trees, policy, workers))
                return time.perf_counter() - begin

            alone = [
                search.prepare(
                    replace(config, task=(task,), sampling_mode=(mode,), seed=(seed,), workers=1)
                )[0]
                for task, mode, seed in cells
            ]
            took["one"] = sum(run(trees, 1) for trees in alone)
            took["grid"] = run(grid, 4)
            nodes = sum(len(t.finished) for t in grid)
        finally:
            os.chdir(here)
    rows = [
        (
            f"{len(cells)} trees one after the other, a node at a time",
            f"{took['one']:.1f} s",
            f"{nodes} nodes",
        ),
        ("the same grid, --workers 4", f"{took['grid']:.1f} s", f"{nodes} nodes"),
        ("ratio", f"{took['one'] / took['grid']:.1f} x", ""),
    ]
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; stand-in, local sandboxes, every action waits for a second",
        rows,
    )


def objectives(args):
    """Every loss and estimator, --steps steps, on titanic and battleOfSexes."""
    variants = [(label, flags.split()) for label, flags in OBJECTIVES]
    return f"{args.steps} steps, seeds {args.seeds}, {args.model}", table(
        variants, args, ("titanic", "battleOfSexes"), args.steps
    )


def attacks_and_faults(args):
    """The tests of attacks and faults; writes tests/README.md."""
    import marked

    return marked.marked(args)


def stability(args):
    """The defaults, and the same without what holds a policy together."""
    variants = [
        ("defaults", []),
        ("no guard no KL", ["--guard", "off", "--kl", "0"]),
        ("no guard no KL twice the rate", ["--guard", "off", "--kl", "0", "--lr", "2e-3"]),
        ("twice the rate", ["--lr", "2e-3"]),
    ]
    return f"{args.steps} steps, seeds {args.seeds}, {args.model}", table(
        variants, args, ("titanic",), args.steps
    )


# ---------------------------------------------------------------------------------------------- main

SECTIONS = {
    "objectives": objectives,
    "stability": stability,
    "env": env,
    "soak": soak,
    "train": train,
    "sync": sync,
    "rollout": rollout,
    "memory": memory,
    "search": search_grid,
    "table": attacks_and_faults,
}


def write(section, command, headline, lines):
    """Replaces the section in tests/BENCHMARKS.md, or adds it."""
    path = HERE / "BENCHMARKS.md"
    text = (
        path.read_text(encoding="utf-8")
        if path.exists()
        else "# Benchmarks\n\nWritten by `python tests/bench.py <section> --write`.\n"
    )
    new = (
        f"\n## {section}\n\n`{command}`, {date.today()}, {platform.machine()}, {headline}\n\n"
        + "\n".join(lines)
        + "\n"
    )
    head, found, rest = text.partition(f"\n## {section}\n")
    tail = rest[rest.index("\n## ") :] if "\n## " in rest else ""
    path.write_text(head + new + tail, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--write", action="store_true", help="into tests/BENCHMARKS.md")
    parser.add_argument("--backend", default="auto", help="of soak")
    parser.add_argument(
        "--steps", type=int, default=5, help="of train, objectives (20 or more), stability (200)"
    )
    parser.add_argument("--seeds", default="0,1,2", help="of objectives and stability")
    parser.add_argument("--model", default="tiny", help="of objectives and stability")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="of objectives and stability: so many runs at a time, each on cores of its own",
    )
    parser.add_argument(
        "--only",
        default="",
        help="of objectives and stability: names of variants, comma between them",
    )
    parser.add_argument(
        "--flags", default="", help="of objectives and stability: more flags of grpo.py"
    )
    parser.add_argument("--count", type=int, default=1000, help="of soak")
    args = parser.parse_args()
    headline, rows = SECTIONS[args.section](args)
    lines = ["| what | measured | note |", "|---|---|---|"] + [
        f"| {' | '.join(map(str, row))} |" for row in rows
    ]
    print(f"{args.section}: {headline}\n" + "\n".join(lines))
    if args.write:
        write(args.section, "python tests/bench.py " + " ".join(sys.argv[1:]), headline, lines)


if __name__ == "__main__":
    main()
