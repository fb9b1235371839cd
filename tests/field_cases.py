"""Tiny studies of several series for tests of fields: radiograph pairs, CT with a localizer, single views."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.format import Dataset
from shardflow.format.codecs import encode_array
from shardflow.format.facts.making import attach_facts
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, slice_field
from shardflow.format.samples import SampleFacts
from tests.factories import MadeSample, make_dataset, sample_key

__all__ = ["CaseSeries", "case_series", "make_case", "make_case_dataset", "pixels_of"]


@dataclass(frozen=True, kw_only=True)
class CaseSeries:
    """One series of a generated study."""

    modality: str
    kind: str
    shape: tuple[int, ...]
    """``(slices, rows, columns)``, with color ``(slices, rows, columns, 3)``."""
    dtype: str = "int16"
    series_number: int | None = 1
    unit: str = "raw"
    technical: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Mapping[str, Any]] = ()


def case_series(number: int) -> list[CaseSeries]:
    """Return the series of study ``number``, in the order in which they are stored.

    By ``number % 4``: a lateral and a frontal radiograph of two sizes, the frontal one acquired first; CT of
    two volumes and a localizer; a frontal radiograph of 8 bits, without a report; a series of two views.
    """
    view = {"view_position": "PA"}, {"view_position": "LL"}
    match number % 4:
        case 0:
            return [
                CaseSeries(
                    modality="DX",
                    kind="images",
                    shape=(1, 20, 12),
                    dtype="uint16",
                    series_number=2,
                    technical=view[1],
                ),
                CaseSeries(
                    modality="DX", kind="images", shape=(1, 24, 16), dtype="uint16", technical=view[0]
                ),
            ]
        case 1:
            return [
                CaseSeries(
                    modality="CT", kind="volume", shape=(6 + number % 5, 16, 16), unit="HU", series_number=3
                ),
                CaseSeries(
                    modality="CT",
                    kind="volume",
                    shape=(5, 12, 16),
                    unit="HU",
                    series_number=2,
                    technical={"has_contrast": True},
                ),
                CaseSeries(modality="CT", kind="localizer", shape=(1, 30, 30), unit="HU"),
            ]
        case 2:
            return [
                CaseSeries(modality="CR", kind="images", shape=(1, 18, 18), dtype="uint8", technical=view[0])
            ]
        case _:
            return [
                CaseSeries(
                    modality="CR",
                    kind="images",
                    shape=(2, 22, 14),
                    dtype="uint16",
                    technical=view[0],
                    images=view,
                )
            ]


def pixels_of(number: int, series: int) -> NDArray[Any]:
    """Return the pixels of a series of study ``number``, of the shape of its `CaseSeries`."""
    case = case_series(number)[series]
    generator = np.random.Generator(np.random.PCG64([number, series]))
    limits = np.iinfo(case.dtype)
    low, high = max(limits.min, -1000), min(limits.max, 60_000)
    return generator.integers(low, high, case.shape, endpoint=True).astype(case.dtype)


def make_case(number: int, *, extra: Mapping[str, bytes] | None = None, **_: Any) -> MadeSample:
    """Generate study ``number``; pass it to `tests.factories.make_dataset`."""
    key, cases = sample_key(number), case_series(number)
    fields: dict[str, bytes] = {}
    if number % 4 != 2:
        fields[REPORT_FIELD] = f"report of study {number}: größer".encode()
    described = []
    for place, case in enumerate(cases):
        pixels = pixels_of(number, place)
        for index, one in enumerate(pixels):
            fields[slice_field(place, index, "b2nd")] = encode_array("b2nd", one)
        described.append(
            {
                "modality": case.modality,
                "kind": case.kind,
                "num_slices": case.shape[0],
                "rows": case.shape[1],
                "columns": case.shape[2],
                "samples_per_pixel": case.shape[3] if len(case.shape) > 3 else 1,
                "dtype": case.dtype,
                "codec": "b2nd",
                "unit": case.unit,
                "display_range": [-10.0 * place, 100.0 + number],
                "series_number": case.series_number,
                "instance_numbers": list(range(1, case.shape[0] + 1)),
                "stack_index": 0,
                "flags": ["single_slice"] if case.shape[0] == 1 else [],
                "technical": dict(case.technical),
                **({"images": [dict(image) for image in case.images]} if case.images else {}),
            }
        )
    fields.update(extra or {})
    study = {"format_version": 1, "sample_key": key, "series": described}
    fields[STUDY_FIELD] = json.dumps(study, sort_keys=True).encode()
    primary = cases[0]
    facts = SampleFacts(
        text_bytes=len(fields.get(REPORT_FIELD, b"")),
        num_series=len(cases),
        num_slices=sum(case.shape[0] for case in cases),
        rows=primary.shape[1],
        columns=primary.shape[2],
        modality=primary.modality,
    )
    return MadeSample(key=key, fields=dict(sorted(fields.items())), facts=facts)


def make_case_dataset(folder: Path, *, num_samples: int = 14, samples_per_shard: int = 4) -> Dataset:
    """Write a dataset of generated studies, with its series table."""
    dataset = Dataset.open(
        make_dataset(folder, num_samples=num_samples, samples_per_shard=samples_per_shard, make=make_case)
    )
    attach_facts(dataset)
    return dataset
