"""Foreign shards: WebDataset tars of other writers, read where they are, indexed, never copied or changed.

`scan` cuts member names as webdataset does and reads a tar once, `build` groups members into samples and
writes the dataset folder, and `places` finds the tars again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.format.foreign.build import ForeignSource, index_tars
    from shardflow.format.foreign.scan import expand_braces

__all__ = [
    "ForeignSource",
    "expand_braces",
    "index_tars",
]
_SOURCES: Final = {
    "ForeignSource": ".build:ForeignSource",
    "expand_braces": ".scan:expand_braces",
    "index_tars": ".build:index_tars",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
