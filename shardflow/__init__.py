"""shardflow: pack medical studies into plain tar shards, stream them exactly to any number of GPUs.

Importing this package imports nothing else; see ARCHITECTURE.md for the way the data takes.
"""

from __future__ import annotations

from shardflow._version import __version__

__all__ = [
    "__version__",
]
