"""Tree search with a language-model agent: many attempts at one task, each built on earlier ones.

    python search.py --task titanic --sampling-mode tail       laptop: the stand-in model, 2 minutes
    python search.py --task titanic --sampling-mode none tail --seed 0 1 2        a grid of 6 trees
    python search.py --task titanic --select mcts --nodes 30 --model logs/grpo-titanic-tiny-0/best
    python search.py configs/evaluate.yaml --task titanic      no search: the mean of 64 episodes
    python viz.py logs/search-titanic-tail-tiny-0              the tree

The same command again resumes a search.

One node:
1. select: a rule picks the finished node to build on. The root is the measured baseline.
2. propose: the model lists strategies with their probabilities, and one of them is taken.
3. expand: an episode in a copy of the parent's files, without its artefact. The model is told a
   bounded summary of the parent instead of its conversation.
4. The validation part scores the node. A failed node is a node as well and can be debugged. One row
   goes to journal.jsonl.

At the end the nodes within one standard error of the best by validation are scored on the selection
part, and the best of them by the mean of both parts once on the test part.

How it departs from what is usual:
1. Rules see `improvement` only (0 baseline, 1 reference), so none knows metrics and directions.
2. A budget of K nodes executes K nodes: failures count, in the budget and in every table. A broken
   sandbox is a fault and never a score.
3. The journal is the checkpoint: ids, decisions, strategies and counts are rebuilt from it, files
   from nodes/<order>.tar.
4. Seeds come from (seed, node id), so bfs grows the same tree with any number of workers (unless
   something depends on what happened meanwhile: --scope global, --reflection).
"""

import asyncio
import contextlib
import inspect
import itertools
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import env
from flatlab import options, threads
from flatlab.errors import SandboxFault, UserError
from flatlab.files import write_whole
from flatlab.model import endpoint
from flatlab.options import (
    Bounds,
    Count,
    EpisodeOptions,
    GpuShare,
    ModelOptions,
    Positive,
    Resumable,
    SandboxOptions,
    Seed,
    Share,
    TaskOptions,
    TrackerOptions,
)
from flatlab.runs import cli, trackers
from flatlab.runs.fingerprint import fingerprint
from flatlab.runs.reader import value_text
from flatlab.runs.store import Run, open_run, packed_tokens, run_directory
from flatlab.task.definition import improvement
from flatlab.tree import parsing, prompts, rules
from flatlab.tree.nodes import Choice, Node, Tree, code_in, difference, results, seed_from, spent
from flatlab.tree.requests import CountingPolicy, chat
from flatlab.tree.rules import Rule
from flatlab.tree.scientist import scientist
from flatlab.view import search_console
from flatlab.world.episode import Episode, in_thread, run_episode
from flatlab.world.texts import FORMS
from policy import Policy, default_model, resolve_model

# ==================================== the idea: edit here ====================================

# Selection rules: functions of (tree, rng, constants with defaults) that return a Choice, or None
# to wait for a running node. flatlab.tree.nodes.Tree is what a rule sees. More rules to copy from
# are in flatlab/tree/rules.py.


def bfs(t, rng, branching=3, depth=2):
    """The first --nodes nodes of a complete tree, level by level.

    Failed nodes get children, too (to debug them), so the set of nodes is known from the start.
    """
    places = {}  # of the next child of each node that may get one -> its id
    for node in t.nodes.values():
        if node.status and len(node.children) < branching and node.depth < depth:
            first = rules.place(node.id, branching) * branching + 1
            places[first + len(node.children)] = node.id
    if not places or min(places) > t.cfg.nodes:
        return None
    return Choice(places[min(places)], reason="next in level order")


def check_bfs(cfg, constants):
    """Raises UserError if a complete tree has fewer nodes than the budget."""
    branching, depth = constants["branching"], constants["depth"]
    levels = range(1, min(depth, 64) + 1)  # 2^64 is more than any budget
    nodes = depth if branching == 1 else sum(branching**level for level in levels)
    if nodes < cfg.nodes:
        raise UserError(
            f"A bfs tree of depth {depth} with {branching} children a node has {nodes} nodes, not "
            f"--nodes {cfg.nodes}: raise --rule-args depth={depth} or branching={branching}."
        )


def greedy(t, rng, drafts=5):
    """Drafts, then always the best node (AIDE, arXiv 2502.13138)."""
    scores = {node.id: node.improvement for node in rules.candidates(t, drafts)}
    if not scores:
        return None
    best = max(scores, key=scores.get)
    return Choice(best, scores=scores, reason="best so far" if t.scored else "draft")


def ucb(t, rng, drafts=3, c=1.41):
    """The arg-max of Q + c sqrt(ln N / (n + 1)) (UCB1, Auer et al. 2002)."""
    return rules.explore_or_exploit(rules.values_and_bonuses(t, drafts, c))


SELECT = {
    "bfs": Rule(bfs, debugs_itself=True, asks_once=True, check=check_bfs),
    "greedy": Rule(greedy),
    "ucb": Rule(ucb),
    **rules.RULES,
    "scientist": Rule(scientist, debugs_itself=True, uses_mode=False),
}

# Operators: how a node builds on its parent. The first one that applies to a choice is taken.


@dataclass(frozen=True)
class Operator:
    applies: Callable  # (choice, parent whose files the node starts from) -> bool
    sentence: str  # what the model is told after the parent's code; "" for nothing
    mark: str  # its marker in pictures, one of matplotlib's; others become a hexagon
    explores: str = ""  # the sentence instead if the rule wants to explore
    asks: bool = True  # whether the model lists strategies for it, see sampling_mode


OPERATORS = {
    "crossover": Operator(lambda choice, parent: choice.second, "Combine both.", "D", asks=False),
    "draft": Operator(lambda choice, parent: parent.op == "baseline", "", "o"),
    "debug": Operator(
        lambda choice, parent: not parent.valid,
        "Fix the error and keep the strategy.",
        "s",
        asks=False,
    ),
    "improve": Operator(
        lambda choice, parent: True, "Improve on it.", "^", explores="Try something different."
    ),
}

# Requests to the model; the stand-in was trained on these texts. Verbalized sampling (arXiv
# 2510.01171): asked for one answer, a model gives the typical one. Asked for several with their
# probabilities, it describes its distribution, and one can ask for the tail of it.

STRATEGY = "\nAnswer with this line for each:\nStrategy: <one sentence>"
STRATEGY_AND_PROBABILITY = """
Answer with these two lines for each:
Strategy: <one sentence>
Probability: <number from 0 to 1>"""
ASK = {  # for strategies, by sampling mode
    "uniform": "List {k} reasonable strategies, all equally probable." + STRATEGY_AND_PROBABILITY,
    "tail": "List {k} unusual strategies, each with a probability below {tau:g}."
    + STRATEGY_AND_PROBABILITY,
    "local": "List {k} variations of {what}, with their probabilities." + STRATEGY_AND_PROBABILITY,
    "sequence": "List {k} different strategies." + STRATEGY,
}
MORE = "List {k} more, different from all above, in the same form."  # if too few came
REFLECT = """{about}

{tree}

What worked, what failed and why, and what should be tried next? Answer in at most five short \
sentences."""


def sampling_mode(t: Tree, node: Node) -> str:
    """How the strategy of this node is asked for: "none", or a key of ASK.

    `local` asks for variations, so only a child of a node with a strategy may get it.
    """
    if not (OPERATORS[node.op].asks and t.rule.uses_mode):
        return "none"
    exploits = node.decision["phase"] == "exploit" and t.nearest_kept(node.parent).idea
    if exploits and t.sampling_mode in ("uniform", "tail"):
        return "local"
    return t.sampling_mode


def strategy_request(mode: str, k: int, tau: float, parent: Node) -> str:
    """Asks for k strategies for children of `parent`, in one of the modes of ASK."""
    is_root = parent.op == "baseline"
    what = "the most common strategy" if is_root else "the strategy so far"
    return ASK[mode].format(k=k, tau=tau, what=what)


def sentence_of(node: Node) -> str:
    """What the operator of a node says after the code of the nodes that it builds on."""
    operator = OPERATORS[node.op]
    explores = operator.explores and node.decision.get("phase") == "explore"
    return operator.explores if explores else operator.sentence


def node_message(t: Tree, node: Node, parents: list[Node]) -> str:
    """What a node is told after the task. parents: the nodes it builds on, none for a draft."""
    notes = "\n".join(filter(None, [node.decision.get("reflection"), summary(t)]))
    return prompts.situation(node, parents, sentence_of(node), prompts.summary_chars(t.cfg), notes)


# ==================================== end of the idea ========================================


@dataclass
class Config:
    """Several values of task, sampling_mode or seed make a grid of trees that share one engine."""

    tasks: TaskOptions = field(default_factory=TaskOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    episode: EpisodeOptions = field(default_factory=lambda: EpisodeOptions(max_turns=15))
    trackers: TrackerOptions = field(default_factory=TrackerOptions)

    # run directory logs/<name>; default: <script>-<task>-<mode>-<model>-<seed>, after the script's
    # name the rule unless it is bfs; of a grid: <script>-grid-<model>
    name: str | None = None
    seed: tuple[Seed, ...] = (0,)  # seed of choices and samples; several: one tree each
    workers: Resumable[Count] = 4  # nodes that run at the same time, over all trees
    engine: Literal["vllm", "api"] = "vllm"  # api: an OpenAI-compatible endpoint
    # address of that endpoint; key: $OPENAI_API_KEY
    url: Resumable[str] = "http://localhost:8000/v1"
    # share of the GPU for the engine (weights and KV cache)
    gpu_memory: GpuShare = 0.85

    nodes: Resumable[Count] = 12  # executed nodes per tree; failed ones count
    # sampled tokens per tree, those for strategies included; default: no limit. Requests under
    # way are finished, so several workers take more
    tokens: Resumable[Annotated[int, Bounds(1)] | None] = None
    minutes: Resumable[Positive | None] = None  # wall time per tree, in minutes; default: no limit

    # how strategies are asked for. none: not at all; sequence: as a list; uniform: equally probable
    # ones; tail: each less probable than tau; local: variations of the parent's
    sampling_mode: tuple[Literal["none", "uniform", "tail", "local", "sequence"], ...] = ("tail",)
    k: Count = 5  # strategies per request
    # tail: ask for strategies less probable than this; others are used only if too few came
    tau: Share = 0.1
    scope: Literal["parent", "global"] = "parent"  # global: prompts summarise the whole tree
    reflection: bool = False  # one more request per node: what has the tree taught so far?

    select: Literal[*SELECT] = "bfs"  # rule that picks the node to build on
    rule_args: tuple[str, ...] = ()  # constants of the rule, as in --rule-args c=0.5 drafts=4
    # probability of debugging a failed leaf instead (not with bfs, mcts, linear, scientist,
    # evaluation)
    debug_prob: Share = 0.5

    end_on: Literal["validate", "submit"] = "validate"  # validate: end at the first valid score


# ------------------------------------------------------------------ requests to the model


def about(t: Tree) -> str:
    """The task as requests tell it; in the full form of the texts also what is left of the budget.

    A rule that asks once has the same nodes with any number of workers, so it asks without this.
    """
    facts = t.facts
    if facts and not t.rule.asks_once:
        facts += f"\nAfter this attempt {t.cfg.nodes - t.executed()} of {t.cfg.nodes} are left."
    return prompts.about(t.task, facts)


async def facts_of(t: Tree) -> str:
    """What requests tell about the sandboxes, found in one of them; "" in the short form."""
    facts = FORMS[t.cfg.episode.texts].facts
    if facts is None:
        return ""
    async with env.Env(t.task, t.cfg.sandbox, t.seed) as world:
        await in_thread(world.reset)
        return await in_thread(facts, world, t.cfg.episode)


def summary(t: Tree) -> str:
    """What prompts say about other branches, if anything."""
    return prompts.summary_of_tree(t.finished) if t.cfg.scope == "global" else ""


async def list_ideas(t: Tree, node: Node) -> list:
    """Up to k (strategy, probability) for the children of node.parent, in the order of their use.

    If too few came, one more request is made. Under `tail`, strategies with a stated probability
    above tau do not count; they only fill up what is missing in the end, the least probable first.
    """
    cfg = t.cfg
    k = max(cfg.k, t.constants.get("branching", 0)) if t.rule.asks_once else cfg.k
    parent = t.nearest_kept(node.parent)
    siblings = [child for child in t.nodes[node.parent].children if child is not node]
    wanted = strategy_request(node.sampling_mode, k, cfg.tau, parent)
    request = prompts.ask(about(t), wanted, parent, siblings, summary(t))
    talk = []
    ideas = {}
    likely = {}
    for call in range(2):
        reply = await chat(t, node, talk, request, t.request_of(node), "ideas", call)
        for idea, stated in parsing.parse(reply):
            is_likely = node.sampling_mode == "tail" and (stated or 0) > cfg.tau
            group = likely if is_likely else ideas
            group.setdefault(parsing.same(idea), (idea, stated))
        if len(ideas) >= k:
            break
        request = MORE.format(k=k - len(ideas))
    for key, idea in sorted(likely.items(), key=lambda item: item[1][1]):
        ideas.setdefault(key, idea)
    return list(ideas.values())[:k]


async def propose(t: Tree, node: Node) -> None:
    """Gives the node its strategy. If there are fewer than children, the rest get none: the
    sampling mode of these is none, and their decision keeps the mode they asked for as `asked`.
    """
    if node.op == "debug" and not node.idea:
        node.idea = t.nearest_kept(node.parent).idea
    node.sampling_mode = sampling_mode(t, node)
    if node.sampling_mode != "none":
        request = t.request_of(node)
        if request not in t.ideas:
            if request not in t.requests:
                t.requests[request] = asyncio.ensure_future(list_ideas(t, node))
            t.ideas[request] = await t.requests[request]
            t.requests.pop(request, None)
        node.ideas = t.ideas[request]
        number = int(node.id.rpartition(".")[2]) if t.rule.asks_once else 0
        if number < len(node.ideas):
            node.idea, node.probability = node.ideas[number]
        else:
            node.decision["asked"] = node.sampling_mode
            node.sampling_mode = "none"
    if t.cfg.reflection and t.finished:
        node.decision["reflection"] = await reflect(t, node)


async def reflect(t: Tree, node: Node) -> str:
    """What the tree has taught, in at most 1/16 of the context: the prompts of the node hold it."""
    tree = prompts.tree_lines([t.root, *t.finished])
    tree = prompts.clip(tree, prompts.summary_chars(t.cfg))
    request = REFLECT.format(about=about(t), tree=tree)
    limit = max(32, t.cfg.model.context // 16)
    return await chat(t, node, [], request, node.id, "reflect", limit=limit)


# ------------------------------------------------------------------ one node


class Attempt(env.Env):
    """The environment of a node: it starts from the files of the first parent, and the prompt also
    tells about the parents. It also ends when tokens run out and, with --end-on validate, at the
    first valid score.
    """

    def __init__(self, t: Tree, node: Node, parents: list[Node]):
        super().__init__(t.task, t.cfg.sandbox, node.seed)
        self.tree = t
        self.parents = parents
        self.message = node_message(t, node, parents)
        self.ends_at_score = t.cfg.end_on == "validate"

    def reset(self):
        if not self.parents:
            return super().reset()
        self.restore(self.tree.files_of(self.parents[0]))
        return self.prompt()

    def step(self, reply, timeout=None):
        step = super().step(reply, timeout)
        cfg = self.tree.cfg
        scored = self.ends_at_score and step.score and step.score.valid
        out_of_tokens = cfg.tokens is not None and self.tree.tokens() >= cfg.tokens
        return replace(step, done=step.done or scored or out_of_tokens)


async def play(t: Tree, node: Node, parents: list[Node]) -> tuple[Episode, bytes]:
    """The node's episode in a sandbox of its own, and a tar of the files that it left.

    If the sandbox breaks, the status of the episode is "fault".
    """
    limits = t.cfg.episode
    if t.cfg.minutes is not None:
        minutes = max(1 / 60, t.cfg.minutes - t.elapsed())
        limits = replace(limits, episode_minutes=min(limits.episode_minutes, minutes))
    policy = CountingPolicy(t.policy, node)
    files = b""
    async with Attempt(t, node, parents) as world:
        episode = await run_episode(world, policy, limits, node.seed)
        if episode.status != "fault":
            # Files that are too large are not kept: the score counts, but nothing is built on it.
            with contextlib.suppress(SandboxFault):
                files = await in_thread(world.snapshot)
    return episode, files


async def expand(t: Tree, node: Node) -> None:
    """Runs a node from its strategy to its row in the journal.

    A broken sandbox is replaced once; after that the node is a fault, which is not a score.
    """
    start = time.monotonic()
    if t.began is None:
        t.began = start
    await propose(t, node)
    parent = t.nearest_kept(node.parent)
    parents = [] if parent is t.root else [parent]
    if node.second:
        parents.append(t.nodes[node.second])
    for _ in range(2):
        episode, files = await play(t, node, parents)
        if episode.status != "fault":
            break
    if files:
        await in_thread(write_whole, t.tar_of(node), files)
        node.code = code_in(files, t.task)
    # Nothing below waits, so the rules see the node finish at once and complete.
    node.kept = bool(files)
    if parents:
        node.diff = difference(parents[0].code, node.code)
    record_episode(t, node, episode)
    # the tokens of an endpoint are not the model's
    tokens = b"" if t.cfg.engine == "api" else packed_tokens([episode])
    t.run.save_episodes(node.order, [episode.to_dict() | {"node": node.id}], tokens)
    node.seconds = time.monotonic() - start
    node.elapsed = t.elapsed()
    t.run.log(node.row(), "journal.jsonl")  # from here on it counts
    t.end(node)
    t.run.result(**results(t), status="running")
    if [other.status for other in t.finished[-3:]] == ["fault"] * 3:
        raise UserError(
            "Three sandboxes in a row broke, so the search stops. Run the same command again to "
            f"continue. The last one: {node.error}"
        )


def record_episode(t: Tree, node: Node, episode: Episode) -> None:
    """Copies what came of an episode into its node."""
    node.actions = episode.turns
    node.status = episode.status
    last = episode.turns[-1]["status"] if episode.turns else ""
    if node.status == "submit" and last != "submit":  # ended by Attempt.step
        node.status = "validated" if last == "validate" else "stopped"
    score = episode.score
    if score and score.valid:
        node.score = score.value
        node.stderr = score.stderr
        node.improvement = improvement(score.value, t.task)
        node.valid = True
        return
    failed = ("error", "timeout", "rejected")
    bad = [turn["observation"] for turn in episode.turns if turn["status"] in failed]
    message = score.message if score else episode.fault
    node.grader_output = score.grader_output if score else ""
    node.error = prompts.clip("\n".join([*bad[-1:], message]), 2000)


# ------------------------------------------------------------------ the search


async def decide(t: Tree) -> Node | None:
    """The next node; None if the budget is spent or the rule has nothing to start now."""
    if t.spent():
        return None
    rng = random.Random(seed_from(t.seed, "select", t.started))
    choice = None
    if not t.rule.debugs_itself:
        choice = rules.failed_leaf(t, rng)
    if choice is None:
        choice = t.rule.function(t, rng, **t.constants)
        if inspect.isawaitable(choice):
            choice = await choice
    return start(t, choice) if choice else None


def start(t: Tree, choice: Choice) -> Node:
    """Adds the chosen node to the tree, with the first operator that applies."""
    parent = t.nearest_kept(choice.parent)
    op = next(name for name, operator in OPERATORS.items() if operator.applies(choice, parent))
    return t.start(choice, op, OPERATORS[op].mark)


async def grow(t: Tree, slots: asyncio.Semaphore, group: asyncio.TaskGroup) -> None:
    """Grows a tree until it is complete. Each running node holds one of the slots."""
    t.facts = await facts_of(t)
    while True:
        await slots.acquire()
        node = await decide(t)
        if node:
            group.create_task(run_node(t, node, slots))
            continue
        slots.release()
        if not t.running:
            break
        t.node_ended.clear()
        await t.node_ended.wait()
    await close(t)


async def run_node(t: Tree, node: Node, slots: asyncio.Semaphore) -> None:
    await expand(t, node)
    print(search_console.node_line(t, node), flush=True)
    slots.release()
    t.node_ended.set()


async def search(trees: list[Tree], policy, workers: int) -> None:
    """Grows all trees until each is complete, with at most `workers` nodes at the same time.

    The trees take turns, because a semaphore serves those who wait in order. After Ctrl-C or an
    error every sandbox is closed before this returns.
    """
    slots = asyncio.Semaphore(workers)
    try:
        async with asyncio.TaskGroup() as group:
            for t in trees:
                t.policy = policy
                t.run.result(**results(t), status="running")
                group.create_task(grow(t, slots, group))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def close(t: Tree) -> None:
    """Chooses the best node and scores it on the test part. An evaluation does neither."""
    stopped_by = t.spent() or "tree"
    if not t.rule.is_evaluation:
        t.chosen = await choose(t)
        if t.chosen.kept and not t.task.selected_on_test:
            await hidden_score(t, t.chosen, t.task.splits[-1])
    t.run.result(**results(t) | {"stopped_by": stopped_by, "status": "finished"})
    t.closed = True


async def choose(t: Tree) -> Node:
    """The finalist with the best mean of validation and selection score; else the best node.

    Ties go to the node with fewer sampled tokens, then to the earlier one.
    """
    if "selection" not in t.task.splits:
        return t.best()
    ranks = {}
    for node in rules.finalists(t):
        selection_score = await hidden_score(t, node, "selection")
        value = improvement((node.score + selection_score) / 2, t.task)
        ranks[node.id] = (value, -node.tokens, -node.order)
    return t.nodes[max(ranks, key=ranks.get)] if ranks else t.best()


async def hidden_score(t: Tree, node: Node, split: str) -> float:
    """The score of a node's files on a part that the search does not see.

    A part is scored once per node, also if the search is killed and resumed.
    """
    parts = t.hidden_scores.setdefault(node.id, {})
    if split not in parts:
        async with env.Env(t.task, t.cfg.sandbox, node.seed) as world:
            await in_thread(world.restore, t.files_of(node), False)
            score = await in_thread(world.score, split)
        # Valid on the validation part and not on this one: worth the baseline.
        value = score.value if score.valid else t.task.baseline
        error = "\n".join(filter(None, [score.message, score.grader_output]))
        parts[split] = {"score": value, "stderr": score.stderr, "error": error}
        t.run.result(hidden_scores=t.hidden_scores)
    return parts[split]["score"]


# ------------------------------------------------------------------ start and end


def check_config(cfg: Config) -> None:
    """Raises UserError for settings that do not exist or do not fit together."""
    options.check_values(cfg)
    rule = SELECT[cfg.select]
    constants = rule.constants(cfg.select, cfg.rule_args)
    if rule.check:
        rule.check(cfg, constants)
    if cfg.engine == "api" and not cfg.model.model:
        raise UserError("--engine api needs --model: the name under which the endpoint knows it.")


def prepare(cfg: Config):
    """Derives what is left open in the config and checks everything before a model is loaded.

    Returns the trees, the directory of the run or grid, the model's path (None for an endpoint),
    and a sentence about the choice of the sandbox.
    """
    check_config(cfg)
    trackers.check_packages(cfg.trackers)
    if not SELECT[cfg.select].uses_mode:
        cfg.sampling_mode = ("none",)
    path = None
    if cfg.engine != "api":
        cfg.model.model = cfg.model.model or default_model()
        path = resolve_model(cfg.model.model)
    is_tiny = path is not None and path.is_tiny
    options.derive(cfg.model, cfg.episode, is_tiny, path and path.positions)
    tasks, why = env.open_tasks(cfg.tasks, cfg.sandbox, is_tiny)
    made_by = fingerprint(__file__, tasks, path)
    trees, where = open_trees(cfg, tasks, made_by)
    return trees, where, path, why


def open_trees(cfg: Config, tasks: list, made_by: dict) -> tuple[list[Tree], Path]:
    """One tree for each task, sampling mode and seed, and the directory of the run or grid."""
    cells = list(itertools.product(tasks, cfg.sampling_mode, cfg.seed))
    is_grid = len(cells) > 1
    model = value_text(cfg.model.model)
    # The name begins with that of the script: a copy of this file makes runs of its own.
    kind = Path(__file__).stem
    if cfg.select != Config.select:
        kind += f"-{cfg.select}"
    name = f"{kind}-grid-{model}"
    if not is_grid:
        [(task, mode, seed)] = cells
        name = f"{kind}-{task.name}-{mode}-{model}-{seed}"
    where = run_directory(cfg.name or name)
    if is_grid and (where / "config.yaml").exists():
        raise UserError(f"{where} is a single run, not a grid: choose another --name.")
    trees = []
    for task, mode, seed in cells:
        directory = where
        if is_grid:
            directory = where / f"{task.name}-{mode}-{seed}"
        cell = {"task": task.name, "sampling_mode": mode, "seed": seed, "name": directory.name}
        run = open_run(
            directory,
            options.flat(cfg) | cell,
            made_by | {"tasks": {task.name: made_by["tasks"][task.name]}},
            options.may_change(cfg),
            lambda run: is_finished(run, cfg),
        )
        t = Tree(task, mode, seed, cfg, run, SELECT[cfg.select])
        if not t.closed:
            (run.dir / "nodes").mkdir(exist_ok=True)
            run.trackers = trackers.open_trackers(run)
        trees.append(t)
    return trees, where


def is_finished(run: Run, cfg: Config) -> bool:
    """Whether a search has scored its best node and has nothing left of its budget."""
    result = run.results()
    if result.get("status") != "finished":
        return False
    used = result["nodes"], result["tokens"], result["seconds"]
    return result["stopped_by"] == "tree" or spent(cfg, *used) != ""


def make_policy(cfg: Config, path):
    settings = {"context": cfg.model.context, "temperature": cfg.model.temperature}
    if cfg.engine == "api":
        endpoint.check_url(cfg.url)
        return endpoint.Endpoint(cfg.url, cfg.model.model, **settings)
    return Policy(
        path,
        **settings,
        seed=cfg.seed[0],
        max_batch=max(8, cfg.workers),
        gpu_memory=cfg.gpu_memory,
        compile=cfg.model.compile,
        exact=cfg.model.exact,
        trains=False,
    )


def main() -> None:
    cfg = cli.parse_config(Config, sys.argv[1:])
    threads.configure()
    trees, where, path, why = prepare(cfg)
    todo = [t for t in trees if not t.closed]
    if todo:
        search_console.banner(cfg, trees, where, path, why)
    else:
        print(f"{where} was finished before: nothing was run.")
    with cli.recorded_end([t.run for t in todo], where):
        if todo:
            policy = make_policy(cfg, path)
            asyncio.run(search(todo, policy, cfg.workers))
    search_console.report(trees, where)


if __name__ == "__main__":
    cli.one_sentence(main)
