"""WebDataset shards that others wrote: read where they lie, indexed as they are, never copied or changed.

``names`` cuts member names as webdataset does, ``scan`` reads a tar once, ``grouping`` makes samples of
members, ``build`` writes the dataset folder, ``places`` finds the tars again.
"""

from __future__ import annotations

from shardflow.format.foreign.build import ForeignSource, IndexOptions, IndexReport, index_tars
from shardflow.format.foreign.places import is_foreign, located
from shardflow.format.foreign.scan import expand_braces

__all__ = [
    "ForeignSource",
    "IndexOptions",
    "IndexReport",
    "expand_braces",
    "index_tars",
    "is_foreign",
    "located",
]
