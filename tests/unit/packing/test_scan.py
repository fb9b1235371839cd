"""Header pass: files of no known kind keep the reason for which they are no images."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.packing.scan import AttachmentFinder
from shardflow.packing.sources.dicom.elements import HeaderLimits

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "head",
    [
        b"\x30\x82\x0a\x0d\x02\x01\x03\x30\x82\x09\xd3",  # a PKCS12 file whose length holds a line end
        b"\x1f\x8bqB\x81K\r\xa6N",
    ],
)
def test_a_recognizer_that_fails_does_not_know_the_file(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "certificate.p12").write_bytes(head)
    finder = AttachmentFinder(limits=HeaderLimits(), max_bytes=1 << 20)
    assert finder.find(tmp_path / "certificate.p12") is None
