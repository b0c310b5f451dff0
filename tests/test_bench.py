"""tests/bench: every section runs, in a form that takes seconds instead of minutes."""

import os
import shlex
import subprocess
import sys

import pytest

from bench import __main__ as bench
from helpers import PROJECT
from tools import check_prose

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


def test_a_number_says_if_its_code_has_changed_since(tmp_path, monkeypatch):
    def git(*command):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        options = {"cwd": tmp_path, "capture_output": True, "check": True, "text": True}
        return subprocess.run(["git", *who, *command], **options).stdout

    code, page = tmp_path / "policy.py", tmp_path / "BENCHMARKS.md"
    monkeypatch.setattr(check_prose, "PROJECT", tmp_path)
    monkeypatch.setattr(check_prose, "BENCHMARKS", page)
    code.write_text("slow")
    git("init", "-q")
    git("add", "policy.py")
    git("commit", "-q", "-m", "first")
    commit = git("rev-parse", "--short", "HEAD").strip()
    page.write_text(f"# Measured\n\n## sync\n\nCode at {commit}: `policy.py`\n\n| a |\n")
    assert not [*check_prose.older_than_their_code()]
    code.write_text("fast")
    [fault] = check_prose.older_than_their_code()
    assert fault.endswith("sync: measure again, or write 'Changed since: policy.py'")
    text = page.read_text()
    page.write_text(text.replace("\n\n|", "\nChanged since: grpo.py (policy is faster)\n\n|"))
    assert [*check_prose.older_than_their_code()]  # the reason names nothing
    page.write_text(text.replace("\n\n|", "\nChanged since: policy.py (faster)\n\n|"))
    assert not [*check_prose.older_than_their_code()]
    page.write_text("# Measured\n\n## sync\n\nCode at 1234567: `policy.py`\n")
    assert not [*check_prose.older_than_their_code()]  # a copy without the history


def test_a_written_section_keeps_what_is_below_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "TESTS", tmp_path)
    page = tmp_path / "BENCHMARKS.md"
    page.write_text("# M\n\n## sync\n\nold\n\n| a |\n|---|\n| 1 |\n\nwords\n\n## train\n\nkept\n")
    bench.write("sync", "the command", "2 cores", ["| b |", "|---|", "| 2 |"])
    text = page.read_text()
    assert "old" not in text and "| 1 |" not in text
    assert "2 cores\nCode at " in text and ": `policy.py flatlab/model`\n\n| b |" in text
    assert text.endswith("| 2 |\n\nwords\n\n## train\n\nkept\n")


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
