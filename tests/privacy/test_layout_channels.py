"""A canary in every channel of a layout: tables, paths, and what PNG, JPEG, NIfTI and gzip can carry."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import nibabel
import numpy as np
import pytest

from shardflow.cli.main import main
from tests.dicom_factory import make_study
from tests.layout_trees import picture, write_png, write_table
from tests.pack_case import PackCase
from tests.privacy.canaries import DATE, STEM, find_canaries, output_bytes

_CANARY = STEM.encode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(path: Path) -> None:
    write_png(path.with_name("plain.png"), picture(1, bits=16))
    data = path.with_name("plain.png").read_bytes()
    path.with_name("plain.png").unlink()
    texts = (
        _chunk(b"tEXt", b"Comment\0" + _CANARY)
        + _chunk(b"zTXt", b"Author\0\0" + zlib.compress(_CANARY * 5))
        + _chunk(b"iTXt", b"Title\0\0\0\0\0" + _CANARY)
        + _chunk(b"eXIf", b"II*\0" + _CANARY)
    )
    path.write_bytes(data[:33] + texts + data[33:] + _CANARY)


def _jpeg(path: Path) -> None:
    assert cv2.imwrite(str(path.with_name("plain.jpg")), picture(2))
    data = path.with_name("plain.jpg").read_bytes()
    path.with_name("plain.jpg").unlink()
    segments = b""
    for marker, content in ((b"\xe1", b"Exif\0\0II*\0" + _CANARY), (b"\xfe", _CANARY)):
        segments += b"\xff" + marker + struct.pack(">H", 2 + len(content)) + content
    path.write_bytes(data[:2] + segments + data[2:] + _CANARY)


def _nifti(path: Path) -> None:
    voxels = np.random.default_rng(3).integers(0, 2000, (6, 5, 4)).astype(np.int16)
    image = nibabel.Nifti1Image(voxels, np.diag([1.0, 1.0, 2.0, 1.0]))  # type: ignore[no-untyped-call]
    for field in ("descrip", "aux_file", "intent_name", "db_name"):
        image.header[field] = STEM
    comment = nibabel.nifti1.Nifti1Extension("comment", _CANARY * 4)
    image.header.extensions.append(comment)
    image.to_filename(path.with_name("plain.nii"))
    data = path.with_name("plain.nii").read_bytes()
    path.with_name("plain.nii").unlink()
    if path.suffix == ".gz":
        with (
            path.open("wb") as file,
            gzip.GzipFile(filename=f"{STEM}.nii", mode="wb", fileobj=file) as zipped,
        ):
            zipped.write(data)
    else:
        path.write_bytes(data)


def _dicom(path: Path) -> None:
    made = make_study(path.parent / "made", patient=STEM, num_slices=1)
    path.write_bytes(gzip.compress(made.files[0].read_bytes()))
    made.files[0].unlink()


_WRITERS: dict[str, Callable[[Path], None]] = {
    ".png": _png,
    ".jpg": _jpeg,
    ".nii": _nifti,
    ".nii.gz": _nifti,
    ".dcm.gz": _dicom,
}


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    """Every form once as it should be and once cut, and rows of every way to be wrong."""
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    folder = case.dicom / STEM
    folder.mkdir()
    rows: list[dict[str, str]] = []

    def add(name: str, **said: str) -> None:
        number = len(rows)
        rows.append(
            {
                "path": f"{STEM}/{name}",
                "patient": f"{STEM}{number}",
                "study": f"{STEM}s{number}",
                **{role: f"{STEM}{role}" for role in ("series", "sex", "view", "body_part", STEM)},
                "report": f"{STEM}-R-{number}",
                "accession": f"{STEM}-{number}",
                "age": DATE,
                "modality": "CT" if ".nii" in name else "CR",
                "slope": "",
                "number": "",
                **said,
            }
        )

    for ending, write in _WRITERS.items():
        write(folder / f"{STEM}{ending}")
        add(f"{STEM}{ending}")
        whole = (folder / f"{STEM}{ending}").read_bytes()
        (folder / f"cut{STEM}{ending}").write_bytes(whole[: len(whole) // 3] + _CANARY)
        add(f"cut{STEM}{ending}")
    for role in ("slope", "number", "modality"):
        _png(folder / f"{role}.png")
        add(f"{role}.png", **{role: STEM})
    (folder / f"text{STEM}.png").write_text(STEM, encoding="ascii")
    add(f"text{STEM}.png")
    add(f"missing{STEM}.png")
    for _ in range(2):
        add("twice.png")
    _png(folder / "twice.png")
    _png(folder / f"unlisted{STEM}.png")
    write_table(case.folder / f"{STEM}.csv", rows)
    with (case.folder / "reports.csv").open("w", encoding="utf-8", newline="") as table:
        table.write(f"study,text,{STEM}\n")
        for number in (0, 2, 4, 404):
            text = f"Accession {STEM}-{number}. Patient {STEM}{number}, order {STEM}-R-{number}: no effusion."
            table.write(f'{STEM}s{number},"{text}",{STEM}\n')
        table.write(f"{STEM}\n")
    settings = case.config_path.read_text(encoding="utf-8").replace(
        "[splits]", f'[inputs.layout]\nkind = "manifest"\ntable = "{STEM}.csv"\n[splits]'
    )
    more = "[policy]\nmax_quarantined_share = 1.0\n[variants]\nthumbnail_px = 16\nsmall_px = 4\n"
    case.config_path.write_text(settings + more, encoding="utf-8")
    return case


def test_no_canary_comes_out_of_a_layout(case: PackCase, capfd: pytest.CaptureFixture[str]) -> None:
    for mode in ([], ["--append"], ["--retry", "--json"]):
        done = case.command(*mode)
        assert done.returncode == 0, done.stderr[-2000:]
        assert not find_canaries((done.stdout + done.stderr).encode())
    dataset = case.open()
    reasons: Any = dataset.manifest.extra["reasons"]
    for reason in (
        "AMBIGUOUS_LINK",
        "DAMAGED_IMAGE",
        "INVALID_IMAGE_DESCRIPTION",
        "MISSING_FILE",
        "NOT_IN_LAYOUT",
        "PIXEL_DATA_TRUNCATED",
        "REPORT_UNREADABLE",
        "REPORT_WITHOUT_STUDY",
    ):
        assert reason in reasons, "this way to fail was not taken"
    modalities = dataset.samples.column("modality")
    assert (dataset.samples.num_samples, len(set(modalities.tolist()))) == (6, 3)
    report = dataset.read_fields(dataset.samples.find(case.sample_key(f"{STEM}s0")))["report.txt"]
    assert b"no effusion" in report
    assert b"[ID]" in report
    looked = case.folder / "looked"
    looked.mkdir()
    for command in (
        ["info", str(case.output), "--json"],
        ["verify", str(case.output)],
        ["preview", str(case.output), "train:0", "-o", str(looked / "one.png")],
        ["report", str(case.output), "-o", str(looked / "page.html")],
    ):
        assert main(command) == 0
    said = capfd.readouterr()
    assert not find_canaries((said.out + said.err).encode())
    for folder in (case.output, looked):
        for name, data in output_bytes(folder):
            assert not find_canaries(data), name
