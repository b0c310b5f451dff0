"""What a model has to have, checked before its weights are loaded, and one sentence for what fails
while they are.
"""

import contextlib
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_mapping
from flatlab.model.chat import ChatTokens

READ = "docs/models.md says which models work and what they need."


def check_model(base: str):
    """Reads the config and the tokenizer of a model. Returns the config. From here on transformers
    shows no progress bars and no messages.

    Raises UserError if a file is missing or damaged, if there is no chat template, or if the
    weights are quantised.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(base)
    if folder.is_dir():
        check_files(folder)
    try:
        config = AutoConfig.from_pretrained(base)
        ChatTokens(base)
    except UserError:
        raise
    except Exception as error:  # a damaged file may raise anything
        if isinstance(error, OSError) and not folder.is_dir():
            raise UserError(
                f"Unknown model {base!r}: there is no such folder, and neither the Hugging Face "
                f"hub nor its local cache has it ({type(error).__name__}). Try --model tiny."
            ) from None
        raise UserError(f"Cannot load the model {base}: {first_line(error)}. {READ}") from error
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method:
        raise UserError(
            f"The weights of {base} are quantised ({method}), and LoRA is trained on plain ones "
            "here: choose a version in bf16."
        )
    return config


def check_files(folder: Path) -> None:
    """Raises UserError if the folder of a model lacks its config, its weights or a part of them, or
    if one of the files of weights is cut off.
    """
    from safetensors import SafetensorError, safe_open

    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds neither a model (config.json) nor an adapter (adapter_config.json)."
        )
    files = set(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    files |= {folder / name for name in read_mapping(index, {}).get("weight_map", {}).values()}
    if not files and not list(folder.glob("pytorch_model*.bin")):
        raise UserError(f"{folder} holds no weights (*.safetensors).")
    for file in sorted(files):
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} is missing or damaged ({error}): fetch it again.") from None


def check_weights(base: str) -> None:
    """Raises UserError if one of the model's tensors is not in its files: both programs would go on
    with random numbers in its place. Reads the names alone, no weights.
    """
    from transformers import AutoModelForCausalLM

    _, found = AutoModelForCausalLM.from_pretrained(
        base, device_map="meta", output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise UserError(f"The weights of {base} lack {missing[0]}{more}: fetch the model again.")


@contextlib.contextmanager
def loading(program: str, base: str):
    """Whatever fails inside becomes one sentence: no model ends in a traceback.

    program: what loads or tries the model `base`. The error stays as the cause of the UserError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise UserError(f"{program} cannot run the model {base}: {reason}. {READ}") from error


def first_line(error: Exception) -> str:
    """The first line of an error that says something, without the full stop."""
    lines = [line.strip() for line in str(error).splitlines()]
    # pydantic first counts the errors, then names the field
    telling = [line for line in lines if len(line.split()) > 2 and "validation error" not in line]
    if not telling:
        return repr(error)
    line, _, _ = telling[0].removeprefix("Value error, ").partition(" [type=")
    return line[:300].rstrip(".")
