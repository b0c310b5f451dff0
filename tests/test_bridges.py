"""Bridges of integrations/: Harbor's task folders, and MLE-Dojo's JSON actions, on a competition
that is made here.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from backends import ISOLATED, needs_docker
from competition import ROWS, make_competition
from env import Env
from flatlab.errors import SandboxFault
from flatlab.sandbox.images import foreign_image
from flatlab.task.grading import grades
from helpers import do, user_error
from integrations import mledojo_actions
from tasks import load_task

# ---- Harbor

FOLDER = Path(__file__).with_name("harbor_task")
SORT = (
    "printf '#!/bin/sh\\nsort\\n' > sort.sh; chmod +x sort.sh; ./sort.sh < words.txt > sorted.txt"
)


@pytest.fixture
def folder(tmp_path):
    """A copy of the folder, to be changed."""
    return shutil.copytree(FOLDER, tmp_path / "harbor_task", symlinks=True)


def said(world, text):
    return do(world, text).observation


@needs_docker
def test_an_episode_in_a_folder():
    task = load_task(str(FOLDER))
    assert task.prompt.startswith("Write the sorted words")
    assert "canary" not in task.prompt
    assert (task.splits, task.source, task.needs_network) == (("test",), "harbor", False)
    with Env(task, "docker") as world:
        assert "link.txt" in world.reset()
        assert "expected" not in world.prompt()
        seen = said(world, "ls /tests /solution /logs; find / -name expected.txt 2>/dev/null")
        assert seen.count("No such file") == 3
        assert "\n/" not in seen
        assert said(world, "cat /app/words.txt") == "pear\nfig\napple"
        assert world.score().message == ("no submission, the workspace is still as it was given")
        said(world, SORT)
        assert world.score().value == pytest.approx(2 / 3)
        said(world, "rm words.txt")  # what is removed is missing in the grading, too
        assert world.score().value == 1
        said(world, "ln -s /tests/expected.txt answer")
        assert world.score().message == "no submission, answer is neither a plain file nor a folder"


@needs_docker
def test_a_child_of_a_search_is_scored_for_its_own_change():
    with Env(load_task(str(FOLDER)), "docker") as world:
        world.reset()
        said(world, SORT)
        with world.fork() as child:
            assert "sorted.txt" in child.prompt()
            assert not child.score().valid
            said(child, "rm words.txt")
            assert child.score().value == 1
        with world.fork(clear_artefacts=False) as same:
            assert same.score().value == pytest.approx(2 / 3)


@needs_docker
def test_what_the_agent_puts_beside_the_tests_is_not_there(folder):
    """A file where the tests are laid out, and one of the names of the reward."""
    (folder / "tests/test.sh").write_text(
        "ls -A /tests /app > /logs/verifier/seen.txt\n"
        "grep -q mine /logs/verifier/seen.txt || echo '{\"first\": 0.25}' "
        "> /logs/verifier/reward.json\n"
    )
    with Env(load_task(str(folder)), "docker") as world:
        world.reset()
        said(world, "mkdir -p .flatlab/tests; touch .flatlab/tests/mine .flatlab/mine")
        assert world.score().value == 0.25


@needs_docker
def test_tests_that_write_no_reward(folder):
    (folder / "tests/test.sh").write_text("echo secret; exit 1\n")
    with Env(load_task(str(folder)), "docker") as world:
        world.reset()
        said(world, "touch new")
        score = world.score()
    assert not score.valid
    assert score.message == "The tests wrote no reward."


def test_what_cannot_be_given_is_one_sentence(folder):
    settings = (folder / "task.toml").read_text()
    for more, words in (
        ("[[environment.mcp_servers]]\nname = 'a'", r"environment\.mcp_servers \(task\.toml\)"),
        ("tpu = {type = 'v4', topology = '2x2'}", r"environment\.tpu"),
        ("memory_mb = 65536", "more than 4096 MB"),
        ("memory = '8G'", "more than 4096 MB"),
        ("memory = 'much'", "an amount of memory that is not a number"),
        ("[verifier.environment]\ncpus = 1", r"verifier\.environment"),
    ):
        text = settings.replace("memory_mb = 2048", "") if "memory" in more else settings
        (folder / "task.toml").write_text(text + more)
        with user_error(f"asks for what a sandbox here lacks: {words}"):
            load_task(str(folder))
    (folder / "task.toml").write_text(settings + "gpus = '1'")
    with user_error(r"in task\.toml must be a number"):
        load_task(str(folder))
    (folder / "task.toml").write_text(settings + "memory_mb")
    with user_error("cannot be read as a Harbor task"):
        load_task(str(folder))
    (folder / "task.toml").write_text(settings)
    (folder / "environment/docker-compose.yaml").write_text("services: {}")
    with user_error("lacks: environment/docker-compose.yaml"):
        load_task(str(folder))
    (folder / "tests/test.sh").unlink()
    with user_error(r"cannot be read as a Harbor task: .*tests/test\.sh"):
        load_task(str(folder))


@needs_docker
def test_images_that_cannot_be_built(tmp_path):
    with user_error("cannot build the image of task empty"):
        foreign_image(tmp_path, "empty")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
    with user_error("which must have python3, bash and tar"):
        foreign_image(tmp_path, "bare")
    (tmp_path / "Dockerfile").write_text("FROM aigym/mlgym-agent:latest\n")
    with user_error("has no working directory"):
        foreign_image(tmp_path, "rootless")
    with user_error("has no image absent:1; get it with `docker pull"):
        foreign_image(tmp_path, "named", "absent:1")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_tests_in_the_folder_of_the_image_are_refused(folder, link):
    link(folder / "tests/test.sh", folder / "environment/copy.sh")
    with user_error("test.sh is hidden, so it cannot be a public file, too"):
        load_task(str(folder))


# ---- MLE-Dojo's actions


@pytest.fixture(scope="module")
def competition(tmp_path_factory):
    """The task, loaded once."""
    folder = tmp_path_factory.mktemp("competition")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return load_task("mine", "", make_competition(folder))


@pytest.fixture(params=ISOLATED)
def world(request, competition):
    with Env(competition, request.param) as world:
        world.message = mledojo_actions.ACTIONS_TEXT
        world.step = partial(world.step, act=mledojo_actions.act)  # what `do` calls, too
        world.reset()
        if world.sandbox.run(["python3", "-c", "import pandas"], 30).exit_code:
            pytest.skip("the sandbox has no pandas, which the grader needs")
        yield world


def act(world, action, **params):
    return world.step(json.dumps({"action": action, "params": params}))


def history(world):
    """ "action status score" of each row of the history."""
    rows = map(json.loads, act(world, "get_history").observation.split("\n"))
    return [f"{row['action']} {row['status']} {row['score']}" for row in rows]


def writes(value):
    return (
        f"with open('submission.csv', 'w') as f:\n    f.write('id,y\\n' + "
        f"''.join(f'{{i}},{{{value}}}\\n' for i in range({ROWS})))\nprint('written')"
    )


REPLIES = [
    ('{"action": "get_history"}', {"action": "get_history"}),
    ('Now.\n```json\n{"action": "reset", "params": {}}\n```\nDone.', {"action": "reset"}),
    ('<think>{"action": "reset"}</think>{"action": "x"}', {"action": "x"}),
    ('{"action": "x", "params": {"code": "a\nb"}}', {"action": "x", "code": "a\nb"}),
    ('{"action": "x", "code": "print(\'<think>\')"}', {"action": "x", "code": "print('<think>')"}),
    ('<think>I could say\n```json\n{"action": "reset"}\n```\nbut', None),
    ('<think>{"action": "reset"}', None),
    ('```json\n{"action": "reset"}\n```\n```json\n{"action": "reset"}\n```', None),
    ("{" * 100_000, None),
    ('{"action": "reset", "params": 7}', None),
    ("```bash\nls\n```", None),
]


def test_replies():
    for reply, action in REPLIES:
        assert mledojo_actions.json_action(reply) == action


def test_request_info(world):
    assert "execute_code" in world.prompt()

    def info(**params):
        return act(world, "request_info", **params).observation

    assert "Predict y." in info()
    assert info(info_type="sample_submission") == "id,y\n0,0\n1,0\n2,0\n"
    assert "data/images/1.png (4 bytes)" in info(info_type="data_structure")
    assert info(info_type="data_path") == f"{world.sandbox.workspace}/data"
    assert "lower is better" in info(info_type="metadata")
    assert "output_path:" in info(info_type="all")
    assert "private" not in info(info_type="all")
    assert act(world, "request_info", info_type="answers").status == "rejected"
    step = act(world, "delete_everything")
    assert step.status == "rejected"
    assert "there are request_info, validate_code" in step.observation


def test_code_is_run_and_scored_with_its_place(world):
    step = act(world, "validate_code", code=writes("i"))
    assert step.observation == "written"
    assert step.status == "ok"
    assert step.score is None
    assert world.score().message.startswith("no submission")  # only tried
    step = act(world, "execute_code", code=writes("i + 3"))
    assert step.status == "validate"
    assert step.score.value == 3
    assert step.score.position == 0.75  # third of four, first of two
    for text in ("validation score: 3.0000", "\nposition: 0.7500", "best so far: 3.0000"):
        assert text in step.observation
    before = len(grades)
    assert world.score().position == 0.75
    assert len(grades) == before
    assert world.score("test").position == 0.75
    step = act(world, "execute_code", code=writes("i + 9"))
    assert step.score.value == 9
    assert step.score.position == 0
    assert "best so far: 3.0000" in step.observation
    act(world, "validate_code", code=writes("i"))  # what was submitted comes back
    assert world.score().value == 9
    assert "\nposition: 0.0000" in do(world, "validate").observation
    step = act(world, "execute_code", code="print(open('submission.csv').read())")
    assert step.status == "error"
    assert "FileNotFoundError" in step.observation
    assert world.score().value == 9
    assert history(world) == [
        "validate_code ok None",
        "execute_code validate 3.0",
        "execute_code validate 9.0",
        "validate_code ok None",
        "validate validate 9.0",
        "execute_code error None",
    ]
    assert "Predict y." in act(world, "reset").observation
    assert act(world, "get_history").observation == "Nothing was run yet."
    assert world.score().message.startswith("no submission")


def test_code_that_fails_or_takes_too_long(world):
    assert act(world, "execute_code", code=" ").status == "rejected"
    assert act(world, "execute_code").status == "rejected"
    step = act(world, "execute_code", code="print(1 / 0)")
    assert step.status == "error"
    assert "ZeroDivisionError" in step.observation
    assert step.score is None
    slow = {"action": "execute_code", "code": "import time; time.sleep(30)"}
    assert world.step(json.dumps(slow), timeout=0.5).status == "timeout"
    step = act(world, "execute_code", code="open('submission.csv', 'w').write('id,y\\n1,2\\n')")
    assert step.status == "invalid"
    assert "200 rows" in step.observation
    assert step.score.position is None


@pytest.mark.fault(14, "the agent makes the place of its program a folder, or moves the workspace")
@pytest.mark.parametrize(
    "spoil",
    [
        "mkdir execution_1.py execution_2.py",
        "mv ~/workspace ~/gone",
        "rm -rf ~/workspace; touch ~/workspace",
    ],
)
def test_no_place_for_the_program_is_no_fault(world, spoil):
    do(world, spoil)
    step = act(world, "execute_code", code="print(1)")
    assert step.status == "rejected"
    assert "Nothing was run. execution_2.py cannot be written" in step.observation
    assert do(world, "echo alive").observation == "alive"
    world.reset()
    remove = "import os, shutil; os.chdir('/'); shutil.rmtree('/home/agent/workspace', True)"
    assert act(world, "execute_code", code=remove).status in ("ok", "invalid", "error")
    world.sandbox.close()  # a broken sandbox is one
    with pytest.raises(SandboxFault):
        act(world, "execute_code", code="print(1)")
