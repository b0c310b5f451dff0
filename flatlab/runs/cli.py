"""The command line: presets, flags, bounds of numbers, and errors in one sentence."""

from __future__ import annotations

import atexit
import inspect
import os
import re
import signal
import sys
import traceback
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from yaml import SafeLoader

from flatlab import threads
from flatlab.errors import UserError, first_cause, nearest, sentence_of, shown
from flatlab.files import TextLoader, read_mapping
from flatlab.heartbeat import heartbeat
from flatlab.model.path import ModelPath
from flatlab.options import check_bounds, fill_in, flat


def parse_config(config_class, argv: list[str], preset: dict | None = None):
    """Parses `script.py [preset.yaml or task] [--flag value ...]` into config_class. The file
    replaces values of `preset`.

    The preset is turned into flags that stand in front of the others, so that tyro checks both in
    the same way and the command line wins. Fields of nested dataclasses are flags without a prefix.
    The docstring of the script heads its --help. Threads are configured, too, since torch is not
    imported yet. Raises UserError for an unreadable preset, for values that their option cannot
    take, and for numbers out of bounds; tyro itself exits with code 2 for an unknown flag.
    """
    flags = list(argv)
    preset = dict(preset or {})
    if flags and flags[0].endswith((".yaml", ".yml")):
        preset |= read_mapping(Path(flags.pop(0)), loader=TextLoader)
    flags = with_task(flags)
    kinds = kinds_of(config_class)
    check_words(flags, kinds)
    preset = preset_flags(preset, flat(config_class()))
    check_words(preset, kinds)
    threads.configure()
    if {"-h", "--help"} & {*flags}:
        show_defaults(config_class, derived_defaults(config_class))
        print(sys.modules["__main__"].__doc__)  # tyro would join its lines
    cfg = tyro.cli(
        config_class,
        args=preset + flags,
        description="",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
    )
    check_bounds(cfg)
    if getattr(cfg, "name", None):  # as the shell completes it, too
        cfg.name = str(Path(cfg.name)).removeprefix("logs/")
    return cfg


def with_task(flags: list[str]) -> list[str]:
    """The flags; a bare value in front is the task."""
    is_bare = flags and not flags[0].startswith("-")
    return ["--task", *flags] if is_bare else flags


def kinds_of(made) -> dict:
    """The type of each option of a dataclass, its nested groups included, or of a function."""
    kinds = {}
    for name, kind in get_type_hints(made).items():
        kinds |= kinds_of(kind) if is_dataclass(kind) else {name: kind}
    return kinds


def check_words(flags: list[str], kinds: dict) -> None:
    """Raises UserError for a value that its option cannot take, and for the flag of a list that is
    given twice. kinds: see kinds_of.
    """
    flag, kind, given = "", None, set()
    for word in flags:
        if re.search("[\0\ud800-\udfff]", word):  # surrogates: bytes that are not UTF-8
            raise UserError(f"This argument is no valid text: {word[:80]!r}.")
        values = [word]
        if word.startswith("--"):
            flag, *values = word.split("=", 1)
            kind = kinds.get(flag[2:].replace("-", "_"))
            if flag in given and get_origin(kind) is tuple:
                raise UserError(f"{flag} is given twice: write its values after one {flag}.")
            given.add(flag)
        for value in values:
            check_word(flag, kind, value)


def check_word(flag: str, kind, value: str) -> None:
    """Raises UserError if the value does not fit the type of the option."""
    hint = ""
    if get_origin(kind) is tuple and "," in value:
        hint = f": separate values by spaces, as in {flag} {value.replace(',', ' ')}"
    while get_origin(kind) in (tuple, Union, UnionType):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal and value not in get_args(kind):
        names = sorted(get_args(kind))
        raise UserError(f"Unknown {flag} {value!r}{hint or '; ' + nearest(value, names)}.")
    if kind in (int, float):
        try:
            kind(value)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{flag} needs {wanted}, not {value!r}{hint}.") from None


def show_defaults(made, defaults: dict) -> None:
    """Lets --help show these defaults in place of None, and nothing in place of an empty one.

    made: a dataclass of options, or a function that takes them. defaults: name -> text.
    """
    hints = get_type_hints(made, include_extras=True)
    for name, option in inspect.signature(made).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            show_defaults(kind, defaults)
        elif option.default in (None, "", (), inspect.Parameter.empty):
            described = tyro.conf.arg(help_behavior_hint=defaults.get(name, ""))
            made.__annotations__[name] = Annotated[kind, described]


def derived_defaults(config_class) -> dict[str, str]:
    """The values of DERIVED for a default config, by name."""
    cfg, small = config_class(), config_class()
    fill_in(cfg, ModelPath("", None, stand_in=False))
    fill_in(small, ModelPath("", None, stand_in=True))
    small = flat(small)
    texts = {}
    for name, value in flat(cfg).items():
        other = "" if value == small[name] else f", stand-in {small[name]}"
        texts[name] = f"(default: {value}{other})" if value not in (None, ()) else ""
    return texts


def preset_flags(preset: dict, defaults: dict) -> list[str]:
    """The 'name: value' pairs of a preset as command-line flags. Values are texts: YAML's words for
    true and false mean that only where the default is one of them, and its null where it is None.
    """
    flags = []
    for key, value in preset.items():
        name = str(key).replace("_", "-")
        default = defaults.get(name.replace("-", "_"), "")
        word = str(value).lower()
        if isinstance(default, bool) and word in SafeLoader.bool_values:
            flags.append(f"--{name}" if SafeLoader.bool_values[word] else f"--no-{name}")
        elif not (default is None and word in ("", "~", "null", "none")):
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *map(str, values)]
    return flags


def call(function):
    """Calls a function with the options of the command line."""
    flags = with_task(sys.argv[1:])
    check_words(flags, kinds_of(function))
    show_defaults(function, {})
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    return tyro.cli(function, args=flags, config=config)


def run(main):
    """Runs the main() of a script that loads a model, see one_sentence, and ends the process after
    its exit functions: to take torch and vLLM apart, as Python does then, takes seconds.
    """
    code = 0
    try:
        one_sentence(main)
    except SystemExit as end:
        code = end.code or 0
    with heartbeat("closing"):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def one_sentence(main):
    """Runs main(). An error that the user can fix is printed as one sentence, with exit code 2.

    These are UserError and a full disk, also where they were raised in a task of a TaskGroup. A
    sandbox that broke ends with exit code 1, as any other error does, which has its traceback;
    Ctrl-C and SIGTERM end with 130.
    """
    # `nohup ... &` starts processes with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    # For those who watch a log. A locale or a lone surrogate may be unfit for a character.
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if os.environ.get("NO_COLOR"):
        os.environ["TERM"] = "dumb"  # tyro knows this one only
    try:
        try:
            main()
        finally:
            sys.stdout.flush()  # while a closed pipe can still be caught
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, BrokenPipeError):  # its reader ended first, as in `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sentence = sentence_of(cause)
        if not sentence:
            print(shown("".join(traceback.format_exception(cause))), end="", file=sys.stderr)
            sys.exit(1)
        print(sentence, file=sys.stderr)
        sys.exit(2 if isinstance(cause, (UserError, OSError)) else 1)
