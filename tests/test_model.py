"""Tests of flatlab/model/memory.py and flatlab/threads.py, of the stand-in model in configs/tiny,
and of what tools/ offers: a pretrained model, demonstrations and the check of a GPU.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import env
import sft
from bench import gpu
from flatlab.files import read_mapping
from flatlab.model import memory, packing
from flatlab.model.lora_sync import at_most
from flatlab.options import ModelOptions
from flatlab.train import metrics
from flatlab.train.batch import TrainSequence, micro_batches
from flatlab.tree import requests
from flatlab.world.prompts import load_prompts
from helpers import (
    AGENT_TEXTS,
    LOCAL,
    PROJECT,
    TINY_TEXTS,
    FakePolicy,
    attempts_of,
    output_of,
    play_once,
    python,
    user_error,
)
from policy import Engine, Policy, Trainer, gpu_engine_options
from tasks import load_task
from tools import gpu_sums, make_tiny

# ---------------------------------------------------------------------------- memory

GIB = 2**30
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49152
)


SIZES = SMOLLM2, 4, False


def test_the_estimate_agrees_with_what_was_measured():
    """135 M parameters in fp32: 2048 tokens trained in 8 GiB, engine included; 16384 took > 24."""
    assert 3 * GIB < memory.bytes_needed(2048, *SIZES, 0) < 8 * GIB
    assert memory.bytes_needed(16384, *SIZES, 0) > 24 * GIB
    assert memory.bytes_needed(2048, *SIZES, 30) < 2.5 * GIB


@pytest.fixture
def kept(monkeypatch):
    """kept(config, lengths) -> the bytes of all tensors that a forward pass over a packed row keeps
    for the backward pass, on meta tensors, with the varlen attention and the fused norms of a GPU.
    """

    def attention(q, k, v, **_):
        return Saves.apply(q, k, v)

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *others):
            y = torch.empty_like(x)
            ctx.save_for_backward(x, *others, y)
            return y

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.empty_like(x)

    def fused(norm, x):
        return Norm.apply(x, norm.weight)

    monkeypatch.setattr(packing, "fused_norm", fused)

    def kept(config, lengths):
        tokens = sum(lengths)
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            x = torch.empty(1, tokens, config.hidden_size, dtype=base.dtype, requires_grad=True)
            positions = torch.arange(tokens)[None]
        trainer = Trainer(base, dict(gpu.LORA), 1.0)
        packing.fuse_norms(trainer.model)
        weights = {p.untyped_storage()._cdata for p in trainer.model.parameters()}
        storages = {}

        def keep(x):
            storage = x.untyped_storage()
            if storage._cdata not in weights:
                storages[storage._cdata] = x, storage.nbytes()
            return x

        layout = packing.Layout(lengths, [None] * len(lengths), attention)
        options = {"position_ids": positions, "layout": layout, "use_cache": False}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            trainer.model.get_base_model().base_model(inputs_embeds=x, **options)
        return sum(size for _, size in storages.values())

    return kept


@pytest.mark.parametrize("name", gpu_sums.SHAPES)
def test_the_numbers_that_a_layer_keeps_are_counted(kept, name):
    """Bytes of one more layer and token."""
    config, found = gpu_sums.config_of(name), []
    for config.num_hidden_layers in (2, 1):
        found.append(kept(config, [0, 384]) - kept(config, [0, 128]))
    a_token = (found[0] - found[1]) / 256
    expected = 2 * memory.layer_numbers(config, is_lean=True)
    assert expected <= a_token < 1.02 * expected  # LoRA's products are the rest


@pytest.mark.parametrize("name", gpu_sums.SHAPES)
def test_copies_of_a_common_prompt_take_memory_with_varlen(kept, name):
    """1 and 40 sequences in rows of 1,280 tokens, 480 of them the prompt's. 40 keep 39 copies more
    of its keys and values (128 numbers of 8 heads each), and FlashAttention's backward pass makes
    gradients of them for each head, which no CPU sees.
    """
    config = gpu_sums.config_of(name)
    config.num_hidden_layers = 1
    copies = 39 * 480
    more = kept(config, [480, *[20] * 40]) - kept(config, [480, 800])
    assert more == copies * 2 * (2 * 8 * 128)
    config = gpu_sums.config_of(name)
    layers, backward = config.num_hidden_layers, 2 * 128 * (2 * config.num_attention_heads + 2 * 8)

    def needed(tokens):
        return memory.bytes_needed(tokens, config, 2, True, layers)

    pieces = [([1] * 480 + [n] * 20, [0] * 480 + [1] * 20) for n in range(40)]
    trainer = SimpleNamespace(model=SimpleNamespace(config=config), packs=True)
    trainer.uses_varlen = False
    row = Trainer.pass_tokens(trainer, pieces)
    assert row == 479 + 40 * 21  # the last token of the prompt is computed for each sequence
    trainer.uses_varlen = True
    more = needed(Trainer.pass_tokens(trainer, pieces)) - needed(row)
    assert more == pytest.approx(40 * 479 * (2 * (2 * 8 * 128) + backward), rel=0.02)


def test_the_tokens_of_a_training_pass_follow_from_model_and_memory():
    def fit(free):
        return memory.fit_micro_tokens(free, 8192, "cpu", SIZES, 0)

    assert (fit(16 * GIB), fit(4 * GIB)) == (2048, 512)
    with user_error("The model does not fit: a training pass over 256 tokens needs about 0.8 GiB"):
        fit(GIB // 4)


def group_of_8():
    """Sequences of a common prompt of 2,048 tokens and 1,920 others."""
    return [TrainSequence([0] * 2049 + [1] * 1919, [0] * 2048 + [1] * 1920, [], [], [])] * 8


def trainer_on(monkeypatch, device, free, config, context, adapter=66_000_000):
    """A stand-in with what fit_micro_tokens() reads, and so much free memory."""
    monkeypatch.setattr(memory, "free_bytes", lambda *_: free)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    adapter = torch.empty(adapter, device="meta")
    trainer = SimpleNamespace(
        device=device,
        dtype=dtype,
        context=context,
        packs=True,
        uses_varlen=device == "cuda",
        model=SimpleNamespace(config=config),
        parameters=lambda: [adapter],
    )
    trainer.pass_tokens = partial(Trainer.pass_tokens, trainer)
    return trainer


@pytest.mark.parametrize(
    "context, wanted, processes, tokens, count",
    [
        (4096, None, 1, 2048, 0),
        (4096, 1024, 1, 1024, 0),
        (4096, 16384, 1, 16384, 20),
        (4096, None, 4, 4096, 23),
        (16384, None, 1, 8192, 20),
        (131072, None, 1, 8192, 30),
    ],
)
def test_as_few_layers_as_necessary_are_recomputed(
    monkeypatch, capsys, context, wanted, processes, tokens, count
):
    """A pass over a whole context has to fit, and the last one does not."""
    policy = trainer_on(monkeypatch, "cpu", 16 * GIB // processes, SMOLLM2, context)
    free = 16 * GIB // processes
    assert Trainer.fit_micro_tokens(policy, wanted) == tokens
    largest = max(context, wanted or 0)
    fits = [memory.bytes_needed(largest, *SIZES, n) <= free for n in range(31)]
    assert fits[count] == any(fits)
    assert count == 0 or not fits[count - 1]
    out = capsys.readouterr().out
    assert out.count(f"recomputes {count} of 30 layers") == bool(count)
    assert out.count("the run may end there") == (not any(fits))


@pytest.mark.parametrize(
    "free, tokens, recomputed",
    [(9.2, 12867, [33, 36]), (46, 32768, [0, 19]), (107, 32768, [0, 0])],
    ids=["24 GB", "80 GB", "141 GB"],
)
def test_a_pass_recomputes_what_its_own_tokens_need(monkeypatch, free, tokens, recomputed):
    """Qwen3-4B beside the KV cache of default flags. By hand: 1.46 GiB for a prefill, 0.74 for
    gradients and moments, and 0.9 of the rest: 6.3, 39.4 and 94.3. A pass takes 2 bytes of 36 x
    64,512 + 29,184 numbers a token and 1.25 GiB of logits: 37.1 for 8,192 tokens, 77.5 for 17,408.
    If all layers are recomputed, 36 x 2560 + 64,512 + 29,184 numbers: 4.1 and 7.3.
    """
    config = gpu_sums.config_of("Qwen/Qwen3-4B-Instruct-2507")
    trainer = trainer_on(monkeypatch, "cuda", int(free * GIB), config, 16384)
    assert Trainer.fit_micro_tokens(trainer) == tokens
    assert trainer.room / GIB == pytest.approx(0.9 * (free - 1.46 - 0.74), abs=0.02)
    counts = [memory.layers_to_recompute(n, trainer.sizes, trainer.room) for n in (8192, 17408)]
    assert counts == recomputed
    parts = list(micro_batches(group_of_8(), trainer))
    assert len(parts) == (1 if tokens > 17408 else 2)


def test_more_tokens_than_fit_into_a_pass_are_not_taken(monkeypatch, capsys):
    """32,768 as in the preset for 80 GB, on a card of 48 GB: 12.6 GiB are needed, 0.9 of 6.9 are
    there.
    """
    config = gpu_sums.config_of("Qwen/Qwen3-4B-Instruct-2507")
    trainer = trainer_on(monkeypatch, "cuda", int(9.12 * GIB), config, 16384)
    assert Trainer.fit_micro_tokens(trainer, 32768) == trainer.micro_tokens == 12867
    out = capsys.readouterr().out
    assert "--micro-tokens 32768 does not fit: passes of 12867 do" in out
    assert "the run may end there" not in out
    assert Trainer.fit_micro_tokens(trainer, 4096) == 4096


def test_the_limits_of_control_groups_count(tmp_path):
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{5 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {2 * GIB}\n")
    assert memory.left_in_cgroup(tmp_path) == 5 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.left_in_cgroup(tmp_path) == sys.maxsize
    assert memory.left_in_cgroup(tmp_path / "elsewhere") == sys.maxsize
    assert 0 < memory.free_bytes("cpu", processes=4) < memory.free_bytes("cpu") < 2**50


def cache_of(monkeypatch, device, free, config, context, *, rank=16, requests=32, share=None):
    """Bytes of an engine's KV cache, and what it prints; a GPU has 2 GiB that others use."""
    sizes = {"config": config, "context": context, "dtype": torch.bfloat16}
    engine = SimpleNamespace(device=device, **sizes)
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), int(free) + 2 * GIB))
    return Engine.kv_cache_bytes(engine, 4_022_468_096, rank, requests, share)


def test_the_kv_cache_of_a_cpu_holds_whole_contexts_if_they_fit(monkeypatch, random_model):
    """Two numbers (k, v) of 2 bytes for 4 layers of 2 heads of 32: 1 KiB a token."""
    config = AutoConfig.from_pretrained(random_model)
    block = memory.BLOCK * 1024  # vLLM's own

    def cache(room, context, requests):
        return cache_of(monkeypatch, "cpu", 4 * room, config, context, requests=requests)

    assert cache(GIB, 1024, 64) == 64 * 2**20 + block
    assert cache(GIB, 1024, 10**6) == GIB
    assert cache(2**20 + block, 1024, 64) == 2**20 + block
    with user_error("it needs 1.0 GiB .KV cache of one context 1.0., and there are 1.0: lower --c"):
        cache(GIB, 2**20, 64)


def test_the_kv_cache_of_a_gpu_holds_typical_episodes_and_no_more(monkeypatch, capsys):
    """Qwen3-4B: 144 KiB a token, and 10.8 GiB that the engine needs beside the cache."""
    config = gpu_sums.config_of("Qwen/Qwen3-4B-Instruct-2507")
    token = 144 * 1024

    def cache(free, **options):
        return cache_of(monkeypatch, "cuda", free * GIB, config, 16384, **options)

    typical = (32 * 4096 + memory.BLOCK) * token
    assert cache(74) == cache(140) == cache(74, share=0.45) == typical
    assert cache(74, requests=64, rank=0) == (64 * 4096 + memory.BLOCK) * token
    assert cache(74, requests=1) == (16384 + memory.BLOCK) * token  # one whole context, at least
    assert capsys.readouterr().out == ""
    whole = {free: cache(free) / GIB for free in (22.2, 30)}
    assert whole[22.2] == pytest.approx(3.95, abs=0.01)
    assert whole[30] - whole[22.2] == pytest.approx(7.8)  # all that the trainer leaves
    said = capsys.readouterr().out
    assert "cache of 4.0 GiB holds 7 of 32 episodes of 4096 tokens: the others wait" in said
    assert cache(74, share=0.25) / GIB == pytest.approx(0.25 * 76 - 10.83, abs=0.01)
    with user_error("it needs 20.5 GiB .base weights 7.5, .* and there are 11.1: lower --context"):
        cache(11.1)
    with user_error("it needs 13.1 GiB .* and there are 12.0"):  # a share is of what is free
        cache(12, share=1.0)


@pytest.mark.parametrize("size, room", [(24, 22.2), (80, 74)])
def test_default_flags_and_the_preset_fit_a_card_and_its_head_has_these_sums(size, room):
    rows = {name: rest for name, *rest in gpu_sums.sums(int(room * GIB))}
    preset = f"configs/grpo-{size}gb.yaml"
    for name in ("grpo.py, learn.py", "sft.py", "search.py", "evaluate.py", preset):
        assert rows[name][0] == "runs", rows[name]
    head = (PROJECT / preset).read_text()
    parts = re.findall(r"([^,]+?)(?: of \d+ of \d+ episodes)? (\d+\.\d\d)", rows[preset][1])
    assert len(parts) == 8
    for name, gib in parts[:-1]:
        assert re.search(rf"^# +{name.strip()} +{float(gib):.1f} ", head, re.MULTILINE), name
    total = room - float(parts[-1][1])
    assert re.search(rf"^# +sum +{total:.1f} ", head, re.MULTILINE)


def test_a_pass_of_the_preset_for_24_gb_takes_several_episodes(monkeypatch):
    """Beside a KV cache that takes what is left. A group of 8 x (2,048 + 1,920) tokens, with the
    prompt once a pass: 23,552 tokens.
    """
    preset = read_mapping(PROJECT / "configs/grpo-24gb.yaml")
    config, context = gpu_sums.config_of(preset["model"]), preset["context"]
    requests = preset["concurrency"]
    cache = cache_of(monkeypatch, "cuda", 22.2 * GIB, config, context, requests=requests)
    assert 24 <= cache * requests // memory.cache_bytes(config, 2, context // 4, requests)
    needs = memory.gpu_needs(config, 2, 4_022_468_096, 16, context, requests)
    used = [needs[name] for name in ("base weights", "CUDA graphs", "CUDA's own")]
    free = int(22.2 * GIB) - cache - sum(used) - 4 * 33_000_000
    trainer = trainer_on(monkeypatch, "cuda", free, config, context, adapter=33_000_000)
    Trainer.fit_micro_tokens(trainer, preset.get("micro_tokens"))
    parts = [[s.tokens for s in part] for part in micro_batches(group_of_8(), trainer)]
    assert [2048 + sum(len(tokens) - 2048 for tokens in part) for part in parts] == [5888] * 4


def test_the_sums_of_memory_are_printed():
    said = output_of("tools/gpu_sums.py", "--total", "24")
    assert "grpo-24gb.yaml   runs: base weights 7.49, CUDA graphs" in said


def test_graphs_are_captured_up_to_max_batch():
    compilation = gpu_engine_options(30)["compilation_config"]
    sizes = [1, 2, 4, 8, 16, 24, 30, 128, 256, 512]
    assert compilation == {"cudagraph_capture_sizes": sizes}


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it():
    ballast = torch.ones(GIB // 16)  # 256 MiB
    code = "from flatlab.train.metrics import peak_bytes; print(peak_bytes())"
    assert 2**20 < int(output_of("-c", code)) < 4 * len(ballast) / 2
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
    assert output_of("-c", code, env=environment).split() == ["1", "PASSIVE"]


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
    valid_share = sum(episode.valid for episode in episodes) / EPISODES
    assert valid_share >= LOWEST_VALID_SHARE, f"{name}: {valid_share:.0%} are valid. {ADVICE}"


@pytest.mark.slow
@pytest.mark.parametrize("name", make_tiny.Config.tasks)
@pytest.mark.parametrize("mode", ["uniform", "tail", "sequence"])
def test_it_lists_strategies_when_a_search_asks(tiny_policy, mode, name):
    texts = load_prompts(TINY_TEXTS)
    task = load_task(name)
    about = requests.task_text(texts, task, {})
    question = requests.ask(texts, task, None, [], about=about, mode=mode, k=5, tau=0.1)
    tokens = tiny_policy.render([{"role": "user", "content": question}])
    replies = for_each_seed(lambda seed: tiny_policy.sample(tokens, 160, seed))
    usable = sum(len(requests.parse(reply.text)[0]) >= 3 for reply in replies)
    assert usable >= LOWEST_VALID_SHARE * EPISODES, f"{usable} lists are usable. {ADVICE}"


# ---------------------------------------------------------------------------- tools


@pytest.mark.slow
def test_demonstrations_are_scored_can_be_imitated_and_have_the_texts_of_an_episode(tmp_path):
    tool = PROJECT / "tools/demonstrations.py"
    said = output_of(tool, "--episodes", 12, "--backend", LOCAL, cwd=tmp_path)
    folder = tmp_path / said.strip()
    episodes = attempts_of(folder, "0")
    assert len(episodes) == 12
    scores = [e["score"] for e in episodes if e["score"] is not None]
    assert min(scores) < 1.0 < max(scores)
    task = load_task("battleOfSexes", "", "")
    best = sft.best_episodes(sft.Config(runs=(str(folder),), share=1.0), [task])
    assert best
    improved = {e["id"] for e in episodes if (e["improvement"] or 0) > 0}
    assert {transcript["id"] for transcript in best} <= improved
    turns = read_mapping(PROJECT / "configs/grpo-cpu.yaml")["max_turns"]
    options = {"max_turns": turns, "prompts": AGENT_TEXTS}
    played = asyncio.run(play_once(env.Env(task, LOCAL), FakePolicy("hm"), **options))
    read = {(e["system"], e["prompt"]) for e in episodes}  # notes depend on what was run
    assert read == {(played.system, played.prompt)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_set_up_for_a_gpu_fails_where_torch_finds_none():
    command = ["make", "-n", "DEVICE=gpu", "READY=ready", "setup"]
    made = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=True).stdout
    [code] = re.findall(r"python -c '(from transformers [^']+)'", made)
    done = python("-c", f"import torch; {code.partition('yaml;')[2].strip()}")
    assert done.returncode == 1
    assert "torch finds no GPU" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes long on a GPU: run it by itself")
def test_the_check_of_a_gpu_runs_here(tmp_path):
    """In the precision of a GPU."""
    check = PROJECT / "tools/gpu_check.py"
    shutil.copytree(PROJECT / "configs/tiny", tmp_path / "model")
    output_of(check, "--dtype", "bfloat16", "--model", "model", cwd=tmp_path)
    table = (tmp_path / "logs/gpu-check/table.md").read_text()
    assert "| failed |" not in table, table
    for part in ("parity", "budget", "update", "decode", "start", "start-twice"):
        assert f"\n| {part} |" in table
