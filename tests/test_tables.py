"""The table of a grid drops nothing; its statistics agree with numbers worked out by hand."""

import math
import re

import pytest

from flatlab.view import stats


def cell(task, method, test, best=None, nodes=12, failed=0, faults=0, baseline=0.7, higher=True):
    return {
        "task": task,
        "method": method,
        "test_score": test,
        "best_score": baseline if best is None else best,
        "baseline": baseline,
        "reference": None,
        "higher_is_better": higher,
        "test_minus_validation": None if test is None else test - best,
        "nodes": nodes,
        "failed": failed,
        "faults": faults,
        "tokens": 10,
        "selected_on_test": False,
    }


def test_permutation_by_hand_and_in_a_published_case():
    """Battle of Sexes, best of 5 runs without and with verbalized sampling: p = 2 / 252."""
    assert stats.permutation_p([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(2 / 20)
    assert stats.permutation_p([1.0], [2.0, 3.0]) is None
    none = [1.3756, 1.2053, 1.2287, 1.1056, 1.2332]
    tail = [1.4059, 1.4383, 1.4431, 1.3796, 1.4446]
    assert stats.permutation_p(tail, none) == pytest.approx(2 / 252)


def test_no_interval_below_three_values_and_its_method_is_named():
    assert stats.mean_interval([0.4, 0.6]) is None
    low, high = stats.mean_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)  # t(0.975, 2) times std 1 over the root of N
    assert (low, high) == (pytest.approx(2 - half), pytest.approx(2 + half))
    assert stats.mean_interval([2.0] * 3) == (2.0, 2.0)


def test_a_run_without_any_score_counts_with_the_baseline():
    good = [cell("t", "tail", x, x) for x in (0.93, 0.94, 0.96)]
    (row,) = stats.grid_table(good)
    (with_failures,) = stats.grid_table(
        good + [cell("t", "tail", None, failed=12), cell("t", "tail", None, failed=11, faults=1)]
    )
    assert (row["n"], with_failures["n"], with_failures["empty"]) == (3, 5, 2)
    assert with_failures["mean"] == pytest.approx((0.93 + 0.94 + 0.96 + 0.7 + 0.7) / 5)
    assert row["mean"] > 0.94
    assert (with_failures["failed"], with_failures["nodes"], with_failures["faults"]) == (23, 60, 1)


def test_methods_are_compared_within_a_task():
    cells = [
        *[cell("up", "none", 0.8, 0.8)] * 2,
        *[cell("up", "tail", 0.9, 0.9)] * 2,
        cell("down", "none", 0.6, 0.6, higher=False),
        cell("down", "tail", 0.5, 0.5, higher=False),
    ]
    rows = {(r["task"], r["method"]): r for r in stats.grid_table(cells)}
    improvements = [rows["down", method]["improvement"] for method in ("none", "tail")]
    assert improvements == [pytest.approx(0.1 / 0.7), pytest.approx(0.2 / 0.7)]
    assert (rows["up", "tail"]["rank"], rows["up", "none"]["rank"]) == (1, 2)
    assert rows["up", "none"]["p"] is None
    assert rows["up", "tail"]["p"] == pytest.approx(1 / 3)
    text = stats.text_of(list(rows.values()))
    assert "against none" in text
    assert "adapter" not in text
    assert len({len(line) for line in text.splitlines()[:5]}) == 1


def test_the_table_names_interval_methods_and_adapters():
    cells = [cell("t", "grpo", x, x) | {"adapter": "best"} for x in (0.8, 0.9, 0.85)]
    cells[0]["adapter"] = "untrained"
    (row,) = stats.grid_table(cells)
    assert row["adapter"] == "1 untrained, 2 best"
    text = stats.text_of([row])
    assert "1 untrained, 2 best" in text
    assert "Student's t; none below N = 3" in text


def test_the_table_shows_validation_selection_and_the_standard_error_of_the_test():
    more = {"selection_score": 0.78, "selection_stderr": 0.03, "test_stderr": 0.02}
    cells = [cell("t", "tail", 0.76, 0.8) | more, cell("t", "tail", 0.74, 0.82) | more]
    cells.append(cell("t", "tail", None))  # chose the baseline: no selection score
    (row,) = stats.grid_table(cells)
    found = row["validation"], row["selection"], row["stderr"]
    assert found == (pytest.approx((0.8 + 0.82 + 0.7) / 3), 0.78, 0.02)
    text = stats.text_of([row])
    assert "selection" in text
    assert "s.e.: standard error" in text
    (row,) = stats.grid_table(cells[2:])
    assert "selection" not in stats.text_of([row])
    assert "s.e." not in stats.text_of([row])


def test_names_that_do_not_fit_go_on_in_the_next_line():
    long = "long-model-name-Instruct max_turns=12 temperature=0.7 lr=0.001"
    rows = stats.grid_table([cell("a" * 40, long, 0.8, 0.8), cell("b", "short", 0.7, 0.7)])
    lines = stats.text_of(rows).splitlines()[:5]
    assert len({len(line) for line in lines}) == 1
    assert [re.split(" {2,}", line)[:2] for line in lines[1:]] == [
        ["a" * 36, "long-model-name-Instruct"],
        ["a" * 4, "max_turns=12 temperature=0.7"],
        ["", "lr=0.001"],
        ["b", "short"],
    ]


def test_tasks_without_a_validation_part_are_named():
    cells = [cell("mlgym", "none", None, 0.8) | {"selected_on_test": True}]
    text = stats.text_of(stats.grid_table(cells))
    assert "validation" not in text
    assert "mlgym: this task has only a test part" in text


def test_the_table_shows_the_improvement_per_minute():
    """The mean improvement divided by the mean minutes."""
    cells = [cell("t", "tail", 0.9, 0.9, baseline=0.5) | {"seconds": s} for s in (60.0, 180.0)]
    (row,) = stats.grid_table(cells)
    assert row["per_minute"] == pytest.approx(row["improvement"] / 2)
    assert "per minute" in stats.text_of([row])
    (row,) = stats.grid_table([cell("t", "tail", 0.9, 0.9)])
    assert row["per_minute"] is None
    assert "per minute" not in stats.text_of([row]).split("mean:")[0]
