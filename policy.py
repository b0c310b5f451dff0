"""The model: a vLLM engine that samples and a PyTorch LoRA model that learns, in one process.

    policy = Policy(resolve_model("tiny"))
    sample = await policy.sample(policy.render(messages), max_tokens=160)
    logp, entropy = policy.logprobs([(tokens, mask), ...])    # with gradient, where mask is 1
    policy.sync()                                             # trained adapter -> running engine

How it departs from the usual set-up:
1. No server, no second process, no files between trainer and engine: `sync()` copies A and
   scaling * B of every LoRA layer into the engine's own buffers (about a millisecond). The base
   weights are never merged, so they never drift.
2. Tokens in, tokens out. A sampled reply is kept as the engine's tokens with the engine's
   log-probs; an observation is appended as new tokens. Nothing is decoded and tokenised again, and
   text can never turn into control tokens.
3. `verify()` compares engine and trainer on a probe before training: with a random adapter that
   changes the model visibly, and with the trained one. A stale or broken sync is the most expensive
   silent fault of such a system, so it stops the run.

Letters: B sequences, T tokens, N loss positions, D hidden size, V vocabulary.
All knowledge of vLLM's layers and model classes is in flatlab/model/lora_sync.py.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType

from flatlab import threads
from flatlab.errors import UserError
from flatlab.heartbeat import heartbeat
from flatlab.model import endpoint, memory
from flatlab.model.adapter import ADAPTER_FILE, read_tensors
from flatlab.model.chat import ChatTokens, Sample
from flatlab.model.path import ModelPath, count_weights, loading
from flatlab.options import ModelOptions

Pairs = list[tuple[list[int], list[int]]]  # (tokens, mask) of sequences; 1: trained
# Below this number of parameters, on a CPU, a decoding step of the engine is faster on one thread:
# waking a second one for each operation costs more than it saves.
ONE_THREAD = 5_000_000


@dataclass(frozen=True)
class Agreement:
    """Distance of engine and trainer on sampled tokens, in nats."""

    mean: float  # of |log p(engine) - log p(trainer)|
    largest: float
    size: float  # mean of |log p(trainer)|

    def __str__(self):
        return f"log-probs differ by {self.mean:.1g} nats on average, at most {self.largest:.1g}"


def open_engine(cfg, path: ModelPath, max_batch: int, trains: bool = False):
    """Opens a Policy, or for --url an Endpoint, which has its sample()."""
    if cfg.url:
        endpoint.check_url(cfg.url)
        model = cfg.model
        return endpoint.Endpoint(cfg.url, model.model, model.context, model.temperature)
    return Policy(path, cfg.model, cfg.seed, max_batch, trains=trains)


@heartbeat("tokenizer is loading")
def token_counter(cfg, path: ModelPath) -> ChatTokens:
    """Counts tokens as the engine does, before one starts; see env.check_context."""
    with loading("transformers", path.base):
        counter = ChatTokens(path.base)
    counter.context = cfg.model.context
    return counter


def lora_settings(path: ModelPath, rank: int | None = None) -> dict:
    """r, lora_alpha and target_modules of the adapter that is trained: those of the adapter in
    `path`, if there is one, and otherwise `rank` (16), twice the rank and None, see
    layers_to_adapt. Raises UserError if the rank differs from that of the adapter.
    """
    if not path.lora:
        rank = rank or 16
        return {"r": rank, "lora_alpha": 2 * rank, "target_modules": None}
    trained_rank = path.lora["r"]
    if rank not in (None, trained_rank):
        raise UserError(
            f"--lora-rank {rank} differs from that of the adapter {path.adapter}, {trained_rank}: "
            "leave it out."
        )
    return path.lora


class Engine(ChatTokens):
    """A causal LM in vLLM that samples from this process: it computes only while it is stepped.

    path: from `resolve_model`. options: context (None: 4096 tokens, or what the model can),
    temperature, compile and gpu_memory. rank: of the adapter. max_batch: requests that it works on
    at once. trains: a trainer needs memory, too.
    """

    dtype = None  # of model and engine; None: bfloat16 on a GPU, float32 on a CPU
    own_stream = True  # steps need not wait for what the trainer's thread has on a GPU

    def __init__(
        self,
        path: ModelPath,
        options: ModelOptions,
        rank: int,
        seed: int,
        max_batch: int,
        trains: bool,
    ):
        # in this process: the engine runs only when it is stepped
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # what fails while a model loads becomes one sentence, see loading()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        logging.getLogger("vllm").addHandler(logging.NullHandler())  # until it reads that level
        import torch
        from transformers import AutoConfig
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        if path.adapter:
            read_tensors(path.adapter)  # a damaged one ends the run before the model loads
        with loading("transformers", path.base):
            super().__init__(path.base)
        self.path = path
        self.context = options.context or min(4096, path.positions or 4096)
        self.temperature = options.temperature
        self.version = 0  # updates in the engine's weights
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        default = "bfloat16" if self.device == "cuda" else "float32"
        self.dtype = getattr(torch, self.dtype or default)
        if self.device == "cpu":
            # compiling even a helper of vLLM's sampler would take 3 s and a C++ compiler
            torch._dynamo.config.disable = not options.compile
        with loading("transformers", path.base):
            self.config = AutoConfig.from_pretrained(path.base)
            if getattr(self.config.get_text_config(), "attn_logit_softcapping", None):
                self.config._attn_implementation = "eager"  # the only one that caps (Gemma 2)
            weights = count_weights(path.base)
        self.decode_threads = 1 if self.device == "cpu" and weights < ONE_THREAD else 0  # 0: all
        cache = self.kv_cache_bytes(weights, rank if trains else 0, max_batch, options.gpu_memory)
        machine = gpu_engine_options(max_batch)
        if self.device == "cpu":
            machine = cpu_engine_options(self.context, options.compile)
        with loading("vLLM", path.base):
            self.engine = self.open_vllm(rank, seed, max_batch, cache, machine)
        self._ids = itertools.count()
        self._futures = {}
        self._pump = None
        self._syncs = 0
        self._step_threads = 0  # of the engine's next step; 0: all, for one that reads prompts

    def kv_cache_bytes(self, weights: int, rank: int, requests: int, share: float | None) -> int:
        """Bytes of the KV cache. On a GPU: room for `requests` typical episodes in this share of
        it (None: in its free memory, beside the trainer of an adapter of this rank; 0: no trainer).
        On a CPU: for as many whole contexts, in a quarter of the free memory. If these do not fit,
        for fewer. vLLM would measure instead, which fails if anything else frees memory.

        Raises UserError if not even one context fits.
        """
        import torch

        sizes = self.config.get_text_config(), self.dtype.itemsize
        episode, needs, room = self.context, {}, memory.free_bytes(self.device)
        if self.device == "cpu":
            room //= 4
        else:
            episode = int(memory.TYPICAL_EPISODE * self.context)
            needs = memory.gpu_needs(*sizes, weights, 0 if share else rank, self.context, requests)
        if share and needs:
            room = min(room, int(share * torch.cuda.mem_get_info()[1]))
        least = memory.cache_bytes(*sizes, self.context)
        wanted = memory.cache_bytes(*sizes, episode, requests)
        cache = memory.fit_cache(least, wanted, needs, room)
        if cache < wanted:
            print(
                f"memory   the KV cache of {cache / 2**30:.1f} GiB holds "
                f"{requests * cache // wanted} of {requests} episodes of {episode} tokens: the "
                "others wait"
            )
        return cache

    def open_vllm(self, rank: int, seed: int, max_batch: int, kv_cache_bytes: int, machine: dict):
        """Opens vLLM's LLMEngine. machine: fields of EngineArgs for this kind of machine."""
        from vllm import EngineArgs, LLMEngine

        from flatlab.model.lora_sync import METHOD, LoraLinear, use_own_stream

        LoraLinear.rank = rank
        if self.own_stream and self.device == "cuda":
            use_own_stream()
        arguments = EngineArgs(
            model=self.path.base,
            dtype=self.dtype,
            hf_overrides={"head_dtype": "float32"},  # bf16 logits would be the largest difference
            model_loader_extra_config={"enable_weights_track": True},  # refuses a missing weight
            max_model_len=self.context,
            seed=seed,
            quantization=METHOD,
            max_num_seqs=max_batch,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            additional_config={"lora_rank": rank},  # vLLM's cache of compiled models goes by it
            use_tqdm_on_load=False,
            kv_cache_memory_bytes=kv_cache_bytes,
            **machine,
        )
        return LLMEngine.from_engine_args(arguments)

    async def sample(self, tokens: list[int], max_tokens: int, seed: int | None = None) -> Sample:
        """Samples one reply to `tokens`. Concurrent calls run in the same engine batch, whenever
        they arrive.

        Raises ValueError if prompt and reply could exceed the context: such a request is never
        sent.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if len(tokens) + max_tokens > self.context:
            raise ValueError(
                f"{len(tokens)} prompt tokens + {max_tokens} reply tokens > context {self.context}"
            )
        request_id, version = str(next(self._ids)), self.version
        future = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        # The salt separates what the prefix cache holds of different weights, also while requests
        # are in flight.
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"v{self._syncs}"}
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=seed,
            logprobs=0,
            detokenize=False,
            stop_token_ids=sorted(self.stop_tokens),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # the object is of this request alone
        )
        self.engine.add_request(request_id, prompt, params)
        self._step_threads = 0
        if not self._pump or self._pump.done():
            self._pump = asyncio.ensure_future(self._run_engine())
        try:
            output = await future
        except asyncio.CancelledError:
            self.engine.abort_request([request_id])
            raise
        finally:
            del self._futures[request_id]
        reply = list(output.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(output.logprobs, reply)]
        return Sample(reply, logprobs, self.decode(reply), output.finish_reason, version)

    def step_engine(self) -> list:
        """One step of the engine, on one thread if the model is small and no prompt is read."""
        from flatlab.model.lora_sync import at_most

        with at_most(self._step_threads):
            self._step_threads = self.decode_threads
            return self.engine.step()

    async def _run_engine(self) -> None:
        """Steps the engine while it has work; between steps other coroutines send requests and
        observations.
        """
        await asyncio.sleep(0.002)  # requests that arrive at about the same time begin together
        try:
            while self.engine.has_unfinished_requests():
                for output in self.step_engine():
                    future = self._futures.get(output.request_id)
                    if future and not future.done():
                        future.set_result(output.outputs[0])
                await asyncio.sleep(0)
        except Exception as error:
            # All pending requests fail; otherwise their episodes would wait forever.
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(error)


class Trainer:
    """A transformers model with a LoRA adapter, which is trained.

    base: the model, which gets the adapter. lora: r, lora_alpha and target_modules. The trainable
    tensors are fp32 whatever the base is. temperature: the log-probs are those of sampling with it.
    """

    def __init__(self, base, lora: dict, temperature: float):
        import torch
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer

        from flatlab.model.packing import can_pack, fuse_norms, has_varlen, lora_forward

        self.temperature = temperature
        self._reference = None  # tensors of set_reference
        self.recomputed = 0  # layers, see recompute_layers
        self.micro_tokens = memory.MOST_TOKENS["cpu"]  # of a pass, from fit_micro_tokens
        self.room = 0.0  # bytes for a pass, from fit_micro_tokens; 0: not yet known
        config = LoraConfig(**lora, lora_dropout=0.0, task_type="CAUSAL_LM")
        self.model = get_peft_model(base, config)
        self.model.eval()  # no dropout: trainer and engine compute the same function
        self.adapter_layers = [m for m in self.model.modules() if isinstance(m, LoraLayer)]
        for layer in self.adapter_layers:
            layer.forward = MethodType(lora_forward, layer)
        if base.device.type == "cuda":  # a CPU keeps the digits that it had
            fuse_norms(self.model)
        if can_pack(base):
            base.set_attn_implementation("packed")
        # some models refuse it, as Falcon does
        self.packs = base.config.get_text_config()._attn_implementation == "packed"
        self.uses_varlen = self.packs and has_varlen(base)
        # cuDNN makes a plan for each new shape, which takes longer than the attention.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def fit_micro_tokens(self, wanted: int | None = None) -> int:
        """Sets micro_tokens, the tokens of a training pass, and returns them: as wanted, or fewer
        if these do not fit.

        From now on each pass recomputes as few layers as necessary. On a GPU, and if a pass over a
        whole context has to, what fits is meant with all of them recomputed.
        """
        free = memory.free_bytes(self.device, threads.whole_number("WORLD_SIZE", 1))
        config = self.model.config.get_text_config()
        self.sizes = sizes = config, self.dtype.itemsize, self.uses_varlen
        if self.device == "cuda":
            free -= memory.prefill_bytes(*sizes[:2])  # of the engine, which may work meanwhile
            # gradients and the two moments of AdamW
            free -= 12 * sum(p.numel() for p in self.parameters())
        self.room = memory.SHARE_OF_FREE[self.device] * free
        layers = config.num_hidden_layers
        most = wanted or memory.MOST_TOKENS[self.device]
        largest = max(self.context, wanted or 0)
        is_tight = memory.layers_to_recompute(largest, sizes, free) > 0
        recomputed = layers if is_tight or self.device == "cuda" else 0
        tokens = memory.fit_micro_tokens(free, most, self.device, sizes, recomputed)
        self.micro_tokens = tokens
        if wanted and tokens < wanted:
            print(f"memory   --micro-tokens {wanted} does not fit: passes of {tokens} do")
        largest = max(self.context, tokens)
        count = memory.layers_to_recompute(largest, sizes, free)
        if count:
            print(
                f"memory   a pass over {largest} tokens recomputes {count} of {layers} layers: "
                "with all, a third more time"
            )
        needed = memory.bytes_needed(largest, *sizes, count)
        if needed > free:
            print(
                f"memory   a pass over {largest} tokens needs about {needed / 2**30:.1f} GiB, and "
                f"{free / 2**30:.1f} are free: the run may end there; lower --context"
            )
        return tokens

    def within_memory(self, learn: Callable, *args):
        """Returns learn(self, *args), which adds gradients to none. If the GPU's memory runs out,
        it is called once more, with half of micro_tokens and of the memory for a pass.
        """
        import torch

        try:
            return learn(self, *args)
        except torch.OutOfMemoryError:
            self.micro_tokens //= 2
            self.room /= 2
        # The failed pass keeps its memory until the error is gone.
        print(f"memory   was used up: from now on a pass takes up to {self.micro_tokens} tokens")
        for p in self.parameters():
            p.grad = None
        return learn(self, *args)

    def recompute_layers(self, count: int) -> None:
        """Gradient checkpointing: only the inputs of the first `count` layers are kept for the
        backward pass.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        from flatlab.model.packing import recomputed_forward

        self.recomputed = count
        # gradient_checkpointing_enable() works in training mode only, where some layers drop out.
        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        for number, layer in enumerate(layers):
            vars(layer).pop("forward", None)
            if number < count:
                layer.forward = MethodType(recomputed_forward, layer)

    def parameters(self) -> list:
        """The trainable tensors: LoRA A and B of every layer."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def make_optimizer(self, lr: float, betas=(0.9, 0.99), weight_decay: float = 0.0):
        """AdamW on the trainable tensors."""
        import torch

        is_fused = self.model.device.type == "cuda"  # one kernel for all tensors
        return torch.optim.AdamW(
            self.parameters(), lr, betas=betas, weight_decay=weight_decay, fused=is_fused
        )

    def logprobs(self, batch: Pairs, base: bool = False):
        """Log-probability and entropy (nats) of the tokens whose mask is 1.

        batch: B pairs (tokens, mask), each of one length. base: of the reference of the KL, see
        set_reference; without gradient. Returns two (N,) tensors, N = sum of all masks, sequence by
        sequence. The entropy has no gradient, and is None under torch.no_grad().
        """
        adapter = contextlib.nullcontext()
        if base:
            adapter = self._using(self._reference) if self._reference else self._without_adapter()
        with adapter:
            hidden, targets = self.hidden_states(batch)
        return self.logprobs_of(hidden, targets)

    def pass_tokens(self, batch: Pairs) -> int:
        """Tokens of a pass over this batch, by which its memory is estimated."""
        from flatlab.model.packing import row_tokens

        weight = 0.0
        if self.uses_varlen:
            weight = memory.copy_weight(self.model.config.get_text_config())
        return row_tokens(batch, self.packs, weight)

    def hidden_states(self, batch: Pairs):
        """Last hidden states (N, D) before each token whose mask is 1, and these tokens (N,)."""
        import torch

        from flatlab.model.packing import hidden_states

        if self.room and torch.is_grad_enabled():
            tokens = self.pass_tokens(batch)
            count = memory.layers_to_recompute(tokens, self.sizes, self.room)
            if count != self.recomputed:
                self.recompute_layers(count)
        inner = self.model.get_base_model().base_model
        device = self.model.device.type
        return hidden_states(inner, batch, device, self.packs, self.uses_varlen)

    def logprobs_of(self, hidden, targets):
        """Log-probability and entropy of the targets (N,) after these hidden states (N, D), as
        logprobs() returns them.

        The (., V) logits exist for a part of the positions at a time, see memory.MOST_LOGITS, and
        none are kept for the backward pass.
        """
        from flatlab.model.packing import TokenLogProbs, head_of

        head = head_of(self.model.get_base_model(), self.temperature)
        chunk = max(1, memory.MOST_LOGITS // len(head.weight))
        if chunk > memory.TILE:
            chunk = memory.TILE * math.ceil(chunk / memory.TILE)
        return TokenLogProbs.apply(hidden, targets, head, chunk)

    def set_reference(self, folder) -> None:
        """Makes the adapter in `folder` the reference of the KL term; without a call it is the base
        model, i.e. the adapter is off.
        """
        with self._using([p.data.clone() for p in self.parameters()]):
            self.load_adapter(folder)
            self._reference = [p.data for p in self.parameters()]

    @contextlib.contextmanager
    def _using(self, tensors: list):
        """Inside, these are the trainable tensors. The engine's do not change without a sync."""
        parameters = self.parameters()
        trained = [p.data for p in parameters]
        try:
            for p, values in zip(parameters, tensors):
                p.data = values
            yield
        finally:
            for p, values in zip(parameters, trained):
                p.data = values

    @contextlib.contextmanager
    def _without_adapter(self):
        """Inside, the trainer computes with the base model. peft's own disable_adapter() searches
        all modules at each use.
        """
        for layer in self.adapter_layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.adapter_layers:
                layer.enable_adapters(True)

    # -------------------------------------------------------------------------- disk

    def save(self, folder) -> None:
        """Writes the adapter as plain peft files: adapter_config.json, adapter_model.safetensors.

        Raises OSError if the disk is full.
        """
        from safetensors.torch import save

        self.model.peft_config["default"].save_pretrained(folder)
        weights = save(self._adapter_tensors(), {"format": "pt"})
        Path(folder, ADAPTER_FILE).write_bytes(weights)

    def load_adapter(self, folder) -> None:
        """Reads an adapter written by `save`; call `sync()` afterwards. Raises UserError if its
        tensors are not finite, or not those of this model's adapter.
        """
        weights = read_tensors(folder)
        tensors = self._adapter_tensors()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if {name: tensor.shape for name, tensor in weights.items()} != shapes:
            raise UserError(
                f"The adapter in {folder} has other layers or another rank than that of this model."
            )
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])

    def _adapter_tensors(self) -> dict:
        """The weights of the adapter themselves, without gradient, by their names in a file."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self.model, save_embedding_layers=False)


class Policy(Engine, Trainer):
    """One causal LM, twice: sampled by vLLM, trained through LoRA. Do not make one inside of a
    running event loop.

    Arguments: see Engine; lora_rank: see lora_settings. trains: False for search and evaluation:
    the trainer holds the adapter alone, and logprobs() cannot be called.
    """

    @heartbeat("engine   is starting")
    def __init__(
        self,
        path: ModelPath,
        options: ModelOptions | None = None,
        seed: int = 0,
        max_batch: int = 64,
        lora_rank: int | None = None,
        trains: bool = True,
    ):
        print("engine   is starting")
        lora = lora_settings(path, lora_rank)
        # The engine comes first because it reseeds the global generators.
        options = options or ModelOptions()
        Engine.__init__(self, path, options, lora["r"], seed, max_batch, trains)
        import torch

        from flatlab.model.lora_sync import empty_base, own_base

        # Limit of the mean log-prob difference between engine and trainer, in nats. Rounding alone
        # makes about 1e-6 (fp32) or 0.01 (bf16), a broken sync far more. verify() measures what
        # a bf16 model rounds.
        self.is_fp32 = self.dtype == torch.float32
        self.diff_limit = 1e-4 if self.is_fp32 else 0.05
        with loading("transformers", path.base):
            # On a GPU the trainer uses the engine's copy of the base weights, if it then computes
            # the same log-probs.
            if not (trains and self.device == "cuda" and self._build_on_shared_base(lora)):
                make = own_base if trains else empty_base
                base = make(self.engine, self.config, self.dtype)
                self._build_trainer(base.to(self.device) if trains else base, lora)
        self.reset(seed)
        with loading("vLLM", path.base):  # some models are refused by the first step only
            asyncio.run(self.sample(self._probes()[0], 1, seed=0))
        print("engine   is ready")

    def _build_on_shared_base(self, lora: dict) -> bool:
        """Builds the trainer on the engine's base weights. Returns whether they agree with the
        initial adapter, which changes nothing.
        """
        import torch

        from flatlab.model.lora_sync import shared_base

        try:
            base = shared_base(self.engine, self.config, self.dtype, self.device)
            self._build_trainer(base, lora)
            self.adapter_copy.push()
            agreement = asyncio.run(self.agreement())
            if agreement.mean <= self.rounding(agreement):
                return True
            reason = agreement
        except torch.OutOfMemoryError:
            raise  # a second copy would not fit, either
        except (AttributeError, KeyError, RuntimeError, ValueError) as error:
            reason = error
        print(
            f"base weights cannot be shared ({reason}): engine and trainer have a copy each; if "
            "the second one does not fit, set --gpu-memory 0.5",
            file=sys.stderr,
        )
        return False

    def _build_trainer(self, base, lora: dict) -> None:
        from flatlab.model.lora_sync import AdapterCopy, has_experts, layers_to_adapt

        self.adapts_attention_only = has_experts(base)
        if not lora["target_modules"]:
            lora["target_modules"] = layers_to_adapt(self.engine, base)
        Trainer.__init__(self, base, lora, self.temperature)
        if base.device.type == "meta":  # only the adapter gets numbers
            for layer in self.adapter_layers:
                layer.lora_A.to_empty(device=self.device)
                layer.lora_B.to_empty(device=self.device)
        self.adapter_copy = AdapterCopy(self.engine, self.model)

    def reset(self, seed: int) -> None:
        """Starts from the adapter of the model's path, or from the one of this seed; the reference
        of the KL is the base model.
        """
        import torch

        torch.manual_seed(seed)
        for layer in self.adapter_layers:
            layer.reset_lora_parameters("default", True)
        if self.path.adapter:
            self.load_adapter(self.path.adapter)
        self._reference = None
        self.sync(0)

    # -------------------------------------------------------------------------- trainer to engine

    def sync(self, version: int | None = None) -> None:
        """Copies the trained adapter into the running engine; requests sent from now on are sampled
        from it. version: number of updates in it; default: one more than before.
        """
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()  # the trainer's thread uses another stream
        self.adapter_copy.push()
        if self.device == "cuda":
            torch.cuda.synchronize()  # before the trainer changes what is copied
        self.version = self.version + 1 if version is None else version
        self._syncs += 1
        # Frees blocks of old weights, but only if no request runs; the salt in sample() keeps them
        # from being used in any case.
        self.engine.reset_prefix_cache()

    def rounding(self, base: Agreement) -> float:
        """Limit of the mean difference without an adapter, in nats. bf16 moves a log-prob by 0.3 %
        of its size (Fast-LLM, pull request 525).
        """
        return 1e-4 if self.is_fp32 else max(0.05, 0.01 * base.size)

    def check(self, agreement: Agreement, name: str, limit: float) -> None:
        """Raises UserError above the limit (nats). fp32 is judged by the largest difference, bf16
        by the mean: the largest has a long tail.
        """
        difference = agreement.largest if self.is_fp32 else agreement.mean
        if not difference <= limit:  # NaN is too large
            raise UserError(
                f"Engine and trainer disagree by {difference:.2g} nats on the {name} (limit "
                f"{limit:.2g}): the last sync did not arrive, or the two compute the model "
                "differently. Not training on samples of another policy."
            )

    async def check_sync(self) -> None:
        """Raises UserError if engine and trainer disagree on a few new samples."""
        self.check(await self.agreement(), "probe after a skipped update", self.diff_limit)

    async def agreement(self) -> Agreement:
        """Samples a few replies of up to 24 tokens and compares their log-probs."""
        import torch

        prompts = self._probes()
        requests = [self.sample(prompt, 24, seed=i) for i, prompt in enumerate(prompts)]
        samples = await asyncio.gather(*requests)
        batch = [
            (prompt + s.tokens, [0] * len(prompt) + [1] * len(s.tokens))
            for prompt, s in zip(prompts, samples)
        ]
        with torch.no_grad():
            trainer, _ = self.logprobs(batch)
        engine = torch.tensor([logp for s in samples for logp in s.logprobs])
        difference = (trainer.cpu() - engine).abs()
        size = trainer.abs().mean().item()
        return Agreement(difference.mean().item(), difference.max().item(), size)

    def _probes(self) -> list[list[int]]:
        texts = ("Print the first ten primes.", "ls -la\n", "score: 0.5")
        return [self.render([{"role": "user", "content": text}]) for text in texts]

    def _random_adapter(self) -> tuple[list, float]:
        """Random weights that move the log-probs of a text by 0.3 to 1 nat, and by how many: enough
        to see whether a sync arrived, and not so much that the model turns into noise, where
        rounding errors grow.
        """
        import torch

        generator = torch.Generator().manual_seed(0)
        tensors = []
        for p in self.parameters():
            values = torch.randn(p.shape, generator=generator) / (10 * p.shape[-1] ** 0.5)
            tensors.append(values.to(p.device))
        batch = [(prompt, [0] + [1] * (len(prompt) - 1)) for prompt in self._probes()]
        with self._without_adapter(), torch.no_grad():
            base, _ = self.logprobs(batch)
        for _ in range(8):
            with self._using(tensors), torch.no_grad():
                logp, _ = self.logprobs(batch)
            moved = (logp - base).abs().mean().item()
            if 0.3 <= moved <= 1:
                break
            # The change is that of B times A, so each gets the square root of the correction.
            tensors = [values * (0.6 / moved) ** 0.5 for values in tensors]
        return tensors, moved

    async def verify(self, version: int = 0) -> dict[str, Agreement]:
        """Compares engine and trainer without an adapter, with a random and with the trained one.
        Returns the Agreement with each. version: as in sync().

        Raises UserError if they disagree: training on such samples would be wrong from the first
        step. In bf16 the limit is 2.5 times the difference without an adapter, which is rounding
        alone: at least 0.02, and at most a quarter of what the random adapter moves. That of
        training, diff_limit, is at least 0.05: long contexts round more than the short probes.
        """
        import torch

        random, moved = self._random_adapter()
        trained = [p.data for p in self.parameters()]
        zeros = [torch.zeros_like(p) for p in trained]
        adapters = {"no adapter": zeros, "random adapter": random, "trained adapter": trained}
        agreements = {}
        limit = self.diff_limit
        with loading("Engine or trainer", self.path.base):
            for name, tensors in adapters.items():
                with self._using(tensors):
                    self.sync(version)
                    agreements[name] = await self.agreement()
                if name != "no adapter":
                    self.check(agreements[name], f"probe with the {name}", limit)
                    continue
                self.check(agreements[name], f"probe with {name}", self.rounding(agreements[name]))
                if not self.is_fp32:
                    rounding = 2.5 * agreements[name].mean
                    limit = min(max(0.02, rounding), moved / 4)
                    self.diff_limit = min(max(0.05, rounding), moved / 4)
        return agreements


def gpu_engine_options(max_batch: int) -> dict:
    """Fields of vLLM's EngineArgs for a GPU."""
    return {
        "compilation_config": {"cudagraph_capture_sizes": memory.graph_sizes(max_batch)},
        # vLLM refuses to start if this share is not free; the KV cache has its size in bytes
        "gpu_memory_utilization": 0.01,
        "max_num_batched_tokens": memory.PREFILL_TOKENS,
    }


def cpu_engine_options(context: int, compile: bool = False) -> dict:
    """Fields of vLLM's EngineArgs for a machine without a GPU."""
    return {
        "enforce_eager": not compile,
        # with vLLM's block size of 128 a hit in the prefix cache loses up to 127 tokens
        "block_size": 32,
        # A prompt that is split over two steps breaks requests with a seed on a CPU.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(context, 4096),
    }


if __name__ == "__main__":  # it is no script, but --help is asked for
    print(f"{__doc__}\nusage: a module; python evaluate.py --model NAME checks a model")
