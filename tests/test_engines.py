"""Container engines other than the local Docker daemon, each a real one that is started here:
podman as root and as an ordinary user, and a second Docker daemon over TCP, over TLS and over ssh.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines import Engines, forget_engine, lacking, start_dockerd
from env import Env
from flatlab.errors import SandboxFault
from flatlab.sandbox import client, docker, hosts, images, ssh
from flatlab.sandbox.backend import IMAGE, WORKSPACE
from flatlab.sandbox.client import Sandbox, pick_backend
from flatlab.sandbox.docker import docker_api, missing_limits
from helpers import PROJECT, SBIN, do, free_port, user_error
from tasks import load_task

pytestmark = pytest.mark.slow
# Limits of resources that every user may set, and a runtime that works with all cgroups.
PODMAN_CONF = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
SSHD_CONF = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
"""
SSH_CONF = """
Host flatlab-remote
HostName 127.0.0.1
IdentityFile {folder}/key
UserKnownHostsFile {folder}/known
StrictHostKeyChecking accept-new
"""
SOLVE = """python3 - <<'END'
rows = [line.split(",") for line in open("data/test.csv").read().split()[1:]]
with open("submission.csv", "w") as file:
    print("id,survived", file=file)
    for row in rows:
        print(row[0], int(row[2] == "female"), sep=",", file=file)
END"""


def ordinary_user():
    """The name of a user whom podman can map other users for: this one, or as root, any."""
    lines = Path("/etc/subuid").read_text().splitlines() if os.path.exists("/etc/subuid") else []
    mine = getpass.getuser()
    for name in (line.partition(":")[0] for line in lines):
        if name != "root" and mine in ("root", name):
            return name
    pytest.skip("no ordinary user has a line in /etc/subuid")


def start_podman(services, rootfs, user):
    """The address of podman's Docker-compatible socket, with the image in a new storage."""
    folder = services.folder
    (folder / "conf").write_text(PODMAN_CONF)
    (folder / "run").mkdir(mode=0o700)
    shutil.copy(rootfs, folder / "small.tar")
    environment = {"CONTAINERS_CONF": f"{folder}/conf", "XDG_RUNTIME_DIR": f"{folder}/run"}
    environment |= {"HOME": str(folder), "PATH": SBIN}
    become = []
    if user:
        if os.geteuid() == 0:
            shutil.chown(folder, user)
            shutil.chown(folder / "run", user)
            become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        command = [*become, "podman", "--storage-driver=overlay"]
    else:
        command = ["podman", f"--root={folder}/store", f"--runroot={folder}/run"]
    imported = subprocess.run(
        [*command, "import", f"{folder}/small.tar", f"docker.io/{IMAGE}"],
        env=os.environ | environment,
        cwd="/",
        capture_output=True,
        text=True,
    )
    if imported.returncode:
        pytest.skip(f"podman: {imported.stderr.strip().splitlines()[-1]}")
    address = f"unix://{folder}/socket"
    services.start(*command, "system", "service", "--time=0", address, **environment)
    services.wait_for((folder / "socket").exists)
    return address


def start_sshd(services):
    """Starts an ssh server that this user may enter, and a `ssh` that knows it."""
    folder = services.folder
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True
    )
    port = free_port()
    (folder / "sshd.conf").write_text(SSHD_CONF.format(port=port, folder=folder))
    (folder / "ssh.conf").write_text(SSH_CONF.format(folder=folder))
    (folder / "bin").mkdir()
    ssh = folder / "bin/ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh.conf "$@"\n')
    ssh.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    services.start("sshd", "-D", "-e", "-f", folder / "sshd.conf")

    def answers():
        with socket.socket() as client:
            return not client.connect_ex(("127.0.0.1", port))

    services.wait_for(answers)
    return port


def start_tls(folder):
    """Certificates for 127.0.0.1. Returns the options of the daemon."""
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    new += ["-subj", "/CN=flatlab", "-addext", "subjectAltName=IP:127.0.0.1"]
    new += ["-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run(new, check=True, capture_output=True)
    shutil.copy(folder / "cert.pem", folder / "ca.pem")
    files = {"cacert": "ca", "cert": "cert", "key": "key"}
    return [
        "--tlsverify",
        *(f"--tls{option}={folder}/{name}.pem" for option, name in files.items()),
    ]


NEEDS = {
    "podman": ("podman", "runc"),
    "rootless podman": ("podman", "runc", "newuidmap", "setpriv"),
    "tcp": ("dockerd", "ip"),
    "tls": ("dockerd", "ip", "openssl"),
    "ssh": ("dockerd", "ip", "sshd", "ssh", "ssh-keygen"),
}


@pytest.fixture(scope="module", params=NEEDS)
def engine(request, rootfs):
    """The name of an engine that answers at DOCKER_HOST."""
    name = request.param
    reason = lacking(*NEEDS[name])
    if not reason and os.geteuid() and name != "rootless podman":
        reason = "only root can start it"
    if reason:
        pytest.skip(f"{name}: {reason}")
    services = Engines()
    patch = pytest.MonkeyPatch()
    try:
        if name == "podman":
            address = start_podman(services, rootfs, "")
        elif name == "rootless podman":
            address = start_podman(services, rootfs, ordinary_user())
        elif name == "ssh":
            path = start_dockerd(services, rootfs)
            address = f"ssh://{getpass.getuser()}@flatlab-remote:{start_sshd(services)}{path}"
            patch.setenv("PATH", f"{services.folder}/bin:{os.environ['PATH']}")
        else:
            address = f"tcp://127.0.0.1:{free_port()}"
            options = start_tls(services.folder) if name == "tls" else ["--tls=false"]
            start_dockerd(services, rootfs, f"--host={address}", *options)
            if name == "tls":
                patch.delenv("REQUESTS_CA_BUNDLE", raising=False)  # would replace ca.pem
                patch.delenv("CURL_CA_BUNDLE", raising=False)
                patch.setenv("DOCKER_TLS_VERIFY", "1")
                patch.setenv("DOCKER_CERT_PATH", str(services.folder))
        patch.setenv("DOCKER_HOST", address)
        forget_engine()
        services.wait_for(lambda: not docker.docker_problem(IMAGE))
        yield name
        # A container removes itself a moment after its program has ended.
        services.wait_for(lambda: not containers_left(), seconds=20)
    finally:
        patch.undo()
        forget_engine()
        services.stop()


def containers_left():
    return docker_api("").containers(all=True, filters={"label": "flatlab.owner"})


# ------------------------------------------------------------------------------------- behaviour


def test_episode_has_the_same_scores_everywhere(engine):
    kind, line = pick_backend()
    assert kind == "docker"
    assert f"image {IMAGE}" in line
    assert ("without limits on" in line) == bool(missing_limits(docker_api("")))
    with Env(load_task("titanic"), "docker") as world:
        assert "without network" in world.reset()
        do(world, "mkdir -p d; cd d; export KEPT=yes")
        with world.fork() as twin:
            assert do(twin, "echo $PWD $KEPT").observation.strip().endswith("workspace/d yes")
            do(twin, f"cd ..; {SOLVE}")
            step = do(twin, "validate")
            assert step.status == "validate", step.observation
            assert step.score.value == 0.778182
        assert do(world, "ls ../submission.csv").status == "error"
        assert not world.score().valid


def test_isolation_and_limits(engine):
    missing = missing_limits(docker_api(""))
    box = Sandbox("docker", memory=256 << 20, processes=24, disk=16 << 20)
    status = box.run("id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/self/status", 10).output.split()
    assert status[0] != "0"
    assert status[2] == "0" * 16
    assert status[4] == "1"
    for command in ("touch /usr/x", "cat /etc/shadow", "unshare -Ur true", "mount -t tmpfs x /mnt"):
        assert box.run(command, 10).exit_code, command
    connect = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
    assert box.run(f'python3 -c "{connect}"', 10).exit_code
    memory = box.run("python3 -c 'print(len(bytes(1) * (600 << 20)))'", 20)
    assert memory.exit_code
    assert "629145600" not in memory.output
    assert box.run("head -c 100M /dev/zero > big", 20).exit_code
    many = 24 if "pids" not in missing else 24 * docker.SHARED_PROCESSES
    bomb = box.run(f"for i in $(seq {many + 8}); do sleep 60 & done; wait", 3)
    assert "Resource temporarily unavailable" in bomb.output
    assert box.run("echo alive", 10).output == "alive\n"
    with pytest.raises(SandboxFault):
        docker_api("").remove_container(box.container, force=True)
        box.run("sleep 20", 20)
    box.close()


OWNER = """
import time
from flatlab.sandbox.client import Sandbox
box = Sandbox("docker")
print(box.container, flush=True)
box.run("setsid sleep 600 & sleep 600", 600)
"""


def test_a_foreign_image_is_prepared(engine, tmp_path):
    name, _ = images.foreign_image(tmp_path, "engine test", base=IMAGE, workdir="/srv/work")
    box = Sandbox("docker", image=name)
    try:
        assert box.run("readlink /srv/work", 10).output.strip() == WORKSPACE
    finally:
        box.close()
        while containers_left():  # podman does not remove the image of one that is ending
            time.sleep(0.1)
        docker_api("").remove_image(name, force=True)


def test_no_container_outlives_its_owner(engine):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    container = owner.stdout.readline().strip()
    assert container in {box["Id"] for box in docker_api("").containers()}
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 60  # rootless podman on a busy machine
    while container in {box["Id"] for box in docker_api("").containers(all=True)}:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_tunnel_that_has_ended_is_opened_again(engine):
    if engine != "ssh":
        pytest.skip("only ssh has a tunnel")
    [(url, client)] = ssh.clients.items()
    client.kill()
    client.wait()
    assert docker.docker_problem(IMAGE).startswith("No Docker daemon answers")
    host = hosts.host_of(url)
    host.retry_at = 0.1  # the time to try it again has come
    hosts.ask(host)
    assert not host.retry_at
    assert not docker.docker_problem(IMAGE)


def test_a_host_without_ssh_or_daemon_is_one_sentence(monkeypatch):
    if lacking("ssh"):
        pytest.skip(lacking("ssh"))
    monkeypatch.setenv("DOCKER_HOST", "ssh://nobody@127.0.0.1:1")
    forget_engine()
    try:
        with user_error(r"^No Docker daemon answers at ssh://\S+ \(ssh: .+\)\.$"):
            client.pick_backend("docker")
    finally:
        forget_engine()
