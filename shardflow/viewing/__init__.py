"""Views of datasets for people: pictures of studies, a page about a dataset, and a local web viewer.

Nothing here changes a dataset. The names are loaded on first use, so that a packing process that needs only
`planes` does not load HTTP and HTML. `render_study` and its like need Pillow (the extra ``view``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardflow.viewing.conversation_sheet import (
        ConversationView,
        has_conversation,
        read_conversation,
        render_conversation,
        render_pieces,
    )
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
    "ConversationView",
    "DatasetFacts",
    "FindingsView",
    "StudyView",
    "Viewer",
    "Window",
    "find_row",
    "gather",
    "has_conversation",
    "read_conversation",
    "read_findings",
    "read_study",
    "render_conversation",
    "render_findings",
    "render_page",
    "render_pieces",
    "render_study",
]
_MODULES: Final = {
    "conversation_sheet": (
        "ConversationView",
        "has_conversation",
        "read_conversation",
        "render_conversation",
        "render_pieces",
    ),
    "dataset_facts": ("Bounds", "DatasetFacts", "gather"),
    "findings_sheet": ("FindingsView", "read_findings", "render_findings"),
    "page": ("render_page",),
    "planes": ("WINDOWS", "Window"),
    "server": ("Viewer",),
    "sheet": ("render_study",),
    "study": ("StudyView", "find_row", "read_study"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
