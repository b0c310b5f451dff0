"""The section `all`: every section in order, until the minutes of --budget are spent."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from bench.measure import PROJECT, TESTS, this_machine
from tools.check_prose import changed_since, measured_sections

ENGINE = "policy.py flatlab/model"
WORLD = "env.py flatlab/sandbox flatlab/task flatlab/world"
TRAINING = f"grpo.py flatlab/train {ENGINE} {WORLD}"
TREES = f"search.py flatlab/tree {ENGINE} {WORLD}"
IMITATION = "sft.py configs/sft-cpu.yaml configs/grpo-cpu.yaml"
MUTATED = "grpo.py flatlab/model flatlab/runs flatlab/task flatlab/train flatlab/tree flatlab/world"

# Section -> its flags, and the code that it measures. The short sections come first. A number is
# quoted with these flags.
PLAN = {
    "start": ("--steps 3", f"evaluate.py search.py sft.py flatlab/runs {TRAINING}"),
    "sync": ("", ENGINE),
    "env": ("", WORLD),
    "engine": ("--steps 3", ENGINE),
    "train": ("--steps 3", TRAINING),
    "agent": ("--steps 4", TRAINING),
    "ahead": ("--steps 2", TRAINING),
    "gpu": ("", TRAINING),
    "soak": ("", WORLD),
    "growth": ("--count 3000", "search.py flatlab/tree flatlab/runs"),
    "learning": ("", TRAINING),
    "mutants": ("--count 330", MUTATED),
    "search": ("--seeds 0,1,2,3,4,5,6,7,8,9 --jobs 24", TREES),
    "real-agent": ("", f"configs/prompts evaluate.py flatlab/model/endpoint.py {WORLD}"),
    "pretrained": ("--jobs 2", f"{IMITATION} {TRAINING}"),
    "learned-search": ("", f"examples/learn.py {TREES}"),
}
BESIDE_TRL = ("train", "agent")  # run by $TRL_VENV, if it is set


def all_sections(args):
    """A row per section: measured now, measured before with this code, failed, or not reached.

    A section writes its own table into tests/BENCHMARKS.md, with the commit and the paths of the
    code that it measures. One whose code has not changed since is not measured again, so a second
    call goes on where the first was cut. Runs of other commits are not read: each commit has a
    folder of its own in logs/.
    """
    commit = commit_of_code()
    current = [title for title, at, paths, _ in measured_sections() if is_unchanged(at, paths)]
    end = time.monotonic() + 60 * args.budget
    rows = []
    for section, (flags, _) in PLAN.items():
        left = end - time.monotonic()
        state = "measured before"
        if section not in current:
            folder = PROJECT / "logs" / f"bench-{commit}"
            state = measured(section, flags, folder, left) if left > 0 else "not reached"
        rows.append((section, state, f"`{section} {flags}`"))
        print(f"{section}: {state}, {max(left, 0) / 60:.0f} min were left", file=sys.stderr)
    return this_machine(), rows


def measured(section, flags, folder, seconds):
    """State of a section after it was given so many seconds. Its runs are in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    python = sys.executable
    if section in BESIDE_TRL and "TRL_VENV" in os.environ:
        python = os.path.abspath(f"{os.environ['TRL_VENV']}/bin/python")
    command = [python, str(TESTS / "bench"), section, *flags.split(), "--write"]
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"cut after {seconds / 60:.0f} min"
    finally:
        with contextlib.suppress(ProcessLookupError):  # with its own processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    took = f"{(time.monotonic() - begun) / 60:.0f} min"
    return f"fails after {took}" if code else f"measured in {took}"


def commit_of_code():
    """Short hash of the last commit that changed more than documents, with + if files differ."""
    code = [".", ":(exclude)*.md", ":(exclude)docs"]
    log = ["git", "log", "-1", "--format=%h", "--", *code]
    commit = subprocess.run(log, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *code], cwd=PROJECT)
    return commit.strip() + ("+" if changed.returncode else "")


def is_unchanged(commit, paths):
    """False also if git does not know the commit."""
    try:
        return not changed_since(commit, paths)
    except RuntimeError:
        return False
