"""Families of models: each one trains, or one sentence says why it does not."""

import json
import os
import re
import subprocess
import sys

import pytest

from families import FAMILIES
from helpers import PROJECT

ATTENTION_ONLY = {"Qwen 3 MoE", "Mixtral", "gpt-oss"}
TWO_COPIES = {"Gemma 2", "Gemma 3", "Gemma 4", "GPT-2", "GPT-NeoX", *ATTENTION_ONLY}
REFUSED = {
    "DeepSeek 3": "Engine and trainer disagree by .* on the probe with the random adapter",
    "Qwen 3 Next": "vLLM cannot run the model .*: Assertion failed, Chunked prefill is required",
}


@pytest.fixture(scope="module")
def circle(tmp_path_factory):
    """Returns what tests/families.py answers for a family."""
    log = tmp_path_factory.mktemp("families") / "log"
    command = [sys.executable, str(PROJECT / "tests" / "families.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log.open("w")}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as server:

        def circle(name, dtype="float32"):
            print(f"{dtype}, {name}", file=server.stdin, flush=True)
            answer = json.loads(server.stdout.readline())
            assert "failed" not in answer, log.read_text()[-3000:]
            return answer

        yield circle
        server.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_engine_and_trainer_agree_before_and_after_training(circle, name):
    """And with the base weights of the engine, where docs/models.md says that these are shared."""
    answer = circle(name)
    assert answer["largest"] <= 2e-5
    assert answer["moved"] > 0.01
    assert answer["attention only"] == (name in ATTENTION_ONLY)
    if name not in ATTENTION_ONLY:
        assert answer["without adapter"] in (["lm_head"], ["embed_out"])
    if name in TWO_COPIES:
        assert "not shared" in answer
    else:
        assert answer["shared"] <= 2e-5
        assert answer["copies"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen 3", "Llama 3", "OLMo 2", "Granite 3", "Gemma 2"])
def test_the_same_in_bf16_as_on_a_gpu(circle, name):
    """With autocast, a rounded copy of the adapter and logits in fp32."""
    answer = circle(name, "bfloat16")
    assert answer["mean"] <= 0.03
    assert answer["moved"] > 0.1
    if name not in TWO_COPIES:
        assert answer["shared"] <= 0.2
        assert answer["copies"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_does_not_work_is_refused_by_one_sentence(circle, name):
    assert re.match(REFUSED[name], circle(name)["refused"])
