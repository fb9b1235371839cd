"""Loading: from a dataset on disk to micro-batches in memory, the same ones on any number of ranks.

The way of the data, a module each::

    selection   which samples: a split, a subset, a blend         subset, key_list, blend_file
    epochs      which rows make micro-batch m of step k           (shardflow.epochs)
    assemble    lay the micro-batch out, take memory              buffers, batch, view, entity_slots
    fill        which fields its samples need                     view, fill_fields, fill_text, fill_tokens
    reader      find, read and check their bytes                  shardflow.shards, shardflow.storage
    decode      bytes to pixels, into their place                 scratch
    engine      threads, order, bounds, deadlines                 stream, thread_state
    loader      iterate, position, masks                          quarantine

``shardflow.loading.torch_dataset`` (the only module that imports torch) puts the same micro-batches into
torch's DataLoader.
"""

from __future__ import annotations

from shardflow.fields.findings import EntityNames
from shardflow.fields.quarantine import QuarantineRow
from shardflow.fields.raw import FieldsView
from shardflow.fields.regions import carry_box, carry_mask, region_masks
from shardflow.fields.tokens import StoredTokens
from shardflow.fields.views import ImageView, NativeView, SizedView, SliceSize, TileView
from shardflow.loading.batch import Batch
from shardflow.loading.blend_file import open_blend
from shardflow.loading.config import LoaderConfig
from shardflow.loading.loader import Loader
from shardflow.loading.selection import Selection, open_view, select
from shardflow.loading.world import World

__all__ = [
    "Batch",
    "EntityNames",
    "FieldsView",
    "ImageView",
    "Loader",
    "LoaderConfig",
    "NativeView",
    "QuarantineRow",
    "Selection",
    "SizedView",
    "SliceSize",
    "StoredTokens",
    "TileView",
    "World",
    "carry_box",
    "carry_mask",
    "open_blend",
    "open_view",
    "region_masks",
    "select",
]
