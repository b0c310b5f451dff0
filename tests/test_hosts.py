"""Sandboxes on several Docker hosts: the daemon of this machine and a second one, or one daemon
behind two wires that can be cut.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count

import pytest

import grpo
import tasks
from backends import needs_docker
from bench.sandboxes import EPISODE
from engines import Engines, Wire, forget_engine, lacking, run_dockerd, start_dockerd
from env import Env
from flatlab.errors import SandboxFault
from flatlab.options import SandboxOptions
from flatlab.runs.reader import read_rows
from flatlab.sandbox import client, hosts, images
from flatlab.sandbox.backend import IMAGE
from flatlab.sandbox.hosts import Host, room
from flatlab.task import grading
from flatlab.train.distributed import SingleProcess
from flatlab.train.metrics import step_metrics
from helpers import PROJECT, FakePolicy, block, configure, do, play_once, python, user_error
from tasks import load_task
from training import CFG

TITANIC = EPISODE[2].format(n=7)
FIRST = "unix:///var/run/docker.sock"


def spread(machines, episodes):
    """The number of episodes on each host after so many have chosen one."""
    for _ in range(episodes):
        max(machines, key=room).sandboxes += 1
    return [host.sandboxes for host in machines]


def test_episodes_fill_the_free_slots_and_then_share_the_load_per_core():
    machines = [Host("a", cores=2), Host("b", cores=4), Host("c", cores=16)]
    assert spread(machines, 12) == [0, 0, 12]
    assert spread(machines, 10) == [2, 4, 16]
    assert spread(machines, 22) == [4, 8, 32]


def test_episodes_of_this_and_of_other_processes_count():
    class Episode:
        pass

    mine = [Episode(), Episode()]
    busy = Host("a", cores=8, sandboxes=3)
    busy.episodes.update(mine)
    assert room(busy) == 3
    mine.clear()  # never closed, but gone
    assert room(busy) == 5


def test_several_addresses_are_separated_by_commas(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@box, tcp://10.0.0.5:2375,")
    assert hosts.addresses() == ["ssh://me@box", "tcp://10.0.0.5:2375"]
    for single in ("ssh://me@box", ",", ""):
        monkeypatch.setenv("DOCKER_HOST", single)
        assert hosts.addresses() == [""]
    monkeypatch.delenv("DOCKER_HOST")
    assert hosts.addresses() == [""]


# ---- one daemon behind two wires


@pytest.fixture
def wires(tmp_path, monkeypatch):
    if not os.path.exists("/var/run/docker.sock") or os.environ.get("DOCKER_HOST"):
        pytest.skip("needs Docker's own socket")
    wires = [Wire(tmp_path / "a.sock"), Wire(tmp_path / "b.sock")]
    monkeypatch.setenv("DOCKER_HOST", ",".join(map(address_of, wires)))
    forget_engine()
    yield wires
    for wire in wires:
        wire.cut()
    monkeypatch.undo()
    forget_engine()


def address_of(wire):
    return f"unix://{wire.path}"


@needs_docker
def test_an_episode_its_forks_and_its_gradings_stay_on_their_host(wires, monkeypatch):
    monkeypatch.setattr(grading, "grades", {})  # another test may have graded the same artefacts
    task = load_task("titanic")
    with Env(task, "docker") as one, Env(task, "docker") as two:
        one.reset()
        two.reset()
        assert {one.host, two.host} == set(map(address_of, wires))
        do(two, TITANIC)
        with two.fork(clear_artefacts=False) as twin:
            assert twin.score().valid
            assert {box.host for box in [*two.opened, *twin.opened]} == {two.host}
            assert len(twin.opened) == 2
        assert len(hosts.host_of(two.host).episodes) == 1
    assert len(hosts.host_of(two.host).episodes) == 0


@needs_docker
@pytest.mark.fault(34, "one of several Docker hosts dies, and comes back")
def test_a_host_that_dies_is_left_out_until_it_is_back(wires, monkeypatch):
    task = load_task("titanic")
    dead, alive = map(address_of, wires)
    with Env(task, "docker") as first, Env(task, "docker") as second, Env(task, "docker") as third:
        first.reset()
        assert first.host == dead
        assert not hosts.is_lost(dead)
        wires[0].cut()
        with pytest.raises(SandboxFault):
            do(first, "ls")
        assert hosts.is_lost(dead)
        second.reset()
        third.reset()
        assert (second.host, third.host) == (alive, alive)
    wires[0].listen()
    with Env(task, "docker") as again:
        again.reset()
        assert again.host == alive  # it is not yet time
    monkeypatch.setattr(hosts.host_of(dead), "retry_at", 0.1)
    with Env(task, "docker") as again:
        again.reset()
        assert again.host == dead
    for wire in wires:
        wire.cut()
    with pytest.raises(SandboxFault, match="Docker did not start a container"):
        Env(task, "docker").reset()
    assert not hosts.is_lost(alive)


@needs_docker
def test_episodes_of_a_lost_host_are_played_again_on_another(wires):
    dead, alive = map(address_of, wires)
    hosts_used = set()

    def cut(prompt, seed):
        hosts_used.update(host for host in (dead, alive) if hosts.host_of(host).episodes)
        wires[0].cut()
        return block("ls")

    task = load_task("titanic")
    cfg = configure(CFG, backend="docker", texts="short", max_turns=2)
    plan = grpo.Plan([task], 4, seed=1)
    policy = FakePolicy(cut, block(TITANIC))
    [group] = asyncio.run(grpo.play_groups(policy, plan, cfg, SingleProcess()))
    assert hosts_used == {dead, alive}
    assert len({episode.seed for episode in group.played}) == len(group.rewards) == 4
    faults = [episode.host for episode in group.episodes if episode.status == "fault"]
    assert faults
    assert set(faults) == {dead}
    assert step_metrics([group], [task])["faults_by_host"] == {dead: len(faults)}


@needs_docker
def test_the_line_names_each_host_and_whether_it_answers(wires):
    dead, alive = map(address_of, wires)
    wires[0].cut()
    line = client.pick_backend("auto")[1]
    assert f"on {dead} (does not answer) and {alive} ({os.cpu_count()} cores, Engine " in line
    wires[1].cut()
    forget_engine()
    with user_error(f"^No Docker daemon answers at {dead}. No Docker daemon answers at {alive}.$"):
        client.pick_backend("auto")


@needs_docker
def test_a_host_whose_daemon_answers_with_an_error_is_left_out(wires):
    broken, alive = map(address_of, wires)
    with Env(load_task("titanic"), "docker") as first:
        first.reset()
        assert first.host == broken
        wires[0].swap = (b"/containers/json", b"/nothing/here")
        for _ in range(2):
            with Env(load_task("titanic"), "docker") as other:
                other.reset()
                assert other.host == alive


@needs_docker
def test_tasks_are_checked_on_a_host_that_answers(wires, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wires[0].cut()
    tasks.check(load_task("titanic"), SandboxOptions("docker"))
    assert "not degenerate" in capsys.readouterr().out


@needs_docker
def test_requirements_are_installed_on_the_hosts_that_answer(wires, monkeypatch, tmp_path):
    required = tmp_path / "requirements.txt"
    required.write_text("nothing\n")
    task = replace(load_task("titanic"), requirements=required)
    monkeypatch.setattr("docker.APIClient.build", lambda *_, **__: [])
    wires[0].cut()
    assert images.install_requirements(task, IMAGE).startswith("flatlab-requirements:")


def test_a_local_sandbox_needs_none_of_several_hosts(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nothing/a,unix:///nothing/b")
    forget_engine()
    assert client.pick_backend("local")[0] == "local"
    with user_error("No Docker daemon answers at unix:///nothing/a."):
        client.pick_backend("auto")
    forget_engine()


@needs_docker
def test_a_host_without_the_image_is_one_sentence(wires):
    done = python("env.py", "--task", "titanic", "--image", "flatlab/nothing:here")
    assert done.returncode == 2
    for wire in wires:
        assert f"Docker at {address_of(wire)} has no image flatlab/nothing:here" in done.stderr
    assert done.stderr.count("\n") == 1


SEARCH = "--task titanic --model tiny --sampling-mode none --nodes 12 --branching 5".split()
SEARCH += ["--workers", "8", "--backend", "docker"]


@pytest.fixture
def script(tmp_path):
    """script(name, *flags) starts a script in tmp_path. It is killed if the test fails."""
    processes = []

    def start(name, *flags):
        command = [sys.executable, PROJECT / name, *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(command, cwd=tmp_path, text=True, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def wait_for(condition, seconds=300):
    """Whether the condition becomes true in this time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


@pytest.mark.slow
@needs_docker
@pytest.mark.fault(34, "all Docker hosts die in the middle of a search")
def test_without_any_host_a_search_stops_and_the_same_command_continues_it(wires, script, tmp_path):
    process = script("search.py", *SEARCH, "--name", "s")
    journal = tmp_path / "logs/s/journal.jsonl"
    assert wait_for(lambda: journal.exists() and len(read_rows(journal)) >= 2)
    for wire in wires:
        wire.cut()
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 2, said
    assert "Run the same command again to continue." in said
    for wire in wires:
        wire.listen()
    process = script("search.py", *SEARCH, "--name", "s", "--nodes", "20")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert len(read_rows(journal)) == 20


# ---- two daemons


@pytest.fixture(scope="module")
def second(rootfs):
    """A second daemon, which can be killed and started again."""
    reason = lacking("dockerd", "ip") or ("only root can start dockerd" if os.geteuid() else "")
    if reason or os.environ.get("DOCKER_HOST"):
        pytest.skip(reason or "needs Docker's own socket")
    services = Engines()
    patch = pytest.MonkeyPatch()
    try:
        services.address = f"unix://{start_dockerd(services, rootfs)}"
        patch.setenv("DOCKER_HOST", f"{FIRST},{services.address}")
        forget_engine()
        yield services
    finally:
        patch.undo()
        forget_engine()
        services.stop()


def containers(address, pid, *options):
    """The containers of one process at an address."""
    label = f"label=flatlab.owner={socket.gethostname()}:{pid}"
    command = ["docker", "--host", address, "ps", "--quiet", "--filter", label, *options]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def kill(services):
    services.running[-1].kill()
    services.running[-1].wait()


def nothing_is_left(services, pid):
    """Whether no container of a process is left, after a while."""
    addresses = (FIRST, services.address)
    return wait_for(lambda: not any(containers(at, pid, "--all") for at in addresses), 60)


@pytest.mark.slow
def test_32_episodes_run_on_two_daemons(second):
    numbers = count(3)

    def replies():
        number = next(numbers)
        return [block(command.format(n=number)) for command in EPISODE]

    async def main():
        worlds = [Env(load_task("titanic"), "docker") for _ in range(32)]
        plays = [play_once(world, FakePolicy(*replies())) for world in worlds]
        return await asyncio.gather(*plays)

    episodes = asyncio.run(main())
    assert all(episode.score and episode.score.valid for episode in episodes)
    on_second = sum(episode.host == second.address for episode in episodes)
    assert 8 <= on_second <= 24  # other processes may have sandboxes on the first
    assert nothing_is_left(second, os.getpid())


TRAIN = "--task titanic --model tiny --steps 2 --groups 4 --max-groups 4 --eval-episodes 0".split()
TRAIN += ["--backend", "docker", "--concurrency", "32", "--name", "t"]


@pytest.mark.slow
@pytest.mark.fault(34, "one of two Docker daemons is killed in the middle of a training step")
def test_a_training_step_loses_nothing_with_a_host(second, script, tmp_path):
    process = script("grpo.py", *TRAIN)
    assert wait_for(lambda: len(containers(second.address, process.pid)) >= 8)
    kill(second)
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    rows = read_rows(tmp_path / "logs/t/metrics.jsonl")
    assert [row["episodes"] for row in rows] == [32, 32]
    assert rows[0]["faults_by_host"] == {second.address: rows[0]["faults"]}
    assert rows[0]["faults"] >= 8
    assert rows[1]["faults"] == 0
    run_dockerd(second)
    assert nothing_is_left(second, process.pid)


@pytest.mark.slow
@pytest.mark.fault(34, "one of two Docker daemons is killed in the middle of a search")
def test_a_search_loses_nothing_with_a_host(second, script, tmp_path):
    process = script("search.py", *SEARCH, "--name", "s")
    assert wait_for(lambda: len(containers(second.address, process.pid)) >= 2)
    kill(second)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    rows = read_rows(tmp_path / "logs/s/journal.jsonl")
    assert len(rows) == 12
    assert all(row["status"] != "fault" for row in rows)
    assert sum(row["faults_by_host"].get(second.address, 0) for row in rows) >= 1
    run_dockerd(second)
    assert nothing_is_left(second, process.pid)
