"""The errors with a meaning of their own, what a person is told about an error, and checks of what
the user's functions return.
"""

import difflib
import errno
import math
import os
import re
import textwrap
from collections.abc import Iterable
from contextlib import suppress

from flatlab.numbers import counted

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE)
# Keys that shown() hides; others are words, as `ollama`, or the ones in the manuals of servers
SECRET = re.compile(r"(?s)(?=.*\d).{6,11}|.{12,}")
PLACEHOLDERS = ("sk-1234", "token-abc123", "not-required", "no-key-needed", "sk-no-key-required")


class UserError(Exception):
    """One clear sentence for the user. A script prints it and exits with code 2."""


class Refusal(UserError):
    """An endpoint refuses one request. The text is its sentence."""


class UnknownTask(UserError):
    """There is no task of this name."""


class SandboxFault(Exception):
    """The sandbox broke. Env.crash_score tells whether the agent is to blame."""


class ArtefactError(Exception):
    """A file cannot be taken out of the sandbox. The text says why; the agent may see it."""


def finite(name: str, value, low: float = -math.inf) -> float:
    """A value of a user's function as a float; also that of a tensor with one element.

    Raises UserError if it is no finite number of at least `low`.
    """
    number = math.nan
    if not isinstance(value, (str, bytes)):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            number = float(value.item() if hasattr(value, "item") else value)
    if not (math.isfinite(number) and number >= low):
        least = "" if low == -math.inf else f" of at least {low:g}"
        raise UserError(f"{name} is {value!r:.80}: it must be a finite number{least}.")
    return number


def finite_list(name: str, values, wanted: int, of: str, skips: bool = False) -> list:
    """The same for one value per thing, of which there are `wanted`. of: what these things are
    called. skips: None stays None.
    """
    if not isinstance(values, Iterable):
        raise UserError(f"{name} returned {values!r:.80}: it must return a list of numbers.")
    values = list(values)
    if len(values) != wanted:
        raise UserError(
            f"{name} returned {counted(len(values), 'number')} for {counted(wanted, of)}."
        )
    return [None if skips and value is None else finite(name, value) for value in values]


def shown(text: str) -> str:
    """The text without the API keys of the environment and without passwords in addresses."""
    for name, value in os.environ.items():
        key = value.strip()
        is_secret = SECRET.fullmatch(key) and key not in PLACEHOLDERS
        if name.endswith(("_KEY", "_TOKEN")) and is_secret:
            text = text.replace(key, f"${name}")
    return re.sub(r"://\S*@", "://***@", text)  # also for a password with / or @


def first_cause(error: BaseException) -> BaseException:
    """The first error of a TaskGroup; any other error is itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def sentence_of(error: BaseException) -> str:
    """Sentence for the user about an error that is not a bug; "" for a bug."""
    if isinstance(error, UserError):
        return shown(str(error))
    if isinstance(error, SandboxFault):
        return f"The sandbox broke: {error}"
    if type(error).__name__ == "OutOfMemoryError":  # of torch, which is not imported here
        return (
            "The GPU's memory is used up: run the same command again with a lower --micro-tokens "
            f"or --concurrency to continue. {str(error)[:200]}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.E2BIG):
        return f"{error.strerror}: {str(error.filename)[:80]}..."
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return (
            f"{error}. Everything written so far is complete; "
            "run the same command again to continue."
        )
    return ""


def nearest(name: str, names: list[str]) -> str:
    """A hint for a misspelt name: the closest names, then as many as fit into a few lines."""
    close = difflib.get_close_matches(name, names, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    listed = textwrap.shorten(", ".join(names), 400, placeholder=" ...")
    return f"{hint}the names are {listed}" if names else "there is none"
