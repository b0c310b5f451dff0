"""Faults of sandboxes: a fault is a status, never a score, and nothing is left behind.

The marker `fault` names what is broken, here and in test_sandbox.py and test_env.py;
`python tests/bench table` lists all of them in tests/ATTACKS.md.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from backends import ISOLATED, containers_of, needs_docker, wait_for
from bench.sandboxes import EPISODE, FAILING, episodes_in_a_row, play
from env import Env
from flatlab.errors import SandboxFault
from flatlab.sandbox import backend as sandbox_backend
from flatlab.sandbox import client, docker, local, snapshot
from flatlab.sandbox.backend import Spec
from flatlab.sandbox.client import Sandbox
from flatlab.task import machine
from helpers import PROJECT, FakePolicy, block, copy_of, do, play_once, slow, user_error, within
from tasks import load_task
from wire import Wire

fault = pytest.mark.fault
TITANIC = EPISODE[2].format(n=7)


@pytest.fixture(params=ISOLATED)
def backend(request):
    return request.param


@pytest.fixture
def task():
    return load_task("titanic")


@pytest.fixture
def world(task, backend):
    with Env(task, backend) as world:
        world.reset()
        yield world


def ours():
    """Containers of this process."""
    return containers_of(os.getpid())


# ---- what the agent does


@fault(29, "looks for copies of earlier states")
def test_no_snapshot_lies_in_the_sandbox(world):
    do(world, "echo MARK7 > f")
    assert b"MARK7" in world.snapshot()
    names = "-name '*flatlab-*' -o -name '*.tar' -newer data/train.csv"
    said = do(world, f"find / {names} 2>/dev/null; ls -A ~ /tmp").observation
    assert "flatlab-" not in said.replace("flatlab-test", "")
    assert "workspace" in said


# ---- copies


# What a sandbox shows of this machine, and the folders above it, are made anew with each one.
SHOWN = [Path(path) for path, _ in local.local_view(Spec())]
ABOVE = {folder for path in SHOWN for folder in path.parents}
MOUNTED = "".join(f"! -path '{path}' ! -path '{path}/*' " for path in SHOWN)
MOUNTED += "".join(f"! -path '{folder}' " for folder in ABOVE)
MANIFEST = rf"""
find /home/agent /tmp /var/tmp /dev/shm -xdev {MOUNTED}\
  \( -type f -printf '%p %y %m %U %G %s %T@ ' -exec md5sum {{}} \; \
  -o -printf '%p %y %m %U %G %T@ %l\n' \) 2>/dev/null | LC_ALL=C sort
"""
WORK = [
    "mkdir -p deep/er ~/.local/lib/python3/site-packages/pkg /tmp/cache; "
    "printf 'x\\0y' > 'deep/er/odd name'; ln -s nowhere link; chmod 700 deep",
    "echo installed > ~/.local/lib/python3/site-packages/pkg/__init__.py; "
    "echo t > /tmp/cache/t; mkfifo fifo; printf z > $(printf 'bad\\xff')",
    "rm data/test.csv; echo more >> data/train.csv; export KEPT='a\nb'; cd deep",
    "ln data/../deep/er/'odd name' hard; echo shm > /dev/shm/s; touch -d 2001-01-01 old; "
    "mkdir empty; chmod 555 empty; chmod 4755 old",
]


@fault(28, "a copy while the agent is in a deep folder")
@fault(28, "a copy of a parent that failed, with installed packages and deleted files")
@pytest.mark.parametrize("last", ["exit 3", "sleep 30"])
def test_a_copy_equals_its_parent(world, last):
    def manifest(copy):
        return copy.sandbox.run(MANIFEST, 60).output

    for command in WORK:
        assert do(world, command).status == "ok"
    world.step(block(last), timeout=0.3)
    with copy_of(world, clear_artefacts=False) as twin:
        ours = manifest(world)
        assert manifest(twin) == ours
        assert "odd name" in ours
        assert "site-packages/pkg/__init__.py" in ours
        assert "data/test.csv" not in ours
        assert do(twin, 'pwd; echo "$KEPT"').observation == f"{twin.sandbox.workspace}/deep\na\nb"
        twin.restore(world.snapshot(), False)  # from a file, too
        assert manifest(twin) == ours
        with copy_of(twin, clear_artefacts=False) as third:
            assert manifest(third) == ours


@fault(28, "a folder renamed in which a large file of the task is mounted")
def test_a_copy_of_a_renamed_folder_with_a_mount(backend, task, monkeypatch):
    """The copy cannot remove the mount, so it keeps the file where it was."""
    monkeypatch.setattr(machine, "MOUNT_BYTES", 1000)
    with Env(task, backend) as world:
        world.reset()
        do(world, "mv data input; cp input/*.csv . && ls")
        with copy_of(world) as twin:
            seen = do(twin, "ls . data").observation
        do(world, "echo x > submission.csv")
        assert "the first line" in world.score().message  # the mount is also in the grading
    assert "input" in seen
    assert "train.csv" in seen


@fault(28, "a copy that is too large")
def test_a_copy_that_is_too_large_is_a_fault(world, monkeypatch):
    monkeypatch.setattr(snapshot, "COPY_BYTES", 1 << 20)
    do(world, "head -c 2M /dev/urandom > big")
    with pytest.raises(SandboxFault, match="cannot be copied: more than 1 MB"):
        copy_of(world)
    assert do(world, "echo alive").observation == "alive"


# ---- Docker


@pytest.fixture
def wire(tmp_path, monkeypatch):
    if not os.path.exists("/var/run/docker.sock") or os.environ.get("DOCKER_HOST"):
        pytest.skip("needs Docker's own socket")
    wire = Wire(tmp_path / "d.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{wire.path}")
    forget_docker()
    yield wire
    wire.cut()
    forget_docker()


def forget_docker():
    docker.docker_api.cache_clear()
    client.pick_backend.cache_clear()


@needs_docker
@fault(17, "the daemon is restarted in the middle of an episode")
def test_daemon_restarted_in_an_episode(wire, task):
    def cut_after(prompt, seed):
        wire.cut()
        return block("ls")

    policy = FakePolicy(block("ls"), cut_after)
    with Env(task, "docker") as world:
        episode = asyncio.run(play_once(world, policy))
        assert (episode.status, episode.value, len(episode.turns)) == ("fault", None, 2)
    with Env(task, "docker") as world:
        with pytest.raises(SandboxFault, match="Docker did not start a container"):
            world.reset()
        wire.listen()
        world.reset()  # it is back
        do(world, TITANIC)
        assert world.score().valid


@needs_docker
@fault(17, "the connection is cut between making and starting a container")
@fault(20, "a container that was made but never started by a process that was killed")
@pytest.mark.parametrize("moment", [b"/start HTTP", slow(b"/attach?")])
def test_container_that_was_made_but_not_started(wire, moment, monkeypatch):
    """It is removed at the next start; one that runs is not."""
    with closing(Sandbox("docker")) as running:
        wire.cut_at = moment
        with pytest.raises(SandboxFault, match="Docker did not start a container"):
            Sandbox("docker")
        wire.cut_at = b"\0never\0"
        monkeypatch.setattr(docker, "LEFTOVER", "0s")  # else a leftover may be five minutes old
        docker.docker_api.cache_clear()
        docker.docker_api()
        assert running.run("true", 5).exit_code == 0
        assert not [box for box in ours() if box["State"] == "created"]


@pytest.mark.slow
@needs_docker
@fault(18, "the daemon hangs")
def test_daemon_that_hangs(wire, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.0)
    with closing(Sandbox("docker")) as box:
        wire.hang = True
        with pytest.raises(SandboxFault, match="does not answer"):
            box.call("sweep")
        forget_docker()
        with within(12), user_error("No Docker daemon answers"):
            client.pick_backend("docker")
        wire.hang = False


def half(*args, boot_program=sandbox_backend.boot_program, **fields):
    """A program that its owner sends in part only."""
    boot, text = boot_program(*args, **fields)
    return boot, text[:1000]


@fault(20, "our process is killed while a sandbox starts")
def test_owner_dies_before_the_sandbox_has_read_its_program(backend, monkeypatch):
    started = []

    def close_only(stream, process):
        stream.close()
        started.append(process)

    monkeypatch.setattr(docker, "boot_program", half)
    monkeypatch.setattr(local, "boot_program", half)
    monkeypatch.setattr(local, "end", close_only)
    monkeypatch.setattr(Sandbox, "call", lambda *_: ({"cwd": ""}, b""))
    box = Sandbox(backend)
    if backend == "docker":
        assert box.container in {row["Id"] for row in ours()}
    box.close()  # as the end of our process does
    if backend == "docker":
        assert wait_for(lambda: box.container not in {row["Id"] for row in ours()})
    else:
        assert started[0].wait(10) == 1


# ---- the machine


@pytest.mark.slow
@fault(19, "many sandboxes at once: 64 local ones, 24 in Docker")
def test_many_sandboxes_at_once(task, backend):
    # 64 containers take half a minute on two idle cores, minutes on busy ones
    count = 24 if backend == "docker" else 64
    barrier = threading.Barrier(count)

    def episode(number):
        with Env(task, backend) as world:
            world.reset()
            assert do(world, f"echo {number} > mine; {TITANIC}").status == "ok"
            barrier.wait(300)  # all are there now
            assert do(world, "cat mine; ls | wc -l").observation == f"{number}\n3"
            assert world.score().valid

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(episode, range(count)))
    assert wait_for(lambda: not ours(), 120)


@pytest.mark.slow
@fault(
    19,
    "60 episodes in a row, every tenth of an agent that fails: memory, threads, file descriptors, "
    "containers, folders (1,000: python tests/bench soak)",
)
def test_nothing_grows(backend, task):
    assert play(task, backend, 0, FAILING) is None
    before, after = episodes_in_a_row(backend, 60)
    assert after["memory (kB)"] < before["memory (kB)"] + 4096
    for name in ("threads", "file descriptors", "folders in /tmp"):
        assert after[name] <= before[name] + 10  # a leak would be 60; connections come and go
    assert wait_for(lambda: not ours())


INTERRUPTED = """
import asyncio, sys; sys.path[:0] = [{project!r}, {project!r} + "/tests"]
from helpers import FakePolicy, block, play_once
from env import Env
from tasks import load_task
async def main():
    policy = FakePolicy(block("sleep 0.3; ls"))
    print("started", flush=True)
    task = load_task("titanic", "", "")
    worlds = [Env(task, {backend!r}) for _ in range(6)]
    await asyncio.gather(*(play_once(world, policy, max_turns=50) for world in worlds))
asyncio.run(main())
"""


@fault(21, "Ctrl-C while sandboxes start, work or end")
@pytest.mark.parametrize("moment", [0.8, slow(0.02), slow(0.2), slow(2.0)])
def test_ctrl_c(backend, moment):
    code = INTERRUPTED.format(project=str(PROJECT), backend=backend)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert process.stdout.readline() == "started\n"
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert err.splitlines()[-1] == "KeyboardInterrupt", err
    assert wait_for(lambda: not containers_of(process.pid), 15)
    folders = [folder.name for folder in Path("/tmp").glob("flatlab-*")]
    assert str(process.pid) not in " ".join(folders)


@fault(30, "a slow start of the sandbox")
def test_a_slow_start_is_not_the_agents_time(task, monkeypatch):
    def slow(self, open_=Env.open):
        time.sleep(1.0)
        return open_(self)

    monkeypatch.setattr(Env, "open", slow)
    policy = FakePolicy(block(TITANIC), block("submit"))
    episode = asyncio.run(play_once(Env(task, "local"), policy, episode_minutes=0.015))
    assert episode.status == "submit"
    assert episode.valid
    assert sum(turn["seconds_env"] for turn in episode.turns) < 0.9


@fault(15, "the sandbox breaks before the first command")
def test_a_sandbox_that_breaks_before_the_first_command_is_a_fault(task, backend):
    world = Env(task, backend)

    def breaks(prompt, seed):
        world.sandbox.close()
        return block("ls")

    episode = asyncio.run(play_once(world, FakePolicy(breaks)))
    assert (episode.status, episode.score) == ("fault", None)


@fault(33, "one of several episodes breaks")
def test_one_broken_episode_leaves_the_others_alone(task, monkeypatch):
    made = []

    def sometimes(*args, **kwargs):
        made.append(args)
        if len(made) == 2:
            raise SandboxFault("no more containers")
        return Sandbox(*args, **kwargs)

    monkeypatch.setattr(machine, "Sandbox", sometimes)

    async def main():
        replies = (block(TITANIC), block("submit"))
        plays = [play_once(Env(task, "local"), FakePolicy(*replies)) for _ in range(6)]
        return await asyncio.gather(*plays)

    episodes = asyncio.run(main())
    assert sorted(episode.status for episode in episodes) == ["fault"] + ["submit"] * 5
