"""Several Docker daemons in $DOCKER_HOST: which one runs the sandboxes of an episode.

All sandboxes of an episode are on one host, so no file travels between hosts. A host that does not
answer, or cannot start a sandbox, is left out for RETRY_SECONDS. The address of a single daemon is
"".
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from dataclasses import dataclass, field
from weakref import WeakSet

from flatlab.errors import SandboxFault
from flatlab.sandbox.docker import (
    docker_api,
    docker_note,
    docker_problem,
    engine_faults,
    engine_info,
    engine_options,
    owner,
)

ANSWER_SECONDS = 5
RETRY_SECONDS = 60
choosing = threading.Lock()


@dataclass
class Host:
    address: str
    cores: int = 1
    sandboxes: int = 0  # of other processes
    episodes: WeakSet = field(default_factory=WeakSet)  # environments of this process
    retry_at: float = 0.0  # on the monotonic clock; 0: it answers


@functools.cache
def host_of(address: str) -> Host:
    return Host(address)


def addresses() -> list[str]:
    """The daemons that $DOCKER_HOST names, separated by commas; [""] without a comma."""
    text = os.environ.get("DOCKER_HOST", "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    return names if names and "," in text else [""]


def room(host: Host) -> float:
    """The free slots of a host, which has one per core; if none is free, the excess per core,
    negative.
    """
    free = host.cores - host.sandboxes - len(host.episodes)
    return free if free > 0 else free / host.cores


def join(episode, address: str = "") -> str:
    """Counts an environment on its host, and returns the address of that.

    address: of the host; "": the one with the most free slots is chosen.
    """
    hosts = [host_of(address)] if address else ask_all()
    with choosing:
        best = max(hosts, key=room)
        best.episodes.add(episode)
    return best.address


def leave(episode, address: str) -> None:
    host_of(address).episodes.discard(episode)


def leave_out(address: str) -> None:
    """No new episode goes to this host for a while, unless no host answers."""
    host_of(address).retry_at = time.monotonic() + RETRY_SECONDS


def is_lost(address: str) -> bool:
    """Whether this host does not answer while another one does, so that the same episode may be
    played there.
    """
    return bool(address) and host_of(address) not in ask_all()


def ask_all() -> list[Host]:
    """Asks each of several hosts for its load. Returns those that answer; all if none does."""
    hosts = list(map(host_of, addresses()))
    if hosts[0].address:
        for host in hosts:
            ask(host)
    return [host for host in hosts if not host.retry_at] or hosts


def ask(host: Host) -> None:
    if time.monotonic() < host.retry_at:
        return
    try:
        with engine_faults():
            if host.retry_at:
                leave_out(host.address)  # for other threads, while this one tries it again
                engine_options(host.address)  # a tunnel of ssh has ended
            before = host.retry_at
            api = docker_api(host.address)
            host.cores = engine_info(api)["NCPU"]
            filters = json.dumps({"label": ["flatlab.owner"]})
            reply = api.get(
                f"{api.base_url}/containers/json",
                params={"filters": filters},
                timeout=ANSWER_SECONDS,
            )
            reply.raise_for_status()
            owners = [box["Labels"]["flatlab.owner"] for box in reply.json()]
            host.sandboxes = len(owners) - owners.count(owner())
            if host.retry_at == before:  # else a sandbox could not be started meanwhile
                host.retry_at = 0.0
    except SandboxFault:
        leave_out(host.address)


def hosts_problem(image: str) -> str:
    """Why Docker cannot be used with this image; empty if one of the hosts answers, and each one
    that answers has it.
    """
    problems = [docker_problem(image, host.address) for host in ask_all()]
    return " ".join(filter(None, problems))


def hosts_note(image: str) -> str:
    """What the line about the choice says of the engine, or of each host."""
    if addresses() == [""]:
        return docker_note("")
    return f", on {' and '.join(describe(address, image) for address in addresses())}"


def describe(address: str, image: str) -> str:
    host = host_of(address)
    if host.retry_at:
        return f"{address} (does not answer)"
    api = docker_api(address)
    engine = api.version()["Components"][0]
    version = f"{engine['Name']} {engine['Version']}"
    digits = api.inspect_image(image)["Id"].removeprefix("sha256:")[:12]
    return f"{address} ({host.cores} cores, {version}, image {digits}{docker_note(address)})"
