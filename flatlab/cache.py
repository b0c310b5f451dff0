"""Files in the user's cache folder, named after the content they were made from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from flatlab.files import write_whole

REMEMBERED_BYTES = 64 << 20  # the digest of a larger file is kept in the cache


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
        text = file_digest(part) if isinstance(part, Path) else part
        data = text.encode()
        digest.update(b"%d " % len(data) + data)
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a file's content.

    A large file is read once: the cache keeps its digest under its path, size and time of change.
    """
    facts = path.stat()
    with open(path, "rb") as file:
        if facts.st_size <= REMEMBERED_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        key = content_key(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}")
        kept = cache_dir() / "digests" / f"{key}.json"
        if not kept.exists():
            store(kept, {"digest": hashlib.file_digest(file, "sha256").hexdigest()[:16]})
    return json.loads(kept.read_text())["digest"]
