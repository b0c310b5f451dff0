"""Prompts, and what the parser reads out of replies as models write them, and hostile ones."""

import random
import re
import time
from dataclasses import replace

import pytest

from flatlab.tree import prompts
from flatlab.tree.nodes import Node
from flatlab.world.texts import load_prompts
from helpers import TINY_TEXTS
from tasks import load_task

TASK = load_task("titanic", "", "")
TEXTS = load_prompts(TINY_TEXTS)

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
    "1) a forest\n2) ridge": [("a forest", None), ("ridge", None)],
    "Reasoning: trees are typical.\nStrategy: a forest\nProbability: likely": [("a forest", None)],
    "Strategy: a forest\nStrategy: A Forest!\nStrategy: ridge": [
        ("a forest", None),
        ("ridge", None),
    ],
    "<think>Strategy: secret\n</think>Strategy: open": [("open", None)],
    "Strategy: <one sentence>\nProbability: <number from 0 to 1>": [],
    "I would try a forest.": [],
    "": [],
    "Probability: 0.5": [],
    "```bash\nls\n```": [],
    "Strategy:": [],
    "Strategy: ...": [],
}


def test_replies():
    for reply, strategies in REPLIES.items():
        assert prompts.parse(reply) == strategies, reply


PROBABILITIES = (
    (0.05, 0.05),
    ("5%", 0.05),
    ("<0.1", 0.1),
    ("1/20", 0.05),
    ("~0.07", 0.07),
    (".5", 0.5),
    ("0,05", 0.05),
    ("1e-3", 0.001),
    ("7", None),
    ("-0.1", None),
    ("1/0", 0.0),
    ("nan", None),
    ("low", None),
    (None, None),
    (True, None),
    ({"a": 1}, None),
    ("9" * 400, None),
    ("²", None),
)


def test_probabilities():
    for text, value in PROBABILITIES:
        expected = None if value is None else pytest.approx(value)
        assert prompts.probability(text) == expected, text


def test_ten_thousand_hostile_replies():
    """No exception, no time lost, and whatever is returned stands in the reply."""
    rng = random.Random(0)
    parts = """<response> </response> <text> </text> <probability> { } [ ] "a" , 0.1 5% 1/0 NaN - *
        ** ( ) p= ``` \0 \ud800 é ١ <think> </think> :""".split()
    parts += ["Strategy: ", "Probability: ", '"text": ', "\n", "1. ", " ", "x" * 50]
    start = time.monotonic()
    for _ in range(10_000):
        reply = "".join(rng.choices(parts, k=rng.randrange(60)))
        if rng.random() < 0.2:
            reply = "".join(map(chr, rng.choices(range(1, 0x500), k=200)))
        for idea, p in prompts.parse(reply):
            if "\\" not in reply:
                assert prompts.same(idea)
                assert all(word in reply for word in re.findall(r"\w+", idea))
            assert len(idea) <= 300
            assert p is None or 0 <= p <= 1
    for reply in (
        "<" * 10**6,
        "{" * 10**6,
        "[" * 10**6,
        "<response " * 10**5,
        "Strategy: " * 10**5,
        "Strategy: x\n" * 10**5,
        "1. " * 10**5,
        "(" * 10**5,
        "p=" * 10**5,
        "9" * 10**6,
        '{"text": ' * 10**5,
        "\n" * 10**6,
        "Strategy: a" + " (" * 10**5,
        '{"a":' + "[" * 5000 + "}",
    ):
        prompts.parse(reply)
    assert time.monotonic() - start < 20


def test_prompts_say_what_they_should():
    good = Node(
        "0.0",
        "0",
        op="draft",
        idea="ridge",
        score=0.7,
        valid=True,
        status="validated",
        code={"solve.py": "import csv"},
    )
    bad = Node(
        "0.1",
        "0",
        op="draft",
        idea="a forest",
        status="turn_limit",
        error="Traceback\nKeyError: 'x'",
    )
    text = prompts.ask(
        TEXTS, prompts.about(TEXTS, TASK, {}), None, [bad], mode="tail", k=5, tau=0.1
    )
    assert "List 5 unusual strategies, each with a probability below 0.1." in text
    assert "data/train.csv: id," in text
    assert "Strategy: a forest\nScore: none, KeyError: 'x'" in text
    child = Node("0.0.0", "0.0", op="improve", idea="lasso", decision={"phase": "explore"})
    assert prompts.situation(TEXTS, child, [good], 1500) == (
        "An earlier attempt left its files here. Score: 0.7\nIts strategy: ridge\n"
        "Its solve.py:\nimport csv\nTry something different.\nStrategy: lasso"
    )
    repair = Node("0.1.0", "0.1", op="debug", idea="a forest")
    debug = prompts.situation(TEXTS, repair, [bad], 1500)
    assert "KeyError" in debug
    assert debug.endswith("Fix the error and keep the strategy.\nStrategy: a forest")
    long = replace(good, code={"a.py": "x" * 10**6, "b.py": "y" * 10**6})
    assert len(prompts.situation(TEXTS, child, [long, long], 3000)) < 4000
