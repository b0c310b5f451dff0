"""File commands for the agent, run inside its sandbox as it: python3 commands.py <command> [arguments].

open goto scroll_up scroll_down create edit insert search_dir search_file find_file, as agents know them from MLGym. Which
file is open, and at which line, is kept in ~/.window.json. A Python file with a syntax error is not saved; how it is
indented is the author's business. Standard library only, Python 3.8 or newer.
"""

import fnmatch
import json
import os
import re
import sys

WINDOW = int(os.environ.get("WINDOW", "") or 100)  # lines that are shown at once
OVERLAP = 2  # lines that two windows share when scrolling
MOST_FILES, MOST_LINES = 100, 100  # that a search shows
MEMORY = os.path.join(os.path.expanduser("~"), ".window.json")
AROUND = 5  # lines shown around a refused edit


class Refused(Exception):
    """What was asked cannot be done; the text says why."""


def remembered():
    """(open file, its line at the top of the window), ("", 1) when none is open."""
    try:
        with open(MEMORY) as file:
            path, line = json.load(file)
        return os.path.expanduser(str(path)), int(line)
    except (OSError, ValueError, TypeError):
        return "", 1


def remember(path, line):
    home = os.path.expanduser("~") + "/"
    if path.startswith(home):  # a copy of this sandbox may have another one
        path = "~/" + path[len(home) :]
    with open(MEMORY, "w") as file:
        json.dump([path, line], file)


def open_file():
    path, line = remembered()
    if not path:
        raise Refused("No file is open. Use: open <file>")
    return path, line


def read_lines(path):
    """Lines without their ends. Bytes that are no UTF-8 survive as surrogates."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            text = file.read()
    except IsADirectoryError:
        raise Refused("%s is a folder; `ls` shows what is in it." % path)
    except OSError as error:
        raise Refused("%s cannot be read: %s." % (path, error.strerror))
    if "\0" in text:
        raise Refused("%s is not a text file." % path)
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def write_lines(path, lines):
    if not os.access(path, os.W_OK):
        raise Refused("%s is read-only." % path)
    with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write("".join(line + "\n" for line in lines))


def number(text, what="line"):
    if not re.fullmatch(r"\d+", text):
        raise Refused("The %s must be a number, not %r." % (what, text))
    return int(text)


def numbered(lines, first, last):
    """Lines first..last (from 1, cut to what is there) with their numbers."""
    return ["%d:%s" % (n, lines[n - 1]) for n in range(max(1, first), min(last, len(lines)) + 1)]


def show(path, lines, top):
    """Prints the window that begins at line `top`, moved into the file, and remembers it."""
    top = max(1, min(top, len(lines) - WINDOW + 1))
    below = len(lines) - (top + WINDOW - 1)
    remember(path, top)
    print("[File: %s (%d lines total)]" % (path, len(lines)))
    if top > 1:
        print("(%d more lines above)" % (top - 1))
    print("\n".join(numbered(lines, top, top + WINDOW - 1)))
    if below > 0:
        print("(%d more lines below)" % below)


def show_line(path, lines, line):
    """The window with a line in its upper part."""
    show(path, lines, line - WINDOW // 6)


def cmd_open(path, line="1"):
    """open <file> [<line>]"""
    path = os.path.abspath(path)
    lines, wanted = read_lines(path), number(line)
    if wanted > max(1, len(lines)):
        print("Line %d is beyond the end: the file has %d lines." % (wanted, len(lines)))
    show_line(path, lines, min(max(1, wanted), max(1, len(lines))))


def cmd_goto(line):
    """goto <line>"""
    path, _ = open_file()
    lines = read_lines(path)
    if not 1 <= number(line) <= len(lines):
        raise Refused("There is no line %s: the file has %d lines." % (line, len(lines)))
    show_line(path, lines, int(line))


def cmd_scroll_down():
    """scroll_down"""
    path, top = open_file()
    show(path, read_lines(path), top + WINDOW - OVERLAP)


def cmd_scroll_up():
    """scroll_up"""
    path, top = open_file()
    show(path, read_lines(path), top - WINDOW + OVERLAP)


def cmd_create(path):
    """create <file>"""
    path = os.path.abspath(path)
    if os.path.lexists(path):
        print("%s exists already." % path)
        if os.path.isdir(path):
            raise Refused("It is a folder.")
    else:
        try:
            with open(path, "x") as file:
                file.write("\n")
        except OSError as error:
            raise Refused("%s cannot be created: %s." % (path, error.strerror))
    show(path, read_lines(path), 1)


def syntax_error(path, lines):
    """(line, message) of the first syntax error in the lines of a Python file, else None."""
    if not path.endswith(".py"):
        return None
    try:
        compile("\n".join(lines) + "\n", path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return error.lineno or 0, "%s: %s" % (type(error).__name__, error.msg)
    except (ValueError, RecursionError, MemoryError, UnicodeError) as error:
        return 0, "%s: %s" % (type(error).__name__, error)
    return None


def body(rest, end):
    """The new lines: from the text that came with the command, or from stdin up to the line `end`."""
    if rest[:1] == ("--body",):
        with open("/dev/fd/96", encoding="utf-8") as file:
            text = json.load(file)[int(rest[1])]
    elif rest:
        raise Refused("The new lines belong on lines of their own, before a line with %s." % end)
    else:
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    lines = text.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    return lines[: lines.index(end)] if end in lines else lines


def replace(path, lines, first, last, new):
    """Puts new lines in the place of first..last (last = first - 1: none), unless that breaks a Python file."""
    changed = lines[: first - 1] + new + lines[last:]
    problem, before = syntax_error(path, changed), syntax_error(path, lines)
    shift = len(changed) - len(lines)
    known = (
        problem
        and before
        and problem[1] == before[1]
        and not first <= before[0] <= last
        and problem[0] in (before[0], before[0] + shift)
    )
    if problem and not known:
        ends = first + len(new) - 1
        print("The edit was not made, because the file would not be valid Python any more:")
        print("- line %d: %s" % problem)
        print("It would have looked like this:")
        print("\n".join(numbered(changed, min(first, problem[0] or first) - AROUND, ends + AROUND)))
        print("These lines are still there:")
        print("\n".join(numbered(lines, first - AROUND, max(first, last) + AROUND)))
        raise Refused(
            "Correct the lines and send the command again; the same one would fail again."
        )
    write_lines(path, changed)
    show_line(path, changed, first)
    print("[The file was changed. Check the lines, above all their indentation.]")


def cmd_edit(where, *rest):
    """edit <first>:<last>, new lines, end_of_edit"""
    path, _ = open_file()
    first, colon, last = where.partition(":")
    first, last, lines = number(first, "first line"), number(last, "last line"), read_lines(path)
    if not 1 <= first <= last or last > max(1, len(lines)):
        raise Refused(
            "There are no lines %d to %d: the file has %d lines." % (first, last, len(lines))
        )
    replace(path, lines, first, last, body(rest, "end_of_edit"))


def cmd_insert(where, *rest):
    """insert <line>, new lines, end_of_insert"""
    path, _ = open_file()
    lines, line = read_lines(path), number(where)
    if line > len(lines):
        raise Refused("There is no line %d: the file has %d lines." % (line, len(lines)))
    replace(path, lines, line + 1, line, body(rest, "end_of_insert"))


def pattern(text):
    """A basic regular expression, as grep has them; what is none is taken literally."""
    try:
        return re.compile(
            re.sub(r"\\?[(){}+?|]", lambda m: m[0][1] if len(m[0]) > 1 else "\\" + m[0], text)
        )
    except re.error:
        return re.compile(re.escape(text))


def files_below(folder):
    """Paths of plain, not hidden files."""
    if not os.path.isdir(folder):
        raise Refused("There is no folder %s." % folder)
    for place, folders, names in os.walk(os.path.abspath(folder)):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.isfile(os.path.join(place, name)):
                yield os.path.join(place, name)


def cmd_search_dir(text, folder="."):
    """search_dir <text> [<folder>]"""
    wanted, found = pattern(text), []
    for path in files_below(folder):
        with open(path, encoding="utf-8", errors="replace") as file:
            count = sum(bool(wanted.search(line)) for line in file)
        if count:
            found.append((path, count))
    where = os.path.abspath(folder)
    if not found:
        raise Refused("%r is nowhere in %s." % (text, where))
    if len(found) > MOST_FILES:
        raise Refused(
            "%r is in %d files of %s; look for something more special." % (text, len(found), where)
        )
    print("%d lines with %r in %s:" % (sum(count for _, count in found), text, where))
    print("\n".join("%s (%d lines)" % row for row in found))


def cmd_search_file(text, path=""):
    """search_file <text> [<file>]"""
    path, wanted = os.path.abspath(path or open_file()[0]), pattern(text)
    found = [(n, line) for n, line in enumerate(read_lines(path), 1) if wanted.search(line)]
    if not found:
        raise Refused("%r is not in %s." % (text, path))
    if len(found) > MOST_LINES:
        raise Refused(
            "%r is in %d lines of %s; look for something more special." % (text, len(found), path)
        )
    print("%d lines with %r in %s:" % (len(found), text, path))
    print("\n".join("Line %d:%s" % row for row in found))


def cmd_find_file(name, folder="."):
    """find_file <pattern> [<folder>]"""
    found = [
        path for path in files_below(folder) if fnmatch.fnmatchcase(os.path.basename(path), name)
    ]
    if not found:
        raise Refused("No file in %s is called %r." % (os.path.abspath(folder), name))
    print("%d files are called %r in %s:" % (len(found), name, os.path.abspath(folder)))
    print("\n".join(found[:MOST_FILES]))


def main(name, *arguments):
    command = globals()["cmd_" + name]
    try:
        least = command.__code__.co_argcount - len(command.__defaults__ or ())
        many = command.__code__.co_flags & 4
        if len(arguments) < least or (len(arguments) > command.__code__.co_argcount and not many):
            raise Refused("Use: %s" % command.__doc__)
        command(*arguments)
    except Refused as why:
        print(why)
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    sys.exit(main(*sys.argv[1:]))
