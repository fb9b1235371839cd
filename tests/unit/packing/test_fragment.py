"""Fragments: whole or absent, and every damage is noticed before it becomes a shard."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from shardflow.errors import StorageError
from shardflow.format.samples import SampleFacts
from shardflow.format.tar import END_OF_ARCHIVE, encode_member
from shardflow.packing.deid.pixel_text import SEARCH_VERSION
from shardflow.packing.publish import fragment_basis
from shardflow.packing.studies import assembly
from shardflow.packing.studies.assembly import (
    DamagedFragmentError,
    Fragment,
    FragmentWriter,
    copy_members,
    fragment_path,
    read_fragment,
)
from shardflow.packing.studies.tasks import StudyOutcome

pytestmark = pytest.mark.fast

FACTS = SampleFacts(text_bytes=5, num_series=1, num_slices=2, rows=4, columns=4, modality="CT")
PACKED = StudyOutcome(outcome="packed", instances={3: "DUPLICATE_INSTANCE"})
FIELDS = {"report.txt": b"clear", "s000.i0000.npy": bytes(700), "s000.i0001.npy": b"x", "study.json": b"{}"}


def _write(folder: Path, key: str = "abcd") -> tuple[Path, Fragment]:
    path = fragment_path(folder, key)
    with FragmentWriter(path, sample_key=key, task_digest="d1") as writer:
        for name, payload in FIELDS.items():
            writer.add(name, payload)
        fragment = writer.commit(PACKED, FACTS)
    return path, fragment


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path, fragment = _write(tmp_path)
    assert read_fragment(path, "d1") == fragment
    assert fragment.outcome == PACKED
    assert fragment.facts == FACTS
    assert b"".join(copy_members(path, fragment)) == path.read_bytes()[: fragment.num_bytes]


def test_members_are_a_tar_once_it_is_closed(tmp_path: Path) -> None:
    path, fragment = _write(tmp_path)
    archive = tmp_path / "all.tar"
    archive.write_bytes(b"".join(copy_members(path, fragment)) + END_OF_ARCHIVE)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [f"abcd.{name}" for name in FIELDS]
        for location in fragment.fields:
            stream = tar.extractfile(f"abcd.{location.name}")
            assert stream is not None
            assert stream.read() == FIELDS[location.name]
            raw = archive.read_bytes()[location.offset : location.offset + location.num_bytes]
            assert raw == FIELDS[location.name]


def test_members_are_written_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a call of the system may take a part of them, also of more than it takes at once."""
    sizes, calls = [*[3] * 700, 700_000, 400_000, 0, 3_000_000, 5], []
    payloads = {f"s000.i{index:04d}.npy": bytes([index % 251]) * size for index, size in enumerate(sizes)}
    write = os.writev

    def write_less(descriptor: int, parts: list[memoryview]) -> int:
        calls.append(len(parts))
        return write(descriptor, [*parts[:-1], parts[-1][: len(parts[-1]) // 2 + 1]])

    monkeypatch.setattr(os, "writev", write_less)
    path = fragment_path(tmp_path, "abcd")
    with FragmentWriter(path, sample_key="abcd", task_digest="d1") as writer:
        for name, payload in payloads.items():
            writer.add(name, payload)
        fragment = writer.commit(PACKED, FACTS)
    assert len(calls) < 60
    assert max(calls) <= 1024
    members = [encode_member(f"abcd.{name}", payload) for name, payload in payloads.items()]
    assert b"".join(copy_members(path, fragment)) == b"".join(members)
    data = path.read_bytes()
    for place in fragment.fields:
        assert data[place.offset : place.offset + place.num_bytes] == payloads[place.name]
        assert place.crc32c == google_crc32c.value(payloads[place.name])


def test_another_task_does_not_take_it(tmp_path: Path) -> None:
    path, _ = _write(tmp_path)
    assert read_fragment(path, "d2") is None
    assert read_fragment(tmp_path / "none", "d1") is None


def test_an_outcome_has_no_members(tmp_path: Path) -> None:
    path = fragment_path(tmp_path, "abcd")
    outcome = StudyOutcome(outcome="quarantined", reason="DECODE_FAILED", instances={0: "DECODE_FAILED"})
    with FragmentWriter(path, sample_key="abcd", task_digest="d1") as writer:
        writer.add("report.txt", b"text that must not stay")
        fragment = writer.commit(outcome, None)
    assert (fragment.num_bytes, fragment.fields) == (0, ())
    assert b"text that must not stay" not in path.read_bytes()
    assert read_fragment(path, "d1") == fragment


@pytest.mark.parametrize("write_bytes", [1, assembly._WRITE_BYTES])
def test_starting_again_forgets_what_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_bytes: int
) -> None:
    """Both what was written and what was about to be."""
    monkeypatch.setattr(assembly, "_WRITE_BYTES", write_bytes)
    path = fragment_path(tmp_path, "abcd")
    with FragmentWriter(path, sample_key="abcd", task_digest="d1") as writer:
        writer.add("report.txt", b"first")
        writer.restart()
        writer.add("report.txt", b"second")
        fragment = writer.commit(PACKED, FACTS)
    assert [location.offset for location in fragment.fields] == [512]
    members = b"".join(copy_members(path, fragment))
    assert b"second" in members
    assert b"first" not in members


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = fragment_path(tmp_path, "abcd")

    def fail() -> None:
        with FragmentWriter(path, sample_key="abcd", task_digest="d1") as writer:
            writer.add("report.txt", b"x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not [entry for entry in tmp_path.rglob("*") if entry.is_file()]


def test_every_flipped_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path, fragment = _write(tmp_path)
    data = path.read_bytes()
    # Every byte of the trailer; of the members, whose checksum is one over all, every fifth.
    for position in [*range(0, fragment.num_bytes, 5), *range(fragment.num_bytes, len(data))]:
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        assert not _passes(path), position
    for length in range(0, len(data), 17):
        path.write_bytes(data[:length])
        assert not _passes(path), length
    path.write_bytes(data)
    assert _passes(path)


def _passes(path: Path) -> bool:
    fragment = read_fragment(path, "d1")
    if fragment is None:
        return False
    try:
        list(copy_members(path, fragment))
    except DamagedFragmentError:
        return False
    return True


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "ab").write_text("a file where a folder must be", encoding="utf-8")
    with pytest.raises(StorageError, match="creating a fragment must succeed") as caught:
        _write(tmp_path)
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(("deid", "is_packed_again"), [({}, False), ({"pixel_text": "blank"}, True)])
def test_a_resumed_job_does_not_mix_two_searches_for_text(
    deid: dict[str, Any], is_packed_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"deid": deid, "limits": {}, "on_bad_instance": "", "variants": {}, "shards": {"codec": "b2nd"}}
    before = fragment_basis(content, [], "key")
    monkeypatch.setattr("shardflow.packing.publish.SEARCH_VERSION", SEARCH_VERSION + 1)
    assert (fragment_basis(content, [], "key") != before) is is_packed_again
