"""Targets: headers of DICOM files, pixels of every codec, NIfTI volumes, pictures."""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import nibabel as nib
import numpy as np
import pydicom
import pydicom.data
from PIL import Image
from pydicom.encaps import generate_frames

from fuzz.target import MAX_BYTES, Target
from shardflow.errors import FormatError, SourceError
from shardflow.format.codecs import array_header, decode_array, decode_field, encode_array
from shardflow.packing.sources.dicom.attributes import read_attributes
from shardflow.packing.sources.dicom.decoders import DECODER_ORDER
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import BrokenInstance, read_header
from shardflow.packing.sources.dicom.pixels import iter_slices
from shardflow.packing.sources.dicom.stacks import build_studies
from shardflow.packing.sources.images import iter_raster, read_raster
from shardflow.packing.sources.nifti import iter_nifti, read_nifti
from shardflow.packing.sources.placement import Placement

_LIMITS: Final = HeaderLimits(
    max_frames=64, max_frame_pixels=1 << 20, max_pixel_bytes=1 << 24, max_inflated_bytes=1 << 22
)
_PIXEL_DATA: Final = struct.pack("<HH2sHL", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF)
_ITEM: Final = struct.pack("<HH", 0xFFFE, 0xE000)
_END: Final = struct.pack("<HHL", 0xFFFE, 0xE0DD, 0)


def _examples() -> list[Path]:
    """List the small files that come with pydicom: all transfer syntaxes, and known oddities."""
    folder = Path(pydicom.data.__file__).parent / "test_files"
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size <= MAX_BYTES]


def _read_instance(path: Path) -> None:
    """Read one file as the header pass and the packing of its study do."""
    header = read_header(path, limits=_LIMITS)
    if isinstance(header, BrokenInstance):
        return
    build_studies([header])
    read_attributes(path, ("Modality", "PatientSex", "PixelSpacing"), limits=_LIMITS)
    for decoded in iter_slices(path, header, limits=_LIMITS):
        if decoded.pixels.shape[:2] != (header.image.rows, header.image.columns):
            raise RuntimeError("a slice must have the shape of its header")


class Dicom(Target):
    """A DICOM file."""

    errors = (SourceError,)

    def seeds(self) -> Iterator[bytes]:
        """Return files of pydicom."""
        for path in _examples():
            yield path.read_bytes()

    def read(self, data: bytes) -> None:
        """Read header and slices."""
        _read_instance(self.file("a.dcm", data))


class Pixels(Target):
    """The encoded frame of a DICOM file whose header is sound; the first byte chooses the header."""

    errors = (SourceError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._heads: list[bytes] = []
        self._frames: list[bytes] = []
        for path in _examples():
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            dataset = pydicom.dcmread(path)
            if dataset.file_meta.TransferSyntaxUID not in DECODER_ORDER:
                return
            frame = next(generate_frames(dataset.PixelData))
            dataset.NumberOfFrames = 1
            for tag in [element.tag for element in dataset if element.tag >= 0x7FE00000]:
                del dataset[tag]
            stream = io.BytesIO()
            pydicom.dcmwrite(stream, dataset)
        except Exception:  # noqa: BLE001 - some of its files are damaged on purpose
            return
        self._heads.append(stream.getvalue())
        self._frames.append(frame)

    def seeds(self) -> Iterator[bytes]:
        """Return the frames of pydicom's files."""
        for number, frame in enumerate(self._frames):
            yield bytes([number]) + frame

    def read(self, data: bytes) -> None:
        """Put the frame behind its header, and decode it."""
        if not data:
            return
        frame = data[1:] + b"\0" * (len(data) % 2 == 0)
        table, item = _ITEM + struct.pack("<L", 0), _ITEM + struct.pack("<L", len(frame)) + frame
        head = self._heads[data[0] % len(self._heads)]
        _read_instance(self.file("a.dcm", head + _PIXEL_DATA + table + item + _END))


class Slices(Target):
    """A stored slice or picture; the first byte chooses the codec."""

    errors = (FormatError,)
    _CODECS: Final = ("b2nd", "png16", "npy", "htj2k", "fast", "png", "jpg", "")

    def seeds(self) -> Iterator[bytes]:
        """Encode small slices."""
        gray = np.add.outer(np.arange(13), 3 * np.arange(11)).astype("<u2")
        for number, codec in enumerate(self._CODECS[:5]):
            yield bytes([number]) + encode_array(codec, gray)
        for number, kind in ((5, "PNG"), (6, "JPEG")):
            stream = io.BytesIO()
            Image.fromarray(gray.astype("u1")).save(stream, kind)
            yield bytes([number]) + stream.getvalue()
        yield bytes([7]) + b'{"a": [1]}'

    def read(self, data: bytes) -> None:
        """Decode it as a loader does: into an array of the size that its header says."""
        codec = self._CODECS[data[0] % len(self._CODECS)] if data else ""
        if codec in ("png", "jpg", ""):
            decode_field(f"a.{codec or 'json'}", data[1:])
            return
        shape, dtype = array_header(codec, data[1:])
        if np.prod(shape, dtype=object) * dtype.itemsize <= 1 << 24:
            decode_array(codec, data[1:], np.empty(shape, dtype))


_PLACE: Final[dict[str, Any]] = {
    "patient": "p",
    "study": "s",
    "series": "e",
    "instance": "i",
    "attributes": {},
}


class Nifti(Target):
    """A NIfTI volume, compressed or not."""

    errors = (SourceError,)

    def seeds(self) -> Iterator[bytes]:
        """Write small volumes of both versions."""
        for made in (nib.Nifti1Image, nib.Nifti2Image):
            for shape, dtype in (((5, 4, 3), "<i2"), ((4, 4, 2, 3), "<f4"), ((3, 3, 2), "u1")):
                voxels = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
                data = made(voxels, np.diag([2.0, 2.0, 5.0, 1.0])).to_bytes()  # type: ignore[no-untyped-call]
                yield data
                yield gzip.compress(data, mtime=0)

    def read(self, data: bytes) -> None:
        """Read header and slices."""
        path = self.file("a.nii.gz" if data[:2] == b"\x1f\x8b" else "a.nii", data)
        header = read_nifti(path, Placement(form="nifti", modality="MR", **_PLACE), limits=_LIMITS)
        for pixels, _ in iter_nifti(path, header, range(min(header.image.num_frames, 4)), _LIMITS):
            if pixels.shape != (header.image.rows, header.image.columns):
                raise RuntimeError("a slice must have the shape of its header")


class Pictures(Target):
    """A PNG or JPEG as an image of a study."""

    errors = (SourceError,)

    def seeds(self) -> Iterator[bytes]:
        """Encode small pictures."""
        for mode, dtype in (("L", "u1"), ("RGB", "u1"), ("I;16", "<u2")):
            pixels = np.arange(12 * 10 * (3 if mode == "RGB" else 1)).astype(dtype)
            shape = (12, 10, 3) if mode == "RGB" else (12, 10)
            for kind in ("PNG", "JPEG")[: 1 if mode == "I;16" else 2]:
                stream = io.BytesIO()
                Image.fromarray(pixels.reshape(shape)).save(stream, kind)
                yield stream.getvalue()

    def read(self, data: bytes) -> None:
        """Read size and pixels."""
        path = self.file("a.png", data)
        place = Placement(form="raster", modality="CR", **_PLACE)
        header = read_raster(path, place, limits=_LIMITS)
        for _ in iter_raster(path, header, [0], _LIMITS):
            pass
