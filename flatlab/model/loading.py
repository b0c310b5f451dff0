"""Requirements of a model, and one sentence for whatever fails while it loads."""

from flatlab.errors import UserError
from flatlab.files import usable


def count_weights(base: str) -> int:
    """The number of parameters of a model. Reads the names alone, no weights.

    Raises UserError if one of its tensors is not in its files: both programs would go on with
    random numbers in its place.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        base, device_map="meta", output_loading_info=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"The weights of {base} lack {missing[0]}: fetch the model again.")
    return model.num_parameters()


def loading(program: str, base: str):
    """Whatever fails inside becomes one sentence about the model `base`. program: what loads it."""
    return usable(f"The model {base} ({program}; see docs/models.md)")
