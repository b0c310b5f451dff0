"""Several ranks: the exchange by itself, two ranks against one with the same total batch, a rank
that is lost; and configs/slurm.sbatch on a real Slurm of one node, which is started here.

The file is also the program of those ranks: `torchrun ... tests/test_ranks.py <model> <steps>`,
runs of grpo.train with the real engine, where an episode is one reply and the reward counts its
letters.
"""

import asyncio
import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import joblib
import pytest
from safetensors.torch import load_file

from flatlab import threads
from flatlab.files import read_rows as rows
from flatlab.train.job import join
from helpers import PROJECT, free_port, segments_of, user_error

sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
PROGRAM = PROJECT / "tests/test_ranks.py"


def torchrun(folder, *command, ranks=2):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, command)],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    """The output of a process that succeeds."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, (out, err[-3000:])
    return out


EXCHANGE = """
import torch
from flatlab.train.job import join
dist = join(timeout=60)
weight = torch.nn.Parameter(torch.full((3,), float(dist.rank)))
dist.broadcast([weight])
assert weight.tolist() == [0, 0, 0]
if dist.rank == 0:
    weight.grad = torch.tensor([1.0, 2.0, 3.0])         # rank 1 had nothing to learn from
assert dist.sum_gradients([weight], True)
assert weight.grad.tolist() == [1, 2, 3], weight.grad
assert not dist.sum_gradients([weight], dist.rank == 0)  # rank 1 disagrees
assert dist.sum(1.5, dist.rank) == [1.5 * dist.world, dist.world * (dist.world - 1) / 2]
assert dist.gather("x" * (1 + dist.rank)) == ["x" * (1 + r) for r in range(dist.world)]
# one write, because the ranks share a pipe
print(f"rank {dist.rank} of {dist.world}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_the_exchange(tmp_path):
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    out = finish(torchrun(tmp_path, "exchange.py"))
    assert sorted(out.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


LAUNCHED = "WORLD_SIZE=2 RANK=1 MASTER_ADDR=localhost MASTER_PORT=1"


@pytest.mark.parametrize(
    "variables, sentence",
    [
        ("WORLD_SIZE=2", "WORLD_SIZE is 2 but LOCAL_RANK is not set: start it with torchrun, or"),
        (f"{LAUNCHED} LOCAL_RANK=1", r"more processes here than there are GPUs \(1\)"),
        ("WORLD_SIZE=2 LOCAL_RANK=0 RANK=1", "WORLD_SIZE is 2 but MASTER_ADDR is not set"),
        ("WORLD_SIZE=2 LOCAL_RANK=x RANK=1", "LOCAL_RANK must be a whole number from 0 .*'x'"),
        ("RANK=1", "RANK is 1 but WORLD_SIZE is not set: start it with torchrun, or unset RANK"),
        ("LOCAL_RANK=abc", "LOCAL_RANK must be a whole number from 0 to 65535, not 'abc'"),
        ("WORLD_SIZE=two", "WORLD_SIZE must be a whole number from 1 to 65535, not 'two'"),
        ("WORLD_SIZE=0", "WORLD_SIZE must .*, not '0'"),
        ("WORLD_SIZE= RANK= LOCAL_RANK=", ""),
        ("WORLD_SIZE=1 RANK=0", ""),
        ("LOCAL_RANK=0 RANK=0", ""),
    ],
)
def test_variables_of_torchrun_that_do_not_fit_together(monkeypatch, variables, sentence):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with user_error(sentence) if sentence else contextlib.nullcontext():
        threads.configure()
        assert join(timeout=1).world == 1


@pytest.mark.parametrize(
    "value, count, sentence",
    [
        ("4,2", 4, ""),
        (" 3 ", 3, ""),
        ("", joblib.cpu_count(), ""),
        ("abc", 0, "OMP_NUM_THREADS must be a whole number from 1 to 65535, not 'abc'"),
        ("0", 0, "not '0'"),
        ("1e3", 0, "not '1e3'"),
        ("9" * 5_000, 0, "not '9"),
    ],
)
def test_the_number_of_threads(monkeypatch, value, count, sentence):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with user_error(sentence) if sentence else contextlib.nullcontext():
        threads.configure()
        assert os.environ["OMP_NUM_THREADS"] == str(count)


def test_an_empty_local_rank_is_removed_before_the_engine_reads_it(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "")
    threads.configure()
    assert "LOCAL_RANK" not in os.environ


STEPS = 4  # of the comparison


def left_by(run):
    """The rows, replies, tokens and the adapter of a run."""
    replies, tokens = [], []
    for step in range(STEPS):
        replies += [e["turns"][0]["reply"] for e in rows(run / f"episodes/{step:06d}.jsonl")]
        tokens += [s["tokens"] for [s] in segments_of(run, f"{step:06d}")]
    adapter = load_file(run / f"checkpoints/{STEPS - 1:06d}/adapter_model.safetensors")
    return rows(run / "metrics.jsonl"), replies, tokens, adapter


@pytest.mark.slow
def test_two_ranks_equal_one_with_the_same_total_batch(tmp_path, random_model):
    """Rows, transcripts, evaluations and adapter; three groups, so that one rank has more than the
    other.
    """
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        finish(torchrun(folder, PROGRAM, random_model, STEPS, "ppo,grpo", ranks=ranks))
    for name in ("ppo", "grpo"):
        one, two = (left_by(tmp_path / ranks / "logs" / name) for ranks in "12")
        (one_rows, *sampled, one_adapter), (two_rows, *others, two_adapter) = one, two
        keys = "step reward_mean loss kl entropy grad_norm episodes groups lr".split()
        for a, b in zip(one_rows, two_rows, strict=True):
            close = pytest.approx({key: b[key] for key in keys}, rel=1e-3, abs=1e-5)
            assert {key: a[key] for key in keys} == close
        last = one_rows[-1]["eval_score_mean"]
        assert last == pytest.approx(two_rows[-1]["eval_score_mean"], abs=1e-4)
        assert sampled == others
        assert len(sampled[0]) == 12 * STEPS
        for key, weight in one_adapter.items():
            assert (weight - two_adapter[key]).abs().max() < 1e-4
        learned = [weight.abs().max() for key, weight in one_adapter.items() if "lora_B" in key]
        assert max(learned) > 1e-3
    assert not list(tmp_path.glob("2/logs/*/.tmp*"))


@pytest.mark.slow
def test_two_ranks_sample_ahead_and_a_lost_one_ends_the_job_which_resumes(tmp_path, random_model):
    """The episodes of rank 1 wait ten times longer, so its trainer is late in every exchange."""
    job = torchrun(tmp_path, PROGRAM, random_model, 40, "grpo", 2)
    run = tmp_path / "logs/grpo"
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(rows(metrics)) < STEPS:
        assert job.poll() is None, job.communicate()[1][-3000:]
        time.sleep(0.1)
    os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode != 0
    survivor = int((tmp_path / "rank0.pid").read_text())
    assert not Path(f"/proc/{survivor}").exists()
    done = len(rows(metrics))
    out = finish(torchrun(tmp_path, PROGRAM, random_model, done + 1, "grpo", 2))
    assert "resumed after step" in out
    result = rows(metrics)
    assert [row["step"] for row in result] == list(range(done + 1))
    assert 1 <= max(row["lag_max"] for row in result) <= 2
    for step in range(done + 1):
        episodes = rows(run / f"episodes/{step:06d}.jsonl")
        assert [e["seed"] - 100_003 * step for e in episodes] == list(range(12))
        rewards = {}
        for e in episodes:
            rewards.setdefault(e["group"], set()).add(e["reward"])
        # also of the groups that the other rank has played
        trained = {e["group"] for e in episodes if "advantage" in e["turns"][0]}
        assert trained == {group for group in rewards if len(rewards[group]) > 1}


# ------------------------------------------------------------------ configs/slurm.sbatch

SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
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
TRAIN = (
    "--task titanic --backend local --steps 1 --groups 2 --group-size 2 --eval-episodes 0 "
    "--max-turns 2 --name ranks"
)


class Cluster:
    """A Slurm of one node with two pretended GPUs, and a project folder with logs of its own."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="fl-", dir="/tmp"))  # a short path, for sockets
        self.folder.chmod(0o755)
        self.running = []
        self.project = self.folder / "project"
        for name in ("state", "spool", "project/logs"):
            (self.folder / name).mkdir(parents=True)
        for path in PROJECT.iterdir():
            if path.name not in ("logs", ".venv"):
                (self.project / path.name).symlink_to(path)
        (self.project / ".venv").symlink_to(sys.prefix)
        self.environment = os.environ | {
            "PATH": SBIN,
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LOGLEVEL": "INFO",  # torchrun then names the ranks
        }
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
        self.start("slurmctld", "-D", "-i")
        self.start("slurmd", "-D")
        self.wait_for(lambda: self.call("sinfo", "--noheader", "--format=%T") == "idle\n")

    def start(self, *command):
        log = open(self.folder / "log", "ab")
        options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        environment = self.environment
        process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
        self.running.append(process)

    def wait_for(self, answers, seconds=120):
        deadline = time.monotonic() + seconds
        while not answers():
            is_over = time.monotonic() > deadline or self.running[-1].poll() is not None
            assert not is_over, (self.folder / "log").read_text()[-2000:]
            time.sleep(0.2)

    def call(self, *command):
        """The output of a command in the project."""
        options = {"cwd": self.project, "env": self.environment, "text": True}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        return done.stdout

    def submit(self, *arguments):
        """Runs `sbatch ARGUMENTS` and waits for the jobs. Returns what they wrote, sorted."""
        outputs = self.project / "logs"
        before = set(outputs.glob("slurm-*.out"))
        said = self.call("sbatch", "--parsable", "--nodes=1", "--cpus-per-task=2", *arguments)
        assert said.strip().isdecimal(), said
        self.wait_for(lambda: not self.call("squeue", "--noheader"), seconds=400)
        made = set(outputs.glob("slurm-*.out")) - before
        return sorted(path.read_text() for path in made)

    def stop(self):
        self.call("scancel", "--full", "--user", str(os.getuid()))
        for process in reversed(self.running):
            process.terminate()
            process.wait(60)
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
def test_job_n_of_a_grid_runs_line_n_of_its_file(cluster):
    cells = ["tasks.py", "viz.py 'logs/no run'"]
    (cluster.project / "cells.txt").write_text("\n".join(cells))
    command = ("--array=1-2", "--gpus-per-node=1", "configs/slurm.sbatch", "cells.txt")
    texts = cluster.submit(*command)
    assert [text.splitlines()[0] for text in texts] == [f"python {cell}" for cell in cells]
    assert "titanic" in texts[0]
    assert "There is no folder logs/no run" in texts[1]


@needs_slurm
@pytest.mark.slow
def test_training_runs_one_rank_a_gpu(cluster):
    text = cluster.submit("--gpus-per-node=2", "configs/slurm.sbatch", *TRAIN.split())[0]
    result = cluster.project / "logs/ranks/result.json"
    assert result.exists() and json.loads(result.read_text())["status"] == "finished", text
    assert "global_ranks=[0, 1]" in text


# ------------------------------------------------------------------ the program of the ranks


def main(model: str, steps: str, scripts: str, ahead: str = "0") -> None:
    import grpo
    from examples import ppo
    from flatlab.model.path import ModelPath
    from flatlab.options import ModelOptions
    from flatlab.runs.store import open_run
    from flatlab.train import metrics
    from flatlab.train.job import TrainingRun
    from helpers import MADE_BY, configure
    from training import CFG, TASK, one_reply, waiting_reply, weights_of

    ranks = join(timeout=120)
    Path(f"rank{ranks.rank}.pid").write_text(str(os.getpid()))
    grpo.run_episode = one_reply
    if ahead != "0":
        grpo.run_episode = partial(waiting_reply, waits=(0.03 * 10**ranks.rank,))
    path = ModelPath(model, None, False)
    seed = ranks.rank  # rank 0's counts
    policy = ppo.ActorCritic(path, ModelOptions(context=512), seed, lora_rank=8)
    begin = weights_of(policy)
    trains = {"grpo": grpo.train, "ppo": ppo.train}
    common = {"kl": 0.05, "groups": 3, "group_size": 4, "eval_episodes": 3}
    common["concurrency"] = 1 if ahead == "0" else 24
    for name in scripts.split(","):
        for p, start in zip(policy.parameters(), begin):
            p.data.copy_(start)
        cfg = configure(CFG, name=name, steps=int(steps), ahead=int(ahead), **common)
        job = TrainingRun(ranks, [TASK])
        if ranks.rank == 0:
            config = {"task": ["titanic"], "steps": cfg.steps}
            job.run = open_run(f"logs/{name}", config, MADE_BY)
        job.update_result(**metrics.first_results([TASK], "training"))
        asyncio.run(trains[name](policy, cfg, job))


if __name__ == "__main__":
    main(*sys.argv[1:])
