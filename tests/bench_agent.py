"""Runs agents of several turns with one trainer, a step for each line of its standard input.

    python tests/bench_agent.py MODEL STEPS VARIANT     bench.py runs this in its own process

It prints one JSON line when it is ready and one after each step. Every variant does the same work:
16 rollouts (2 prompts of 8), each of 4 replies of 24 tokens with a command after each but the last,
then one training step. A command waits and does not compute: after the line "even" 0.1 s each,
after the line "uneven" 0.02, 0.05 or 0.4 s by a table that is the same for every variant.

VARIANT: "ours" (the functions of grpo.py), "compiled" (the same with a compiled engine), or of TRL
"factory" (environment_factory, a tool), "factory-async" (an async tool), "rollout" (rollout_func
that calls the tools of a turn at once in threads) or "continuous" (the same with the continuous
batching of transformers). "floor" prints the seconds of the model's own matrix products instead.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from bench import RESULT, make_endless, median_seconds  # and the project is on sys.path

BEGIN = time.perf_counter()

PROMPTS = 2
EPISODES = 16
TURNS = 4
TOKENS = 24  # of a reply
CONTEXT = 1024
KL = 0.05
RATE = 1e-4
RANK = 16
OBSERVATION = "result " * 4
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Without these sizes the cache of continuous batching takes most of the memory.
CACHE = {"page_size": 32, "num_blocks": 256, "max_batch_tokens": 4096}

# One template for all. It leaves the list of tools out, so that all prompts are equally long.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


WAITS = {"even": (0.1,), "uneven": (0.02, 0.05, 0.4)}  # seconds


def make_waits(choices):
    """Seconds of every command, by rollout and turn."""
    rng = random.Random(0)
    return [[rng.choice(choices) for _ in range(TURNS - 1)] for _ in range(EPISODES)]


class Work:
    """The clock of a step, and what it has done, to check that all variants do the same."""

    def __init__(self):
        self.numbers = itertools.cycle(range(EPISODES))  # of the rollouts, as they are made
        print_result(start=time.perf_counter() - BEGIN)

    def begin(self):
        """Waits for its turn."""
        kind = sys.stdin.readline().strip()
        if not kind:
            sys.exit()
        self.waits = make_waits(WAITS[kind])
        self.calls = 0
        self.trained = 0
        self.tokens = 0
        self.seconds = time.perf_counter()
        self.cpu_seconds = time.process_time()

    def end(self, **parts):
        print_result(
            seconds=time.perf_counter() - self.seconds,
            cpu_seconds=time.process_time() - self.cpu_seconds,
            calls=self.calls,
            trained=self.trained,
            tokens=self.tokens,
            **parts,
        )


def print_result(**result):
    """Prints a line that bench.py tells apart from what TRL prints."""
    print("\n" + RESULT + json.dumps(result), flush=True)


# ---- ours


def run_ours(model, steps, compiled):
    import torch

    import grpo
    from env import Step
    from flatlab.episode.grading import Score
    from flatlab.train.distributed import SingleProcess
    from policy import ModelPath, Policy
    from tasks import load_task

    class World:
        """Stands in for Env: commands that wait, and a random score."""

        sandbox = None

        def __init__(self, task, *_):
            self.task = task
            self.left = work.waits[next(work.numbers)]

        def reset(self):
            return self.task.prompt

        def step(self, reply, timeout):
            if not self.left:
                return Step("", True, None, "submit", 0.0)
            work.calls += 1
            time.sleep(self.left.pop(0))
            return Step(OBSERVATION, False, None, "ok", 0.0)

        def score(self):
            # close to the baseline, where the reward is not clipped and no two are equal
            value = self.task.baseline + 0.01 * random.random()
            return Score(value, self.task.metric, "validation", True, "")

        def close(self):
            pass

    policy = Policy(
        ModelPath(model, None, False),
        context=CONTEXT,
        lora_rank=RANK,
        lora_alpha=2 * RANK,
        compile=compiled,
    )
    policy.tokenizer.chat_template = TEMPLATE
    make_endless(policy)
    work = Work()
    grpo.env.Env = World
    cfg = grpo.Config(
        group_size=EPISODES // PROMPTS,
        max_turns=TURNS,
        clip_low=0.2,
        clip_high=0.28,
        kl=KL,
        micro_tokens=8192,
        lr=RATE,
    )
    cfg.model.max_reply_tokens = TOKENS
    cfg.model.max_observation_tokens = 256
    task = load_task("titanic", "", "")
    plan = [replace(task, prompt=f"Write. {i}") for i in range(PROMPTS)]
    dist = SingleProcess()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)

    async def run():
        for step in range(steps):
            work.begin()
            groups = await grpo.play_groups(policy, plan, cfg.group_size, cfg, step, dist)
            sampling = time.perf_counter() - work.seconds
            batch = grpo.make_batch(policy, groups, cfg, dist)
            grpo.update(policy, optimizer, batch, cfg, dist)
            policy.sync()
            work.trained = sum(sum(s.mask) for s in batch)
            work.tokens = sum(len(s.tokens) for s in batch)
            work.end(sampling=sampling)

    with profiled():
        asyncio.run(run())


@contextlib.contextmanager
def profiled():
    """With $BENCH_PROFILE=FILE, writes a profile of what runs inside, in CPU seconds."""
    path = os.environ.get("BENCH_PROFILE")
    if not path:
        yield
        return
    import cProfile

    with cProfile.Profile(time.process_time) as profile:
        yield
    profile.dump_stats(path)


# ---- TRL


def call_the_tool(*_, **__):
    """Stands in for TRL's parser: every reply of the model is a call of the tool."""
    function = {"name": "bash", "arguments": {"command": "true"}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def environments(work):
    """Two environments of TRL: one with a tool, one with an async tool."""

    class Environment:
        def __init__(self):
            self._number = next(work.numbers)

        def reset(self, **row):
            self._turn = 0

        def get_reward(self):
            return random.random()

        def _next_wait(self):
            seconds = work.waits[self._number][self._turn]
            self._turn += 1
            work.calls += 1
            return seconds

    class World(Environment):
        def bash(self, command: str) -> str:
            """Runs a command.

            Args:
                command: the command
            """
            time.sleep(self._next_wait())
            return OBSERVATION

    class AsyncWorld(Environment):
        async def bash(self, command: str) -> str:
            """Runs a command.

            Args:
                command: the command
            """
            await asyncio.sleep(self._next_wait())
            return OBSERVATION

    return World, AsyncWorld


def make_rollout(make_world):
    """A rollout_func whose rollouts take turns together, with the commands of a turn at once."""
    pool = ThreadPoolExecutor(EPISODES)

    def rollout(prompts, trainer):
        encode = trainer.processing_class.encode
        prompt_ids, *_ = trainer._tokenize_prompts(prompts)
        worlds = [make_world() for _ in prompts]
        for world in worlds:
            world.reset()
        completions = [[] for _ in prompts]
        masks = [[] for _ in prompts]
        for turn in range(TURNS):
            if turn:
                for i, text in enumerate(pool.map(lambda world: world.bash("true"), worlds)):
                    after = encode(
                        f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
                        add_special_tokens=False,
                    )
                    completions[i] += after
                    masks[i] += [0] * len(after)
            contexts = [prompt + done for prompt, done in zip(prompt_ids, completions)]
            replies, _ = trainer._generate_single_turn(contexts, None, {}, 1)
            for i, reply in enumerate(replies):
                completions[i] += reply
                masks[i] += [1] * len(reply)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
            "score": [world.get_reward() for world in worlds],
        }

    return rollout


def run_trl(model, steps, variant):
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer import grpo_trainer

    class Trainer(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            mask = inputs["completion_mask"]
            work.trained += int((mask * inputs.get("tool_mask", mask)).sum())
            work.tokens += int(mask.sum() + inputs["prompt_mask"].sum())
            return super()._compute_loss(model, inputs)

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            work.begin()

        def on_step_end(self, *args, **kwargs):
            work.end()

    work = Work()
    world, async_world = environments(work)
    if variant.startswith("factory"):
        grpo_trainer.parse_response = call_the_tool
        make = async_world if variant == "factory-async" else world
        options = {"environment_factory": make}
    else:
        options = {
            "rollout_func": make_rollout(world),
            "reward_funcs": lambda score, **_: score,
        }
    generation = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    if variant == "continuous":  # which ignores min_new_tokens
        generation = {"max_new_tokens": TOKENS, "eos_token_id": -1}
    config = trl.GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=EPISODES,
        num_generations=EPISODES // PROMPTS,
        max_steps=steps,
        max_completion_length=CONTEXT,
        max_tool_calling_iterations=TURNS - 1,
        generation_kwargs=generation,
        use_transformers_continuous_batching=variant == "continuous",
        transformers_continuous_batching_config=CACHE if variant == "continuous" else None,
        learning_rate=RATE,
        beta=KL,
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = {"unused": True}
    questions = [f"Write. {i % 10}" for i in range(PROMPTS * (steps + 1))]
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in questions]})
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=LAYERS
    )
    trainer = Trainer(
        model=model,
        args=config,
        train_dataset=data,
        peft_config=lora,
        processing_class=tokenizer,
        **options,
    )
    trainer.add_callback(Steps())
    trainer.train()


# ---- the floor


def matrix_seconds(layers, rows):
    """Seconds in which torch multiplies `rows` rows with each of these weights, median of 5."""
    import torch

    inputs = [torch.randn(rows, layer.in_features) for layer in layers]

    def once():
        for x, layer in zip(inputs, layers):
            torch.nn.functional.linear(x, layer.weight)

    with torch.no_grad():
        once()
        return median_seconds(once, 5)


def floor(model):
    """Seconds of the matrix products that a step cannot do without, and what they consist of.

    Sampling computes every token once, training once forward, once backward and once more for the
    KL term. A group's prompt counts once. Attention and the adapter are left out.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from flatlab.chat import ChatTokens

    chat = ChatTokens(model)
    chat.tokenizer.chat_template = TEMPLATE
    prompt = len(chat.render([{"role": "user", "content": "Write. 0"}]))
    after = len(chat.observation_tokens(OBSERVATION, False))
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    sampled = EPISODES * TURNS * TOKENS
    read = PROMPTS * prompt + EPISODES * (TURNS - 1) * after

    decode = TURNS * TOKENS * matrix_seconds([*layers, head], EPISODES)
    block = EPISODES * after
    forward = matrix_seconds(layers, block) / block
    scored = matrix_seconds([head], block) / block
    prefill = read * forward
    one_pass = (read + sampled) * forward + sampled * scored
    weights = sum(layer.weight.numel() for layer in layers)
    count = weights + head.weight.numel()
    decode_rate = 2 * count * sampled / decode / 1e9
    rate = 2 * weights / forward / 1e9
    return {
        "seconds": decode + prefill + 3 * one_pass,
        "sampling": decode + prefill,
        "training": 3 * one_pass,
        "note": f"{decode_rate:.0f} GFLOP/s at {EPISODES} rows, {rate:.0f} at {block} rows",
    }


def main(model, steps, variant):
    from flatlab import threads

    threads.configure()
    if variant == "floor":
        print_result(**floor(model))
    elif variant in ("ours", "compiled"):
        run_ours(model, steps, variant == "compiled")
    else:
        run_trl(model, steps, variant)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
