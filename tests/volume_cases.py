"""Tiny studies with volumes of known voxels and geometry, and an independent reader of what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardflow.format import Dataset
from shardflow.format.codecs import encode_array
from shardflow.format.keys import STUDY_FIELD, slice_field, volume_field
from shardflow.format.samples import SampleFacts
from shardflow.format.volumes.bricks import EncodedVolume, StoredVolume
from shardflow.format.volumes.encoder import BRICK_SHAPE, VolumeEncoder
from tests.factories import MadeSample, make_dataset, sample_key

__all__ = ["VolumeSeries", "affine_of", "encode_volume", "make_volumes", "stored_volume", "volume_sample"]


@dataclass(frozen=True, kw_only=True)
class VolumeSeries:
    """One series of a generated study."""

    voxels: NDArray[Any]
    """``(slices, rows, columns)``."""
    affine: NDArray[np.float64] = field(default_factory=lambda: np.full((4, 4), np.nan))
    """``(4, 4)``: maps ``(slice, row, column, 1)`` to LPS millimeters; NaN where that is unknown."""
    modality: str = "CT"
    kind: str = "volume"
    unit: str = "HU"
    flags: Sequence[str] = ()
    brick_shape: tuple[int, int, int] | None = None
    """Stored in bricks of this size; None stores slices."""
    extra: Mapping[str, Any] = field(default_factory=dict)


def affine_of(
    spacing: ArrayLike, *, turn: float = 0.0, tilt: float = 0.0, flip: bool = False
) -> NDArray[np.float64]:
    """Return an affine of (slice, row, column): axial, turned by an angle about each axis, slices sheared."""
    cosine, sine = np.cos(turn), np.sin(turn)
    turns = [
        np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]]),
        np.array([[cosine, 0, sine], [0, 1, 0], [-sine, 0, cosine]]),
        np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]]),
    ]
    axes = np.array(
        [[0, 0, -1 if flip else 1], [0, 1, 0], [1, 0, 0]], float
    ).T  # slice up, row to P, column to L
    axes = turns[0] @ turns[1] @ turns[2] @ axes
    axes[:, 0] += np.tan(tilt) * axes[:, 1]
    found = np.eye(4)
    found[:3, :3] = axes * np.asarray(spacing, float)
    found[:3, 3] = -31.25, 17.5, 4.0
    return found


def encode_volume(array: NDArray[Any], *, brick_shape: Sequence[int] = BRICK_SHAPE) -> EncodedVolume:
    """Encode a volume ``(D, H, W)`` slab by slab."""
    encoder = VolumeEncoder(array.shape, array.dtype, brick_shape=brick_shape)
    for first in range(0, array.shape[0], encoder.slab_num_slices):
        encoder.add(array[first : first + encoder.slab_num_slices])
    return encoder.finish()


def volume_sample(
    number: int, series: Sequence[VolumeSeries], extra: Mapping[str, bytes] | None = None
) -> MadeSample:
    """Return a study of some series; pass a function that makes it to `tests.factories.make_dataset`."""
    key = sample_key(number)
    fields: dict[str, bytes] = dict(extra or {})
    described = []
    volumes: dict[str, StoredVolume] = {}
    for place, one in enumerate(series):
        if one.brick_shape is not None:
            encoded = encode_volume(one.voxels, brick_shape=one.brick_shape)
            fields[volume_field(place)], volumes[volume_field(place)] = encoded.read_frame(), encoded.stored
        for index, plane in enumerate(one.voxels if one.brick_shape is None else ()):
            fields[slice_field(place, index, "b2nd")] = encode_array("b2nd", np.ascontiguousarray(plane))
        affine = None
        if np.isfinite(one.affine).all():
            affine = one.affine[:, [2, 1, 0, 3]].tolist()
        steps = (
            [None] * 3 if np.isnan(one.affine).any() else np.linalg.norm(one.affine[:3, :3], axis=0).tolist()
        )
        described.append(
            {
                "modality": one.modality,
                "kind": one.kind,
                "num_slices": one.voxels.shape[0],
                "rows": one.voxels.shape[1],
                "columns": one.voxels.shape[2],
                "samples_per_pixel": 1,
                "dtype": one.voxels.dtype.name,
                "codec": "b2nd" if one.brick_shape is None else "bricks",
                "unit": one.unit,
                "display_range": [-100.0 + place, 300.0 + number],
                "series_number": place + 1,
                "instance_numbers": list(range(1, len(one.voxels) + 1)),
                "stack_index": 0,
                "affine_lps": affine,
                "pixel_spacing_mm": None if affine is None else steps[1:],
                "slice_spacing_mm": steps[0],
                "flags": list(one.flags),
                "technical": {},
                **one.extra,
            }
        )
    study = {"format_version": 1, "sample_key": key, "series": described}
    fields[STUDY_FIELD] = json.dumps(study, sort_keys=True).encode()
    shape = series[0].voxels.shape if series else (0, 0, 0)
    facts = SampleFacts(
        text_bytes=0,
        num_series=len(series),
        num_slices=sum(len(one.voxels) for one in series),
        rows=shape[1],
        columns=shape[2],
        modality=series[0].modality if series else "",
    )
    return MadeSample(key=key, fields=dict(sorted(fields.items())), facts=facts, volumes=volumes)


def make_volumes(
    folder: Path,
    series_of: Callable[[int], Sequence[VolumeSeries]],
    *,
    extra_of: Callable[[int], Mapping[str, bytes]] = lambda _: {},
    num_samples: int = 8,
    samples_per_shard: int = 3,
) -> Dataset:
    """Write a dataset of studies, with its series table."""

    def make(number: int, **_: Any) -> MadeSample:
        return volume_sample(number, series_of(number), extra_of(number))

    return Dataset.open(
        make_dataset(
            folder, num_samples=num_samples, samples_per_shard=samples_per_shard, make=make, facts=True
        )
    )


def stored_volume(dataset: Dataset, row: int, series: int = 0) -> NDArray[Any]:
    """Return a whole stored volume, read by plain blosc2."""
    path, fields = dataset.sample_fields(row)
    planes: list[NDArray[Any]] = []
    with (Path(dataset.store.url) / path).open("rb") as shard:
        for one in sorted(fields, key=lambda one: one.name):
            if one.name.startswith(f"s{series:03d}.") and one.name.endswith(".b2nd"):
                shard.seek(one.offset)
                planes.append(blosc2.ndarray_from_cframe(shard.read(one.num_bytes))[...])
    return np.stack(planes) if planes[0].ndim == 2 else planes[0]
