"""Registry of field types, and the fields of a loader bound to its samples.

Types of other packages come from the entry points of the group ``shardflow.fields``; a type that has none can
be used from Python, and is named by its module and class.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.config import TypeKey, load_config
from shardflow.errors import ConfigError
from shardflow.fields.catalog import Reach
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Field,
    FieldContext,
    Slots,
    check_names,
    settings_of,
)
from shardflow.fields.outputs import ENTRY_TYPE, present_output
from shardflow.fields.previous import BoundPrevious, PreviousStudies, open_studies_of
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Samples
from shardflow.fields.transforming import SampleTransform
from shardflow.fields.types.pictures import Image, Slices
from shardflow.fields.types.pixel_field import PixelField
from shardflow.fields.types.text import BoundText, Text
from shardflow.fields.types.tokens import BoundTokens
from shardflow.format import Dataset
from shardflow.format.foreign.places import image_facts, num_samples_with
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.sampling.budget import DELIVERED_PICTURES, MAX_PICTURES, PREVIOUS_PREFIX
from shardflow.telemetry import StageCounters

_BESIDE_ROLES: Final = frozenset({"localizer", "secondary"})
FIELD_GROUP: Final = "shardflow.fields"
_TYPES: Final = {
    "boxes": "shardflow.fields.types.regions:Boxes",
    "image": "shardflow.fields.types.pictures:Image",
    "mask": "shardflow.fields.types.masks:Mask",
    "slices": "shardflow.fields.types.pictures:Slices",
    "tiles": "shardflow.fields.volumes.tiles:Tiles",
    "text": "shardflow.fields.types.text:Text",
    "json": "shardflow.fields.types.members:Json",
    "bytes": "shardflow.fields.types.members:Bytes",
    "array": "shardflow.fields.types.members:Array",
    "column": "shardflow.fields.types.columns:Column",
    "columns": "shardflow.fields.types.columns:Columns",
    "conversation": "shardflow.fields.conversations.field:Conversation",
    "events": "shardflow.fields.types.events:Events",
    "volume": "shardflow.fields.volumes.field:Volume",
    "waveform": "shardflow.fields.types.waveform:Waveform",
    "tokens": "shardflow.fields.types.tokens:Tokens",
}


@cache
def field_type(name: str) -> type[Field]:
    """Return the field type of a name: a built-in one, an entry point, or ``package.module:Class``.

    Raises:
        ConfigError: There is none, or it cannot be imported.
    """
    found = {entry.name: entry.value for entry in entry_points(group=FIELD_GROUP)}
    place = _TYPES.get(name) or found.get(name) or name
    module, separator, attribute = place.partition(":")
    if not separator:
        raise ConfigError(
            f"There is no field type {name!r}; there are {', '.join(sorted({*_TYPES, *found}))}."
        )
    try:
        loaded: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The field type {name!r} cannot be imported ({type(error).__name__}).") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Field)):
        raise ConfigError(f"{place} is not a field type; derive it from shardflow.fields.Field.")
    return loaded


def type_name(kind: type[Field]) -> str:
    """Return the name that `field_type` finds a type by: a built-in one, or ``package.module:Class``."""
    place = f"{kind.__module__}:{kind.__qualname__}"
    return kind.type_name if _TYPES.get(kind.type_name) == place else place


FieldTables: TypeAlias = dict[str, Annotated[Field, TypeKey(field_type, type_name)]]
"""Fields by name in TOML: a table each, with its ``type`` and the settings of the type."""


@dataclass(frozen=True, slots=True)
class FieldsFile:
    """TOML file of fields."""

    fields: FieldTables


def read_fields(path: str | Path) -> dict[str, Field]:
    """Read fields from a TOML file.

    Example::

        [fields.frontal]
        type = "image"
        series = "role == 'frontal'"
        size = [512, 512]

    Args:
        path: The file, or one of training, which has a table ``[data]`` and others beside. Types are
            ``image``, ``slices`` and the other built-in ones, the names of entry points of the group
            ``shardflow.fields``, or ``package.module:Class``.

    Returns:
        The fields by name, as `shardflow.Loader` takes them.

    Raises:
        ConfigError: The file is missing or not TOML, or a type, key or value is not valid; the message names
            the file, the field and the nearest known key.
    """
    fields = load_config(FieldsFile, path, within="data").fields
    check_names(fields)
    if not fields:
        raise ConfigError(f"{Path(path).name} holds no field; write a table such as [fields.image].")
    return fields


def default_fields(context: FieldContext) -> dict[str, Field]:
    """Return the fields that deliver what samples have, for those who name none.

    ``image``: all pictures of a sample, such as both views of a radiograph study; ``slices``: the first
    volume or loop by acquisition; ``report``: the text. Each is there if a sample of the population has such
    content, and pads where others lack it. Localizers and secondary captures are left out. Images of tars of
    other writers are ``image``, or ``image_left_png`` and so on where members of several names hold them.

    Raises:
        ConfigError: The samples have images and no series table, or neither images nor reports.
    """
    pairs = list(zip(context.samples.datasets, context.populations, strict=True))
    has_images = any(
        not dataset.is_foreign and dataset.samples.column("num_slices")[used].any() for dataset, used in pairs
    )
    found: dict[str, Field] = {
        name: field
        for name, field in (_DEFAULT_IMAGES.items() if has_images else ())
        if context.catalog.select(field.series, context.populations).roles()[0]
    }
    members = sorted({member for dataset, _ in pairs for member in _image_members(dataset)})
    for member in members:
        name = "image" if len(members) == 1 else f"image_{_NO_NAME.sub('_', member)}"
        found[name] = Image(member=member, missing="pad")
    if any(dataset.samples.column("text_bytes")[used].any() for dataset, used in pairs):
        found["report"] = Text(missing="pad")
    if not found:
        raise ConfigError(
            "The samples have neither images of studies nor reports, so there are no default fields; name "
            "what a batch holds, such as fields={'image': ...}."
        )
    return found


def _image_members(dataset: Dataset) -> list[str]:
    """Return the names of members of foreign tars that hold images, as far as the index states them."""
    if not dataset.is_foreign:
        return []
    names = num_samples_with(dataset.manifest) or {}
    return [name for name in names if image_facts(dataset.manifest, name) is not None]


_NO_NAME: Final = re.compile(r"[^a-z0-9]+")
_STACKED: Final = "kind in ('volume', 'frames') or kind is missing and num_slices >= 4"
_SINGLE: Final = (
    "kind not in ('volume', 'frames', 'localizer', 'secondary') or kind is missing and num_slices < 4"
)
_DEFAULT_IMAGES: Final[Mapping[str, PixelField]] = {
    "image": Image(series=_SINGLE, num_images="all", missing="pad"),
    "slices": Slices(series=_STACKED, missing="pad"),
}


def _in_order(fields: Mapping[str, Field]) -> list[str]:
    """Return the names of fields, each behind those that it depends on, as far as these are there."""

    def depth(name: str, above: frozenset[str]) -> int:
        others = {*fields[name].depends_on} & fields.keys() - above
        return 1 + max((depth(other, above | {other}) for other in others), default=0)

    return sorted(fields, key=lambda name: depth(name, frozenset({name})))


def _eased(fields: Mapping[str, Field]) -> frozenset[str]:
    """Return the names of fields that pad though they say ``error``, see `FieldContext.eased`."""
    partly = {name for one in fields.values() for name in one.needs_partly}
    eased = {name for name in partly & fields.keys() if fields[name].missing == "error"}
    needed = {
        other
        for name, one in fields.items()
        if name not in eased
        for other in {*one.depends_on} - {*one.needs_partly}
    }
    return frozenset(eased - needed)


class FieldSet:
    """Fields of a loader, bound to its samples. Safe for many threads.

    Args:
        fields: The fields by name.
        context: The samples and their tables.

    Attributes:
        transform: What is done to each sample; None delivers the fields as they are.
        series_tables: SHA-256 of the series table of each dataset; empty if no field needs it.
        own: Fields of the samples themselves.
        derived: Fields that are made of others.
        of_previous: Fields of the earlier studies of the same persons, or of those that a column names.
        previous: Which studies these are; None if no field reads them.

    Raises:
        ConfigError: A name is reserved, or a field does not fit the datasets.
    """

    def __init__(self, fields: Mapping[str, Field], context: FieldContext) -> None:
        check_names(fields)
        _check_crops(fields)
        self.transform: SampleTransform | None = None
        self.specs = dict(fields)
        others = sorted({one.study for one in fields.values() if one.study != "own"})
        if len(others) > 1:
            raise ConfigError(
                f"Fields read the studies {others[0]!r} and {others[1]!r}, and a loader reads one other "
                "study of each sample; leave out one of them."
            )
        self.previous: PreviousStudies | None = open_studies_of(context.samples, *others) if others else None
        context.eased = _eased(fields)
        for name in _in_order(fields):
            spec = replace(fields[name], missing="pad") if name in context.eased else fields[name]
            context.bound[name] = _bind(name, spec, context, self.previous)
        self.bound: Sequence[BoundField] = [context.bound[name] for name in fields]
        self._context = context
        self._entries = [self._describe(one) for one in self.bound]
        tables = [] if "catalog" not in vars(context) else context.catalog.digests
        self.series_tables: Sequence[str] = list(tables)
        self._digests = [*tables, *(digest for one in self.bound for digest in one.digests)]
        self.beside: Sequence[BoundField] = [one for one in self.bound if one.is_beside]
        self.derived: Sequence[BoundField] = [one for one in self.bound if one.is_derived]
        self.own: Sequence[BoundField] = [
            one for one in self.bound if not (isinstance(one, BoundPrevious) or one.is_derived)
        ]
        self.of_previous: Sequence[BoundField] = [one for one in self.bound if isinstance(one, BoundPrevious)]

    def reopened(self, samples: Samples, counters: StageCounters) -> FieldSet:
        """Return the same fields with tables, counters and locks of this process.

        Args:
            samples: The same samples, reopened.
            counters: Gets the stages of decoding.
        """
        again = FieldSet(self.specs, FieldContext(samples, self._context.populations, counters))
        again.transform = self.transform
        return again

    @property
    def content_id(self) -> str:
        """Identity of what fills the slots: the field specs and the digests of the tables that they read."""
        specs = {
            name: {"type": entry["type"], "settings": settings_of(self.specs[name])}
            for name, entry in zip(self.specs, self._entries, strict=True)
        }
        transform = {} if self.transform is None else {"transform": self.transform.identity()}
        return sha256_hex(canonical_json({"fields": specs, "tables": list(self._digests), **transform}))

    @property
    def entries(self) -> Sequence[Mapping[str, Any]]:
        """What each entry of a batch is, JSON values: its type and name, and of columns their classes."""
        return self._entries

    @property
    def table_digests(self) -> Sequence[str]:
        """SHA-256 of the tables that the fields read, those of the series tables first."""
        return self._digests

    @property
    def tables(self) -> Sequence[str]:
        """Names of the attached tables that the fields read, ascending."""
        return sorted({table for one in self.bound for table in one.tables})

    def sample(self, arrays: Arrays, slot: int, num_slots: int) -> dict[str, Any]:
        """Return the entries of one of B slots, as a transform gets them; arrays are views."""
        return self._sample(self._entries, arrays, slot, num_slots)

    def _sample(
        self, entries: Sequence[Mapping[str, Any]], arrays: Arrays, slot: int, num_slots: int
    ) -> dict[str, Any]:
        of_slot = {name: _of_slot(name, array, slot, num_slots) for name, array in arrays.items()}
        return _values_of_slot(present_entries(entries, of_slot))

    def derive(self, arrays: Arrays, slots: Slots, slot: int) -> tuple[BadSampleReason, str, str] | None:
        """Fill a slot with the fields that are made of others, once theirs are there.

        Returns:
            What is wrong with the sample, a detail, and the field that found it; None where all is right.
        """
        for one in self.derived:
            wanted = {*self.specs[one.name].depends_on}
            entries = [entry for entry in self._entries if entry["name"] in wanted]
            bad = one.derive(arrays, slots, slot, self._sample(entries, arrays, slot, len(slots)))
            if bad is not None:
                return (*bad, one.name)
        return None

    def example(self, slots: Slots, *, is_other: bool) -> tuple[dict[str, Any], bool]:
        """Return a synthetic sample for a transform, and whether the sizes of samples differ.

        Args:
            slots: One slot, of a sample that has content for as many fields as possible.
            is_other: Whether to give arrays whose size differs between samples other sizes than that one's.
        """
        arrays = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.array_specs(slots)}
        self.prepare(arrays, slots)
        for field in self.bound:
            field.example(arrays)
        entries = present_entries(self._entries, arrays)
        found = _values_of_slot(entries)
        varying = [
            name
            for name, value in entries.items()
            if f"{name}_offsets" in entries or (isinstance(value, list) and _has_sizes(value[0]))
        ]
        longer = [name for field in self.bound for name in field.varying]
        for name in varying if is_other else ():
            found[name] = _resized(found[name])
        for name in set(longer) - set(varying) if is_other else ():
            found[name] = np.concatenate([found[name], found[name][-1:]])
        return found, bool(varying or longer)

    @cached_property
    def num_crops(self) -> int:
        """Neighboring slots that each sample fills, see `Field.num_crops`."""
        return max((one.num_crops for one in self.specs.values()), default=1)

    @cached_property
    def reads_shards(self) -> bool:
        """Whether any field is read from shards."""
        return len(self.beside) + len(self.derived) < len(self.bound)

    @cached_property
    def reads_own(self) -> bool:
        """Whether any field is read from the shard of the sample itself."""
        return len(self.beside) < len(self.own)

    @cached_property
    def reads_members(self) -> bool:
        """Whether more than the report is read of each sample, so that samples are read one by one."""
        return self.reads_shards and self.report is None

    @cached_property
    def has_pictures(self) -> bool:
        """Whether a field delivers images or slices of series."""
        return any(one.has_pictures for one in self.bound)

    @cached_property
    def report(self) -> BoundText | None:
        """The field of reports, if nothing else is read from shards; it has a fast path."""
        read = [one for one in self.bound if not (one.is_beside or one.is_derived)]
        one = read[0] if len(read) == 1 else None
        return one if isinstance(one, BoundText) and one.is_report else None

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return [spec for field in self.bound for spec in field.array_specs(slots)]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Fill the arrays so that every slot is empty."""
        for field in self.bound:
            field.prepare(arrays, slots)

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without a sample."""
        for field in self.bound:
            field.blank(arrays, slot)

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of a batch for its descriptor."""
        return self._entries

    def describe_names(self) -> list[dict[str, Any]]:
        """Return the entries of fields whose classes or columns have names, which no transform changes."""
        return [entry for entry in self._entries if "classes" in entry or "columns" in entry]

    def summary(self) -> list[str]:
        """Return a line per field on what it delivers and leaves out, as far as tables know."""
        lines = []
        for field in self.bound:
            coverage = field.coverage
            if coverage is None:
                continue
            parts = [f"{coverage.num_samples - coverage.num_missing:,} of {coverage.num_samples:,} samples"]
            parts += [f"delivered {_listed(coverage.delivered)}"] if coverage.delivered else []
            parts += [f"left out {_listed(coverage.left_out)}"] if coverage.left_out else []
            lines.append(f"field {field.name!r}: {'; '.join(parts)}")
        return lines

    def costs(self, place: int, texts: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """Return what a token budget charges for, by row of a dataset's own table, ``(num_rows,)`` each.

        Args:
            place: Of the dataset in the selection.
            texts: Bytes or tokens of the report of each row.

        Returns:
            ``text`` and ``previous_text``, as far as a field delivers it, and `DELIVERED_PICTURES`.

        Raises:
            ConfigError: No table knows how much a field delivers.
        """
        num_rows = self._context.samples.datasets[place].samples.num_samples
        nothing = np.broadcast_to(np.zeros(1, np.uint8), (num_rows,))
        found: dict[str, NDArray[Any]] = {"text": nothing, f"{PREVIOUS_PREFIX}text": nothing}
        pictures = np.zeros(num_rows, np.int64)
        for one in self.bound:
            if (count := one.num_delivered(place)) is not None:
                pictures += count
            of = one.of if isinstance(one, BoundPrevious) else one
            if texts is not None and (
                isinstance(of, BoundTokens) or (isinstance(of, BoundText) and of.is_report)
            ):
                if isinstance(one, BoundPrevious):
                    found[f"{PREVIOUS_PREFIX}text"] = one.gathered(place, texts)
                else:
                    found["text"] = texts
        pictures = np.minimum(pictures, MAX_PICTURES)
        return {
            **found,
            DELIVERED_PICTURES: pictures.astype(np.min_scalar_type(int(pictures.max(initial=0)))),
        }

    def reach(self, populations: Sequence[NDArray[np.bool_]]) -> Reach | None:
        """Count the stored images of samples, and those that at least one field delivers.

        Args:
            populations: For each dataset the rows whose images are counted, ``(num_rows,)``; more than
                those of the fields where some were left out.

        Returns:
            The counts; None where a dataset has no series table.
        """
        try:
            catalog = self._context.catalog
        except ConfigError:
            return None
        delivered = [
            [images for one in self.bound if (images := one.delivered_images(place)) is not None]
            for place in range(len(populations))
        ]
        return catalog.reach(populations, delivered)

    def warnings(self) -> list[str]:
        """Return a line per field that probably delivers other images than were meant."""
        lines = []
        for field in self.bound:
            coverage = field.coverage
            if coverage is None:
                continue
            beside = [role for role in ("localizer", "secondary") if coverage.delivered.get(role)]
            others = {role: num for role, num in coverage.left_out.items() if role not in _BESIDE_ROLES}
            if beside and others:
                lines.append(
                    f"field {field.name!r} delivers {' and '.join(beside)} images and leaves out "
                    f"{_listed(others)}; add \"and kind == 'volume'\" to its series, or name the role"
                )
        return lines

    def _describe(self, field: BoundField) -> dict[str, Any]:
        return {**field.describe(), "type": type_name(type(self.specs[field.name]))}


def _check_crops(fields: Mapping[str, Field]) -> None:
    found = {one.num_crops: name for name, one in fields.items() if one.num_crops > 1}
    if len(found) > 1:
        (first, a), (second, b) = list(found.items())[:2]
        raise ConfigError(
            f"The fields {a!r} and {b!r} take {first} and {second} crops of a sample, and all fields of a "
            f"loader "
            "share its slots; write the same num_samples."
        )


def _of_slot(name: str, array: NDArray[Any], slot: int, num_slots: int) -> NDArray[Any]:
    """Return the part of an array that belongs to a slot, as the array of a batch of one."""
    if name.endswith(".data"):
        return array
    return array[slot : slot + 1 + len(array) - num_slots]


def _values_of_slot(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a batch of one; what is flat beside ``NAME_offsets`` is the slot's as it is."""
    flat = {name for name in entries if f"{name}_offsets" in entries}
    offsets = {f"{name}_offsets" for name in flat}
    return {
        name: value if name in flat else value[0] for name, value in entries.items() if name not in offsets
    }


def _has_sizes(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, list) and any(map(_has_sizes, value)))


def _resized(value: Any) -> Any:
    """Return an array of other sides, or a list of one more of them."""
    if isinstance(value, list):
        return [_resized(one) for one in [*value, value[-1]]]
    sides = [(0, 1 if axis < value.ndim - 2 else 3) for axis in range(value.ndim)]
    if value.ndim > 2:
        sides[-3] = (0, 0)  # channels
    return np.pad(value, sides)


def _bind(name: str, field: Field, context: FieldContext, previous: PreviousStudies | None) -> BoundField:
    """Bind a field; an error that does not say of which field it is gets its name."""
    try:
        if field.study != "own" and previous is not None:
            return BoundPrevious(name, field, context, previous)
        return field.bind(name, context)
    except ConfigError as error:
        if repr(name) in error.message:
            raise
        raise ConfigError(f"field {name!r}: {error.message}") from None


def _listed(counts: Mapping[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {role}" for role, count in ranked)


def present_entries(entries: Sequence[Mapping[str, Any]], arrays: Arrays) -> dict[str, Any]:
    """Return what a batch holds by name, see `Field.present`."""
    found: dict[str, Any] = {}
    for entry in entries:
        is_output = entry["type"] == ENTRY_TYPE
        present = present_output if is_output else field_type(entry["type"]).present
        found.update(present(entry, arrays))
    return found
