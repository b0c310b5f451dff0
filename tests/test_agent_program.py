"""Agent programs of other people, with a real engine and real sandboxes."""

import asyncio
import functools
import json
import os
import shlex
import sys
import threading
from dataclasses import replace
from unittest.mock import patch

import psutil
import pytest

import env
from backends import wait_for
from flatlab.errors import SandboxFault, UserError
from flatlab.options import EpisodeOptions
from flatlab.train.batch import sequences_of
from flatlab.world.episode import run_episode
from helpers import (
    AGENT_TEXTS,
    LOCAL,
    PROJECT,
    TINY_TEXTS,
    FakePolicy,
    code_of,
    dead_proxy,
    play_once,
    python,
    refuses,
    trained,
    within,
)
from integrations import agent_program
from training import TASK

SCRIPT = PROJECT / "integrations/agent_program.py"
# The beginning of every program: ask(messages) returns a reply, act(command) what it prints.
CLIENT = f"""
import json, os, subprocess, sys, time, urllib.request
from urllib.error import HTTPError

def post(path, body):
    url = os.environ["OPENAI_BASE_URL"] + path
    headers = {{"Content-Type": "application/json"}}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def ask(*messages, **settings):
    body = {{"model": "any", "messages": messages, **settings}}
    return post("/chat/completions", body)["choices"][0]["message"]

def act(command):
    return post("/act", {{"command": command}})["observation"]

def user(text):
    return {{"role": "user", "content": text}}

def attach(command):
    done = subprocess.run([sys.executable, {str(SCRIPT)!r}, "--attach", command],
                          capture_output=True, text=True)
    return done.stdout, done.returncode, done.stderr

SYSTEM = os.environ["FLATLAB_SYSTEM"]
PROMPT = user(os.environ["FLATLAB_PROMPT"])
"""
EVERYBODY_DIED = "sed -E 's/,.*//; s/$/,0/; 1s/.*/id,survived/' data/test.csv > submission.csv"
OPTIONS = EpisodeOptions(
    max_turns=6, max_reply_tokens=8, max_observation_tokens=64, prompts=TINY_TEXTS
)


@pytest.fixture
def command(tmp_path):
    """command(text): the command of a program that begins with CLIENT."""

    def write(text):
        file = tmp_path / "program.py"
        file.write_text(CLIENT + text)
        return shlex.join([sys.executable, str(file)])

    return write


@pytest.fixture
def play_program(policy, command):
    """play_program(text) -> its episode, and what the engine sampled meanwhile, as trained() has
    it.
    """

    def play(program, seed=0, policy=policy, world=None, **options):
        limits = replace(OPTIONS, **options)
        sample = policy.sample
        sampled = []

        async def logged(tokens, *arguments, **settings):
            said = await sample(tokens, *arguments, **settings)
            sampled.append((list(tokens), said.tokens, said.logprobs))
            return said

        async def run():
            loop = functools.partial(agent_program.play, command=command(program))
            async with world or env.Env(TASK, LOCAL, seed) as box:
                return await run_episode(box, policy, limits, play=loop)

        with patch.object(policy, "sample", logged):
            return asyncio.run(run()), sampled

    return play


def test_a_program_plays_an_episode_and_its_tokens_are_those_of_the_engine(play_program):
    episode, sampled = play_program(
        f"""
talk = [PROMPT]
for command in ({EVERYBODY_DIED!r}, "validate", "submit"):
    talk += [ask(*talk), user(act(command))]
"""
    )
    assert episode.status == "submit"
    assert episode.score == pytest.approx(0.6782, abs=1e-4)
    assert trained(episode) == sampled
    assert len(episode.segments) == 1
    assert [turn["status"] for turn in episode.turns] == ["ok", "validate", "submit"]
    assert "accuracy: 0.67" in episode.turns[1]["observation"]


def test_a_program_that_does_as_the_usual_loop_gets_the_same_tokens(play_program, policy):
    episode, _ = play_program("""
talk = [PROMPT]
while True:
    talk += [ask(*talk), user("Go on.")]
""", seed=5)  # fmt: skip

    class World(env.Env):
        def step(self, reply, timeout, act):
            return env.Step("Go on.", "", None, "ok", 0.0, "")

    usual = asyncio.run(play_once(World(TASK, LOCAL), policy, 5, **vars(OPTIONS)))
    assert episode.status == usual.status == "turn_limit"
    assert episode.prompt == usual.prompt
    [segment], [expected] = episode.segments, usual.segments
    assert (segment.tokens, segment.reply) == (expected.tokens, expected.reply)
    # The second episode finds its prompt in the prefix cache, which changes how sums are rounded.
    assert segment.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_program_may_branch_shorten_and_change_its_messages(play_program):
    episode, sampled = play_program("""
first = ask(PROMPT)
second = ask(PROMPT, first, user("one"))
branch = ask(PROMPT, first, user("two"))
third = ask(PROMPT, first, user("one"), second, user("and"))
shorter = ask(PROMPT, second, user("and"))
changed = ask(PROMPT, {**first, "content": "Something else."}, user("one"))
fourth = ask(PROMPT, first, user("two"), branch, user("end"))
""", max_turns=7)  # fmt: skip
    assert episode.status == "exit"
    assert trained(episode) == sampled
    moved, context = sampled[1][1], sampled[4][0]  # a reply keeps its tokens in a new place
    assert any(context[i : i + len(moved)] == moved for i in range(len(context)))
    batch = sequences_of(episode, list(range(len(sampled))))
    assert [sorted(set(s.advantage)) for s in batch] == [[0, 1], [2], [3], [4], [5], [6]]


ENDS = {
    "crashes": ("ask(PROMPT); sys.exit('no idea')", "exit", 1),
    "never submits": (f"ask(PROMPT); act({EVERYBODY_DIED!r})", "exit", 1),
    "hangs in a command": ("ask(PROMPT)\nwhile True: act('sleep 60')", "time_limit", 1),
    "asks too often": ("while True: ask(PROMPT)", "turn_limit", 6),
}


@pytest.mark.parametrize("how", ENDS)
def test_however_a_program_ends_its_episode_is_scored_and_no_fault(play_program, how):
    program, status, turns = ENDS[how]
    minutes = 0.015 if status == "time_limit" else 1
    with within(50):  # a command that hangs would take 60 s
        episode, _ = play_program(program, episode_minutes=minutes)
    assert episode.status == status
    assert len(episode.turns) == turns
    assert episode.valid == (how == "never submits")
    if how == "crashes":
        assert episode.fault == "exit code 1: no idea"


def ends(pid):
    """True if the process has ended, or ends in a few seconds."""
    return wait_for(lambda: not psutil.pid_exists(pid))


def test_a_program_that_is_still_there_after_its_episode_is_killed(play_program, tmp_path):
    pid = tmp_path / "pid"
    program = f"""
child = subprocess.Popen(["sleep", "60"])
open({str(pid)!r}, "w").write(str(child.pid))
act("submit")
time.sleep(60)
"""
    play_program(program)
    assert ends(int(pid.read_text()))


@pytest.mark.slow
def test_commands_that_wait_for_another_one_end_with_the_episode(play_program):
    program = """
from threading import Thread
for i in range(4):
    Thread(target=act, args=["sleep 60; touch late"], daemon=True).start()
time.sleep(60)
"""
    with within(30):  # 60 s, or four commands after each other
        episode, _ = play_program(program, episode_minutes=0.04)
    assert episode.status == "time_limit"


def test_a_program_does_not_outlive_a_process_that_is_killed(command, tmp_path):
    """started() of another process, which is killed while its program runs."""
    pid = tmp_path / "pid"
    program = command(f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    variables = {name: "" for name in ("FLATLAB_SYSTEM", "FLATLAB_PROMPT")}
    script = f"""
import asyncio, os, signal, time
from pathlib import Path
from integrations.agent_program import started

async def main():
    with started({program!r}, {variables!r}):
        while not Path({str(pid)!r}).exists() or not Path({str(pid)!r}).read_text():
            await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    done = python("-c", script, env=os.environ | {"PYTHONPATH": str(PROJECT)})
    assert done.returncode == -9
    assert ends(int(pid.read_text()))


def test_a_program_reads_its_variables_and_no_input_and_its_commands_run_as_they_are(play_program):
    program = """
said = act("cat <<'END'\\n```bash\\nls\\n```\\n```\\nEND")
ask({"role": "system", "content": SYSTEM}, PROMPT, user(sys.stdin.read() + said))
"""
    episode, _ = play_program(program, policy=FakePolicy("a"), prompts=AGENT_TEXTS)
    assert "A block with only the word validate scores submission.csv" in episode.system
    assert "Limits: 6 turns" in episode.prompt
    assert episode.prompt.endswith("\n\n```bash\nls\n```\n```")


@pytest.mark.slow
def test_attach_runs_a_command_as_a_reply_would(play_program):
    episode, _ = play_program("""
said = [attach(command) for command in
        ("cd /tmp; export A=5", "pwd; echo $A; yes | head -n 999", "exit 3", "validate")]
ask(user(json.dumps(said)))
said = attach("submit")
""")  # fmt: skip
    assert episode.status == "submit"
    first, second, third, last = json.loads(episode.prompt)
    assert first == ["(no output)\n", 0, ""]
    assert second[0].startswith("/tmp\n5\ny\n")
    assert third[:2] == ["(no output)\n[exit code 3]\n", 1]
    assert last[0] == "No score: no submission, submission.csv is not there\n"


BAD_FLAGS = {
    "": "--agent is missing: the command of your program",
    "--agent x --thoughts drop": "--thoughts is not for a program",
    "--agent x --eval-episodes 1": "--eval-episodes must be 0 or at least 2",
    "--agent x --task titanik": "Unknown task 'titanik'; did you mean titanic",
    "--attach": "--attach takes one command, in quotes",
    "--attach ls -l": "--attach takes one command, in quotes",
    "--attach ls": "--attach is for a program that --agent has started: ",
}


def test_bad_flags_are_one_sentence(monkeypatch, capsys):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    refuses(agent_program.main, BAD_FLAGS, monkeypatch, capsys)


def test_a_request_that_cannot_be_answered_says_why(play_program):
    episode, sampled = play_program("""
url = os.environ["OPENAI_BASE_URL"]
answers = []
def refused(*messages, path="/chat/completions", **body):
    try:
        post(path, {"messages": messages, **body})
    except (HTTPError, OSError) as error:  # the connection is closed at a body that is too large
        answers.append([getattr(error, "code", 413), getattr(error, "read", bytes)().decode()])
reply = {**PROMPT, "role": "assistant"}
refused(PROMPT, stream=True)
refused(PROMPT, tools=[{}])
refused({"role": "user"})
refused(PROMPT, reply)
refused(reply, PROMPT)
refused(user("x" * 4000))
refused(user("x" * 40_000))
refused(user("x" * 50_000_000))
refused(PROMPT, max_tokens=float("inf"))
refused(PROMPT, max_completion_tokens=float("nan"))
refused(user("\\ud800"))
refused(user(1e999))
refused(path="/act")
refused(path="/act", command=float("inf"))
refused(path="/act", command="\\ud800")
for key in ("", "0"):
    os.environ["OPENAI_BASE_URL"] = url.replace(os.environ["OPENAI_API_KEY"], key)
    refused(PROMPT)
os.environ["OPENAI_BASE_URL"] = url
ask(user(json.dumps(answers)))
""")  # fmt: skip
    assert len(sampled) == 1
    codes, said = zip(*json.loads(episode.prompt))
    assert codes == (*6 * [400], 413, 413, *7 * [400], 404, 404)
    assert "tools=[{}] is not honoured here" in said[1]
    assert "the first and the last message must not be the model's" in said[3]
    assert "over the maximum context length" in said[5]


HONOURED = {
    "n": [1, None],
    "stream": [False, None],
    "tool_choice": ["none", "auto"],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "temperature": [0.0, 1],
    "max_tokens": [None, 10**6],
    "no_such_field": [None],
}
REFUSED = {
    "top_p": [0.5],
    "n": [2, 0, "1"],
    "stream": [True],
    "tools": [[{}]],
    "tool_choice": ["required"],
    "stop": ["Observation:", ["a"]],
    "logit_bias": [{"5": -100}],
    "max_tokens": [0, -1, float("inf"), float("nan"), "many"],
    "no_such_field": [1],
}


def request(content="hi", **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return json.dumps(body).encode()


@pytest.mark.parametrize("name", HONOURED | REFUSED)
def test_a_field_of_a_request_is_honoured_or_refused_by_name(name):
    read = functools.partial(agent_program.read, policy=FakePolicy(""), samples={}, limit=9)
    assert read(request(max_tokens=3))[2] == 3
    for value in HONOURED.get(name, ()):
        assert read(request(**{name: value}))[2] == 9
    for value in REFUSED.get(name, ()):
        with pytest.raises(ValueError, match=name):
            read(request(**{name: value}))


def test_the_text_of_a_request_may_come_in_parts(play_program):
    part = {"type": "text", "text": "hi"}
    episode, sampled = play_program(f"""
first = ask(user([{part}, {part}]))
ask(user("hihi"), {{**first, "content": [dict({part}, text=first["content"])]}}, user([{part}]))
""")
    assert trained(episode) == sampled
    assert len(episode.segments) == 1  # what was sampled is known again
    assert episode.prompt == "hihi"
    assert episode.turns[0]["observation"] == "hi"
    with pytest.raises(ValueError, match="image_url is no text"):
        agent_program.read(request([{"type": "image_url"}]), FakePolicy(""), {}, 9)


def test_a_proxy_is_not_asked_and_requests_are_read_beside_the_event_loop(
    play_program, monkeypatch
):
    dead_proxy(monkeypatch, "")
    readers = []

    class Policy(FakePolicy):
        def render(self, messages):
            if messages[0]["content"] == "mine":
                readers.append(threading.current_thread())
            return super().render(messages)

    episode, _ = play_program("ask(user('mine'))", policy=Policy("a"))
    assert len(episode.turns) == 1, episode.fault
    assert readers[0] is not threading.main_thread()


def test_a_sandbox_that_breaks_is_a_fault_and_what_the_policy_raises_ends_the_run(play_program):
    class Breaking(env.Env):
        def step(self, reply, timeout, act):
            raise SandboxFault("the container died")

    class Broken(FakePolicy):
        async def sample(self, *_, **__):
            raise RuntimeError("the engine is broken")

    episode, _ = play_program("ask(PROMPT); act('ls')", world=Breaking(TASK, LOCAL))
    assert (episode.status, episode.fault) == ("fault", "the container died")
    assert episode.score is None
    with pytest.raises(RuntimeError, match="the engine is broken"):
        play_program("ask(PROMPT)", policy=Broken("a"))


def test_an_episode_that_is_cancelled_ends_its_program_and_its_request(policy, command, tmp_path):
    mark = tmp_path / "mark"
    program = f"""
open({str(mark)!r}, "w").write(str(os.getpid()))
while True: ask(PROMPT)
"""

    async def run():
        loop = functools.partial(agent_program.play, command=command(program))
        async with env.Env(TASK, LOCAL) as world:
            options = replace(OPTIONS, max_turns=10**6)
            playing = asyncio.ensure_future(run_episode(world, policy, options, play=loop))
            while not mark.exists() or not policy._futures:
                await asyncio.sleep(0.01)
            playing.cancel()
            await asyncio.wait([playing])
            await asyncio.sleep(0.05)
            return playing.cancelled()

    assert asyncio.run(run())
    assert not policy._futures
    assert ends(int(mark.read_text()))


def play_steps(play, agent, **fields):
    """Rows of a training in which the program `agent` plays the episodes."""

    async def train(policy, cfg, job):
        await agent_program.train(policy, agent_program.Config(**vars(cfg), agent=agent), job)

    return play(episode=run_episode, train=train, prompts=TINY_TEXTS, **fields)


@pytest.mark.slow
def test_programs_play_the_episodes_of_a_training_step(play, command):
    program = f"""
talk = [PROMPT]
reply = ask(*talk)["content"]
died = sum(map(ord, reply)) % 2
act({EVERYBODY_DIED!r}.replace("$/,0", "$/," + str(died)))
talk += [{{"role": "assistant", "content": reply}}, user(act("validate"))]
ask(*talk)
act("submit")
"""
    rows = play_steps(play, command(program), steps=2, ahead=1, seed=3)
    assert [row["turns"] for row in rows] == [2.0, 2.0]
    assert all(row["faults"] == 0 and row["valid_share"] == 1 for row in rows)
    assert max(row.get("logprob_diff_max", 0.0) for row in rows) < 1e-4
    assert any(row.get("grad_norm", 0) > 0 for row in rows)


def test_a_step_of_programs_that_never_ask_stops_the_run(play, command):
    with pytest.raises(UserError, match="exit code 1: (?s:.*)No module named 'no_such_package'"):
        play_steps(play, command("import no_such_package"))


@pytest.mark.slow
@pytest.mark.skipif(
    "MINI_SWE_VENV" not in os.environ, reason="set MINI_SWE_VENV, see tests/README.md"
)
def test_mini_swe_agent_plays_the_episodes_of_a_training_step(play, tmp_path, monkeypatch):
    """The program of docs/extend.md, with a random model, whose replies hold no command."""
    program = code_of("docs/extend.md", "python", "minisweagent")
    program = program.replace(".venv/bin/python", sys.executable)
    program = program.replace('"integrations/agent_program.py"', repr(str(SCRIPT)))
    (tmp_path / "mini.py").write_text(program)
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    interpreter = os.path.join(os.environ["MINI_SWE_VENV"], "bin/python")
    command = shlex.join([interpreter, str(tmp_path / "mini.py")])
    [row] = play_steps(play, command, steps=1, max_turns=2)
    assert (row["faults"], row["turns"]) == (0, 2.0)
