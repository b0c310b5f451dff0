"""Tasks: built-in ones and those of MLGym and MLE-Dojo; graders, gradings and the sanity check.

Other projects are small checkouts made here, or a real one: MLGYM_ROOT=<checkout of MLGym>.
"""

import asyncio
import csv
import json
import math
import os
import random
import re
import shutil
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import env
import grpo
import search
import tasks
from backends import EVERYWHERE, ISOLATED
from competition import ROWS, answers, make_competition, write
from env import Env
from flatlab.errors import UserError
from flatlab.options import SandboxOptions, TaskOptions
from flatlab.runs.store import open_run
from flatlab.task import grading
from flatlab.task.builtin import builtin_names
from flatlab.task.definition import (
    TASKS_DIR,
    Task,
    clipped_improvement,
    finite_number,
    improvement,
    last_json_object,
    parse_grade,
)
from flatlab.task.grading import open_sandbox
from flatlab.task.mlgym import mlgym_names
from flatlab.task.sanity import check_grader, csv_rules, degenerate, sanity_file
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
    slow,
    user_error,
)
from tasks import load_task
from tools import make_data

sys.path.append(str(TASKS_DIR))
import grade_csv  # noqa: E402

LOCAL_BOX = SandboxOptions(LOCAL)
MLGYM = os.environ.get("MLGYM_ROOT")  # before conftest.py hides it
real_mlgym = pytest.mark.skipif(not MLGYM, reason="set MLGYM_ROOT to a checkout of MLGym")


@pytest.fixture(autouse=True)
def only_what_a_test_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(grading, "grades", {})


def score_of(task, folder, artefacts, split=None):
    """The score and the message of a grader."""
    printed = run_grader(task, folder, artefacts, split or task.splits[-1])
    return parse_grade(last_json_object(printed), task)


def grade(task, folder, artefacts, split="validation"):
    """The JSON that the grader prints."""
    return json.loads(run_grader(task, folder, artefacts, split))


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# ----------------------------------------------------------------------------------------- loading


def test_builtin_tasks_are_complete():
    for name in builtin_names(TASKS_DIR):
        task = load_task(name)
        assert (task.name, task.source) == (name, "built-in")
        parts = ("exact",) if task.exact else ("validation", "selection", "test")
        assert task.splits == parts
        assert not set(task.public.values()) & set(task.hidden.values())


def test_unknown_task_lists_the_nearest_names():
    with user_error("did you mean titanic.*battleOfSexes"):
        load_task("Titanc")
    with user_error("Unknown task"):
        load_task("../tasks/titanic")


@pytest.fixture
def titanic_copy(tmp_path, monkeypatch):
    shutil.copytree(TASKS_DIR / "titanic", tmp_path / "titanic")
    shutil.copy(TASKS_DIR / "grade_csv.py", tmp_path)
    monkeypatch.setattr(tasks, "TASKS_DIR", tmp_path)
    return tmp_path / "titanic"


@pytest.mark.parametrize("name", ["train.csv", "answers.csv", "../grade_csv.py"])
def test_a_missing_file_is_named(titanic_copy, name):
    (titanic_copy / name).unlink()
    with user_error(f"{Path(name).name} is missing"):
        load_task("titanic")


def test_a_wrong_yaml_is_one_clear_sentence(titanic_copy):
    cases = [
        ("metric: accuracy\n", "", "lacks the key metric"),
        ("metric:", "metrik:", "unknown key 'metrik'; did you mean metric"),
        (
            "higher_is_better: true",
            "higher_is_better: up",
            "higher_is_better: .*boolean.*, not 'up'",
        ),
        ("artefacts: [submission.csv]", "artefacts: []", "titanic needs artefacts"),
        ("artefacts: [submission.csv]", "artefacts: [a/../../x]", "artefacts in the workspace"),
        ("artefacts: [submission.csv]", "artefacts: [/etc/x]", "artefacts in the workspace"),
        ("splits: [validation, selection, test]", "splits: []", "titanic needs splits"),
        ("step_timeout: 60", "step_timeout: 0", "needs finite time limits above 0"),
        ("grade_timeout: 30", "grade_timeout: -1", "needs finite time limits above 0"),
        ("grade_timeout: 30", "grade_timeout: .nan", "needs finite time limits above 0"),
        ("baseline: 0.678182", "baseline: .nan", "needs a finite baseline"),
        ("baseline: 0.678182", "baseline: -.inf", "needs a finite baseline"),
        ("artefacts: [submission.csv]", "artefacts: ['*.csv']", "artefacts that are not hidden"),
        ("artefacts: [submission.csv]", "artefacts: x.csv", "artefacts: .* tuple, not 'x.csv'"),
        ("data: [", "data: [3, ", "data.0: .* string, not '3'"),
        ("metric: accuracy", "metric: [", "is damaged"),
        ("reference: 0.790909", "reference: .nan", "the reference nan must be better"),
    ]
    for old, new, message in cases:
        shutil.copy(TASKS_DIR / "titanic" / "task.yaml", titanic_copy)
        path = titanic_copy / "task.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        with user_error(message) as caught:
            load_task("titanic")
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------ scores


def test_parse_grade():
    cases = [
        ('noise\n{"accuracy": 0.1}\n{"accuracy": 0.5}\nmore noise\n', 0.5, ""),
        ('{"Accuracy": 1}', None, "no finite number called accuracy"),
        ('{"accuracy": 0.9, "error": "no good"}', None, "no good"),
        ('{"accuracy": NaN}', None, "no finite number"),
        ('{"accuracy": ' + "9" * 400 + "}", None, "no finite number"),  # no float can hold it
        ('{"accuracy": 1e308}', None, "no finite number"),
        ('{"accuracy": true}', None, "no finite number"),
        ('{"error": "' + "x" * 10_000 + '"}', None, "xxx"),
        ('[{"accuracy": 1}]', None, "no result"),
        ("", None, "no result"),
        ('{"a":' * 100_000, None, "no result"),
    ]
    for stdout, score, words in cases:
        value, message = parse_grade(last_json_object(stdout), load_task("titanic"))
        assert value == score
        assert words in message
        assert len(message) <= 500
    for text in ("null", "-Infinity", '"0.1"', "[1]"):
        assert finite_number(last_json_object('{"stderr": ' + text + "}"), "stderr") is None
    assert finite_number({"stderr": 0.02}, "stderr") == 0.02


def test_improvement_knows_direction_and_unit():
    assert improvement(0.8, (0.6, True, 0.9)) == pytest.approx(2 / 3)
    assert improvement(8.0, (10.0, False, 6.0)) == pytest.approx(0.5)
    assert improvement(12.0, (10.0, False, 6.0)) == pytest.approx(-0.5)
    assert improvement(8.0, (10.0, False, None)) == pytest.approx(0.2)
    assert improvement(3.0, (0.0, True, None)) == 3.0


# ----------------------------------------------------------------------------------------- titanic


def best_rule():
    """The majority of the training persons of the same class, sex and age."""

    def kind(row):
        return row["class"], row["sex"], row["age"]

    votes = defaultdict(int)
    for row in read_csv(TASKS_DIR / "titanic" / "train.csv"):
        votes[kind(row)] += 1 if row["survived"] == "1" else -1
    return lambda row: int(votes.get(kind(row), 1) > 0)


def test_titanic_stored_scores_are_what_the_grader_says(tmp_path):
    task = load_task("titanic")
    by_hand = {  # rows, nobody survives, the best rule
        "validation": (550, task.baseline, task.reference),
        "selection": (275, 0.676364, 0.792727),
        "test": (275, 0.676364, 0.789091),
    }

    def graded(rule, split):
        return grade(task, tmp_path, submission("titanic", rule), split)

    for split, (rows, nobody, best) in by_hand.items():
        died = graded(lambda row: 0, split)
        assert died["accuracy"] == nobody
        assert died["stderr"] == pytest.approx(math.sqrt(nobody * (1 - nobody) / rows))
        assert graded(best_rule(), split)["accuracy"] == best


# -------------------------------------------------------------------------------- diabetes, digits

TARGETS = {"titanic": "survived", "diabetes": "progression", "digits": "label"}


@pytest.mark.parametrize("name", ["titanic", "diabetes", "digits"])
def test_data_is_what_make_data_writes(tmp_path, name):
    """So the parts are stratified, and the committed answers are those of the public files."""
    pytest.importorskip("sklearn")
    make_data.main(name, tmp_path)
    for file in ("train.csv", "test.csv", "answers.csv"):
        assert (tmp_path / file).read_bytes() == (TASKS_DIR / name / file).read_bytes()


@pytest.mark.parametrize("name", TARGETS)
def test_public_files_hold_no_answers(name):
    task = load_task(name)
    assert set(task.public) == {"data/train.csv", "data/test.csv"}
    train, test = (read_csv(task.public[f"data/{part}.csv"]) for part in ("train", "test"))
    answers = read_csv(task.hidden["answers.csv"])
    assert set(train[0]) - set(test[0]) == {TARGETS[name]}
    assert [row["id"] for row in test] == [row["id"] for row in answers]
    assert not {row["id"] for row in train} & {row["id"] for row in test}
    assert {row["part"] for row in answers} == set(task.splits)


def submission(name, value):
    """A submission from a function of a row of test.csv."""
    lines = [f"id,{TARGETS[name]}"]
    for row in read_csv(TASKS_DIR / name / "test.csv"):
        lines.append(f"{row['id']},{value(row)}")
    return {"submission.csv": "\n".join([*lines, ""])}


@pytest.mark.parametrize("name, constant", [("diabetes", 152.153846), ("digits", 4)])
def test_the_baseline_is_what_a_constant_scores(tmp_path, name, constant):
    task = load_task(name)
    for split in task.splits:
        graded = grade(task, tmp_path, submission(name, lambda _: constant), split)
        assert graded[task.metric] == pytest.approx(task.baseline, abs=3e-3)
        if split == "validation":
            assert graded[task.metric] == task.baseline


def test_the_bootstrap_gives_the_standard_error_of_r2():
    """Against the spread of r2 over new samples; the same submission has the same error again."""
    rng = random.Random(0)

    def sample():
        truth = [rng.gauss(0, 1) for _ in range(200)]
        return truth, [value + rng.gauss(0, 0.7) for value in truth]

    spread = statistics.stdev(grade_csv.r2(*sample()) for _ in range(300))
    one = sample()
    error = grade_csv.standard_error(grade_csv.r2, *one)
    assert error == grade_csv.standard_error(grade_csv.r2, *one)
    assert error == pytest.approx(spread, rel=0.35)
    assert grade_csv.standard_error(grade_csv.r2, [1], [1]) is None
    assert grade_csv.standard_error(grade_csv.r2, [1, 2], [1, 2]) == 0


@pytest.mark.parametrize(
    "value, message",
    [
        ("nan", "must be a finite number"),
        ("", "must be a finite number"),
        ("1,5", "needs 2 values"),
        ("9" * 400, "must be a finite number"),
    ],
)
def test_diabetes_refuses_what_is_not_a_number(tmp_path, value, message):
    predicted = iter([150, value])
    files = submission("diabetes", lambda _: next(predicted, 150))
    said = grade(load_task("diabetes"), tmp_path, files)
    assert message in said["error"]
    assert len(said["error"]) < 200


# ----------------------------------------------------------------------------------- battleOfSexes


def play(folder, strategy, split="validation"):
    return grade(load_task("battleOfSexes"), folder, {"strategy.py": strategy}, split)


BATTLES = [
    ("def row_strategy(history): return 0", 1.44),
    slow("import random\ndef row_strategy(history): return random.randint(0, 1)", 0.725),
    # opens with 1, then 0: meets 0 with probability 0.2 in nine rounds
    ("def row_strategy(history): return 0 if history else 1", (1 + 9 * 0.2 * 2) / 10),
    # needs a true history: plays 0 as long as length, tuples and the partner's moves are right
    (
        "def row_strategy(history):\n"
        "    ok = all(type(pair) is tuple and pair[0] == 0 and pair[1] in (0, 1) for pair "
        "in history)\n"
        "    ok = ok and len(history) < 10 and (not history or history[0] == (0, 1))\n"
        "    history.append('mine')\n"
        "    return 0 if ok else 1",
        1.44,
    ),
]


@pytest.mark.parametrize("strategy, exact", BATTLES)
def test_battle_scores(tmp_path, strategy, exact):
    said = play(tmp_path / "a", strategy)
    assert said["Score"] == pytest.approx(exact, abs=0.02)  # six standard errors
    assert not list((tmp_path / "a").iterdir())  # nothing was left to read
    assert 0.001 < said["stderr"] < 0.02 / 6


def test_battle_draws_anew(tmp_path):
    strategy = "def row_strategy(history): return 0"
    scores = {play(tmp_path, strategy, split)["Score"] for split in ("test", "test", "validation")}
    assert len(scores) > 1


# ----------------------------------------------------------------------------------- a small MLGym


def task_yaml(kind="CSVSubmissionTasks", scores="r2: 0.5", starters=(), datasets=(), more=""):
    return (
        "id: other\nname: A task\ndescription: |-\n  What to {do}.\n  {dataset_docs}\n"
        f"task_entrypoint: {kind}\ntraining_timeout: 100\nevaluation_paths: [evaluate.py]\n"
        f"baseline_scores:\n- {scores}\n"
        f"starter_code: {json.dumps(list(starters))}\n"
        f"dataset_configs: {json.dumps(list(datasets))}\n{more}\n"
    )


def dataset(path):
    return f"name: set\ndescription: Its columns.\ndata_path: {path}\nis_local: true\n"


@pytest.fixture
def mlgym(tmp_path):
    """A checkout: a game, CSV tasks, a generated split, folders as artefacts, missing data."""
    root = tmp_path / "MLGym"
    house = [f"data/regressionKaggleHousePrice/{name}" for name in ("baseline.py", "evaluate.py")]
    write(
        root,
        {
            "configs/tasks/battleOfSexes.yaml": task_yaml(
                "PythonSubmissionTasks",
                "Score: 0.5",
                [f"data/battleOfSexes/{name}.py" for name in ("target", "evaluate", "strategy")],
            ),
            "data/battleOfSexes/target.py": "pass",
            "data/battleOfSexes/evaluate.py": "pass",
            "data/battleOfSexes/strategy.py": "pass",
            "configs/tasks/titanic.yaml": task_yaml(
                "CSVSubmissionTasks",
                "Accuracy: 0.75",
                ["data/titanic/evaluate.py"],
                ["datasets/titanic.yaml"],
            ),
            "configs/datasets/titanic.yaml": dataset("data/titanic/data"),
            "data/titanic/evaluate.py": "print(1)",
            "data/titanic/data/train.csv": "a",
            "data/titanic/data/deep/test.csv": "b",
            "data/titanic/data/ground_truth.csv": "c",
            "configs/tasks/regressionKaggleHousePrice.yaml": task_yaml(
                starters=house,
                datasets=["datasets/kaggleHousePrice.yaml"],
                scores="{rmse: 30.5, r2: 0.88}",
            ),
            "configs/datasets/kaggleHousePrice.yaml": dataset(
                "data/regressionKaggleHousePrice/data"
            ),
            **{name: "pass" for name in house},
            "configs/tasks/rlMetaMaze.yaml": task_yaml(
                "ModelSubmissionTasks",
                "{Reward Mean: 15, Reward Std: 3}",
                ["data/rl/src", "data/rl/evaluate.py"],
                more="use_generic_conda: false\nrequirements_path: data/rl/requirements.txt",
            ),
            "data/rl/src/train.py": "pass",
            "data/rl/src/config.yaml": "a: 1",
            "data/rl/src/__pycache__/train.pyc": "x",
            "data/rl/requirements.txt": "gymnax",
            "data/rl/evaluate.py": "import json, sys\n"
            "print(json.dumps({'Reward Mean': len(open(sys.argv[2]).read())}))",
            "configs/tasks/3SATTime.yaml": task_yaml(
                "PythonSubmissionTasks", "Time: 16", datasets=["datasets/3SAT.yaml"]
            ),
            "configs/datasets/3SAT.yaml": dataset("data/3SATTime/data"),
            "configs/tasks/regressionHousePrice.yaml": task_yaml(
                datasets=["datasets/nowhere.yaml"]
            ),
            "configs/tasks/mine.yaml": task_yaml(
                scores="mae: 3",
                starters=["data/mine/key.csv"],
                more="metric: mae\nhigher_is_better: false\nhidden: [key.csv]",
            ),
            "data/mine/key.csv": "k",
            "configs/tasks/other.yaml": task_yaml(),
        },
    )
    return root


def test_mlgym_game(mlgym):
    task = load_task("battleOfSexes", mlgym)
    assert (task.source, task.baseline, task.splits) == ("mlgym", 0.5, ("test",))
    assert (task.step_timeout, task.grade_timeout) == (100, 300)
    assert set(task.public) == {"strategy.py"}
    assert set(task.hidden) == {"target.py", "evaluate.py"}
    assert "copies of the history" in task.prompt
    files = task.grading_files({"strategy.py": b"mine"})
    assert files["strategy_agent.py"] == b"mine"
    assert files["strategy.py"] == TASKS_DIR / "proxy.py"


def test_mlgym_answers_are_hidden_and_folders_kept(mlgym):
    task = load_task("titanic", mlgym)
    assert set(task.public) == {"data/train.csv", "data/deep/test.csv"}
    assert set(task.hidden) == {"data/ground_truth.csv", "evaluate.py"}
    assert task.baseline == 0.75
    assert "SET\nIts columns." in task.prompt  # the key of the baseline is Accuracy


def test_mlgym_split_that_is_not_there_yet(mlgym):
    with user_error("data is missing; task .* needs it: run `python _generate_split.py` in"):
        load_task("regressionKaggleHousePrice", mlgym)
    for name in ("train", "answer"):
        write(mlgym, {f"data/regressionKaggleHousePrice/data/{name}.csv": "x"})
    task = load_task("regressionKaggleHousePrice", mlgym)
    assert set(task.public) == {"baseline.py", "data/train.csv"}
    assert task.metric == "r2"
    assert "data/answer.csv" in task.hidden


def test_mlgym_folders_as_artefacts(mlgym, tmp_path):
    task = load_task("rlMetaMaze", mlgym)
    assert task.requirements == mlgym / "data/rl/requirements.txt"
    assert task.metric == "Reward Mean"
    assert set(task.public) == {"src/train.py", "src/config.yaml"}
    for path in ("checkpoints/a-0.pkl", "src/deep/net.py", "my.yaml"):
        assert task.is_artefact(path)
    for path in ("evaluate.py", "data/my.yaml", "src"):
        assert not task.is_artefact(path)
    bare = {"checkpoints/a.pkl": b""}
    files = bare | {"src/config.yaml": b"four"}
    assert "src/train.py" not in task.grading_files(files)  # the agent has removed it
    assert score_of(task, tmp_path / "a", files) == (4, "")
    assert score_of(task, tmp_path / "b", files | {"config.yaml": b"seven.."}) == (7, "")
    score, message = score_of(task, tmp_path / "c", bare)
    assert score is None
    assert message == "there is no configuration (*.yaml)"


def test_mlgym_task_of_the_user(mlgym):
    task = load_task("mine", mlgym)
    assert (task.metric, task.higher_is_better, task.baseline) == ("mae", False, 3)
    assert set(task.hidden) == {"key.csv"}


@pytest.mark.parametrize(
    "name, message",
    [
        ("3SATTime", "data/3SATTime/data is missing; task 3SATTime needs it: MLGym does not"),
        (
            "regressionHousePrice",
            "never published.*regressionKaggleHousePrice is the one that works",
        ),
        ("other", "metric and higher_is_better"),
        ("battelOfSexes", "did you mean battleOfSexes"),
    ],
)
def test_mlgym_says_what_is_wrong(mlgym, name, message):
    with user_error(message) as caught:
        load_task(name, mlgym)
    assert "\n" not in str(caught.value)


def test_roots_come_first_and_from_the_environment(mlgym, monkeypatch, tmp_path):
    assert load_task("titanic").source == "built-in"
    monkeypatch.setenv("MLGYM_ROOT", str(mlgym))
    assert load_task("titanic").source == "mlgym"
    assert load_task("digits").source == "built-in"
    assert load_task("titanic", mlgym_root="").source == "built-in"
    with user_error("not a checkout of MLGym"):
        load_task("titanic", mlgym_root=tmp_path)


# -------------------------------------------------------------------------------- a small MLE-Dojo


@pytest.fixture
def dojo(tmp_path):
    pytest.importorskip("pandas")
    return make_competition(tmp_path)


METRIC_FILE = "../../mledojo/competitions/mine/utils/metric.py"


def test_dojo_loads(dojo):
    task = load_task("mine", mledojo_root=dojo)
    assert (task.source, task.metric, task.higher_is_better) == ("mledojo", "score", False)
    assert "data/images/1.png" in task.public
    assert not any("private" in path for path in task.public)
    assert "private/test_answer.csv" in task.hidden
    assert task.splits == ("validation", "selection", "test")
    assert task.reference == pytest.approx((2.5 + 4) / 2)
    assert "Predict y." in task.prompt


@pytest.mark.slow
def test_dojo_parts(dojo, tmp_path):
    """Each part is graded on its own ids only: one wrong value shows in exactly one of them."""
    task = load_task("mine", mledojo_root=dojo)
    files = {"submission.csv": answers(lambda i: i + (i == 3))}
    scores = [score_of(task, tmp_path / "a", files, split)[0] for split in task.splits]
    assert sorted(score > 0 for score in scores) == [False, False, True]


def test_dojo_position_and_standard_error(dojo, tmp_path):
    """Answers of 0 for 0 to 199 have a standard error of 57.7 / sqrt(rows of the part)."""
    task = load_task("mine", mledojo_root=dojo)

    def graded(value, split):
        files = {"submission.csv": answers(value)}
        return json.loads(run_grader(task, tmp_path / "a", files, split))

    position = (2 / 4 + 2 / 2) / 2  # third of four, first of two
    assert graded(lambda i: i + 3, "test") == {"score": 3, "stderr": 0, "position": position}
    for split, rows in zip(task.splits, (ROWS / 2, ROWS / 4, ROWS / 4)):
        error = graded(lambda i: 0, split)["stderr"]
        assert error == pytest.approx(ROWS / math.sqrt(12 * rows), rel=0.5)


def test_dojo_sample_that_cannot_be_graded(dojo):
    write(dojo / "mine/data", {"public/sample_submission.csv": "id,y\n1,2\n"})
    task = load_task("mine", mledojo_root=dojo)
    assert task.baseline == 5
    assert task.reference == 3.25  # the last place
    for board in ("private", "public"):
        (dojo / f"mine/data/private/{board}_leaderboard.csv").unlink()
    with user_error("sample submission of mine cannot be graded.*200 rows"):
        load_task("mine", mledojo_root=dojo)


@pytest.mark.parametrize(
    "path, message",
    [
        ("data/prepared/mine/data/private", "private is missing; let MLE-Dojo prepare mine again"),
        ("data/prepared/mine/data/private/test_answer.csv", "private/test_answer.csv is missing"),
        ("mledojo", "set .MLEDOJO_REPO to a checkout"),
        ("data/prepared/mine", "no <name>/data/public"),
    ],
)
def test_dojo_says_what_is_missing(dojo, tmp_path, path, message):
    (tmp_path / "MLE-Dojo" / path).rename(tmp_path / "away")
    with user_error(message):
        load_task("mine", mledojo_root=dojo)


def test_what_a_metric_says_of_the_answers_is_masked(dojo, tmp_path):
    says = f"if y_pred['y'].any(): raise InvalidSubmissionError({SECRET!r})"
    change(dojo / METRIC_FILE, "return float(", f"{says}\n        return float(")
    task = load_task("mine", mledojo_root=dojo)
    score, message = score_of(task, tmp_path / "a", {"submission.csv": answers(lambda i: i)})
    assert score is None
    assert message == "the metric cannot be computed (InvalidSubmissionError)"


def test_a_metric_that_returns_no_number_is_a_reason(dojo, tmp_path):
    change(dojo / METRIC_FILE, "return float(", "return None if y_pred['y'].any() else float(")
    task = load_task("mine", mledojo_root=dojo)
    score, message = score_of(task, tmp_path / "a", {"submission.csv": answers(lambda i: i)})
    assert message == "the metric cannot be computed (TypeError)"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_answers_among_the_public_files_are_refused(mlgym, dojo, link):
    link(mlgym / "data/titanic/data/ground_truth.csv", mlgym / "data/titanic/data/notes.csv")
    with user_error("ground_truth.csv is hidden, so it cannot be a public file, too"):
        load_task("titanic", mlgym)
    link(dojo / "mine/data/private/test_answer.csv", dojo / "mine/data/public/notes.csv")
    with user_error("test_answer.csv is hidden, so it cannot be a public file, too"):
        load_task("mine", mledojo_root=dojo)


# ---------------------------------------------------------------------------------- real checkouts


@real_mlgym
def test_real_mlgym_every_task():
    refused = {}
    for name in mlgym_names(Path(MLGYM)):
        try:
            task = load_task(name, MLGYM)
        except UserError as error:
            refused[name] = str(error)
            continue
        assert "evaluate.py" in task.hidden
        for word in ("answer", "ground_truth", "target.py"):
            assert word not in " ".join(task.public)
    assert len(refused) <= 7
    for name, reason in refused.items():
        assert "is missing" in reason or "never published" in reason, name


@real_mlgym
def test_real_mlgym_titanic(backend):
    """In a sandbox: MLGym's graders hold paths that only exist there."""
    task = load_task("titanic", MLGYM)
    rows = read_csv(task.public["data/test.csv"])
    women = [f"{row['PassengerId']},{int(row['Sex'] == 'female')}" for row in rows]
    twice = [f"{rows[0]['PassengerId']},0"] * len(rows)  # worth 1.0 in MLGym

    def graded(lines):
        files = {"submission.csv": "\n".join(["PassengerId,Survived", *lines]).encode()}
        return grading.grade(task, files, "test", Env(task, backend).make_sandbox)

    assert graded(women).value == 1.0
    assert graded(twice).message == "a PassengerId is there twice"


# ------------------------------------------------------------------------------------------ sanity


def trivial(tmp_path, train, test):
    write(tmp_path, {"train.csv": train, "test.csv": test})
    return dict(csv_rules(tmp_path / "train.csv", tmp_path / "test.csv"))


def test_trivial_rules_of_classes_and_numbers(tmp_path):
    colour = ("blue", "red", "red")
    lines = ["id,name,colour,x,y"]
    lines += [f"{i},n{i},{colour[i % 3]},{i % 30},{int(i % 3 > 0)}" for i in range(99)]
    test = "id,name,colour,x\n500,n,blue,1\n501,n,green,\n"  # green: never seen
    assert trivial(tmp_path, "\n".join(lines), test) == {
        "always 1": "id,y\n500,1\n501,1\n",
        "always 0": "id,y\n500,0\n501,0\n",
        "by colour alone": "id,y\n500,0\n501,1\n",
    }
    lines = ["id,x,y"] + [f"{i},{i},{i * i}" for i in range(1, 101)]
    rules = trivial(tmp_path, "\n".join(lines), "id,x\n500,1\n501,100\n")
    assert set(rules) == {"always 3383.5", "always 2550.5", "by x alone"}
    _, *lines = rules["by x alone"].splitlines()
    low, high = (line.split(",")[1] for line in lines)
    assert float(low) < 300
    assert float(high) > 8000
    assert trivial(tmp_path, "id,a,b\n1,2,3\n", "id\n1\n") == {}


def test_degenerate_is_what_was_found_or_is_known(mlgym):
    task = load_task("titanic")
    assert degenerate(task) is None
    stored = sanity_file(task)
    write(stored.parent, {stored.name: json.dumps({"degenerate": "the rule 'a' is at the top"})})
    assert degenerate(task) == "the rule 'a' is at the top"
    assert degenerate(replace(task, reference=2.0)) is None  # another task: not checked yet
    assert "always 0" in degenerate(load_task("battleOfSexes"))
    assert "women survive" in degenerate(load_task("titanic", mlgym))


# ---------------------------------------------------------------------------------------- gradings

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
    "another name": ("print('{\"rmse\": 1}'); sys.exit()", "no finite number called distance"),
    "exit code 3": ("print(json.dumps({'distance': 4})); sys.exit(3)", "exit code 3"),
    "error and exit code 1": ("print(json.dumps({'error': 'x'})); sys.exit(1)", '{"error": "x"}'),
}


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
    make_sandbox = partial(open_sandbox, task, LOCAL_BOX)
    return grading.grade(task, {"answer.txt": text.encode()}, split, make_sandbox)


# ------------------------------------------------------------------ the grader is broken


def check_before_a_run(task):
    check_grader(task, partial(open_sandbox, task, LOCAL_BOX))


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
    assert len(sentence) < 1500


def test_a_grader_that_is_broken_on_the_test_part_alone_is_found(make_task):
    task = make_task("if sys.argv[2] == 'test': raise KeyError('test')")
    with user_error("on the test part: .*KeyError: 'test'"):
        check_before_a_run(task)
    check_before_a_run(make_task())
    check_before_a_run(make_task("1 / 0", trivial={}))  # nothing to check it with


def test_a_grader_of_a_game_that_raises_is_not_taken_for_a_refused_move(tmp_path):
    """Its errors reach the agent as {"error": ...}, through the proxy of the strategy."""
    task = load_task("battleOfSexes")
    grader = tmp_path / "evaluate.py"
    grader.write_bytes(task.hidden["evaluate.py"].read_bytes())
    change(grader, "stdev(points)", "stdev(pointz)")
    with user_error("'always 0' no result .*name 'pointz' is not defined"):
        check_before_a_run(replace(task, hidden=task.hidden | {"evaluate.py": grader}))


# ------------------------------------------------------------------ the limit is CPU time


BUSY = "import subprocess; subprocess.run([sys.executable, '-c', 'while True: pass'])"


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_the_limit_of_a_grading_is_the_cpu_time_of_its_processes(make_task, backend, monkeypatch):
    monkeypatch.setattr(grading, "WALL_FACTOR", 1000)
    task = make_task(BUSY, grade_timeout=1.0)
    make_sandbox = partial(open_sandbox, task, SandboxOptions(backend))
    score = grading.grade(task, {"answer.txt": b"41"}, "test", make_sandbox)
    assert "longer than 1 seconds of CPU time" in score.message


def test_a_grading_that_waits_has_its_score(make_task):
    """As one does on a machine with too much work."""
    task = make_task("import time; time.sleep(0.7)", grade_timeout=0.5)
    assert graded(task, "41").value == 1


def test_a_game_with_a_slow_strategy_is_stopped():
    task = replace(load_task("battleOfSexes"), grade_timeout=1.0)
    files = {"strategy.py": b"def row_strategy(history):\n    while True: pass"}
    score = grading.grade(task, files, "test", partial(open_sandbox, task, LOCAL_BOX))
    assert "longer than 1 seconds of CPU time" in score.message


# ------------------------------------------------------------------ the proxy of a strategy


def test_the_proxy_of_a_strategy_refuses(tmp_path):
    task = load_task("battleOfSexes")
    few = task.hidden["evaluate.py"].read_text().replace("GAMES = 8000", "GAMES = 50")
    write(tmp_path, {"evaluate.py": few})
    task = replace(task, hidden=task.hidden | {"evaluate.py": tmp_path / "evaluate.py"})
    cases = [
        ("def row_strategy(history): return 2", "returned '2', not 0 or 1"),
        ("def row_strategy(history): return None", "returned 'None'"),
        ("def row_strategy(history): raise ValueError('y' * 10000)", "ValueError: yyy"),
        (b"\xff\xfe", "not a text file"),
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
        printed = run_grader(task, tmp_path / str(number), {"strategy.py": source}, "test")
        value, said = parse_grade(last_json_object(printed), task)
        assert value is None
        assert message in said
        assert len(said) <= 300


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


def test_a_negative_standard_error_is_none(make_task):
    score = graded(make_task('print(\'{"distance": 1, "stderr": -1}\'); sys.exit()'), "41")
    assert (score.value, score.stderr) == (1, None)


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
    main = lambda: tasks.main(*flags, sandbox=LOCAL_BOX)  # noqa: E731
    return run_here(main, monkeypatch=monkeypatch, capsys=capsys)


def test_the_task_of_the_documentation_is_checked(folder, capsys, monkeypatch):
    code, out, _ = check(capsys, monkeypatch, "median")
    assert code == 0
    assert "the first number                      2.0000         0.80" in out
    assert out.endswith("as far as these rules tell\n")
    assert len(list((folder / "../../cache/flatlab/sanity").glob("*.json"))) == 1


def test_a_broken_grader_ends_the_check(folder, capsys, monkeypatch):
    change(folder / "evaluate.py", "import sys", "import sys, numbers_of_mine")
    code, _, err = check(capsys, monkeypatch, "median")
    assert code == 2
    assert err.count("\n") == 1
    assert "The grader of task median is broken" in err
    assert "No module named 'numbers_of_" in err
    with user_error("The grader of task median is broken"):
        env.open_tasks(TaskOptions(("median",)), LOCAL_BOX, True)


def test_a_rule_at_the_top_is_named(folder, capsys, monkeypatch):
    change(folder / "task.yaml", "reference: 0 ", "reference: 2 ")
    _, out, _ = check(capsys, monkeypatch, "median")
    assert out.endswith("\ndegenerate: the rule 'the first number' scores 2\n")


def test_a_damaged_task_is_listed_and_is_one_sentence(folder, capsys, monkeypatch):
    (folder / "task.yaml").write_text("metric: [")
    code, out, _ = check(capsys, monkeypatch)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["battleOfSexes", "median"]
    code, _, err = check(capsys, monkeypatch, "median")
    assert code == 2
    assert err.count("\n") == 1
    assert "task.yaml is damaged" in err


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


# ------------------------------------------------------------------ rewards in other places


def test_the_reward_of_the_bridges_is_that_of_training():
    assert clipped_improvement(None) == grpo.NO_SUBMISSION
    for value in (-3.47, -0.5, 0.0, 0.7, 4.0):
        assert clipped_improvement(value) == grpo.continuous(value, [])
