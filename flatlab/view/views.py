"""The pictures of one run, and a value of its result as text."""

from __future__ import annotations

import time
from pathlib import Path

from flatlab.runs.reader import RunData, read_run
from flatlab.runs.store import Run
from flatlab.view import compare, plots, search_plots


def plot(run: RunData, format="png") -> list[Path]:
    """Draws the pictures of one run into its directory: curves, or the tree and search."""
    curves = "curves" if run.kind == "grpo" else "search"
    paths = [plot_curves(run, run.dir / f"{curves}.{format}")]
    if run.kind != "search":
        return paths
    with plots.figure_of(*search_plots.tree_size(run)) as figure:
        search_plots.draw_tree(figure, run)
        plots.set_title(figure, plots.heading(run))
        return [plots.save(figure, run.dir / f"tree.{format}"), *paths]


def plot_curves(run: RunData, path: Path) -> Path:
    """All panels of one run."""
    group = plots.RunGroup(run.name, plots.BLUE, [run])
    title = plots.heading(run)
    if run.kind == "grpo":
        title += f"   (bold: running mean of {plots.window_of(run.rows)} steps)"
    return compare.plot_groups([group], title, path)


def plot_now_and_then(run: Run, always: bool = False) -> None:
    """Refreshes the pictures, but spends at most a twentieth of the time on it."""
    start = time.monotonic()
    if always or start > run.plot_again:
        plot(read_run(run.dir))
        now = time.monotonic()
        run.plot_again = now + 20 * (now - start)


def result_text(value) -> str:
    """A value of result.json for people; nested ones as "key value  key value"."""
    if isinstance(value, dict):
        return "  ".join(f"{key} {result_text(part)}" for key, part in value.items())
    return f"{value:.5g}" if isinstance(value, float) else str(value)
