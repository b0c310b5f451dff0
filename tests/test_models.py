"""Families of models: each one trains, or one sentence says why it does not."""

import json
import os
import subprocess
import sys

import pytest

from families import FAMILIES
from helpers import PROJECT

ATTENTION_ONLY = {"Qwen 3 MoE", "Mixtral", "gpt-oss"}


@pytest.fixture(scope="module")
def circle(tmp_path_factory):
    """Returns what tests/families.py answers for a family."""
    log = tmp_path_factory.mktemp("families") / "log"
    command = [sys.executable, str(PROJECT / "tests" / "families.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("w")}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as server:

        def circle(name):
            print(name, file=server.stdin, flush=True)
            answer = json.loads(server.stdout.readline())
            assert "failed" not in answer, log.read_text()[-3000:]
            return answer

        yield circle
        server.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_engine_and_trainer_agree_before_and_after_training(circle, name):
    answer = circle(name)
    assert "refused" not in answer
    assert answer["largest"] <= 2e-5
    assert answer["moved"] > 1e-3
    assert answer["attention only"] == (name in ATTENTION_ONLY)
