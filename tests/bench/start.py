"""Seconds from the command of a script to its first line, its engine and its first episode."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.measure import PROJECT, this_machine

TASK = ["--task", "titanic", "--model", "tiny"]
SCRIPTS = {
    "grpo.py": ["--steps", "1", "--eval-episodes", "0"],
    "search.py": ["--nodes", "1"],
    "evaluate.py": ["--episodes", "1"],
    "sft.py": ["--runs", "logs/runs", "--updates", "1"],
}
# Beginning of the first line after a phase -> the phase. The last one is the first result.
PHASES = {
    "model": "first line",
    "plan": "task checked, run open",
    "imitate  1": "first update",
    "engine   is ready": "engine",
    "engine   agrees": "agreement",
    "step ": "step 0",
    "titanic ": "first node",
    "episode": "first episode",
}


def start(args):
    """A row for each script: the median of args.steps warm starts."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "configs").symlink_to(PROJECT / "configs")
        phases_of(folder, "grpo.py", ["--name", "runs", *SCRIPTS["grpo.py"]])  # warms caches, too
        for script, flags in SCRIPTS.items():
            starts = []
            for number in range(args.steps):
                starts.append(phases_of(folder, script, ["--name", f"{script}-{number}", *flags]))
                print(script, starts[-1], file=sys.stderr, flush=True)
            medians = {
                phase: statistics.median(one[phase] for one in starts) for phase in starts[0]
            }
            values = [f"{phase} {seconds:.1f} s" for phase, seconds in medians.items()]
            rows.append((script, ", ".join(values), f"median of {args.steps}"))
    return this_machine(), rows


def phases_of(folder, script, flags):
    """Phase -> seconds after the command, of one start."""
    command = [sys.executable, str(PROJECT / script), *TASK, *flags]
    begun = time.monotonic()
    found = {}
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            for words, phase in PHASES.items():
                if line.startswith(words):
                    found.setdefault(phase, time.monotonic() - begun)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return found
