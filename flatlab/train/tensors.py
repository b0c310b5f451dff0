"""Tensors to disk."""

import io
from pathlib import Path


def save_tensors(content, path: Path) -> None:
    """torch.save, but a full disk stays an OSError: torch.save itself turns it into a RuntimeError."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(buffer.getbuffer())
