"""shardflow: pack medical studies into plain tar shards, stream them exactly to any number of GPUs.

Importing this package imports nothing else; see ARCHITECTURE.md for the way the data takes.
"""

__version__ = "0.1.0"
