"""Several ranks: the exchange by itself, two ranks against one with the same total batch, a rank
that is lost; and configs/slurm.sbatch on a real Slurm of one node, which is started here.

The file is also the program of those ranks: `torchrun ... tests/test_ranks.py <model> <steps>`, a
run of grpo.train with the real engine, where an episode is one reply and the reward counts its
letters.
"""

import asyncio
import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from flatlab.errors import UserError
from flatlab.files import read_rows as rows
from flatlab.train.job import join
from helpers import PROJECT, SBIN, Services, free_port, python, segments_of

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def torchrun(folder, *command, ranks=2):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    if ranks == 1:
        launcher = []
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, command)],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process, timeout=300):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


EXCHANGE = """
import torch
from flatlab.train.job import join
dist = join(timeout=60)
weight = torch.nn.Parameter(torch.full((3,), float(dist.rank)))
dist.broadcast([weight])
assert weight.tolist() == [0, 0, 0]
if dist.rank == 0:
    weight.grad = torch.tensor([1.0, 2.0, 3.0])         # rank 1 had nothing to learn from
dist.sum_gradients([weight])
assert weight.grad.tolist() == [1, 2, 3], weight.grad
assert dist.sum(1.5, dist.rank) == [1.5 * dist.world, dist.world * (dist.world - 1) / 2]
assert dist.gather("x" * (1 + dist.rank)) == ["x" * (1 + r) for r in range(dist.world)]
# one write, because the ranks share a pipe
print(f"rank {dist.rank} of {dist.world}\\n", end="", flush=True)
"""


def test_the_exchange(tmp_path):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    code, out, err = finish(torchrun(tmp_path, "exchange.py", ranks=2))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_more_processes_than_gpus_is_one_sentence(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(UserError, match=r"more processes here than there are GPUs \(1\)"):
        join(timeout=1)


STEPS = 4  # of the comparison


class Finished:
    """What a run of STEPS steps on this number of ranks left."""

    def __init__(self, folder, ranks, *arguments):
        from safetensors.torch import load_file

        folder.mkdir()
        program = ROOT / "tests/test_ranks.py"
        code, out, err = finish(torchrun(folder, program, *arguments, ranks=ranks))
        assert code == 0, (out, err[-3000:])
        run = folder / "logs/m"
        self.rows = rows(run / "metrics.jsonl")
        self.texts = []
        self.tokens = []
        for step in range(STEPS):
            episodes = rows(run / f"episodes/{step:06d}.jsonl")
            self.texts.append([e["turns"][0]["reply"] for e in episodes])
            self.tokens.append([s["tokens"] for [s] in segments_of(run, f"{step:06d}")])
        last = run / f"checkpoints/{STEPS - 1:06d}"
        self.weights = load_file(last / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["group", "ppo"])
def test_two_ranks_equal_one_with_the_same_total_batch(tmp_path, random_model, advantage):
    """Rows, transcripts, evaluations and adapter; three groups, so that one rank has more than the
    other.
    """
    one = Finished(tmp_path / "one", 1, random_model, STEPS, advantage)
    two = Finished(tmp_path / "two", 2, random_model, STEPS, advantage)
    assert len(one.rows) == len(two.rows) == STEPS
    for step, (a, b) in enumerate(zip(one.rows, two.rows)):
        for key in "step reward_mean loss kl entropy grad_norm episodes groups lr".split():
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), (step, key)
    last = one.rows[-1]["eval_score_mean"]
    assert last == pytest.approx(two.rows[-1]["eval_score_mean"], abs=1e-4)
    assert one.texts == two.texts
    assert one.tokens == two.tokens
    assert {len(step) for step in one.tokens} == {12}
    for name, weight in one.weights.items():
        assert (weight - two.weights[name]).abs().max() < 1e-4
    learned = [weight.abs().max() for name, weight in one.weights.items() if "lora_B" in name]
    assert max(learned) > 1e-3
    assert not list(tmp_path.glob("two/logs/m/.tmp*"))


@pytest.mark.slow
def test_a_lost_rank_ends_the_job_and_it_resumes(tmp_path, random_model):
    program = ROOT / "tests/test_ranks.py"
    job = torchrun(tmp_path, program, random_model, 40)
    metrics = tmp_path / "logs/m/metrics.jsonl"
    while not metrics.exists() or len(rows(metrics)) < 2:
        assert job.poll() is None, job.communicate()[1][-3000:]
        time.sleep(0.1)
    os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGKILL)
    begin = time.monotonic()
    code, _, err = finish(job, timeout=90)
    assert code != 0, err[-3000:]
    assert time.monotonic() - begin < 60
    survivor = int((tmp_path / "rank0.pid").read_text())
    assert not Path(f"/proc/{survivor}").exists()
    done = len(rows(metrics))
    code, out, err = finish(torchrun(tmp_path, program, random_model, done + 1))
    assert code == 0, err[-3000:]
    assert "resumed after step" in out
    assert [row["step"] for row in rows(metrics)] == list(range(done + 1))


@pytest.mark.slow
def test_two_ranks_with_unequal_waits_sample_ahead(tmp_path, random_model):
    """The episodes of rank 1 wait ten times longer, so its trainer is late in every exchange."""
    code, out, err = finish(
        torchrun(tmp_path, ROOT / "tests/test_ranks.py", random_model, STEPS, "group", 2, ranks=2)
    )
    assert code == 0, (out, err[-3000:])
    run = tmp_path / "logs/m"
    result = rows(run / "metrics.jsonl")
    assert [row["step"] for row in result] == list(range(STEPS))
    assert 1 <= max(row["lag_max"] for row in result) <= 2
    for step in range(STEPS):
        episodes = rows(run / f"episodes/{step:06d}.jsonl")
        assert [e["seed"] - 100_003 * step for e in episodes] == list(range(12))


# ------------------------------------------------------------------ configs/slurm.sbatch

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
missing = [name for name in PROGRAMS if not shutil.which(name, path=SBIN)]
needs_slurm = pytest.mark.skipif(bool(missing), reason=f"no Slurm: {', '.join(missing)} missing")
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


@needs_slurm
@pytest.mark.slow
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
    assert re.search("titanic +seed 0 +2 ", table.stdout), table.stderr


@needs_slurm
@pytest.mark.slow
def test_training_runs_one_rank_a_gpu(cluster):
    cluster.environment["LOGLEVEL"] = "INFO"  # torchrun then names the ranks
    text = cluster.submit("--gpus-per-node=2", "configs/slurm.sbatch", *TRAIN.split())[0]
    result = cluster.project / "logs/ranks/result.json"
    assert result.exists() and json.loads(result.read_text())["status"] == "finished", text
    assert "global_ranks=[0, 1]" in text


# ------------------------------------------------------------------ the program of the ranks


def main(model: str, steps: str, advantage: str = "group", ahead: str = "0") -> None:
    import grpo
    from flatlab.runs.store import open_run
    from flatlab.train.job import Job, run_beside
    from helpers import MADE_BY, RESULT, configure
    from policy import ModelPath, Policy
    from training import CFG, TASK, one_reply, waiting_reply

    job = Job(join(timeout=120))
    rank = job.ranks.rank
    Path(f"rank{rank}.pid").write_text(str(os.getpid()))
    cfg = configure(
        CFG,
        kl=0.05,
        name="m",
        steps=int(steps),
        groups=3,
        group_size=4,
        ahead=int(ahead),
        concurrency=1 if ahead == "0" else 24,
        eval_episodes=3,
        advantage=advantage,
    )
    grpo.run_episode = one_reply
    if ahead != "0":
        grpo.run_episode = partial(waiting_reply, waits=(0.03 * 10**rank,))
    if rank == 0:
        job.run = open_run("logs/m", {"task": ["titanic"], "steps": cfg.steps}, MADE_BY)
    job.result(**RESULT)
    policy = Policy(
        ModelPath(model, None, False),
        context=512,
        lora_rank=8,
        seed=rank,  # rank 0's counts
        value_head=advantage == "ppo",
    )
    asyncio.run(run_beside(job.loop, grpo.train, policy, [TASK], cfg, job))


if __name__ == "__main__":
    main(*sys.argv[1:])
