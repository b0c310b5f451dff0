"""Prompts files, and the texts that they make for agents and searches."""

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import sft
from env import Env
from flatlab.model.chat import ChatTokens, Sample
from flatlab.model.path import resolve_model
from flatlab.options import EpisodeOptions
from flatlab.runs.fingerprint import fingerprint
from flatlab.sandbox.client import Sandbox
from flatlab.task import machine
from flatlab.tree import requests
from flatlab.tree.nodes import Node
from flatlab.world import prompts
from flatlab.world.episode import Episode, History, begin_episode, play
from helpers import (
    AGENT_TEXTS,
    LOCAL,
    PROJECT,
    TINY_TEXTS,
    FakePolicy,
    block,
    play_once,
    user_error,
)
from tasks import load_task

TITANIC = load_task("titanic", "", "")
FULL = {"prompts": AGENT_TEXTS, "max_turns": 3}
OPTIONS = EpisodeOptions(128, "keep", 5, 128, 20.0, AGENT_TEXTS)
FAILS = "```python\nopen('no.csv')\n```"
NOBODY = block("sed 's/,.*/,0/; 1s/.*/id,survived/' data/test.csv > submission.csv")
# texts that the stand-in was trained on, but for the last line about battleOfSexes
RECORDED = json.loads((PROJECT / "tests/recorded_texts.json").read_text())


# ------------------------------------------------------------------ byte for byte


def first_of(world, options):
    return prompts.first_messages(world, options, prompts.episode_facts(world, options))


@pytest.mark.parametrize("name", ["titanic", "battleOfSexes", "diabetes", "digits"])
def test_the_first_messages_of_the_stand_in_are_the_recorded_ones(name):
    task = load_task(name, "", "")
    with Env(task, LOCAL) as world:
        world.restart()
        messages = first_of(world, replace(OPTIONS, prompts=TINY_TEXTS))
    assert messages == ("", RECORDED[f"{name} short"])
    tiny = prompts.load_prompts(TINY_TEXTS)
    assert requests.task_text(tiny, task, {}) == RECORDED[f"{name} about short"]


@pytest.mark.parametrize(
    "name, line",
    [
        ("titanic", 'train, test = pd.read_csv("mails/train.csv"), pd.read_csv("mails/test.csv")'),
        ("battleOfSexes", "def order(sold):"),
    ],
)
def test_the_example_suits_the_kind_of_task(name, line):
    """It is copied: after one about tables, agents read a table that a game does not have."""
    with Env(load_task(name, "", ""), LOCAL) as world:
        world.restart()
        system, _ = first_of(world, OPTIONS)
    program = system.split("```python\n")[1].split("```")[0]
    compile(program, "example", "exec")
    assert line in program.splitlines()


CODE = {"solve.py": "import csv\nprint(1)\n", "b.sh": "x" * 900}
ERROR = "Traceback\nKeyError: 'x'\n"

VALID = {"status": "validated", "ended": True}
FAILED = {"status": "turn_limit", "ended": True}


def node_of(id, **more):
    return Node("titanic", 0, id, **more)


NODES = [
    node_of("0.0", idea="ridge", score=0.7012, improvement=0.2, code=CODE, **VALID),
    node_of("0.1", idea="a forest", error=ERROR, **FAILED),
    node_of("0.2", score=0.7546, improvement=0.5, **VALID),
    node_of("0.1.0", idea="a forest", **FAILED),
    node_of("0.0.1", idea="knn", status="submit", error=ERROR),  # its files are being written
]


@pytest.mark.parametrize("file", [TINY_TEXTS, AGENT_TEXTS])
def test_the_requests_of_a_search_are_the_recorded_ones(file):
    asked = prompts.load_prompts(file)
    good, bad, plain, repair, running = NODES
    finished = [good, bad, plain, repair]
    tree = SimpleNamespace(cfg=SimpleNamespace(scope="global"), prompts=asked, finished=finished)
    tree.task = TITANIC
    summary = requests.tree_summary(tree)
    said = {"more": asked.fill("more", k=2), "summary": summary}
    for mode in ("uniform", "tail", "local", "sequence"):
        wanted = {"mode": mode, "k": 5, "tau": 0.1}
        for what, *nodes in (
            ("root", None, [good, bad, plain, repair, running]),
            ("child", good, [], summary),
            ("failed parent", bad, [repair]),
        ):
            request = requests.ask(asked, TITANIC, *nodes, about="The task.", **wanted)
            said[f"ask {mode}, {what}"] = request
    for op, parents, *notes in (
        ("draft", [], "A note.\nAnother."),
        ("improve", [good]),
        ("debug", [bad]),
        ("crossover", [plain, bad], "A note."),
    ):
        node = node_of("0.3", op=op, idea="ridge")
        said[f"situation, {op}"] = requests.situation(asked, TITANIC, node, parents, 600, *notes)
    assert said == RECORDED["search"]


def test_no_request_shows_more_of_a_score_than_validate():
    asked = prompts.load_prompts(AGENT_TEXTS)
    task = replace(TITANIC, metric="r2")
    node = node_of("0.0", idea="ridge", score=0.45678, stderr=0.06, improvement=0.2, **VALID)
    tree = SimpleNamespace(cfg=SimpleNamespace(scope="global"), prompts=asked, finished=[node])
    tree.task = task
    wanted = {"about": "", "mode": "tail", "k": 5, "tau": 0.1}
    turn = {"action": "", "reply": "", "observation": "", "status": "ok", "stderr": 0.06}
    world = Env(replace(task, artefacts=("data/",)), LOCAL)
    for text in (
        requests.tree_summary(tree),
        requests.ask(asked, task, node, [], **wanted),
        requests.ask(asked, task, None, [node], **wanted),
        requests.situation(asked, task, node_of("0.0.0"), [node], 600),
        requests.situation(asked, task, node_of("0.0.0"), [node, node], 600),
        prompts.note(OPTIONS, world, [turn | {"score": 0.45678}], 5, 1790)[0],
    ):
        assert "0.46" in text and "0.45" not in text


# ------------------------------------------------------------------ what an agent reads


def episode_of(policy, task=TITANIC, **options):
    return asyncio.run(play_once(Env(task, LOCAL), policy, **FULL | options))


class Scripted(ChatTokens):
    """Says the given replies, with the stand-in's tokenizer."""

    def __init__(self, *replies, context=2048):
        super().__init__(str(PROJECT / "configs/tiny"))
        self.replies = iter(replies)
        self.context = context
        self.requests = []
        self.threads = set()

    def encode(self, text):
        self.threads.add(threading.current_thread())
        return super().encode(text)

    async def sample(self, tokens, max_tokens, seed=None):
        self.requests.append(tokens)
        text = next(self.replies)
        said = [*self.encode(text), self.end_of_turn]
        return Sample(said, [-1.0] * len(said), text, "stop", 0)


def test_the_stand_in_is_known_by_its_config_and_not_by_the_name_of_its_folder(
    random_model, tmp_path
):
    copy = shutil.copytree(PROJECT / "configs/tiny", tmp_path / "copy")
    other = shutil.copytree(random_model, tmp_path / "tiny")
    assert resolve_model(str(copy)).stand_in
    assert not resolve_model(str(other)).stand_in


@pytest.mark.parametrize("file", [TINY_TEXTS, AGENT_TEXTS])
def test_reset_returns_what_the_agent_of_the_file_reads(file):
    """More that an environment tells ends the first message."""
    message = "Begin with the simplest rule."
    played, shown = [Env(TITANIC, LOCAL, message=message) for _ in range(2)]
    options = FULL | {"prompts": file}
    episode = asyncio.run(play_once(played, FakePolicy(block("submit")), **options))
    assert episode.prompt.endswith(f"\n\n{message}")
    read = f"{episode.system}\n\n{episode.prompt}".lstrip()
    with shown:
        assert shown.reset(EpisodeOptions(**options)) == read


def test_packages_are_looked_up_once_for_all_episodes(monkeypatch):
    commands = []
    run = Sandbox.run
    monkeypatch.setattr(Sandbox, "run", lambda *call: commands.append(call[1]) or run(*call))
    monkeypatch.setattr(machine, "looked_up", {})

    async def main():
        policy = FakePolicy(block("submit"))
        await asyncio.gather(*(play_once(Env(TITANIC, LOCAL), policy, **FULL) for _ in range(4)))

    asyncio.run(main())
    assert len(commands) == 1


def test_one_thread_alone_uses_the_tokenizer():
    """Two at once may read each other's settings, and then text becomes control tokens."""
    policy = Scripted(block("submit"))
    episode_of(policy)
    assert policy.threads == {threading.current_thread()}


# ------------------------------------------------------------------ files of one's own


def a_file(tmp_path, **changes):
    """agent.yaml with other texts; None leaves one out."""
    data = yaml.safe_load((PROJECT / AGENT_TEXTS).read_text()) | changes
    path = tmp_path / "prompts.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in data.items() if v is not None}))
    return str(path)


def test_a_file_of_ones_own_is_what_the_agent_reads(tmp_path):
    file = a_file(tmp_path, system="Use {{ artefact }}.", note="{{ turns_left }} left")
    task = replace(TITANIC, prompt="{{ 1 + 1 }} is {% what %} is asked.")  # data, no template
    policy = FakePolicy(block("ls"), block("submit"))
    episode = episode_of(policy, task, prompts=file)
    assert episode.system == "Use submission.csv."
    assert episode.prompt.startswith("{{ 1 + 1 }} is {% what %} is asked.\n\nScore: accuracy")
    assert policy.prompts[1].endswith("\n2 left")


WRONG = {
    "more is missing, or is not the name of a prompt": {"more": None},
    "hint is missing, or is not the name of a prompt": {"hint": "Try."},
    "system cannot be used: TemplateSyntaxError: Expected an expression": {"system": "{% if %}"},
    "system cannot be used: ": {"system": 3},
    "note cannot be used: .* 'files' is unknown there; the names are task": {"note": "{{ files }}"},
    "note cannot be used: .* has no attribute 'no_such'": {"note": "{{ task.no_such }}"},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_file_that_is_wrong_is_one_sentence(tmp_path, sentence):
    with user_error(sentence):
        prompts.load_prompts(a_file(tmp_path, **WRONG[sentence])).fill("note", task=TITANIC)


def test_the_content_of_the_file_belongs_to_what_made_a_run(tmp_path):
    made = []
    for changes in ({}, {}, {"system": "Be brief."}):
        changed = prompts.Prompts(Path(a_file(tmp_path, **changes)))
        made.append(fingerprint([], changed.digest)["prompts"])
    assert made[0] == made[1] != made[2]


# ------------------------------------------------------------------ notes


def test_a_note_tells_what_is_left_and_the_best_score():
    """Whole under a long output."""
    long = NOBODY.replace("submission.csv", "submission.csv; seq 1000")
    policy = FakePolicy(long, block("validate"), block("ls"))
    episode = episode_of(policy, max_observation_tokens=30)
    first, second, last = [turn["note"] for turn in episode.turns]
    begin = "[2 turns and 30 minutes left. No valid score so far: a block with only the word "
    assert first == f"{begin}validate shows it.]"
    assert "last one: 1 turn and" in second
    assert "Best validation accuracy so far: 0.6782." in second
    assert last == ""  # nobody reads it
    assert policy.prompts[1].endswith(f"1000\n{first}")
    lower = replace(TITANIC, higher_is_better=False, baseline=1.0, reference=0.1)
    scores = [0.25, None, 0.5]
    turn = {"action": "", "reply": "", "observation": "", "status": "ok"}
    turns = [turn | {"score": score, "stderr": 0.02} for score in scores]
    world = Env(replace(lower, artefacts=("data/",)), LOCAL)
    assert "so far: 0.2500" in prompts.note(OPTIONS, world, turns, 5, 1790)[0]
    late, _ = prompts.note(OPTIONS, world, turns, 5, -90)  # its commands outlasted the time
    assert "5 turns and less than a minute left" in late


def test_a_note_tells_what_is_missing_and_what_was_said_before():
    asks = "What is asked?"
    lists = block("ls; ls no.csv")
    policy = FakePolicy(FAILS, asks, lists, lists, NOBODY, block("rm -r *; false"))
    episode = episode_of(policy, max_turns=7)
    first, second, third, fourth, fifth, sixth, *_ = [turn["note"] for turn in episode.turns]
    assert "submission.csv is not there yet. Send the whole program" in first
    assert "submission.csv is not there yet. Reply with one block" in second
    assert "earlier" not in first + second + third + fifth + sixth
    assert "earlier reply, and they end as before (ls: cannot access 'no.csv'" in fourth
    assert "No valid score so far: a block" in fifth
    assert "submission.csv is not there yet.]" in sixth
    for task in (replace(TITANIC, artefacts=("out/", "*.txt")), replace(TITANIC, collect="true")):
        assert not prompts.missing(Env(task, LOCAL))
    with Env(replace(TITANIC, artefacts=("out[1].txt",)), LOCAL) as world:
        world.reset()
        assert prompts.missing(world) == ["out[1].txt"]


def test_only_our_own_notes_are_no_last_line():
    lines = {
        "scores:\n[0.61 0.62]": "[0.61 0.62]",
        "a\n[exit code 1]": "a",
        "a\n[2 repeated warnings left out]\n[stopped: it used no CPU]": "a",
        "[exit code 1]": "[exit code 1]",
        "": "nothing",
    }
    for text, line in lines.items():
        assert prompts.last_line({"observation": text}) == line


def test_commands_that_end_in_another_way_than_before_are_not_called_repeated():
    edits = [block(f"echo 'print({text})' > a.py") for text in ("1/0", "4", "4+0", "2/0")]
    runs = block("python3 a.py")
    policy = FakePolicy(*[reply for edit in edits for reply in (edit, runs)], block("ls"))
    episode = episode_of(policy, max_turns=9)
    notes = [turn["note"] for turn in episode.turns]
    said = {number: note[:80] for number, note in enumerate(notes) if "earlier" in note}
    begin = "[These are the commands of an earlier reply, and they end as before "
    assert said == {5: f"{begin}(4): change "[:80], 7: f"{begin}(ZeroDivisionError"[:80]}


@pytest.mark.parametrize("thoughts", ["keep", "drop"])
@pytest.mark.parametrize(
    "said, line", [(FAILS, "FileNotFoundError: "), ("No block.", "Nothing was")]
)
def test_a_program_that_ends_as_before_leaves_the_history(said, line, thoughts):
    """With all replies before it. What the model read and wrote is still what is trained, and what
    an imitation makes of the transcript.
    """
    policy = Scripted(block("ls"), said, f"Once more.\n{said}", NOBODY, block("validate"))
    if line.startswith("Nothing"):
        policy = Scripted(block("ls"), said, said, NOBODY, block("validate"))
    episode = episode_of(policy, max_turns=5, thoughts=thoughts)
    assert [turn["restarts"] for turn in episode.turns] == [False, False, True, False, False]
    read = policy.tokenizer.decode(policy.requests[3])
    word = "program" if said == FAILS else "reply"
    begin = f"{episode.prompt}\n\nYou have sent the same {word} twice, and it ended both times with"
    assert f"{begin}: {line}" in read
    assert "It is not shown again. Send a different one.\n[2 turns and 30 minutes left. " in read
    assert "submission.csv is not there yet.]" in read
    assert "earlier reply" not in read and said not in read and block("ls") not in read
    after = policy.tokenizer.decode(policy.requests[4])
    assert NOBODY in after and after.startswith(read)
    assert [segment.mask.count(1) for segment in episode.segments] == [
        sum(turn["reply_tokens"] for turn in turns)
        for turns in (episode.turns[:3], episode.turns[3:])
    ]
    options = replace(OPTIONS, max_observation_tokens=512, thoughts=thoughts)
    sequences = sft.sequences_from(episode.transcript(), policy, sft.Config(episode=options))
    assert [s.tokens for s in sequences] == [s.tokens for s in episode.segments]
    assert [s.mask for s in sequences] == [s.mask for s in episode.segments]


def test_commands_and_what_ends_otherwise_and_all_after_a_score_stay_in_the_history():
    waits = block("sleep 0.01; echo loss 2")  # for a job in the background, say
    counts = "```python\nopen('n', 'a').write('n')\nprint(open('n').read())\n```"
    made = "pd.read_csv('data/test.csv')[['id']].assign(survived=0)"
    scores = f"```python\nimport pandas as pd\n{made}.to_csv('submission.csv', index=False)\n```"
    policy = FakePolicy(waits, waits, counts, counts, scores, scores, FAILS, FAILS, block("ls"))
    episode = episode_of(policy, max_turns=9)
    assert not any(turn["restarts"] for turn in episode.turns)
    assert [turn["status"] for turn in episode.turns[4:6]] == ["validate"] * 2
    read = policy.prompts[-1]
    assert read.count("loss 2") == 5 and read.count("open('n', 'a')") == 2


def test_a_tool_of_a_copy_may_be_used_again():
    """Also one that names no action."""

    def act(world, reply, timeout):
        return None, "the same", "ok", None

    episode = Episode("titanic", 0)
    with Env(TITANIC, LOCAL) as world:
        policy = FakePolicy("look")
        options = replace(OPTIONS, max_turns=3)
        history = asyncio.run(begin_episode(world, policy, episode, options))
        asyncio.run(play(world, policy, episode, options, history, act))
    assert [turn["restarts"] for turn in episode.turns] == [False] * 3


def test_the_stand_in_keeps_a_program_that_it_repeats():
    episode = episode_of(FakePolicy(FAILS), prompts=TINY_TEXTS, max_turns=4)
    assert [turn["restarts"] for turn in episode.turns] == [False] * 4
    assert len(episode.segments) == 1


# ------------------------------------------------------------------ lengths


def test_a_short_context_leaves_out_packages_then_first_lines_then_files(tmp_path):
    (tmp_path / "a.csv").write_text("id,value\n1,2\n3,4\n5,6\n")
    task = replace(TITANIC, public={f"data/{i:02}.csv": tmp_path / "a.csv" for i in range(30)})
    seen = []
    with Env(task, LOCAL) as world:
        world.restart()
        facts = prompts.episode_facts(world, OPTIONS)
        policy = Scripted()
        with user_error("more than half of --context .*: choose a larger"):
            for policy.context in range(8000, 100, -50):
                system, message = prompts.first_messages(world, OPTIONS, facts, policy)
                messages = prompts.as_messages(system, message)
                assert len(policy.render(messages)) <= policy.context / 2
                assert task.prompt.strip() in message
                seen.append(("numpy" in message, message.count("\n  "), message.count(" bytes)")))
    assert [*dict.fromkeys(seen)] == [
        (True, 90, 30),
        (False, 90, 30),
        (False, 0, 30),
        (False, 0, 0),
    ]
    assert "\n... and 30 more\n" in message


def test_longer_lines_of_a_table_and_lines_of_a_changed_one_are_not_shown(tmp_path):
    table = tmp_path / "wide.csv"
    table.write_text("id,x\n" + ",".join("0" * 200) + "\n1,2\n")
    task = replace(TITANIC, public={"wide.csv": table})
    lines = prompts.table_head(task, "wide.csv", table.stat().st_size)
    assert lines == ["id,x", "[a line of 200 characters or more]"]
    assert not prompts.table_head(task, "wide.csv", 12)


# ------------------------------------------------------------------ thoughts

# As Qwen3's: replies before the last message of the user lose their thoughts.
STRIPS = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set text = text.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}OPENS{% endif %}"
)
TALK = [
    "<think>\nI look first.\n</think>\n\n" + block("echo seen"),
    "<think>\nNow a table.\n</think>\n\n" + NOBODY,
    block("validate"),
]


def thinking(thoughts, opens=""):
    """The policy and the episode of TALK with a template that strips thoughts."""
    policy = Scripted(*(text.removeprefix(opens) for text in TALK))
    policy.tokenizer.chat_template = STRIPS.replace("OPENS", opens)
    return policy, episode_of(policy, thoughts=thoughts)


def said_by(role, text):
    return {"role": role, "content": text}


@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_dropped_thoughts_leave_what_the_template_makes_of_the_conversation(opens):
    """They are trained after the tokens that they were sampled after."""
    policy, episode = thinking("drop", opens)
    messages = [said_by("system", episode.system), said_by("user", episode.prompt)]
    for request, segment, turn in zip(policy.requests, episode.segments, episode.turns):
        wanted = policy.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert policy.tokenizer.decode(request) == wanted
        messages.append(said_by("assistant", turn["reply"]))
        messages.append(
            said_by("user", "\n".join(filter(None, (turn["observation"], turn["note"]))))
        )
        said = [*policy.encode(turn["reply"]), policy.end_of_turn]
        assert segment.tokens == request + said
        assert segment.mask == [0] * len(request) + [1] * len(said)
    assert len(messages) == 8


def test_a_shortened_observation_is_short_where_thoughts_are_dropped():
    policy = Scripted()
    history = History(policy, replace(OPTIONS, thoughts="drop"), "start")
    history.add(Sample([], [], TALK[0], "stop", 0), "first line\n" + "more\n" * 40)
    read = policy.decode(history.fit(100))
    assert "first line [...]" in read and "more" not in read


# ------------------------------------------------------------------ imitation


@pytest.mark.parametrize("thoughts", ["keep", "drop"])
def test_an_imitated_transcript_has_the_tokens_of_the_episode(thoughts):
    policy, episode = thinking(thoughts)
    assert len(episode.segments) == (1 if thoughts == "keep" else 3)
    options = replace(OPTIONS, max_observation_tokens=512, thoughts=thoughts)
    cfg = sft.Config(episode=options)
    sequences = sft.sequences_from(episode.transcript(), policy, cfg)
    assert [s.tokens for s in sequences] == [s.tokens for s in episode.segments]
    assert [s.mask for s in sequences] == [s.mask for s in episode.segments]
