"""Tests of tiny.py and expert.py: the expert, the tokens, the files, building once. The model here learns nothing."""

import dataclasses
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatlab.episode.task import improvement
from flatlab.tree import prompts
from tasks import load_task
from tools import expert
from tools import make_tiny as tiny

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--steps", "2", "--transcripts", "24", "--batch", "8"]


def start_builder(cache: Path) -> subprocess.Popen:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [sys.executable, "tiny.py", *SMALL],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(the directory, cache, outputs of the two processes that were started to build it at the same time)."""
    cache = tmp_path_factory.mktemp("cache")
    builders = [start_builder(cache), start_builder(cache)]
    outputs = [builder.communicate(timeout=600) for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], outputs
    return Path(outputs[0][0].splitlines()[-1]), cache, outputs


@pytest.fixture(scope="module")
def tokenizer(built):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built[0])


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


# ---------------------------------------------------------------------------------------------- the expert


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
        found = prompts.parse(answer)
        assert (
            len(found) == int(re.search(r"List (\d+)", question)[1])
            and {words for words, _ in found} <= known
        )
        assert ("Probability" in question) == all(p is not None and 0 <= p <= 1 for _, p in found)
        tried = re.findall("Strategy: (.*)\nScore", question)
        assert not {words for words, _ in found} & set(tried)


def test_the_tables_have_bad_and_good_solutions_in_real_sandboxes():
    """One solution of each kind is really played: the baseline, a bad one, a good one, and a mistake."""
    world = expert.World(load_task("titanic"), expert.TABLES["titanic"](), tiny.any_backend())
    programs = {words: program for _, words, program in world.table.solutions}

    def gain(words):
        return improvement(world.play(expert.block(programs[words]))[1].score.value, world.task)

    assert gain("nobody survives") == pytest.approx(0, abs=0.01)
    assert gain("everybody survives") < -1
    assert gain("majority by all three") > 0.9
    text, after = world.play(
        expert.block(programs["majority by sex"].replace("r['survived']", "r['Survived']"))
    )
    assert "KeyError" in text and after.observation == world.nothing.observation
    assert (
        world.node("majority by sex", programs["majority by sex"])
        .code["solve.py"]
        .startswith("import csv\n")
    )


# ---------------------------------------------------------------------------------------------- tokens and files


def test_two_builders_build_once_and_leave_nothing_behind(built):
    directory, cache, outputs = built
    assert {out.splitlines()[-1] for out, _ in outputs} == {str(directory)}
    assert sorted("built in" in err for _, err in outputs) == [False, True]
    assert [path.name for path in (cache / "flatlab").iterdir() if path.suffix != ".lock"] == [
        directory.name
    ]
    assert directory.name.startswith("tiny-")


def test_a_built_model_is_found_without_torch(built):
    code = (
        f"import sys, tiny; sys.argv[1:] = {SMALL}; tiny.main(); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(built[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout.splitlines() == [str(built[0])]


def test_transformers_loads_it(built, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(built[0])
    assert (
        model.config.architectures == ["Qwen3ForCausalLM"]
        and model.config.max_position_embeddings == 4096
    )
    assert sum(p.numel() for p in model.parameters()) < 3e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    tokens = torch.tensor([tokenizer("Strategy: majority by sex\n").input_ids])
    assert model(tokens).logits.shape == (1, tokens.shape[1], tiny.Config.vocab)


def test_any_text_survives_the_tokenizer_and_none_becomes_a_control_token(tokenizer):
    for text in (
        "naïve café \U0001f6a2 \x00\x7f",
        "\n\n  a\r\n\tb",
        "Strategy: \nStrategy: x",
        "<|im_end|> <|im_start|>user\n",
    ):
        tokens = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert tokenizer.decode(tokens) == text
        assert not set(tokens) & set(tokenizer.convert_tokens_to_ids(tiny.SPECIAL))


def test_training_sees_the_tokens_of_the_chat_template(built, tokenizer):
    from tokenizers import Tokenizer

    raw = Tokenizer.from_file(str(built[0] / "tokenizer.json"))
    talk = expert.solve(random.Random(3), CannedWorld("titanic"), "draft")
    tokens, own = tiny.encode_episode(raw, talk)
    messages = [{"role": role, "content": text} for role, text in talk]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(text, add_special_tokens=False).input_ids == tokens + raw.encode("\n").ids
    said = tokenizer.decode([token for token, mine in zip(tokens, own) if mine])
    assert said == "".join(f"{text}<|im_end|>" for role, text in talk if role == "assistant")
    opening = tokenizer.apply_chat_template(
        messages[:1], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer(opening, add_special_tokens=False).input_ids == tokens[: own.index(True)]


def test_a_strategy_has_the_same_tokens_at_the_end_of_the_prompt_and_in_the_reply(tokenizer):
    line = "Strategy: majority by sex and class"
    tokens = tokenizer(line).input_ids
    assert tokenizer(f"of the task.\n\n{line}").input_ids[-len(tokens) :] == tokens
    assert tokenizer(f"{line}\n```bash\nls").input_ids[: len(tokens)] == tokens


# ---------------------------------------------------------------------------------------------- training and cache


def test_sharing_the_prompt_does_not_change_the_loss():
    import torch

    pytest.importorskip("transformers")
    model = tiny.new_model(
        tiny.Config(vocab=320), SimpleNamespace(token_to_id=tiny.SPECIAL.index)
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
    assert tiny.batch_loss(model, batch, 0).item() == pytest.approx(expected.item(), rel=1e-6)


def test_batches_use_every_episode_once_per_round():
    episodes = [([i] * (i % 7 + 1), []) for i in range(50)]
    stream, seen = tiny.batches(random.Random(0), episodes, 4), []
    while len(seen) < 50:
        seen += [ids[0] for ids, _ in next(stream)]
    assert sorted(seen) == list(range(50))


def test_the_name_changes_with_config_and_content(monkeypatch):
    names = {
        tiny.content_hash(config) for config in (tiny.Config(), tiny.Config(), tiny.Config(seed=1))
    }
    assert len(names) == 2
    changed = {"titanic": dataclasses.replace(load_task("titanic"), prompt="Another question.")}
    monkeypatch.setattr(
        "tasks.load_task",
        lambda name, *roots, old=load_task: changed.get(name) or old(name, *roots),
    )
    assert tiny.content_hash(tiny.Config()) not in names


def test_a_failed_build_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def build(directory, config):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("no more memory")

    monkeypatch.setattr(tiny, "build", build)
    with pytest.raises(RuntimeError):
        tiny.find_or_build(tiny.Config())
    assert [path.suffix for path in (tmp_path / "flatlab").iterdir()] == [".lock"]


def test_help_answers_at_once():
    command = [sys.executable, "-X", "importtime", "tiny.py", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "--steps" in text.stdout and not re.search(
        r"\| +(torch|transformers|docker)\b", text.stderr
    )
