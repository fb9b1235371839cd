"""Where people are looked for in a header: the lists are those of the registry."""

from __future__ import annotations

import pytest
from pydicom.datadict import DicomDictionary

from shardflow.packing.deid.known_values import IDENTIFYING_KEYWORDS
from shardflow.packing.sources.dicom.dictionary import KNOWN, SEQUENCES

pytestmark = pytest.mark.fast

WITHOUT_PEOPLE = frozenset({0x52009229, 0x52009230, 0x00880200, 0x54000100, 0x00620002, 0x30060039})
"""Functional groups, icons, waveforms, segments, contours: one item a frame, or pixels, and nobody's name."""


def test_every_sequence_of_the_registry_is_looked_into_but_those_that_are_named() -> None:
    registry = {tag for tag, (representation, *_) in DicomDictionary.items() if representation == "SQ"}
    assert registry - WITHOUT_PEOPLE == SEQUENCES
    assert registry > WITHOUT_PEOPLE


def test_every_person_name_of_the_registry_is_looked_for() -> None:
    names = {keyword for representation, *_, keyword in DicomDictionary.values() if representation == "PN"}
    assert names - {""} <= set(IDENTIFYING_KEYWORDS)


def test_what_is_looked_for_needs_no_dictionary() -> None:
    assert set(IDENTIFYING_KEYWORDS) <= KNOWN.keys()
