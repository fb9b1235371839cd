"""Loading: from a plan to micro-batches in memory, identical for any number of ranks.

Data flow, by module::

    rows          samples to iterate over: selection, blend_file, weighting, windows
    loader        iteration, position, masks; runtime: streams and tunables of one process
    assembly      layout of a micro-batch, filled by the field kinds of `shardflow.fields`
    engine        batch memory, threads, order, bounds, deadlines
    sample        one sample by its key
    prefetch      access forecast for caches, and reads fetched ahead
    process       loader processes beside the trainer (process_main, ipc)
    service       data servers on other machines (service_main, service_wire, service_ray)

Only two modules import torch: ``shardflow.loading.tensors`` turns arrays into tensors (`Batch.torch`), and
``shardflow.loading.torch_dataset`` puts the same micro-batches into torch's DataLoader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.fields.quarantine import QuarantineRow
    from shardflow.fields.types.findings import EntityNames
    from shardflow.loading.batch import Batch
    from shardflow.loading.config import LoaderConfig, World
    from shardflow.loading.loader import Loader
    from shardflow.loading.rows.blend_file import open_blend
    from shardflow.loading.rows.selection import Selection, open_view, select
    from shardflow.loading.sample import open_dataset

__all__ = [
    "Batch",
    "EntityNames",
    "Loader",
    "LoaderConfig",
    "QuarantineRow",
    "Selection",
    "World",
    "open_blend",
    "open_dataset",
    "open_view",
    "select",
]
_SOURCES: Final = {
    "Batch": ".batch:Batch",
    "EntityNames": "shardflow.fields.types.findings:EntityNames",
    "Loader": ".loader:Loader",
    "LoaderConfig": ".config:LoaderConfig",
    "QuarantineRow": "shardflow.fields.quarantine:QuarantineRow",
    "Selection": ".rows.selection:Selection",
    "World": ".config:World",
    "open_blend": ".rows.blend_file:open_blend",
    "open_dataset": ".sample:open_dataset",
    "open_view": ".rows.selection:open_view",
    "select": ".rows.selection:select",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
