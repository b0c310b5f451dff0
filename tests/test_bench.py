"""tests/bench: every section runs, in a form that takes seconds instead of minutes."""

import os
import shlex
import subprocess
import sys

import pytest

from helpers import PROJECT

# Sections of whole runs (pretrained, partial-credit) are the functions of `objectives` with other
# flags; agent runs beside TRL below.
SHORT = {
    "all": "--budget 0",
    "env": "",
    "soak": "--count 20 --backend local",
    "train": "--steps 1 --only ours",
    "ahead": "--steps 1 --only ahead1 --waits even",
    "growth": "--count 30 --only bfs,training",
    "engine": "--steps 1 --only eager",
    "gpu": "",
    "sync": "--steps 1",
    "objectives": "--steps 1 --seeds 0 --only titanic-dapo --flags '--groups 1 --eval-episodes 2'",
    "first-submission": "--seeds 0 --only python",
    "search": "--seeds 0,1 --only titanic,tail --flags '--tokens 100'",
}


def measured(folder, section, flags, interpreter=sys.executable):
    """Output of a section."""
    command = [interpreter, PROJECT / "tests/bench", section, *shlex.split(flags)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"\n{section}: " in f"\n{done.stdout}"
    assert "| fail" not in done.stdout and "| cut" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("section", SHORT)
def test_a_section_in_its_short_form(section, tmp_path):
    measured(tmp_path, section, SHORT[section])


@pytest.mark.slow
@pytest.mark.skipif("TRL_VENV" not in os.environ, reason="set TRL_VENV, see tests/README.md")
def test_a_step_of_agents_beside_trl(tmp_path):
    interpreter = os.path.abspath(f"{os.environ['TRL_VENV']}/bin/python")
    flags = "--steps 1 --only ours,factory --waits even"
    table = measured(tmp_path, "agent", flags, interpreter)
    assert "TRL environment_factory" in table
    assert " x ours" in table  # both did the same work
