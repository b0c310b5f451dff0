"""tests/bench: every section runs, in a form that takes seconds instead of minutes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as bench
from bench import gpu, real_agent
from flatlab.files import read_mapping
from flatlab.model import memory
from helpers import PROJECT, output_of
from policy import Policy
from tools import check_prose, gpu_check, gpu_sums

# pretrained is the function of `objectives` with other flags; agent runs beside TRL below;
# real-agent needs a model of 1 GB.
SHORT = {
    "all": "--budget 0",
    "env": "",
    "soak": "--count 20 --backend local",
    "train": "--steps 1 --only ours",
    "ahead": "--steps 1 --only ahead1 --waits even",
    "growth": "--count 30 --only bfs,training",
    "engine": "--steps 1 --only eager",
    # without the parts that differ on a GPU alone, and without the preset, which is tested below
    "gpu": "--only decode,update,stream,passes,lengths,sync,prompts,decode-plain,decode-folded",
    "sync": "--steps 1",
    "objectives": "--steps 1 --seeds 0 --only titanic-dapo --flags '--groups 1 --eval-episodes 2'",
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


# ------------------------------------------------------------------ gpu


def test_packages_in_a_folder_are_found_by_every_part():
    code = "from bench.measure import ENVIRONMENT; print(ENVIRONMENT['PYTHONPATH'])"
    paths = os.pathsep.join([f"{PROJECT}/tests", "/x"])
    said = output_of("-c", code, env=os.environ | {"PYTHONPATH": paths})
    assert said.strip().endswith(f"{os.pathsep}/x")


def test_the_stream_of_an_engine_is_chosen_before_it_is_built(monkeypatch):
    calls = []

    def built(*_, **__):
        calls.append(f"engine, own stream: {Policy.own_stream}")
        raise InterruptedError

    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "make_policy", built)
    monkeypatch.setattr(gpu, "model_path", str)
    monkeypatch.setattr(Policy, "own_stream", True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default stream")
    monkeypatch.setattr(torch.cuda, "set_stream", calls.append)
    for part in ("stream", "one-stream"):
        with pytest.raises(InterruptedError):
            next(gpu.PARTS[part][0]())
    assert calls == [
        "engine, own stream: True",
        "default stream",
        "engine, own stream: False",
    ]


def test_every_update_fits_on_a_card_of_80_gb():
    """Beside the weights of two models: one may not yet be gone."""
    config = gpu_sums.config_of(gpu.LARGE)

    def needed(count, episodes, is_lean=True):
        copies = memory.copy_weight(config) * 2048 * episodes
        tokens = 2048 + episodes * 1920 + int(copies)
        weights = 2 * 2 * 4_022_468_096
        return (weights + memory.bytes_needed(tokens, config, 2, is_lean, count)) / 2**30

    cases = gpu.update_cases(36)
    assert [case[2] for case in cases[:4]] == [36, 17, 25, 36]
    assert {name for _, on, *_ in cases for name in on} == {*gpu.MENDS, *gpu.IDEAS}
    for name, on, count, episodes in cases:
        assert needed(count, episodes, "varlen" in on) < 79 - 1.5, name
    assert needed(0, 8) > 79


def test_rows_are_read_while_they_are_written(tmp_path):
    code = (
        "import sys; file = open('rows', 'a'); print('{\"step\": 0}\\n{\"st', file=file, end='',"
        "flush=True); sys.stdin.read(); print('ep\": 1}', file=file)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=tmp_path)
    rows = gpu.rows_as_written(tmp_path / "rows", process)
    assert next(rows) == {"step": 0}
    assert process.poll() is None
    process.stdin.close()
    assert [*rows] == [{"step": 1}]


@pytest.mark.slow
def test_a_step_of_the_preset_learns():
    """Though its random model submits nothing."""
    rows = [*gpu.preset()]
    assert [what for what, *_ in rows] == [f"step {n} of the preset, --ahead 0" for n in (0, 1)]
    assert all("grad_norm " in note and "seconds_train " in note for *_, note in rows), rows


def test_the_parts_of_a_call_end_within_its_limit_and_have_one_key_of_the_compile_cache(
    monkeypatch,
):
    preset = read_mapping(PROJECT / "configs/grpo-80gb.yaml")
    sizes = gpu.RANK, gpu_check.REQUESTS, gpu.CONTEXT
    assert sizes == (preset["lora_rank"], preset["concurrency"], preset["context"])
    assert sum(limit for _, limit, _ in gpu.FIRST.values()) <= 600
    assert not any(environment for *_, environment in gpu.FIRST.values())
    monkeypatch.setattr(gpu, "run_part", lambda name: [(name, "1 s", "")])

    def names(only):
        return [what for what, *_ in gpu.gpu(SimpleNamespace(only=only))[1]]

    assert names("first") + names("second") == names("") == [*gpu.PARTS]
    assert names("sync,update") == ["sync", "update"]
    with pytest.raises(SystemExit, match="there is no decod; there are decode, update"):
        names("sync,decod")


def test_a_random_model_that_was_cut_is_made_again(tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerBase

    def cut(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_sums.SHAPES, "small", (16, 1, 2, 32, True))
    save = PreTrainedTokenizerBase.save_pretrained
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", cut)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.random_model(tmp_path / "a" / "model", "small")
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save)
    made = Path(gpu_check.random_model(tmp_path / "a" / "model", "small"))
    assert (made / "config.json").exists() and (made / "tokenizer.json").exists()
    assert [path.name for path in made.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("given", [[], ["--model", "a"]])
def test_the_check_of_a_gpu_makes_its_model_in_a_part(tmp_path, monkeypatch, given):
    """The process of the check itself would keep the memory of it."""
    parts = []

    def run_part(name, model, _):
        parts.append((name, model))
        return [("what", "1 s", "")]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--parts", "budget", *given])
    monkeypatch.setattr(gpu_check, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_check, "describe", lambda: "a card")
    monkeypatch.setattr(gpu_check, "random_model", None)
    monkeypatch.setattr(gpu_check, "run_part", run_part)
    gpu_check.main()
    random = "logs/gpu-check/qwen3-0.6b"
    expected = [("budget", "a")] if given else [("model", random), ("budget", random)]
    assert parts == expected


# ------------------------------------------------------------------ all sections
def test_the_real_agent_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(real_agent, "CODER", tmp_path)
    node = tmp_path / "node"
    node.touch(0o755)
    for path, missing in ((tmp_path / "none", "node, version 20"), (tmp_path, "npm install")):
        monkeypatch.setenv("PATH", str(path))
        with pytest.raises(SystemExit, match=missing), real_agent.served_coder():
            pass


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
