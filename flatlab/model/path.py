"""The model that a run names: where it lies, what its config.json says, how large it is, and one
sentence for whatever fails while it loads. Needs no torch.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from flatlab.errors import UserError, nearest
from flatlab.files import ROOT, absent, read_mapping, usable
from flatlab.model.adapter import read_settings
from flatlab.model.fields import POSITIONS, check_fields
from flatlab.numbers import value_text

STAND_IN = ROOT / "configs" / "tiny"  # the folder of --model tiny
FOLDER = re.compile(r"[/.~]|logs/|.+/.*/")  # names that are none of the Hugging Face hub


@dataclass(frozen=True)
class ModelPath:
    base: str  # folder or Hugging Face name of the causal LM
    adapter: str | None  # folder of a trained LoRA adapter (`logs/<run>/best`), or None
    stand_in: bool  # whether it is the stand-in, which its config says
    positions: int | None = None  # upper bound on the context; None: the model has none
    lora: dict | None = None  # r, lora_alpha and target_modules of the adapter


def default_model() -> str:
    """A real instruct model if there is a GPU, else the stand-in."""
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):  # dxg: under Windows
        return "tiny"
    import torch

    return "Qwen/Qwen3-4B-Instruct-2507" if torch.cuda.is_available() else "tiny"


def model_name(cfg) -> str:
    """Name of a config's model in the name of its run."""
    return value_text(cfg.model.model or default_model())


def resolve_model(name: str) -> ModelPath:
    """Finds a model and its adapter. Reads their configs; Engine reads the rest.

    Raises UserError if one of them does not exist or cannot be used.
    """
    folder = Path(os.path.expanduser(name))  # also with an unknown ~user
    if (folder / "best" / "adapter_config.json").is_file():
        raise UserError(f"{name} is a run: its adapter is {folder / 'best'}.")
    base = str(folder) if folder.is_dir() else name
    adapter, lora = None, None
    if name == "tiny":
        base = str(STAND_IN)
    elif os.path.lexists(folder / "adapter_config.json"):  # also a link to nothing
        adapter = str(folder)
        base, lora = read_settings(folder)
    try:
        config = read_config(base)
    except UserError as error:
        if not adapter:
            raise
        raise UserError(f"base_model_name_or_path of the adapter {adapter}: {error}") from None
    text = config | (config.get("text_config") or {})
    positions = min((text[name] for name in POSITIONS if text.get(name)), default=None)
    return ModelPath(base, adapter, config.get("stand_in", False), positions, lora)


def read_config(base: str) -> dict:
    """The content of a model's config.json. Raises UserError if there is none, if it is damaged, or
    if the weights are quantised.
    """
    if FOLDER.match(base) and not Path(base).is_dir():
        raise absent(base)
    file = config_file(base)
    config = read_mapping(file)
    check_fields(config, file)
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method:
        raise UserError(
            f"The weights of {base} are quantised ({method}), and LoRA is trained on plain ones "
            "here: choose a version in bf16."
        )
    return config


def config_file(base: str) -> Path:
    """The config.json of a model; one of the hub is fetched unless its cache has it."""
    if Path(base).is_dir():
        return Path(base, "config.json")
    from huggingface_hub import hf_hub_download

    try:
        with loading("huggingface_hub", base):
            return Path(hf_hub_download(base, "config.json"))
    except UserError as error:
        local = ["tiny", *map(str, Path("logs").glob("*/best"))]
        raise UserError(f"{error} Local models: {nearest(base, local)}.") from None


def count_weights(base: str) -> int:
    """The number of parameters of a model. Reads the names alone, no weights.

    Raises UserError if one of its tensors is not in its files: both programs would go on with
    random numbers in its place.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        base, device_map="meta", output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"The weights of {base} lack {missing[0]}: fetch the model again.")
    return model.num_parameters()


def loading(program: str, base: str):
    """Whatever fails inside becomes one sentence about the model `base`. program: what loads it."""
    return usable(f"The model {base} ({program}; see docs/models.md)")
