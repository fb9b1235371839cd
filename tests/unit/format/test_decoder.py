from __future__ import annotations

import cv2
import numpy as np
import pytest

from shardflow.errors import FormatError
from shardflow.format.codecs import CODECS, decode_field, encode_array, webdataset_decoder

pytestmark = pytest.mark.fast


def test_fields_decode_by_the_last_part_of_their_name() -> None:
    pixels = np.arange(12, dtype="<i2").reshape(3, 4)
    for codec in CODECS:
        assert np.array_equal(decode_field(f"s000.i0001.{codec}", encode_array(codec, pixels)), pixels)
    assert decode_field("study.json", b'{"a":[1.5]}') == {"a": [1.5]}
    assert decode_field("report.txt", "Befund: \u00f6dem".encode()) == "Befund: \u00f6dem"


@pytest.mark.parametrize(
    ("field", "data"),
    [
        ("a.json", b"{"),
        ("a.json", b"[" * 100_000),
        ("a.txt", b"\xff"),
        ("a.b2nd", b"x"),
        ("a.npy", b""),
        ("a.htj2k", b"\xff\x4f\xff\x51"),
        ("a.png16", b"\x89PNG"),
        ("a.webp", b"x"),
        ("a.pkl", b""),
        ("a.jpg", b"x"),
    ],
)
def test_what_does_not_decode_is_refused_without_its_text(field: str, data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_field(field, data)


@pytest.mark.parametrize("kind", ["jpg", "webp"])
def test_previews_decode_to_grey_or_rgb(kind: str) -> None:
    colours = np.zeros((16, 16, 3), np.uint8)
    colours[..., 0] = 200  # red, which OpenCV takes last
    data = cv2.imencode(f".{kind}", colours[..., ::-1])[1].tobytes()
    found = webdataset_decoder(f".s000.thumb.{kind}", data)
    assert found.dtype == np.uint8
    assert np.abs(found.astype(int) - colours).max() < 12


def test_webdataset_gets_none_for_what_is_not_ours() -> None:
    assert webdataset_decoder(".preview.jpg", b"x") is None
    assert webdataset_decoder(".model.pkl", b"x") is None
    assert webdataset_decoder(".report.txt", b"x") == "x"
    with pytest.raises(FormatError):
        webdataset_decoder(".s000.thumb.jpg", b"x")
    assert webdataset_decoder(".study.json", b"{}") == {}
