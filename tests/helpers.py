"""Fakes and short forms that several test files share. Importing this file starts nothing."""

import asyncio
import sys
from pathlib import Path

from flatlab.episode.episode import Sample
from flatlab.runs.cli import one_sentence

PROJECT = Path(__file__).resolve().parents[1]
LOCAL = "local"


def block(text):
    """A reply with one bash block."""
    return f"```bash\n{text}\n```"


def do(world, text):
    """The step of an environment for one bash block."""
    return world.step(block(text))


def run_here(main, *flags, monkeypatch, capsys):
    """Runs main() of a script in this process, as its command line does.

    Returns the exit code, stdout and stderr.
    """
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, flags)])
    code = 0
    try:
        one_sentence(main)
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


class FakePolicy:
    """Says scripted replies, the last one again and again.

    One token per character; 1 ends a reply, 2 and 3 open and close a user turn. `requests` holds
    all prompts.
    """

    def __init__(self, *replies, context=100_000, stop_reason="stop", wait=0.0):
        self.replies = list(replies)
        self.context = context
        self.stop_reason = stop_reason
        self.wait = wait
        self.requests = []

    def render(self, messages):
        return [2, *self.encode(messages[0]["content"]), 3]

    def encode(self, text):
        return [ord(c) + 10 for c in text]

    def decode(self, tokens):
        return "".join(chr(token - 10) for token in tokens)

    def observation_tokens(self, text, ended):
        end = [] if ended else [1]
        return [*end, 2, *self.encode(text), 3]

    async def sample(self, tokens, max_tokens, temperature=1.0, seed=None):
        assert len(tokens) + max_tokens <= self.context
        self.requests.append(list(tokens))
        await asyncio.sleep(self.wait)
        text = self.replies[min(len(self.requests), len(self.replies)) - 1]
        said = self.encode(text)
        if self.stop_reason == "stop":
            said.append(1)
        return Sample(said, [-0.5] * len(said), text, self.stop_reason, 7)


def search_config(**flags):
    """A Config of search.py from flat options, as they are written on the command line."""
    import search

    config = search.Config()
    groups = [config.tasks, config.model, config.sandbox, config.trackers]
    for name, value in flags.items():
        owner = next((group for group in groups if hasattr(group, name)), config)
        assert hasattr(owner, name), name
        setattr(owner, name, value)
    return config
