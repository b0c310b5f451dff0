"""Stands in for a module of the agent in a grader that imports it: it runs in a child process.

A grading sandbox has this file under the module's name, such as strategy.py, and the agent's file
as strategy_agent.py. `from strategy import row_strategy` works as before, and every call goes
through a pipe: copies of the arguments go in, one line of JSON comes back. The grader's objects,
random numbers and output stay out of reach.

At the first call, when the grader has read all it needs, everything in this folder is deleted
before foreign code starts, so there is nothing to read or change. Use this file only in a
throw-away copy.
"""

import atexit
import ctypes
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

FOLDER = os.path.dirname(os.path.abspath(__file__))
NAME = os.path.basename(__file__)  # "strategy.py"
AGENT = NAME.removesuffix(".py") + "_agent.py"
MAX_BYTES, MAX_REPLY = 1_000_000, 100_000
ERROR_CHARS = 300
NOBODY = 65534
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 24, 38  # linux/prctl.h
libc = ctypes.CDLL(None)

# Runs in the child. The channel is moved away from fds 0 and 1, so that print() and input() cannot
# disturb it. A request is a pickle of (function, [arguments, ...]) from the trusted side; a
# reply is a line: JSON, or "!" and text.
CHILD = r"""
import json, os, pickle, random, sys, traceback, types
random.seed(0)                          # equal strategies make equal moves
requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1)
file = sys.argv[1]

def describe(error):
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError):
        lines.append(error.lineno)
    text = " ".join(traceback.format_exception_only(type(error), error)[-1].split())
    return f"{file} line {lines[-1]}: {text}" if lines else f"{file}: {text}"

def plain(value):
    if hasattr(value, "tolist"):        # numpy's numbers and arrays
        return value.tolist()
    name = type(value).__name__
    raise TypeError(f"returned a {name}, which is neither a number nor a list of numbers")

def serve(source):
    module = sys.modules[file[:-3]] = types.ModuleType(file[:-3])
    exec(compile(source, file, "exec"), module.__dict__)
    encode = json.JSONEncoder(default=plain).encode
    while True:
        name, calls = pickle.load(requests)
        results = [getattr(module, name)(*arguments) for arguments in calls]
        replies.write(encode(results).encode() + b"\n")
        replies.flush()

try:
    serve(pickle.load(requests))
except EOFError:
    pass
except BaseException as error:      # SystemExit, too: its author reads whatever it raises
    replies.write(b"!" + describe(error)[:1000].encode("utf-8", "replace") + b"\n")
    replies.flush()
"""


def fail(message, code=0):
    """Ends the grader here; its last line is the message for the agent."""
    print(json.dumps({"error": message[:ERROR_CHARS]}), flush=True)
    stop()
    os._exit(code)


def raised(kind, error, trace):
    """Ends a grader that raised an error: it may not like a result, or may itself be broken.

    The user reads the error, the agent its type alone: the text could hold what is hidden.
    """
    sys.__excepthook__(kind, error, trace)
    fail(f"the grader refused what {NAME} returned ({kind.__name__})", code=1)


def lower_privileges(change_user):
    """In the child before exec: no new privileges, no capabilities, another user if possible."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):  # fails, harmlessly, when there are none to give up
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if change_user and os.geteuid() == 0:
        with suppress(OSError):  # a user namespace may know only one user
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)


def start_child():
    """Starts CHILD without rights; no foreign code runs in it yet."""

    def start(change_user):
        return subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD, NAME],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: lower_privileges(change_user),
        )

    try:
        return start(change_user=True)
    except PermissionError:
        # Only root can read this Python; the child stays root, without capabilities.
        return start(change_user=False)


def delete_everything():
    """Empties the folder. An error here ends the grader: the child could read what is left."""
    for entry in list(os.scandir(FOLDER)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


child = None


def stop():
    if child:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def send_source():
    """Starts the child and sends it the source, with nothing left to read here."""
    global child
    try:
        with open(os.path.join(FOLDER, AGENT), "rb") as file:
            data = file.read(MAX_BYTES + 1)
        source = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{NAME} is not a text file: {error}")
    if len(data) > MAX_BYTES:
        fail(f"{NAME} is larger than {MAX_BYTES} bytes")
    child = start_child()
    atexit.register(stop)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process of the same user may look into this one
    delete_everything()
    child.stdin.write(pickle.dumps(source))
    sys.excepthook = raised


def call_many(name, calls):
    """Calls the agent's function in the child, once for each tuple of arguments.

    Returns the results as a list of JSON values; a tuple becomes a list.
    """
    if child is None:
        send_source()
    with suppress(BrokenPipeError):  # it has ended: the line is what it said before
        child.stdin.write(pickle.dumps((name, calls), 5))
        child.stdin.flush()
    line = child.stdout.readline(MAX_REPLY)
    if line[:1] == b"!" and line[1:].strip():
        fail(line[1:].decode("utf-8", "replace"))
    if not line:
        fail(f"{NAME} ended the process that runs it")
    try:
        results = json.loads(line)
        if type(results) is not list or len(results) != len(calls):
            raise ValueError
        return results
    except (ValueError, RecursionError):
        fail(f"{NAME} disturbed the process that runs it")


def __getattr__(name):
    """Any function of the agent's module, by name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *arguments: call_many(name, [arguments])[0]
