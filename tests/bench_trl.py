"""Runs TRL's GRPOTrainer and prints the seconds of each step as JSON.

    python tests/bench_trl.py MODEL STEPS PROMPTS EPISODES TOKENS VLLM

bench.py runs this in a process of its own. VLLM: 1 for vLLM in TRL's process, 0 for generate().
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from flatlab.train.memory import peak_bytes

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Clock(TrainerCallback):
    def __init__(self):
        self.took = []

    def on_step_begin(self, *args, **kwargs):
        self.begin = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.took.append(time.perf_counter() - self.begin)


def letter_share(completions, **_):
    """Reward: the share of letters in a reply."""
    rewards = []
    for completion in completions:
        text = completion[0]["content"] if isinstance(completion, list) else completion
        rewards.append(sum(c.isalpha() for c in text) / max(1, len(text)))
    return rewards


def main(model, steps, prompts, episodes, tokens, vllm):
    has_gpu = torch.cuda.is_available()
    options = {"generation_kwargs": {"min_new_tokens": tokens}}
    if vllm:
        options = {
            "generation_kwargs": {"ignore_eos": True},
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
        }
    config = GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=episodes,
        num_generations=episodes // prompts,
        max_steps=steps,
        max_completion_length=tokens,
        learning_rate=1e-4,
        beta=0.05,
        temperature=1.0,
        bf16=False,
        use_cpu=not has_gpu,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        **options,
    )
    lora = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=LAYERS
    )
    questions = [f"Write. {i}" for i in range(prompts * (steps + 1))]
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in questions]})
    trainer = GRPOTrainer(
        model=model, reward_funcs=letter_share, args=config, train_dataset=data, peft_config=lora
    )
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    memory = peak_bytes()
    if has_gpu:
        memory = torch.cuda.max_memory_allocated()
    note = f"TRL {trl.__version__}; peak memory {memory / 2**30:.1f} GiB"
    print("\n" + json.dumps({"took": clock.took, "note": note}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
