"""The engine's side of the adapter: LoRA as a linear method of vLLM, and the copy into it. A faster
RMSNorm for a CPU.

vLLM's own LoRA support serves many adapters that are read from files. Here there is one adapter and
it changes at every step, so each linear layer of the engine holds A and B as two buffers and adds
(x A^T) B^T to its output. The buffers are written in place: their addresses never change, so CUDA
graphs and compiled code stay valid.

This module imports vLLM; import it late. Tested with vLLM 0.32.0, CPU build.
"""

import contextlib
import copy
import dataclasses

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from vllm.config import CompilationConfig, CompilationMode, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

METHOD = "flatlab_lora"  # the name of the linear method in EngineArgs(quantization=...)
FEW_ROWS = 64  # of a decoding step; measured up to there


def use_own_stream() -> None:
    """From now on this thread works on a CUDA stream of its own, and its kernels come before those
    of the trainer's. Call it before the engine is built.

    A kernel of a CUDA graph has the priority of the stream that captured the graph, wherever it is
    launched, and vLLM captures on a stream of priority 0.
    """
    context = parallel_state.GraphCaptureContext
    parallel_state.GraphCaptureContext = lambda _: context(torch.cuda.Stream(priority=-1))
    torch.cuda.set_stream(torch.cuda.Stream(priority=-1))  # after vLLM's import: it takes note


@contextlib.contextmanager
def at_most(count: int):
    """Inside, PyTorch computes with at most `count` threads; 0: no limit."""
    before = torch.get_num_threads()
    # vLLM's CPU engine replaces torch.set_num_threads by a function that only prints a warning.
    torch._C.set_num_threads(min(count or before, before))
    try:
        yield
    finally:
        torch._C.set_num_threads(before)


def threads_for(x):
    """On a CPU one thread for a small product of few rows: it ends before a second one wakes."""
    is_alone = torch.compiler.is_compiling() or torch.get_num_threads() == 1
    if x.is_cpu and not is_alone and len(x) <= FEW_ROWS:
        return at_most(1)
    return contextlib.nullcontext()


@register_weight_loader_v2_supported_method
class LoraLinear(UnquantizedLinearMethod):
    """y = x W^T + (x A^T) B^T for a layer whose output may be stacked from n parts (q, k, v).

    lora_a: (n * rank, in), the A of all parts. lora_b: (out, n * rank), block-diagonal over the
    parts, with alpha / rank already multiplied in. Both are zero until the first push.
    """

    rank = 16  # of the adapter; set it before the engine is built

    def create_weights(self, layer, *args, **kwargs):
        super().create_weights(layer, *args, **kwargs)
        rows, columns = layer.weight.shape
        dtype = layer.weight.dtype
        stacked_rank = len(layer.output_partition_sizes) * self.rank
        lora_a = torch.zeros(stacked_rank, columns, dtype=dtype)
        lora_b = torch.zeros(rows, stacked_rank, dtype=dtype)
        layer.register_buffer("lora_a", lora_a, persistent=False)
        layer.register_buffer("lora_b", lora_b, persistent=False)

    def apply(self, layer, x, bias=None):
        rows = x.flatten(0, -2)  # transformers' own layers keep a batch dimension
        y = super().apply(layer, rows, bias)
        with threads_for(rows):
            reduced = F.linear(rows, layer.lora_a)
            if torch.compiler.is_compiling():  # Inductor fuses the sum with what follows
                y = y + reduced @ layer.lora_b.T
            else:
                y.addmm_(reduced, layer.lora_b.T)
        return y.unflatten(0, x.shape[:-1])


@register_quantization_config(METHOD)
class LoraMethod(QuantizationConfig):
    """Tells vLLM to use LoraLinear in every linear layer. It quantises nothing."""

    def get_name(self):
        return METHOD

    def get_supported_act_dtypes(self):
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls):
        return 0

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        return cls()

    def get_quant_method(self, layer, prefix):
        return LoraLinear() if isinstance(layer, LinearBase) else None


class FusedRMSNorm(RMSNorm):
    """On a CPU in fp32, vLLM's own kernel instead of the five PyTorch calls that an eager engine
    makes.

    The kernel expects contiguous rows; q and k, for example, are views of the stacked qkv. In bf16
    it rounds elsewhere than transformers, and towards zero on a CPU without bf16 instructions,
    which shrinks every layer's input: SmolLM2 was 0.13 nats from its trainer.
    """

    def forward_cpu(self, x, residual=None):
        plain = x.dtype == self.weight.dtype == torch.float32
        if not self.has_weight or self.variance_size_override or not plain:
            return super().forward_cpu(x, residual)
        with threads_for(x):
            if residual is None:
                y = torch.empty(x.shape, dtype=x.dtype)
                torch.ops._C.rms_norm(y, x.contiguous(), self.weight, self.variance_epsilon)
                return y
            x = x.contiguous()
            residual = residual.contiguous()
            # in place
            torch.ops._C.fused_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
            return x, residual


if current_platform.is_cpu():
    RMSNorm.register_oot(FusedRMSNorm)


class AdapterCopy:
    """Where every A and B of the trainer's adapter goes in the engine."""

    def __init__(self, engine, model):
        """engine: an LLMEngine built with quantization=METHOD. model: the trainer's peft model.

        Raises KeyError if the engine has no place for one of the adapter's layers.
        """
        self.engine = []  # views of the engine's buffers, for A and B of each layer
        self.trainer = []
        self.scalings = []  # 1 for A, alpha / rank for B
        named = model.get_base_model().named_modules()
        layers = {name: module for name, module in named if hasattr(module, "lora_A")}
        served = served_layers(engine, layers)
        for name, layer in layers.items():
            module, number, row = served[name]
            a = layer.lora_A["default"].weight
            b = layer.lora_B["default"].weight
            columns = slice(number * len(a), (number + 1) * len(a))
            rows = slice(row, row + len(b))
            self.engine += [module.lora_a[columns], module.lora_b[rows, columns]]
            self.trainer += [a, b]
            self.scalings += [1.0, layer.scaling["default"]]

    @torch.no_grad()
    def push(self) -> None:
        """Copies the adapter into the engine. alpha / rank is multiplied in fp32, then rounded."""
        torch._foreach_copy_(self.engine, torch._foreach_mul(self.trainer, self.scalings))


def served_model(engine):
    """The engine's PyTorch model."""
    return engine.apply_model(lambda model: model)[0]


def served_layers(engine, names) -> dict[str, tuple]:
    """Those of these layers of a transformers model that the engine serves: name -> the engine's
    layer that holds it, its number in that stack (of q, k, v, say), and its first row there.
    """
    served = served_model(engine)
    stacks = getattr(served, "packed_modules_mapping", {})  # {"qkv_proj": ["q_proj", ...]}
    layers = {}
    for name, module in served.named_modules():
        path, _, leaf = name.rpartition(".")
        rows = getattr(module, "output_partition_sizes", ())
        for number, part in enumerate(stacks.get(leaf, [leaf])):
            layers[f"{path}.{part}"] = (module, number, sum(rows[:number]))
        layers[name] = (module, 0, 0)  # some transformers models stack in the same way (GLM 4)
    mapper = getattr(served, "hf_to_vllm_mapper", None)
    if mapper:  # vLLM may have another name for a layer (gpt-oss)
        mapper = dataclasses.replace(mapper, orig_to_new_stacked={})
        for name in set(names) - set(layers):
            served_name = str(mapper.map_name(f"{name}.weight")).removesuffix(".weight")
            layers[name] = layers.get(served_name)
    return {name: layers[name] for name in names if layers.get(name)}


def layers_to_adapt(engine, model) -> list[str]:
    """The last parts of the names of the linear layers that engine and trainer have in common.

    Of a mixture of experts the attention layers alone: vLLM computes all experts in one kernel.
    """
    linear = (torch.nn.Linear, Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, linear)]
    layers = served_layers(engine, names)
    names = [name.split(".") for name, place in layers.items() if hasattr(place[0], "lora_a")]
    if has_experts(model):
        names = [name for name in names if "att" in name[-2]]
    return sorted({name[-1] for name in names})


def has_experts(model) -> bool:
    """Returns whether a transformers model is a mixture of experts."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


@contextlib.contextmanager
def trainer_config(engine):
    """Inside, any transformers model can be built. vLLM serves some families through transformers'
    own classes, and changes these so that they ask for a vLLM config and compile themselves.
    """
    config = copy.copy(engine.vllm_config)
    config.compilation_config = CompilationConfig(mode=CompilationMode.NONE)
    with set_current_vllm_config(config):
        yield


def own_base(engine, config, dtype):
    """The transformers model that the engine serves, with weights of its own, on the CPU."""
    name = engine.vllm_config.model_config.model
    with trainer_config(engine):
        return AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype)


def empty_base(engine, config, dtype):
    """The same model without weights, on the device "meta"."""
    with trainer_config(engine), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def shared_base(engine, config, dtype, device):
    """The same model with parameters that are views of the engine's: one copy in memory.

    vLLM stacks the rows of q, k, v and of gate, up; the vocabulary is padded at its end. Raises
    KeyError or ValueError if the two do not fit together. Never merge into, move or cast the
    result.
    """
    model = empty_base(engine, config, dtype)
    parameters = [(*name.rpartition("."), p) for name, p in model.named_parameters()]
    layers = served_layers(engine, [owner for owner, *_ in parameters])
    for owner, _, leaf, p in parameters:  # tied weights come once
        layer, _, first_row = layers[owner]
        view = getattr(layer, leaf).data[first_row : first_row + len(p)]
        if view.shape != p.shape or view.dtype != dtype:
            raise ValueError(
                f"{owner} is {tuple(p.shape)} {dtype}, the engine's {tuple(view.shape)} "
                f"{view.dtype}"
            )
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(view, requires_grad=False))
    model.tie_weights()
    rotary = model.base_model.rotary_emb
    with trainer_config(engine), torch.device(device):
        model.base_model.rotary_emb = type(rotary)(config=config)
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise ValueError(f"the engine has no {left[0]}")
    return model
