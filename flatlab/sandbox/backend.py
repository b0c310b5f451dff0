"""Specification of a sandbox, the interface of a backend, and the program that runs inside.

A new backend is a file like local.py with a start function and a `Backend`; an entry in `BACKENDS`
and a branch of pick_backend() in client.py; its name in SandboxOptions.backend; and a function in
guest/isolate.py if it has to isolate from inside.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

IMAGE = "aigym/mlgym-agent:latest"
WORKSPACE = "/home/agent/workspace"
TOOLS = "/opt/flatlab/bin"


@dataclass(frozen=True)
class Spec:
    """Specification of a sandbox. A backend ignores what does not apply to it."""

    image: str = IMAGE  # docker
    memory: int = 4 << 30  # bytes; docker: in total, local: per process
    disk: int = 1 << 30  # bytes per file; local: also per tmpfs
    cpus: float = 2.0  # docker; 0: all
    processes: int = 256
    env: dict[str, str] = field(default_factory=dict)  # added to the variables of commands
    network: bool = False  # True: this machine's network (local) or Docker's default one
    gpu: bool = False  # docker: all GPUs
    hf_cache: str | None = None  # docker: Hugging Face cache of its machine, mounted read-only
    hide: tuple[str, ...] = ()  # local: folders of this machine that must not be visible
    # Folders relative to where Python packages lie that are empty in there (not with Landlock).
    hide_package_data: tuple[str, ...] = ()
    # Workspace path -> file of this machine, mounted read-only if the backend can do that
    mounts: dict[str, Path] = field(default_factory=dict)

    @property
    def shared_memory(self) -> int:
        """Bytes of /dev/shm: they outlive their process, and the sandbox needs the rest."""
        return min(256 << 20, self.memory // 4)


@dataclass
class Connection:
    """A started sandbox as its backend sees it."""

    stream: object  # has recv, sendall, settimeout, shutdown and close, as a socket
    stop: Callable[[], None]  # closes the stream, which ends the sandbox
    errors: Callable[[], str]  # stderr of the program inside so far
    mounts: dict[str, Path] = field(default_factory=dict)  # those of Spec.mounts that are there
    container: str | None = None  # its id


@dataclass(frozen=True)
class Backend:
    start: Callable[[Spec], Connection]
    covers: str  # one line: isolated parts, and gaps
    is_complete: bool = True  # False: only the stand-in model uses it unless it is asked for
    is_container: bool = False  # has images and GPUs
    # Where commands can write beside their home; () nowhere, None: depends on the image.
    writable: tuple[str, ...] | None = ()


DEFAULT_ENV = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "EDITOR": "true",
    "USER": "agent",
    "DEBIAN_FRONTEND": "noninteractive",
    "GIT_TERMINAL_PROMPT": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "OMP_NUM_THREADS": "2",
}
# The command line of python3 in a sandbox: reads the config and the modules of guest/ from stdin,
# imports them under their own names and calls main(). An end of file means that the owner is gone.
BOOT = """import json, os, sys, types
size = {size}
text = b""
while len(text) < size:
    text += os.read(0, size - len(text)) or os._exit(1)
config, modules = json.loads(text)
for name, source in modules:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(types.SimpleNamespace(**config))
"""
MODULES = []  # (name, source) in the order of their imports
for name in ("isolate", "files", "main"):
    source = Path(__file__).with_name("guest") / f"{name}.py"
    MODULES.append((name, source.read_text(encoding="utf-8")))


def boot_program(isolation: str, spec: Spec, env: dict, limits: dict, **fields) -> tuple:
    """(program for `python3 -c`, what it then reads from stdin as bytes).

    env, limits: added to the defaults of every sandbox. fields: replace those of the config.
    """
    config = {
        "isolation": isolation,  # "docker", "namespaces" or "landlock", see guest/isolate.py
        "workspace": WORKSPACE,  # where commands start; its parent is the home of the agent
        "tools": TOOLS,  # folder of our own programs, first in PATH
        "path": "",  # PATH behind it; empty: the one that Python was started with
        "env": DEFAULT_ENV | env | spec.env,  # variables of commands
        "limits": {"CORE": 0, "FSIZE": spec.disk} | limits,  # RLIMIT_<name> -> number
        "uid": 1000,  # user of the commands; docker: found in the image
        "gid": 1000,
        "disk": spec.disk,  # bytes of each tmpfs (namespaces)
        "shared_memory": spec.shared_memory,  # bytes of /dev/shm (namespaces)
        "network": spec.network,  # True leaves this machine's network open (local)
        "view": [],  # (path, real path) to show read-only; an empty real path hides (local)
    }
    text = json.dumps([config | fields, MODULES]).encode()
    return BOOT.format(size=len(text)), text


def package_patterns(names: Iterable[str], prefixes: Iterable[str]) -> list[str]:
    """Glob patterns of folders in the packages of each Python; conda environments included."""
    patterns = []
    for prefix in ("/usr", "/usr/local", *prefixes):
        for part in ("", "envs/*/", "pkgs/*/"):
            patterns += [f"{prefix}/{part}lib/python3*/*-packages/{name}" for name in names]
    return patterns
