"""Plays the scripted expert and writes its transcripts as a run, which sft.py imitates.

    python tools/demonstrations.py --task battleOfSexes
    python sft.py --runs logs/demonstrations-battleOfSexes --task battleOfSexes --model FOLDER

A pretrained model of 135 million parameters submits nothing valid by itself, so there is nothing to
reinforce. Imitating a few of these episodes is its cold start. The expert is deliberately mediocre:
it writes good and bad solutions, makes mistakes, and repairs some (see expert.py). Its episodes are
played and scored like those of a model, in the same kind of sandbox and with the same texts: give
--max-turns and --prompts as for the training. The last line of the output is the run directory.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import env
from flatlab.errors import UserError
from flatlab.model.chat import Sample
from flatlab.options import Count, EpisodeOptions
from flatlab.runs.cli import one_sentence, parse_configs
from flatlab.runs.fingerprint import fingerprint
from flatlab.runs.store import open_run, run_directory
from flatlab.world.episode import Episode, run_episode
from tasks import load_task
from tools import expert


@dataclass(frozen=True)
class Config:
    task: tuple[str, ...] = ("battleOfSexes",)  # one or more of the tasks that the expert knows
    episodes: Count = 96  # of each task
    seed: int = 0  # of the expert's choices
    # replies per episode, as in configs/grpo-cpu.yaml; longer ones are redrawn
    max_turns: Count = 3
    prompts: str | None = None  # file of what the agent reads; default: configs/prompts/agent.yaml
    backend: Literal["auto", "docker", "local"] = "auto"  # auto: as grpo.py chooses for this model
    name: str | None = None  # run directory logs/<name>; default: demonstrations-<task>


def short_titanic_table() -> expert.Table:
    """Rules of one or two conditions; programs of about 80 tokens, which a small model can copy.

    Accuracy: nobody survives 0.68, first class 0.71, women 0.78.
    """
    rules = {
        "women": "r['sex'] == 'female'",
        "women outside third class": "r['sex'] == 'female' and r['class'] != '3rd'",
        "women of first class": "r['sex'] == 'female' and r['class'] == '1st'",
        "women of second class": "r['sex'] == 'female' and r['class'] == '2nd'",
        "first class": "r['class'] == '1st'",
        "second class": "r['class'] == '2nd'",
        "passengers": "r['class'] != 'crew'",
        "all but third class": "r['class'] != '3rd'",
    }
    return expert.Table(
        looks=("ls data", "head -n 3 data/train.csv"),
        solutions=tuple((1.0, words, short_program(rule)) for words, rule in rules.items()),
        mistakes=(
            (2, "r['id']", "r['ID']"),
            (2, "'id,survived'", "'id,label'"),
            (1, "import csv\n", ""),
            (1, "test.csv')):", "test.csv'))"),
            (1, "data/test.csv", "test.csv"),
        ),
    )


def short_program(rule: str) -> str:
    return f"""cat > solve.py <<'EOF'
import csv
print('id,survived')
for r in csv.DictReader(open('data/test.csv')):
    print(r['id'], int({rule}), sep=',')
EOF
python3 solve.py > submission.csv"""


def short_overlap_table() -> expert.Table:
    """Step functions of six heights, in tenths; commands of about 40 tokens.

    Overlap: flat 0.5, the best ones 0.393, a block 0.667.
    """
    heights = {
        "flat": "5, 5, 5, 5, 5, 5",
        "low hill": "4, 5, 6, 6, 5, 4",
        "hill": "2, 5, 8, 8, 5, 2",
        "high hill": "0, 5, 10, 10, 5, 0",
        "steep hill": "1, 4, 10, 10, 4, 1",
        "broad hill": "1, 6, 8, 8, 6, 1",
        "valley": "8, 5, 2, 2, 5, 8",
        "block": "0, 0, 10, 10, 10, 0",
    }
    solutions = []
    for words, numbers in heights.items():
        command = f'python3 -c "print([x * 10**8 for x in ({numbers})])" > solution.json'
        solutions.append((1.0, words, command))
    return expert.Table(
        looks=("ls", "cat data/sample_solution.json"),
        solutions=tuple(solutions),
        mistakes=(
            (2, "solution.json", "answer.json"),
            (1, "10**8", "10**7"),
            (1, "print(", "print"),
        ),
    )


AT_ONCE = 16  # episodes
TABLES = {
    "titanic": short_titanic_table,
    "battleOfSexes": expert.battle_table,
    "erdosOverlap": short_overlap_table,
}


class Script:
    """A policy that says the given replies in order. Its tokens are words and mean nothing."""

    context = 10**9

    def __init__(self, replies: list[str]):
        self.replies = iter(replies)

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())

    def render(self, messages: list[dict]) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def observation_tokens(self, text: str, ended: bool) -> list[int]:
        return self.encode(text)

    async def sample(self, tokens, max_tokens, seed=None) -> Sample:
        text = next(self.replies)
        said = self.encode(text)
        return Sample(said, [0.0] * len(said), text, "stop", 0)


def draw(world: expert.World, cfg: Config, number: int) -> list[str]:
    """The replies of an episode that ends in time."""
    rng = random.Random(f"{cfg.seed} {world.task.name} {number}")
    while True:
        talk = expert.solve(rng, world, "free")
        replies = [text for role, text in talk if role == "assistant"]
        if len(replies) <= cfg.max_turns:
            return replies


async def play(world: expert.World, cfg: Config, number: int) -> Episode:
    """One episode of the expert, replayed and scored in a sandbox of its own."""
    replies = await env.in_thread(draw, world, cfg, number)
    options = EpisodeOptions(
        10**9, max_turns=cfg.max_turns, max_reply_tokens=512, prompts=cfg.prompts
    )
    async with env.Env(world.task, world.backend, cfg.seed * 100_003 + number) as box:
        return await run_episode(box, Script(replies), options)


async def demonstrate(name: str, cfg: Config, backend: str) -> list[Episode]:
    """All episodes of one task; broken sandboxes are left out."""
    world = await env.in_thread(expert.World, load_task(name, "", ""), TABLES[name](), backend)
    slots = asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(number):
        nonlocal done
        async with slots:
            episode = await play(world, cfg, number)
        done += 1
        if done % 24 == 0:
            print(f"{name}: {done} of {cfg.episodes} episodes", file=sys.stderr, flush=True)
        return episode

    episodes = await asyncio.gather(*map(one, range(cfg.episodes)))
    return [episode for episode in episodes if episode.status != "fault"]


def describe(name: str, episodes: list[Episode]) -> str:
    task = load_task(name, "", "")
    valid = [e for e in episodes if e.valid]
    better = [e for e in valid if e.improvement > 0]
    mean = fmean(e.score for e in valid)
    return (
        f"{name}: {len(episodes)} episodes, {len(valid)} with a valid submission (mean score "
        f"{mean:.3f}), {len(better)} better than the baseline of {task.baseline:.3f}"
    )


def main() -> None:
    [cfg] = parse_configs(Config, sys.argv[1:])
    unknown = set(cfg.task) - set(TABLES)
    if unknown:
        known = " and ".join(TABLES)
        raise UserError(f"The expert knows {known}, not {', '.join(sorted(unknown))}.")
    name = cfg.name or f"demonstrations-{'+'.join(cfg.task)}"
    backend, _ = env.pick_backend(cfg.backend)
    tasks = [load_task(name) for name in cfg.task]
    run = open_run(
        run_directory(name),
        asdict(cfg),
        fingerprint(tasks),
        is_finished=lambda run: run.result.get("status") == "finished",
    )
    if not run.finished:
        played = []
        for name in cfg.task:
            episodes = asyncio.run(demonstrate(name, cfg, backend))
            played += episodes
            print(describe(name, episodes), file=sys.stderr, flush=True)
        for number, episode in enumerate(played):
            episode.id, episode.when = f"0/{number}", "0"
        run.save_episodes("0", played)
        run.update_result(status="finished", task=list(cfg.task))
    print(run.dir)


if __name__ == "__main__":
    one_sentence(main)
