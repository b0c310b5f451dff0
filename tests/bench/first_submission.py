"""The sections `first-submission` and `partial-credit`: a pretrained model before anything was
imitated.

Episodes and runs are in logs/ of this folder; finished ones are read and not repeated.
"""

import asyncio
import json
import statistics
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from bench.learning import row_of_run, trained
from bench.measure import PROJECT
from bench.models import coder
from flatlab.world.blocks import find_blocks, without_thought
from flatlab.world.episode import act_bash, act_command, play, run_episode

TASKS = ("titanic", "battleOfSexes")
FIRST_SEED = -(10**13)  # no training and no evaluation plays these episodes
PROMPTS = PROJECT / "configs/prompts/agent.yaml"
BLOCK = """\
  ```bash
  ls -l
  ```
"""
# An example of another task, so that it shows the form and no answer.
PROGRAM = """\
  import csv
  with open('prices.csv', 'w') as out:
      print('name,price', file=out)
      for row in csv.DictReader(open('data/new.csv')):
          print(row['name'], 2 if row['size'] == 'large' else 1, sep=',', file=out)
"""
AS_BASH = f"  ```bash\n  cat > solve.py <<'EOF'\n{PROGRAM}  EOF\n  python3 solve.py\n  ```\n"
AS_PYTHON = f"  ```python\n{PROGRAM}  ```\n"


def act_program(env, reply, timeout):
    """act_bash, but a reply whose one block is marked python is run as a program."""
    try:
        blocks = find_blocks(without_thought(reply))
    except ValueError:  # act_bash says why
        blocks = []
    if [block.language for block in blocks] == ["python"] and blocks[0].is_closed:
        return act_command(env, f"python3 - <<'PROGRAM'\n{blocks[0].text}\nPROGRAM", timeout)
    return act_bash(env, reply, timeout)


# Name of a variant -> (the block in the system message, how replies are run)
VARIANTS = {
    "as shipped": (BLOCK, act_bash),
    "an example in the prompt": (AS_BASH, act_bash),
    "a python block is run": (BLOCK, act_program),
    "both": (AS_PYTHON, act_program),
}


def first_submission(args):
    """The share of valid episodes without demonstrations, by task and variant."""
    from flatlab.model.path import resolve_model
    from flatlab.options import ModelOptions
    from policy import Policy

    model = pretrained_model(args.model)
    policy = None
    rows = []
    for task in TASKS:
        for variant in VARIANTS:
            if args.only and variant not in args.only.split(","):
                continue
            file = Path("logs", f"first-submission-{args.model}-{args.seeds}", f"{task}-{variant}.jsonl")
            if not file.exists():
                options = ModelOptions(context=2048, temperature=0.7)
                policy = policy or Policy(resolve_model(model), options, trains=False)
                episodes = asyncio.run(play_all(policy, task, variant, args))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("".join(json.dumps(e.to_dict()) + "\n" for e in episodes))
            played = [json.loads(line) for line in file.read_text().splitlines()]
            rows.append((f"{task}, {variant}", *described(played)))
    return f"{args.model}, {args.count} episodes of {TURNS} turns of {REPLY_TOKENS} tokens", rows


TURNS = 3
REPLY_TOKENS = 300


async def play_all(policy, name, variant, args):
    """args.count episodes of a variant, all in flight at once; faults are left out."""
    import env
    from flatlab.options import EpisodeOptions
    from tasks import load_task

    block, act = VARIANTS[variant]
    prompts = Path("logs", f"prompts-{list(VARIANTS).index(variant)}.yaml")
    prompts.parent.mkdir(exist_ok=True)
    text = PROMPTS.read_text()
    assert BLOCK in text
    prompts.write_text(text.replace(BLOCK, block))
    options = EpisodeOptions(TURNS, REPLY_TOKENS, 256, prompts=str(prompts))
    task = load_task(name)

    async def one(number):
        seed = FIRST_SEED * (1 + int(args.seeds)) + number
        async with env.Env(task, "local", seed) as world:
            return await run_episode(world, policy, options, seed, play=partial(play, act=act))

    episodes = await asyncio.gather(*map(one, range(args.count)))
    return [episode for episode in episodes if episode.score]


def described(episodes):
    """Share of the valid episodes with its standard error, and what became of the replies."""
    valid = [float(e["score"]["valid"]) for e in episodes]
    error = statistics.stdev(valid) / len(valid) ** 0.5
    turns = [turn for e in episodes for turn in e["turns"]]
    ends = Counter(turn["status"] for turn in turns)
    ended = ", ".join(f"{count / len(turns):.0%} {name}" for name, count in ends.most_common())
    return f"{sum(valid):.0f} of {len(valid)} ({statistics.mean(valid):.0%} ± {error:.0%})", ended
