"""P5 for the sources: sentinels in every element and name, and not one in what is said."""

from __future__ import annotations

import json
import logging
import random
import struct
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydicom.datadict import DicomDictionary
from pydicom.dataset import Dataset
from pydicom.uid import MPEG2MPML, DeflatedExplicitVRLittleEndian, ImplicitVRLittleEndian

from shardflow.errors import ShardflowError
from shardflow.format.reasons import PHASE_NAMES
from shardflow.packing.deid.allowlist import KEYWORDS, allow_patient, allow_technical
from shardflow.packing.sources.dicom.attributes import read_attributes
from shardflow.packing.sources.dicom.dictionary import ENCAPSULATED_SYNTAXES
from shardflow.packing.sources.dicom.elements import HeaderLimits, read_elements
from shardflow.packing.sources.dicom.headers import _WANTED, BrokenInstance, InstanceHeader, read_header
from shardflow.packing.sources.dicom.pixels import (
    DisplayRange,
    check_copies,
    form_of,
    iter_slices,
)
from shardflow.packing.sources.dicom.planes import DIFFUSION_TAGS
from shardflow.packing.sources.dicom.stacks import build_studies
from shardflow.packing.sources.dicom.values import third_party_silence
from shardflow.packing.sources.placement import discover
from tests.stacks import iter_stack
from tests.unit.packing.sources.dicom.factory import make_dataset, write

WORD, DIGITS = "ZQXJSENTINEL", "7771237"
TEXT_VRS = {"AE", "LO", "LT", "PN", "SH", "ST", "UC", "UT", "UR"}
# Without these no file would get past the door; they hold codes, not identifiers.
NEEDED = {"ImageType", "Modality", "PhotometricInterpretation", "SOPClassUID", "SpecificCharacterSet"}
MESSAGE_SECRETS = (WORD, DIGITS)


def _sentinels(*, in_numbers: bool = False) -> Dataset:
    """An image with a sentinel in every standard text and UID element, and in private and nested ones."""
    dataset = make_dataset()
    for tag, (representation, multiplicity, _, _, keyword) in DicomDictionary.items():
        if not 0x00080000 <= tag < 0x7FE00000 or keyword in NEEDED or not keyword:
            continue
        if representation in TEXT_VRS:
            dataset.add_new(tag, representation, WORD)
        elif representation == "UI" and multiplicity.startswith("1"):
            dataset.add_new(tag, "UI", f"1.2.{DIGITS}.{tag}")
        elif in_numbers and representation in ("DS", "IS", "AS", "DA", "TM", "CS", "DT"):
            dataset.add_new(tag, "LO", WORD)  # a text where a number is expected
    nested = Dataset()
    nested.PatientName = WORD
    dataset.ReferencedStudySequence = [nested]
    dataset.private_block(0x0011, WORD, create=True).add_new(1, "LO", WORD)
    dataset.PatientID = WORD
    return dataset


def _broken_files(folder: Path) -> Iterator[Path]:
    """Files that fail at every step there is."""
    whole = write(folder / "whole.dcm", _sentinels())
    yield whole
    yield write(folder / "numbers.dcm", _sentinels(in_numbers=True))
    yield write(folder / "implicit.dcm", _sentinels(), syntax=ImplicitVRLittleEndian)
    yield write(folder / "deflated.dcm", _sentinels(), syntax=DeflatedExplicitVRLittleEndian)
    data = whole.read_bytes()
    for number, end in enumerate(np.linspace(100, len(data) - 1, 40).astype(int)):
        (folder / f"cut-{number}").write_bytes(data[:end])
        yield folder / f"cut-{number}"
    rng = random.Random(0)
    for number in range(60):
        mutated = bytearray(data)
        for _ in range(rng.choice((1, 5, 50))):
            mutated[rng.randrange(132, len(mutated))] = rng.randrange(256)
        (folder / f"mutated-{number}").write_bytes(mutated)
        yield folder / f"mutated-{number}"
    deflated = (folder / "deflated.dcm").read_bytes()
    (folder / "bad-deflate").write_bytes(deflated[:-200] + b"\xff" * 100)
    yield folder / "bad-deflate"
    changes: list[dict[str, Any]] = [
        *(
            {keyword: ""}
            for keyword in ("PatientID", "StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
        ),
        *({"Rows": 0}, {"BitsAllocated": 12}, {"NumberOfFrames": 9}, {"Rows": 65535, "Columns": 65535}),
        *({"PhotometricInterpretation": WORD}, {"PhotometricInterpretation": "PALETTE COLOR"}),
        {"PixelPaddingValue": 17},
    ]
    for number, change in enumerate(changes):
        dataset = _sentinels()
        for keyword, value in change.items():
            setattr(dataset, keyword, value)
        yield write(folder / f"changed-{number}.dcm", dataset)
    for syntax in (*sorted(ENCAPSULATED_SYNTAXES), str(MPEG2MPML)):
        jpeg = b"\xff\xd8\xff\xc0\x00\x0b\x10\x00\x03\x00\x04\x01\x01\x11\x00" + WORD.encode() * 9
        size = struct.pack(">IIII", 4, 3, 0, 0)
        jpeg2000 = b"\xff\x4f\xff\x51\x00\x29\x00\x00" + size + b"\0" * 16 + b"\x00\x01\x0f\x01\x01"
        rle = struct.pack("<16I", 2, 64, 70, *[0] * 13)
        for number, start in enumerate((b"", jpeg, jpeg2000, rle)):
            frame = start + WORD.encode() * 9
            yield write(folder / f"{syntax}-{number}.dcm", _sentinels(), syntax=syntax, frames=[frame])


class Said:
    """Everything that a person or a log could get to see."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.reasons: set[str] = set()

    def add(self, thing: object) -> None:
        self.parts += [str(thing), repr(thing)]

    def error(self, error: ShardflowError) -> None:
        self.add(error)
        self.parts.append("".join(traceback.format_exception(error)))
        self.reasons.add(getattr(error, "reason", type(error).__name__))

    def check(self) -> None:
        for part in self.parts:
            for secret in MESSAGE_SECRETS:
                assert secret not in part, part


def _exercise(path: Path, said: Said) -> None:
    try:
        said.add(
            read_elements(path, _WANTED, HeaderLimits(max_header_bytes=1 << 20, max_inflated_bytes=1 << 20))
        )
        header = read_header(path)
        said.add(header)
        if isinstance(header, BrokenInstance):
            said.parts.append(header.detail)
            said.reasons.add(header.reason)
            return
        said.add(header.planes)
        for decoded in iter_slices(path, header):
            said.add(decoded)
        copy = InstanceHeader(
            **{name: getattr(header, name) for name in header.__slots__} | {"file_index": 7}
        )
        grouping = build_studies([header, copy])
        said.add(grouping)
        for study in grouping.studies:
            said.add(study)
            check_copies(study, lambda _: path)
            for stack in study.stacks:
                form = form_of([header])
                display = DisplayRange(stack, form)
                for decoded in iter_stack(stack, lambda _: path, form=form):
                    display.add(decoded)
                said.parts += [*stack.flags, repr(display.result()), repr(stack.geometry), repr(stack)]
    except ShardflowError as error:
        said.error(error)
    try:
        attributes = read_attributes(path, KEYWORDS)
        said.parts.append(json.dumps(allow_technical(attributes)) + json.dumps(allow_patient(attributes)))
    except ShardflowError as error:
        said.error(error)


def test_no_sentinel_in_anything_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"{WORD}-{DIGITS}"
    files = list(_broken_files(folder))
    caplog.clear()
    said = Said()
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for path in files:
            _exercise(path, said)
        for found in discover([folder]):
            said.add(found)
            _exercise(found.path([folder]), said)
    said.parts += [str(warning.message) for warning in caught] + [caplog.text, *capfd.readouterr()]
    said.check()
    assert said.reasons >= {
        "DECODE_FAILED",
        "HEADER_UNREADABLE",
        "INVALID_IMAGE_DESCRIPTION",
        "LIMIT_EXCEEDED",
        "MISSING_IDENTIFIER",
        "NO_PIXEL_DATA",
        "PIXEL_DATA_TRUNCATED",
        "UNSUPPORTED_SOP_CLASS",
        "UNSUPPORTED_TRANSFER_SYNTAX",
    }


def test_the_check_itself_would_notice() -> None:
    said = Said()
    said.error(ShardflowError(f"Invalid value for VR UI: '1.2.{DIGITS}.4'"))
    with pytest.raises(AssertionError):
        said.check()


def test_headers_keep_no_text_that_is_not_needed(tmp_path: Path) -> None:
    """Of all text elements only identifiers, which link inputs and people, and what tells slices apart."""
    header = read_header(write(tmp_path / "a.dcm", _sentinels()))
    assert isinstance(header, InstanceHeader)
    kept = {name for name in header.__slots__ if WORD in repr(getattr(header, name))}
    of_people = {"patient_name", "patient_id_issuer", "other_patient_ids"}
    assert kept == {"patient_id", "accession_number", *of_people}
    phase = dict(zip(PHASE_NAMES, header.planes[0].phase, strict=True))
    assert {name for name, value in phase.items() if WORD in value} == {"sequence_name", "convolution_kernel"}
    assert len([tag for tag in _WANTED if not tag >> 16 & 1]) < 86
    # Of private elements only those that tell b-values apart, and what says whose they are.
    assert {tag for tag in _WANTED if tag >> 16 & 1} <= DIFFUSION_TAGS


def test_third_party_silence_is_whole_and_ends() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pydicom")
    logger.addHandler(handler)
    try:
        with third_party_silence():
            logging.getLogger("pydicom.deep.inside").critical("inside")
            warnings.warn("inside", stacklevel=1)
        logging.getLogger("pydicom.deep.inside").critical("outside")
        with pytest.warns(UserWarning, match="outside"):
            warnings.warn("outside", stacklevel=1)
    finally:
        logger.removeHandler(handler)
    assert messages == ["outside"]
