"""What a task needs of its sandboxes: network, caches, large files and packages in an image."""

import json
import os
import shutil
import socket
import sysconfig
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from backends import ISOLATED, backends, needs_docker
from env import Env, check_needs
from flatlab.errors import SandboxFault
from flatlab.options import SandboxOptions
from flatlab.sandbox import docker, images
from flatlab.sandbox.backend import IMAGE
from flatlab.sandbox.docker import docker_api
from helpers import do, python, user_error
from tasks import load_task

# ---- needs


def test_needs_are_honoured_or_refused(tmp_path, monkeypatch):
    task = load_task("titanic")
    check_needs(task, SandboxOptions("local"))
    online = replace(task, needs_network=True)
    with user_error(
        "takes data from the network.*--network, or in Docker mount what it needs",
    ):
        check_needs(online, SandboxOptions("docker"))
    with user_error("allow it with --network"):
        check_needs(online, SandboxOptions("local", hf_cache=str(tmp_path)))
    check_needs(online, SandboxOptions("local", network=True))
    check_needs(online, SandboxOptions("docker", hf_cache=str(tmp_path)))
    with user_error("no folder .*absent"):
        check_needs(online, SandboxOptions("docker", hf_cache=str(tmp_path / "absent")))
    with user_error("only Docker gives one"):
        check_needs(replace(task, needs_gpu=True), SandboxOptions("local"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with user_error("no /dev/nvidiactl"):
        check_needs(replace(task, needs_gpu=True), SandboxOptions("docker"))


CONNECT = (
    "python3 -c \"import socket; s = socket.socket(2, 2); s.connect(('192.0.2.1', 9)); "
    'print(s.getsockname()[0])"'
)


@pytest.mark.parametrize("backend", ISOLATED)
def test_network_is_there_for_tasks_that_need_it_and_only_with_the_flag(backend):
    task = load_task("titanic")
    online = replace(task, needs_network=True)
    for what, allowed in ((online, True), (task, True), (task, False)):
        with Env(what, SandboxOptions(backend, network=allowed)) as world:
            assert ("without network" in world.reset()) == (not what.needs_network)
            if what.needs_network:
                links = do(world, "cat /proc/net/dev").observation.count(":")
                assert links > 3 or do(world, CONNECT).status == "ok"
            else:
                assert do(world, CONNECT).status == "error"


@needs_docker
def test_hf_cache_is_mounted_read_only_and_found(tmp_path):
    (tmp_path / "hub/models--x").mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / "hub/models--x/config.json").write_text("{}")
    task = replace(load_task("titanic"), needs_network=True)
    with Env(task, SandboxOptions("docker", hf_cache=str(tmp_path))) as world:
        assert "without network" in world.reset()
        assert (
            do(
                world, "cat $HF_HOME/hub/models--x/config.json; echo; echo $HF_HUB_OFFLINE"
            ).observation
            == "{}\n1"
        )
        writes = (
            "touch $HF_HOME/hub/new $HF_HOME/hub/models--x/lock && "
            "echo x > $HF_HOME/hub/models--x/config.json"
        )
        assert do(world, writes).status == "error"
        assert do(world, "ls $HF_HOME/hub").observation.split() == ["models--x", "new"]
    assert (tmp_path / "hub/models--x/config.json").read_text() == "{}"
    assert not (tmp_path / "hub/new").exists()


# ---- images for a task


def leftovers():
    """Images of this process that have lost their name."""
    label = f"flatlab.owner={socket.gethostname()}:{os.getpid()}"
    return docker_api().images(filters={"dangling": True, "label": label})


def remove_leftovers():
    """As a later process does at its first use of Docker, when their containers have ended."""
    deadline = time.monotonic() + 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docker, "LEFTOVER", "0s")
        while leftovers() and time.monotonic() < deadline:
            docker_api.cache_clear()


@pytest.fixture
def big_task(tmp_path):
    (tmp_path / "big.bin").write_bytes(b"7" * (9 << 20))
    yield replace(
        load_task("titanic"),
        name="flatlab test",
        public={"data/big.bin": tmp_path / "big.bin"},
    )
    api = docker_api()
    for image in api.images("flatlab/flatlab-test"):
        for tag in image["RepoTags"]:
            api.remove_image(tag, force=True)
    remove_leftovers()


@needs_docker
def test_large_files_are_baked_into_one_image_once(big_task, monkeypatch):
    assert images.prepared_image(load_task("titanic"), IMAGE) == IMAGE
    with Env(big_task, "docker") as world:
        assert "data/big.bin (9437184 bytes)" in world.reset()
        assert world.sandbox.image.startswith("flatlab/flatlab-test:")
        assert do(world, "echo x >> data/big.bin; ls -l data").status == "ok"
        first = world.sandbox.image
    for name in ("build_image", "content_key"):
        monkeypatch.setattr(images, name, lambda *_: pytest.fail("looked for again"))
    with Env(big_task, "docker") as world:
        world.reset()
        assert world.sandbox.image == first
        assert do(world, "stat -c %s data/big.bin").observation == str(9 << 20)
    monkeypatch.undo()
    images.found_images.clear()  # as a later process
    monkeypatch.setattr(images, "build_image", lambda *_: pytest.fail("built again"))
    assert images.prepared_image(big_task, IMAGE) == first
    monkeypatch.undo()
    docker_api().remove_image(first, force=True)  # by somebody else
    with Env(big_task, "docker") as world:
        with pytest.raises(SandboxFault):
            world.reset()
        assert "data/big.bin" in world.reset()
    path = big_task.public["data/big.bin"]
    path.write_bytes(b"8" * (9 << 20))  # another content: another image
    images.found_images.clear()
    with Env(big_task, "docker") as world:
        world.reset()
        assert world.sandbox.image != first
        assert do(world, "head -c 3 data/big.bin").observation == "888"


@needs_docker
def test_missing_requirements_of_an_image_are_named(big_task, tmp_path):
    needed = tmp_path / "requirements.txt"
    needed.write_text("# ours\nnumpy>=1\nflatlab-test==1.0  # not there\n-e git+x\n")
    task = replace(big_task, public={}, requirements=needed)
    with user_error("lacks: flatlab-test. `python tasks.py .*--build"):
        Env(task, "docker").reset()
    needed.write_text("# nothing\n")
    task = replace(task, public={"data/small": needed})
    with Env(task, "docker") as world:
        assert "data/small (10 bytes)" in world.reset()
        assert world.sandbox.image.startswith("flatlab/flatlab-test:")


@needs_docker
@pytest.mark.fault(20, "an image that lost its name while a container used it")
def test_images_without_a_name_are_removed_at_the_next_start(big_task):
    with Env(big_task, "docker") as world:
        world.reset()
        docker_api().remove_image(world.sandbox.image, force=True)
        assert leftovers()
    remove_leftovers()
    assert not leftovers()


@pytest.mark.parametrize("backend", backends("namespaces", "landlock"))
def test_missing_requirements_of_a_local_sandbox_are_named(tmp_path, backend):
    (tmp_path / "requirements.txt").write_text("flatlab-nowhere\n")
    with user_error("needs packages .* lacks: flatlab-nowhere"):
        Env(
            replace(load_task("titanic"), requirements=tmp_path / "requirements.txt"),
            backend,
        ).reset()


# ---- python tasks.py NAME --build-image


WITH_WHEEL = "flatlab/with-wheel:1"


def write_wheel(path, name):
    """A wheel of version 1.0 with an empty module."""
    about = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": f"{name}.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n",
    }
    with zipfile.ZipFile(path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


SPEC = {
    "description": "Import a package.",
    "task_entrypoint": "CSVSubmissionTasks",
    "metric": "score",
    "higher_is_better": True,
    "baseline_scores": [{"score": 0}],
    "starter_code": ["evaluate.py"],
    "use_generic_conda": False,
    "requirements_path": "requirements.txt",
}


@pytest.fixture(scope="module")
def image_with_wheel(tmp_path_factory):
    """An image with pip and a wheel, so that no network is needed."""
    folder = tmp_path_factory.mktemp("image")
    hidden = shutil.ignore_patterns("__pycache__")
    # not `import pip`: setuptools, which vLLM imports, could not be imported after it
    shutil.copytree(Path(sysconfig.get_path("purelib"), "pip"), folder / "pip", ignore=hidden)
    write_wheel(folder, "flatlab_one")
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY . /srv\nENV PYTHONPATH=/srv\n")
    list(docker_api().build(str(folder), WITH_WHEEL, forcerm=True, decode=True))
    yield WITH_WHEEL
    docker_api().remove_image(WITH_WHEEL, force=True)


@pytest.fixture
def checkout(tmp_path, image_with_wheel):
    """An MLGym checkout with one task."""
    (tmp_path / "configs/tasks").mkdir(parents=True)
    (tmp_path / "configs/tasks/needy.yaml").write_text(json.dumps(SPEC))
    (tmp_path / "evaluate.py").write_text("")
    (tmp_path / "requirements.txt").write_text("--no-index\n--find-links /srv\nflatlab_one>=1\n")
    tag = images.package_tag(load_task("needy", tmp_path), image_with_wheel)
    yield tmp_path
    api = docker_api()
    for image in api.images("flatlab/needy") + api.images(tag):
        api.remove_image(image["RepoTags"][0], force=True)


def build(root, image=WITH_WHEEL):
    """`python tasks.py needy --build-image` as it ended."""
    return python("tasks.py", "needy", "--mlgym-root", root, "--image", image, "--build-image")


@pytest.mark.slow
@needs_docker
def test_one_command_builds_the_image_with_the_requirements_of_a_task(checkout):
    task = load_task("needy", checkout)
    options = SandboxOptions("docker", image=WITH_WHEEL)
    with user_error("flatlab_one. `python tasks.py needy --build-image`"):
        Env(task, options).reset()
    done = build(checkout)
    assert done.returncode == 0, done.stderr
    assert "Successfully installed flatlab_one-1.0" in done.stdout
    assert "image flatlab-requirements:" in done.stdout.splitlines()[-1]
    with Env(task, options) as world:
        world.reset()
        assert do(world, "python3 -c 'import flatlab_one'").status == "ok"
    images.found_images.clear()  # as a later process
    with task.requirements.open("a") as file:
        file.write("flatlab_two\n")
    with user_error("flatlab_one, flatlab_two"):
        Env(task, options).reset()


@needs_docker
def test_an_image_that_pip_cannot_make_is_one_sentence(checkout):
    (checkout / "requirements.txt").write_text("--no-index\nflatlab_two\n")
    done = build(checkout)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot be installed in flatlab/with-wheel:1: ERROR: No matching" in done.stderr
    assert not docker_api().images(images.package_tag(load_task("needy", checkout), WITH_WHEEL))
    done = build(checkout, image="absent:1")
    assert done.returncode == 2
    assert done.stderr.startswith("Docker runs but has no image absent:1")
    done = python("tasks.py", "titanic", "--build-image")
    assert done.returncode == 2
    assert done.stderr == "Task titanic has no requirements: it needs no image of its own.\n"
