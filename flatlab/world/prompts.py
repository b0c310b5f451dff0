"""Templates of a prompts file, which an agent reads and a search asks, and their facts.

configs/prompts/agent.yaml is the file of every model but the stand-in; --prompts names another one.
Arguments: `env` is an Env whose sandbox runs, `options` are EpisodeOptions.
"""

import functools
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import jinja2
from jinja2 import meta

from flatlab.errors import UserError
from flatlab.files import ROOT, content_key, read_mapping, usable
from flatlab.numbers import counted
from flatlab.task.definition import Task
from flatlab.task.machine import software_of
from flatlab.task.value import score_text, validation_text
from flatlab.world.blocks import is_program

AGENT = "configs/prompts/agent.yaml"
LISTED_FILES = 60  # files that the first message names
SHARE = 0.5  # largest part of the context for the system message and the first one
TABLES = (".csv", ".tsv", ".jsonl")
TABLE_LINES = 3
LINE_CHARS = 200  # limit of a line of a table; longer ones are not shown
# Lines of an observation that are ours, see actions.py
OWN_NOTE = re.compile(r"\[(exit code|stopped|\d+ (repeated|library|line))")
# Packages that are named, in this order; others are counted.
PACKAGES = """numpy pandas scipy scikit-learn torch xgboost lightgbm catboost tensorflow keras jax
flax transformers datasets tokenizers accelerate peft timm torchvision torchaudio gymnasium
stable-baselines3 polars statsmodels nltk spacy gensim sentence-transformers opencv-python
opencv-python-headless pillow scikit-image networkx numba optuna imbalanced-learn matplotlib joblib
tqdm pyarrow""".split()

MACHINE = """max_turns minutes memory_gb is_container cores has_network python packages
package_count"""
# The templates of a file, and the names that each of them may use
FACTS = {
    "system": "task workspace artefact program ends_at_score has_network",
    "first_message": "task workspace artefact program ends_at_score has_network files more_files "
    "limits",
    "limits": f"task {MACHINE}",
    "note": "task turns_left minutes_left best missing repeated restarts turn",
    "restart": "repeated turn",
    "about": "task files limits nodes_left nodes",
    "strategies": "task about summary parent tried mode k tau",
    "more": "k",
    "node": "task summary parents node phase",
    "summary": "task count failed best_and_worst latest_failures",
}


class Prompts:
    """The templates of a prompts file.

    Raises UserError if one of them is missing, is not jinja2, or uses a name that does not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self.templates = {}
        self.uses = {}  # template -> the names that it uses
        jinja = jinja2.Environment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        jinja.globals["counted"] = counted
        jinja.globals["score_text"] = score_text
        jinja.globals["validation_text"] = validation_text
        texts = read_mapping(path)
        self.digest = content_key(path)
        if different := set(texts) ^ set(FACTS):
            raise UserError(f"{path}: {min(different)} is missing, or is not the name of a prompt.")
        for name, text in texts.items():
            with usable(f"{path}: {name}"):
                self.templates[name] = jinja.from_string(text)
                self.uses[name] = meta.find_undeclared_variables(jinja.parse(text))
                known = FACTS[name].split()
                if unknown := self.uses[name].difference(known, jinja.globals):
                    names = ", ".join(known)
                    raise NameError(f"{min(unknown)!r} is unknown there; the names are {names}")

    def fill(self, name: str, **facts) -> str:
        """The text of a template, without line breaks at its end."""
        with usable(f"{self.path}: {name}"):
            return self.templates[name].render(facts).rstrip("\n")


@functools.cache
def load_prompts(file: str | None) -> Prompts:
    """The prompts of a file, by default AGENT. A path may also begin at the project."""
    path = Path(file or AGENT)
    shipped = ROOT / path
    return Prompts(shipped if shipped.exists() and not path.exists() else path)


# ------------------------------------------------------------------ an episode


def episode_facts(env, options) -> dict:
    """Facts for the system message and the first message. Waits for the sandbox."""
    task = env.task
    listing = env.sandbox.call("listing", most=LISTED_FILES)[0]
    return machine_facts(env, options) | {
        "workspace": env.sandbox.workspace,
        "artefact": "the workspace" if task.collect else " and ".join(task.artefacts),
        "program": task.program,
        "ends_at_score": env.ends_at_score,
        "files": [
            {"path": visible(path), "size": size, "lines": table_head(task, path, size)}
            for path, size in listing["files"]
        ],
        "more_files": listing["count"] - len(listing["files"]),
    }


def machine_facts(env, options) -> dict:
    """Facts for `limits` about an episode and its sandbox."""
    python, packages, cores = software_of(env.sandbox)
    is_container = env.sandbox.backend.is_container
    spec = env.sandbox.spec
    return {
        "task": env.task,
        "max_turns": options.max_turns,
        "minutes": options.episode_minutes,
        "memory_gb": spec.memory / 2**30,
        "is_container": is_container,
        "cores": min(cores, spec.cpus) if is_container else cores,
        "has_network": spec.network,
        "python": python,
        "packages": [(name, packages[name]) for name in PACKAGES if name in packages],
        "package_count": len(packages),
    }


def table_head(task: Task, path: str, size: int) -> list[str]:
    """First lines of a public table; [] if the agent has changed it.

    size: bytes of the file.
    """
    source = task.public.get(path)
    if not source or Path(path).suffix not in TABLES or source.stat().st_size != size:
        return []
    lines = []
    with source.open(encoding="utf-8", errors="replace") as file:
        while len(lines) < TABLE_LINES and (line := file.readline(LINE_CHARS)):
            if len(line) == LINE_CHARS:
                return [*lines, f"[a line of {LINE_CHARS} characters or more]"]
            lines.append(visible(line.rstrip()))
    return lines


def visible(text: str) -> str:
    """The text in one line, with escapes for what is not printable: line breaks, a BOM."""
    shown = ""
    for char in text:
        shown += char if char.isprintable() or char == "\t" else repr(char)[1:-1]
    return shown


def first_messages(env, options, facts: dict, policy=None) -> tuple[str, str]:
    """The system message and the first message, which Env.message ends.

    With a policy, the first version that takes at most SHARE of its context and leaves room for a
    reply: packages are left out first, then the first lines of tables, then the files. Raises
    UserError if none is that short. Env.message does not count.
    """
    prompts = load_prompts(options.prompts)
    system = prompts.fill("system", **facts)
    files = [file | {"lines": []} for file in facts["files"]]
    more_files = facts["more_files"] + len(files)
    room = policy.context - (options.max_reply_tokens or 0) if policy else 0
    for less in (
        {},
        {"packages": []},
        {"files": files},
        {"files": [], "more_files": more_files},
    ):
        facts = facts | less
        limits = prompts.fill("limits", **facts)
        first = prompts.fill("first_message", limits=limits, **facts)
        tokens = len(policy.render(as_messages(system, first))) if policy else 0
        if not policy or tokens <= min(SHARE * policy.context, room):
            return system, "\n\n".join(filter(None, [first, env.message]))
    raise UserError(
        f"The first message of task {env.task.name} has {tokens} tokens without its files, more "
        f"than half of --context {policy.context} or than the {room} beside a reply: choose a "
        "larger one, or a shorter text with --prompts."
    )


def as_messages(system: str, first: str) -> list[dict]:
    """The messages before the first reply."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    return messages if system else messages[1:]


def note(options, env, turns: list[dict], turns_left: int, seconds_left: float) -> tuple[str, bool]:
    """(text after the observation, or ""; True if the next reply follows the first messages and
    this text only, see restart_text). turns: the transcript so far.

    The time is rounded to minutes, so episodes of equal actions read the same texts unless one of
    them is slower by about a minute. Waits for the sandbox.
    """
    scored = [turn for turn in turns if turn["score"] is not None]
    best = max if env.task.higher_is_better else min
    texts = load_prompts(options.prompts)
    asks = "missing" in texts.uses["note"]  # which takes a call to the sandbox
    restart = restart_text(texts, env, turns)
    text = texts.fill(
        "note",
        task=env.task,
        turns_left=turns_left,
        minutes_left=max(0, round(seconds_left / 60)),
        best=best(scored, key=lambda turn: turn["score"], default=None),
        missing=missing(env) if asks else [],
        repeated=repeated_line(turns),
        restarts=bool(restart),
        turn=turns[-1],
    )
    return "\n".join(filter(None, [restart, text])), bool(restart)


def restart_text(texts: Prompts, env, turns: list[dict]) -> str:
    """Text that ends the first message in place of all replies so far, if the last one sent a whole
    program again, or a reply that could not be run, and the agent read the same; else "". After a
    valid score they stay: a new beginning might overwrite what was handed in.
    """
    turn = turns[-1]
    if not is_repeated(turns, itemgetter("observation")):
        return ""
    if any(turn["score"] is not None for turn in turns):
        return ""
    where = env.sandbox.workspace, env.task.program
    if turn["status"] != "rejected" and not is_program(turn["action"] or "", *where):
        return ""
    return texts.fill("restart", repeated=last_line(turn), turn=turn)


def missing(env) -> list[str]:
    """Names of the artefacts that are not in the workspace, without folders and patterns."""
    names = [] if env.task.collect else env.task.named_artefacts
    answers = {name: env.sandbox.call("get", path=name, limit=0)[0] for name in names}
    return [name for name in names if answers[name].get("error") == "is not there"]


def repeated_line(turns: list[dict]) -> str:
    """The last line that the last commands led to, if an earlier reply had the same commands and
    they led to it, too; else "".
    """
    return last_line(turns[-1]) if is_repeated(turns, last_line) else ""


def is_repeated(turns: list[dict], end_of: Callable) -> bool:
    """True if an earlier turn has the commands of the last one, or its reply if nothing was run,
    and an equal end_of(turn).
    """
    *earlier, last = [(turn["action"] or turn["reply"], end_of(turn)) for turn in turns]
    return last in earlier


def last_line(turn: dict) -> str:
    """The last line of an observation, without our own notes if there is another one."""
    lines = [line.strip() for line in turn["observation"].splitlines() if line.strip()]
    printed = [line for line in lines if not OWN_NOTE.match(line)] or lines or ["nothing"]
    return printed[-1][:200]
