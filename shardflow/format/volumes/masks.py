"""Masks of regions in bricks: one volume of small numbers for all regions of a series.

Each voxel holds the number of a *combination*: the regions that it belongs to, 0 for none.
``annotations.json`` lists for each region the numbers of the combinations with it, so regions may overlap, a
hundred classes take one byte a voxel, and a mask of any regions is one look at a table of numbers. Fractional
masks, whose pixels are parts of 255, are a volume each. docs/format.md, section 20, has the layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.format.codecs import codec_for, codec_rank, decode_array, encode_array
from shardflow.format.contents.regions import Region, read_regions
from shardflow.format.keys import encode_json, mask_field, mask_prefix, parse_mask_field, volume_field
from shardflow.format.volumes.bricks import EncodedVolume, Extents
from shardflow.format.volumes.encoder import BRICK_SHAPE, VolumeEncoder

Pixels: TypeAlias = NDArray[np.uint8]
ReadFields: TypeAlias = Callable[[Sequence[str]], Mapping[str, bytes]]
"""Returns the payloads of some fields of a sample."""
ReadMask: TypeAlias = Callable[[int, int, slice], NDArray[Any]]
"""Returns some slices of the mask volume that is named after a region of a series."""
_DTYPES: Final = (np.dtype("u1"), np.dtype("<u2"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedMasks:
    """Masks of a sample on their way into another storage."""

    annotations: bytes
    """``annotations.json`` that names them."""
    fields: Mapping[str, bytes | EncodedVolume]
    """The new members."""
    former: frozenset[str]
    """Names of the members that they replace."""


def join_masks(
    annotations: bytes,
    names: Iterable[str],
    read: ReadFields,
    shapes: Mapping[int, Extents],
    *,
    brick_shape: Sequence[int] = BRICK_SHAPE,
) -> ConvertedMasks | None:
    """Store the masks of regions in bricks.

    A region stays as it is where bricks would lose something: pixels of a mask in slices that it does not
    list, slices in which outlines or a box stand for a mask, another shape than the series', or regions that
    overlap in more than 65,535 ways.

    Args:
        annotations: ``annotations.json``.
        names: Of all members of the sample.
        read: Reads members.
        shapes: Slices, rows and columns of the series whose masks become bricks, by number.
        brick_shape: Largest size of a brick.

    Returns:
        None if no mask changes.

    Raises:
        FormatError: A mask or the annotations are damaged.
    """
    stored: dict[tuple[int, int], dict[int, list[str]]] = {}
    for name in names:
        part = parse_mask_field(name)
        if part is not None and part.series in shapes and codec_rank(part.codec) is not None:
            stored.setdefault((part.series, part.roi), {}).setdefault(part.index, []).append(name)
    if not stored:
        return None
    binary: dict[int, list[_SliceMasks]] = {}
    fractional: list[_SliceMasks] = []
    for one in _joinable(read_regions(annotations), stored, read, shapes):
        if one.region.is_fractional:
            fractional.append(one)
        else:
            binary.setdefault(one.region.series, []).append(one)
    fields: dict[str, bytes | EncodedVolume] = {}
    facts: dict[tuple[int, int], dict[str, Any]] = {}
    for series, regions in binary.items():
        encoded = _encode_combinations(regions, shapes[series], brick_shape)
        if encoded is None:
            continue
        volume, values = encoded
        fields[volume_field(series, regions[0].region.number)] = volume
        mask = f"{mask_prefix(series, regions[0].region.number)}.volume"
        for one in regions:
            number = one.region.number
            facts[series, number] = {"mask": mask, "values": values[number]}
    for one in fractional:
        place = one.region.series, one.region.number
        fields[volume_field(*place)] = _encode_parts(one, shapes[place[0]], brick_shape)
        facts[place] = {"mask": f"{mask_prefix(*place)}.volume"}
    if not facts:
        return None
    content = json.loads(annotations)
    rois = [{**roi, **facts.get((int(roi["series"]), int(roi["roi"])), {})} for roi in content["rois"]]
    former = {name for place in facts for found in stored[place].values() for name in found}
    return ConvertedMasks(
        annotations=encode_json({**content, "rois": rois}), fields=fields, former=frozenset(former)
    )


def split_masks(
    annotations: bytes, read: ReadMask, shapes: Mapping[int, Extents], *, depth: int, codec: str
) -> ConvertedMasks | None:
    """Store the masks of regions in slices.

    Args:
        annotations: ``annotations.json``.
        read: Reads slices of the volumes of masks.
        shapes: Slices, rows and columns of the series whose masks become slices, by number.
        depth: Slices that are read at once.
        codec: Of the slices.

    Returns:
        None if no mask changes.

    Raises:
        FormatError: The annotations are damaged.
    """
    volumes: dict[tuple[int, int], list[Region]] = {}
    for region in read_regions(annotations):
        if region.volume is not None and region.series in shapes:
            volumes.setdefault((region.series, region.volume), []).append(region)
    if not volumes:
        return None
    fields: dict[str, bytes | EncodedVolume] = {}
    for (series, number), regions in volumes.items():
        for first in range(0, shapes[series][0], depth):
            stop = min(first + depth, shapes[series][0])
            touched = {index for one in regions for index in one.places if first <= index < stop}
            if not touched:
                continue
            begin = min(touched)
            layer = read(series, number, slice(begin, max(touched) + 1))
            for region in regions:
                for index in sorted(touched & region.places.keys()):
                    pixels = layer[index - begin]
                    found = pixels if region.is_fractional else region.table(pixels.dtype)[pixels]
                    if found.any():
                        chosen = codec_for(codec, found.shape, np.dtype(np.uint8))
                        name = mask_field(series, region.number, index, chosen)
                        fields[name] = encode_array(chosen, found.astype(np.uint8))
    rois = []
    content = json.loads(annotations)
    changed = {(one.series, one.number) for regions in volumes.values() for one in regions}
    for roi in content["rois"]:
        place = int(roi["series"]), int(roi["roi"])
        if place in changed:
            roi = {
                **{name: one for name, one in roi.items() if name != "values"},
                "mask": mask_prefix(*place),
            }
        rois.append(roi)
    former = frozenset(volume_field(*place) for place in volumes)
    return ConvertedMasks(annotations=encode_json({**content, "rois": rois}), fields=fields, former=former)


def _joinable(
    regions: Iterable[Region],
    stored: Mapping[tuple[int, int], Mapping[int, Sequence[str]]],
    read: ReadFields,
    shapes: Mapping[int, Extents],
) -> Iterator[_SliceMasks]:
    """Yield the regions whose masks bricks can hold."""
    for region in regions:
        slices = stored.get((region.series, region.number))
        if slices is not None and _is_whole(region, slices, shapes[region.series]):
            one = _SliceMasks(region, {index: found[0] for index, found in slices.items()}, read)
            if one.fits(shapes[region.series]):
                yield one


def _is_whole(region: Region, slices: Mapping[int, Sequence[str]], shape: Extents) -> bool:
    """Return whether the stored masks of a region are all that it covers."""
    if not slices.keys() <= region.places.keys() or max(map(len, slices.values())) > 1:
        return False
    if not 0 <= min(slices) <= max(slices) < shape[0]:
        return False
    for index in region.places.keys() - slices.keys():
        filled = region.fill(index, shape[1:])
        if filled is not None and filled.any():
            return False
    return True


@dataclass(frozen=True, slots=True)
class _SliceMasks:
    """Region whose masks are stored slice by slice."""

    region: Region
    names: Mapping[int, str]
    """Of its members, by the index of the slice."""
    read: ReadFields

    def fits(self, shape: Extents) -> bool:
        """Return whether all masks have the shape of the series, and those of a binary region are 0 and 1."""
        most = 255 if self.region.is_fractional else 1
        masks = (self.pixels(index) for index in self.names)
        return all(
            one.shape == shape[1:] and one.dtype == np.uint8 and int(one.max()) <= most for one in masks
        )

    def pixels(self, index: int) -> Pixels:
        """Return the mask of a slice, ``(rows, columns)``."""
        name = self.names[index]
        return decode_array(name.rpartition(".")[2], self.read([name])[name])


def _encode_combinations(
    regions: Sequence[_SliceMasks], shape: Extents, brick_shape: Sequence[int]
) -> tuple[EncodedVolume, dict[int, list[int]]] | None:
    """Encode the combinations of regions; return the numbers of those that each region is in.

    None if there are more combinations than numbers.
    """
    for dtype in _DTYPES:
        combinations = _Combinations(int(np.iinfo(dtype).max))
        try:
            volume = _encode_slabs(
                lambda index, plane: combinations.draw(regions, index, plane),  # noqa: B023 - used at once
                shape,
                dtype,
                brick_shape,
            )
        except _TooManyError:
            continue
        return volume, combinations.values()
    return None


def _encode_parts(one: _SliceMasks, shape: Extents, brick_shape: Sequence[int]) -> EncodedVolume:
    def draw(index: int, plane: NDArray[Any]) -> None:
        if index in one.names:
            plane[...] = one.pixels(index)

    return _encode_slabs(draw, shape, _DTYPES[0], brick_shape)


def _encode_slabs(
    draw: Callable[[int, NDArray[Any]], None],
    shape: Extents,
    dtype: np.dtype[Any],
    brick_shape: Sequence[int],
) -> EncodedVolume:
    encoder = VolumeEncoder(shape, dtype, brick_shape=brick_shape)
    for first in range(0, shape[0], encoder.slab_num_slices):
        slab = np.zeros((min(encoder.slab_num_slices, shape[0] - first), *shape[1:]), dtype)
        for place, plane in enumerate(slab):
            draw(first + place, plane)
        encoder.add(slab)
    found = encoder.finish()
    # It waits beside other members of its sample, and is small.
    return EncodedVolume(found.stored, found.num_bytes, [found.read_frame()])


class _TooManyError(Exception):
    """There are more combinations than a dtype has numbers; stays in this module."""


class _Combinations:
    """Numbers of the combinations of regions, in the order in which they are found."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._members: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}

    def draw(self, regions: Sequence[_SliceMasks], index: int, plane: NDArray[Any]) -> None:
        """Draw a slice of all regions into a plane of zeros."""
        for one in regions:
            if index not in one.names:
                continue
            is_inside = one.pixels(index) > 0
            former = plane[is_inside]
            table = np.zeros(len(self._members), plane.dtype)
            for number in np.flatnonzero(np.bincount(former, minlength=1)).tolist():
                table[number] = self._number((*self._members[number], one.region.number))
            plane[is_inside] = table[former]

    def _number(self, members: tuple[int, ...]) -> int:
        number = self._numbers.setdefault(members, len(self._members))
        if number == len(self._members):
            if number > self._most:
                raise _TooManyError
            self._members.append(members)
        return number

    def values(self) -> dict[int, list[int]]:
        """Return the numbers of the combinations of each region."""
        found: dict[int, list[int]] = {}
        for number, members in enumerate(self._members):
            for region in members:
                found.setdefault(region, []).append(number)
        return found
