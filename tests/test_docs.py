"""README.md, docs/ and --help: links lead somewhere, quoted messages are in the code, help comes at
once.
"""

import os
import re
import sys

from helpers import PROJECT, python

PAGES = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("tests/*.md")]


def anchors(page):
    """The anchors of a page's titles, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_to_a_file_and_a_title():
    wrong = []
    for page in PAGES:
        for link in re.findall(r'(?:\]\(|src=")([^)"]+)', page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" in link:
                continue
            if not target.exists() or anchor and anchor not in anchors(target):
                wrong.append(f"{page.name}: {link}")
    assert not wrong


def test_the_help_in_runs_quotes_messages_that_exist():
    scripts = [*PROJECT.glob("*.py"), *PROJECT.glob("flatlab/**/*.py"), PROJECT / "Makefile"]
    # Pieces of one message stand on several lines of the code, each in its own quotes.
    code = " ".join(path.read_text() for path in scripts)
    code = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", code))
    text = (PROJECT / "docs/runs.md").read_text().partition("## Something does not work")[2]
    assert text
    for message in re.findall(r"^\| `([^`]{12,})` \|", text, re.MULTILINE):
        for part in re.split(r"\.\.\.| N\b", message):
            if not re.fullmatch(r"[\d.]*", part.strip()):
                assert part.strip() in code, f"no code says {part.strip()!r}"


HEAVY = ("torch", "vllm", "transformers", "docker", "pandas", "scipy", "matplotlib")
SCRIPTS = [path.name for path in PROJECT.glob("*.py") if "__main__" in path.read_text()]
SCRIPTS += ["examples/learn.py", "integrations/agent_program.py"]
# Flags of other programs that the pages name.
FOREIGN = "--array --generation-config --max-lora-rank --max-loras --max-model-len --split"


def test_help_loads_nothing_heavy_and_has_every_flag_in_the_docs():
    known = FOREIGN
    for script in SCRIPTS:
        narrow = os.environ | {"COLUMNS": "80"}
        done = python("-X", "importtime", script, "--help", env=narrow)
        _, usage, options = done.stdout.partition("usage:")
        assert usage
        assert max(map(len, options.splitlines())) <= 80
        assert not [name for name in HEAVY if f"| {name}\n" in done.stderr], script
        known += f"\n{done.stdout}"
    missing = set()
    for page in [PROJECT / "README.md", *PROJECT.glob("docs/*.md")]:
        text = page.read_text().replace("\\\n", " ")
        quoted = re.findall(r"`(--[a-z][a-z-]*)", text)
        for command in re.findall(rf"python (?:{'|'.join(SCRIPTS)})[^`\n]*", text):
            quoted += re.findall(r" (--[a-z][a-z-]*)", command.partition("#")[0])
        missing |= {(page.name, flag) for flag in quoted if not re.search(rf"{flag}\b", known)}
    assert not missing


def test_without_the_environment_a_script_says_what_to_do():
    for script in [*SCRIPTS, "examples/minimal.py", "examples/ppo.py"]:
        done = python("-S", script, "--help")
        said = f"{sys.executable} lacks packages: run `source .venv/bin/activate`, or"
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), script
        assert done.stderr.startswith(said)


def test_policy_names_the_command_that_checks_a_model():
    assert "python evaluate.py --model NAME" in python("policy.py", "--help").stdout


def test_the_loop_in_the_readme_is_in_the_example():
    [block] = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert block in (PROJECT / "examples/minimal.py").read_text()
