"""integrations/verifiers through the real `vf-eval`, in a virtual environment of its own."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import tomllib
from collections import Counter
from pathlib import Path

import psutil
import pytest

from backends import containers_of, missing
from flatlab.task.definition import clipped_improvement
from helpers import PROJECT, block, chat_server, completion, python, served

VENV = os.path.abspath(os.environ.get("VERIFIERS_VENV", ""))
CONFIG = PROJECT / "integrations/verifiers/eval.toml"
TINY = {"context": 2048, "max-reply-tokens": 160, "max-observation-tokens": 256, "max-turns": 8}
TINY |= {"prompts": "configs/prompts/tiny.yaml"}
EVERYBODY_DIES = block(
    "sed 1d data/test.csv | cut -d, -f1 | sed 's/$/,0/' | sed '1i id,survived' > submission.csv"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "VERIFIERS_VENV" not in os.environ,
        reason="set VERIFIERS_VENV, see integrations/verifiers/README.md",
    ),
]


def replying(answer):
    """An endpoint that replies answer(messages)."""
    return chat_server(lambda body, _: (200, completion(answer(body["messages"])), {}))


def is_alive(process):
    """Whether a process runs; one that was killed and not yet waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class VfEval:
    """A running `vf-eval @ eval.toml`. It remembers all processes that it started."""

    def __init__(self, folder: Path, url: str, rollouts: int, *flags, **options):
        for name, value in options.items():
            flags += (f"--env.agent.harness.{name}", value)
        command = [f"{VENV}/bin/vf-eval", "@", CONFIG, "--client.base-url", url, "--model", "m"]
        command += ["--num-rollouts", rollouts, "--no-rich", "-o", folder, "--run.name", "run"]
        self.log = folder / "vf-eval.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(part) for part in (*command, *flags)], cwd=folder, stdout=log, stderr=log
            )
        self.traces = folder / "run/traces.jsonl"
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
        """The trace of each episode of a finished run that left no sandbox behind."""
        self.nothing_is_left()
        lines = self.traces.read_text().splitlines()
        return [json.loads(line)["traces"][0] for line in lines]

    def sandboxes(self) -> list:
        """The containers, or else the processes, of the episodes that run now."""
        running = list(filter(is_alive, self.started))
        return containers_of(self.process.pid) or running

    def nothing_is_left(self):
        assert not self.sandboxes()


def conversation(trace: dict) -> list[dict]:
    messages = [node["message"] for node in trace["nodes"]]
    return [{"role": m["role"], "content": m["content"]} for m in messages]


@contextlib.contextmanager
def replaying(conversations: list[list[dict]]):
    """An endpoint that gives the replies of these conversations to the same prompts, each once."""
    replies = {}
    for messages in conversations:
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                key = json.dumps(messages[:number])
                replies.setdefault(key, []).append(message["content"])
    lock = threading.Lock()

    def answer(messages):
        with lock:
            return replies[json.dumps(messages)].pop()

    with replying(answer) as url:
        yield url
    assert not any(replies.values())


def test_rewards_of_a_real_model_are_those_of_a_search(tmp_path):
    """Eight episodes at once with the stand-in; search.py then gets the same replies."""
    with served(PROJECT / "configs/tiny", tmp_path) as url:
        run = VfEval(tmp_path, url, 8, **TINY)
        assert run.wait() == 0, run.log.read_text()[-3000:]
    traces = run.episodes()
    assert len(traces) == 8
    assert all(trace["ok"] for trace in traces)
    agents = [trace["timing"]["agent"] for trace in traces]
    assert max(agent["start"] for agent in agents) < min(agent["end"] for agent in agents)
    assert all(trace["metrics"]["faults"] == 0 for trace in traces)
    with replaying([conversation(trace) for trace in traces]) as url:
        flags = [f"--{name}={value}" for name, value in TINY.items()]
        command = [f"{PROJECT}/search.py", f"{PROJECT}/configs/evaluate.yaml", "--task=titanic"]
        command += [f"--url={url}", "--model=m", "--nodes=8", "--name=replay"]
        done = python(*command, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = map(json.loads, (tmp_path / "logs/replay/journal.jsonl").read_text().splitlines())
    searched = Counter()
    for row in rows:
        replies = tuple(turn["reply"] for turn in row["actions"])
        improvement = row["improvement"] if row["valid"] else 0.0  # the baseline, as in tables
        reward = clipped_improvement(row["improvement"])  # as in training
        searched[replies, row["valid"], improvement, reward] += 1
    evaluated = Counter()
    for trace in traces:
        replies = [m["content"] for m in conversation(trace) if m["role"] == "assistant"]
        assert trace["metrics"]["turns"] == len(replies)
        reward = sum(reward["score"] for reward in trace["rewards"].values())
        metrics = trace["metrics"]
        evaluated[tuple(replies), bool(metrics["valid"]), metrics["improvement"], reward] += 1
    assert evaluated == searched
    assert len({reward for *_, reward in evaluated}) > 1


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
        run = VfEval(tmp_path, url, 1, *flags)
        assert run.wait() == 0, run.log.read_text()[-3000:]
    (trace,) = run.episodes()
    assert trace["ok"]
    assert trace["stop_condition"] == stopped_by
    assert trace["metrics"]["valid"] == 1
    assert trace["info"]["score"]["value"] > 0.5
    agent = trace["timing"]["agent"]
    assert agent["end"] - agent["start"] < 30


def asleep(asked: list):
    """An answer of replying(): a command that takes long."""

    def answer(messages):
        asked.append(messages)
        return block("sleep 500")

    return answer


def test_ctrl_c_leaves_no_sandbox(tmp_path):
    asked = []
    with replying(asleep(asked)) as url:
        run = VfEval(tmp_path, url, 4)
        assert run.wait(lambda: len(asked) == 4 and run.sandboxes()) is None
        run.process.send_signal(signal.SIGINT)
        assert run.wait(seconds=60) == 130, run.log.read_text()[-3000:]
    run.nothing_is_left()


@pytest.mark.skipif(bool(missing("local")), reason=missing("local"))
def test_a_broken_sandbox_is_replaced_once_and_then_an_error(tmp_path):
    asked = []
    with replying(asleep(asked)) as url:
        run = VfEval(tmp_path, url, 1, backend="local")
        for _ in range(2):
            assert run.wait(lambda: asked and run.sandboxes()) is None
            asked.clear()
            for process in run.sandboxes():
                process.kill()
        assert run.wait() == 0, run.log.read_text()[-3000:]
    (trace,) = run.episodes()
    assert not trace["ok"]
    assert trace["stop_condition"] == "sandbox_error"
    assert [error["type"] for error in trace["errors"]] == ["SandboxError"] * 2
    assert trace["metrics"]["faults"] == 2
    assert not any(trace["rewards"].values())


def test_nothing_is_paid_for_or_uploaded(tmp_path):
    """By default as far as the package decides, and by eval.toml for the rest."""
    for source in (["@", CONFIG], ["flatlab-env"]):
        command = [f"{VENV}/bin/vf-eval", *source, "--dry-run", "-o", tmp_path, "--run.name", "dry"]
        subprocess.run(list(map(str, command)), check=True, cwd=tmp_path)
        (path,) = (tmp_path / "dry").rglob("eval.json")
        config = json.loads(path.read_text())
        assert config["env"]["agent"]["runtime"]["type"] == "subprocess"
        assert config["env"]["agent"]["harness"]["id"] == "flatlab-env"
        if source[0] == "@":
            assert not config["push"]
            assert "localhost" in config["client"]["base_url"]


def test_prime_rls_file_has_the_keys_of_our_package():
    config = tomllib.loads((PROJECT / "configs/prime-rl.toml").read_text())
    code = "import json, sys, verifiers.v1 as vf; vf.resolve_env_config(json.loads(sys.argv[1]))"
    for part in ("train", "eval"):
        (source,) = config["orchestrator"][part]["source"]
        subprocess.run([f"{VENV}/bin/python", "-c", code, json.dumps(source["env"])], check=True)
