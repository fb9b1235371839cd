"""Field assembly: what fills the slots of a view, and which stored fields that takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.findings import centre_first
from shardflow.fields.images import ImageAssembler, find_slices
from shardflow.fields.raw import FieldsView, RawAssembler
from shardflow.fields.reader import FieldReader, Samples, Shard
from shardflow.fields.views import ImageView, SizedView, View
from shardflow.shards import Dataset
from shardflow.shards.entity_dataset import EntityPlace
from shardflow.telemetry import StageCounters


def check_view(samples: Samples, view: View | FieldsView | None) -> None:
    """Refuse a view that asks for what a dataset does not have.

    Raises:
        ConfigError: Slices of shards that others wrote, small slices where only large ones would be read, or
            augmented variants that nobody made.
    """
    if not isinstance(view, View):
        return
    for dataset in samples.datasets:
        if dataset.is_foreign:
            raise ConfigError(
                "a view of shards that others wrote must be a FieldsView, got one of slices; name fields."
            )
        variants = dataset.manifest.extra.get("variants")
        has_small = isinstance(variants, dict) and bool(variants.get("small_px"))
        if view.resolution != "small" or has_small:
            continue
        if samples.is_blend and not dataset.samples.column("num_slices").any():
            continue  # text alone has no slices of any size
        raise ConfigError(
            "view.resolution must be full for a dataset without small slices, got small; pack it with "
            "variants.small_px."
        )
    is_pooled = isinstance(view, ImageView) and view.augment_pool
    if is_pooled and not any(map(_has_pool, samples.datasets)):
        raise ConfigError(
            "view.augment_pool must be 0 for a dataset without augmented variants, got a share; pack it with "
            "variants.augment.num_variants."
        )


def _has_pool(dataset: Dataset) -> bool:
    variants = dataset.manifest.extra.get("variants")
    return isinstance(variants, dict) and bool(variants.get("augment"))


def make_assembler(
    reader: FieldReader,
    view: View | FieldsView | None,
    *,
    text: bool,
    seed: int,
    epoch: int,
    counters: StageCounters,
) -> ImageAssembler | RawAssembler:
    """Make what fills the slots of an epoch's micro-batches."""
    if isinstance(view, FieldsView):
        return RawAssembler(reader, view, text=text, counters=counters)
    return ImageAssembler(reader, view, text=text, seed=seed, epoch=epoch, counters=counters)


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
