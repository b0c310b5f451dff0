"""What an agent's reply asks for: the text of its one bash block. Fences inside heredocs belong to the heredoc."""

from __future__ import annotations

import re

FENCE = re.compile(r" {0,3}(`{3,})[ \t]*([^`]*?)[ \t]*$")
HEREDOC = re.compile(r"<<(-?)[ \t]*((?:'[^'\n]*'|\"[^\"\n]*\"|\\.|[^\s;&|<>()'\"\\`])+)")


def extract_action(reply: str) -> tuple[str | None, str]:
    """(text of the reply's one bash block, "") or (None, why there is none that may be run). Never raises."""
    blocks, lines, at = [], reply.split("\n"), 0
    while at < len(lines):
        line = lines[at]
        fence = FENCE.match(line)
        if "</think>" in line and not line.partition("</think>")[0].count("<think>"):
            blocks, lines[at] = [], line.rpartition("</think>")[2]  # the prompt had opened it
        elif "<think>" in line:
            rest = "\n".join([line.partition("<think>")[2], *lines[at + 1 :]])
            if "</think>" not in rest:
                break  # it never stopped thinking
            lines, at = rest.partition("</think>")[2].split("\n"), 0
        elif fence:
            end, problem = block_end(lines, at + 1, len(fence[1]))
            if problem:
                return None, problem
            blocks.append((fence[2].lower(), "\n".join(lines[at + 1 : end])))
            at = end + 1
        else:
            at += 1
    if len(blocks) != 1:
        return (
            None,
            "There is no ```bash block in the reply."
            if not blocks
            else f"There are {len(blocks)} code blocks in the reply; write one. (A ``` line in quotes ends a block, too.)",
        )
    language, text = blocks[0]
    if language not in ("bash", "sh", "shell", ""):
        return None, f"The block is marked {language[:20]!r}; it must be bash."
    if not text.strip():
        return None, "The block is empty."
    return text, ""


def block_end(lines: list[str], at: int, ticks: int) -> tuple[int, str]:
    """(index of the line that closes a block, "") or (0, problem). Fences inside heredocs belong to the heredoc."""
    context, pending = (
        [""],
        [],
    )  # context: what is open, innermost last: " ' ( and (( for arithmetic
    for at in range(at, len(lines)):
        line = lines[at]
        if pending and context[-1] not in ("'", '"'):
            strip, word = pending[0]
            if (line.lstrip("\t") if strip else line) == word:
                pending.pop(0)
            continue
        fence = FENCE.match(line)
        if fence and not fence[2] and len(fence[1]) >= ticks:
            return at, ""
        pending += scan_line(line, context)
    if pending:
        return 0, f"The heredoc {pending[0][1]!r} is not closed, so the block has no end."
    return 0, "The ``` block is not closed; it may have been cut off at the length limit."


def scan_line(line: str, context: list[str]) -> list[tuple[bool, str]]:
    """Heredocs that start in a line of shell, as (strip tabs?, end word); updates the open quotes and parentheses."""
    found, i = [], 0
    while i < len(line):
        top, two = context[-1], line[i : i + 2]
        if top == "'":
            if line[i] == "'":
                context.pop()
        elif line[i] == "\\":
            i += 1
        elif line[i] == '"':
            context.pop() if top == '"' else context.append('"')
        elif two == "$(" or (line[i] == "(" and top != '"'):
            arithmetic = line.startswith("((", i + (two == "$("))
            context.append("((" if arithmetic else "(")
            i += (two == "$(") + arithmetic
        elif top == '"':
            pass
        elif line[i] == "'":
            context.append("'")
        elif line[i] == ")" and top.startswith("("):
            context.pop()
            i += top == "((" and two == "))"
        elif line[i] == "#" and (i == 0 or line[i - 1] in " \t;&|()"):
            break
        elif line.startswith("<<<", i):
            i += 2
        elif two == "<<" and top != "((" and (match := HEREDOC.match(line, i)):
            found.append((bool(match[1]), re.sub(r"['\"]|\\(.)", r"\1", match[2])))
            i = match.end() - 1
        i += 1
    return found


# ---------------------------------------------------------------------------------------------- edits

EDIT = re.compile(
    r"([ \t]*(?:edit[ \t]+\d+:\d+|insert[ \t]+\d+))[ \t]*(<<[ \t]*(['\"]?)(end_of_edit|end_of_insert)\3[ \t]*)?$"
)
ENDS = ("end_of_edit", "end_of_insert")


def find_edits(
    lines: list[str], at: int = 0, ticks: int = 0
) -> tuple[list[tuple[int, int]], int, bool]:
    """([(line of an edit, line of its end)] in shell text from line `at`, where a fence of `ticks` closes it, whether
    something is still open). What looks like an edit in a heredoc or in quotes is text of that."""
    found, context, pending, is_open = [], [""], [], False
    ends = [n for n in range(len(lines) - 1, at, -1) if lines[n].rstrip(" \t") in ENDS]
    while at < len(lines):
        line = lines[at]
        if pending and context[-1] not in ("'", '"'):
            strip, word = pending[0]
            if (line.lstrip("\t") if strip else line) == word:
                pending.pop(0)
            at += 1
            continue
        fence = FENCE.match(line) if ticks else None
        if fence and not fence[2] and len(fence[1]) >= ticks:
            break
        if context[-1] in ("", "(") and (match := EDIT.match(line)):
            while ends and ends[-1] <= at:
                ends.pop()
            end = next((n for n in reversed(ends) if match[4] in (None, lines[n])), None)
            if end:
                found.append((at, end))
                at = end + 1
                continue
            is_open = is_open or not match[4]
        pending += scan_line(line, context)
        at += 1
    return found, at, is_open or bool(pending) or len(context) > 1


def typed_edits(reply: str) -> str:
    """Edits as agents type them, with a body up to end_of_edit, turned into heredocs, in which nothing is special. Goes
    through the reply as extract_action does: only blocks count."""
    if "end_of_" not in reply:
        return reply
    lines, at = reply.split("\n"), 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if "<think>" in lines[at]:
            while at < len(lines) and "</think>" not in lines[at]:
                at += 1
        elif fence:
            found, at, _ = find_edits(lines, at + 1, len(fence[1]))
            for first, end in found:
                match, word = EDIT.match(lines[first]), lines[end].rstrip(" \t")
                if not match[4]:
                    lines[first], lines[end] = f"{match[1]} <<'{word}'", word
        at += 1
    return "\n".join(lines)


def lift_bodies(action: str) -> tuple[str, list[str]]:
    """(the action without the bodies of its edits, these bodies): they do not pass through the shell."""
    if "end_of_" not in action:
        return action, []
    lines, bodies, kept, at = action.split("\n"), [], [], 0
    for first, end in find_edits(lines)[0]:
        kept += [*lines[at:first], f"{EDIT.match(lines[first])[1]} --body {len(bodies)}"]
        bodies.append("".join(line + "\n" for line in lines[first + 1 : end]))
        at = end + 1
    return "\n".join(kept + lines[at:]), bodies


def unfinished(text: str) -> bool:
    """Whether lines typed by hand still wait for the end of a heredoc, a quote or an edit."""
    return find_edits(text.split("\n"))[2]
