"""What made a run: digests of its code, its tasks and its model, which config.yaml keeps.

A run is continued only with the task and the model that it began with. Code may change while it
goes on, and each row names the code that made it, see open_run() in store.py. The settings of the
run are compared by open_run() itself.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from flatlab.cache import file_digest
from flatlab.task.definition import Task

ROOT = Path(__file__).resolve().parents[2]
GUEST = ROOT / "flatlab" / "sandbox" / "guest"  # a sandbox runs these; few are imported here
VIEW = "flatlab/view/"  # draws and prints only, so it changes no result
MOST_FILES = 100  # of a task; the files of a larger one are summed up by folder
# Fields of a Task that change neither an episode nor its score, or that name files
NOT_COMPARED = set(
    """name source degenerate trivial needs_gpu needs_network public hidden proxies requirements
    act""".split()
)


def fingerprint(script: str, tasks: list[Task], model=None, command: str = "") -> dict:
    """The digests of everything that makes a run besides its settings.

    script: file of the script. model: a ModelPath, or None for an endpoint. command: of an agent
    program; the files that it names count as code.
    Returns {"code": {file: digest}, "tasks": {task: {part: digest}}, "model": {file: digest}}.
    """
    return {
        "code": code_digests(Path(script).absolute()) | command_digests(command),
        "tasks": {task.name: task_digests(task) for task in tasks},
        "model": model_digests(model) if model else {},
    }


def changed(old: dict, new: dict) -> str:
    """The keys whose digests differ, as "a, b"; "" if none does."""
    keys = sorted({*old, *new})
    return ", ".join(key for key in keys if old.get(key) != new.get(key))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------ code


def code_digests(script: Path) -> dict[str, str]:
    """Digests of a script and of the modules that it imports from its own folder and this project.

    Comments and layout do not count, docstrings do: a digest is that of the syntax tree. Another
    version of Python may write the tree in another way, and then counts as other code.
    """
    roots = (script.parent, ROOT)
    waiting = [script, *sorted(GUEST.glob("*.py"))]
    digests = {}
    while waiting:
        path = waiting.pop()
        root = next(root for root in roots if path.is_relative_to(root))
        name = str(path.relative_to(root))
        if name in digests or name.startswith(VIEW):
            continue
        tree = ast.parse(path.read_bytes())
        digests[name] = digest(ast.dump(tree))
        for module in imported_modules(tree):
            relative = Path(*module.split(".")).with_suffix(".py")
            files = [root / relative for root in roots]
            waiting += [file for file in files if file.is_file()][:1]
    return dict(sorted(digests.items()))


def command_digests(command: str) -> dict[str, str]:
    """Digests of the files that a command names, without those that it writes, after > or >>."""
    words = re.sub(r">+ *\S+", "", command).split()
    return {word: file_digest(Path(word)) for word in words if Path(word).is_file()}


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Names that may be modules, also those of imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


# ------------------------------------------------------------------ tasks and models


def task_digests(task: Task) -> dict[str, str]:
    """Digests of what is asked and how it is scored, and of all files of the task by their path in
    the sandbox.
    """
    facts = [field.name for field in fields(Task) if field.name not in NOT_COMPARED]
    digests = {name: digest(str(getattr(task, name))) for name in facts}
    files = {**task.public, **task.hidden}
    for path, (proxy, _) in task.proxies.items():
        files[f"proxy of {path}"] = proxy
    if task.requirements:
        files["requirements"] = task.requirements
    file_digests = {path: file_digest(file) for path, file in sorted(files.items())}
    if len(file_digests) <= MOST_FILES:
        return digests | file_digests
    lines = {}
    for path, value in file_digests.items():
        folder = path.partition("/")[0]
        lines.setdefault(folder, []).append(f"{path} {value}")
    return digests | {folder: digest("\n".join(text)) for folder, text in lines.items()}


def model_digests(model) -> dict[str, str]:
    """Digests of the files of a local model and of its adapter; the revision of one of the hub."""
    digests = {}
    if Path(model.base).is_dir():
        digests |= folder_digests(Path(model.base), "")
    else:
        from transformers.utils import cached_file

        # The hub's cache keeps each file under snapshots/<revision>/.
        digests["revision"] = Path(cached_file(model.base, "config.json")).parent.name
    if model.adapter:
        digests |= folder_digests(Path(model.adapter), "adapter/")
    return digests


def folder_digests(folder: Path, prefix: str) -> dict[str, str]:
    """Digests of the files in a folder, without notes for people and hidden files."""
    digests = {}
    for path in sorted(folder.iterdir()):
        is_for_people = path.suffix == ".md" or path.name.startswith(".")
        if path.is_file() and not is_for_people:
            digests[prefix + path.name] = file_digest(path)
    return digests
