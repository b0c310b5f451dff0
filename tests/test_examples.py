"""The files in examples/ run, shortened, from another folder than the project's."""

import re

import pytest

from helpers import PROJECT, python

SHORT = f"""
import runpy, asyncio
module = runpy.run_path({str(PROJECT / "examples/minimal.py")!r})
module["main"].__globals__.update(STEPS=2, GROUPS=2, GROUP_SIZE=4)
asyncio.run(module["main"]())
"""


@pytest.mark.slow
def test_minimal_trains_and_prints_a_line_for_each_step(tmp_path):
    done = python("-c", SHORT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1500:]
    steps = re.findall(r"^step +(\d+)  reward ([+-]\d\.\d\d)  loss", done.stdout, re.MULTILINE)
    assert [number for number, _ in steps] == ["0", "1"]
    assert all(-1 <= float(reward) <= 1 for _, reward in steps)
