"""search.py with a fake model and fake episodes, then in real sandboxes, then the real script."""

import asyncio
import contextlib
import itertools
import random
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import search
from flatlab.errors import SandboxFault, UserError
from flatlab.files import read_mapping, read_rows
from flatlab.model.path import ModelPath
from flatlab.runs import start
from flatlab.runs.store import EPISODES, transcript_reader
from flatlab.sandbox import snapshot
from flatlab.task.grading import Score
from flatlab.tree.nodes import Tree, open_trees, result_json
from flatlab.view import compare, console
from flatlab.view.reader import read_run
from flatlab.view.results import best_node, numbers_on_test_part, outcome_sentences, states
from helpers import (
    AGENT_TEXTS,
    PROJECT,
    RIGHT,
    FakePolicy,
    block,
    half_break,
    killed_and_continued,
    parsed,
    refuses,
    search_config,
    segments_of,
    slow,
    turn,
    user_error,
    within,
)
from tasks import load_task

TASK = replace(load_task("titanic", "", ""), baseline=0.5, reference=1.0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, quick_provenance):
    monkeypatch.chdir(tmp_path)


def lists(prompt, seed):
    """Five strategies that depend on the seed."""
    rng = random.Random(seed)
    return "\n".join(
        f"Strategy: plan {rng.randrange(10**6)}\nProbability: 0.0{i + 1}" for i in range(5)
    )


PLAYED = []  # ids of the nodes that the last run has played


def fake_play(score_of, delay, stderr):
    """A search.play_node without a sandbox. score_of(node): a number, None (not valid) or "fault".

    The files of a node are its id. stderr: standard error of all scores.
    """

    async def play(t, node, parents):
        PLAYED.append(node.id)
        await asyncio.sleep(delay(node))
        node.tokens += 10
        node.turns = [turn(status="submit")]
        node.packed = b"x"
        value = score_of(node)
        if value == "fault":
            node.status, node.fault = "fault", "broke"
            node.judge(t.task, None)
            return b""
        node.status = "turn_limit" if value is None else "submit"
        scored = "accuracy", "validation", value is not None
        node.judge(t.task, Score(value, *scored, "no submission", stderr=stderr))
        return b"\0" * 10240 + f"{{{node.id}}}".encode()

    return play


def by_seed(node):
    """A score that depends on the node's seed; a third of the nodes fail."""
    rng = random.Random(node.seed)
    return None if rng.random() < 0.3 else rng.random()


def equal(node):
    return 0.6


class FakeEnv(contextlib.nullcontext):
    """Scores the files of a node on a hidden part."""

    hidden = {}  # (split, node id) -> score, None (not valid) or SandboxFault; others: 0.75
    read = []  # (split, node id) of each score

    def __init__(self, *_):
        super().__init__(self)

    def crash_score(self, fault, split):
        return None

    def restore(self, files, *_):
        self.name = files.decode().strip("\0{}")

    def score(self, split):
        value = self.hidden.get((split, self.name), 0.75)
        if value is SandboxFault:
            raise SandboxFault("it broke")
        self.read.append((split, self.name))
        return Score(value, "accuracy", split, value is not None, "", stderr=0.03)


def opened(tasks=(TASK,), modes=("tail",), seeds=(0,), **config):
    """The trees of a search in logs/a. config: options of search.py."""
    sizes = {"context": 50_000, "max_reply_tokens": 2000, "max_observation_tokens": 2000}
    usual = {"name": "a", "backend": "local", "workers": 1} | sizes
    cfgs = []
    for task, mode, seed in itertools.product(tasks, modes, seeds):
        cell = {"task": task.name, "sampling_mode": mode, "seed": seed}
        cfgs.append(search_config(**usual | cell | config))
    by_name = {task.name: task for task in tasks}
    rule = search.SELECT[cfgs[0].select]
    return open_trees(search.named(cfgs, "search"), by_name, rule, None)[0]


def grow(trees, model):
    try:
        todo = [t for t in trees if not t.closed]
        growing = search.search(todo, model, trees[0].cfg.workers)
        asyncio.run(asyncio.wait_for(growing, 120))
    finally:
        for t in trees:
            t.run.lock.close()


def run(
    score_of=by_seed,
    model=None,
    delay=lambda node: 0.0,
    stderr=None,
    hidden=None,
    **config,
):
    """One tree, or several, of a search with fake episodes. config: see opened()."""
    trees = opened(**config)
    FakeEnv.hidden = hidden or {}
    FakeEnv.read = []
    PLAYED.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "play_node", fake_play(score_of, delay, stderr))
        patch.setattr(search.env, "Env", FakeEnv)
        grow(trees, model or FakePolicy(lists))
    return trees if len(trees) > 1 else trees[0]


def shape(t):
    names = ("op", "idea", "probability", "score", "seed")
    return {id: [getattr(node, name) for name in names] for id, node in t.nodes.items()}


def rows(t):
    return read_rows(t.run.dir / EPISODES)


def counts(t, key):
    """Returns how often each value of a key is in the rows."""
    return Counter(row[key] for row in rows(t))


def by_id(t):
    """The row of each node with its texts."""
    transcript_of = transcript_reader(t.run.dir)
    return {row["id"]: row | transcript_of(row) for row in rows(t)}


def has(t, **expected):
    """Asserts that result.json has these values."""
    found = read_mapping(t.run.dir / "result.json")
    assert {key: found[key] for key in expected} == expected


def run_of(t):
    """The run as viz.py reads it."""
    return read_run(t.run.dir)


def headline(t):
    return " ".join(outcome_sentences(run_of(t)))


def table(t):
    return compare.table([run_of(t)])


# ------------------------------------------------------------------ budgets


@pytest.mark.parametrize("select, workers", [("bfs", 4), *((name, 1) for name in search.SELECT)])
def test_budget_k_executes_k(select, workers):
    t = run(select=select, workers=workers, nodes=11)
    assert len(PLAYED) == len(rows(t)) == len(by_id(t)) == 11
    has(t, stopped_by="nodes", tokens=sum(row["tokens"] for row in rows(t)))
    assert all(row["decision"]["reason"] for row in rows(t))


def test_a_strategy_cannot_steer_the_terminal(capsys):
    strategy = "clear\x1b[2J the screen\u202e"
    t = run(equal, FakePolicy(lambda _, seed: f"Strategy: {strategy} {seed}"), nodes=2)
    console.print_end([t])
    said = capsys.readouterr().out
    assert said.count("clear·[2J the screen·") == 3
    assert not {"\x1b", "\u202e"} & set(said)


def test_without_a_valid_node_there_is_no_best_one_and_the_reasons_are_named():
    t = run(score_of=lambda node: None, nodes=12)
    has(t, nodes=12, value=-1, best_id=None, tested_id=None)
    assert counts(t, "outcome") == {"failed": 12} and counts(t, "value") == {-1: 12}
    assert {row["error"] for row in by_id(t).values()} == {"no submission"}
    assert console.node_line(t, t.nodes["0.0"]).endswith("  no submission")
    found = best_node(run_of(t))
    assert (found["value_mean"], found["valid_share"], found["score_mean"]) == (-1, 0, None)
    said = "No valid node. 12 of 12 nodes failed (value -1): 12 x no submission; 0 faults."
    assert headline(t).startswith(said)


def test_the_rules_see_a_node_finish_at_once(monkeypatch):
    """Another thread writes its files, while rules may decide."""
    seen = []
    keep = Tree.keep

    def watched(t, node, files):
        code = keep(t, node, files)
        seen.append((node in t.running, node.valid, node.kept, node.code))
        return code

    monkeypatch.setattr(Tree, "keep", watched)
    t = run(equal, nodes=3)
    assert seen == [(True, False, False, {})] * 3
    assert all(node.valid and node.kept for node in t.finished)


def test_the_best_node_of_a_task_with_a_test_part_only_is_optimistic():
    tasks = [replace(TASK, splits=("test",))]
    t = run(tasks=tasks, select="greedy", nodes=4, score_of=equal)
    has(t, selected_on_test=True, split="test", best_id="0.0", tested_id="0.0")
    assert best_node(run_of(t))["score_mean"] == 0.6
    assert FakeEnv.read == []  # it is the score that the search sees
    assert "on the test part." in headline(t)


THREE = {"0.0": 0.80, "0.1": 0.79, "0.2": 0.70}  # one standard error, 0.02, is below the third


def finished(hidden, name="a", **options):
    """The tree of a search over the nodes of THREE."""
    options = {"score_of": lambda node: THREE[node.id], "stderr": 0.02} | options
    return run(name=name, nodes=3, hidden=hidden, **options)


def test_the_selection_part_decides_between_nodes_within_one_standard_error():
    hidden = {("selection", "0.0"): 0.70, ("selection", "0.1"): 0.76, ("test", "0.1"): 0.74}
    t = finished(hidden)
    assert FakeEnv.read == [("selection", "0.0"), ("selection", "0.1"), ("test", "0.1")]
    has(t, selected_on_test=False, best_id="0.1", tested_id="0.1", value=pytest.approx(0.48))
    chosen = by_id(t)["0.1"]
    assert (chosen["score"], chosen["stderr"]) == (0.79, 0.02)
    assert t.run.result["hidden_scores"]["0.1"]["selection"]["score"] == 0.76
    numbers = {"score": 0.74, "stderr": 0.03, "improvement": 0.48, "value": 0.48}
    assert numbers_on_test_part(run_of(t)) == pytest.approx(numbers | {"error": ""})
    found = best_node(run_of(t))
    assert (found["score_mean"], found["rows_error"], found["part"]) == (0.74, 0.03, "test")
    assert finished(hidden).best().id == "0.1"  # as it is read again
    # The mean of both parts counts: 0.0 stays ahead if it loses less than it had gained.
    t = finished(hidden | {("selection", "0.0"): 0.755}, "b")
    has(t, best_id="0.0")
    assert numbers_on_test_part(run_of(t))["score"] == 0.75
    # Not valid on a hidden part: a failure.
    t = finished({("test", "0.0"): None}, "c")
    has(t, value=-1)
    assert numbers_on_test_part(run_of(t))["score"] is None
    assert "the best node is not valid on the test part" in headline(t)
    t = finished({("selection", "0.0"): None, ("selection", "0.1"): 0.5}, "d")
    has(t, best_id="0.1")
    # Without that part the best by validation is chosen.
    finished(hidden, "e", tasks=[replace(TASK, splits=("validation", "test"))])
    assert FakeEnv.read == [("test", "0.0")]


def test_a_search_stopped_at_the_end_resumes_without_scoring_twice():
    for breaks, read in (("selection", "0.1"), "0.0"), (("test", "0.0"), "0.1"):
        with pytest.raises(ExceptionGroup) as error:
            finished({breaks: SandboxFault})
        assert error.group_contains(SandboxFault)
        assert FakeEnv.read == [("selection", read)]
    t = finished({})
    assert FakeEnv.read == [("test", "0.0")]
    has(t, status="finished")
    t = finished({})
    assert FakeEnv.read == []
    assert numbers_on_test_part(run_of(t))["score"] == 0.75


def test_a_finished_tree_stays_as_it_is():
    """Its time may have run out while it waited for a slot, after its last node."""

    def once_more(minutes, nodes=2):
        [tree] = opened(minutes=minutes, nodes=nodes)
        tree.run.lock.close()
        return tree

    tree = once_more(1.0)
    ended = {"tested_id": "0", "seconds": 61.0, "stopped_by": "minutes", "status": "finished"}
    tree.run.update_result(**result_json(tree) | ended)
    assert once_more(1.0, nodes=3).closed
    assert read_mapping(tree.run.dir / "config.yaml")["nodes"] == 2
    tree = once_more(2.0)
    assert not (tree.closed or tree.spent())
    assert once_more(1.01).spent() == "minutes"  # 61 seconds are over


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9/v1"])
def test_tokens_are_kept_unless_they_are_those_of_an_endpoint(url, monkeypatch):
    monkeypatch.setattr(start.endpoint, "check_url", lambda url: None)  # nobody is there
    t = run(nodes=1, url=url)
    assert (t.run.dir / "transcripts/000000.tokens.jsonl.gz").exists() == (url is None)


# ------------------------------------------------------------------ faults


def test_a_fault_is_tried_once_more_and_is_never_a_score():
    def score(node):
        is_fault = node.id == "0.2" or PLAYED.count("0.1") == 1 and node.id == "0.1"
        return "fault" if is_fault else 0.6

    t = run(score_of=score, nodes=12)
    nodes = by_id(t)
    assert (nodes["0.1"]["score"], PLAYED.count("0.2")) == (0.6, 2)
    assert (nodes["0.2"]["value"], nodes["0.2"]["reason"]) == (None, "broke")
    assert nodes["0.2.0"]["op"] == "draft"  # nothing was left there: it starts from the files above
    assert counts(t, "outcome") == {"valid": 11, "fault": 1}
    has(t, nodes=12)
    assert best_node(run_of(t))["valid_share"] == 1


def test_three_faults_in_a_row_stop_the_search_with_a_sentence():
    with pytest.raises(ExceptionGroup) as error:
        run(score_of=lambda node: "fault", nodes=12)
    assert error.group_contains(UserError, match="Three sandboxes in a row broke")


# ------------------------------------------------------------------ the same tree


def test_bfs_grows_the_same_tree_with_any_number_of_workers_and_another_from_another_seed():
    def grown(workers):
        t = run(name=str(workers), workers=workers, delay=lambda node: 0.02 * random.random())
        return shape(t)

    assert grown(1) == grown(3) == grown(8) != shape(run(seed=1))


def cut_run(whole, name, kept, torn=b""):
    """A copy of a run of which only the rows of some nodes are there, and a part of one."""
    copy = whole.run.dir.with_name(name)
    shutil.copytree(whole.run.dir, copy)
    (copy / "result.json").unlink()
    file = copy / EPISODES
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:kept]) + torn)
    return name


@pytest.mark.parametrize("select", ["open_ended", *map(slow, ("bfs", "evolution", "ucb", "mcts"))])
def test_a_cut_table_is_continued_to_the_same_tree(select):
    """After kill -9 no node that has a row is run again, and the rest comes out the same."""
    options = {"select": select, "nodes": 9}
    whole = run(**options)
    torn_lines = {0: b"", 1: b'{"id": "0.', 4: b"{}", 8: b"", 9: b""}
    for kept, torn in torn_lines.items():
        again = run(name=cut_run(whole, str(kept), kept, torn), **options)
        assert len(PLAYED) == 9 - kept
        assert shape(again) == shape(whole)
        assert [r["decision"] for r in rows(again)] == [r["decision"] for r in rows(whole)]


def test_resumed_bfs_does_not_ask_again_for_ideas_that_it_has():
    whole = run()
    model = FakePolicy(lists)
    run(name=cut_run(whole, "cut", 2), model=model)
    asked = sum("Strategy: <one" in prompt for prompt in model.prompts)
    assert asked == sum(n.valid for n in whole.root.children)  # one per parent, none for the root


def test_the_test_score_of_an_earlier_best_node_does_not_stay():
    """Given more nodes, and killed when a better one was found."""

    def score(node):
        if node.id == "0.0.0":
            raise KeyboardInterrupt
        return 0.9 if node.id == "0.2" else 0.6

    t = run(nodes=2, score_of=score)
    with pytest.raises((KeyboardInterrupt, BaseExceptionGroup)):
        run(nodes=8, score_of=score)
    has(t, best_id="0.2", tested_id=None, value=pytest.approx(0.8), status="running")
    assert numbers_on_test_part(run_of(t)) == {}


def test_a_second_look_at_the_test_part_is_counted_and_said():
    scores = {"0.0": 0.6, "0.1": 0.7, "0.2": 0.8, "0.0.0": 0.5}
    for reads, nodes in enumerate((1, 2, 4), 1):
        t = run(nodes=nodes, score_of=lambda node: scores[node.id])
        has(t, best_id=f"0.{reads - 1}")
        assert states(run_of(t))["test_reads"] == reads
    assert "more --nodes has read the test part 3 times" in table(t)


def test_time_runs_out_between_two_looks_at_the_clock(monkeypatch):
    """Nothing is running then, and the tree is closed all the same."""
    looks = []
    spent = Tree.spent

    def no_time(self):
        looks.append(len(self.finished))
        # not yet on the first look after the second node
        return "minutes" if looks.count(2) > 1 else spent(self)

    monkeypatch.setattr(Tree, "spent", no_time)
    t = run(nodes=9, score_of=equal)
    has(t, status="finished", stopped_by="minutes")
    assert len(rows(t)) == 2


# ------------------------------------------------------------------ ideas


def requests_for_ideas(model):
    return [prompt for prompt in model.prompts if "Answer with th" in prompt]


@pytest.mark.parametrize("mode", search.MODES)
def test_modes(mode):
    model = FakePolicy(lists)
    t = run(sampling_mode=mode, model=model, nodes=4, score_of=equal)
    row = by_id(t)["0.1"]
    is_asked = mode != "none"
    assert row["sampling_mode"] == mode
    assert len(requests_for_ideas(model)) == 2 * is_asked
    assert len(row["ideas"]) == 5 * is_asked
    assert row["probability"] == (0.02 if is_asked else None)


def test_too_few_ideas_one_more_call_then_fewer_and_never_invented_ones():
    """A node without a strategy is counted under the mode none."""
    model = FakePolicy("Strategy: the only one\nProbability: 5%")
    one = run(model=model, nodes=3, workers=3, score_of=equal)
    assert sorted(row["idea"] for row in rows(one)) == ["", "", "the only one"]
    assert len(model.prompts) == 2
    assert "List 4 more" in model.prompts[1]
    assert counts(one, "sampling_mode") == {"tail": 1, "none": 2}
    assert "2 of 3 nodes got no strategy" in table(one)
    damaged = '[{"text": "a "b" c"}, {"text": "d", "probability": 0.01}]'
    t = run(name="damaged", model=FakePolicy(damaged), select="greedy", nodes=3, score_of=equal)
    assert {row["idea"] for row in rows(t)} == {"d"}
    assert "6 strategies in replies could not be read" in table(t)


def test_ideas_above_tau_are_asked_for_again_and_marked():
    first = "Strategy: usual\nProbability: 0.6\nStrategy: rare\nProbability: 0.05"
    second = "Strategy: odd\nProbability: 0.02\nStrategy: common\nProbability: 0.4\n"
    model = FakePolicy(first, f"{second}Strategy: rare\nProbability: 0.7")
    t = run(model=model, nodes=3, k=3, score_of=equal)
    assert "List 2 more" in model.prompts[1]
    ideas = {row["idea"]: row["probability"] for row in rows(t)}
    assert ideas == {"rare": 0.05, "odd": 0.02, "common": 0.4}
    t = run(name="b", model=FakePolicy(first), sampling_mode="uniform", nodes=2, k=2)
    assert {row["idea"] for row in rows(t)} == {"usual", "rare"}


def test_exploiting_asks_for_variations_and_says_so():
    model = FakePolicy(lists)
    t = run(model=model, score_of=equal, select="ucb", rule_args=("c=0",), nodes=6)
    assert "Tried already" not in model.prompts[0]
    assert model.prompts[2].count("Score: 0.6") == 2
    assert "variations of the strategy so far" in model.prompts[3]
    assert counts(t, "sampling_mode") == {"tail": 3, "local": 3}


def test_global_scope_shows_other_branches():
    model = FakePolicy(lists)
    run(model=model, score_of=equal, scope="global", nodes=4)
    assert any("experiments so far" in prompt for prompt in model.prompts)


# ------------------------------------------------------------------ grids


def test_a_grid_shares_the_workers_and_has_a_page(capsys):
    changes = []  # of the number of nodes that run

    def starts(node):
        changes.append(1)
        return 0.1

    def ends(node):
        changes.append(-1)
        return by_seed(node)

    other = replace(TASK, name="other", higher_is_better=False, reference=0.0)
    grid = {"tasks": (TASK, other), "modes": ("none", "tail")}
    trees = run(nodes=4, workers=6, delay=starts, score_of=ends, **grid)
    assert 4 < max(itertools.accumulate(changes)) <= 6  # a tree has four nodes
    for tree in trees[2:]:  # of the task where lower is better
        scores = {row["score"]: row["id"] for row in rows(tree) if row["outcome"] == "valid"}
        has(tree, best_id=scores[min(scores)])  # also where it is below the baseline
    where = trees[0].run.dir.parent
    console.print_end(trees)
    assert (where / "report.html").exists()
    assert capsys.readouterr().out.endswith(f"again: python viz.py {where}\n")


# ------------------------------------------------------------------ real sandboxes


PROGRAM = """```bash
echo seen $SEEN; ls
cat > solve.py <<'EOF'
import csv
with open('submission.csv', 'w') as out:
    out.write('id,survived\\n')
    for r in csv.DictReader(open('data/test.csv')):
        out.write(f"{r['id']},{int(RULE)}\\n")
EOF
export SEEN=yes; python3 solve.py
```"""


RULES = {"sex rule": "r['sex'] == 'female'", "nobody": "0", "broken": "r['missing']"}


def scripted(prompt, seed):
    """A model that lists strategies, writes a program for the one it got, and validates it."""
    if "Answer with th" in prompt:
        return "\n".join(f"Strategy: {name}\nProbability: 0.05" for name in RULES)
    turns = prompt.split("<user>")[1:]
    if len(turns) == 1:
        strategy = prompt.strip().splitlines()[-1].removeprefix("Strategy: ")
        return PROGRAM.replace("RULE", RULES[strategy])
    return block("validate" if len(turns) == 2 else "submit")


def real_tree(model, **config):
    """A tree whose nodes ran in real sandboxes."""
    trees = opened([load_task("titanic")], max_turns=4, **config)
    grow(trees, model)
    return trees[0]


@pytest.mark.parametrize("leave", ["cd data", "cd /tmp", "mkdir x; cd x; rmdir ../x"])
def test_a_node_starts_in_the_workspace_wherever_its_parent_ended(leave):
    ends = [block(f"{RIGHT}\nexport SEEN=yes; {leave}"), block("validate")]
    model = FakePolicy(*ends, block('[ "$PWD" = ~/workspace ] && echo $SEEN; ls'), block("submit"))
    t = real_tree(model, nodes=2, select="linear", sampling_mode="none")
    child = by_id(t)["0.0.0"]
    assert child["turns"][0]["observation"] == "yes\ndata"


@pytest.mark.attack("a broken sandbox after a bad result, in a node")
def test_a_node_whose_agent_breaks_the_sandbox_failed_and_is_not_played_again(hasty):
    model = FakePolicy(half_break)
    t = real_tree(model, nodes=6, select="random", sampling_mode="none")
    nodes = by_id(t).values()
    broken = [node for node in nodes if node["status"] == "crashed"]
    assert 0 < len(broken) < 6
    for node in broken:
        assert (node["kept"], node["outcome"], node["value"]) == (False, "failed", -1)
        assert "the agent broke its sandbox" in node["reason"]
    assert not {node["parent"] for node in nodes} & {node["id"] for node in broken}
    assert len(model.samples) == 3 * len(nodes)
    has(t, nodes=6)
    assert "fault" not in {node["outcome"] for node in nodes}


def test_a_real_tree_inherits_files_but_not_artefacts_and_keeps_code():
    model = FakePolicy(scripted)
    t = real_tree(model, workers=3, nodes=6, k=3)
    nodes = by_id(t)
    assert nodes["0.0"]["score"] > 0.75
    assert len(nodes["0.0"]["turns"]) == 2  # the first valid score ends a node
    assert "female" in nodes["0.0"]["code"]["solve.py"]
    assert "KeyError: 'missing'" in nodes["0.2"]["error"]
    child = nodes["0.0.0"]
    assert child["op"] == "improve"
    assert "female" in [p for p in model.prompts if "An earlier attempt" in p][0]
    # files and variables came along, the artefact did not
    assert child["turns"][0]["observation"] == "seen yes\ndata\nsolve.py"
    has(t, best_id="0.0")
    parts = t.run.result["hidden_scores"]["0.0"]
    assert min(parts["test"]["score"], parts["selection"]["score"]) > 0.7
    [[segment]] = segments_of(t.run.dir, "000000")
    sampled = sum(r >= 0 for r in segment["reply"])
    assert sampled == sum(turn["reply_tokens"] for turn in nodes["0.0"]["turns"]) > 0


@pytest.mark.parametrize("select, workers, left", [("ucb", 1, [2, 1]), ("bfs", 3, [])])
def test_the_full_form_tells_requests_the_limits_and_what_is_left(select, workers, left):
    """A rule that asks once is told nothing that depends on what runs at the same time."""
    model = FakePolicy(lambda prompt, seed: scripted(prompt.rpartition("it is.")[2], seed))
    options = {"nodes": 3, "prompts": AGENT_TEXTS, "select": select, "k": 3}
    t = real_tree(model, workers=workers, **options)
    asked = requests_for_ideas(model)
    assert all("Limits: 4 turns" in prompt and "numpy" in prompt for prompt in asked)
    told = re.findall("After this attempt ([0-9]) of 3 are left.", "".join(asked[:2]))
    assert list(map(int, told)) == left
    assert "The first valid score ends the task" in by_id(t)["0.0"]["system"]
    assert "turns and" not in "".join(node.error for node in t.finished)


@pytest.mark.parametrize(
    "budget, reply, status",
    [
        ({"tokens": 5}, "No block at all.", "stopped"),
        slow({"minutes": 0.03}, "```bash\nsleep 60\n```", "time_limit"),
    ],
)
def test_a_budget_ends_a_node_that_is_running(budget, reply, status):
    with within(30):
        t = real_tree(FakePolicy(reply), nodes=5, **budget)
    [row] = rows(t)
    assert (row["turns"], row["status"]) == (1, status)
    has(t, stopped_by=next(iter(budget)))


def test_a_node_has_the_minutes_that_are_left():
    trees = opened([load_task("titanic")], nodes=1, minutes=60, max_turns=2)
    trees[0].seconds_before = 100.0  # of an earlier process
    grow(trees, FakePolicy(block("sleep 1.5")))
    assert counts(trees[0], "status") == {"turn_limit": 1}


@pytest.mark.parametrize("limit", ["episode_minutes", "minutes"])
def test_a_model_that_lists_no_strategies_in_time_holds_a_node_no_longer_than_an_episode(limit):
    with within(30):
        t = run(model=FakePolicy(lists, wait=60), nodes=1, **{limit: 0.02})
    assert counts(t, "status") == {"refused": 1}
    assert counts(t, "reason") == {"no strategies within 0.02 minutes": 1}


def test_a_node_whose_files_are_too_large_keeps_its_score_but_nothing_builds_on_it(monkeypatch):
    monkeypatch.setattr(snapshot, "COPY_BYTES", 1000)
    t = real_tree(FakePolicy(scripted), workers=3, nodes=4, k=3)
    nodes = by_id(t)
    assert nodes["0.0"]["outcome"] == "valid"
    assert not nodes["0.0"]["kept"]
    assert nodes["0.0.0"]["op"] == "draft"
    has(t, best_id="0.0", tested_id=None)
    assert "the best node was not scored on the test part" in headline(t)


# ------------------------------------------------------------------ the script


BAD_INPUT = {
    "--seed 0 -1": "--seed: Input should be greater than or equal to 0, not '-1'",
    "--seed 0 0": "--seed has a value twice",
    "--select ucb --rule-args tau=1": "rule ucb has no 'tau'; the names are drafts, c",
    "--select linear --sampling-mode tail": "--select linear asks for no strategies",
    "--model x --url http://127.0.0.1:9/v1": "--url http://127.0.0.1:9/v1 does not answer: ",
    "--model x --url localhost:8/v1": "an address with its scheme, as http://localhost:8000/v1",
    "--model x --url me:secret@localhost:8/v1": "an address with its scheme, as http://local",
}


def prepared(cfg):
    """Does what main() does before the engine starts. Returns the run directory."""
    search.check(cfg)
    [cfg], model = search.complete_configs(search.named([cfg], "search"))
    [task], sandbox = search.env.open_tasks([cfg.task], cfg.sandbox, model.stand_in)
    cfg = replace(cfg, sandbox=sandbox)
    return open_trees([cfg], {cfg.task: task}, search.SELECT[cfg.select], model)[1]


def test_bad_input_is_one_sentence_before_a_model_is_loaded(monkeypatch, capsys):
    refuses(search.main, BAD_INPUT, monkeypatch, capsys)
    assert not Path("logs").exists()


def test_a_grid_is_not_written_over_a_run():
    single = Path("logs/x")
    single.mkdir(parents=True)
    (single / "config.yaml").write_text("seed: 0\n")
    with user_error("lies in the run logs/x: choose another one"):
        opened(name="x", seeds=(0, 1))
    assert [path.name for path in single.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("preset", ["search-adaptive", "search-greedy"])
def test_presets_are_flat_and_so_is_config_yaml(preset):
    flags = f"{PROJECT}/configs/{preset}.yaml --model tiny --backend local"
    cfg = parsed(search.Config, flags)
    where = prepared(cfg)
    assert where == Path(f"logs/search-{cfg.select}-titanic-none-tiny-0")
    saved = read_mapping(where / "config.yaml")
    assert [key for key in saved if isinstance(saved[key], dict)] == ["fingerprint"]


def test_what_was_left_open_means_what_the_runs_have_used(no_daemon, monkeypatch):
    """Docker may have started or stopped in between. The first run that is there decides."""
    folder = Path("logs/a/cell")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("backend: docker\nmodel: there\n")
    with monkeypatch.context() as patch:
        patch.setattr(start, "resolve_model", lambda name: ModelPath(name, None, False))
        for asked, kept in (("auto", "docker"), ("local", "local")):
            cfgs = [search_config(name=name, backend=asked) for name in ("a/new", "a/cell")]
            for cfg in start.complete_configs(cfgs)[0]:
                assert (cfg.model.model, cfg.sandbox.backend) == ("there", kept)
    with user_error("No Docker daemon answers at .* for --backend local choose another --name"):
        prepared(search_config(name="a/cell", model="tiny"))


COMMAND = "--task titanic --backend local --model tiny --name x --max-turns 3"
GRID = "--sampling-mode none tail --nodes 4 --workers 2"
ROUNDS = "--sampling-mode none --nodes 12 --parents 2 --children 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, flags, moment, rows",
    [("search.py", GRID, 3, [4, 4]), ("examples/learn.py", ROUNDS, 6, [12])],
)
def test_the_stand_in_grows_a_tree_survives_kill_9_and_goes_on(name, flags, moment, rows):
    """Real engine, sandboxes, graders: killed in the middle, resumed, called when finished."""
    before = {}

    def tables():
        return {path: read_rows(path) for path in Path("logs/x").rglob(EPISODES)}

    def is_far():
        before.update(tables())
        return sum(map(len, before.values())) >= moment

    assert "\nresumed " in killed_and_continued(".", is_far, name, f"{COMMAND} {flags}")
    after = tables()
    for path, known in before.items():
        learned = ("reward", "advantage", "trained")  # written at the end of a round
        for old, new in zip(known, after[path]):
            assert {key for key in old if old[key] != new[key]} <= {*learned}
    assert list(map(len, after.values())) == rows
