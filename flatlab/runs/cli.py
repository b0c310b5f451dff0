"""The command line: presets, flags, checks of their values, and errors in one sentence."""

import atexit
import inspect
import itertools
import math
import os
import re
import signal
import sys
import traceback
from dataclasses import field, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from yaml import SafeLoader

from flatlab import options, threads
from flatlab.errors import UserError, first_cause, nearest, sentence_of, shown
from flatlab.files import TextLoader, read_mapping, validated
from flatlab.heartbeat import heartbeat
from flatlab.model.path import ModelPath

TYRO = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)


def parse_configs(config_class, argv: list[str], preset: dict | None = None) -> list:
    """Parses `script.py [preset.yaml or task] [--flag value ...]` into a config_class for each run:
    each combination of the values of options that are Several. The file replaces values of
    `preset`.

    The preset is turned into flags that stand in front of the others, so that tyro checks both in
    the same way and the command line wins. Fields of nested dataclasses are flags without a prefix.
    The docstring of the script heads its --help. Threads are configured, too, since torch is not
    imported yet. Raises UserError for an unreadable preset and for values that their option cannot
    take; tyro itself exits with code 2 for an unknown flag.
    """
    flags = list(argv)
    preset = dict(preset or {})
    if flags and flags[0].endswith((".yaml", ".yml")):
        preset |= read_mapping(Path(flags.pop(0)), loader=TextLoader)
    flags = with_task(flags)
    several = options.marked(config_class, "several")[::-1]  # the seed, which is first, varies most
    settings_class = with_tuples(config_class, several)
    kinds = options.kinds_of(settings_class)
    check_words(flags, kinds)
    preset = preset_flags(preset, options.flat(settings_class()))
    check_words(preset, kinds)
    threads.configure()
    if {"-h", "--help"} & {*flags}:
        show_defaults(settings_class, derived_defaults(config_class))
        print(sys.modules["__main__"].__doc__)  # tyro would join its lines
    settings = tyro.cli(settings_class, args=preset + flags, description="", config=TYRO)
    check_values(settings)
    values = {**vars(settings)}
    if values.get("name"):  # as the shell completes it, too
        values["name"] = str(Path(values["name"])).removeprefix("logs/")
    chosen = itertools.product(*map(values.get, several))
    return [config_class(**values | dict(zip(several, each))) for each in chosen]


def with_tuples(config_class, several: list[str]):
    """The class of what a command line says: these options are tuples of the values in a Config."""
    kinds = get_type_hints(config_class, include_extras=True)
    tuples = []
    for option in fields(config_class):
        if option.name in several:
            default = field(default=(option.default,))
            tuples.append((option.name, tuple[kinds[option.name], ...], default))
    settings = make_dataclass("Settings", tuples, bases=(config_class,), frozen=True)
    # In the source of the class tyro finds the comments of the options.
    settings.__module__ = config_class.__module__
    settings.__qualname__ = config_class.__qualname__
    return settings


def with_task(flags: list[str]) -> list[str]:
    """The flags; a bare value in front is the task."""
    is_bare = flags and not flags[0].startswith("-")
    return ["--task", *flags] if is_bare else flags


def check_words(flags: list[str], kinds: dict) -> None:
    """Raises UserError for a value that its option cannot take, and for the flag of a list that is
    given twice. kinds: see options.kinds_of.
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
            is_number = math.isfinite(kind(value))
        except (ValueError, OverflowError):
            is_number = False
        if not is_number:
            wanted = "a whole number" if kind is int else "a number"
            raise UserError(f"{flag} needs {wanted}, not {value!r}{hint}.")


def check_values(settings) -> None:
    """Raises UserError for a value that the type of its option refuses, for a list without values
    whose default has some, and for one with a value twice.
    """
    kinds = options.kinds_of(type(settings), extras=True)
    defaults = options.flat(type(settings)())
    for name, value in options.flat(settings).items():
        flag = "--" + name.replace("_", "-")
        validated(kinds[name], value, flag)
        if value == () and defaults[name]:
            raise UserError(f"{flag} needs at least one value.")
        if isinstance(value, tuple) and len({*value}) < len(value):
            raise UserError(f"{flag} has a value twice.")


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
    """The values of a default config that are derived, by name."""
    large, small = (
        options.flat(options.filled(config_class(), ModelPath("", None, stand_in)))
        for stand_in in (False, True)
    )
    texts = {}
    for name, value in large.items():
        other = "" if value == small[name] else f", stand-in {small[name]}"
        texts[name] = f"(default: {value}{other})" if value not in (None, ()) else ""
    return texts


def preset_flags(preset: dict, defaults: dict) -> list[str]:
    """The 'name: value' pairs of a preset as command-line flags. Values are texts: YAML's words for
    true and false mean that only where the default is one of them, and its null where it is None.
    Raises UserError for a key that is no option.
    """
    flags = []
    for key, value in preset.items():
        name = str(key).replace("_", "-")
        option = name.replace("-", "_")
        if option not in defaults:
            raise UserError(f"A preset has the unknown key {key!r}; {nearest(option, defaults)}.")
        if isinstance(value, dict):
            raise UserError(f"A preset needs one value or a list for {key!r}, not {value}.")
        default = defaults[option]
        word = str(value).lower()
        if isinstance(default, bool) and word in SafeLoader.bool_values:
            flags.append(f"--{name}" if SafeLoader.bool_values[word] else f"--no-{name}")
        elif not (default is None and word in ("", "~", "null", "none")):
            values = value if isinstance(value, list) else [value]
            flags += [f"--{name}", *map(str, values)]
    return flags


def call(made, flags: list[str] | None = None, description: str | None = None):
    """Calls a function with the options of the command line, or makes a dataclass of them. flags:
    others than those. description: in place of its docstring, for --help.
    """
    flags = with_task(sys.argv[1:]) if flags is None else flags
    check_words(flags, options.kinds_of(made))
    show_defaults(made, {})
    return tyro.cli(made, args=flags, description=description, config=TYRO)


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


def hang_up(*_):
    """Ends the run as Ctrl-C does. The terminal may be gone: then nothing more is printed."""
    for stream in (1, 2):
        try:
            os.write(stream, b"\n")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    signal.raise_signal(signal.SIGINT)


def one_sentence(main):
    """Runs main(). An error that the user can fix is printed as one sentence, with exit code 2.

    These are UserError and a full disk, also where they were raised in a task of a TaskGroup. A
    sandbox that broke ends with exit code 1, as any other error does, which has its traceback;
    Ctrl-C, SIGTERM and SIGHUP (a closed terminal) end with 130.
    """
    # `nohup ... &` starts processes with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, hang_up)
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
