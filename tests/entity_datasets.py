"""Tiny datasets whose studies have reports that were read and aligned: what an entity view is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardflow.format import Dataset
from shardflow.format.codecs import encode_array
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, slice_field
from shardflow.reports import ReportReader
from shardflow.seeds import derive
from tests import factories

__all__ = ["CONFIDENCES", "make_entity_dataset", "study_fields"]

_SENTENCES = (
    "A 9 mm nodule in the right upper lobe.",
    "Possible pneumonia at the left base.",
    "Small pleural effusion.",
    "Mild cardiomegaly \u2013 unchanged.",
)
CONFIDENCES = (0.7, 0.95, 0.71, 0.3, 0.7000000000000001)


def study_fields(number: int, *, num_slices: int, seed: int = 0) -> dict[str, bytes]:
    """Return report, its content and its alignment for a study of two series of ``num_slices`` each.

    Every study has a denied finding and some that are there or may be; how surely they are aligned goes
    through `CONFIDENCES`, 0.7 among them.
    """
    chosen = [derive(seed, "test-entity", number, place) % len(_SENTENCES) for place in range(1 + number % 3)]
    text = "FINDINGS: " + " ".join(_SENTENCES[place] for place in chosen) + " No pneumothorax.\n"
    content = ReportReader().read(text).to_json()
    for entity in content["entities"]:
        del entity["probability"]  # as an earlier reader wrote it: the confidences alone decide
    aligned: list[dict[str, Any]] = []
    unaligned: list[dict[str, Any]] = []
    for place, entity in enumerate(content["entities"]):
        if entity["assertion"] not in {"present", "uncertain"}:
            unaligned.append({"entity": place, "reason": "NOT_PRESENT"})
            continue
        for series in range(1 + (number + place) % 2):
            first = derive(seed, "test-slices", number, place, series) % num_slices
            slices = sorted({first, (first + 1) % num_slices, (first + 2) % num_slices})
            weights = [1.0 if index == first else 0.5 for index in slices]
            aligned.append(
                {
                    "entity": place,
                    "series": series,
                    "slices": slices,
                    "weights": weights,
                    "confidence": CONFIDENCES[(number + place + series) % len(CONFIDENCES)],
                    "evidence": [{"rule": "E1", "confidence": 0.9}],
                }
            )
    alignment = {"format_version": 1, "threshold": 0.7, "entities": aligned, "unaligned": unaligned}
    return {
        "alignment.json": json.dumps(alignment).encode(),
        "report.json": json.dumps({"format_version": 1, **content}).encode(),
        REPORT_FIELD: text.encode(),
    }


def _with_entities(made: factories.MadeSample, number: int, num_slices: int) -> factories.MadeSample:
    """Give a sample a second series, whose pixel [0, 0] is 10,000 above the first one's, and an alignment."""
    study = json.loads(made.fields[STUDY_FIELD])
    fields = dict(made.fields)
    for index in range(num_slices):
        pixels = np.full((12, 20), index, np.int16)
        pixels[0, 0] = 10_000 + number * 16 + index
        fields[slice_field(1, index, "b2nd")] = encode_array("b2nd", pixels)
    second = {**study["series"][0], "rows": 12, "columns": 20, "modality": "MR", "unit": "raw"}
    study["series"].append({**second, "display_range": [0.0, 50.0]})
    fields[STUDY_FIELD] = json.dumps(study, sort_keys=True, separators=(",", ":")).encode()
    fields |= study_fields(number, num_slices=num_slices)
    facts = replace(made.facts, num_series=2, num_slices=2 * num_slices, text_bytes=len(fields[REPORT_FIELD]))
    return replace(made, fields=dict(sorted(fields.items())), facts=facts)


def make_entity_dataset(
    path: Path,
    *,
    splits: Mapping[str, int] | None = None,
    samples_per_shard: int = 4,
    num_slices: int = 6,
    without: Sequence[int] = (3,),
    facts: bool = False,
) -> Dataset:
    """Write a dataset of studies with entities.

    Args:
        path: Folder to create it in.
        splits: Numbers of studies by split.
        samples_per_shard: The last shard of a split may hold fewer.
        num_slices: Of each of the two series.
        without: Numbers of studies that have no alignment.
        facts: Whether to write the series table, which fields of images need.
    """

    def made(number: int, **settings: Any) -> factories.MadeSample:
        sample = factories.make_sample(number, **settings)
        return sample if number in without else _with_entities(sample, number, num_slices)

    return Dataset.open(
        factories.make_dataset(
            path,
            splits=splits or {"train": 11, "val": 3},
            samples_per_shard=samples_per_shard,
            slices=num_slices,
            make=made,
            facts=facts,
        )
    )
