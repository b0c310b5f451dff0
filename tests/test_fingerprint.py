"""A run belongs to the code, the task and the model that made it: a copy never gets its results."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import helpers
from flatlab.runs import fingerprint, store
from flatlab.runs.reader import read_mapping, read_rows
from helpers import step_row, user_error
from policy import ModelPath
from tasks import load_task

ROOT = Path(__file__).parents[1]
TRAIN = "--steps 1 --groups 1 --max-groups 1 --group-size 2 --eval-episodes 2 --max-turns 2".split()
SEARCH = "--nodes 3 --max-turns 2 --sampling-mode none".split()
FRESH = {
    "code": {"mine.py": "a"},
    "tasks": {"titanic": {"baseline": "b"}},
    "model": {"w": "c"},
}


# ------------------------------------------------------------------ digests


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """A copy of the project, without what nobody imports."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("flatlab", "configs", "integrations"):
        shutil.copytree(ROOT / name, folder / name)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    return folder


def code_of(folder, script="grpo.py"):
    """The digests as a process of that copy computes them."""
    program = (
        "import json, sys; from pathlib import Path; from flatlab.runs import fingerprint;"
        "print(json.dumps(fingerprint.code_digests(Path(sys.argv[1]).absolute())))"
    )
    return json.loads(helpers.python("-c", program, script, cwd=folder).stdout)


def test_code_is_the_script_and_what_it_imports(unpacked):
    code = code_of(unpacked)
    assert {"grpo.py", "env.py", "policy.py", "flatlab/world/texts.py"} <= set(code)
    assert "flatlab/sandbox/guest/isolate.py" in code  # runs in the sandbox, nothing imports it
    assert "search.py" not in code
    assert not [name for name in code if name.startswith("flatlab/view/")]


def test_comments_and_layout_do_not_count_but_every_other_edit_does(unpacked):
    before = code_of(unpacked)
    texts = unpacked / "flatlab/world/texts.py"
    original = texts.read_text()
    texts.write_text(f"# a comment\n\n{original}\n\n")
    assert code_of(unpacked) == before
    texts.write_text(f"{original}\nMORE = 1\n")
    assert fingerprint.changed(before, code_of(unpacked)) == "flatlab/world/texts.py"
    texts.write_text(original)


def test_a_copy_counts_with_the_modules_beside_it(unpacked):
    shutil.copy(unpacked / "grpo.py", unpacked / "mine.py")
    (unpacked / "my_rewards.py").write_text("BONUS = 1\n")
    with open(unpacked / "mine.py", "a") as script:
        script.write("import my_rewards\n")
    code = code_of(unpacked, "mine.py")
    assert {"mine.py", "my_rewards.py"} <= set(code)
    assert "grpo.py" not in code


def test_the_files_of_an_agent_program_count(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = Path("my_agent.py")
    program.write_text("1")
    Path("my_agent.log").write_text("")  # does not count
    command = "python my_agent.py >> my_agent.log 2>&1"
    old = fingerprint.fingerprint(__file__, [], command=command)["code"]
    program.write_text("2")
    Path("my_agent.log").write_text("more")
    new = fingerprint.fingerprint(__file__, [], command=command)["code"]
    assert fingerprint.changed(old, new) == "my_agent.py"


def test_each_part_of_a_task_is_named(tmp_path):
    task = load_task("titanic")
    before = fingerprint.task_digests(task)
    answers = tmp_path / "answers.csv"
    answers.write_bytes(task.hidden["answers.csv"].read_bytes() + b"\n")
    changes = {
        "prompt": {"prompt": task.prompt + "!"},
        "baseline": {"baseline": 0.5},
        "reference": {"reference": 0.9},
        "metric": {"metric": "auc"},
        "grader": {"grader": (*task.grader, "--strict")},
        "answers.csv": {"hidden": task.hidden | {"answers.csv": answers}},
    }
    for name, change in changes.items():
        digests = fingerprint.task_digests(replace(task, **change))
        assert fingerprint.changed(before, digests) == name


def test_a_task_of_many_files_is_summed_up_by_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "MOST_FILES", 1)
    task = load_task("titanic")
    digests = fingerprint.task_digests(task)
    assert "data" in digests
    assert "data/train.csv" not in digests
    train = tmp_path / "train.csv"
    train.write_text("id\n")
    other = replace(task, public=task.public | {"data/train.csv": train})
    assert fingerprint.changed(digests, fingerprint.task_digests(other)) == "data"


def test_the_files_of_a_model_and_of_its_adapter_count(tmp_path):
    base, adapter = tmp_path / "model", tmp_path / "best"
    for folder in (base, adapter):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(b"1")
        (folder / "README.md").write_text("notes")
    model = ModelPath(str(base), str(adapter), False)
    before = fingerprint.model_digests(model)
    assert set(before) == {"weights.safetensors", "adapter/weights.safetensors"}
    (adapter / "weights.safetensors").write_bytes(b"2")
    after = fingerprint.model_digests(model)
    assert fingerprint.changed(before, after) == "adapter/weights.safetensors"


def test_a_model_of_the_hub_counts_with_its_revision(tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "hub/models--org--m"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(revision)
    (model / "snapshots" / revision).mkdir(parents=True)
    shutil.copy(ROOT / "configs/tiny/config.json", model / "snapshots" / revision)
    program = (
        "from flatlab.runs import fingerprint; from policy import ModelPath;"
        "print(fingerprint.model_digests(ModelPath('org/m', None, False)))"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = helpers.python("-c", program, env=environment)
    assert done.stdout == f"{{'revision': '{revision}'}}\n", done.stderr


def test_a_large_file_is_read_once(tmp_path, monkeypatch):
    from flatlab import cache

    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(b"large")
    first = cache.file_digest(path)
    times = path.stat()
    assert len(list((tmp_path / "cache/flatlab/digests").iterdir())) == 1
    path.write_bytes(b"LARGE")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.file_digest(path) == first  # the same size and time: not read again
    os.utime(path, ns=(0, 0))
    assert cache.file_digest(path) != first


# ------------------------------------------------------------------ what may go on


@pytest.fixture
def begun(tmp_path, quick_provenance):
    """begun(finished=...) makes a run of FRESH with one step, and returns its directory."""

    def make(finished):
        run = store.open_run(tmp_path / "run", helpers.CONFIG, FRESH)
        run.log(step_row(0))
        run.result(status="finished" if finished else "running")
        run.lock.close()
        return run.dir

    return make


def again(folder, **changes):
    def is_finished(run):
        return run.results().get("status") == "finished"

    return store.open_run(folder, helpers.CONFIG, FRESH | changes, is_finished=is_finished)


def test_a_finished_run_of_the_same_makers_is_opened_and_left_alone(begun):
    folder = begun(finished=True)

    def contents():
        return {path: path.read_bytes() for path in folder.glob("*.*") if path.is_file()}

    before = contents()
    assert again(folder).finished
    assert contents() == before


def test_a_finished_run_of_other_code_is_refused(begun):
    folder = begun(finished=True)
    with user_error(r"finished and was made by other code .*: mine.py, new.py"):
        again(folder, code={"mine.py": "changed", "new.py": "1"})


def test_an_unfinished_run_goes_on_with_other_code_and_marks_its_rows(begun, capsys):
    folder = begun(finished=False)
    run = again(folder, code={"mine.py": "changed"})
    run.log(step_row(1))
    run.lock.close()
    warning = capsys.readouterr().out
    assert "begun by other code (now different: mine.py)" in warning
    assert [row["made_by"] for row in run.rows()] == [0, 1]
    code = read_mapping(folder / "config.yaml")["fingerprint"]["code"]
    assert code == [{"mine.py": "a"}, {"mine.py": "changed"}]
    run = again(folder, code={"mine.py": "changed"})
    assert run.code_number == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("finished", [True, False])
def test_another_task_or_model_is_refused(begun, finished):
    folder = begun(finished)
    with user_error("version of the task titanic .*: baseline.*--name"):
        again(folder, tasks={"titanic": {"baseline": "x"}})
    with user_error("version of the model .*: w.*--name"):
        again(folder, model={"w": "x"})


def test_a_run_without_a_fingerprint_is_refused(tmp_path, quick_provenance):
    run = store.open_run(tmp_path, helpers.CONFIG, FRESH)
    run.log(step_row(0))
    run.lock.close()
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().partition("fingerprint:")[0])
    with user_error("earlier version"):
        again(tmp_path)


def test_a_renamed_or_copied_run_goes_on(begun):
    folder = begun(finished=False)
    shutil.copytree(folder, folder.with_name("copy"))
    folder.rename(folder.with_name("renamed"))
    for name in ("copy", "renamed"):
        config = helpers.CONFIG | {"name": name}
        run = store.open_run(folder.with_name(name), config, FRESH)
        assert len(run.rows()) == 1
        assert read_mapping(run.dir / "config.yaml")["name"] == name


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "", ".", "a" * 201])
def test_a_name_that_is_no_folder_of_logs_is_refused(name):
    with user_error("--name"):
        store.run_directory(name)


# ------------------------------------------------------------------ copies, as a user makes them


@pytest.fixture(scope="module")
def project(unpacked, tmp_path_factory):
    """A project with a finished run of grpo.py and of search.py, each under its default name."""
    folder = tmp_path_factory.mktemp("user") / "project"
    shutil.copytree(unpacked, folder)
    start(folder, "grpo.py", *TRAIN)
    start(folder, "search.py", *SEARCH)
    return folder


def start(folder, script, *flags, code=0):
    """(stdout, stderr) of a script of that project, which ends with this exit code."""
    flags = ("--task", "titanic", "--backend", "local", *flags)
    done = helpers.python(script, *flags, cwd=folder, env=os.environ | {"MLGYM_ROOT": ""})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def copied(folder, script, name, *edits):
    text = (folder / script).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / name).write_text(text)


@pytest.mark.slow
def test_a_copy_of_grpo_with_another_reward_makes_a_run_of_its_own(project):
    edit = ("    return max(-1.0, min(1.0, improvement))\n", "    return 0.5\n")
    copied(project, "grpo.py", "mine.py", edit)
    out, _ = start(project, "mine.py", *TRAIN)
    run = project / "logs/mine-titanic-tiny-0"
    for episode in read_rows(run / "episodes/000000.jsonl"):
        assert episode["reward"] == 0.5 or not episode["score"]["valid"]
    assert (run / "curves.png").exists()
    assert "nothing was run" not in out


RULE = """
def chain(t, rng):
    return None if t.running else Choice([t.root, *t.finished][-1].id)


SELECT = {
    "chain": Rule(chain),"""
OPERATOR = """OPERATORS = {
    "distill": Operator(lambda choice, parent: choice.parent == "0", "Make it shorter.", "v"),"""


@pytest.mark.slow
def test_a_copy_of_search_with_another_rule_and_operator_has_a_run_and_a_row_of_its_own(project):
    copied(project, "search.py", "mine2.py", ("\nSELECT = {", RULE), ("OPERATORS = {", OPERATOR))
    start(project, "mine2.py", "--select", "chain", *SEARCH)
    run = project / "logs/mine2-chain-titanic-none-tiny-0"
    rows = read_rows(run / "journal.jsonl")
    assert [row["id"] for row in rows] == ["0.0", "0.0.0", "0.0.0.0"]
    assert rows[0]["op"] == "distill"
    assert (run / "tree.png").exists()
    [original] = project.glob("logs/search-titanic-*")
    done = helpers.python("viz.py", original, run, cwd=project)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("titanic")]
    methods = [line.replace("=", " ").split()[1:3] for line in table]
    assert methods == [["bfs", "search.py"], ["chain", "mine2.py"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, old, new, message",
    [
        ("grpo.py", "N = -1.0", "N = -0.9", "made by other code (now different: grpo.py)"),
        ("flatlab/world/texts.py", "", "MORE = 1\n", "different: flatlab/world/texts.py)"),
        ("configs/tasks/titanic/task.yaml", "baseline: 0.678182", "baseline: 0.6", ": baseline)"),
        ("configs/tasks/grade_csv.py", "", "MORE = 1\n", ": grade_csv.py)"),
        ("configs/tiny/config.json", "", "\n", "the model (now different: config.json)"),
    ],
)
def test_an_edit_of_what_made_a_finished_run_is_refused(project, file, old, new, message):
    """old: text that is replaced; "" appends to the file."""
    path = project / file
    original = path.read_text()
    assert old in original
    path.write_text(original.replace(old, new, 1) if old else original + new)
    try:
        _, err = start(project, "grpo.py", *TRAIN, code=2)
    finally:
        path.write_text(original)
    assert message in err
    assert err.count("\n") == 1
