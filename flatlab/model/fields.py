"""Fields of a model's config.json and generation_config.json: what those that are used must be."""

import math
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import read_mapping

SIZES = """vocab_size hidden_size d_model n_embd emb_dim intermediate_size head_dim v_head_dim
num_hidden_layers n_layer n_layers num_layers num_attention_heads num_key_value_heads sliding_window
max_position_embeddings n_positions max_seq_len seq_length"""
FACTORS = """rms_norm_eps rope_theta logit_scale logits_scaling final_logit_softcapping
attn_logit_softcapping"""


def is_token_or_list(value) -> bool:
    tokens = value if isinstance(value, list) else [value]
    return all(type(token) is int and token >= 0 for token in tokens)


# Names of fields -> what they must be if they are given, and a test of that
FIELDS = {
    SIZES: ("a whole number of at least 1", lambda x: type(x) is int and x >= 1),
    FACTORS: ("a number above 0", lambda x: type(x) in (int, float) and 0 < x < math.inf),
    "eos_token_id": ("a token's number or a list of them", is_token_or_list),
    "model_type dtype torch_dtype": ("a text", lambda x: isinstance(x, str)),
    "architectures layer_types": (
        "a list of texts",
        lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x),
    ),
    "stand_in tie_word_embeddings": ("true or false", lambda x: isinstance(x, bool)),
    "text_config quantization_config rope_parameters rope_scaling": (
        "'name: value' pairs",
        lambda x: isinstance(x, dict),
    ),
}
# Those that must be given, with their names in other families
NEEDED = (
    ("model_type",),
    ("vocab_size",),
    ("hidden_size", "d_model", "n_embd", "emb_dim"),
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
)


def check_fields(config: dict, where) -> None:
    """Raises UserError, which names the file and the field, if the content of a config.json lacks a
    field or holds a wrong value. where: the file.
    """
    check_kinds(config, where)
    text = config.get("text_config") or {}  # of a model that also sees; it may lack what is usual
    check_kinds(text, where)
    for names in NEEDED[:1] if text else NEEDED:
        if all(config.get(name) is None for name in names):
            raise UserError(f"{where} lacks {names[0]}.")


def check_kinds(config: dict, where) -> None:
    """Raises UserError if a field has a wrong value; null is one that is not given."""
    for names, (kind, is_right) in FIELDS.items():
        for name in names.split():
            value = config.get(name)
            if value is not None and not is_right(value):
                raise UserError(f"{where}: {name} must be {kind}, not {value!r:.80}.")


def end_tokens(file: Path) -> list[int]:
    """The end tokens that a generation_config.json names. Raises UserError if it is damaged."""
    config = read_mapping(file)
    check_kinds(config, file)
    ends = config.get("eos_token_id")
    return ends if isinstance(ends, list) else [ends]
