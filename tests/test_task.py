"""Tasks: built-in ones and those of MLGym and MLE-Dojo; graders, gradings and the sanity check.

Other projects are small checkouts made here, or a real one: MLGYM_ROOT=<checkout of MLGym>.
"""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grade_csv
import grade_mledojo
import numpy as np
import pytest

import env
import grpo
import tasks
from backends import EVERYWHERE, ISOLATED
from competition import ROWS, answers, make_competition, write
from env import Env
from flatlab import numbers
from flatlab.errors import UserError
from flatlab.options import SandboxOptions
from flatlab.task import grading
from flatlab.task.definition import TASKS_DIR, Task, last_json_object, parse_grade
from flatlab.task.machine import open_sandbox
from flatlab.task.mlgym import mlgym_names
from flatlab.task.sanity import check_grader, csv_rules, degenerate
from flatlab.task.value import improvement, score_at, score_text, validation_text, value_of
from flatlab.world.episode import step_record
from helpers import (
    LOCAL,
    PROJECT,
    do,
    python,
    run_csv_grader,
    run_grader,
    run_here,
    user_error,
)
from tasks import load_task
from tools import make_data

LOCAL_BOX = SandboxOptions(LOCAL)
MLGYM = os.environ.get("MLGYM_ROOT")  # before conftest.py hides it
SECRET = "the answer is 42"


@pytest.fixture(autouse=True)
def only_what_a_test_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(grading, "grades", {})


def grade(task, folder, artefacts, split="validation"):
    """The JSON that the grader prints."""
    return last_json_object(run_grader(task, folder, artefacts, split))


def score_of(task, folder, artefacts, split=None):
    """The score and the message of a grader."""
    return parse_grade(grade(task, folder, artefacts, split or task.splits[-1]), task)[:2]


# ----------------------------------------------------------------------------------------- loading


def test_unknown_task_lists_the_nearest_names():
    with user_error("did you mean titanic.*battleOfSexes"):
        load_task("Titanc")
    with user_error("Unknown task"):
        load_task("../tasks/titanic")


def test_a_task_may_come_from_a_python_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text("import tasks\nload_task = tasks.load_task\n")
    assert load_task("mine:titanic") == load_task("titanic")
    for name in ("no_such:titanic", "json:titanic", ":titanic", ".mine:titanic"):
        with user_error("is no Python module that loads tasks"):
            load_task(name)


@pytest.fixture
def titanic_copy(tmp_path, monkeypatch):
    shutil.copytree(TASKS_DIR / "titanic", tmp_path / "titanic")
    shutil.copy(TASKS_DIR / "grade_csv.py", tmp_path)
    monkeypatch.setattr(tasks, "TASKS_DIR", tmp_path)
    return tmp_path / "titanic"


def lists(task_yaml, **names):
    """Adds names of files to these keys of a task.yaml."""
    text = task_yaml.read_text()
    for key, more in names.items():
        text = re.sub(rf"^{key}: \[", f"{key}: [{more}, ", text, flags=re.MULTILINE)
    task_yaml.write_text(text)


@pytest.mark.parametrize(
    "names, make, said",
    [
        ({"data": "a/x.csv, b/x.csv"}, "", "a/x.csv and .*b/x.csv would both be data/x.csv"),
        ({"data": "a/raw, b/raw"}, "", "b/raw/1 would both be data/raw/1"),
        ({"hidden": "a/grade_csv.py"}, "", "both be grade_csv.py"),
        ({"data": "raw"}, "mkdir raw", "raw .task.yaml .* cannot be used: .* it is empty"),
        ({"data": "raw"}, "mkdir -p raw/empty; touch raw/x", "raw/empty .* it is empty"),
        ({"data": "raw"}, "mkdir raw; ln -s no raw/x", "raw/x .* cannot be used: .* No such file"),
        ({"data": "raw"}, "mkdir raw; ln -s .. raw/up", "raw/up .* leads back"),
        ({"data": "a/raw"}, "ln -s ../../b a/raw/l; ln -s ../a b/l", "a/raw/l/l .* leads back"),
        ({"data": "pipe"}, "mkfifo pipe", "pipe .* neither a file nor a folder"),
    ],
)
def test_what_cannot_arrive_whole_is_named(titanic_copy, names, make, said):
    for place in ("a", "b"):
        write(
            titanic_copy, {f"{place}/{name}": place for name in ("x.csv", "raw/1", "grade_csv.py")}
        )
    subprocess.run(["bash", "-c", make], cwd=titanic_copy, check=True)
    lists(titanic_copy / "task.yaml", **names)
    with user_error(said):
        load_task("titanic")


def test_linked_folders_and_all_but_bytecode_arrive(titanic_copy, tmp_path):
    write(tmp_path / "far", {"1.png": "x", "lib/a.py": "", "lib/__pycache__/a.cpython-311.pyc": ""})
    write(titanic_copy, {"raw/__pycache__/table.csv": "x"})
    (titanic_copy / "raw" / "images").symlink_to(tmp_path / "far")
    lists(titanic_copy / "task.yaml", data="raw")
    raw = {name for name in load_task("titanic").public if "raw" in name}
    names = {"__pycache__/table.csv", "images/1.png", "images/lib/a.py"}
    assert raw == {f"data/raw/{name}" for name in names}


def test_one_place_is_not_for_a_hidden_file_and_a_public_one(make_task, tmp_path):
    write(tmp_path, {"a": "1", "b": "2"})
    hidden = make_task().hidden
    with user_error("would both be truth"):
        make_task(public={"truth": tmp_path / "a"}, hidden=hidden | {"truth": tmp_path / "b"})
    with user_error("would be data .* needs a folder"):
        make_task(public={"data": tmp_path / "a", "data/x": tmp_path / "b"})


def test_a_missing_file_is_named(titanic_copy):
    for name in ("answers.csv", "../grade_csv.py", "train.csv"):
        (titanic_copy / name).unlink()
        with user_error(f"{Path(name).name} .*cannot be used: FileNotFoundError"):
            load_task("titanic")


def test_a_wrong_yaml_is_one_clear_sentence(titanic_copy):
    task = load_task("titanic")
    for name in ("org/task", "my task", ""):  # it becomes a part of file names and of lists
        with user_error("needs a name without spaces and slashes"):
            replace(task, name=name)
    cases = [
        ("metric: accuracy\n", "", "lacks the key metric"),
        ("metric:", "metrik:", "unknown key 'metrik'; did you mean metric"),
        ("artefacts: [submission.csv]", "artefacts: []", "titanic needs artefacts"),
        ("artefacts: [submission.csv]", "artefacts: [a/../../x]", "artefacts in the workspace"),
        ("artefacts: [submission.csv]", "artefacts: [./x.csv]", "artefacts in the workspace"),
        ("splits: [validation, selection, test]", "splits: []", "titanic needs splits, each once"),
        ("splits: [validation, selection, test]", "splits: [test, test]", "splits, each once"),
        ("data: ", "hide_package_data: [sklearn.datasets.data]\ndata: ", "such as sklearn/da"),
        ("data: ", "hide_package_data: [scikit-learn/data]\ndata: ", "such as sklearn/datasets"),
        ("step_timeout: 60", "step_timeout: 0", "needs finite time limits above 0"),
        ("baseline: 0.678182", "baseline: -.inf", "needs a finite baseline"),
        ("artefacts: [submission.csv]", "artefacts: ['*.csv']", "artefacts that are not hidden"),
        ("artefacts: [submission.csv]", "artefacts: x.csv", "artefacts: .* a valid tuple"),
        ("reference: 0.790909", "reference: 0.678182", "must be better than the baseline 0.678"),
        ("metric: accuracy", "metric: error", "a metric with another name than error, stderr"),
        ("data: ", "imported: [submission]\ndata: ", "imported files that are Python artefacts"),
        ("data: ", "imported: [x.py]\ndata: ", "imported files that are Python artefacts"),
        ("artefacts: [submission.csv]", "artefacts: [a/]\ntrivial: {x: y}", "one artefact, a file"),
        ("artefacts: [submission.csv]", "artefacts: [a, b]\ntrivial: {x: y}", "one artefact, a "),
    ]
    for old, new, message in cases:
        shutil.copy(TASKS_DIR / "titanic" / "task.yaml", titanic_copy)
        change(titanic_copy / "task.yaml", old, new)
        with user_error(message) as caught:
            load_task("titanic")
        assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------ scores


def test_parse_grade():
    lost = "no finite number called accuracy"
    cases = {
        'noise\n{"accuracy": 0.1}\n{"accuracy": 0.5}\nmore noise\n': "",
        '{"accuracy": 0.9, "error": "no good"}': "no good",
        '{"accuracy": NaN}': lost,
        '{"accuracy": 1e308}': "accuracy is no finite number below 1e+100 in size",
        '{"accuracy": ' + "9" * 5000 + "}": lost,
        '{"accuracy": [[0.5]]}': lost,
        '{"error": {"why": "size"}}': "size",
        '{"error": " \\n", "accuracy": null}': lost,
        '{"error": "' + "x" * 10_000 + '"}': "xxx",
        '{"error": "no 5\u2028\u2029\x85 number"}': "no 5",
        "": lost,
        '{"a":' * 100_000: lost,
    }
    for empty in ("null", "false", '" "'):
        cases[f'{{"error": {empty}, "accuracy": 0.5}}'] = ""
        cases[f'{{"error": {empty}}}'] = lost
    cases['50 %\r100 %\r{"accuracy": 0.5}\r\nbye'] = ""
    for stdout, words in cases.items():
        value, message, _ = parse_grade(last_json_object(stdout), load_task("titanic"))
        assert value == (None if words else 0.5)
        assert words in message
        assert len(message) <= 500
    for wrong in (True, -math.inf, "0.1"):
        assert numbers.number(wrong) is None


@pytest.mark.parametrize(
    "score, expected, baseline, reference, up",
    [
        (0.8, 2 / 3, 0.6, 0.9, True),
        (8.0, 0.5, 10.0, 6.0, False),
        (12.0, -0.5, 10.0, 6.0, False),
        (8.0, 0.2, 10.0, None, False),
    ],
)
def test_improvement_knows_direction_and_unit(score, expected, baseline, reference, up):
    task = SimpleNamespace(baseline=baseline, higher_is_better=up, reference=reference)
    assert improvement(score, task) == pytest.approx(expected)
    assert score_at(expected, task) == pytest.approx(score)


# ----------------------------------------------------------------------- titanic, diabetes, digits

TARGETS = {"titanic": "survived", "diabetes": "progression", "digits": "label"}


@pytest.mark.parametrize("name", TARGETS)
def test_data_is_what_make_data_writes(tmp_path, name):
    """So the parts are stratified, and the committed answers are those of the public files."""
    make_data.main(name, tmp_path)
    for file in ("train.csv", "test.csv", "answers.csv"):
        assert (tmp_path / file).read_bytes() == (TASKS_DIR / name / file).read_bytes()


def submission(name, value):
    """A submission with the same value for each row of test.csv."""
    lines = [f"id,{TARGETS[name]}"]
    for line in (TASKS_DIR / name / "test.csv").read_text().splitlines()[1:]:
        lines.append(f"{line.partition(',')[0]},{value}")
    return {"submission.csv": "\n".join([*lines, ""])}


def test_a_score_of_any_size_is_kept_whole(tmp_path):
    task = load_task("diabetes")
    rows = task.hidden["answers.csv"].read_text().splitlines()
    small = [f"{row.rpartition(',')[0]},{float(row.rpartition(',')[2]) * 1e-9}" for row in rows[1:]]
    (tmp_path / "answers.csv").write_text("\n".join([rows[0], *small]))
    task.hidden["answers.csv"] = tmp_path / "answers.csv"
    grader = tuple("rmse" if part == "r2" else part for part in task.grader)
    graded = grade(replace(task, grader=grader), tmp_path, submission("diabetes", 152e-9))
    assert graded["rmse"] == pytest.approx(7.5e-8, rel=0.1)


@pytest.mark.parametrize(
    "baseline, reference, score, texts",
    [
        (0.790909, 0.678182, 0.751234, "0.7909 0.7512"),
        (1e-7, 0, 2.34567e-8, "0.00000010000 0.00000002346"),
        (1000, 999.999, 999.99954, "1000.0000000 999.9995400"),
        (5e5, 4e5, 431234.56, "500000 431230"),
        (20, 10, 1234567.8, "20.000 1235000"),
        (0, None, -0.00000001, "0.0000 0.0000"),
    ],
)
def test_a_score_is_shown_with_four_digits_of_its_scale(baseline, reference, score, texts):
    task = SimpleNamespace(baseline=baseline, reference=reference, higher_is_better=False)
    assert f"{score_text(baseline, task)} {score_text(score, task)}" == texts


@pytest.mark.parametrize(
    "error, other, text",
    [
        (2.1, {}, "54"),
        (0.08, {}, "54.32"),
        (1e-9, {}, "54.321"),
        (30, {}, "50"),
        (4e4, {}, "0"),
        (0, {}, "54.321"),
        (None, {}, "54.3"),
        (None, {"splits": ("exact",)}, "54.321"),
        (2.1, {"metric": "accuracy"}, "54.321"),
    ],
)
def test_an_agent_reads_a_score_to_the_first_digit_of_its_standard_error(error, other, text):
    facts = {"baseline": 60, "reference": 52, "higher_is_better": False, "metric": "rmse"}
    task = SimpleNamespace(**facts | {"splits": ("validation", "test")} | other)
    assert validation_text(54.3210123, task, error) == text


@pytest.mark.parametrize(
    "name, constant", [("titanic", 0), ("diabetes", 152.153846), ("digits", 4)]
)
def test_the_baseline_is_what_a_constant_scores(tmp_path, name, constant):
    task = load_task(name)
    for split in task.splits:
        graded = grade(task, tmp_path, submission(name, constant), split)
        assert graded[task.metric] == pytest.approx(task.baseline, abs=3e-3)
        if split == "validation":
            assert round(graded[task.metric], 6) == task.baseline


def test_the_bootstrap_gives_the_standard_error_of_r2():
    """Against the spread of r2 over new samples; the same submission has the same error again."""
    rng = np.random.default_rng(0)
    error_of = grade_csv.standard_error
    truth = rng.normal(size=(300, 200))
    found = truth + rng.normal(scale=0.7, size=truth.shape)
    samples = list(zip(truth.tolist(), found.tolist()))
    spread = statistics.stdev(grade_csv.r2(*sample) for sample in samples)
    errors = [error_of(grade_csv.r2, *samples[0]) for _ in range(2)]
    assert errors == [pytest.approx(spread, rel=0.35), errors[0]]
    assert error_of(grade_csv.r2, [1], [1]) is None
    exact = pytest.approx(math.sqrt(0.8 * 0.2 / 5))
    assert error_of(grade_csv.accuracy, "aaaab", "aaaaa") == exact


def test_the_largest_numbers_have_a_score_on_every_part(tmp_path):
    task = load_task("diabetes")
    files = submission("diabetes", "-9.9e39")
    for split in task.splits:
        printed = run_csv_grader(task, tmp_path, files, split)
        assert parse_grade(last_json_object(printed), task)[0] < -1e70


# ----------------------------------------------------------------------------------- battleOfSexes


BATTLES = [
    ("def row_strategy(history): return 0", 1.44),
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
    said = grade(load_task("battleOfSexes"), tmp_path / "a", {"strategy.py": strategy})
    assert said == {"Score": pytest.approx(exact, abs=1e-6), "stderr": 0}
    assert not list((tmp_path / "a").iterdir())  # nothing was left to read


def test_a_strategy_of_chance_has_its_mean(tmp_path):
    task = load_task("battleOfSexes")
    coin = "import random\ndef row_strategy(history): return random.randrange(2)"
    said = grade(task, tmp_path / "a", {"strategy.py": coin})
    assert abs(said["Score"] - task.baseline) < 4 * said["stderr"] < 0.1
    assert grade(task, tmp_path / "a", {"strategy.py": coin}) == said


# Finds all histories in its caller's frame and follows the random numbers of a grader that seeds
# them with the part, the histories and the moves. Of equal moves in other words, and of moves that
# differ in a few games, it makes those that meet the partner most often.
PLANS = """
import random, sys

plan = []

def meetings(histories, moves, first):
    rng = random.Random(f"validation {histories} {moves}")
    partner = [(first if rng.random() < 0.8 else 1 - first) for _ in moves]
    return sum(2 * (move == other == 0) for move, other in zip(moves, partner))

def row_strategy(history):
    if not history:
        return 0
    if not plan:
        frame = sys._getframe()
        while "calls" not in frame.f_locals:
            frame = frame.f_back
        histories = [arguments[0] for arguments in frame.f_locals["calls"]]
        tries = []
        for number in range(10):
            moves = [0] * len(histories)
            moves[number] = [0, 0.0, False][number % 3]
            moves[-number - 1] = number % 2
            tries.append(moves)
        plan.extend(max(tries, key=lambda moves: meetings(histories, moves, 0)))
    return plan.pop(0)
"""


@pytest.mark.attack("guessing the random numbers of a grader, and choosing among equal moves")
def test_no_choice_of_moves_is_worth_more_than_the_optimum(tmp_path):
    task = load_task("battleOfSexes")
    said = grade(task, tmp_path / "a", {"strategy.py": PLANS})
    assert said["Score"] <= task.reference, said


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
    house = [f"data/regressionKaggleHousePrice/{name}.py" for name in ("baseline", "evaluate")]
    game = [f"data/battleOfSexes/{name}.py" for name in ("target", "evaluate", "strategy")]
    write(
        root,
        {
            **dict.fromkeys(house + game, "pass"),
            "configs/tasks/battleOfSexes.yaml": task_yaml(
                "PythonSubmissionTasks", "Score: 0.5", game
            ),
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
    assert set(task.public) == {"strategy.py"}
    assert set(task.hidden) == {"target.py", "evaluate.py"}
    files = task.grading_files({"strategy.py": b"mine"})
    assert files["strategy_agent.py"] == b"mine"
    assert files["strategy.py"] == TASKS_DIR / "proxy.py"


def test_mlgym_answers_are_hidden_and_folders_kept(mlgym):
    task = load_task("titanic", mlgym)
    assert set(task.public) == {"data/train.csv", "data/deep/test.csv"}
    assert set(task.hidden) == {"data/ground_truth.csv", "evaluate.py"}
    assert task.baseline == 0.75
    assert "SET\nIts columns." in task.prompt  # the key of the baseline is Accuracy
    assert "women survive" in degenerate(task)


def test_mlgym_split_that_is_not_there_yet(mlgym):
    name = "regressionKaggleHousePrice"
    with user_error("data .task .* needs it: run `python _generate_split.py` in .* No such file"):
        load_task(name, mlgym)
    write(mlgym / f"data/{name}/data", {"train.csv": "x", "answer.csv": "x"})
    task = load_task(name, mlgym)
    assert set(task.public) == {"baseline.py", "data/train.csv"}
    assert set(task.hidden) == {"evaluate.py", "data/answer.csv"}
    assert task.metric == "r2"


def test_mlgym_folders_as_artefacts(mlgym, tmp_path):
    task = load_task("rlMetaMaze", mlgym)
    assert task.requirements == mlgym / "data/rl/requirements.txt"
    assert set(task.public) == {"src/train.py", "src/config.yaml"}
    assert all(map(task.is_artefact, ("checkpoints/a-0.pkl", "src/deep/net.py", "my.yaml")))
    assert not any(map(task.is_artefact, ("evaluate.py", "data/my.yaml")))
    bare = {"checkpoints/a.pkl": b""}
    files = bare | {"src/config.yaml": b"four"}
    assert "src/train.py" not in task.grading_files(files)  # the agent has removed it
    assert score_of(task, tmp_path / "a", files) == (4, "")
    assert score_of(task, tmp_path / "c", bare)[1] == "there is no configuration (*.yaml)"


def test_mlgym_task_of_the_user(mlgym):
    task = load_task("mine", mlgym)
    assert (task.metric, task.higher_is_better, task.baseline) == ("mae", False, 3)
    assert set(task.hidden) == {"key.csv"}
    change(mlgym / "configs/tasks/mine.yaml", "[key.csv]", "[key.csv, keys.csv]")
    with user_error("mine hides keys.csv, but no file"):
        load_task("mine", mlgym)


def test_mlgym_says_what_is_wrong(mlgym):
    messages = {
        "3SATTime": "data/3SATTime/data .task 3SATTime needs it: MLGym does not",
        "regressionHousePrice": "never published.*regressionKaggleHousePrice is the one that works",
        "other": "cannot be used: KeyError: 'metric'",
    }
    for name, message in messages.items():
        with user_error(message):
            load_task(name, mlgym)


def test_roots_come_first_and_from_the_environment(mlgym, monkeypatch, tmp_path):
    assert load_task("titanic").source == "configs/tasks"
    monkeypatch.setenv("MLGYM_ROOT", str(mlgym))
    assert load_task("titanic").source == "mlgym"
    assert load_task("titanic").outline.startswith("titanic (mlgym): ")  # the line of a start
    assert load_task("digits").source == "configs/tasks"
    assert load_task("titanic", mlgym_root="").source == "configs/tasks"
    with user_error("not a checkout of MLGym"):
        load_task("titanic", mlgym_root=tmp_path)


# -------------------------------------------------------------------------------- a small MLE-Dojo


@pytest.fixture
def dojo(tmp_path):
    pytest.importorskip("pandas")
    return make_competition(tmp_path)


def test_dojo_loads(dojo):
    task = load_task("mine", mledojo_root=dojo)
    assert (task.source, task.higher_is_better) == ("mledojo", False)
    assert "data/images/1.png" in task.public
    assert not any("private" in path for path in task.public)
    assert "private/test_answer.csv" in task.hidden
    assert task.splits == ("validation", "selection", "test")
    assert task.reference == pytest.approx((2.5 + 4) / 2)


@pytest.mark.slow
def test_dojo_position_parts_and_standard_error(dojo, tmp_path):
    """Answers of 0 for 0 to 199 have a standard error of 57.7 / sqrt(rows of the part). One wrong
    value shows in one part.
    """
    task = load_task("mine", mledojo_root=dojo)

    def graded(value, split):
        return grade(task, tmp_path / "a", {"submission.csv": answers(value)}, split)

    position = (2 / 4 + 2 / 2) / 2  # third of four, first of two
    assert graded(lambda i: i + 3, "test") == {"score": 3, "stderr": 0, "position": position}
    for split, rows in zip(task.splits, (ROWS / 2, ROWS / 4, ROWS / 4)):
        error = graded(lambda i: 0, split)["stderr"]
        assert error == pytest.approx(ROWS / math.sqrt(12 * rows), rel=0.5)
    wrong = [graded(lambda i: i + (i == 3), split)["score"] > 0 for split in task.splits]
    assert sum(wrong) == 1


def test_dojo_sample_that_cannot_be_graded(dojo):
    write(dojo / "mine/data", {"public/sample_submission.csv": "id,y\n1,2\n"})
    task = load_task("mine", mledojo_root=dojo)
    assert task.baseline == 5
    assert task.reference == 3.25  # the last place
    for board in ("private", "public"):
        (dojo / f"mine/data/private/{board}_leaderboard.csv").unlink()
    with user_error("sample submission of mine cannot be graded.*200 rows"):
        load_task("mine", mledojo_root=dojo)


METRIC = "return float("
CHECK = 'raise InvalidSubmissionError("other ids")'


@pytest.mark.attack("answers through the error text of a competition of MLE-Dojo")
@pytest.mark.parametrize(
    "old, new, shown",
    [
        (METRIC, f"raise InvalidSubmissionError({SECRET!r})", "computed (InvalidSubmissionError)"),
        (METRIC, "return None", "computed (TypeError)"),
        (
            CHECK,
            "raise InvalidSubmissionError(str(ground_truth.y[0]))",
            "csv cannot be checked",
        ),
        (
            CHECK,
            "raise InvalidSubmissionError(f'{len(ground_truth)} rows of {list(submission)}')",
            "200 rows of ['id', 'y']",
        ),
    ],
)
def test_what_a_metric_says_of_the_answers_is_masked(dojo, tmp_path, old, new, shown):
    metric = dojo / "../../mledojo/competitions/mine/utils/metric.py"
    if old == METRIC:  # of the sample submission it says nothing
        new = f"if y_pred['y'].any(): {new}\n        return float("
    change(metric, old, new)
    write(dojo / "mine/data", {"private/test_answer.csv": answers(lambda i: i + 1)})
    task = load_task("mine", mledojo_root=dojo)
    ids = range(1, 201) if old == CHECK else range(ROWS)
    files = {"submission.csv": answers(lambda i: i, ids)}
    assert score_of(task, tmp_path / "a", files)[1].endswith(shown)


def test_dojo_validation_has_no_score_where_test_has_none(dojo, tmp_path):
    task = load_task("mine", mledojo_root=dojo)
    place = next(i for i in range(ROWS) if grade_mledojo.part_of(i) == "test")
    files = {"submission.csv": answers(lambda i: "1e103" if i == place else i)}
    for split in ("validation", "test"):
        said = score_of(task, tmp_path / "a", files, split)
        assert said == (None, "the metric is no number below 1e+100 in size")


def test_dojo_says_what_is_missing(dojo, tmp_path):
    """Each besides those before it."""
    for number, (path, message) in enumerate(
        {
            "mledojo": "set .MLEDOJO_REPO to a checkout",
            "data/prepared/mine/data/private/test_answer.csv": "/test_answer.csv .* cannot be used",
            "data/prepared/mine/data/private": "private .let MLE-Dojo prepare mine again. cannot",
            "data/prepared/mine": "no <name>/data/public",
        }.items()
    ):
        (tmp_path / "MLE-Dojo" / path).rename(tmp_path / f"away{number}")
        with user_error(message):
            load_task("mine", mledojo_root=dojo)


# ---------------------------------------------------------------------------------- real checkouts


@pytest.mark.skipif(not MLGYM, reason="set MLGYM_ROOT to a checkout of MLGym")
def test_real_mlgym_every_task():
    refused = []
    for name in mlgym_names(Path(MLGYM)):
        try:
            task = load_task(name, MLGYM)
        except UserError as error:
            refused.append(name)
            assert re.search("cannot be used|never published", str(error))
            continue
        assert "evaluate.py" in task.hidden
        assert not re.search("answer|ground_truth|target.py", " ".join(task.public))
    assert len(refused) <= 7


# ------------------------------------------------------------------------------------------ sanity


def trivial(tmp_path, train, test):
    write(tmp_path, {"train.csv": train, "test.csv": test})
    return dict(csv_rules(tmp_path / "train.csv", tmp_path / "test.csv"))


def test_trivial_rules_of_classes_and_numbers(tmp_path):
    lines = ["id,colour,x,y"] + [f"{i},c{i % 3},{i % 30},{int(i % 3 > 0)}" for i in range(99)]
    test = "id,colour,x\n500,c1,1\n501,green,\n"  # green: never seen
    assert trivial(tmp_path, "\n".join(lines), test) == {
        "always the most frequent, 1": "id,y\n500,1\n501,1\n",
        "always the second most frequent, 0": "id,y\n500,0\n501,0\n",
        "always the mean, 0.666667": "id,y\n500,0.6666666666666666\n501,0.6666666666666666\n",
        "always the median, 1": "id,y\n500,1.0\n501,1.0\n",
    }
    names = trivial(tmp_path, "id,x,y\n1,1,b\n2,1,a\n3,1,b\n4,1,5\n", "id,x\n500,1\n")
    assert [*names] == [
        "always the most frequent, b",
        "always the second most frequent, a",
        "always the third most frequent, 5",
    ]
    lines = ["id,x,y"] + [f"{i},{i},{i * i}" for i in range(1, 101)]
    rules = trivial(tmp_path, "\n".join(lines), "id,x\n500,1\n501,100\n")
    assert {"always the mean, 3383.5", "always the median, 2550.5"} < set(rules)
    assert not trivial(tmp_path, "id,x,y,z\n1,2,3,4\n", "id,x\n5,6\n")  # which is the target?


# ---------------------------------------------------------------------------------------- gradings

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
FORTY = {"forty": "40"}
LOST = "is broken: it gives the rule 'forty' no score on the {} part: .*"
# Code in front of the grader, rules of the task, what the user reads.
BROKEN = [
    ("open('truth.json')", FORTY, LOST + "No such file or directory: 'truth.json'"),
    ("sys.exit()", FORTY, LOST + r"exit code 0 stdout: \(nothing\) stderr: \(nothing\)"),
    ("print('{\"rmse\": 1}'); sys.exit()", FORTY, LOST + "no finite number called distance"),
    ("print(json.dumps({'error': 'x'})); sys.exit(1)", FORTY, LOST + '{"error": "x"}'),
    ("if sys.argv[2] == 'test': raise KeyError('t')", FORTY, "on the test part: .*KeyError: 't'"),
    ("", {"blank": " "} | FORTY, "the rule 'blank' no score on the {} part: .* is empty"),
]


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
            trivial=FORTY,
        )
        return replace(task, **fields)

    return make


def graded(task, text, split="validation"):
    make_sandbox = partial(open_sandbox, task, LOCAL_BOX)
    return grading.grade(task, {"answer.txt": text.encode()}, split, make_sandbox)


# ------------------------------------------------------------------ names of artefacts


def test_an_artefact_in_a_folder_that_no_agent_may_write_is_named(make_task):
    """A folder of root in an image, say; put() writes there, too."""
    task = make_task(artefacts=("out/answer.txt",), trivial={})

    def make_sandbox():
        box = open_sandbox(task, LOCAL_BOX)
        box.put({"out/given.txt": b""}, user="root")
        box.put({})  # the workspace is the agent's
        return box

    with user_error("Task near: no agent can hand in its artefacts: .*answer.txt: Perm"):
        check_grader(task, make_sandbox)


NAMES = ("out[1].txt", "[!a].txt", "out[", "a b'c.txt", "-x", "dir[0]/é\n.txt", "f[o]/")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_with_brackets_is_the_name_of_one_file(make_task, name):
    task = make_task(artefacts=(name,), trivial={})
    check_before_a_run(task)
    written = f"{name}a" if name.endswith("/") else name
    assert task.is_artefact(written)
    assert not task.is_artefact("out1.txt") and not task.is_artefact("fo/a")
    with Env(task, "local") as world:
        world.restart()
        world.sandbox.put({written: b"40"})
        assert grading.read_artefacts(task, world.sandbox) == {written: b"40"}


def test_an_artefact_that_cannot_be_written_is_refused(make_task):
    for name in ("x" * 300, "evaluate/" + "x" * 300 + "/"):
        with user_error("no agent can hand in its artefacts: .*too long"):
            check_before_a_run(make_task(artefacts=(name,), trivial={}))


# ------------------------------------------------------------------ the grader is broken


def check_before_a_run(task):
    check_grader(task, partial(open_sandbox, task, LOCAL_BOX))


@pytest.mark.parametrize(
    "old, new, said",
    [
        (",selection,", ",selectoin,", "the part selectoin; there are validation, selection, test"),
        (",selection,", ",test,", "no row has the part selection"),
        (",test,", ",", "line 3 has 2 values, not id, part and target"),
        ("\n4,", "\n2,", "answers.csv: id 2 is there twice"),
        ("\n4,", "\n\udcff,", "answers.csv: 'utf-8' codec can't decode"),
    ],
)
def test_every_part_is_checked_before_a_run(titanic_copy, old, new, said):
    answers = titanic_copy / "answers.csv"
    text = answers.read_text().replace(old, new)
    answers.write_bytes(text.encode(errors="surrogateescape"))
    with user_error(f"titanic is broken: .*{said}"):
        check_before_a_run(load_task("titanic"))


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("metric: accuracy", "metric: acuracy", "no finite number called acuracy"),
        ("--metric, accuracy", "--metric, acuracy", "unknown metric 'acuracy'; there are accuracy"),
        ("--metric, accuracy", "--metric, f1", "no finite number called accuracy"),
        ("--metric, ", "--metrics, ", "the arguments are not --metric NAME"),
        ("--labels, 0, ", "", "the arguments are not --metric NAME"),
    ],
)
def test_the_metric_and_the_arguments_fit_together(titanic_copy, old, new, said):
    change(titanic_copy / "task.yaml", old, new)
    with user_error(f"titanic is broken: .*{said}"):
        check_before_a_run(load_task("titanic"))


def test_a_table_that_no_submission_can_answer_is_refused(titanic_copy):
    """Its ids are written in two ways."""
    test = titanic_copy / "test.csv"
    first, *rows = test.read_text().splitlines()
    test.write_text("\n".join([first, *(row.replace(",", ".0,", 1) for row in rows)]))
    with user_error("'always the most frequent, 0' no score .*id '2.0' is none of the ids to pred"):
        check_before_a_run(load_task("titanic"))


def test_a_large_table_can_be_answered(titanic_copy):
    """80,000 rows with ids of 13 characters: a submission of 1.2 MB."""
    ids = [f"customer{number:05}" for number in range(80_000)]
    parts = ["validation", "selection", "test"]
    answers = [f"{id},{parts[i % 3]},{i % 2}" for i, id in enumerate(ids)]
    (titanic_copy / "answers.csv").write_text("\n".join(["id,part,survived", *answers]))
    (titanic_copy / "test.csv").write_text("\n".join(["id", *ids]))
    task = load_task("titanic")
    check_before_a_run(task)
    artefacts = {"submission.csv": "\n".join(["id,survived", *(f"{id},1" for id in ids)]).encode()}
    score = grading.grade(task, artefacts, "test", partial(open_sandbox, task, LOCAL_BOX))
    assert score.value == 0.5


def test_arguments_of_a_grader_are_read_as_they_are_written(titanic_copy):
    labels = "yes, no, 01, 1e3, 2020-01-01, null"
    change(titanic_copy / "task.yaml", "--labels, 0, 1]", f"--labels, {labels}]")
    assert load_task("titanic").grader[-8:-2] == tuple(labels.split(", "))


@pytest.mark.parametrize(
    "name", ["sklearn/dataset/data", "sklearn/datasets/data/diabetes_target.csv.gz"]
)
def test_package_data_that_would_not_be_hidden_is_refused(name):
    """A slip in the name, or a file."""
    task = load_task("diabetes")
    with user_error(f"an agent can read {name}, which hide_package_data should hide"):
        check_before_a_run(replace(task, hide_package_data=(name,)))
    absent = (*task.hide_package_data, "no_such_package/data")
    check_before_a_run(replace(task, hide_package_data=absent))


def test_a_table_without_a_trivial_rule_is_graded_empty():
    task = replace(load_task("titanic"), reference=None, public={})
    check_before_a_run(task)
    upside_down = replace(load_task("titanic"), reference=None, higher_is_better=False)
    with user_error("lower is better, and the grader the opposite"):
        check_before_a_run(upside_down)


@pytest.mark.parametrize(
    "metric, values, said",
    [
        ("log_loss", "yn", "an answer must be 0 or 1 for log_loss"),
        ("roc_auc", "12", "must be 0 or 1 for roc_auc"),
        ("f1", ["0", "1.0"], "must be 0 or 1 for f1"),
        ("accuracy", ["1", "1.0"], "1 and 1.0 are one number"),
        ("f1", "00", "f1 needs different answers"),
        ("rmse", "1x", "an answer must be a finite number"),
        ("quadratic_kappa", ["1", "1.5"], "an answer must be a whole number"),
        ("r2", "33", "r2 needs different answers in the part validation"),
        ("roc_auc", "11", "roc_auc needs different answers"),
    ],
)
def test_answers_that_a_metric_cannot_use(metric, values, said):
    answers = {number: ("validation", values[number % 2]) for number in range(4)}
    with pytest.raises(grade_csv.Broken, match=said):
        grade_csv.check_answers(metric, [], answers, "validation")


def test_the_metrics_are_those_of_scikit_learn():
    from sklearn import metrics

    theirs = {
        "accuracy": metrics.accuracy_score,
        "balanced_accuracy": metrics.balanced_accuracy_score,
        "f1": partial(metrics.f1_score, pos_label="1", average="binary"),
        "f1_macro": partial(metrics.f1_score, average="macro"),
        "r2": metrics.r2_score,
        "quadratic_kappa": partial(metrics.cohen_kappa_score, weights="quadratic"),
        "roc_auc": metrics.roc_auc_score,
        "rmse": metrics.root_mean_squared_error,
        "mae": metrics.mean_absolute_error,
        "log_loss": metrics.log_loss,
    }
    assert theirs.keys() == grade_csv.METRICS.keys()
    drawn = np.random.default_rng(0).integers(4, size=(2, 200))
    for name, (ours, wrong, _) in grade_csv.METRICS.items():
        truth, predicted = drawn.tolist()
        if name in ("roc_auc", "log_loss"):
            truth = (drawn[0] % 2).tolist()
            predicted = (drawn[1] / 3).tolist()  # with ties, 0 and 1
        if name == "f1":
            truth, predicted = (drawn % 2).astype(str).tolist()
        assert ours(truth, predicted) == pytest.approx(theirs[name](truth, predicted)), name
        assert grade_csv.standard_error(ours, truth, predicted) > 0
        assert not wrong("1", ()) and wrong("1e999", ["1"])
        wants_label = wrong in (grade_csv.wrong_label, grade_csv.wrong_rating)
        assert bool(wrong("0.5", ["1"])) == wants_label


def test_labels_that_are_numbers_are_compared_as_numbers(tmp_path):
    task = load_task("titanic")

    def score(value, task=task):
        printed = run_csv_grader(task, tmp_path, submission("titanic", value), "validation")
        return last_json_object(printed)

    assert score("0.0") == score("0") == score("-0e0")
    assert "must be 0 or 1" in score("0.5")["error"]
    assert "must be 0 or 1" in score("\u0660")["error"]  # a zero of another script
    free = replace(task, grader=tuple(part for part in task.grader if part not in "--labels01"))
    assert score("0.0", free) == score("0")
    by_f1 = replace(free, grader=tuple(part.replace("accuracy", "f1") for part in free.grader))
    assert "must be 0 or 1" in score("0.5", by_f1)["error"]
    assert score("1.0", by_f1)["f1"] > 0.4


@pytest.mark.parametrize("code, rules, said", BROKEN)
def test_a_broken_grader_is_found_before_a_run(make_task, code, rules, said):
    with user_error(said.replace("{}", "validation")) as caught:
        check_before_a_run(make_task(code, trivial=rules))
    assert len(str(caught.value)) < 1500


def test_a_starter_that_is_refused_is_no_fault(make_task, tmp_path):
    """It is given to be changed: a baseline without weights, say."""
    check_before_a_run(make_task())
    check_before_a_run(make_task("1 / 0", trivial={}))  # nothing to check it with
    write(tmp_path, {"given/answer.txt": " "})
    check_before_a_run(make_task(trivial={}, public={"answer.txt": tmp_path / "given/answer.txt"}))


def test_a_grader_of_a_game_that_raises_is_not_taken_for_a_refused_move(tmp_path):
    """Its errors reach the agent as {"error": ...}, through the proxy of the strategy."""
    task = load_task("battleOfSexes")
    grader = tmp_path / "evaluate.py"
    grader.write_bytes(task.hidden["evaluate.py"].read_bytes())
    change(grader, "stdev(points)", "stdev(pointz)")
    with user_error("'always 0' no score .*name 'pointz' is not defined"):
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


# ------------------------------------------------------------------ the proxy of a strategy


def test_the_proxy_of_a_strategy_refuses(tmp_path):
    task = load_task("battleOfSexes")
    cases = [
        ("def row_strategy(history): return 2", "returned '2', not 0 or 1"),
        (b"\xff\xfe", "not a text file"),
        (
            "def row_strategy(history): return 1 / 0",
            "strategy.py line 1: ZeroDivisionError: division by zero",
        ),
        ("raise SystemExit", "SystemExit"),
        ("def row_strategy(history): return {1}", "returned a set"),
        ("def row_strategy(history): return '0' * 10 ** 6", "disturbed"),
        (
            "a = []\nfor _ in range(10 ** 5): a = [a]\ndef row_strategy(history): return a",
            "Recursion",
        ),
        (
            "import os\ndef row_strategy(h):\n    print('{\"Score\": 9}', flush=True)\n"
            "    os._exit(0)",
            "ended the process",
        ),
        ("#" * 2_000_000, "larger"),
    ]
    for number, (source, message) in enumerate(cases):
        value, said = score_of(task, tmp_path / str(number), {"strategy.py": source})
        assert value is None
        assert message in said
        assert len(said) <= 300


CALLS = """
from heuristic import choose
variable, value = choose([[1, -2]], {3: True}, [4])
assert (variable, value) == (7, None)
raise KeyError("the answer is 42")
"""
CHOOSE = """
def choose(clauses, assigned, level):
    assert (clauses, assigned, level) == ([[1, -2]], {3: True}, [4])
    return 7, None
"""


def test_the_proxy_passes_arguments_and_keeps_the_text_of_an_error_for_the_user(tmp_path):
    """The call of 3-SAT's solver: lists, dicts with number keys, and two values back."""
    write(tmp_path, {"main.py": CALLS, "heuristic_agent.py": CHOOSE})
    shutil.copy(TASKS_DIR / "proxy.py", tmp_path / "heuristic.py")
    done = python("main.py", cwd=tmp_path)
    said = {"error": "the grader refused what heuristic.py returned (KeyError)"}
    assert (done.returncode, last_json_object(done.stdout)) == (1, said)
    assert SECRET in done.stderr


# ------------------------------------------------------------------ the artefact is to blame


@pytest.mark.attack("stopping a run by an artefact that crashes its honest grader")
@pytest.mark.attack("answers in what a grader that crashed has printed or in its traceback")
@pytest.mark.fault(26, "the grader raises or says NaN")
@pytest.mark.fault(26, "a grader that fails after it has printed a score")
def test_an_artefact_that_crashes_an_honest_grader_is_no_submission(make_task, backend):
    messages = {
        "crash": "The grader printed no finite number called distance.",
        "exit": "The grader failed after it had printed a score.",
        "nan": "The grader printed no finite number called distance.",
        "1e300": "The distance is no finite number below 1e+100 in size.",  # it works
    }
    with Env(make_task(), backend) as world:
        world.reset()
        for text, message in messages.items():
            do(world, f"echo {text} > answer.txt")
            step = do(world, "validate")
            assert (step.observation, step.score.valid) == (f"No score: {message}", False)
            kept = step_record(step)["grader_output"]  # in the transcript
            assert kept.startswith("exit code ") == (text != "1e300")
            assert (SECRET in kept) == (text == "crash")
        do(world, "echo 41 > answer.txt")
        assert world.score().value == 1


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
    assert "the first number                       2.000         0.80    0.80" in out
    assert out.endswith("as far as these rules tell\n")
    assert len(list((folder / "../../cache/flatlab/sanity").glob("*.json"))) == 1


def test_a_broken_grader_ends_the_check(folder):
    change(folder / "evaluate.py", "import sys", "import sys, numbers_of_mine")
    with user_error("The grader of task median is broken.*No module named 'numbers_of_"):
        env.open_tasks(["median"], LOCAL_BOX, True)


def test_a_rule_at_the_top_and_copies_of_hidden_files_are_named(folder, capsys, monkeypatch):
    change(folder / "task.yaml", "reference: 0 ", "reference: 2 ")
    change(folder / "task.yaml", "data: [", "data: [notes.txt, ")
    shutil.copy(folder / "truth.json", folder / "notes.txt")
    _, out, _ = check(capsys, monkeypatch, "median")
    assert "\ndegenerate: the rule 'the first number' scores 2.000\n" in out
    assert "can read data/notes.txt: it has the content of the hidden truth.json." in out
    task = load_task("median")
    assert degenerate(task) == "the rule 'the first number' scores 2.000"
    assert degenerate(replace(task, reference=1.0)) is None  # another task: not checked yet


def test_a_task_without_a_rule_that_has_a_score(folder, capsys, monkeypatch):
    change(folder / "task.yaml", '  the first number: "3"', "  {}")
    write(folder, {"sample_answer.txt": "none"})
    change(folder / "task.yaml", "data: [", "data: [sample_answer.txt, ")
    _, out, _ = check(capsys, monkeypatch, "median")
    assert "answer.txt is not a number" in out
    assert out.endswith("\n\nNo trivial rule scores: add one under `trivial:` in task.yaml.\n")


def test_a_large_file_that_only_its_owner_may_read_is_copied(folder):
    (folder / "numbers.txt").write_bytes(b"1" * (17 << 20))
    (folder / "numbers.txt").chmod(0o600)
    box = open_sandbox(load_task("median"), LOCAL_BOX)
    assert "data/numbers.txt" not in box.mounts
    box.close()


def test_a_damaged_task_is_listed(folder, capsys, monkeypatch):
    (folder / "task.yaml").write_text("metric: [")
    _, out, _ = check(capsys, monkeypatch)
    assert "median " in out


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_hidden_file_that_is_public_is_refused(folder, link):
    (folder / "truth.json").unlink()
    link(folder / "numbers.txt", folder / "truth.json")
    with user_error("is hidden, so it cannot be a public file, too"):
        load_task("median")


# ------------------------------------------------------------------ rewards in other places


def test_the_reward_of_the_bridges_is_that_of_training():
    assert value_of(None) == grpo.NO_SUBMISSION
    for value in (-3.47, -0.5, 0.0, 0.7, 4.0):
        assert min(1, value_of(value)) == grpo.continuous(SimpleNamespace(improvement=value))


def test_one_score_far_above_the_reference_does_not_buy_a_mean():
    task = SimpleNamespace(baseline=0.5, higher_is_better=True, reference=0.505)
    lucky = [improvement(1.0, task)] + [None] * 63
    assert statistics.fmean(map(value_of, lucky)) < -0.9
    assert [value_of(x) for x in (1.0, 2.0, 4.0)] == [1.0, 1.5, 1.75]  # more is always better
    assert value_of(1e90) <= 2


def test_a_reference_within_the_noise_of_the_baseline_is_told(folder, capsys, monkeypatch):
    change(
        folder / "evaluate.py", 'json.dumps({"distance"', 'json.dumps({"stderr": 4.9, "distance"'
    )
    _, out, _ = check(capsys, monkeypatch, "median")
    assert "warning" not in out
    change(folder / "evaluate.py", '"stderr": 4.9', '"stderr": 5.0')
    grading.grades.clear()
    _, out, _ = check(capsys, monkeypatch, "median")
    words = "The reference 0.000 is within two standard errors (5 each) of the baseline 10.000"
    assert words in out


def test_the_list_has_a_line_for_each_task_and_the_reason_for_one_that_is_broken(
    tmp_path, monkeypatch
):
    write(tmp_path, {"configs/tasks/gone.yaml": "metric: loss"})
    monkeypatch.setenv("MLGYM_ROOT", str(tmp_path))
    lines = {line.split()[0]: line for line in tasks.task_table().splitlines()}
    facts = "titanic accuracy higher 0.6782 0.7909 no no configs/tasks Predict who survived".split()
    assert lines["titanic"].split()[: len(facts)] == facts
    assert lines["battleOfSexes"].split()[5:7] == ["yes", "yes"]
    assert "  yes    no          configs/tasks" in lines["circlePacking"]
    assert re.search("gone +- .*gone", lines["gone"])
