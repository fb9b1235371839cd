"""Which bytes make which frame, held against pydicom and against files that end too soon."""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydicom.data import get_testdata_files
from pydicom.encaps import encapsulate, generate_frames

from shardflow.errors import SourceError
from shardflow.packing.sources.dicom import stored as fragments
from shardflow.packing.sources.dicom.headers import BrokenInstance, read_header
from shardflow.packing.sources.dicom.stored import Fragment, find_frames, read_frame

pytestmark = pytest.mark.fast


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _frames(path: Path, num_frames: int, offset: int = 0) -> list[bytes]:
    with _opened(path) as descriptor:
        found = find_frames(descriptor, offset, path.stat().st_size, num_frames)
        return [read_frame(descriptor, frame) for frame in found]


def _items(table: bytes, parts: Sequence[bytes], *, delimiter: bool = True) -> bytes:
    items = [b"\xfe\xff\x00\xe0" + struct.pack("<I", len(part)) + part for part in (table, *parts)]
    return b"".join(items) + (b"\xfe\xff\xdd\xe0\0\0\0\0" if delimiter else b"")


def _write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "value"
    path.write_bytes(data)
    return path


def test_every_bundled_encapsulated_file_gives_the_frames_of_pydicom() -> None:
    num_files = 0
    for path in sorted(map(Path, get_testdata_files())):
        try:
            header = read_header(path)
        except SourceError:
            continue
        if isinstance(header, BrokenInstance) or header.is_native:
            continue
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file.seek(header.pixel_offset)
            expected = list(generate_frames(file, number_of_frames=header.image.num_frames))
        assert _frames(path, header.image.num_frames, header.pixel_offset) == expected, path.name
        num_files += 1
    assert num_files > 25


@pytest.mark.parametrize("fragments_per_frame", [1, 2, 3])
@pytest.mark.parametrize("has_bot", [False, True])
@pytest.mark.parametrize("num_frames", [1, 4])
def test_frames_of_several_fragments(
    tmp_path: Path, num_frames: int, has_bot: bool, fragments_per_frame: int
) -> None:
    frames = [bytes([frame]) * 40 + b"\xff\xd9" for frame in range(num_frames)]
    path = _write(tmp_path, encapsulate(frames, fragments_per_frame=fragments_per_frame, has_bot=has_bot))
    assert _frames(path, num_frames) == frames


def test_a_wrong_offset_table_is_not_believed(tmp_path: Path) -> None:
    parts = [b"aaaa", b"a\xff\xd9\0", b"bbbb", b"b\xff\xd9\0"]
    for table in (struct.pack("<2I", 0, 13), struct.pack("<2I", 4, 24), struct.pack("<2I", 0, 0)):
        path = _write(tmp_path, _items(table, parts))
        assert _frames(path, 2) == [b"aaaaa\xff\xd9\0", b"bbbbb\xff\xd9\0"]
    path = _write(tmp_path, _items(struct.pack("<2I", 0, 12), parts))
    assert _frames(path, 2) == [b"aaaa", b"a\xff\xd9\0bbbbb\xff\xd9\0"]


def test_a_missing_delimiter_loses_nothing(tmp_path: Path) -> None:
    assert _frames(_write(tmp_path, _items(b"", [b"aaaa", b"bbbb"], delimiter=False)), 2) == [
        b"aaaa",
        b"bbbb",
    ]


@pytest.mark.parametrize(
    ("data", "num_frames", "reason"),
    [
        (b"", 1, "PIXEL_DATA_TRUNCATED"),
        (_items(b"", []), 1, "PIXEL_DATA_TRUNCATED"),
        (_items(b"", [b"aaaa"]), 2, "PIXEL_DATA_TRUNCATED"),
        (_items(b"", [b"aaaa"])[:-10], 1, "PIXEL_DATA_TRUNCATED"),
        (_items(b"", [b"aaaa"], delimiter=False) + b"garbage!", 1, "PIXEL_DATA_TRUNCATED"),
        (_items(b"", [b"aaaa", b"bbbb", b"cccc"]), 2, "DECODE_FAILED"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, data: bytes, num_frames: int, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        _frames(_write(tmp_path, data), num_frames)
    assert caught.value.reason == reason


def test_a_fragment_that_is_not_all_there_is_found_before_it_is_read(tmp_path: Path) -> None:
    path = _write(tmp_path, _items(b"", [b"aaaa"], delimiter=False)[:-1])
    with _opened(path) as descriptor, pytest.raises(SourceError, match="1 bytes of a fragment are missing"):
        find_frames(descriptor, 0, path.stat().st_size, 1)


def test_endless_fragments_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragments, "MAX_FRAGMENTS", 50)
    with pytest.raises(SourceError, match="more than 50 fragments"):
        _frames(_write(tmp_path, _items(b"", [b""] * 60)), 1)


def test_a_file_that_shrinks_is_told(tmp_path: Path) -> None:
    path = _write(tmp_path, b"abc")
    with _opened(path) as descriptor, pytest.raises(SourceError, match="became shorter"):
        read_frame(descriptor, [Fragment(0, 2), Fragment(2, 9)])
