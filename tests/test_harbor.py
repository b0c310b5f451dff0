"""A Harbor task folder that is made here, harbor_task/."""

import os
import shutil
from pathlib import Path

import pytest

from backends import needs_docker
from env import Env, check_needs
from flatlab.options import SandboxOptions
from flatlab.sandbox.images import foreign_image
from helpers import do, python, user_error
from tasks import load_task

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
        ("memory = 8", "an amount of memory that is not a number"),
        ("[verifier.environment]\ncpus = 1", r"verifier\.environment"),
    ):
        text = settings.replace("memory_mb = 2048", "") if "memory" in more else settings
        (folder / "task.toml").write_text(text + more)
        with user_error(f"asks for what a sandbox here lacks: {words}"):
            load_task(str(folder))
    for text in (settings + "gpus = '1'", settings.replace("30.0", "'long'")):
        (folder / "task.toml").write_text(text)
        with user_error(r"in task\.toml must be a number"):
            load_task(str(folder))
    (folder / "task.toml").write_text(settings + "memory_mb")
    with user_error("cannot be read as a Harbor task"):
        load_task(str(folder))
    (folder / "task.toml").write_text(settings)
    (folder / "tests/test.sh").unlink()
    with user_error(r"cannot be read as a Harbor task: .*tests/test\.sh"):
        load_task(str(folder))


def test_several_containers_are_refused_with_exit_code_2(folder):
    (folder / "environment/docker-compose.yaml").write_text("services: {}")
    done = python("env.py", "--task", folder)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "lacks: environment/docker-compose.yaml." in done.stderr


@needs_docker
def test_needs_of_a_folder(folder):
    text = (folder / "task.toml").read_text().replace('network_mode = "no-network"', "gpus = 1")
    (folder / "task.toml").write_text(text)
    task = load_task(str(folder))
    assert task.needs_gpu
    assert task.needs_network  # a public network is the format's default
    with user_error("allow it with --network"):
        check_needs(task, SandboxOptions("docker"))
    with user_error("has a Docker image of its own: use --backend docker"):
        check_needs(task, SandboxOptions("namespaces"))


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
