"""tests/bench: sections run, in a form that takes seconds instead of minutes."""

import shlex
import subprocess
import sys

import pytest

from helpers import PROJECT

# The other sections compare more variants with the functions of these, or whole runs of grpo.py.
SHORT = {
    "soak": "--count 20 --backend local",
    "agent": "--steps 1 --only ahead2 --waits even",
    "growth": "--count 30 --only bfs,training",
    "sync": "--steps 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("section", SHORT)
def test_a_section_in_its_short_form(section, tmp_path):
    command = [sys.executable, PROJECT / "tests/bench", section, *shlex.split(SHORT[section])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{section}: ")
    assert "| fail" not in done.stdout, done.stdout
