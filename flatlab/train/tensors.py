"""Tensors to disk."""

import io
from pathlib import Path


def save_tensors(content, path: Path) -> None:
    """torch.save, which turns a full disk into a RuntimeError; here it stays an OSError."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())
