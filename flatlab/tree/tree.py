"""The tree of a search: its nodes, what it has spent, and how all of that is rebuilt from journal.jsonl.

A journal row is one finished Node. Rows are appended and flushed when the node ends and never change: a run that was
killed loses the nodes that were running, and nothing else. Files that a node left are in nodes/ beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import tarfile
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, stdev

from flatlab.episode.task import Task, improvement
from flatlab.errors import UserError
from flatlab.sandbox.sandbox import readable
from flatlab.tree import prompts

CODE = {
    ".py",
    ".sh",
    ".r",
    ".R",
    ".jl",
    ".c",
    ".cpp",
    ".yaml",
    ".yml",
    ".toml",
}  # files whose text goes to the journal


@dataclass
class Node:
    """One attempt, and a row of journal.jsonl. status "" means: still running."""

    id: str  # lineage: "0.2.1" is the second child of the third child of the root "0"
    parent: str = ""
    second: str | None = None  # the other parent of a crossover
    order: int = -1  # of starts; rows are in the order of completion
    op: str = ""  # draft | improve | debug | crossover
    sampling_mode: str = "none"  # how the idea was really asked for; none: without a request
    idea: str = ""
    probability: float | None = None
    above_tau: bool = False  # the stated probability is above --tau although tail was asked for
    ideas: list = field(
        default_factory=list
    )  # all (text, probability) of the call that this idea comes from
    score: float | None = None  # on the validation part
    improvement: float | None = None  # improvement(score, task); None: failed
    valid: bool = False
    status: str = ""  # of the episode, or validated, stopped; fault: the sandbox broke twice
    error: str = ""
    code: dict = field(default_factory=dict)  # text files that it left
    diff: str = ""  # to the parent's
    actions: list = field(default_factory=list)
    seconds: float = 0.0
    elapsed: float = 0.0  # of the whole tree when this ended
    tokens: int = 0  # sampled
    prompt_tokens: int = 0
    seed: int = 0
    attempts: int = 0
    kept: bool = False  # its files are in nodes/<order>.tar
    decision: dict = field(
        default_factory=dict
    )  # rule, scores of all candidates, explore or exploit, reason
    time: float = 0.0

    @property
    def depth(self) -> int:
        return self.id.count(".")


@dataclass
class Choice:
    """What a selection rule decides; `notes` go to the journal as they are."""

    parent: str
    phase: str = ""  # "explore", "exploit" or "" (the rule does not tell them apart)
    reason: str = ""
    scores: dict = field(default_factory=dict)  # of all candidates
    second: str | None = None
    idea: str = ""  # when the rule itself brings one
    notes: dict = field(default_factory=dict)
    tokens: int = 0  # that deciding cost
    prompt_tokens: int = 0


def stable(*parts) -> int:
    """A 31-bit seed from anything printable, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


class Tree:
    """All nodes of one (task, mode, seed), those in flight included. Everything here is rebuilt from the journal."""

    def __init__(self, task: Task, sampling_mode: str, seed: int, cfg: Config, run):
        self.task, self.sampling_mode, self.seed, self.cfg, self.run, self.policy = (
            task,
            sampling_mode,
            seed,
            cfg,
            run,
            None,
        )
        self.nodes = {
            "0": Node(
                "0",
                op="baseline",
                score=task.baseline,
                improvement=0.0,
                valid=True,
                status="baseline",
            )
        }
        self.finished: list[Node] = []  # in order of completion
        self.pending_ideas: dict[str, list | asyncio.Future] = {}  # ideas per call
        self.busy, self.waiting, self.closed, self.deciding = 0, False, False, asyncio.Lock()
        self.began, self.before = None, 0.0  # clock of this process, seconds of earlier ones
        for row in run.rows("journal.jsonl"):
            node = node_of(row, run)
            self.nodes[node.id], self.before = node, node.elapsed
            self.finished.append(node)
            if node.ideas:
                self.pending_ideas[self.call_of(node)] = node.ideas

    def start(self, choice: Choice) -> Node:
        """Makes the node in flight; from now on the rules see it."""
        number = next(i for i in itertools.count() if f"{choice.parent}.{i}" not in self.nodes)
        base = self.nearest_kept(choice.parent)
        op = (
            "crossover"
            if choice.second
            else "draft"
            if base.id == "0"
            else "improve"
            if base.valid
            else "debug"
        )
        node = Node(
            f"{choice.parent}.{number}",
            choice.parent,
            choice.second,
            self.started(),
            op,
            idea=choice.idea,
            tokens=choice.tokens,
            prompt_tokens=choice.prompt_tokens,
        )
        node.seed = stable(self.seed, node.id)
        node.decision = {
            "rule": self.cfg.select,
            "phase": choice.phase,
            "scores": choice.scores,
            "reason": choice.reason,
        } | choice.notes
        self.nodes[node.id] = node
        return node

    def call_of(self, node) -> str:
        """bfs asks once for all children of a node; the other rules ask for each, knowing the earlier ones."""
        return node.parent if self.cfg.select == "bfs" else node.id

    def started(self) -> int:
        return max(node.order for node in self.nodes.values()) + 1

    def executed(self) -> int:
        return len(self.nodes) - 1

    def children(self, id: str) -> list[Node]:
        return [node for node in self.nodes.values() if node.parent == id]

    def running(self) -> bool:
        return len(self.finished) < self.executed()

    def scored(self) -> list[Node]:
        """Valid nodes without the root, in order of completion."""
        return [node for node in self.finished if node.valid]

    def path(self, id: str) -> list[Node]:
        parts = id.split(".")
        return [self.nodes[".".join(parts[: i + 1])] for i in range(len(parts))]

    def nearest_kept(self, id: str) -> Node:
        """The node whose files the children of `id` get: itself, or where its sandbox broke, the next one above."""
        return next(node for node in reversed(self.path(id)) if node.kept or node.id == "0")

    def files_of(self, node: Node) -> bytes:
        path = self.tar_of(node)
        if not path.is_file():
            raise UserError(
                f"{path} is missing: it holds the files of node {node.id}, which the search builds on."
            )
        return path.read_bytes()

    def tar_of(self, node: Node):
        return (
            self.run.dir / "nodes" / f"{node.order:06d}.tar"
        )  # an id may be longer than names of files

    def failures(self, node: Node) -> int:
        """Failed nodes in a row that end with this one."""
        return len(list(itertools.takewhile(lambda n: not n.valid, reversed(self.path(node.id)))))

    def best(self) -> Node:
        return max(
            [self.nodes["0"], *self.scored()], key=lambda node: node.improvement
        )  # ties: the earlier one

    def tokens(self) -> int:
        return sum(node.tokens for node in self.nodes.values())

    def elapsed(self) -> float:
        return self.before + (0.0 if self.began is None else time.monotonic() - self.began)

    def spent(self) -> str:
        """The budget that is used up; "" while none is."""
        cfg, best = self.cfg, self.best()
        without = len(self.finished) - (self.finished.index(best) + 1 if best.id != "0" else 0)
        reached = {
            "nodes": self.executed() >= cfg.nodes,
            "tokens": 0 < cfg.tokens <= self.tokens(),
            "minutes": 0 < 60 * cfg.minutes <= self.elapsed(),
            "patience": 0 < cfg.patience <= without,
            "target": cfg.target is not None
            and best.improvement >= improvement(cfg.target, self.task),
        }
        return next((name for name, used_up in reached.items() if used_up), "")


def node_of(row: dict, run) -> Node:
    """The node of a journal row. Raises UserError for a row that another version wrote."""
    values = {key: value for key, value in row.items() if key != "depth"}
    unknown = sorted(set(values) - {f.name for f in fields(Node)})
    if unknown:
        raise UserError(
            f"{run.dir / 'journal.jsonl'} was written by another version of search.py "
            f"(it holds {', '.join(unknown)}): choose another --name."
        )
    return Node(**values)


def code_in(files: bytes, task: Task) -> dict[str, str]:
    """The programs in a tar of a workspace, but not the task's own; read here, never unpacked."""
    code = {}
    with tarfile.open(fileobj=io.BytesIO(files)) if files else contextlib.nullcontext([]) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if (
                member.isreg()
                and Path(name).suffix in CODE
                and member.size <= 50_000
                and len(code) < 10
            ):
                text = tar.extractfile(member).read()
                if name not in task.public or text != task.public[name].read_bytes():
                    code[readable(name)] = text.decode(errors="replace")
    return code


def results(t: Tree) -> dict:
    """What result.json says, at any moment."""
    best, done, counted = (
        t.best(),
        t.finished,
        [n.score if n.valid else t.task.baseline for n in t.finished if n.status != "fault"],
    )
    faults = sum(n.status == "fault" for n in done)
    prompt_tokens = sum(n.prompt_tokens for n in t.nodes.values())
    return {
        "task": t.task.name,
        "metric": t.task.metric,
        "higher_is_better": t.task.higher_is_better,
        "baseline": t.task.baseline,
        "reference": t.task.reference,
        "model": t.cfg.model,
        "sampling_mode": t.sampling_mode,
        "sampling_modes_used": dict(Counter(n.sampling_mode for n in done)),
        "above_tau": sum(n.above_tau for n in done),
        "fell_back": sum(bool(n.decision.get("fell_back")) for n in done),
        "select": t.cfg.select,
        "seed": t.seed,
        "nodes": len(done),
        "failed": sum(not n.valid for n in done) - faults,
        "faults": faults,
        "without_idea": sum(not n.idea and n.sampling_mode != "none" for n in done),
        "tokens": t.tokens(),
        "prompt_tokens": prompt_tokens,
        "dollars": (prompt_tokens * t.cfg.price[0] + t.tokens() * t.cfg.price[1]) / 1e6,
        "seconds": t.elapsed(),
        "stopped_by": t.spent(),
        "best_id": best.id,
        "best_score": best.score,
        "improvement": best.improvement,
        "best_path": [n.id for n in t.path(best.id)],
        "node_mean": fmean(counted) if counted else None,
        "node_stderr": stdev(counted) / len(counted) ** 0.5 if len(counted) > 1 else None,
        "valid_share": len(t.scored()) / len(counted) if counted else None,
        "selected_on_test": len(t.task.splits) == 1,
        "diversity": prompts.diversity(done),
    }
