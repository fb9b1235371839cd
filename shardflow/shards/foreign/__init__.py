"""WebDataset shards that others wrote: read where they lie, indexed as they are, never copied or changed.

``names`` cuts member names as webdataset does, ``scan`` reads a tar once, ``grouping`` makes samples of
members, ``build`` writes the dataset folder, ``places`` finds the tars again.
"""

from __future__ import annotations

from shardflow.shards.foreign.build import ForeignSource, IndexOptions, IndexReport, index_tars
from shardflow.shards.foreign.names import expand_braces
from shardflow.shards.foreign.places import is_foreign, located

__all__ = [
    "ForeignSource",
    "IndexOptions",
    "IndexReport",
    "expand_braces",
    "index_tars",
    "is_foreign",
    "located",
]
