"""Views of datasets for people: pictures of studies, a page about a dataset, and a local web viewer.

Nothing here changes a dataset. The names are loaded on first use, so that a packing process that needs only
`study` does not load HTTP and HTML. `render_study` and its like need Pillow (the extra ``view``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

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
    from shardflow.viewing.server import Viewer
    from shardflow.viewing.sheet import render_study
    from shardflow.viewing.study import WINDOWS, StudyView, Window, find_row, read_study

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
_SOURCES: Final = {
    "WINDOWS": ".study:WINDOWS",
    "Bounds": ".dataset_facts:Bounds",
    "ConversationView": ".conversation_sheet:ConversationView",
    "DatasetFacts": ".dataset_facts:DatasetFacts",
    "FindingsView": ".findings_sheet:FindingsView",
    "StudyView": ".study:StudyView",
    "Viewer": ".server:Viewer",
    "Window": ".study:Window",
    "find_row": ".study:find_row",
    "gather": ".dataset_facts:gather",
    "has_conversation": ".conversation_sheet:has_conversation",
    "read_conversation": ".conversation_sheet:read_conversation",
    "read_findings": ".findings_sheet:read_findings",
    "read_study": ".study:read_study",
    "render_conversation": ".conversation_sheet:render_conversation",
    "render_findings": ".findings_sheet:render_findings",
    "render_page": ".page:render_page",
    "render_pieces": ".conversation_sheet:render_pieces",
    "render_study": ".sheet:render_study",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
