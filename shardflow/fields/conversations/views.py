"""Values that a template writes: columns of a dataset's tables, and other fields of the same sample."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.conversations.templates import IncompleteError, Template, template_digest
from shardflow.fields.field import BoundField, DrawKey, Field, FieldContext, with_dependencies
from shardflow.fields.previous import BoundPrevious
from shardflow.fields.types.pictures import Image, Slices
from shardflow.fields.types.regions import Boxes
from shardflow.fields.types.text import Text
from shardflow.fields.where import own_columns
from shardflow.format import Dataset
from shardflow.format.counts import CountedTemplate
from shardflow.format.facts.columns import Columns, open_columns
from shardflow.format.tables import ColumnValues
from shardflow.sampling.expressions import Expression, ExpressionColumn, parse_expression

_MAX_LEVEL: Final = 255


@dataclass(frozen=True, slots=True)
class _Sample:
    """Sample that a conversation is made of."""

    component: int
    row: NDArray[np.int64]
    """``(1,)``, of its dataset's own table."""
    entries: Mapping[str, Any]


class TemplateValues:
    """What a template names, bound to the samples of a loader. Safe for many threads.

    Args:
        template: The template.
        context: The samples, and the fields that are already bound.
        renderer: Renders its conversations; says how large images are when the model sees them.

    Attributes:
        digests: SHA-256 of the tables whose columns it names.
        digests_of: Those of each dataset.
        tables: Names of the attached ones.

    Raises:
        ConfigError: A name is that of no column or field, or of a field that cannot be written; or the boxes
            of a field would be elsewhere in what the model sees.
    """

    def __init__(self, template: Template, context: FieldContext, renderer: Renderer) -> None:
        self._template, self._renderer, self._lock = template, renderer, threading.Lock()
        bound = {name: _spec(one) for name, one in context.bound.items()}
        self._fields: dict[str, Text | Boxes | Image | Slices] = {
            name: one for name, one in bound.items() if isinstance(one, Text | Boxes | Image | Slices)
        }
        datasets = context.samples.datasets
        self._columns = [_DatasetColumns(dataset) for dataset in datasets]
        every = [name for name in self._columns[0].names if all(name in one.names for one in self._columns)]
        known = [*(name for name, one in self._fields.items() if isinstance(one, Text | Boxes)), *every]
        for name in template.values:
            _check_name(name, known, "column or field of text or boxes")
        pictures = [name for name, one in self._fields.items() if isinstance(one, Image | Slices)]
        for name in template.images:
            _check_name(name, pictures, "field of images or slices")
        asked = [name for name in self._fields if name not in every]
        self._conditions: list[Expression | None] = [
            parse_expression(one.when, [*asked, *every]) if one.when else None for one in template.turns
        ]
        for name in template.values:
            if isinstance(one := self._fields.get(name), Boxes) and name not in every:
                self._check_boxes(name, one)
        self._check_whole(context)
        columns = [name for name in self._named_columns() if name in every]
        self.digests_of: list[tuple[str, ...]] = [
            tuple(dict.fromkeys(filter(None, map(one.digest, columns)))) for one in self._columns
        ]
        self.digests: list[str] = list(dict.fromkeys(chain.from_iterable(self.digests_of)))
        owners = dict.fromkeys(name.partition(".")[0] for name in columns)
        self.tables: list[str] = [name for name in owners if any(name in one.tables for one in datasets)]

    def compose(
        self, component: int, row: int, draw: DrawKey, entries: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return the conversation of a sample, see `BoundTemplate.compose`."""
        sample = _Sample(component, np.array([row], np.int64), entries)
        is_said = [one is None or self._is_true(one, sample) for one in self._conditions]
        return self._template.compose(
            draw,
            is_said,
            lambda name, form: self._written(name, form, sample),
            lambda name: self._pictures(name, entries),
        )

    def counted_by(self, name: str, names: Sequence[str], context: FieldContext) -> list[CountedTemplate]:
        """Return what decides the conversations of each dataset.

        Args:
            name: Of the field of conversations, for messages.
            names: Fields that it depends on.
            context: The fields that are already bound.

        Raises:
            ConfigError: A sample may be of another length in another epoch.
        """
        if self._template.varies:
            raise ConfigError(
                f"The template of the field {name!r} has several phrasings and draws one anew in each epoch, "
                'while a token budget knows the tokens of one; write draws = "sample" in it.'
            )
        named = _named_specs(names, context)
        drawn = next((one for one, spec in named.items() if getattr(spec, "sizes", ())), None)
        if drawn is not None:
            raise ConfigError(
                f"The field {drawn!r} draws a size in each epoch, while a token budget knows the tokens of "
                "one; write num_slices and size in place of sizes."
            )
        digest = template_digest(self._template, named)
        bound = (context.bound[one] for one in named)
        others = [one.named_by for one in bound if isinstance(one, BoundPrevious)][:1]
        if any(isinstance(one, Image | Slices) for one in named.values()):
            others.append(context.catalog.digests)  # which decides what is shown
        return [
            CountedTemplate(digest=digest, tables=(*tables, *(each[place] for each in others)))
            for place, tables in enumerate(self.digests_of)
        ]

    def _named_columns(self) -> list[str]:
        asked = [name for one in self._conditions if one is not None for name in sorted(one.names)]
        return list(dict.fromkeys([*self._template.values, *asked]))

    def _is_true(self, condition: Expression, sample: _Sample) -> bool:
        columns: dict[str, ExpressionColumn] = {}
        for name in condition.names:
            found = self._columns[sample.component].gather(name, sample.row)
            columns[name] = found if found is not None else _answer(bool(_mask(name, sample.entries).any()))
        return bool(condition.select(columns, 1).rows[0])

    def _written(self, name: str, form: str, sample: _Sample) -> str:
        """Return what stands for a name.

        Raises:
            IncompleteError: The sample has no value.
        """
        column = self._columns[sample.component].gather(name, sample.row)
        if column is not None:
            found = _value(column)
            if found is None:
                raise IncompleteError(f"it has no value of {name}", name)
            return self._template.write_value(found, form)
        spec, entries = self._fields[name], sample.entries
        is_there = _mask(name, entries)
        if not is_there.any():
            raise IncompleteError(f"it has nothing for the field {name!r}", name)
        if not isinstance(spec, Boxes):
            said = str(entries[name]).strip()
            if not said:
                raise IncompleteError(f"the text of the field {name!r} is empty", name)
            return said
        (shown,) = {one.shape[-2:] for one in _arrays(spec.like, entries)}
        seen = (1000, 1000) if self._template.coordinates == "thousandths" else shown
        if self._template.coordinates == "model":
            with self._lock:
                seen = self._renderer.seen_size(*shown)
        numbers = entries[f"{name}_label"][is_there].tolist()
        labels = [spec.labels[number] for number in numbers] if spec.labels is not None else []
        return self._template.write_boxes(
            entries[name][is_there], labels if self._template.has_labels else [], shown, seen
        )

    def _pictures(self, name: str, entries: Mapping[str, Any]) -> list[Any]:
        """Return the pictures of a field as RGB images of Pillow, in order.

        Raises:
            IncompleteError: There is none.
        """
        ranges = np.atleast_2d(entries[f"{name}_range"])
        found = _arrays(name, entries)
        if not found:
            raise IncompleteError(f"it has no image for the field {name!r}", name)
        return [_to_picture(one, ranges[min(place, len(ranges) - 1)]) for place, one in enumerate(found)]

    def _check_whole(self, context: FieldContext) -> None:
        """Refuse to write numbers with digits behind the point as whole ones."""
        pieces = (piece for one in self._template.turns for piece in one.pieces)
        for name in dict.fromkeys(piece.text for piece in pieces if piece.format == "d"):
            for columns, used in zip(self._columns, context.populations, strict=True):
                column = columns.gather(name, np.flatnonzero(used))
                if column is None or column.names is not None or column.values.dtype.kind != "f":
                    continue
                is_cut = np.isfinite(column.values) & (column.values != np.trunc(column.values))
                if column.is_missing is not None:
                    is_cut &= ~column.is_missing
                if is_cut.any():
                    raise ConfigError(
                        f"The template writes {{{name}:d}}, and {int(is_cut.sum()):,} of {len(is_cut):,} "
                        f"samples have a value with digits behind the point; write {{{name}:.0f}} to round "
                        f"it, or {{{name}}} for all digits."
                    )

    def _check_boxes(self, name: str, boxes: Boxes) -> None:
        """Refuse boxes whose place in what the model sees is not known."""
        like = self._fields.get(boxes.like)
        if not isinstance(like, Image) or like.num_images != 1 or like.tiles is not None:
            raise ConfigError(
                f"The boxes {name!r} are like {boxes.like!r}, which may deliver several pictures, and text "
                "does not say in which one a box is; follow an sf.Image with num_images=1 and no tiles."
            )
        if boxes.like not in self._template.images:
            raise ConfigError(
                f"The boxes {name!r} are of {boxes.like!r}, which the template does not show; write "
                f"<image:{boxes.like}> into a turn."
            )
        if self._template.has_labels and boxes.labels is None:
            raise ConfigError(
                f"The template writes the labels of the boxes {name!r}, which names none; write labels= for "
                "it, or leave {label} out of box."
            )
        if self._renderer.cuts(like.size):
            raise ConfigError(
                f"The processor cuts images, so that boxes of {boxes.like!r} would be elsewhere in what the "
                "model sees; give that field a square size, with fit='letterbox' where sides differ."
            )
        if self._template.coordinates == "model" and not self._renderer.keeps_sizes:
            raise ConfigError(
                "coordinates='model' needs a processor that tells the size of each image, such as that of "
                "Qwen2.5-VL; write 'thousandths' or 'pixels'."
            )


class _DatasetColumns:
    """Columns of a dataset with one value for each of its rows, and those of findings that they are."""

    def __init__(self, dataset: Dataset) -> None:
        self._columns: Columns = open_columns(dataset)
        self._own: Mapping[str, Callable[[NDArray[np.int64]], ExpressionColumn]] = own_columns(dataset)
        of_rows = [
            name for name, one in self._columns.items() if one.unit == "study" and one.kind != "floats"
        ]
        self.names = {*of_rows, *self._own} - {"facts.patient_key"}

    def digest(self, name: str) -> str:
        """Return the identity of the table of a column; empty if that is part of the dataset's own."""
        return self._columns.digest(name) if name in self._columns else ""

    def gather(self, name: str, row: NDArray[np.int64]) -> ExpressionColumn | None:
        """Return the value of a row, ``(1,)``; None if there is no such column."""
        if name not in self.names:
            return None
        return self._own[name](row) if name in self._own else self._columns.gather(name, row)


def _spec(bound: BoundField) -> Field | None:
    """Return what a field was bound from, as far as it says."""
    found: Any = bound.of if isinstance(bound, BoundPrevious) else bound
    spec: Field | None = getattr(found, "spec", None)
    return spec


def _named_specs(names: Sequence[str], context: FieldContext) -> dict[str, Field]:
    """Return the bound fields of some names, and those that they depend on, by name."""
    found = {}
    for name, bound in context.bound.items():
        spec = _spec(bound)
        if spec is not None:
            # What a field of another study was bound from is that study's own.
            found[name] = replace(spec, study=bound.study) if isinstance(bound, BoundPrevious) else spec
    return {name: found[name] for name in sorted(with_dependencies(found, names))}


def _check_name(name: str, known: Sequence[str], what: str) -> None:
    if name in known:
        return
    short = name.rpartition(".")[2]
    near = [one for one in known if one.rpartition(".")[2] == short][:3]
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known[:40]) or 'none'}."
    raise ConfigError(f"The template names {name!r}, which is no {what}; {hint}")


def _mask(name: str, entries: Mapping[str, Any]) -> NDArray[np.bool_]:
    return np.atleast_1d(np.asarray(entries[f"{name}_mask"])) > 0


def _answer(value: bool) -> ColumnValues:
    return ColumnValues(np.array([value]))


def _value(column: ExpressionColumn) -> Any:
    """Return the value of a column of one row; None where it is missing."""
    if column.is_missing is not None and column.is_missing[0]:
        return None
    found = column.values[0]
    if column.names is not None:
        return column.names[int(found)]
    if isinstance(found, np.floating):  # whose digits depend on its type
        return None if np.isnan(found) else found
    return found.decode("utf-8") if isinstance(found, bytes) else found.item()


def _arrays(name: str, entries: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Return the pictures of a field of pixels, ``(C, H, W)`` each."""
    value, mask = entries[name], _mask(name, entries)
    if value is None:
        return []
    if isinstance(value, list):
        return [one for one in value if one is not None]
    if value.ndim == 3:
        return [value] if mask.all() else []
    return [one for one, is_there in zip(value, mask, strict=False) if is_there]


def _to_picture(pixels: NDArray[Any], display_range: NDArray[np.float32]) -> Any:
    """Return an RGB image of the pixels in their display range, as packing makes pictures of slices."""
    from PIL import Image as Pillow

    low, high = map(float, display_range)
    scaled = (pixels.astype(np.float64) - low) / max(high - low, 1e-9) * _MAX_LEVEL
    gray = np.clip(np.rint(scaled), 0, _MAX_LEVEL).astype(np.uint8)
    return Pillow.fromarray(
        np.ascontiguousarray(np.broadcast_to(gray, (3, *gray.shape[1:])).transpose(1, 2, 0))
    )
