"""The tree of a search: its nodes, what it has spent, and how both are rebuilt from the disk.

A node is an episode with a parent. Its row of episodes.jsonl is written once, when the node ends;
learn.py adds what it learned from the node. A run that was killed loses the nodes that were running
and nothing else. The files that a node left are in nodes/.

A tree holds its nodes and nothing that can be computed from them: a node takes seconds, and to walk
through a thousand of them takes less than a millisecond.
"""

import asyncio
import hashlib
import io
import itertools
import math
import tarfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from flatlab.errors import UserError
from flatlab.files import usable, write_whole
from flatlab.runs.start import begin_run
from flatlab.runs.store import EPISODES, WAY_OUT, Run, transcript_reader
from flatlab.sandbox.client import readable
from flatlab.task.definition import Task
from flatlab.task.value import WORST
from flatlab.world.episode import Episode
from flatlab.world.prompts import load_prompts

DEBUG_DEPTH = 3  # attempts to debug a failed node; after one failure more its branch is given up
SCORES = 20  # scores of candidates in the row of a node, the highest ones: they may be thousands

# Files with these suffixes are copied into the transcript of a node: at most CODE_FILES of them,
# each of at most CODE_BYTES.
CODE = {".py", ".sh", ".r", ".R", ".jl", ".c", ".cpp", ".yaml", ".yml", ".toml"}
CODE_FILES = 10
CODE_BYTES = 50_000


@dataclass
class Node(Episode):
    """An episode with a parent. It counts once it has ended.

    id: lineage, "0.2.1" is the second child of the third child of the root "0". tokens: also those
    of requests for strategies. seconds: with the time of these requests.
    """

    parent: str = ""
    second_parent: str | None = None  # of a crossover
    order: int = -1  # number of nodes started before; rows are in order of completion
    op: str = ""  # a key of OPERATORS in search.py; baseline: the root
    mark: str = "*"  # its marker in pictures
    sampling_mode: str = "none"  # how this node's strategy was asked for
    idea: str = ""  # its strategy
    probability: float | None = None  # as the model stated it
    kept: bool = False  # its files are in nodes/<order>.tar
    decision: dict = field(default_factory=dict)  # phase, scores of the candidates, reason
    ideas: list = field(default_factory=list)  # all (strategy, probability) of the same request
    code: dict = field(default_factory=dict)  # file name -> text
    children: list = field(default_factory=list)  # Nodes, in order of their start
    ended: bool = False

    TEXTS = (*Episode.TEXTS, "ideas", "code")
    UNSAVED = (*Episode.UNSAVED, "children", "ended")

    @property
    def valid(self) -> bool:
        return self.ended and self.improvement is not None

    @property
    def depth(self) -> int:
        return self.id.count(".")

    @property
    def place(self) -> int:
        """Among the children of its parent, from 0."""
        return int(self.id.rpartition(".")[2])


@dataclass
class Choice:
    """Decision of a selection rule: the parent of the next node, and why."""

    parent: str
    phase: str = ""  # "explore", "exploit", or "" if the rule does not tell them apart
    reason: str = ""
    scores: dict = field(default_factory=dict)  # id -> score of each candidate
    second_parent: str | None = None  # of a crossover
    notes: dict = field(default_factory=dict)  # goes into the row of the node as it is


def seed_from(*parts) -> int:
    """A 31-bit seed from printable values, the same in every process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Tree:
    """All nodes of one task, sampling mode and seed, the running ones included.

    cfg: the Config of search.py. run: the open run directory; the tree is rebuilt from its rows.
    rule: the Rule that selects parents.
    """

    def __init__(self, task: Task, cfg, run, rule):
        self.task = task
        self.sampling_mode = cfg.sampling_mode
        self.seed = cfg.seed
        self.cfg = cfg
        self.run = run
        self.rule = rule
        self.constants = rule.constants(cfg)
        self.policy = None
        self.prompts = load_prompts(cfg.episode.prompts)
        self.machine = {}  # what requests tell about the sandboxes
        facts = {"score": task.baseline, "improvement": 0.0}
        self.root = Node(task.name, self.seed, "0", op="baseline", ended=True, **facts)
        self.nodes = {"0": self.root}
        self.finished: list[Node] = []  # without the root, in order of completion
        self.requests: dict[str, asyncio.Future] = {}  # strategies for the children of a node
        self.node_ended = asyncio.Event()
        result = run.result
        # node id -> part that the search does not see -> what judged() says, and the error
        self.hidden_scores: dict[str, dict] = result.get("hidden_scores", {})
        self.began: float | None = None  # clock of this process
        rows = run.rows(EPISODES)
        if len(rows) < result.get("nodes", 0):
            raise UserError(
                f"{run.dir / EPISODES} is damaged: it holds {len(rows)} nodes of "
                f"{result['nodes']}. {WAY_OUT}"
            )
        for row in rows:
            with usable(run.dir / EPISODES):
                node = stored_node(run.dir, row)
                self.add(node)
            self.finished.append(node)
        self.seconds_before = result.get("seconds", 0.0)  # of earlier processes
        self.closed = run.finished  # complete, and its best node is scored on the test part
        self.chosen = self.nodes.get(result["tested_id"]) if self.closed else None

    @property
    def running(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.ended]

    @property
    def scored(self) -> list[Node]:
        """The finished nodes with a valid score, in order of completion."""
        return [node for node in self.finished if node.valid]

    @property
    def kept(self) -> list[Node]:
        """The scored nodes whose files are kept."""
        return [node for node in self.scored if node.kept]

    @property
    def started(self) -> int:
        """Number of nodes that were started, also those that a killed search has lost."""
        return 1 + max(node.order for node in self.nodes.values())

    def start_node(self, choice: Choice, op: str, mark: str) -> Node:
        """Adds the node that was chosen; from now on the rules see it as running."""
        place = 0
        # A search that was killed may have lost the nodes between others.
        while (id := f"{choice.parent}.{place}") in self.nodes:
            place += 1
        decision = {
            "phase": choice.phase,
            "scores": dict(Counter(choice.scores).most_common(SCORES)),
            "reason": choice.reason,
        }
        node = Node(
            self.task.name,
            seed_from(self.seed, id),
            id,
            when=f"{self.started}",
            parent=choice.parent,
            second_parent=choice.second_parent,
            order=self.started,
            op=op,
            mark=mark,
            decision=decision | choice.notes,
        )
        self.add(node)
        return node

    def add(self, node: Node) -> None:
        self.nodes[node.id] = node
        self.nodes[node.parent].children.append(node)

    def keep(self, node: Node, files: bytes) -> dict[str, str]:
        """Writes a tar of the files that a node left; returns the programs in it.

        Runs beside the rules, so it changes nothing that they see.
        """
        write_whole(self.tar_of(node), files)
        return code_in(files, self.task)

    def record(self, node: Node) -> Node:
        """Ends a node and writes it to the disk. The tree keeps neither its turns nor its tokens; a
        copy that has them is returned.
        """
        node.ended = True
        if self.cfg.url:
            node.packed = b""  # tokens of an endpoint are not the model's
        self.run.save_episodes(node.when, [node])  # from here on it counts
        self.run.track(node.row())
        whole = replace(node)
        node.turns, node.segments, node.packed = [], [], b""
        self.finished.append(node)
        self.run.update_result(**result_json(self), status="running")
        return whole

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
        return next((n for n in self.upwards(self.nodes[id]) if n.kept), self.root)

    def tar_of(self, node: Node) -> Path:
        """The file is named by order, because an id may be longer than a file name."""
        return self.run.dir / "nodes" / f"{node.order:06d}.tar"

    def files_of(self, node: Node) -> bytes:
        """Raises UserError if the file is gone or damaged."""
        path = self.tar_of(node)
        files = path.read_bytes() if path.is_file() else b""
        if not files.endswith(b"}"):  # of the notes after the tar, see sandbox/snapshot.py
            raise UserError(
                f"{path} is missing or damaged: the search builds on these files of node {node.id}."
                f" {WAY_OUT}"
            )
        return files

    def given_up(self, node: Node) -> bool:
        """Returns whether more than DEBUG_DEPTH failed nodes in a row end with this one."""
        line = itertools.islice(self.upwards(node), DEBUG_DEPTH + 1)
        return not any(node.valid for node in line)

    def best(self) -> Node:
        """The node that was chosen at the end; before that the best valid one by validation, of
        equal ones the earliest; the root while no node is valid."""
        best = max(self.scored, key=lambda node: node.improvement, default=self.root)
        return self.chosen or best

    def test_scores(self, node: Node) -> dict:
        """The numbers of a node on the test part; {} if that was not scored. If the task has one
        part, it is that one.
        """
        if len(self.task.splits) == 1:
            return {"value": node.value} if node in self.scored else {}
        return self.hidden_scores.get(node.id, {}).get(self.task.splits[-1], {})

    def test_reads(self) -> int:
        """Number of nodes scored on the test part; with more --nodes another may be chosen."""
        return sum(self.task.splits[-1] in parts for parts in self.hidden_scores.values())

    def tokens(self) -> int:
        return sum(node.tokens for node in self.nodes.values())

    def elapsed(self) -> float:
        now = 0.0 if self.began is None else time.monotonic() - self.began
        return self.seconds_before + now

    def minutes_left(self) -> float:
        """Time limit of an episode, or of a request for strategies, that begins now."""
        left = math.inf if self.cfg.minutes is None else self.cfg.minutes - self.elapsed() / 60
        return min(self.cfg.episode.episode_minutes, max(1 / 60, left))

    def spent(self) -> str:
        return spent(self.cfg, self.executed(), self.tokens(), self.elapsed())


def spent(cfg, nodes: int, tokens: int, seconds: float) -> str:
    """The name of the budget that is used up; "" while none is."""
    for name, used in {"nodes": nodes, "tokens": tokens, "minutes": seconds / 60}.items():
        limit = getattr(cfg, name)
        if limit is not None and used >= limit:
            return name
    return ""


def stored_node(directory: Path, row: dict) -> Node:
    """A finished node from its row and its transcript, without its turns."""
    values = transcript_reader(directory)(row) | row
    names = {column.name for column in fields(Node)} - {*Node.UNSAVED, "turns"}
    return Node(**{name: values[name] for name in names}, ended=True)


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


def result_json(t: Tree) -> dict:
    """The content of result.json, at any moment. What is true of the nodes is in their rows.

    value: of the best node, on the test part once that was scored. tested_id: the node that was
    chosen at the end.
    """
    best = t.best() if t.scored else None
    tested = t.test_scores(t.chosen) if t.chosen else {}
    facts = {
        "kind": "search",
        "task": t.task.name,
        **t.task.scale,
        "split": t.task.splits[0],
        "selected_on_test": t.task.selected_on_test,
        "nodes": len(t.finished),
        "tokens": t.tokens(),
        "seconds": t.elapsed(),
        "stopped_by": t.spent(),
        "best_id": best.id if best else None,
        "tested_id": t.chosen.id if tested else None,
    }
    value = tested["value"] if tested else best.value if best else WORST
    return facts | {"value": value}


# ------------------------------------------------------------------ run directories


def open_trees(cfgs: list, tasks: dict, rule, model) -> tuple[list[Tree], Path]:
    """A tree for each config of search.py, and the directory of the run or grid.

    tasks: by name. rule: a Rule. model: a ModelPath.
    """
    trees = []
    for cfg in cfgs:
        task = tasks[cfg.task]
        run = begin_run(cfg, [task], model, partial(is_finished, cfg=cfg))
        t = Tree(task, cfg, run, rule)
        if not t.closed:
            (run.dir / "nodes").mkdir(exist_ok=True)
        trees.append(t)
    return trees, run.dir if len(trees) == 1 else run.dir.parent


def is_finished(run: Run, cfg) -> bool:
    """Returns whether a search has scored its best node and has nothing left of its budget."""
    result = run.result
    if result.get("status") != "finished":
        return False
    used = result["nodes"], result["tokens"], result["seconds"]
    return result["stopped_by"] == "tree" or spent(cfg, *used) != ""
