"""Groups that start from the nodes of a search instead of the bare task.

    python grpo.py --task titanic --start-from logs/search-titanic-tail-tiny-0

Such a group begins as a child of its node begins in the search: in the files that the node left,
without its artefact, and told what the search tells a child about the node and its strategy. All
episodes of a group begin alike, and what they score is only what they wrote themselves. Every other
group starts this way; the others, and all evaluations, start from the bare task.
"""

import random
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

from flatlab.episode.task import Task
from flatlab.errors import UserError
from flatlab.files import read_mapping
from flatlab.runs.reader import read_rows
from flatlab.tree.prompts import situation


@dataclass(frozen=True)
class Start:
    """A node of a search whose files were kept."""

    name: str  # directory of the search and id of the node
    task: str
    files: Path  # its tar
    improvement: float  # of the node over the task's baseline; -inf if it failed
    tries: int  # children in the search
    better: int  # of these, how many scored better than the node
    texts: list[str]  # what children are told after the task; a group that was drawn has one


def load(search: str | None, tasks: list[Task], limit: int) -> list[Start]:
    """The nodes of a search, or of the searches of a grid, that have one of the tasks.

    limit: characters of a node's code and error in a prompt. Raises UserError if there is none.
    """
    if search is None:
        return []
    names = [task.name for task in tasks]
    journals = sorted(Path(search).rglob("journal.jsonl"))
    starts = [start for path in journals for start in starts_of(path.parent, limit)]
    found = [start for start in starts if start.task in names]
    if not found:
        what = " or ".join(names)
        raise UserError(f"--start-from: {search} has no node of {what} with its files.")
    return found


def starts_of(search: Path, limit: int):
    """Yields a Start for each node of a search that has its files."""
    task = read_mapping(search / "config.yaml")["task"]
    nodes = [SimpleNamespace(**row) for row in read_rows(search / "journal.jsonl")]
    for node in nodes:
        files = search / "nodes" / f"{node.order:06d}.tar"
        if not (node.kept and files.is_file()):
            continue
        own = node.improvement if node.valid else -inf
        # A crossover had a second parent, and a fault says nothing.
        known = [child for child in nodes if child.status != "fault" and not child.second]
        children = [child for child in known if child.parent == node.id]
        better = sum(child.valid and child.improvement > own for child in children)
        texts = [situation(child, [node], limit) for child in children or expected(node)]
        yield Start(f"{search} {node.id}", task, files, own, len(children), better, texts)


def expected(node) -> list[SimpleNamespace]:
    """Children that a node could have: with the strategies that were listed beside its own, or to
    debug it.
    """
    if not node.valid:
        return [SimpleNamespace(op="debug", idea=node.idea, decision={})]
    ideas = [idea for idea, _ in node.ideas if idea != node.idea] or [""]
    return [SimpleNamespace(op="improve", idea=idea, decision={}) for idea in ideas]


def learnability(start: Start, rows: list[dict]) -> float:
    """How much a group from here can teach: the expected p (1 - p).

    p is the probability that an episode from here scores better than the node; any valid score is
    better than a failure. p (1 - p) is the variance of this event, the weight of sampling for
    learnability (arXiv 2502.12272; AceGRPO, 2602.07906, draws states of searches by a similar one):
    where all episodes succeed, or none, there is nothing to compare. s of n tries were better: of
    the children in the search and of the episodes in `rows`. From a uniform prior p has the
    posterior Beta(s + 1, n - s + 1), under which

        E[p (1 - p)] = (s + 1) (n - s + 1) / ((n + 2) (n + 3)).

    A node without tries has 1/6, more than 5/42 of one where four of four failed.
    """
    n, s = start.tries, start.better
    for row in rows:
        for group in row["starts"]:
            if group["start"] == start.name:
                n += group["episodes"]
                s += group["better"]
    return (s + 1) * (n - s + 1) / ((n + 2) * (n + 3))


def draw(
    pool: list[Start], planned: list[Task], seed: int, step: int, rows: list[dict]
) -> dict[int, Start]:
    """The starts of a step's groups by number, with one text each; the others start bare.

    Every other group starts from a node, drawn in proportion to its learnability. The halves swap
    with every step, so that an odd number of groups is shared out, too. The result depends on the
    arguments alone, so a resumed run plays the same groups.
    """
    drawn = {}
    for number, task in enumerate(planned):
        own = [start for start in pool if start.task == task.name]
        if own and (number + step) % 2:
            rng = random.Random(f"{seed} {step} start {number}")
            weights = [learnability(start, rows) for start in own]
            start = rng.choices(own, weights)[0]
            drawn[number] = replace(start, texts=[rng.choice(start.texts)])
    return drawn
