"""The three errors with a meaning of their own, and what a person is told about an error."""

import difflib
import errno

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


class UserError(Exception):
    """One clear sentence for the user. A script prints it and exits with code 2."""


class SandboxFault(Exception):
    """The sandbox broke. The agent is not to blame: the episode is dropped and counted."""


class ArtefactError(Exception):
    """A file cannot be taken out of the sandbox. The text says why; the agent may see it."""


def first_cause(error: BaseException) -> BaseException:
    """The first error of a TaskGroup; any other error is itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def sentence_of(error: BaseException) -> str:
    """What a person is told about an error that is not a bug; "" for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, SandboxFault):
        return f"The sandbox broke: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.E2BIG):
        return f"{error.strerror}: {str(error.filename)[:80]}..."
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return (
            f"{error}. Everything written so far is complete; "
            "run the same command again to continue."
        )
    return ""


def nearest(name: str, names: list[str]) -> str:
    """A hint for a misspelt name: the closest names, then all of them."""
    close = difflib.get_close_matches(name, names, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}the names are {', '.join(names)}"
