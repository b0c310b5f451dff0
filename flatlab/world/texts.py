"""What an agent reads: the first messages, what comes of an action, and a note after it.

There are two forms, see FORMS at the end. The stand-in was trained on the short one, so its words
stay as they are. Every other model reads the full one, which also tells the limits of the episode.
Arguments: `env` is an Env whose sandbox runs, `options` are EpisodeOptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flatlab.sandbox.backend import Spec
from flatlab.sandbox.client import Result
from flatlab.task.definition import WHOLE_WORKSPACE, Task
from flatlab.task.grading import KILLED, Score
from flatlab.task.machine import Software, software_of

LISTED_FILES = 60  # in the first message
SHARE = 0.5  # of the context: the system message and the first one, at most

# ------------------------------------------------------------------ the short form


def short_messages(env, options) -> list[str]:
    return [short_message(env)]


def short_message(env) -> str:
    """The first message: the task, how to reply, and what is in the workspace."""
    task = env.task
    files, count = env.files(LISTED_FILES)
    lines = [task.prompt.rstrip(), ""]
    lines += [
        "Reply with one block of bash commands:",
        "```bash",
        "ls",
        "```",
        f"They run in {env.sandbox.workspace}{'' if env.has_network else ' without network'}, "
        "and you see what they print.",
        f"A block with only the word validate scores your {' and '.join(task.artefacts)}; "
        "one with only submit ends the task.",
        "",
        "Files:",
    ]
    lines += [f"{path} ({size} bytes)" for path, size in files]
    if count > len(files):
        lines.append(f"... and {count - len(files)} more")
    return "\n".join(lines)


def nothing(*_) -> str:
    return ""


# ------------------------------------------------------------------ the full form

SYSTEM = """\
You are a machine-learning engineer. You work alone on one task, in a Linux sandbox: you reply \
with bash commands, they are run, and you read what they print.

You may think first. Every reply holds exactly one block of commands:
```bash
ls -l
```
They start in {workspace}. Files, the working directory and exported variables stay from one reply \
to the next. There is no keyboard: a command that asks a question gets no answer. Of long outputs \
you see the first and the last lines.

A block with only the word validate scores {artefact} and shows the score. {after_a_score}
A block with only the word submit ends the task. The task also ends when the turns or the time are \
used up. Whatever ends it, {artefact} is then scored as it is."""
GOES_ON = "You may then improve it and validate again."
ENDS = "The first valid score ends the task, so validate only when you are done."

# How the first message is shortened: packages, first lines of a table, and files, at most.
SIZES = (
    (40, 3, LISTED_FILES),
    (12, 3, LISTED_FILES),
    (0, 3, LISTED_FILES),
    (0, 1, LISTED_FILES),
    (0, 0, LISTED_FILES),
    (0, 0, 20),
    (0, 0, 5),
)
TABLES = (".csv", ".tsv", ".jsonl")
TABLE_LINES = 3
LINE_CHARS = 200  # longer lines of a table are not shown
LEFT_OUT = "[some lines of the description are left out]"
# Packages that are named, in this order; others are counted.
PACKAGES = """numpy pandas scipy scikit-learn torch xgboost lightgbm catboost tensorflow keras jax
flax transformers datasets tokenizers accelerate peft timm torchvision torchaudio gymnasium
stable-baselines3 polars statsmodels nltk spacy gensim sentence-transformers opencv-python
opencv-python-headless pillow scikit-image networkx numba optuna imbalanced-learn matplotlib joblib
tqdm pyarrow""".split()


def full_system(env, options) -> str:
    """The system message: the role, the form of a reply, what `validate` and `submit` do."""
    is_workspace = env.task.artefacts == WHOLE_WORKSPACE
    return SYSTEM.format(
        workspace=env.sandbox.workspace,
        artefact="the workspace" if is_workspace else " and ".join(env.task.artefacts),
        after_a_score=ENDS if env.ends_at_score else GOES_ON,
    )


def full_messages(env, options) -> Iterator[str]:
    """The first message: the task, its score, the files, the limits and the packages.

    Shorter versions follow: first by the rows of SIZES, then the description loses lines.
    """
    files, count = env.files(LISTED_FILES)
    tables = {path: first_lines(env.task, path, size) for path, size in files}
    software = software_of(env.sandbox)
    limits = limits_text(env, options, software)
    score = f"Score: {env.task.metric}, {env.task.direction}, baseline {env.task.baseline:.4f}."

    def message(description: str, packages: int, lines: int, most: int) -> str:
        listed = []
        for path, size in files[:most]:
            listed.append(f"{path} ({size} bytes)")
            listed += [f"  {line}" for line in tables[path][:lines]]
        if count > most:
            listed.append(f"... and {count - most} more")
        parts = [
            description,
            score,
            "\n".join([f"Files in {env.sandbox.workspace}:", *listed]),
            f"{limits}\n{packages_text(software, packages)}",
        ]
        return "\n\n".join(filter(None, parts))

    def versions() -> Iterator[str]:
        description = env.task.prompt.strip()
        for size in SIZES:
            yield message(description, *size)
        lines = description.split("\n")
        while len(lines) > 1:
            cut = len(lines) * 2 // 3
            del lines[cut]
            shorter = "\n".join([*lines[:cut], LEFT_OUT, *lines[cut:]])
            yield message(shorter, *SIZES[-1])

    return versions()


def first_lines(task: Task, path: str, size: int) -> list[str]:
    """Of a table that is as the task gave it. size: of the file in the workspace, in bytes."""
    source = task.public.get(path)
    if not source or Path(path).suffix not in TABLES or source.stat().st_size != size:
        return []
    lines = []
    with source.open(encoding="utf-8", errors="replace") as file:
        while len(lines) < TABLE_LINES and (line := file.readline(LINE_CHARS)):
            if len(line) == LINE_CHARS:
                return [*lines, f"[a line of {LINE_CHARS} characters or more]"]
            lines.append(line.rstrip())
    return lines


def limits_text(env, options, software: Software) -> str:
    """What an episode may use."""
    cores = software.cores
    memory = f"{env.limits['memory'] / 2**30:g} GB of memory"
    if env.sandbox.backend.is_container:
        cores = min(cores, env.limits.get("cpus", Spec.cpus))
    else:
        memory += " for each process"
    gpu = "the GPUs that nvidia-smi lists" if env.task.needs_gpu else "no GPU"
    return (
        f"Limits: {counted(options.max_turns, 'turn')} (a reply and its output), "
        f"{options.episode_minutes:g} minutes in all, {env.task.step_timeout:g} seconds for the "
        "commands of a reply.\n"
        f"Machine: {counted(cores, 'CPU core')}, {memory}, {gpu}, "
        f"{'a' if env.has_network else 'no'} network."
    )


def packages_text(software: Software, most: int) -> str:
    """The version of Python and of up to `most` packages."""
    names = [name for name in PACKAGES if name in software.packages][:most]
    listed = "".join(f"{name} {software.packages[name]}, " for name in names)
    others = counted(len(software.packages) - len(names), "more package" if names else "package")
    return f"Python {software.python} with {listed}{others}."


def full_facts(env, options) -> str:
    """What the requests of a search tell about its episodes."""
    software = software_of(env.sandbox)
    limits = limits_text(env, options, software)
    return f"Every attempt has a sandbox.\n{limits}\n{packages_text(software, SIZES[1][0])}"


def full_note(task: Task, turns: list[dict], turns_left: int, seconds_left: float) -> str:
    """The last line of an observation. turns: those of the transcript so far.

    The time is rounded to minutes, so episodes of equal actions read the same texts unless one of
    them is slower by about a minute.
    """
    minutes = round(seconds_left / 60)
    time = counted(minutes, "minute") if minutes else "less than a minute"
    left = f"{counted(turns_left, 'turn')} and {time} left."
    if turns_left == 1:
        left = f"The next reply is the last one: 1 turn and {time} left."
    scores = [turn["score"] for turn in turns if turn["score"] is not None]
    if not scores:
        return f"[{left} No valid score so far.]"
    best = max(scores) if task.higher_is_better else min(scores)
    return f"[{left} Best {task.splits[0]} {task.metric} so far: {best:.4f}.]"


def counted(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------ both forms


def first_message(env, versions: Iterable[str], policy, system: str) -> str:
    """The first of the versions that, with the system message, takes at most SHARE of the context;
    else the last one. Env.message follows it.
    """
    room = SHARE * policy.context - len(policy.encode(system))
    for text in versions:
        if len(policy.encode(text)) <= room:
            break
    return with_message(text, env)


def with_message(text: str, env) -> str:
    return f"{text}\n\n{env.message}" if env.message else text


def run_text(env, result: Result, timeout: float) -> tuple[str, str]:
    """(what the agent sees after a command, status of the turn). timeout: seconds."""
    output = result.output.rstrip("\n") or "(no output)"
    if result.timed_out:
        note = f"[stopped at the time limit of {timeout:.0f} s, with all background processes]"
        return f"{output}\n{note}", "timeout"
    if not result.exit_code:
        return output, "ok"
    note = f"[exit code {result.exit_code}]"
    if result.exit_code == KILLED:
        most = env.limits["memory"] >> 20
        note = f"[exit code 137: killed, perhaps over the memory limit of {most} MB]"
    return f"{output}\n{note}", "error"


def score_text(score: Score, task: Task) -> str:
    """What the agent sees after `validate`."""
    if not score.valid:
        return f"No score: {score.message}"
    value = f"{score.split} {score.metric}: {score.value:.4f}"
    text = f"{value} (baseline {task.baseline:.4f}, {task.direction})"
    if score.position is not None:  # a competition with leaderboards
        text += f"\nposition: {score.position:.4f} (share of the leaderboards that is not better)"
    return text


@dataclass(frozen=True)
class Form:
    """The texts in which the forms differ. A text of "" is left out."""

    system: Callable  # (env, options) -> the system message
    messages: Callable  # (env, options) -> the first message, and shorter versions of it
    note: Callable  # (task, turns, turns left, seconds left) -> the last line of an observation
    facts: Callable | None  # (env, options) -> what the other requests of a search are told


FORMS = {
    "short": Form(nothing, short_messages, nothing, None),
    "full": Form(full_system, full_messages, full_note, full_facts),
}
