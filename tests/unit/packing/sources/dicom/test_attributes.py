"""Attributes by keyword: typed, tolerant, and judged elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydicom.datadict import dictionary_VR, tag_for_keyword
from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from shardflow.errors import ConfigError
from shardflow.packing.deid.allowlist import KEYWORDS, allow_patient, allow_technical
from shardflow.packing.deid.known_values import IDENTIFYING_KEYWORDS
from shardflow.packing.deid.pixel_rules import load_rules
from shardflow.packing.sources.dicom.attributes import read_attributes
from shardflow.packing.sources.dicom.dictionary import KNOWN, find_attribute
from tests.unit.packing.sources.dicom.factory import make_file

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian])
def test_values_are_typed_by_their_representation(tmp_path: Path, syntax: str) -> None:
    path = make_file(
        tmp_path / "a.dcm",
        syntax=syntax,
        KVP="120.5",
        ExposureTime="17",
        CTDIvol=1.25,
        PatientAge="045Y",
        PatientSex="",
        Manufacturer="ACME",
        ImageType=["ORIGINAL", "PRIMARY"],
    )
    wanted = (
        "KVP",
        "ExposureTime",
        "CTDIvol",
        "PatientAge",
        "PatientSex",
        "Manufacturer",
        "ImageType",
        "Rows",
        "SAR",
    )
    assert read_attributes(path, wanted) == {
        "KVP": (120.5,),
        "ExposureTime": (17,),
        "CTDIvol": (1.25,),
        "PatientAge": ("045Y",),
        "Manufacturer": ("ACME",),
        "ImageType": ("ORIGINAL", "PRIMARY"),
        "Rows": (3,),
    }


def test_known_keywords_are_those_of_the_registry() -> None:
    for keyword, (tag, representation) in KNOWN.items():
        assert tag_for_keyword(keyword) == tag
        assert dictionary_VR(tag).split(" or ")[0] == representation


def test_packing_needs_no_registry_for_what_it_reads() -> None:
    """Else every process of every job would load pydicom."""
    asked = {*KEYWORDS, *IDENTIFYING_KEYWORDS, *load_rules().keywords, "StudyDate"}
    assert asked <= KNOWN.keys()
    assert find_attribute("WindowCenterWidthExplanation") == (0x00281055, "LO")
    assert find_attribute("NoSuchThing") is None


def test_what_does_not_parse_is_left_out(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a.dcm", KVP="120.5")
    path.write_bytes(path.read_bytes().replace(b"DS\x06\x00120.5 ", b"DS\x06\x00SMITH "))
    assert read_attributes(path, ("KVP",)) == {}


@pytest.mark.parametrize("keyword", ["NoSuchThing", "ModalityLUTSequence", "PixelData"])
def test_keywords_must_name_values(tmp_path: Path, keyword: str) -> None:
    with pytest.raises(ConfigError, match="must name DICOM values"):
        read_attributes(make_file(tmp_path / "a.dcm"), (keyword,))


def test_every_allowed_keyword_can_be_read(tmp_path: Path) -> None:
    attributes = read_attributes(
        make_file(tmp_path / "a.dcm", BodyPartExamined="chest", PatientAge="101Y"), KEYWORDS
    )
    assert allow_technical(attributes) == {
        "body_part_examined": "CHEST",
        "image_type": ["ORIGINAL", "PRIMARY", "AXIAL"],
        "modality": "CT",
        "photometric_interpretation": "MONOCHROME2",
        "pixel_spacing": [0.5, 0.75],
        "slice_thickness": 2.5,
    }
    assert allow_patient(attributes) == {"age_years": 90, "sex": None}
