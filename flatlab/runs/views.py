"""The pictures of one run."""

from __future__ import annotations

import time
from pathlib import Path

from flatlab.runs import plots, search_plots
from flatlab.runs.reader import RunData, read_run
from flatlab.runs.store import Run


def plot(run_dir, format="png") -> list[Path]:
    """Draw the views of one run into its directory: curves (training), or tree and search (search).

    format: png, pdf or svg; the last two for papers: each panel also alone, in panels/. Returns the paths. Raises UserError when there is nothing to draw.
    """
    record = run_dir if isinstance(run_dir, RunData) else read_run(run_dir)
    groups = [plots.Group(record.name, plots.BLUE, [record])]
    panels = plots.TRAINING if record.kind == "grpo" else search_plots.SEARCH
    single = (
        [] if format == "png" else plots.save_panels(panels, groups, record.dir / "panels", format)
    )
    if record.kind == "grpo":
        with plots.figure_of(19, 11.5) as figure:
            plots.draw_panels(figure, plots.TRAINING, groups, 4)
            bold = f"   (bold: running mean of {plots.window_of(record.rows)} steps)"
            figure.suptitle(plots.shorten(plots.heading(record), 200) + bold)
            return [plots.save(figure, record.dir / f"curves.{format}"), *single]
    with plots.figure_of(*search_plots.tree_size(record)) as figure:
        search_plots.draw_tree(figure, record)
        figure.suptitle(plots.shorten(plots.heading(record), 120), fontsize=10)
        paths = [plots.save(figure, record.dir / f"tree.{format}")]
    with plots.figure_of(15, 8.5) as figure:
        plots.draw_panels(figure, search_plots.SEARCH, groups, 3)
        figure.suptitle(plots.shorten(plots.heading(record), 160))
        return [*paths, plots.save(figure, record.dir / f"search.{format}"), *single]


def plot_now_and_then(run: Run, always: bool = False) -> None:
    """Refresh the pictures, but spend at most a twentieth of the time on it."""
    start = time.monotonic()
    if always or start > run.plot_again:
        plot(run.dir)
        run.plot_again = time.monotonic() + 20 * (time.monotonic() - start)
