"""Lists the files of a task, for all loaders. Whatever a task names arrives whole, or UserError
names it.
"""

import os
from pathlib import Path

from flatlab.errors import UserError


def tree_files(path: Path, place: str, hint: str, above: tuple = ()) -> dict[str, Path]:
    """Maps workspace paths to the files at `path`, a file or a folder, which go to `place`. Links
    are followed. Python's bytecode is left out.

    Raises UserError, which ends with the hint, for what is missing, empty, unreadable, a link in a
    circle, or neither a file nor a folder. above: the real folders that lead here.
    """
    try:
        is_folder = path.is_dir()
        if is_folder:
            names = sorted(os.listdir(path))
        elif not path.exists():
            link = " (a link to nothing)" if path.is_symlink() else ""
            raise UserError(f"The file or folder {path} is missing{link}; {hint}.")
    except OSError as error:  # also a link to itself
        raise UserError(f"Cannot read {path}: {error.strerror}; {hint}.") from None
    if not is_folder:
        if not path.is_file():
            raise UserError(f"{path} is neither a file nor a folder; {hint}.")
        if not os.access(path, os.R_OK):
            raise UserError(f"Cannot read {path}: Permission denied; {hint}.")
        return {place: path}
    if not names:
        raise UserError(f"The folder {path} is empty; {hint}.")
    real = Path(os.path.realpath(path))
    if any(folder.is_relative_to(real) for folder in above):
        raise UserError(f"The link {path} leads back to a folder that holds it; {hint}.")
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
