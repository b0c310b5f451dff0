"""Options, marks and fixtures of the tests: a random Qwen3, and one real engine per session."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables would be cut there
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "configs/tasks"))

from flatlab import threads  # noqa: E402
from flatlab.sandbox import backend  # noqa: E402

threads.configure()


def pytest_addoption(parser):
    group = parser.getgroup("flatlab")
    group.addoption("--all", action="store_true", help="run the tests marked slow, too")
    group.addoption(
        "--all-backends",
        action="store_true",
        help="run tests of sandboxes in every kind that works here, not only in the first",
    )
    group.addoption("--skipped", metavar="FILE", help="write the skipped tests and why to FILE")


def pytest_configure(config):
    # A shell that starts the tests with & lets them and their processes ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--all-backends"):
        os.environ["FLATLAB_ALL_BACKENDS"] = "1"  # read by backends.py
    config.addinivalue_line("markers", "slow: runs with --all (make test-all) only")
    config.addinivalue_line(
        "markers", "attack(name, ...): what the test tries, for the table in tests/ATTACKS.md"
    )
    config.addinivalue_line(
        "markers", "fault(number, name, ...): what the test lets break, for the same table"
    )


@pytest.fixture
def hasty(monkeypatch):
    """Sandboxes that break if processes (LARGE) do not end within a hundredth of a second."""
    modules = [
        (name, source.replace("SWEEP_SECONDS = 25", "SWEEP_SECONDS = 0.01"))
        for name, source in backend.MODULES
    ]
    assert modules != backend.MODULES
    monkeypatch.setattr(backend, "MODULES", modules)


def pytest_collection_modifyitems(config, items):
    """Without --all, tests marked slow are deselected, unless the command names a single test."""
    names_a_test = any("::" in argument for argument in config.args)
    if config.getoption("--all") or names_a_test:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_terminal_summary(terminalreporter, config):
    """With --skipped, writes a line for every test that was skipped; -rs puts several into one."""
    if config.getoption("--skipped"):
        reports = terminalreporter.stats.get("skipped", [])
        lines = [f"{r.nodeid}: {r.longrepr[2].removeprefix('Skipped: ')}\n" for r in reports]
        Path(config.getoption("--skipped")).write_text("".join(lines))


@pytest.fixture(autouse=True)
def no_checkouts(monkeypatch):
    """A test uses the checkouts that it names itself, not those of the person who runs it."""
    for name in ("MLGYM_ROOT", "MLEDOJO_ROOT", "MLEDOJO_REPO"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    from helpers import make_model

    return make_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="session")
def shared_policy(random_model):
    from flatlab.model.path import ModelPath
    from flatlab.options import ModelOptions
    from policy import Policy

    return Policy(ModelPath(random_model, None, False), ModelOptions(context=2048), lora_rank=8)


@pytest.fixture
def policy(shared_policy):
    """The engine and trainer of the session, with the adapter at its initial state (B = 0)."""
    for p in shared_policy.parameters():
        p.grad = None
    shared_policy.reset(0)
    return shared_policy


@pytest.fixture(scope="session")
def tiny_model():
    """The stand-in model, which ships in configs/tiny."""
    from flatlab.model.path import resolve_model

    return resolve_model("tiny")


@pytest.fixture
def quick_provenance(monkeypatch):
    """Neither git nor packages are looked up when a run directory is opened."""
    from flatlab.runs import store

    monkeypatch.setattr(store, "describe_git", lambda: "a commit")
    monkeypatch.setattr(store, "describe_machine", lambda: "a machine")


@pytest.fixture
def play(policy, tmp_path, monkeypatch, quick_provenance):
    """play(steps=4, ...) -> rows: a run of a script's train() in a fresh or known directory, from a
    fresh adapter.
    """
    import torch

    import grpo
    from flatlab.errors import first_cause
    from flatlab.options import changed
    from flatlab.runs import store
    from flatlab.train import metrics
    from flatlab.train.job import TrainingRun
    from flatlab.view import page
    from helpers import MADE_BY
    from training import CFG, TASK, one_reply, weights_of

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(page, "plot_now_and_then", lambda directory: None)
    start = weights_of(policy)

    def play(
        name="a",
        episode=one_reply,
        tasks=(TASK,),
        begin=start,
        trackers=(),
        guarded=True,
        train=grpo.train,
        **fields,
    ):
        with torch.no_grad():
            for p, s in zip(policy.parameters(), begin):
                p.copy_(s)
        monkeypatch.setattr(grpo, "run_episode", episode)
        if not guarded:
            monkeypatch.setattr(metrics, "collapse", lambda *_: "")
        cfg = changed(
            CFG,
            name=name,
            groups=2,
            max_groups=3,
            group_size=4,
            task=tuple(t.name for t in tasks),
            **{"eval_episodes": 0, "kl": 0.05, "concurrency": 8, **fields},
        )
        config = {"task": list(cfg.tasks.task), "steps": cfg.steps}
        run = store.open_run(f"logs/{name}", config, MADE_BY)
        run.update_result(**metrics.first_results(list(tasks), "training"))
        run.trackers += trackers
        try:
            asyncio.run(train(policy, cfg, TrainingRun(tasks=list(tasks), run=run)))
            return run.rows()
        except ExceptionGroup as group:
            raise first_cause(group) from group
        finally:
            run.lock.close()

    return play


@pytest.fixture
def no_daemon(monkeypatch):
    """No Docker daemon answers, and nobody remembers one."""
    from flatlab.sandbox import client
    from flatlab.sandbox.docker import docker_api

    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    docker_api.cache_clear()
    client.pick_backend.cache_clear()
    yield monkeypatch
    docker_api.cache_clear()
    client.pick_backend.cache_clear()
