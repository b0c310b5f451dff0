"""The table of a grid drops nothing; its statistics agree with numbers worked out by hand."""

import math

import pytest

from flatlab.view import stats


def cell(test, task="t", method="tail", **more):
    """The result of a run whose best node has the same score on both parts; None: none is valid."""
    result = {
        "task": task,
        "method": method,
        "test_score": test,
        "best_score": 0.7 if test is None else test,
        "baseline": 0.7,
        "reference": None,
        "higher_is_better": True,
        "test_minus_validation": None if test is None else 0.0,
        "nodes": 12,
        "failed": 0,
        "faults": 0,
        "tokens": 10,
        "selected_on_test": False,
    }
    return result | more


def test_permutation_by_hand_and_in_a_published_case():
    """Battle of Sexes, best of 5 runs without and with verbalized sampling: p = 2 / 252."""
    low = [1.0, 2.0, 3.0]
    high = [4.0, 5.0, 6.0]
    assert stats.permutation_p(low, high) == pytest.approx(2 / 20)
    assert stats.permutation_p([1.0], [2.0, 3.0]) is None
    none = [1.3756, 1.2053, 1.2287, 1.1056, 1.2332]
    tail = [1.4059, 1.4383, 1.4431, 1.3796, 1.4446]
    assert stats.permutation_p(tail, none) == pytest.approx(2 / 252)


def test_no_interval_below_three_values():
    assert stats.mean_interval([0.4, 0.6]) is None
    half = 4.302653 / math.sqrt(3)  # t(0.975, 2) times std 1 over the root of N
    assert stats.mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - half, 2 + half))
    assert stats.mean_interval([2.0] * 3) == (2.0, 2.0)


def test_a_run_without_any_score_counts_with_the_baseline():
    good = [cell(0.93), cell(0.94), cell(0.96)]
    empty = [cell(None, failed=12), cell(None, failed=11, faults=1)]
    (row,) = stats.grid_table(good + empty)
    assert row["n"] == 5
    assert row["empty"] == 2
    assert row["mean"] == pytest.approx((0.93 + 0.94 + 0.96 + 0.7 + 0.7) / 5)
    assert row["nodes"] == 60
    assert row["failed"] == 23
    assert row["faults"] == 1


def test_methods_are_compared_within_a_task():
    up = [cell(0.8, "up", "none")] * 2 + [cell(0.9, "up")] * 2
    down = [cell(0.6, "down", "none"), cell(0.5, "down")]
    for result in down:
        result["higher_is_better"] = False
    rows = stats.grid_table(up + down)
    up_none, up_tail, down_none, down_tail = rows
    assert down_none["improvement"] == pytest.approx(0.1 / 0.7)
    assert down_tail["improvement"] == pytest.approx(0.2 / 0.7)
    assert up_tail["rank"] == 1
    assert up_none["rank"] == 2
    assert up_none["p"] is None
    assert up_tail["p"] == pytest.approx(1 / 3)
    text = stats.text_of(rows)
    assert "p: permutation test against none" in text
    assert "adapter" not in text
    assert len(set(map(len, text.splitlines()[:5]))) == 1


def test_the_table_shows_validation_selection_and_the_standard_error_of_the_test():
    more = {"selection_score": 0.78, "selection_stderr": 0.03, "test_stderr": 0.02}
    chosen = [cell(0.76, best_score=0.8, **more), cell(0.74, best_score=0.82, **more)]
    empty = cell(None)  # chose the baseline: no selection score
    rows = stats.grid_table([*chosen, empty])
    assert rows[0]["validation"] == pytest.approx((0.8 + 0.82 + 0.7) / 3)
    assert rows[0]["selection"] == 0.78
    assert rows[0]["stderr"] == 0.02
    text = stats.text_of(rows)
    assert "selection" in text
    assert "s.e.: standard error" in text
    text = stats.text_of(stats.grid_table([empty]))
    assert "selection" not in text
    assert "s.e." not in text


def test_tasks_without_a_validation_part_are_named():
    text = stats.text_of(stats.grid_table([cell(None, "mlgym", selected_on_test=True)]))
    assert "validation" not in text
    assert "mlgym: this task has only a test part" in text
