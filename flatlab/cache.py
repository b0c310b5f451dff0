"""Files in the user's cache folder, named after the content they were made from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from flatlab.files import write_whole

HASHED_BYTES = 64 << 20  # larger files enter a content key by name, size and time only


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatlab"


def store(path: Path, value: dict) -> None:
    """Writes a JSON file of the cache, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=1))


def content_key(*parts: str | Path) -> str:
    """A short name for the content of texts and files. It changes if one of them does."""
    digest = hashlib.sha256()
    for part in parts:
        data = file_content(part) if isinstance(part, Path) else part.encode()
        digest.update(b"%d " % len(data) + data)
    return digest.hexdigest()[:16]


def file_content(path: Path) -> bytes:
    """The bytes of a file, or for a large one its name, size and time of change."""
    facts = path.stat()
    if facts.st_size <= HASHED_BYTES:
        return path.read_bytes()
    return f"{path.name} {facts.st_size} {facts.st_mtime_ns}".encode()
