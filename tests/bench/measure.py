"""Timing, and scripts that run in processes of their own, one after the other or in turn."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PROJECT = TESTS.parent
OTHERS = os.environ.get("PYTHONPATH")  # of a machine whose packages are in a folder
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(map(str, filter(None, [PROJECT, TESTS, OTHERS]))),
    "PYTHONWARNINGS": "ignore",
}
RESULT = "result: "  # begins the lines that a Contestant waits for


def median_seconds(call, times=1, pause=0.0):
    """Median duration of a call; `pause` seconds before each are not counted."""
    durations = []
    for _ in range(times):
        time.sleep(pause)
        begin = time.perf_counter()
        call()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations)


def ms(value):
    return f"{1000 * value:.1f} ms"


def spread(values, digits=2):
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def this_machine():
    threads = os.environ.get("OMP_NUM_THREADS")
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, OMP_NUM_THREADS={threads}, load {load:.1f}"


def last_error(text):
    """The last line that names an error, or the last line."""
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if "Error" in line] or lines
    return errors[-1][:200]


def run_module(name, *arguments, timeout):
    """Runs a module of this folder in a process of its own; returns (its last line, None) or
    (None, the error)."""
    command = [sys.executable, "-m", f"bench.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout)
    if done.returncode:
        return None, last_error(done.stderr)
    return done.stdout.strip().splitlines()[-1], None


def result_of(name, *arguments, timeout):
    """The same for a module that ends with print_result: (result, None) or (None, error)."""
    line, error = run_module(name, *arguments, timeout=timeout)
    return (None, error) if error else (json.loads(line.removeprefix(RESULT)), None)


def print_result(**result):
    """Prints a line that a Contestant tells apart from everything else that is printed."""
    print("\n" + RESULT + json.dumps(result), flush=True)


class Contestant:
    """A module of this folder that works whenever a line is written to its standard input."""

    def __init__(self, name, *arguments):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"bench.{name}", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=ENVIRONMENT,
        )
        self.results = []
        self.start = self.next_result()

    def run(self, line):
        with contextlib.suppress(BrokenPipeError):  # it has failed: next_result says why
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        self.results.append(self.next_result())

    def next_result(self):
        for line in self.process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        self.errors.seek(0)
        raise RuntimeError(last_error(self.errors.read()))

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def compete(commands, rounds):
    """Runs the modules of `commands` ({name: arguments}) in turn, so that all see the same machine.

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
        for line in rounds:
            for name in list(running):
                try:
                    running[name].run(line)
                    print(name, line, running[name].results[-1], file=sys.stderr, flush=True)
                except RuntimeError as error:
                    failed[name] = str(error)
                    running.pop(name).close()
        results = {name: (c.start, c.results[1:]) for name, c in running.items()}
        return results, failed
    finally:
        for contestant in running.values():
            contestant.close()


def compared(others, ours):
    """Ratios of the others' seconds to ours, round by round, and the ratio of CPU seconds."""
    ratios = [theirs["seconds"] / own["seconds"] for theirs, own in zip(others, ours)]
    cpu = [theirs["cpu_seconds"] / own["cpu_seconds"] for theirs, own in zip(others, ours)]
    return ratios, statistics.median(cpu)
