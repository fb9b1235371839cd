"""Which fields of a sample a loader will read: known before any of their bytes are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardflow.loading.views import View
from shardflow.loading.entity_slots import centre_first
from shardflow.loading.fields_view import FieldsView
from shardflow.loading.pool_choice import find_slices
from shardflow.loading.reader import Shard
from shardflow.loading.sized_view import SizedView
from shardflow.shards.entity_dataset import EntityPlace

__all__ = ["needed_fields"]


def needed_fields(
    shard: Shard,
    row_in_shard: int,
    view: View | FieldsView | None,
    *,
    text: bool,
    seed: int,
    epoch: int,
    row: int,
    table_row: int,
    place: tuple[int, ...] = (),
    entity: EntityPlace | None = None,
) -> NDArray[np.int64]:
    """Return the numbers of the fields that a slot needs, as the fillers choose them.

    Args:
        shard: The sample's shard.
        row_in_shard: The sample in it.
        view: What is asked for of the images, or which fields.
        text: Whether the report is asked for.
        seed: Run-level seed.
        epoch: The epoch.
        row: Row of the selection.
        table_row: Row of the samples table.
        place: Step, micro-batch and slot where an epoch may draw a sample again.
        entity: Where the sample is, where it is no whole study.
    """
    found: list[int | None] = [shard.report(row_in_shard)] if text else []
    if isinstance(view, FieldsView):
        found += [shard.find(row_in_shard, name) for name in view.fields]
    elif view is not None:
        series = 0 if entity is None else entity.series
        slices, _ = find_slices(
            shard, row_in_shard, view, series, seed=seed, epoch=epoch, row=row, place=place
        )
        num_slices = len(slices) if entity is None else len(entity.slices)
        chooser = view.of_sample(table_row, seed=seed, epoch=epoch) if isinstance(view, SizedView) else view
        chosen = chooser.choose(num_slices, seed=seed, epoch=epoch, row=row, place=place)
        if entity is not None:
            chosen = centre_first(chosen, entity)
            chosen = chosen[chosen < len(slices)]  # the loader masks a sample that lacks slices
        found += slices[chosen].tolist()
        if len(chosen):
            found.append(shard.study(row_in_shard))
    return np.unique(np.array([number for number in found if number is not None], np.int64))
