"""The pictures of one run, and the table of its adapters."""

from __future__ import annotations

import time
from pathlib import Path

from flatlab.runs import plots, search_plots
from flatlab.runs.reader import RunData, read_run
from flatlab.runs.store import Run
from flatlab.train import metrics


def plot(run_dir, format="png") -> list[Path]:
    """Draws the pictures of one run into its directory and returns their paths.

    Training: curves. Search: tree and search. Raises UserError if there is nothing to draw.
    """
    run = run_dir if isinstance(run_dir, RunData) else read_run(run_dir)
    group = plots.Group(run.name, plots.BLUE, [run])
    if run.kind == "grpo":
        return plot_training(run, [group], format)
    return plot_search(run, [group], format)


def plot_training(run: RunData, groups, format: str) -> list[Path]:
    with plots.figure_of(15, 8.5) as figure:
        plots.draw_panels(figure, plots.TRAINING, groups)
        window = plots.window_of(run.rows)
        title = plots.shorten(plots.heading(run), 160)
        title += f"   (bold: running mean of {window} steps)"
        figure.suptitle(title, fontsize=10)
        path = run.dir / f"curves.{format}"
        return [plots.save(figure, path)]


def plot_search(run: RunData, groups, format: str) -> list[Path]:
    with plots.figure_of(*search_plots.tree_size(run)) as figure:
        search_plots.draw_tree(figure, run)
        title = plots.shorten(plots.heading(run), 120)
        figure.suptitle(title, fontsize=10)
        tree = plots.save(figure, run.dir / f"tree.{format}")
    with plots.figure_of(15, 5) as figure:
        plots.draw_panels(figure, search_plots.SEARCH, groups)
        figure.suptitle(title)
        return [tree, plots.save(figure, run.dir / f"search.{format}")]


def plot_now_and_then(run: Run, always: bool = False) -> None:
    """Refreshes the pictures, but spends at most a twentieth of the time on it."""
    start = time.monotonic()
    if always or start > run.plot_again:
        plot(run.dir)
        now = time.monotonic()
        run.plot_again = now + 20 * (now - start)


def final_table(run: RunData) -> str:
    """The comparison of the adapters at the end of a training run, on the same fresh seeds.

    "" for searches and for runs that are not finished.
    """
    final = run.result.get("final")
    return metrics.final_table(final, str(run.result["metric"])) if final else ""


def result_text(value) -> str:
    """A value of result.json for people; nested ones as "key value  key value"."""
    if isinstance(value, dict):
        return "  ".join(f"{key} {result_text(part)}" for key, part in value.items())
    return f"{value:.5g}" if isinstance(value, float) else str(value)
