"""Many runs: groups without their seed, tables that drop nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

import viz
from flatlab.runs.reader import RunData, node_row
from flatlab.view import compare, plots, views
from flatlab.view.search_plots import SEARCH as PANELS
from flatlab.view.search_plots import best_so_far, draw_distribution
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


def trained(seed=0, scores=(0.6, 0.7), **config):
    counts = {"valid_share": 0.75, "reply_tokens": 10.0, "faults": 1, "episodes": 8}
    rows = [step_row(i, score_mean=score, **counts) for i, score in enumerate(scores)]
    config = GRPO | {"seed": seed, "name": f"g{seed}"} | config
    return RunData(Path(f"logs/g{seed}"), "grpo", config, rows, RESULT | {"baseline": 0.5})


def searched(seed=0, scores=(0.6, None, 0.7), higher=True, **config):
    rows = [node(f"0.{i}", s, tokens=100, elapsed=60.0 * i) for i, s in enumerate(scores)]
    result = search_result(rows, metric="m", higher_is_better=higher, baseline=0.5)
    if scores == (None,) * len(scores):
        result["best_score"] = 0.5
    config = SEARCH | {"seed": seed, "name": f"s{seed}"} | config
    rows = [node_row(row, 0.5) for row in rows]
    return RunData(Path(f"logs/s{seed}"), "search", config, rows, result)


def test_groups_are_runs_of_the_same_config_but_for_the_seed():
    found = compare.groups_of(
        [
            trained(0),
            trained(1),
            trained(0, lr=2e-3),
            trained(1, lr=2e-3, steps=9),
            searched(0),
            searched(1),
            searched(0, sampling_mode="none"),
            searched(0, task="digits"),
        ]
    )
    assert {place: [(g.label, len(g.runs)) for g in groups] for place, groups in found.items()} == {
        ("grpo", "titanic"): [
            ("lr=0.001 steps=2", 2),
            ("lr=0.002 steps=2", 1),
            ("lr=0.002 steps=9", 1),
        ],
        ("search", "titanic"): [("tail", 2), ("none", 1)],
        ("search", "digits"): [("tail", 1)],
    }


def test_a_group_has_the_same_name_on_every_task():
    """Ranks are means over tasks, so another rule on another task is no run of the same group."""
    found = compare.groups_of(
        [
            searched(select="bfs"),
            searched(select="bfs", sampling_mode="none"),
            searched(select="mcts", task="digits"),
            searched(select="bfs", task="digits"),
        ]
    )
    labels = {place: [group.label for group in groups] for place, groups in found.items()}
    assert labels == {
        ("search", "titanic"): ["bfs tail", "bfs none"],
        ("search", "digits"): ["bfs tail", "mcts tail"],
    }


def test_names_are_unique_even_when_they_are_cut():
    configs = [searched(i, model="m" * 100 + str(i)) for i in range(3)]
    labels = [g.label for g in compare.groups_of(configs)["search", "titanic"]]
    assert len(set(labels)) == 3 and max(map(len, labels)) <= 90


def test_labels_are_the_settings_that_a_user_chose():
    """Loss, reward, rule and mode first; what follows from them is not repeated."""
    grpo = {"loss": "grpo", "clip_high": 0.2, "lr": 1e-3, "groups": 2, "max_groups": 4}
    dapo = {"loss": "dapo", "clip_high": 0.28, "lr": 1e-3, "groups": 2, "max_groups": 4}
    runs = [
        trained(0, **grpo, kl=0.1, reward="tiered"),
        trained(1, **dapo, kl=0.0, reward="binary"),
    ]
    labels = [g.label for g in compare.groups_of(runs)["grpo", "titanic"]]
    assert labels == ["grpo reward=tiered kl=0.1", "dapo reward=binary kl=0"]
    runs = [trained(0, **dapo), trained(1, **dapo | {"clip_high": 0.3})]
    labels = [g.label for g in compare.groups_of(runs)["grpo", "titanic"]]
    assert labels == ["clip_high=0.28", "clip_high=0.3"]


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
        "best_is_last": False,
    }
    return replace(run, result=run.result | {"final": final})


def test_training_runs_are_ranked_by_a_named_adapter():
    [row] = compare.comparison([ended(0), ended(1, untrained=True)], "grpo")
    assert row["adapter"] == "1 best, 1 untrained" and row["mean"] == pytest.approx(0.55)
    [row] = compare.comparison([trained()], "grpo")  # not finished
    assert row["adapter"] == "1 last steps" and row["mean"] == pytest.approx(0.7)
    assert "1 best, 1 untrained" in compare.table([ended(0), ended(1, untrained=True)])


def test_the_best_adapter_is_called_untrained_where_it_is():
    lines = views.final_table(ended(untrained=True))
    assert "best (the untrained adapter)" in lines and "fresh seeds" in lines
    assert "no evaluation during training was better" in lines
    lines = views.final_table(ended())
    assert "best (step 1)" in lines and "+0.1000" in lines and "best (the untr" not in lines


def groups_alone(run):
    return [plots.Group(run.name, plots.BLUE, [run])]


def test_the_part_that_was_selected_on_is_named():
    run = ended()
    run.result["final"]["split"] = "test"
    run.result["selected_on_test"] = True
    del run.result["final"]["best"]["test_score_mean"]
    assert "validation" not in views.final_table(run)


def test_the_mean_over_several_tasks_is_an_improvement():
    run = trained(scores=(0.1, 0.2))
    rows = [r | {"improvement_mean": r.pop("score_mean")} for r in run.rows]
    result = RESULT | {"metric": "improvement", "baseline": 0.0, "reference": 1.0}
    config = run.config | {"task": ["titanic", "digits"]}
    run = replace(run, rows=rows, config=config, result=result)
    [row] = compare.comparison([run], "grpo")
    assert row["task"] == "titanic+digits" and row["improvement"] == pytest.approx(0.2)
    with plots.figure_of(6, 4) as figure:
        axis = figure.subplots()
        plots.draw_panel(axis, plots.TRAINING[0], groups_alone(run))
        assert "improvement" in axis.get_ylabel() and axis.lines[0].get_ydata()[1] == 0.2


def test_failed_nodes_count_as_the_baseline_and_faults_do_not():
    run = searched(scores=(0.7, None, None))
    run.rows[2] = node_row(run.rows[2] | {"status": "fault"}, 0.5)
    assert [row["counted"] for row in run.rows] == [0.7, 0.5, None]
    summary = viz.node_summary(run).splitlines()
    assert summary[1].split() == ["draft", "3", "1", "1", "0.6", "0.7", "1", "100"]
    with plots.figure_of(4, 3) as figure:
        axis = figure.subplots()
        plots.draw_panel(axis, PANELS[2], compare.groups_of([run])["search", "titanic"])
        [median] = [lines.get_segments()[0][0][1] for lines in axis.collections[1:]]
    assert median == pytest.approx(0.6)


def test_colours_repeat_beyond_seven_groups():
    """And no group is left out."""
    runs = [trained(i, lr=10.0**-i, kl=i / 10, model=f"a/long-model-name-{i}") for i in range(12)]
    groups = compare.groups_of(runs)["grpo", "titanic"]
    assert len({group.label for group in groups}) == 12
    assert [group.colour for group in groups] == [*plots.COLOURS, *plots.COLOURS[:5]]


def test_failures_and_runs_without_any_score_are_counted():
    rows = compare.comparison([searched(0), searched(1, scores=(None, None))], "search")
    assert len(rows) == 1 and (rows[0]["n"], rows[0]["failed"], rows[0]["nodes"]) == (2, 3, 5)
    assert rows[0]["mean"] == pytest.approx((0.7 + 0.5) / 2)  # nothing valid counts as the baseline
    text = compare.table([searched(0), searched(1, scores=(None, None)), trained()])
    assert "3 of 5" in text and "4 of 16" in text


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_distribution_of_faults_alone_is_empty():
    run = searched(scores=(0.6, None))
    run.rows[1] |= {"op": "debug", "status": "fault", "outcome": "fault", "counted": None}
    with plots.figure_of(4, 3) as figure:
        axis = figure.add_subplot()
        draw_distribution(axis, [plots.Group("tail", "#000000", [run])])
        labels = [text.get_text() for text in axis.get_xticklabels()]
    assert labels[1].startswith("debug\nN=1")


def test_best_so_far_follows_the_direction_and_starts_at_the_baseline():
    down = best_so_far(searched(scores=(0.6, 0.3, None, 0.4), higher=False), "nodes")
    assert down.to_dict() == {0: 0.5, 1: 0.5, 2: 0.3, 3: 0.3, 4: 0.3}
    assert best_so_far(searched(), "tokens").to_dict() == {0: 0.5, 100: 0.6, 200: 0.6, 300: 0.7}


def test_the_band_of_best_so_far_never_leaves_the_possible_range():
    """Accuracy 1 is the top and the baseline the bottom, whatever the standard deviation is."""
    runs = [searched(i, scores=(score,)) for i, score in enumerate((1.0, 1.0, 1.0, None))]
    with plots.figure_of(4, 3) as figure:
        axis = figure.subplots()
        PANELS[0][3](axis, compare.groups_of(runs)["search", "titanic"])
        [band] = axis.collections
    ys = band.get_paths()[0].vertices[:, 1]
    assert ys.max() <= 1.0 and ys.min() >= 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_all_pictures_of_a_mixed_crowd(tmp_path):
    crowd = [
        trained(0),
        trained(1),
        trained(0, lr=1.0),
        searched(0),
        searched(1),
        searched(0, sampling_mode="none"),
        searched(0, task="a $ b $ c/d"),
        searched(5, scores=(None,)),
    ]
    paths = compare.plot_many(crowd, tmp_path, "pdf")
    assert {p.name for p in paths} == {
        f"{name}.pdf"
        for name in (
            "compare-grpo-titanic",
            "compare-search-titanic",
            "compare-search-a---b---c-d",
        )
    }
    assert all(p.read_bytes()[:4] == b"%PDF" for p in paths)


def test_the_mean_is_solid_only_where_all_runs_are():
    """Else a run that was stopped would vanish from the mean without a word."""
    [group] = compare.groups_of([trained(0), trained(1)])["grpo", "titanic"]
    group.runs[1].rows.extend({"step": i, "score_mean": 0.9} for i in range(2, 6))
    with plots.figure_of(4, 3) as figure:
        axis = figure.subplots()
        plots.draw_key(axis, [group], "score_mean")
        solid, dotted = (
            [line.get_xdata()[-1] for line in axis.lines if line.get_linestyle() == style]
            for style in ("-", ":")
        )
    assert solid == [1] and dotted == [5]
