"""Tree search with a language-model agent: many attempts at one task, each built on earlier ones.

    python search.py --task titanic                            laptop: the stand-in model, 2 minutes
    python search.py --task titanic --sampling-mode none tail --seed 0 1 2        a grid of 6 trees
    python search.py --task titanic --select mcts --nodes 30 --model logs/grpo-titanic-tiny-0/best
    python viz.py logs/search-titanic-none-tiny-0              the tree

The same command again resumes a search. examples/learn.py also trains the model while it searches.

One node, in reading order (flatlab/ left out):
1. decide: a rule (tree/rules.py) picks the finished node to build on. The root is the baseline.
2. propose: with a --sampling-mode the model lists strategies with their probabilities, and one of
   them is taken; ask and parse (tree/requests.py).
3. play_node: run_episode (world/episode.py) in a copy of the parent's files, without its artefact.
   A bounded summary of the parent replaces its conversation: situation (tree/requests.py).
4. Tree.keep, Tree.record (tree/nodes.py): a node is an episode with a parent, a row of
   episodes.jsonl.

At the end the nodes within one standard error of the best by validation are scored on the selection
part, and the best of them by the mean of both parts once on the test part.

How it departs from what is usual:
1. Rules see `improvement` only (0 baseline, 1 reference), so none knows metrics and directions.
2. A budget of K nodes executes K nodes: failures count, in the budget and in every table. A broken
   sandbox is a fault and never a score.
3. episodes.jsonl is the checkpoint: the tree is rebuilt from it, files from nodes/<order>.tar.
4. Seeds come from (seed, node id), so bfs grows the same tree with any number of workers (unless
   --scope global shows prompts what happened meanwhile).
"""

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import env
from flatlab import options
from flatlab.errors import Refusal, SandboxFault, UserError
from flatlab.heartbeat import heartbeat, stoppable
from flatlab.model.path import model_name
from flatlab.numbers import value_text
from flatlab.options import Count, Ge, Le, Number, Positive, Resumable, Several, Whole
from flatlab.runs import cli
from flatlab.runs.start import complete_configs, recorded
from flatlab.task.grading import Score
from flatlab.task.sanity import warning
from flatlab.task.value import judged
from flatlab.tree import requests, rules
from flatlab.tree.nodes import Choice, Node, Tree, open_trees, result_json, seed_from
from flatlab.view import console
from flatlab.world.episode import in_thread, run_episode, stop_after_faults
from flatlab.world.prompts import machine_facts
from policy import open_engine, token_counter

# ==================================== the idea: edit here ====================================

# Selection rules: functions of (tree, rng, constants with defaults) that return a Choice, or None
# to wait for a running node. flatlab.tree.nodes.Tree is what a rule sees. --select also offers the
# rules of flatlab/tree/rules.py; add yours here.


def greedy(t, rng, drafts=5):
    """Drafts, then always the best node (AIDE, arXiv 2502.13138)."""
    open_nodes = rules.candidates(t, drafts)
    scores = {node.id: node.improvement for node in open_nodes}
    if not scores:
        return None
    reason = "draft" if open_nodes == [t.root] else "best so far"
    return Choice(rules.arg_max(scores), reason=reason, scores=scores)


def ucb(t, rng, drafts=3, c=1.41):
    """The arg-max of Q + c sqrt(ln N / (n + 1)), Q of the best child (UCB1, Auer et al. 2002)."""
    return rules.explore_or_exploit(rules.values_and_bonuses(t, drafts, c))


def bfs(t, rng, branching=3):
    """The first --nodes nodes of a complete tree, level by level.

    Failed nodes get children, too (to debug them), so the set of nodes is known from the start.
    """
    number = {"0": 0}  # of each node in level order
    places = {}  # number of the next child of each node that may get one -> id of the node
    for node in t.nodes.values():  # a parent comes before its children
        first = number[node.id] * branching + 1
        number |= {child.id: first + child.place for child in node.children}
        if node.ended and len(node.children) < branching:
            places[first + len(node.children)] = node.id
    if not places or min(places) > t.cfg.nodes:
        return None
    return Choice(places[min(places)], reason="next in level order")


SELECT = {
    "bfs": rules.Rule(bfs, debugs=False, shared_request=True),
    "greedy": rules.Rule(greedy),
    "ucb": rules.Rule(ucb),
    **rules.RULES,
}
DEBUG_PROB = 0.5  # of debugging a failed leaf instead, for rules with Rule.debugs

# Operators: how a node builds on its parent. The first one that applies to a choice is taken. What
# the model is told is in configs/prompts/, under `node`.


@dataclass(frozen=True)
class Operator:
    applies: Callable  # (choice, parent whose files the node starts from) -> bool
    mark: str  # its marker in pictures, one of matplotlib's; others become a hexagon
    keeps_strategy: bool = False  # whether its strategy is that of the parent
    asks: bool = True  # whether the model lists strategies for it, see sampling_mode


OPERATORS = {
    "crossover": Operator(lambda choice, parent: choice.second_parent, "D", asks=False),
    "draft": Operator(lambda choice, parent: not parent.parent, "o"),
    "debug": Operator(
        lambda choice, parent: not parent.valid, "s", keeps_strategy=True, asks=False
    ),
    "improve": Operator(lambda choice, parent: True, "^"),
}

# Requests for strategies; their texts are in configs/prompts/. Verbalized sampling (arXiv
# 2510.01171): asked for one answer, a model gives the typical one. Asked for several with their
# probabilities, it describes its distribution, and one can ask for the tail of it.


@dataclass(frozen=True)
class Mode:
    """Request for strategies."""

    exploits_as: str = ""  # the mode that replaces it where the rule exploits a strategy
    below_tau: bool = False  # strategies with a stated probability above tau are the last choice


MODES = {
    "none": None,  # nothing is asked
    "uniform": Mode(exploits_as="local"),
    "tail": Mode(exploits_as="local", below_tau=True),
    "local": Mode(),  # variations of the parent's strategy; for a draft, of the most common one
    "sequence": Mode(),
}


def sampling_mode(t: Tree, node: Node) -> str:
    """Mode in which the strategy of this node is asked for, a key of MODES."""
    if not OPERATORS[node.op].asks:
        return "none"
    parent = t.nearest_kept(node.parent)
    if node.decision["phase"] == "exploit" and parent.idea:
        return MODES[t.sampling_mode].exploits_as or t.sampling_mode
    return t.sampling_mode


# ==================================== end of the idea ========================================


@dataclass(frozen=True)
class Config(options.RunOptions):
    """Options of a tree. Several values of task, sampling_mode or seed make a grid of trees, which
    share one engine.
    """

    nodes: Resumable[Count] = 12  # executed nodes per tree, failed ones too
    # how strategies are asked for. none: not at all; sequence: as a list; uniform: equally probable
    # ones; tail: each less probable than tau; local: variations of the parent's. The modes are
    # experiments, which gained on one task of two: docs/results.md
    sampling_mode: Several[Literal[*MODES]] = "none"
    select: Literal[*SELECT] = "bfs"  # rule that picks the node to build on
    workers: Resumable[Count] = 4  # nodes that run at the same time, over all trees
    # OpenAI-compatible endpoint to sample from, as http://localhost:8000/v1; key: $OPENAI_API_KEY
    url: Resumable[str | None] = None

    # token budget per tree, strategy requests included; default: no limit. Running requests may
    # exceed it
    tokens: Resumable[Annotated[Whole, Ge(1)] | None] = None
    minutes: Resumable[Positive | None] = None  # wall time per tree; default: none

    k: Count = 5  # strategies per request
    # tail: ask for strategies less probable than this; others are used only if too few came
    tau: Annotated[Number, Le(1)] = 0.1
    scope: Literal["parent", "global"] = "parent"  # global: prompts summarise the whole tree
    rule_args: tuple[str, ...] = ()  # constants of the rule, as in --rule-args c=0.5 drafts=4

    task: Several[str] = "titanic"  # name, as for --task of grpo.py
    model: options.ModelOptions = options.ModelOptions()
    sandbox: options.SandboxOptions = options.SandboxOptions()
    episode: options.EpisodeOptions = options.EpisodeOptions(max_turns=15)
    # other places that get the rows; WANDB_MODE=offline needs no account
    trackers: options.Trackers = ()


# ------------------------------------------------------------------ strategies


async def propose(t: Tree, node: Node) -> None:
    """Gives the node its strategy. If there are too few, its sampling mode is none, and `asked` in
    its decision is the mode that was asked for.
    """
    if OPERATORS[node.op].keeps_strategy:
        node.idea = t.nearest_kept(node.parent).idea
    node.sampling_mode = sampling_mode(t, node)
    if not MODES[node.sampling_mode]:
        return
    if t.rule.shared_request:
        node.ideas = await shared_ideas(t, node)
        ideas = node.ideas[node.place :]  # earlier ones are those of its elder siblings
    else:
        node.ideas = ideas = await list_ideas(t, node, node.id)
    if ideas:
        node.idea, node.probability = ideas[0]
    else:
        node.decision["asked"] = node.sampling_mode
        node.sampling_mode = "none"


async def shared_ideas(t: Tree, node: Node) -> list:
    """The strategies for all children of a node, which are asked for once."""
    for sibling in t.nodes[node.parent].children:
        if sibling.ideas:
            return sibling.ideas
    if node.parent not in t.requests:
        request = list_ideas(t, node, node.parent)
        t.requests[node.parent] = asyncio.create_task(request)
    try:
        return await t.requests[node.parent]
    except Refusal:
        t.requests.pop(node.parent, None)  # a later child asks again
        raise


async def list_ideas(t: Tree, node: Node, seed: str) -> list:
    """Up to k (strategy, probability) for the children of node.parent, in the order of their use.

    If too few came, one more request is made. Under `tail`, strategies with a stated probability
    above tau do not count; they only fill up what is missing in the end, the least probable first.
    The node's decision counts those that could not be read as `unread`.
    seed: id of the node whose request this is. Raises Refusal if the first request is refused.
    """
    cfg = t.cfg
    k = cfg.k
    left = cfg.nodes - t.executed()
    if t.rule.shared_request:
        k = max(k, t.constants.get("branching", 0))
        left = None  # not told, or the strategies would depend on how many workers there are
    about = requests.task_text(t.prompts, t.task, t.machine, left, cfg.nodes)
    parent = t.nearest_kept(node.parent)
    shown = None if parent is t.root else parent
    siblings = [child for child in t.nodes[node.parent].children if child is not node]
    wanted = {"about": about, "mode": node.sampling_mode, "k": k, "tau": cfg.tau}
    request = requests.ask(t.prompts, t.task, shown, siblings, requests.tree_summary(t), **wanted)
    limit = cfg.tau if MODES[node.sampling_mode].below_tau else 1
    talk = []
    ideas = {}
    unread = 0
    for call in range(2):
        talk.append({"role": "user", "content": request})
        call_seed = seed_from(t.seed, seed, "ideas", call)
        try:
            reply = await requests.reply_to(t, node, talk, call_seed)
        except Refusal:
            if call == 0:
                raise
            break
        talk.append({"role": "assistant", "content": reply})
        strategies, damaged = requests.parse(reply)
        for idea, stated in strategies:
            ideas.setdefault(requests.same(idea), (idea, stated))
        unread += damaged
        missing = k - sum((stated or 0) <= limit for _, stated in ideas.values())
        if missing <= 0:
            break
        request = t.prompts.fill("more", k=missing)
    node.decision["unread"] = unread
    return sorted(ideas.values(), key=lambda idea: max(idea[1] or 0, limit))[:k]


# ------------------------------------------------------------------ one node


class NodeEnv(env.Env):
    """The environment of a node: it starts from the files of the first parent, and the prompt also
    tells about the parents, of which a draft has none. It also ends when tokens run out and at the
    first valid score.
    """

    def __init__(self, t: Tree, node: Node, parents: list[Node]):
        limit = min(6000, t.cfg.model.context * 3 // 4)  # characters: a quarter of the context
        summary = requests.tree_summary(t)
        message = requests.situation(t.prompts, t.task, node, parents, limit, summary)
        super().__init__(t.task, t.cfg.sandbox, node.seed, message, ends_at_score=True)
        self.tree = t
        self.parents = parents

    def restart(self):
        if self.parents:
            self.restore(self.tree.files_of(self.parents[0]))
            # Exported variables come along, but the texts say that a node starts in the workspace.
            state = self.sandbox.call("state")[0]
            self.sandbox.call("state", **state | {"cwd": self.sandbox.workspace})
        else:
            super().restart()

    def ending(self, status, score):
        limit = self.tree.cfg.tokens
        out_of_tokens = limit is not None and self.tree.tokens() >= limit
        return super().ending(status, score) or ("stopped" if out_of_tokens else "")


async def play_node(t: Tree, node: Node, parents: list[Node]) -> bytes:
    """Plays the episode of a node in a sandbox of its own. Returns a tar of the files that it left,
    b"" for a fault.
    """
    limits = replace(t.cfg.episode, episode_minutes=t.minutes_left())
    files = b""
    async with NodeEnv(t, node, parents) as world:
        await run_episode(world, t.policy, limits, node)
        if node.status != "fault":
            # Files that are too large are not kept: the score counts, but nothing is built on it.
            with contextlib.suppress(SandboxFault):
                files = await in_thread(world.snapshot)
    return files


async def run_node(t: Tree, node: Node, slots: asyncio.Semaphore) -> Node:
    """Runs a node from its strategy to its row, and frees its slot. Returns it with its turns.

    A broken sandbox is replaced once; after that the node is a fault, which is not a score. A
    refused request for strategies ends the node, which has failed.
    """
    began = time.monotonic()
    t.began = t.began or began
    parent = t.nearest_kept(node.parent)
    parents = [] if parent is t.root else [parent]
    if node.second_parent:
        parents.append(t.nodes[node.second_parent])
    files = b""
    try:
        await propose(t, node)
        for _ in range(2):
            files = await play_node(t, node, parents)
            if node.status != "fault":
                break
    except Refusal as refusal:
        node.status, node.refusal = "refused", str(refusal)
        node.judge(t.task, Score(None, t.task.metric, t.task.splits[0], False, ""))
    code = await in_thread(t.keep, node, files) if files else {}
    # Nothing below waits, so the rules see the node finish at once and complete.
    node.code, node.kept = code, bool(files)
    node.seconds = time.monotonic() - began
    whole = t.record(node)
    console.say(console.node_line(t, node))
    slots.release()
    t.node_ended.set()
    stop_after_faults([other.status for other in t.finished], node.error)
    return whole


# ------------------------------------------------------------------ the search


def decide(t: Tree) -> Choice | None:
    """The next parent; None if the budget is spent or the rule has nothing to start now."""
    if t.spent():
        return None
    rng = random.Random(seed_from(t.seed, "select", t.started))
    if t.rule.debugs and (leaf := rules.failed_leaf(t, rng, DEBUG_PROB)):
        return leaf
    name = f"--select {t.cfg.select}"
    choice = t.rule.function(t, rng, **t.constants)
    if choice is None and not (t.finished or t.running):
        raise UserError(f"{name} returned None although nothing is running.")
    ended = {id for id, node in t.nodes.items() if node.ended}
    if choice and not {choice.parent, choice.second_parent or choice.parent} <= ended:
        raise UserError(f"{name} returned {choice!r:.200}: there is no such finished node.")
    return choice


def add_node(t: Tree, choice: Choice) -> Node:
    """Adds the chosen node to the tree, with the first operator that applies."""
    parent = t.nearest_kept(choice.parent)
    for op, operator in OPERATORS.items():
        if operator.applies(choice, parent):
            return t.start_node(choice, op, operator.mark)
    raise UserError(f"No operator of OPERATORS applies to a child of node {parent.id}.")


async def prepare_tree(t: Tree, policy) -> None:
    """Prepares a tree for its first node. policy: samples replies and strategies."""
    t.policy = policy
    if "limits" in t.prompts.uses["about"]:  # requests tell about the sandboxes
        async with env.Env(t.task, t.cfg.sandbox, t.seed) as world:
            await in_thread(world.restart)
            t.machine = await in_thread(machine_facts, world, t.cfg.episode)


async def grow(t: Tree, policy, slots: asyncio.Semaphore, together: asyncio.TaskGroup) -> None:
    """Grows a tree until it is complete. Each running node holds one of the slots."""
    await prepare_tree(t, policy)
    while True:
        await slots.acquire()
        choice = decide(t)
        if choice:
            together.create_task(run_node(t, add_node(t, choice), slots))
            continue
        slots.release()
        if not t.running:
            break
        t.node_ended.clear()
        await t.node_ended.wait()
    await close(t)


async def search(trees: list[Tree], policy, workers: int) -> None:
    """Grows all trees until each is complete, with at most `workers` nodes at the same time.

    The trees take turns, because a semaphore serves those who wait in order. After Ctrl-C or an
    error every sandbox is closed before this returns.
    """
    slots = asyncio.Semaphore(workers)
    with heartbeat(lambda: f"search   {sum(len(t.finished) for t in trees)} nodes have ended"):
        async with asyncio.TaskGroup() as together:
            for t in trees:
                together.create_task(grow(t, policy, slots, together))


async def close(t: Tree) -> None:
    """Chooses the best node and scores it on the test part."""
    stopped_by = t.spent() or "tree"
    t.chosen = await choose(t)
    if t.chosen.kept and len(t.task.splits) > 1:
        await hidden_value(t, t.chosen, t.task.splits[-1])
    t.run.update_result(**result_json(t) | {"stopped_by": stopped_by, "status": "finished"})


async def choose(t: Tree) -> Node:
    """The finalist with the best mean value on the validation and selection parts; else the best
    node.

    Ties go to the node with fewer sampled tokens, then to the earlier one.
    """
    ranks = {}
    for node in rules.finalists(t) if "selection" in t.task.splits else ():
        value = await hidden_value(t, node, "selection")
        mean = (node.value + value) / 2
        ranks[node.id] = (mean, -node.tokens, -node.order)
    return t.nodes[rules.arg_max(ranks)] if ranks else t.best()


async def hidden_value(t: Tree, node: Node, split: str) -> float:
    """The value of a node's files on a part that the search does not see.

    A part is scored once per node, also if the search is killed and resumed.
    """
    parts = t.hidden_scores.setdefault(node.id, {})
    if split not in parts:
        async with env.Env(t.task, t.cfg.sandbox, node.seed) as world:
            try:
                await in_thread(world.restore, t.files_of(node), False)
                score = await in_thread(world.score, split)
            except SandboxFault as fault:
                score = await in_thread(world.crash_score, fault, split)
                if not score:
                    raise
        parts[split] = judged(score, t.task) | {"error": score.grader_output or score.message}
        t.run.update_result(hidden_scores=t.hidden_scores)
    return parts[split]["value"]


# ------------------------------------------------------------------ start and end


SCRIPT = Path(__file__).stem  # a copy of this file makes runs of its own


def named(cfgs: list[Config], script: str) -> list[Config]:
    """The configs with the names of their runs, which are made of the script, the rule if it is not
    the default, and what differs. The runs of a grid are in a folder.
    """
    first = cfgs[0]
    prefix = script if first.select == type(first).select else f"{script}-{first.select}"
    model = model_name(first)
    if len(cfgs) == 1:
        task = value_text(first.task)
        name = f"{prefix}-{task}-{first.sampling_mode}-{model}-{first.seed}"
        return [replace(first, name=first.name or name)]
    grid = first.name or f"{prefix}-grid-{model}"
    cells = [f"{value_text(cfg.task)}-{cfg.sampling_mode}-{cfg.seed}" for cfg in cfgs]
    return [replace(cfg, name=f"{grid}/{cell}") for cfg, cell in zip(cfgs, cells)]


def check(cfg: Config) -> None:
    """Raises UserError for constants that the rule does not have, or a mode that it ignores."""
    rule = SELECT[cfg.select]
    rule.constants(cfg)
    if not rule.uses_strategies and cfg.sampling_mode != "none":
        raise UserError(f"--select {cfg.select} asks for no strategies: leave out --sampling-mode.")


def main(config_class=Config, script=SCRIPT, check=check, loop=search, trains=False) -> None:
    """loop: grows the trees. trains: whether it trains the model."""
    cfgs = cli.parse_configs(config_class, sys.argv[1:])
    for cfg in cfgs:
        check(cfg)
    cfgs, model = complete_configs(named(cfgs, script))
    first = cfgs[0]
    console.model_line(first, model)
    names = list(dict.fromkeys(cfg.task for cfg in cfgs))
    tasks, sandbox = env.open_tasks(names, first.sandbox, model.stand_in)
    cfgs = [replace(cfg, sandbox=sandbox) for cfg in cfgs]
    first = cfgs[0]
    trees, where = open_trees(cfgs, dict(zip(names, tasks)), SELECT[first.select], model)
    growing = [t for t in trees if not t.closed]
    if growing:
        console.search_banner(trees, where)
        with recorded([t.run for t in growing], where=where):
            for t in growing:
                t.run.update_result(
                    **result_json(t), degenerate=warning([t.task]), status="running"
                )
            if not first.url:
                env.check_context(tasks, first, token_counter(first, model))
            policy = open_engine(first, model, max(8, first.workers), trains)
            asyncio.run(stoppable(loop(growing, policy, first.workers)))
    console.print_end(trees)


if __name__ == "__main__":
    cli.run(main)
