"""What a search knows of other branches: near-copies, lessons and merges."""

import asyncio
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

import search
import viz
from flatlab.episode.episode import Episode
from flatlab.episode.grading import Score
from flatlab.errors import UserError
from flatlab.runs.cli import parse_config
from flatlab.runs.store import open_run
from flatlab.tree import copies, parsing, prompts, selection
from flatlab.tree.tree import Tree
from flatlab.view import page, search_plots, stats
from helpers import block, search_config
from test_rules import make, put
from test_search import (  # noqa: F401
    TASK,
    Model,
    attempt,
    by_seed,
    empty_tar,
    lists,
    no_provenance,
    result,
    rows,
    run,
    shape,
)

PROGRAM = """cat > solve.py <<'EOF'
import csv
rows = list(csv.DictReader(open('data/test.csv')))
with open('submission.csv', 'w') as out:
    out.write('id,survived\\n')
    for row in rows:
        out.write(f"{row['id']},{RULE}\\n")
EOF
python3 solve.py"""


def ran(id, program):
    return SimpleNamespace(id=id, actions=[{"action": None}, {"action": program}])


# ------------------------------------------------------------------ near-copies


def test_similarity_by_hand():
    one = " ".join(f"w{i}" for i in range(21))  # 20 pairs of adjacent words
    assert copies.similarity(one, one) == 1.0
    assert copies.similarity(one, one.replace("w20", "x")) == pytest.approx(19 / 20)
    assert copies.similarity(one, one.replace("w10", "x")) == pytest.approx(18 / 20)
    assert copies.similarity(one, f"{one} w21") == pytest.approx(40 / 41)


def test_blanks_and_comments_are_no_difference_and_short_actions_are_no_programs():
    spaced = PROGRAM.replace("import csv", "# the table\nimport   csv  # of csv files\n")
    assert copies.similarity(PROGRAM, spaced) == 1.0
    assert copies.similarity(PROGRAM, PROGRAM.replace("RULE", "int(row['sex'] == 'female')")) < 0.95
    assert copies.similarity("python3 solve.py", "python3 solve.py") == 0.0
    nodes = [ran("0.0", "ls"), ran("0.1", PROGRAM), ran("0.2", PROGRAM)]
    assert copies.near_copy(spaced, nodes, 0.95) == ("0.1", 1.0)
    assert copies.near_copy("validate", nodes, 0.95) is None


def sampled(op, replies, limit=0.95, times=1):
    """The node, the texts that its episode got, and the model, with 0.0 done before."""
    t = Tree(
        TASK, "tail", 0, search_config(max_similarity=limit), SimpleNamespace(rows=lambda _: [])
    )
    t.finished.append(ran("0.0", PROGRAM))
    replies = iter(replies)
    t.policy = Model(lambda prompt, seed: next(replies))
    node = SimpleNamespace(op=op, refused=[], tokens=0)
    policy = search.CountingPolicy(t, node, refuses_copies=True)
    found = [asyncio.run(policy.sample([1], 10_000, seed=i)).text for i in range(times)]
    return node, found, t.policy


def test_a_near_copy_is_sampled_once_more_and_its_tokens_count():
    again, other = block(PROGRAM), block("ls")
    node, found, model = sampled("improve", [again, other])
    assert found == [other] and node.refused == [("0.0", 1.0)]
    assert node.tokens == len(again) + len(other) and len(model.prompts) == 2
    node, found, model = sampled("improve", [again, again, again], times=2)
    assert found == [again, again] and len(node.refused) == 1  # once per node
    node, found, model = sampled("debug", [again])
    assert found == [again] and node.refused == []


def test_an_exact_copy_is_refused_below_the_largest_limit_only():
    node, found, model = sampled("draft", [block(PROGRAM), "second"], limit=0.999)
    assert found == ["second"]
    node, found, model = sampled("draft", [block(PROGRAM)], limit=1.0)
    assert node.refused == []


# ------------------------------------------------------------------ lessons


def lesson(text, effect, task="titanic"):
    return {"task": task, "effect": effect, "text": text}


def test_lessons_in_prompts_best_evidence_first_each_once_and_capped():
    known = [lesson("small", 0.01), lesson("breaks", -0.5), lesson("small", 0.3)]
    known += [lesson("from afar", 2.0, "digits")]
    lines = prompts.lesson_lines(TASK, known, 10_000).splitlines()
    assert lines == [
        "Lessons so far:",
        "- breaks (improvement -0.50)",
        "- small (improvement +0.30)",
        "- from afar (improvement +2.00, task digits)",
    ]
    many = [lesson(f"number {i}", i) for i in range(30)]
    text = prompts.lesson_lines(TASK, many, 10_000)
    assert text.count("\n- ") == prompts.LESSONS and text.splitlines()[1].startswith("- number 29")
    assert len(prompts.lesson_lines(TASK, many, 50)) == 50
    assert prompts.lesson_lines(TASK, [], 10_000) == ""


def test_the_lesson_is_one_sentence_of_the_reply():
    assert parsing.sentence("<think>a\nb</think>\n\n - **More trees** help.\nYes.") == (
        "More trees** help."
    )
    assert parsing.sentence(" \n") == "" and len(parsing.sentence("x" * 999)) == 300


def teacher(prompt, seed):
    return f"Lesson {seed % 1000}." if "What changed" in prompt else lists(prompt, seed)


def test_a_lesson_per_node_with_its_effect_in_the_prompts_of_all_branches(tmp_path):
    model = Model(teacher)
    scores = {"0.0": 0.6, "0.1": None, "0.2": 0.7}
    t = run(
        tmp_path,
        model=model,
        lessons=(),
        nodes=4,
        workers=1,
        score_of=lambda node: scores.get(node.id, 0.9),
    )
    effects = {row["id"]: row["lesson"]["effect"] for row in rows(t)}
    # baseline 0.5, reference 1; 0.1 failed: no change; 0.0.0 is a child of 0.0
    assert effects == pytest.approx({"0.0": 0.2, "0.1": 0.0, "0.2": 0.4, "0.0.0": 0.6})
    assert rows(t)[0]["tokens"] > 10 + len(rows(t)[0]["lesson"]["text"])
    first, second = (row["lesson"]["text"] for row in rows(t)[:2])
    asked = [p for p in model.prompts if "List" in p]
    assert "Lessons so far" not in asked[0] and f"- {first} (improvement +0.20)" in asked[-1]
    assert f"- {second} (improvement +0.00)" in asked[-1]
    told = search.told(t, t.nodes["0.2"], [])
    assert told.startswith("Lessons so far:") and told.endswith(f"Strategy: {t.nodes['0.2'].idea}")
    learned = [p for p in model.prompts if "What changed" in p]
    assert "Before: score 0.5\nAfter: score 0.6" in learned[0] and "no submission" in learned[1]
    assert "Before: score 0.6" in learned[3] and "After: score 0.9" in learned[3]


def test_without_lessons_nothing_is_asked_and_no_prompt_changes(tmp_path):
    model = Model(teacher)
    t = run(tmp_path, model=model, nodes=4, workers=1, score_of=lambda node: 0.6)
    assert not any("esson" in p or "What changed" in p for p in model.prompts)
    assert all(row["lesson"] == {} and row["refused"] == [] for row in rows(t))
    assert result(t)["refused"] == 0


def test_a_search_starts_with_the_lessons_of_earlier_ones_and_keeps_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run(tmp_path / "logs", model=Model(teacher), lessons=(), nodes=3, workers=1)
    (first.run.dir / "config.yaml").write_text("task: titanic\nsampling_mode: tail\n")
    texts = [row["lesson"]["text"] for row in rows(first)]
    opened = open_run(tmp_path / "logs/second", {"seed": 0})
    cfg = search_config(lessons=(str(first.run.dir), "logs/second", str(tmp_path / "logs/none")))
    assert [row["text"] for row in search.earlier_lessons(cfg, opened)] == texts
    shutil.rmtree(first.run.dir)
    assert [row["text"] for row in search.earlier_lessons(cfg, opened)] == texts
    opened.log({"id": "0.0"}, "journal.jsonl")
    assert [row["text"] for row in search.earlier_lessons(cfg, opened)] == texts
    opened.lock.close()
    empty = open_run(tmp_path / "logs/third", {"seed": 0})
    assert search.earlier_lessons(search_config(lessons=()), empty) == []
    with pytest.raises(UserError, match="--lessons: logs/none does not exist"):
        search.earlier_lessons(search_config(lessons=("logs/none",)), empty)
    empty.lock.close()


def test_flags():
    assert parse_config(search.Config, []).lessons is None
    assert parse_config(search.Config, ["--lessons"]).lessons == ()
    assert parse_config(search.Config, ["--lessons", "a", "b", "--k", "3"]).lessons == ("a", "b")
    for flags in ({"merge_share": 1.5}, {"max_similarity": -0.1}):
        with pytest.raises(UserError, match="must be"):
            search.check_choices(search_config(**flags))


# ------------------------------------------------------------------ merges


def test_merges_combine_the_best_of_two_branches_and_no_pair_twice():
    t = make("greedy")
    for score in (0.5, 0.9, 0.7):
        put(t, "0", score)
    put(t, "0.0", 0.8), put(t, "0.1", None)  # bests: 0.0.0 at 0.8, 0.1 at 0.9, 0.2 at 0.7
    pairs = []
    for _ in range(3):
        choice = selection.merge(t)
        node = t.start(choice)
        assert node.op == "crossover" and choice.phase == "exploit"
        pairs.append((node.parent, node.second))
    assert pairs == [("0.1", "0.0.0"), ("0.1", "0.2"), ("0.0.0", "0.2")]
    assert selection.merge(t) is None


def test_a_pair_that_changed_places_is_not_merged_again():
    t = make("greedy")
    put(t, "0", 0.5), put(t, "0", 0.4)
    failed = t.start(selection.merge(t))
    t.finished.append(failed)
    assert (failed.parent, failed.second) == ("0.0", "0.1")
    t.nodes["0.1"].improvement = 0.9  # the better one of the two from now on
    assert selection.merge(t) is None


def test_what_was_merged_already_is_not_merged_again():
    t = make("greedy")
    for score in (0.9, 0.8, 0.7):
        put(t, "0", score)
    node = t.start(selection.merge(t))  # 0.0 and 0.1
    node.kept = node.valid = True
    node.improvement = node.score = 0.95
    t.finished.append(node)
    assert selection.branches(t, "0.0.0") == {"0", "1"}
    choice = selection.merge(t)
    assert (choice.parent, choice.second) == ("0.0.0", "0.2")  # not 0.1: it is in there
    alone = make("greedy")
    put(alone, "0", 0.5), put(alone, "0.0", 0.6)
    assert selection.merge(alone) is None


def test_the_last_share_of_the_budget_merges(tmp_path):
    t = run(tmp_path, select="greedy", nodes=12, workers=1, merge_share=0.25, score_of=merging)
    merges = [row["order"] for row in rows(t) if row["decision"]["reason"].startswith("merges")]
    assert merges == [9, 10, 11] and result(t)["nodes"] == 12
    assert all(row["second"] for row in rows(t)[9:])


def merging(node):
    return 0.6 + 0.01 * node.order


# ------------------------------------------------------------------ cost


def test_tables_show_the_improvement_per_minute():
    cell = {
        "task": "t",
        "sampling_mode": "tail",
        "test_score": 0.9,
        "best_score": 0.9,
        "baseline": 0.5,
        "reference": 1.0,
        "higher_is_better": True,
        "test_minus_validation": 0.0,
        "selected_on_test": False,
        "nodes": 3,
        "failed": 0,
        "faults": 0,
        "tokens": 1,
    }
    (row,) = stats.grid_table([cell | {"seconds": 60.0}, cell | {"seconds": 180.0}])
    assert row["per_minute"] == pytest.approx(1.6 / 4) and "per minute" in stats.text_of([row])
    (row,) = stats.grid_table([cell])
    assert row["per_minute"] is None and "per minute" not in stats.text_of([row]).split("mean:")[0]


# ------------------------------------------------------------------ resuming, and the views


def reply_with_program(prompt, seed):
    """Five programs in all, so that many nodes would repeat one."""
    if "<program>" in prompt:
        return block(PROGRAM.replace("RULE", f"rule_{seed % 5}(row, {seed % 5}) + table[row, 0]"))
    return teacher(prompt, seed)


async def play_one_program(t, node, parents):
    """A search.play without a sandbox: one reply, sampled as the real one samples it."""
    node.refused = []
    policy = search.CountingPolicy(t, node, refuses_copies=True)
    sample = await policy.sample(
        policy.render([{"role": "<program>", "content": ""}]), 2000, seed=node.seed
    )
    action = {"reply": sample.text, "action": sample.text, "observation": "", "status": "submit"}
    value = by_seed(node)
    score = Score(value, "accuracy", "validation", value is not None, "")
    status = "submit" if value is not None else "turn_limit"
    turns = [action | {"score": None, "reply_tokens": 0, "seconds_env": 0.0}]
    return Episode(TASK.name, node.seed, status=status, score=score, turns=turns), empty_tar(
        node.id
    )


def grown(folder, monkeypatch, select):
    """A tree of 10 nodes with lessons, refusals and merges."""
    cfg = search_config(
        context=50_000,
        max_reply_tokens=1000,
        backend="local",
        select=select,
        nodes=10,
        workers=1,
        lessons=(),
        max_similarity=0.95,
        merge_share=0.3,
    )
    opened = open_run(folder, {"seed": 0})
    (opened.dir / "nodes").mkdir(exist_ok=True)
    t = Tree(replace(TASK), "tail", 0, cfg, opened)
    before = len(t.finished)
    monkeypatch.setattr(search, "play", play_one_program)
    monkeypatch.setattr(search, "Attempt", attempt)
    asyncio.run(search.search([t], Model(reply_with_program), 1))
    opened.lock.close()
    return t, before


def told_apart(t):
    facts = ("id", "second", "refused", "lesson", "decision", "idea", "tokens", "score")
    return [{key: row[key] for key in facts} for row in rows(t)]


@pytest.mark.parametrize("select", ["bfs", "greedy"])
def test_a_killed_search_resumes_to_the_same_lessons_refusals_and_merges(
    tmp_path, monkeypatch, select
):
    whole, _ = grown(tmp_path / "whole", monkeypatch, select)
    assert sum(len(row["refused"]) for row in rows(whole)) >= 2 and result(whole)["refused"] >= 2
    assert sum(row["op"] == "crossover" for row in rows(whole)) >= 2
    assert all(row["lesson"]["text"].startswith("Lesson") for row in rows(whole))
    lines = (whole.run.dir / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for kept in (1, 4, 8):
        cut = tmp_path / f"cut-{kept}"
        cut.mkdir()
        (cut / "config.yaml").write_text("seed: 0\n")
        (cut / "journal.jsonl").write_bytes(b"".join(lines[:kept]) + b'{"id": "0.')
        shutil.copytree(whole.run.dir / "nodes", cut / "nodes")
        again, before = grown(cut, monkeypatch, select)
        assert before == kept
        assert shape(again) == shape(whole) and told_apart(again) == told_apart(whole)


def test_page_and_plots_show_lessons_and_refusals(tmp_path, monkeypatch):
    t, _ = grown(tmp_path / "run", monkeypatch, "greedy")
    (t.run.dir / "config.yaml").write_text("task: titanic\nsampling_mode: tail\nselect: greedy\n")
    shown = search.read_run(t.run.dir)
    lessons = page.run_of(shown)["lessons"]
    assert lessons == [[row["id"], row["lesson"]] for row in rows(t)] and len(lessons) == 10
    refused = next(row for row in shown.rows if row["refused"])
    assert page.texts_of(refused | {"turns": []})["refused"] == refused["refused"]
    assert page.texts_of(refused | {"turns": []})["lesson"] == refused["lesson"]
    assert refused["refused"][0][0] in viz.show(refused | {"turns": []})
    counts = search_plots.diversity(shown)
    assert counts[0] == (0, 0) and counts[-1][1] == result(t)["refused"] >= 2
    codes = [{"a.py": "x = 1"}, {}, {"a.py": "x  = 1  # one"}, {"a.py": "x = 2"}]
    for row, code in zip(shown.rows, codes):
        row["code"] = code
    assert [programs for programs, _ in search_plots.diversity(shown)[:5]] == [0, 1, 1, 1, 2]
