"""A small dataset that has everything the page shows: findings, aligned slices, a region, a damaged slice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from shardflow.format.codecs import encode_array
from shardflow.format.slice_codecs import npy
from tests.factories import MadeSample, make_dataset, make_sample

NUM_SLICES = 24
ECG_HZ = 100
RESP_HZ = 25
LEADS = ("I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6")
DOCUMENT = "Discharge summary <b>of nobody</b>.\nThe nodule was seen again.\n"
SIZE = 64
REPORT = "FINDINGS: A 9 mm nodule (series 1, image 6) \U0001f600. No effusion. <img src=x onerror=alert(1)>\n"
"""A character of two halves stands before a finding: places are characters, not halves. Markup is text."""


def make_viewed_sample(number: int, **settings: object) -> MadeSample:
    """Make a sample whose report has two findings; of number 0 the nodule is aligned and has a mask."""
    del settings
    made = make_sample(number, slices=NUM_SLICES, size=(SIZE, SIZE), modality="CT" if number < 6 else "MR")
    nodule, effusion = REPORT.index("nodule"), REPORT.index("effusion")
    entities = [
        _entity("nodule", "present", nodule),
        _entity("effusion", "absent", effusion),
    ]
    if number % 2:
        entities = entities[:1]
    header = {"kind": "findings", "span": [0, len(REPORT)], "header": [0, 9], "exam": 0, "part": ""}
    content = {"format_version": 1, "sections": [header], "entities": entities, "mentions": []}
    fields = dict(made.fields)
    fields["report.txt"] = REPORT.encode()
    fields["report.json"] = json.dumps(content).encode()
    if number == 0:
        place = {
            "entity": 0,
            "series": 0,
            "slices": [4, 5, 6],
            "weights": [0.5, 1.0, 0.5],
            "confidence": 0.97,
            "evidence": [{"rule": "E1", "confidence": 0.98}],
            "region": False,
            "modifiers": [],
        }
        fields["alignment.json"] = json.dumps({"entities": [place], "unaligned": []}).encode()
        mask = np.zeros((SIZE, SIZE), np.uint8)
        mask[20:40, 10:30] = 1
        fields["s000.m000.i0005.b2nd"] = encode_array("b2nd", mask)
        roi = {
            "roi": 0,
            "series": 0,
            "slices": [{"slice": 5, "box_px": [10, 20, 30, 40]}],
            "mask": "s000.m000",
        }
        fields["annotations.json"] = json.dumps({"rois": [roi]}).encode()
        fields |= _recordings() | _documents()
    return dataclasses.replace(made, fields=dict(sorted(fields.items())))


def _recordings() -> dict[str, bytes]:
    """An ECG of 20 s whose first lead is a square, half a millivolt up and down, and an hour of breathing."""
    ecg = np.zeros((len(LEADS), 20 * ECG_HZ), np.int16)
    ecg[0] = np.where(np.arange(20 * ECG_HZ) // ECG_HZ % 2, -100, 100)
    seconds = np.arange(3600 * RESP_HZ) / RESP_HZ
    breathing = np.round(100 * np.sin(seconds * 2 * np.pi / 4)).astype(np.int16)[None]
    breathing[0, 10 * RESP_HZ : 20 * RESP_HZ] = -32768
    channel = {"code": None, "filters": None, "offset": 0.0, "invalid_value": None}
    recordings = [
        {
            "recording": 0,
            "source": "dicom-waveform",
            "arrays": [
                {
                    "field": "w000.g00.npy",
                    "dtype": "int16",
                    "num_samples": ecg.shape[1],
                    "rate_hz": float(ECG_HZ),
                    "start_s": 0.0,
                    "channels": [{**channel, "label": lead, "unit": "mV", "gain": 0.005} for lead in LEADS],
                }
            ],
            "events": [{"start_s": 3.0, "kind": "Artifact"}],
            "flags": [],
        },
        {
            "recording": 1,
            "source": "edf",
            "arrays": [
                {
                    "field": "w001.g00.npy",
                    "dtype": "int16",
                    "num_samples": breathing.shape[1],
                    "rate_hz": float(RESP_HZ),
                    "start_s": 0.0,
                    "channels": [
                        {
                            **channel,
                            "label": "Resp",
                            "unit": "L/min",
                            "gain": -0.5,
                            "offset": 1.0,
                            "invalid_value": -32768,
                        }
                    ],
                }
            ],
            "events": [],
            "flags": ["truncated"],
        },
    ]
    return {
        "waveforms.json": json.dumps({"format_version": 1, "recordings": recordings}).encode(),
        "w000.g00.npy": npy.encode(ecg),
        "w001.g00.npy": npy.encode(breathing),
    }


def _documents() -> dict[str, bytes]:
    facts = [{"kind": "condition", "document": 0}]
    records = {"format_version": 1, "documents": [{"document": 0, "kind": "summary"}], "facts": facts}
    return {
        "records.json": json.dumps(records).encode(),
        "document.000.txt": DOCUMENT.encode(),
        "document.001.txt": b"A second one.",
    }


def make_viewed_dataset(folder: Path) -> str:
    """Write the dataset: eight samples in ``train``, two in ``val``."""
    return make_dataset(folder, splits={"train": 8, "val": 2}, make=make_viewed_sample)


def _entity(concept: str, assertion: str, start: int) -> dict[str, object]:
    return {
        "span": [start, start + len(concept)],
        "concept": concept,
        "assertion": assertion,
        "anatomy": None,
        "laterality": "",
        "size_mm": [],
        "severity": "",
        "source": "lexicon",
    }
