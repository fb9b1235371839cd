"""A page to look into a dataset: a server on this machine, and what it shows.

Owns: lists, studies, slices, inputs and steps as JSON and bytes, and the page that draws them. Writes
nothing. What a request names is looked up by numbers; no part of an address becomes a path.


What people look at: a picture of one study beside its report, and one page about a whole dataset.

Reads datasets and never changes one. `render_study` and `render_findings` need Pillow, which the extra
``pack`` brings; all else here does without.
"""

from __future__ import annotations

from shardflow.viewing.dataset_facts import Bounds, DatasetFacts, gather
from shardflow.viewing.findings_sheet import FindingsView, read_findings, render_findings
from shardflow.viewing.page import render_page
from shardflow.viewing.planes import WINDOWS, Window
from shardflow.viewing.server import Viewer
from shardflow.viewing.sheet import render_study
from shardflow.viewing.study import StudyView, find_row, read_study

__all__ = [
    "WINDOWS",
    "Bounds",
    "DatasetFacts",
    "FindingsView",
    "StudyView",
    "Viewer",
    "Window",
    "find_row",
    "gather",
    "read_findings",
    "read_study",
    "render_findings",
    "render_page",
    "render_study",
]
