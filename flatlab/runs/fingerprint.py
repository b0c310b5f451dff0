"""What made a run: one digest each of its code, its tasks and its model, which config.yaml keeps.

open_run() in store.py compares them when a run continues. The changes themselves are in git.txt.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

from flatlab.files import content_key

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flatlab"
VIEW = PACKAGE / "view"  # draws and prints only, so it changes no result


def fingerprint(
    task_digests: list[str],
    model=None,
    command: str = "",
) -> dict[str, str]:
    """The digests of everything that makes a run besides its settings: "code", "task", "model".

    task_digests: Task.digest() of each task. model: a ModelPath, or None for an endpoint.
    command: of an agent program; files that it names, but does not write after > or >>, are code.
    """
    words = re.sub(r">+ *\S+", "", command).split()
    programs = [Path(word) for word in words if Path(word).is_file()]
    return {
        "code": content_key(code_digest(), *programs),
        "task": content_key(*task_digests),
        "model": content_key(*model_parts(model)) if model else "",
    }


def code_files() -> list[Path]:
    """The package, the bridges to other projects (imported late), and all modules imported by now
    from the script's folder and this project.
    """
    names = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = {Path(name) for name in names if name and name.endswith(".py")}
    files.update(PACKAGE.rglob("*.py"))
    files.update((ROOT / "integrations").glob("*.py"))
    script = Path(sys.path[0]).resolve()
    return sorted(
        file
        for file in files
        if (file.is_relative_to(ROOT) or file.is_relative_to(script))
        and "site-packages" not in file.parts
        and not file.is_relative_to(VIEW)
    )


@functools.cache  # modules that are imported later belong to the same code
def code_digest() -> str:
    """Comments and layout do not count, docstrings do: it is the digest of the syntax trees.
    Another version of Python may write these in another way.
    """
    trees = [ast.parse(file.read_bytes()) for file in code_files()]
    return content_key(*map(ast.dump, trees))


def model_parts(model) -> list[str | Path]:
    """The files of a local model and of its adapter; the revision of a model of the hub."""
    folders = [Path(folder) for folder in (model.base, model.adapter) if folder]
    parts = []
    if not folders[0].is_dir():
        from transformers.utils import cached_file

        # The hub's cache keeps each file under snapshots/<revision>/.
        parts.append(Path(cached_file(model.base, "config.json")).parent.name)
        del folders[0]
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix != ".md" and path.name[0] != ".":
                parts.append(path)
    return parts
