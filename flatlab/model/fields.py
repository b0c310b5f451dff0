"""Fields of a model's config.json and generation_config.json: what those that are used must be."""

from math import inf
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Lt
from typing_extensions import TypedDict  # of Python before 3.12, pydantic takes this one only

from flatlab.errors import UserError
from flatlab.files import read_mapping, validated

SIZES = """vocab_size hidden_size d_model n_embd emb_dim intermediate_size head_dim v_head_dim
num_hidden_layers n_layer n_layers num_layers num_attention_heads num_key_value_heads sliding_window
max_position_embeddings n_positions max_seq_len seq_length"""
FACTORS = """rms_norm_eps rope_theta logit_scale logits_scaling final_logit_softcapping
attn_logit_softcapping"""


Size = Annotated[int, Gt(0)]
Token = Annotated[int, Ge(0)]
# Types of fields -> their names
KINDS = {
    Size: SIZES,
    Annotated[float, Gt(0), Lt(inf)]: FACTORS,
    Token | list[Token]: "eos_token_id",
    str: "model_type dtype torch_dtype",
    list[str]: "architectures layer_types",
    bool: "stand_in tie_word_embeddings",
    dict: "text_config quantization_config rope_parameters rope_scaling",
}
FIELDS = {name: kind | None for kind, names in KINDS.items() for name in names.split()}
Fields = TypedDict("Fields", FIELDS, total=False)
# Those that must be given, with their names in other families
NEEDED = (
    ("model_type",),
    ("vocab_size",),
    ("hidden_size", "d_model", "n_embd", "emb_dim"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
)


def check_fields(config: dict, where) -> None:
    """Raises UserError, which names the file and the field, if the content of a config.json lacks a
    field or holds a wrong value; null is one that is not given. where: the file.
    """
    validated(Fields, config, where, strict=True)
    text = config.get("text_config") or {}  # of a model that also sees; it may lack what is usual
    validated(Fields, text, where, strict=True)
    for names in NEEDED[:1] if text else NEEDED:
        if all(config.get(name) is None for name in names):
            raise UserError(f"{where} lacks {names[0]}.")


def end_tokens(file: Path) -> list[int]:
    """The end tokens that a generation_config.json names. Raises UserError if it is damaged."""
    ends = validated(Fields, read_mapping(file), file, strict=True).get("eos_token_id")
    return ends if isinstance(ends, list) else [ends]
