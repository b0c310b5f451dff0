"""The three errors with a meaning of their own."""


class UserError(Exception):
    """One clear sentence for the person at the keyboard. A script's main prints it and exits with code 2."""


class SandboxFault(Exception):
    """The sandbox broke. This is not the agent's failure: the episode is dropped and counted."""


class ArtefactError(Exception):
    """A file cannot be taken out of the sandbox. The text says why and may be shown to the agent."""
