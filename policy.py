"""The model: a vLLM engine that samples and a PyTorch LoRA model that learns, in one process.

    policy = Policy(resolve_model("tiny"))
    sample = await policy.sample(policy.render(messages), max_tokens=160)   # many at once share the engine's batch
    logp, entropy = policy.logprobs([(tokens, mask), ...])                  # with gradient, only where mask is 1
    policy.sync()                                                           # trained adapter -> running engine, in place

How it departs from the usual set-up:
1. No server, no second process, no files between trainer and engine: `sync()` copies A and scaling*B of every LoRA
   layer into the engine's own buffers (about a millisecond). The base weights are never merged, so they never drift.
2. Tokens in, tokens out. A sampled reply is kept as the engine's tokens with the engine's log-probs; an observation is
   appended as new tokens. Nothing is decoded and tokenised again, and text can never turn into control tokens.
3. `verify()` compares engine and trainer on a probe before training, with a random adapter, without one and with the
   trained one; a stale or broken sync is the most expensive silent fault of this kind of system: it stops the run.

Letters: B sequences, T tokens, N loss positions, D hidden size, V vocabulary.
What is known of vLLM's insides is in weights.py.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from flatlab.episode.episode import Sample
from flatlab.errors import UserError
from flatlab.train.lora_sync import Slots, on_weights_of, served_model
from flatlab.train.tensors import save_tensors

LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TINY = Path(__file__).resolve().parent / "configs" / "tiny"  # the stand-in model
ENGINE_RANKS = (8, 16, 32, 64, 128, 256)  # what vLLM's LoRA buffers can be sized for


@dataclass(frozen=True)
class ModelPath:
    base: str  # folder or Hugging Face name of the causal LM
    adapter: str | None  # folder of a trained LoRA adapter (`logs/<run>/best`), or None
    is_tiny: bool  # the stand-in model


def resolve_model(name: str) -> ModelPath:
    """Finds the model before anything heavy is loaded. Raises UserError."""
    if name == "tiny":
        return ModelPath(str(TINY), None, True)
    folder = Path(name).expanduser()
    if (folder / "adapter_config.json").is_file():
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        if base.startswith("/") and not Path(base).is_dir():
            raise UserError(
                f"the adapter {folder} was trained on {base}, which is not there any more"
            )
        return ModelPath(base, str(folder), Path(base).name == "tiny")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder} holds neither a model (config.json) nor an adapter (adapter_config.json)"
            )
        return ModelPath(str(folder), None, folder.resolve() == TINY)
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"unknown model {name!r}: no such folder, and the Hugging Face hub or its local cache does not "
            f"give it ({type(error).__name__}); try --model tiny"
        ) from None
    return ModelPath(name, None, False)


class Policy:
    """One causal LM, twice: sampled by vLLM, trained through LoRA.

    path: from `resolve_model`. context: most tokens of prompt plus reply. temperature: of sampling; the trainer's
    log-probs use the same. lora_rank, lora_alpha: ignored when the path holds an adapter (its own are used).
    max_batch: most requests the engine works on at once. gpu_memory: share of the GPU the engine may take.
    value_head: a linear value estimate on the trunk's hidden states, trained with the adapter (PPO).
    checkpointing: recompute the layers' activations in the backward pass: a third slower, memory of one layer, not all.
    packing: sequences one after the other in a row instead of padded rows (see `_packed`).
    share_base: on a GPU the trainer uses the engine's copy of the base weights. Its mapping is tested on a CPU with a
    stand-in for the engine; it has not been run on a GPU yet. `verify()` would stop a run in which it were wrong.
    trains: False for search and evaluation: the trainer's copy of the model stays out of the GPU.
    """

    def __init__(
        self,
        path: ModelPath,
        context: int = 4096,
        temperature: float = 1.0,
        lora_rank: int = 16,
        lora_alpha: int = 32,
        seed: int = 0,
        max_batch: int = 64,
        gpu_memory: float = 0.45,
        value_head: bool = False,
        checkpointing: bool = False,
        packing: bool = False,
        share_base: bool = False,
        trains: bool = True,
    ):
        os.environ.setdefault(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )  # in this process: nothing runs unless stepped
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        logging.getLogger("vllm").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()

        self.path, self.context, self.temperature, self.version = path, context, temperature, 0
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            torch._dynamo.config.disable = (
                True  # compiling a helper of vLLM's sampler takes 3 s (and a C++ compiler)
            )
            if share_base:
                print(
                    "share_base: only on a GPU, on a CPU engine and trainer have a copy each",
                    file=sys.stderr,
                )
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.packing = packing
        # Rounding alone separates two implementations by about 1e-6 (fp32) and 0.1 on a rare token (bf16);
        # a broken sync is far off both. Over the many tokens of a step the mean counts: the largest gap has a long tail.
        self.gap_limit, self.mean_gap_limit = (
            (1e-4, 1e-4) if self.dtype == torch.float32 else (0.5, 0.05)
        )
        if path.adapter:
            adapter = json.loads((Path(path.adapter) / "adapter_config.json").read_text())
            lora_rank, lora_alpha = adapter["r"], adapter["lora_alpha"]

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path.base)
        self._build_engine(
            path.base, lora_rank, seed, max_batch, gpu_memory
        )  # first: it reseeds global generators
        torch.manual_seed(seed)
        self._build_trainer(
            path.base,
            lora_rank,
            lora_alpha,
            checkpointing,
            share_base and self.device == "cuda",
            self.device if trains else "cpu",
        )
        self.value_head = None
        if value_head:  # V = 0 everywhere at the start: the first advantages are plain returns
            self.value_head = torch.nn.Linear(self.model.config.hidden_size, 1, device=self.device)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
        if path.adapter:
            self.load(path.adapter)
        self._slots = Slots(self.engine, self.model)
        self._slots.push()

    # ------------------------------------------------------------------------------------------ text and tokens

    def encode(self, text: str) -> list[int]:
        """Plain text to tokens; `<|im_end|>` and the like inside the text stay ordinary characters."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def render(self, messages: list[dict]) -> list[int]:
        """Chat messages ({"role", "content"}) to prompt tokens, the opening of the assistant's turn included."""
        contents = [message["content"] for message in messages]
        frame = self._frame([message["role"] for message in messages])
        tokens = list(frame[0])
        for content, after in zip(contents, frame[1:]):
            tokens += self.encode(content) + after
        return tokens

    def observation_tokens(self, text: str, ended: bool) -> list[int]:
        """What follows a sampled reply: end of its turn (only if the model did not end it itself), the observation as a
        user turn, the opening of the next assistant turn."""
        _, _, before, after = self._frame(["user", "assistant", "user"])
        closing = before[1:] if ended and before[:1] and before[0] in self.stop_tokens else before
        return closing + self.encode(text) + after

    def _frame(self, roles: list[str]) -> list[list[int]]:
        """The chat template's own tokens around len(roles) contents: len(roles) + 1 pieces."""
        key = tuple(roles)
        if key not in self._frames:
            marks = [f"\x02{i}\x02" for i in range(len(roles))]
            messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks)]
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            pieces = []
            for mark in marks:
                piece, text = text.split(mark)
                pieces.append(piece)
            self._frames[key] = [
                self.tokenizer(piece, add_special_tokens=False).input_ids
                for piece in (*pieces, text)
            ]
        return self._frames[key]

    # ------------------------------------------------------------------------------------------ sampling

    def _build_engine(
        self, base: str, rank: int, seed: int, max_batch: int, gpu_memory: float
    ) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        cpu = self.device == "cpu"
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=base,
                tokenizer=base,
                dtype="float32" if cpu else "bfloat16",
                max_model_len=self.context,
                seed=seed,
                enable_lora=True,
                max_loras=1,
                max_lora_rank=rank,
                lora_target_modules=LORA_LAYERS,
                max_num_seqs=max_batch,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                enforce_eager=cpu,  # block size on a CPU: with its 128 a prefix hit loses up to 127
                **({"block_size": 32} if cpu else {"gpu_memory_utilization": gpu_memory}),
            )
        )
        self._lora = LoRARequest(
            "policy", 1, "in-memory"
        )  # the path is never opened: the slot is filled in place
        stop = self.tokenizer.eos_token_id
        with contextlib.suppress(OSError):  # a model folder without generation_config.json
            from transformers import GenerationConfig

            stop = GenerationConfig.from_pretrained(base).eos_token_id or stop
        self.stop_tokens = {stop} if isinstance(stop, int) else set(stop)
        self._params = lambda max_tokens, temperature, seed: SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            logprobs=0,
            detokenize=False,
            stop_token_ids=sorted(self.stop_tokens),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._ids, self._futures, self._pump, self._frames = itertools.count(), {}, None, {}
        self.engine_seconds = 0.0  # spent in the engine so far, of which the rest was idle

    async def sample(
        self,
        tokens: list[int],
        max_tokens: int,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Sample:
        """Samples one reply to `tokens`. Concurrent calls run in the same engine batch, whenever they arrive.

        Raises ValueError when prompt plus reply budget exceed the context: such a request is never sent.
        """
        if len(tokens) + max_tokens > self.context:
            raise ValueError(
                f"{len(tokens)} prompt tokens + {max_tokens} reply tokens > context {self.context}"
            )
        request_id, version = str(next(self._ids)), self.version
        params = self._params(
            max_tokens, self.temperature if temperature is None else temperature, seed
        )
        future = self._futures[request_id] = asyncio.get_running_loop().create_future()
        # The salt keeps apart what the prefix cache holds from different weights, also while requests are in flight.
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": tokens, "cache_salt": f"v{version}"},
            params,
            lora_request=self._lora,
        )
        if self._pump is None or self._pump.done():
            self._pump = asyncio.ensure_future(self._step_engine())
        try:
            output = await future
        except asyncio.CancelledError:
            self.engine.abort_request([request_id])
            raise
        finally:
            self._futures.pop(request_id, None)
        reply = list(output.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, reply)]
        return Sample(reply, logprobs, self.decode(reply), output.finish_reason, version)

    async def _step_engine(self) -> None:
        """Steps the engine while it has work; between steps other coroutines hand in requests and observations."""
        try:
            while self.engine.has_unfinished_requests():
                begin = time.perf_counter()
                outputs = self.engine.step()
                self.engine_seconds += time.perf_counter() - begin
                for output in outputs:
                    future = self._futures.get(output.request_id)
                    if output.finished and future and not future.done():
                        future.set_result(output.outputs[0])
                await asyncio.sleep(0)
        except (
            Exception
        ) as error:  # every waiting episode must hear of a broken engine, else they wait for ever
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(error)

    # ------------------------------------------------------------------------------------------ training

    def _build_trainer(
        self, base: str, rank: int, alpha: int, checkpointing: bool, share_base: bool, device: str
    ) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        model = None
        if share_base:
            try:
                model = on_weights_of(served_model(self.engine), base, self.dtype, self.device)
            except (AttributeError, KeyError, RuntimeError, ValueError) as error:
                print(
                    f"base weights cannot be shared ({error}): engine and trainer have a copy each",
                    file=sys.stderr,
                )
        model = model or AutoModelForCausalLM.from_pretrained(base, dtype=self.dtype).to(device)
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            lora_dropout=0.0,
            target_modules=LORA_LAYERS,
            task_type="CAUSAL_LM",
        )
        self.model = get_peft_model(model, config)  # adapters stay fp32 whatever the base is
        self.model.eval()  # no dropout: trainer and engine compute the same function
        if checkpointing:
            self.recompute_layers()

    def recompute_layers(self) -> None:
        """Gradient checkpointing: only the inputs of the layers are kept for the backward pass."""
        model = self.model.get_base_model()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in (
            model.base_model.layers
        ):  # a layer recomputes only "in training"; its parts stay in eval
            layer.training = True

    def parameters(self) -> list:
        """The trainable tensors: LoRA A and B of every layer, and the value head's."""
        head = self.value_head.parameters() if self.value_head else ()
        return [*(p for p in self.model.parameters() if p.requires_grad), *head]

    def logprobs(
        self,
        batch: list[tuple[list[int], list[int]]],
        base: bool = False,
        chunk: int = 0,
        values: bool = False,
    ):
        """Log-probability and entropy (nats, without gradient) of the tokens whose mask is 1.

        batch: B pairs (tokens, mask) of equal lengths. base: adapter off, the reference of the KL term.
        Returns two (N,) tensors, N = sum of all masks, sequence by sequence; with `values` a third one, the value
        head's estimates before each token. The vocabulary-sized logits exist for `chunk` positions at a time only
        (0: 256 MiB of them), in the backward pass too (they are recomputed there).
        """
        import torch
        from torch.utils.checkpoint import checkpoint

        ids, where, position = (self._packed if self.packing else self._padded)(
            batch
        )  # (B, T), or (1, B*T)
        causal_lm = self.model.get_base_model()
        with self.model.disable_adapter() if base else contextlib.nullcontext():
            hidden = causal_lm.base_model(
                input_ids=ids, position_ids=position, use_cache=False
            ).last_hidden_state
        hidden, targets = hidden[:, :-1][where[:, 1:]], ids[:, 1:][where[:, 1:]]  # (N, D), (N,)
        head = causal_lm.get_output_embeddings().weight  # (V, D), frozen

        chunk = chunk or max(1, 2**26 // len(head))

        def score(h, target):
            logp = torch.log_softmax((h @ head.T).float() / self.temperature, dim=-1)
            with (
                torch.no_grad()
            ):  # else what it saves waits for a gradient that never comes: memory of all chunks
                entropy = -(logp.exp() * logp).sum(-1)
            return logp.gather(-1, target[:, None])[:, 0], entropy

        parts = [
            checkpoint(score, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk))
        ]
        logp, entropy = (
            torch.cat([logp for logp, _ in parts]),
            torch.cat([entropy for _, entropy in parts]),
        )
        return (logp, entropy, self.value_head(hidden.float())[:, 0]) if values else (logp, entropy)

    def _padded(self, batch):
        """Tokens, where the loss is, positions: a row per sequence, padded where causal attention never looks."""
        import torch

        T = max(len(tokens) for tokens, _ in batch)
        ids, where = (
            torch.zeros(len(batch), T, dtype=torch.long),
            torch.zeros(len(batch), T, dtype=torch.bool),
        )
        for row, (tokens, mask) in enumerate(batch):
            ids[row, : len(tokens)], where[row, : len(mask)] = (
                torch.tensor(tokens),
                torch.tensor(mask, dtype=torch.bool),
            )
        return ids.to(self.device), where.to(self.device), None

    def _packed(self, batch):
        """The same in one row: where positions start again at 0, transformers keeps attention inside the sequence."""
        import torch

        ids = torch.tensor([token for tokens, _ in batch for token in tokens])
        where = torch.tensor(
            [m and i > 0 for _, mask in batch for i, m in enumerate(mask)], dtype=torch.bool
        )
        position = torch.cat([torch.arange(len(tokens)) for tokens, _ in batch])
        return (
            ids[None].to(self.device),
            where[None].to(self.device),
            position[None].to(self.device),
        )

    def peak_memory(self) -> float:
        """GiB at most: of the GPU since the last call, engine included; else of this process since its start."""
        import resource

        import torch

        if self.device == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak

    # ------------------------------------------------------------------------------------------ from trainer to engine

    def sync(self) -> None:
        """Copies the trained adapter into the running engine; requests sent from now on are sampled from it.

        Raises UserError when the engine does not hold it afterwards.
        """
        self._slots.push()
        if not self._slots.arrived():
            off, largest = self._slots.difference()
            raise UserError(
                f"the sync did not arrive: the engine's LoRA weights differ from the trainer's by {off:.2g}, "
                f"which are at most {largest:.2g}; not training on samples of another policy"
            )
        self.version += 1
        self.engine.reset_prefix_cache()  # frees stale blocks when idle; correctness comes from the salt

    async def gap(self, tokens: int = 24, base: bool = False) -> float:
        """Largest |log p(engine) - log p(trainer)| over a few freshly sampled tokens, in nats. base: the trainer's is off."""
        import torch

        texts = ("Print the first ten primes.", "ls -la\n", "score: 0.5")
        prompts = [self.render([{"role": "user", "content": text}]) for text in texts]
        samples = await asyncio.gather(
            *(self.sample(p, tokens, seed=i) for i, p in enumerate(prompts))
        )
        with torch.no_grad():
            trainer, _ = self.logprobs(
                [
                    (p + s.tokens, [0] * len(p) + [1] * len(s.tokens))
                    for p, s in zip(prompts, samples)
                ],
                base,
            )
        engine = torch.tensor([logp for s in samples for logp in s.logprobs])
        return (trainer.cpu() - engine).abs().max().item()

    async def verify(self) -> float:
        """Compares with a random adapter, with one of zeros against the base model, and with the trained one again;
        returns the largest gap.

        Raises UserError when engine and trainer disagree: training on such samples would be wrong from the first step.
        """
        import torch

        kept = [p.detach().clone() for p in self.parameters()]
        generator = torch.Generator().manual_seed(0)
        gaps = {}
        values = {
            "random adapter": lambda old: torch.randn(old.shape, generator=generator) * 0.02,
            "adapter of zeros": torch.zeros_like,
            "trained adapter": lambda old: old,
        }
        for name, value in values.items():
            with torch.no_grad():
                for p, old in zip(self.parameters(), kept):
                    p.copy_(value(old))
            self.sync()
            gaps[name] = await self.gap(base=name == "adapter of zeros")
        if max(gaps.values()) > self.gap_limit:
            import vllm

            found = ", ".join(f"{gap:.2g} with the {name}" for name, gap in gaps.items())
            raise UserError(
                f"engine and trainer disagree: log-probs differ by {found}; the limit is {self.gap_limit:g} "
                f"nats (vLLM {vllm.__version__}, {self.dtype}); not training on samples of another policy"
            )
        return max(gaps.values())

    # ------------------------------------------------------------------------------------------ disk

    def save(self, folder) -> None:
        """Writes the adapter as plain peft files (adapter_config.json, adapter_model.safetensors), the value head beside
        them. Raises OSError when the disk is full."""
        from safetensors import SafetensorError

        try:
            self.model.save_pretrained(folder)
        except SafetensorError as error:  # "... No space left on device (os error 28)"
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else error
        if self.value_head:
            save_tensors(self.value_head.state_dict(), Path(folder) / "value_head.pt")

    def load(self, folder) -> None:
        """Reads an adapter written by `save`; call `sync()` afterwards. Raises UserError when it does not fit."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        try:
            result = set_peft_model_state_dict(
                self.model, load_file(Path(folder) / "adapter_model.safetensors")
            )
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"cannot load the adapter in {folder}: {str(error).splitlines()[0]}"
            ) from None
        if self.value_head and (Path(folder) / "value_head.pt").is_file():
            import torch

            self.value_head.load_state_dict(
                torch.load(
                    Path(folder) / "value_head.pt", map_location=self.device, weights_only=True
                )
            )
        if result.unexpected_keys:
            raise UserError(
                f"the adapter in {folder} has layers this model lacks, e.g. {result.unexpected_keys[0]}"
            )


# ---------------------------------------------------------------------------------------------- policies that do not train


class Transformers:
    """The same interface with transformers alone (search and evaluation): for machines and models that vLLM does not serve.

    One request at a time. Log-probs are of the sampling distribution, so the episodes can be trained on elsewhere.
    """

    encode, decode, render, observation_tokens, _frame = (
        Policy.encode,
        Policy.decode,
        Policy.render,
        Policy.observation_tokens,
        Policy._frame,
    )

    def __init__(self, path: ModelPath, context: int = 4096, temperature: float = 1.0):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.path, self.context, self.temperature, self.version, self._frames = (
            path,
            context,
            temperature,
            0,
            {},
        )
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path.base)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.base, dtype=torch.bfloat16 if self.device == "cuda" else torch.float32
        ).to(self.device)
        if path.adapter:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, path.adapter)
        stop = self.model.generation_config.eos_token_id or self.tokenizer.eos_token_id
        self.stop_tokens = {stop} if isinstance(stop, int) else set(stop)
        self._one_at_a_time = asyncio.Lock()

    async def sample(
        self,
        tokens: list[int],
        max_tokens: int,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> Sample:
        """Samples one reply to `tokens`; the same seed gives the same reply. Raises ValueError when it cannot fit."""
        if len(tokens) + max_tokens > self.context:
            raise ValueError(
                f"{len(tokens)} prompt tokens + {max_tokens} reply tokens > context {self.context}"
            )
        async with self._one_at_a_time:
            return await asyncio.to_thread(
                self._sample,
                tokens,
                max_tokens,
                self.temperature if temperature is None else temperature,
                seed,
            )

    def _sample(self, tokens, max_tokens, temperature, seed) -> Sample:
        import torch

        generator = torch.Generator(self.device)
        generator.manual_seed(seed) if seed is not None else generator.seed()
        reply, logprobs, cache = [], [], None
        following = torch.tensor([tokens], device=self.device)
        with torch.inference_mode():
            while len(reply) < max_tokens and not (reply and reply[-1] in self.stop_tokens):
                output = self.model(
                    following, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                cache, logits = output.past_key_values, output.logits[0, -1].float()
                logp = (logits / temperature if temperature else logits).log_softmax(-1)
                following = (
                    torch.multinomial(logp.exp(), 1, generator=generator)
                    if temperature
                    else logp.argmax(keepdim=True)
                )
                reply.append(following.item())
                logprobs.append(logp[reply[-1]].item())
                following = following[None]
        return Sample(
            reply,
            logprobs,
            self.decode(reply),
            "stop" if reply[-1] in self.stop_tokens else "length",
            0,
        )
