"""Requirements of a model, and one sentence for whatever fails while it loads."""

import contextlib

from flatlab.errors import UserError


def count_weights(base: str) -> int:
    """The number of parameters of a model. Reads the names alone, no weights.

    Raises UserError if one of its tensors is not in its files: both programs would go on with
    random numbers in its place.
    """
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        base, device_map="meta", output_loading_info=True
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise UserError(f"The weights of {base} lack {missing[0]}: fetch the model again.")
    return model.num_parameters()


@contextlib.contextmanager
def loading(program: str, base: str):
    """Whatever fails inside becomes one sentence: no model ends in a traceback.

    program: what loads or tries the model `base`. The error stays as the cause of the UserError.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{program} cannot run the model {base}: {type(error).__name__}: {reason} "
            "(docs/models.md says which models work and what they need)."
        ) from error
