"""Slides of known pixels as TIFF pyramids and DICOM series, with planted identifiers; and an independent
reader."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence as DicomSequence
from pydicom.uid import JPEG2000, ExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, generate_uid

from shardflow.format.keys import STUDY_FIELD, level_field
from shardflow.format.samples import SampleFacts
from shardflow.format.volumes.bricks import StoredVolume
from shardflow.format.volumes.encoder import LevelWriter
from shardflow.format.volumes.tiles import encode_tile
from tests.factories import MadeSample, sample_key

__all__ = ["PLANTED", "dicom_level", "make_slide_pixels", "pyramid", "slide_sample", "write_ome", "write_svs"]

PLANTED = ("DOE^PLANTED", "BARCODE-77-4711", "1999-12-31", "secretfile", "icc-of-hospital")
"""Texts that must not leave."""


def make_slide_pixels(rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return glass with two islands of tissue, whose texture differs from pixel to pixel."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:rows, :columns]
    pixels = np.full((rows, columns, 3), 244, np.int16)
    for row, column, radius in ((0.3, 0.3, 0.16), (0.65, 0.7, 0.2)):
        inside = (y / rows - row) ** 2 + (x / columns - column) ** 2 < radius**2
        stain = 40 * np.sin(y / 17) + 30 * np.cos(x / 23)
        pixels[inside] = np.stack([180 + stain, 90 + stain, 160 - stain], axis=-1)[inside]
    noisy = np.clip(pixels + rng.integers(-3, 4, (rows, columns, 1)), 0, 255)
    return np.asarray(noisy, np.uint8)


def pyramid(pixels: NDArray[np.uint8], factors: Sequence[int] = (1, 4)) -> list[NDArray[np.uint8]]:
    """Return levels, averaged over squares."""
    found = []
    for factor in factors:
        rows, columns = (side // factor * factor for side in pixels.shape[:2])
        cut = pixels[:rows, :columns].astype(np.float64)
        mean = cut.reshape(rows // factor, factor, columns // factor, factor, 3).mean(axis=(1, 3))
        found.append(np.rint(mean).astype(np.uint8))
    return found


def write_svs(
    path: Path,
    levels: Sequence[NDArray[np.uint8]],
    *,
    tile: int = 64,
    mpp: float = 0.25,
    compression: str | None = "jpeg",
    photometric: str = "rgb",
    has_label: bool = True,
) -> None:
    """Write an Aperio slide: baseline, thumbnail, levels, label and macro; identifiers in all texts."""
    notes = f"|AppMag = 40|MPP = {mpp}|" + "|".join(f"Note {at} = {text}" for at, text in enumerate(PLANTED))
    options: dict[str, Any] = {
        "photometric": photometric,
        "compression": compression,
        "metadata": None,
        "datetime": "1999:12:31 10:11:12",
    }
    if compression == "jpeg":
        options["compressionargs"] = {"level": 90}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tifffile.TiffWriter(path) as writer:
        for number, level in enumerate(levels):
            writer.write(
                level,
                tile=(tile, tile),
                description=f"Aperio Image Library v11\n{level.shape[1]}x{level.shape[0]}{notes}",
                software=PLANTED[3],
                iccprofile=PLANTED[4].encode(),
                subfiletype=0,
                **options,
            )
            if number == 0:
                thumbnail = np.ascontiguousarray(level[::8, ::8])
                writer.write(
                    thumbnail, photometric="rgb", description=f"Aperio thumbnail{notes}", metadata=None
                )
        if has_label:
            label = np.zeros((40, 60, 3), np.uint8)
            for name, kind in (("label", 1), ("macro", 9)):
                writer.write(
                    label + kind,
                    photometric="rgb",
                    description=f"Aperio Image Library\n{name} 60x40 {PLANTED[1]}",
                    subfiletype=kind,
                    metadata=None,
                )


def write_ome(path: Path, levels: Sequence[NDArray[np.uint8]], *, tile: int = 64, mpp: float = 0.25) -> None:
    """Write an OME-TIFF whose coarser levels are SubIFDs, without loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "axes": "YXS",
        "PhysicalSizeX": mpp,
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": mpp,
        "PhysicalSizeYUnit": "µm",
        "Name": PLANTED[0],
    }
    options: dict[str, Any] = {"photometric": "rgb", "tile": (tile, tile), "compression": "zlib"}
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(levels[0], subifds=len(levels) - 1, metadata=metadata, **options)
        for level in levels[1:]:
            writer.write(level, subfiletype=1, metadata=None, **options)


def dicom_level(
    path: Path,
    pixels: NDArray[np.uint8],
    *,
    study: str,
    series: str,
    tile: int = 64,
    mpp: float = 0.25,
    syntax: str = JPEGBaseline8Bit,
    sparse: Sequence[tuple[int, int]] | None = None,
    flavor: str = "VOLUME",
    patient: str = "P1",
    **changes: Any,
) -> None:
    """Write a level of a slide as VL Whole Slide Microscopy.

    Args:
        path: The file.
        pixels: ``(rows, columns, 3)``.
        study: Of the study.
        series: Of the series.
        tile: Side of a tile.
        mpp: Microns per pixel.
        syntax: Transfer syntax.
        sparse: Rows and columns of the stored tiles, in the grid of tiles; None stores all, TILED_FULL.
        flavor: Third value of Image Type.
        patient: Of the patient.
        changes: Further attributes by keyword.
    """
    rows, columns = pixels.shape[:2]
    grid = -(-rows // tile), -(-columns // tile)
    padded = np.pad(pixels, ((0, grid[0] * tile - rows), (0, grid[1] * tile - columns), (0, 0)), mode="edge")
    places = (
        [(row, column) for row in range(grid[0]) for column in range(grid[1])] if sparse is None else sparse
    )
    tiles = [padded[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for r, c in places]
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = syntax
    data = Dataset()
    data.file_meta = meta
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    data.StudyInstanceUID, data.SeriesInstanceUID = study, series
    data.PatientID, data.PatientName, data.StudyDate = patient, PLANTED[0], "19991231"
    data.ContainerIdentifier = PLANTED[1]
    data.Modality, data.ImageType = "SM", ["ORIGINAL", "PRIMARY", flavor, "NONE"]
    data.Rows = data.Columns = tile
    data.SamplesPerPixel, data.BitsAllocated, data.BitsStored, data.HighBit = 3, 8, 8, 7
    data.PixelRepresentation = data.PlanarConfiguration = 0
    data.NumberOfFrames = len(tiles)
    data.TotalPixelMatrixRows, data.TotalPixelMatrixColumns = rows, columns
    data.SpecimenLabelInImage = "NO"
    data.FrameOfReferenceUID = generate_uid(entropy_srcs=[study])
    data.NumberOfOpticalPaths, data.TotalPixelMatrixFocalPlanes = 1, 1
    data.ImageOrientationSlide = [0, -1, 0, -1, 0, 0]
    data.ImagedVolumeWidth, data.ImagedVolumeHeight = columns * mpp / 1000, rows * mpp / 1000
    data.ImagedVolumeDepth, data.FocusMethod, data.ExtendedDepthOfField = 1.0, "AUTO", "NO"
    origin = Dataset()
    origin.XOffsetInSlideCoordinateSystem, origin.YOffsetInSlideCoordinateSystem = 20.0, 40.0
    data.TotalPixelMatrixOriginSequence = DicomSequence([origin])
    data.LossyImageCompression = "01" if syntax in (JPEGBaseline8Bit, JPEG2000) else "00"
    data.AcquisitionDateTime = "19991231101112"
    measures, shared = Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [mpp / 1000, mpp / 1000], 0.001
    shared.PixelMeasuresSequence = DicomSequence([measures])
    data.SharedFunctionalGroupsSequence = DicomSequence([shared])
    optical = Dataset()
    optical.OpticalPathIdentifier, optical.ObjectiveLensPower = "1", 40
    kind = Dataset()
    kind.CodeValue, kind.CodingSchemeDesignator, kind.CodeMeaning = (
        "111744",
        "DCM",
        "Brightfield illumination",
    )
    optical.IlluminationTypeCodeSequence = DicomSequence([kind])
    optical.ICCProfile = PLANTED[4].encode().ljust(16, b"\0")
    data.OpticalPathSequence = DicomSequence([optical])
    data.DimensionOrganizationType = "TILED_FULL" if sparse is None else "TILED_SPARSE"
    if sparse is not None:
        groups = []
        for row, column in places:
            position, group = Dataset(), Dataset()
            position.RowPositionInTotalImagePixelMatrix = row * tile + 1
            position.ColumnPositionInTotalImagePixelMatrix = column * tile + 1
            position.XOffsetInSlideCoordinateSystem = 20.0 - row * tile * mpp / 1000
            position.YOffsetInSlideCoordinateSystem = 40.0 - column * tile * mpp / 1000
            position.ZOffsetInSlideCoordinateSystem = 0.0
            group.PlanePositionSlideSequence = DicomSequence([position])
            groups.append(group)
        data.PerFrameFunctionalGroupsSequence = DicomSequence(groups)
    if syntax == ExplicitVRLittleEndian:
        data.PhotometricInterpretation = "RGB"
        data.PixelData = np.stack(tiles).tobytes()
    elif syntax in (JPEG2000, JPEG2000Lossless):
        is_lossy = syntax == JPEG2000
        data.PhotometricInterpretation = "YBR_ICT" if is_lossy else "YBR_RCT"
        options: dict[str, Any] = {"level": 40 if is_lossy else 0, "reversible": not is_lossy}  # decibels
        data.PixelData = encapsulate(
            [imagecodecs.jpeg2k_encode(one, codecformat="j2k", mct=True, **options) for one in tiles]
        )
    else:
        data.PhotometricInterpretation = "YBR_FULL_422"
        data.PixelData = encapsulate(
            [_with_comment(bytes(imagecodecs.jpeg8_encode(one, level=90))) for one in tiles]
        )
    data["PixelData"].VR = "OB"
    for keyword, value in changes.items():
        setattr(data, keyword, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data.save_as(path, enforce_file_format=True)


def _with_comment(stream: bytes) -> bytes:
    """Put identifiers into a JPEG stream: in a comment, in Exif, and behind its end."""
    text = " ".join(PLANTED).encode()
    comment = b"".join(struct.pack(">BBH", 0xFF, marker, len(text) + 2) + text for marker in (0xFE, 0xE1))
    return stream[:2] + comment + stream[2:] + text


def slide_sample(
    number: int, pixels: NDArray[np.uint8], *, factors: Sequence[int] = (1, 4), mpp: float | None = 0.25
) -> MadeSample:
    """Return a study of one slide without loss, as packing stores it; tiles of white glass are not stored."""
    key = sample_key(number)
    fields: dict[str, bytes] = {}
    volumes: dict[str, StoredVolume] = {}
    tile = 32 + 8 * (number % 3), 32 + 16 * (number % 2)
    for place, level in enumerate(pyramid(pixels, factors)):
        name = level_field(0, place)
        with LevelWriter(
            (level.shape[0], level.shape[1]), tile, folder=Path(tempfile.gettempdir())
        ) as writer:
            for top in range(0, level.shape[0], tile[0]):
                for left in range(0, level.shape[1], tile[1]):
                    own = level[top : top + tile[0], left : left + tile[1]]
                    missing = [(0, tile[0] - own.shape[0]), (0, tile[1] - own.shape[1]), (0, 0)]
                    share = -(-int(np.count_nonzero((own != 255).any(axis=2))) * 255 // (own.size // 3))
                    whole = np.pad(own, missing, mode="edge")
                    writer.add(encode_tile(whole) if share else None, share)
            encoded = writer.finish("deflate")
            fields[name], volumes[name] = encoded.read_frame(), encoded.stored
    rows, columns = pixels.shape[:2]
    series = {
        "modality": "SM",
        "kind": "slide",
        "num_slices": 1,
        "rows": rows,
        "columns": columns,
        "samples_per_pixel": 3,
        "dtype": "uint8",
        "codec": "tiles",
        "unit": "rgb",
        "display_range": [0.0, 255.0],
        "series_number": 1,
        "instance_numbers": [1],
        "stack_index": 0,
        "affine_lps": None,
        "pixel_spacing_mm": None if mpp is None else [mpp / 1000] * 2,
        "slice_spacing_mm": None,
        "flags": [],
        "technical": {},
        "slide": {"objective_power": 40.0},
    }
    study = {"format_version": 1, "sample_key": key, "series": [series]}
    fields[STUDY_FIELD] = json.dumps(study, sort_keys=True).encode()
    facts = SampleFacts(text_bytes=0, num_series=1, num_slices=1, rows=rows, columns=columns, modality="SM")
    return MadeSample(key=key, fields=dict(sorted(fields.items())), facts=facts, volumes=volumes)
