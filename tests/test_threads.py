"""OpenMP threads: passive waiting, and no more threads than cores."""

import os

import pytest

from flatlab import threads
from helpers import python


def run_in_fresh_process(code):
    kept = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "LD_LIBRARY_PATH")  # no setting of a library's
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["HF_HUB_OFFLINE"] = "1"
    return python("-c", code, env=environment)


def test_torch_gets_no_more_threads_than_cores_are_ours_and_they_sleep_while_they_wait():
    one_core = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = f"{one_core}; from flatlab import threads; threads.configure(); import torch"
    done = run_in_fresh_process(
        f"{code}; print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    )
    assert done.stdout.split() == ["1", "PASSIVE"], done.stderr


def test_a_limit_holds_inside_and_ends_with_an_error():
    import torch

    before = torch.get_num_threads()
    with pytest.raises(ValueError), threads.at_most(1):
        assert torch.get_num_threads() == 1
        raise ValueError
    with threads.at_most(0), threads.at_most(before + 1):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
