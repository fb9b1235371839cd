"""Headers made to exhaust or to hold whoever reads them: each is named, and the job packs the rest."""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from pydicom.dataset import FileDataset

from tests.dicom_factory import make_study
from tests.pack_case import PackCase
from tests.pack_faults import HANDLERS
from tests.sweeps import sampled

_META_END: Final = 132
_UI_EXPLICIT: Final = b"\x02\x00\x10\x00UI\x14\x001.2.840.10008.1.2.1\0"
_UI_RLE: Final = b"\x02\x00\x10\x00UI\x14\x001.2.840.10008.1.2.5\0"
_BOMB_BYTES: Final = 64 << 20


def _start(data: bytes) -> int:
    """Return where the dataset begins, behind the meta information."""
    return int(_META_END + 12 + struct.unpack_from("<I", data, _META_END + 8)[0])


def _before_all(path: Path, elements: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: _start(data)] + elements + data[_start(data) :])


@functools.cache
def _deflated() -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    return compressor.compress(bytes(_BOMB_BYTES)) + compressor.flush()


def _deflate(path: Path) -> None:
    """Replace a file by a data set in the deflated syntax that inflates a thousandfold."""
    assert _BOMB_BYTES / len(_deflated()) > 1000
    meta = path.read_bytes()[:_META_END] + b"\x02\x00\x10\x00UI\x16\x001.2.840.10008.1.2.1.99"
    path.write_bytes(meta + _deflated())


@functools.cache
def _gzipped() -> bytes:
    return gzip.compress(bytes(_BOMB_BYTES))


def _gzip(path: Path) -> None:
    path.unlink()
    path.with_suffix(".dcm.gz").write_bytes(_gzipped())


def _nest(path: Path) -> None:
    """Put sequences inside sequences before the first element."""
    opening = b"\x08\x00\x06\x00SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff"
    closing = b"\xfe\xff\x0d\xe0\0\0\0\0\xfe\xff\xdd\xe0\0\0\0\0"
    _before_all(path, opening * 10_000 + closing * 10_000)


def _fragment(path: Path) -> None:
    """Replace the pixels by empty fragments that never end."""
    data = path.read_bytes().replace(_UI_EXPLICIT, _UI_RLE)
    start = data.index(b"\xe0\x7f\x10\x00OW")
    item = b"\xfe\xff\x00\xe0\0\0\0\0"
    path.write_bytes(data[:start] + b"\xe0\x7f\x10\x00OB\0\0\xff\xff\xff\xff" + item * 300_000)


def _elements(path: Path) -> None:
    """Put empty elements before all others, as many as a header may hold, and one more."""
    _before_all(path, b"\x08\x00\x01\x00CS\0\0" * (1 << 16))


def _items(path: Path) -> None:
    """Put empty items into a sequence that is read."""
    items = b"\xfe\xff\x00\xe0\0\0\0\0" * (1 << 16)
    _before_all(path, b"\x10\x00\x02\x10SQ\0\0\xff\xff\xff\xff" + items)


def _length(path: Path) -> None:
    _before_all(path, b"\x08\x00\x01\x00UN\0\0\xf0\xff\xff\xff")


def _sparse(path: Path) -> None:
    """Let an element reach far into a file of 8 GiB that has no blocks there."""
    _before_all(path, b"\x08\x00\x01\x00UN\0\0\xf0\xff\xff\xfe")
    os.truncate(path, 8 << 30)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _stream(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _declare(dataset: FileDataset, _: int) -> None:
    dataset.Rows = dataset.Columns = 65535
    dataset.NumberOfFrames = 2**31 - 1


_ATTACKS: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "declared": (lambda _: None, "LIMIT_EXCEEDED"),
    "deflate": (_deflate, "LIMIT_EXCEEDED"),
    "elements": (_elements, "LIMIT_EXCEEDED"),
    "fragments": (_fragment, "LIMIT_EXCEEDED"),
    "gzip": (_gzip, "LIMIT_EXCEEDED"),
    "items": (_items, "LIMIT_EXCEEDED"),
    "length": (_length, "HEADER_UNREADABLE"),
    "nest": (_nest, "LIMIT_EXCEEDED"),
    "pipe": (_pipe, "NOT_REGULAR_FILE"),
    "short": (lambda path: os.truncate(path, 400), "HEADER_UNREADABLE"),
    "sparse": (_sparse, "LIMIT_EXCEEDED"),
    "stream": (_stream, "NOT_REGULAR_FILE"),
}


def _outcomes(case: PackCase) -> Counter[tuple[str, str | None]]:
    (ledger,) = case.private.glob("inputs-*.jsonl")
    entries = [json.loads(line) for line in ledger.read_text(encoding="ascii").splitlines()]
    return Counter((Path(entry["path"]).parent.name.partition("-")[0], entry["reason"]) for entry in entries)


@pytest.mark.parametrize("num_of_each", sampled([1, 8], {1}))
def test_a_tree_of_hostile_headers_ends_no_process(tmp_path: Path, num_of_each: int) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    good = make_study(case.dicom / "good", patient="GOOD", num_slices=2)
    names = list(_ATTACKS) * num_of_each
    for number, name in enumerate(names):
        change = _declare if name == "declared" else None
        made = make_study(
            case.dicom / f"{name}-{number}", patient=f"P{number}", num_slices=1, change=change
        ).files
        _ATTACKS[name][0](made[0])
    summary = case.pack(
        "policy.max_quarantined_share=1.0",
        "execution.memory_bytes=700MiB",
        "limits.max_inflated_bytes=16MiB",
        "limits.max_header_bytes=256KiB",
        "execution.num_processes=2",
    )
    expected = Counter((name, _ATTACKS[name][1]) for name in names)
    assert _outcomes(case) == expected + Counter({("good", None): 2})
    assert case.open().samples.find(case.sample_key(good.study_instance_uid)) == 0
    # Counts and declared sizes refused them: no deadline or memory limit was needed, and nothing allocated.
    assert not (case.private / "resource_outcomes.jsonl").exists()
    assert summary.peak_memory_bytes["process"] < 400 << 20


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_files", sampled([3, 96], {3}))
def test_headers_that_end_their_process_have_a_bounded_number_of_tries(
    tmp_path: Path, num_files: int
) -> None:
    """A try ends with the process, at the latest at its deadline; so this bounds the time of any tree."""
    case = PackCase(tmp_path)
    case.prepare()
    make_study(case.dicom / "good", patient="GOOD", num_slices=2)
    deadly = make_study(case.dicom / "deadly", patient="P", num_slices=num_files).files
    faults = {path.relative_to(case.dicom).as_posix(): "counted_kill" for path in deadly}
    case.write_faults(header=faults)
    settings = ("policy.max_quarantined_share=1.0", "execution.num_processes=2")
    assert case.pack(*settings, handlers=HANDLERS).reasons == {"WORKER_KILLED": num_files}
    num_tries = (tmp_path / "counted").stat().st_size
    assert num_tries == 2 * num_files + 2  # two with its batch, and two of each file by itself
    # What is known is not tried again.
    shutil.rmtree(case.output)
    case.pack(*settings, handlers=HANDLERS)
    assert (tmp_path / "counted").stat().st_size == num_tries
