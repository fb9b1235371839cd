"""Dataset format: docs/format.md in code.

Covers names, slices, tars, indexes, the samples table, manifests, the ledger and their verification. Knows
neither DICOM nor training: packing writes a dataset through these modules, and loading reads it through
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.format.checks.shards import Damage
    from shardflow.format.checks.verification import VerifyReport, verify
    from shardflow.format.codecs import array_header, decode_array, encode_array, webdataset_decoder
    from shardflow.format.dataset import Dataset
    from shardflow.format.index import FieldLocation, ShardIndex
    from shardflow.format.manifest import Manifest
    from shardflow.format.writer import ShardWriter

__all__ = [
    "Damage",
    "Dataset",
    "FieldLocation",
    "Manifest",
    "ShardIndex",
    "ShardWriter",
    "VerifyReport",
    "array_header",
    "decode_array",
    "encode_array",
    "verify",
    "webdataset_decoder",
]
_SOURCES: Final = {
    "Damage": ".checks.shards:Damage",
    "Dataset": ".dataset:Dataset",
    "FieldLocation": ".index:FieldLocation",
    "Manifest": ".manifest:Manifest",
    "ShardIndex": ".index:ShardIndex",
    "ShardWriter": ".writer:ShardWriter",
    "VerifyReport": ".checks.verification:VerifyReport",
    "array_header": ".codecs:array_header",
    "decode_array": ".codecs:decode_array",
    "encode_array": ".codecs:encode_array",
    "verify": ".checks.verification:verify",
    "webdataset_decoder": ".codecs:webdataset_decoder",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
