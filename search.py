"""Tree search with a language-model agent: many attempts at one research task, each built on what came before.

    python search.py --task titanic --sampling-mode tail          laptop: the stand-in model, a few minutes
    python search.py --task titanic battleOfSexes --sampling-mode none tail --seed 0 1 2      a grid: all cells share one engine
    python search.py --task titanic --select mcts --nodes 30 --model logs/grpo-titanic-tiny-0/best
    python search.py configs/evaluate.yaml --task titanic         no search: a policy's mean score over 64 episodes
    python viz.py logs/search-titanic-tail-tiny-0                 the tree; the same search command again resumes it

One node:
1. select: a rule picks a finished node to build on; the root is the measured baseline and costs nothing
2. propose: the model lists strategies with their probabilities (flatlab/tree/prompts.py), and one of them is taken
3. expand: an episode in a copy of the parent's files, without its artefact, told a bounded summary instead of its talk
4. the validation part scores it; a failure is a node as well, and can be debugged; one line goes to journal.jsonl

At the end the best node by validation is scored, once, on the test part.

How it departs from what is usual:
1. Rules see `improvement` only (0 baseline, 1 reference), so none of them knows about metrics and directions.
2. A budget of K executes K nodes: failures count, in the budget and in every table. A sandbox fault is never a score.
3. The journal is the checkpoint: ids, decisions, ideas and counts are rebuilt from it, files from nodes/<order>.tar.
4. Seeds come from (seed, node id): bfs grows the same tree with any number of workers (not with prompts that hold what
   happened meanwhile: --scope global, --reflection).
"""

import asyncio
import contextlib
import difflib
import itertools
import json
import math
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import env
import viz
from flatlab import threads
from flatlab.episode.sanity import degenerate
from flatlab.episode.task import improvement
from flatlab.errors import UserError
from flatlab.runs import page, stats, trackers
from flatlab.runs.views import plot_now_and_then
from flatlab.tree import prompts
from flatlab.tree.selection import select
from flatlab.tree.tree import Choice, Node, Tree, code_in, results, stable
from policy import Policy, resolve_model
from tasks import load_task

Mode = Literal["none", "local", "uniform", "tail", "sequence"]
Rule = Literal[
    "bfs",
    "random",
    "greedy",
    "ucb",
    "open_ended",
    "softmax",
    "signals",
    "mcts",
    "evolution",
    "linear",
    "scientist",
]


@dataclass
class Config:
    # run: several values of task, sampling-mode or seed make a grid; finished cells are not run again
    task: tuple[str, ...] = (
        "titanic",
    )  # folders in configs/tasks, or tasks of the two checkouts below
    sampling_mode: tuple[Mode, ...] = (
        "tail",
    )  # how ideas are asked for; none: temperature only; sequence: a plain list (not linear, scientist)
    seed: tuple[int, ...] = (0,)  # of choices and samples
    model: str = "auto"  # Hugging Face name, folder, logs/<run>/best, or tiny (the stand-in); auto: tiny without a GPU, else Qwen3-4B
    engine: Literal["vllm", "hf", "api"] = (
        "vllm"  # hf: transformers only; api: an OpenAI-compatible endpoint
    )
    url: str = "http://localhost:8000/v1"  # of that endpoint; its key is read from $OPENAI_API_KEY
    price: tuple[float, float] = (
        0.0,
        0.0,
    )  # dollars per million prompt and sampled tokens, for the sum in result.json
    name: str = ""  # run directory logs/<name>; empty: search-<task>-<mode>-<model>-<seed>
    gpu_memory: float = 0.85  # share of the GPU for the engine: its weights and its KV cache
    workers: int = 4  # nodes that run at once
    # budget of a tree: whichever is used up first; 0: no limit of that kind
    nodes: int = 12  # executed nodes, failed ones count
    tokens: int = 0  # sampled tokens, ideas included
    minutes: float = 0.0  # wall time
    patience: int = 0  # nodes in a row without a better one
    target: float | None = None  # a validation score that is good enough
    # ideas
    vs_variant: Literal["standard", "cot", "multi"] = (
        "standard"  # cot: a line of reasoning first; multi: two at a time
    )
    k: int = 5  # per call
    tau: float = 0.1  # tail: ideas are asked to be less probable than this
    use_probability: Literal["no", "order", "sample"] = (
        "no"  # which of the k is taken: first, most probable, drawn
    )
    scope: Literal["parent", "global"] = (
        "parent"  # global: prompts hold a summary of the whole tree
    )
    reflection: bool = False  # one more call per node: what has the tree taught so far?
    # selection
    select: Rule = "bfs"  # which node is built on next, see flatlab/tree/selection.py
    branching: int = 3  # bfs, mcts: children per node
    depth: int = 2  # bfs: levels below the root
    breadth: int = (
        3  # random, ucb, open-ended, softmax, signals: so many children of the root first
    )
    drafts: int = 5  # greedy, evolution: so many children of the root first
    debug_prob: float = 0.5  # all but bfs, mcts, linear, scientist: debug a failed leaf instead, with this probability
    debug_depth: int = 3  # failures in a row until a branch is given up
    ucb_c: float = 1.41  # ucb, open-ended, softmax: weight of the visit bonus
    uct_c: float = 0.25  # mcts: the same
    trend_weight: float = 0.5  # open-ended, softmax: weight of the trend along the path
    commitment: int = 2  # open-ended: nodes that stay on a path that gets better
    softmax_tau: float = 0.5  # softmax: temperature
    visit_alpha: float = 0.5  # softmax: weight of the visit penalty
    signals: tuple[Literal["variance", "regret", "coverage", "depth"], ...] = (
        "regret",
        "depth",
    )  # signals: their sum
    exploit_quantile: float = 0.75  # signals: nodes from here on are exploited
    crossover_prob: float = 0.5  # evolution
    population: int = 10  # evolution: the best so many are parents
    # episodes
    max_actions: int = 15  # replies per node
    end_on: Literal["validate", "submit"] = (
        "validate"  # validate: a node ends at its first valid score
    )
    max_reply_tokens: int = 0  # per reply; 0: 160 for the stand-in, else 2048
    max_observation_tokens: int = (
        0  # longer outputs keep head and tail; 0: 256 for the stand-in, else 2048
    )
    context: int = 0  # tokens of prompt and reply together; 0: 2048 for the stand-in, else 16384
    temperature: float = 1.0  # of sampling
    node_minutes: float = 30.0  # time limit of one node
    backend: Literal["auto", "docker", "local"] = (
        "auto"  # auto: docker when daemon and image are there
    )
    image: str = env.IMAGE  # Docker image of the sandboxes
    network: bool = False  # tasks that ask for the network get it
    hf_cache: str = (
        ""  # Hugging Face cache of this machine to mount for them instead, read-only (docker)
    )
    mlgym_root: str = ""  # an MLGym checkout; empty: $MLGYM_ROOT
    mledojo_root: str = ""  # an MLE-Dojo folder; empty: $MLEDOJO_ROOT
    # also to
    tensorboard: bool = (
        False  # rows and transcripts to logs/<run>/tensorboard (pip install tensorboard)
    )
    wandb: bool = False  # the same to Weights & Biases (pip install wandb); $WANDB_MODE=offline needs no account


async def scientist(t: Tree, cfg: Config) -> Choice | None:
    """The model reads the tree, looks into some nodes and names the next parent and strategy; it keeps five notes."""
    if t.running():  # it has to see the result of the last experiment first
        return None
    nodes = [t.nodes["0"], *t.finished]
    choice = Choice("0")
    notes = [n.decision["memory"] for n in t.finished if n.decision.get("memory")][-5:]
    talk = [
        {
            "role": "user",
            "content": prompts.LOOK.format(
                about=prompts.about(t.task),
                tree=prompts.tree_lines(nodes),
                notes="".join(f"Note: {note}\n" for note in notes),
                left=cfg.nodes - t.executed(),
            ),
        }
    ]
    look = await chat(t, choice, talk, "look", t.started())
    inspected = [
        i
        for i in map(int, prompts.NUMBER.findall(prompts.fields(look).get("inspect", "")))
        if 0 < i < len(nodes)
    ][:3]
    talk += [
        {"role": "assistant", "content": look},
        {
            "role": "user",
            "content": prompts.CHOOSE.format(
                details=prompts.details(nodes, inspected, summary_chars(cfg))
            ),
        },
    ]
    reply = prompts.fields(await chat(t, choice, talk, "choose", t.started()))
    number = prompts.NUMBER.search(reply.get("parent", ""))
    if number and int(number[0]) < len(nodes):
        choice.parent, choice.reason, choice.idea = (
            nodes[int(number[0])].id,
            "chosen by the model",
            reply.get("strategy", ""),
        )
    choice.phase = (
        reply.get("mode", "").lower()
        if reply.get("mode", "").lower() in ("explore", "exploit")
        else ""
    )
    choice.notes = {
        "memory": reply.get("memory", ""),
        "inspected": [nodes[i].id for i in inspected],
    }
    if not choice.reason:
        choice.reason = "fell back to the root: the reply named no experiment that exists"
        choice.notes["fell_back"] = True
    return choice


async def decide(t: Tree) -> Node | None:
    """The next node, or None: nothing to start before another one has ended."""
    async with t.deciding:
        if t.spent():
            return None
        rng = random.Random(stable(t.seed, "select", t.started()))
        choice = await scientist(t, t.cfg) if t.cfg.select == "scientist" else select(t, t.cfg, rng)
        return t.start(choice) if choice else None


async def chat(t: Tree, account, messages: list[dict], *purpose, most: int = 10**9) -> str:
    """One reply of at most `most` tokens. Its tokens go on the account of a node or choice. A prompt that leaves no room for a reply gets none."""
    prompt = t.policy.render(messages)
    room = min(most, t.cfg.max_reply_tokens, t.cfg.context - len(prompt))
    if room < 32:
        return ""
    try:
        sample = await t.policy.sample(
            prompt, room, temperature=t.cfg.temperature, seed=stable(t.seed, *purpose)
        )
    except OverflowError:  # an endpoint counts for itself
        return ""
    count(account, sample, prompt)
    return sample.text


def count(account, sample, prompt: list[int]) -> None:
    """Puts tokens on the account of a node or choice, as counted by an endpoint or by us."""
    account.prompt_tokens += getattr(sample, "prompt_tokens", len(prompt))
    account.tokens += getattr(sample, "reply_tokens", len(sample.tokens))


def summary_chars(cfg: Config) -> int:
    """Characters for other nodes' code and errors in a prompt: about a quarter of the context."""
    return min(6000, cfg.context * 3 // 4)


def reflection_tokens(cfg: Config) -> int:
    """Tokens of a reflection, which every prompt of the node then holds."""
    return max(32, cfg.context // 16)


def summary(t: Tree) -> str:
    tried = set().union(*(prompts.families(n.idea) for n in t.finished if n.idea))
    return (
        prompts.summary_of_tree(t.finished, set(prompts.FAMILIES) - tried, lambda n: n.improvement)
        if t.cfg.scope == "global"
        else ""
    )


async def list_ideas(t: Tree, node: Node) -> list:
    """Up to k (strategy, probability) for a child of node.parent: one call, or several (multi), and one more if too few came.

    tail: ideas whose stated probability is above tau do not count; what is still missing then is filled up with them.
    """
    cfg, found, above = t.cfg, {}, {}
    k = max(cfg.k, cfg.branching) if cfg.select == "bfs" else cfg.k
    siblings = [child for child in t.children(node.parent) if child is not node]
    prompt = prompts.ask(
        t.task,
        node.sampling_mode,
        k,
        cfg.tau,
        cfg.vs_variant,
        t.nearest_kept(node.parent),
        siblings,
        summary(t),
    )
    talk = [{"role": "user", "content": prompt}]
    for call in range(1 + (math.ceil(k / 2) if cfg.vs_variant == "multi" else 1)):
        if len(found) < k:
            reply = await chat(t, node, talk, t.call_of(node), "ideas", call)
            for idea, stated in prompts.parse(reply):
                too_probable = node.sampling_mode == "tail" and (stated or 0.0) > cfg.tau
                (above if too_probable else found).setdefault(prompts.same(idea), (idea, stated))
            missing = min(2, k - len(found)) if cfg.vs_variant == "multi" else k - len(found)
            talk += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": prompts.MORE.format(k=missing)},
            ]
    least_probable_first = sorted(above.values(), key=lambda idea: idea[1])
    return prompts.in_order(
        [*found.values(), *least_probable_first][:k],
        cfg.use_probability,
        random.Random(stable(t.seed, t.call_of(node), "order")),
    )


def mode_for(t: Tree, node: Node) -> str:
    """The sampling mode of a node: `local` when the rule exploits a parent that has a strategy to vary."""
    exploits = node.decision["phase"] == "exploit" and t.sampling_mode in ("uniform", "tail")
    return "local" if exploits and t.nearest_kept(node.parent).idea else t.sampling_mode


async def propose(t: Tree, node: Node) -> None:
    """Gives the node its idea. Fewer ideas than children: the rest go without one, as in mode none."""
    if t.cfg.select == "scientist":
        return
    if node.op == "debug":
        node.idea = t.nearest_kept(node.parent).idea
    elif node.op != "crossover" and t.sampling_mode != "none" and t.cfg.select != "linear":
        node.sampling_mode = mode_for(t, node)
        call = t.call_of(node)
        if call not in t.pending_ideas:
            t.pending_ideas[call] = asyncio.ensure_future(list_ideas(t, node))
        node.ideas = (
            t.pending_ideas[call]
            if isinstance(t.pending_ideas[call], list)
            else await t.pending_ideas[call]
        )
        number = int(node.id.rpartition(".")[2]) if t.cfg.select == "bfs" else 0
        if number < len(node.ideas):
            node.idea, node.probability = node.ideas[number]
            stated = node.probability or 0.0
            node.above_tau = node.sampling_mode == "tail" and stated > t.cfg.tau
    if t.cfg.reflection and t.finished:
        tree = prompts.clip(prompts.tree_lines([t.nodes["0"], *t.finished]), summary_chars(t.cfg))
        text = prompts.REFLECT.format(about=prompts.about(t.task), tree=tree)
        talk = [{"role": "user", "content": text}]
        node.decision["reflection"] = await chat(
            t, node, talk, node.id, "reflect", most=reflection_tokens(t.cfg)
        )


class Attempt(env.Env):
    """The environment of a node: its episode ends when `enough(step)` says so, too."""

    def step(self, reply, timeout=None):
        step = super().step(reply, timeout)
        return replace(step, done=step.done or self.enough(step))


class Counted:
    """The policy, as one node uses it: its tokens are on the node's account while it still runs."""

    def __init__(self, policy, node):
        self.policy, self.node = policy, node

    def __getattr__(self, name):
        return getattr(self.policy, name)

    async def sample(self, tokens, *args, **kwargs):
        sample = await self.policy.sample(tokens, *args, **kwargs)
        count(self.node, sample, tokens)
        return sample


async def play(t: Tree, node: Node, parents: list[Node]) -> tuple[env.Episode, bytes]:
    """The node's episode in a sandbox of its own, and a tar of the files it left. A fault is an episode with status "fault"."""
    cfg, files = t.cfg, b""
    box = Attempt(t.task, cfg.backend, node.seed, cfg.image, cfg.network, cfg.hf_cache)
    box.enough = lambda step: bool(
        cfg.end_on == "validate" and step.score and step.score.valid or 0 < cfg.tokens <= t.tokens()
    )
    about_tree = "\n".join(filter(None, [node.decision.get("reflection"), summary(t)]))
    left = 60 * cfg.minutes - t.elapsed() if cfg.minutes else math.inf
    try:
        if parents:
            await env.in_thread(box.restore, t.files_of(parents[0]))
        episode = await env.run_episode(
            box,
            Counted(t.policy, node),
            seed=node.seed,
            max_turns=cfg.max_actions,
            max_reply_tokens=cfg.max_reply_tokens,
            max_observation_tokens=cfg.max_observation_tokens,
            temperature=cfg.temperature,
            time_limit=max(1.0, min(60 * cfg.node_minutes, left)),
            keep_open=True,
            extra_user_text=prompts.situation(node, parents, summary_chars(cfg), about_tree),
        )
        if episode.status != "fault":
            with contextlib.suppress(
                env.SandboxFault
            ):  # too large: the score counts, but nothing can build on this node
                files = await env.in_thread(box.snapshot)
    except env.SandboxFault as fault:
        episode = env.Episode(t.task.name, node.seed, status="fault", fault=str(fault))
    finally:
        await asyncio.shield(env.in_thread(box.close))
    return episode, files


async def expand(t: Tree, node: Node) -> None:
    """One node from its idea to its line in the journal. A broken sandbox is tried once more, then it is a fault, not a score."""
    start, t.began = time.monotonic(), t.began or time.monotonic()
    await propose(t, node)
    parents = [
        p for p in (t.nearest_kept(node.parent), t.nodes.get(node.second)) if p and p.id != "0"
    ]
    for node.attempts in (1, 2):
        episode, files = await play(t, node, parents)
        if episode.status != "fault":
            break
    last, score = episode.turns[-1] if episode.turns else {}, episode.score
    node.status, node.actions, node.kept, node.time = (
        episode.status,
        episode.turns,
        bool(files),
        time.time(),
    )
    if node.status == "submit" and last["status"] != "submit":
        node.status = "validated" if last["status"] == "validate" else "stopped"
    if score and score.valid:
        node.score, node.improvement, node.valid = (
            score.value,
            improvement(score.value, t.task),
            True,
        )
    else:
        bad = [
            turn["observation"]
            for turn in episode.turns
            if turn["status"] in ("error", "timeout", "rejected")
        ][-1:]
        node.error = prompts.clip(
            "\n".join([*bad, score.message if score else episode.fault]), 2000
        )
    node.code, old = code_in(files, t.task), parents[0].code if parents else {}
    node.diff = (
        "".join(
            "".join(
                difflib.unified_diff(
                    old.get(name, "").splitlines(True), text.splitlines(True), name, name
                )
            )
            for name, text in node.code.items()
        )
        if parents
        else ""
    )
    if files:
        await env.in_thread(viz.write_whole, t.tar_of(node), files)
    segments = (
        [asdict(segment) for segment in episode.segments] if t.cfg.engine != "api" else []
    )  # what one can train on
    t.run.save_episodes(
        node.order,
        [episode.to_dict() | {"node": node.id, "group": node.parent, "segments": segments}],
    )
    node.seconds, node.elapsed = time.monotonic() - start, t.elapsed()
    t.run.log(asdict(node) | {"depth": node.depth}, "journal.jsonl")  # from here on the node counts
    t.finished.append(node)
    stale = (
        {}
        if t.run.results().get("tested_id") in (None, t.best().id)
        else {
            "test_score": None,
            "test_minus_validation": None,
            "test_error": "",
            "tested_id": None,
        }
    )  # of an earlier, shorter search
    t.run.result(**results(t) | stale, status="running")
    if len(t.finished) > 2 and all(n.status == "fault" for n in t.finished[-3:]):
        raise UserError(
            f"Three sandboxes in a row broke, so the search stops; the same command goes on. The last one: {node.error}"
        )


async def close(t: Tree) -> None:
    """The end: the best node by validation is scored on the test part. A node that has been is not scored again."""
    best, known = t.best(), t.run.results()
    if known.get("tested_id") == best.id:
        test = {key: known[key] for key in ("test_score", "test_error", "test_minus_validation")}
    elif best.id == "0" or len(t.task.splits) == 1 or not best.kept:
        test = {
            "test_score": best.score if len(t.task.splits) == 1 else None,
            "test_minus_validation": None,
            "test_error": ""
            if best.kept or best.id == "0"
            else "the files of the best node could not be kept",
        }
    else:
        score = await test_score(
            t, best
        )  # valid on one part and not on the other: worth the baseline
        value = score.value if score.valid else t.task.baseline
        test = {
            "test_score": value,
            "test_minus_validation": value - best.score,
            "test_error": score.message,
        }
    t.run.result(
        **results(t) | {"stopped_by": t.spent() or "tree"} | test,
        tested_id=best.id,
        status="finished",
    )
    t.closed = True


async def test_score(t: Tree, node: Node) -> env.Score:
    for last in (False, True):
        box = Attempt(t.task, t.cfg.backend, node.seed, t.cfg.image, t.cfg.network, t.cfg.hf_cache)
        try:
            await env.in_thread(box.restore, t.files_of(node), False)
            return await env.in_thread(box.score, t.task.splits[-1])
        except env.SandboxFault as fault:
            if last:
                raise UserError(
                    f"The sandbox for the test score broke twice ({fault}); the same command tries again."
                ) from None
        finally:
            await asyncio.shield(env.in_thread(box.close))


async def worker(trees: list[Tree], changed: asyncio.Condition, say) -> None:
    """Runs one node after the other, always in the tree that has the fewest in flight; ends the trees that are complete."""
    complete = lambda: [t for t in trees if not (t.closed or t.busy) and (t.waiting or t.spent())]
    ready = lambda: [t for t in trees if not (t.closed or t.waiting or t.spent())]
    while not all(t.closed for t in trees):
        async with (
            changed
        ):  # time passes meanwhile, so a tree may be spent from one call of spent() to the next
            todo = await changed.wait_for(
                lambda: complete() or ready() or all(t.closed for t in trees)
            )
        if todo is True:
            break
        t = min(todo, key=lambda t: t.busy)
        t.busy += 1
        if t.busy == 1 and (t.waiting or t.spent()):
            await close(t)
        else:
            node = await decide(t)
            if node:
                await expand(t, node)
                say(t, node)
            t.waiting = node is None
        t.busy -= 1
        async with changed:
            changed.notify_all()


async def search(trees: list[Tree], policy, workers: int) -> None:
    changed, began, left = (
        asyncio.Condition(),
        time.monotonic(),
        sum(t.cfg.nodes - t.executed() for t in trees),
    )
    done = itertools.count(1)

    def say(t, node):
        eta = (time.monotonic() - began) / (now := next(done)) * (left - now)
        print(node_line(t, node, eta), flush=True)

    for t in trees:
        t.policy = policy
        t.run.result(status="running")
    try:
        async with (
            asyncio.TaskGroup() as group
        ):  # one is cancelled or breaks: all are, and every sandbox is closed
            for _ in range(workers):
                group.create_task(worker(trees, changed, say))
    except* UserError as broken:
        raise broken.exceptions[0] from None


TITLES = "task           mode     seed   nodes node       op            score      best    sec    left  strategy"


def short_id(id: str) -> str:
    """An id that fits its column: of a long one the end."""
    return id if len(id) <= 10 else f"…{id[-9:]}"


def node_line(t: Tree, node: Node, eta: float) -> str:
    score = f"{node.score:.4f}" if node.valid else "fault" if node.status == "fault" else "failed"
    note = "  (fell back to the root)" if node.decision.get("fell_back") else ""
    return (
        f"{t.task.name[:14]:<14} {node.sampling_mode:<8} {t.seed:>4} {len(t.finished):>3}/{t.cfg.nodes:<3} {short_id(node.id):<10} {node.op:<9} {score:>9} "
        f"{t.best().score:>9.4f} {node.seconds:>6.1f} {viz.duration(max(0.0, eta)):>7}  {node.idea[:60]}{note}"
    )


# ---------------------------------------------------------------------------------------------------------------- start


MAY_CHANGE = (
    "nodes",
    "tokens",
    "minutes",
    "patience",
    "target",
    "workers",
    "price",
    "url",
    "mlgym_root",
    "mledojo_root",
    "tensorboard",
    "wandb",
)


NO_SAMPLING_MODE = ("linear", "scientist")  # they ask for no lists of ideas, and go node by node

BOUNDS = {
    "nodes": (1, 1e6),
    "workers": (1, 1000),
    "k": (1, 50),
    "tau": (1e-9, 1),
    "max_actions": (1, 1e6),
    "depth": (1, 1e6),
    "branching": (1, 1e6),
    "breadth": (1, 1e6),
    "drafts": (1, 1e6),
    "population": (1, 1e6),
    "softmax_tau": (1e-9, 1e9),
    "exploit_quantile": (0, 1),
    "debug_prob": (0, 1),
    "crossover_prob": (0, 1),
    "node_minutes": (0.01, 1e6),
    "gpu_memory": (0.01, 1),
    "temperature": (0, 100),
    "target": (-math.inf, math.inf),
}  # all others: not negative


def prepare(cfg: Config):
    """Fills what is left open in the config and finds everything that can be wrong, before any model is loaded."""
    tasks = [
        load_task(name, cfg.mlgym_root or None, cfg.mledojo_root or None)
        for name in dict.fromkeys(cfg.task)
    ]
    room = sum(cfg.branching**level for level in range(1, cfg.depth + 1))
    if cfg.select == "bfs" and room < cfg.nodes:
        raise UserError(
            f"A bfs tree of --branching {cfg.branching} and --depth {cfg.depth} has {room} nodes, not --nodes {cfg.nodes}."
        )
    viz.check_numbers(cfg, BOUNDS, (0, math.inf))
    if cfg.select in NO_SAMPLING_MODE:
        cfg.sampling_mode = ("none",)
    if not (cfg.task and cfg.sampling_mode and cfg.seed and cfg.signals):
        raise UserError(
            "--task, --sampling-mode, --seed and --signals need at least one value each."
        )
    if cfg.engine == "api" and cfg.model == "auto":
        raise UserError("--engine api needs --model: the name under which the endpoint knows it.")
    if cfg.model == "auto":
        import torch

        cfg.model = "Qwen/Qwen3-4B-Instruct-2507" if torch.cuda.is_available() else "tiny"
    path = None if cfg.engine == "api" or cfg.model == "tiny" else resolve_model(cfg.model)
    tiny = cfg.engine != "api" and (path is None or path.is_tiny)
    cfg.backend, why = env.pick_backend(cfg.backend, cfg.image, tiny)
    for task in tasks:
        env.check_needs(task, cfg.backend, cfg.network, cfg.hf_cache)
    for name, for_tiny, otherwise in (
        ("max_reply_tokens", 160, 2048),
        ("max_observation_tokens", 256, 2048),
        ("context", 2048, 16384),
    ):
        setattr(cfg, name, getattr(cfg, name) or (for_tiny if tiny else otherwise))
    if cfg.max_reply_tokens >= cfg.context:
        raise UserError(
            f"--max-reply-tokens {cfg.max_reply_tokens} leaves no room for a prompt in --context {cfg.context}."
        )
    model = cfg.model.strip("/").removesuffix("/best").split("/")[-1]
    kind = "search" if cfg.select == "bfs" else f"search-{cfg.select}"
    cells, trees = (
        list(itertools.product(tasks, dict.fromkeys(cfg.sampling_mode), dict.fromkeys(cfg.seed))),
        [],
    )
    grid = Path("logs") / (cfg.name or f"{kind}-grid-{model}") if len(cells) > 1 else None
    if grid and (grid / "config.yaml").exists():
        raise UserError(
            f"{grid} is a run of its own, so a grid cannot be written there: take another --name."
        )
    for task, mode, seed in cells:
        name = (
            grid / f"{task.name}-{mode}-{seed}"
            if grid
            else Path("logs") / (cfg.name or f"{kind}-{task.name}-{mode}-{model}-{seed}")
        )
        run = viz.open_run(
            name,
            asdict(cfg)
            | {"task": task.name, "sampling_mode": mode, "seed": seed, "name": name.name},
            MAY_CHANGE,
        )
        (run.dir / "nodes").mkdir(exist_ok=True)
        run.trackers = trackers.opened(run.dir, run.config, cfg.tensorboard, cfg.wandb)
        trees.append(Tree(task, mode, seed, cfg, run))
        trees[-1].closed = run.results().get("status") == "finished" and bool(
            trees[-1].spent() or run.results()["stopped_by"] == "tree"
        )
    return trees, grid, path, tiny, why


def make_policy(cfg: Config, path):
    if cfg.engine == "api":
        from flatlab.tree.endpoint import Endpoint

        return Endpoint(cfg.url, cfg.model, context=cfg.context, temperature=cfg.temperature)
    path = path or resolve_model(cfg.model)
    if cfg.engine == "hf":
        from policy import Transformers

        return Transformers(path, context=cfg.context, temperature=cfg.temperature)
    return Policy(
        path,
        context=cfg.context,
        temperature=cfg.temperature,
        seed=cfg.seed[0],
        max_batch=max(8, cfg.workers),
        gpu_memory=cfg.gpu_memory,
        trains=False,
    )


def main() -> None:
    threads.configure()
    cfg = viz.parse_config(Config, sys.argv[1:])
    trees, grid, path, tiny, why = prepare(cfg)
    todo = [t for t in trees if not t.closed]
    where = grid or trees[0].run.dir
    stand_in = (
        "  (a stand-in that only knows the built-in tasks: for trying things out, not for results)"
        if tiny
        else ""
    )
    before = f"; {len(trees) - len(todo)} of them finished before" if len(todo) < len(trees) else ""
    note = (
        f"note     {cfg.select} uses no sampling mode and runs one node of a tree at a time\n"
        if cfg.select in NO_SAMPLING_MODE
        else ""
    )
    for reason in {f"{t.task.name}: {degenerate(t.task)}" for t in trees if degenerate(t.task)}:
        print(f"warning  {reason}")
    print(
        f"tasks    {', '.join(cfg.task)}   modes {', '.join(cfg.sampling_mode)}   seeds {', '.join(map(str, cfg.seed))}\n"
        f"model    {cfg.model}{stand_in}\n"
        f"sandbox  {why}\n"
        f"plan     {len(trees)} trees of {cfg.nodes} nodes, rule {cfg.select}, {cfg.workers} nodes at once{before}\n"
        f"{note}"
        f"run      {where}   ({sum(len(t.finished) for t in trees)} nodes are there)",
        flush=True,
    )
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # `nohup ... &` has it ignored, and the next line needs it
    signal.signal(
        signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)
    )  # close sandboxes, say how to go on
    try:
        if todo:
            policy = make_policy(cfg, path)
            print(TITLES, flush=True)
            asyncio.run(search(todo, policy, cfg.workers))
    except KeyboardInterrupt:
        for t in trees:
            if not t.closed:
                t.run.result(status="interrupted")
        print(
            f"\ninterrupted; the same command continues {where}: only nodes that were running are run again",
            file=sys.stderr,
        )
        sys.exit(130)
    except UserError as error:
        for t in trees:
            if not t.closed:
                t.run.result(status=f"stopped: {error}")
        raise
    cells = [t.run.results() for t in trees]
    rows = stats.grid_table(cells)
    print(f"\n{stats.text_of(rows)}")
    if grid:
        viz.write_whole(
            grid / "result.json",
            json.dumps(viz.plain({"cells": cells, "table": rows}, finite=True), indent=1) + "\n",
        )
        viz.write_whole(grid / "table.txt", stats.text_of(rows) + "\n")
    else:  # the pictures of a grid take minutes: viz.py draws them when somebody wants to look
        plot_now_and_then(trees[0].run, always=True)
        page.write([viz.read_run(where)], where / "report.html")
        best, cell = trees[0].best(), cells[0]
        test = "none" if cell["test_score"] is None else f"{cell['test_score']:.4f}"
        scores = f"validation {best.score:.4f}, test {test}"
        if cell["selected_on_test"]:  # there is no validation part
            scores = f"test {best.score:.4f} (chosen on it, so optimistic)"
        print(f"\nbest     {best.id}: {scores}, baseline {cell['baseline']:.4f}   {best.idea}")
        used = ", ".join(f"{m} {n}" for m, n in cell["sampling_modes_used"].items())
        print(f"modes    asked for {cell['sampling_mode']}, used: {used}")
        if cell["node_stderr"] is not None:
            print(
                f"nodes    {cell['node_mean']:.4f} ± {cell['node_stderr']:.4f} on average ({'test' if cell['selected_on_test'] else 'validation'}, "
                f"n={cell['nodes'] - cell['faults']}, failed ones count with the baseline), {cell['valid_share']:.0%} valid"
            )
        print(f"tree: {where}/tree.png   page: {where}/page.html", end="   ")
    print(f"everything: {where}   (python viz.py {where})")


if __name__ == "__main__":
    viz.one_sentence(main)
