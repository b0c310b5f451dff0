"""tools/demonstrations.py: episodes of the scripted expert as a run that can be imitated."""

import asyncio
import json
import subprocess
import sys

import pytest

from env import Env
from flatlab.files import read_mapping
from flatlab.train import imitation
from helpers import AGENT_TEXTS, LOCAL, PROJECT, FakePolicy, play_once
from tasks import load_task

pytestmark = pytest.mark.slow  # nobody needs the tool to run or to test
TOOL = [sys.executable, str(PROJECT / "tools" / "demonstrations.py")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    where = tmp_path_factory.mktemp("demonstrations")
    command = [*TOOL, "--episodes", "12", "--backend", LOCAL]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=True)
    return where / done.stdout.strip(), done


def test_transcripts_are_played_scored_mixed_and_can_be_imitated(run):
    folder, done = run
    lines = (folder / "episodes" / "000000.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert len(episodes) == 12
    assert all(e["task"] == "battleOfSexes" and e["status"] == "submit" for e in episodes)
    scores = [e["score"]["value"] for e in episodes if e["score"]["valid"]]
    assert min(scores) < 1.0 < max(scores)
    assert len(scores) < len(episodes)
    best = imitation.best_episodes([str(folder)], [load_task("battleOfSexes")], 1.0)
    assert best
    assert all(e["score"]["value"] > 0.725 for e in best)
    assert "better than the baseline of 0.725" in done.stderr


def test_they_have_the_texts_that_a_model_reads(run):
    folder, _ = run
    recipe = read_mapping(PROJECT / "configs/grpo-cpu.yaml")
    options = {"max_turns": recipe["max_turns"], "prompts": AGENT_TEXTS}
    world = Env(load_task("battleOfSexes", "", ""), LOCAL)
    episode = asyncio.run(play_once(world, FakePolicy("hm"), **options))
    shown = [json.loads(line) for line in (folder / "episodes/000000.jsonl").open()]
    assert {e["system"] for e in shown} == {episode.system}
    assert {e["prompt"] for e in shown} == {episode.prompt}
    assert {e["turns"][0]["note"] for e in shown} == {episode.turns[0]["note"]}
    assert max(len(e["turns"]) for e in shown) == recipe["max_turns"]
