"""What an agent's reply asks for: the text of its one bash block.

The block starts at a line ```bash and ends at the last closing fence of the reply, so a heredoc
inside it may hold fences of its own, as a README does.
"""

from __future__ import annotations

import re

FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([^`]*?)[ \t]*$")
SHELLS = ("bash", "sh", "shell")


def extract_action(reply: str) -> tuple[str | None, str]:
    """(text of the bash block, "") or (None, why there is no action to run). Never raises."""
    text = without_thought(reply)
    if text is None:
        return None, "There is no ```bash block in the reply."
    lines = text.split("\n")
    fences = find_fences(lines)
    starts, problem = find_starts(fences)
    if problem:
        return None, problem
    start, ticks, _ = starts[0]
    ends = [at for at, length, mark in fences if at > start and length >= ticks and not mark]
    if not ends:
        return None, "The ``` block is not closed; it may have been cut off at the length limit."
    if len(ends) > 1 and "<<" not in "\n".join(lines[start : ends[0]]):
        return None, "There are several code blocks in the reply; write one."
    action = "\n".join(lines[start + 1 : ends[-1]])
    if not action.strip():
        return None, "The block is empty."
    return action, ""


def find_fences(lines: list[str]) -> list[tuple[int, int, str]]:
    """(line number, number of backticks, language) of every line that is a fence."""
    found = []
    for at, line in enumerate(lines):
        if match := FENCE.match(line):
            found.append((at, len(match[1]), match[2].lower()))
    return found


def find_starts(fences: list[tuple[int, int, str]]) -> tuple[list[tuple[int, int, str]], str]:
    """(the one fence that opens the action, "") or ([], why there is none)."""
    starts = [fence for fence in fences if fence[2] in SHELLS]
    if not starts and len(fences) == 2:
        starts = [fence for fence in fences[:1] if not fence[2]]  # a block without a language
    if len(starts) == 1:
        return starts, ""
    if starts:
        return [], (
            f"There are {len(starts)} code blocks in the reply; write one. "
            "(A ```bash line inside a heredoc counts, too.)"
        )
    languages = [language for _, _, language in fences if language]
    if languages:
        return [], f"The block is marked {languages[0][:20]!r}; it must be bash."
    if len(fences) == 1:
        return [], "The ``` block is not closed; it may have been cut off at the length limit."
    if fences:
        return [], "There are several code blocks in the reply; write one, marked ```bash."
    return [], "There is no ```bash block in the reply."


def without_thought(reply: str) -> str | None:
    """The reply after its thought; None if it never stopped thinking.

    The prompt may have opened the thought, so `</think>` alone ends one. Inside the block, where
    only the closing fence follows, `</think>` is text.
    """
    _, mark, rest = reply.rpartition("</think>")
    inside_block = [language for _, _, language in find_fences(rest.split("\n"))] == [""]
    text = reply if mark and inside_block else rest
    begin, mark, _ = text.partition("<think>")
    if mark and not find_fences(begin.split("\n")):
        return None
    return text
