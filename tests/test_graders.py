"""Graders that do not work, and artefacts that make honest ones crash: who is told what."""

import asyncio
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import grpo
import search
import tasks
from backends import ISOLATED
from env import Env
from flatlab.errors import UserError
from flatlab.options import SandboxOptions
from flatlab.runs.reader import read_run, transcripts
from flatlab.runs.store import open_run
from flatlab.task import grading
from flatlab.task.definition import Task, clipped_improvement
from flatlab.task.grading import grade, trivial_rules
from flatlab.task.machine import open_sandbox
from flatlab.task.task_files import TASKS_DIR
from flatlab.tree.nodes import Tree
from flatlab.view import stats
from helpers import (
    LOCAL,
    MADE_BY,
    PROJECT,
    FakePolicy,
    block,
    do,
    play_once,
    python,
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
    "another name": ("print(json.dumps({'rmse': 1})); sys.exit()", '{"rmse": 1}'),
    "exit code 3": ("print(json.dumps({'distance': 4})); sys.exit(3)", "exit code 3"),
    "error and exit code 1": ("print(json.dumps({'error': 'x'})); sys.exit(1)", '{"error": "x"}'),
}


@pytest.fixture(autouse=True)
def nothing_is_known_of_any_grader(monkeypatch):
    monkeypatch.setattr(grading, "grades", {})
    monkeypatch.setattr(grading, "checked_graders", set())
    monkeypatch.setattr(grading, "scored_submissions", {})


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
    """(score, number of gradings) of an answer.txt."""
    opened = []

    def make_sandbox():
        opened.append(1)
        return open_sandbox(task, SandboxOptions(LOCAL))

    return grade(task, {"answer.txt": text.encode()}, split, make_sandbox), len(opened)


# ------------------------------------------------------------------ the grader is broken


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_grader_stops_the_run_with_what_it_said(make_task, how):
    code, said = BROKEN[how]
    with pytest.raises(UserError) as caught:
        graded(make_task(code), "41")
    sentence = str(caught.value)
    start = "The grader of task near is broken: it gives 'forty' no result on the validation part: "
    assert sentence.startswith(start)
    assert said in sentence
    assert "\n" not in sentence
    assert len(sentence) < 1100


def test_a_grader_that_is_broken_on_the_test_part_alone_is_found(make_task):
    task = make_task("if sys.argv[2] == 'test': raise KeyError('test')")
    assert graded(task, "41")[0].value == 1
    with user_error("on the test part: .*KeyError: 'test'"):
        graded(task, "41", "test")


@pytest.mark.parametrize("trivial", [{}, {"of another form": "crash"}])
def test_what_has_a_score_on_one_part_shows_that_the_other_part_can_be_graded(make_task, trivial):
    """Also without a trivial rule, or with one that crashes an honest grader."""
    task = make_task(trivial=trivial)
    assert graded(task, "41")[0].valid
    assert graded(task, "crash", "test")[1] == 2


def test_what_has_a_score_on_one_part_shows_that_the_other_part_cannot_be_graded(make_task):
    task = make_task("if sys.argv[2] == 'test': raise KeyError('test')", trivial={})
    assert graded(task, "41")[0].valid
    with user_error("'a submission with a score' no result on the test part"):
        graded(task, "41", "test")


def test_an_episode_with_a_broken_grader_raises_and_closes_its_sandbox(make_task):
    world = Env(make_task("1 / 0"), LOCAL)
    policy = FakePolicy(block("echo 41 > answer.txt"), block("validate"))
    with user_error("ZeroDivisionError"):
        asyncio.run(play_once(world, policy))
    assert world.closed
    assert len(policy.requests) == 2


def test_a_grader_of_a_game_that_raises_is_not_taken_for_a_refused_move(tmp_path):
    """Its errors reach the agent as {"error": ...}, through the proxy of the strategy."""
    task = load_task("battleOfSexes")
    grader = tmp_path / "evaluate.py"
    text = task.hidden["evaluate.py"].read_text()
    grader.write_text(text.replace("stdev(points)", "stdev(pointz)"))
    task = replace(task, hidden=task.hidden | {"evaluate.py": grader})
    files = {"strategy.py": b"def row_strategy(history): return 0"}
    with user_error("last move.* no result .*name 'pointz' is not defined"):
        grade(task, files, "validation", lambda: open_sandbox(task, SandboxOptions(LOCAL)))


# ------------------------------------------------------------------ the artefact is to blame


@pytest.fixture(params=ISOLATED)
def backend(request):
    return request.param


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


def test_the_trivial_rule_is_graded_once(make_task):
    assert graded(make_task(), "crash")[1] == 2
    assert graded(make_task(), "crash")[1] == 1
    grading.checked_graders.clear()
    assert graded(make_task(), " ")[0].message == "answer.txt is empty"
    assert graded(make_task(), "crash")[1] == 1  # the reason above shows that the grader works


def test_gradings_that_fail_at_the_same_time_ask_once(make_task):
    task = make_task()
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: graded(task, "crash"), range(3)))
    assert sorted(count for _, count in results) == [1, 1, 2]


def test_without_a_trivial_rule_there_is_a_warning_and_the_run_goes_on(make_task, capsys):
    task = make_task("if answer == '': sys.exit(5)", trivial={})
    for _ in range(2):
        assert not graded(task, "crash")[0].valid
    said = capsys.readouterr().err
    warning = "warning  The grader of task near may be broken: it gives 'an empty submission' no"
    assert said.count(warning) == 1
    assert "exit code 5" in said
    grading.checked_graders.clear()
    assert not graded(make_task(trivial={}), "crash")[0].valid
    assert capsys.readouterr().err == ""  # it gave the empty submission a reason


@pytest.mark.fault(26, "a trivial rule that is killed or too slow: perhaps the machine is busy")
@pytest.mark.parametrize(
    "code, words",
    [
        ("os.kill(os.getpid(), 9)", "exit code 137"),
        ("import time; time.sleep(60)", "stopped at the time limit"),
    ],
)
def test_a_grader_that_was_killed_is_not_called_broken(make_task, capsys, code, words):
    task = make_task(code, grade_timeout=1.0)
    score, _ = graded(task, "41")
    assert not score.valid
    assert words in score.grader_output
    said = capsys.readouterr().err
    assert "may be broken: it gives 'forty' no result" in said
    assert words in said


def test_a_score_after_300_mb_of_noise_counts(make_task):
    task = make_task("for _ in range(300): print('x' * 10**6)")
    assert graded(task, "41")[0].value == 1


# ------------------------------------------------------------------ what is kept


def searched(task, folder, policy, **config):
    """The rows of the journal of a search."""
    sizes = {"context": 50_000, "max_reply_tokens": 2000, "max_observation_tokens": 2000}
    cfg = search_config(backend=LOCAL, **sizes, **config)
    run = open_run(folder, {"sampling_mode": "none"}, MADE_BY)
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
    result = read_run(folder).result
    assert result["ungraded"] == 2
    assert "gave no result for 2 failed nodes" in stats.text_of(
        stats.grid_table([result | {"method": "none"}])
    )


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


@pytest.mark.parametrize(
    "printed, code, reward",
    [
        ('noise\n{"distance": 5.0}', 0, 0.5),
        ('{"distance": 400.0}', 0, -1.0),
        ('{"error": "no"}', 0, -1.0),
        ('{"distance": 5.0}', 3, -1.0),
    ],
)
def test_the_reward_of_an_exported_task(tmp_path, printed, code, reward):
    script = (PROJECT / "integrations/harbor/reward.py").read_text()
    script = script.replace("/logs/verifier", str(tmp_path))
    python("-c", script, "distance", "10.0", "-0.1", code, input=printed)
    assert json.loads((tmp_path / "reward.json").read_text())["reward"] == reward
