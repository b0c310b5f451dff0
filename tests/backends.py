"""The sandbox backends of this machine as test parameters. Importing this file tries some of them.

ISOLATED and EVERYWHERE hold one backend, the first that works here. With --all-backends they hold
all; a test with a backend that does not work here is then skipped with the reason.
"""

import os
import time
from functools import cache

import pytest

from flatlab.errors import SandboxFault
from flatlab.sandbox import docker
from flatlab.sandbox.backend import IMAGE
from flatlab.sandbox.client import Sandbox


@cache
def missing(backend):
    """Why a backend cannot be tested here; empty if it can."""
    if backend == "docker":
        return docker.docker_problem(IMAGE)
    try:
        Sandbox(backend).close()
    except SandboxFault as fault:
        return str(fault)
    return ""


def backends(*kinds):
    """Test parameters: the first of these backends that works here, or all with --all-backends."""
    if not os.environ.get("FLATLAB_ALL_BACKENDS"):  # set by conftest.py
        working = (kind for kind in kinds if not missing(kind))
        kinds = [next(working, kinds[0])]
    parameters = []
    for kind in kinds:
        reason = missing(kind)
        skip = pytest.mark.skipif(bool(reason), reason=f"{kind}: {reason}")
        parameters.append(pytest.param(kind, marks=skip, id=kind))
    return parameters


# The quickest first.
EVERYWHERE = backends("namespaces", "docker", "landlock")
ISOLATED = backends("namespaces", "docker")  # Landlock does not promise all that is tested in these
needs_docker = pytest.mark.skipif(bool(missing("docker")), reason=missing("docker"))


def containers_of(pid):
    """The containers of one owner process."""
    if missing("docker"):
        return []
    boxes = docker.docker_api().containers(all=True, filters={"label": "flatlab.owner"})
    return [box for box in boxes if box["Labels"]["flatlab.owner"].endswith(f":{pid}")]


def wait_for(condition, seconds=10):
    """Waits until condition() holds. Returns its last value."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
