"""configs/slurm.sbatch on a real Slurm of one node, started here and stopped by its processes."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from helpers import PROJECT, SBIN, Services, free_port, python

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
missing = [name for name in PROGRAMS if not shutil.which(name, path=SBIN)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"no Slurm here: {', '.join(missing)} missing"),
]
CONFIG = """
ClusterName=flatlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
SEARCH = "search.py --task titanic --backend local --nodes 1 --sampling-mode none"
TRAIN = (
    "--task titanic --backend local --steps 1 --groups 2 --group-size 2 --eval-episodes 0 "
    "--max-turns 2 --name ranks"
)


class Cluster(Services):
    """A Slurm of one node with two pretended GPUs, and a project folder with logs of its own."""

    def __init__(self):
        super().__init__()
        self.project = self.folder / "project"
        for name in ("state", "spool", "project/logs"):
            (self.folder / name).mkdir(parents=True)
        for path in PROJECT.iterdir():
            if path.name not in ("logs", ".venv"):
                (self.project / path.name).symlink_to(path)
        (self.project / ".venv").symlink_to(sys.prefix)
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        config = CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=self.folder,
            control_port=free_port(),
            node_port=free_port(),
        )
        (self.folder / "slurm.conf").write_text(config)
        gpus = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
        (self.folder / "gres.conf").write_text(gpus)

    def begin(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")]
        files += [f"--log-file={self.folder}/munge.log", f"--socket={self.folder}/munge.socket"]
        self.start("munged", "--foreground", "--force", *files)
        self.start("slurmctld", "-D", "-i", **self.environment)
        self.start("slurmd", "-D", **self.environment)
        self.wait_for(lambda: self.call("sinfo", "--noheader", "--format=%T").stdout == "idle\n")

    def call(self, *command):
        return subprocess.run(
            command,
            cwd=self.project,
            env=os.environ | {"PATH": SBIN} | self.environment,
            capture_output=True,
            text=True,
        )

    def submit(self, *arguments):
        """Runs `sbatch ARGUMENTS` and waits for the jobs. Returns what they wrote, sorted."""
        options = ("--parsable", "--nodes=1", "--cpus-per-task=2")
        done = self.call("sbatch", *options, *arguments)
        assert not done.returncode, done.stderr
        self.wait_for(lambda: not self.call("squeue", "--noheader").stdout, seconds=400)
        outputs = list((self.project / "logs").glob("slurm-*.out"))
        texts = [path.read_text() for path in outputs]
        for path in outputs:
            path.unlink()
        return sorted(texts)

    def stop(self):
        self.call("scancel", "--full", "--user", str(os.getuid()))
        super().stop()
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster()
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.stop()


def test_grid_runs_a_cell_a_job_and_skips_finished_ones(cluster):
    cells = [f"{SEARCH} --seed {seed} --name 'study/seed {seed}'" for seed in (0, 1)]
    (cluster.project / "cells.txt").write_text("\n".join(cells))
    command = ("--array=1-2", "--gpus-per-node=1", "configs/slurm.sbatch", "cells.txt")
    first = cluster.submit(*command)
    assert [text.splitlines()[0] for text in first] == [f"python {cell}" for cell in cells]
    assert all("1/1" in text for text in first), first
    journals = sorted((cluster.project / "logs/study").glob("*/journal.jsonl"))
    assert [path.parent.name for path in journals] == ["seed 0", "seed 1"]

    journals[1].parent.joinpath("result.json").unlink()  # as if that job had been killed early
    journals[1].unlink()
    kept = journals[0].stat().st_mtime_ns
    again = cluster.submit(*command)
    assert "was finished before: nothing was run" in again[0]
    assert "1/1" not in again[0]
    assert "1/1" in again[1]
    assert journals[0].stat().st_mtime_ns == kept

    table = python("viz.py", cluster.project / "logs/study")
    assert re.search("titanic +none +2 ", table.stdout), table.stderr


def test_training_runs_one_rank_a_gpu(cluster):
    cluster.environment["LOGLEVEL"] = "INFO"  # torchrun then names the ranks
    text = cluster.submit("--gpus-per-node=2", "configs/slurm.sbatch", *TRAIN.split())[0]
    result = cluster.project / "logs/ranks/result.json"
    assert result.exists() and json.loads(result.read_text())["status"] == "finished", text
    assert "global_ranks=[0, 1]" in text
