"""Files of a LoRA adapter, as peft writes them: what its settings may say, and its tensors.

What an adapter_config.json may hold is a list. Whatever else it holds is refused by name, because
it could change what the adapter computes.
"""

import re
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt, MinLen
from typing_extensions import TypedDict  # of Python before 3.12, pydantic takes this one only

from flatlab.files import read_mapping, usable, validated

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
Name = Annotated[str, MinLen(1)]


class Settings(TypedDict):
    """The fields that are used."""

    base_model_name_or_path: Name
    peft_type: Literal["LORA"]
    r: Annotated[int, Gt(0)]
    lora_alpha: Annotated[int | float, Ge(0), Lt(inf)]
    target_modules: Name | Annotated[list[Name], MinLen(1)]


def read_settings(folder: Path) -> tuple[str, dict]:
    """The base model of a plain LoRA adapter, and its r, lora_alpha and target_modules. Raises
    UserError, which names the field, if the adapter is of another kind.
    """
    file = folder / "adapter_config.json"
    settings = read_mapping(file)
    used = {name: settings.pop(name, None) for name in Settings.__annotations__}
    lora = validated(Settings, used, file)
    layers = lora["target_modules"]
    with usable(file):
        for name, value in settings.items():
            if name not in IGNORED and value not in (*PLAIN.get(name, ()), *EMPTY):
                raise ValueError(f"{name}={value!r:.80} is no plain LoRA")
        for name in [layers] if isinstance(layers, str) else layers:
            if AROUND.search(name):
                raise ValueError(f"the engine has no adapter for {name}")
    del lora["peft_type"]
    return lora.pop("base_model_name_or_path"), lora


def read_tensors(folder) -> dict:
    """The tensors of an adapter by their names. Raises UserError if the file is damaged, or if one
    of them is no A or B of a layer in the model's blocks, or holds NaN or infinity.
    """
    from safetensors.torch import load_file

    file = Path(folder, ADAPTER_FILE)
    with usable(file):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if not TENSOR.fullmatch(name):
                raise ValueError(f"the tensor {name} is no A or B of a layer in a model's blocks")
            if not tensor.float().isfinite().all():
                raise ValueError(f"the tensor {name} holds NaN or infinity")
    return tensors
