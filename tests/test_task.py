"""Tasks: built-in ones and those of MLGym and MLE-Dojo, their graders, and the sanity check.

Other projects are small checkouts made here, or a real one: MLGYM_ROOT=<checkout of MLGym>.
"""

import csv
import importlib.util
import json
import math
import os
import random
import shutil
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import env
import tasks
from backends import ISOLATED
from competition import ROWS, answers, make_competition, write
from flatlab.errors import UserError
from flatlab.options import SandboxOptions
from flatlab.task import grading
from flatlab.task.builtin import builtin_names
from flatlab.task.definition import (
    TASKS_DIR,
    finite_number,
    improvement,
    last_json_object,
    parse_grade,
)
from flatlab.task.mlgym import mlgym_names
from flatlab.task.sanity import csv_rules, degenerate, sanity_file
from helpers import run_grader, slow, user_error
from tasks import load_task
from tools import make_data

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
    for name in builtin_names():
        task = load_task(name)
        assert (task.name, task.source) == (name, "built-in")
        parts = ("exact",) if task.exact else ("validation", "selection", "test")
        assert task.splits == parts
        assert not set(task.public.values()) & set(task.hidden.values())


def test_unknown_task_lists_the_nearest_names():
    with user_error("did you mean titanic"):
        load_task("Titanc")
    for name in ("", "../tasks/titanic", "no such thing"):
        with user_error("battleOfSexes"):
            load_task(name)


@pytest.fixture
def titanic_copy(tmp_path, monkeypatch):
    shutil.copytree(TASKS_DIR / "titanic", tmp_path / "titanic")
    shutil.copy(TASKS_DIR / "grade_csv.py", tmp_path)
    monkeypatch.setattr(tasks, "TASKS_DIR", tmp_path)
    return tmp_path / "titanic"


def test_a_missing_file_is_named(titanic_copy):
    cases = ["train.csv", "answers.csv", "../grade_csv.py"]
    for name in cases:
        shutil.copytree(TASKS_DIR / "titanic", titanic_copy, dirs_exist_ok=True)
        shutil.copy(TASKS_DIR / "grade_csv.py", titanic_copy.parent)
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
        ("artefacts: [submission.csv]", "artefacts: []", "needs artefacts and splits"),
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
        ('{"accuracy": 0.5}\n', 0.5, ""),
        ('noise\n{"accuracy": 0.1}\n{"accuracy": 0.5}\nmore noise\n', 0.5, ""),
        ('{"Accuracy": 1}', None, "no finite number called accuracy"),
        ('{"error": "no good"}', None, "no good"),
        ('{"accuracy": 0.9, "error": "no good"}', None, "no good"),
        ('{"accuracy": NaN}', None, "no finite number"),
        ('{"accuracy": ' + "9" * 400 + "}", None, "no finite number"),
        ('{"accuracy": 1e308}', None, "no finite number"),
        ('{"accuracy": true}', None, "no finite number"),
        ('{"rmse": 1}', None, "no finite number"),
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


def test_a_standard_error_is_a_finite_number_or_absent():
    # The last one is an integer that no float can hold; it once ended the whole run.
    for text in ("null", "true", "NaN", "Infinity", "-Infinity", '"0.1"', "[1]", "9" * 400):
        assert finite_number(last_json_object('{"stderr": ' + text + "}"), "stderr") is None
    assert finite_number({"stderr": 0.02}, "stderr") == 0.02
    assert finite_number({}, "stderr") is None


def test_improvement_knows_direction_and_unit():
    assert improvement(0.8, (0.6, True, 0.9)) == pytest.approx(2 / 3)
    assert improvement(8.0, (10.0, False, 6.0)) == pytest.approx(0.5)
    assert improvement(12.0, (10.0, False, 6.0)) == pytest.approx(-0.5)
    assert improvement(8.0, (10.0, False, None)) == pytest.approx(0.2)
    assert improvement(3.0, (0.0, True, None)) == 3.0
    task = replace(load_task("titanic"), baseline=-2.0, reference=-1.0)
    assert improvement(-1.5, task) == pytest.approx(0.5)


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
        sex = graded(lambda row: int(row["sex"] == "female"), split)
        assert sex["accuracy"] == pytest.approx(0.776, abs=0.01)
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

    grader = grade_csv()
    spread = statistics.stdev(grader.r2(*sample()) for _ in range(300))
    one = sample()
    error = grader.standard_error(grader.r2, *one)
    assert error == grader.standard_error(grader.r2, *one)
    assert error == pytest.approx(spread, rel=0.35)
    assert grader.standard_error(grader.r2, [1], [1]) is None
    assert grader.standard_error(grader.r2, [1, 2], [1, 2]) == 0


def grade_csv():
    """configs/tasks/grade_csv.py as a module."""
    spec = importlib.util.spec_from_file_location("grade_csv", TASKS_DIR / "grade_csv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "value, message",
    [
        ("nan", "must be a finite number"),
        ("", "must be a number"),
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
    scores = {
        play(tmp_path, "def row_strategy(history): return 0", split)["Score"]
        for split in ("validation", "selection", "test", "test")
    }
    assert len(scores) > 1
    stored = load_task("battleOfSexes")
    assert stored.baseline == 0.725
    assert math.isclose(stored.reference, 1.44)


@pytest.mark.parametrize(
    "strategy, message",
    [
        ("def row_strategy(history): return 2", "returned '2', not 0 or 1"),
        ("def row_strategy(history): return None", "returned 'None'"),
        ("def row_strategy(history): raise ValueError('y' * 10000)", "ValueError: yyy"),
        (b"\xff\xfe", "not a text file"),
    ],
)
def test_battle_refuses_and_says_why(tmp_path, strategy, message):
    """What its moves may be; what strategies may do is tested in test_grading.py."""
    graded = play(tmp_path, strategy)
    assert set(graded) == {"error"}
    assert message in graded["error"]
    assert len(graded["error"]) <= 300


def content(root):
    """All files under a folder."""
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------- a small MLGym

GAME = """
import json, random
from strategy import row_strategy
from target import partner

def play():
    history, points = [], 0
    for _ in range(10):
        mine, other = row_strategy(history), partner(history)
        if mine not in (0, 1):
            raise ValueError
        points += mine == other
        history.append((mine, other))
    return points
print(json.dumps({"Score": sum(play() for _ in range(300)) / 3000}))
"""
PARTNER = "import random\ndef partner(history):\n    return random.randint(0, 1)\n"


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
            "data/battleOfSexes/target.py": PARTNER,
            "data/battleOfSexes/evaluate.py": GAME,
            "data/battleOfSexes/strategy.py": "def row_strategy(history): return 0\n",
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
            "data/regressionKaggleHousePrice/_helpers/_generate_split.py": "pass",
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
    assert (task.source, task.metric, task.higher_is_better) == ("mlgym", "Score", True)
    assert (task.baseline, task.splits, task.step_timeout) == (0.5, ("test",), 100)
    assert (set(task.public), task.artefacts) == ({"strategy.py"}, ("strategy.py",))
    assert set(task.hidden) == {"target.py", "evaluate.py"}
    assert task.prompt.startswith("What to {do}.")
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
    with user_error(r"data is missing; `python _generate_split.py` in .*help"):
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


def test_dojo_loads(dojo):
    task = load_task("mine", mledojo_root=dojo)
    assert (task.source, task.metric, task.higher_is_better) == ("mledojo", "score", False)
    assert set(task.public) == {
        "data/description.txt",
        "data/sample_submission.csv",
        "data/images/1.png",
    }
    assert not any("private" in path for path in task.public)
    assert "private/test_answer.csv" in task.hidden
    assert task.splits == ("validation", "selection", "test")
    assert task.reference == pytest.approx((2.5 + 4) / 2)
    assert "Predict y." in task.prompt
    assert "Lower scores are better" in task.prompt


@pytest.mark.slow
def test_dojo_parts(dojo, tmp_path):
    """Each part is graded on its own ids only, and they make up the whole."""
    task = load_task("mine", mledojo_root=dojo)

    def scores(value):
        files = {"submission.csv": answers(value).encode()}
        return [score_of(task, tmp_path / "a", files, split)[0] for split in task.splits]

    zeros = scores(lambda i: 0)
    assert zeros[0] == task.baseline
    assert len(set(zeros)) == 3
    assert 70 < min(zeros) < max(zeros) < 130
    for wrong in (3, 4):  # one wrong value shows in exactly one of them
        one_wrong = scores(lambda i, wrong=wrong: i + (i == wrong))
        assert sorted(score > 0 for score in one_wrong) == [False, False, True]


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


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_answers_among_the_public_files_are_refused(mlgym, dojo, link):
    link(mlgym / "data/titanic/data/ground_truth.csv", mlgym / "data/titanic/data/notes.csv")
    with user_error("ground_truth.csv is hidden, so it cannot be a public file, too"):
        load_task("titanic", mlgym)
    link(dojo / "mine/data/private/test_answer.csv", dojo / "mine/data/public/notes.csv")
    with user_error("test_answer.csv is hidden, so it cannot be a public file, too"):
        load_task("mine", mledojo_root=dojo)


# ---------------------------------------------------------------------------------- real checkouts


@pytest.fixture(params=ISOLATED)
def in_a_sandbox(request):
    """Grades in a sandbox of one backend: MLGym's graders hold paths that only exist there."""

    def graded(task, artefacts):
        """(score, message)"""
        grading.grades.clear()  # what another backend has found
        score = grading.grade(task, artefacts, "test", env.Env(task, request.param).make_sandbox)
        return score.value, score.message

    return graded


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
@pytest.mark.parametrize(
    "name, strategy, exact, error",
    [
        ("battleOfSexes", None, 1.0227, 0.02),
        ("battleOfSexes", "0", 1.44, 0.02),
        ("prisonersDilemma", None, 2.3716, 0.03),
        ("prisonersDilemma", "1", 2.6251, 0.03),
        ("blotto", None, -0.248, 0.02),
        ("blotto", "[30] * 4 + [0] * 2", 0.25, 0.02),
        ("blotto", "[20] * 6", -0.005, 0.02),
    ],
)
def test_real_mlgym_games(in_a_sandbox, name, strategy, exact, error):
    task = load_task(name, MLGYM)
    source = f"def row_strategy(history): return {strategy}".encode()
    if strategy is None:
        source = task.public["strategy.py"].read_bytes()
    score, message = in_a_sandbox(task, {"strategy.py": source})
    assert message == ""
    assert score == pytest.approx(exact, abs=error)


@real_mlgym
def test_real_mlgym_titanic(in_a_sandbox):
    task = load_task("titanic", MLGYM)
    with open(task.public["data/test.csv"], newline="") as file:
        rows = list(csv.DictReader(file))
    lines = ["PassengerId,Survived"]
    twice = lines + [f"{rows[0]['PassengerId']},0"] * len(rows)  # worth 1.0 in MLGym
    lines += [f"{row['PassengerId']},{int(row['Sex'] == 'female')}" for row in rows]
    assert in_a_sandbox(task, {"submission.csv": "\n".join(lines).encode()}) == (1.0, "")
    assert "women" in degenerate(task)
    score, message = in_a_sandbox(task, {"submission.csv": "\n".join(twice).encode()})
    assert score is None
    assert message == "a PassengerId is there twice"


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


def test_command_names_the_rule_that_is_at_the_top(tmp_path, capsys):
    tasks.main("battleOfSexes", sandbox=SandboxOptions("local"))
    assert "degenerate: always 0" in capsys.readouterr().out
    assert len(list((tmp_path / "cache/flatlab/sanity").glob("*.json"))) == 1
