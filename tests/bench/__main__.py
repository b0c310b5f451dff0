"""Measures what the design promises; `--write` also puts the table into tests/BENCHMARKS.md.

    python tests/bench all         the sections in order, until --budget minutes are spent; a second
                                   call goes on; each writes its table into tests/BENCHMARKS.md
    python tests/bench env         sandboxes: steps, resets, copies, gradings, many episodes;
                                   MLGym's own shell too if $MLGYM_ROOT is a checkout
    python tests/bench soak        1,000 episodes in a row: memory, threads, files, containers
    python tests/bench train       a GRPO step of single replies beside TRL's (pip install trl)
    python tests/bench agent       agents of several turns beside TRL's (pip install trl)
    python tests/bench ahead       steps that play while one is learned, with waits of all kinds
    python tests/bench growth      own work of searches and trainings, by the length of the run
    python tests/bench engine      tokens per second of the engine with an adapter, three ways
    python tests/bench gpu         experiments on a GPU, for one that is lent; small on a CPU
    python tests/bench sync        the trained adapter into the running engine, two ways
    python tests/bench learning    the stand-in by grpo.py as it is, on two tasks; half an hour
    python tests/bench objectives  losses and advantages on the built-in tasks; an hour
    python tests/bench pretrained  SmolLM2 imitates, then GRPO, on two tasks; an hour
    python tests/bench real-agent  a coder of 1.5B through an endpoint (needs node); two hours
    python tests/bench learned-search  searches that learn against frozen ones; two hours
    python tests/bench search      modes and rules of search.py at equal tokens; an hour
    python tests/bench start       seconds from a command to its first line and its first step
    python tests/bench mutants     small faults in files where errors are silent, against the tests
    python tests/bench table       runs the tests of attacks and faults, writes tests/ATTACKS.md

A section is a function in SECTIONS that returns (headline, rows); a row is (what, value, note).
"""

import argparse
import os
import re
import sys
from datetime import date
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS.parent), str(TESTS)]

from bench.campaign import PLAN, commit_of_code  # noqa: E402

SECTIONS = {
    "all": "bench.campaign.all_sections",
    "env": "bench.sandboxes.env",
    "soak": "bench.sandboxes.soak",
    "train": "bench.agent.train",
    "agent": "bench.agent.agent",
    "ahead": "bench.agent.ahead",
    "growth": "bench.growth.growth",
    "engine": "bench.engine.engine",
    "gpu": "bench.gpu.gpu",
    "sync": "bench.models.sync",
    "learning": "bench.learning.learning",
    "objectives": "bench.learning.objectives",
    "pretrained": "bench.learning.pretrained",
    "real-agent": "bench.real_agent.real_agent",
    "learned-search": "bench.learned_search.learned_search",
    "search": "bench.search.search",
    "start": "bench.start.start",
    "mutants": "bench.mutants.mutants",
    "table": "marked.marked",
}


def write(section, command, headline, lines):
    """Replaces the table of the section in tests/BENCHMARKS.md, and what is above it, or adds the
    section. What was written below the table stays.
    """
    path = TESTS / "BENCHMARKS.md"
    text = path.read_text(encoding="utf-8")
    title = f"\n## {section}\n"
    about = f"`{command}`, {date.today()}, {headline}"
    if section in PLAN:
        about += f"\nCode at {commit_of_code()}: `{PLAN[section][1]}`"
    before, _, rest = text.partition(title)
    old, mark, after = rest.partition("\n## ")
    *_, below = re.split(r"^(?:\|.*\n)+", old, maxsplit=1, flags=re.MULTILINE)
    body = "\n".join([about, "", *lines])
    path.write_text(f"{before}{title}\n{body}\n{below}{mark}{after}", encoding="utf-8")


def main():
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python tests/bench", description=__doc__, formatter_class=form
    )
    add = parser.add_argument
    runs = "for learning, objectives, pretrained, learned-search and search:"
    add("section", choices=SECTIONS)
    add("--write", action="store_true", help="write the table into tests/BENCHMARKS.md")
    add("--backend", default="auto", help="for soak")
    add(
        "--count",
        type=int,
        default=1000,
        help="for soak: episodes; for growth: nodes and steps; for mutants: mutants",
    )
    add("--steps", type=int, default=5, help="for train, engine, agent, objectives and start")
    add("--seeds", default="0,1,2", help=f"{runs} comma-separated seeds")
    model = "not for pretrained; train, agent: instead of a random one"
    add("--model", default="tiny", help=model)
    add("--jobs", type=int, default=1, help=f"{runs} number of runs at a time")
    also = "also for train, agent, engine and growth; for mutants: files"
    add("--only", default="", help=f"{runs} comma-separated variants; {also}")
    add("--waits", default="", help="for agent and ahead: comma-separated kinds of waits")
    add("--budget", type=float, default=60, help="for all: minutes")
    first = "for real-agent:"
    add("--episodes", type=int, default=12, help=f"{first} episodes of a task")
    add("--reply-tokens", type=int, default=500, help=f"{first} most tokens of a reply")
    add("--gpu", action="store_true", help="for agent: the size of a step on a GPU")
    add("--flags", default="", help=f"{runs} more flags of the script")
    args = parser.parse_args()

    if args.gpu:
        os.environ["BENCH_GPU"] = "1"
    if args.section not in ("all", "env"):  # titanic is the built-in one, not that of a checkout
        os.environ.pop("MLGYM_ROOT", None)
        os.environ.pop("MLEDOJO_ROOT", None)

    from flatlab import threads

    threads.configure()
    module, _, function = SECTIONS[args.section].rpartition(".")
    headline, rows = getattr(import_module(module), function)(args)
    lines = ["| what | measured | note |", "|---|---|---|"]
    for row in rows:
        lines.append(f"| {' | '.join(map(str, row))} |")
    print(f"{args.section}: {headline}")
    print("\n".join(lines))
    if args.write:
        write(args.section, "python tests/bench " + " ".join(sys.argv[1:]), headline, lines)


if __name__ == "__main__":
    main()
