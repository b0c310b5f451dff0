"""Files that are complete or absent, files of tensors, of 'name: value' pairs, and of rows; and the
user's cache folder, where files are named after the content they were made from.
"""

import hashlib
import io
import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from flatlab.errors import UserError, nearest

ROOT = Path(__file__).resolve().parents[1]  # of the project


def absent(path: str | Path) -> UserError:
    """The error that a file or folder does not exist, with the names that stand in its place."""
    missing = Path(path)
    while not missing.parent.exists():
        missing = missing.parent
    names = sorted(found.name for found in missing.parent.glob("[!.]*"))
    return UserError(f"There is no file or folder {path}; {nearest(missing.name, names)}.")


def temporary(final: Path) -> Path:
    """The name under which `final` is written first. sweep() in runs/store.py removes what a killed
    process left.
    """
    return final.with_name(f".tmp-{os.getpid()}-{final.name}")


def to_disk(path: Path) -> None:
    """fsync of a file, or of a directory, which keeps the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_whole(path: Path, content: str | bytes) -> None:
    """Readers see the old file or the new one, also after a full disk, kill -9 or a power cut."""
    temp = temporary(path)
    try:
        temp.write_bytes(content.encode() if isinstance(content, str) else content)
        to_disk(temp)
    except OSError:
        temp.unlink(missing_ok=True)
        raise
    os.replace(temp, path)
    to_disk(path.parent)


def save_tensors(content, path: Path) -> None:
    """torch.save, which turns a full disk into a RuntimeError; here it stays an OSError."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())


@contextmanager
def usable(what: str | Path):
    """Whatever fails inside becomes a UserError: `what`, a file of someone else, cannot be used."""
    try:
        yield
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"in line {mark.line + 1}:\n{mark.get_snippet()}"  # with a caret below the line
        raise UserError(f"{what} cannot be used: {error.problem}, {place}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"{what} cannot be used: {type(error).__name__}: {reason}.") from error


def load_tensors(path: Path, device="cpu") -> dict:
    """Reads a file of save_tensors. Raises UserError if it is missing or damaged."""
    import torch

    with usable(path):
        data = io.BytesIO(path.read_bytes())
        try:
            return torch.load(data, map_location=device, weights_only=True)
        except Exception:  # torch advises to read it unsafely
            raise ValueError("it holds no tensors") from None


class YamlLoader(yaml.SafeLoader):
    """Refuses a mapping that holds the same key twice, of which PyYAML would take the last."""

    def construct_mapping(self, node, deep=False):
        names = [str(key.value) for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the key {name} is given twice")
        return super().construct_mapping(node, deep)


class TextLoader(YamlLoader):
    """Reads every value as the text that stands in the file."""

    yaml_implicit_resolvers = {"<": YamlLoader.yaml_implicit_resolvers["<"]}  # merge keys


def read_mapping(path: Path, default: dict | None = None, loader=YamlLoader) -> dict:
    """The 'name: value' pairs of a .yaml or .json file; `default` if the file does not exist.

    loader: of the .yaml file. Raises UserError if the file is missing without a default, damaged,
    or holds something else or a key twice.
    """
    if default is not None and not path.exists():
        return default
    if not os.path.lexists(path):  # a link to nothing is named by the system's error
        raise absent(path)
    with usable(path):
        data = path.read_bytes()
        content = json.loads(data) if path.suffix == ".json" else yaml.load(data, loader)
        if not isinstance(content, dict):
            raise TypeError("it should hold 'name: value' pairs")
    return content


def validated(kind: type, values, path: Path | str, strict: bool = False):
    """Makes a dataclass or TypedDict from the content of a file, or another type from the value of
    a flag. strict: no value is converted.

    Raises UserError naming the file or flag and the first wrong key.
    """
    from pydantic import TypeAdapter, ValidationError  # takes long: --help does without it

    try:
        return TypeAdapter(kind).validate_python(values, strict=strict)
    except ValidationError as error:
        first = error.errors()[0]
    where = ".".join(part for part in first["loc"] if isinstance(part, str))
    if first["type"] == "missing":
        raise UserError(f"{path} lacks the key {where}.")
    if first["type"] == "extra_forbidden":  # only of a TypedDict
        raise UserError(f"{path}: unknown key {where!r}; {nearest(where, kind.__annotations__)}.")
    said = [str(path), where, first["msg"]]
    raise UserError(f"{': '.join(filter(None, said))}, not {str(first['input'])[:100]!r}.")


def read_rows(path) -> list[dict]:
    """All complete lines of a jsonl file; [] without a file. UserError if a line is damaged."""
    rows = []
    path = Path(path)
    if not path.exists():
        return rows
    with usable(path):
        lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        with usable(f"{path}, line {number},"):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("it is not a JSON object")
            rows.append(row)
    return rows


def user_home() -> Path:
    """The user's home directory; without one /dev/null, where nothing can be read or written."""
    path = os.path.expanduser("~")
    return Path(os.devnull if path == "~" else path)


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or user_home() / ".cache") / "flatlab"


def recall(path: Path) -> dict:
    """The content of a JSON file of the cache; {} if there is none that can be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_bytes()))
    return {}


def remember(path: Path, value: dict) -> None:
    """Writes a JSON file of the cache, completely or not at all. No run needs one: a place where
    nothing can be written is left as it is.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value, indent=1))


def content_key(*parts: str | Path) -> str:
    """A short name for the content of texts and files. It changes if one of them does."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with open(part, "rb") as file:
                part = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        data = part.encode()
        digest.update(b"%d " % len(data) + data)
    return digest.hexdigest()[:16]
