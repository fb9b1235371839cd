"""The page about a training run, and the page that compares two.

From the lines of a run (`reading`) come numbers in bounded memory (`columns`), from these charts
(`run_charts`, `stretch_charts`, `heat`), which `svg` draws, and `page` and `compare` put together.
"""

from __future__ import annotations

from shardflow.monitoring.run_page.compare import render_comparison
from shardflow.monitoring.run_page.page import render_run_page
from shardflow.monitoring.run_page.reading import RunNumbers, read_run

__all__ = ["RunNumbers", "read_run", "render_comparison", "render_run_page"]
