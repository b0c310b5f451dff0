"""Replies, grading, forks and whole episodes, in real sandboxes."""

import asyncio
import io
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

import env
from backends import ISOLATED, wait_for
from env import Env
from flatlab.errors import ArtefactError, SandboxFault
from flatlab.options import EpisodeOptions, SandboxOptions
from flatlab.sandbox.client import Sandbox
from flatlab.task import grading, machine
from flatlab.task.definition import Task
from flatlab.task.grading import Score
from flatlab.world import blocks
from flatlab.world.actions import fold_tracebacks, fold_warnings
from flatlab.world.episode import Episode, crashed, run_episode
from helpers import (
    LOCAL,
    PROJECT,
    TINY_TEXTS,
    FakePolicy,
    block,
    copy_of,
    do,
    output_of,
    play_once,
    slow,
    trained,
    turn,
    user_error,
    within,
)
from tasks import load_task

CANARY = "canary,4b1d,of,the,hidden,answers"


# ----------------------------------------------------------------------------------------- replies

README = "cat > a.md <<'EOF'\n# Title\n```python\nprint(1)\n```\n\n```\nplain\n```\nEOF\nls"
QUOTED_MARKS = "cat <<E\n</think>\n```\n</think>\nE"

ACCEPTED = [
    (block("ls"), "ls"),
    ("```\nls\n```", "ls"),
    ("```\tBash\u00a0\r\nls\n```\r", "ls"),
    ("````bash\necho '```'\n```\n````", "echo '```'\n```"),
    (block("\n  indented\n\ttab\n"), "\n  indented\n\ttab\n"),
    (block(README), README),
    (block("echo don't ${#x}"), "echo don't ${#x}"),  # bash itself complains about this one
    ("```python\nprint()\n```\n" + block("ls"), "ls"),
    ("<think>I could ```bash\nrm -rf /\n``` but</think>\n" + block("ls"), "ls"),
    ("so I could run\n```bash\nrm -rf /\n```\nno.</think>\n" + block("ls"), "ls"),
    (block("echo </think>"), "echo </think>"),
    ("so </think> and so </think>\n" + block("ls"), "ls"),
    ("~~~\nnot a block\n~~~\n" + block("ls"), "ls"),
    ("Output:\n```\nhello << world\n```\n" + block("ls"), "ls"),
    ("<think>a</think>\n" + block(QUOTED_MARKS), QUOTED_MARKS),
    ("\u200b```bash\u200b\nls\n\ufeff```\u2060", "ls"),
    ("\xad``\u200d`bash\xa0\necho \u200b\n```\u200e", "echo \u200b"),
    ("\xa0\ufe0f```\u2066bash\u2069\nls\n\u3000```\u034f", "ls"),
    ("I say\r\n```bash\r\ncat <<'E'\r\n```\r\nE\r\nls\r\n```\r\n", "cat <<'E'\n```\nE\nls"),
]
HERE = "cat <<E\n```\nx\n  y\nE\nls"


def quoted(first, rest, script=HERE):
    """The block of a script behind a marker, whose other lines have an indent."""
    return first + block(script).replace("\n", f"\n{rest}")


# The block is in a list or a quotation, or has an indent.
INDENTED = [
    quoted("- ", "  "),
    quoted("1. ", "   "),
    quoted("1. Look:\n   ", "   "),
    quoted("1.  Look:\n    ", "    "),
    quoted("10) ", "    "),
    quoted("* a\n    - b\n      ", "      "),
    quoted("- 1. ", "     "),
    quoted("> ", "> "),
    quoted("> ", ">"),
    quoted("> - ", ">   "),
    quoted("- > ", "  > "),
    quoted("\t", "\t"),
    quoted("   ", "   "),
    quoted("   ", ""),
    quoted("- ", ""),
    quoted("- ", "", "\n" + HERE),
    quoted("1. ", "   ", "\n" + HERE),
    quoted("- ```python\n  x\n  ```\n- ", "  "),
    quoted("\xa0\xa0", "\xa0\xa0"),
]
# The fences are in the heredoc.
HEREDOCS = [
    "cat <<E\n```\nE",
    "cat > a <<'E F' && ls\n```bash\nls\n```\nE F\nls",
    'cat <<-"E"|wc; ls\n```python\n```\n\tE',
    "cat <<\\E >a 2>&1\n```\nE ``` \n E\nE",
    "cat << A 3<<B\n```\nB\nA\n```\nA\nB",
    "cat <<E\n```\na\\\nE\n```\nE",
    "cat <<E \\\n  'a\nb'\n```\nE",
    "x=$(cat <<E\n```\nE\n)",
    'echo "$(cat <<E\n```\n"\nE\n)" <<< E',
    "(cat <<E)\n```\nE",
    "cat <<''\n```\n\nls",
    "# it's\necho $# a#b \\' <<E\n```\nE",
    "echo \"it's \\\" $((1<<4))\" $'\\'' <<E\n```\nE",
    "shopt -s extglob\nrm !(a)\ncat <<E\n```\nE",
    "let x=1<<4 y=2<<3\n```\n4\n3",
    'python - <<\'E\'\nx = """\n```json\n{}\n```\n"""\nE',
]
# The next fence closes the block: nothing in it is an open heredoc.
NO_HEREDOCS = [
    "cat > a <<'EOF'\nx\nEOF\npython a",
    "echo $((1<<4)) $(( (1<<2) << (3) )) $[1<<4]",
    "((x=1<<4)); for ((i=0; i<1<<4; i++)); do ls; done",
    'let "x = 1 << EOF"',
    "echo `cat <<E",  # bash looks for the other backquote first
    "a[1<<4]=3",
    "cat <<< EOF; cat <<<EOF",
    "echo '<<EOF' \"<<EOF\" \\<\\<EOF $'\\'<<EOF'",
    "echo '\n<<EOF\n' \"\n<<EOF\n\"",
    "ls  # <<EOF\n# cat <<EOF",
    "cat <<A <<-'B'\nB\nA\n\tB",
]
REJECTED = [
    ("", "no ```bash"),
    ("```bash ls```", "no ```bash"),
    (block("ls") + "\n" + block("pwd"), "2 code blocks"),
    (block("ls") + "\nIt prints:\n```\na.txt\n```", "several code blocks"),
    ("```json\n{}\n```", "marked 'json'; it must be bash or python"),
    ("```python\nprint()\n```\n```python\nprint()\n```", "2 code blocks"),
    ("```python\nprint()\n```\nIt prints:\n```\n\n```", "several code blocks"),
    ("```python\nprint()", "not closed; it may"),
    (block("cat > a <<'EOF'\nx\n# EOF\npython3 a"), "Line 3 must be EOF alone, without '# EOF'"),
    (block("cat > a <<EOF\nx\n\tEOF \nls"), "Line 3 must be EOF alone, without '.*EOF '"),
    ("```bash\n \n```", "empty"),
    ("```bash\nls", "not closed"),
    ("<think>\n" + block("rm") + "\n</think>\nI give up.", "no ```bash"),
    (block("ls") + "\n<think>\n" + block("rm"), "2 code blocks"),
    (block("cat <<E\nx\n E"), "not closed: the heredoc <<E "),
    (block("cat <<E\na\\\nE"), "not closed: the heredoc"),
    (block("let x=1<<4"), "not closed: the heredoc <<4 "),
    (block(f"cat <<E\n{'x' * 100_000}\nE"), "at most 100000 bytes"),
    (block("cat <<E\n```\nE\n" * 200), "more than 100 fences"),
    ("```\ncat <<E\n```\n", "not closed: the heredoc"),
    ("so\n```bash\ncat <<E\n</think>\nI give up.", "no ```bash"),
]


extract_action = partial(blocks.extract_action, folder="/w", artefact="")


@pytest.mark.parametrize("reply, action", ACCEPTED)
def test_accepted(reply, action):
    assert extract_action(reply) == action


@pytest.mark.parametrize("reply", INDENTED)
def test_the_indent_of_a_block_is_no_part_of_it(reply):
    assert extract_action(reply).strip() == HERE
    assert extract_action(f"Look:\n\n{reply}\n\n- It prints x.").strip() == HERE


@pytest.mark.parametrize("script", HEREDOCS + NO_HEREDOCS)
def test_only_a_fence_in_an_open_heredoc_does_not_close_the_block(script):
    assert extract_action(block(script)) == script
    assert extract_action(block(script).replace("\n", "\r\n")) == script
    for more in ("It prints:\n```\nrm a\n```", "```", "EOF\n```", "```python\nEOF\n```"):
        with pytest.raises(ValueError, match="several code blocks|not closed"):
            extract_action(f"{block(script)}\n{more}")


@pytest.mark.parametrize("mark", ["python", "Python3", " py "])
def test_a_block_of_python_is_written_to_a_file_and_run(mark, world):
    code = 'x = """$HOME \\t\nPROGRAM\n"""\nprint(x, end="")'
    step = world.step(f"I think.\n```{mark}\n{code}\n```\nDone.")
    no_score = "No score: no submission, guess.txt is not there"
    assert step.observation == f"$ python3 solve.py\n$HOME \t\nPROGRAM\n{no_score}"
    assert do(world, "cat solve.py").observation == code
    assert do(world, step.action).observation == step.observation
    assert world.step(f"```{mark}\nvalidate  # now\n```").action == "validate"
    world.task = replace(world.task, artefacts=("my game.py",))
    assert world.step("```python\n```\nNo.").status == "rejected"
    assert world.step("```python\nprint(1 / 0)\n```").status == "error"
    assert do(world, "cat 'my game.py'").observation == "print(1 / 0)"


@pytest.mark.parametrize("ends_at_score", [False, True])
def test_a_program_that_ends_well_is_scored(world, ends_at_score):
    world.ends_at_score = ends_at_score
    writes = "open('guess.txt', 'w').write('a b')"
    assert world.step(f"```python\n{writes}\n1 / 0\n```").score is None
    assert do(world, "rm guess.txt").score is None
    step = world.step("```python\n1\n```")
    assert step.observation == "$ python3 solve.py\nNo score: no submission, guess.txt is not there"
    assert (step.status, step.score.valid, step.ended) == ("ok", False, "")
    step = world.step(f"```python\n{writes}\n```")
    assert step.observation.startswith("$ python3 solve.py\nvalidation hits: 2")
    assert (step.status, step.score.value) == ("validate", 2.0)
    assert step.ended == ("validated" if ends_at_score else "")


def test_a_program_runs_in_the_workspace_wherever_the_agent_is(world):
    row = "```python\ndef row_strategy(history): return {}\n```"
    do(world, "echo a b > guess.txt; mkdir -p a/b; cd a/b")
    assert world.step("```python\nopen('guess.txt', 'w').write('b')\n```").score.value == 1.0
    assert do(world, "pwd; ls").observation.endswith("/a/b")  # the agent stays there
    with Env(load_task("battleOfSexes"), LOCAL) as game:
        game.reset()
        assert game.step(row.format(1)).score.value == 0.82
        do(game, "mkdir a && cd a")
        assert game.step(row.format(0)).score.value == 1.44


@pytest.mark.parametrize(
    "line",
    [
        "from strategy import row_strategy",
        "import strategy",
        "if 1:\n    import os, strategy as mine",
    ],
)
def test_a_program_that_imports_the_artefact_does_not_replace_it(line):
    with Env(load_task("battleOfSexes"), LOCAL) as game:
        game.reset()
        game.step("```python\ndef row_strategy(history): return 0\n```")
        step = game.step(f"```python\n{line}\nprint('tried')\n```")
        assert step.observation.startswith("$ python3 solve.py\ntried\nexact Score: 1.4400")
        assert step.status == "validate"
        for other in (
            "import strategy_of_mine",
            "from os import strategy",
            "import os  # strategy",
        ):
            step = game.step(f"```python\n{other}\n```")
            assert step.observation.startswith("$ python3 strategy.py\n")


def test_a_program_does_not_end_a_task_that_collects_its_workspace(task):
    with Env(replace(task, collect="cat words/* > guess.txt"), LOCAL, ends_at_score=True) as world:
        world.reset()
        step = world.step("```python\nprint(1)\n```")
        assert (step.observation, step.score, step.done) == ("$ python3 solve.py\n1", None, False)


OTHER_ARTEFACTS = [("a.py", "b.csv"), ("src/*.py",), ("src/a.py",), ("out/",), ("a.csv",)]


@pytest.mark.parametrize("artefacts", OTHER_ARTEFACTS)
def test_only_a_single_python_artefact_is_a_program(artefacts):
    assert replace(load_task("titanic"), artefacts=artefacts).program == ""


@pytest.mark.parametrize("reply, why", REJECTED)
def test_rejected_with_a_reason(reply, why):
    with pytest.raises(ValueError, match=why):
        extract_action(reply)


def test_bash_reads_a_block_and_runs_nothing(tmp_path, monkeypatch):
    file = tmp_path / "ran"
    (tmp_path / "rc").write_text(f"touch {file}")
    for name in ("BASH_ENV", "ENV"):
        monkeypatch.setenv(name, str(tmp_path / "rc"))
    script = f"set +n; touch {file}; trap 'touch {file}' EXIT\ncat <<E\n$(touch {file})\n```\nE"
    assert extract_action(block(script)) == script
    assert not file.exists()
    readme = "cat > a.md <<'EOF'\n" + "```\nx\n```\n" * 49 + "EOF"
    assert extract_action(block(readme)) == readme


def test_a_machine_without_bash_is_one_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    blocks.find_bash.cache_clear()
    with user_error("bash is not on the PATH"):
        env.open_tasks(["titanic"], LOCAL)


def test_two_tasks_have_two_names():
    with user_error("Two tasks have the name titanic"):
        env.open_tasks(["titanic", "titanic"], SandboxOptions("local"))


def test_hostile_replies_raise_nothing_else_and_take_no_time():
    rng = random.Random(1)
    pieces = (
        "``` ```bash ```` <think> </think> <<EOF <<' EOF ' \" \\ $( ) (( )) # ls \0 \ud800 ` ~~~ é"
    )
    pieces = [*pieces.split(), '<<-"a b"', "validate", *"\n\n\n \t"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(60))) for _ in range(3000)]
    for piece in ("<think>", "```bash\n", "<think></think>\n", "<<", "`"):
        texts.append(piece * 50_000)
    for piece in ("a[", "<<E\n", '$("', "cat <<E\n```\nE\n", "<<E\n```\nE\n```\n```bash\n"):
        texts.append("```bash\n" + piece * 50_000)
    texts.append("```" + " " * 20_000 + "`")
    with within(20):
        for text in texts:
            with suppress(ValueError):
                first, *lines = extract_action(text).split("\n")
                assert "```" in text[: text.index(first)], text
                assert all(line in text for line in lines[:100]), text


# ------------------------------------------------------------------------------- a task of our own

GRADER = """
import json, sys
answers = open("answers.txt").read().split()
part = {"validation": answers[:4], "test": answers[4:]}[sys.argv[1]]
guess = open("guess.txt").read().split()
if guess[0] == "hang": import time; time.sleep(60)
print("some words", file=sys.stderr)
print(json.dumps({"hits": len([answer for answer in part if answer in guess])}))
"""


@pytest.fixture
def task(tmp_path):
    """Guess words; the first four are the validation part."""
    (tmp_path / "grade.py").write_text(GRADER)
    (tmp_path / "answers.txt").write_text(f"a b c d e {CANARY}\n")
    (tmp_path / "starter.txt").write_text("x\n")
    (tmp_path / "hint.txt").write_text("letters\n")
    return Task(
        name=f"words-{tmp_path.name}",
        prompt="Write words to guess.txt.",
        metric="hits",
        higher_is_better=True,
        baseline=0.0,
        reference=4.0,
        artefacts=("guess.txt",),
        public={"data/hint.txt": tmp_path / "hint.txt"},
        hidden={name: tmp_path / name for name in ("grade.py", "answers.txt")},
        grader=("python3", "-I", "grade.py", "{split}"),
    )


@pytest.fixture(params=ISOLATED)
def backend(request):
    return request.param


@pytest.fixture
def world(task, backend):
    with Env(task, backend) as world:
        world.reset()
        yield world


def test_prompt_shows_task_format_and_real_files(task, backend):
    with Env(task, backend) as world:
        options = EpisodeOptions(prompts=TINY_TEXTS)
        prompt = world.reset(options)
        assert prompt.startswith(task.prompt)
        assert prompt.endswith("Files:\ndata/hint.txt (8 bytes)")
        assert "answers" not in prompt
        assert "grade" not in prompt
        do(world, "touch new")
        assert do(world, "ls -A . data").observation == ".:\ndata\nnew\n\ndata:\nhint.txt"
        do(world, "touch $(seq 99)")
        assert world.prompt(options).endswith("\n... and 41 more")
        assert world.reset(options) == prompt  # starts over


def test_names_and_headers_are_shown_in_one_line(task, tmp_path):
    """Whatever is in them: a line break, a control character, a byte order mark."""
    table = tmp_path / "table.csv"
    table.write_text("\ufeffid,\u200bx\té\n1,\x1b2\n")
    names = ["new\nline.csv", "tab\té \x07.csv", "\u2028.csv"]
    task = replace(task, public={f"data/{name}": table for name in names})
    with Env(task, LOCAL) as world:
        prompt = world.reset()
    for name in ("new\\nline.csv", "tab\té \\x07.csv", "\\u2028.csv"):
        assert f"\ndata/{name} (19 bytes)\n  \\ufeffid,\\u200bx\té\n  1,\\x1b2\n" in prompt


def test_observations(world):
    assert do(world, "true").observation == "(no output)"
    step = do(world, "echo out; echo err >&2; exit 3")
    assert (step.observation, step.status) == ("out\nerr\n[exit code 3]", "error")
    step = world.step("I would like to run ls.")
    assert step.status == "rejected"
    assert step.observation == "Nothing was run. There is no ```bash block in the reply."
    task = world.task
    stops = {"step_timeout": "at the time limit", "idle_timeout": ": it used no CPU and printed"}
    for limit, words in stops.items():
        world.task = replace(task, **{limit: 0.2})
        step = world.step(block("echo begun; sleep 30"), timeout=60)
        assert step.status == "timeout"
        assert step.observation.startswith(f"begun\n[stopped {words}".replace(" :", ":"))
    world.task = replace(task, idle_timeout=0)
    assert do(world, "sleep 0.5").status == "ok"
    assert "memory limit" in do(world, "kill -9 $$").observation
    assert do(world, "submit").done
    for text in (
        "validate; ls",
        "validate now",
        "echo x && submit",
        "submit || true",
        "submit #\nls",
    ):
        step = do(world, text)
        assert "block of its own" in step.observation
        assert not step.done


TRACEBACK = """\
Traceback (most recent call last):
  File "/w/solve.py", line 3, in <module>
    fit()
  File "/opt/lib/python3.11/site-packages/pandas/a.py", line 7, in fit
    b(x,
      ^^
  File "pandas/_libs/index.pyx", line 167, in pandas._libs.get_loc
  [Previous line repeated 9 more times]
  File "<stdin>", line 1, in callback
  File "/usr/lib/python3/dist-packages/c.py", line 1, in <module>
KeyError: 'a'

The above exception was the direct cause"""
FOLDED = """\
Traceback (most recent call last):
  File "/w/solve.py", line 3, in <module>
    fit()
  [2 library frames left out]
  [Previous line repeated 9 more times]
  File "<stdin>", line 1, in callback
  [1 library frame left out]
KeyError: 'a'

The above exception was the direct cause"""


TREE = """\
/opt/lib/python3.11/site-packages/sklearn/tree.py:297: UserWarning: 9 classes.
  check(y)
"""
FOREST = TREE.replace("tree.py", "forest.py")
WARNED = (
    f"$ python3 a.py\n{FOREST}{TREE}[3 repeated warnings left out]\n  said\na.py:1: UserWarning: 9"
)


def test_a_warning_of_a_package_is_read_once():
    text = f"$ python3 a.py\n{FOREST}{TREE * 2}{FOREST}{TREE}  said\na.py:1: UserWarning: 9"
    assert fold_warnings(text) == WARNED
    assert fold_warnings(WARNED) == WARNED
    assert fold_warnings(TREE + FOREST) == TREE + FOREST


def test_warnings_of_packages_are_left_out_of_an_observation(world):
    program = "import warnings\nfor i in range(3):\n    warnings.warn_explicit('x', UserWarning, "
    program += "'/a/site-packages/b.py', i // 2, registry={})"
    step = world.step(f"```python\n{program}\n```")
    lines = step.observation.splitlines()
    assert lines[1:3] == [
        "/a/site-packages/b.py:0: UserWarning: x",
        "[1 repeated warning left out]",
    ]
    assert lines[3] == "/a/site-packages/b.py:1: UserWarning: x"


def test_frames_of_packages_are_left_out_of_a_traceback():
    assert fold_tracebacks(TRACEBACK) == FOLDED
    assert fold_tracebacks(FOLDED) == FOLDED
    cut = TRACEBACK[: TRACEBACK.index("  [Prev")]
    assert fold_tracebacks(cut).endswith("    fit()\n  [2 library frames left out]\n")
    text = "a\n    /site-packages/ is a folder\n\n  File: /site-packages/\n"
    assert fold_tracebacks(text) == text


@pytest.mark.parametrize("ends_at_score, ended", [(True, "validated"), (False, "")])
def test_an_episode_may_end_at_a_score(task, backend, ends_at_score, ended):
    with Env(task, backend, ends_at_score=ends_at_score) as world:
        world.reset()
        assert do(world, "validate").ended == ""  # nothing is there to be scored
        assert do(world, "echo a > guess.txt").ended == ""
        step = do(world, "validate")
        assert (step.ended, step.done) == (ended, bool(ended))


def test_validate_grades_in_a_fresh_sandbox_and_equal_artefacts_once(world, monkeypatch):
    step = do(world, "validate")
    assert (step.status, step.score.valid, step.score.value) == ("invalid", False, None)
    assert "no submission, guess.txt is not there" in step.observation
    do(world, "echo a c e > guess.txt")
    step = do(world, "validate")
    assert step.status == "validate"
    assert step.score == Score(2.0, "hits", "validation", True, "")
    assert step.observation == "validation hits: 2.0 (baseline 0.000, higher is better)"
    assert world.score("test") == Score(1.0, "hits", "test", True, "")
    monkeypatch.setattr(world, "make_sandbox", lambda: pytest.fail("graded again"))
    assert world.score() == step.score


@pytest.mark.parametrize("stderr", ["-1", "-1e-300", "-1e999", "NaN", '"x"'])
def test_a_standard_error_that_is_none_is_unknown(world, stderr):
    world.task.hidden["grade.py"].write_text(f"""print('{{"hits": 1, "stderr": {stderr}}}')""")
    do(world, "echo a > guess.txt")
    step = do(world, "validate")
    assert (step.score.value, step.score.stderr) == (1.0, None)
    assert step.observation == "validation hits: 1.0 (baseline 0.000, higher is better)"


@pytest.mark.fault(26, "the grader waits")
@pytest.mark.parametrize("wait", ["time.sleep(10**6)", slow("threading.Event().wait()")])
def test_grader_that_waits_is_stopped_before_its_time(world, monkeypatch, wait):
    monkeypatch.setattr(grading, "IDLE_SECONDS", 0.5)
    world.task.hidden["grade.py"].write_text(f"import time, threading\n{wait}")
    world.task = replace(world.task, grade_timeout=3.6)
    do(world, "echo a > guess.txt")
    score = world.score()
    assert score.message == "The grader was stopped: it used no CPU for 0.6 seconds."
    assert score.grader_output.startswith("exit code 143 idle")


@pytest.mark.fault(26, "the grader hangs", "a grading that failed under load")
def test_a_grading_that_failed_is_tried_again_and_a_score_stays(task, world):
    task.hidden["grade.py"].write_text(
        "import random, json\nprint(json.dumps({'hits': random.random()}))"
    )
    do(world, "echo a > guess.txt")
    world.task = replace(task, grade_timeout=0.001)
    assert "longer than" in world.score().message
    world.task = task
    first = world.score()
    assert first.valid
    assert [world.score() for _ in range(3)] == [first] * 3


@pytest.mark.fault(21, "the end while a grading runs")
def test_close_ends_a_grading(task, backend):
    world = Env(replace(task, grade_timeout=100.0), backend)
    world.reset()
    do(world, "echo hang > guess.txt")
    with ThreadPoolExecutor(1) as pool:
        score = pool.submit(world.score)
        assert wait_for(lambda: len(world.opened) == 2)
        time.sleep(0.5)
        world.close()
        with pytest.raises(SandboxFault):
            score.result(timeout=10)
    assert len(world.opened) == 2  # and none was begun anew
    with pytest.raises(SandboxFault, match="closed"):
        world.make_sandbox()


@pytest.mark.fault(23, "the agent edits grader or data")
@pytest.mark.attack("declaring the grader an artefact")
def test_nothing_in_the_workspace_reaches_the_grader(world, task):
    do(
        world,
        "echo z | tee guess.txt answers.txt data/hint.txt; "
        'echo \'print("{\\"hits\\": 99}")\' > grade.py',
    )
    assert do(world, "validate").score.value == 0.0
    artefacts = ("guess.txt", "grade.py", "answers.txt", "data/hint.txt")
    swapped = replace(task, name="swap", artefacts=artefacts)
    files = {path: world.sandbox.get(path) for path in artefacts}
    assert env.grade(swapped, files, "validation", world.make_sandbox).value == 0.0


@pytest.mark.attack("a background process that swaps the artefact")
def test_background_process_cannot_swap_the_artefact(world):
    do(
        world,
        "echo a > guess.txt; setsid bash -c 'while :; do echo a b c d e > guess.txt; "
        "echo a > guess.txt; done' >/dev/null 2>&1 &",
    )
    do(world, "validate")
    assert len({world.sandbox.get("guess.txt") for _ in range(50)}) == 1


@pytest.mark.attack("reading the answers from inside of a grading")
def test_hidden_files_of_a_grading_are_readable_by_root_alone(world, task):
    box = world.make_sandbox()
    grading.lay_out(task, {"guess.txt": b"a"}, box)
    for path in task.hidden:
        assert "ermission denied" in box.run(f"cat {path}", 10).output


def test_artefacts_are_files_folders_and_patterns(world, monkeypatch):
    plain = world.task
    world.task = replace(plain, artefacts=("guess.txt", "out/", "*.log"))
    do(world, "echo a > guess.txt")
    assert world.score().message == "no submission, out/ is not there or empty"
    do(world, "mkdir out; touch out/1 2.log other")
    found = grading.read_artefacts(world.task, world.sandbox)
    assert {*found} == {"guess.txt", "out/1", "2.log"}
    monkeypatch.setattr(grading, "MOST_FILES", 1)
    assert world.score().message == "no submission, the workspace holds more than 1 files"
    world.task = plain
    assert world.score().valid
    monkeypatch.setattr(grading, "ARTEFACT_BYTES", 1)
    assert "guess.txt is larger than" in world.score().message
    monkeypatch.setattr(grading, "MODEL_BYTES", 3)  # the sum of the files of a model
    model = replace(plain, needs_gpu=True)
    assert grading.read_artefacts(model, world.sandbox) == {"guess.txt": b"a\n"}
    do(world, "echo b > 2.log")
    with pytest.raises(ArtefactError, match="2.log is larger than"):
        grading.read_artefacts(replace(model, artefacts=("guess.txt", "2.log")), world.sandbox)


@pytest.mark.fault(25, "a given file instead of an artefact")
def test_a_given_file_is_not_an_artefact_of_the_agent(task, backend, tmp_path):
    given = replace(task, public={"guess.txt": tmp_path / "starter.txt"})
    with Env(given, backend) as world:
        world.reset()
        assert "still as it was given" in do(world, "validate").observation
        do(world, "echo a >> guess.txt")
        assert do(world, "validate").score.value == 1.0


@pytest.mark.fault(27, "two sandboxes at once", "files of another episode")
def test_two_episodes_never_see_each_others_files(task, backend):
    with Env(task, backend) as one, Env(task, backend) as two:
        one.reset(), two.reset()
        do(
            one,
            "for f in mine7 ~/mine7 /tmp/mine7 /dev/shm/mine7; do echo 7mine > $f; done; "
            "export MINE=7mine; echo a > guess.txt; "
            "sleep 13579 &",
        )
        seen = do(
            two,
            "ls -RA ~ /dev/shm; ls -A /tmp; cat m*7 /tmp/m*7 2>/dev/null; echo $MINE; "
            "cat /proc/*/cmdline | tr '\\0' ' '",
        )
        assert not any(word in seen.observation for word in ("mine7", "7mine", "guess", "13579"))
        assert not two.score().valid
        assert one.score().valid
        one.restart()
        seen = do(one, "find ~ /tmp /dev/shm -name mine7; cat /dev/shm/*")
        assert "mine7" not in seen.observation


@pytest.mark.fault(22, "the agent looks for answers")
@pytest.mark.attack("reading answers anywhere in the file system")
def test_hidden_files_are_nowhere_in_the_agents_sandbox(task, backend):
    """Searches every file in Docker, installed packages left out.

    A local sandbox also shows the programs of this machine, so there it searches the files of the
    last ten minutes: the secret is as new as that.
    """
    with Env(replace(task, step_timeout=300.0), backend) as world:
        world.reset()
        do(world, "echo a > guess.txt")
        assert do(world, "validate").score.valid
        row = "".join(f"\\x{ord(c):02x}" for c in CANARY)  # the search must not find itself
        do(world, f"printf '{row}' > /tmp/decoy")  # but it does find
        new = "" if backend == "docker" else "-cmin -10"
        find = r"find / \( -path /proc -o -path /sys -o -name site-packages \) -prune -o"
        texts = f"{find} -type f {new} -print0 | xargs -0 grep -slF -e $(printf '{row}')"
        names = rf"{find} \( -name answers.txt -o -name grade.py \) -print"
        assert do(world, f"({texts}; {names}) 2>/dev/null; true").observation == "/tmp/decoy"
        shown = do(world, "env; cat /proc/*/cmdline /proc/*/environ 2>/dev/null").observation
        assert CANARY[:10] not in shown


# ------------------------------------------------------------------------------------------ copies


@pytest.mark.fault(25, "the parent's artefact in a copy")
@pytest.mark.attack("a stale artefact")
def test_a_copy_is_independent_and_has_no_artefact(world):
    do(world, "echo a > guess.txt; touch there")
    with copy_of(world) as twin:
        assert not twin.score().valid
        assert world.score().valid
        do(twin, "touch only_here; rm there")
        assert do(world, "ls").observation == "data\nguess.txt\nthere"
    with copy_of(world, clear_artefacts=False) as twin:
        assert twin.score() == world.score()
    world.reset()
    assert not world.score().valid


@pytest.mark.attack("the work of a parent, where the whole workspace is handed in")
def test_a_collected_artefact_counts_after_a_change(task, backend):
    with Env(replace(task, collect="cat words/* > guess.txt"), backend) as world:
        assert "validate scores the workspace" in world.reset()
        assert "the workspace cannot be copied: cat: " in world.score().message
        do(world, "mkdir words; echo a > words/1; cd words; export PATH=/nowhere")
        assert world.score().value == 1.0
        with copy_of(world) as child:
            assert "still as it was given" in child.score().message
            do(child, "echo b > 2")
            assert child.score().value == 2.0
            assert do(child, "echo ../*").observation == "../data ../words"
        with copy_of(world, clear_artefacts=False) as same:
            assert same.score().value == 1.0


# ---------------------------------------------------------------------------------------- episodes


def play(task, policy, backend=LOCAL, **options):
    return asyncio.run(play_once(Env(task, backend), policy, **options))


def check_tokens(episode, policy):
    """Segments hold what was requested; each reply is trained on once, with its own log-probs."""
    pairs = zip(policy.requests, policy.samples, strict=True)
    assert trained(episode) == [(before, s.tokens, s.logprobs) for before, s in pairs]
    assert sum(sum(s.mask) for s in episode.segments) == episode.tokens


def test_episode_until_submit(task, backend):
    policy = FakePolicy(block("echo a b > guess.txt"), "prose", block("validate"), block("submit"))
    episode = play(task, policy, backend=backend, max_turns=9, score_test=True)
    assert episode.status == "submit"
    assert (episode.score, episode.test_score) == (2.0, 0.0)
    assert [turn["status"] for turn in episode.turns] == ["ok", "rejected", "validate", "submit"]
    assert episode.turns[2]["score"] == 2.0
    said = "".join(f"{turn['reply']}<user>{turn['observation']}" for turn in episode.turns)
    [segment] = episode.segments
    assert f"{policy.decode(segment.tokens)}<user>Submitted." == f"<user>{episode.prompt}{said}"
    check_tokens(episode, policy)


@pytest.mark.parametrize(
    "exact, score_test, parts",
    [(False, False, [()]), (False, True, [(), ("test",)]), (True, True, [()])],
)
def test_the_test_part_is_read_only_if_it_is_asked_for(task, exact, score_test, parts):
    """Exact tasks have no other part."""
    world = Env(replace(task, exact=exact), LOCAL)
    score, graded = world.score, []

    def recorded(*split):
        graded.append(split)
        return score(*split)

    world.score = recorded
    policy = FakePolicy(block("echo a > guess.txt"), block("submit"))
    episode = asyncio.run(play_once(world, policy, score_test=score_test))
    assert graded[-len(parts) :] == parts
    assert (episode.test_value is not None) == (len(parts) == 2)


@pytest.mark.parametrize(
    "said, message, error, reason",
    [
        ("a\nValueError: odd\nb", "no file", "a\nValueError: odd\nb\nno file", "ValueError: odd"),
        ("a: not found\nb", "", "a: not found\nb", "a: not found"),
        ("", "no file", "no file", "no file"),
        ("$ python3 a.py\nx\n[stopped]", "", "$ python3 a.py\nx\n[stopped]", "[stopped]"),
        ("$ python3 a.py\nx\n[exit code 1]", "", "$ python3 a.py\nx\n[exit code 1]", "x"),
        ("", "", "", "turn limit"),
    ],
)
def test_an_episode_without_a_score_says_why(task, said, message, error, reason):
    """The last command that failed, and the grader."""
    turns = [turn(observation="earlier", status="error"), turn(observation=said, status="error")]
    episode = Episode("words", 0, status="turn_limit", turns=[*turns, turn()])
    episode.judge(task, Score(None, "hits", "validation", False, message))
    assert (episode.error, episode.reason, episode.value) == (error, reason, -1)
    episode.judge(task, Score(2.0, "hits", "validation", True, ""))
    assert (episode.error, episode.reason) == ("", "")


@pytest.mark.parametrize("last, status", [("fault", "crashed"), ("submit", "submit")])
def test_a_turn_that_broke_the_sandbox_is_the_agents(last, status):
    turns = [turn(status="error"), turn(status=last)]
    episode = Episode("words", 0, fault="it is gone", turns=turns)
    assert (crashed(episode), episode.fault) == ("crashed", "")
    assert [turn["status"] for turn in episode.turns] == ["error", status]


def test_reply_cut_at_the_length_limit_is_closed(task):
    policy = FakePolicy("```bash\necho cut", stop_reason="length")
    episode = play(task, policy, max_turns=2)
    assert {turn["status"] for turn in episode.turns} == {"rejected"}
    assert "cut off" in episode.turns[0]["observation"]
    assert 1 in policy.requests[1]
    check_tokens(episode, policy)


@pytest.mark.fault(32, "a long observation")
def test_long_observations_are_capped_head_and_tail(task):
    policy = FakePolicy(block("seq 1000"), block("submit"))
    episode = play(task, policy, max_observation_tokens=90)
    shown = policy.prompts[1].removeprefix(policy.prompts[0])
    assert shown.split("```")[-1].startswith("<user>1\n2\n3\n")
    assert shown.endswith("999\n1000")
    assert "tokens left out" in shown
    assert len(shown) < 200
    assert episode.turns[0]["observation"].count("\n") == 999  # the record has all of it


def test_old_observations_are_shortened_and_start_a_new_segment(task):
    commands = [block(f"seq {i}00 {i}99") for i in range(1, 8)]
    policy = FakePolicy(*commands, block("submit"), context=2600)
    episode = play(task, policy, max_reply_tokens=100, max_observation_tokens=1000)
    assert episode.status == "submit"
    assert len(episode.segments) > 1
    assert max(map(len, policy.requests)) <= 2500
    check_tokens(episode, policy)
    assert "100 [...]" in policy.prompts[-1]
    assert "799" in policy.prompts[-1]


@pytest.mark.fault(32, "context overflow")
def test_what_cannot_fit_is_never_sent(task):
    policy = FakePolicy(block("ls"), context=900)
    with user_error("more than half of --context 900 or than the 100 beside a reply"):
        play(task, policy, max_reply_tokens=800)
    with_message = Env(task, LOCAL, message="y" * 500)
    episode = asyncio.run(play_once(with_message, policy, max_reply_tokens=400))
    assert (episode.status, episode.valid, episode.turns) == ("context_limit", False, [])
    assert not policy.requests
    policy = FakePolicy(block("echo a > guess.txt; echo " + "y" * 300), context=1200)
    episode = play(task, policy, max_reply_tokens=400, max_turns=50)
    assert episode.status == "context_limit"
    assert episode.turns
    assert episode.score == 1.0
    check_tokens(episode, policy)


@pytest.mark.parametrize("command, wait", [("echo a > guess.txt; sleep 30", 0.0), ("ls", 30.0)])
def test_time_limit(task, command, wait):
    with within(8):
        episode = play(task, FakePolicy(block(command), wait=wait), episode_minutes=1 / 60)
    assert episode.status == "time_limit"
    assert episode.valid == (wait == 0.0)


@pytest.mark.fault(15, "the sandbox breaks in an episode")
def test_broken_sandbox_is_a_fault_and_never_a_score(task, monkeypatch):
    monkeypatch.setattr(Sandbox, "run", lambda self, *_: self.close() or self.call("state"))
    episode = play(task, FakePolicy(block("ls")))
    assert (episode.status, episode.score, episode.value) == ("fault", None, None)
    assert "closed" in episode.fault

    def no_start(*args, **kwargs):
        raise SandboxFault("no more containers")

    monkeypatch.setattr(machine, "Sandbox", no_start)
    assert play(task, FakePolicy(block("ls"))).fault == "no more containers"


@pytest.mark.parametrize(
    "status, reply, options",
    [
        ("submit", "submit", {}),
        ("turn_limit", "ls", {}),
        ("time_limit", "ls", {"episode_minutes": 0.0}),
        ("context_limit", "ls", {"max_reply_tokens": 99_600}),
    ],
)
def test_every_way_out_scores_once_and_closes(task, monkeypatch, status, reply, options):
    calls = []
    no_score = Score(None, "hits", "validation", False, "")
    close = Env.close
    monkeypatch.setattr(Env, "score", lambda self, split=None: calls.append(split) or no_score)
    monkeypatch.setattr(Env, "close", lambda self: calls.append("close") or close(self))
    episode = play(task, FakePolicy(block(reply)), score_test=True, **options)
    assert episode.status == status
    assert calls == [None, "test", "close"]


@pytest.mark.fault(21, "an episode is cancelled")
def test_cancelled_episode_closes_its_sandbox(task):
    world = Env(task, LOCAL)

    async def main():
        async with asyncio.timeout(10):
            job = asyncio.ensure_future(play_once(world, FakePolicy(block("sleep 20"))))
            while not world.opened:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.6)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job

    asyncio.run(main())
    with pytest.raises(SandboxFault):
        world.opened[0].run("true", 1)


def test_an_env_that_was_handed_in_goes_on_and_stays_open(task):
    options = EpisodeOptions(512, max_turns=1, max_reply_tokens=512, prompts=TINY_TEXTS)
    with Env(task, LOCAL) as world:
        for command in ("echo a > guess.txt", "ls"):
            episode = asyncio.run(run_episode(world, FakePolicy(block(command)), options))
        assert episode.score == 1.0
        assert do(world, "cat guess.txt").observation == "a"


@pytest.mark.fault(26, "the grading sandbox breaks")
def test_what_was_handed_in_cannot_turn_its_grading_into_a_fault(world, monkeypatch):
    """An artefact may return the exit code of a program that is missing; it is still invalid."""
    do(world, "echo 'exit 127' > guess.txt")
    world.task = replace(world.task, grader=("sh", "guess.txt"))
    assert not world.score().valid
    world.task = replace(world.task, grader=("no-such-program", "guess.txt"))
    with pytest.raises(SandboxFault, match="the grader does not start: no-such-program"):
        world.score()
    monkeypatch.setattr(Sandbox, "put", lambda self, *_, **__: self.close())
    with pytest.raises(SandboxFault):
        do(world, "validate")


def test_folders_of_hidden_files_are_hidden(monkeypatch):
    made = {}
    monkeypatch.setattr(machine, "Sandbox", lambda *_, **options: made.update(options))
    task = load_task("titanic")
    machine.open_sandbox(task, SandboxOptions("namespaces"))
    assert str(task.hidden["answers.csv"].parent) in made["hide"]


# ----------------------------------------------------------------------------------------- by hand


def test_an_episode_by_hand_names_each_part(capsys, monkeypatch):
    code = ["cat > strategy.py <<'X'", "def row_strategy(history):", "    return 0", "", "X"]
    lines = ["```bash", *code, "```", "no_such", "validate"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    env.by_hand("battleOfSexes", TINY_TEXTS, sandbox=SandboxOptions(LOCAL))
    said = capsys.readouterr().out
    for words in (
        "> (no output)\n[ok, ",
        "[exit code 127]\n[error, ",
        "$ exact Score: 1.4400 (",
        "\n[exact part] exact Score: 1.4400 (",
    ):
        assert words in said


# ---------------------------------------------------------------------------------------- examples

SHORT = f"""
path = {str(PROJECT / "examples/minimal.py")!r}
text = open(path).read()
for line, short in [("STEPS = 12", "STEPS = 2"), ("GROUPS = 4", "GROUPS = 2")]:
    text = text.replace(line, short)
exec(compile(text, path, "exec"), {{"__name__": "__main__", "__file__": path}})
"""


@pytest.mark.slow
def test_minimal_trains_and_prints_a_line_for_each_step(tmp_path):
    said = output_of("-c", SHORT, cwd=tmp_path)
    steps = re.findall(r"^step +(\d+)  reward [+-]\d\.\d\d  loss", said, re.MULTILINE)
    assert steps == ["0", "1"]
