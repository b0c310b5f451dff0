"""Requirements of a model, one sentence for whatever fails while it loads, and the phases of the
engine's start.
"""

import contextlib
import logging
import time

from flatlab.errors import UserError

# Records of vLLM's log at the end of a phase of its start -> the name of the phase
PHASES = {
    "Loading weights took %.2f seconds": "weights",
    "%sDirectly load AOT compilation from path %s": "compiled code from the cache",
    "%storch.compile took %.2f s in total": "compiling",
    "%sInitial profiling/warmup run took %.2f s": "warm-up",
    "Graph capturing finished in %.0f secs, took %.2f GiB": "CUDA graphs",
}


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


class PhaseLines(logging.Handler):
    """Prints a line with the seconds of each phase of vLLM's start. start: of the first one."""

    def emit(self, record):
        now = time.monotonic()
        if name := PHASES.get(record.msg):
            if now - self.start >= 0.5:
                print(f"engine   {name} ({now - self.start:.0f} s)")
            self.start = now


@contextlib.contextmanager
def phases():
    """Inside, each phase of vLLM's start is printed when it ends."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(LoggingConfig())  # else the engine would, without the handler
    logger = logging.getLogger("vllm")
    logger.setLevel(min(logger.level, logging.INFO))  # its own handler still drops them
    lines = PhaseLines()
    lines.start = time.monotonic()
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)
