"""Front door of shardflow: pack medical studies into tar shards, stream them exactly to any number of GPUs.

    import shardflow as sf

    dataset = sf.open("my-dataset")
    spec = sf.BatchSpec.simple(global_batch_size=8, micro_batch_size=2)
    with sf.Loader(dataset, split="train", batch=spec, seed=7) as loader:
        for batch in loader:
            ...

Each name is imported when it is first used, so that importing the package loads neither NumPy nor torch. The
library itself never imports from here. See ARCHITECTURE.md for the data flow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names
from shardflow._version import __version__

if TYPE_CHECKING:
    from shardflow.errors import (
        ChecksumError,
        ConfigError,
        FormatError,
        NotFoundError,
        SampleError,
        ShardflowError,
        StateError,
        StorageError,
        WaitTimeoutError,
    )
    from shardflow.fields import adapters
    from shardflow.fields.conversations.field import Conversation
    from shardflow.fields.conversations.templates import Template
    from shardflow.fields.field import Field
    from shardflow.fields.registry import read_fields
    from shardflow.fields.types.columns import Column, Columns
    from shardflow.fields.types.events import Events
    from shardflow.fields.types.masks import Mask
    from shardflow.fields.types.members import Array, Bytes, Json
    from shardflow.fields.types.pictures import Image, Slices
    from shardflow.fields.types.regions import Boxes
    from shardflow.fields.types.text import Text
    from shardflow.fields.types.tokens import Tokens
    from shardflow.fields.types.waveform import Waveform
    from shardflow.fields.volumes.field import Volume
    from shardflow.fields.volumes.tiles import Tiles
    from shardflow.fields.volumes.windows import Stitcher
    from shardflow.format.checks.verification import VerifyReport, verify
    from shardflow.format.copies.copying import copy_dataset as copy
    from shardflow.format.dataset import Dataset
    from shardflow.format.writer import ShardWriter
    from shardflow.loading.batch import Batch
    from shardflow.loading.column_writer import ColumnWriter
    from shardflow.loading.config import LoaderConfig, World
    from shardflow.loading.loader import Loader
    from shardflow.loading.rows.blend_file import open_blend as blend
    from shardflow.loading.rows.selection import Selection
    from shardflow.loading.sample import open_dataset as open  # noqa: A004 - `sf.open`
    from shardflow.packing.config import PackConfig
    from shardflow.packing.job import pack
    from shardflow.sampling.budget import TokenBudget
    from shardflow.sampling.plan import EpochPlan
    from shardflow.sampling.spec import BatchSpec, Sampling
    from shardflow.storage.cache.config import CacheConfig
    from shardflow.storage.requests import RemoteOptions
    from shardflow.training.device.volumes import VolumeAugmentation

__all__ = [
    "Array",
    "Batch",
    "BatchSpec",
    "Boxes",
    "Bytes",
    "CacheConfig",
    "ChecksumError",
    "Column",
    "ColumnWriter",
    "Columns",
    "ConfigError",
    "Conversation",
    "Dataset",
    "EpochPlan",
    "Events",
    "Field",
    "FormatError",
    "Image",
    "Json",
    "Loader",
    "LoaderConfig",
    "Mask",
    "NotFoundError",
    "PackConfig",
    "RemoteOptions",
    "SampleError",
    "Sampling",
    "Selection",
    "ShardWriter",
    "ShardflowError",
    "Slices",
    "StateError",
    "Stitcher",
    "StorageError",
    "Template",
    "Text",
    "Tiles",
    "TokenBudget",
    "Tokens",
    "VerifyReport",
    "Volume",
    "VolumeAugmentation",
    "WaitTimeoutError",
    "Waveform",
    "World",
    "__version__",
    "adapters",
    "blend",
    "copy",
    "open",
    "pack",
    "read_fields",
    "verify",
]
_SOURCES: Final = {
    "Array": "shardflow.fields.types.members:Array",
    "adapters": "shardflow.fields.adapters",
    "Batch": "shardflow.loading.batch:Batch",
    "BatchSpec": "shardflow.sampling.spec:BatchSpec",
    "Boxes": "shardflow.fields.types.regions:Boxes",
    "Bytes": "shardflow.fields.types.members:Bytes",
    "CacheConfig": "shardflow.storage.cache.config:CacheConfig",
    "ChecksumError": "shardflow.errors:ChecksumError",
    "Column": "shardflow.fields.types.columns:Column",
    "ColumnWriter": "shardflow.loading.column_writer:ColumnWriter",
    "Columns": "shardflow.fields.types.columns:Columns",
    "ConfigError": "shardflow.errors:ConfigError",
    "Conversation": "shardflow.fields.conversations.field:Conversation",
    "Dataset": "shardflow.format.dataset:Dataset",
    "EpochPlan": "shardflow.sampling.plan:EpochPlan",
    "Events": "shardflow.fields.types.events:Events",
    "Field": "shardflow.fields.field:Field",
    "FormatError": "shardflow.errors:FormatError",
    "Image": "shardflow.fields.types.pictures:Image",
    "Json": "shardflow.fields.types.members:Json",
    "Loader": "shardflow.loading.loader:Loader",
    "LoaderConfig": "shardflow.loading.config:LoaderConfig",
    "Mask": "shardflow.fields.types.masks:Mask",
    "NotFoundError": "shardflow.errors:NotFoundError",
    "PackConfig": "shardflow.packing.config:PackConfig",
    "RemoteOptions": "shardflow.storage.requests:RemoteOptions",
    "SampleError": "shardflow.errors:SampleError",
    "Sampling": "shardflow.sampling.spec:Sampling",
    "Selection": "shardflow.loading.rows.selection:Selection",
    "ShardWriter": "shardflow.format.writer:ShardWriter",
    "ShardflowError": "shardflow.errors:ShardflowError",
    "Slices": "shardflow.fields.types.pictures:Slices",
    "StateError": "shardflow.errors:StateError",
    "Stitcher": "shardflow.fields.volumes.windows:Stitcher",
    "StorageError": "shardflow.errors:StorageError",
    "Template": "shardflow.fields.conversations.templates:Template",
    "Text": "shardflow.fields.types.text:Text",
    "Tiles": "shardflow.fields.volumes.tiles:Tiles",
    "TokenBudget": "shardflow.sampling.budget:TokenBudget",
    "Tokens": "shardflow.fields.types.tokens:Tokens",
    "VerifyReport": "shardflow.format.checks.verification:VerifyReport",
    "Volume": "shardflow.fields.volumes.field:Volume",
    "VolumeAugmentation": "shardflow.training.device.volumes:VolumeAugmentation",
    "Waveform": "shardflow.fields.types.waveform:Waveform",
    "WaitTimeoutError": "shardflow.errors:WaitTimeoutError",
    "World": "shardflow.loading.config:World",
    "blend": "shardflow.loading.rows.blend_file:open_blend",
    "copy": "shardflow.format.copies.copying:copy_dataset",
    "open": "shardflow.loading.sample:open_dataset",
    "pack": "shardflow.packing.job:pack",
    "read_fields": "shardflow.fields.registry:read_fields",
    "verify": "shardflow.format.checks.verification:verify",
}

if not TYPE_CHECKING:  # A type checker reads the imports above, and reports a name that does not exist.
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
