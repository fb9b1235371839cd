"""Files made to exhaust whoever reads them: each is named in the quarantine, and the job packs the rest."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

from pydicom.dataset import FileDataset

from tests.dicom_factory import make_study
from tests.pack_case import PackCase

_META_END = 132


def _declare(dataset: FileDataset, _: int) -> None:
    dataset.Rows = dataset.Columns = 65535
    dataset.NumberOfFrames = 2**31 - 1


def _deflate(path: Path, *, ratio: int = 1000) -> None:
    """Replace a file by a data set in the deflated syntax that inflates a thousandfold."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = compressor.compress(bytes(64 << 20)) + compressor.flush()
    assert (64 << 20) / len(packed) > ratio
    meta = path.read_bytes()[:_META_END] + b"\x02\x00\x10\x00UI\x16\x001.2.840.10008.1.2.1.99"
    path.write_bytes(meta + packed)


def _nest(path: Path, *, depth: int = 10_000) -> None:
    """Put sequences inside sequences before the first element."""
    opening = b"\x08\x00\x06\x00SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff"
    closing = b"\xfe\xff\x0d\xe0\0\0\0\0\xfe\xff\xdd\xe0\0\0\0\0"
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, _META_END + 8)
    start = _META_END + 12 + length
    path.write_bytes(data[:start] + opening * depth + closing * depth + data[start:])


def _fragment(path: Path, *, num_fragments: int = 300_000) -> None:
    """Replace the pixels by empty fragments that never end."""
    data = path.read_bytes()
    data = data.replace(b"\x02\x00\x10\x00UI\x14\x001.2.840.10008.1.2.1\0", _UI_RLE)
    group = struct.unpack_from("<I", data, _META_END + 8)[0] + len(_UI_RLE) - 28
    data = data[: _META_END + 8] + struct.pack("<I", group) + data[_META_END + 12 :]
    start = data.index(b"\xe0\x7f\x10\x00OW")
    item = b"\xfe\xff\x00\xe0\0\0\0\0"
    path.write_bytes(data[:start] + b"\xe0\x7f\x10\x00OB\0\0\xff\xff\xff\xff" + item * num_fragments)


_UI_RLE = b"\x02\x00\x10\x00UI\x14\x001.2.840.10008.1.2.5\0"


def test_bombs_are_named_and_stop_nothing(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    good = make_study(case.dicom / "good", patient="GOOD", num_slices=2)
    bombs = {
        name: make_study(case.dicom / name, patient=name, num_slices=1).files[0]
        for name in ("deflate", "nest", "fragments")
    }
    declared = make_study(case.dicom / "declared", patient="declared", num_slices=1, change=_declare)
    bombs["declared"] = declared.files[0]
    _deflate(bombs["deflate"])
    _nest(bombs["nest"])
    _fragment(bombs["fragments"])
    summary = case.pack(
        "policy.max_quarantined_share=1.0",
        "execution.memory_bytes=700MiB",
        "limits.max_inflated_bytes=16MiB",
        "execution.num_processes=2",
    )
    (ledger,) = case.private.glob("inputs-*.jsonl")
    entries = [json.loads(line) for line in ledger.read_text(encoding="ascii").splitlines()]
    reasons = {Path(entry["path"]).parent.name: entry["reason"] for entry in entries}
    assert reasons == {"good": None, **dict.fromkeys(bombs, "LIMIT_EXCEEDED")}
    assert summary.inputs == {"total": 6, "packed": 2, "skipped": 0, "quarantined": 4}
    assert case.open().samples.find(case.sample_key(good.study_instance_uid)) == 0
    # Nothing was allocated before it was refused.
    assert summary.peak_memory_bytes["process"] < 400 << 20
