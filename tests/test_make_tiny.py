"""Tests of the stand-in's builder: tools/make_tiny.py and tools/expert.py."""

import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from flatlab.episode.task import improvement
from flatlab.tree import parsing
from policy import TINY
from tasks import load_task
from tools import expert, make_tiny

pytestmark = pytest.mark.slow  # nobody needs the builder to run or to test


def canned_step(score=None) -> SimpleNamespace:
    return SimpleNamespace(
        observation=f"score {score}",
        score=SimpleNamespace(
            valid=score is not None, value=score, message="" if score else "no submission"
        ),
    )


class CannedWorld(expert.World):
    """Observations without a sandbox: a right program scores 0.7, a spoiled one writes nothing."""

    def __init__(self, name):
        self.task, self.table = load_task(name), expert.TABLES[name]()
        self.prompt, self.nothing = "the prompt", canned_step()
        self.right = {expert.block(program) for _, _, program in self.table.solutions}

    def play(self, reply):
        return "(no output)", canned_step(0.7) if reply in self.right else self.nothing


@pytest.mark.parametrize("name", expert.TABLES)
def test_every_mistake_changes_some_program_and_every_program_has_its_own_strategy(name):
    table = expert.TABLES[name]()
    words, programs = [row[1] for row in table.solutions], [row[2] for row in table.solutions]
    assert len(set(words)) == len(set(programs)) == len(table.solutions)
    for _, right, wrong in table.mistakes:
        assert right != wrong and any(right in program for program in programs)


@pytest.mark.parametrize("name", expert.TABLES)
@pytest.mark.parametrize("kind", ["free", "draft", "child", "debug", "crossover"])
def test_an_attempt_alternates_ends_with_submit_and_keeps_to_the_named_strategy(name, kind):
    rng, world = random.Random(0), CannedWorld(name)
    for _ in range(50):
        talk = expert.solve(rng, world, kind)
        assert [role for role, _ in talk] == ["user", "assistant"] * (len(talk) // 2)
        assert talk[-1][1] == "```bash\nsubmit\n```"
        said = {
            line
            for role, text in talk[1:]
            for line in text.split("\n")
            if line.startswith("Strategy: ")
        }
        if kind == "debug":
            assert (
                "Score: none" in talk[0][1]
                and "Its error:" in talk[0][1]
                and "Fix the error" in talk[0][1]
            )
        if kind == "crossover":
            assert "Combine both." in talk[0][1]
        elif kind != "free":
            assert said == {talk[0][1].split("\n")[-1]}


@pytest.mark.parametrize("name", expert.TABLES)
def test_attempts_are_varied_and_some_fail(name):
    rng, world = random.Random(0), CannedWorld(name)
    talks = [expert.solve(rng, world, "free") for _ in range(400)]
    first = Counter(
        re.search("Strategy: .*", "".join(text for _, text in talk))[0] for talk in talks
    )
    assert len(first) > 15 and first.most_common(1)[0][1] < 0.3 * len(talks)
    blocks = [
        {expert.block(text.partition("```bash\n")[2][:-4]) for _, text in talk} for talk in talks
    ]
    assert 0.1 < sum(not said & world.right for said in blocks) / len(talks) < 0.35


@pytest.mark.parametrize("name", expert.TABLES)
def test_lists_of_strategies_are_read_by_the_search(name):
    rng, world = random.Random(0), CannedWorld(name)
    known = {words for _, words, _ in world.table.solutions}
    for _ in range(50):
        (_, question), (_, answer) = expert.list_strategies(rng, world)
        found = parsing.parse(answer)
        assert (
            len(found) == int(re.search(r"List (\d+)", question)[1])
            and {words for words, _ in found} <= known
        )
        assert ("Probability" in question) == all(p is not None and 0 <= p <= 1 for _, p in found)
        tried = re.findall("Strategy: (.*)\nScore", question)
        assert not {words for words, _ in found} & set(tried)


def test_the_tables_have_bad_and_good_solutions_in_real_sandboxes():
    """Plays one solution of each kind: the baseline, a bad one, a good one, and a mistake."""
    world = expert.World(load_task("titanic"), expert.TABLES["titanic"](), make_tiny.any_backend())
    programs = {words: program for _, words, program in world.table.solutions}

    def improvement_of(words):
        return improvement(world.play(expert.block(programs[words]))[1].score.value, world.task)

    assert improvement_of("nobody survives") == pytest.approx(0, abs=0.01)
    assert improvement_of("everybody survives") < -1
    assert improvement_of("majority by all three") > 0.9
    text, after = world.play(
        expert.block(programs["majority by sex"].replace("r['survived']", "r['Survived']"))
    )
    assert "KeyError" in text and after.observation == world.nothing.observation
    assert (
        world.node("majority by sex", programs["majority by sex"])
        .code["solve.py"]
        .startswith("import csv\n")
    )


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


def test_training_sees_the_tokens_of_the_chat_template(tokenizer):
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    talk = expert.solve(random.Random(3), CannedWorld("titanic"), "draft")
    tokens, own = make_tiny.encode_episode(raw, talk)
    messages = [{"role": role, "content": text} for role, text in talk]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(text, add_special_tokens=False).input_ids == tokens + raw.encode("\n").ids
    said = tokenizer.decode([token for token, mine in zip(tokens, own) if mine])
    assert said == "".join(f"{text}<|im_end|>" for role, text in talk if role == "assistant")
    opening = tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer(opening, add_special_tokens=False).input_ids == tokens[: own.index(True)]


def test_sharing_the_prompt_does_not_change_the_loss():
    import torch

    pytest.importorskip("transformers")
    model = make_tiny.new_model(
        make_tiny.Config(vocab=320), SimpleNamespace(token_to_id=make_tiny.SPECIAL.index)
    ).double()
    rng = random.Random(0)
    prompt = [rng.randrange(3, 320) for _ in range(9)]
    batch = [
        (prompt + [rng.randrange(3, 320) for _ in range(n)], [False] * 10 + [True] * (n - 1))
        for n in (5, 8, 12)
    ]
    alone = [
        torch.nn.functional.cross_entropy(
            model(torch.tensor([ids])).logits[0, 9:-1], torch.tensor(ids[10:]), reduction="sum"
        )
        for ids, _ in batch
    ]
    expected = sum(alone) / sum(sum(own) for _, own in batch)
    assert make_tiny.batch_loss(model, batch, 0).item() == pytest.approx(expected.item(), rel=1e-6)


def test_batches_use_every_episode_once_per_round():
    episodes = [([i] * (i % 7 + 1), []) for i in range(50)]
    stream, seen = make_tiny.batches(random.Random(0), episodes, 4), []
    while len(seen) < 50:
        seen += [ids[0] for ids, _ in next(stream)]
    assert sorted(seen) == list(range(50))


def test_a_small_model_is_built(tmp_path):
    from transformers import AutoModelForCausalLM

    config = make_tiny.Config(out=tmp_path, steps=2, transcripts=24, batch=8)
    make_tiny.build(config)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == config.vocab
    assert "--steps 2" in (tmp_path / "README.md").read_text()
