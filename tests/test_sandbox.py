"""Real sandboxes, attacked and mistreated, in one backend; in all of them with --all-backends. Then
what a task needs of them: network, caches, large files and packages in an image.
"""

import os
import pwd
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
import time
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import tasks
from backends import (
    EVERYWHERE,
    ISOLATED,
    backends,
    containers_of,
    missing,
    needs_docker,
    wait_for,
)
from env import Env
from flatlab.errors import ArtefactError, SandboxFault
from flatlab.options import SandboxOptions
from flatlab.sandbox import backend as sandbox_backend
from flatlab.sandbox import client, docker, local, snapshot
from flatlab.sandbox.backend import IMAGE, MODULES, Spec
from flatlab.sandbox.client import Sandbox
from flatlab.sandbox.docker import docker_api
from flatlab.task import machine
from flatlab.task.machine import resolve_backend
from flatlab.tree.nodes import code_in
from helpers import PROJECT, do, slow, user_error, within
from tasks import load_task


@pytest.fixture(scope="module", params=EVERYWHERE)
def box(request):
    """One sandbox for all tests that leave it usable."""
    box = Sandbox(request.param)
    yield box
    box.close()


@pytest.fixture(params=ISOLATED)
def isolated(request):
    return request.param


def out(box, command, timeout=10):
    return box.run(command, timeout).output.strip()


def running(box, marker):
    """Number of processes in the sandbox with the marker in their command line."""
    pattern = f"[{marker[0]}]{marker[1:]}"  # which the command below does not match
    lines = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
    return int(out(box, f"{lines} | grep -c '{pattern}'; true"))


# ---- commands


def test_exit_code_and_output_cwd_and_exported_variables(box):
    result = box.run("echo to stdout; echo to stderr >&2; exit 7", 10)
    assert (result.exit_code, result.output) == (7, "to stdout\nto stderr\n")
    box.run(
        "mkdir -p 'a b'; cd 'a b'; export LINES='one\ntwo \"quoted\" $HOME'; NOT_EXPORTED=1", 10
    )
    assert out(box, 'echo "$PWD|$LINES|$NOT_EXPORTED"').endswith('a b|one\ntwo "quoted" $HOME|')
    box.run("unset LINES; cd ..", 10)
    assert out(box, 'echo "[$LINES]"; pwd') == f"[]\n{box.workspace}"
    box.run("mkdir gone; cd gone; rm -r ../gone", 10)
    assert out(box, "pwd") == box.workspace


@pytest.mark.fault(10, "exit, exec, kill $$, broken syntax, odd shell options")
@pytest.mark.fault(10, "exec over the shell, closed output, a million open files")
def test_no_command_breaks_the_next_one(box):
    cases = [
        "exit 3",
        "exec true",
        "exec 1>&- 2>&-",
        "ulimit -v 1000; ls",
        'for i in $(seq 3 250); do eval "exec $i>/dev/null"; done',
        "kill -9 $$",
        "set -euo pipefail; false",
        "trap - EXIT",
        "trap 'exit 9' EXIT",
        "if",
        "'",
        "return 5",
        "unset PWD HOME PATH",
        "echo garbage >&99; printf 'a\\0declare -x (' >&99",
        "set -o noexec",
        "readonly PWD",
        "export BASH_ENV=/nowhere ENV=/nowhere",
        "ulimit -n 3",
        "umask 777",
    ]
    for command in cases:
        box.run(f"cd {box.workspace}; export KEPT=yes PATH='{out(box, 'echo $PATH')}'", 10)
        box.run(command, 10)
        assert box.run("echo fine", 10).output.endswith("fine\n")
        box.call("state", cwd=box.workspace)


def test_variables_that_no_shell_can_keep(box):
    read_only = "SHELLOPTS BASHOPTS BASH_VERSINFO UID EUID PPID"
    assert out(box, f"cd {box.workspace}; export {read_only} KEPT=1") == ""
    large = out(box, "export KEPT=2 BIG=$(head -c 300000 /dev/zero | tr '\\0' x); printf x; cd /")
    assert large.startswith("x\n[the exported variables of this command are not kept")
    assert out(box, "echo $KEPT; pwd") == "1\n/"
    box.call("state", cwd=box.workspace)


# Prints the processes with the parent of this shell, other than itself.
SIBLINGS = "ps -eo ppid=,pid= | awk -v up=$PPID -v me=$BASHPID '$1 == up && $2 != me {print $2}'"


def test_nothing_of_one_command_runs_or_counts_in_the_next(box):
    box.run(f"cd {box.workspace}; mkdir -p q; cd q", 10)
    box.run("(sleep 0.2; rmdir ../q; mkdir ../q) > /dev/null 2>&1 &", 10)
    time.sleep(0.6)
    assert out(box, "touch here; ls ../q") == "here"  # the new folder of that name
    box.run("SECONDS=100; export flatlab='echo not this'", 10)
    assert int(out(box, "echo $SECONDS")) < 100  # 0, or 1 if a second begins meanwhile
    box.call("sweep")
    siblings = out(box, SIBLINGS).split()
    assert not [pid for pid in siblings if out(box, f"cat /proc/{pid}/comm") == "bash"]
    box.run("cd ..; rm -r q", 10)


USE_UP = """
import subprocess
while True:
    subprocess.Popen(["sleep", "30"], stdout=-3, stderr=-3)
"""


@pytest.mark.fault(9, "jobs that use up all processes")
def test_no_process_is_left_for_a_command(isolated):
    with closing(Sandbox(isolated, processes=24)) as box:
        for _ in range(3):
            box.run(f"echo a > f; python3 -c '{USE_UP}' 2> /dev/null; exit 0", 10)
            assert box.get("f") == b"a\n"
            assert out(box, "echo alive") == "alive"


@pytest.mark.fault(7, "progress bars, ANSI codes, invalid UTF-8, NUL")
@pytest.mark.fault(10, "a command of 1 MB")
def test_text_arrives_and_returns_unharmed(box):
    text = "tab\t 'single' \"double\" \\back $x `y` Ünïcödé 日本 😀\n  indented\n"
    box.run(f"cat > t.txt <<'END'\n{text}END", 10)
    assert box.get("t.txt").decode() == text
    assert box.run("cat t.txt", 10).output == text
    assert out(box, "printf 'a\\xffb\\0c\\033[31mred'") == "a\ufffdbcred"
    assert box.run("printf 'lone \ud800 surrogate'", 10).exit_code == 0
    assert out(box, f"x='{'y' * 1_000_000}'; echo ${{#x}}") == "1000000"


LONG = "a" * 80_000


@pytest.mark.fault(7, "escape sequences without an end, line ends of CR alone, backspaces")
@pytest.mark.parametrize(
    "printed, text",
    [
        ("a\033]0;t\nERROR: out of memory\n", "a]0;t\nERROR: out of memory\n"),
        (f"\033]8;;http://{LONG}THE END\n", f"]8;;http://{LONG}THE END\n"),
        (f"\033{' ' * 80_000}x", f"{' ' * 80_000}x"),
        ("\033P1\nb\033\\c \033Xd\r\n\033_e\033^f\033[", "P1\nbc Xd\n_e^f["),
        (
            "\033]8;;http://x\033\\link\033]8;;\a \033Pq\033\\\033_a\033\\\033^a\a\033Xa\aend",
            "link end",
        ),
        ("\033[1;31mred\033[0m \033(B\0337\033c\033[?25l\033]0;title\007end", "red end"),
        ("id,x\r1,2\r3,4\r", "[2 lines overwritten after \\r]\n3,4"),
        ("\r1/3\r2/3\r3/3\r\r\n\n\r\n", "3/3\n\n\n"),
        ("\b|\b/\b- N\bNA\bA _\bx", "- NA x"),
    ],
)
def test_readable_text_of_what_was_printed(printed, text):
    assert client.plain_text(printed.encode()) == text


@pytest.mark.fault(8, "waits for input, pager, editor, password")
def test_nothing_waits_for_input(box):
    reads = "read x; echo \"[$x]\"; cat; python3 -c 'input()' 2>&1 | tail -1"
    asks = "git log; less /etc/passwd; ssh nowhere; sudo ls; su; git init -q ."
    with within(10):
        assert out(box, reads).startswith("[]\nEOFError")
        box.run(f"{asks}; git commit --allow-empty", 20)


@pytest.mark.fault(6, "endless output")
def test_endless_output_needs_constant_memory(box):
    def peak():
        return int(out(box, "grep VmHWM /proc/$PPID/status").split()[1])

    before = peak()
    result = box.run("echo first; yes", 1.5)
    assert result.stopped
    assert result.output.startswith("first\ny\n")
    assert "bytes left out" in result.output
    assert len(result.output) < 4 * client.KEEP_BYTES
    assert box.run("seq 2000000", 20).output.endswith("1999999\n2000000\n")
    script = "seq 2000000; seq 2000000 >&2; sleep 9 & exit 3"
    reply, stdout = box.program(["sh", "-c", script], 20, keep=(0, 8))
    assert stdout.endswith(b" bytes left out ...]\n2000000\n")
    assert (reply["code"], reply["stopped"]) == (3, "")
    assert reply["stderr"].endswith("1999999\n2000000\n")
    assert peak() < before + 4096  # kB


# ---- time limits


@pytest.mark.fault(1, "endless loop")
@pytest.mark.fault(2, "background and nohup children")
@pytest.mark.fault(3, "daemon (setsid)")
@pytest.mark.fault(4, "ignores SIGTERM")
def test_time_limit_kills_everything(box):
    command = (
        "echo partial; sleep 98765.1 & nohup sleep 98765.2 >/dev/null 2>&1 & "
        "setsid sleep 98765.3 & (trap '' TERM; while :; do sleep 98765.4; done) & "
        "trap '' TERM; while :; do sleep 0.05; done"
    )
    with within(0.5 + 2 + 2):
        result = box.run(command, 0.5)
    assert result.stopped
    assert result.output.startswith("partial\n")
    assert running(box, "98765") == 0
    assert out(box, "echo alive") == "alive"


def test_sigterm_comes_first_and_is_no_timeout_by_itself(box):
    with within(2):
        result = box.run("trap 'echo saved; exit 0' TERM; sleep 30 & wait", 0.3)
    assert result.stopped
    assert "saved" in result.output
    assert not box.run("kill -TERM $$", 5).stopped


IN_VFORK = """
import ctypes
libc = ctypes.PyDLL(None)
if not libc.vfork():
    libc.sleep(1); libc._exit(0)
"""
THREAD = "import threading\nthreading.Thread(target=lambda: exec('while 1: pass')).start()"


@pytest.mark.parametrize(
    "command, limit",
    [
        ("sleep 30", "idle"),
        ("printf '\\xff (' > /proc/self/comm; sleep 30", "idle"),
        slow("python3 -c 'import threading; threading.Event().wait()'", "idle"),
        ("sleep 0.3; sleep 30 & sleep 0.1", ""),
        slow("while :; do sleep 0.01; done", "time"),
        (f'python3 -c "{THREAD}"', "time"),  # the main thread waits
        (f"python3 -c '{IN_VFORK}'", ""),  # in state D, as one that waits for a disk
    ],
)
def test_a_command_that_only_waits_is_stopped(box, command, limit):
    with within(9):
        assert box.run(command, 1.5, 0.5).stopped == limit
    box.call("sweep")


@pytest.mark.fault(5, "a child keeps the output open")
def test_background_job_lives_on_but_holds_nothing_up(box):
    with within(2):
        assert box.run("sleep 97531 & echo started", 10).output == "started\n"
    assert wait_for(lambda: running(box, "97531"))  # until then it is a copy of the shell
    box.run("(while :; do echo noise; done) & sleep 97531", 0.2)
    box.run("(while :; do echo noise; sleep 0.01; done) & true", 5)
    assert out(box, "echo quiet") == "quiet"
    box.call("sweep")
    assert running(box, "97531") == 0


# ---- limits


@pytest.mark.fault(11, "memory bomb")
def test_memory_bomb(isolated):
    with closing(Sandbox(isolated, memory=256 << 20)) as box:
        result = box.run("python3 -c 'x = bytearray(1 << 30); print(len(x))'", 20)
        assert result.exit_code
        assert str(1 << 30) not in result.output
        # Where memory is short the command is killed, not the runner.
        assert out(box, "cat /proc/self/oom_score_adj") == "1000"
        assert int(out(box, "cat /proc/$PPID/oom_score_adj")) < 1000


@pytest.mark.fault(12, "fork bomb")
@pytest.mark.parametrize(
    "bomb",
    [
        "for i in $(seq 300); do sleep 60 & done; wait",
        slow(":(){ :|:& };:; sleep 60"),
        slow("python3 -c 'import os\nwhile 1:\n try: os.fork()\n except OSError: pass'"),
    ],
)
def test_fork_bomb(isolated, bomb):
    with closing(Sandbox(isolated, processes=64)) as box:
        with within(8):
            assert box.run(bomb, 1).stopped
        assert out(box, "echo alive") == "alive"
        assert int(out(box, "ls -d /proc/[0-9]* | wc -l")) < 12


@pytest.mark.attack("filling the disk")
@pytest.mark.fault(13, "full disk")
def test_disk(isolated):
    with closing(Sandbox(isolated, disk=16 << 20)) as box:
        assert box.run("head -c 100M /dev/zero > big", 20).exit_code
        assert int(out(box, "stat -c %s big")) <= 16 << 20
        if isolated == "namespaces":  # in sum, too
            parts = "for i in 1 2 3; do head -c 10M /dev/zero > part$i; done"
            assert "No space left" in out(box, parts)
        assert out(box, "rm -f big part*; echo x > y; cat y") == "x"


LASTING = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(5, 1000, 0o1600), libc.semget(5, 1, 0o1600), libc.msgget(5, 0o1600))
"""


@pytest.mark.attack("shared memory that outlives its process, or that another sandbox reads")
def test_no_shared_memory_of_system_v(box):
    assert out(box, f"python3 -c '{LASTING}'") == "-1 -1 -1"


@pytest.mark.attack("shared memory beyond the memory limit")
def test_shared_memory_is_a_part_of_the_memory_limit(isolated):
    with closing(Sandbox(isolated, memory=256 << 20)) as box:
        assert box.run("head -c 80M /dev/zero > /dev/shm/x", 20).exit_code
        assert int(out(box, "stat -c %s /dev/shm/x")) <= 64 << 20


@pytest.mark.attack("a large file that makes the main process of the sandbox large")
def test_the_main_process_holds_no_large_file(isolated):
    with closing(Sandbox(isolated)) as box:
        assert box.run("head -c 60M /dev/urandom > f; truncate -s 900M g", 20).exit_code == 0
        assert len(box.get("f")) == 60 << 20
        with pytest.raises(ArtefactError, match="is larger than"):
            box.get("g")
        box.run("rm g", 5)
        assert len(snapshot.take(box)) > 60 << 20
        peak = out(box, "grep VmHWM /proc/$PPID/status")
        assert int(peak.split()[1]) < 60_000, peak


# ---- isolation


FORBIDDEN = """
touch /usr/x
touch /etc/x
touch /x
mount -t tmpfs x /mnt
unshare -Ur true
chroot / true
dmesg
mknod d c 1 5
cat /proc/1/environ
cat /etc/shadow
echo 1 > /proc/sys/kernel/panic
"""


@pytest.mark.attack("mounting, namespaces, devices, /etc/shadow")
def test_no_rights(box):
    status = out(box, "grep -E '^(Cap(Eff|Prm|Inh|Amb)|NoNewPrivs)' /proc/self/status")
    assert set(status.split()[1::2]) == {"0" * 16, "1"}
    # With Landlock, if no other user can reach the Python: the number of root, no capability.
    assert out(box, "id -u") != "0" or box.backend is local.LANDLOCK
    for command in FORBIDDEN.strip().splitlines():
        assert box.run(command, 10).exit_code, command


@pytest.mark.attack("network: this machine, its bridge, the internet")
def test_no_network(box):
    with socket.create_server(("0.0.0.0", 0)) as server:  # something of this machine that listens
        port = server.getsockname()[1]
        for target in (f"127.0.0.1/{port}", f"172.17.0.1/{port}", "1.1.1.1/53"):
            assert "bash: connect: " in out(box, f": > /dev/tcp/{target}"), target
    if box.backend is not local.LANDLOCK:
        assert "bash: connect: " in out(box, ": > /dev/udp/1.1.1.1/53")


@pytest.mark.fault(14, "the agent kills its sandbox")
@pytest.mark.attack("killing, stopping, tracing or reading the runner")
def test_runner_cannot_be_killed_or_read(isolated):
    with closing(Sandbox(isolated)) as box:
        for signal_name in ("9 1", "9", "TERM", "INT 1", "ALRM 1", "STOP"):
            box.run(f"kill -{signal_name} $PPID", 5)
            assert out(box, "echo alive") == "alive", signal_name
        box.run("kill -9 -1", 5)
        for path in "environ mem fd/0 fd/3 fd/4 maps cwd/ root/".split():
            assert box.run(f"cat /proc/$PPID/{path} || ls /proc/$PPID/{path}/", 5).exit_code, path
        attach = "import ctypes, sys; print(ctypes.CDLL(None).ptrace(16, int(sys.argv[1]), 0, 0))"
        assert out(box, f"python3 -c '{attach}' $PPID") == "-1"


FORGE = """
import json, os, struct
reply = dict(code=0, cwd="/", head=0, dropped=0, seconds=0, stopped="")
head = json.dumps(reply).encode()
frame = struct.pack(">I4sII", 4, b"FAKE", 0, len(head)) + head
paths = [f"/proc/{p}/fd/{n}" for p in (1, os.getppid()) for n in range(12)]
for target in [*range(256), *paths]:
    try:
        fd = os.open(target, os.O_WRONLY) if isinstance(target, str) else target
        os.write(fd, frame)
    except OSError:
        pass
os._exit(5)
"""


@pytest.mark.fault(9, "prints our own protocol")
@pytest.mark.fault(16, "prints that the container is not running")
@pytest.mark.attack("forging the runner's frames")
def test_printed_frames_are_only_text(box):
    result = box.run(f"exec python3 - <<'E'\n{FORGE}\nE", 10)
    assert result.exit_code == 5
    assert "FAKE" in result.output
    words = "Error response from daemon: Container 0123456789ab is not running"
    assert out(box, f"echo '{words}'; echo '{words}' >&2; exit 137") == f"{words}\n{words}"
    assert box.call("state")[0]["cwd"] == box.workspace
    assert box.run("echo next; exit 6", 10).exit_code == 6


@pytest.mark.attack("reading files of this machine")
@pytest.mark.parametrize("backend", backends("namespaces", "landlock"))
def test_local_sandbox_shows_nothing_of_the_machine(backend, tmp_path):
    (tmp_path / "secret").write_text("secret")
    folders = (tmp_path, PROJECT, PROJECT / "configs", Path("/var/log"))
    files = (Path.home() / ".bashrc", Path("/var/run/docker.sock"))
    with closing(Sandbox(backend)) as box:
        for path in folders + files:
            assert box.run(f"ls {path}/* || cat {path}", 5).exit_code, path
        assert out(box, "python -c 'import sys; print(sys.prefix)'") == sys.prefix
        assert box.run("pip --version || python -c 'import yaml'", 20).exit_code == 0


def test_an_environment_behind_two_links(tmp_path):
    for link, target in (("one", sys.prefix), ("two", "one")):
        (tmp_path / link).symlink_to(target)
    code = (
        "from flatlab.sandbox.client import Sandbox; box = Sandbox('local'); "
        "asked = 'import yaml, sys; print(sys.prefix)'; "
        "print(box.run(['python3', '-c', asked], 9).output); box.close()"
    )
    command = [tmp_path / "two/bin/python", "-c", code]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "two"), done.stderr


@pytest.mark.parametrize("backend", backends("landlock"))
def test_a_landlock_sandbox_leaves_nothing_behind(backend):
    with closing(Sandbox(backend)) as box:
        home = Path(box.workspace).parents[1]
        assert box.run(f"echo x > /dev/shm/{home.name}", 5).exit_code
        assert box.run("ls /dev/shm", 5).exit_code
        assert box.run("mkdir -p a/b/c; chmod 000 a/b a", 5).exit_code == 0
    assert not home.exists()


def test_a_sandbox_without_isolation_removes_nothing(tmp_path):
    """As where the kernel refuses namespaces: /home is then the one of this machine."""
    kept = tmp_path / "home/agent/kept"
    kept.mkdir(parents=True)
    workspace = str(kept.parent / "workspace")
    boot, text = sandbox_backend.boot_program("refused", Spec(), {}, {}, workspace=workspace)
    request = b'{"call": "state"}'
    text += struct.pack(">II", len(request), 0) + request
    done = subprocess.run([sys.executable, "-c", boot], input=text, capture_output=True)
    assert b"there is no isolation" in done.stdout
    assert kept.exists()


# ---- files


def test_put_and_get(box, monkeypatch):
    monkeypatch.setattr(client, "PUT_BYTES", 1 << 20)  # so there are several requests
    binary = bytes(range(256)) * 5000
    box.put({"deep/er/file.bin": binary, "empty": b"", "script": PROJECT / "env.py"})
    assert box.get("deep/er/file.bin") == binary
    assert box.get("script") == (PROJECT / "env.py").read_bytes()
    writes = "stat -c %U empty deep/er >/dev/null && touch deep/er/x && echo writable"
    assert out(box, f"echo more >> empty; cat empty; {writes}") == "more\nwritable"


REFUSED = {
    "absent": ("true", "is not there"),
    "no/where/absent": ("true", "is not there"),
    "link": ("ln -sf /etc/passwd link", "is a link"),
    "linked/passwd": ("ln -sfn /etc linked", "does not lie in a plain folder"),
    "fifo": ("mkfifo fifo", "is not a regular file"),
    "folder": ("mkdir -p folder", "is not a regular file"),
    "sparse": ("truncate -s 900M sparse", "is larger than"),
    "big": ("head -c 2M /dev/zero > big", "is larger than"),
    "../workspace/x": ("true", "is not a path in the workspace"),
    "/etc/passwd": ("true", "is not a path in the workspace"),
    "a\0b": ("true", "is not a path in the workspace"),
    "sock": (
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
        "No such device",
    ),
}


@pytest.mark.fault(24, "links, devices, sockets, sparse files instead of an artefact")
@pytest.mark.attack("an artefact of 10 GB")
@pytest.mark.attack("an artefact that is a link, a device, a FIFO, a socket or a folder")
def test_get_refuses_what_is_not_a_plain_small_file(box):
    for path, (make, why) in REFUSED.items():
        box.run(f"cd {box.workspace}; {make}", 10)
        with within(2), pytest.raises(ArtefactError, match=why):
            box.get(path, max_bytes=1 << 20)
    assert out(box, "echo alive") == "alive"


def test_put_never_writes_through_links(isolated):
    make = "mkdir /tmp/target; echo old > /tmp/target/f; ln -s /tmp/target/f f; ln -s /tmp/target d"
    with closing(Sandbox(isolated)) as box:
        box.run(make, 5)
        box.put({"f": b"new"})
        with pytest.raises(SandboxFault):
            box.put({"d/f": b"new"})
        assert out(box, "cat /tmp/target/f f") == "old\nnew"


@pytest.mark.slow
@pytest.mark.fault(25, "20,000 stale files with long names")
def test_any_number_of_files_is_removed(box):
    box.call("state", cwd=box.workspace)
    make = "mkdir -p many/x; ln -s many pointer; cd many; pad=$(printf %0195d)"
    box.run(f"{make}; for i in {{00001..20000}}; do : > $i$pad; done", 60)
    listing = box.call("listing", most=10**6)[0]["files"]
    names = [path for path, _ in listing if path.startswith("many/")]
    assert len(names) == 20_000  # more than one argv holds
    box.remove([*names, "pointer/", "absent", "odd\nname"])
    assert out(box, "ls -A") == "x"
    with pytest.raises(SandboxFault, match="cannot be removed"):
        box.remove(["many/."])


@pytest.mark.attack("a tar, rm or xargs of the agent's own, first in root's PATH")
def test_root_runs_no_program_of_the_agent(isolated, monkeypatch):
    monkeypatch.setattr(sandbox_backend, "TOOLS", "/home/agent/bin")  # comes first in PATH
    script = "'#!/bin/bash\\necho $0 >> /tmp/owned\\n'"
    with closing(Sandbox(isolated)) as box:
        box.run(
            "mv ~/bin ~/old; mkdir ~/bin; for n in tar rm xargs python3; "
            f"do printf {script} > ~/bin/$n; done; "
            "chmod 755 ~/bin/*; /bin/echo kept > f",
            5,
        )
        assert "tar" in out(box, "tar; cat /tmp/owned; : > /tmp/owned")  # ours is found first
        snapshot.put_back(box, snapshot.take(box))
        box.remove(["f"])
        assert out(box, "cat /tmp/owned; ls") == ""


# In a sandbox: the clock is an hour ahead when it starts, and is set back then.
AHEAD = """real, ahead = time.time, [3600]
time.time = lambda: real() + (ahead.pop() if ahead else 0)


class Files:"""


def test_a_clock_that_is_set_back_loses_no_file(isolated, monkeypatch):
    modules = [(name, text.replace("class Files:", AHEAD)) for name, text in MODULES]
    monkeypatch.setattr(sandbox_backend, "MODULES", modules)
    with closing(Sandbox(isolated)) as box, closing(Sandbox(isolated)) as twin:
        box.put({"data/a": b"a"})
        box.run("echo b > b", 5)
        snapshot.put_back(twin, snapshot.take(box))
        assert out(twin, "cat data/a b") == "ab"


def test_holes_stay_holes(isolated):
    with closing(Sandbox(isolated)) as box, closing(Sandbox(isolated)) as twin:
        box.run(
            "truncate -s 300M a; echo end >> a; echo 'print(1)' > a.py; truncate -s 40K a.py", 5
        )
        files = snapshot.take(box)
        assert len(files) < 100_000
        snapshot.put_back(twin, files)
        end, size, stored = out(twin, "tail -c 4 a; stat -c %s a; du -k a | cut -f1").split()
        assert (end, int(size)) == ("end", (300 << 20) + 4)
        assert int(stored) < 100
    code = code_in(files, load_task("titanic"))
    assert code["a.py"].strip("\0") == "print(1)\n"


@pytest.mark.fault(28, "a tar that cannot be read")
def test_files_that_cannot_be_copied_are_a_fault(isolated):
    with closing(Sandbox(isolated)) as box:
        with pytest.raises(SandboxFault, match="cannot be read"):
            snapshot.put_back(box, b"no tar" * 1000)


def test_files_behind_a_link_of_the_image_stay_when_a_copy_has_a_folder_there(isolated):
    with closing(Sandbox(isolated)) as box, closing(Sandbox(isolated)) as twin:
        out(box, "mkdir ~/link; touch ~/link/new")
        out(twin, "mkdir /tmp/kept; touch /tmp/kept/file; ln -s /tmp/kept ~/link")
        snapshot.put_back(twin, snapshot.take(box))
        assert out(twin, "ls /tmp/kept ~/link").split()[1::2] == ["new", "file"]


# ---- ends


OWNER = """
import sys; sys.path.insert(0, {project!r})
from flatlab.sandbox.client import Sandbox
box = Sandbox({backend!r})
box.run("setsid sleep {marker} & true", 5)
print(box.workspace, flush=True)
box.run("sleep {marker}", 600)
"""


def processes(marker):
    """Ids of the processes whose first argument is the marker."""
    done = subprocess.run(["pgrep", "-f", f"^sleep {marker}$"], capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.fault(20, "our process is killed")
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_killed_owner_leaves_nothing(backend):
    marker = f"7531{os.getpid()}"
    code = OWNER.format(project=str(PROJECT), backend=backend, marker=marker)
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workspace = owner.stdout.readline().strip()
    assert wait_for(lambda: len(processes(marker)) == 2)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert wait_for(lambda: not processes(marker) and not containers_of(owner.pid))
    assert backend != "landlock" or not Path(workspace).exists()


@pytest.mark.fault(15, "the container dies")
@needs_docker
def test_container_that_dies_is_a_fault():
    box = Sandbox("docker")
    threading.Timer(0.5, lambda: docker_api().kill(box.container)).start()
    for seconds in (20, 0):
        with pytest.raises(SandboxFault):
            box.run(f"sleep {seconds}", 20)
    box.close()


# ---- an ordinary user

ORDINARY = """
import sys; sys.path.insert(0, {project!r})
from flatlab.sandbox import snapshot
from flatlab.sandbox.client import Sandbox
box = Sandbox("namespaces")
out = lambda command, box=box: box.run(command, 5).output.strip()
assert out("id -u") == "1000"
assert out("kill -9 1; kill -KILL $PPID; echo alive").endswith("alive")
assert out("grep CapEff /proc/self/status").split()[1] == "0" * 16
for refused in ("cat /proc/1/environ /proc/1/mem; ls /proc/1/fd", "touch /usr/x /etc/x /x",
                "unshare -Ur true", "ls {project}"):
    assert box.run(refused, 5).exit_code, refused
assert box.run("setsid sleep 4321 & sleep 60", 0.3).stopped == "time"
assert int(out("ls -d /proc/[0-9]* | wc -l")) < 6
box.put({{"f": b"x"}}, user="root")
assert box.get("f") == b"x"
out("mkdir ~/workspace/d ~/workspace/e; cd ~/workspace; echo 1 | tee d/f e/f > g")
out("echo 2 > h; chmod 444 d; chmod 000 e g")
twin = Sandbox("namespaces")
snapshot.put_back(twin, snapshot.take(box))
copied = out("stat -c '%n %a' *; cat h", twin)
assert " ".join(copied.split()) == "d 444 f 600 h 644 2"  # what it may not read is left out
twin.close()
box.close()
"""


@pytest.fixture
def ordinary():
    """A command that runs Python as an ordinary user, and a folder with the project for it."""
    python = "/usr/bin/python3"
    if os.geteuid():
        yield [sys.executable], str(PROJECT)
        return
    if not shutil.which("setpriv") or not os.path.exists(python):
        pytest.skip("needs setpriv and a system python3 to become an ordinary user")
    nobody = pwd.getpwnam("nobody")
    user = [f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    copies = "/tmp/flatlab-test-ordinary"  # pytest's own folders are closed to others
    shutil.rmtree(copies, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "flatlab", f"{copies}/flatlab", ignore=ignore)
    shutil.copy(PROJECT / "tasks.py", copies)
    yield ["setpriv", *user, python], copies
    shutil.rmtree(copies)


def test_namespaces_of_an_ordinary_user(ordinary):
    command, project = ordinary
    done = subprocess.run(
        [*command, "-B", "-c", ORDINARY.format(project=project)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    if "not permitted" in done.stderr and "unshare" in done.stderr:
        pytest.skip("ordinary users have no namespaces here")
    assert done.returncode == 0, done.stderr


# ---- choosing


@pytest.mark.fault(17, "no daemon")
def test_no_daemon(no_daemon):
    with within(6):
        with user_error("^No Docker daemon answers at unix:///nowhere/docker.sock. A run that "):
            client.pick_backend("docker")
        no_daemon.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
        with user_error("No Docker daemon answers at tcp://127.0.0.1:1"):
            client.pick_backend("docker")


def test_auto_falls_back_only_to_complete_isolation(no_daemon):
    kind = replace(client.BACKENDS["namespaces"], covers="half covered")
    no_daemon.setattr(client, "get_backend", lambda name: kind)
    name, line = client.pick_backend("auto", IMAGE, False)
    assert name == "local"
    assert "half covered" in line
    client.pick_backend.cache_clear()
    kind = replace(kind, is_complete=False)
    with user_error("half covered"):
        client.pick_backend("auto", IMAGE, False)
    assert client.pick_backend("auto", IMAGE, True)[0] == "local"
    assert client.pick_backend("local", IMAGE, False)[0] == "local"


def test_an_unknown_kind_of_sandbox_is_refused():
    with user_error("Unknown kind of sandbox 'dokcer'"):
        Env(load_task("titanic"), "dokcer")
    # Without isolation, the end of a grading would end all processes of this user.
    with user_error("Unknown kind of sandbox"):
        Sandbox("none")


def test_local_falls_back_to_landlock_and_says_what_is_missing(monkeypatch):
    if missing("landlock"):
        pytest.skip(missing("landlock"))

    def refuse(spec):
        raise SandboxFault("unshare: Operation not permitted")

    for kind in client.LOCAL:
        monkeypatch.setitem(client.BACKENDS, kind, replace(client.BACKENDS[kind], start=refuse))
        client.local_kind.cache_clear()
        if kind == "namespaces":
            assert not client.get_backend("local").is_complete
    with user_error("cannot isolate"):
        client.get_backend("local")
    client.local_kind.cache_clear()


def test_landlock_that_cannot_hide_a_folder_leaves_none_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(local.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SandboxFault, match="Landlock cannot hide /usr/share"):
        Sandbox("landlock", hide=("/usr/share",))
    assert not list(tmp_path.iterdir())


@pytest.mark.fault(17, "image missing, socket without permission")
@needs_docker
def test_docker_image_and_permission(monkeypatch):
    with user_error("no image flatlab/nothing:here; get it with"):
        client.pick_backend("docker", "flatlab/nothing:here")
    with pytest.raises(SandboxFault, match="flatlab/nothing"):
        Env(load_task("titanic"), SandboxOptions("docker", image="flatlab/nothing:here")).reset()
    assert client.pick_backend("docker") == ("docker", f"docker, image {IMAGE}")
    from docker import errors

    def refused():
        raise errors.DockerException(
            "Error while fetching server API version: "
            "('Connection aborted.', PermissionError(13, 'Permission denied'))"
        )

    monkeypatch.setattr(docker, "docker_api", refused)
    assert "no permission on the Docker socket" in docker.docker_problem(IMAGE)


# ---- needs


@pytest.mark.parametrize(
    "need, backend, cache, sentence",
    [
        ("needs_network", "local", None, "takes data from the network.*--hf-cache"),
        ("needs_network", "docker", "absent", "no folder absent"),
        ("needs_gpu", "local", None, "use --backend docker"),
        ("needs_gpu", "docker", None, "no /dev/nvidiactl"),
    ],
)
def test_needs_that_a_sandbox_cannot_meet_are_refused(monkeypatch, need, backend, cache, sentence):
    task = replace(load_task("titanic"), **{need: True})
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with user_error(sentence):
        resolve_backend(task, SandboxOptions(backend, hf_cache=cache))


CONNECT = (
    "python3 -c \"import socket; s = socket.socket(2, 2); s.connect(('192.0.2.1', 9)); "
    'print(s.getsockname()[0])"'
)


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("needs_network", [True, False])
def test_network_is_there_for_tasks_that_need_it_only(backend, needs_network):
    task = replace(load_task("titanic"), needs_network=needs_network)
    with Env(task, SandboxOptions(backend, network=True)) as world:
        assert ("no network." in world.reset()) != needs_network
        links = do(world, "cat /proc/net/dev").observation.count(":")
        assert (links > 3 or do(world, CONNECT).status == "ok") == needs_network


@needs_docker
def test_hf_cache_is_mounted_read_only_and_found(tmp_path):
    model = tmp_path / "hub/models--x/config.json"
    model.parent.mkdir(parents=True)
    tmp_path.chmod(0o755)
    model.write_text("{}")
    task = replace(load_task("titanic"), needs_network=True)
    with Env(task, SandboxOptions("docker", hf_cache=str(tmp_path))) as world:
        world.reset()
        reads = "cat $HF_HOME/hub/models--x/config.json; echo; echo $HF_HUB_OFFLINE"
        assert do(world, reads).observation == "{}\n1"
        assert do(world, "touch $HF_HOME/hub/new").status == "ok"  # a lock, but not in the cache
        assert do(world, "echo x > $HF_HOME/hub/models--x/config.json").status == "error"
    assert model.read_text() == "{}"
    assert not (tmp_path / "hub/new").exists()


# ---- files and packages of a task


@pytest.mark.parametrize("artefacts, is_mounted", [(("submission.csv",), 1), (("data/*",), 0)])
def test_a_large_file_is_mounted_unless_it_may_be_handed_in(
    isolated, monkeypatch, artefacts, is_mounted
):
    monkeypatch.setattr(machine, "MOUNT_BYTES", 10_000)
    task = replace(load_task("titanic"), artefacts=artefacts)
    with Env(task, isolated) as world:
        world.reset()
        assert ("data/train.csv" in world.sandbox.mounts) == is_mounted
        assert do(world, "head -1 data/train.csv").observation == "id,class,sex,age,survived"
        assert do(world, "touch data/new").status == "ok"
        change = do(world, "echo 9 >> data/train.csv; rm data/train.csv; tail -1 data/train.csv")
        assert ("No such file" in change.observation) == (not is_mounted)
        assert world.task.public["data/train.csv"].is_file()


@needs_docker
def test_a_daemon_that_does_not_see_a_file_gets_a_copy(monkeypatch):
    monkeypatch.setattr(machine, "MOUNT_BYTES", 10_000)
    with closing(Sandbox("docker", mounts={"x": Path("/nowhere/x")})) as box:
        assert box.mounts == {}
    docker_api()
    monkeypatch.setenv("DOCKER_HOST", "tcp://elsewhere:2375")
    with Env(load_task("titanic"), "docker") as world:
        assert "data/train.csv (" in world.reset()
        assert world.sandbox.mounts == {}


def test_missing_requirements_of_a_local_sandbox_are_named(tmp_path):
    needed = tmp_path / "requirements.txt"
    needed.write_text("flatlab-nowhere\n")
    task = replace(load_task("titanic"), requirements=needed, public={}, trivial={})
    with user_error("needs packages .* lacks: flatlab-nowhere"):
        tasks.check_task(task, SandboxOptions("local"))


WITH_WHEEL = "flatlab/with-wheel:1"
WITH_PACKAGE = "flatlab/with-package:1"


@pytest.fixture
def needy(tmp_path):
    """A task whose requirement is a wheel in an image with pip, so that no network is needed."""
    hidden = shutil.ignore_patterns("__pycache__")
    # not `import pip`: setuptools, which vLLM imports, could not be imported after it
    shutil.copytree(Path(sysconfig.get_path("purelib"), "pip"), tmp_path / "pip", ignore=hidden)
    about = "flatlab_one-1.0.dist-info"
    files = {
        "flatlab_one.py": "",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: flatlab_one\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": f"flatlab_one.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n",
    }
    with zipfile.ZipFile(tmp_path / "flatlab_one-1.0-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY . /srv\nENV PYTHONPATH=/srv\n")
    api = docker_api()
    list(api.build(str(tmp_path), WITH_WHEEL, forcerm=True, decode=True))
    needed = tmp_path / "requirements.txt"
    needed.write_text("--no-index\n--find-links /srv\nflatlab_one>=1\n")
    yield replace(load_task("titanic"), name="needy", requirements=needed)
    for image in sum(map(api.images, (WITH_PACKAGE, WITH_WHEEL)), []):
        api.remove_image(image["RepoTags"][0], force=True)


@pytest.mark.slow
@needs_docker
def test_the_message_about_missing_packages_has_the_dockerfile(needy):
    with user_error("lacks: flatlab_one. This makes an image") as raised:
        Env(needy, SandboxOptions("docker", image=WITH_WHEEL)).reset()
    found = re.search("--file - (.*) <<'END'\n(.*)END", str(raised.value), re.DOTALL)
    Path(found[1], "Dockerfile").write_text(found[2])
    list(docker_api().build(found[1], WITH_PACKAGE, forcerm=True, network_mode="none"))
    with Env(needy, SandboxOptions("docker", image=WITH_PACKAGE)) as world:
        world.reset()
        assert do(world, "python3 -c 'import flatlab_one'").status == "ok"
