"""Loading: from a dataset on disk to micro-batches in memory, the same ones on any number of ranks.

The way of the data, a module each::

    epochs      which rows make micro-batch m of step k           (shardflow.epochs)
    assemble    lay the micro-batch out, take memory              buffers, batch, view
    fill        which fields its samples need                     view
    reader      find, read and check their bytes                  shardflow.shards, shardflow.storage
    decode      bytes to pixels, into their place                 scratch
    engine      threads, order, bounds, deadlines                 stream, thread_state
    loader      iterate, position, masks                          quarantine

``shardflow.loading.torch_dataset`` (the only module that imports torch) puts the same micro-batches into
torch's DataLoader.
"""

from __future__ import annotations

from shardflow.loading.batch import Batch
from shardflow.loading.config import LoaderConfig
from shardflow.loading.loader import Loader
from shardflow.loading.quarantine import QuarantineRow
from shardflow.loading.view import ImageView, NativeView
from shardflow.loading.world import World

__all__ = ["Batch", "ImageView", "Loader", "LoaderConfig", "NativeView", "QuarantineRow", "World"]
