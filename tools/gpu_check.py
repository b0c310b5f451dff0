"""Does my card work? Checks and measures in a few minutes what a machine without one cannot.

    python tools/gpu_check.py                        all parts, one after the other
    python tools/gpu_check.py --parts parity start   some of them
    python tools/gpu_check.py --dtype bfloat16       on a CPU: with the precision of a GPU

Each part runs in a process of its own, so that it survives the crash of another. The table is
printed and written to logs/gpu-check/table.md after every part; paste it into tests/BENCHMARKS.md.
Without a GPU the same code runs with the small stand-in model, as a test of itself. Experiments are
in tests/bench/gpu.py, and the sums of its memory in tools/gpu_sums.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatlab import threads
from flatlab.errors import UserError, nearest
from flatlab.files import write_whole
from flatlab.runs.cli import one_sentence, parse_configs
from tools.gpu_sums import config_of

ROOT = Path(__file__).resolve().parents[1]
DTYPE = None  # that of --dtype
SECONDS = 300  # time limit of a part
REQUESTS = 64  # without a GPU 8 of 32 tokens
TOKENS = 128  # of a request
PROMPT = 256  # tokens
CONTEXT = 2048  # tokens
EPISODES = 8
FOLDER = Path("logs/gpu-check")


@dataclass(frozen=True)
class Config:
    parts: tuple[str, ...] = ()  # names of parts; default: all
    model: str | None = None  # default: a random model with the shape of Qwen3-0.6B; CPU: tiny
    # of model and engine; default: bfloat16 on a GPU, float32 on a CPU
    dtype: Literal["bfloat16", "float32"] | None = None
    part: str = ""  # runs one part in this process and prints its rows as JSON


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def random_model(folder: Path, name: str = "Qwen/Qwen3-0.6B") -> str:
    """A random model with this shape and the tokenizer of the stand-in. It stays: the path of a
    model is a part of the key of vLLM's compile cache. One that was cut while it was written is
    made again.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs" / "tiny")
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = config_of(name, max_position_embeddings=16384, bos_token_id=None, **ends)
        torch.manual_seed(0)
        with torch.device("cuda" if has_gpu() else "cpu"):
            model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
        del model
        torch.cuda.empty_cache()  # it is the memory of others now
    return str(folder)


def make_policy(model: str, **options):
    from flatlab.model.path import resolve_model
    from flatlab.options import ModelOptions
    from policy import Policy

    Policy.dtype = DTYPE
    model_options = ModelOptions(context=CONTEXT)
    return Policy(resolve_model(model), model_options, max_batch=REQUESTS, **options)


def gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def prompt_of(policy, number: int) -> list[int]:
    """Different prompts of about PROMPT tokens."""
    text = f"{number} " + "x" * 20 * PROMPT
    return policy.render([{"role": "user", "content": text}])[:PROMPT]


def update_batch(policy) -> list:
    """EPISODES sequences with a common prompt, as pairs (tokens, mask)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    prompt = prompt_of(policy, 0)
    mask = [0] * len(prompt) + [1] * TOKENS
    shape = EPISODES, TOKENS
    replies = torch.randint(0, len(policy.tokenizer), shape, generator=generator).tolist()
    return [(prompt + reply, mask) for reply in replies]


def one_update(policy, batch) -> tuple:
    """(log-probs, gradients) of one forward and backward pass."""
    import torch

    policy.model.zero_grad()
    logp = policy.logprobs(batch)[0]
    logp.mean().backward()
    if has_gpu():
        torch.cuda.synchronize()
    grads = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return logp.detach(), grads


def apart_text(one: tuple, other: tuple) -> str:
    """Compare two updates of one_update(): the distance of their log-probs and gradients."""
    (logp, grads), (other_logp, other_grads) = one, other
    apart = (logp - other_logp).abs().max().item()
    relative = ((grads - other_grads).norm() / other_grads.norm()).item()
    return f"log-probs {apart:.1g}, gradients {relative:.1g} apart"


def timed_update(policy, batch) -> tuple:
    """(log-probs and gradients, seconds, peak bytes) of the second of two updates."""
    import torch

    one_update(policy, batch)
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    found = one_update(policy, batch)
    seconds = time.perf_counter() - begin
    return found, seconds, torch.cuda.max_memory_allocated() if has_gpu() else 0


# ------------------------------------------------------------------------------ parts
# Each returns rows (what, value, note).


def parity(model: str) -> list:
    """Engine against trainer."""
    policy = make_policy(model)
    rows = []
    for name, found in asyncio.run(policy.verify()).items():
        text = f"mean {found.mean:.2g}, largest {found.largest:.2g} nats"
        rows.append((f"log-prob difference, {name}", text, f"limit {policy.diff_limit:.2g}"))
    return rows


def budget(model: str) -> list:
    """Free memory beside engine and trainer, and whether the largest training pass fits into it."""
    from flatlab.model import memory

    policy = make_policy(model)
    left = memory.free_bytes(policy.device)
    most = policy.fit_micro_tokens()
    length = min(most, policy.context)
    sequence = ([0] * length, [0] + [1] * (length - 1))
    _, seconds, peak = timed_update(policy, [sequence] * (most // length))
    note = f"beside engine and trainer {gib(left)} were free"
    return [(f"a pass of {most} tokens", f"{seconds:.2f} s", f"peak {gib(peak)}; {note}")]


def update(model: str) -> list:
    """One update of episodes with a common prompt; with all layers recomputed it is the same."""
    policy = make_policy(model)
    batch = update_batch(policy)
    kept, seconds, peak = timed_update(policy, batch)
    policy.recompute_layers(policy.model.config.get_text_config().num_hidden_layers)
    again, slower, _ = timed_update(policy, batch)
    note = f"with all layers recomputed {slower:.3f} s, {apart_text(again, kept)}"
    return [(f"update of {EPISODES} episodes", f"{seconds:.3f} s", f"peak {gib(peak)}; {note}")]


def decode(model: str) -> list:
    """Tokens per second of the engine with the adapter, of the second of two rounds."""
    policy = make_policy(model, trains=False)
    prompts = [prompt_of(policy, i) for i in range(REQUESTS)]

    async def sample_all():
        requests = [policy.sample(prompt, TOKENS, seed=i) for i, prompt in enumerate(prompts)]
        return sum(len(sample.tokens) for sample in await asyncio.gather(*requests))

    for _ in range(2):
        begin = time.perf_counter()
        count = asyncio.run(sample_all())
    rate = count / (time.perf_counter() - begin)
    return [("decode", f"{rate:.0f} tokens/s", f"{REQUESTS} requests, {count} tokens")]


def start(model: str) -> list:
    """Seconds of a start; the second one finds the code of the first one in vLLM's cache."""
    from vllm.compilation.counter import compilation_counter

    begin = time.perf_counter()
    make_policy(model, trains=False)
    loaded = compilation_counter.num_aot_artifacts_loaded
    note = f"{loaded} compiled artifacts from the cache"
    return [("start", f"{time.perf_counter() - begin:.1f} s", note)]


def start_twice(model: str) -> list:
    """Two starts with a cache that is empty before, each in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"VLLM_CACHE_ROOT": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        rows = [run_part("start", model, DTYPE)[0] for _ in range(2)]
    return [(name, *row[1:]) for name, row in zip(("first start", "second start"), rows)]


def model_made(model: str) -> list:
    """Makes the random model, in a process whose memory is free afterwards."""
    begin = time.perf_counter()
    random_model(Path(model))
    return [("random model", f"{time.perf_counter() - begin:.1f} s", model)]


PARTS = {"parity": parity, "budget": budget, "update": update, "decode": decode}
PARTS |= {"start": start, "start-twice": start_twice}


# ------------------------------------------------------------------------------ start


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()] or ["no message"]
    return lines[-1][:300]


def run_part(name: str, model: str, dtype: str | None) -> list:
    """The rows of a part, from a process of its own; one row with the reason if it fails."""
    command = [sys.executable, __file__, "--part", name, "--model", model]
    if dtype:
        command += ["--dtype", dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [(name, "failed", f"took longer than {SECONDS} s")]
    if done.returncode:
        return [(name, "failed", last_line(done.stderr))]
    return json.loads(done.stdout.strip().splitlines()[-1])


def table_of(rows: list) -> str:
    lines = ["| part | what | value | note |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def describe() -> str:
    import torch
    import vllm

    name = torch.cuda.get_device_name() if has_gpu() else "no GPU: small shapes on the CPU"
    return f"{name}, torch {torch.__version__}, vLLM {vllm.__version__}"


def main() -> None:
    threads.configure()
    [cfg] = parse_configs(Config, sys.argv[1:])
    if cfg.part:
        global DTYPE, REQUESTS, TOKENS
        DTYPE = cfg.dtype
        if not has_gpu():
            REQUESTS, TOKENS = 8, 32
        part = model_made if cfg.part == "model" else PARTS[cfg.part]
        print("\n" + json.dumps(part(cfg.model)))
        return
    for part in cfg.parts:
        if part not in PARTS:
            raise UserError(f"Unknown part {part!r}; {nearest(part, [*PARTS])}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    heading = describe()
    print(heading, flush=True)
    model, parts = cfg.model or "tiny", [*(cfg.parts or PARTS)]
    if has_gpu() and not cfg.model:
        model = str(FOLDER / "qwen3-0.6b")
        parts.insert(0, "model")
    rows = []
    for name in parts:
        begin = time.monotonic()
        found = run_part(name, model, cfg.dtype)
        rows += [(name, *row) for row in found]
        write_whole(FOLDER / "table.md", f"{heading}\n\n{table_of(rows)}")
        for what, value, note in found:
            print(f"{name:16} {what}: {value}   ({note})")
        print(f"{name:16} took {time.monotonic() - begin:.0f} s", flush=True)
    print(f"\nPaste {FOLDER}/table.md into tests/BENCHMARKS.md, with the date and the command.")


if __name__ == "__main__":
    one_sentence(main)
