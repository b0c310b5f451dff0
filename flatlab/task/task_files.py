"""What the loaders of tasks share: the folder of tasks, misspelt names, the files of a folder."""

from __future__ import annotations

import difflib
from pathlib import Path

from flatlab.errors import UserError

TASKS_DIR = Path(__file__).resolve().parents[2] / "configs" / "tasks"


def nearest(name: str, names: list[str]) -> str:
    """A hint for a misspelt name: the closest names, then all of them."""
    close = difflib.get_close_matches(name, names, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}Known names: {', '.join(names)}"


def tree_files(path: Path, prefix: str, hint: str) -> dict[str, Path]:
    """Maps workspace paths to the files at `path`, a file or a folder.

    Raises UserError, which ends with the hint, if `path` does not exist.
    """
    if path.is_file():
        return {prefix: path}
    if not path.is_dir():
        raise UserError(f"The file or folder {path} is missing; {hint}.")
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            files[f"{prefix}/{file.relative_to(path).as_posix()}"] = file
    return files


def proxies(artefacts: list[str]) -> dict[str, tuple[Path, str]]:
    """Task.proxies for Python artefacts that the grader imports."""
    proxy = TASKS_DIR / "proxy.py"
    return {name: (proxy, name.removesuffix(".py") + "_agent.py") for name in artefacts}
