"""HTML pages about one training run and about two, each a single file that works offline.

`reading` condenses a run to bounded size, `svg` draws charts, `page` and `compare` assemble the pages.
"""

from __future__ import annotations

from shardflow.monitoring.run_page.compare import render_comparison
from shardflow.monitoring.run_page.page import render_run_page
from shardflow.monitoring.run_page.reading import RunNumbers, read_run

__all__ = [
    "RunNumbers",
    "read_run",
    "render_comparison",
    "render_run_page",
]
