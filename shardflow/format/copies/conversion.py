"""Members of a sample on their way into another dataset: volumes change between slices and bricks.

Nothing is lost: slices that become bricks and slices again have equal bytes where the codec is the same, and
equal values always. Masks of regions follow their series. All other members stay as they are, but for the
``codec`` of such a series in ``study.json``, which also gets what only the headers of slices said, and the
places of masks in ``annotations.json``. Memory is that of one layer of bricks, of a spool of 64 MiB, of 16
MiB of other members and of the encoded masks of a sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.codecs import (
    DEFAULT_CODEC,
    FAST,
    SLICE_CODEC,
    array_header,
    codec_for,
    decode_array,
    encode_array,
    stored_codec,
)
from shardflow.format.dataset import Dataset
from shardflow.format.facts.making import completed_study
from shardflow.format.index import FieldLocation
from shardflow.format.keys import (
    ANNOTATIONS_FIELD,
    STUDY_FIELD,
    encode_json,
    parse_mask_field,
    parse_slice_field,
    parse_small_field,
    parse_variant_field,
    slice_field,
    volume_field,
)
from shardflow.format.volumes.bricks import BRICKS_CODEC, BrickVolume, EncodedVolume
from shardflow.format.volumes.encoder import MAX_EXTENT, VolumeWriter, suits_bricks
from shardflow.format.volumes.masks import ConvertedMasks, join_masks, split_masks

VolumeStorage: TypeAlias = Literal["bricks", "slices"]
Member: TypeAlias = "tuple[str, bytes | EncodedVolume]"
_GROUP_BYTES: Final = 16 << 20
_STATED: Final = frozenset({"num_slices", "rows", "columns", "samples_per_pixel", "dtype", "codec"})
"""What ``study.json`` says of each series, so that nothing has to look at its slices."""


@dataclass(frozen=True, slots=True)
class _Slices:
    """A series in slices that becomes bricks."""

    number: int
    names: Sequence[str]
    """In geometric order."""
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]


@dataclass(slots=True)
class _Changes:
    """Members of a sample that are stored in another way."""

    joined: dict[str, _Slices] = field(default_factory=dict)
    """Series of slices by the name of their volume."""
    split: dict[str, tuple[int, BrickVolume, str]] = field(default_factory=dict)
    """Number, volume and new codec of series in bricks, by the name of their first slice."""
    made: dict[str, bytes | EncodedVolume] = field(default_factory=dict)
    """New members that are small: masks, and what describes both."""
    gone: set[str] = field(default_factory=set)
    """Names of members that are no more."""
    codecs: dict[int, str] = field(default_factory=dict)
    """New codec of each such series, by its number."""


class SampleMembers:
    """Reader of all members of samples, as another dataset stores them.

    Args:
        source: A dataset that shardflow wrote.
        volumes: ``bricks`` joins the slices of each series that packing would store in bricks: of kind
            ``volume``, of several slices and one value a pixel. ``slices`` makes slices of all series in
            bricks. None changes nothing.
        folder: For an unnamed file of encoded bricks.
        codec: Of the series that change; that of the source by default.

    Attributes:
        changed: New codec of each series that changed, by sample and number of the series.
        slice_codec: The codec of series that change; by default of slices in the dataset that are no plain
            ``b2nd``; else of those that became bricks before; else ``b2nd``.
    """

    def __init__(
        self, source: Dataset, volumes: VolumeStorage | None, folder: Path, codec: str | None = None
    ) -> None:
        self.source, self.volumes, self._folder = source, volumes, folder
        self.changed: dict[tuple[int, int], str] = {}
        self.slice_codec = codec or (DEFAULT_CODEC if volumes is None else _slice_codec(source))

    def of(self, row: int, sample: int) -> Iterator[Member]:
        """Yield the members of a sample, names ascending; volumes are taken before the next member is.

        Args:
            row: Row in the samples table.
            sample: What `changed` calls it.

        Raises:
            FormatError: A member is damaged, or slices of a volume are missing; the message names both.
            StorageError: Reading failed, or the unnamed file cannot be written.
        """
        _, fields = self.source.sample_fields(row)
        index = self.source.shard_index(int(self.source.studies.gather("shard", row)))
        place = int(self.source.studies.gather("row_in_shard", row))
        stored = {fields[number].name: volume for number, volume in index.volumes_in(place, first_field=0)}
        change = self._changes(row, fields)
        joined, split, made = change.joined, change.split, change.made
        self.changed.update({(sample, number): codec for number, codec in change.codecs.items()})

        plain: list[str] = []
        num_bytes = 0
        sizes = {one.name: one.num_bytes for one in fields}
        for name in sorted({*sizes, *joined, *split, *made} - change.gone):
            is_plain = name not in made and name not in stored and name in sizes
            if plain and (not is_plain or num_bytes + sizes[name] > _GROUP_BYTES):
                yield from self.source.read_fields(row, plain).items()
                plain, num_bytes = [], 0
            if is_plain:
                plain.append(name)
                num_bytes += sizes[name]
            elif name in made:
                yield name, made[name]
            elif name in joined:
                yield from self._join(row, name, joined[name])
            elif name in split:
                yield from self._split(row, *split[name])
            elif name in stored:
                payload = self.source.read_fields(row, [name])[name]
                yield name, EncodedVolume(stored[name], len(payload), [payload])
        if plain:
            yield from self.source.read_fields(row, plain).items()

    def _changes(self, row: int, fields: Sequence[FieldLocation]) -> _Changes:
        """Return what becomes of the members of a sample that change."""
        volumes, change = self.source.volumes(row), _Changes()
        if self.volumes is None or (self.volumes == "slices" and not volumes):
            return change
        study = self._study(row, fields, is_sliced=not volumes)
        masks: ConvertedMasks | None = None
        if self.volumes == "bricks" and study is not None:
            found = self._slices_to_join(row, fields, study["series"])
            change.joined = {volume_field(one.number): one for one in found}
            change.gone = {name for one in change.joined.values() for name in one.names}
            change.codecs = {one.number: BRICKS_CODEC for one in change.joined.values()}
            masks = self._masks_to_join(row, fields, study["series"], change.joined.values())
        elif self.volumes == "slices":
            for number, volume in volumes.items():
                codec = codec_for(self.slice_codec, volume.shape[1:], volume.dtype)
                # Sorts where its slices do.
                change.split[slice_field(number, 0, stored_codec(codec))] = number, volume, codec
                change.codecs[number] = stored_codec(codec)
            change.gone = {volume_field(number) for number in volumes}
            masks = self._masks_to_split(row, fields, volumes)
        if masks is not None:
            change.gone |= masks.former
            change.made = {**masks.fields, ANNOTATIONS_FIELD: masks.annotations}
        if study is not None and change.codecs:
            change.made[STUDY_FIELD] = _with_codecs(study, change.codecs)
        return change

    def _study(self, row: int, fields: Sequence[FieldLocation], *, is_sliced: bool) -> dict[str, Any] | None:
        """Return ``study.json`` if it describes every series, by what slices say where all are such."""
        if not any(one.name == STUDY_FIELD for one in fields):
            return None
        read = partial(self.source.read_fields, row)
        try:
            study: dict[str, Any] = json.loads(read([STUDY_FIELD])[STUDY_FIELD])
            if not study.get("series"):
                return None
            if all(one.keys() >= _STATED for one in study["series"]):
                return study
            if not is_sliced:
                return None
            whole = None
            with suppress(LookupError):  # fewer series are described than stored
                whole = completed_study(study, fields, read)
            return whole if whole and len(whole["series"]) == len(study["series"]) else None
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            raise self._error(row, STUDY_FIELD, "a study must describe its series, got another") from None

    def _slices_to_join(
        self, row: int, fields: Sequence[FieldLocation], series: Sequence[Mapping[str, Any]]
    ) -> Iterator[_Slices]:
        """Yield the series of slices that packing would store in bricks."""
        found: dict[int, list[tuple[int, str]]] = {}
        for name in (one.name for one in fields):
            part = parse_slice_field(name)
            if part is not None:
                found.setdefault(part.series, []).append((part.index, name))
        for number, facts in enumerate(series):
            num_slices, places = facts["num_slices"], sorted(found.get(number, ()))
            if facts["codec"] == BRICKS_CODEC or not suits_bricks(
                kind=facts.get("kind"), num_slices=num_slices, num_samples=facts["samples_per_pixel"]
            ):
                continue
            if len({name.rpartition(".")[2] for _, name in places}) > 1:
                continue  # each slice in several codecs: which one is wanted is not known
            missing = next(
                (want for want, (has, _) in enumerate([*places, (-1, "")]) if has != want), num_slices
            )
            if missing != num_slices or len(places) != num_slices:
                name = slice_field(number, missing, facts["codec"])
                raise self._error(row, name, f"a volume must have its {num_slices} slices, got {len(places)}")
            names = [name for _, name in places]
            shape, dtype = self._header(row, names[0])
            extents = num_slices, *shape[:2]
            if dtype.kind in "iuf" and max(extents) <= MAX_EXTENT and shape[2:] in {(), (1,)}:
                yield _Slices(number, names, (extents[0], extents[1], extents[2]), dtype)

    def _masks_to_join(
        self,
        row: int,
        fields: Sequence[FieldLocation],
        series: Sequence[Mapping[str, Any]],
        joined: Iterable[_Slices],
    ) -> ConvertedMasks | None:
        """Return the masks of series in bricks, and of those that become such, in bricks."""
        names = {one.name for one in fields}
        shapes = {
            number: (int(facts["num_slices"]), int(facts["rows"]), int(facts["columns"]))
            for number, facts in enumerate(series)
            if facts["codec"] == BRICKS_CODEC
        }
        shapes |= {one.number: one.shape for one in joined}
        wanted = sorted(name for name in names if (part := parse_mask_field(name)) and part.series in shapes)
        if not wanted or ANNOTATIONS_FIELD not in names:
            return None
        payloads = self.source.read_fields(row, [ANNOTATIONS_FIELD, *wanted])
        with self._naming(row, ANNOTATIONS_FIELD):
            return join_masks(
                payloads[ANNOTATIONS_FIELD],
                wanted,
                lambda names: {name: payloads[name] for name in names},
                shapes,
            )

    def _masks_to_split(
        self, row: int, fields: Sequence[FieldLocation], bricks: Mapping[int, BrickVolume]
    ) -> ConvertedMasks | None:
        """Return the masks of series in bricks in slices."""
        if not any(one.name == ANNOTATIONS_FIELD for one in fields):
            return None
        annotations = self.source.read_fields(row, [ANNOTATIONS_FIELD])[ANNOTATIONS_FIELD]
        with self._naming(row, ANNOTATIONS_FIELD):
            return split_masks(
                annotations,
                partial(self.source.read_masks, row),
                {number: volume.shape for number, volume in bricks.items()},
                depth=max(volume.brick_shape[0] for volume in bricks.values()),
                codec=stored_codec(self.slice_codec),
            )

    def _header(self, row: int, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        payload = self.source.read_fields(row, [name])[name]
        with self._naming(row, name):
            return array_header(name.rpartition(".")[2], payload)

    def _join(self, row: int, name: str, slices: _Slices) -> Iterator[Member]:
        """Yield the volume of a series of slices."""
        is_fast = self.slice_codec == FAST
        with VolumeWriter(slices.shape, slices.dtype, folder=self._folder, is_fast=is_fast) as volume:
            for first in range(0, slices.shape[0], volume.num_slices_at_once):
                names = slices.names[first : first + volume.num_slices_at_once]
                payloads = self.source.read_fields(row, names)
                for one in names:
                    volume.add(self._pixels(row, one, payloads[one], slices))
            yield name, volume.finish()

    def _pixels(self, row: int, name: str, payload: bytes, slices: _Slices) -> NDArray[Any]:
        with self._naming(row, name):
            pixels = decode_array(name.rpartition(".")[2], payload)
        if pixels.dtype != slices.dtype or pixels.shape[:2] != slices.shape[1:] or pixels[0, 0].size != 1:
            raise self._error(
                row,
                name,
                f"a slice must be {slices.dtype} {slices.shape[1:]} as the first one of its series, got "
                f"{pixels.dtype} {pixels.shape}",
            )
        return pixels

    def _split(self, row: int, number: int, volume: BrickVolume, codec: str) -> Iterator[Member]:
        """Yield the slices of a series in bricks."""
        depth = volume.brick_shape[0]
        slab, held = np.empty((0, *volume.shape[1:]), volume.dtype), -1
        # The order of names, which from 10,000 slices on is not that of the slices.
        stored = stored_codec(codec)
        for name, place in sorted((slice_field(number, at, stored), at) for at in range(volume.shape[0])):
            if place // depth != held:
                held = place // depth
                stop = min((held + 1) * depth, volume.shape[0]), *volume.shape[1:]
                slab = self.source.read_volume(row, number, (held * depth, 0, 0), stop)
            yield name, encode_array(codec, slab[place - held * depth])

    @contextmanager
    def _naming(self, row: int, name: str) -> Iterator[None]:
        """Name the sample and its member in errors of reading it."""
        try:
            yield
        except FormatError as error:
            raise self._error(row, name, error.message) from None

    def _error(self, row: int, name: str, problem: str) -> FormatError:
        path, key = self.source.sample_fields(row)[0], self.source.studies.sample_key(row)
        return FormatError(f"{problem.rstrip('.')} ({path}, {key}.{name}); run `shardflow verify`.")


def _with_codecs(study: Mapping[str, Any], codecs: Mapping[int, str]) -> bytes:
    """Encode ``study.json`` as packing does, with other codecs of some series."""
    series = [
        {**one, "codec": codecs.get(number, one["codec"])} for number, one in enumerate(study["series"])
    ]
    return encode_json({**study, "series": series})


def _slice_codec(source: Dataset) -> str:
    parsers = (parse_slice_field, parse_small_field, parse_variant_field)
    names = {
        name for shard in range(len(source.manifest.shards)) for name in source.shard_index(shard).field_names
    }
    parts = [part for name in names for parse in parsers if (part := parse(name)) is not None]
    used = sorted({part.codec for part in parts} - {DEFAULT_CODEC})
    return used[0] if used else str(source.manifest.extra.get(SLICE_CODEC, DEFAULT_CODEC))
