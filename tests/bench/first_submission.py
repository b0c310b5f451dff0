"""The section `first-submission`: what gives a pretrained model its first valid submission, when it
has imitated nothing.

Episodes are in logs/ of this folder; those that were played are read and not repeated.
"""

import asyncio
import json
import statistics
from collections import Counter
from functools import partial
from pathlib import Path

from bench.learning import TASKS
from bench.measure import PROJECT
from bench.models import PRETRAINED

FIRST_SEED = -(10**13)  # no training and no evaluation plays these episodes
TURNS = 3
IN_FLIGHT = 64
BLOCK = """\
  ```bash
  ls -l
  ```
"""
# An example of another task: it shows the form and answers nothing.
PROGRAM = """\
  import csv
  with open('prices.csv', 'w') as out:
      print('name,price', file=out)
      for row in csv.DictReader(open('data/new.csv')):
          print(row['name'], 2 if row['size'] == 'large' else 1, sep=',', file=out)
"""
AS_BASH = f"  ```bash\n  cat > solve.py <<'EOF'\n{PROGRAM}  EOF\n  python3 solve.py\n  ```\n"
AS_PYTHON = f"  ```python\n{PROGRAM}  ```\n"
AFTER_TOLD = "  A block with only the word validate"
TOLD = f"""\
  {{{{ artefact }}}} is not there yet: write a program that makes it, and run it in the same block.

{AFTER_TOLD}"""
# Name of a variant -> (changes of the system message, whether a block marked python is run)
VARIANTS = {
    "as shipped": ({}, False),
    "example": ({BLOCK: AS_BASH}, False),
    "python": ({}, True),
    "example and python": ({BLOCK: AS_PYTHON}, True),
    "told": ({AFTER_TOLD: TOLD}, False),
    "all three": ({AFTER_TOLD: TOLD, BLOCK: AS_PYTHON}, True),
}


def first_submission(args):
    """A row per task and variant, or those of --only. --model: smollm2, coder, or any other."""
    size = f"{args.episodes}x{args.reply_tokens}"
    folder = Path("logs", f"first-submission-{args.model}-{args.seeds}-{size}")
    folder.mkdir(parents=True, exist_ok=True)
    only = args.only.split(",") if args.only else []
    unknown = {*only} - {*TASKS, *VARIANTS}
    if unknown:
        raise SystemExit(f"--only has neither tasks nor variants: {', '.join(unknown)}")
    wanted = {}
    for task in [name for name in only if name in TASKS] or TASKS:
        for variant in [name for name in only if name in VARIANTS] or VARIANTS:
            wanted[task, variant] = folder / f"{task}, {variant}.jsonl"
    missing = {key: file for key, file in wanted.items() if not file.exists()}
    if missing:
        policy = open_policy(args.model)
        asyncio.run(play_all(policy, missing, args))
    rows = []
    for (task, variant), file in wanted.items():
        episodes = [json.loads(line) for line in file.read_text().splitlines()]
        rows.append((f"{task}, {variant}", *described(episodes)))
    return f"{args.model}, at most {TURNS} replies of {args.reply_tokens} tokens", rows


def open_policy(name):
    from flatlab.model.path import resolve_model
    from flatlab.options import ModelOptions
    from policy import Policy

    path = PRETRAINED[name]() if name in PRETRAINED else name
    options = ModelOptions(context=3072, temperature=0.7)
    return Policy(resolve_model(str(path)), options, max_batch=IN_FLIGHT, trains=False)


async def play_all(policy, missing, args):
    """A file is written when all episodes of its variant have ended."""
    slots = asyncio.Semaphore(IN_FLIGHT)
    jobs = [play_variant(policy, slots, *key, file, args) for key, file in missing.items()]
    await asyncio.gather(*jobs)


async def play_variant(policy, slots, name, variant, file, args):
    """Episodes whose sandbox broke are left out."""
    import env
    from flatlab.options import EpisodeOptions
    from flatlab.runs.store import json_line
    from flatlab.world.actions import act_bash
    from flatlab.world.episode import play, run_episode
    from tasks import load_task

    changes, runs_python = VARIANTS[variant]
    text = Path(PROJECT, "configs/prompts/agent.yaml").read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    prompts = file.with_suffix(".yaml")
    prompts.write_text(text)
    options = EpisodeOptions(TURNS, args.reply_tokens, 128, prompts=str(prompts))
    loop = partial(play, act=act_program if runs_python else act_bash)
    task = load_task(name)

    seeds = [
        FIRST_SEED * (1 + int(seed)) + number
        for seed in args.seeds.split(",")
        for number in range(args.episodes)
    ]

    async def one(seed):
        async with slots, env.Env(task, "local", seed) as world:
            return await run_episode(world, policy, options, play=loop)

    episodes = await asyncio.gather(*map(one, seeds))
    played = [episode for episode in episodes if episode.status != "fault"]
    file.write_text("".join(json_line(e.row() | e.transcript()) for e in played))


def act_program(env, reply, timeout):
    """act_bash, but a block marked python that is alone in its reply is run as a program."""
    from flatlab.world.actions import act_bash, act_command
    from flatlab.world.blocks import find_blocks, without_thought

    try:
        blocks = find_blocks(without_thought(reply))
    except ValueError:  # act_bash says why
        blocks = []
    if [block.language for block in blocks] == ["python"] and blocks[0].is_closed:
        return act_command(env, f"python3 - <<'PROGRAM'\n{blocks[0].text}\nPROGRAM", timeout)
    return act_bash(env, reply, timeout)


def described(episodes):
    """The share of valid episodes with its standard error, and what became of the replies."""
    valid = [float(e["outcome"] == "valid") for e in episodes]
    error = statistics.stdev(valid) / len(valid) ** 0.5
    turns = [turn for e in episodes for turn in e["turns"]]
    ends = Counter(kind(turn) for turn in turns)
    note = ", ".join(f"{count / len(turns):.0%} {name}" for name, count in ends.most_common(6))
    share = f"{statistics.mean(valid):.0%} ± {error:.0%} of {len(valid)} valid"
    return share, f"replies: {note}"


# Beginning of the sentence that an agent reads -> the kind of reply
REJECTED = {
    "The block is marked": "other language",
    "There is no": "no block",
    "There are": "several blocks",
    "The ``` block is not closed": "not closed",
    "The block is empty": "empty",
}


def kind(turn):
    """Status of a turn; for a rejected one the reason."""
    sentence = turn["observation"].removeprefix("Nothing was run. ")
    for begins, name in REJECTED.items():
        if turn["status"] == "rejected" and sentence.startswith(begins):
            return name
    return turn["status"]
