"""A sample's text: find it, and put it where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.loading.quarantine import BadSampleReason
from shardflow.loading.reader import Shard
from shardflow.shards.entity_dataset import EntityPlace, entity_key

__all__ = ["SlotRequest", "check_row", "find_text", "put_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRequest:
    """A slot to be filled."""

    slot: int
    row: int
    """Row of the selection."""
    place: tuple[int, ...]
    """Step, micro-batch and slot where an epoch may draw a sample again, as a blend's does; else nothing."""
    row_in_shard: int
    key: str
    text_bytes: int
    """Size of the text as the table has it: of the report, or of a piece of it."""
    entity: EntityPlace | None = None
    """Where the sample is in its study; None for all of it."""


def check_row(shard: Shard, request: SlotRequest) -> None:
    """Compare index and samples table.

    Raises:
        BadSample: They name two samples.
    """
    index, row = shard.index, request.row_in_shard
    key = index.sample_key(row) if row < index.num_samples else ""
    if key and request.entity is not None:
        key = entity_key(key, request.entity.entity, request.entity.series)
    if key != request.key:
        raise shard.bad(BadSampleReason.INDEX_DAMAGED, "", "the samples table names another sample")


def find_text(shard: Shard, request: SlotRequest) -> int | None:
    """Return the field with a sample's text; None where there is no text, or an empty one.

    Raises:
        BadSample: It has another size than the samples table says.
    """
    report = shard.report(request.row_in_shard)
    num_bytes = 0 if report is None else shard.num_bytes(report)
    if request.entity is not None:
        # A piece of the report: all of it is read, because its checksum is of all of it.
        num_bytes = min(request.text_bytes, max(num_bytes - request.entity.text_start, 0))
    if num_bytes != request.text_bytes:
        reason = BadSampleReason.FIELD_MISSING if report is None else BadSampleReason.SIZE_MISMATCH
        detail = f"{num_bytes} bytes instead of {request.text_bytes}"
        raise shard.bad(reason, shard.index.text_field, detail)
    return report if num_bytes else None


def put_text(
    shard: Shard, request: SlotRequest, payload: NDArray[np.uint8], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Put a sample's text into its place.

    Raises:
        BadSample: It is no UTF-8.
    """
    if request.entity is not None:
        first = request.entity.text_start
        payload = payload[first : first + request.text_bytes]
    try:
        str(payload.data, "utf-8")
    except UnicodeDecodeError:
        raise shard.bad(BadSampleReason.TEXT_UNREADABLE, shard.index.text_field, "no UTF-8") from None
    start = int(arrays["text_offsets"][request.slot])
    arrays["text_bytes"][start : start + len(payload)] = payload
