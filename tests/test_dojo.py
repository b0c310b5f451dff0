"""MLE-Dojo's five actions in real sandboxes, on a small competition that is made here."""

import json
from functools import partial

import pytest

from backends import ISOLATED
from competition import ROWS, make_competition
from env import Env
from flatlab.errors import SandboxFault
from flatlab.task.grading import grades
from helpers import do
from integrations import mledojo_actions
from tasks import load_task


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


# ----------------------------------------------------------------------------------------- replies


REPLIES = [
    ('{"action": "get_history"}', {"action": "get_history"}),
    ('Now.\n```json\n{"action": "reset", "params": {}}\n```\nDone.', {"action": "reset"}),
    (
        '<think>```json\n{"action": "reset"}\n```</think>{"action": "get_history"}',
        {"action": "get_history"},
    ),
    (
        '{"action": "execute_code", "params": {"code": "a\nb"}}',
        {"action": "execute_code", "code": "a\nb"},
    ),
    (
        '{"action": "execute_code", "code": "print(\'<think>\')"}',
        {"action": "execute_code", "code": "print('<think>')"},
    ),
    ('<think>I could say\n```json\n{"action": "reset"}\n```\nbut', None),
    ('<think>{"action": "reset"}', None),
    ('```json\n{"action": "reset"}\n```\n```json\n{"action": "reset"}\n```', None),
    ('{"params": 1}', None),
    ("{" * 100_000, None),
    ('{"action": "reset", "params": 7}', None),
    ("```bash\nls\n```", None),
]


def test_replies():
    for reply, action in REPLIES:
        assert mledojo_actions.json_action(reply) == action


# -------------------------------------------------------------------------------- the five actions


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


def test_history_shows_bash_blocks_and_what_they_validated(world):
    act(world, "request_info")
    do(world, "ls")
    do(world, "exit 3")
    world.step("no block")
    do(world, "validate")
    assert history(world) == ["bash ok None", "bash error None", "validate invalid None"]
    world.reset()
    assert act(world, "get_history").observation == "Nothing was run yet."


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
