"""The format of a dataset on disk: docs/format.md, in code.

Owns names, slices, tars, indexes, the samples table, manifests, the ledger and their verification. Knows
neither DICOM nor training: packing writes a dataset by these modules, loading reads it by them.
"""

from __future__ import annotations

from shardflow.shards.codecs import array_header, decode_array, encode_array
from shardflow.shards.dataset import Dataset
from shardflow.shards.decoder import webdataset_decoder
from shardflow.shards.index import FieldLocation, ShardIndex
from shardflow.shards.manifest import Manifest
from shardflow.shards.samples import SamplesTable
from shardflow.shards.shard_checks import Damage
from shardflow.shards.verification import VerifyReport, verify
from shardflow.shards.writer import ShardWriter

__all__ = [
    "Damage",
    "Dataset",
    "FieldLocation",
    "Manifest",
    "SamplesTable",
    "ShardIndex",
    "ShardWriter",
    "VerifyReport",
    "array_header",
    "decode_array",
    "encode_array",
    "verify",
    "webdataset_decoder",
]
