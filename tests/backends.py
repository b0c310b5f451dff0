"""The sandbox backends of this machine as test parameters. Importing this file tries each once."""

import pytest

from flatlab.errors import SandboxFault
from flatlab.sandbox import docker
from flatlab.sandbox.sandbox import Sandbox


def missing(backend):
    """Why a backend cannot be tested on this machine; empty if it can."""
    if backend == "docker":
        return docker.docker_problem(docker.IMAGE)
    try:
        Sandbox(backend).close()
    except SandboxFault as fault:
        return str(fault)
    return ""


MISSING = {backend: missing(backend) for backend in ("docker", "namespaces", "landlock")}
EVERYWHERE = [
    pytest.param(
        backend, marks=pytest.mark.skipif(bool(why), reason=f"{backend}: {why}"), id=backend
    )
    for backend, why in MISSING.items()
]
ISOLATED = EVERYWHERE[:2]  # Landlock does not promise everything that is tested in these
needs_docker = pytest.mark.skipif(bool(MISSING["docker"]), reason=MISSING["docker"])


def containers_of(pid):
    """The containers of one owner process."""
    if MISSING["docker"]:
        return []
    boxes = docker.docker_api().containers(all=True, filters={"label": "flatlab.owner"})
    return [box for box in boxes if f":{pid}:" in box["Labels"]["flatlab.owner"]]
