"""What people look at: a picture of one study beside its report, and one page about a whole dataset.

Reads datasets and never changes one. `render_study` and `render_findings` need Pillow, which the extra
``pack`` brings; all else here does without.
"""

from shardflow.preview.facts import DatasetFacts
from shardflow.preview.findings import FindingsView, read_findings
from shardflow.preview.findings_sheet import render_findings
from shardflow.preview.gathering import Bounds, gather
from shardflow.preview.page import render_page
from shardflow.preview.planes import WINDOWS, Window
from shardflow.preview.sheet import render_study
from shardflow.preview.study import StudyView, find_row, read_study

__all__ = [
    "WINDOWS",
    "Bounds",
    "DatasetFacts",
    "FindingsView",
    "StudyView",
    "Window",
    "find_row",
    "gather",
    "read_findings",
    "read_study",
    "render_findings",
    "render_page",
    "render_study",
]
