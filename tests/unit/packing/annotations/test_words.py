"""What may be said of a region, whatever a file says; and a deflated bomb."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.errors import SourceError
from shardflow.packing.attachments.annotations.dicom_drawings import read_structure_set
from shardflow.packing.attachments.annotations.targets import AnnotationLimits
from shardflow.packing.attachments.annotations.vocabulary import Vocabulary, allow_unit
from shardflow.packing.attachments.codes import Code, allow_code
from shardflow.reports.lexicon import load_lexicon
from tests.unit.packing.annotations.made_objects import make_structure_set
from tests.unit.packing.annotations.scene import make_target, read

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("label", "name", "side"),
    [
        ("Lung_Left 2", "lung", "L"),
        ("LeftLung", "lung", "L"),
        ("Kidney R", "kidney", "R"),
        ("GTVp1", "gtv", ""),
        ("PTV_70", "ptv", ""),
        ("BODY", "body", ""),
        ("pleural effusion", "pleural effusion", ""),
        ("Vertebra L1", "spine", ""),
        ("Left", "", "L"),
    ],
)
def test_words_of_the_lexicon(label: str, name: str, side: str) -> None:
    term = Vocabulary().term(label)
    assert term is not None
    assert (term.name, term.side) == (name, side)


@pytest.mark.parametrize("label", ["lung of Miller", "Smith", "2020-01-02", "", "Nodule!" * 99, "MRN 1"])
def test_other_words_do_not_leave(label: str) -> None:
    assert Vocabulary().term(label) is None


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_whatever_is_typed_only_names_of_the_lexicon_come_back(label: str) -> None:
    term = Vocabulary().term(f"lung {label}")
    names = {concept.name for concept in load_lexicon().phrases.values()}
    assert term is None or term.name in names | {"gtv", "ctv", "ptv", "itv", "body", "couch", "external", ""}


def test_codes() -> None:
    for scheme, value in (("SCT", "10200004"), ("SRT", "T-62000"), ("DCM", "113000"), ("RADLEX", "RID58")):
        assert allow_code(Code(scheme, value)) == {"scheme": scheme, "value": value}
    for scheme, value in (
        ("99SITE", "10200004"), ("SCT", "10200005"), ("SCT", "12345678"), ("SCT", "Smith"),
        ("DCM", "99113000"), ("SRT", "T-SMITH"), ("", ""),
    ):  # fmt: skip
        assert allow_code(Code(scheme, value)) is None
    assert allow_code(None) is None
    assert (allow_unit("mm"), allow_unit("Smith")) == ("mm", None)


def test_deflated_object_that_inflates_to_too_much(tmp_path: Path) -> None:
    plain = make_structure_set(tmp_path / "rt.dcm", {}).read_bytes()
    start = 128 + 4 + 12 + int.from_bytes(plain[140:144], "little")
    head = plain[:start].replace(b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2.1.99")
    length = int.from_bytes(plain[140:144], "little") + len(head) - start
    head = head[:140] + length.to_bytes(4, "little") + head[144:]
    at = head.index(b"1.2.840.10008.1.2.1.99")
    head = head[: at - 2] + (22).to_bytes(2, "little") + head[at:]
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    bomb = packer.compress(plain[start:] + b"\0" * 40_000_000) + packer.flush()
    path = tmp_path / "bomb.dcm"
    path.write_bytes(head + bomb)
    assert path.stat().st_size < 100_000
    with pytest.raises(SourceError) as caught:
        read(
            partial(read_structure_set, path),
            make_target(),
            limits=AnnotationLimits(max_inflated_bytes=1 << 20),
        )
    assert caught.value.reason == "LIMIT_EXCEEDED"
