"""Many runs: groups without their seed, tables that drop nothing."""

import contextlib
import itertools
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import viz
from flatlab.runs.reader import RunData, node_row
from flatlab.train import metrics
from flatlab.view import compare, plots
from flatlab.view.search_plots import SEARCH as PANELS
from flatlab.view.search_plots import (
    best_so_far,
    draw_tree,
)
from helpers import RESULT, node, search_result, step_row

GRPO = {
    "task": ["titanic"],
    "model": "/x/tiny",
    "lr": 1e-3,
    "steps": 2,
    "groups": 2,
    "group_size": 4,
}
SEARCH = {"task": "titanic", "sampling_mode": "tail", "select": "ucb", "model": "tiny"}


@contextlib.contextmanager
def new_axis():
    with plots.figure_of(6, 4) as figure:
        yield figure.subplots()


FOLDERS = itertools.count()


def folder(name):
    """A run directory of its own, as every run has one."""
    return Path(f"logs/{next(FOLDERS)}/{name}")


def trained(seed=0, scores=(0.6, 0.7), **config):
    counts = {"valid_share": 0.75, "reply_tokens": 10.0, "faults": 1, "episodes": 8}
    rows = [step_row(i, score_mean=score, **counts) for i, score in enumerate(scores)]
    config = GRPO | {"seed": seed, "name": f"g{seed}"} | config
    return RunData(folder(f"g{seed}"), "grpo", config, rows, RESULT | {"baseline": 0.5}, {})


def searched(seed=0, scores=(0.6, None, 0.7), higher=True, **config):
    rows = [node(f"0.{i}", s, tokens=100, elapsed=60.0 * i) for i, s in enumerate(scores)]
    result = search_result(rows, metric="m", higher_is_better=higher, baseline=0.5)
    if scores == (None,) * len(scores):
        result["best_score"] = 0.5
    config = SEARCH | {"seed": seed, "name": f"s{seed}"} | config
    rows = [node_row(row, 0.5) for row in rows]
    return RunData(folder(f"s{seed}"), "search", config, rows, result, {})


def groups_by_task(runs):
    """Task -> ["name of the group: names of its runs", ...]."""
    shown = {}
    for (_, task), groups in compare.groups_of(runs).items():
        shown[task] = []
        for group in groups:
            names = " ".join(run.name for run in group.runs)
            shown[task].append(f"{group.label}: {names}")
    return shown


def test_groups_are_runs_of_the_same_config_but_for_the_seed():
    runs = [searched(0), searched(1)]
    runs += [searched(2, sampling_mode="none"), searched(3, task="digits")]
    assert groups_by_task(runs) == {
        "titanic": ["tail: s0 s1", "none: s2"],
        "digits": ["tail: s3"],
    }
    settings = [{}, {}, {"lr": 2e-3}, {"lr": 2e-3, "steps": 9}]
    runs = [trained(seed, **changed) for seed, changed in enumerate(settings)]
    assert groups_by_task(runs) == {
        "titanic": ["lr=0.001 steps=2: g0 g1", "lr=0.002 steps=2: g2", "lr=0.002 steps=9: g3"]
    }


def test_a_group_has_the_same_name_on_every_task():
    """Ranks are means over tasks, so another rule on another task is no run of the same group."""
    runs = [
        searched(0, select="bfs"),
        searched(1, select="bfs", sampling_mode="none"),
        searched(2, select="mcts", task="digits"),
        searched(3, select="bfs", task="digits"),
    ]
    assert groups_by_task(runs) == {
        "titanic": ["bfs tail: s0", "bfs none: s1"],
        "digits": ["bfs tail: s3", "mcts tail: s2"],
    }


def test_labels_are_the_settings_that_a_user_chose():
    """Loss, reward, rule and mode first; what follows from them is not repeated."""
    grpo = {"loss": "grpo", "clip_high": 0.2, "max_groups": 4, "kl": 0.1, "reward": "tiered"}
    dapo = {"loss": "dapo", "clip_high": 0.28, "max_groups": 4, "kl": 0.0, "reward": "binary"}
    shown = groups_by_task([trained(0, **grpo), trained(1, **dapo)])
    assert shown["titanic"] == ["grpo reward=tiered kl=0.1: g0", "dapo reward=binary kl=0: g1"]
    wide = dapo | {"clip_high": 0.3}
    shown = groups_by_task([trained(0, **dapo), trained(1, **wide)])
    assert shown["titanic"] == ["clip_high=0.28: g0", "clip_high=0.3: g1"]


def evaluated(score, **more):
    numbers = {"score_mean": score, "score_stderr": 0.01, "n": 64, "valid_share": 1.0}
    return numbers | {"improvement": score - 0.5, "improvement_stderr": 0.01} | more


def ended(seed=0, untrained=False, **config):
    """A finished training run; with `untrained` no evaluation beat the untrained adapter."""
    run = trained(seed, **config)
    paired = {"difference": 0.1, "difference_stderr": 0.02, "difference_n": 64}
    best = evaluated(0.5 if untrained else 0.6, step=-1 if untrained else 1)
    best |= {"test_score_mean": 0.55, "test_score_stderr": 0.01}
    final = {
        "n": 64,
        "split": "validation",
        "steps": 2,
        "untrained": evaluated(0.5),
        "last": evaluated(0.6, step=1) | paired,
        "best": best | paired,
        "best_is_untrained": untrained,
    }
    return replace(run, result=run.result | {"final": final})


def test_training_runs_are_ranked_by_a_named_adapter():
    runs = [ended(0), ended(1, untrained=True)]
    [row] = compare.comparison(runs, "grpo")
    assert row["adapter"] == "1 best, 1 untrained"
    assert row["mean"] == pytest.approx(0.55)
    [row] = compare.comparison([trained()], "grpo")  # not finished
    assert row["adapter"] == "1 last steps"
    assert row["mean"] == pytest.approx(0.7)
    assert "1 best, 1 untrained" in compare.table(runs)


def test_the_part_that_was_selected_on_is_named():
    run = ended()
    run.result["final"]["split"] = "test"
    run.result["selected_on_test"] = True
    del run.result["final"]["best"]["test_score_mean"]
    assert "validation" not in metrics.final_table(run.result)


def test_the_mean_over_several_tasks_is_an_improvement():
    run = trained(task=["titanic", "digits"])
    for row, improvement in zip(run.rows, (0.1, 0.2)):
        del row["score_mean"]
        row["improvement_mean"] = improvement
    run.result.update(metric="improvement", baseline=0.0, reference=1.0)
    [row] = compare.comparison([run], "grpo")
    assert row["task"] == "titanic+digits"
    assert row["improvement"] == pytest.approx(0.2)
    group = plots.RunGroup(run.name, plots.BLUE, [run])
    with new_axis() as axis:
        plots.draw_panel(axis, plots.TRAINING[0], [group])
        assert "improvement" in axis.get_ylabel()
        assert axis.lines[0].get_ydata()[1] == 0.2


def test_failed_nodes_count_as_the_baseline_and_faults_do_not():
    run = searched(scores=(0.7, None, None))
    run.rows[2] = node_row(run.rows[2] | {"status": "fault"}, 0.5)
    assert [row["counted"] for row in run.rows] == [0.7, 0.5, None]
    _, draft, *_ = viz.node_summary(run).splitlines()
    assert draft.split() == "draft 3 1 1 0.6 0.7 1 100".split()
    [group] = compare.groups_of([run])["search", "titanic"]
    with new_axis() as axis:
        plots.draw_panel(axis, PANELS[2], [group])
        [cross] = axis.containers  # mean and standard error
        [mean] = cross[0].get_ydata()
    assert mean == pytest.approx(0.6)


def test_best_so_far_follows_the_direction_and_starts_at_the_baseline():
    down = searched(scores=(0.6, 0.3, None, 0.4), higher=False)
    assert best_so_far(down, "nodes").to_list() == [0.5, 0.5, 0.3, 0.3, 0.3]
    by_tokens = best_so_far(searched(), "tokens")
    assert by_tokens.to_dict() == {0: 0.5, 100: 0.6, 200: 0.6, 300: 0.7}


def test_the_band_of_best_so_far_never_leaves_the_possible_range():
    """Accuracy 1 is the top and the baseline the bottom, whatever the standard deviation is."""
    runs = [searched(seed, (1.0,)) for seed in range(3)]
    runs.append(searched(3, (None,)))
    groups = compare.groups_of(runs)["search", "titanic"]
    with new_axis() as axis:
        plots.draw_panel(axis, PANELS[0], groups)
        [band] = axis.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert 0.5 <= heights.min()
    assert heights.max() <= 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_all_pictures_of_a_mixed_crowd(tmp_path):
    faulty = searched(0)
    faulty.rows[1] |= {"op": "debug", "status": "fault", "outcome": "fault", "counted": None}
    crowd = [
        trained(0),
        trained(1),
        trained(0, lr=1.0),
        faulty,
        searched(1),
        searched(0, sampling_mode="none"),
        searched(0, task="a $ b $ c/d"),
        searched(5, scores=(None,)),
    ]
    paths = compare.plot_many(crowd, tmp_path, "pdf")
    names = ["compare-grpo-titanic", "compare-search-a---b---c-d", "compare-search-titanic"]
    assert sorted(path.stem for path in paths) == names
    assert all(path.read_bytes()[:4] == b"%PDF" for path in paths)


def test_the_mean_is_solid_only_where_all_runs_are():
    """Else a run that was stopped would vanish from the mean without a word."""
    runs = [trained(0), trained(1, scores=(0.6, 0.7, 0.9, 0.9))]
    [group] = compare.groups_of(runs)["grpo", "titanic"]
    with new_axis() as axis:
        plots.draw_key(axis, [group], "score_mean")
        ends = {line.get_linestyle(): line.get_xdata()[-1] for line in axis.lines}
    assert ends["-"] == 1
    assert ends[":"] == 3


# ------------------------------------------------------------------ what made a run


def made_by(run, *code, model="m1", task="t1"):
    """The run with a fingerprint: its versions of the code, model and task."""
    return replace(run, fingerprint={"code": list(code or "a"), "model": model, "task": task})


def test_an_original_and_its_modified_copy_are_rows_of_their_own():
    originals = [made_by(searched(0)), made_by(searched(1))]
    copy = made_by(searched(3), "b")
    shown = groups_by_task([*originals, copy])
    assert shown == {"titanic": ["code=a: s0 s1", "code=b: s3"]}


def test_a_model_whose_files_changed_is_another_model():
    first = made_by(searched(0))
    changed = made_by(searched(1), model="m2")
    shown = groups_by_task([first, changed])["titanic"]
    names = [re.sub("=.*:", ":", name) for name in shown]
    assert names == ["weights: s0", "weights: s1"]
    other = made_by(searched(1, model="logs/x/best"), model="m2")
    assert groups_by_task([first, other])["titanic"] == ["tiny: s0", "x: s1"]


def test_versions_of_a_task_are_tasks_of_their_own():
    runs = [made_by(searched(0)), made_by(searched(1), task="t2"), made_by(searched(2))]
    assert groups_by_task(runs) == {
        "titanic (version=t1)": ["tail: s0 s2"],
        "titanic (version=t2)": ["tail: s1"],
    }


def test_a_method_that_is_alone_on_its_task_has_no_rank():
    """Else the only method on a version of a task would be its best."""
    first = made_by(searched(0))
    other_task = made_by(searched(1), task="t2")
    alone = compare.comparison([first, other_task], "search")
    assert [row["rank"] for row in alone] == [None, None]
    better = made_by(searched(0, scores=(0.9,), sampling_mode="none"))
    rows = compare.comparison([first, other_task, better], "search")
    assert {row["method"]: row["rank"] for row in rows} == {"tail": 2.0, "none": 1.0}


def test_a_seed_that_occurs_twice_counts_once():
    runs = [made_by(searched(seed)) for seed in (0, 1, 2)]
    again = [replace(runs[0], dir=Path(f"logs/{name}")) for name in ("t1", "a1")]
    (row,) = compare.comparison([*runs, *again], "search")
    assert row["n"] == 3
    assert row["nodes"] == 9
    text = compare.table([*runs, *again])
    assert "titanic tail: every seed counts once; not counted: s0, t1" in text
    assert "counts once" not in compare.table(runs)


def test_a_run_whose_code_changed_is_marked_as_mixed():
    pure = made_by(searched(0))
    mixed = made_by(searched(1), "a", "b")
    assert groups_by_task([mixed])["titanic"] == ["tail mixed: s1"]
    sentence = "s1 is mixed: while it went on, its code changed"
    assert sentence in compare.table([pure, mixed])
    assert plots.heading(mixed).endswith("mixed code")
    assert "mixed" not in plots.heading(pure)


def evaluation(*scores, **config):
    """An evaluation with one episode per score."""
    run = searched(0, scores, select="evaluation", sampling_mode="none", **config)
    mean = fmean(row["counted"] for row in run.rows)
    run.result.update(evaluation=True, split="validation", node_mean=mean, node_stderr=0.01)
    run.result.update(best_id=None, best_score=None)
    return replace(run, kind="evaluation")


def test_evaluations_are_compared_by_their_means():
    """Both have the same best episode."""
    runs = [evaluation(0.9, 0.6), evaluation(0.9, 0.8, None, model="logs/trained/best")]
    tiny, other = compare.comparison([*runs, searched(0)], "evaluation")
    assert tiny["method"] == "tiny"
    assert other["method"] == "trained"
    assert other["rank"] == 2.0
    assert tiny["mean"] == 0.75
    assert other["mean"] == pytest.approx(2.2 / 3)
    assert tiny["stderr"] == 0.01
    searches, evaluations = compare.table([*runs, searched(0)]).split("\n\n")
    assert "trained" in evaluations
    assert "tiny" not in searches


# ------------------------------------------------------------------ the picture of a tree


def test_operators_of_a_copied_script_have_marks_of_their_own():
    run = searched(scores=(0.6, 0.7, 0.8))
    run.rows[0] |= {"mark": "o"}
    run.rows[1] |= {"op": "distill", "mark": "v"}
    run.rows[2] |= {"op": "restart", "mark": "no such mark"}
    with plots.figure_of(9, 5) as figure:
        draw_tree(figure, run)
        tree, _ = figure.axes
    shapes = [marks.get_paths()[0].vertices.tolist() for marks in tree.collections[:4]]
    assert all(shapes.count(shape) == 1 for shape in shapes)  # the first one is the baseline's
    assert len(shapes[-1]) == 7  # a closed hexagon
