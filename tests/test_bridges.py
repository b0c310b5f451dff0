"""Bridges of integrations/: Harbor task folders, and verifiers."""

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import threading
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from backends import containers_of, missing, needs_docker
from env import Env
from flatlab.files import read_rows
from flatlab.task.grading import grade
from helpers import (
    AGENT_TEXTS,
    LOCAL,
    PROJECT,
    FakePolicy,
    block,
    chat_server,
    completion,
    do,
    play_once,
    user_error,
)
from integrations.harbor import foreign_image
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


def load_folder(folder):
    return load_task(f"integrations.harbor:{folder}")


def said(world, text):
    return do(world, text).observation


@needs_docker
def test_an_episode_in_a_folder():
    task = load_folder(FOLDER)
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
        assert (
            world.score().message == "No submission: 'answer' is neither a plain file nor a folder"
        )


@needs_docker
@pytest.mark.attack("a forged archive of a workspace: links to the tests, paths outside of it")
@pytest.mark.parametrize(
    "name, kind, link",
    [
        ("sorted.txt", tarfile.SYMTYPE, "/tests/expected.txt"),
        ("sorted.txt", tarfile.LNKTYPE, "/tests/expected.txt"),
        ("link.txt", tarfile.SYMTYPE, "/tests/expected.txt"),  # the image has another one
        ("../../../flatlab/tests/test.sh", tarfile.REGTYPE, ""),
        ("/flatlab/tests/test.sh", tarfile.REGTYPE, ""),
    ],
)
def test_an_archive_of_the_agents_own_reaches_no_tests(name, kind, link):
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = link
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(member)
    task = load_folder(FOLDER)
    with Env(task, "docker") as world:
        score = grade(task, {".flatlab.tar": data.getvalue()}, "test", world.make_sandbox)
    assert "neither a plain file nor a folder" in score.message


@needs_docker
def test_what_the_agent_puts_beside_the_tests_is_not_there(folder):
    """A file where the tests are laid out, and one of the names of the reward."""
    (folder / "tests/test.sh").write_text(
        "ls -A /tests /app > /logs/verifier/seen.txt\n"
        "grep -q mine /logs/verifier/seen.txt || echo '{\"first\": 0.25}' "
        "> /logs/verifier/reward.json\n"
    )
    with Env(load_folder(folder), "docker") as world:
        world.reset()
        said(world, "mkdir -p .flatlab/tests; touch .flatlab/tests/mine .flatlab/mine")
        assert world.score().value == 0.25
        said(world, "touch mine")
        assert world.score().message == "The tests wrote no reward."


@needs_docker
def test_files_that_the_agent_left_alone_keep_their_times(folder):
    """Tests that call make build what has changed."""
    (folder / "tests/test.sh").write_text(
        "[ sorted.txt -nt words.txt ] && ! [ link.txt -nt words.txt ]\n"
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    with Env(load_folder(folder), "docker") as world:
        world.reset()
        said(world, SORT)
        assert world.score().value == 1


def test_what_cannot_be_given_is_one_sentence(folder):
    settings = (folder / "task.toml").read_text().replace("memory_mb = 2048", "")
    (folder / "environment/docker-compose.yaml").write_text("services: {}")
    lacks = "asks for what a sandbox here lacks: environment/docker-compose.yaml, "
    mcp = r"environment\.mcp_servers \(task\.toml"
    for more, words in (
        ("[[environment.mcp_servers]]\nname = 'a'", f"{lacks}{mcp}"),
        ("tpu = {type = 'v4', topology = '2x2'}", rf"{lacks}environment\.tpu"),
        ("memory_mb = 65536", f"{lacks}more than 4096 MB"),
        ("memory_mb = 'much'", "The Harbor task .* cannot be used: ValueError: .*'much'"),
        ("memory_mb", "The Harbor task .* cannot be used: TOMLDecodeError"),
    ):
        (folder / "task.toml").write_text(settings + more)
        with user_error(words):
            load_folder(folder)
    (folder / "task.toml").write_text(settings)
    (folder / "tests/test.sh").unlink()
    with user_error(r"The Harbor task .* cannot be used: .*tests/test\.sh"):
        load_folder(folder)


@needs_docker
def test_images_that_cannot_be_built(tmp_path):
    with user_error("cannot build the image of task empty"):
        foreign_image(tmp_path, "empty")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nWORKDIR /app\n")
    with user_error("which must have python3, bash and tar"):
        foreign_image(tmp_path, "bare")
    with user_error("has no image absent:1; get it with `docker pull"):
        foreign_image(tmp_path, "named", "absent:1")


def test_tests_in_the_folder_of_the_image_are_refused(folder):
    os.link(folder / "tests/test.sh", folder / "environment/copy.sh")
    with user_error("test.sh is hidden, so it cannot be a public file, too"):
        load_folder(folder)


# ---- verifiers, through the real vf-eval in a virtual environment of its own

VENV = os.path.abspath(os.environ.get("VERIFIERS_VENV", ""))
CONFIG = PROJECT / "integrations/verifiers/eval.toml"
EVERYBODY_DIES = block(
    "sed 1d data/test.csv | cut -d, -f1 | sed 's/$/,0/' | sed '1i id,survived' > submission.csv"
)

has_verifiers = pytest.mark.skipif(
    "VERIFIERS_VENV" not in os.environ,
    reason="set VERIFIERS_VENV, see integrations/verifiers/README.md",
)


def replying(answer):
    """An endpoint that replies answer(messages)."""
    return chat_server(lambda body, _: (200, completion(answer(body["messages"])), {}))


def is_alive(process):
    """True if a process runs; one that was killed and not yet waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class VfEval:
    """A running `vf-eval @ eval.toml`. It remembers all processes that it started."""

    def __init__(self, folder: Path, url: str, rollouts: int, *flags):
        command = (
            f"{VENV}/bin/vf-eval @ {CONFIG} --client.base-url {url} --model m "
            f"--num-rollouts {rollouts} --no-rich -o {folder} --run.name run"
        )
        self.log = folder / "vf-eval.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command.split(), *map(str, flags)], cwd=folder, stdout=log, stderr=log
            )
        self.folder = folder
        self.started = set()

    def wait(self, done=lambda: False, seconds=400) -> int | None:
        """Waits for done() or the end; returns the exit code."""
        deadline = time.monotonic() + seconds
        while not done() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            with contextlib.suppress(psutil.NoSuchProcess):
                self.started |= set(psutil.Process(self.process.pid).children(recursive=True))
            time.sleep(0.1)
        return self.process.poll()

    def episodes(self) -> list[dict]:
        """Waits for the end. Returns the trace of each episode; no sandbox is left behind."""
        assert self.wait() == 0, self.log.read_text()[-3000:]
        assert not self.sandboxes()
        rows = read_rows(self.folder / "run/traces.jsonl")
        return [row["traces"][0] for row in rows]

    def sandboxes(self) -> list:
        """The containers, or else the processes, of the episodes that run now."""
        running = list(filter(is_alive, self.started))
        return containers_of(self.process.pid) or running


@pytest.mark.slow
@has_verifiers
def test_rewards_are_those_of_our_own_episodes(tmp_path):
    """Four episodes at once, of which every other one hands in a submission."""
    asked = []

    def answer(messages):
        if len(messages) > 2:
            return block("submit")
        asked.append(messages)
        return EVERYBODY_DIES if len(asked) % 2 else block("ls")

    with replying(answer) as url:
        traces = VfEval(tmp_path, url, 4, "--env.agent.harness.episode.max-turns", 2).episodes()
    task = load_task("titanic")
    policy = FakePolicy(EVERYBODY_DIES, block("submit"))
    own = asyncio.run(play_once(Env(task), policy, prompts=AGENT_TEXTS, max_turns=2))
    # A local sandbox has the packages of the environment around it, which is another one here.
    prompts = {re.sub(" with .*packages", "", p) for p in (own.prompt, asked[0][1]["content"])}
    assert len(prompts) == 1
    value = own.value
    seen = []
    for trace in traces:
        metrics = trace["metrics"]
        assert (metrics["turns"], metrics["faults"]) == (2, 0)
        [reward] = trace["rewards"].values()
        seen.append((metrics["valid"], metrics["value"], reward["score"]))
    valid = (1, pytest.approx(value), pytest.approx(min(1, value)))
    assert sorted(seen) == [(0, -1, -1)] * 2 + [valid] * 2


@pytest.mark.slow
@has_verifiers
@pytest.mark.parametrize(
    "flags, then, stopped_by",
    [
        (("--env.agent.max-turns", 2), "true", "max_turns"),
        (("--env.agent.timeout.rollout", 8), "sleep 100", "agent_timeout"),
    ],
)
def test_what_was_done_before_a_limit_of_verifiers_counts(tmp_path, flags, then, stopped_by):
    def answer(messages):
        is_first = messages[-2]["role"] == "system"
        return EVERYBODY_DIES if is_first else block(then)

    with replying(answer) as url:
        [trace] = VfEval(tmp_path, url, 1, *flags).episodes()
    assert trace["ok"]
    assert trace["stop_condition"] == stopped_by
    assert trace["metrics"]["valid"] == 1
    agent = trace["timing"]["agent"]
    assert agent["end"] - agent["start"] < 30


def asleep(asked: list):
    """An answer of replying(): a command that takes long."""

    def answer(messages):
        asked.append(messages)
        return block("sleep 500")

    return answer


@pytest.mark.slow
@has_verifiers
def test_ctrl_c_leaves_no_sandbox(tmp_path):
    asked = []
    with replying(asleep(asked)) as url:
        run = VfEval(tmp_path, url, 4)
        assert run.wait(lambda: len(asked) == 4 and run.sandboxes()) is None
        run.process.send_signal(signal.SIGINT)
        assert run.wait(seconds=60) == 130, run.log.read_text()[-3000:]
    assert not run.sandboxes()


def kill_sandboxes(run: VfEval, asked: list) -> None:
    """Kills what runs in the sandbox of the episode that has sent a request."""
    assert run.wait(lambda: asked and run.sandboxes()) is None
    for process in run.sandboxes():
        process.kill()
    asked.clear()


@pytest.mark.slow
@has_verifiers
@pytest.mark.skipif(bool(missing("local")), reason=missing("local"))
def test_a_sandbox_that_breaks_before_the_agents_first_command_is_replaced_once(tmp_path):
    asked, killed = [], threading.Semaphore(0)

    def answer(messages):
        asked.append(messages)
        killed.acquire()
        return block("true")

    with replying(answer) as url:
        run = VfEval(tmp_path, url, 1, "--env.agent.harness.sandbox.backend", LOCAL)
        for _ in range(2):
            kill_sandboxes(run, asked)
            killed.release()
        [trace] = run.episodes()
    assert not trace["ok"]
    assert trace["stop_condition"] == "sandbox_error"
    assert trace["metrics"]["faults"] == 2
    assert not any(trace["rewards"].values())


@pytest.mark.slow
@has_verifiers
@pytest.mark.skipif(bool(missing("local")), reason=missing("local"))
def test_a_sandbox_that_breaks_during_a_command_is_the_agents_doing(tmp_path):
    asked = []
    with replying(asleep(asked)) as url:
        run = VfEval(tmp_path, url, 1, "--env.agent.harness.sandbox.backend", LOCAL)
        kill_sandboxes(run, asked)
        [trace] = run.episodes()
    assert trace["ok"] and not asked  # nothing is played again
    assert trace["info"]["status"] == "crashed"
    [reward] = trace["rewards"].values()
    metrics = trace["metrics"]
    assert (metrics["faults"], metrics["valid"], metrics["value"], reward["score"]) == (
        0,
        0,
        -1,
        -1,
    )


@pytest.mark.slow
@has_verifiers
def test_nothing_is_paid_for_or_uploaded(tmp_path):
    """By default as far as the package decides, and by eval.toml for the rest."""
    for source in (f"@ {CONFIG}", "flatlab-env"):
        command = f"{VENV}/bin/vf-eval {source} --dry-run -o {tmp_path} --run.name dry"
        subprocess.run(command.split(), check=True, cwd=tmp_path)
        (path,) = (tmp_path / "dry").rglob("eval.json")
        config = json.loads(path.read_text())
        assert config["env"]["agent"]["runtime"]["type"] == "subprocess"
        assert source == "flatlab-env" or not config["push"]


@pytest.mark.slow
@has_verifiers
def test_prime_rls_file_has_the_keys_of_our_package():
    config = tomllib.loads((PROJECT / "configs/prime-rl.toml").read_text())["orchestrator"]
    code = "import json, sys, verifiers.v1 as vf; vf.resolve_env_config(json.loads(sys.argv[1]))"
    for source in config["train"]["source"] + config["eval"]["source"]:
        subprocess.run([f"{VENV}/bin/python", "-c", code, json.dumps(source["env"])], check=True)
