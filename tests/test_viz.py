"""viz.py: pictures, tables, terminal views and the page of finished, running and broken runs.

In a real browser: click, search, compare; no text becomes markup, no request leaves.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from statistics import stdev
from types import SimpleNamespace

import pytest

import viz
from competition import write
from flatlab.runs import store, trackers
from flatlab.train import checkpoint, metrics
from flatlab.train.batch import Group
from flatlab.view import columns, compare, console, page, plots, reader, results
from flatlab.view.episodes import learned as learned_from
from flatlab.world.episode import Episode
from helpers import (
    CONFIG,
    MADE_BY,
    PROJECT,
    RESULT,
    SCALE,
    code_of,
    episode,
    graded,
    node,
    python,
    search_result,
    start,
    step_row,
    turn,
    user_error,
    within,
)

pytestmark = [
    pytest.mark.usefixtures("quick_provenance"),
    pytest.mark.filterwarnings("error::RuntimeWarning"),  # else it stands between the lines
]


# ------------------------------------------------------------------ runs

TRAINING = RESULT | {"status": "running"}
ROWS = [step_row(step, entropy=1.0, kl=0.01, logprob_diff_max=1e-6) for step in range(6)]


def stored(folder, groups=(), attempts=(), result=(), rows=ROWS, **config):
    """A run with these rows of steps. groups: of a training, by the name of their step or
    evaluation. attempts: nodes, or episodes of an evaluation.
    """
    run = store.open_run(folder, CONFIG | config, MADE_BY)
    run.update_result(**TRAINING | dict(result))
    for row in rows:
        run.log(row)
    for when, played in dict(groups).items():
        checkpoint.save_groups(run, f"{when}", played)
    for attempt in attempts:
        run.save_episodes(attempt.when, [attempt])
    run.lock.close()
    return reader.read_run(folder)


def group(*scores, number=0):
    """A group of finished Episodes, or of episodes with these scores."""
    played = enumerate(scores)
    episodes = [s if isinstance(s, Episode) else episode(s, seed=i) for i, s in played]
    return Group(number, SCALE, episodes)


def trained(folder, scores=(0.5, 0.7, 0.9), seed=0, result=(), best="last", **config):
    """A finished training run whose last adapter has these scores at the end; the untrained one has
    those of the baseline. best: the other one of the two that is the best.
    """
    played = {"untrained": [group(*[0.6] * len(scores))], "last": [group(*scores)]}
    before = metrics.evaluation(metrics.episode_rows(played["untrained"]), [SCALE])
    compared = {name: (groups, f"final-{name}") for name, groups in played.items()}
    compared["best"] = compared[best]
    made_after = {"last": 1, "best": 1 if best == "last" else -1}
    final = metrics.comparison(compared, [SCALE], made_after) | {"n": len(scores)}
    steps = [step_row(step, faults=1, eval_value_mean=0.6) for step in range(2)]
    result = {"before": before, "final": final} | dict(result)
    return stored(folder, {f"final-{best}": played[best]}, (), result, steps, seed=seed, **config)


def search_run(folder, nodes, seed=1, **result):
    for order, each in enumerate(nodes):
        each.order, each.when = order, f"{order}"
    result = search_result(nodes, **result)
    return stored(folder, (), nodes, result, (), sampling_mode="tail", seed=seed)


def searched(folder, seed=1):
    nodes = [
        node("0.0", 0.4, kept=True, code={"solve.py": "old\n"}),
        node("0.1", None),
        node("0.0.0", 0.3, "improve", code={"solve.py": "old\nnew\n"}),
        node("0.0.1", 0.45, "improve"),
    ]
    scale = {"metric": "loss", "higher_is_better": False, "reference": 0.4}
    for each in nodes:
        each.judge(SimpleNamespace(**RESULT | scale), graded(each.score))
    return search_run(folder, nodes, seed, **scale)


def evaluated(folder, scores, tests=None, **result):
    """A running evaluation; its third episode is a fault. tests: scores on the test part."""
    attempts = []
    for seed, score in enumerate(scores):
        played = episode(score, status="fault" if seed == 2 else "submit", seed=seed)
        played.id = played.when = f"{2 * seed}"  # some have not ended yet
        if tests:
            played.judge(SCALE, graded(score), graded(tests[seed]))
        attempts.append(played)
    result = {"kind": "evaluation", "metric": "loss"} | result
    return stored(folder, (), attempts, result, ())


def with_episodes(tmp_path):
    best = episode(0.9, "\ud800 best reply", observation="\x1b[31m\x07 \u202e", system="Be brief.")
    for each in best.turns:
        each["note"] = "2 turns left"
    evaluation = [group(None, episode(0.95, "a final reply"))]
    groups = {"before": evaluation, 0: [group(0.7, None)]}
    groups[1] = [group(0.6, best, episode(None, status="fault"))]
    groups |= dict.fromkeys(("eval-9", "final-best"), evaluation)
    return stored(tmp_path / "run", groups)


def learned(tmp_path):
    """A run with three groups in step 1: trained, of equal rewards, and without stored advantages;
    of the first the last reply of an episode carried no loss.
    """
    scores = (0.9, 0.5, None), (0.7, 0.7), (0.6, 0.8)
    groups = [group(*own, number=number) for number, own in enumerate(scores)]
    for played, own in zip(groups[0].episodes, ((1.2, None), (-0.4, -0.4), (-0.8, -0.8))):
        for each, advantage in zip(played.turns, own):
            each["advantage"] = advantage
    return stored(tmp_path / "run", {0: [group(0.7)], 1: groups})


# ------------------------------------------------------------------ runs with nothing to show


@pytest.mark.filterwarnings("error::UserWarning")
def test_plot_of_rows_with_holes(tmp_path):
    rows = [{"step": 0}, {"step": 1, "eval_value_mean": 0.5}]
    runs = [stored(tmp_path / str(seed), rows=rows, seed=seed) for seed in range(2)]
    for shown in (runs[:1], runs):
        [path] = page.draw(shown, tmp_path)
        assert path.exists()


def test_plot_is_not_redrawn_all_the_time(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "draw", lambda runs, dir: drawn.append(dir) or time.sleep(0.01))
    directory = stored(tmp_path).dir
    page.plot_now_and_then(directory)
    page.plot_now_and_then(directory)
    assert drawn == [directory]


STEP = {"config.yaml": "a: 1", "metrics.jsonl": '{"step": 0}\n'}


NEEDED = reader.NEEDED.union(*reader.NEEDED_OF.values())


def kind(name, keys=NEEDED):
    return {"result.json": json.dumps(dict.fromkeys(keys) | {"kind": name})}


BROKEN = {
    "There is no file or folder .*run; there is none": {},
    r"config.yaml cannot be used: expected ',' or '\]'.*, in line 1:\n.*a: \[1\n.*\^$": STEP
    | {"config.yaml": "a: [1"},
    "There is no file or folder .*result.json; did you mean .*names are config.yaml, metr": STEP,
    "result.json cannot be used: JSONDecode": STEP | {"result.json": "{"},
    "by another version: its result.json has no baseline": STEP | {"result.json": "{}"},
    "its result.json has no best_id": STEP | kind("search", reader.NEEDED),
    "by a version before 2026-11-28": STEP | kind("search") | {"journal.jsonl": "{}\n"},
    "no finished step": kind("training") | {"config.yaml": "a: 1", "metrics.jsonl": '{"step": 0'},
    "no finished node": STEP | kind("search"),
    "line 2, cannot be used: TypeError: it is not a JSON object": STEP
    | kind("search")
    | {"episodes.jsonl": "{}\n[1]\n"},
    "has no 'advantage'": STEP | kind("search") | {"episodes.jsonl": "{}\n"},
    "no finished episode": STEP | kind("evaluation"),
}


@pytest.mark.parametrize("sentence", BROKEN)
def test_broken_empty_and_foreign_directories_are_one_sentence(tmp_path, sentence):
    directory = tmp_path / "run"
    write(directory, BROKEN[sentence])
    with user_error(sentence) as caught:
        reader.read_run(directory)
    first, *snippet = str(caught.value).splitlines()
    assert str(directory) in first
    assert [line.strip() for line in snippet] == ["a: [1", "^"] * ("used: expected" in first)


@pytest.mark.parametrize("name", reader.NOUNS)
def test_a_run_that_ended_before_its_first_row_says_how(tmp_path, name):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    first = TRAINING | {"kind": name, "split": "test"}
    for fields, status in (
        ({}, "not begun"),  # killed when its directory was there
        ({"status": "interrupted"}, "interrupted"),
        (first | {"status": "interrupted"}, "interrupted"),  # while the engine loaded
        (first | {"status": "failed: no room"}, "failed: no room"),
    ):
        if fields:
            run.update_result(**fields)
        with user_error(f"nothing to show. Its status: {status}$"):
            reader.read_run(tmp_path)


PHASES = {  # of a start -> beginnings of lines after which Ctrl-C arrives
    "before the run": ("model",),
    "while the engine loads": ("plan", "engine"),
    "before the first row": ("engine   is ready",),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_viz_says_how_a_script_was_interrupted(tmp_path, tiny_model, monkeypatch, phase):
    """All scripts at once, because most of a start waits for imports."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    made = stored(tmp_path / "logs/made", {0: [group(0.7)]})
    names = {"grpo.py": "", "search.py": "", "evaluate.py": "", "sft.py": f"--runs {made.dir}"}

    def interrupted(script):
        process = start(tmp_path, script, f"--task titanic --name {script} {names[script]}")
        while not process.stdout.readline().startswith(PHASES[phase]):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        return process.returncode

    with ThreadPoolExecutor() as pool:
        assert {*pool.map(interrupted, names)} == {130}
    for script in names:
        path = tmp_path / "logs" / script
        sentence = "There is no file or folder"
        if path.exists():
            sentence = "no config.yaml|not begun"  # interrupted while its first files are written
        if (path / "result.json").exists():
            status = json.loads((path / "result.json").read_text())["status"]
            sentence = f"nothing to show. Its status: {status}$"
            assert status == "interrupted"
        with user_error(sentence):
            reader.read_run(path)


def test_the_eta_counts_the_evaluations_that_are_left(tmp_path, capsys, monkeypatch):
    """An evaluation of 100 s every 4 steps, after the last step, and three at the end."""
    monkeypatch.setattr(page, "plot_now_and_then", lambda directory: None)
    cfg = SimpleNamespace(steps=6, eval_every=4, eval_episodes=8)
    row = step_row(0, zero_variance_share=0, seconds_sample=1.0, alarms=[])
    for step, left in ((2, "8m28s"), (4, "6m44s"), (6, "5m00s")):
        job = SimpleNamespace(step=step, evaluation_seconds=100, run=SimpleNamespace(dir=tmp_path))
        console.step_made(job, [row], cfg)
        assert f"ETA {left}" in capsys.readouterr().out


def test_a_comparison_has_a_place_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [stored(Path("logs", name), seed=seed) for seed, name in enumerate("abc")]
    assert reader.folder_of(runs) == Path("logs")
    assert reader.folder_of(runs[:2]) == Path("logs/compare-a+b")
    console.print_outcome(*[run.dir for run in runs[:2]])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].endswith("again: python viz.py logs/a logs/b")
    assert Path("logs/compare-a+b/report.html").exists() and not Path("logs/report.html").exists()
    assert len(reader.find_runs([*Path("logs").iterdir()])[0]) == 3


def test_the_answer_of_a_comparison_is_a_sentence(tmp_path):
    values = {"good": (0.5, 0.6, 0.7), "same": (0.45, 0.7, 0.6), "bad": (0.1, 0.2, 0.31)}
    runs = [
        stored(tmp_path / f"{name}-{seed}", seed=seed, lr=name, rows=[step_row(0)])
        for name in values
        for seed in range(3)
    ]
    [groups] = compare.groups_of(runs).values()
    bad, good, same = groups
    for group, name in zip(groups, sorted(values)):
        each = enumerate(values[name])
        group.results = [{"value_mean": x, "values": {seed: x}} for seed, x in each]
    assert compare.answer([good, same]) == (
        "good (seeds 0, 1, 2) [lr=good] and same (seeds 0, 1, 2) [lr=same] do not differ: "
        "+0.0167 ± 0.0601, 95 % interval -0.2419 to +0.2752, 3 paired seeds."
    )
    better = "good (seeds 0, 1, 2) [lr=good] is better than bad (seeds 0, 1, 2) [lr=bad]: +0.3967"
    assert better in compare.answer([good, bad])
    bad.results, bad.runs = bad.results[:1], bad.runs[:1]
    assert compare.answer([good, bad]).endswith(
        "and bad-0 [lr=bad] have the values +0.6000 and +0.1000; 1 paired seed: too few for an "
        "interval."
    )


def test_a_comparison_names_the_runs_in_which_nothing_was_gained(tmp_path):
    """Their best adapter is the untrained one, so their values are equal whatever was trained."""
    runs = [
        trained(tmp_path / f"{name}-{seed}", [last] * 3, seed, best="untrained", lr=name)
        for name, last in (("brave", 0.55), ("ranks", 0.65))
        for seed in range(2)
    ]
    text = compare.table(runs)
    assert (
        "\n\nNothing was gained in 2 of 2 runs of brave (seeds 0, 1) (last adapter, validation "
        "part: -0.2500, -0.2500) and 2 of 2 runs of ranks (seeds 0, 1) (last adapter, validation "
        "part: +0.2500, +0.2500): their best adapter is the untrained one, which says nothing "
        "about the training. "
    ) in text
    assert "\nValue 0 is the baseline 0.6000, 1 a good known score" in text
    assert {row["gain over untrained"] for row in rows(*runs)} == {"-"}
    assert "have the values +0.0000 and +0.0000; 2 paired seeds: too few for an interval" in text
    assert {row["last adapter"] for row in rows(*runs)} == {"-0.2500, -0.2500", "+0.2500, +0.2500"}
    gained = compare.table([trained(tmp_path / "a"), trained(tmp_path / "b", lr=2.0)])
    assert "Nothing was gained" not in gained and "last adapter" not in gained


def test_adapters_with_the_same_values_are_explained_by_how_far_the_last_one_moved(tmp_path):
    """One sentence says that nothing was gained."""
    run = trained(tmp_path / "same", [0.6] * 3, best="untrained")
    run.steps[-1]["kl"] = 6.2e-5
    text = viz.run_summary(run)
    assert (
        "No evaluation during training was better than the untrained adapter, which is best/; the "
        "last one, 6.2e-05 nats per token away (KL), has the same values. "
    ) in text
    assert text.count("was better than the untrained") == 1
    assert text.count("3 fresh seeds") == 2  # beside the table and beside the value
    moved = trained(tmp_path / "moved", best="untrained")
    assert "has the same values" not in viz.run_summary(moved)


def test_the_time_of_a_training_is_that_of_the_command(tmp_path):
    """Its evaluations included."""
    assert "2 steps in 0m12s" in results.heading(trained(tmp_path / "a", result={"seconds": 12.3}))


def test_reasons_of_failures_are_counted_the_most_frequent_first(tmp_path):
    errors = ["KeyError: 'a'", "KeyError: 'b'", "1 ids are missing, such as 2", "a.py: TypeError"]
    errors += ["9 ids are missing, such as 7", "Nothing was run. There is no block. Write it.", ""]
    nodes = [node(f"0.{number}", None) for number in range(7)]
    for each, error in zip(nodes, errors):
        each.reason = error
    nodes[-1].status = "crashed"
    assert results.ends([search_run(tmp_path / "a", nodes)]) == (
        "7 of 7 nodes failed (value -1): 2 x KeyError; 2 x N ids are missing, such as N; "
        "1 x TypeError; 1 x There is no block; 1 x other; 0 faults."
    )
    assert "1 x broke its sandbox" in results.ends([search_run(tmp_path / "b", nodes[-1:])])
    training = stored(tmp_path / "c", {0: [group(0.7, None)], "eval-0": [group(None)]})
    said = "1 of 2 training episodes failed (value -1): 1 x no file"
    assert results.ends([training]).startswith(said)
    assert results.ends([training] * 2).startswith(
        "2 of 4 training episodes failed (value -1): 2 x"
    )
    assert f"\nc: {said}" in compare.table([training])


def test_lines_that_were_read_before_are_folded_in_a_transcript():
    warning = "WARNING: pip\nis old\nupdate it"
    texts = (f"1\n{warning}", f"2\n{warning}\nnew", "is old\nupdate it")
    turns = [{"observation": text, "note": ""} for text in texts]
    first, second, third = reader.observations(turns)
    assert (first, second, third) == (texts[0], "2\n[... 3 lines as above ...]\nnew", texts[2])


def test_a_transcript_shows_where_the_model_read_no_earlier_reply():
    turns = [
        {"observation": "a\nb\nc", "note": "2 turns", "restarts": True},
        {"observation": "a\nb\nc", "note": "1 turn", "restarts": False},
    ]
    first, second = reader.observations(turns)
    assert first == f"a\nb\nc\n{reader.BEGINS_ANEW}\n2 turns"
    assert second == "a\nb\nc\n1 turn"  # the model has not read these lines before


def test_the_terminal_explains_the_columns_that_it_shows(monkeypatch, tmp_path):
    runs = [trained(tmp_path / "a"), trained(tmp_path / "b", lr=2.0)]
    monkeypatch.setenv("COLUMNS", "100")
    narrow = compare.table(runs)
    monkeypatch.setenv("COLUMNS", "400")
    wide = compare.table(runs)
    for title in ("gain over untrained", "measured on"):
        assert f"\n{title}: " in wide and f"\n{title}: " not in narrow
    assert "\nvalue: " in narrow


def test_nothing_to_show_is_exit_code_2(tmp_path):
    done = python("viz.py", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "did you mean pdf" in python("viz.py", tmp_path, "--format", "pdff").stderr
    for step, sentence in (
        (None, "run has no transcripts; it has none.$"),
        (3, "no transcripts of step 3; it has none.$"),
    ):
        with user_error(sentence):
            viz.list_text(stored(tmp_path / "run"), step)
    with user_error("no transcripts of step 0; it has none.$"):
        viz.list_text(evaluated(tmp_path / "played", (0.8,)), 0)


def test_a_number_that_is_rounded_to_zero_has_no_minus(capsys):
    console.episode_made(episode(0.6 - 1e-9), 1, 2, None)
    assert "titanic value +0.0000 (0.6000)" in capsys.readouterr().out
    rows = [{"id": "0", "reward": -1e-9, "gain": -1e-9}, {"id": "1", "reward": 1.0, "gain": 5.0}]
    assert columns.aligned(rows).splitlines()[1].split() == ["0", "+0.000", "0.000"]


def test_a_list_of_many_rows_takes_no_time():
    with within(5):
        assert columns.aligned([{"id": str(number), "b": 0.5} for number in range(20_000)])


# A locale without UTF-8, which Python takes as it is
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_locale_without_utf_8(tmp_path):
    run = stored(tmp_path / "run", {0: [group(episode(0.7, "± né"))]})
    done = python("viz.py", run.dir, env=os.environ | ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert "± né" in (run.dir / "report.html").read_text("utf-8")
    done = python("viz.py", run.dir, "--episode", "0/0", env=os.environ | ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert "? n?" in done.stdout


def printed(capsys, *arguments, **options):
    viz.main(viz.Options(tuple(map(Path, arguments)), **options))
    return capsys.readouterr().out


def test_a_group_of_equal_rewards_can_be_trained():
    """By examples/ppo.py."""
    row = {"task": "titanic", "reward": -1.0, "trained": 2}
    assert learned_from([row, row]) == "titanic, rewards -1.000 to -1.000, 2 of 2 trained"


def test_what_a_step_was_learned_from_in_the_terminal(tmp_path, capsys):
    text = printed(capsys, learned(tmp_path).dir, step=1)
    assert re.findall("^step.*", text, re.M) == [
        "step 1, group 0: titanic, rewards -1.000 to +1.333, 3 of 3 trained",
        "step 1, group 1: titanic, rewards +0.500 to +0.500, equal rewards, none trained",
        "step 1, group 2: titanic, rewards +0.000 to +1.000",
    ]
    first, second = re.findall("^ *1/[01] .*", text, re.M)
    assert first.split() == "1/0 0.9000 submit +1.333 +1.200 1 of 2 2 0 9 1.5 titanic".split()
    assert "-0.400  2 of 2" in second


def test_transcripts_of_training_in_the_terminal(tmp_path, capsys):
    directory = with_episodes(tmp_path).dir
    assert "reward_mean" in printed(capsys, directory)
    assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = printed(capsys, directory, episode="1/1")
    for part in ("best reply", "── system message\n  │ Be brief.\n", "\n  │ 2 turns left\n"):
        assert part in text
    assert not set("\x1b\x07\u202e") & set(text)
    listed = re.findall(r"^ *(\S+/\d) ", printed(capsys, directory, list=True), re.M)
    ids = "before/0 before/1 0/0 0/1 1/0 1/1 1/2 eval-9/0 eval-9/1 final-best/0 final-best/1"
    assert listed == ids.split()
    assert "a final reply" in printed(capsys, directory, episode="final-best/1")
    assert printed(capsys, directory, best=True).startswith("1/1  0.9")  # of training alone
    for id, near in (("7/0", "1/0"), ("eval-9/5", "eval-9/1")):
        with user_error(f"no transcript '{id}'; did you mean .*{near}.*names are before/0"):
            printed(capsys, directory, episode=id)


def test_nodes_of_a_search_in_the_terminal(tmp_path, capsys):
    directory = searched(tmp_path / "run").dir
    text = printed(capsys, directory, list=True)
    assert text.startswith("run: titanic, tail, tiny, seed 1, 4 nodes in ")
    tree = [" ".join(line.split()[:3]) for line in text.splitlines()[4:]]
    assert tree == ["* 0.0 0.4000", "* 0.0.0 0.3000", "0.0.1 0.4500 validated", "0.1 failed turn"]
    other = searched(tmp_path / "other").dir
    shutil.rmtree(other / "transcripts")
    assert "The page lacks transcripts: " in printed(capsys, other)
    assert "4 of 4 nodes are listed here, 0 of them" in (other / "report.html").read_text()
    text = printed(capsys, directory, other, episode="0.0.0")
    assert "output of 0.0.0" in text
    assert "\n old\n+new\n" in text
    assert printed(capsys, directory, best=True).startswith("0.0.0  0.3")
    best = "Best node (0.0.0): value +1.3333, loss 0.3000, on the validation part"
    assert best in printed(capsys, directory)
    assert {p.name for p in directory.glob("*.png")} == {"tree.png", "curves.png"}


def test_a_folder_stands_for_the_runs_in_it_at_any_depth(tmp_path):
    searched(tmp_path / "a")
    (tmp_path / "notes/more").mkdir(parents=True)
    searched(tmp_path / "notes/b", seed=2)
    write(tmp_path, {"file.txt": "x", "a/wandb/files/config.yaml": "seed: 1"})  # W&B's own
    write(tmp_path / "broken", STEP | kind("other"))
    runs, [error] = reader.find_runs([tmp_path])
    assert [run.name for run in runs] == ["a", "b"] and "viz.py does not know: other" in error
    paths = [tmp_path / name for name in ("a", "file.txt", "notes/more")]
    runs, [error] = reader.find_runs(paths)
    assert [run.name for run in runs] == ["a"]
    assert "notes/more is not a run directory" in error


def test_the_recipe_of_the_docs_makes_conversations_of_episodes():
    """Its function gets a row of the file, without the datasets library."""
    recipe = code_of("docs/runs.md", "python", "from datasets")
    names = {}
    exec(recipe.split("\n\n\n")[1], names)
    played = episode(0.7, "good", system="Be brief.")
    for each in played.turns:
        each["note"] = "2 turns left"
    made = names["conversation"](played.transcript())
    contents = [message["content"] for message in made["messages"]]
    read = "seen hello\n2 turns left"
    assert contents == ["Be brief.", "Predict who survived.", "good", read, "good"]
    played.turns[0]["restarts"] = True
    made = names["conversation"](played.transcript())
    contents = [message["content"] for message in made["messages"]]
    assert contents == ["Be brief.", "Predict who survived.\n\n2 turns left", "good"]


# ------------------------------------------------------------------ trackers


def test_trackers_get_the_numbers_of_a_row():
    row = step_row(3, alarms=["x"], flag=True)
    assert trackers.step_of(row) == 3
    assert trackers.step_of({"step": None, "order": 5}) == 5  # a node of a search
    numbers = {"reward_mean": 0.3, "reward_std": 0.2, "value_mean": 0.5, "seconds": 2.0}
    numbers |= {"value_stderr": 0.1, "valid_share": 0.75}
    assert trackers.scalars(row) == pytest.approx(numbers)
    node = {"step": 1, "order": 5, "tokens": 7}  # in a search that learns
    assert (trackers.step_of(node), trackers.scalars(node)) == (5, {"node/tokens": 7})


def tracked(tmp_path, name):
    pytest.importorskip(name, reason=f"optional: pip install {name}")
    run = store.open_run(tmp_path, CONFIG | {"trackers": [name]}, MADE_BY)
    run.trackers = [trackers.OPEN[name](run)]
    for step in range(2):
        run.log(step_row(step))
    return run.trackers


def test_tensorboard_can_read_it(tmp_path):
    tracked(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward_mean")] == [0, 1]


@pytest.mark.slow
def test_wandb_gets_the_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    [tracker] = tracked(tmp_path, "wandb")
    wandb = tracker.__closure__[0].cell_contents
    summary = dict(wandb.summary)
    wandb.finish()
    assert (summary["step"], summary["reward_mean"]) == (1, pytest.approx(0.1))


def test_two_searches_are_two_runs_at_wandb_and_a_resumed_one_is_not(tmp_path):
    folders = [tmp_path / name for name in "aab"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    first, again, other = map(trackers.wandb_id, folders)
    assert first == again != other


def test_the_best_episode_of_several_tasks_is_that_of_the_largest_improvement(tmp_path):
    played = group(episode(0.791, improvement=1.0), episode(0.8, improvement=0.1))
    assert viz.best_of(stored(tmp_path, {0: [played]}))["improvement"] == 1.0


# ------------------------------------------------------------------ tables and curves


def said(run):
    """The outcome of a run, as at its end on a terminal."""
    return " ".join(results.outcome_sentences(run))


def rows(*runs):
    """The rows of the tables, as dictionaries."""
    compared = compare.groups_of(runs).values()
    return [
        row
        for table in compared
        for row in compare.difference_rows(sorted(table, key=lambda group: -group.value))
    ]


def test_two_training_runs_are_compared_in_pairs_with_their_uncertainty(tmp_path):
    """Both are far from certain, but the same seeds are 0.5 better in all cases but one. One unit
    of value is 0.2 of score.
    """
    first = trained(tmp_path / "a", scores=(0.4, 0.5, 0.7, None))
    second = trained(tmp_path / "b", scores=(0.5, 0.6, 0.8, None), lr=1.0)
    better, worse = rows(first, second)
    expected = {
        "run": "a",
        "value": f"-0.5000 ± {stdev((-1.0, -0.5, 0.5, -1)) / 2:.4f}",
        "score": f"0.5333 ± {stdev((0.4, 0.5, 0.7)) / 3**0.5:.4f}",
        "difference": f"-0.3750 ± {stdev((0.5, 0.5, 0.5, 0)) / 2:.4f}",
        "95 % interval": "-0.7728 to +0.0228",
        "pairs": 4,
    }
    assert worse.items() >= expected.items()
    expected = {"measured on": "best adapter, validation part", "valid": 0.75}
    assert better.items() >= expected.items()


def test_runs_that_differ_by_their_seed_are_one_row_whose_error_is_over_the_runs(tmp_path):
    """Fewer than three runs show each value: two are no measure of a spread."""
    one, two = (trained(tmp_path / f"x-{seed}", (0.5 + 0.1 * seed,), seed) for seed in (1, 2))
    [row] = rows(one, two)
    assert (row["run"], row["runs"]) == ("x (seeds 1, 2)", 2)
    assert (row["value"], row["score"]) == ("+0.0000, +0.5000", "0.6000, 0.7000")
    zero = trained(tmp_path / "x-0", (0.5,))
    others = [trained(tmp_path / f"z-{seed}", (0.4,), seed, lr=2.0) for seed in range(3)]
    first, second = rows(zero, one, two, *others)
    assert first["value"] == "+0.0000 ± 0.2887"  # 0.5 / sqrt(3)
    assert second["difference"] == "-1.0000 ± 0.2887"
    assert (second["95 % interval"], second["pairs"]) == ("-2.2421 to +0.2421", 3)
    again = trained(tmp_path / "y-1", (0.9,), 1)  # every seed counts once
    assert [row["runs"] for row in rows(one, two, again)] == [1, 2]
    assert rows(one, two, others[1])[-1]["difference"] == "-"  # no common seed


def test_runs_are_grouped_by_their_whole_config_and_their_folder_not_by_their_names(tmp_path):
    """Number and seed; a grid beside a single run of the same settings."""
    (tmp_path / "grid").mkdir()
    single = trained(tmp_path / "a-0")
    first, second = (trained(tmp_path / f"grid/x-{seed}", seed=seed) for seed in (0, 1))
    other = trained(tmp_path / "a-1", seed=1, workers=9)
    assert {row["run"] for row in rows(single, first, second)} == {"a-0", "x (seeds 0, 1)"}
    assert [row["run"] for row in rows(single, second)] == ["a + x (seeds 0, 1)"]
    assert {row["run"] for row in rows(single, other)} == {"a-0", "a-1"}


def test_a_table_fits_into_the_terminal_and_names_the_columns_that_it_lost(monkeypatch):
    row = {"run": "a-run", "N": 1, "value": "+0.5000", "seconds": "1.0", "differs in": "x" * 40}
    for width, lost in ((30, "seconds, value"), (40, "seconds"), (200, "")):
        monkeypatch.setenv("COLUMNS", str(width))
        *lines, last = columns.aligned([row, row]).splitlines()
        assert last.endswith(lost) and last.startswith("left out") == bool(lost)
        assert max(map(len, lines)) <= width
    assert last.split()[3:] == ["1.0", "x" * 40]


def test_one_table_for_a_task_whatever_differs(tmp_path):
    """An ablation of the prompts is a row like any other, also if the file has kept its name."""
    usual = {"prompts": "agent.yaml"}
    runs = [trained(tmp_path / f"base-{seed}", seed=seed, **usual) for seed in (0, 1)]
    runs.append(trained(tmp_path / "more", steps=6, runs=["logs/a", "logs/b/"], **usual))
    for name, prompts in (("other", "p/my.yaml"), ("edited", "agent.yaml")):
        runs.append(trained(tmp_path / name, prompts=prompts))
        runs[-1].fingerprint["prompts"] = name
    shown = {row["run"]: row["differs in"] for row in rows(*runs)}
    assert shown == {
        "base (seeds 0, 1)": "prompts=agent.yaml@d",
        "more": "steps=6, runs=logs/a+logs/b/, prompts=agent.yaml@d",
        "other": "prompts=my.yaml@other",
        "edited": "prompts=agent.yaml@edited",
    }
    assert [row["gain over untrained"] for row in rows(runs[2])] == ["+0.4444 ± 0.5300"]
    assert "95 %" not in columns.aligned(rows(runs[2]))
    assert [path.name for path in page.draw(runs, tmp_path)] == ["compare-training-titanic.png"]


def test_models_without_a_digest_are_told_apart_by_their_whole_names(tmp_path):
    """An endpoint's model has no digest; the address may change."""
    runs = []
    for seed, (model, url) in enumerate((("a/m", "x/v1"), ("b/m", "x/v1"), ("a/m", "y/v1"))):
        runs.append(trained(tmp_path / f"run-{seed}", seed=seed, model=model, url=url))
        runs[-1].fingerprint["model"] = ""
    shown = {row["run"]: row["differs in"] for row in rows(*runs)}
    assert shown == {"run (seeds 0, 2)": "model=a/m", "run-1": "model=b/m"}


def test_numbers_of_nodes_and_of_episodes_are_drawn_in_the_order_of_their_rows(tmp_path):
    run = evaluated(tmp_path, (0.8, 0.6))
    assert [row["step"] for row in run.rows] == [None, None]
    frame = plots.by_step(compare.RunGroup(runs=[run]), "score")
    assert frame[0].to_dict() == {0: 0.8, 1: 0.6}


def test_a_run_that_is_not_finished_shows_its_last_steps(tmp_path):
    text = said(stored(tmp_path))
    assert text.startswith(
        "Episodes of the last 1 step: value +0.5000, 75% valid, on the validation part. "
    )
    assert "Status: running" in text


def test_a_training_without_its_episodes_keeps_the_numbers_of_its_result(tmp_path):
    run = trained(tmp_path / "a", scores=(0.8, 0.7))
    whole = results.result_of(run)
    (run.dir / store.EPISODES).unlink()
    kept = results.result_of(reader.read_run(run.dir))
    for key in ("what", "part", "value_mean", "valid_share"):
        assert kept[key] == whole[key] is not None


def test_an_adapter_that_lost_half_of_its_valid_submissions_is_marked(tmp_path):
    run = trained(tmp_path / "a")
    assert "!" not in results.final_table(run.result)
    lost = {"value_mean": -0.8, "value_stderr": 0.1, "valid_share": 0.3, "step": 9}
    run.result["final"]["last"] = lost
    sentence, marked = [
        line for line in results.final_table(run.result).splitlines() if "!" in line
    ]
    assert marked.startswith("last (step 9) !  -0.8000 ± 0.1000    30%")
    assert sentence == "! last: the share of valid submissions fell from 100% to 30%."


def test_an_evaluation_is_the_mean_over_all_episodes_on_the_test_part_if_it_was_scored(tmp_path):
    run = evaluated(tmp_path / "a", (0.8, None, None))
    assert "All episodes: value +0.0000 ± 1.0000, 50% valid, " in said(run)
    assert "on the validation part." in said(run)
    assert "1 of 3 episodes failed (value -1): 1 x no file; 1 fault. Status: running." in said(run)
    assert [row["outcome"] for row in run.rows] == ["valid", "failed", "fault"]
    assert [line.split()[0] for line in viz.list_text(run).splitlines()[2:]] == ["0", "2", "4"]
    tested = evaluated(tmp_path / "b", (0.8, None), (0.7, 0.7))
    assert "value +0.5000 ± 0.0000, 100% valid, loss 0.7000" in said(tested)
    invalid = said(evaluated(tmp_path / "c", (0.8, 0.8), (None, 0.7)))
    assert "1 of 2 episodes failed (value -1): 1 x no score on the test part; 0 f" in invalid
    assert "on the test part." in said(tested)
    [row] = rows(tested)
    assert (row["measured on"], row["score"]) == ("all episodes, test part", "0.7000 ± 0.0000")
    [path, _] = page.write([run])
    assert path.name == "curves.png"


def test_several_tasks_have_a_common_value_and_no_score_and_a_line_each(tmp_path):
    facts = {"value_mean": 0.5, "value_stderr": 0.1, "valid_share": 1.0}
    facts |= {f"digits.{key}": 0.25 for key in facts}
    run = evaluated(tmp_path, (1.6, None), task="titanic digits", **facts)
    [row] = rows(run)
    assert (row["value"], row["score"]) == ("+0.4000 ± 1.4000", "-")
    assert ", score" not in said(run)
    assert "titanic digits, evaluation\n\n" in compare.table([run])
    assert "\n\n1 run of one setting" in compare.table([run])
    lines = results.final_table(run.result).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["all", "+0.5000", "±", "0.1000", "100%"],
        ["digits", "+0.2500", "±", "0.2500", "25%"],
    ]
    [path] = page.draw([run, run], tmp_path)
    assert path.name == "compare-evaluation-titanic+digits.png"


def test_an_imitation_has_a_loss_and_no_value(tmp_path):
    steps = [{"step": step, "loss": 0.5 - 0.1 * step, "time": 1.8e9} for step in range(2)]
    run = stored(tmp_path, result={"kind": "imitation", "episodes": 12}, rows=steps)
    assert said(run) == "Imitation of 12 episodes: last loss 0.4000. Status: running."
    assert "An imitation has no value" in compare.table([run])
    assert "loss" in viz.run_summary(run)
    assert "time" not in viz.run_summary(run)  # in rows of earlier versions
    assert [path.name for path in page.write([run])] == ["curves.png", "report.html"]


# ------------------------------------------------------------------ curves


def test_a_key_of_the_rows_is_one_picture(tmp_path, capsys):
    folders = [trained(tmp_path / f"x-{seed}", seed=seed).dir for seed in range(3)]
    keys = ("value_mean", "reward_std")
    assert "plot-value_mean.pdf" in printed(capsys, *folders, plot=keys, format="pdf")
    assert (tmp_path / "plot-reward_std.png").exists()
    assert (tmp_path / "plot-reward_std.pdf").read_bytes().startswith(b"%PDF")
    [groups] = compare.groups_of(map(reader.read_run, folders)).values()
    figure = plots.draw_panels(groups, ["value_mean"])
    assert figure.axes[0].get_title() == "value"
    assert names_in(figure.legends[0]) == ["x (seeds 0, 1, 2)"]
    with user_error("No run has numbers 'valu_mean'; did you mean value_mean"):
        printed(capsys, *folders, plot=("valu_mean",))
    with user_error("--plot and --format draw pictures"):
        printed(capsys, *folders, plot=keys, list=True)


def test_runs_without_a_key_are_named_and_the_others_drawn(tmp_path, capsys):
    """One lacks it among trainings, the other is an evaluation, whose rows hold text."""
    stored(tmp_path / "old", lr=2.0)
    trained(tmp_path / "new")
    evaluated(tmp_path / "played", (0.8,))
    text = printed(capsys, tmp_path, plot=("eval_value_mean",))
    assert "lack the key: old (eval_value_mean), played (eval_value_mean)\n" in text
    [picture] = tmp_path.glob("*.png")
    assert picture.stem == "plot-eval_value_mean-training-titanic"


def test_each_picture_has_one_size_for_a_paper_and_no_empty_cell(tmp_path):
    """Groups differ by more than their colour, which a grey print loses."""
    [groups] = compare.groups_of([trained(tmp_path / x, lr=x) for x in "ab"]).values()
    keys = ["seconds", "value_mean", "reward_mean", "valid_share"]
    for panels, width in (([], plots.PAGE), (keys[:1], plots.COLUMN), (keys, plots.PAGE)):
        figure = plots.draw_panels(groups, panels)
        figure.draw_without_rendering()
        assert figure.get_figwidth() == width
        right = [axis.get_position().x1 for axis in figure.axes]
        assert right[-1] == pytest.approx(max(right), abs=0.01)
    assert len({line.get_marker() for line in figure.legends[0].get_lines()}) == 2


def group_of(*runs):
    return compare.RunGroup(runs=[*runs])


def names_in(legend):
    return [text.get_text() for text in legend.get_texts()]


def y_of(axis, style):
    """The heights of the one line of this style."""
    [line] = [x for x in axis.lines if style in (x.get_linestyle(), x.get_drawstyle())]
    return line.get_ydata().tolist()


def test_the_curve_of_evaluations_begins_before_training(tmp_path):
    run = trained(tmp_path / "a")
    value, *others = plots.draw_panels([group_of(run)]).axes
    assert {axis.get_xlim() for axis in others} == {value.get_xlim()}
    points = [line.get_xydata().tolist() for line in value.lines]
    assert [[0, 0], [1, 0.6], [2, 0.6]] in points


def test_the_legend_covers_no_data_and_names_the_untrained_and_the_final_value(tmp_path):
    run = trained(tmp_path / "a", eval_episodes=64)
    run.result["final"]["best"] |= {"test_value_mean": 0.3, "test_value_stderr": 0.1}
    figure = plots.draw_panels([group_of(run)])
    figure.draw_without_rendering()
    axis = figure.axes[0]
    legend = axis.get_legend()
    names = ["value", "value, evaluations, N = 64", "before training, same seeds"]
    names += ["best/, test part, 3 fresh seeds"]
    assert names_in(legend) == names
    assert legend.get_window_extent().y0 >= axis.get_window_extent().y1
    assert [2, 0.3] in [line.get_xydata().ravel().tolist() for line in axis.lines]


def test_each_run_is_drawn_whole_and_the_mean_where_all_are(tmp_path):
    """Else a run that was stopped would vanish from the mean without a word."""
    runs = [trained(tmp_path / "a"), trained(tmp_path / "b", seed=1)]
    runs[1].rows.append(step_row(3, value_mean=0.9))
    axis = plots.new_figure(6, 4).subplots()
    plots.draw_keys(axis, [group_of(*runs)], ["value_mean"])
    *thin, bold, baseline = axis.lines
    assert [line.get_ydata()[-1] for line in thin[1:]] == [0.9]
    assert bold.get_xdata().tolist() == [0, 1]


def test_best_so_far_begins_with_the_first_valid_node_and_failures_count_in_a_mean(tmp_path):
    run = searched(tmp_path / "a")
    [axis] = plots.draw_panels([group_of(run)]).axes
    first, *best = y_of(axis, "steps-post")
    assert math.isnan(first) and best == pytest.approx([1, 1, 4 / 3, 4 / 3])
    assert names_in(axis.get_legend()) == ["baseline", "a node", "a failed node", "best so far"]
    mean = plots.draw_panels([group_of(run, run)]).axes[0]
    assert y_of(mean, "steps-post")[0] == -1  # no valid node yet


def test_the_episodes_of_an_evaluation_are_a_strip_for_each_task_with_their_failures(tmp_path):
    played = evaluated(tmp_path / "a", (0.8, None, None, 0.7))
    several = evaluated(tmp_path / "b", (0.8,), task="titanic digits", metric="value")
    axis = plots.draw_panels([group_of(played), group_of(several)]).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["titanic: 1 of 4 failed, 1 fault", "titanic: 0 of 1 failed"]
    strip, mean, *_ = axis.lines
    assert strip.get_xdata() == pytest.approx([1, 0.5])
    assert mean.get_xdata() == pytest.approx([0.5 / 3])


def test_a_tree_names_its_nodes(tmp_path):
    tree, _ = plots.draw_tree(searched(tmp_path / "a")).axes
    assert [text.get_text().strip() for text in tree.texts] == [
        "baseline  0.6000",
        "0.0  0.4000  idea 0.0",
        "0.0.0  0.3000  idea 0.0.0",
        "0.0.1  0.4500  idea 0.0.1",
        "0.1  failed: KeyError: 'missing'",
    ]
    bold = [line.get_xydata()[-1].tolist() for line in tree.lines if line.get_linewidth() > 1]
    assert bold == [[0.2, 0], [0.4, -1]]  # the path to the best
    assert tree.get_xlim()[1] == plots.COLUMN  # no gap before the colour bar
    for id, name in {"0.1.2.3.4.5": "0.1.2.3.4.5", "0.1.2.3.4.567": "….1.2.3.4.567"}.items():
        tree, _ = plots.draw_tree(search_run(tmp_path / id, [node(id, 0.5)])).axes
        assert tree.texts[1].get_text().split()[0] == name


def test_a_large_tree_is_cut_to_its_best_nodes_with_the_path_to_the_best(tmp_path):
    """The best nodes of 200."""
    nodes = [node(f"0.{i}", 0.5 + i / 1000) for i in range(199)] + [node("0.0.0", 0.9)]
    figure = plots.draw_tree(search_run(tmp_path, nodes, best_id="0.0.0"))
    tree, _ = figure.axes
    names = [text.get_text().split()[0] for text in tree.texts[1:]]
    assert names == ["0.0", "0.0.0", *(f"0.{i}" for i in range(137, 199))]
    assert tree.get_title().startswith("64 of 200 nodes")
    assert [text.get_position()[1] for text in tree.texts[1:]] == [-line for line in range(64)]
    assert figure.get_figheight() < 13


def test_what_the_numbers_do_not_say_is_a_sentence(tmp_path):
    run = searched(tmp_path / "a")
    assert "a: the best node was not scored on the test part." in results.notes([run])
    run.result["selected_on_test"] = True
    run.rows[0]["alarms"] = ["The loss is not finite."]
    run.result["degenerate"] = "titanic: women survive"
    run.result["hidden_scores"] = {"0.0": {"selection": {}, "test": {}}, "0.1": {"selection": {}}}
    optimistic, degenerate, alarm = results.notes([run])
    assert degenerate == "a: a score says little: titanic: women survive."
    assert "its score is optimistic" in optimistic
    assert "a: the last alarms: The loss" in alarm
    run.result["hidden_scores"]["0.1"]["test"] = {}
    assert "with more --nodes has read the test part 2 times" in " ".join(results.notes([run]))


def test_a_search_that_learns_shows_its_rounds_and_their_alarms(tmp_path):
    folder = searched(tmp_path / "a").dir
    rows = [{"step": 6, "gain_mean": 0.2}, {"step": 7, "valid_share": 0.75, "gain_mean": None}]
    rows[0] |= {"kl": 0.1, "entropy": 1.0, "live_lineages": 2, "improved_share": 0.125}
    rows[0] |= {"nodes": 3, "best_score": 1.5}
    rows[1]["alarms"] = ["It decays."]
    (folder / "metrics.jsonl").write_text(store.json_lines(rows))
    run = reader.read_run(folder)
    [rounds] = results.run_tables(run)
    titles, _, line = map(str.split, columns.aligned(rounds).splitlines())
    assert titles == results.ROUNDS[:8]
    assert line == "7 - - 0.7500 - - - -".split()
    titles = [axis.get_title() for axis in plots.draw_panels([group_of(run)]).axes]
    assert titles[-1] == "live lineages" and len(titles) == 6
    assert plots.draw_panels([group_of(run)]).axes[0].get_xlabel() == "nodes"
    html = written(tmp_path, run).read_text()
    assert columns.aligned(rounds) in viz.run_summary(run)
    assert '<td class="number">0.1250</td>' in html
    for text in (viz.run_summary(run), html):
        assert "the last alarms: It decays." in text


# ------------------------------------------------------------------ the page, also in a browser

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium here (Debian, Ubuntu: apt install chromium)"
)
HOSTILE = (
    "</pre></script><script>document.title='owned'</script><img src=http://example.com/x "
    "onerror=\"document.title='owned'\"> <!-- \u2028 ${1} &amp; \ud800 {{ 7 * 7 }}"
)


def browse(path, script, fragment="", width=1200):
    """Opens a page in Chromium, with a script of the test at its end: (what this returns, messages
    of the console).
    """
    html = path.read_text()
    nonce = re.search('nonce="(.+?)"', html)[1]
    run = f"<script nonce={nonce}>(async () => {{{script}}})().then(answer => {{"
    run += "document.body.dataset.answer = JSON.stringify(answer)})</script></body>"
    path.write_text(html.replace("</body>", run))
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom"
    flags += f" --window-size={width},900"
    flags += " --virtual-time-budget=2000 --enable-logging=stderr"
    folder = f"--user-data-dir={path.parent}/chromium"
    command = [CHROMIUM, *flags.split(), folder, path.resolve().as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    answer = re.search('data-answer="(.*?)"', done.stdout)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(answer[1])) if answer else None, messages


def written(tmp_path, *runs):
    """The page of the runs, whose curves are not drawn: that takes a second each time."""
    encoded = plots.encoded

    def quick(figure, format):
        return b"" if format == "png" else encoded(figure, format)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "encoded", quick)
        return page.write(list(runs))[-1]


def test_the_page_of_a_long_training_shows_a_sample_and_says_so(tmp_path):
    """The last steps and the evaluations are always there; earlier steps are listed."""
    groups = dict.fromkeys([*range(40), "eval-9"], [group(0.7)])
    html = written(tmp_path, stored(tmp_path / "run", groups)).read_text()
    assert "31 of 41 episodes are listed here, 4 of them with" in html
    assert html.count('<img alt="training, run: value; value, evaluations; reward') == 1
    listed = re.findall('" id="([^"]+)"', html)
    assert listed == [*(f"{step}/0" for step in range(39, 9, -1)), "eval-9/0"]
    assert html.count("transcript is not on the page") == 27


def test_the_best_episode_of_a_training_has_its_transcript_on_the_page(tmp_path):
    """It is the one of viz.py --best: an evaluation plays other seeds."""
    groups = dict.fromkeys(range(9), [group(0.7)])
    groups |= {2: [group(0.9)], "eval-8": [group(0.95)]}
    run = stored(tmp_path / "run", groups)
    top, *listed = written(tmp_path, run).read_text().split('<details class="episode')
    assert "What the agent did: run, the best one, 2/0" in top
    whole = [text for text in listed if "is not on the page" not in text]
    ids = [re.search(' id="([^"]+)"', text)[1] for text in whole]
    assert ids == ["8/0", "7/0", "6/0", "2/0", "eval-8/0"]
    assert viz.best_of(reader.read_run(run.dir))["id"] == "2/0"


def test_the_page_of_a_large_search_lists_all_nodes_and_has_the_best_transcripts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(page, "MOST_NODES", 3)
    scores = {"0.0": 0.6, "0.1": 0.7, "0.2": None, "0.3": 0.65, "0.0.4": 0.9}
    nodes = [node(id, score) for id, score in scores.items()]
    html = written(tmp_path, search_run(tmp_path / "run", nodes)).read_text()
    assert "5 of 5 nodes are listed here, 3 of them with their transcripts" in html
    listed = html.split('<details class="episode')[1:]
    missing = ["is not on the page" in text for text in listed]
    assert missing == [False, True, True, False, False]  # 0.0 is on the path to the best


WAIT = "await new Promise(done => setTimeout(done, 100));"
OPEN_ALL = "document.querySelectorAll('details').forEach(d => d.open = true);"


@needs_browser
def test_click_search_filter_sort_and_compare_nodes(tmp_path):
    nodes = [
        node("0.0", 0.7, kept=True),
        node("0.1", None),
        node("0.0.0", 0.75, "improve", code={"solve.py": "needle in the code\n"}),
        node("0.0.1", 0.65, "merge", mark="d"),
    ]
    script = f"""
    const seen = {{body: document.body.innerText, open: $("0.1").open}};
    const click = new MouseEvent("click", {{bubbles: true, cancelable: true, view: window}});
    document.querySelector('svg a[*|href="#0.0.0"]').dispatchEvent(click);
    {WAIT}
    seen.clicked = $("0.0.0").open;
    {OPEN_ALL}
    seen.detail = $("0.0.0").innerText;
    for (const id of ["0.0.0", "0.1", "0.0"]) $(id).querySelector("button").click();
    seen.pair = $("pair").innerText;
    const list = (id, text, event) => {{
        $(id).value = text;
        $(id).dispatchEvent(new Event(event));
        return [...document.querySelectorAll("#list .episode:not([hidden])")].map(e => e.id);
    }};
    seen.found = list("find", "NEEDLE", "input");
    list("find", "", "input");
    seen.failed = list("status", "failed", "change");
    seen.validated = list("status", "validated", "change");
    list("status", "", "change");
    seen.sorted = list("sort", "score", "change");
    return seen;
    """
    run = search_run(tmp_path / "run", nodes)
    seen, messages = browse(written(tmp_path, run), script, "#0.1")
    assert messages == []
    shown = "Best node (0.0.0): value +0.7500, accuracy 0.7500, on the validation part"
    for text in (shown, "1 of 4 nodes failed (value -1): 1 x KeyError", "KeyError: 'missing'"):
        assert text in seen["body"]
    assert seen["open"]
    assert seen["clicked"]
    for text in ("Be brief.", "first message of 0.0.0", "output of 0.0.0", "+needle", "bound"):
        assert text in seen["detail"]
    assert re.findall("message of (.*)", seen["pair"]) == ["0.1", "0.0"]  # two at most
    assert (seen["found"], seen["failed"]) == (["0.0.0"], ["0.1"])
    assert sorted(seen["validated"]) == ["0.0", "0.0.0", "0.0.1"]
    assert seen["sorted"] == ["0.0.0", "0.0", "0.0.1", "0.1"]


@needs_browser
def test_groups_on_the_page_are_sorted_and_their_best_is_beside_their_worst(tmp_path):
    script = f"""
    const order = key => {{
        $("sort").value = key;
        sort();
        return all("#list .episode").map(e => e.id);
    }};
    const seen = {{first: order("order"), reward: order("reward"), advantage: order("advantage")}};
    seen.quiet = all(".group.quiet").length;
    const group = groups.find(g => g.innerText.includes("step 1, group 0"));
    group.querySelector("button").click();
    {OPEN_ALL}
    seen.pair = [...$("pair").children].map(e => e.innerText);
    return seen;
    """
    seen, messages = browse(written(tmp_path, learned(tmp_path)), script)
    assert messages == []
    assert seen["first"] == ["1/0", "1/1", "1/2", "1/3", "1/4", "1/5", "1/6", "0/0"]
    assert seen["reward"] == ["1/0", "1/1", "1/2", "1/6", "1/5", "1/3", "1/4", "0/0"]
    assert seen["advantage"][:3] == ["1/0", "1/1", "1/2"]
    assert seen["quiet"] == 2
    best, worst = seen["pair"]
    assert "+1.333" in best and "advantage +1.200" in best and "not trained" in best
    assert "-1.000" in worst and "not trained" not in worst


@needs_browser
def test_a_comparison_begins_with_its_answer_and_nothing_is_beyond_the_page(tmp_path):
    runs = [
        trained(tmp_path / f"{name}-{seed}", seed=seed, lr=name * 9)
        for name in "ab"
        for seed in range(3)
    ]
    script = """
    return [document.body.firstElementChild.innerText, all("h2").slice(0, 4).map(e => e.innerText),
        all("table").map(table => table.rows[0].innerText.split("\\t").slice(0, 3).join()),
        all(".wide").every(e => [...e.querySelectorAll("tr")].every(row => [...row.cells].every(
            (cell, i) => cell.className === e.querySelectorAll("th")[i].className))),
        all(".wide").every(e => e.scrollWidth <= e.clientWidth),
        document.documentElement.scrollWidth <= innerWidth];
    """
    (answer, titles, tables, *fits), messages = browse(written(tmp_path, *runs), script, width=800)
    assert answer.startswith(
        "a (seeds 0, 1, 2) [lr=aaaaaaaaa] and b (seeds 0, 1, 2) [lr=bbbbbbbbb] do not differ: "
    )
    assert titles == ["Difference", "Each run", "How it was measured", "Episodes"]
    assert tables[:2] == ["run,runs,difference", "run,value,valid"]
    assert fits == [True, True, True]
    assert messages == []


@needs_browser
def test_episodes_have_a_line_each_with_the_reason_of_a_failure_and_keys_go_through_them(tmp_path):
    nodes = [node("0.0", 0.7), node("0.1", None, idea="a long strategy " * 30)]
    script = """
    const heights = episodes.map(e => e.firstElementChild.offsetHeight);
    const failed = $("0.1").firstElementChild.innerText;
    const opened = [];
    for (const key of "nnpn") {
        document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        opened.push(episodes.filter(e => e.open).map(e => e.id).join());
    }
    return [heights, failed, opened];
    """
    (heights, failed, opened), messages = browse(
        written(tmp_path, search_run(tmp_path, nodes)), script
    )
    assert messages == []
    assert max(heights) < 30
    assert "KeyError: 'missing'; a long strategy" in failed
    assert opened == ["0.1", "0.0", "0.1", "0.0"]


@pytest.mark.slow
@needs_browser
def test_several_runs_on_one_page(tmp_path):
    nodes = [node("0.0", 0.7, seed=1), node("0.1", None, seed=2)]
    runs = [search_run(tmp_path / name, nodes) for name in ("one", "two")]
    runs.append(evaluated(tmp_path / "episodes", (0.8, None)))
    runs.append(with_episodes(tmp_path))
    script = "return [document.querySelectorAll('svg').length, episodes.length, "
    script += "$('1/0.0').open, $('0/0.0').open];"
    assert browse(written(tmp_path, *runs), script, "#1/0.0") == ([2, 17, True, False], [])


@needs_browser
def test_hostile_text_stays_text(tmp_path):
    """And if there were a hole, the page's policy would run no script but its own, and request
    nothing.
    """
    texts = dict.fromkeys("sampling_mode idea error status".split(), HOSTILE)
    texts["turns"] = [turn(HOSTILE, HOSTILE, HOSTILE, action=HOSTILE)]
    texts |= {"code": {HOSTILE: HOSTILE}, "decision": {"reason": HOSTILE}}
    run = search_run(tmp_path / "run", [node("0.0", 0.7, HOSTILE, **texts)], metric=HOSTILE)
    hole = '<img src=http://127.0.0.1:9/x onerror="document.title=1">'
    hole += '<svg onload="document.title=1"></svg>'
    script = f"""
    {OPEN_ALL}
    const text = $("0.0").innerText;
    const scripts = document.scripts.length;
    const inside = [...document.images].every(image => image.src.startsWith("data:"));
    document.body.insertAdjacentHTML("beforeend", {json.dumps(hole)});
    {WAIT}
    return [text, scripts, inside, document.title];
    """
    (text, *seen), messages = browse(written(tmp_path, run), script, "#0.0")
    assert text.count("owned") > 15
    assert "{{ 7 * 7 }}" in text
    assert seen == [2, True, "run"]  # the scripts of the page and of this test
    assert len(messages) == 3  # two handlers and an image of the hole
    assert all("violates the following Content Security" in message for message in messages)


# ------------------------------------------------------------------ pictures of the docs


@pytest.mark.parametrize(
    "picture", sorted(PROJECT.glob("docs/pictures/*/*.png")), ids=lambda p: p.stem
)
def test_a_picture_of_the_docs_is_what_the_viewer_draws_of_the_runs_beside_it(picture, tmp_path):
    """If this fails, draw it again: `python viz.py docs/pictures/NAME`."""
    from matplotlib.image import imread

    runs, errors = reader.find_runs([picture.parent])
    assert not errors
    key = picture.stem.removeprefix("plot-")
    keys = [key] * (key != picture.stem)
    drawn = {path.name: path for path in page.draw(runs, tmp_path, keys=keys)}
    old, new = imread(picture), imread(drawn[picture.name])
    assert old.shape == new.shape
    assert abs(old - new).mean() < 1e-3
