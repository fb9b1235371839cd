"""Hostile XML and JSON: entities, depth, size, encodings, cut files; all end in a reason, quoting nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.bounded import (
    DocumentLimits,
    iter_json_lines,
    parse_json,
    parse_xml,
    read_bounded,
    read_json_line,
    recognise_document,
)

pytestmark = pytest.mark.fast

SMALL = DocumentLimits(max_bytes=4096, max_line_bytes=512, max_depth=8, max_nodes=64)

LAUGHS = b"""<?xml version="1.0"?>
<!DOCTYPE lolz [<!ENTITY a "Okafor">
<!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;">]>
<ClinicalDocument xmlns="urn:hl7-org:v3"><title>&c;</title></ClinicalDocument>"""
OUTSIDE = b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a>Okafor</a>'


@pytest.mark.parametrize(
    "data",
    [
        LAUGHS,
        OUTSIDE,
        b"<!DOCTYPE a><a>Okafor</a>",
        # No look for letters finds these.
        '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a><a>Okafor</a>'.encode("utf-16"),
        b'<?xml version="1.0" encoding="utf-8"?>\n<!-- x --><!DOCTYPE a []><a/>',
        b"<a>&okafor;</a>",
        b"<a>Okafor",
        b'<?xml version="1.0" encoding="klingon"?><a>Okafor</a>',
        b"<a>Okafor\xff</a>",
        b"",
        b"\x00" * 64,
    ],
)
def test_no_entities_no_document_types_no_broken_xml(data: bytes) -> None:
    with pytest.raises(SourceError) as raised:
        parse_xml(data)
    assert raised.value.reason == Reason.REPORT_UNREADABLE
    assert "kafor" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


@pytest.mark.parametrize(
    "data",
    [b"<a>" * 9 + b"</a>" * 9, b"<a>" + b"<b/>" * 64 + b"</a>", b"<a>" * 100_000],
)
def test_depth_and_number_of_elements_are_bounded(data: bytes) -> None:
    with pytest.raises(SourceError) as raised:
        parse_xml(data, SMALL)
    assert raised.value.reason == Reason.LIMIT_EXCEEDED


def test_elements_up_to_the_bounds_are_read() -> None:
    assert len(list(parse_xml(b"<a>" * 8 + b"</a>" * 8, SMALL).walk())) == 8
    assert len(list(parse_xml(b"<a>" + b"<b/>" * 63 + b"</a>", SMALL).walk())) == 64


def test_xml_names_lose_their_namespace_and_keep_their_text() -> None:
    root = parse_xml('<h:a xmlns:h="urn:x" h:t="1" u=" 2 ">\u00e4<h:b>c</h:b>d</h:a>'.encode("utf-16"))
    assert (root.name, root.get("t"), root.get("u"), root.text()) == ("a", "1", "2", "\u00e4cd")
    found = root.find("b")
    assert found is not None
    assert found.text() == "c"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 9 + b"]" * 9, Reason.LIMIT_EXCEEDED),
        (b"[" * 1_000_000, Reason.LIMIT_EXCEEDED),
        (b'{"a":' * 9 + b"1" + b"}" * 9, Reason.LIMIT_EXCEEDED),
        (b'{"a": "\xff"}', Reason.REPORT_UNREADABLE),
        (b'{"a": NaN}', Reason.REPORT_UNREADABLE),
        (b'{"Okafor": ', Reason.REPORT_UNREADABLE),
        (b"1" * 5000, Reason.REPORT_UNREADABLE),
        ('{"a": 1}'.encode("utf-16"), Reason.REPORT_UNREADABLE),
    ],
)
def test_json_is_bounded_and_strict(data: bytes, reason: Reason) -> None:
    with pytest.raises(SourceError) as raised:
        parse_json(data, SMALL)
    assert raised.value.reason == reason
    assert "kafor" not in str(raised.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(alphabet='[]{}"\\ab\u00e4'),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[{"\\'), inner, max_size=3)
        ),
        max_leaves=12,
    )
)
def test_brackets_in_strings_are_no_levels(value: Any) -> None:
    data = json.dumps(value, ensure_ascii=False).encode()

    def depth(one: Any) -> int:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    levels = depth(value)
    assert parse_json(data, DocumentLimits(max_depth=max(levels, 1))) == value
    if levels > 1:
        with pytest.raises(SourceError):
            parse_json(data, DocumentLimits(max_depth=levels - 1))


def test_size_is_checked_before_anything_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 4097)
    with pytest.raises(SourceError) as raised:
        read_bounded(tmp_path / "large", SMALL)
    assert raised.value.reason == Reason.LIMIT_EXCEEDED
    (tmp_path / "fits").write_bytes(b"x" * 4096)
    assert len(read_bounded(tmp_path / "fits", SMALL)) == 4096
    with pytest.raises(SourceError) as raised:
        read_bounded(tmp_path / "absent", SMALL)
    assert raised.value.reason == Reason.FILE_UNREADABLE


def test_lines_stand_alone_and_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "lines.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \r\n' + b'{"x": "' + b"y" * 600 + b'"}\n{"a": 2}')
    found = list(iter_json_lines(path, SMALL))
    said = [one.reason if isinstance(one, SourceError) else one for _, one in found]
    assert said == [{"a": 1}, Reason.REPORT_UNREADABLE, Reason.LIMIT_EXCEEDED, {"a": 2}]
    assert read_json_line(path, found[0][0], SMALL) == {"a": 1}
    assert read_json_line(path, found[3][0], SMALL) == {"a": 2}


@pytest.mark.parametrize(
    ("head", "form"),
    [
        (b"MSH|^~\\&|A", "hl7v2"),
        (b"\x0bMSH|^~\\&|A", "hl7v2"),
        (b"OBX|1|TX|", "hl7v2"),
        (b"\xef\xbb\xbf <?xml version='1.0'?><ClinicalDocument xmlns='urn:hl7-org:v3'>", "cda"),
        ("<?xml version='1.0'?><ClinicalDocument>".encode("utf-16"), "cda"),
        (b"<labresult>", "xml"),
        (b'{"resourceType": "Bundle",\n "entry": []}', "fhir"),
        (b'{"resourceType":"Patient"}\n{"resourceType":"Patient"}\n', "fhir-lines"),
        (b'{"a":{"b":1}}\n{"a":2}\n', "json-lines"),
        (b'{"a": 1}', "json"),
        (b"\x00" * 128 + b"DICM", "dicom"),
        (b"MSHA is a word", None),
        (b"FINDINGS: OBX", None),
        (b"", None),
    ],
)
def test_forms_are_told_by_content(head: bytes, form: str | None) -> None:
    assert recognise_document(head) == form
