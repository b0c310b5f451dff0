"""The command line: presets, flags, bounds of numbers, and errors in one sentence."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import traceback
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, get_type_hints

import tyro
from tyro._errors import InstantiationFailure, InvalidChoice, on_parse_error
from yaml import SafeLoader

from flatlab import threads
from flatlab.errors import UserError, first_cause, nearest, sentence_of, shown
from flatlab.files import TextLoader, read_mapping
from flatlab.options import flat


def hide_none(config_class) -> None:
    """Leaves "(default: None)" out of --help, where the comment names the default."""
    hints = get_type_hints(config_class)
    for option in fields(config_class):
        kind = hints[option.name]
        if is_dataclass(kind):
            hide_none(kind)
        elif option.default is None:
            no_hint = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
            config_class.__annotations__[option.name] = no_hint


def parse_config(config_class, argv: list[str], preset: dict | None = None):
    """Parses `script.py [preset.yaml] [--flag value ...]` into config_class. The file replaces
    values of `preset`.

    The preset is turned into flags that stand in front of the others, so that tyro checks both in
    the same way and the command line wins. Fields of nested dataclasses are flags without a prefix.
    The docstring of the script heads its --help. Threads are configured, too, since torch is not
    imported yet. Raises UserError for an unreadable preset and for arguments that are no text; tyro
    itself exits with code 2 for a wrong flag.
    """
    flags = list(argv)
    preset = dict(preset or {})
    if flags and not flags[0].startswith("-"):
        preset |= read_mapping(Path(flags.pop(0)), loader=TextLoader)
    flags = preset_flags(preset, flat(config_class())) + flags
    threads.configure()
    for flag in flags:
        if re.search("[\0\ud800-\udfff]", flag):  # surrogates: bytes that are not UTF-8
            raise UserError(f"This argument is no valid text: {flag[:80]!r}.")
    hide_none(config_class)
    return tyro.cli(
        config_class,
        args=flags,
        description=sys.modules["__main__"].__doc__,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
    )


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


def explain(event) -> None:
    """Raises UserError for a value that its option cannot take. The rest is reported by tyro."""
    if isinstance(event, InvalidChoice):
        names = sorted(set(event.choices) - {"None"})
        hint = nearest(event.value, names)
        raise UserError(f"Unknown {event.argument.display_name()} {event.value!r}; {hint}.")
    if isinstance(event, InstantiationFailure) and event.argument:
        given = re.sub(r"""^[^["']*""", "", event.message.partition("\n")[0]).strip("[].")
        metavar = event.argument.lowered.metavar
        wanted = "a number" if "FLOAT" in metavar else f"one of {metavar}"
        if "INT" in metavar:
            wanted = "a whole number"
        raise UserError(f"{event.argument.display_name()} needs {wanted}, not {given}.")


def hide_empty(made) -> None:
    """Leaves "(default: None)", and an empty one, out of --help, where the comment names the
    default. made: a dataclass of options, or a function that takes them.
    """
    hints = get_type_hints(made, include_extras=True)
    for name, option in inspect.signature(made).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            hide_empty(kind)
        elif option.default in (None, "", (), inspect.Parameter.empty):
            made.__annotations__[name] = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]


def call(function):
    """Calls a function with the options of the command line. A first bare value is its --task."""
    args = sys.argv[1:]
    if args and not args[0].startswith("-"):
        args.insert(0, "--task")
    hide_empty(function)
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    return tyro.cli(function, args=args, config=config)


def one_sentence(main):
    """Runs main(). An error that the user can fix is printed as one sentence, with exit code 2.

    These are UserError and a full disk, also where they were raised in a task of a TaskGroup. A
    sandbox that broke ends with exit code 1, as any other error does, which has its traceback;
    Ctrl-C and SIGTERM end with 130.
    """
    # `nohup ... &` starts processes with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    if os.environ.get("NO_COLOR"):
        tyro._experimental_options["ansi_codes"] = False
    try:
        try:
            with on_parse_error(explain):
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
