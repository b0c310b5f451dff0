"""Graders that do not work, and artefacts that make honest ones crash: who is told what."""

import asyncio
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest

import env
import grpo
import search
import tasks
from backends import EVERYWHERE, ISOLATED
from competition import write
from env import Env
from flatlab.errors import UserError
from flatlab.options import SandboxOptions, TaskOptions
from flatlab.runs.store import open_run
from flatlab.task import grading
from flatlab.task.definition import Task, clipped_improvement, last_json_object, parse_grade
from flatlab.task.grading import check_grader, grade
from flatlab.task.machine import open_sandbox
from flatlab.task.sanity import trivial_rules
from flatlab.task.task_files import TASKS_DIR
from flatlab.tree.nodes import Tree
from flatlab.view import tables
from flatlab.view.reader import read_run, transcripts
from helpers import (
    LOCAL,
    MADE_BY,
    PROJECT,
    FakePolicy,
    block,
    do,
    python,
    run_grader,
    run_here,
    search_config,
    user_error,
)
from tasks import load_task

SECRET = "the answer is 42"
# The grader of a task: a number near the one in answer.txt. `broken` runs in front of it.
GRADER = """
import json, os, sys
answer = open("answer.txt").read()
{broken}
if answer.startswith("crash"):
    raise ValueError({secret!r})
if answer.startswith("exit"):
    print(json.dumps({{"distance": 0.0}}), flush=True)
    os._exit(3)
if not answer.strip():
    print(json.dumps({{"error": "answer.txt is empty"}}))
else:
    print(json.dumps({{"distance": abs(42 - float(answer))}}))
"""
# How a grader can be broken -> (its code, what the user reads).
BROKEN = {
    "raises": ("open('truth.json')", "No such file or directory: 'truth.json'"),
    "nothing": ("sys.exit()", "exit code 0 stdout: (nothing) stderr: (nothing)"),
    "NaN": ("print(json.dumps({'distance': float('nan')})); sys.exit()", '{"distance": NaN}'),
    "text": ("print('distance 4'); sys.exit()", "stdout: distance 4"),
    "huge": ("for _ in range(300): print('x' * 10**6)\nsys.exit()", "xxxx stderr: (nothing)"),
    "another name": (
        "print(json.dumps({'rmse': 1})); sys.exit()",
        "The result has no 'distance', which the task names, but 'rmse'.",
    ),
    "upper case": ("print(json.dumps({'Distance': 1})); sys.exit()", "no 'distance', which"),
    "exit code 3": ("print(json.dumps({'distance': 4})); sys.exit(3)", "exit code 3"),
    "error and exit code 1": ("print(json.dumps({'error': 'x'})); sys.exit(1)", '{"error": "x"}'),
}


@pytest.fixture(autouse=True)
def nothing_is_known_of_any_grader(monkeypatch):
    monkeypatch.setattr(grading, "grades", {})


@pytest.fixture(params=ISOLATED)
def backend(request):
    return request.param


@pytest.fixture
def make_task(tmp_path):
    """make_task(code in front of the grader, fields of Task)"""

    def make(broken="", **fields):
        grader = tmp_path / "evaluate.py"
        grader.write_text(GRADER.format(broken=broken, secret=SECRET))
        task = Task(
            name="near",
            prompt="Write a number to answer.txt.",
            metric="distance",
            higher_is_better=False,
            baseline=10.0,
            reference=0.0,
            artefacts=("answer.txt",),
            public={},
            hidden={"evaluate.py": grader},
            grader=("python3", "-I", "evaluate.py", "--split", "{split}"),
            splits=("validation", "test"),
            step_timeout=20.0,
            grade_timeout=20.0,
            trivial={"forty": "40"},
        )
        return replace(task, **fields)

    return make


def graded(task, text, split="validation"):
    make_sandbox = partial(open_sandbox, task, SandboxOptions(LOCAL))
    return grade(task, {"answer.txt": text.encode()}, split, make_sandbox)


# ------------------------------------------------------------------ the grader is broken


def check_before_a_run(task):
    check_grader(task, partial(open_sandbox, task, SandboxOptions(LOCAL)))


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_grader_is_found_before_a_run(make_task, how):
    code, said = BROKEN[how]
    with pytest.raises(UserError) as caught:
        check_before_a_run(make_task(code))
    sentence = str(caught.value)
    start = "The grader of task near is broken: it gives 'forty' no result on the validation part: "
    assert sentence.startswith(start)
    assert said in sentence
    assert "\n" not in sentence
    assert len(sentence) < 1100


def test_a_grader_that_is_broken_on_the_test_part_alone_is_found(make_task):
    task = make_task("if sys.argv[2] == 'test': raise KeyError('test')")
    with user_error("on the test part: .*KeyError: 'test'"):
        check_before_a_run(task)
    check_before_a_run(make_task())
    check_before_a_run(make_task("1 / 0", trivial={}))  # nothing to check it with


def test_no_run_starts_with_a_broken_grader(folder):
    change(folder / "evaluate.py", "import sys", "import sys, numbers_of_mine")
    with user_error("The grader of task median is broken: .*No module named 'numbers_of_mine'"):
        env.open_tasks(TaskOptions(("median",)), SandboxOptions(LOCAL), True)


def test_a_grader_of_a_game_that_raises_is_not_taken_for_a_refused_move(tmp_path):
    """Its errors reach the agent as {"error": ...}, through the proxy of the strategy."""
    task = load_task("battleOfSexes")
    grader = tmp_path / "evaluate.py"
    text = task.hidden["evaluate.py"].read_text()
    grader.write_text(text.replace("stdev(points)", "stdev(pointz)"))
    with user_error("'always 0' no result .*name 'pointz' is not defined"):
        check_before_a_run(replace(task, hidden=task.hidden | {"evaluate.py": grader}))


# ------------------------------------------------------------------ the limit is CPU time


BUSY = "import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])"


@pytest.mark.parametrize("code", ["while True: pass", BUSY])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_the_limit_of_a_grading_is_the_cpu_time_of_its_processes(
    make_task, backend, code, monkeypatch
):
    monkeypatch.setattr(grading, "WALL_FACTOR", 1000)
    task = make_task(code, grade_timeout=1.0)
    make_sandbox = partial(open_sandbox, task, SandboxOptions(backend))
    score = grade(task, {"answer.txt": b"41"}, "test", make_sandbox)
    assert "longer than 1 seconds of CPU time" in score.message


def test_a_grading_that_waits_has_its_score(make_task):
    """As one does on a machine with too much work."""
    task = make_task("import time; time.sleep(2)", grade_timeout=0.5)
    assert graded(task, "41").value == 1


def test_a_game_with_a_slow_strategy_is_stopped():
    task = replace(load_task("battleOfSexes"), grade_timeout=1.0)
    files = {"strategy.py": b"def row_strategy(history):\n    while True: pass"}
    score = grade(task, files, "test", partial(open_sandbox, task, SandboxOptions(LOCAL)))
    assert "longer than 1 seconds of CPU time" in score.message


# ------------------------------------------------------------------ the proxy of a strategy


def test_the_proxy_of_a_strategy_refuses(tmp_path):
    task = load_task("battleOfSexes")
    few = task.hidden["evaluate.py"].read_text().replace("GAMES = 8000", "GAMES = 50")
    write(tmp_path, {"evaluate.py": few})
    task = replace(task, hidden=task.hidden | {"evaluate.py": tmp_path / "evaluate.py"})
    cases = [
        (
            "def row_strategy(history): return 1 / 0",
            "strategy.py line 1: ZeroDivisionError: division by zero",
        ),
        ("def row_strategy(history) return 0", "strategy.py line 1: SyntaxError"),
        ("x = 1", "no attribute 'row_strategy'"),
        ("raise SystemExit", "SystemExit"),
        ("def row_strategy(history): return {1}", "returned a set"),
        ("def row_strategy(history): return '0' * 10 ** 6", "disturbed"),
        ("def row_strategy(history): return int('9' * 5000)", "ValueError"),
        (
            "a = []\nfor _ in range(10 ** 5): a = [a]\ndef row_strategy(history): return a",
            "Recursion",
        ),
        (
            "import os\ndef row_strategy(h):\n    print('{\"Score\": 9}', flush=True)\n"
            "    os._exit(0)",
            "ended the process",
        ),
        (
            "import os\ndef row_strategy(h):\n    os.kill(os.getppid(), 9)\n"
            "    raise ValueError('alive')",
            "",
        ),  # a user of its own cannot; the same user can, and gains nothing
        (
            "import os\ndef row_strategy(h):\n    for fd in range(3, 20):\n"
            "        try: os.write(fd, b'{\"Score\": 9}\\n')\n"
            "        except OSError: pass\n    return 0",
            "disturbed",
        ),
        ("#" * 2_000_000, "larger"),
    ]
    for number, (source, message) in enumerate(cases):
        files = {"strategy.py": source.encode()}
        printed = run_grader(task, tmp_path / str(number), files, "test")
        value, said = parse_grade(last_json_object(printed), task)
        assert value is None
        assert message in said


def test_the_proxy_passes_arguments_and_tuples(tmp_path):
    """The call of 3-SAT's solver: lists, dicts with number keys, and two values back."""
    write(
        tmp_path,
        {
            "main.py": "from heuristic import choose\n"
            "variable, value = choose([[1, -2]], {3: True}, [4])\n"
            "assert (variable, value) == (7, None), (variable, value)\nprint('fine')",
            "heuristic.py": (TASKS_DIR / "proxy.py").read_text(),
            "heuristic_agent.py": "def choose(clauses, assigned, level):\n"
            "    assert (clauses, assigned, level) == ([[1, -2]], {3: True}, [4])\n"
            "    return 7, None\n",
        },
    )
    done = python("main.py", cwd=tmp_path)
    assert done.stdout == "fine\n", done


# ------------------------------------------------------------------ the artefact is to blame


@pytest.mark.attack("stopping a run by an artefact that crashes its honest grader")
@pytest.mark.attack("answers in what a grader that crashed has printed or in its traceback")
@pytest.mark.fault(26, "the grader raises or says NaN")
@pytest.mark.fault(26, "a grader that fails after it has printed a score")
def test_an_artefact_that_crashes_an_honest_grader_is_no_submission(make_task, backend):
    messages = {
        "crash": "The grader printed no result.",
        "exit": "The grader failed after it had printed a score.",
        "nan": "The grader's result has no finite number called distance.",
    }
    with Env(make_task(), backend) as world:
        world.reset()
        for text, message in messages.items():
            do(world, f"echo {text} > answer.txt")
            step = do(world, "validate")
            assert step.observation == f"No score: {message}"
            assert not step.score.valid
            assert step.score.grader_output.startswith("exit code ")
            assert (SECRET in step.score.grader_output) == (text == "crash")
        do(world, "echo 41 > answer.txt")
        assert world.score().value == 1


def test_a_score_after_300_mb_of_noise_counts(make_task):
    task = make_task("for _ in range(300): print('x' * 10**6)")
    assert graded(task, "41").value == 1


# ------------------------------------------------------------------ what is kept


def searched(task, folder, policy, **config):
    """The rows of the journal of a search."""
    sizes = {"context": 50_000, "max_reply_tokens": 2000, "max_observation_tokens": 2000}
    cfg = search_config(backend=LOCAL, **sizes, **config)
    run = open_run(folder, {"sampling_mode": "none", "task": task.name, "seed": 0}, MADE_BY)
    (run.dir / "nodes").mkdir()
    tree = Tree(task, "none", 0, cfg, run, search.SELECT[cfg.select])
    try:
        asyncio.run(search.search([tree], policy, 1))
    finally:
        run.lock.close()
    return run.rows("journal.jsonl")


def test_the_journal_keeps_what_the_grader_said_and_no_prompt_has_it(
    make_task, tmp_path, quick_provenance
):
    crash = block("echo crash > answer.txt")
    policy = FakePolicy(crash, block("validate"), crash)
    folder = tmp_path / "run"
    rows = searched(make_task(), folder, policy, nodes=2, rule_args=("branching=1",))
    assert [row["op"] for row in rows] == ["draft", "debug"]
    assert all(SECRET in row["grader_output"] for row in rows)
    assert SECRET in rows[0]["actions"][1]["grader_output"]
    assert rows[0]["error"] == "The grader printed no result."
    assert "The grader printed no result." in policy.prompts[-1]
    assert not any(SECRET in prompt for prompt in policy.prompts)
    shown = transcripts(read_run(folder))[0]
    assert SECRET in shown["error"]
    run = read_run(folder)
    assert run.result["ungraded"] == 2
    assert "gave no result for 2 failed nodes" in tables.table([run])


# ------------------------------------------------------------------ python tasks.py


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """configs/tasks with the task of the documentation, `median`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tasks, "TASKS_DIR", tmp_path / "tasks")
    shutil.copytree(TASKS_DIR / "battleOfSexes", tmp_path / "tasks" / "battleOfSexes")
    shutil.copy(TASKS_DIR / "proxy.py", tmp_path / "tasks")
    text = (PROJECT / "docs/tasks.md").read_text()
    files = re.findall(r"`([a-z.]+)`\n\n```[a-z]*\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in files] == ["numbers.txt", "truth.json", "task.yaml", "evaluate.py"]
    for name, content in files:
        (tmp_path / "tasks/median").mkdir(exist_ok=True)
        (tmp_path / "tasks/median" / name).write_text(content)
    return tmp_path / "tasks/median"


def change(path, old, new):
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def check(capsys, monkeypatch, *flags):
    """(exit code, stdout, stderr) of `python tasks.py FLAGS`."""
    options = SandboxOptions(LOCAL)
    main = lambda: tasks.main(*flags, sandbox=options)  # noqa: E731
    return run_here(main, monkeypatch=monkeypatch, capsys=capsys)


def test_the_task_of_the_documentation_is_checked_on_all_parts(folder, capsys, monkeypatch):
    code, out, _ = check(capsys, monkeypatch, "median")
    assert code == 0
    assert "the first number                      2.0000         0.80" in out
    assert "the first number, test" in out
    assert out.endswith("as far as these rules tell\n")
    (rule,) = trivial_rules(load_task("median"))
    assert rule == ("the first number", {"answer.txt": b"3"})


def test_the_check_finds_a_grader_that_crashes(folder, capsys, monkeypatch):
    change(folder / "evaluate.py", "import sys", "import sys, numbers_of_mine")
    code, out, err = check(capsys, monkeypatch, "median")
    assert code == 2
    assert "not degenerate" not in out
    assert err.count("\n") == 1
    assert "The grader of task median is broken" in err
    assert "No module named 'numbers_of_" in err


@pytest.mark.parametrize("reference", [10, 12.5])
def test_a_reference_that_is_not_better_than_the_baseline_is_refused(folder, reference):
    change(folder / "task.yaml", "reference: 0 ", f"reference: {reference} ")
    words = f"the reference {reference:g} must be better than the baseline 10, and lower is"
    with user_error(words):
        load_task("median")


@pytest.mark.parametrize("how", ["named twice", "symbolic link", "hard link"])
def test_a_hidden_file_that_is_public_is_refused(folder, how):
    hidden = folder / "truth.json"
    if how == "named twice":
        change(folder / "task.yaml", "hidden: [", "hidden: [numbers.txt, ")
    else:
        hidden.unlink()
    if how == "symbolic link":
        hidden.symlink_to("numbers.txt")
    if how == "hard link":
        hidden.hardlink_to(folder / "numbers.txt")
    with user_error("is hidden, so it cannot be a public file, too"):
        load_task("median")


def test_the_check_names_copies_of_hidden_files(folder, capsys, monkeypatch):
    shutil.copy(folder / "truth.json", folder / "notes.txt")
    change(folder / "task.yaml", "data: [", "data: [notes.txt, ")
    code, out, _ = check(capsys, monkeypatch, "median")
    assert code == 0
    assert "can read data/notes.txt: it has the content of the hidden truth.json." in out


def test_the_check_names_what_the_sandbox_lacks(folder, capsys, monkeypatch):
    change(folder / "task.yaml", "reference: 0 ", "needs_network: true #")
    code, _, err = check(capsys, monkeypatch, "median")
    assert code == 2
    assert "allow it with --network" in err


def test_a_broken_folder_does_not_hide_the_other_tasks(folder, capsys, monkeypatch):
    (folder / "truth.json").unlink()
    code, out, _ = check(capsys, monkeypatch)
    battle, median = out.splitlines()
    assert code == 0
    assert battle.startswith("battleOfSexes")
    assert "Score, higher is better" in battle
    assert median.startswith("median")
    assert "cannot be used: The file or folder" in median


# ------------------------------------------------------------------ rewards in other places


def test_the_reward_of_the_bridges_is_that_of_training():
    assert clipped_improvement(None) == grpo.NO_SUBMISSION
    for improvement in (-3.47, -0.5, 0.0, 0.7, 4.0):
        assert clipped_improvement(improvement) == grpo.continuous(improvement, [])
