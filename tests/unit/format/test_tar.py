from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import FormatError
from shardflow.format.tar import (
    BLOCK_NUM_BYTES,
    END_OF_ARCHIVE,
    encode_member,
    member_header,
    member_num_bytes,
    padding,
    parse_member_header,
)

pytestmark = pytest.mark.fast

NAMES = st.from_regex(r"[a-z0-9]{1,40}(\.[a-z0-9]{1,8}){1,3}", fullmatch=True).filter(
    lambda name: len(name) <= 100
)
SIZES = st.integers(0, 8**11 - 1)


@given(NAMES, SIZES)
def test_a_header_is_the_one_of_python_s_tarfile(name: str, num_bytes: int) -> None:
    """Device numbers apart: tarfile leaves them empty, POSIX and GNU tar write zeros."""
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[329:345] = b"0000000\0" * 2
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
    assert member_header(name, num_bytes) == header
    assert parse_member_header(member_header(name, num_bytes)) == (name, num_bytes)


@pytest.mark.parametrize("name", ["", "a" * 101, "\u00e4.txt", "a\0b"])
def test_a_name_that_ustar_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match="1 to 100 ASCII"):
        member_header(name, 0)


@pytest.mark.parametrize("num_bytes", [-1, 8**11])
def test_a_size_that_ustar_cannot_hold_is_refused(num_bytes: int) -> None:
    with pytest.raises(FormatError, match="must hold 0 to"):
        member_header("a.txt", num_bytes)


def test_every_flipped_bit_of_a_header_is_found() -> None:
    header = bytearray(member_header("abc.s000.i0000.b2nd", 1234))
    for bit in range(8 * 512):
        header[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            parse_member_header(bytes(header))
        header[bit // 8] ^= 1 << bit % 8


def test_hostile_sizes_are_no_headers() -> None:
    """tarfile takes a negative or base-256 size for a member; nothing here does."""
    for size in (
        b"-0000000001\0",
        b"\x80" + bytes(10) + b"\x05",
        b"\xff" * 12,
        b" 0000001234\0",
        b"0_0_1_2_3_4\0",
    ):
        header = bytearray(member_header("a.b", 1234))
        header[124:136] = size.ljust(12, b"\0")
        header[148:156] = b"%06o\0 " % (sum(header[:148]) + sum(header[156:]) + 8 * 32)
        with pytest.raises(FormatError):
            parse_member_header(bytes(header))


MEMBERS = {
    "k1.report.txt": b"text",
    "k1.s000.i0000.b2nd": bytes(range(256)) * 4,
    "k2.empty": b"",
    "k2.x": b"y" * 513,
}


def _archive() -> tuple[bytes, dict[str, int]]:
    data, offsets = bytearray(), {}
    for name, payload in MEMBERS.items():
        offsets[name] = len(data) + BLOCK_NUM_BYTES
        data += encode_member(name, memoryview(payload))
    return bytes(data + END_OF_ARCHIVE), offsets


def test_offsets_point_at_the_payloads() -> None:
    data, offsets = _archive()
    for name, payload in MEMBERS.items():
        assert data[offsets[name] : offsets[name] + len(payload)] == payload


def test_a_member_is_its_header_its_payload_and_padding() -> None:
    parts = [encode_member(name, payload) for name, payload in MEMBERS.items()]
    assert [len(part) for part in parts] == [member_num_bytes(len(payload)) for payload in MEMBERS.values()]
    assert all(len(payload + padding(len(payload))) % 512 == 0 for payload in MEMBERS.values())


def test_gnu_tar_makes_the_same_bytes(tmp_path: Path) -> None:
    for name, payload in MEMBERS.items():
        (tmp_path / name).write_bytes(payload)
        (tmp_path / name).chmod(0o644)
    command = [
        "tar",
        "--format=ustar",
        "-b1",
        "--mtime=@0",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "-cf",
        "-",
    ]
    made = subprocess.run([*command, *MEMBERS], cwd=tmp_path, check=True, capture_output=True)
    assert made.stdout == _archive()[0]


def test_python_and_gnu_tar_read_it(tmp_path: Path) -> None:
    data, _ = _archive()
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with tarfile.open(path) as archive:
        found = {}
        for member in archive:
            stream = archive.extractfile(member)
            found[member.name] = stream.read() if stream else None
            facts = (
                member.mode,
                member.uid,
                member.gid,
                member.mtime,
                member.uname,
                member.gname,
                member.type,
            )
            assert facts == (0o644, 0, 0, 0, "", "", tarfile.REGTYPE)
    assert found == MEMBERS
    listed = subprocess.run(["tar", "-tf", str(path)], check=True, capture_output=True, text=True)
    assert listed.stdout.split() == list(MEMBERS)
    assert listed.stderr == ""
