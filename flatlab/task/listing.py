"""Lists the files of a task, for all loaders. Whatever a task names arrives whole, or UserError
names it.
"""

import os
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import usable


def tree_files(path: Path, place: str, hint: str, above: tuple = ()) -> dict[str, Path]:
    """Maps workspace paths to the files at `path`, a file or a folder, which go to `place`. Links
    are followed. Python's bytecode is left out.

    Raises UserError, which holds the hint, for what is missing, empty, unreadable, a link in a
    circle, or neither a file nor a folder. above: the real folders that lead here.
    """
    with usable(f"{path} ({hint})"):
        if not path.is_dir():
            if path.exists() and not path.is_file():
                raise ValueError("it is neither a file nor a folder")
            path.open("rb").close()
            return {place: path}
        names = sorted(os.listdir(path))
        if not names:
            raise ValueError("it is empty")
        real = Path(os.path.realpath(path))
        if any(folder.is_relative_to(real) for folder in above):
            raise ValueError("the link leads back to a folder that holds it")
    files = {}
    for name in names:
        child = path / name
        if not child.match("__pycache__/*.pyc"):
            files |= tree_files(child, f"{place}/{name}", hint, (*above, real))
    return files


def joined(task: str, *parts: dict[str, Path]) -> dict[str, Path]:
    """All files of the parts. Raises UserError if two would have one place in the workspace."""
    files = {}
    for part in parts:
        for place, file in part.items():
            other = files.setdefault(place, file)
            if other is not file:
                raise UserError(
                    f"Task {task}: {other} and {file} would both be {place} in the workspace: "
                    "rename one of them."
                )
    for place in files:
        for folder in map(str, Path(place).parents):
            if folder in files:
                raise UserError(
                    f"Task {task}: {files[folder]} would be {folder} in the workspace, where "
                    f"{files[place]} needs a folder: rename one of them."
                )
    return files
