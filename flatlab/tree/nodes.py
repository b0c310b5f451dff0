"""The tree of a search: its nodes, what it has spent, and how both are rebuilt from journal.jsonl.

A row of the journal is one finished Node. It is written once, when the node ends, and never
changed. A run that was killed loses the nodes that were running and nothing else. The files that a
node left are in nodes/ beside the journal.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import heapq
import io
import math
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from operator import itemgetter
from pathlib import Path

from flatlab.errors import UserError
from flatlab.sandbox.client import readable
from flatlab.task.definition import Task, improvement

DEBUG_DEPTH = 3  # failures in a row after which a branch is given up
SCORES = 20  # scores of candidates in a row of the journal, the highest ones: they may be thousands

# Files with these suffixes are copied into the journal as text: at most CODE_FILES of them, each of
# at most CODE_BYTES.
CODE = {".py", ".sh", ".r", ".R", ".jl", ".c", ".cpp", ".yaml", ".yml", ".toml"}
CODE_FILES = 10
CODE_BYTES = 50_000


@dataclass(slots=True)
class Node:
    """One attempt, and one row of journal.jsonl. A node with status "" is still running.

    Once it has ended, `ideas`, `grader_output`, `diff`, `actions` and the scores in `decision` are
    in the journal only.
    """

    id: str  # lineage: "0.2.1" is the second child of the third child of the root "0"
    parent: str = ""
    second: str | None = None  # the other parent of a crossover
    order: int = -1  # number of nodes started before; the journal is in order of completion
    op: str = ""  # baseline (the root), or a key of OPERATORS in search.py
    mark: str = "*"  # its marker in pictures
    sampling_mode: str = "none"  # how this node's strategy was asked for
    idea: str = ""  # its strategy
    probability: float | None = None  # as the model stated it
    ideas: list = field(default_factory=list)  # all (strategy, probability) of the same request
    score: float | None = None  # on the validation part
    stderr: float | None = None  # its standard error, if the grader gives one
    improvement: float | None = None  # see flatlab.task.definition.improvement; None: failed
    valid: bool = False
    status: str = ""  # of the episode, or validated, stopped; fault: the sandbox broke twice
    error: str = ""
    grader_output: str = ""  # see Score; no prompt may hold it
    code: dict = field(default_factory=dict)  # file name -> text
    diff: str = ""  # of the code, against the parent's
    actions: list = field(default_factory=list)  # the turns of the episode
    seconds: float = 0.0
    elapsed: float = 0.0  # seconds of the whole search when this node ended
    tokens: int = 0  # sampled
    seed: int = 0
    kept: bool = False  # its files are in nodes/<order>.tar
    decision: dict = field(default_factory=dict)  # phase, scores of the candidates, reason
    made_by: int | None = None  # number of the code, see flatlab/runs/fingerprint.py

    # What add() and end() of a Tree keep of it; the journal does not hold these.
    children: list[Node] = field(default_factory=list, init=False)
    next_number: int = field(default=0, init=False)  # of the next child
    best_child: Node | None = field(default=None, init=False)  # among the valid ones
    # sums over the node and all nodes below it
    nodes_below: int = field(default=0, init=False)  # the running ones included
    scored_below: int = field(default=0, init=False)
    improvement_below: float = field(default=0.0, init=False)  # of the scored ones
    # number of steps i between scored nodes on the path from the root, sum of i times the rise of
    # the improvement in step i, and the last improvement
    rises: tuple = field(default=(0, 0.0, 0.0), init=False)

    def row(self) -> dict:
        """Its row of journal.jsonl."""
        return {column.name: getattr(self, column.name) for column in fields(self) if column.init}

    @property
    def depth(self) -> int:
        return self.id.count(".")


@dataclass
class Choice:
    """What a selection rule decides: the parent of the next node, and why."""

    parent: str
    phase: str = ""  # "explore", "exploit", or "" if the rule does not tell them apart
    reason: str = ""
    scores: dict = field(default_factory=dict)  # id -> score of each candidate
    second: str | None = None  # the other parent of a crossover
    idea: str = ""  # the strategy, if the rule provides one
    notes: dict = field(default_factory=dict)  # goes to the journal as it is
    tokens: int = 0  # sampled for this decision


def seed_from(*parts) -> int:
    """A 31-bit seed from printable values, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class RunningMean:
    """Mean and standard error of values that come one by one (Welford, Technometrics 1962)."""

    def __init__(self):
        self.n = 0
        self.mean = 0.0
        self.squares = 0.0  # sum of (value - mean)^2

    def add(self, value: float) -> None:
        difference = value - self.mean
        self.n += 1
        self.mean += difference / self.n
        self.squares += difference * (value - self.mean)

    def standard_error(self) -> float | None:
        """None below two values."""
        return math.sqrt(self.squares / (self.n - 1) / self.n) if self.n > 1 else None


class Tree:
    """All nodes of one task, sampling mode and seed, the running ones included.

    add() and end() keep what rules and result.json need of all nodes, so that nothing is counted
    again for each node.

    cfg: the Config of search.py. run: the open run directory; the tree is rebuilt from its journal.
    rule: the Rule that selects parents.
    """

    def __init__(self, task: Task, sampling_mode: str, seed: int, cfg, run, rule):
        self.task = task
        self.sampling_mode = sampling_mode
        self.seed = seed
        self.cfg = cfg
        self.run = run
        self.rule = rule
        self.constants = rule.constants(cfg.select, cfg.rule_args)
        self.policy = None
        self.facts = ""  # what requests tell about the sandboxes, in the full form of the texts
        self.root = Node(
            "0", op="baseline", score=task.baseline, improvement=0.0, valid=True, status="baseline"
        )
        self.nodes: dict[str, Node] = {}
        self.running: dict[str, Node] = {}
        self.finished: list[Node] = []  # without the root, in order of completion
        self.scored: list[Node] = []  # the valid ones among them
        self.kept: list[Node] = []  # the valid ones whose files are kept
        self.best_scored = self.root
        self.lowest = 0.0  # improvement, the root's included
        self.committed = self.root  # the last node that the rule committed itself to
        self.started = 0  # nodes, also those that a killed search has lost
        # those that may be debugged: their files are kept, they have no children and end at most
        # DEBUG_DEPTH failures in a row
        self.failed_leaves: dict[str, Node] = {}
        self.counts: Counter[str] = Counter()  # of finished nodes, for result.json
        self.modes: Counter[str] = Counter()  # the same by sampling mode
        self.mean = RunningMean()  # of the scores; failed nodes count as the baseline
        self.add(self.root)
        self.ideas: dict[str, list] = {}  # strategies by request, see request_of
        self.requests: dict[str, asyncio.Future] = {}  # the same while the model lists them
        self.node_ended = asyncio.Event()
        result = run.results()
        # node id -> part -> score, stderr and error on a part that the search does not see
        self.hidden_scores: dict[str, dict] = result.get("hidden_scores", {})
        self.began: float | None = None  # clock of this process
        self.seconds_before = 0.0  # of earlier processes
        for row in run.rows("journal.jsonl"):
            try:
                node = Node(**row)
            except TypeError as error:
                raise UserError(
                    f"{run.dir / 'journal.jsonl'} was written by another version of search.py "
                    f"({error}): choose another --name."
                ) from None
            self.seconds_before = node.elapsed
            if node.ideas:
                self.ideas[self.request_of(node)] = node.ideas
            self.add(node)
            self.end(node)
        if result.get("status") == "finished":  # with a larger budget it goes on
            self.seconds_before = result["seconds"]  # also those without a node, at the end
        self.closed = run.finished  # complete, and its best node is scored on the test part
        self.chosen = self.nodes.get(result["tested_id"]) if self.closed else None

    def start(self, choice: Choice, op: str, mark: str) -> Node:
        """Adds the node that was chosen; from now on the rules see it as running."""
        parent = self.nodes[choice.parent]
        # A search that was killed may have lost the nodes between others.
        while (id := f"{parent.id}.{parent.next_number}") in self.nodes:
            parent.next_number += 1
        decision = {
            "phase": choice.phase,
            "scores": dict(heapq.nlargest(SCORES, choice.scores.items(), key=itemgetter(1))),
            "reason": choice.reason,
        }
        node = Node(
            id,
            parent.id,
            choice.second,
            order=self.started,
            op=op,
            mark=mark,
            idea=choice.idea,
            tokens=choice.tokens,
            seed=seed_from(self.seed, id),
            decision=decision | choice.notes,
        )
        self.add(node)
        self.running[id] = node
        return node

    def add(self, node: Node) -> None:
        self.nodes[node.id] = node
        for above in self.upwards(node):
            above.nodes_below += 1
        self.started = max(self.started, node.order + 1)
        if "commit" in node.decision and node.order > self.committed.order:
            self.committed = node
        if node.parent:
            self.nodes[node.parent].children.append(node)
            self.failed_leaves.pop(node.parent, None)

    def end(self, node: Node) -> None:
        """Counts a node that has ended, and forgets what only the journal needs of it."""
        self.running.pop(node.id, None)
        self.finished.append(node)
        parent = self.nodes[node.parent]
        node.rises = parent.rises
        if node.valid:
            self.add_score(node, parent)
        elif node.kept and self.failures(node) <= DEBUG_DEPTH:
            self.failed_leaves[node.id] = node
        if node.status != "fault":
            self.mean.add(node.score if node.valid else self.task.baseline)
        is_above_tau = (node.probability or 0) > self.cfg.tau
        self.modes[node.sampling_mode] += 1
        self.counts["faults"] += node.status == "fault"
        self.counts["ungraded"] += bool(node.grader_output)
        self.counts["above_tau"] += node.sampling_mode == "tail" and is_above_tau
        self.counts["without_strategy"] += "asked" in node.decision
        self.counts["fell_back"] += bool(node.decision.get("fell_back"))
        self.counts["tokens"] += node.tokens
        self.ideas.pop(node.id, None)  # those that were listed for this node alone
        node.ideas = []
        node.actions = []
        node.grader_output = ""
        node.diff = ""
        node.decision.pop("scores", None)

    def add_score(self, node: Node, parent: Node) -> None:
        self.scored.append(node)
        if node.kept:
            self.kept.append(node)
        self.lowest = min(self.lowest, node.improvement)
        if node.improvement > self.best_scored.improvement:
            self.best_scored = node
        best = parent.best_child
        if best is None or node.improvement > best.improvement:
            parent.best_child = node
        steps, total, before = parent.rises
        total += (steps + 1) * (node.improvement - before)
        node.rises = (steps + 1, total, node.improvement)
        for above in self.upwards(node):
            above.scored_below += 1
            above.improvement_below += node.improvement

    def request_of(self, node: Node) -> str:
        """The key of the request for strategies that serves this node.

        A rule may ask once for all children of a node. Otherwise each child has a request of its
        own, which shows the model the earlier ones.
        """
        return node.parent if self.rule.asks_once else node.id

    def executed(self) -> int:
        """Finished and running nodes, without the root."""
        return len(self.nodes) - 1

    def upwards(self, node: Node) -> Iterator[Node]:
        """The node, its parent, and so on to the root."""
        while node is not self.root:
            yield node
            node = self.nodes[node.parent]
        yield node

    def nearest_kept(self, id: str) -> Node:
        """The node whose files the children of `id` start from.

        This is `id` itself, or the next one above it whose files were kept, or the root.
        """
        kept = (node for node in self.upwards(self.nodes[id]) if node.kept)
        return next(kept, self.root)

    def tar_of(self, node: Node) -> Path:
        """The file is named by order, because an id may be longer than a file name."""
        return self.run.dir / "nodes" / f"{node.order:06d}.tar"

    def files_of(self, node: Node) -> bytes:
        """Raises UserError if the file is gone."""
        path = self.tar_of(node)
        if not path.is_file():
            raise UserError(
                f"{path} is missing: the search builds on these files of node {node.id}."
            )
        return path.read_bytes()

    def failures(self, node: Node) -> int:
        """Number of failed nodes in a row that end with this one."""
        count = 0
        while not node.valid:
            count += 1
            node = self.nodes[node.parent]
        return count

    def best(self) -> Node:
        """The node that was chosen at the end; before that the best one by validation, the root
        included, and of equal ones the earliest."""
        return self.chosen or self.best_scored

    def test_reads(self) -> int:
        """How many nodes were scored on the test part; with more --nodes another may be chosen."""
        return sum(self.task.splits[-1] in parts for parts in self.hidden_scores.values())

    def tokens(self) -> int:
        return self.counts["tokens"] + sum(node.tokens for node in self.running.values())

    def elapsed(self) -> float:
        now = 0.0 if self.began is None else time.monotonic() - self.began
        return self.seconds_before + now

    def spent(self) -> str:
        return spent(self.cfg, self.executed(), self.tokens(), self.elapsed())


def spent(cfg, nodes: int, tokens: int, seconds: float) -> str:
    """The name of the budget that is used up; "" while none is."""
    for name, used in {"nodes": nodes, "tokens": tokens, "minutes": seconds / 60}.items():
        limit = getattr(cfg, name)
        if limit is not None and used >= limit:
            return name
    return ""


def code_in(files: bytes, task: Task) -> dict[str, str]:
    """The programs in a tar of a workspace, without the task's own. Nothing is unpacked to disk."""
    code = {}
    with tarfile.open(fileobj=io.BytesIO(files), mode="r:") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            is_code = member.isreg() and Path(name).suffix in CODE and not name.startswith("../")
            if not is_code or member.size > CODE_BYTES or len(code) >= CODE_FILES:
                continue
            text = tar.extractfile(member).read()
            if name not in task.public or text != task.public[name].read_bytes():
                code[readable(name)] = text.decode(errors="replace")
    return code


def difference(old: dict, new: dict) -> str:
    """A unified diff of the files in `new` against those of the same name in `old`."""
    lines = []
    for name, text in new.items():
        before = old.get(name, "").splitlines(keepends=True)
        lines += difflib.unified_diff(before, text.splitlines(keepends=True), name, name)
    return "".join(lines)


def results(t: Tree) -> dict:
    """The content of result.json, at any moment. Failed nodes count as the baseline.

    An evaluation has no best node, and its improvement is that of the mean.
    """
    best = t.best()
    nodes = len(t.finished)
    faults = t.counts["faults"]
    mean = t.mean.mean if t.mean.n else None
    summary = {
        "task": t.task.name,
        **t.task.scale,
        "sampling_mode": t.sampling_mode,
        "sampling_modes_used": dict(t.modes),
        "select": t.cfg.select,
        "seed": t.seed,
        "nodes": nodes,
        "failed": nodes - len(t.scored) - faults,
        "faults": faults,
        **{
            key: t.counts[key] for key in ("ungraded", "above_tau", "without_strategy", "fell_back")
        },
        "tokens": t.tokens(),
        "seconds": t.elapsed(),
        "stopped_by": t.spent(),
        "best_id": best.id,
        "best_score": best.score,
        "best_stderr": best.stderr,
        "improvement": best.improvement,
        "split": t.task.splits[0],
        "node_mean": mean,
        "node_stderr": t.mean.standard_error(),
        "valid_share": len(t.scored) / t.mean.n if t.mean.n else None,
        "selected_on_test": t.task.selected_on_test,
        "evaluation": t.rule.is_evaluation,
    }
    if t.rule.is_evaluation:
        summary |= dict.fromkeys(("best_id", "best_score", "best_stderr"))
        summary["improvement"] = None if mean is None else improvement(mean, t.task)
        summary["selected_on_test"] = False
    return summary | hidden_results(t)


def hidden_results(t: Tree) -> dict:
    """What result.json says about the chosen node on the parts that the search does not see: None
    before the end, for the root, and in an evaluation.
    """
    node = t.chosen
    parts = t.hidden_scores.get(node.id, {}) if node else {}
    selection = parts.get("selection", {})
    test = parts.get(t.task.splits[-1], {})
    difference = test["score"] - node.score if test else None
    error = test.get("error")
    if node and t.task.selected_on_test:
        test = {"score": node.score, "stderr": node.stderr}
    elif node and not node.kept and node is not t.root:
        error = "the files of the best node could not be kept"
    return {
        "tested_id": node.id if node else None,
        "selection_score": selection.get("score"),
        "selection_stderr": selection.get("stderr"),
        "test_score": test.get("score"),
        "test_stderr": test.get("stderr"),
        "test_minus_validation": difference,
        "test_error": error,
        "test_reads": t.test_reads(),
    }
