"""Faults put into the files in which a silent error costs most: which of them do the tests find?

A mutant is the source with one small change. It is killed if a test of its file fails or takes too
long. It runs in a fork of a process that has imported torch and vLLM, in a copy of the tree.
Outcomes are kept in logs/mutants.jsonl; a mutant whose file and tests have not changed since is
not run again, so the same command continues.
"""

import ast
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

from flatlab.files import content_key, read_rows
from flatlab.runs.store import json_lines

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "logs/mutants.jsonl"
# Lines "file | function | original | mutated | reason": mutants that no test can tell apart.
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")

# File: the tests that find its faults, as tests/test_<name>.py and an expression for pytest's -k;
# the fast ones come first.
METRICS = "alarm or _row_ or collapse or is_the_adapter_with or exact_task or paired"
PACKED = "pack or mask or micro or prompt or varlen or recomput or prob or entropy or head or peft"
ADAPTED = "adapter or sync or verify or agree or layers or rank or norm or share"
GRADED = "grad or artefact or score or record or beats"
PLAYED = "episode or observation or fit or history or status or reason or why or part or fault"
RUN = (
    "run or resume or kill_9 or disk or checkpoint or directory or row or numbers or git or killed"
)
TESTED_BY = {
    "flatlab/tree/rules.py": {"tree": ""},
    "flatlab/task/value.py": {"tree": "", "objective": "", "grpo": METRICS},
    "flatlab/task/grading.py": {"exact": GRADED, "task": GRADED, "env": GRADED, "faults": "mount"},
    "flatlab/train/batch.py": {"objective": "", "grpo": "micro_batches or travel or exact_task"},
    "flatlab/train/metrics.py": {"grpo": METRICS},
    "grpo.py": {"objective": ""},
    "flatlab/model/packing.py": {"policy": PACKED},
    "flatlab/model/lora_sync.py": {"policy": ADAPTED},
    "flatlab/world/blocks.py": {"env": "accepted or rejected or heredoc or bash or hand"},
    "flatlab/world/episode.py": {
        "env": PLAYED,
        "prompts": "",
        "objective": "",
        "grpo": "travel",
        "search": "faults_in_a_row",
    },
    "flatlab/tree/nodes.py": {"tree": "", "search": "", "damage": "of_a_search"},
    "flatlab/runs/store.py": {
        "runs": RUN,
        "grpo": "travel",
        "damage": "of_a_search",
        "viz": "track",
    },
}
# Of grpo.py only what computes: not its start, not the loop, not what needs an engine
SKIPPED = """Config play_groups evaluate judge train main begin finish check
open_job end_runs load_policy update optimize add_gradients micro_loss"""
FORK = multiprocessing.get_context("fork")
HEAVY = ("peft", "pytest", "scipy.stats", "torch", "transformers", "vllm.v1.engine.llm_engine")
# Copies what git knows or would add to the folder $0
COPY = 'mkdir "$0"; git ls-files -coz --exclude-standard | xargs -0 cp --parents -t "$0"'

# What stands in the place of a kind of operator
SWAPS = """Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is,
In NotIn, NotIn In, Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Mult, Mod Mult, Pow Mult,
BitAnd BitOr, BitOr BitAnd, And Or, Or And"""
SWAPS = {kind: others for kind, *others in map(str.split, SWAPS.split(","))}
NAMES = {"min": "max", "any": "all", "ceil": "floor", "startswith": "endswith"}
NAMES |= {new: old for old, new in NAMES.items()}


def changed(node, **fields):
    """A copy of the node with other fields."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def swapped(op):
    """The operators that may stand in the place of this one."""
    return [getattr(ast, name)() for name in SWAPS.get(type(op).__name__, ())]


def replacements(node):
    """Yields the nodes that may stand in the place of this one."""
    match node:
        case ast.Compare(ops=[op]):
            yield from (changed(node, ops=[new]) for new in swapped(op))
        case ast.BinOp() | ast.AugAssign():
            yield from (changed(node, op=new) for new in swapped(node.op))
        case ast.BoolOp():
            yield from (changed(node, op=new) for new in swapped(node.op))
            yield from node.values
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
            if node.value:
                yield ast.Constant(node.value / 2 if isinstance(node.value, float) else 0)
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield changed(node, func=ast.Name(NAMES[name]))
        case ast.Call(func=ast.Attribute(attr=name)) if name in NAMES:
            yield changed(node, func=changed(node.func, attr=NAMES[name]))
        case ast.Call(args=[first, second]):
            yield changed(node, args=[second, first])
        case ast.Call(keywords=[_, *_]):
            yield changed(node, keywords=node.keywords[:-1])
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.If() | ast.While():
            yield changed(node, test=ast.UnaryOp(ast.Not(), node.test))
        case ast.comprehension(ifs=[_, *_]):
            yield changed(node, ifs=[])


def nodes_of(node, where=""):
    """Yields (list or __dict__ that holds a node, its place there, path of names) of what may be
    changed: no texts, types or decorators.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        is_list = isinstance(value, list)
        for place, child in enumerate(value) if is_list else [(name, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Import)):
                continue
            inner = where
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{where}.{child.name}".strip(".")
            yield value if is_list else vars(node), place, inner
            yield from nodes_of(child, inner)


def mutants_of(file: str):
    """Yields the key of each mutant of a file, and its tree, which holds until the next one."""
    tree = ast.parse((PROJECT / file).read_text())
    seen = {}
    for holder, place, function in [*nodes_of(tree)]:
        if file == "grpo.py" and function.split(".")[0] in SKIPPED.split():
            continue
        node = holder[place]
        for new in [*replacements(node)]:
            texts = [ast.unparse(x).strip().partition("\n")[0] for x in (node, new)]
            key = " | ".join((file, function, *texts))
            seen[key] = seen.get(key, 0) + 1
            holder[place] = new
            yield f"{key} #{seen[key]}" if seen[key] > 1 else key, tree
            holder[place] = node


def place(key: str, seed: str) -> bytes:
    """The place of a mutant in the order of a draw: a new line moves none of the others."""
    return hashlib.sha256(f"{seed} {key}".encode()).digest()


def equivalents() -> dict[str, str]:
    """Key of a mutant -> why no test can find it."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()[1:]
    return {key: reason for key, _, reason in (line.rpartition(" | ") for line in lines)}


def run_tests(folder: Path, options: list[str], log: Path) -> None:
    """Runs pytest in this process, a fork, which ends with its status."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        if file.startswith(f"{PROJECT}/") and ".venv" not in file and name != "__main__":
            del sys.modules[name]
    sys.path[:] = [p for p in sys.path if Path(p).resolve() not in (PROJECT, PROJECT / "tests")]
    sys.path.insert(0, str(folder / "tests"))
    os.environ["PYTHONPATH"] = str(folder)
    import pytest

    base = f"--basetemp={folder.with_name('pytest')}"
    os._exit(int(pytest.main(["-q", "-x", base, "-p", "no:cacheprovider", *options])))


def in_fork(folder: Path, options: list[str], log: Path, limit: float) -> int | None:
    """The exit status of these tests in a fork, or None after `limit` seconds."""
    fork = FORK.Process(target=run_tests, args=(folder, options, log))
    fork.start()
    fork.join(limit)
    status = fork.exitcode
    with suppress(ProcessLookupError):
        os.killpg(fork.pid, signal.SIGKILL)  # also what the tests have left
    fork.join()
    return status


def timed_groups(folder: Path, file: str, log: Path) -> list[tuple]:
    """(pytest's arguments, seconds without a fault) of each file of tests."""
    groups = []
    for name, chosen in TESTED_BY[file].items():
        options = [f"tests/test_{name}.py", *(["-k", chosen] if chosen else [])]
        start = time.monotonic()
        if in_fork(folder, options, log, 900):
            text = log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{options[0]} fails without a fault:\n{text}")
        groups.append((options, time.monotonic() - start))
    return groups


def outcome(folder: Path, groups: list[tuple], log: Path) -> str:
    """The first test that fails, "time limit", or "" if the tests find nothing."""
    for options, seconds in groups:
        status = in_fork(folder, options, log, 3 * seconds + 10)
        if status is None:
            return "time limit"
        if status:
            lines = log.read_text(errors="replace").splitlines()
            return next((x for x in lines if x.startswith(("FAILED", "ERROR"))), "crash")[:100]
    return ""


def run_file(file: str, chosen: list[str]) -> dict[str, str]:
    """Runs the mutants of a file: key -> what killed it, "" if nothing did."""
    names = [file, *(f"tests/test_{name}.py" for name in TESTED_BY[file])]
    digest = content_key(*(PROJECT / name for name in names))
    rows = [row for row in read_rows(RESULTS) if row["digest"] == digest]
    found = {row["key"]: row["killed_by"] for row in rows}
    found |= dict.fromkeys(equivalents(), "equivalent")
    waiting = [key for key in chosen if key not in found]
    print(f"{file}: {len(chosen)} mutants, {len(waiting)} to run", flush=True)
    texts = {key: ast.unparse(tree) for key, tree in mutants_of(file) if key in waiting}
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        folder, log = Path(place, "tree"), Path(place, "log.txt")
        subprocess.run(["bash", "-c", COPY, folder], cwd=PROJECT)
        groups = timed_groups(folder, file, log) if waiting else []
        for number, key in enumerate(waiting, 1):
            (folder / file).write_text(texts[key])
            os.utime(folder / file, (number, number))  # compiled files are told apart by the time
            found[key] = outcome(folder, groups, log)
            with open(RESULTS, "a") as out:
                out.write(json_lines([{"key": key, "digest": digest, "killed_by": found[key]}]))
            print(f"  {number}/{len(waiting)}  {found[key] or 'SURVIVED'}  {key}", flush=True)
    return {key: found[key] for key in chosen}


def mutants(args):
    """Section of tests/bench: a row for each file, and the survivors on the terminal."""
    keys = {file: [key for key, _ in mutants_of(file)] for file in TESTED_BY}
    share = args.count / sum(map(len, keys.values()))
    seed = args.seeds.split(",")[0]
    RESULTS.parent.mkdir(exist_ok=True)
    for name in HEAVY:  # what all forks need, and none of the project's own modules
        import_module(name)
    table = []
    total = Counter()
    for file in args.only.split(",") if args.only else TESTED_BY:
        chosen = sorted(keys[file], key=partial(place, seed=seed))[: round(share * len(keys[file]))]
        found = run_file(file, chosen)
        print("\n".join(f"survivor {key}" for key in found if not found[key]))
        equivalent = sum(killed_by == "equivalent" for killed_by in found.values())
        killed = sum(map(bool, found.values())) - equivalent
        real = len(found) - equivalent
        total += Counter(killed=killed, real=real)
        table.append((file, f"{killed} of {real}", f"{equivalent} equivalent"))
    return f"{total['killed']} of {total['real']} mutants are killed", table
