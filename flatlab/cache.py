"""Files that are kept between runs in the user's cache folder, named by the content they come from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

HASHED_BYTES = 64 << 20  # a larger file goes into a content key with name, size and time only


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatlab"


def store(path: Path, value: dict) -> None:
    """Write a JSON file of the cache, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(value, indent=1), encoding="utf-8")
    part.replace(path)


def content_key(*parts: str | Path) -> str:
    """A short name for the content of texts and files: it changes whenever one of them does."""
    digest = hashlib.sha256()
    for part in parts:
        if (
            isinstance(part, Path) and part.stat().st_size > HASHED_BYTES
        ):  # too slow: what stands for it is
            part = f"{part.name} {part.stat().st_size} {part.stat().st_mtime_ns}"
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(b"%d " % len(data) + data)
    return digest.hexdigest()[:16]
