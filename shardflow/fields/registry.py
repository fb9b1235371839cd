"""Registry of field kinds: the kinds that deliver a view, and the check of a view against its datasets."""

from __future__ import annotations

from collections.abc import Sequence

from shardflow.errors import ConfigError
from shardflow.fields.images import Slices
from shardflow.fields.raw import FieldsView, NamedFields
from shardflow.fields.reader import Samples
from shardflow.fields.slots import FieldKind
from shardflow.fields.text import Texts
from shardflow.fields.views import ImageView, View
from shardflow.format import Dataset
from shardflow.telemetry import StageCounters


def field_kinds(
    view: View | FieldsView | None, *, text: bool, counters: StageCounters
) -> Sequence[FieldKind]:
    """Return the field kinds of a slot.

    Args:
        view: Which slices to deliver, or which fields by name.
        text: Whether to deliver the text as well.
        counters: Gets the stages ``decode``, ``transform`` and ``saturated`` (items: pixels).
    """
    kinds: list[FieldKind] = [Texts()] if text else []
    if isinstance(view, FieldsView):
        kinds.append(NamedFields(view, counters))
    elif view is not None:
        kinds.append(Slices(view, counters))
    return kinds


def check_view(samples: Samples, view: View | FieldsView | None) -> None:
    """Refuse a view that needs what a dataset does not have.

    Raises:
        ConfigError: The view is one of slices and the shards are foreign, or small slices or augmented
            variants were not packed.
    """
    if not isinstance(view, View):
        return
    for dataset in samples.datasets:
        if dataset.is_foreign:
            raise ConfigError(
                "a view of shards that others wrote must be a FieldsView, got one of slices; name fields."
            )
        if view.resolution != "small" or _variants(dataset).get("small_px"):
            continue
        if samples.is_blend and not dataset.samples.column("num_slices").any():
            continue  # a component of text alone has no slices
        raise ConfigError(
            "view.resolution must be full for a dataset without small slices, got small; pack it with "
            "variants.small_px."
        )
    is_pooled = isinstance(view, ImageView) and view.augment_pool
    if is_pooled and not any(_variants(dataset).get("augment") for dataset in samples.datasets):
        raise ConfigError(
            "view.augment_pool must be 0 for a dataset without augmented variants, got a share; pack it with "
            "variants.augment.num_variants."
        )


def _variants(dataset: Dataset) -> dict[str, object]:
    variants = dataset.manifest.extra.get("variants")
    return variants if isinstance(variants, dict) else {}
