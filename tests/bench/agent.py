"""The sections `agent`, `train` and `ahead`: the training steps of ours and of TRL's, in turn.

    python -m bench.agent MODEL STEPS TURNS TOKENS VARIANT     one contestant

A contestant prints a result when it is ready and after each step, which it begins when a line
arrives. All variants do the same work: 16 rollouts (2 prompts of 8), each of TURNS replies of
TOKENS tokens with a command after each but the last, then one training step. A command waits and
does not compute, by tables that are the same for every variant: after the line "even" 0.1 s, after
"uneven" 0.02, 0.05 or 0.4 s, after "heavy" a log-normal time with a median of 0.1 s and a 99th
percentile of 1 s, after "slow" ten times that.

With --gpu the model has the shape of Qwen3-0.6B and random weights, and there are 64 rollouts
(8 prompts of 8) of 256 tokens a reply. Not run on a GPU yet.

VARIANT: "ours" (the functions of grpo.py), "compiled" (the same with a compiled engine), "ahead0",
"ahead1", ... (BLOCK steps in a row with --ahead 0, 1, ...; the mean of all but the first two, in
which the pipeline fills), "kept2" (--ahead 2, but after an update the episodes in flight keep the
keys and values of older weights, so that no history is read again), or of TRL
"factory" (environment_factory, a tool), "rollout" (rollout_func that calls the tools of a turn at
once in threads), "vllm" (no tools) or "generate" (the same with generate()). All but the last
sample with vLLM in the process of the trainer.
"""

import asyncio
import contextlib
import itertools
import os
import random
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench.floor import floor
from bench.measure import (
    PROJECT,
    compared,
    compete,
    print_result,
    spread,
    this_machine,
)

BEGIN = time.perf_counter()

GPU = "BENCH_GPU" in os.environ  # --gpu: the size of a step on a GPU
PROMPTS, EPISODES, CONTEXT = (8, 64, 4096) if GPU else (2, 16, 1024)
TOKENS = 256 if GPU else 24  # of a reply of an agent
GPU_SHARE = 0.1  # all contestants are there at the same time
PASS = 4 if GPU else EPISODES  # sequences of a training pass of TRL, whose logits are in memory
KL = 0.05
RATE = 1e-4
RANK = 16
OBSERVATION = "result " * 4
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BLOCK = 10  # steps of a round of "ahead"
FILLING = 2  # of them, not counted
# draws the seconds of a command
WAITS = {
    "even": lambda rng: 0.1,
    "uneven": lambda rng: rng.choice((0.02, 0.05, 0.4)),
    "heavy": lambda rng: 0.1 * rng.lognormvariate(0, 0.99),
    "slow": lambda rng: rng.lognormvariate(0, 0.99),
}

# One template for all. It leaves the list of tools out, so that all prompts are equally long.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SAMPLER = "vLLM in its process"
LABELS = {
    "ours": f"ours, {SAMPLER}",
    "compiled": f"ours, {SAMPLER}, compiled",
    "ahead0": f"ours, {SAMPLER}, a row of steps",
    "ahead1": f"ours, {SAMPLER}, --ahead 1",
    "ahead2": f"ours, {SAMPLER}, --ahead 2",
    "ahead4": f"ours, {SAMPLER}, --ahead 4",
    "kept2": f"ours, {SAMPLER}, --ahead 2, old keys and values",
    "factory": f"TRL environment_factory, {SAMPLER}",
    "rollout": f"TRL rollout_func, commands in threads, {SAMPLER}",
    "vllm": f"TRL, {SAMPLER}",
    "generate": "TRL, generate()",
}
GOALS = {("factory", "even"): 5.0, ("factory", "uneven"): 4.5, ("generate", "no"): 1.3}

PICTURE = PROJECT / "docs/pictures/step-floor.png"


# ---- the sections


def agent(args):
    """A training step of agents with several turns whose commands wait: ours and TRL's."""
    variants = ("ours", "ahead1", "ahead2", "factory", "rollout")
    if not GPU:  # where engines are compiled anyway
        variants += ("compiled",)
    headline, rows = race(args, variants, turns=4, tokens=TOKENS, waits=("even", "uneven"))
    has_floor = any("floor " in note for _, _, note in rows)  # it is known unless ours fails
    if args.write and has_floor and not args.only:
        PICTURE.write_bytes(picture_of(rows))
    return headline, rows


def picture_of(rows):
    """Seconds of a step, and its floor as a line: the content of a PNG file."""
    from flatlab.view import plots

    panels = {}  # kind of waits -> (name, seconds, floor) of each row
    for what, value, note in rows:
        waits, _, name = what.partition(": ")
        least = re.search(r"floor ([\d.]+) s", note)
        if least:
            name = name.replace(f", {SAMPLER}", "")
            panels.setdefault(waits, []).append((name, float(value.split()[0]), float(least[1])))
    figure = plots.new_figure(plots.PAGE, 2.6)
    first = None
    for place, (waits, points) in enumerate(panels.items(), 1):
        names, seconds, floors = zip(*points)
        axis = figure.add_subplot(1, len(panels), place, title=waits, sharey=first, xscale="log")
        first = first or axis
        axis.plot(floors, names, "|", color="black", markersize=14, label="floor")
        axis.plot(seconds, names, "o", color=plots.COLOURS[0], label="a step")
        axis.set_xticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
        axis.set_xlabel("seconds")
        axis.minorticks_off()
        axis.tick_params(labelleft=place == 1)
    first.invert_yaxis()
    figure.legend(*first.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return plots.encoded(figure, "png")


def ahead(args):
    """The steps of ours with --ahead 0, 1, 2 and 4."""
    variants = ("ahead0", "ahead1", "ahead2", "ahead4")
    return race(args, variants, turns=4, tokens=24, waits=("even", "uneven", "heavy", "slow"))


def train(args):
    """A training step of single replies: ours and TRL's."""
    variants = ("ours", "compiled", "generate", "vllm")
    return race(args, variants, turns=1, tokens=256, waits=("even",))


def race(args, variants, turns, tokens, waits):
    """(headline, rows) of args.steps rounds for each kind of wait."""
    rows = []
    waits = tuple(args.waits.split(",")) if args.waits else waits
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        model = args.model
        if model == "tiny":
            model = random_model(Path(folder) / "model")
        rounds = [waits[0], *(kind for kind in waits for _ in range(args.steps))]
        chosen = args.only.split(",") if args.only else variants
        commands = {name: ("agent", model, len(rounds), turns, tokens, name) for name in chosen}
        done, failed = compete(commands, rounds)
    for name, error in failed.items():
        rows.append((LABELS[name], "fails", error))
    for number, kind in enumerate(waits):
        part = slice(number * args.steps, (number + 1) * args.steps)
        results = {name: steps[part] for name, (_, steps) in done.items()}
        rows += rows_of(kind if turns > 1 else "no", results)
    size = "0.6 B" if GPU else "0.8 M"
    shown = f"random Qwen3 of {size} parameters" if args.model == "tiny" else Path(model).name
    work = f"{EPISODES} rollouts of {turns} turns of {tokens} tokens, then a step"
    return f"{this_machine()}; {shown}, {work}; median (range) of {args.steps} rounds in turn", rows


def random_model(folder):
    if GPU:
        from tools.gpu_check import random_model

        return random_model(folder)
    from helpers import make_model

    return make_model(folder)


def rows_of(waits, done):
    rows = []
    work = {(step["calls"], step["trained"]) for steps in done.values() for step in steps}
    ours = next((steps for steps in done.values() if "engine_floor" in steps[0]), None)
    for name, steps in done.items():
        seconds = [step["seconds"] for step in steps]
        cpu = statistics.median(step["cpu_seconds"] for step in steps)
        last = steps[-1]
        note = f"{cpu:.2f} CPU seconds"
        if ours:
            ahead = int(name.removeprefix("ahead")) if name.startswith("ahead") else 0
            least = statistics.fmean(floor_of(step, ours[0], ahead) for step in steps)
            note += f"; floor {least:.2f} s, {statistics.median(seconds) / least:.2f} x"
        note += f"; {last['calls']} commands, {last['trained']} of {last['tokens']} tokens trained"
        note += f"; peak memory {last['memory']:.1f} GiB"
        if "sampling" in last:
            sampling = statistics.median(step["sampling"] for step in steps)
            difference = max(step["difference"] for step in steps)
            note += f"; sampling {sampling:.2f} s; log-probs differ by {difference:.1g} nats"
        elif "lag" in last:
            lag, waited, idle = (
                statistics.median(step[key] for step in steps) for key in ("lag", "waited", "idle")
            )
            note += f"; mean lag {lag:.2f}; the trainer waited {waited:.2f} s"
            note += f"; engine idle {idle:.0%}"
            note += f"; a step reads {last['read']:.0f} and samples {last['sampled']:.0f} tokens"
            note += f"; log-probs of current tokens differ by {last['difference']:.1g} nats"
            if name != "ahead0" and "ahead0" in done:
                faster = statistics.median(
                    base["seconds"] / step["seconds"] for base, step in zip(done["ahead0"], steps)
                )
                note += f"; {faster:.2f} x as fast as ahead 0"
        elif len(work) > 1:
            note += "; no ratio: not the same work"
        elif "ours" in done:
            ratios, cpu_ratio = compared(steps, done["ours"])
            note += f"; {spread(ratios)} x ours, {cpu_ratio:.1f} x in CPU seconds"
            goal = GOALS.get((name, waits))
            if goal:
                reached = "reached" if statistics.median(ratios) >= goal else "missed"
                note += f"; goal {goal:g} x {reached}"
        rows.append((f"{waits} waits: {LABELS[name]}", f"{spread(seconds)} s", note))
    return rows


def floor_of(step, ours, ahead):
    """Seconds that a step needs at least, see floor.py; ours: a result that has its parts."""
    return floor(step["longest_wait"], ours["engine_floor"], ours["update_floor"], ahead)


# ---- a contestant


class Work:
    """The clock of a step, and what it has done, to check that all variants do the same."""

    def __init__(self, turns):
        self.turns = turns
        self.rounds = 0
        self.numbers = itertools.count()
        print_result(start=time.perf_counter() - BEGIN)

    def begin(self, steps=1):
        """Waits for its turn, and draws the seconds of every command, by rollout and turn."""
        kind = sys.stdin.readline().strip()
        if not kind:
            sys.exit()
        rng = random.Random(self.rounds)
        self.rounds += 1
        self.numbers = itertools.count()  # of the rollouts, as they are made
        self.waits = []
        for _ in range(steps * EPISODES):
            self.waits.append([WAITS[kind](rng) for _ in range(self.turns - 1)])
        chains = [sum(waits) for waits in self.waits]
        longest = [max(chains[i : i + EPISODES]) for i in range(0, len(chains), EPISODES)]
        self.longest_wait = statistics.fmean(longest)
        self.busy = 0.0  # seconds in steps of the engine
        self.read = 0  # tokens of prompts that the engine computed
        self.sampled = 0
        self.calls = 0
        self.trained = 0
        self.tokens = 0
        self.seconds = time.perf_counter()
        self.cpu_seconds = time.process_time()

    def end(self, seconds=None, steps=1, **parts):
        import torch

        from flatlab.train.metrics import peak_bytes

        print_result(
            seconds=seconds or time.perf_counter() - self.seconds,
            cpu_seconds=(time.process_time() - self.cpu_seconds) / steps,
            calls=self.calls,
            trained=self.trained,
            tokens=self.tokens,
            longest_wait=self.longest_wait,
            memory=peak_bytes("cuda" if GPU else "cpu") / 2**30,
            **parts,
        )
        if GPU:
            torch.cuda.empty_cache()  # for the next contestant


# ---- ours


def run_ours(model, rounds, turns, tokens, variant):
    import torch

    import grpo
    from bench.floor import counting_flops, engine_step_seconds, peak_flops
    from bench.models import make_endless
    from env import Step
    from flatlab import threads
    from flatlab.model.path import ModelPath
    from flatlab.options import EpisodeOptions, ModelOptions
    from flatlab.task.grading import Score
    from flatlab.train.job import TrainingRun, in_trainer
    from flatlab.world import prompts
    from flatlab.world.episode import play
    from policy import Policy
    from tasks import load_task

    class World:
        """Stands in for Env: commands that wait, and a random score."""

        sandbox = True

        def __init__(self, task, _, seed, ends_at_score):
            self.task, self.seed = task, seed
            self.left = list(work.waits[next(work.numbers) % len(work.waits)])

        def step(self, reply, timeout, act):
            if not self.left:
                return Step("", "submit", None, "submit", 0.0)
            work.calls += 1
            time.sleep(self.left.pop(0))
            return Step(OBSERVATION, "", None, "ok", 0.0)

        def score(self):
            # close to the baseline, where the reward is not clipped and no two are equal
            value = self.task.baseline + 0.01 * random.random()
            return Score(value, self.task.metric, "validation", True, "")

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

    is_row = variant.startswith(("ahead", "kept"))
    ahead = int(variant[-1]) if is_row else 0

    policy = Policy(
        ModelPath(model, None, False),
        ModelOptions(context=CONTEXT, compile=variant == "compiled", gpu_memory=GPU_SHARE),
        lora_rank=RANK,
        max_batch=EPISODES * (1 + ahead),
    )
    policy.tokenizer.chat_template = TEMPLATE
    make_endless(policy)
    work = Work(turns)
    grpo.env.Env = World
    grpo.KL_SHARE = 1.0  # the work of the other variants
    cfg = grpo.Config(
        seed=0,
        group_size=EPISODES // PROMPTS,
        kl=KL,
        micro_tokens=8192,
        lr=RATE,
        concurrency=EPISODES * (1 + ahead),
        episode=EpisodeOptions(
            max_turns=turns,
            max_reply_tokens=tokens,
            max_observation_tokens=256,
            prompts="configs/prompts/tiny.yaml",
        ),
    )
    # The messages are those of the other variants.
    prompts.episode_facts = lambda env, options: {}
    prompts.first_messages = lambda env, *_: ("", env.task.prompt)
    task = load_task("titanic", "", "")
    plan = [replace(task, prompt=f"Write. {i}") for i in range(PROMPTS)]
    job = TrainingRun(play=play)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)

    def counted_batch(*args):
        batch = make_batch(*args)
        work.trained = sum(sum(s.mask) for s in batch)
        work.tokens = sum(len(s.tokens) for s in batch)
        return batch

    make_batch = grpo.make_batch
    grpo.make_batch = counted_batch

    update, flops = counting_flops(grpo.update)  # in the first round, which is not measured
    floors = {}

    async def learn(groups):
        call = grpo.update if flops else update
        row = await in_trainer(call, policy, optimizer, groups, cfg, job)
        policy.sync()
        if variant == "kept2":
            policy._syncs = 0  # the salt of the prefix cache
        if not floors:
            floors["engine_floor"] = (
                turns * tokens * await engine_step_seconds(policy, EPISODES, tokens)
            )
            floors["update_floor"] = flops[0] / peak_flops(policy.device)
        return row

    def start(step):
        steps = grpo.Plan(plan, len(plan), cfg.group_size, step, order=step)
        return asyncio.create_task(grpo.play_groups(policy, steps, cfg, job))

    async def single_steps():
        for step in range(rounds):
            work.begin()
            groups = await start(step)
            sampling = time.perf_counter() - work.seconds
            row = await learn(groups)
            work.end(sampling=sampling, difference=row["logprob_diff_max"], **floors)

    def measured_engine():
        begin = time.perf_counter()
        outputs = engine_step()
        work.busy += time.perf_counter() - begin
        for output in outputs:
            work.read += len(output.prompt_token_ids) - output.num_cached_tokens
            work.sampled += len(output.outputs[0].token_ids)
        return outputs

    async def rows_of_steps():
        if ahead:  # as in grpo.begin
            await in_trainer(threads.use_all, policy.decode_threads)
        for number in range(rounds):
            work.begin(BLOCK + ahead)
            playing, ends, lags, waits, differences = [], [], [], [], [0.0]
            for step in range(BLOCK):
                while len(playing) <= step + ahead:
                    playing.append(start(number * 1000 + len(playing)))
                begin = time.perf_counter()
                groups = await playing[step]
                waits.append(time.perf_counter() - begin)
                row = await learn(groups)
                lags.append(row["lag_mean"])
                differences.append(row.get("logprob_diff_max", 0.0))
                ends.append(time.perf_counter())
                if step == FILLING - 1:
                    work.busy, work.read, work.sampled = 0.0, 0, 0
            seconds = ends[-1] - ends[FILLING - 1]
            idle = 1 - work.busy / seconds
            for later in playing[BLOCK:]:
                later.cancel()
            await asyncio.wait(playing)
            work.calls = EPISODES * (turns - 1)  # of a step
            work.end(
                seconds=seconds / (BLOCK - FILLING),
                steps=BLOCK,
                lag=statistics.fmean(lags[FILLING:]),
                waited=statistics.fmean(waits[FILLING:]),
                idle=idle,
                read=work.read / (BLOCK - FILLING),
                sampled=work.sampled / (BLOCK - FILLING),
                difference=max(differences),
                **floors,
            )

    if variant == "kept2":
        policy.engine.reset_prefix_cache = bool  # in sync()
    engine_step = policy.step_engine
    policy.step_engine = measured_engine
    asyncio.run(rows_of_steps() if is_row else single_steps())


# ---- TRL


def call_the_tool(*_, **__):
    """Stands in for TRL's parser: every reply of the model is a call of the tool."""
    function = {"name": "bash", "arguments": {"command": "true"}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def make_environment(work):
    """An environment of TRL with one tool, whose commands wait."""

    class World:
        def __init__(self):
            self._number = next(work.numbers)

        def reset(self, **row):
            self._turn = 0

        def get_reward(self):
            return random.random()

        def bash(self, command: str) -> str:
            """Runs a command.

            Args:
                command: the command
            """
            seconds = work.waits[self._number][self._turn]
            self._turn += 1
            work.calls += 1
            time.sleep(seconds)
            return OBSERVATION

    return World


def make_rollout(make_world, turns):
    """A rollout_func whose rollouts take turns together, with the commands of a turn at once."""
    pool = ThreadPoolExecutor(EPISODES)

    def rollout(prompts, trainer):
        encode = trainer.processing_class.encode
        prompt_ids, *_ = trainer._tokenize_prompts(prompts)
        worlds = [make_world() for _ in prompts]
        for world in worlds:
            world.reset()
        completions = [[] for _ in prompts]
        logprobs = [[] for _ in prompts]
        masks = [[] for _ in prompts]
        for turn in range(turns):
            if turn:
                for i, text in enumerate(pool.map(lambda world: world.bash("true"), worlds)):
                    after = encode(
                        f"<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
                        add_special_tokens=False,
                    )
                    completions[i] += after
                    logprobs[i] += [0.0] * len(after)
                    masks[i] += [0] * len(after)
            contexts = [prompt + done for prompt, done in zip(prompt_ids, completions)]
            replies = zip(*trainer._generate_single_turn(contexts, None, {}, 1))
            for i, (reply, sampled) in enumerate(replies):
                completions[i] += reply
                logprobs[i] += sampled
                masks[i] += [1] * len(reply)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": logprobs,
            "env_mask": masks,
            "score": [world.get_reward() for world in worlds],
        }

    return rollout


def reward(completions, **_):
    return [random.random() for _ in completions]


def variant_options(variant, world, turns, tokens):
    """(arguments of TRL's trainer, fields of its config) of a variant."""
    if variant == "generate":
        exactly = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        fields = {"generation_kwargs": exactly, "max_completion_length": tokens}
        return {"reward_funcs": reward}, fields
    fields = {
        "generation_kwargs": {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True},
        "max_completion_length": CONTEXT,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": CONTEXT,
        "vllm_gpu_memory_utilization": GPU_SHARE,
    }
    if variant == "factory":
        return {"environment_factory": world}, fields
    if variant == "rollout":
        rollout = make_rollout(world, turns)
        return {"rollout_func": rollout, "reward_funcs": lambda score, **_: score}, fields
    return {"reward_funcs": reward}, fields


def run_trl(model, steps, turns, tokens, variant):
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

    if variant != "generate":
        from vllm import _custom_ops

        # oneDNN's packed copies of the weights replace them, and TRL could not load new ones.
        _custom_ops._supports_onednn = False
    work = Work(turns)
    arguments, fields = variant_options(variant, make_environment(work), turns, tokens)
    if variant == "factory":
        grpo_trainer.parse_response = call_the_tool
    config = trl.GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=PASS,
        gradient_accumulation_steps=EPISODES // PASS,
        num_generations=EPISODES // PROMPTS,
        max_steps=steps,
        max_tool_calling_iterations=turns - 1 or None,
        learning_rate=RATE,
        beta=KL,
        temperature=1.0,
        bf16=GPU,
        use_cpu=not GPU,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=False,
        **fields,
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
        **arguments,
    )
    trainer.add_callback(Steps())
    trainer.train()


def main(model, steps, turns, tokens, variant):
    from flatlab import threads

    threads.configure()
    if variant in ("ours", "compiled") or variant.startswith(("ahead", "kept")):
        run_ours(model, steps, turns, tokens, variant)
    else:
        run_trl(model, steps, turns, tokens, variant)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
