"""The action of a reply: the commands of its one block, which is marked bash or python.

A block starts at a line ```bash or ```python, also in a list or a quotation, whose indent its lines
lose. It ends at the first closing fence; in one of bash this is the first at which bash itself
reports no open here-document, so a here-document may hold fences, as a README does.
"""

import functools
import re
import shlex
import shutil
import subprocess
import unicodedata
from dataclasses import dataclass, field

from flatlab.errors import UserError

THOUGHT_ENDS = "</think>"
FENCE = re.compile(r"( {0,3})(`{3,})([^`]*)$")
# An opening fence may follow the markers of lists and quotations.
OPENING = re.compile(r"((?:[ \t]*(?:>|(?:[-*+]|\d{1,9}[.)])(?=[ \t])))*[ \t]*)(`{3,})([^`]*)$")
# Categories of characters without width, which nobody sees beside a fence: joiners, marks of
# direction, selectors of a glyph
NO_WIDTH = ("Cf", "Mn")
SHELLS = ("bash", "sh", "shell")
PYTHONS = ("python", "python3", "py")
OTHER = "solve.py"  # a program that is not the artefact
OPEN_HEREDOC = re.compile(
    r"^[^`\n]*warning: here-document at line \d+ delimited by end-of-file "
    r"\(wanted `([^\0]*?)'\)$",
    re.MULTILINE,
)
# Limits of what bash reads for one reply
SCRIPT_BYTES = 100_000
CHECKS = 100
CHECK_SECONDS = 10


@functools.cache
def find_bash() -> str:
    """The path of bash on this machine. Raises UserError if there is none."""
    path = shutil.which("bash")
    if not path:
        raise UserError("bash is not on the PATH: install it, it finds the end of a bash block.")
    return path


@functools.lru_cache(128)
def open_heredoc(script: str) -> str | None:
    """The delimiter of the first here-document that is still open at the end of the script.

    bash parses the script and runs nothing (-n). Raises ValueError if the script is too long.
    """
    if "<<" not in script:
        return None
    text = script.replace("\0", "").encode(errors="replace")
    if len(text) > SCRIPT_BYTES:
        raise ValueError(f"A block with << may have at most {SCRIPT_BYTES} bytes.")
    # extglob accepts the patterns of a script that turns it on itself.
    options = ("--norc", "--noprofile", "-O", "extglob", "-n")
    try:
        done = subprocess.run(
            [find_bash(), *options, "-c", text],
            env={"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHECK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ValueError("bash needs too long to read the block.") from None
    warning = OPEN_HEREDOC.search(done.stderr.decode(errors="replace"))
    return warning[1] if warning else None


@dataclass
class Block:
    """A code block, read line by line."""

    language: str
    ticks: int  # least number of backticks of its fences
    is_bash: bool  # its here-documents may hold fences
    indent: str = ""  # text before its opening fence, as far as the first line has it, too
    lines: list[str] = field(default_factory=list)
    is_blank: bool = True
    is_closed: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def add(self, line: str) -> None:
        """Adds a line without the indent."""
        rest = without_indent(line, self.indent)
        if self.is_blank and rest.strip():
            self.is_blank = False
            self.indent = self.indent[: len(line) - len(rest)]
        self.lines.append(rest)


def extract_action(reply: str, folder: str, artefact: str) -> str:
    """The commands of the block: its text, or what writes and runs a block marked python.

    A Python program is written to a file of the folder: artefact, the name of the artefact if it
    is one ("" if not), or OTHER if it imports that. Raises ValueError, with a sentence for the
    agent, if there is not exactly one block. One of Python before one of bash does not count.
    """
    text = without_thought(reply)
    blocks = find_blocks(text)
    chosen = [block for block in blocks if block.language in SHELLS]
    if not chosen:
        chosen = [block for block in blocks if block.language in PYTHONS]
    if not chosen:
        chosen = blocks = find_blocks(text, ("",))  # a block without a language
        languages = [block.language for block in blocks if block.language]
        if languages:
            raise ValueError(
                f"The block is marked {languages[0][:20]!r}; it must be bash or python."
            )
    if not chosen:
        raise ValueError("There is no ```bash block in the reply.")
    if len(chosen) > 1:
        raise ValueError(f"There are {len(chosen)} code blocks in the reply; write one.")
    [block] = chosen
    if block is not blocks[-1]:
        raise ValueError("There are several code blocks in the reply; write one.")
    if not block.is_closed:
        raise ValueError(f"The ``` block is not closed{why_open(block)}")
    if block.is_blank:
        raise ValueError("The block is empty.")
    word = re.sub("#.*", "", block.text).strip()
    if word in ("validate", "submit"):
        return word
    if block.language not in PYTHONS:
        return block.text
    module = re.escape(artefact.removesuffix(".py"))
    imports = rf"^\s*(from\s+|import\s[^#\n]*\b){module}\b"
    is_artefact = artefact and not re.search(imports, block.text, re.MULTILINE)
    return run_program(block, folder, artefact if is_artefact else OTHER)


def why_open(block: Block) -> str:
    """End of the sentence about a block that is not closed."""
    word = open_heredoc(block.text) if block.is_bash else None
    if word is None:
        return "; it may have been cut off at the length limit."
    why = f": the heredoc <<{word[:20]} in it does not end."
    for number, line in enumerate(block.lines, 1):
        if word and line != word and line.strip("# \t") == word:
            return f"{why} Line {number} must be {word[:20]} alone, without {line!r:.40}."
    return why


def write_program(folder: str, file: str, end: str = "PROGRAM") -> str:
    """Beginning of the commands of run_program. end: the word that ends the program."""
    return f"(cd {shlex.quote(folder)} && cat > {shlex.quote(file)} <<'{end}"


def run_program(block: Block, folder: str, file: str) -> str:
    """Commands that write the block to a file of the folder and run it there, after a line that
    shows how. They leave the working directory as it is.
    """
    end = "PROGRAM"
    while end in block.lines:
        end += "_"
    write = write_program(folder, file, end)
    run = f"python3 {shlex.quote(file)}"
    show = f"echo {shlex.quote('$ ' + run)}"
    return f"{write}' && {show} && {run})\n{block.text}\n{end}"


def is_program(action: str, folder: str, artefact: str) -> bool:
    """True for commands of run_program."""
    return action.startswith(tuple(write_program(folder, file) for file in (artefact, OTHER)))


def find_blocks(text: str, shells: tuple = SHELLS) -> list[Block]:
    """The code blocks of the text. One that is followed by a fence with a language is not closed.

    shells: languages of the blocks whose here-documents may hold fences. Raises ValueError if bash
    would have to look at too much.
    """
    blocks = []
    checks = 0
    for line in text.split("\n"):
        opening = OPENING.match(as_seen(line)) if line.count("`") >= 3 else None
        block = blocks[-1] if blocks and not blocks[-1].is_closed else None
        fence = opening
        if opening and block:
            fence = FENCE.match(without_indent(as_seen(line), block.indent))
        may_close = fence and block and len(fence[2]) >= block.ticks
        if may_close and block.is_bash:
            checks += 1
            if checks > CHECKS:
                raise ValueError(f"There are more than {CHECKS} fences in the reply.")
            may_close = open_heredoc(block.text) is None
        if block and not may_close:
            block.add(line)
        elif block and not fence[3].strip():
            block.is_closed = True
        elif fence:
            indent, ticks, language = opening.groups()
            language = language.strip().lower()
            blocks.append(Block(language, len(ticks), language in shells, indent))
    return blocks


def without_indent(line: str, indent: str) -> str:
    """The line without as much of the indent as it has; blanks stand for the marker of a list."""
    size = 0
    for char, other in zip(line, indent):
        if not (char.isspace() or char == other == ">"):
            break
        size += 1
    return line[size:]


def as_seen(line: str) -> str:
    """The line without characters without width, and with plain spaces."""
    kinds = [(char, unicodedata.category(char)) for char in line]
    return "".join(" " if kind == "Zs" else char for char, kind in kinds if kind not in NO_WIDTH)


def without_thought(reply: str) -> str:
    """The reply after its thought, with "\\n" as line ends; "" if it never stopped thinking.

    The prompt may have opened the thought, so `</think>` alone ends one. Inside the last block,
    `</think>` is text.
    """
    reply = reply.replace("\r\n", "\n")
    for text in (reply, reply.partition(THOUGHT_ENDS)[2]):
        blocks = find_blocks(text)
        inside = blocks[-1].text if blocks and blocks[-1].is_closed else ""
        if inside.count(THOUGHT_ENDS) == text.count(THOUGHT_ENDS):
            break
    else:
        text = reply.rpartition(THOUGHT_ENDS)[2]
    begin, mark, _ = text.partition("<think>")
    return "" if mark and not find_blocks(begin) else text
