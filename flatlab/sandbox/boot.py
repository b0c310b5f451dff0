"""What every sandbox is started with: the program in it, its configuration, and the two errors that it can mean."""

from __future__ import annotations

import json
from pathlib import Path

WORKSPACE, TOOLS = "/home/agent/workspace", "/opt/flatlab/bin"
RUNNER, NURSERY, COMMANDS = (
    "".join(
        Path(__file__).with_name("guest").joinpath(name).read_text(encoding="utf-8")
        for name in names
    )
    for names in (("isolate.py", "files.py", "main.py"), ("nursery.py",), ("commands.py",))
)
LIFE = 24 * 3600  # seconds after which a sandbox ends by itself
GRACE = 2  # seconds between SIGTERM and SIGKILL
# What python3 is told on its command line, where `ps` shows it: to read the rest, runner.py and its configuration.
# An end of file before that means that the owner is gone.
BOOT = (
    'import json, os; n = %d; text = b""\nwhile len(text) < n: text += os.read(0, n - len(text)) or os._exit(1)\n'
    "CONFIG, source = json.loads(text); exec(source)"
)
# Where Pythons keep their packages: on any machine, and in images with conda.
PACKAGES = ("/usr/lib/python3*/*-packages", "/usr/local/lib/python3*/*-packages")
CONDA_PACKAGES = tuple(
    f"{conda}/{part}lib/python3*/site-packages"
    for conda in ("/home/agent/miniconda3", "/opt/conda")
    for part in ("", "envs/*/", "pkgs/*/")
)
# The commands of commands.py, beside bash: agents that know MLGym type them.
FILE_COMMANDS = (
    "open",
    "goto",
    "scroll_up",
    "scroll_down",
    "create",
    "edit",
    "insert",
    "search_dir",
    "search_file",
    "find_file",
)


def readable(name: str) -> str:
    """A file's name as text that can be encoded: what is not UTF-8 in it is replaced."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def runner_config(mode: str, env: dict, **more) -> dict:
    """What isolate.py, files.py and runner.py read as CONFIG."""
    alone = 'echo "{0} works only as the single word in a bash block of its own." >&2; exit 1'
    env = {
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "EDITOR": "true",
        "USER": "agent",
        "DEBIAN_FRONTEND": "noninteractive",
        "GIT_TERMINAL_PROMPT": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
    } | env
    return {
        "mode": mode,
        "workspace": WORKSPACE,
        "tools": TOOLS,
        "path": "",
        "env": env,
        "life": LIFE,
        "grace": GRACE,
        "programs": {name: alone.format(name) for name in ("validate", "submit")}
        | {"commands.py": COMMANDS}
        | {
            name: f'exec python3 -I -S "${{0%/*}}/commands.py" {name} "$@"'
            for name in FILE_COMMANDS
        },
    } | more


def boot_texts(config: dict, program: str = RUNNER) -> tuple[str, bytes]:
    """(what a python3 is told on its command line, what it then reads from stdin)."""
    text = json.dumps([config, program]).encode()
    return BOOT % len(text), text
