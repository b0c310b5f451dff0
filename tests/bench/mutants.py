"""Faults put into the files in which a silent error costs most: which of them do the tests find?

A mutant is the source with one small change. It is killed if a test of its file fails or takes too
long. It runs in a fork of a process that has imported torch and vLLM, in a copy of the tree.
Outcomes are kept in logs/mutants.jsonl; a mutant whose file and tests have not changed since is
not run again, so the same command continues.
"""

import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "logs/mutants.jsonl"
# Lines "file | function | original | mutated | reason": mutants that no test can tell apart.
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")

# File: the tests that find its faults, without the prefix test_; the fast ones come first. A name
# can be followed by an expression for pytest's -k.
METRICS = "alarm or _row_ or collapse or is_the_adapter_with or exact_task or wild_score or paired"
TESTED_BY = {
    "flatlab/tree/rules.py": ["tree"],
    "flatlab/task/value.py": ["tree", "objective", f"grpo: {METRICS}"],
    "flatlab/task/grading.py": ["task", "exact", "attacks", "env"],
    "flatlab/train/batch.py": ["objective", "grpo: share_of_the_micro_batches"],
    "flatlab/train/metrics.py": [f"grpo: {METRICS}"],
    "grpo.py": ["objective"],
    "flatlab/model/packing.py": ["policy", "families"],
    "flatlab/model/lora_sync.py": ["policy", "families", "model"],
    "flatlab/world/blocks.py": ["env"],
    "flatlab/runs/store.py": ["runs"],
}
# Of grpo.py only what computes: not its start, not the loop, not what needs an engine.
SKIPPED_FUNCTIONS = {
    "grpo.py": (
        *("Config", "play_groups", "evaluate", "judge", "train", "main"),
        *("begin", "finish", "check", "open_job", "end", "load_policy"),
        *("update", "optimize", "micro_loss"),
    )
}

COMPARISONS = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {
    "min": "max",
    "any": "all",
    "ceil": "floor",
    "startswith": "endswith",
    "nlargest": "nsmallest",
}
NAMES |= {new: old for old, new in NAMES.items()}


def changed(node, **fields):
    """A copy of the node with other fields."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def replacements(node):
    """Yields the nodes that may stand in the place of this one."""
    match node:
        case ast.Compare(ops=[op]):
            yield from (changed(node, ops=[new()]) for new in COMPARISONS[type(op)])
        case ast.BinOp() | ast.AugAssign() if type(node.op) in OPERATORS:
            yield changed(node, op=OPERATORS[type(node.op)]())
        case ast.BoolOp():
            yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
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
    """Yields (node, path of names) of what may be changed: no texts, types or decorators."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Import)):
                continue
            inner = where
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{where}.{child.name}".strip(".")
            yield child, inner
            yield from nodes_of(child, inner)


def offset(lines: list[bytes], line: int, column: int) -> int:
    return sum(map(len, lines[: line - 1])) + column


def extent(node, lines):
    """First and last offset of a node's text. An if or while is changed in its test alone."""
    first = last = node
    if isinstance(node, (ast.If, ast.While)):
        first = last = node.test
    if isinstance(node, ast.comprehension):
        first, last = node.target, node.ifs[-1]
    begin = offset(lines, first.lineno, first.col_offset)
    return begin, offset(lines, last.end_lineno, last.end_col_offset)


def mutants_of(file: str, text: str) -> list[dict]:
    """All mutants of a file, each with the whole mutated source."""
    source = text.encode()
    lines = source.splitlines(keepends=True)
    mutants = []
    for node, function in nodes_of(ast.parse(text)):
        if function.split(".")[0] in SKIPPED_FUNCTIONS.get(file, ()):
            continue
        for new in replacements(node):
            begin, end = extent(node, lines)
            old = source[begin:end].decode()
            new = new.test if isinstance(new, (ast.If, ast.While)) else new
            written = ast.unparse(ast.fix_missing_locations(new)).strip()
            if isinstance(node, ast.comprehension):
                written = written.removeprefix("for ")
            elif isinstance(node, ast.expr) and not isinstance(node, (ast.Constant, ast.Call)):
                written = f"({written})"
            mutated = source[:begin].decode() + written + source[end:].decode()
            line = source[:begin].count(b"\n")
            mutant = {"file": file, "function": function, "line": line + 1}
            mutant |= {"original": " ".join(old.split()), "mutated": " ".join(written.split())}
            mutants.append(mutant | {"context": lines[line].decode().strip(), "text": mutated})
    return mutants


def key_of(mutant: dict) -> str:
    """Its identity, which stays the same when other lines of the file change."""
    return " | ".join(mutant[name] for name in ("file", "function", "original", "mutated"))


def drawn(mutants: list[dict], share: float, seed: str) -> list[dict]:
    """A share of the mutants, in the order of a hash: a new line moves none of the others."""
    unique = {(key_of(mutant), mutant["context"]): mutant for mutant in mutants}

    def place(key):
        return hashlib.sha256(f"{seed} {key}".encode()).digest()

    return [unique[key] for key in sorted(unique, key=place)[: round(share * len(unique))]]


def equivalents() -> dict[str, str]:
    """Key of a mutant -> why no test can find it."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    rows = [line.rpartition(" | ") for line in lines if line and line[0] != "#"]
    return {key: reason for key, _, reason in rows}


def copy_tree(folder: Path) -> None:
    """Copies what git knows or would add."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (PROJECT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, folder / name)


def import_heavy() -> None:
    """Imports what all forks need, and none of the project's own modules."""
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
    from vllm import AsyncLLMEngine  # noqa: F401


def in_fork(folder: Path, tests: list[str], options: list[str], log: Path, limit: float) -> int:
    """Runs pytest in a fork, in the copy. Returns its exit status, or -1 after `limit` seconds."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{PROJECT}/") and (
                ".venv" not in module.__file__
            ):
                del sys.modules[name]
        sys.path[:] = [p for p in sys.path if Path(p).resolve() not in (PROJECT, PROJECT / "tests")]
        sys.path.insert(0, str(folder / "tests"))
        os.environ["PYTHONPATH"] = str(folder)
        import pytest

        status = 1
        try:
            base = folder.with_name("pytest")
            status = pytest.main(
                ["-q", f"--basetemp={base}", "-p", "no:cacheprovider", *options, *tests]
            )
        finally:
            os._exit(int(status))
    end = time.monotonic() + limit
    status = None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)  # also what the tests have left
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(pid, 0)
        return -1
    return status


class Tests:
    """The tests of a file: their options, and how long they take without a fault."""

    def __init__(self, folder: Path, file: str):
        self.folder = folder
        self.log = folder.with_name("log.txt")
        self.groups = []  # (paths, options, seconds)
        for name in TESTED_BY[file]:
            name, _, chosen = name.partition(": ")
            options = ["-k", chosen] if chosen else []
            path = [f"tests/test_{name}.py"]
            start = time.monotonic()
            status = in_fork(folder, path, options, self.log, 900)
            if status:
                text = self.log.read_text(errors="replace")
                marks = ("FAILED ", "ERROR ")
                lines = [x for x in text.splitlines() if x.startswith(marks)]
                failed = [x.partition(" ")[2].partition(" - ")[0] for x in lines]
                if not failed:
                    raise SystemExit(f"{path[0]} does not run without a fault:\n{text[-2000:]}")
                print(f"  left out, they fail without a fault: {' '.join(failed)}", flush=True)
                for test in failed:
                    options += ["--deselect", test]
            self.groups.append((path, [*options, "-x"], time.monotonic() - start))

    def seconds(self) -> float:
        return sum(seconds for *_, seconds in self.groups)

    def outcome(self) -> str:
        """The first test that fails, "time limit", or "" if the tests find nothing."""
        for paths, options, seconds in self.groups:
            status = in_fork(self.folder, paths, options, self.log, 3 * seconds + 10)
            if status == -1:
                return "time limit"
            if status not in (0, 5):
                text = self.log.read_text(errors="replace").splitlines()
                return next((x for x in text if x.startswith(("FAILED", "ERROR"))), "crash")[:100]
        return ""


def digest(file: str) -> str:
    """Digest of a file and of its tests."""
    names = [file, *(f"tests/test_{name.partition(':')[0]}.py" for name in TESTED_BY[file])]
    return hashlib.sha256(b"".join((PROJECT / n).read_bytes() for n in names)).hexdigest()[:16]


def known_outcomes() -> dict:
    """(key, context) -> the row of the last run of this mutant."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {(row["key"], row["context"]): row for row in map(json.loads, lines)}


def run_file(file: str, chosen: list[dict], survivors_only: bool) -> list[dict]:
    """Runs the mutants of a file; returns a row for each."""
    known = known_outcomes()
    excused = equivalents()
    state = digest(file)
    rows = []
    waiting = []
    for mutant in chosen:
        row = known.get((key_of(mutant), mutant["context"]))
        is_kept = row and (row["digest"] == state or survivors_only and row["killed_by"])
        if key_of(mutant) in excused:
            rows.append(mutant | {"killed_by": "equivalent"})
        elif is_kept:
            rows.append(mutant | {"killed_by": row["killed_by"]})
        else:
            waiting.append(mutant)
    print(f"{file}: {len(chosen)} mutants, {len(waiting)} to run", flush=True)
    if not waiting:
        return rows
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        folder = Path(place, "tree")
        folder.mkdir()
        copy_tree(folder)
        tests = Tests(folder, file)
        print(f"  the tests take {tests.seconds():.0f} s", flush=True)
        start = time.monotonic()
        for number, mutant in enumerate(waiting, 1):
            path = folder / file
            path.write_text(mutant["text"])
            os.utime(path, (number, number))  # compiled files are told apart by the time
            killed_by = tests.outcome()
            rows.append(mutant | {"killed_by": killed_by})
            row = {"key": key_of(mutant), "context": mutant["context"], "digest": state}
            RESULTS.parent.mkdir(exist_ok=True)
            with open(RESULTS, "a") as out:
                out.write(json.dumps(row | {"killed_by": killed_by}) + "\n")
            left = (time.monotonic() - start) / number * (len(waiting) - number)
            where = f"{file}:{mutant['line']}  {mutant['original']} -> {mutant['mutated']}"
            verdict = f"killed  {killed_by}" if killed_by else "SURVIVED"
            print(
                f"  {number}/{len(waiting)} ETA {left:.0f} s  {where[:110]}  {verdict}", flush=True
            )
    return rows


def mutants(args):
    """Section of tests/bench: a row for each file, and the survivors on the terminal."""
    files = args.only.split(",") if args.only else list(TESTED_BY)
    found = {f: mutants_of(f, (PROJECT / f).read_text()) for f in TESTED_BY}
    share = args.count / sum(map(len, found.values()))
    seed = args.seeds.split(",")[0]
    import_heavy()
    table = []
    total = [0, 0, 0]
    for file in files:
        rows = run_file(file, drawn(found[file], share, seed), args.survivors)
        survivors = [row for row in rows if not row["killed_by"]]
        equivalent = sum(row["killed_by"] == "equivalent" for row in rows)
        killed = len(rows) - len(survivors) - equivalent
        total = [x + y for x, y in zip(total, (len(rows), killed, equivalent))]
        table.append((file, f"{killed} of {len(rows) - equivalent}", f"{equivalent} equivalent"))
        for row in sorted(survivors, key=lambda row: row["line"]):
            print(f"survivor {row['file']}:{row['line']}\n    {row['context']}\n    {key_of(row)}")
    count, killed, equivalent = total
    real = max(1, count - equivalent)
    headline = f"{count} mutants, {killed} killed ({killed / real:.0%} of those not equivalent)"
    return headline, table
