"""Fields of a batch that the tasks take, and whether they fit; without torch, for the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardflow.errors import ConfigError
from shardflow.fields.field import Field
from shardflow.fields.registry import type_name
from shardflow.fields.types.columns import Column, Columns
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.pixel_field import PixelField
from shardflow.fields.types.text import Text
from shardflow.fields.types.tokens import Tokens

IMAGE_FIELD: Final = "image"
REPORT_FIELD: Final = "report"
LABEL_FIELD: Final = "label"
"""Names of the fields that tasks take."""


def _check_type(
    fields: Mapping[str, Field],
    name: str,
    kinds: type[Field] | tuple[type[Field], ...],
    types: tuple[str, str],
) -> None:
    one = fields.get(name)
    if one is None:
        raise ConfigError(
            f"[fields] has no field {name!r}, which the model takes; add [fields.{name}] with type = "
            f'"{types[0]}" or "{types[1]}".'
        )
    if not isinstance(one, kinds):
        raise ConfigError(
            f'fields.{name} must be of type "{types[0]}" or "{types[1]}" for the model, got '
            f'"{type_name(type(one))}"; give the other field another name.'
        )


def check_classify_fields(fields: Mapping[str, Field]) -> None:
    """Refuse fields from which no classes can be learned.

    Args:
        fields: The tables ``[fields.NAME]``.

    Raises:
        ConfigError: ``image`` or ``label`` is missing or of a wrong type, or images have no one size.
    """
    _check_type(fields, IMAGE_FIELD, PixelField, ("image", "slices"))
    _check_type(fields, LABEL_FIELD, (Column, Columns), ("column", "columns"))
    images = fields[IMAGE_FIELD]
    assert isinstance(images, PixelField)  # noqa: S101 - checked above
    num_places(images)
    if images.size is None or images.tiles or (isinstance(images, Slices) and images.sizes):
        raise ConfigError(
            "fields.image must have a size, and neither sizes nor tiles, as a classifier takes images of one "
            "shape; set size to [image.rows, image.columns]."
        )


def check_report_fields(fields: Mapping[str, Field], *, needs_text: bool) -> None:
    """Refuse fields from which no report can be learned.

    Args:
        fields: The tables ``[fields.NAME]``.
        needs_text: Whether the words of reports are asked for, beside their tokens.

    Raises:
        ConfigError: ``image`` or ``report`` is missing or of a wrong type, or the model cannot take it.
    """
    _check_type(fields, IMAGE_FIELD, PixelField, ("slices", "image"))
    _check_type(fields, REPORT_FIELD, (Text, Tokens), ("text", "tokens"))
    images = fields[IMAGE_FIELD]
    assert isinstance(images, PixelField)  # noqa: S101 - checked above
    if images.channels == 3:
        raise ConfigError("fields.image.channels must be 1, as the model takes gray images; leave it out.")
    num_places(images)
    if images.size is None and (images.fit == "letterbox" or not isinstance(images, Slices)):
        raise ConfigError(
            "fields.image.size must be set with type 'image' or fit 'letterbox', so that all images of a "
            "micro-batch are of one size; set it to [image.rows, image.columns]."
        )
    if needs_text and text_field(fields) is None:
        raise ConfigError(
            "augment.mirror exchanges no sides of a report that names one, and fields.report delivers "
            'tokens; add [fields.words] with type = "text", or set augment.mirror to 0.'
        )


def text_field(fields: Mapping[str, Field]) -> str | None:
    """Return the name of a field that delivers the text of reports; None where there is none."""
    for name, one in fields.items():
        if isinstance(one, Text) and one.member is None:
            return name
    return None


def num_places(images: PixelField) -> int:
    """Return the most images, slices or tiles that a field delivers of a sample.

    Raises:
        ConfigError: It has no bound, but a model has a position for each.
    """
    if isinstance(images, Slices):
        name, most = "num_slices", max((size[0] for size in images.sizes), default=images.num_slices)
    else:
        name, most = "num_images", getattr(images, "num_images", None)
    if not isinstance(most, int):
        raise ConfigError(
            f"fields.image.{name} must be a number, as the model has a position for each; set it."
        )
    tiles = images.tiles or 1
    return most * (tiles + 1 if tiles > 1 else 1)
