"""Files of a LoRA adapter, as peft writes them: what its settings may say, and its tensors.

What an adapter_config.json may hold is a list. Whatever else it holds is refused by name, because
it could change what the adapter computes.
"""

import math
import re
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_mapping

ADAPTER_FILE = "adapter_model.safetensors"
# Fields that change nothing once an adapter is trained
IGNORED = {
    "auto_mapping",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",  # follows from the layers
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
# Values of other fields that mean a plain adapter, beside those of EMPTY
PLAIN = {
    "bias": ("none",),
    # other ways of drawing the first weights (PiSSA, OLoRA, LoftQ) change the base model, too
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
EMPTY = (None, False, "", [], {})
# Layers around the blocks of a model; the engine has no adapter for them
AROUND = re.compile(r"(^|\.)(lm_head|embed_\w+|\w*word_embeddings|wte|wpe|output_layer)$")
# Tensor of a layer in a numbered block
TENSOR = re.compile(r"base_model\.model\..+\.\d+\..+\.lora_[AB]\.weight")


def read_settings(folder: Path) -> tuple[str, dict]:
    """The base model of a plain LoRA adapter, and its r, lora_alpha and target_modules. Raises
    UserError, which names the field, if the adapter is of another kind.
    """
    settings = read_mapping(folder / "adapter_config.json")
    base, r, alpha, layers = (
        settings.pop(name, None)
        for name in ("base_model_name_or_path", "r", "lora_alpha", "target_modules")
    )
    names = layers if isinstance(layers, list) else [layers]
    wanted = {
        "base_model_name_or_path": ("the name of a model", isinstance(base, str) and base),
        "r": ("a whole number of at least 1", type(r) is int and r > 0),
        "lora_alpha": ("a number", type(alpha) in (int, float) and math.isfinite(alpha)),
        "target_modules": (
            "names of layers",
            names and all(isinstance(name, str) and name for name in names),
        ),
        "peft_type": ("LORA", settings.pop("peft_type", None) == "LORA"),
    }
    for name, (kind, is_right) in wanted.items():
        if not is_right:
            raise UserError(f"The adapter {folder}: {name} of its config must be {kind}.")
    for name, value in settings.items():
        if name not in IGNORED and value not in (*PLAIN.get(name, ()), *EMPTY):
            raise UserError(
                f"The adapter {folder} has {name}={value!r:.80} in its config, which is not "
                "supported: only plain LoRA is."
            )
    for name in names:
        if AROUND.search(name):
            raise UserError(f"The adapter {folder} adapts {name}, which is not supported.")
    return base, {"r": r, "lora_alpha": alpha, "target_modules": layers}


def read_tensors(folder) -> dict:
    """The tensors of an adapter by their names. Raises UserError if the file is damaged, or if one
    of them is no A or B of a layer in the model's blocks, or holds NaN or infinity.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(folder, ADAPTER_FILE)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"Cannot load the adapter in {folder}: {error}") from None
    for name, tensor in tensors.items():
        if not TENSOR.fullmatch(name):
            raise UserError(
                f"{file} holds the tensor {name}: only A and B of the layers in a model's blocks "
                "are supported."
            )
        if not tensor.float().isfinite().all():
            raise UserError(f"{file} holds NaN or infinity: the tensor {name}.")
    return tensors
