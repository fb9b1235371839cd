"""Which filler a view needs, and whether a dataset has what the view asks for."""

from __future__ import annotations

from shardflow.errors import ConfigError
from shardflow.loading.fields_view import FieldsView
from shardflow.loading.fill import SlotFiller
from shardflow.loading.fill_fields import FieldsFiller
from shardflow.loading.reader import FieldReader
from shardflow.loading.reader import Samples
from shardflow.loading.view import ImageView
from shardflow.loading.views import View
from shardflow.shards import Dataset
from shardflow.telemetry import StageCounters

__all__ = ["check_view", "make_filler"]


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


def make_filler(
    reader: FieldReader,
    view: View | FieldsView | None,
    *,
    text: bool,
    seed: int,
    epoch: int,
    counters: StageCounters,
) -> SlotFiller | FieldsFiller:
    """Make what fills the slots of an epoch's micro-batches."""
    if isinstance(view, FieldsView):
        return FieldsFiller(reader, view, text=text, counters=counters)
    return SlotFiller(reader, view, text=text, seed=seed, epoch=epoch, counters=counters)
