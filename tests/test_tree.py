"""flatlab/tree: decisions of the rules worked out by hand, the same ones for a metric m and for -m,
and what is read out of replies as models write them, and hostile ones.
"""

import io
import itertools
import math
import random
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import search
from flatlab.tree import requests, rules
from flatlab.tree.nodes import Choice, Node, Tree, code_in
from helpers import graded, search_config, user_error, within
from tasks import load_task

TASK = replace(load_task("titanic", "", ""), baseline=0.0, reference=1.0)
MIRRORED = replace(TASK, reference=-1.0, higher_is_better=False)


NO_RUN = SimpleNamespace(finished=False, rows=lambda file: [], result={})


def make(select, task=TASK, **config):
    cfg = search_config(select=select, sampling_mode="tail", **config)
    return Tree(task, cfg, NO_RUN, search.SELECT[select])


def put(t, parent, score, **more):
    """A finished child; score None: failed. For MIRRORED the sign of the score is turned."""
    return end(t, search.add_node(t, Choice(parent)), score, **more)


def end(t, node, score, status="validated", kept=True):
    node.status = status
    node.kept = kept and status != "fault"
    if score is not None and not t.task.higher_is_better:
        score = -score
    node.judge(t.task, graded(score))
    node.ended = True
    t.finished.append(node)
    return node


def choose(t, seed=0):
    return t.rule.function(t, random.Random(seed), **t.constants)


def step(t):
    """Starts the node that the rule chooses."""
    return search.add_node(t, choose(t))


def three(select, **config):
    """Root with children of Q = 1, 0.5 and a failure; the root has Q = 0."""
    t = make(select, **config)
    for score in (0.8, 0.4, None):
        put(t, "0", score)
    return t


# ------------------------------------------------------------------ by hand


def test_bfs_takes_the_first_nodes_in_level_order_whatever_finishes_first():
    """Failed nodes get children, too."""
    t = make("bfs", rule_args=("branching=2",), nodes=5)
    first, second = step(t), step(t)
    assert choose(t) is None  # nothing is finished
    end(t, second, 0.5)
    later = [step(t)]
    assert choose(t) is None  # 0.1.1 lies outside of the budget, 0.0.0 has to wait
    end(t, first, None)
    later += step(t), step(t)
    found = [(node.id, node.op) for node in later]
    assert found == [("0.1.0", "improve"), ("0.0.0", "debug"), ("0.0.1", "debug")]
    assert choose(t) is None


def test_q_is_normalised_over_the_root_and_all_scored_nodes():
    t = make("ucb")
    assert rules.quality(t)(t.root) == 0.5
    worse, better = put(t, "0", -0.5), put(t, "0", 1.5)
    assert list(map(rules.quality(t), (worse, t.root, better))) == [0, 0.25, 1]


def test_ucb_by_hand():
    t = three("ucb", rule_args=("c=1.41",))
    choice = choose(t)
    bonus = 1.41 * math.sqrt(math.log(3) / 1)  # N = 3, n = 0
    assert choice.scores == pytest.approx({"0.0": 1 + bonus, "0.1": 0.5 + bonus})
    assert (choice.parent, choice.phase) == ("0.0", "explore")
    put(t, "0.0", 0.2)  # Q = 0.25: now the value of 0.0 is that of its child
    choice = choose(t)
    bonus = 1.41 * math.sqrt(math.log(4) / 2)
    assert choice.scores["0.0"] == pytest.approx(0.25 + bonus)
    assert choice.parent == "0.1"
    assert choose(three("ucb", rule_args=("c=0.5",))).phase == "exploit"


DRAFT_FIRST = ["greedy", "random", "ucb", "open_ended"]


@pytest.mark.parametrize("select", DRAFT_FIRST)
def test_first_the_breadth_of_the_root(select):
    t = make(select, rule_args=("drafts=2",))
    for score in (0.3, 0.5):
        assert choose(t).parent == "0"
        put(t, "0", score)
    built_on = choose(t).parent
    assert built_on != "0"
    assert select != "random" or choose(t).reason == "drawn from 2"
    assert select != "greedy" or built_on == "0.1"  # the best one


def test_trend_by_hand():
    t = make("open_ended")
    put(t, "0", 0.25)
    put(t, "0.0", 1.0)
    put(t, "0.0.0", 0.5)
    # Q: 0, 0.25, 1, 0.5; steps 0.25, 0.75, -0.5 with weights 1, 2, 3
    assert rules.trends(t) == pytest.approx(
        {"0": 0, "0.0": 0.25, "0.0.0": (0.25 + 1.5) / 3, "0.0.0.0": (0.25 + 1.5 - 1.5) / 6}
    )
    put(t, "0", -1.0)  # Q: 0.5, 0.625, 1, 0.75, and 0 for a fall, which adds no bonus
    values = {id: bonus for id, (_, bonus) in rules.values_and_bonuses(t, 1, 0.0, 1.0).items()}
    assert values == pytest.approx({"0.0": 1 / 8, "0.0.0": 7 / 24, "0.0.0.0": 1 / 48, "0.1": 0})


def test_open_ended_commits_to_a_rising_path_for_exactly_k_nodes():
    t = make("open_ended", rule_args=("drafts=1", "commitment=2", "c=0"))
    put(t, "0", 0.5)
    choice = choose(t)
    assert choice.notes == {"commit": 2}
    assert choice.parent == "0.0"
    # two committed nodes, then scored anew
    for score, left in ((0.6, 1), (0.7, 0), (0.8, 2)):
        end(t, search.add_node(t, choice), score)
        choice = choose(t)
        assert choice.notes["commit"] == left


@pytest.mark.parametrize("score, left", [(0.1, 3), (None, 3), (0.5, 2)])
def test_open_ended_drops_the_commitment_when_a_child_is_worse_or_fails(score, left):
    """One that is as good is followed."""
    t = make("open_ended", rule_args=("drafts=1", "commitment=3", "c=0"))
    put(t, "0", 0.5)
    node = step(t)
    assert choose(t).notes == {}  # while it runs there is no second commitment
    end(t, node, score)
    choice = choose(t)
    assert choice.notes == {"commit": left}  # 3: a new one
    assert ("committed to this path for 3" in choice.reason) == (left == 2)


def test_open_ended_keeps_its_commitment_beside_a_node_for_debugging():
    t = make("open_ended", rule_args=("drafts=1", "commitment=3", "c=0"))
    put(t, "0", 0.5)
    end(t, step(t), 0.5)
    put(t, "0", 0.1)
    assert "committed to this path for 3" in choose(t).reason


def test_open_ended_commits_to_no_path_that_is_flat():
    t = make("open_ended", rule_args=("drafts=1",))
    put(t, "0", 0.0)
    assert (choose(t).parent, choose(t).notes) == ("0.0", {})


def test_a_line_holds_ancestors_and_descendants_but_the_root_is_alone():
    nodes = "0 0.1 0.1.0 0.10 0.2".split()
    together = {pair for pair in itertools.permutations(nodes, 2) if rules.same_line(*pair)}
    assert together == {("0.1", "0.1.0"), ("0.1.0", "0.1")}
    assert rules.same_line("0", "0")


def test_mcts_counts_failures_as_the_worst():
    t = three("mcts")
    choice = choose(t)
    bonus = 0.25 * math.sqrt(math.log(4))
    scores = {"0.0": 1 + bonus, "0.1": 0.5 + bonus, "0.2": bonus}
    assert choice.scores == pytest.approx(scores)
    assert search.add_node(t, choice).id == "0.0.0"
    for _ in range(2):
        put(t, "0.0", None)
    bonus = 0.25 * math.sqrt(math.log(7) / 4)
    assert choose(t).scores["0.0"] == pytest.approx(1 / 4 + bonus)  # one of four visits still runs


def test_mcts_gives_a_node_one_more_child_where_its_children_are_closed():
    t = make("mcts", rule_args=("branching=1",))
    for parent in ("0", "0.0", "0.0.0", "0.0.0.0"):
        assert choose(t).parent == parent
        put(t, parent, None)
    assert choose(t).parent == "0.0.0.0"  # its child ends in too many failures
    t = make("mcts", rule_args=("branching=1",))
    put(t, "0", 0.5, kept=False)
    assert choose(t).parent == "0"


def test_one_executed_node_has_no_bonus():
    t = make("ucb")
    put(t, "0", 0.5)
    assert rules.values_and_bonuses(t, 1, 1.0) == {"0.0": (1.0, 0.0)}


def test_puct_by_hand():
    t = make("puct")
    for score in (0.8, 0.4, None, 0.2):
        put(t, "0", score)
    # candidates: the root and its two best children; Q 0, 1, 0.5; ranks 3, 1, 2 of 3
    total = math.sqrt(1 + 4)
    scores = {"0": 1 + 1 / 6 * total / 5, "0.0": 1 + 3 / 6 * total, "0.1": 0.5 + 2 / 6 * total}
    choice = choose(t)
    assert choice.scores == pytest.approx(scores)
    assert choice.parent == "0.0"
    node = search.add_node(t, choice)
    other = search.add_node(t, choose(t))
    assert other.id == "0.1.0"  # not the line of a node that has a running child
    assert choose(t).parent == "0"
    t.nodes["0.1"].children.remove(t.nodes.pop(other.id))
    end(t, node, 0.3)
    # the value of 0.0 is now that of its child, which counts as a visit of all nodes above it
    total = math.sqrt(1 + 5)
    scores = choose(t).scores
    assert scores["0.0"] == pytest.approx(0.375 + 4 / 10 * total / 2)
    assert scores["0"] == pytest.approx(1 + 1 / 10 * total / 6)
    assert scores["0.0.0"] == pytest.approx(0.375 + 2 / 10 * total)
    assert "0.3" not in scores


def test_the_children_of_a_group_are_one_expansion():
    t = make("puct")
    for parent, group in (("0", 0), ("0", 0), ("0", 2), ("0.0", 3)):
        node = put(t, parent, 0.5)
        node.group = group
    counts = rules.expansions(t)
    assert [counts[id] for id in t.nodes] == [3, 1, 0, 0, 0]


def test_evolution_prefers_the_fit_and_crosses():
    t = make("evolution", rule_args=("drafts=3", "crossover_prob=1", "population=2"))
    for score in (0.0, 1.0, 0.5):
        put(t, "0", score)
    choice = choose(t)
    assert choice.scores == pytest.approx({"0.1": math.e, "0.2": math.exp(0.5)})
    for seed in range(20):
        choice = choose(t, seed)
        assert {choice.parent, choice.second_parent} == {"0.1", "0.2"}
    assert search.add_node(t, choice).op == "crossover"
    t.constants["crossover_prob"] = 0.0
    assert choose(t).second_parent is None


def test_defaults_of_the_rules():
    """Results of runs depend on them: a change is a decision."""
    defaults = {name: rule.constants(search_config()) for name, rule in rules.RULES.items()}
    assert defaults == {
        "random": {"drafts": 3},
        "open_ended": {"drafts": 3, "c": 1.41, "trend_weight": 0.5, "commitment": 2},
        "mcts": {"c": 0.25, "branching": 3},
        "evolution": {"drafts": 5, "crossover_prob": 0.5, "population": 10},
        "puct": {"c": 1.0, "siblings": 2},
        "linear": {},
    }
    assert rules.FINALISTS == 10
    usual = {name for name, rule in search.SELECT.items() if rule == rules.Rule(rule.function)}
    assert search.SELECT.keys() - usual == {"bfs", "mcts", "puct", "linear"}
    bfs, linear = search.SELECT["bfs"], search.SELECT["linear"]
    assert (bfs.debugs, bfs.shared_request, bfs.uses_strategies) == (False, True, True)
    assert (linear.debugs, linear.shared_request, linear.uses_strategies) == (False, False, False)


WRONG_CONSTANTS = {
    "ucb drafts=0": "is 0: .* of at least 1",
    "ucb c=-1": r"is -1\.0: .* 0",
    "ucb c=x": "is 'x'",
    "mcts x=1": r"no 'x'; the names are c, branching\.",
    "linear x=1": r"no 'x'; there is none\.",
}


def test_a_wrong_constant_is_one_sentence():
    for words, sentence in WRONG_CONSTANTS.items():
        name, text = words.split()
        with user_error(sentence):
            search.SELECT[name].constants(search_config(select=name, rule_args=(text,)))


def test_linear_is_a_chain():
    t = make("linear")
    for score, id in ((0.5, "0.0"), (None, "0.0.0"), (0.2, "0.0.0.0")):
        assert put(t, choose(t).parent, score).id == id
    step(t)
    assert choose(t) is None


def test_finalists_are_few_and_kept():
    t = make("random")
    nodes = [put(t, "0", 0.5 - 0.01 * place, kept=place != 2) for place in range(20)]
    nodes[0].stderr = 1.0
    del nodes[2]
    assert rules.finalists(t) == nodes[: rules.FINALISTS]
    nodes[0].stderr = 0.25  # one standard error below the best is near enough
    near, far = put(t, "0", 0.25), put(t, "0", 0.125)
    t.finished[:] = [nodes[0], near, far]
    assert rules.finalists(t) == [nodes[0], near]
    # without a standard error only equal ones: fewer tokens first, then the earlier
    put(t, "0", 0.5)
    equal = [put(t, "0", 0.75) for _ in range(3)]
    for node, tokens in zip(equal, (3, 2, 2)):
        node.tokens = tokens
    assert rules.finalists(t) == [equal[1], equal[2], equal[0]]


# ------------------------------------------------------------------ failures


def test_failed_leaves_are_debugged_up_to_a_depth_and_faults_are_not(monkeypatch):
    monkeypatch.setattr(search, "DEBUG_PROB", 1.0)
    t = make("greedy", rule_args=("drafts=1",))
    put(t, "0", None)
    for id in ("0.0", "0.0.0", "0.0.0.0"):
        choice = search.decide(t)
        assert choice.parent == id
        assert choice.reason == "one of 1 failed leaves, drawn for debugging"
        assert put(t, id, None).op == "debug"
    assert search.decide(t).parent == "0"  # four failures in a row: given up
    t = make("greedy", rule_args=("drafts=1",))
    put(t, "0", None, status="fault")
    assert search.decide(t).parent == "0"
    monkeypatch.setattr(search, "DEBUG_PROB", 0.0)
    put(t, "0", None)
    assert search.decide(t).parent == "0"
    assert search.add_node(t, Choice("0.0")).op == "draft"  # it starts from the root's files


@pytest.mark.parametrize("select", ["greedy", "ucb", "mcts", "evolution"])
def test_nothing_is_built_on_a_node_whose_files_are_too_large(select):
    """Nor is it chosen again and again."""
    t = make(select, nodes=14)
    while choice := search.decide(t):
        assert choice.parent != "0.1"
        node = search.add_node(t, choice)
        too_large = node.id == "0.1"
        end(t, node, 0.99 if too_large else 0.6, kept=not too_large)


@pytest.mark.parametrize("select", search.SELECT)
def test_every_rule_decides_the_same_for_m_and_minus_m_and_where_all_nodes_fail(select):
    higher = decisions_of(select, TASK)
    assert len(higher) == 30
    assert decisions_of(select, MIRRORED) == higher
    assert len(decisions_of(select, TASK, fail_share=1)) == 30


def decisions_of(select, task, fail_share=0.5):
    """Decisions of a rule until its budget of 30 nodes is spent, for random scores whose sign turns
    with the task's.
    """
    rule_args = ("branching=4",) if select == "bfs" else ()
    t = make(select, task, nodes=30, rule_args=rule_args)
    rng = random.Random(7)
    decisions = []
    while choice := search.decide(t):
        decisions.append(replace(choice, reason=""))
        score = None if rng.random() < fail_share else rng.uniform(-1, 2)
        put(t, choice.parent, score)
    return decisions


# ------------------------------------------------------------------ the tree


def test_code_is_what_the_node_wrote_or_changed_in_the_workspace(tmp_path):
    (tmp_path / "start.py").write_text("given")
    task = replace(TASK, public={name: tmp_path / "start.py" for name in ("a.py", "b.py")})
    files = {"a.py": b"given", "b.py": b"changed", "./c.py": b"new", "../.d.py": b"of the home"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert code_in(packed.getvalue(), task) == {"b.py": "changed", "c.py": "new"}


def test_the_name_of_a_file_is_short_however_deep_its_node_lies():
    t = make("linear")
    t.run.dir = Path("run")
    assert len(t.tar_of(Node("", 0, "0" + ".0" * 200, order=200)).name) < 20


# ------------------------------------------------------------------ replies


REPLIES = {
    "Strategy: a forest\nProbability: 0.05\nStrategy: ridge\nProbability: 0.1": [
        ("a forest", 0.05),
        ("ridge", 0.1),
    ],
    "Sure!\n\n1. **Strategy:** a forest\n   **Probability:** 5%\n\n"
    "2. **Strategy:** ridge\n   **Probability:** <0.1": [
        ("a forest", 0.05),
        ("ridge", 0.1),
    ],
    '```json\n{"responses": [{"text": "a forest", "probability": 0.05}, '
    '{"text": "ridge", "probability": "<5%"}]}\n```': [
        ("a forest", 0.05),
        ("ridge", 0.05),
    ],
    '[{"strategy": "a forest", "probability": 0.2}, {"strategy": "ridge", "confi': [
        ("a forest", 0.2)
    ],
    "Here are some:\n1. a forest (p=0.05)\n2. ridge (3%)\n- knn, probability: 0.01": [
        ("a forest", 0.05),
        ("ridge", 0.03),
        ("knn", 0.01),
    ],
    "Reasoning: trees are typical.\nStrategy: a forest\nProbability: likely": [("a forest", None)],
    "Strategy: a forest\nStrategy: A Forest!\nStrategy: ridge": [
        ("a forest", None),
        ("ridge", None),
    ],
    "Strategy: Strategy: a forest": [("a forest", None)],  # as a coder of 1.5B says it
    "<think>Strategy: secret\n</think>Strategy: open": [("open", None)],
    "Strategy: <one sentence>\nProbability: <number from 0 to 1>": [],
    "I would try a forest.": [],
    "": [],
    "Strategy: ...": [],
    '{"text": "use params {C: 1}", "probability": 0.1}': [("use params {C: 1}", 0.1)],
    r'{"text": "fit \alpha, \nu of \"C:\\d\e\" in\ntwo", "probability": 0.1} {"text": "b"}': [
        (r'fit \alpha, \nu of "C:\d\e" in two', 0.1),
        ("b", None),
    ],
    '{"responses": [{"meta": {"a": [1]}, "text": "a {x}\r\n\ty", "probability": 0.1},\r\n'
    '{"strategy": {"text": "b", "sub": {"text": "no"}, "tags": ["{"]}}, {"text": "cut {o': [
        ("a {x} y", 0.1),
        ("b", None),
    ],
    "### Strategy 1: ridge\r\nProbability: 5%\r\n\r\n## Strategy #2: svm\r\n- p: 3%": [
        ("ridge", 0.05),
        ("svm", 0.03),
    ],
    "**Strategy 1**\nridge\n**Probability**: 5%\n\n**Strategy 2:**\n\n- svm\n- rbf": [
        ("ridge", 0.05),
        ("svm", None),
    ],
    "Here:\n  1. ridge\n     scaled\n     - Probability: 5%\n\n  2. **SVM** (3%)\n\t- kernels\n"
    "\t- Reasoning: rare\n 10. knn\n\nGood luck!": [
        ("ridge scaled", 0.05),
        ("SVM - kernels", 0.03),
        ("knn", None),
    ],
    '- {"text": "an "odd" one"}\n- {"text": "ok"}': [("ok", None)],
    "<responses><response><text>ridge</text><probability>0.05</probability></response>\n"
    '<Response id="2">\n<text>svm,\n&lt; rbf</text>\n<probability>5%</probability></Response>': [
        ("ridge", 0.05),
        ("svm, < rbf", 0.05),
    ],
    '<response probability="0.1">ridge</response><strategy>svm</strategy><p>0.2</p>': [
        ("ridge", 0.1),
        ("svm", 0.2),
    ],
}
UNREAD = {
    '[{"text": "a {x}"}, {"text": "a "b" c"}, {"probability": 1, "strategy": "cut': 2,
    '<think>{"text": "cut</think>{"strategy": {"text": "a"}} {"text": "b", "probability": 5%}': 1,
    "{'text': 'a'} {\"text\": null} {C: 1}": 2,
    '{"text": "a", "probability": 0.1}': 0,
    "<response><text>a</text></response><response><text>cut": 1,
    "<text>a</text><probability>0.1</probability><text>b</text><probability>0.1</probability>": 2,
    "The probability is small.": 0,
}


def test_replies():
    for reply, strategies in REPLIES.items():
        assert requests.parse(reply)[0] == strategies, reply
    for reply, count in UNREAD.items():
        assert requests.parse(reply)[1] == count, reply


PROBABILITIES = {
    0.05: 0.05,
    "1/20": 0.05,
    "~0.07": 0.07,
    ".5": 0.5,
    "0,05": 0.05,
    "1e-3": 0.001,
    "1/0": 0.0,
}


def test_probabilities():
    for text, value in PROBABILITIES.items():
        assert requests.probability(text) == pytest.approx(value), text
    for text in ("7", "-0.1", "nan", None, {"a": 1}, "9" * 400, "²"):
        assert requests.probability(text) is None, text


def test_ten_thousand_hostile_replies():
    """No exception, no time lost, and whatever is returned stands in the reply."""
    rng = random.Random(0)
    parts = """<response> <text> <probability> { } [ ] "a" , 0.1 5% 1/0 NaN - * ** ( ) p= ``` \0
        \ud800 é ١ <think> </think> :""".split()
    parts += ["Strategy: ", "Probability: ", '"text": ', "\n", "1. ", " ", "x" * 50]
    long = [part * 10**6 for part in ("<", "{", "9", "\n", "1. ", "p=", "Strategy: x\n")]
    deep = ('{"text": ', "Strategy: a" + " (" * 10**5, '{"a":' + "[" * 5000 + "}")
    with within(20):
        for _ in range(10_000):
            letters = map(chr, rng.choices(range(1, 0x500), k=40))
            reply = "".join(rng.choices([*parts, *letters], k=rng.randrange(100)))
            for idea, p in requests.parse(reply)[0]:
                assert "\\" in reply or all(word in reply for word in re.findall(r"\w+", idea))
                assert len(idea) <= 300
                assert p is None or 0 <= p <= 1
        for reply in (*long, *(part * 100 for part in deep)):
            requests.parse(reply)
