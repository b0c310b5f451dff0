"""Makes the laptop-size stand-in model from scratch: `python tiny.py` prints its directory as the last line of stdout.

A Qwen3 of about one million parameters with its own byte-level BPE learns, in a few minutes on two CPU cores, to
imitate the scripted expert of expert.py on the built-in tasks: the very prompts and observations of env.py, solutions
of deliberately mixed quality, planted mistakes, so that reinforcement learning has something to improve.
It re-weights programs it has seen and knows nothing else: a stand-in that makes the whole system run on a laptop,
no evidence that small models can do research.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import inspect
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@dataclasses.dataclass(frozen=True)
class Config:
    """What is built; every field changes the name of the directory."""

    steps: int = 400  # warm-start steps; each is one batch per task
    transcripts: int = 2400  # scripted episodes per task
    batch: int = 16  # episodes per task and step
    vocab: int = 2048
    hidden: int = 128
    layers: int = 4
    seed: int = 0


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer and model

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def train_tokenizer(texts: list[str], vocab: int):
    """Byte-level BPE that is pre-split at newlines only, so that a line is a few tokens of up to 16 characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"Strategy: [^\n]*"), "isolated"
            ),  # the same tokens at the end of a message, too
            pre_tokenizers.Split(Regex("\n"), "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab,
            max_token_length=16,
            special_tokens=SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return tokenizer


def encode_episode(tokenizer, talk: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Tokens of the chat-templated episode, and which of them the model has to say itself."""
    ids, own = [], []

    def add(text: str, said: bool) -> None:
        new = tokenizer.encode(text).ids
        ids.extend(new)
        own.extend([said] * len(new))

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
        )
    )


def batch_loss(model, batch: list[tuple[list[int], list[bool]]], pad: int):
    """Mean cross-entropy of what the model has to say. The common beginning (the prompt) is run once per batch."""
    import torch
    from transformers import DynamicCache

    first = batch[0][0]
    shared = min(
        next((i for i, (a, b) in enumerate(zip(first, ids)) if a != b), len(first))
        for ids, _ in batch
    )
    shared = min(shared, min(own.index(True) for _, own in batch) - 1)
    width = max(len(ids) for ids, _ in batch) - shared
    tokens = torch.full((len(batch), width), pad)
    mask = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, (ids, own) in enumerate(batch):  # right padding: causal attention never looks at it
        tokens[row, : len(ids) - shared] = torch.tensor(ids[shared:])
        mask[row, : len(ids) - shared] = torch.tensor(own[shared:])
    device = model.device
    tokens, mask = tokens.to(device), mask.to(device)
    prefix = model.model(
        torch.tensor([first[:shared]], device=device), use_cache=True
    ).past_key_values
    cache = DynamicCache()
    for number, layer in enumerate(
        prefix.layers
    ):  # gradients flow through the expanded keys and values
        cache.update(
            layer.keys.expand(len(batch), -1, -1, -1),
            layer.values.expand(len(batch), -1, -1, -1),
            number,
        )
    hidden = model.model(tokens[:, :-1], past_key_values=cache).last_hidden_state
    logits = model.lm_head(hidden[mask[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), tokens[:, 1:][mask[:, 1:]])


def repeat_loss(model, vocab: int, rows: int = 32, width: int = 12):
    """Random tokens, said twice. Looking back is learned here first; without it hardly any strategy is followed."""
    import torch

    tokens = torch.randint(len(SPECIAL), vocab, (rows, width), device=model.device).repeat(1, 2)
    logits = model(tokens).logits[:, width - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, width:].flatten())


def batches(rng: random.Random, episodes: list, size: int):
    """Endless batches of episodes of similar length."""
    while True:
        order = rng.sample(episodes, len(episodes))
        for start in range(0, len(order), 8 * size):
            chunk = sorted(order[start : start + 8 * size], key=lambda episode: len(episode[0]))
            groups = [chunk[i : i + size] for i in range(0, len(chunk), size)]
            yield from rng.sample(groups, len(groups))


def train(model, sources: list[list], config: Config, pad: int) -> float:
    """Warm start on a batch of each source per step; returns the loss of the last 20 steps.

    Muon for the matrices, AdamW for embeddings and norms: several times faster here than AdamW alone.
    """
    import torch

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimisers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    decay = torch.optim.lr_scheduler.LambdaLR
    schedules = [
        decay(
            optimiser,
            lambda step: min((step + 1) / 10, 1.0, (config.steps - step) / (0.4 * config.steps)),
        )
        for optimiser in optimisers
    ]  # linear at both ends
    rng = random.Random(config.seed)
    streams = [batches(rng, rows, config.batch) for rows in sources]
    losses, start = [], time.time()
    for step in range(config.steps):
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
        progress(f"warm start, loss {losses[-1]:.2f}, step", step + 1, config.steps, start)
    return sum(losses[-20:]) / len(losses[-20:])


def progress(text: str, done: int, total: int, start: float) -> None:
    """A line on stderr with the time left: it overwrites itself on a terminal; else there is one every ten seconds."""
    now, terminal = time.time(), sys.stderr.isatty()
    if terminal or done == total or now - progress.printed > 10:
        line = f"tiny: {text} {done}/{total}, {(now - start) / done * (total - done):.0f} s left"
        end = "" if terminal and done < total else "\n"
        print(f"\r{line:<79}" if terminal else line, end=end, file=sys.stderr, flush=True)
        progress.printed = now


progress.printed = time.time()


# ----------------------------------------------------------------------------------------------------------------------
# Building once: named by the content it comes from, complete or not there at all


def content_hash(config: Config) -> str:
    """Changes with all the model is made of: this file, expert, tasks' files, the texts of env.py and prompts.py."""
    import env
    from flatlab.tree import prompts
    from tasks import load_task
    from tools import expert

    digest = hashlib.sha256(
        repr(config).encode() + Path(__file__).read_bytes() + Path(expert.__file__).read_bytes()
    )
    for said in (
        env.first_message,
        env.run_text,
        env.score_text,
        env.extract_action,
        prompts.situation,
        prompts.ask,
    ):
        digest.update(inspect.getsource(said).encode())
    digest.update(repr((prompts.ASK, prompts.FORM, prompts.LIST_FORM)).encode())
    for task in (
        load_task(name, "", "") for name in expert.TABLES
    ):  # the built-in ones, whatever $MLGYM_ROOT is
        digest.update(repr((task.prompt, task.baseline, task.metric)).encode())
        for path in sorted([*task.public.values(), *task.hidden.values()]):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatlab"


@contextlib.contextmanager
def locked(path: Path):
    """Holds an exclusive lock on a file; a second builder waits here, and then finds the model."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                "tiny: another process is building the stand-in model, waiting for it",
                file=sys.stderr,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_or_build(config: Config) -> Path:
    """The directory of the model; built in a temporary directory beside it and renamed when complete."""
    target = cache_dir() / f"tiny-{content_hash(config)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_suffix(".lock")):
        if not target.is_dir():
            for left in target.parent.glob(f".{target.name}-*"):  # of a builder that was killed
                shutil.rmtree(left)
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                build(work, config)
                work.chmod(0o755)
                work.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def any_backend() -> str:
    """The local sandbox, which starts in 30 ms; Docker where this machine has no way to isolate a process."""
    import env
    from flatlab.errors import UserError

    try:
        return env.pick_backend("local", model_is_tiny=True)[0]
    except UserError:
        return env.pick_backend("docker")[0]


def build(directory: Path, config: Config) -> None:
    """Writes a Hugging Face model directory that transformers and vLLM load: config, weights, tokenizer."""
    from tools import expert

    start = time.time()
    print(
        "tiny: building the stand-in model from scratch; it is kept for the next time",
        file=sys.stderr,
        flush=True,
    )
    worlds = expert.worlds(
        any_backend(), lambda done, of: progress("programs of the scripted expert", done, of, start)
    )
    rng = random.Random(config.seed)
    talks = [
        [expert.episode(rng, world) for _ in range(config.transcripts)] for world in worlds.values()
    ]
    lessons = [
        [expert.copy_lesson(rng, world) for _ in range(config.transcripts)]
        for world in worlds.values()
    ]
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # else threads that wait for a busy machine's cores burn them
    from transformers import GenerationConfig, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    texts = [f"{role}\n{text}" for rows in talks for talk in rows for role, text in talk]
    tokenizer = train_tokenizer(texts, config.vocab)
    pad, _, end = (tokenizer.token_to_id(token) for token in SPECIAL)
    model = new_model(config, tokenizer)
    sources = [[encode_episode(tokenizer, talk) for talk in rows] for rows in talks + lessons]
    loss = train(model, sources, config, pad)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=[SPECIAL[1]],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    print(
        f"tiny: built in {time.time() - start:.0f} s, {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million "
        f"parameters, loss {loss:.3f}",
        file=sys.stderr,
    )


def main() -> None:
    import tyro

    import tasks

    config = tyro.cli(Config, description=__doc__)
    try:
        print(find_or_build(config))
    except tasks.UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
