"""The action of a reply: the text of its one bash block.

A block starts at a line ```bash and ends at the first closing fence that is not in a heredoc, so a
heredoc may hold fences, as a README does.
"""

import re

THOUGHT_ENDS = "</think>"
FENCE = re.compile(r" {0,3}(`{3,})([^`]*)$")
# Characters without width, which nobody sees beside a fence: soft hyphen, joiners, marks of
# direction, word joiner, byte order mark
NO_WIDTH = dict.fromkeys([0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), 0x2060, 0xFEFF])
SHELLS = ("bash", "sh", "shell")
# The parts of a line of bash that matter here: quotes, brackets, and heredocs (dash, delimiter).
# Escapes, here-strings, comments, `let x=1<<4` and indices match whole: nothing in them counts.
CODE = re.compile(
    r"""\\.|<<<|<<(-?)[ \t]*((?:\\.|'[^']*'|"[^"]*"|[^\s;&|<>()'"\\`])+)"""
    r"""|(?<![^\s;&|()])(?:#.*|let(?:[ \t]+[^\s;&|'"<][^\s;&|'"]*)+)"""
    r"""|[\w$]\[[^][]*\]|\$?\(\(?|\$?'|["`)]"""
)
IN_QUOTES = {
    "'": re.compile("'"),
    "$'": re.compile(r"\\.|'"),
    '"': re.compile(r'\\.|\$\(\(?|["`]'),
}


class Block:
    """A code block, read line by line. If it is bash, it knows the heredocs that are open."""

    def __init__(self, language: str, ticks: int, is_bash: bool):
        self.language = language
        self.ticks = ticks  # least number of backticks of its fences
        self.is_bash = is_bash
        self.lines = []
        self.is_closed = False
        self.nesting = []  # open quotes and brackets
        self.heredocs = []  # open ones: (dash, delimiter as it is written)
        self.in_heredoc = False  # True if the next line is in a heredoc or ends one
        self.is_joined = False  # True if a backslash joins the next line to the last one

    def add(self, line: str) -> None:
        self.lines.append(line)
        joins = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        if self.in_heredoc:
            dash, word = self.heredocs[0]
            delimiter = re.sub(r"""\\(.)|\$?['"]""", r"\1", word)
            text = line.lstrip("\t") if dash else line
            if text == delimiter and not self.is_joined:
                self.heredocs.pop(0)
            self.is_joined = joins and delimiter == word  # a quoted heredoc joins none
            self.in_heredoc = bool(self.heredocs)
        elif self.is_bash:
            bracket = self.add_code(line)
            self.is_joined = joins
            self.in_heredoc = self.heredocs and not joins and bracket not in IN_QUOTES

    def add_code(self, line: str) -> str:
        """Returns what is open at the end of the line: a quote, a bracket, or ""."""
        position = 0
        while True:
            inner = self.nesting[-1] if self.nesting else ""
            match = IN_QUOTES.get(inner, CODE).search(line, position)
            if not match:
                return inner
            position = match.end()
            token = match[0]
            if token == inner[-1:].replace("(", ")"):
                self.nesting.pop()
            elif token.lstrip("$")[0] in "('\"`":
                self.nesting += [token] * max(1, token.count("("))
            elif match.lastindex and not any("((" in bracket for bracket in self.nesting):
                self.heredocs.append(match.groups())


def extract_action(reply: str) -> str:
    """The text of the bash block. Raises ValueError, with a sentence for the agent, if there is not
    exactly one.
    """
    text = without_thought(reply)
    blocks = find_blocks(text)
    shells = [block for block in blocks if block.language in SHELLS]
    if not shells:
        shells = blocks = find_blocks(text, ("",))  # a block without a language
        languages = [block.language for block in blocks if block.language]
        if languages:
            raise ValueError(f"The block is marked {languages[0][:20]!r}; it must be bash.")
    if not shells:
        raise ValueError("There is no ```bash block in the reply.")
    if len(shells) > 1:
        raise ValueError(f"There are {len(shells)} code blocks in the reply; write one.")
    [block] = shells
    if block is not blocks[-1]:
        raise ValueError("There are several code blocks in the reply; write one.")
    if block.in_heredoc:
        word = block.heredocs[0][1][:20]
        raise ValueError(f"The ``` block is not closed: the heredoc <<{word} in it does not end.")
    if not block.is_closed:
        raise ValueError(
            "The ``` block is not closed; it may have been cut off at the length limit."
        )
    action = "\n".join(block.lines)
    if not action.strip():
        raise ValueError("The block is empty.")
    return action


def find_blocks(text: str, shells: tuple = SHELLS) -> list[Block]:
    """The code blocks of the text. One that is followed by a fence with a language is not closed.

    shells: languages of the blocks whose heredocs may hold fences.
    """
    blocks = []
    for line in text.split("\n"):
        fence = FENCE.match(line.translate(NO_WIDTH))
        block = blocks[-1] if blocks and not blocks[-1].is_closed else None
        if block and (block.in_heredoc or not fence or len(fence[1]) < block.ticks):
            block.add(line)
        elif block and not fence[2].strip():
            block.is_closed = True
        elif fence:
            language = fence[2].strip().lower()
            blocks.append(Block(language, len(fence[1]), language in shells))
    return blocks


def without_thought(reply: str) -> str:
    """The reply after its thought, with "\\n" as line ends; "" if it never stopped thinking.

    The prompt may have opened the thought, so `</think>` alone ends one. Inside the last block,
    `</think>` is text.
    """
    reply = reply.replace("\r\n", "\n")
    for text in (reply, reply.partition(THOUGHT_ENDS)[2]):
        blocks = find_blocks(text)
        inside = "\n".join(blocks[-1].lines) if blocks and blocks[-1].is_closed else ""
        if inside.count(THOUGHT_ENDS) == text.count(THOUGHT_ENDS):
            break
    else:
        text = reply.rpartition(THOUGHT_ENDS)[2]
    begin, mark, _ = text.partition("<think>")
    return "" if mark and not find_blocks(begin) else text
