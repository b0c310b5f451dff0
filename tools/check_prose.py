"""Style of the prose, as part of `make lint`: openings of docstrings, lengths, numbers in a line,
and measured numbers (with ± or x), which tests/BENCHMARKS.md must have, too, and not be older than
the code without saying so. Also names: a local one must not hide a function, class or import of its
file.

Prints what to change; the exit code is 1 if there is anything.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
README = PROJECT / "README.md"
BENCHMARKS = PROJECT / "tests/BENCHMARKS.md"
DOCS = [README, *sorted(PROJECT.glob("docs/*.md"))]
PROSE = [*DOCS, PROJECT / "CONTRIBUTING.md", PROJECT / "tests/README.md"]

MOST_WORDS = 60  # of a paragraph
MOST_NUMBERS = 3  # of a line
MOST_CHARACTERS = 149  # of a line
MOST_WORDS_OF_DOCS = 10_000
MOST_LINES_OF_README = 120
# A version, a date or an arXiv number is one number; digits in a name (Qwen3, H100) are none.
NUMBER = re.compile(r"(?<![\w.-])\d[\d.,:-]*")
MEASURED = re.compile(r"[\d.,]+ ± [\d.]*\d|[\d.]+ x\b")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
UNNAMED = ("tests", "tools")  # folders whose local names may hide others
OPENING = re.compile(r'^ *r?"""(?:What|Whether|Which|Of|How) .*', re.MULTILINE)


def paragraphs(text: str) -> list[list[str]]:
    """The lines of each paragraph and of each entry of a list. Titles, tables, HTML and blocks of
    code are left out.
    """
    text = re.sub(r"^(```|~~~).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [[]]
    for line in text.splitlines():
        if not line or line.startswith(("#", "|", "<")):
            found.append([])
            continue
        if re.match(r" *(-|\d+\.) ", line):
            found.append([])
        found[-1].append(line)
    return [lines for lines in found if lines]


def faults_of(page: Path):
    """Yields what is too long in a page."""
    for lines in paragraphs(page.read_text(encoding="utf-8")):
        if len(" ".join(lines).split()) > MOST_WORDS:
            yield f"more than {MOST_WORDS} words: {lines[0]}"
        for line in lines:
            text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)  # no code, no addresses
            if len(NUMBER.findall(text)) > MOST_NUMBERS:
                yield f"more than {MOST_NUMBERS} numbers: {line}"
            if len(line) > MOST_CHARACTERS:
                yield f"more than {MOST_CHARACTERS} characters: {line}"


def unmeasured():
    """Yields the numbers with ± or x in README.md and docs/ that are not in BENCHMARKS.md."""
    number = re.compile(r"\d+(?:[.,]\d+)*")
    known = {*number.findall(BENCHMARKS.read_text())}
    for page in DOCS:
        for text in MEASURED.findall(page.read_text()):
            if not {*number.findall(text)} <= known:
                yield f"{page.relative_to(PROJECT)}: {text} is not in tests/BENCHMARKS.md"


def measured_sections():
    """Returns (title, commit, measured paths, text) of the sections of BENCHMARKS.md that have a
    line "Code at COMMIT: `PATH PATH`".
    """
    found = []
    for section in BENCHMARKS.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        code = re.search(r"^Code at (\w+): `(.*)`", text, re.MULTILINE)
        if code:
            found.append((title, code[1], code[2].split(), text))
    return found


def changed_since(commit: str, paths: list[str]) -> list[str]:
    """Files under the paths that differ from the commit. RuntimeError if git does not know it."""
    command = ["git", "diff", "--name-only", commit, "--", *paths]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout.split()


def older_than_their_code():
    """Yields the sections of BENCHMARKS.md with changed code that no "Changed since:" names, above
    the table of the section or at the top of the page.
    """
    top = BENCHMARKS.read_text().partition("\n## ")[0]
    for title, commit, paths, text in measured_sections():
        # The reason in brackets names nothing.
        named = re.findall(r"^Changed since: ([^(\n]*)", top + text, re.MULTILINE)
        known = re.findall(r"[\w./-]+", " ".join(named))
        try:
            changed = changed_since(commit, paths)
        except RuntimeError as error:  # a copy without the history
            print(f"prose: age of section {title} not checked: {error}")
            continue
        unnamed = [path for path in changed if not path.startswith(tuple(known))]
        if unnamed:
            files = ", ".join(unnamed)
            yield f"BENCHMARKS.md, {title}: measure again, or write 'Changed since: {files}'"


def hidden_names(text: str):
    """Yields the local names that hide a function, a class or an import of the file with this text.
    A parameter may have the name of its default.
    """
    tree = ast.parse(text)
    names = {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    for function in ast.walk(tree):
        if not isinstance(function, DEFINITIONS[:2]):
            continue
        arguments = function.args
        hooks = {default.id for default in arguments.defaults if isinstance(default, ast.Name)}
        stored = {arg.arg for arg in ast.walk(arguments) if isinstance(arg, ast.arg)} - hooks
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stored.add(node.id)
        for name in sorted(stored & names):
            yield f"{function.name} hides the name {name}"


def main():
    faults = [*unmeasured(), *older_than_their_code()]
    for page in PROSE:
        faults += [f"{page.relative_to(PROJECT)}: {fault}" for fault in faults_of(page)]
    for path in sorted(PROJECT.rglob("*.py")):
        name = path.relative_to(PROJECT)
        is_ours = not any(part.startswith(".") or part == "logs" for part in name.parts)
        if is_ours:
            text = path.read_text()
            openings = OPENING.findall(text)
            faults += [f"{name}: begin with a verb or a noun: {line.strip()}" for line in openings]
            if name.parts[0] not in UNNAMED:
                faults += [f"{name}: {fault}" for fault in hidden_names(text)]
    words = sum(len(page.read_text().split()) for page in DOCS)
    if words > MOST_WORDS_OF_DOCS:
        faults.append(f"README.md and docs/ have {words} words, at most {MOST_WORDS_OF_DOCS}")
    if len(README.read_text().splitlines()) > MOST_LINES_OF_README:
        faults.append(f"README.md has more than {MOST_LINES_OF_README} lines")
    print("\n".join(faults) or "prose: all checks passed")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
