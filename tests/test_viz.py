"""viz.py: pictures, tables and terminal views of finished, running and broken runs."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import stdev

import pytest

import viz
from flatlab.runs import store, trackers
from flatlab.view import page, plots, reader, tables
from helpers import (
    CONFIG,
    MADE_BY,
    PROJECT,
    RESULT,
    episode,
    node,
    python,
    search_result,
    step_row,
    user_error,
)

pytestmark = pytest.mark.usefixtures("quick_provenance")


# ------------------------------------------------------------------ views


def filled(tmp_path, steps=6):
    run = store.open_run(tmp_path / "run", CONFIG, MADE_BY)
    run.result(**RESULT)
    for step in range(steps):
        run.log(step_row(step, entropy=1.0, kl=0.01, logprob_diff_max=1e-6, faults=0))
    return run


def test_command_prints_the_table_and_writes_the_plot(tmp_path, capsys):
    run = filled(tmp_path)
    said = printed(capsys, run.dir)
    assert "reward_mean" in said
    assert f"wrote {run.dir}/curves.png" in said
    assert (run.dir / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.filterwarnings("error::UserWarning")
def test_plot_of_rows_with_holes(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    run.result(**RESULT)
    run.log({"step": 0})
    page.draw([reader.read_run(tmp_path)], tmp_path)
    assert (tmp_path / "curves.png").exists()


def test_plot_is_not_redrawn_all_the_time(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "draw", lambda runs, dir: drawn.append(dir) or time.sleep(0.01))
    run = filled(tmp_path)
    page.plot_now_and_then(run)
    page.plot_now_and_then(run)
    assert drawn == [run.dir]


STEP = {"config.yaml": "a: 1", "metrics.jsonl": '{"step": 0}\n'}
BROKEN = (
    (None, "no config.yaml"),
    ({"photo.jpg": "x"}, "no config.yaml"),
    (STEP | {"metrics.jsonl": '{"step": 0'}, "no finished step"),
    ({"config.yaml": "sampling_mode: tail"}, "no finished node"),
    ({"config.yaml": "sampling_mode: x", "journal.jsonl": "{}\n[1]\n"}, "line 2 is not"),
    (STEP, "Cannot read .*result.json"),
    (STEP | {"config.yaml": "a: [1"}, "config.yaml is damaged"),
)


@pytest.mark.parametrize("files, sentence", BROKEN)
def test_broken_empty_and_foreign_directories_are_one_sentence(tmp_path, files, sentence):
    directory = tmp_path / "run"
    if files is not None:
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
    with user_error(sentence) as caught:
        reader.read_run(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_closed_pipe_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, str(PROJECT / "viz.py"), "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


# --------------------------------------------- terminal views and other kinds of runs


def with_episodes(tmp_path):
    run = filled(tmp_path, steps=2)
    run.save_episodes(0, [episode(0.7), episode(None)])
    best = episode(0.9, "\ud800 best reply", observation="\x1b[31m\x07 \u202e")
    best["system"] = "Be brief."
    best["turns"] = [turn | {"note": "2 turns left"} for turn in best["turns"]]
    run.save_episodes(1, [episode(0.6), best, episode(None, status="fault")])
    for name in ("final-best", "eval-000009", "before"):
        run.save_episodes(name, [episode(None), episode(0.95, "a final reply")])
    return run.dir


def searched(folder, seed=1, **more):
    run = store.open_run(folder, CONFIG | {"sampling_mode": "tail", "seed": seed}, MADE_BY)
    rows = [
        node("0.0", 0.4),
        node("0.1", None),
        node("0.0.0", 0.3, "improve"),
        node("0.0.1", 0.45, "improve"),
    ]
    run.result(**search_result(rows, metric="loss", higher_is_better=False, **more))
    for row in rows:
        row["improvement"] = None if row["score"] is None else -row["score"]
        run.log(row, "journal.jsonl")
    run.lock.close()
    return run.dir


def printed(capsys, *arguments, **options):
    viz.main(viz.Options(tuple(map(Path, arguments)), **options))
    return capsys.readouterr().out


def test_transcripts_of_training_in_the_terminal(tmp_path, capsys):
    directory = with_episodes(tmp_path)
    text = printed(capsys, directory, episode="1/1")
    assert "best reply" in text
    assert "2 of 2   ok   0.2 s" in text
    assert "── system message\n  │ Be brief.\n" in text
    assert "── first message\n  │ Predict who survived.\n" in text
    assert "\n  │ 2 turns left\n" in text
    assert not set("\x1b\x07\u202e") & set(text)
    _, _, *lines = printed(capsys, directory, list=True).splitlines()
    evaluated = "before/0 before/1 eval-9/0 eval-9/1 final-best/0 final-best/1"
    ids = ["0/0", "0/1", "1/0", "1/1", "1/2", *evaluated.split()]
    assert [line.split()[0] for line in lines] == ids
    assert "a final reply" in printed(capsys, directory, episode="final-best/1")
    assert printed(capsys, directory, best=True).startswith("1/1  0.9")  # of training alone
    for id in ("7/0", "1/9", "eval-9/5"):
        with user_error(f"no transcript .{id}"):
            printed(capsys, directory, episode=id)


def test_nodes_of_a_search_in_the_terminal(tmp_path, capsys):
    directory = searched(tmp_path / "run")
    _, *tree = printed(capsys, directory, list=True).splitlines()
    starts = ("best", "* 0.6 baseline", "* 0.4 draft", "* 0.3 improve", "0.45 improve 0.0.1")
    for line, start in zip(tree, (*starts, "failed draft 0.1"), strict=True):
        assert " ".join(line.split()).startswith(start)
    text = printed(capsys, directory, episode="0.0.0")
    assert "output of 0.0.0" in text
    assert "highest bound" in text
    assert printed(capsys, directory, best=True).startswith("0.0.0  0.3")
    assert "Best node (0.0.0): loss 0.3" in printed(capsys, directory)
    assert {p.name for p in directory.glob("*.png")} == {"tree.png", "search.png"}


@pytest.mark.slow
def test_several_runs_and_strangers_among_them(tmp_path):
    searched(tmp_path / "a")
    searched(tmp_path / "b", seed=2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("x")
    done = python("viz.py", *sorted(tmp_path.iterdir()))
    assert done.returncode == 0
    assert done.stdout.count("wrote") == 2
    assert (tmp_path / "compare-search-titanic.png").exists()
    assert done.stderr.count("\n") == 1
    assert "notes is not a run directory" in done.stderr
    # a directory of runs stands for them, as a grid does
    assert python("viz.py", tmp_path).stdout.count("2 of 8") == 1
    assert (tmp_path / "report.html").exists()


def test_the_recipe_of_the_docs_makes_conversations_of_good_episodes(tmp_path, monkeypatch):
    """Without the datasets library the function of the recipe gets the rows of the file."""
    run = filled(tmp_path, steps=1)
    rows = [episode(0.7, "good") | {"reward": 0.5}, episode(0.5) | {"reward": -0.5}]
    rows[0] |= {"system": "Be brief."}
    rows[1] |= {"system": ""}
    for row in rows:
        row["turns"] = [turn | {"note": "2 turns left"} for turn in row["turns"]]
    run.save_episodes(0, rows)
    text = (PROJECT / "docs/runs.md").read_text()
    [recipe] = re.findall("```python\n(from datasets.*?)```", text, re.S)
    (tmp_path / "logs").mkdir()
    run.dir.rename(tmp_path / "logs/my-run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = {}
    if importlib.util.find_spec("datasets"):
        exec(recipe, names)
        [made] = names["rows"]
    else:
        exec(recipe.split("\n\n\n")[1], names)
        made = names["conversation"](rows[0])
    contents = [message["content"] for message in made["messages"]]
    read = "seen hello\n2 turns left"
    assert contents == ["Be brief.", "Predict who survived.", "good", read, "good"]


# ------------------------------------------------------------------ trackers


def test_trackers_get_each_row(tmp_path):
    run = store.open_run(tmp_path, CONFIG, MADE_BY)
    sent = []
    run.trackers.append(sent.append)
    run.log(step_row(3, alarms=["x"], name="y", flag=True))
    [row] = sent
    assert trackers.step_of(row) == 3
    numbers = {"reward_mean": 0.3, "reward_std": 0.2, "score_mean": 0.7, "seconds": 2.0}
    assert trackers.scalars(row) == pytest.approx(numbers)


def test_tensorboard_can_read_it(tmp_path):
    pytest.importorskip("tensorboard", reason="optional: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = store.open_run(tmp_path, CONFIG | {"trackers": ["tensorboard"]}, MADE_BY)
    run.trackers = trackers.open_trackers(run)
    for step in range(2):
        run.log(step_row(step))
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("reward_mean")] == [0, 1]


def test_two_searches_are_two_runs_at_wandb_and_a_resumed_one_is_not(tmp_path):
    folders = [tmp_path / name for name in "aab"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    first, again, other = map(trackers.wandb_id, folders)
    assert first == again != other


def test_the_best_episode_of_several_tasks_is_that_of_the_largest_improvement(tmp_path):
    run = store.open_run(tmp_path, CONFIG | {"task": ["titanic", "battleOfSexes"]}, MADE_BY)
    run.result(**RESULT)
    episodes = [
        episode(0.791, "a") | {"improvement": 1.0},
        episode(0.8, "b") | {"improvement": 0.1},
    ]
    run.save_episodes(0, episodes)
    run.log(step_row(0))
    assert viz.best_of(reader.read_run(tmp_path))["improvement"] == 1.0


# ------------------------------------------------------------------ tables and curves


def trained(folder, scores=(0.5, 0.7, 0.9), seed=0, untrained=False, **config):
    """A finished training run whose best adapter has these scores at the end."""
    run = store.open_run(folder, CONFIG | {"seed": seed} | config, MADE_BY)
    counts = {"episodes": 8, "valid_share": 0.75, "faults": 1}
    before = {"score_mean": 0.4, "score_stderr": 0.1}
    best = {"file": "episodes/final-best.jsonl", "score_mean": 0.6, "step": 1}
    run.result(**RESULT, status="finished", before=before)
    run.result(final={"best": best, "split": "validation", "best_is_untrained": untrained})
    run.save_episodes("final-best", [episode(s) | {"seed": i} for i, s in enumerate(scores)])
    evaluation = {"eval_score_mean": 0.6, "eval_score_stderr": 0.05}
    for step in range(2):
        run.log(step_row(step, **counts, **evaluation))
    run.lock.close()
    return reader.read_run(folder)


def rows(*runs):
    """The rows of the tables, as dictionaries of texts."""
    shown = []
    for groups in tables.groups_of(list(runs)).values():
        numbers = tables.rows_of(groups)
        shown += [tables.cells(row, numbers[0]) for row in numbers]
    return shown


def test_two_training_runs_are_compared_in_pairs_with_their_uncertainty(tmp_path):
    """Both are far from certain, but the same seeds are 0.1 better in all cases but one."""
    first = trained(tmp_path / "a", scores=(0.5, 0.7, 0.9, None))
    second = trained(tmp_path / "b", scores=(0.6, 0.8, 1.0, None), lr=1.0)
    better, worse = rows(first, second)
    assert (better["run"], worse["run"]) == ("b", "a")
    values = (0.5, 0.7, 0.9, 0.6)  # a failure counts as the baseline
    assert worse["score"] == f"0.6750 ± {stdev(values) / 2:.4f}"
    assert worse["difference"] == f"-0.0750 ± {stdev((0.1, 0.1, 0.1, 0)) / 2:.4f} (4 paired)"
    assert better["difference"] == ""
    assert better["of"] == "best adapter, validation"
    assert better["failed"] == "4 of 18, 2 faults"
    assert better["improvement"] == "+0.75"
    assert rows(trained(tmp_path / "c", untrained=True))[0]["of"].startswith("untrained adapter")


def test_runs_that_differ_by_their_seed_are_one_row_whose_error_is_over_the_runs(tmp_path):
    runs = [trained(tmp_path / f"x-{seed}", (0.5 + 0.1 * seed,), seed) for seed in (1, 2)]
    [row] = rows(*runs)
    assert (row["run"], row["N"]) == ("x-1", 2)
    assert row["score"] == "0.6500 ± 0.0500"
    again = trained(tmp_path / "y-1", (0.9,), 1)  # every seed counts once
    other = trained(tmp_path / "x-3", (0.9,), 3, lr=1.0)
    shown = rows(*runs, again, other)
    assert {(row["run"], row["N"]) for row in shown} == {("x-1", 2), ("y-1", 1), ("x-3", 1)}
    assert "(" not in shown[-1]["difference"]  # nothing in common


def test_a_run_that_is_not_finished_shows_its_last_steps(tmp_path):
    run = filled(tmp_path)
    said = tables.headline(reader.read_run(run.dir))
    assert said.startswith("Mean of the last 1 step: accuracy 0.7000 (training part; ")
    assert "Status: " in said


def test_several_tasks_are_measured_by_clipped_improvements(tmp_path):
    run = trained(tmp_path / "a", task=["titanic", "digits"])
    for row in run.rows:
        del row["score_mean"]
        row["improvement_mean"] = 0.2
    run.result.update(metric="improvement", baseline=0.0, reference=1.0)
    played = [episode(0.9) | {"seed": i, "improvement": x} for i, x in enumerate((5.0, None))]
    store.Run(run.dir, {}, None).save_episodes("final-best", played)
    [row] = rows(run)
    assert row["score"] == "0.5000 ± 0.5000"
    assert row["task"] == "titanic+digits"
    group = plots.RunGroup("a", plots.BLUE, [run])
    axis = plots.draw_panels(plots.TRAINING, [group], "").axes[0]
    assert "improvement" in axis.get_ylabel()
    assert 0.2 in axis.lines[0].get_ydata()


def test_the_curve_of_evaluations_begins_before_training_and_has_errors(tmp_path):
    run = trained(tmp_path / "a")
    group = plots.RunGroup("a", plots.BLUE, [run])
    figure = plots.draw_panels(plots.TRAINING, [group], "")
    score = figure.axes[0]
    line, _, [bars] = score.containers[0]
    assert line.get_xdata().tolist() == [0, 1, 2]
    assert line.get_ydata().tolist() == [0.4, 0.6, 0.6]
    assert line.get_marker() == "s"
    heights = [path.vertices[:, 1].tolist() for path in bars.get_paths()]
    assert heights[0] == pytest.approx([0.3, 0.5])


def test_each_run_is_drawn_whole_and_the_mean_where_all_are(tmp_path):
    """Else a run that was stopped would vanish from the mean without a word."""
    runs = [trained(tmp_path / "a"), trained(tmp_path / "b", seed=1)]
    runs[1].rows.append(step_row(3, score_mean=0.9))
    axis = plots.new_figure(6, 4).subplots()
    plots.draw_key(axis, [plots.RunGroup("", plots.BLUE, runs)], "score_mean", "", plots.BLUE)
    *thin, bold = axis.lines
    assert [line.get_ydata()[-1] for line in thin[1:]] == [0.9]
    assert bold.get_xdata().tolist() == [0, 1]


def test_best_so_far_follows_the_direction(tmp_path):
    run = reader.read_run(searched(tmp_path / "a"))
    assert plots.best_so_far(run).to_list() == [0.6, 0.4, 0.4, 0.3, 0.3]


def test_failed_nodes_count_as_the_baseline_and_faults_do_not(tmp_path):
    run = reader.read_run(searched(tmp_path / "a"))
    run.rows[0] = reader.node_row(run.rows[0] | {"status": "fault"}, 0.6)
    assert [row["counted"] for row in run.rows] == [None, 0.6, 0.3, 0.45]
    titles, draft, *_ = viz.node_summary(run).splitlines()
    shown = dict(zip(titles.split(), draft.split()[1:]))
    assert (shown["counted"], shown["failed"], shown["fault"]) == ("0.6", "1", "1")


def test_operators_of_a_copied_script_have_marks_of_their_own(tmp_path):
    run = reader.read_run(searched(tmp_path / "a"))
    run.rows[2] |= {"op": "distill", "mark": "h"}
    tree, _ = plots.draw_tree(run).axes
    by_name = {marks.get_label(): marks for marks in tree.collections}
    shape = by_name["distill: 1"].get_paths()[0].vertices
    assert len(shape) == 7  # a closed hexagon


def test_what_the_numbers_do_not_say_is_a_sentence(tmp_path):
    run = reader.read_run(searched(tmp_path / "a"))
    assert "a: the best node was not scored on the test part." in tables.notes([run])
    run.result["selected_on_test"] = True
    run.rows[0]["alarms"] = ["The loss is not finite."]
    optimistic, alarm = tables.notes([run])
    assert "its score is optimistic" in optimistic
    assert "a: the last alarms: The loss" in alarm
