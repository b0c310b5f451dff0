"""Many runs: groups of the same config but for the seed, overlaid curves, heat map, ranks, performance profiles.

No run is dropped: every table and picture says how many runs and failures are in each of its cells.
"""

import math
import re
from pathlib import Path
from statistics import fmean

from flatlab.runs import search_plots, stats
from flatlab.runs.plots import (
    COLOURS,
    TRAINING,
    Group,
    draw_panels,
    figure_of,
    mean,
    save,
    series,
    shorten,
    task_of,
    window_of,
)
from flatlab.runs.reader import RunData, number

NOT_OF_THE_GROUP = {
    "seed",
    "name",
    "workers",
    "sandboxes",
    "checkpoints",
    "price",
    "url",
    "eval_episodes",
    "backend",
    "mlgym_root",
    "mledojo_root",
    "tensorboard",
    "wandb",
}
SAY_THE_VALUE = {"sampling_mode", "select", "model"}  # these need no "key=" in front
PANELS = {"grpo": (TRAINING, 4), "search": (search_plots.SEARCH, 3)}  # and columns

# ------------------------------------------------------------------ groups


def groups_of(records: list[RunData]) -> dict[tuple[str, str], list[Group]]:
    """(kind, task) -> groups, named by what their configs differ in."""
    places = {}
    for record in records:
        config = {key: value for key, value in record.config.items() if key not in NOT_OF_THE_GROUP}
        place = places.setdefault((record.kind, task_of(record)), {})
        place.setdefault(repr(sorted(config.items(), key=lambda pair: pair[0])), []).append(record)
    return {
        place: [
            Group(name, COLOURS[i % len(COLOURS)], runs)
            for i, (name, runs) in enumerate(zip(names(groups.values()), groups.values()))
        ]
        for place, groups in places.items()
    }


def names(groups) -> list[str]:
    """A short and unique name for each group: the settings that are not the same in all of them."""
    configs = [runs[0].config for runs in groups]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if key not in NOT_OF_THE_GROUP and len({repr(config.get(key)) for config in configs}) > 1
    ]
    keys.sort(key=lambda key: key not in SAY_THE_VALUE)
    found = []
    for config, runs in zip(configs, groups):
        parts = [
            value_text(config.get(key))
            if key in SAY_THE_VALUE
            else f"{key}={value_text(config.get(key))}"
            for key in keys
        ]
        otherwise = config.get("sampling_mode") or config.get("model") or runs[0].name
        name = cut(" ".join(parts[:4]), 60) or value_text(otherwise)
        found.append(name if name not in found else f"{cut(name, 40)} ({runs[0].name})")
    return found


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def value_text(value) -> str:
    """The last part of a path; numbers short."""
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).rstrip("/").removesuffix("/best").split("/")[-1]
    )


def cell_of(record: RunData, name: str) -> dict:
    """A run as stats.grid_table wants it, `mode` being the name of its group."""
    result, rows = record.result, record.rows
    base = {
        "task": task_of(record),
        "mode": name,
        "higher_is_better": result.get("higher_is_better") is not False,
        "reference": number(result.get("reference")),
        "selected_on_test": bool(result.get("selected_on_test")),
    }
    if record.kind == "search":
        scored = [number(row.get("score")) for row in rows]
        faults = sum(row.get("status") == "fault" for row in rows)
        curve = search_plots.best_so_far(record, "nodes")
        best = curve[-1][1] if curve else math.nan
        return base | {
            "baseline": number(result.get("baseline")) or 0.0,
            "best_score": best,
            "test_score": number(result.get("test_score")),
            "best_id": result.get("best_id", "0"),
            "test_minus_validation": number(result.get("test_minus_validation")),
            "nodes": len(rows),
            "failed": scored.count(None) - faults,
            "faults": faults,
            "tokens": sum(int(number(row.get("tokens")) or 0) for row in rows),
            "seconds": max(number(row.get("elapsed")) or 0.0 for row in rows),
        }
    after = result.get("after") if isinstance(result.get("after"), dict) else {}
    last = mean(series(rows, "score_mean")[-window_of(rows) :])
    validation = number(after.get("mean")) if after else last
    size = (number(record.config.get("groups")) or 1) * (
        number(record.config.get("group_size")) or 1
    )
    sizes = [number(row.get("episodes")) or size for row in rows]
    invalid = sum((1 - (number(row.get("valid_share")) or 0.0)) * n for row, n in zip(rows, sizes))
    test = number(after.get("test_mean"))
    return base | {
        "baseline": number(result.get("baseline")) or 0.0,
        "best_score": validation,
        "test_score": test,
        "best_id": "best",
        "test_minus_validation": None if test is None else test - validation,
        "nodes": round(sum(sizes)),
        "failed": round(invalid),
        "faults": round(sum(v for v in series(rows, "faults") if not math.isnan(v))),
        "seconds": sum(v for v in series(rows, "seconds") if v == v),
        "tokens": round(
            sum(v * n for v, n in zip(series(rows, "reply_tokens"), sizes) if not math.isnan(v))
        ),
    }


def comparison(records: list[RunData], kind: str) -> list[dict]:
    """A row per task and group, see stats.grid_table."""
    return stats.grid_table(
        [
            cell_of(run, group.label)
            for (k, _), groups in groups_of(records).items()
            if k == kind
            for group in groups
            for run in group.runs
        ]
    )


def table(records: list[RunData]) -> str:
    """What `python viz.py logs/*` prints."""
    parts, notes = [], []
    for kind, what, done in ("grpo", "trained", "episodes"), ("search", "searched", "nodes"):
        rows = comparison(records, kind)
        if not rows:
            continue
        notes += [note for note in stats.reservations(rows) if note not in notes]
        titles = [
            "task",
            what,
            "N runs",
            "mean",
            "std",
            "95 % of the mean",
            "gain",
            "rank",
            f"failed {done}",
            "faults",
            "tokens",
        ]
        lines = [titles] + [
            [
                row["task"],
                row["mode"],
                str(row["n"]),
                f"{row['mean']:.4f}",
                "-" if row["std"] is None else f"{row['std']:.4f}",
                "{:.4f} to {:.4f}".format(*row["interval"]) if row["interval"] else "-",
                f"{row['gain']:+.2f}",
                f"{row['rank']:.2f}",
                f"{row['failed']} of {row['nodes']}",
                str(row["faults"]),
                str(row["tokens"]),
            ]
            for row in rows
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
        parts += [
            "\n".join(
                "  ".join(
                    cell.ljust(w) if i < 2 else cell.rjust(w)
                    for i, (cell, w) in enumerate(zip(line, widths))
                )
                for line in lines
            )
        ]
    notes.insert(
        0,
        "mean: of the held-out test part where it was scored, else of the validation part; "
        "gain: 0 baseline, 1 reference",
    )
    return "\n\n".join([*parts, "\n".join(notes)])


# ------------------------------------------------------------------ performance profiles (MLGym, arXiv 2502.14499)


def ratios(
    scores: dict[str, float | None], higher_is_better: bool, baseline: float
) -> dict[str, float]:
    """One task: method -> how many times worse than the best, 1 for the best.

    A method is infeasible when it has no score, a negative one, or one worse than the baseline's; it gets 1.05 times
    the worst ratio of the others. By this published rule a task with negative scores hardly tells methods apart.
    """

    def feasible(score):
        return (
            score is not None
            and score >= 0
            and (score >= baseline if higher_is_better else score <= baseline)
        )

    there = {method: score for method, score in scores.items() if feasible(score)}
    best = (max if higher_is_better else min)(there.values(), default=1.0)

    def ratio(score):
        above, below = (best, score) if higher_is_better else (score, best)
        return above / below if below else 1.0 if above == below else math.inf

    found = {method: ratio(score) for method, score in there.items()}
    worst = max((r for r in found.values() if math.isfinite(r)), default=1.0)
    return {
        method: found[method] if math.isfinite(found.get(method, math.inf)) else 1.05 * worst
        for method in scores
    }


def profiles(
    table: dict[str, dict[str, float | None]],
    higher_is_better: dict[str, bool],
    baseline="baseline",
    end=None,
    points=500,
):
    """task -> method -> score, the method `baseline` among them. Returns (taus, method -> rho): rho(tau) is the share
    of tasks whose log10 ratio is at most tau. `end`: the largest tau, to compare with other tables."""
    by_task = {
        task: ratios(scores, higher_is_better[task], scores[baseline])
        for task, scores in table.items()
    }
    largest = max(math.ceil(1.05 * max(found.values())) for found in by_task.values())
    end = end or math.ceil(10 * math.log10(largest) - 1e-9) / 10 or 0.1
    taus = [end * i / (points - 1) for i in range(points)]
    methods = list(dict.fromkeys(method for scores in table.values() for method in scores))
    return taus, {
        method: [
            fmean(math.log10(found[method]) <= tau for found in by_task.values()) for tau in taus
        ]
        for method in methods
    }


def aup(taus: list[float], rho: list[float]) -> float:
    """Area under a performance profile: a step function that holds its left value."""
    return sum((b - a) * height for a, b, height in zip(taus, taus[1:], rho))


# ------------------------------------------------------------------ pictures


def draw_heat_map(axis, figure, rows, done):
    """Tasks down, groups to the right; colour: gain; in each cell mean score, N runs, failures."""
    tasks_, groups = (
        list(dict.fromkeys(r["task"] for r in rows)),
        list(dict.fromkeys(r["mode"] for r in rows)),
    )
    gains = [
        [
            next((r["gain"] for r in rows if (r["task"], r["mode"]) == (t, g)), math.nan)
            for g in groups
        ]
        for t in tasks_
    ]
    limit = max([abs(v) for line in gains for v in line if not math.isnan(v)] + [0.1])
    image = axis.imshow(gains, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
    for r in rows:
        spread = "" if r["std"] is None else f" ± {r['std']:.3g}"
        fail = f"{r['failed']} of {r['nodes']} {done} failed" + (
            f"\n{r['faults']} faults" if r["faults"] else ""
        )
        axis.text(
            groups.index(r["mode"]),
            tasks_.index(r["task"]),
            f"{r['mean']:.4g}{spread}\nN={r['n']}\n{fail}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if abs(r["gain"]) > 0.7 * limit else "black",
        )
    axis.set_xticks(
        range(len(groups)), [shorten(g, 24) for g in groups], rotation=20 if len(groups) > 4 else 0
    )
    axis.set_yticks(range(len(tasks_)), [shorten(task, 30) for task in tasks_])
    axis.grid(False)
    axis.set_title("Mean score, its standard deviation, N, failures")
    figure.colorbar(image, ax=axis, label="gain (0 baseline, 1 reference)", shrink=0.9)


def draw_ranks(axis, rows):
    """Mean place of each group over the tasks; 1 is best."""
    found = sorted(
        {r["mode"]: (r["rank"], r["rank_tasks"]) for r in rows}.items(), key=lambda pair: pair[1]
    )
    for place, (name, (rank, count)) in enumerate(found):
        axis.hlines(place, 1, rank, color="#cccccc", linewidth=2)
        axis.scatter(rank, place, s=90, color=COLOURS[0], zorder=3)
        axis.annotate(f"{rank:.2f}", (rank, place), (9, 0), textcoords="offset points", va="center")
    axis.set_yticks(
        range(len(found)),
        [f"{shorten(name, 24)} (N={count} task{'s' * (count > 1)})" for name, (_, count) in found],
    )
    axis.set(
        title="Average rank",
        xlabel="mean place over tasks, 1 is best",
        xlim=(0.8, len(found) + 0.5),
    )
    axis.invert_yaxis()
    axis.margins(y=0.2)


def draw_profiles(axis, rows, cells):
    """Performance profiles of the groups and of the baseline over the tasks, AUP in the legend."""
    scores, higher = {}, {}
    for cell in cells:
        scores.setdefault(cell["task"], {})["baseline"] = cell["baseline"]
        higher[cell["task"]] = cell["higher_is_better"]
    for row in rows:
        scores[row["task"]][row["mode"]] = row["mean"]
    for found in scores.values():
        found.update({row["mode"]: None for row in rows if row["mode"] not in found})
    taus, rhos = profiles(scores, higher)
    ordered = sorted(rhos, key=lambda method: -aup(taus, rhos[method]))
    for place, method in enumerate(ordered):
        axis.step(
            taus,
            rhos[method],
            where="post",
            linewidth=2,
            color="#888888" if method == "baseline" else COLOURS[place % len(COLOURS)],
            linestyle=":" if method == "baseline" else "-",
            label=f"{shorten(method, 28)}: AUP {aup(taus, rhos[method]):.3f}",
        )
    axis.set(
        title=f"Performance profiles (N={len(scores)} tasks)",
        xlabel="log10 of the ratio to the best",
        ylabel="share of tasks",
        ylim=(-0.03, 1.05),
    )
    axis.legend()


def sheet_size(rows) -> tuple[float, float]:
    """Width and height in inches of what draw_sheet draws."""
    tasks_, groups = len({r["task"] for r in rows}), len({r["mode"] for r in rows})
    return max(15.0, 15 + 2.4 * (groups - 2)), max(4.5, 1.2 * tasks_ + 2, 0.6 * groups + 2)


def draw_sheet(figure, records, kind):
    """Heat map, average ranks, performance profiles of all runs of a kind."""
    rows, cells = (
        comparison(records, kind),
        [cell_of(run, "") for run in records if run.kind == kind],
    )
    groups = len({r["mode"] for r in rows})
    left, middle, right = figure.subplots(1, 3, width_ratios=[max(1.3, 0.45 * groups), 1, 1])
    draw_heat_map(left, figure, rows, "episodes" if kind == "grpo" else "nodes")
    draw_ranks(middle, rows)
    draw_profiles(right, rows, cells)


def line_of(group: Group):
    """An entry of the legend."""
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=group.colour,
        linewidth=3,
        label=f"{shorten(group.label, 60)} (N={len(group.runs)} run{'s' * (len(group.runs) > 1)})",
    )


def plot_many(records: list[RunData], folder: Path, format="png") -> list[Path]:
    """Overlays per kind and task, and one sheet that compares across tasks, into `folder`. Returns the paths."""
    paths, grouped = [], groups_of(records)
    for (kind, task), groups in grouped.items():
        panels, columns = PANELS[kind]
        with figure_of(19 if kind == "grpo" else 15, 11.5 if kind == "grpo" else 8) as figure:
            draw_panels(figure, panels, groups, columns)
            figure.suptitle(
                f"{shorten(task, 60)}: mean over seeds, band: ± standard deviation of the seeds"
                + (
                    ", running mean over a sixth of the steps, at most 20; dotted: where not all runs went on"
                    if kind == "grpo"
                    else ""
                )
            )
            figure.legend(
                handles=[line_of(group) for group in groups],
                loc="outside lower center",
                ncols=min(4, len(groups)),
                fontsize=11,
            )
            paths.append(
                save(
                    figure,
                    folder / f"compare-{kind}-{re.sub(r'[^A-Za-z0-9_.-]', '-', task)}.{format}",
                )
            )
    for kind in sorted({kind for kind, _ in grouped}):
        rows = comparison(records, kind)
        if len(rows) > 1:
            with figure_of(*sheet_size(rows)) as figure:
                draw_sheet(figure, records, kind)
                paths.append(save(figure, folder / f"grid-{kind}.{format}"))
    return paths
