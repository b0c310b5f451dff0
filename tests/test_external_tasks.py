"""Tasks of MLGym and MLE-Dojo, in small checkouts made here and in real ones.

The real ones: MLGYM_ROOT=<checkout of MLGym>, MLEDOJO_REPO=<checkout of MLE-Dojo>.
"""

import csv
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import env
import tasks
from backends import ISOLATED
from competition import METRIC, ROWS, answers, make_competition, write
from flatlab.errors import UserError
from flatlab.options import SandboxOptions
from flatlab.task import grading
from flatlab.task.builtin import builtin_names
from flatlab.task.definition import last_json_object, parse_grade
from flatlab.task.mlgym import mlgym_names
from flatlab.task.sanity import at_the_top, csv_rules, degenerate, sanity_file
from flatlab.task.task_files import TASKS_DIR
from helpers import python, run_grader, user_error
from tasks import load_task

MLGYM, DOJO = os.environ.get("MLGYM_ROOT"), os.environ.get("MLEDOJO_REPO")
real_mlgym = pytest.mark.skipif(not MLGYM, reason="set MLGYM_ROOT to a checkout of MLGym")
real_dojo = pytest.mark.skipif(not DOJO, reason="set MLEDOJO_REPO to a checkout of MLE-Dojo")


@pytest.fixture(autouse=True)
def only_what_a_test_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(grading, "grades", {})


def grade(task, folder, artefacts, split=None):
    """The score and the message of a grader."""
    printed = run_grader(task, folder, artefacts, split or task.splits[-1])
    return parse_grade(last_json_object(printed), task)


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


def dataset(path, local="true"):
    return f"name: set\ndescription: Its columns.\ndata_path: {path}\nis_local: {local}\n"


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
            "configs/tasks/imageClassificationFMnist.yaml": task_yaml(
                scores="accuracy: 0.78",
                datasets=["datasets/hub.yaml"],
                starters=["data/image/sample_submission.csv"],
            ),
            "configs/datasets/hub.yaml": dataset("zalando/fashion", "false"),
            "data/image/sample_submission.csv": "label\n7\n",
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
    assert task.source == "mlgym"
    assert task.metric == "Score"
    assert task.higher_is_better
    assert task.baseline == 0.5
    assert set(task.public) == {"strategy.py"}
    assert set(task.hidden) == {"target.py", "evaluate.py"}
    assert task.splits == ("test",)
    assert task.artefacts == ("strategy.py",)
    assert task.step_timeout == 100
    assert task.prompt.startswith("What to {do}.")
    assert "copies of the history" in task.prompt
    files = task.grading_files({"strategy.py": b"mine"})
    assert files["strategy_agent.py"] == b"mine"
    assert files["strategy.py"] == TASKS_DIR / "proxy.py"
    assert files["target.py"] == task.hidden["target.py"]


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
    assert grade(task, tmp_path / "a", files) == (4, "")
    assert grade(task, tmp_path / "b", files | {"config.yaml": b"seven.."}) == (7, "")
    score, message = grade(task, tmp_path / "c", bare)
    assert score is None
    assert message == "there is no configuration (*.yaml)"


def test_mlgym_requirements_that_are_missing(mlgym):
    (mlgym / "data/rl/requirements.txt").unlink()
    with user_error(r"names requirements that are missing: .*data/rl/requirements.txt"):
        load_task("rlMetaMaze", mlgym)


def test_mlgym_needs(mlgym):
    task = load_task("imageClassificationFMnist", mlgym)
    assert task.needs_network
    assert not task.needs_gpu
    assert set(task.public) == {"sample_submission.csv"}


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


def test_mlgym_starter_missing(mlgym):
    (mlgym / "data/battleOfSexes/target.py").unlink()
    with user_error("target.py is missing; `git checkout"):
        load_task("battleOfSexes", mlgym)


def test_roots_come_first_and_from_the_environment(mlgym, monkeypatch, tmp_path):
    assert load_task("titanic").source == "built-in"
    monkeypatch.setenv("MLGYM_ROOT", str(mlgym))
    assert load_task("titanic").source == "mlgym"
    assert load_task("digits").source == "built-in"
    assert load_task("titanic", mlgym_root="").source == "built-in"
    with user_error("not a checkout of MLGym"):
        load_task("titanic", mlgym_root=tmp_path)


# --------------------------------------------------------------------------------------- the proxy


def play(mlgym, folder, source):
    return grade(load_task("battleOfSexes", mlgym), folder, {"strategy.py": source.encode()})


LENGTHS = """
def row_strategy(history):
    assert len(history) < 10
    assert all(type(pair) is tuple and pair[0] == i % 2 for i, pair in enumerate(history))
    history.clear()
    return LATER
LATER = 0
def row_strategy(history, first=row_strategy):
    move = len(history) % 2
    first(history)
    return move
"""


@pytest.mark.parametrize("source", ["def row_strategy(history): return 0", LENGTHS])
def test_proxy_plays(mlgym, tmp_path, source):
    begin = time.perf_counter()
    score, message = play(mlgym, tmp_path / "a", source)
    assert message == ""
    assert score == pytest.approx(0.5, abs=0.05)
    assert time.perf_counter() - begin < 5  # 3,000 moves: 0.2 s on an idle machine
    assert list((tmp_path / "a").iterdir()) == []  # nothing was left to read


def test_proxy_refuses(mlgym, tmp_path):
    cases = [
        (
            "def row_strategy(history): return 1 / 0",
            "strategy.py line 1: ZeroDivisionError: division by zero",
        ),
        ("def row_strategy(history) return 0", "strategy.py line 1: SyntaxError"),
        ("x = 1", "no attribute 'row_strategy'"),
        ("raise SystemExit", "SystemExit"),
        ("def row_strategy(history): return {1}", "returned a set"),
        ("def row_strategy(history): return 2", "refused what strategy.py returned: ValueError"),
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
        folder = tmp_path / str(number)
        folder.mkdir()
        score, said = play(mlgym, folder / "a", source)
        assert score is None
        assert message in said


def test_proxy_passes_arguments_and_tuples(tmp_path):
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
        return [grade(task, tmp_path / "a", files, split)[0] for split in task.splits]

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, message",
    [
        (answers(lambda i: i, range(10)), "200 rows of ['id', 'y'] are needed"),
        (answers(lambda i: i, range(1, ROWS + 1)), "other ids"),
        (answers(lambda i: ""), "not a finite number"),
        ("", "cannot be read"),
    ],
)
def test_dojo_refuses(dojo, tmp_path, text, message):
    task = load_task("mine", mledojo_root=dojo)
    score, said = grade(task, tmp_path / "a", {"submission.csv": text.encode()})
    assert score is None
    assert message in said


def test_dojo_without_ids_has_one_part(dojo, tmp_path):
    files = {
        "private/test_answer.csv": answers(lambda i: i, header="row,y"),
        "public/sample_submission.csv": answers(lambda i: 0, header="other,y"),
    }
    write(dojo / "mine/data", files)
    ids = 'submission["id"].values != ground_truth["id"].values'
    unchecked = METRIC.replace(ids, "np.array([False])")
    unchecked = unchecked.replace("list(submission.columns) != columns", "False")
    write(dojo.parents[1], {"mledojo/competitions/mine/utils/metric.py": unchecked})
    task = load_task("mine", mledojo_root=dojo)
    assert task.splits == ("test",)
    assert task.baseline == (ROWS - 1) / 2
    handed_in = {"submission.csv": answers(lambda i: i + 1).encode()}
    assert grade(task, tmp_path / "a", handed_in) == (1, "")


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
        (
            "data/prepared/mine/data/public/sample_submission.csv",
            "public/sample_submission.csv is missing",
        ),
        ("data/prepared/mine/data/private/test_answer.csv", "private/test_answer.csv is missing"),
        ("mledojo", "set .MLEDOJO_REPO to a checkout"),
        ("data/prepared/mine", "no <name>/data/public"),
    ],
)
def test_dojo_says_what_is_missing(dojo, tmp_path, path, message):
    (tmp_path / "MLE-Dojo" / path).rename(tmp_path / "away")
    with user_error(message):
        load_task("mine", mledojo_root=dojo)


def test_dojo_metric_that_cannot_be_loaded(dojo, tmp_path):
    write(tmp_path / "MLE-Dojo", {"mledojo/competitions/mine/utils/metric.py": "import not_there"})
    with user_error("No module named 'not_there'"):
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
    before = content(Path(MLGYM, "configs"))
    loaded = []
    refused = {}
    for name in mlgym_names(Path(MLGYM)):
        try:
            task = load_task(name, MLGYM)
        except UserError as error:
            refused[name] = str(error)
            continue
        loaded.append(name)
        assert task.name == name
        assert task.metric
        assert task.splits == ("test",)
        assert "evaluate.py" in task.hidden
        for word in ("answer", "ground_truth", "target.py"):
            assert word not in " ".join(task.public)
    assert len(loaded) + len(refused) == 19
    assert len(loaded) >= 14
    never_published = {"regressionHousePrice", "regressionHousingPrice"}
    assert never_published <= set(refused)
    may_be_refused = {"3SATTime", "imageCaptioningCOCO", "languageModelingFineWeb"}
    for name in set(refused) - never_published - may_be_refused:
        assert "HousePrice" in name
        assert "is missing" in refused[name]
    assert content(Path(MLGYM, "configs")) == before


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


@real_mlgym
def test_real_mlgym_house_price(in_a_sandbox, tmp_path):
    """Their baseline, on their split, gives their number."""
    pytest.importorskip("sklearn")
    task = load_task("regressionKaggleHousePrice", MLGYM)
    for path, source in task.public.items():
        write(tmp_path, {path: source.read_bytes()})
    python("baseline.py", cwd=tmp_path)
    score, message = in_a_sandbox(
        task, {"submission.csv": (tmp_path / "submission.csv").read_bytes()}
    )
    assert message == ""
    assert score == pytest.approx(task.baseline, abs=1e-9) == pytest.approx(0.8799891, abs=1e-6)


@real_dojo
def test_real_dojo_every_metric_loads():
    """All but those that need a package that is not there (Levenshtein)."""
    pytest.importorskip("sklearn")
    code = (
        "import sys\nfrom grade_mledojo import load_metric\n"
        "for path in sys.argv[1:]:\n    try: print(load_metric(path).higher_is_better)\n"
        "    except ImportError as error: print(error)"
    )
    paths = sorted(map(str, Path(DOJO).glob("mledojo/competitions/*/utils/metric.py")))
    done = python("-W", "ignore", "-c", code, *paths, cwd=TASKS_DIR)
    said = done.stdout.split("\n")
    assert len(paths) > 190
    assert said.count("True") + said.count("False") >= len(paths) - 2


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


def test_at_the_top():
    task = load_task("titanic")
    assert not at_the_top(0.778, task)
    assert at_the_top(0.79, task)
    assert at_the_top(1, task)
    task = replace(task, reference=None)
    assert not at_the_top(0.9, task)
    assert at_the_top(1, task)


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


def test_command_without_a_name_lists_all_tasks(mlgym, capsys):
    tasks.main(mlgym_root=str(mlgym))
    lines = capsys.readouterr().out.splitlines()
    assert ["mine", str(mlgym)] in [line.split() for line in lines]
    assert "accuracy, higher is better, baseline 0.6782" in "\n".join(lines)
    assert len(lines) == len(mlgym_names(mlgym)) + len(builtin_names())
