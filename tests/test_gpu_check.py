"""tools/gpu_check.py: on a CPU the same code runs with the stand-in."""

import pytest
import torch

from helpers import PROJECT, python
from tools.get_smollm2 import model_folder

CHECK = PROJECT / "tools" / "gpu_check.py"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes long on a GPU: run it by itself")
def test_every_part_runs_here_or_says_why_not(tmp_path):
    done = python(CHECK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (tmp_path / "logs/gpu-check/table.md").read_text().splitlines()[4:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert not [row for row in rows if row[2] == "failed"]
    skipped = {row[0] for row in rows if row[2] == "skipped"}
    if not model_folder().is_dir():
        skipped.remove("pretrained")
    assert skipped == {"runner-v1", "runner-v2", "shared-base", "own-base", "autocast"}
    assert any("prompt computed once" in row[1] for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes in bf16 anyway")
def test_three_steps_of_training_in_the_precision_of_a_gpu(tmp_path):
    command = (CHECK, "--parts", "parity", "budget", "training", "--dtype", "bfloat16")
    done = python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    table = (tmp_path / "logs/gpu-check/table.md").read_text()
    assert "failed" not in table, table
    assert "3 steps of titanic" in table
    assert "free at the peak of a step" in table
