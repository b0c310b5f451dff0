"""flatlab/suites: the area under the performance profile, intervals, and what is refused.

The published results are a small folder made here, or those of a checkout: MLGYM_ROOT.
"""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest

import evaluate
import viz
from flatlab.suites import report, statistics
from flatlab.suites.attempts import read_suite
from helpers import refuses
from test_task import write
from test_viz import evaluated

MLGYM = os.environ.get("MLGYM_ROOT")  # before conftest.py hides it

SUITE = """
needs: MLGYM_ROOT
settings: {task: [titanic, gone], attempts: 2}
published:
  files: runs/m-{model}__{id}__*/results.json
  models: [x, y]
  tasks:
    - {task: titanic, id: ship, metric: accuracy, higher_is_better: true}
    - {task: gone, id: gone, metric: loss, higher_is_better: false}
"""
ATTEMPTS = {  # (model, id): the scores of each attempt
    ("x", "ship"): [[0.8, 0.4]],
    ("y", "ship"): [[], [1.0]],
    ("x", "gone"): [[1.0]],
    ("y", "gone"): [[]],
    ("z", "ship"): [[9.0]],  # no model of the suite
}
METRICS = {"ship": ("accuracy", 0.5), "gone": ("loss", 2.0)}  # and the baseline's score


def make_root(root):
    """A checkout with published results, and with a task that lacks its files."""
    gone = "task_entrypoint: CSVSubmissionTasks\nmetric: loss\nhigher_is_better: false\n"
    gone += "description: d\nbaseline_scores: [{loss: 2}]\nstarter_code: [data/gone]\n"
    write(root, {"configs/tasks/gone.yaml": gone, "suite.yaml": SUITE})
    for (model, id), attempts in ATTEMPTS.items():
        metric, baseline = METRICS[id]
        for number, scores in enumerate(attempts):
            results = {"agent": [{metric: score} for score in scores]}
            results["baseline"] = {metric: baseline}
            file = f"runs/m-{model}__{id}__t-0.00__{number}/results.json"
            write(root, {file: json.dumps(results)})
    return root


def rows_of(text, number=0):
    """The cells of each row of a table of a report."""
    return [line.split() for line in text.split("\n\n")[number].splitlines()[1:]]


def test_the_area_by_hand(tmp_path, monkeypatch):
    """On the ship, r is 1.25, 1 and 2 for x, y and the baseline, and 1.05 * 2 for x whose last
    score is below the baseline. On the other task it is 1, 1.05 * 2 (missing) and 2. So tau ends at
    ceil(10 log10(ceil(2.1))) / 10 = 0.5, and a step is h = 0.5 / 499. The first tau of 500 with
    log10 r <= tau are 97 (1.25), 301 (2) and 322 (2.1): each leaves 499 - tau steps.
    """
    monkeypatch.setenv("MLGYM_ROOT", str(make_root(tmp_path)))
    monkeypatch.chdir(tmp_path)
    text = report.suite_report(read_suite(f"{tmp_path}/suite.yaml"), [])
    h = 0.5 / 499
    x, y, baseline = (402 + 499) * h / 2, (499 + 177) * h / 2, 198 * h
    x_last = (177 + 499) * h / 2
    areas = {"x": (x, x_last), "y": (y, y), "baseline": (baseline, baseline)}
    expected = [[name, f"{best:.3f}", f"{last:.3f}"] for name, (best, last) in areas.items()]
    assert rows_of(text) == expected
    assert (tmp_path / "logs/profile.png").read_bytes()[1:4] == b"PNG"


def test_the_largest_area_is_first_also_beside_our_value(tmp_path, monkeypatch):
    monkeypatch.setenv("MLGYM_ROOT", str(make_root(tmp_path)))
    result = {"larger_is_better": {"titanic": True}, "left_out": {}, "degenerate": "titanic: why"}
    run = evaluated(tmp_path / "ours", (0.1,), **result)
    run.config.update(suite="suite.yaml", max_turns=2, temperature=1.0)
    text = report.suite_report(read_suite(f"{tmp_path}/suite.yaml"), [run])
    assert "\na score says little: titanic: why\n" in text
    assert [row[0] for row in rows_of(text, 1)] == ["y", "x", "baseline", str(run.dir)]


def test_two_models_of_a_suite_without_published_attempts_have_a_picture(tmp_path, capsys):
    suite = read_suite("builtin")
    runs = []
    for name, values in (("a", (0.65, None)), ("b", (0.7, 0.8))):
        result = {"larger_is_better": {"titanic": True}, "left_out": {}}
        runs.append(evaluated(tmp_path / name, values, **result))
        runs[-1].config.update(suite="builtin", max_turns=2, temperature=1.0)
    text = report.suite_report(suite, runs)
    assert "no AUP: the suite builtin has no published attempts" in text
    assert f"wrote {tmp_path}/profile.png" in capsys.readouterr().out
    scores = [row[2:4] for row in rows_of(text)]
    assert scores == [["0.6500", "0.6500"], ["0.8000", "0.8000"]]  # one number of decimals


@pytest.mark.skipif(not MLGYM, reason="set MLGYM_ROOT to a checkout of MLGym")
def test_all_published_areas_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("MLGYM_ROOT", MLGYM)
    monkeypatch.chdir(tmp_path)
    table = Path(MLGYM, "results/tables/aup_scores_aggregate_results.csv").read_text()
    published = {
        name: (float(best), float(last)) for name, best, last in csv.reader(table.splitlines()[1:])
    }
    text = report.suite_report(read_suite("mlgym"), [])
    found = {name: (float(best), float(last)) for name, best, last in rows_of(text)}
    assert found == published
    assert len(published) == 13


def test_intervals_resample_within_a_task():
    tasks = [np.zeros(3), np.ones(5)]
    assert statistics.bootstrap_text(statistics.mean_value, *tasks) == "0.5000 [0.5000, 0.5000]"
    assert statistics.bootstrap_text(statistics.mean_value, *tasks, np.ones(1)) == "0.6667"
    better = statistics.probability_of_improvement
    # of four pairs three are larger and one is equal; of the other task all are smaller
    assert better(np.array([1, 2]), np.zeros(1), np.array([1, 0]), np.ones(1)) == 0.875 / 2
    low, high = (
        statistics.bootstrap_text(better, np.arange(8), np.arange(8)).split("[")[1][:-1].split(", ")
    )
    assert 0.1 < float(low) < 0.35 and 0.65 < float(high) < 0.9  # +- 2 sqrt(2 * 8 / (12 * 64))


DAMAGED = {  # file: (content, the end of the sentence about it)
    "a.yaml": ("settings: [titanic]", "settings: Input should be a valid dictionary"),
    "b.yaml": ("settings:", "settings: Input should be a valid dictionary"),
    "c.yaml": ("setings: {attempts: 2}", "unknown key 'setings'; did you mean settings"),
    "d.yaml": ("needs: 5", "needs: Input should be"),
    "e.yaml": ("notes: [x]", "notes: Input should be a valid string"),
    "f.yaml": ("published: x", "published: Input should be a valid dictionary"),
}
SHOWN = {
    "--suite builtin": "None of these evaluations played a task",
    "--suite mledojo": "The suite mledojo needs $MLEDOJO_ROOT",
}
PLAYED = {
    "--suite builtn": "There is no suite builtn; did you mean builtin? the names are",
    "--suite mine.yaml": "There is no suite mine.yaml",
    "--suite typo.yaml": "Unknown task 'titanicc'; did you mean titanic",
    "--suite gone.yaml": "None of these tasks can be played here. ",
    "--suite mlgym": "holds no published results",
    **{f"--suite {name}": f"{name}: {words}" for name, (_, words) in DAMAGED.items()},
    "--suite format.yaml": "format.yaml cannot be used: KeyError: 'idd'",
    "--suite other.yaml": "results.json cannot be used: KeyError: 'baseline'",
}


def test_errors_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_root(tmp_path))
    monkeypatch.setenv("MLGYM_ROOT", str(tmp_path))
    monkeypatch.setattr("sys.stdout.reconfigure", lambda **_: None, raising=False)
    files = {"typo.yaml": "settings: {task: [titanic, titanicc]}"}
    files["gone.yaml"] = "needs: MLGYM_ROOT\nsettings: {task: [gone]}"
    files |= {name: content for name, (content, _) in DAMAGED.items()}
    files["format.yaml"] = SUITE.replace("{id}", "{idd}")
    files["other.yaml"] = SUITE.replace("runs/m-{model}", "other/m-{model}")
    files["other/m-x__ship__1/results.json"] = "{}"
    write(tmp_path, files)
    refuses(lambda: viz.main(viz.tyro.cli(viz.Options)), SHOWN, monkeypatch, capsys)
    refuses(evaluate.main, PLAYED, monkeypatch, capsys)
    assert not list(tmp_path.glob("logs/*/*/transcripts"))
