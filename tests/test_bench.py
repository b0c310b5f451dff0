"""tests/bench: every section runs, in a form that takes seconds instead of minutes."""

import shlex
import subprocess
import sys

import pytest

from helpers import PROJECT

# Sections of whole runs (objectives, pretrained) are the functions of `trained` with other flags.
SHORT = {
    "env": "",
    "soak": "--count 20 --backend local",
    "train": "--steps 1 --only ours",
    "agent": "--steps 1 --only ours --waits even",
    "ahead": "--steps 1 --only ahead1 --waits uneven",
    "growth": "--count 30 --only bfs,training",
    "engine": "--steps 1 --only vllm,eager",
    "sync": "--steps 1",
    "objectives": "--steps 1 --seeds 0 --only titanic-dapo --flags '--groups 1 --eval-episodes 2'",
}


@pytest.mark.slow
@pytest.mark.parametrize("section", SHORT)
def test_a_section_in_its_short_form(section, tmp_path):
    command = [sys.executable, PROJECT / "tests/bench", section, *shlex.split(SHORT[section])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{section}: ")
    assert "| fail" not in done.stdout, done.stdout
