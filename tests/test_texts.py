"""What an agent reads: both forms of the texts, in real sandboxes, and thoughts in the history."""

import asyncio
import shutil
import threading
from dataclasses import replace
from importlib.metadata import version

import pytest

from env import Env
from flatlab.model.chat import ChatTokens, Sample
from flatlab.options import EpisodeOptions, ModelOptions, derive
from flatlab.runs.reader import observed
from flatlab.sandbox.client import Sandbox
from flatlab.task import machine
from flatlab.train import imitation
from flatlab.world import texts
from helpers import LOCAL, PROJECT, FakePolicy, block, play_once
from policy import resolve_model
from tasks import load_task

FULL = {"texts": "full", "max_turns": 3}
OPTIONS = EpisodeOptions(3, 128, 128, texts="full")
NOBODY = block("sed 's/,.*/,0/; 1s/.*/id,survived/' data/test.csv > submission.csv")
SHORT = """\
Play a game of ten rounds with a partner.
Each round you and your partner pick 0 or 1.
You get 2 if both pick 0, 1 if both pick 1, else 0.
The partner picks 1 in the first round. In each later
round it copies your first move with probability 0.8,
else it picks the other move.
Write strategy.py with def row_strategy(history):
that returns 0 or 1. history is the list of earlier
rounds, each a tuple (your move, partner's move).
The Score is your mean points per round. Higher is better.
The partner is hidden: it plays new random games for
validation and for the final test.

Reply with one block of bash commands:
```bash
ls
```
They run in /home/agent/workspace without network, and you see what they print.
A block with only the word validate scores your strategy.py; one with only submit ends the task.

Files:
simulate.py (610 bytes)"""


@pytest.fixture(scope="module")
def titanic():
    return load_task("titanic", "", "")


@pytest.fixture(scope="module")
def world(titanic):
    with Env(titanic, LOCAL) as world:
        world.reset()
        yield world


def full_message(world, policy=None):
    system = texts.full_system(world, OPTIONS)
    versions = texts.full_messages(world, OPTIONS)
    return texts.first_message(world, versions, policy or FakePolicy(), system)


def episode_of(task, policy, **options):
    return asyncio.run(play_once(Env(task, LOCAL), policy, **options))


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


# ------------------------------------------------------------------ the two forms


def test_the_stand_in_reads_what_it_was_trained_on():
    policy = FakePolicy(block("echo 1"), block("submit"))
    episode = episode_of(load_task("battleOfSexes", "", ""), policy)
    assert episode.prompt == SHORT
    assert episode.system == ""
    assert policy.prompts[1] == f"<user>{SHORT}{block('echo 1')}<user>1"


def test_the_form_follows_from_the_model_unless_it_is_given():
    cases = [(True, None, "short"), (False, None, "full"), (True, "full", "full")]
    for is_tiny, given, form in cases:
        options = EpisodeOptions(texts=given)
        derive(ModelOptions("m"), options, is_tiny)
        assert options.texts == form


def test_the_stand_in_is_known_by_its_config_and_not_by_the_name_of_its_folder(
    random_model, tmp_path
):
    copy = shutil.copytree(PROJECT / "configs/tiny", tmp_path / "copy")
    other = shutil.copytree(random_model, tmp_path / "tiny")
    assert resolve_model(str(copy)).is_tiny
    assert not resolve_model(str(other)).is_tiny


def test_the_full_form_tells_the_limits_of_the_episode(world):
    message = full_message(world)
    assert "3 turns" in message
    assert "30 minutes in all" in message
    assert "60 seconds for the commands of a reply" in message
    assert "4 GB of memory for each process, no GPU, no network" in message


def test_the_full_form_shows_files_with_their_size_and_the_first_lines_of_tables(world, titanic):
    message = full_message(world)
    size = titanic.public["data/train.csv"].stat().st_size
    lines = f"data/train.csv ({size} bytes)\n  id,class,sex,age,survived\n  1,3rd,male,adult,0\n"
    assert lines in message


def test_packages_are_those_of_the_sandbox(world):
    message = full_message(world)
    assert (
        f"numpy {version('numpy')}, " in message
    )  # a local sandbox has the Python of this process
    assert f"scikit-learn {version('scikit-learn')}, " in message


def test_packages_are_looked_up_once_for_all_episodes(titanic, monkeypatch):
    commands = []

    class Counting(Sandbox):
        def run(self, command, timeout):
            commands.append(command)
            return super().run(command, timeout)

    monkeypatch.setattr(machine, "Sandbox", Counting)
    monkeypatch.setattr(machine, "looked_up", {})

    async def main():
        policy = FakePolicy(block("submit"))
        plays = [play_once(Env(titanic, LOCAL, seed), policy, **FULL) for seed in range(4)]
        return await asyncio.gather(*plays)

    assert len({episode.prompt for episode in asyncio.run(main())}) == 1
    assert len(commands) == 1


def test_a_first_score_that_ends_the_episode_is_told(world, monkeypatch):
    assert texts.GOES_ON in texts.full_system(world, OPTIONS)
    monkeypatch.setattr(world, "ends_at_score", True)
    assert texts.ENDS in texts.full_system(world, OPTIONS)


def test_more_that_an_environment_tells_ends_both_forms(world, monkeypatch):
    monkeypatch.setattr(world, "message", "Begin with the simplest rule.")
    for form in texts.FORMS.values():
        versions = form.messages(world, OPTIONS)
        text = texts.first_message(world, versions, FakePolicy(), "")
        assert text.endswith("\n\nBegin with the simplest rule.")


def test_one_thread_alone_uses_the_tokenizer(titanic):
    """Two at once may read each other's settings, and then text becomes control tokens."""
    policy = Scripted(block("submit"))
    episode_of(titanic, policy, **FULL)
    assert policy.threads == {threading.current_thread()}


# ------------------------------------------------------------------ notes


def test_a_note_tells_what_is_left_and_the_best_score(titanic):
    policy = FakePolicy(NOBODY, block("validate"), block("ls"))
    episode = episode_of(titanic, policy, **FULL)
    assert episode.status == "turn_limit"
    first, second, last = [turn["note"] for turn in episode.turns]
    assert last == ""  # nobody reads it
    assert first == "[2 turns and 30 minutes left. No valid score so far.]"
    assert second == (
        "[The next reply is the last one: 1 turn and 30 minutes left. "
        "Best validation accuracy so far: 0.6782.]"
    )
    assert policy.prompts[1].endswith(f"<user>(no output)\n{first}")
    assert policy.prompts[2].endswith(second)


def test_a_note_is_whole_under_a_long_output(titanic):
    policy = FakePolicy(block("seq 1000"), block("submit"))
    episode = episode_of(titanic, policy, **FULL, max_observation_tokens=30)
    assert policy.prompts[1].endswith(f"1000\n{episode.turns[0]['note']}")


def test_minutes_are_rounded_and_the_best_score_may_be_the_lowest(titanic):
    task = replace(titanic, higher_is_better=False, baseline=1.0, reference=0.1)
    turns = [{"score": 0.25}, {"score": None}, {"score": 0.5}]
    note = texts.full_note(task, turns, 5, 1790)
    assert note == "[5 turns and 30 minutes left. Best validation accuracy so far: 0.2500.]"
    assert texts.full_note(task, turns, 5, 1810) == note
    assert "less than a minute left" in texts.full_note(task, turns, 5, 20)


# ------------------------------------------------------------------ lengths


def test_a_short_context_shortens_whole_parts_in_a_fixed_order(titanic, tmp_path):
    description = [f"Line {i} of what is asked, with some more words." for i in range(40)]
    names = [f"data/{i:02}.csv" for i in range(30)]
    for name in names:
        (tmp_path / name[-6:]).write_text("id,value\n1,2\n3,4\n5,6\n")
    public = {name: tmp_path / name[-6:] for name in names}
    task = replace(titanic, prompt="\n".join(description), public=public)
    seen = []
    with Env(task, LOCAL) as world:
        world.reset()
        whole = full_message(world).split("\n")
        system = texts.full_system(world, OPTIONS)
        policy = Scripted()
        for policy.context in (8192, 4096, 3584, 3072, 2560, 2048, 1536, 1200):
            message = full_message(world, policy)
            assert len(policy.encode(system) + policy.encode(message)) <= policy.context / 2
            lines = message.split("\n")
            new = [line for line in lines if line not in whole]
            assert all(line.startswith(("Python ", "... and ", "[some lines")) for line in new)
            rows = sum(line.startswith("  ") for line in lines)
            files = sum(line.endswith(" bytes)") for line in lines)
            named = lines[-1].count(",")
            seen.append((named, rows, files, sum(line in description for line in lines)))
    assert seen == sorted(seen, reverse=True)  # a part shrinks only after those before it
    assert seen[-1][:3] == (0, 0, 5)
    assert 0 < seen[-1][3] < 40


def test_longer_lines_of_a_table_are_not_shown(titanic, tmp_path):
    table = tmp_path / "wide.csv"
    table.write_text("id,x\n" + ",".join("0" * 200) + "\n1,2\n")
    task = replace(titanic, public={"wide.csv": table})
    lines = texts.first_lines(task, "wide.csv", table.stat().st_size)
    assert lines == ["id,x", "[a line of 200 characters or more]"]


def test_a_table_that_was_changed_shows_no_lines(titanic):
    assert not texts.first_lines(titanic, "data/train.csv", 12)


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


def thinking(titanic, thoughts, opens=""):
    """The policy and the episode of TALK with a template that strips thoughts."""
    policy = Scripted(*(text.removeprefix(opens) for text in TALK))
    policy.tokenizer.chat_template = STRIPS.replace("OPENS", opens)
    return policy, episode_of(titanic, policy, **FULL, thoughts=thoughts)


def conversation(episode):
    """The messages of an episode, whole."""
    messages = [
        {"role": "system", "content": episode.system},
        {"role": "user", "content": episode.prompt},
    ]
    for turn in episode.turns:
        messages.append({"role": "assistant", "content": turn["reply"]})
        messages.append({"role": "user", "content": observed(turn)})
    return messages


@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_dropped_thoughts_leave_what_the_template_makes_of_the_conversation(titanic, opens):
    policy, episode = thinking(titanic, "drop", opens)
    messages = conversation(episode)
    for number, request in enumerate(policy.requests):
        wanted = policy.tokenizer.apply_chat_template(
            messages[: 2 + 2 * number], tokenize=False, add_generation_prompt=True
        )
        assert policy.tokenizer.decode(request) == wanted


def test_dropped_thoughts_are_trained_after_the_tokens_that_they_were_sampled_after(titanic):
    policy, episode = thinking(titanic, "drop")
    assert len(episode.segments) == 3
    for segment, request, text in zip(episode.segments, policy.requests, TALK):
        said = [*policy.encode(text), policy.end_of_turn]
        assert segment.tokens == request + said
        assert segment.mask == [0] * len(request) + [1] * len(said)


def test_kept_thoughts_make_one_sequence(titanic):
    policy, episode = thinking(titanic, "keep")
    (segment,) = episode.segments
    assert "I look first." in policy.decode(policy.requests[2])
    for request in policy.requests:
        assert segment.tokens[: len(request)] == request


# ------------------------------------------------------------------ imitation


@pytest.mark.parametrize("thoughts", ["keep", "drop"])
def test_an_imitated_transcript_has_the_tokens_of_the_episode(titanic, thoughts):
    policy, episode = thinking(titanic, thoughts)
    options = replace(OPTIONS, max_observation_tokens=512, thoughts=thoughts)
    sequences = imitation.sequences_from(episode.to_dict(), policy, options)
    assert [s.tokens for s in sequences] == [s.tokens for s in episode.segments]
    assert [s.mask for s in sequences] == [s.mask for s in episode.segments]
