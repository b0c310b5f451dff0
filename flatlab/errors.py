"""The three errors with a meaning of their own."""


class UserError(Exception):
    """One clear sentence for the user. A script prints it and exits with code 2."""


class SandboxFault(Exception):
    """The sandbox broke. The agent is not to blame: the episode is dropped and counted."""


class ArtefactError(Exception):
    """A file cannot be taken out of the sandbox. The text says why; the agent may see it."""
