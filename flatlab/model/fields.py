"""Fields of a model's config.json and generation_config.json that are used here. The rest is for
transformers and vLLM to refuse.
"""

from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt
from typing_extensions import TypedDict  # of Python before 3.12, pydantic takes this one only

from flatlab.files import read_mapping, validated

# Those that bound the context; vLLM reads the same ones
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
Token = Annotated[int, Ge(0)]
KINDS = {
    **dict.fromkeys(POSITIONS, Annotated[int, Gt(0)]),
    "eos_token_id": Token | list[Token],
    "stand_in": bool,
    "text_config": dict,
    "quantization_config": dict,
}
Fields = TypedDict("Fields", {name: kind | None for name, kind in KINDS.items()}, total=False)


def check_fields(config: dict, file: Path) -> None:
    """Raises UserError, which names the file and the field, for a wrong value."""
    for part in (config, config.get("text_config") or {}):
        validated(Fields, part, file, strict=True)


def end_tokens(file: Path) -> list[int]:
    """The end tokens that a generation_config.json names. Raises UserError if it is damaged."""
    ends = validated(Fields, read_mapping(file), file, strict=True).get("eos_token_id")
    return ends if isinstance(ends, list) else [ends]
