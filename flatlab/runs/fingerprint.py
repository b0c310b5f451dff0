"""Digests of what made a run: its code, its tasks and its model. config.yaml keeps them.

open_run() in store.py compares them when a run continues. The changes themselves are in git.txt.
"""

import functools
import sys
from pathlib import Path

from flatlab.files import ROOT, content_key
from flatlab.model.path import config_file

PACKAGE = ROOT / "flatlab"


def fingerprint(tasks: list, prompts: str = "", model=None) -> dict[str, str]:
    """The digests of everything that makes a run besides its settings: "code", "prompts", "task",
    "model".

    prompts: Prompts.digest, "" without any. model: a ModelPath, or None for an endpoint.
    """
    return {
        "code": code_digest(),
        "prompts": prompts,
        "task": content_key(*(task.digest() for task in tasks)),
        "model": content_key(*model_parts(model)) if model else "",
    }


def code_files() -> list[Path]:
    """The package, and all modules imported by now from the script's folder and this project;
    without the views, which change no result.
    """
    files = {*PACKAGE.rglob("*.py")}
    script = Path(sys.path[0]).resolve()
    for module in [*sys.modules.values()]:
        file = Path(getattr(module, "__file__", None) or "")
        is_own = file.is_relative_to(ROOT) or file.is_relative_to(script)
        if file.suffix == ".py" and is_own and "site-packages" not in file.parts:
            files.add(file)
    return sorted(file for file in files if not file.is_relative_to(PACKAGE / "view"))


@functools.cache  # modules that are imported later belong to the same code
def code_digest() -> str:
    return content_key(*code_files())


def model_parts(model) -> list[str]:
    """The revision of a model of the hub; names, sizes and times of change of the files of a local
    model and of its adapter.
    """
    parts = []
    for name in filter(None, (model.base, model.adapter)):
        if not Path(name).is_dir():
            # The hub's cache keeps each file under snapshots/<revision>/.
            parts.append(config_file(name).parent.name)
        for file in sorted(Path(name).glob("[!.]*")):
            if file.is_file() and file.suffix != ".md":
                stat = file.stat()
                parts.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    return parts
