"""Fields of a model's config.json and generation_config.json that are used here. The rest is for
transformers and vLLM to refuse.
"""

from math import inf
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt
from typing_extensions import TypedDict  # of Python before 3.12, pydantic takes this one only

from flatlab.files import read_mapping, validated

# Those that bound the context; vLLM reads the same ones
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Those with which a model computes NaN or nonsense without an error, unless they are above 0
FACTORS = """rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon rope_theta
logit_scale logits_scaling final_logit_softcapping attn_logit_softcapping""".split()
Token = Annotated[int, Ge(0)]
KINDS = {
    **dict.fromkeys(POSITIONS, Annotated[int, Gt(0)]),
    "eos_token_id": Token | list[Token],
    "stand_in": bool,
    "text_config": dict,
    "quantization_config": dict,
}
Fields = TypedDict("Fields", {name: kind | None for name, kind in KINDS.items()}, total=False)
Factor = Annotated[float, Gt(0), Lt(inf)]
Factors = TypedDict("Factors", dict.fromkeys(FACTORS, Factor | None), total=False)


def check_fields(config: dict, file: Path) -> None:
    """Raises UserError, which names the file and the field, for a wrong value."""
    for part in (config, config.get("text_config") or {}):
        validated(Fields, part, file, strict=True)
    check_factors(config, file)


def check_factors(config: dict, file: Path) -> None:
    """See check_fields; also of the dicts inside, such as rope_parameters."""
    validated(Factors, config, file, strict=True)
    for part in config.values():
        if isinstance(part, dict):
            check_factors(part, file)


def end_tokens(file: Path) -> list[int]:
    """The end tokens that a generation_config.json names. Raises UserError if it is damaged."""
    ends = validated(Fields, read_mapping(file), file, strict=True).get("eos_token_id")
    return ends if isinstance(ends, list) else [ends]
