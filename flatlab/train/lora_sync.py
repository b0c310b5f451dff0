"""Weights between trainer and engine; all knowledge of vLLM's insides is here. Tried on vLLM
0.32.0, CPU build.

Slots           copies the trained adapter into the running engine's LoRA buffers
on_weights_of   builds the trainer's model on the engine's base weights: one copy on a GPU
cpu_lora_linear replaces a slow kernel of vLLM's CPU build

Why in place: addresses never change, so CUDA graphs and the kernels' pointer tables stay valid,
nothing goes through the CPU or a file, and the attributes used have been the same from vLLM 0.10
on.
"""

from flatlab.errors import UserError


class Slots:
    """The engine's LoRA buffers, and which peft layer goes where."""

    def __init__(self, engine, model):
        from vllm.lora.request import LoRARequest

        manager = engine.model_executor.driver_worker.model_runner.lora_manager
        adapters = manager._adapter_manager
        manager.add_dummy_lora(
            LoRARequest("policy", 1, "in-memory"), rank=8
        )  # a slot of zeros, no file
        adapters.activate_adapter(1)
        adapters.pin_adapter(1)
        slot = adapters.lora_index_to_id.index(1)
        layers = {
            name.removeprefix("base_model.model."): m
            for name, m in model.named_modules()
            if hasattr(m, "lora_A")
        }
        self.copies, placed = [], set()
        for name, wrapper in adapters.modules.items():
            for i, part in enumerate(
                adapters.packed_modules.get(name, [name])
            ):  # qkv and gate/up are fused in vLLM
                if part in layers:
                    a, b = (
                        layers[part].lora_A["default"].weight,
                        layers[part].lora_B["default"].weight,
                    )
                    rank = a.shape[0]
                    self.copies.append(
                        (
                            wrapper.lora_a_stacked[i][slot, 0, :rank],
                            wrapper.lora_b_stacked[i][slot, 0, :, :rank],
                            a,
                            b,
                            layers[part].scaling["default"],
                        )
                    )
                    placed.add(part)
        if placed != set(layers):
            raise UserError(
                f"vLLM does not serve these LoRA layers: {sorted(set(layers) - placed)[:3]} ..."
            )
        for wrapper in adapters.punica_wrapper_mapping.values():
            if type(wrapper).__name__ == "PunicaWrapperCPU":
                wrapper.add_lora_linear = cpu_lora_linear.__get__(wrapper)

    def push(self) -> None:
        import torch

        with torch.no_grad():
            for (
                slot_a,
                slot_b,
                a,
                b,
                scaling,
            ) in self.copies:  # vLLM scales by 1: alpha / rank goes into B
                slot_a.copy_(a)
                slot_b.copy_(b).mul_(scaling)

    def arrived(self) -> bool:
        """Whether the engine holds exactly what the trainer has."""
        import torch

        with torch.no_grad():
            return all(torch.equal(slot, own) for slot, own in self.pairs())

    def pairs(self):
        """(the engine's, the trainer's) of every A and scaled B, as the engine would hold it."""
        for slot_a, slot_b, a, b, scaling in self.copies:
            yield slot_a, a.to(slot_a.dtype)
            yield slot_b, b.to(slot_b.dtype) * scaling

    def difference(self) -> tuple[float, float]:
        """(largest difference between engine and trainer, largest value of the trainer)."""
        import torch

        with torch.no_grad():
            pairs = list(self.pairs())
            off = max((slot - own).abs().max().item() for slot, own in pairs)
            return off, max(own.abs().max().item() for _, own in pairs)


def served_model(engine):
    return engine.model_executor.driver_worker.model_runner.model


def on_weights_of(served, base: str, dtype, device):
    """A transformers model of `base` whose parameters are views of a vLLM model's: one copy in
    memory.

    vLLM stacks the rows of q, k, v and of gate, up; LoRA wrappers add ".base_layer" to a name; the
    vocabulary is padded at its end. Raises KeyError or ValueError when the two do not fit together.
    Never merge into, move or cast the result.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = {name.replace(".base_layer", ""): p.data for name, p in served.named_parameters()}
    first_row = {}  # of the next part in a stacked weight
    for name, p in list(
        model.named_parameters()
    ):  # in the order of the parts; tied weights come once
        owner, _, leaf = name.rpartition(".")
        path, _, part = owner.rpartition(".")
        stacked = next(
            (whole for whole, parts in served.packed_modules_mapping.items() if part in parts), part
        )
        whole = weights[f"{path}.{stacked}.{leaf}"]
        start = first_row.get((path, stacked, leaf), 0)
        view = whole[start : start + len(p)]
        if view.shape != p.shape or view.dtype != dtype:
            raise ValueError(
                f"{name} is {tuple(p.shape)} {dtype}, the engine's {tuple(view.shape)} {view.dtype}"
            )
        first_row[path, stacked, leaf] = start + len(p)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(view, requires_grad=False))
    model.tie_weights()
    rotary = model.base_model.rotary_emb
    with torch.device(device):
        model.base_model.rotary_emb = type(rotary)(config=config)
    left = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise ValueError(f"the engine has no {left[0]}")
    return model


def cpu_lora_linear(
    wrapper, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **_
) -> None:
    """y[:, slice] += scale * (x A^T) B^T for the only slot, which every request uses (before the
    first push it holds zeros). vLLM's CPU kernel gathers A, B for every token: 20x slower.
    """
    y = y.view(-1, y.shape[-1])
    x = x.view(-1, x.shape[-1])
    start = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices):
        part = y[:, start : start + width]
        part.addmm_(x @ a[0, 0].T, b[0, 0].T, alpha=scale)
        start += width
