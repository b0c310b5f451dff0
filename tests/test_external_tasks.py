"""Tasks of MLGym and MLE-Dojo, in small checkouts made here and in real ones.

The real ones: MLGYM_ROOT=<checkout of MLGym>, MLEDOJO_REPO=<checkout of MLE-Dojo>.
"""

import csv
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import env
import tasks
from backends import ISOLATED
from competition import METRIC, ROWS, answers, make_competition, write
from flatlab.episode import grading
from flatlab.episode.builtin import builtin_names
from flatlab.episode.mlgym import mlgym_names
from flatlab.episode.sanity import at_the_top, csv_rules, degenerate, sanity_file
from flatlab.episode.task import last_json_object, parse_grade
from flatlab.episode.task_files import TASKS_DIR
from flatlab.errors import SandboxFault, UserError
from flatlab.options import SandboxOptions
from flatlab.runs.cli import one_sentence
from helpers import python
from tasks import load_task

MLGYM, DOJO = os.environ.get("MLGYM_ROOT"), os.environ.get("MLEDOJO_REPO")
real_mlgym = pytest.mark.skipif(not MLGYM, reason="set MLGYM_ROOT to a checkout of MLGym")
real_dojo = pytest.mark.skipif(not DOJO, reason="set MLEDOJO_REPO to a checkout of MLE-Dojo")


@pytest.fixture(autouse=True)
def only_what_a_test_names(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(grading, "grades", {})


def lay_out(task, folder, artefacts):
    for path, source in task.grading_files(artefacts).items():
        write(folder, {path: source if isinstance(source, bytes) else source.read_bytes()})


def grade(task, folder, artefacts, split=None):
    """(score, message) of a grader that runs in `folder`, without the protection of a sandbox."""
    lay_out(task, folder, artefacts)
    argv = [
        sys.executable if part == "python3" else part
        for part in task.grader_argv(split or task.splits[-1])
    ]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60)
    return parse_grade(last_json_object(done.stdout), task)


def content(root):
    """A hash of everything under a folder."""
    rows = [
        (str(path), path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    ]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


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
print(json.dumps({"score": sum(play() for _ in range(300)) / 3000}))
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
    assert (task.source, task.metric, task.higher_is_better, task.baseline) == (
        "mlgym",
        "Score",
        True,
        0.5,
    )
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
    with pytest.raises(UserError, match=r"data is missing; `python _generate_split.py` in .*help"):
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
    assert all(map(task.is_artefact, ("checkpoints/a-0.pkl", "src/deep/net.py", "my.yaml")))
    assert not any(map(task.is_artefact, ("evaluate.py", "data/my.yaml", "src")))
    files = {"checkpoints/a.pkl": b"", "src/config.yaml": b"four"}
    assert "src/train.py" not in task.grading_files(files)  # the agent has removed it
    assert grade(task, tmp_path / "a", files) == (4, "")
    assert grade(task, tmp_path / "b", files | {"config.yaml": b"seven.."}) == (7, "")
    assert grade(task, tmp_path / "c", {"checkpoints/a.pkl": b""}) == (
        None,
        "there is no configuration (*.yaml)",
    )


def test_mlgym_needs(mlgym):
    task = load_task("imageClassificationFMnist", mlgym)
    assert task.needs_network
    assert not task.needs_gpu
    assert set(task.public) == {"sample_submission.csv"}


def test_mlgym_task_of_the_user(mlgym):
    task = load_task("mine", mlgym)
    assert (task.metric, task.higher_is_better, task.baseline) == ("mae", False, 3)
    assert set(task.hidden) == {"key.csv"}


def test_mlgym_says_what_is_wrong(mlgym):
    cases = [
        (
            "3SATTime",
            "data/3SATTime/data is missing; task 3SATTime needs it: MLGym does not publish",
        ),
        (
            "regressionHousePrice",
            "never published.*regressionKaggleHousePrice is the one that works",
        ),
        ("other", "metric and higher_is_better"),
        ("battelOfSexes", "did you mean battleOfSexes"),
    ]
    for name, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            load_task(name, mlgym)
        assert "\n" not in str(caught.value)


def test_mlgym_starter_missing(mlgym):
    (mlgym / "data/battleOfSexes/target.py").unlink()
    with pytest.raises(UserError, match="target.py is missing; `git checkout"):
        load_task("battleOfSexes", mlgym)


def test_roots_come_first_and_from_the_environment(mlgym, monkeypatch, tmp_path):
    assert load_task("titanic").source == "built-in"
    monkeypatch.setenv("MLGYM_ROOT", str(mlgym))
    assert load_task("titanic").source == "mlgym"
    assert load_task("digits").source == "built-in"
    assert load_task("titanic", mlgym_root="").source == "built-in"
    with pytest.raises(UserError, match="not a checkout of MLGym"):
        load_task("titanic", mlgym_root=tmp_path)


# --------------------------------------------------------------------------------------- the proxy


def play(mlgym, folder, source):
    return grade(load_task("battleOfSexes", mlgym), folder, {"strategy.py": source.encode()})


def test_proxy_plays(mlgym, tmp_path):
    begin = time.perf_counter()
    score, message = play(mlgym, tmp_path / "a", "def row_strategy(history): return 0")
    assert message == ""
    assert score == pytest.approx(0.5, abs=0.05)
    assert time.perf_counter() - begin < 5  # 3,000 moves: 0.2 s on an idle machine
    assert list((tmp_path / "a").iterdir()) == []  # nothing was left to read
    score, message = play(
        mlgym,
        tmp_path / "b",
        """
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
""",
    )
    assert message == ""
    assert score == pytest.approx(0.5, abs=0.05)


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


def test_proxy_keeps_the_grader_out_of_reach(mlgym, tmp_path):
    """Tries to read the partner, and the grader's memory, frames and modules; says what it got."""
    folder = tmp_path / "a"
    score, said = play(
        mlgym,
        folder,
        """
import os, sys
def row_strategy(history):
    found, parent = [], f"/proc/{os.getppid()}"
    for path in (f"{parent}/mem", f"{parent}/environ", f"{parent}/fd/0", f"{parent}/fd/1",
                 FOLDER + "/target.py", FOLDER + "/evaluate.py", FOLDER + "/strategy_agent.py"):
        try:
            open(path, "rb")
            found.append(path)
        except OSError:
            pass
    try:
        import target
        found.append("target")
    except ImportError:
        pass
    frame = sys._getframe()
    while frame:
        found += [frame.f_code.co_filename] if "evaluate" in frame.f_code.co_filename else []
        frame = frame.f_back
    status = open("/proc/self/status").read()
    raise ValueError(f"found {found} caps {status.split('CapEff:')[1].split()[0]}")
""".replace("FOLDER", repr(str(folder))),
    )
    assert "found [] caps 0000000000000000" in said


def test_proxy_shares_no_random_numbers(mlgym, tmp_path):
    score, said = play(
        mlgym,
        tmp_path / "a",
        """
import random
def row_strategy(history):
    state = random.getstate()       # what the partner would draw next, if it drew in this process
    move = random.randint(0, 1)
    random.setstate(state)
    return move
""",
    )
    assert said == ""
    assert score == pytest.approx(0.5, abs=0.05)


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
    text = answers(lambda i: 0).encode()
    part = [
        grade(task, tmp_path / "a", {"submission.csv": text}, split)[0] for split in task.splits
    ]
    assert task.baseline == part[0]
    assert len(set(part)) == 3
    assert all(70 < score < 130 for score in part)
    for wrong in (3, 4):  # one wrong value shows in exactly one of them
        text = answers(lambda i, wrong=wrong: i + (i == wrong)).encode()
        assert sorted(
            grade(task, tmp_path / "a", {"submission.csv": text}, split)[0] > 0
            for split in task.splits
        ) == [False, False, True]


def test_dojo_position_and_standard_error(dojo, tmp_path):
    """Answers of 0 for 0 to 199 have a standard error of 57.7 / sqrt(rows of the part)."""
    task = load_task("mine", mledojo_root=dojo)

    def graded(value, split):
        lay_out(task, tmp_path / "a", {"submission.csv": answers(value).encode()})
        return json.loads(python(*task.grader_argv(split)[1:], cwd=tmp_path / "a").stdout)

    position = (2 / 4 + 2 / 2) / 2  # third of four, first of two
    assert graded(lambda i: i + 3, "test") == {"score": 3, "stderr": 0, "position": position}
    for split, rows in zip(task.splits, (ROWS / 2, ROWS / 4, ROWS / 4)):
        error = graded(lambda i: 0, split)["stderr"]
        assert error == pytest.approx(ROWS / math.sqrt(12 * rows), rel=0.5)


@pytest.mark.slow
def test_dojo_refuses(dojo, tmp_path):
    cases = [
        (answers(lambda i: i, range(10)), "200 rows of ['id', 'y'] are needed"),
        (answers(lambda i: i, header="id,z"), "are needed"),
        (answers(lambda i: i, range(1, ROWS + 1)), "other ids"),
        (answers(lambda i: ""), "not a finite number"),
        (answers(lambda i: "x"), "cannot be computed"),
        ("", "cannot be read"),
        ("\xff\x00,", "are needed"),
        ('id,y\n"', "cannot be read"),
    ]
    task = load_task("mine", mledojo_root=dojo)
    for text, message in cases:
        score, said = grade(task, tmp_path / "a", {"submission.csv": text.encode()})
        assert score is None
        assert message in said


def test_dojo_without_ids_has_one_part(dojo, tmp_path):
    write(
        dojo / "mine/data",
        {
            "private/test_answer.csv": answers(lambda i: i, header="row,y"),
            "public/sample_submission.csv": answers(lambda i: 0, header="other,y"),
        },
    )
    metric = dojo.parent.parent / "mledojo/competitions/mine/utils/metric.py"
    metric.write_text(
        METRIC.replace(
            'submission["id"].values != ground_truth["id"].values', "np.array([False])"
        ).replace("list(submission.columns) != columns", "False")
    )
    task = load_task("mine", mledojo_root=dojo)
    assert task.splits == ("test",)
    assert task.baseline == (ROWS - 1) / 2
    assert grade(task, tmp_path / "a", {"submission.csv": answers(lambda i: i + 1).encode()}) == (
        1,
        "",
    )


def test_dojo_sample_that_cannot_be_graded(dojo):
    write(dojo / "mine/data", {"public/sample_submission.csv": "id,y\n1,2\n"})
    task = load_task("mine", mledojo_root=dojo)
    assert task.baseline == 5
    assert task.reference == 3.25  # the last place
    for board in ("private", "public"):
        (dojo / f"mine/data/private/{board}_leaderboard.csv").unlink()
    with pytest.raises(UserError, match="sample submission of mine cannot be graded.*200 rows"):
        load_task("mine", mledojo_root=dojo)


def test_dojo_says_what_is_missing(dojo, tmp_path):
    cases = [
        ("data/prepared/mine/data/private", "private is missing; let MLE-Dojo prepare mine again"),
        (
            "data/prepared/mine/data/public/sample_submission.csv",
            "public/sample_submission.csv is missing",
        ),
        ("data/prepared/mine/data/private/test_answer.csv", "private/test_answer.csv is missing"),
        ("mledojo", "set .MLEDOJO_REPO to a checkout"),
        ("data/prepared/mine", "no <name>/data/public"),
    ]
    for path, message in cases:
        (tmp_path / "MLE-Dojo" / path).rename(tmp_path / "away")
        with pytest.raises(UserError, match=message):
            load_task("mine", mledojo_root=dojo)
        (tmp_path / "away").rename(tmp_path / "MLE-Dojo" / path)


def test_dojo_metric_that_cannot_be_loaded(dojo, tmp_path):
    write(tmp_path / "MLE-Dojo", {"mledojo/competitions/mine/utils/metric.py": "import not_there"})
    with pytest.raises(UserError, match="No module named 'not_there'"):
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
    before, loaded, refused = content(Path(MLGYM, "configs")), [], {}
    for name in mlgym_names(Path(MLGYM)):
        try:
            task = load_task(name, MLGYM)
            assert task.name == name
            assert task.metric
            assert task.splits == ("test",)
            assert "evaluate.py" in task.hidden
            assert not any(
                word in path
                for path in task.public
                for word in ("answer", "ground_truth", "target.py")
            )
            loaded.append(name)
        except UserError as error:
            refused[name] = str(error)
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
def test_real_mlgym_games(in_a_sandbox):
    cases = [
        ("battleOfSexes", None, 1.0227, 0.02),
        ("battleOfSexes", "0", 1.44, 0.02),
        ("prisonersDilemma", None, 2.3716, 0.03),
        ("prisonersDilemma", "1", 2.6251, 0.03),
        ("blotto", None, -0.248, 0.02),
        ("blotto", "[30] * 4 + [0] * 2", 0.25, 0.02),
        ("blotto", "[20] * 6", -0.005, 0.02),
    ]
    for name, strategy, exact, error in cases:
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
    text = "PassengerId,Survived\n" + "".join(
        f"{row['PassengerId']},{int(row['Sex'] == 'female')}\n" for row in rows
    )
    assert in_a_sandbox(task, {"submission.csv": text.encode()}) == (1.0, "")
    assert "women" in degenerate(task)
    text = "PassengerId,Survived\n" + f"{rows[0]['PassengerId']},0\n" * len(
        rows
    )  # worth 1.0 in MLGym
    assert in_a_sandbox(task, {"submission.csv": text.encode()}) == (
        None,
        "a PassengerId is there twice",
    )


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
    return csv_rules(tmp_path / "train.csv", tmp_path / "test.csv")


def test_trivial_rules_of_classes_and_numbers(tmp_path):
    colour = ("blue", "red", "red")
    train = "id,name,colour,x,y\n" + "".join(
        f"{i},n{i},{colour[i % 3]},{i % 30},{int(i % 3 > 0)}\n" for i in range(99)
    )
    found = trivial(
        tmp_path, train, "id,name,colour,x\n500,n,blue,1\n501,n,green,\n"
    )  # green: never seen
    assert found == {
        "always 1": "id,y\n500,1\n501,1\n",
        "always 0": "id,y\n500,0\n501,0\n",
        "by colour alone": "id,y\n500,0\n501,1\n",
    }
    train = "id,x,y\n" + "".join(f"{i},{i},{i * i}\n" for i in range(1, 101))
    found = trivial(tmp_path, train, "id,x\n500,1\n501,100\n")
    values = [float(line.split(",")[1]) for line in found["by x alone"].splitlines()[1:]]
    assert values[0] < 300
    assert values[1] > 8000
    assert set(found) == {"always 3383.5", "always 2550.5", "by x alone"}
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


@pytest.mark.parametrize(
    "name, words",
    [
        ("titanic", ["by sex alone", "not degenerate"]),
        ("battleOfSexes", ["always 0", "degenerate: always 0"]),
    ],
)
def test_command(tmp_path, capsys, name, words):
    tasks.main(name, sandbox=SandboxOptions("local"))
    said = capsys.readouterr().out
    assert all(word in said for word in words)
    assert len(list((tmp_path / "cache/flatlab/sanity").glob("*.json"))) == 1


def test_command_without_a_name_lists_all_tasks(mlgym, capsys):
    tasks.main(mlgym_root=str(mlgym))
    lines = capsys.readouterr().out.splitlines()
    assert ["mine", str(mlgym)] in [line.split() for line in lines]
    assert "accuracy, higher is better, baseline 0.6782" in "\n".join(lines)
    assert len(lines) == len(mlgym_names(mlgym)) + len(builtin_names())


def test_command_with_a_sandbox_that_breaks_says_one_sentence(monkeypatch, capsys):
    def broken(*_, **__):
        raise SandboxFault("no daemon")

    monkeypatch.setattr(tasks, "open_sandbox", broken)
    with pytest.raises(SystemExit) as end:
        one_sentence(lambda: tasks.main("titanic", sandbox=SandboxOptions("local")))
    assert end.value.code == 1
    assert capsys.readouterr().err == "The sandbox broke: no daemon\n"
