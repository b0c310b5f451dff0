"""The section `all`: every section in order, until the minutes of --budget are spent."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

from bench.measure import PROJECT, TESTS, this_machine

# Section -> its flags, the short ones first. A number is quoted with these flags.
PLAN = {
    "start": "--steps 3",
    "sync": "",
    "env": "",
    "engine": "--steps 3",
    "train": "--steps 3",
    "agent": "--steps 4",
    "ahead": "--steps 2",
    "gpu": "",
    "soak": "",
    "growth": "--count 3000",
    "learning": "",
    "mutants": "--count 330",
    "search": "--seeds 0,1,2,3,4,5,6,7,8,9 --jobs 24",
    "first-submission": "--model smollm2 --seeds 0",
    "partial-credit": "--seeds 0",
    "pretrained": "",
    "learned-search": "",
}
BESIDE_TRL = ("train", "agent")  # run by $TRL_VENV, if it is set


def all_sections(args):
    """A row per section: measured now, measured before at this commit, failed, or not reached.

    A section writes its own table into tests/BENCHMARKS.md, with the commit of the code. One that
    has this commit there is not measured again, so a second call goes on where the first was cut.
    Runs of other commits are not read: each commit has a folder of its own in logs/.
    """
    commit = commit_of_code()
    end = time.monotonic() + 60 * args.budget
    rows = []
    for section, flags in PLAN.items():
        left = end - time.monotonic()
        state = "measured before"
        if not has(section, commit):
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


def has(section, commit):
    """True if tests/BENCHMARKS.md has the section as measured at this commit."""
    text = (TESTS / "BENCHMARKS.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {section}\n\n.*, commit {re.escape(commit)},", text, re.MULTILINE)
    return found is not None
