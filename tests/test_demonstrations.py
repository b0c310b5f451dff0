"""tools/demonstrations.py: episodes of the scripted expert as a run that can be imitated."""

import asyncio

import pytest

from env import Env
from flatlab.files import read_mapping, read_rows
from flatlab.train import imitation
from helpers import AGENT_TEXTS, LOCAL, PROJECT, FakePolicy, play_once, python
from tasks import load_task

pytestmark = pytest.mark.slow  # nobody needs the tool to run or to test


def test_transcripts_are_scored_can_be_imitated_and_have_the_texts_of_an_episode(tmp_path):
    tool = PROJECT / "tools/demonstrations.py"
    done = python(tool, "--episodes", 12, "--backend", LOCAL, cwd=tmp_path)
    folder = tmp_path / done.stdout.strip()
    episodes = read_rows(folder / "episodes/000000.jsonl")
    assert len(episodes) == 12
    scores = [e["score"]["value"] for e in episodes if e["score"]["valid"]]
    assert min(scores) < 1.0 < max(scores)
    task = load_task("battleOfSexes", "", "")
    best = imitation.best_episodes([str(folder)], [task], 1.0)
    assert best
    assert all(e["score"]["value"] > task.baseline for e in best)
    turns = read_mapping(PROJECT / "configs/grpo-cpu.yaml")["max_turns"]
    options = {"max_turns": turns, "prompts": AGENT_TEXTS}
    played = asyncio.run(play_once(Env(task, LOCAL), FakePolicy("hm"), **options))
    read = {(e["system"], e["prompt"], e["turns"][0]["note"]) for e in episodes}
    assert read == {(played.system, played.prompt, played.turns[0]["note"])}
