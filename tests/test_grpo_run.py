"""`python grpo.py` as a user runs it: the stand-in, the real engine, real sandboxes, a real kill
-9.
"""

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import pytest
from pytest import approx

import flatlab.runs.start
import grpo
import search
from flatlab.errors import UserError
from flatlab.files import read_mapping
from flatlab.files import read_rows as rows
from flatlab.runs import trackers
from helpers import PROJECT, attempts_of, done, refuses, run_here, run_until, segments_of

SMALL = "--groups 2 --group-size 4 --eval-episodes 2 --concurrency 8 --model tiny --backend local"
A_RUN = f"{SMALL} --steps 2 --task titanic --name a"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("run")
    return folder, done(folder, "grpo.py", A_RUN)


def test_a_run_leaves_everything_behind(finished):
    folder, out = finished
    logs = folder / "logs" / "a"
    metrics = rows(logs / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1]
    assert max(row["valid_share"] for row in metrics) > 0.5  # the stand-in knows today's prompts
    result = read_mapping(logs / "result.json")
    assert result["status"] == "finished"
    assert result["final"]["n"] == result["final"]["steps"] == 2
    episodes = attempts_of(logs, "1")
    groups = Counter(e["group"] for e in episodes)
    assert groups == dict.fromkeys(range(metrics[1]["groups"]), 4)
    for episode in episodes:
        assert episode["reward"] == -1 or episode["outcome"] == "valid"
        assert episode["status"] != "fault"
    for name in "config.yaml command.txt git.txt env.txt curves.png report.html".split():
        assert (logs / name).stat().st_size > 0
    for line in ("engine   agrees", "untrained ", "last (step 1) ", "best "):
        assert f"\n{line}" in out


@pytest.mark.slow
def test_seeds_share_an_engine_and_equal_runs_alone(finished):
    folder, _ = finished
    command = f"{A_RUN} --name s --seed 0 1"

    def first_row(name):
        return rows(folder / "logs" / name / "metrics.jsonl")[0]

    assert done(folder, "grpo.py", command).count("engine   is ready") == 1
    alone, first, second = map(first_row, ("a", "s-0", "s-1"))
    assert alone["reward_mean"] == first["reward_mean"] != second["reward_mean"]
    assert alone.get("loss") == approx(first.get("loss"), abs=1e-6)
    shutil.rmtree(folder / "logs" / "s-1")
    assert done(folder, "grpo.py", command).count("was finished before") == 1
    assert first_row("s-1")["reward_mean"] == second["reward_mean"]


# ------------------------------------------------------------------ numbers from the files alone


def value(episode, key="improvement"):
    return -1 if episode[key] is None else max(-1, episode[key])


def error_of(numbers):
    return stdev(numbers) / len(numbers) ** 0.5


def follows(result, episodes, parts=("",), **more):
    """The values of an evaluation, and more numbers, are those of its episodes without faults."""
    expected = more | {"n": len(episodes), "faults": 0}
    expected["valid_share"] = fmean(e["outcome"] == "valid" for e in episodes)
    for part in parts:
        values = [value(e, f"{part}improvement") for e in episodes]
        expected |= {f"{part}value_mean": fmean(values), f"{part}value_stderr": error_of(values)}
    assert {key: result[key] for key in expected} == approx(expected)


def test_every_headline_follows_from_the_episodes(finished):
    logs = finished[0] / "logs" / "a"
    result = read_mapping(logs / "result.json")
    row = rows(logs / "metrics.jsonl")[-1]
    before, last = (attempts_of(logs, when) for when in ("before", "eval-1"))
    follows(result["before"], before)
    follows({key.removeprefix("eval_"): row[key] for key in row}, last)
    follows(result["best"], last if result["best"]["step"] == 1 else before)

    final = result["final"]
    names = {name: final[name]["when"] for name in ("untrained", "last", "best")}
    assert (names["best"] == names["untrained"]) == final["best_is_untrained"]
    untrained = attempts_of(logs, names["untrained"])
    follows(final["untrained"], untrained)
    reference = {e["seed"]: value(e) for e in untrained}
    for name, parts in {"last": [""], "best": ["", "test_"]}.items():
        episodes = attempts_of(logs, names[name])
        pairs = [value(e) - reference[e["seed"]] for e in episodes]
        more = {"difference": fmean(pairs), "difference_stderr": error_of(pairs)}
        follows(final[name], episodes, parts, **more, difference_n=len(pairs))
    assert [name for name in names if "test_value_mean" in final[name]] == ["best"]
    assert not {e["seed"] for e in before} & set(reference)


def test_the_loss_of_a_step_follows_from_the_files(finished):
    """The group advantage, DAPO's loss and the KL term, with plain transformers and peft."""
    import torch
    import yaml
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    logs = finished[0] / "logs" / "a"
    cfg = yaml.safe_load((logs / "config.yaml").read_text())
    row = rows(logs / "metrics.jsonl")[1]
    episodes = attempts_of(logs, "1")
    sampled = segments_of(logs, "000001")

    adapter = logs / "checkpoints" / "000000"  # before the update of step 1
    base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)).eval()

    def logprobs(tokens, is_trained):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / cfg["temperature"]
        chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return chosen[is_trained[1:]]

    columns = []
    for episode, segments in zip(episodes, sampled, strict=True):
        group = [e["reward"] for e in episodes if e["group"] == episode["group"]]
        if len(set(group)) == 1:
            continue
        advantage = (episode["reward"] - fmean(group)) / stdev(group)
        replies = [r for segment in segments for r in segment["reply"] if r >= 0]
        assert len(replies) == episode["tokens"]
        for segment in segments:
            tokens = torch.tensor(segment["tokens"])
            is_trained = torch.tensor(segment["reply"]) >= 0
            old = torch.tensor(segment["logprobs"])[is_trained]
            logp = logprobs(tokens, is_trained)
            with model.disable_adapter():
                reference = logprobs(tokens, is_trained)
            ratio = (logp - old).exp().clamp(max=grpo.IS_CAP)
            clipped = ratio.clamp(1 - cfg["clip_low"], 1 + cfg["clip_high"])
            kl = (reference - logp).exp() - (reference - logp) - 1
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            is_clipped = gain < ratio * advantage
            columns.append(torch.stack([cfg["kl"] * kl - gain, kl, logp - old, is_clipped]))
    loss, kl, difference, clip_share = torch.cat(columns, 1)
    assert row["loss"] == approx(loss.mean().item(), rel=1e-5)
    assert row["kl"] == approx(kl.mean().item(), rel=1e-2)
    assert row["kl"] > 1e-6  # the adapter of step 0 is not the base model
    assert row["logprob_diff_max"] == approx(difference.abs().max().item(), abs=5e-6)
    assert row["clip_share"] == approx(clip_share.mean().item())


@pytest.fixture
def again(finished, monkeypatch, capsys):
    """again(more flags) runs the script in this process, in the folder of the finished run.

    Returns the exit code, stdout and stderr; an engine that is loaded is an error.
    """

    def load_policy(*_):
        raise UserError("the engine was loaded")

    monkeypatch.chdir(finished[0])
    monkeypatch.setattr(grpo, "load_policy", load_policy)
    made_by = read_mapping(Path("logs/a/config.yaml"))["fingerprint"]
    made_by["code"] = made_by["code"][-1]
    # in this process the modules of the tests would count as code
    monkeypatch.setattr(flatlab.runs.start, "fingerprint", lambda *_: made_by)

    def again(more=""):
        flags = f"{A_RUN} {more}".split()
        return run_here(grpo.main, *flags, monkeypatch=monkeypatch, capsys=capsys)

    return again


def test_the_same_command_again_finds_it_finished_and_another_config_is_refused(again):
    metrics = Path("logs/a/metrics.jsonl")
    before = metrics.read_bytes()
    code, out, err = again()
    assert code == 0, err
    assert "was finished before" in out
    assert "\nuntrained " in out
    assert metrics.read_bytes() == before
    code, _, err = again("--lr 0.5")
    assert code == 2
    assert "lr: 0.001 there, 0.5 now" in err
    assert err.count("\n") == 1
    _, _, err = again("--steps 4")
    assert "the engine was loaded" in err  # there is something left to do


def test_a_run_without_its_checkpoints_is_not_erased(again):
    logs = Path("logs/a")
    before = (logs / "metrics.jsonl").read_bytes()
    (logs / "checkpoints").rename("elsewhere")
    try:
        code, _, err = again()
    finally:
        shutil.rmtree(logs / "checkpoints", ignore_errors=True)
        Path("elsewhere").rename(logs / "checkpoints")
    assert code == 2
    assert "no checkpoint to continue from" in err
    assert (logs / "metrics.jsonl").read_bytes() == before
    assert len(list((logs / "transcripts").glob("0*.jsonl"))) == 2


# grpo.py on a slow disk
SLOW_DISK = f"""
import sys, time
sys.path.insert(0, {str(PROJECT)!r})
from flatlab.runs import store
import grpo
to_disk = store.to_disk
def slow(path):
    time.sleep(".tmp-" in str(path) and "checkpoints" in str(path))
    to_disk(path)
store.to_disk = slow
grpo.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1])
def test_kill_9_while_a_checkpoint_is_written(tmp_path, tiny_model, step):
    """The step before counts, and the same command goes on from it, or starts anew."""
    (tmp_path / "slow.py").write_text(SLOW_DISK)
    flags = f"{SMALL} --steps 3 --task titanic --name w"
    logs = tmp_path / "logs" / "w"
    is_far = lambda: list(logs.glob(f"checkpoints/.tmp-*-00000{step}/trainer.pt"))  # noqa: E731
    run_until(tmp_path, is_far, tmp_path / "slow.py", flags, signal.SIGKILL)
    assert [row["step"] for row in rows(logs / "metrics.jsonl")] == [*range(step + 1)]
    assert len(list(logs.glob("checkpoints/0*"))) == step
    assert ("resumed after step 0" in done(tmp_path, "grpo.py", flags)) == bool(step)
    assert [row["step"] for row in rows(logs / "metrics.jsonl")] == [0, 1, 2]
    assert not list(logs.rglob(".tmp-*"))


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_step_and_the_same_command_again(tmp_path, tiny_model):
    """While groups of three steps are in flight."""
    flags = f"{SMALL} --steps 4 --task battleOfSexes --name k --eval-episodes 0 --ahead 2"
    logs = tmp_path / "logs" / "k"
    metrics = logs / "metrics.jsonl"
    is_far = lambda: any(logs.glob("checkpoints/0*"))  # noqa: E731
    run_until(tmp_path, is_far, "grpo.py", flags, signal.SIGKILL)
    for path in logs.rglob("[!.]*.jsonl"):  # whatever is there is whole
        rows(path)
    out = done(tmp_path, "grpo.py", f"{flags} --micro-tokens 1024")  # this may change
    assert "resumed after step" in out
    assert "up to 1024 tokens" in out
    assert [row["step"] for row in rows(metrics)] == [0, 1, 2, 3]
    assert max(row["lag_max"] for row in rows(metrics)) <= 2
    assert not list(logs.rglob(".tmp-*"))
    files = sorted((logs / "transcripts").glob("*[0-9].jsonl"))
    assert [int(file.stem) for file in files] == [0, 1, 2, 3]
    played = rows(logs / "episodes.jsonl")
    assert {row["step"] for row in played} == {0, 1, 2, 3}
    assert set(Counter(row["seed"] for row in played).values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_is_an_orderly_end(tmp_path, tiny_model, number):
    """Also for a run in the background of a script, which ignores SIGINT."""
    flags = f"{SMALL} --steps 50 --name t --eval-episodes 0"
    logs = tmp_path / "logs/t"
    is_far = (logs / "metrics.jsonl").exists
    code, err = run_until(tmp_path, is_far, "grpo.py", flags, number)
    assert code == 130
    assert "the same command continues logs/t" in err
    assert "Traceback" not in err
    assert read_mapping(logs / "result.json")["status"] == "interrupted"


BAD_INPUT = {
    "--task titanik": "did you mean titanic",
    "--name x --model tiny": "Cannot write the run directory logs/x",
    "--eval-episodes 1": "--eval-episodes must be 0 or at least 2",
    "--learning-rate 1": "Unrecognized options: --learning-rate",
    "--gpu-memory 45": "--gpu-memory: Input should be less than or equal to 1",
    "--max-groups 1": "--max-groups 1 is less than --groups 4",
    "--loss gspo --ahead 1": "the bounds of --loss gspo would clip most of what is sampled",
    "--advantage ppo": "Unknown --advantage 'ppo'",
}


def test_bad_input_is_one_sentence_and_code_2_before_any_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "load_policy", None)
    Path("logs").write_text("a file where the folder should be")
    refuses(grpo.main, BAD_INPUT, monkeypatch, capsys)


MISSING = {
    "--model m": "m has no chat template: choose an instruct model.",
    "--model tiny --trackers wandb": "--trackers wandb needs a missing package: pip install wandb",
}


@pytest.mark.parametrize("flags", MISSING)
@pytest.mark.parametrize("script", [grpo, search])
def test_what_is_missing_leaves_no_run_directory_or_one_that_says_so(
    script, flags, random_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    shutil.copytree(random_model, "m")
    Path("m/chat_template.jinja").unlink()
    command = f"{flags} --task titanic --backend local --name a".split()
    code, _, err = run_here(script.main, *command, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert err == f"{MISSING[flags]}\n"
    if Path("logs").exists():
        assert read_mapping(Path("logs/a/result.json"))["status"] == f"failed: {MISSING[flags]}"
