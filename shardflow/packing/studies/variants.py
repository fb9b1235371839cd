"""Variants of the slices of a series: small versions and a thumbnail, and augmented copies to train on.

Fields (docs/format.md, section 4): ``sSSS.small.iIIII.CODEC``, ``sSSS.thumb.jpg``,
``sSSS.vVV.iIIII.CODEC``. They follow the slices of their series in the tar, so that all small slices of a
series are one read. While slices stream by, what is needed later waits encoded in a spool: in memory up to
a bound, above it in an unnamed file. Augmented variants are made at the end, when the display range is
known.

Smaller versions average areas, exactly: bytes are the same on every machine. A pixel is the mean of the
pixels under it, weighted by area; for integers of up to 16 bits all sums are integers and the mean is
rounded once, half up. A mean keeps the unit (HU of the mean attenuation) and never leaves the range of its
pixels, as sharper filters do. Padding is left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import naming_os_errors
from shardflow.fields.augmentation import ALLOWED, Draw, Warp, change_intensity, draw_sample, names_a_side
from shardflow.format.codecs import decode_array, encode_array, stored_codec
from shardflow.format.keys import small_field, thumbnail_field, variant_field
from shardflow.viewing.study import encode_thumbnail

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from shardflow.packing.settings import PoolConfig, VariantsConfig
    from shardflow.packing.sources.dicom.pixels import DecodedSlice, SliceForm
    from shardflow.packing.sources.dicom.stacks import Stack
    from shardflow.packing.studies.assembly import FragmentWriter

Matrix = list[list[float]]
_SPOOL_BYTES: Final = 64 << 20


def fit_within(rows: int, columns: int, max_side: int) -> tuple[int, int]:
    """Return the size of a smaller version with the same proportions; the size itself if it fits.

    Example:
        >>> fit_within(512, 384, 128), fit_within(100, 60, 128)
        ((128, 96), (100, 60))
    """
    longest = max(rows, columns)
    if longest <= max_side:
        return rows, columns
    small = [max((2 * side * max_side + longest) // (2 * longest), 1) for side in (rows, columns)]
    return small[0], small[1]


def shrink(
    pixels: NDArray[Any],
    rows: int,
    columns: int,
    *,
    valid: NDArray[np.bool_] | None = None,
    fill: float = 0,
) -> NDArray[Any]:
    """Average a slice to a smaller size.

    Args:
        pixels: ``(R, C)`` or ``(R, C, samples)``.
        rows: At most R.
        columns: At most C.
        valid: ``(R, C)``, False at padding, which is left out.
        fill: Value of a pixel with nothing but padding under it.

    Returns:
        ``(rows, columns)`` or ``(rows, columns, samples)`` of the same dtype.
    """
    is_exact = pixels.dtype.kind in "iub" and pixels.dtype.itemsize <= 2
    exact = np.dtype(np.int64 if is_exact else np.float64)
    mask = None if valid is None else valid.reshape(*valid.shape, *(1,) * (pixels.ndim - 2))
    values = pixels if mask is None else np.where(mask, pixels, pixels.dtype.type(0))
    sums = _sums(values, rows, columns, exact)
    # Without padding, every pixel of the result covers R x C units of area.
    areas: Any = exact.type(pixels.shape[0] * pixels.shape[1])
    if mask is not None:
        areas = _sums(mask, rows, columns, exact)
    known = np.maximum(areas, 1)
    means = (2 * sums + known) // (2 * known) if is_exact else sums / known
    return np.where(areas > 0, means, fill).astype(pixels.dtype)


def _sums(values: NDArray[Any], rows: int, columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Sum the pixels under each pixel of the result, weighted by area in units of 1 / (rows x columns)."""
    by_rows = _sum_rows(values, rows, dtype)
    return np.swapaxes(_sum_rows(np.ascontiguousarray(np.swapaxes(by_rows, 0, 1)), columns, dtype), 0, 1)


def _sum_rows(values: NDArray[Any], num_rows: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    size = len(values)
    if size % num_rows == 0:
        parts = values.reshape(num_rows, size // num_rows, *values.shape[1:])
        return np.asarray(parts.sum(axis=1, dtype=dtype) * dtype.type(num_rows))
    sums = np.empty((num_rows, *values.shape[1:]), dtype)
    for row in range(num_rows):
        # Each row of the source is num_rows units long, each of the result size units.
        first, start = divmod(row * size, num_rows)
        last, stop = divmod((row + 1) * size - 1, num_rows)
        sums[row] = values[first].astype(dtype) * dtype.type(num_rows - start)
        sums[row] += values[last].astype(dtype) * dtype.type(stop + 1)
        sums[row] += values[first + 1 : last].sum(axis=0, dtype=dtype) * dtype.type(num_rows)
        if first == last:
            sums[row] = values[first].astype(dtype) * dtype.type(size)
    return sums


def scale_affine(affine: Matrix, row_factor: float, column_factor: float) -> Matrix:
    """Return the affine of a version whose pixels are larger.

    The corners of the image stay in place, so the center of the first pixel moves by half the growth of a
    pixel.

    Args:
        affine: 4 x 4: maps ``(column, row, slice, 1)`` to mm, at pixel centers.
        row_factor: How much the distance between rows grows.
        column_factor: How much the distance between columns grows.
    """
    shift_column, shift_row = (column_factor - 1) / 2, (row_factor - 1) / 2
    return [
        [
            line[0] * column_factor,
            line[1] * row_factor,
            line[2],
            line[3] + line[0] * shift_column + line[1] * shift_row,
        ]
        for line in affine
    ]


def study_names_a_side(texts: Iterable[bytes], contents: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether any text or annotation of a study would be wrong for mirrored images.

    Args:
        texts: Reports and documents, UTF-8.
        contents: JSON fields of the sample by name, such as ``annotations``.
    """
    if any(names_a_side(text.decode("utf-8", "replace")) for text in texts):
        return True
    regions = contents.get("annotations", {}).get("rois", ())
    return any(region.get("laterality") for region in regions) or any(
        names_a_side(json.dumps(content, ensure_ascii=True)) for content in contents.values()
    )


def draw_variants(
    config: PoolConfig, *, modality: str | None, sample_key: str, has_sides: bool
) -> tuple[Draw, ...]:
    """Draw the augmentations of a series; none if its modality allows nothing.

    Args:
        config: Settings of the augmentation.
        modality: Of the series.
        sample_key: Of the study; seeds all numbers.
        has_sides: Result of `study_names_a_side`.
    """
    if modality not in ALLOWED:
        return ()
    key = int.from_bytes(sample_key.encode("ascii"), "big")
    return tuple(
        draw_sample(
            config,
            modality=modality,
            report_names_a_side=has_sides,
            seed=config.seed,
            place=(key, number),
            elastic=config.elastic,
        )
        for number in range(1, config.num_variants + 1)
    )


class _Spool:
    """Encoded slices of a series that wait until all of them have passed."""

    def __init__(self, folder: Path) -> None:
        self._sizes: list[int] = []
        self._file = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by close
            max_size=_SPOOL_BYTES, dir=str(folder)
        )

    def close(self) -> None:
        self._file.close()

    def add(self, payload: bytes) -> None:
        self._sizes.append(len(payload))
        with naming_os_errors("writing slices to a temporary file"):
            self._file.write(payload)

    def __iter__(self) -> Iterator[bytes]:
        with naming_os_errors("reading slices back from a temporary file"):
            self._file.seek(0)
        for size in self._sizes:
            with naming_os_errors("reading slices back from a temporary file"):
                payload = self._file.read(size)
            yield payload


class SeriesVariants:
    """Writer of the variants of one series, fed with its slices; a context manager.

    Args:
        config: Settings of the variants.
        writer: Of the study's fragment.
        number: Of the series in the study.
        stack: The series.
        form: Form of its slices.
        codec: Of its slices.
        draws: Augmentation of each variant.
    """

    def __init__(
        self,
        config: VariantsConfig,
        writer: FragmentWriter,
        number: int,
        stack: Stack,
        form: SliceForm,
        codec: str,
        draws: Sequence[Draw] = (),
    ) -> None:
        self._config = config
        self._writer = writer
        self._number = number
        self._stack = stack
        self._form = form
        self._encoding, self._codec = codec, stored_codec(codec)
        self._draws = draws
        self._size = fit_within(stack.rows, stack.columns, config.small_px or max(stack.rows, stack.columns))
        self._has_small = self._size != (stack.rows, stack.columns)
        self._small, self._full = _Spool(writer.folder), _Spool(writer.folder)
        self._middle: NDArray[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._small.close()
        self._full.close()

    def add(self, index: int, decoded: DecodedSlice, payload: bytes) -> None:
        """Take the next slice, decoded and encoded.

        Raises:
            StorageError: The spool cannot be written.
        """
        if self._config.thumbnail_px and index == len(self._stack.slices) // 2:
            self._middle = decoded.pixels.copy()
        if self._draws:
            self._full.add(payload)
        if self._has_small:
            small = shrink(decoded.pixels, *self._size, valid=decoded.valid, fill=self._form.fill)
            self._small.add(encode_array(self._encoding, small))

    def finish(self, display_range: tuple[float, float]) -> dict[str, Any]:
        """Write the fields.

        Returns:
            The variants of the series for ``study.json``.

        Raises:
            StorageError: A field cannot be written, or the spool not be read.
        """
        variants: dict[str, Any] = {}
        if self._has_small:
            for index, payload in enumerate(self._small):
                self._writer.add(small_field(self._number, index, self._codec), payload)
            variants["small"] = self._describe_small()
        if self._middle is not None:
            picture = encode_thumbnail(
                self._middle,
                self._stack.geometry.pixel_spacing_mm,
                display_range,
                max_side=self._config.thumbnail_px,
            )
            self._writer.add(thumbnail_field(self._number), picture.jpeg)
            variants["thumbnail"] = {
                "columns": picture.width,
                "rows": picture.height,
                "slice": len(self._stack.slices) // 2,
            }
        if self._draws:
            self._write_augmented(display_range)
            variants["augmented"] = [
                {"variant": variant, **draw.to_json()} for variant, draw in enumerate(self._draws, 1)
            ]
        return variants

    def _write_augmented(self, display_range: tuple[float, float]) -> None:
        spacing = self._stack.geometry.pixel_spacing_mm
        aspect = 1.0 if spacing is None else spacing[0] / spacing[1]
        for variant, draw in enumerate(self._draws, 1):
            warp = Warp(draw, self._stack.rows, self._stack.columns, pixel_aspect=aspect)
            for index, payload in enumerate(self._full):
                pixels = decode_array(self._codec, payload)
                if draw.changes_intensity:
                    pixels = change_intensity(pixels, draw, display_range)
                warped = warp.image(pixels, fill=self._form.fill)
                name = variant_field(self._number, variant, index, self._codec)
                self._writer.add(name, encode_array(self._encoding, warped))

    def _describe_small(self) -> dict[str, Any]:
        geometry = self._stack.geometry
        rows, columns = self._size
        row_factor, column_factor = self._stack.rows / rows, self._stack.columns / columns
        spacing, affine = geometry.pixel_spacing_mm, geometry.affine_lps
        return {
            "affine_lps": None
            if affine is None
            else scale_affine([list(line) for line in affine], row_factor, column_factor),
            "columns": columns,
            "pixel_spacing_mm": None
            if spacing is None
            else [spacing[0] * row_factor, spacing[1] * column_factor],
            "rows": rows,
        }
