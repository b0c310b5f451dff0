"""Tests of flatlab/model/memory.py and flatlab/threads.py, of the stand-in model in configs/tiny,
and of what tools/ offers: a pretrained model, demonstrations and the check of a GPU.
"""

import asyncio
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

import env
import sft
from flatlab.errors import UserError
from flatlab.files import read_mapping, read_rows
from flatlab.model import memory
from flatlab.model.lora_sync import at_most
from flatlab.options import ModelOptions
from flatlab.train import metrics
from flatlab.tree import prompts
from flatlab.world.texts import load_prompts
from helpers import (
    AGENT_TEXTS,
    LOCAL,
    PROJECT,
    TINY_TEXTS,
    FakePolicy,
    play_once,
    python,
    user_error,
)
from policy import ModelPath, Policy, Trainer
from tasks import load_task
from tools import get_smollm2, make_tiny

# ---------------------------------------------------------------------------- memory

GIB = 2**30
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152
)


def test_the_estimate_agrees_with_what_was_measured():
    """135 M parameters in fp32: 2048 tokens trained in 8 GiB, engine included; 16384 took > 24."""
    assert 3 * GIB < memory.bytes_needed(2048, SMOLLM2, 4, False) < 8 * GIB
    assert memory.bytes_needed(16384, SMOLLM2, 4, False) > 24 * GIB
    assert memory.bytes_needed(2048, SMOLLM2, 4, True) < 2.5 * GIB


def test_the_tokens_of_a_training_pass_follow_from_model_and_memory():
    def fit(free):
        return memory.fit_micro_tokens(free, SMOLLM2, 4, False)

    assert (fit(16 * GIB), fit(4 * GIB)) == (2048, 512)
    with user_error("The model does not fit: a training pass over 256 tokens needs about 0.8 GiB"):
        fit(GIB // 4)


NO_RECOMPUTING = [(4096, None, 1, 2048), (4096, 1024, 1, 1024)]
RECOMPUTING = [
    (4096, 16384, 1, 16384),
    (4096, None, 4, 4096),
    (16384, None, 1, 8192),
]


@pytest.mark.parametrize("context, wanted, processes, tokens", [*NO_RECOMPUTING, *RECOMPUTING])
def test_layers_are_recomputed_if_a_pass_over_a_whole_context_would_not_fit(
    monkeypatch, context, wanted, processes, tokens
):
    model = SimpleNamespace(config=SMOLLM2)
    numbers = {"device": "cpu", "dtype": torch.float32, "context": context, "recomputes": False}
    policy = SimpleNamespace(model=model, **numbers)
    policy.recompute_layers = lambda: setattr(policy, "recomputes", True)
    monkeypatch.setattr(memory, "free_bytes", lambda device, processes: 16 * GIB // processes)
    assert Trainer.fit_micro_tokens(policy, wanted, processes) == tokens
    assert policy.recomputes == ((context, wanted, processes, tokens) in RECOMPUTING)


def test_the_limits_of_control_groups_count(tmp_path):
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert memory.left_in_cgroup(tmp_path) == 5 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.left_in_cgroup(tmp_path) == sys.maxsize
    assert memory.left_in_cgroup(tmp_path / "elsewhere") == sys.maxsize
    assert 0 < memory.free_bytes("cpu", processes=4) < memory.free_bytes("cpu") < 2**50


def test_the_kv_cache_holds_all_requests_if_they_fit(random_model):
    """Two numbers (k, v) of 2 bytes for 4 layers of 2 heads of 32: 1 KiB a token."""
    config = AutoConfig.from_pretrained(random_model)
    block = memory.BLOCK * 1024  # vLLM's own
    assert memory.kv_cache_bytes(config, 2, 1024, 64, GIB) == 64 * 2**20 + block
    assert memory.kv_cache_bytes(config, 2, 1024, 10**6, GIB) == GIB
    assert memory.kv_cache_bytes(config, 2, 1024, 64, 2**20 + block) == 2**20 + block
    with user_error("One context of 1048576 tokens needs 1.0 GiB of KV cache, and 1.0 are left"):
        memory.kv_cache_bytes(config, 2, 2**20, 64, GIB)


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it():
    ballast = torch.ones(GIB // 16)  # 256 MiB
    code = "from flatlab.train.metrics import peak_bytes; print(peak_bytes())"
    assert 2**20 < int(python("-c", code).stdout) < 4 * len(ballast) / 2
    assert metrics.peak_bytes() > 4 * len(ballast)


# ---------------------------------------------------------------------------- threads


def test_torch_gets_no_more_threads_than_cores_are_ours_and_they_sleep_while_they_wait():
    kept = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "LD_LIBRARY_PATH")  # no setting of a library's
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from flatlab import threads; threads.configure(); import torch\n"
        "print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    )
    done = python("-c", code, env=environment)
    assert done.stdout.split() == ["1", "PASSIVE"], done.stderr


def test_a_limit_holds_inside_and_ends_with_an_error():
    before = torch.get_num_threads()
    with pytest.raises(ValueError), at_most(1):
        assert torch.get_num_threads() == 1
        raise ValueError
    with at_most(0), at_most(before + 1):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------------------- the stand-in

EPISODES = 12  # per task
LOWEST_VALID_SHARE = 0.5
ADVICE = "If the prompts changed on purpose: run `python tools/make_tiny.py`, commit configs/tiny."


@pytest.fixture(scope="session")
def tiny_policy(tiny_model):
    """One for the session: an engine that ends takes the process groups of all engines with it."""
    return Policy(tiny_model, ModelOptions(context=2048), max_batch=EPISODES)


def for_each_seed(function):
    """The results of an async function for all seeds of EPISODES at once."""

    async def all_of_them():
        return await asyncio.gather(*map(function, range(EPISODES)))

    return asyncio.run(all_of_them())


@pytest.mark.slow
@pytest.mark.parametrize("name", make_tiny.Config.tasks)
def test_it_solves_the_tasks_with_the_prompts_of_today(tiny_policy, name):
    """vLLM plays episodes in real sandboxes. A changed prompt is what makes this fail."""
    task = load_task(name)
    backend = make_tiny.any_backend()
    limits = {"max_reply_tokens": 160, "max_observation_tokens": 256}

    def play(seed):
        return play_once(env.Env(task, backend, seed), tiny_policy, seed, **limits)

    episodes = for_each_seed(play)
    assert [episode.fault for episode in episodes if episode.status == "fault"] == []
    valid_share = sum(episode.score.valid for episode in episodes) / EPISODES
    assert valid_share >= LOWEST_VALID_SHARE, f"{name}: {valid_share:.0%} are valid. {ADVICE}"


@pytest.mark.slow
@pytest.mark.parametrize("name", make_tiny.Config.tasks)
@pytest.mark.parametrize("mode", ["uniform", "tail", "sequence"])
def test_it_lists_strategies_when_a_search_asks(tiny_policy, mode, name):
    texts = load_prompts(TINY_TEXTS)
    about = prompts.about(texts, load_task(name), {})
    question = prompts.ask(texts, about, None, [], mode=mode, k=5, tau=0.1)
    tokens = tiny_policy.render([{"role": "user", "content": question}])
    replies = for_each_seed(lambda seed: tiny_policy.sample(tokens, 160, seed))
    usable = sum(len(prompts.parse(reply.text)[0]) >= 3 for reply in replies)
    assert usable >= LOWEST_VALID_SHARE * EPISODES, f"{usable} lists are usable. {ADVICE}"


# ---------------------------------------------------------------------------- tools


@pytest.fixture(scope="session")  # as tiny_policy
def smollm2():
    try:
        folder = get_smollm2.get_model()
    except UserError as error:
        pytest.skip(str(error))
    path = ModelPath(str(folder), None, False)
    return Policy(path, ModelOptions(context=1024), max_batch=8)


@pytest.mark.slow
def test_engine_and_trainer_of_a_pretrained_model_agree(smollm2):
    assert max(a.largest for a in asyncio.run(smollm2.verify()).values()) <= 1e-4


@pytest.mark.slow
def test_demonstrations_are_scored_can_be_imitated_and_have_the_texts_of_an_episode(tmp_path):
    tool = PROJECT / "tools/demonstrations.py"
    done = python(tool, "--episodes", 12, "--backend", LOCAL, cwd=tmp_path)
    folder = tmp_path / done.stdout.strip()
    episodes = read_rows(folder / "episodes/000000.jsonl")
    assert len(episodes) == 12
    scores = [e["score"]["value"] for e in episodes if e["score"]["valid"]]
    assert min(scores) < 1.0 < max(scores)
    task = load_task("battleOfSexes", "", "")
    best = sft.best_episodes(sft.Config(runs=(str(folder),), share=1.0), [task])
    assert best
    assert all(e["score"]["value"] > task.baseline for e in best)
    turns = read_mapping(PROJECT / "configs/grpo-cpu.yaml")["max_turns"]
    options = {"max_turns": turns, "prompts": AGENT_TEXTS}
    played = asyncio.run(play_once(env.Env(task, LOCAL), FakePolicy("hm"), **options))
    read = {(e["system"], e["prompt"], e["turns"][0]["note"]) for e in episodes}
    assert read == {(played.system, played.prompt, played.turns[0]["note"])}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes long on a GPU: run it by itself")
def test_the_check_of_a_gpu_runs_here(tmp_path):
    """In the precision of a GPU. Without the parts that need one, and those that are others with
    another setting.
    """
    parts = "parity without-adapter sync shared-prompt memory budget ahead training".split()
    check = PROJECT / "tools/gpu_check.py"
    done = python(check, "--dtype", "bfloat16", "--parts", *parts, "autocast", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    table = (tmp_path / "logs/gpu-check/table.md").read_text()
    assert "| failed |" not in table, table
    for part in parts:
        assert f"\n| {part} |" in table
    assert "| autocast | autocast | skipped | needs a GPU |" in table
