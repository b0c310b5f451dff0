"""Several ranks: the exchange by itself, which configs/slurm.sbatch starts, two ranks against one
with the same total batch, and a rank that is lost.

The file is also the program of those ranks: `torchrun ... tests/test_ranks.py <model> <steps>`,
runs of grpo.train with the real engine, where an episode is one reply and the reward counts its
letters.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import joblib
import pytest
from safetensors.torch import load_file

from flatlab import threads
from flatlab.files import read_rows as rows
from flatlab.train.job import join_ranks
from helpers import PROJECT, attempts_of, free_port, segments_of, user_error

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
import os
import torch
from flatlab.train.job import join_ranks
dist = join_ranks(timeout=60)
weight = torch.nn.Parameter(torch.full((3,), float(dist.rank)))
dist.broadcast([weight])
assert weight.tolist() == [0, 0, 0]
if dist.rank == 0:
    weight.grad = torch.tensor([1.0, 2.0, 3.0])         # rank 1 had nothing to learn from
assert dist.sum_gradients([weight], True)
assert weight.grad.tolist() == [1, 2, 3], weight.grad
assert not dist.sum_gradients([weight], dist.rank == 0)  # rank 1 disagrees
n = dist.world_size
assert dist.sum(1.5, dist.rank) == [1.5 * n, n * (n - 1) / 2]
assert dist.gather("x" * (1 + dist.rank)) == ["x" * (1 + r) for r in range(dist.world_size)]
print("said by rank 0")
# one write, because the ranks share a pipe
os.write(1, f"rank {dist.rank} of {dist.world_size}\\n".encode())
"""


# Programs of Slurm on a cluster that is this machine
SLURM = {
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done; exec "$@"\n',
    "scontrol": "#!/bin/bash\necho localhost\n",
}


def sbatch(folder, *arguments, **variables):
    """Runs configs/slurm.sbatch as a job of one node with two GPUs."""
    (folder / ".venv").symlink_to(sys.prefix)
    for name, text in SLURM.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"JOB_ID": free_port(), "JOB_NODELIST": "localhost", "NNODES": 1, "GPUS_ON_NODE": 2}
    job = {f"SLURM_{name}": str(value) for name, value in (job | variables).items()}
    job |= {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}
    command = ["bash", PROJECT / "configs/slurm.sbatch", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | job, **pipes)


@pytest.mark.slow
def test_slurm_starts_a_rank_for_each_gpu_and_these_exchange(tmp_path):
    (tmp_path / "grpo.py").write_text(EXCHANGE)
    out = finish(sbatch(tmp_path))
    for words in ("rank 0 of 2", "rank 1 of 2", "said by rank 0"):  # lines may run together
        assert out.count(words) == 1


def test_job_n_of_a_grid_runs_line_n_of_its_file(tmp_path):
    (tmp_path / "cells.txt").write_text("none\n-c 'print(\"cell 2\")'")
    job = sbatch(tmp_path, "cells.txt", ARRAY_TASK_ID=2)
    assert finish(job).endswith("\ncell 2\n")


LAUNCHED = "WORLD_SIZE=2 RANK=1 MASTER_ADDR=localhost MASTER_PORT=1"


VARIABLES = {
    "WORLD_SIZE=2": "WORLD_SIZE is 2 but LOCAL_RANK is not set: start it with torchrun, or",
    f"{LAUNCHED} LOCAL_RANK=1": r"more processes here than there are GPUs \(1\)",
    "WORLD_SIZE=2 LOCAL_RANK=0 RANK=1": "WORLD_SIZE is 2 but MASTER_ADDR is not set",
    "RANK=1": "RANK is 1 but WORLD_SIZE is not set: start it with torchrun, or unset RANK",
    "LOCAL_RANK=abc": "LOCAL_RANK must be a whole number from 0 to 65535, not 'abc'",
    "WORLD_SIZE=0": "WORLD_SIZE must be a whole number from 1 to 65535, not '0'",
    "WORLD_SIZE= RANK= LOCAL_RANK=": "",
    "WORLD_SIZE=1 RANK=0": "",
    "LOCAL_RANK=0 RANK=0": "",
}


@pytest.mark.parametrize("variables, sentence", VARIABLES.items())
def test_variables_of_torchrun_that_do_not_fit_together(monkeypatch, variables, sentence):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    join_ranks.cache_clear()
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with user_error(sentence) if sentence else contextlib.nullcontext():
        threads.configure()
        assert join_ranks(timeout=1).world_size == 1


@pytest.mark.parametrize(
    "value, count, sentence",
    [
        ("4,2", 4, ""),
        (" 3 ", 3, ""),
        ("", joblib.cpu_count(), ""),
        ("1e3", 0, "OMP_NUM_THREADS must be a whole number from 1 to 65535, not '1e3'"),
        ("0", 0, "not '0'"),
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
        replies += [e["turns"][0]["reply"] for e in attempts_of(run, f"{step}")]
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
        keys = "step reward_mean loss kl entropy grad_norm episodes groups lr eval_score_mean"
        for key in keys.split():
            column, other = ([row.get(key, 0) for row in rows] for rows in (one_rows, two_rows))
            assert column == pytest.approx(other, rel=1e-3, abs=1e-5)
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
        episodes = attempts_of(run, f"{step}")
        assert [e["seed"] - 100_003 * step for e in episodes] == list(range(12))
        rewards = {}
        for e in episodes:
            rewards.setdefault(e["group"], set()).add(e["reward"])
        # also of the groups that the other rank has played
        trained = {e["group"] for e in episodes if "advantage" in e["turns"][0]}
        assert trained == {group for group in rewards if len(rewards[group]) > 1}


# ------------------------------------------------------------------ the program of the ranks


def main(model: str, steps: str, scripts: str, ahead: str = "0") -> None:
    import grpo
    from examples import ppo
    from flatlab.model.path import ModelPath
    from flatlab.options import ModelOptions, changed
    from flatlab.runs.store import open_run
    from flatlab.train import metrics
    from flatlab.train.job import TrainingRun
    from helpers import MADE_BY
    from training import CFG, TASK, one_reply, waiting_reply, weights_of

    ranks = join_ranks(timeout=120)
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
        cfg = changed(CFG, name=name, steps=int(steps), ahead=int(ahead), **common)
        job = TrainingRun([TASK], ranks=ranks)
        if ranks.rank == 0:
            config = {"task": ["titanic"], "steps": cfg.steps}
            job.run = open_run(f"logs/{name}", config, MADE_BY)
        job.update_result(**metrics.first_results([TASK], "training"))
        asyncio.run(trains[name](policy, cfg, job))


if __name__ == "__main__":
    main(*sys.argv[1:])
