"""The sections `learning`, `objectives` and `pretrained`: whole runs of grpo.py in this folder.

A run that was finished before is read and not repeated. `python viz.py logs/*` compares them.
"""

import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import PROJECT, last_error

OBJECTIVES = {
    "grpo": "--loss grpo",
    "dr_grpo": "--loss dr_grpo --advantage group_nostd",
    "dapo": "--loss dapo",
    "gspo": "--loss gspo",
    "cispo": "--loss cispo",
    "rloo": "--advantage rloo",
    "ppo": "",
}
TASKS = ("titanic", "battleOfSexes")


def trained(name, flags):
    """Runs grpo.py, or examples/ppo.py, in this folder; returns the comparison at its end."""
    script = "examples/ppo.py" if name.startswith("ppo") else "grpo.py"
    command = [sys.executable, PROJECT / script, *flags.split()]
    command += ["--name", name, "--backend", "local"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(last_error(done.stderr))
    return json.loads(Path("logs", name, "result.json").read_text())["final"]


def run_all(variants, args):
    """A row per run of the variants ({label: flags}), and one per variant over its seeds."""
    seeds = args.seeds.split(",")
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = {}
        for label in variants:
            for seed in seeds:
                flags = f"{variants[label]} --seed {seed} {args.flags}"
                jobs[label, seed] = pool.submit(trained, f"bench-{label}-{seed}", flags)
    rows = []
    for label in variants:
        gains = []
        for seed in seeds:
            try:
                final = jobs[label, seed].result()
            except RuntimeError as error:
                rows.append((f"{label}, seed {seed}", "fails", error))
                continue
            start = final.get("imitated", final["untrained"])
            gains.append(final["best"]["value_mean"] - start["value_mean"])
            rows.append((f"{label}, seed {seed}", *row_of_run(final)))
        if len(gains) > 1:
            error = statistics.stdev(gains) / len(gains) ** 0.5
            value = f"{statistics.mean(gains):+.3f} ± {error:.3f}"
            rows.append((f"{label}: best - start", value, f"standard error, {len(gains)} seeds"))
    return f"seeds {args.seeds}", rows


def row_of_run(final):
    texts = []
    for name in ("untrained", "imitated", "last", "best"):
        if name in final:
            mean, error = final[name]["value_mean"], final[name]["value_stderr"]
            texts.append(
                f"{name} {mean:.3f} ± {error:.3f} ({final[name]['valid_share']:.0%} valid)"
            )
    best = final["best"]
    note = f"N = {final['n']}; test {best['test_value_mean']:.3f}; best is step {best['step']}"
    return " -> ".join(texts), note


def learning(args):
    """grpo.py with its own defaults on both built-in tasks."""
    variants = {task: f"--task {task} --model {args.model}" for task in TASKS}
    return run_all(variants, args)


def objectives(args):
    """Every loss and estimator on both built-in tasks, or those of --only, --steps steps."""
    variants = {}
    for task in TASKS:
        for name in OBJECTIVES:
            common = f"--task {task} --model {args.model} --steps {args.steps}"
            variants[f"{task}-{name}"] = f"{common} {OBJECTIVES[name]}"
    if args.only:
        variants = {name: variants[name] for name in args.only.split(",")}
    return run_all(variants, args)


def pretrained(args):
    """The recipe of configs/grpo-cpu.yaml on two tasks: imitation, then GRPO."""
    tools = PROJECT / "tools"
    fetch = [sys.executable, tools / "get_smollm2.py"]
    model = subprocess.run(fetch, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    variants = {}
    for task in TASKS:
        if not Path(f"logs/demonstrations-{task}").exists():
            subprocess.run(
                [sys.executable, tools / "demonstrations.py", "--task", task], check=True
            )
        flags = f"{PROJECT}/configs/grpo-cpu.yaml --task {task}"
        imitate = [sys.executable, PROJECT / "sft.py", f"{PROJECT}/configs/sft-cpu.yaml"]
        imitate += f"--task {task} --model {model} --name sft-{task}".split()
        imitate += ["--runs", f"logs/demonstrations-{task}"]
        subprocess.run(imitate, check=True)
        variants[f"pretrained-{task}"] = f"{flags} --model logs/sft-{task}/best"
    return run_all(variants, args)
