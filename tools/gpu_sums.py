"""The memory of a GPU by sums, no card needed: what scripts and presets need, and whether it fits.

python tools/gpu_sums.py --total 24      a card of 24 GB
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatlab import threads
from flatlab.errors import UserError
from flatlab.files import read_mapping
from flatlab.runs.cli import one_sentence, parse_configs

ROOT = Path(__file__).resolve().parents[1]
GIB_PER_GB = 22.2 / 24  # what an A10G shows
SHAPES = {  # hidden size, layers, heads, intermediate size, one matrix for both embeddings
    "Qwen/Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen/Qwen3-4B-Instruct-2507": (2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B": (4096, 36, 32, 12288, False),
}
# scripts and presets -> what differs from these defaults
DEFAULTS = {"model": "Qwen/Qwen3-4B-Instruct-2507", "context": 16384}
DEFAULTS |= {"concurrency": 32, "lora_rank": 16}
CASES = {
    "grpo.py, learn.py": {},
    "the same, Qwen3-0.6B": {"model": "Qwen/Qwen3-0.6B"},
    "the same, Qwen3-8B": {"model": "Qwen/Qwen3-8B"},
    "sft.py": {"concurrency": 8},
    "search.py": {"concurrency": 8, "lora_rank": 0},
    "evaluate.py": {"lora_rank": 0},
    "configs/grpo-24gb.yaml": read_mapping(ROOT / "configs/grpo-24gb.yaml"),
    "configs/grpo-80gb.yaml": read_mapping(ROOT / "configs/grpo-80gb.yaml"),
}


@dataclass(frozen=True)
class Config:
    total: float = 80  # GB of a card


def config_of(name: str, **options):
    """The config of one of SHAPES."""
    from transformers import Qwen3Config

    hidden, layers, heads, inner, tied = SHAPES[name]
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        **options,
    )


def sums(room: int) -> list:
    """Sums of each of CASES on a GPU with so many bytes, and whether it runs there."""
    import torch
    from transformers import Qwen3ForCausalLM

    from flatlab.model import memory

    rows = []
    for name, given in CASES.items():
        case = DEFAULTS | given
        config = config_of(case["model"])
        with torch.device("meta"):
            weights = Qwen3ForCausalLM(config).num_parameters()
        context, requests = case["context"], case["concurrency"]
        needs = memory.gpu_needs(config, 2, weights, case["lora_rank"], context, requests)
        least = memory.cache_bytes(config, 2, context)
        wanted = memory.cache_bytes(config, 2, int(memory.TYPICAL_EPISODE * context), requests)
        try:
            cache = memory.fit_cache(least, wanted, needs, room)
        except UserError as error:
            rows.append((name, "does not fit", str(error)))
            continue
        fit = min(requests, cache * requests // wanted)
        needs |= {f"KV cache of {fit} of {requests} episodes": cache}
        needs |= {"left": room - sum(needs.values())}
        parts = [f"{what} {size / 2**30:.2f}" for what, size in needs.items()]
        rows.append((name, "runs", ", ".join(parts)))
    return rows


def main() -> None:
    threads.configure()
    [cfg] = parse_configs(Config, sys.argv[1:])
    for name, result, parts in sums(int(cfg.total * GIB_PER_GB * 2**30)):
        print(f"{name:24} {result}: {parts}")


if __name__ == "__main__":
    one_sentence(main)
