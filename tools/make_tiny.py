"""Builds the stand-in model of configs/tiny from scratch; needed only after its prompts changed.

    python tools/make_tiny.py       about ten minutes on two CPU cores
    python tools/make_tiny.py --tasks autocorrelation --out logs/tiny-autocorrelation

A Qwen3 of about one million parameters with its own byte-level BPE learns to imitate the scripted
expert of expert.py on the tasks of its TABLES. It sees the same prompts and observations as any
agent, solutions of deliberately mixed quality and planted mistakes, so that reinforcement learning
has something to improve. The model re-weights programs it has seen and knows nothing else: it makes
the whole system run on a laptop and says nothing about what small models can do.
"""

import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Config:
    tasks: tuple[str, ...] = ("titanic", "battleOfSexes", "erdosOverlap")  # of expert.TABLES
    out: Path = ROOT / "configs" / "tiny"  # folder to write to
    steps: int = 400  # training steps; each uses one batch per task
    transcripts: int = 2400  # scripted episodes per task
    batch: int = 16  # episodes per task and step
    vocab: int = 2048  # size of the vocabulary
    hidden: int = 128  # hidden size
    layers: int = 4  # number of layers
    seed: int = 0  # of the episodes and the weights


# ----------------------------------------------------------------------------------------------
# Tokenizer and model

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_tokenizer(texts: list[str], vocab: int):
    """Trains a byte-level BPE that splits only at newlines, so that a line is a few tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    # A strategy gets the same tokens at the end of a message as in the middle.
    strategy = pre_tokenizers.Split(Regex(r"Strategy: [^\n]*"), "isolated")
    line = pre_tokenizers.Split(Regex("\n"), "merged_with_previous")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([strategy, line, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        max_token_length=16,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_episode(tokenizer, talk: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Returns the tokens of the episode in the chat template, and which of them are trained."""
    ids, own = [], []

    def add(text: str, is_own: bool) -> None:
        new = tokenizer.encode(text).ids
        ids.extend(new)
        own.extend([is_own] * len(new))

    for role, text in talk:
        add(f"<|im_start|>{role}\n", False)
        add(f"{text}<|im_end|>", role == "assistant")
        add("\n", False)
    return ids[:-1], own[:-1]  # nothing follows the last <|im_end|>


def new_model(config: Config, tokenizer):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(config.seed)
    pad, _, end = (tokenizer.token_to_id(token) for token in SPECIAL)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.hidden // 32,
            num_key_value_heads=max(1, config.hidden // 64),
            head_dim=32,
            intermediate_size=3 * config.hidden,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
            stand_in=True,  # so that this model gets the texts and settings that it was made for
        )
    )


# ----------------------------------------------------------------------------------------------
# Training


def common_prefix(first: list[int], second: list[int]) -> int:
    """Number of tokens that both start with."""
    length = 0
    for a, b in zip(first, second):
        if a != b:
            break
        length += 1
    return length


def batch_loss(model, batch: list[tuple[list[int], list[bool]]], pad: int):
    """Mean cross-entropy of the trained tokens. The common prompt is computed once per batch."""
    import torch
    from transformers import DynamicCache

    first = batch[0][0]
    shared = min(common_prefix(first, ids) for ids, _ in batch)
    shared = min(shared, min(own.index(True) for _, own in batch) - 1)
    width = max(len(ids) for ids, _ in batch) - shared
    tokens = torch.full((len(batch), width), pad)
    mask = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, (ids, own) in enumerate(batch):  # right padding: causal attention never looks at it
        tokens[row, : len(ids) - shared] = torch.tensor(ids[shared:])
        mask[row, : len(ids) - shared] = torch.tensor(own[shared:])
    prompt = torch.tensor([first[:shared]])
    prefix = model.model(prompt, use_cache=True).past_key_values
    cache = DynamicCache()
    for number, layer in enumerate(prefix.layers):  # gradients flow through the expanded tensors
        keys = layer.keys.expand(len(batch), -1, -1, -1)
        values = layer.values.expand(len(batch), -1, -1, -1)
        cache.update(keys, values, number)
    hidden = model.model(tokens[:, :-1], past_key_values=cache).last_hidden_state
    logits = model.lm_head(hidden[mask[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), tokens[:, 1:][mask[:, 1:]])


def repeat_loss(model, vocab: int, rows: int = 32, width: int = 12):
    """Cross-entropy of the second half of random tokens repeated once.

    It teaches the model to look back; without it, hardly any strategy in a prompt is followed.
    """
    import torch

    tokens = torch.randint(len(SPECIAL), vocab, (rows, width)).repeat(1, 2)
    logits = model(tokens).logits[:, width - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, width:].flatten())


def batches(rng: random.Random, episodes: list, size: int):
    """Yields batches of episodes of similar length, without end."""
    while True:
        order = rng.sample(episodes, len(episodes))
        for start in range(0, len(order), 8 * size):
            chunk = sorted(order[start : start + 8 * size], key=lambda episode: len(episode[0]))
            groups = [chunk[i : i + size] for i in range(0, len(chunk), size)]
            yield from rng.sample(groups, len(groups))


def train(model, sources: list[list], config: Config, pad: int) -> float:
    """Trains on a batch of each source per step; returns the mean loss of the last 20 steps.

    Muon for the matrices and AdamW for embeddings and norms train several times faster here than
    AdamW alone. The learning rate rises for 10 steps and falls over the last 40 % of them.
    """
    import torch
    from tqdm import tqdm

    def learning_rate(step: int) -> float:
        return min((step + 1) / 10, 1.0, (config.steps - step) / (0.4 * config.steps))

    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    optimisers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, learning_rate) for o in optimisers]
    rng = random.Random(config.seed)
    streams = [batches(rng, rows, config.batch) for rows in sources]
    losses = []
    bar = tqdm(range(config.steps), "training", mininterval=5)
    for _ in bar:
        losses.append(0.0)
        repeat_loss(model, config.vocab).backward()
        for stream in streams:
            loss = batch_loss(model, next(stream), pad) * 2 / len(streams)
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules):
            optimiser.step()
            schedule.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    return sum(losses[-20:]) / len(losses[-20:])


# ----------------------------------------------------------------------------------------------
# The folder


def any_backend() -> str:
    """Returns the local sandbox, which starts in 30 ms, or docker if there is none here."""
    import env
    from flatlab.errors import UserError

    try:
        return env.pick_backend("local", stand_in=True)[0]
    except UserError:
        return env.pick_backend("docker")[0]


def build(config: Config) -> None:
    """Writes a Hugging Face model folder in bfloat16: config, weights, tokenizer, README.md."""
    import torch
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    from tools import expert

    start = time.time()
    worlds = expert.worlds(any_backend(), config.tasks).values()
    rng = random.Random(config.seed)
    count = range(config.transcripts)
    talks = [[expert.episode(rng, world) for _ in count] for world in worlds]
    lessons = [[expert.copy_lesson(rng, world) for _ in count] for world in worlds]
    texts = [f"{role}\n{text}" for rows in talks for talk in rows for role, text in talk]
    tokenizer = train_tokenizer(texts, config.vocab)
    pad, _, end = (tokenizer.token_to_id(token) for token in SPECIAL)
    model = new_model(config, tokenizer)
    sources = [[encode_episode(tokenizer, talk) for talk in rows] for rows in talks + lessons]
    loss = train(model, sources, config, pad)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=end, pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(config.out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(config.out)
    write_note(config, loss, time.time() - start)


def write_note(config: Config, loss: float, seconds: float) -> None:
    """Writes README.md: where the weights come from."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    text = f"""# The stand-in model

A Qwen3 of about one million parameters that imitates the scripted expert in `tools/expert.py` on
{", ".join(config.tasks)}. It exists so that everything runs on a laptop; it knows nothing else.

- made by: `python tools/make_tiny.py --seed {config.seed} --steps {config.steps}`
- commit: {commit}, {date.today()}
- time: {seconds:.0f} s on {os.cpu_count()} cores
- training loss at the end: {loss:.3f}; stored in bfloat16
"""
    (config.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    import tyro

    from flatlab import threads
    from flatlab.errors import UserError

    config = tyro.cli(Config, description=__doc__)
    threads.configure()
    try:
        build(config)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
