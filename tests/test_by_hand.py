"""An episode by hand at the terminal: python env.py."""

import subprocess
import sys

import pytest

import env
from backends import backends
from env import Env
from flatlab.errors import SandboxFault
from helpers import PROJECT


@pytest.mark.parametrize("backend", backends("docker", "local"))
def test_an_episode_by_hand(backend):
    lines = [
        "cat > strategy.py <<'END'",
        "def row_strategy(history):",
        "  return 0",
        "END",
        "cat <<X",
        "it's",
        "X",
        "no_such",
        "validate",
    ]
    done = subprocess.run(
        [sys.executable, "env.py", "--task", "battleOfSexes", "--backend", backend],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "[sandbox: ",
        "Files:",
        "it's\n[ok, ",
        "[exit code 127]\n[error, ",
        "$ validate\nvalidation Score: 1.4",
        "$ no_such\n",
        "submit",
        "[submit, ",
        "\nvalidation part: Score 1.4",
        "\ntest part: Score 1.4",
    ):
        assert words in done.stdout, words


def test_bad_input_by_hand_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "env.py", "--task", "titanik"],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        timeout=60,
    )
    assert (
        done.returncode == 2
        and "did you mean titanic" in done.stderr
        and len(done.stderr.strip().split("\n")) == 1
    )


def test_a_broken_sandbox_by_hand_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(Env, "reset", lambda self: (_ for _ in ()).throw(SandboxFault("no daemon")))
    with pytest.raises(SandboxFault, match="no daemon"):
        env.by_hand("titanic", "local")


def test_lines_are_read_until_all_is_closed(monkeypatch):
    lines = iter(["cat <<X", "a", "X", "never"])
    prompts = []

    def ask(prompt):
        prompts.append(prompt)
        return next(lines)

    assert env.read_block(ask) == "cat <<X\na\nX" and prompts == ["$ ", "> ", "> "]
