"""Tasks with exact scores: known constructions score what the literature says, and attacks fail."""

import itertools
import json
import math
import re
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import grade_exact
import pytest

import tasks
from env import Env
from flatlab.options import SandboxOptions
from flatlab.view.results import numbers_on_test_part, states
from helpers import LOCAL, FakePolicy, attempts_of, block, run_grader
from tasks import load_task
from test_search import grow, has, headline, opened, run_of

EXACT = ("sumsDifferences", "hadamard29", "erdosOverlap", "autocorrelation", "circlePacking")
UNIT = 10**9
HALF = UNIT // 2
attack = pytest.mark.attack


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def scored(name, solution):
    """The score of a solution, or of the text of one. Raises Invalid with what the agent reads."""
    text = solution if isinstance(solution, str) else json.dumps(solution)
    Path("solution.json").write_text(text)
    return grade_exact.SCORES[load_task(name).metric](grade_exact.read_solution())


def refused(name, solution, sentence):
    with pytest.raises(grade_exact.Invalid) as caught:
        scored(name, solution)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 300


# ------------------------------------------------------------------ what the literature says


def paley(size):
    """+1 where i = j or i - j is a square modulo a prime of the form 4 k + 1, else -1."""
    squares = {i * i % size for i in range(1, size)}
    indices = range(size)
    return [[1 if i == j or (i - j) % size in squares else -1 for j in indices] for i in indices]


def grid(radius):
    """26 circles on a grid of 8 x 8; with the radius 1/16 they touch each other and the square."""
    return [[(2 * (i % 8) + 1) / 16, (2 * (i // 8) + 1) / 16, radius] for i in range(26)]


DENORMAL = [[(i + 1) / 32, 0.5, 5e-324] for i in range(26)]
CONWAY = [0, 2, 3, 4, 7, 11, 12, 14]  # 26 sums, 25 differences
HEGARTY = [0, 1, 2, 4, 5, 9, 12, 13, 14, 16, 17, 21, 24, 25, 26, 28, 29]  # 59 and 55 (2007)


@pytest.mark.parametrize(
    ("name", "solution", "score"),
    [
        ("sumsDifferences", CONWAY, math.log(26 / 8) / math.log(25 / 8)),
        ("sumsDifferences", [3 * a - 7 for a in CONWAY], 1.034421215660),  # an affine map
        ("sumsDifferences", HEGARTY, 1.059793094509),  # as printed in arXiv 2604.19341
        ("hadamard29", paley(29), 28**14 / 29**14.5),
        ("hadamard29", paley(29)[::-1], 28**14 / 29**14.5),
        ("hadamard29", [paley(29)[0], *paley(29)[:28]], 0),
        ("circlePacking", grid(1 / 16), 26 / 16),
        # Schinzel and Schmidt: binom(2 i, i) / 4^i has the autoconvolution 1; in the limit pi / 2
        (
            "autocorrelation",
            [math.comb(2 * i, i) * 4 ** (9 - i) for i in range(10)],
            4**20 / (20 * math.comb(20, 10) ** 2),
        ),
    ],
)
def test_known_constructions_score_what_the_literature_says(name, solution, score):
    assert scored(name, solution) == pytest.approx(score, rel=1e-10)


def test_the_overlap_of_partitions_is_that_of_erdos_problem():
    """M(n) of R. K. Guy, Unsolved problems in number theory, C17, by all partitions of 2 n."""
    for n, known in enumerate((1, 1, 2, 2, 3, 3, 3), 1):
        scores = []
        for chosen in itertools.combinations(range(2 * n), n):
            scores.append(grade_exact.overlap([UNIT * (i in chosen) for i in range(2 * n)]))
        assert min(scores) == known / n


def test_a_score_is_the_nearest_double_of_the_fraction():
    """Floating point goes wrong in the sixteenth digit here."""
    heights = [HALF + 1, HALF - 1, HALF + 333333333, HALF - 333333333, HALF]
    sums = [0] * 9  # by shift
    for i, height in enumerate(heights):
        for j, other in enumerate(heights):
            sums[i - j] += Fraction(height, UNIT) * (1 - Fraction(other, UNIT))
    assert grade_exact.overlap(heights) == float(max(sums) * 2 / 5)


@pytest.mark.parametrize("name", EXACT)
def test_the_sample_is_the_baseline_and_the_sanity_check_says_so(name, capsys):
    tasks.main(name, sandbox=SandboxOptions(LOCAL))
    said = capsys.readouterr().out
    baseline, sample = re.findall(r" (\d+\.\d{4}) +0\.00 +0\.00$", said, re.MULTILINE)
    assert baseline == sample
    assert "not degenerate" in said


# ------------------------------------------------------------------ attacks


PAIR = "[500000000, 500000000]"
REFUSED = {  # task -> solutions or their texts, and what the agent reads
    "erdosOverlap": [
        ('{"overlap": 0.1}', "there must be a list of 1 to 2048 integers"),
        (PAIR + '\n{"overlap": 0.1}', "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[500000000, 500000001]", "the sum must be 1000000000, but it is 1000000001"),
        ("[-1, 1000000001]", "an integer from 0 to 1000000000, not -1"),
        ("[0.5, 0.5]", "an integer from 0 to 1000000000, not 0.5"),
        ("[NaN, NaN]", "it is not JSON with finite numbers"),
        ("[1e999, -1e999]", "it is not JSON with finite numbers"),
        (f"[{10**200}, 0]", "an integer"),  # no float can hold it
        ("[[500000000], [500000000]]", "an integer"),
        ("[true, false]", "an integer from 0 to 1000000000, not True"),
        ('["500000000", "500000000"]', "an integer from 0 to 1000000000, not 5000"),
        (str([0, 1] * 500_000), "it is larger than 200000 bytes"),
        (str([0] * 2049), "there must be a list of 1 to 2048"),
        (f"[{'9' * 100_000}]", "it is not JSON"),
    ],
    "autocorrelation": [
        ("[0, 0, 0]", "one height at least must be positive"),
    ],
    "sumsDifferences": [
        ("[1]", "there must be a list of 2 to 512 integers"),
        ("[1, 1]", "an integer is there twice"),
        ("[0, 1000001]", "an integer from -1000000 to 1000000"),
    ],
    "hadamard29": [
        ([[1] * 29] * 28, "there must be a list of 29 rows"),
        ([[1] * 28] * 29, "there must be a list of 29 integers in each row"),
        ([[2] * 29] * 29, "an integer from -1 to 1, not 2"),
        ([[0] * 29] * 29, "each must be 1 or -1, not 0"),
    ],
    "circlePacking": [
        (grid(0.0625)[:25], "there must be a list of 26 circles"),
        (grid(math.nextafter(0.0625, 1)), "circle 0 has no positive"),
        ([[0.5, 0.5, 0.1]] * 26, "circle 1 overlaps circle 0"),
        ([[0.5, 0.5, -0.1]] * 26, "a number from 0 to 1, not -0.1"),
        ([[0.5, 0.5, True]] * 26, "a number from 0 to 1, not True"),
        ([["0.5", 0.5, 0.1]] * 26, "a number from 0 to 1, not 0.5"),
        ([[0.5, 0.5]] * 26, "there must be a list of 3 numbers"),
        ([[math.nan, 0.5, 0.1]] * 26, "finite numbers"),
    ],
}
ROWS = [(name, *row) for name, rows in REFUSED.items() for row in rows]


@attack
@pytest.mark.parametrize(("name", "solution", "sentence"), ROWS)
def test_what_is_not_feasible_is_refused_with_one_sentence(name, solution, sentence):
    refused(name, solution, sentence)


@attack
def test_the_grader_says_no_more_than_the_sentence(tmp_path):
    printed = run_grader(load_task("hadamard29"), tmp_path, {"solution.json": b"[]"}, "exact")
    [(key, text)] = json.loads(printed).items()
    assert key == "error"
    assert text.startswith("solution.json: there must be a list of 29 rows")


@attack
def test_nothing_is_tolerated():
    """Neither the last bit of a radius nor a billionth of a height; denormals are numbers."""
    for i in (9, 25):  # circle 9 touches four others
        circles = grid(1 / 16)
        circles[i][2] = math.nextafter(1 / 16, 1)
        refused("circlePacking", circles, f"circle {i} overlaps")
    assert scored("circlePacking", DENORMAL) == 26 * 5e-324
    # squares of the radii are 0 in floating point
    refused("circlePacking", DENORMAL[:1] * 26, "circle 1 overlaps circle 0")


LARGEST = {
    "erdosOverlap": [HALF + 333333333, HALF - 333333333] * 1024,
    "autocorrelation": [UNIT - i for i in range(2048)],
    "sumsDifferences": [i * i * 3 % 999983 for i in range(1, 513)],
    "hadamard29": paley(29),
    "circlePacking": DENORMAL,
}


@attack
@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_solutions_take_less_than_ten_seconds(name):
    """Seconds of CPU time, so that a busy machine changes nothing."""
    before = time.process_time()
    assert scored(name, LARGEST[name]) > 0
    assert time.process_time() - before < 10


# ------------------------------------------------------------------ what a run says

BETTER = json.dumps([UNIT // 4, UNIT // 2, UNIT * 3 // 4, UNIT * 3 // 4, UNIT // 4])  # 0.4


def test_a_search_says_exact_and_keeps_a_file_that_beats_the_reference(quick_provenance):
    reply = block(f"echo '{BETTER}' > solution.json")
    task = replace(load_task("erdosOverlap"), reference=0.49)
    trees = opened([task], nodes=1, sampling_mode="none")
    grow(trees, FakePolicy(reply, block("validate"), block("submit")))
    [t] = trees
    result = t.run.result
    assert result["value"] > 1
    has(t, split="exact", exact=True, selected_on_test=False, tested_id="0.0")
    assert numbers_on_test_part(run_of(t)) == {} and states(run_of(t))["test_reads"] == 0
    [node] = attempts_of(t.run.dir, "0")
    assert json.loads(node["record"]) == json.loads(BETTER)
    with Env(replace(task, name="hard", reference=0.1), LOCAL) as world:
        world.restart()
        assert world.step(reply).status == "ok"
        assert world.score().valid and not world.score().record
    for words in (f"overlap {node['score']:.6f}", "exact part", "the score is exact"):
        assert words in headline(t)


IN_FILES = {("out/",): "1\n22", ("*.json",): "3\n4", ("out/", "a.json"): "3\n1\n22"}


@pytest.mark.parametrize("artefacts", IN_FILES)
def test_a_record_in_several_files_is_kept_whole(artefacts, tmp_path):
    (tmp_path / "g.py").write_text("print('{\"radii\": 9}')")
    task = replace(load_task("circlePacking"), artefacts=artefacts)
    task = replace(task, hidden={"g.py": tmp_path / "g.py"}, grader=("python3", "g.py"))
    with Env(task, LOCAL) as world:
        world.reset()
        world.sandbox.put({"out/1.json": b"1", "out/2.json": b"22", "a.json": b"3", "b.json": b"4"})
        assert world.score().record == IN_FILES[artefacts]
        world.task = replace(task, name="open", reference=None)
        assert world.score().value == 9 and not world.score().record
