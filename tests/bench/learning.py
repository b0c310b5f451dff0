"""The sections `learning`, `objectives` and `pretrained`: whole runs of grpo.py.

They are in this folder. A run that was finished before is read and not repeated.
`python viz.py logs/*` compares them.
"""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import PROJECT, last_error
from flatlab.numbers import plus_minus
from tools.get_smollm2 import get_model

OBJECTIVES = {
    "grpo": "grpo.py --loss grpo",
    "dr_grpo": "grpo.py --loss dr_grpo --advantage group_nostd",
    "dapo": "grpo.py --loss dapo",
    "gspo": "grpo.py --loss gspo",
    "cispo": "grpo.py --loss cispo",
    "rloo": "grpo.py --advantage rloo",
    "ppo": "examples/ppo.py",
}
TASKS = ("titanic", "battleOfSexes")


def trained(name, command):
    """Runs a script that trains in this folder; returns the comparison at its end."""
    script, *flags = command.split()
    whole = [sys.executable, PROJECT / script, *flags, "--name", name, "--backend", "local"]
    done = subprocess.run(whole, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(last_error(done.stderr))
    return json.loads(Path("logs", name, "result.json").read_text())["final"]


def run_all(variants, args):
    """A row per run of the variants ({label: command}), and one per variant over its seeds."""
    seeds = args.seeds.split(",")
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {}
        for label in variants:
            for seed in seeds:
                command = f"{variants[label]} --seed {seed} {args.flags}"
                jobs[label, seed] = pool.submit(trained, f"bench-{label}-{seed}", command)
    rows = []
    for label in variants:
        gains = []
        for seed in seeds:
            try:
                final = jobs[label, seed].result()
            except RuntimeError as error:
                rows.append((f"{label}, seed {seed}", "fails", error))
                continue
            gains.append(final["best"]["difference"])
            rows.append((f"{label}, seed {seed}", *row_of_run(final)))
        if len(gains) > 1:
            error = statistics.stdev(gains) / len(gains) ** 0.5
            value = f"{statistics.mean(gains):+.3f} ± {error:.3f}"
            rows.append((f"{label}: best - start", value, f"standard error, {len(gains)} seeds"))
    return f"seeds {args.seeds}", rows


def row_of_run(final):
    texts = []
    for name in ("untrained", "last", "best"):
        value = plus_minus(final[name]["value_mean"], final[name]["value_stderr"], "+")
        texts.append(f"{name} {value} ({final[name]['valid_share']:.0%} valid)")
    best = final["best"]
    gain = plus_minus(best["difference"], best["difference_stderr"], "+")
    note = f"best - untrained {gain}, N = {final['n']}; best is step {best['step']}"
    if "test_value_mean" in best:
        note += f"; test {best['test_value_mean']:+.3f}"
    return " -> ".join(texts), note


def learning(args):
    """grpo.py with its own defaults on both built-in tasks, or those of --only."""
    tasks = args.only.split(",") if args.only else TASKS
    variants = {task: f"grpo.py --task {task} --model {args.model}" for task in tasks}
    return run_all(variants, args)


def objectives(args):
    """Every loss and estimator on both built-in tasks, or those of --only, --steps steps."""
    variants = {}
    for task in TASKS:
        for name in OBJECTIVES:
            common = f"--task {task} --model {args.model} --steps {args.steps}"
            variants[f"{task}-{name}"] = f"{OBJECTIVES[name]} {common}"
    if args.only:
        variants = {name: variants[name] for name in args.only.split(",")}
    return run_all(variants, args)


def pretrained(args):
    """The recipe of configs/grpo-cpu.yaml on two tasks: imitation, then GRPO. "untrained" is the
    adapter of the imitation.
    """
    model = get_model()
    variants = {}
    for task in TASKS:
        show = [sys.executable, PROJECT / "tools/demonstrations.py", "--backend", "local"]
        subprocess.run([*show, "--task", task], check=True)
        imitate = [sys.executable, PROJECT / "sft.py", f"{PROJECT}/configs/sft-cpu.yaml"]
        imitate += f"--task {task} --model {model} --name sft-{task}".split()
        imitate += ["--runs", f"logs/demonstrations-{task}"]
        subprocess.run(imitate, check=True)
        flags = f"{PROJECT}/configs/grpo-cpu.yaml --task {task} --model logs/sft-{task}/best"
        variants[f"pretrained-{task}"] = f"grpo.py {flags}"
    return run_all(variants, args)
