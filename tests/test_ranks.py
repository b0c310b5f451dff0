"""Several ranks: the exchange by itself, two ranks against one with the same total batch, a rank
that is lost; and configs/slurm.sbatch.

The file is also the program of those ranks: `torchrun ... tests/test_ranks.py <model> <steps>`, a
run of grpo.train with the real engine, where an episode is one reply and the reward counts its
letters.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from flatlab.errors import UserError
from flatlab.runs.reader import read_rows as rows
from flatlab.train.job import join
from helpers import segments_of

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

STAND_INS = {
    "bin/srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "bin/scontrol": "echo node1; echo node2",
    ".venv/bin/python": 'printf "%s\\n" "$@"',
}


@pytest.fixture
def job(tmp_path):
    """job(*arguments, **environment) runs configs/slurm.sbatch as Slurm does, with the stand-ins.
    That of python prints its arguments, one a line.
    """
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    programs = f"{tmp_path}/bin:{os.environ['PATH']}"

    def run(*arguments, **environment):
        return subprocess.run(
            ["bash", ROOT / "configs/slurm.sbatch", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PATH": programs} | environment,
            capture_output=True,
            text=True,
        )

    return run


def test_a_job_of_a_grid_runs_its_line(job, tmp_path):
    lines = "search.py --seed 0\nsearch.py --name 'study/seed 1'\n"
    (tmp_path / "cells.txt").write_text(lines)
    said, *words = job("cells.txt", SLURM_ARRAY_TASK_ID="2").stdout.splitlines()
    assert said == "python search.py --name 'study/seed 1'"
    assert words == ["search.py", "--name", "study/seed 1"]
    third = job("cells.txt", SLURM_ARRAY_TASK_ID="3")
    assert third.returncode == 2
    assert third.stderr == "cells.txt has no line 3.\n"


def test_a_training_job_starts_a_rank_on_every_gpu(job):
    nodes = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    done = job("--task", "titanic", SLURM_JOB_ID="10007", **nodes)
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "torch.distributed.run"], done.stderr
    arguments = parse_args(words[2:])
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "8")
    assert arguments.rdzv_endpoint == "node1:20007"
    assert arguments.training_script == "grpo.py"
    assert arguments.training_script_args == ["--task", "titanic"]


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
        lora_alpha=16,
        seed=rank,  # rank 0's counts
        value_head=advantage == "ppo",
    )
    asyncio.run(run_beside(job.loop, grpo.train, policy, [TASK], cfg, job))


if __name__ == "__main__":
    main(*sys.argv[1:])
