"""A page to look into a dataset: a server on this machine, and what it shows.

Owns: lists, studies, slices, inputs and steps as JSON and bytes, and the page that draws them. Writes
nothing. What a request names is looked up by numbers; no part of an address becomes a path.
"""

from shardflow.viewing.server import Viewer

__all__ = ["Viewer"]
