"""Loading tasks, reading grades, and the graders of the built-in tasks."""

import csv
import importlib.util
import json
import math
import random
import shutil
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import tasks
from flatlab.task.builtin import builtin_names
from flatlab.task.definition import improvement, last_json_object, parse_grade, standard_error
from flatlab.task.task_files import TASKS_DIR
from helpers import python, run_grader, slow, user_error
from tasks import load_task
from tools import make_data


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
        assert task.splits == ("validation", "selection", "test")
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
        ("higher_is_better: true", "higher_is_better: up", "higher_is_better: .*boolean, not 'up'"),
        ("artefacts: [submission.csv]", "artefacts: []", "artefacts: .*at least 1 item"),
        ("artefacts: [submission.csv]", "artefacts: [data/test.csv]", "is an artefact, so"),
        ("artefacts: [submission.csv]", "artefacts: [../x]", "does not lie in the workspace"),
        ("metric: accuracy", "metric: [", "is damaged"),
        ("reference: 0.790909", "reference: .nan", "reference: .*finite number"),
    ]
    for old, new, message in cases:
        shutil.copy(TASKS_DIR / "titanic" / "task.yaml", titanic_copy)
        path = titanic_copy / "task.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        with user_error(message) as caught:
            load_task("titanic")
        assert "\n" not in str(caught.value)


def test_the_smallest_task_yaml(titanic_copy):
    (titanic_copy / "task.yaml").write_text(
        "description: Do it.\nmetric: accuracy\nhigher_is_better: true\nbaseline: 0\n"
        "artefacts: [a.csv]\ngrader: ../grade_csv.py\n"
    )
    task = load_task("titanic")
    assert (task.baseline, task.reference, task.splits) == (0.0, None, ("validation", "test"))
    assert (task.step_timeout, task.grade_timeout) == (60.0, 60.0)


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
    for text, stderr in (("0.02", 0.02), ("0", 0.0), ("1e-3", 0.001)):
        assert standard_error(last_json_object('{"stderr": ' + text + "}")) == stderr
    # The last one is an integer that no float can hold; it once ended the whole run.
    for text in ("null", "true", "-1", "NaN", "Infinity", "-Infinity", '"0.1"', "[1]", "9" * 400):
        assert standard_error(last_json_object('{"stderr": ' + text + "}")) is None
    assert standard_error({}) is None


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


def test_titanic_without_a_submission(tmp_path):
    assert "submission.csv cannot be read" in grade(load_task("titanic"), tmp_path, {})["error"]


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diabetes", "digits"])
def test_the_reference_is_what_the_named_model_scores(tmp_path, name):
    import pandas
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    ridge = make_pipeline(StandardScaler(), RidgeCV([1, 3, 10, 30, 100]))
    model = SVC(C=10, gamma=0.001) if name == "digits" else ridge
    train = pandas.read_csv(TASKS_DIR / name / "train.csv")
    test = pandas.read_csv(TASKS_DIR / name / "test.csv")
    columns = test.columns[1:]
    model.fit(train[columns], train[TARGETS[name]])
    predicted = iter(model.predict(test[columns]))
    task = load_task(name)
    graded = grade(task, tmp_path, submission(name, lambda _: next(predicted)))
    assert graded[task.metric] == pytest.approx(task.reference, abs=0.005)


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


def test_digits_names_the_labels(tmp_path):
    said = grade(load_task("digits"), tmp_path, submission("digits", lambda _: "4.0"))
    assert "label must be 0, 1, 2, 3, 4, 5, 6, 7, 8 or 9, but id" in said["error"]


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
    said = play(tmp_path, strategy)
    assert said["Score"] == pytest.approx(exact, abs=0.02)  # six standard errors
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
    """What its moves may be; what strategies may do is tested in test_external_tasks.py."""
    graded = play(tmp_path, strategy)
    assert set(graded) == {"error"}
    assert message in graded["error"]
    assert len(graded["error"]) <= 300


def test_battle_grader_does_not_delete_the_original():
    folder = TASKS_DIR / "battleOfSexes"
    assert python("evaluate.py", "--split", "test", cwd=folder).returncode
    assert (folder / "evaluate.py").exists()


def test_battle_simulate_agrees_with_the_grader(tmp_path):
    shutil.copy(load_task("battleOfSexes").public["simulate.py"], tmp_path)
    (tmp_path / "strategy.py").write_text("def row_strategy(history): return 0")
    said = python("simulate.py", cwd=tmp_path)
    assert float(said.stdout.split()[1]) == pytest.approx(1.44, abs=0.06)
