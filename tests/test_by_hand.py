"""An episode by hand at the terminal: python env.py."""

import io
import sys
from dataclasses import replace

import env
from flatlab.options import SandboxOptions
from helpers import LOCAL, TINY_TEXTS
from tasks import load_task

EVERYBODY_DIED = "sed -E 's/,.*//; s/$/,0/; 1s/.*/id,survived/' data/test.csv > submission.csv"


def by_hand(capsys, monkeypatch, task, *lines, prompts=None):
    """What an episode at the terminal prints for lines that are piped in."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    env.by_hand(task, prompts=prompts, sandbox=SandboxOptions(LOCAL))
    return capsys.readouterr().out


def test_an_episode_by_hand_echoes_what_is_piped_in_and_names_each_part(capsys, monkeypatch):
    lines = [
        "```bash",
        "cat > strategy.py <<X",
        "def row_strategy(history):",
        "    return 0",
        "",
        "X",
    ]
    said = by_hand(capsys, monkeypatch, "battleOfSexes", *lines, "```", "no_such", "validate")
    for words in (
        "[sandbox: ",
        "Type a command and press Enter",
        "Files in /home/agent/workspace:\nsimulate.py",
        "$ ```bash\n> cat > strategy.py <<X\n",
        "> ```\n(no output)\n[ok, ",
        "$ no_such\n",
        "[exit code 127]\n[error, ",
        "$ validate\nvalidation Score: 1.4",
        "$ submit\nSubmitted.\n[submit, ",
        "\n[validation part] validation Score: 1.4",
        "\n[test part] test Score: 1.4",
    ):
        assert words in said, (words, said)


def test_by_hand_one_reads_what_the_agent_of_the_file_reads(capsys, monkeypatch):
    said = by_hand(capsys, monkeypatch, "titanic", "submit", prompts=TINY_TEXTS)
    assert "Reply with one block of bash commands:\n" in said
    assert "You are" not in said


def test_the_last_lines_name_the_part_also_without_a_score(capsys, monkeypatch):
    said = by_hand(capsys, monkeypatch, "titanic", "submit")
    first, middle, last = said.splitlines()[-3:]
    assert middle.startswith("[selection part] No score")
    assert first == "[validation part] No score: no submission, submission.csv is not there"
    assert last.startswith("[test part] No score")


def test_a_task_with_a_test_part_only_never_says_validation(capsys, monkeypatch):
    task = replace(load_task("titanic"), prompt="Predict.", splits=("test",))
    monkeypatch.setattr(env, "load_task", lambda *_: task)
    said = by_hand(capsys, monkeypatch, "any", EVERYBODY_DIED, "validate")
    assert "test accuracy: 0.6764" in said
    assert said.splitlines()[-1].startswith("[test part] test accuracy: 0.6764")
    assert "validation" not in said
