"""The sections `objectives`, `stability` and `pretrained`: whole runs of grpo.py in this folder."""

import itertools
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import PROJECT

OBJECTIVES = {
    "grpo": "--loss grpo",
    "dr_grpo": "--loss dr_grpo --advantage group_nostd",
    "dapo": "--loss dapo",
    "gspo": "--loss gspo --epochs 2",
    "cispo": "--loss cispo",
    "rloo": "--advantage rloo",
    "ppo": "--advantage ppo",
}
PRETRAINED = ("battleOfSexes", "titanic")
STABILITY = {
    "defaults": "",
    "no-guard-no-kl": "--guard off --kl 0",
}


def trained(name, flags):
    """Runs grpo.py in this folder, or finds it finished: (result.json, rows), or an error text."""
    command = [sys.executable, str(PROJECT / "grpo.py"), *flags]
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


def row_of_runs(task, label, runs):
    done = [pair for pair in runs if not isinstance(pair, str) and pair[0].get("final")]
    if not done:
        return f"{task}, {label}", "fails", str(runs[0])[:200]
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
        f"{len(done)} of {len(runs)} seeds; best adapter {best:.3f}; {restores} restores, "
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
    tool = PROJECT / "tools"
    fetch = [sys.executable, str(tool / "get_smollm2.py")]
    model = subprocess.run(fetch, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    rows = []
    for task in PRETRAINED:
        if not Path(f"logs/demonstrations-{task}").exists():
            subprocess.run([sys.executable, tool / "demonstrations.py", "--task", task], check=True)
        gains = []
        for seed in args.seeds.split(","):
            words = f"{PROJECT}/configs/grpo-cpu.yaml --task {task} --seed {seed}"
            words += f" --model {model} --sft logs/demonstrations-{task} {args.flags}"
            name = f"real-{task}-{seed}"
            outcome = trained(name, words.split())
            if isinstance(outcome, str):
                rows.append((f"{task}, seed {seed}", "fails", outcome))
                continue
            final = outcome[0]["final"]
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
