"""Make slices smaller by averaging areas: exact, so that the bytes are the same on every machine.

A pixel of the result is the mean of the pixels under it, those at its edges by their part. For integers of
up to 16 bits all sums are integers and the mean is rounded once, half up. A mean keeps the unit (HU of the
mean attenuation) and never leaves the range of its pixels, as sharper filters do. Padding is left out.

Augmented variants of a series behind its slices: a pool that training chooses from.

Fields (docs/format.md, section 4): ``sSSS.vVV.iIIII.CODEC``. Slices wait as they were encoded in a spool, in
memory up to a bound, above it in a file without a name: what changes intensities needs the display range,
which is known once all slices have passed. Then variant after variant is made slice by slice.

What lies beside the slices of a series: a thumbnail for people, small slices and variants for models.

Fields (docs/format.md, section 4): ``sSSS.small.iIIII.CODEC`` and ``sSSS.thumb.jpg``. They follow the slices
of their series in the tar, so that all small slices of a series are one read. While the slices stream by, the
small ones wait encoded in a spool: in memory up to a bound, above it in a file without a name.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.augmentation import ALLOWED, Draw, Warp, change_intensity, draw_sample, names_a_side
from shardflow.format.codecs import decode_array, encode_array
from shardflow.format.keys import small_field, thumbnail_field, variant_field
from shardflow.packing.workspace import storage_error
from shardflow.viewing.planes import encode_thumbnail

if TYPE_CHECKING:
    from types import TracebackType

    from shardflow.packing.settings import PoolConfig, VariantsConfig
    from shardflow.packing.sources.dicom.pixels import DecodedSlice, SliceForm
    from shardflow.packing.sources.dicom.stacks import Stack
    from shardflow.packing.studies.fragment import InOrder

Matrix = list[list[float]]


def fit_within(rows: int, columns: int, max_side: int) -> tuple[int, int]:
    """Return the size of a smaller version with the same shape; the size itself where it fits.

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
        valid: ``(R, C)``, False at padding, which takes no part.
        fill: What a pixel becomes under which all is padding.

    Returns:
        ``(rows, columns)`` or ``(rows, columns, samples)`` of the same dtype.
    """
    is_exact = pixels.dtype.kind in "iub" and pixels.dtype.itemsize <= 2
    exact = np.dtype(np.int64 if is_exact else np.float64)
    mask = None if valid is None else valid.reshape(*valid.shape, *(1,) * (pixels.ndim - 2))
    values = pixels if mask is None else np.where(mask, pixels, pixels.dtype.type(0))
    sums = _sums(values, rows, columns, exact)
    # Every pixel of the result has R x C units of area, if none of them is padding.
    areas: Any = exact.type(pixels.shape[0] * pixels.shape[1])
    if mask is not None:
        areas = _sums(mask, rows, columns, exact)
    known = np.maximum(areas, 1)
    means = (2 * sums + known) // (2 * known) if is_exact else sums / known
    return np.where(areas > 0, means, fill).astype(pixels.dtype)


def _sums(values: NDArray[Any], rows: int, columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Sum what lies under each pixel of the result, weighted by area, in units of 1 / (rows x columns)."""
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

    The corners of the image stay where they are, so the centre of the first pixel moves by half of what the
    pixels grow.

    Args:
        affine: 4 x 4: maps ``(column, row, slice, 1)`` to mm, at pixel centres.
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


_SPOOL_BYTES: Final = 64 << 20


def speaks_of_sides(texts: Iterable[bytes], contents: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether anything that is packed with a study would be wrong of mirrored images.

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
    """Draw the variants of a series; none where its modality allows nothing.

    Args:
        config: How much is wanted.
        modality: Of the series.
        sample_key: Of the study, which all numbers follow from.
        has_sides: Whether `speaks_of_sides`.
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


class SeriesPool:
    """Keeps the slices of one series while they pass, and makes their variants at the end.

    Args:
        draws: What each variant gets.
        writer: Of the study's fragment.
        number: Of the series in the study.
        stack: The series.
        form: How its slices look.
        codec: Of its slices.
    """

    def __init__(
        self, draws: Sequence[Draw], writer: InOrder, number: int, stack: Stack, form: SliceForm, codec: str
    ) -> None:
        self._draws = draws
        self._writer = writer
        self._number = number
        self._stack = stack
        self._form = form
        self._codec = codec
        self._sizes: list[int] = []
        self._spool = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by close
            max_size=_SPOOL_BYTES, dir=str(writer.folder)
        )

    def close(self) -> None:
        """Forget the slices."""
        self._spool.close()

    def add(self, payload: bytes) -> None:
        """Take the next slice as it was encoded.

        Raises:
            StorageError: The spool cannot be written.
        """
        if not self._draws:
            return
        self._sizes.append(len(payload))
        try:
            self._spool.write(payload)
        except OSError as error:
            raise storage_error("writing slices aside", error) from None

    def write(self, display_range: tuple[float, float]) -> list[dict[str, Any]]:
        """Make and write all variants.

        Returns:
            What ``study.json`` says of them.

        Raises:
            StorageError: A field cannot be written, or the spool not be read.
        """
        spacing = self._stack.geometry.pixel_spacing_mm
        aspect = 1.0 if spacing is None else spacing[0] / spacing[1]
        for variant, draw in enumerate(self._draws, 1):
            warp = Warp(draw, self._stack.rows, self._stack.columns, pixel_aspect=aspect)
            for index, payload in enumerate(self._payloads()):
                pixels = decode_array(self._codec, payload)
                if draw.changes_intensity:
                    pixels = change_intensity(pixels, draw, display_range)
                turned = warp.image(pixels, fill=self._form.fill)
                name = variant_field(self._number, variant, index, self._codec)
                self._writer.add(name, encode_array(self._codec, turned))
        return [{"variant": variant, **draw.to_json()} for variant, draw in enumerate(self._draws, 1)]

    def _payloads(self) -> Iterable[bytes]:
        try:
            self._spool.seek(0)
            for size in self._sizes:
                yield self._spool.read(size)
        except OSError as error:
            raise storage_error("reading slices back", error) from None


class SeriesVariants:
    """Makes the variants of one series while its slices pass; a context manager.

    Args:
        config: What to make.
        writer: Of the study's fragment.
        number: Of the series in the study.
        stack: The series.
        form: How its slices look.
        codec: Of its slices.
        draws: What each augmented variant gets.
    """

    def __init__(
        self,
        config: VariantsConfig,
        writer: InOrder,
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
        self._codec = codec
        self._size = fit_within(stack.rows, stack.columns, config.small_px or max(stack.rows, stack.columns))
        self._has_small = self._size != (stack.rows, stack.columns)
        self._spool = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by __exit__
            max_size=_SPOOL_BYTES, dir=str(writer.folder)
        )
        self._pool = SeriesPool(draws, writer, number, stack, form, codec)
        self._sizes: list[int] = []
        self._middle: NDArray[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()
        self._pool.close()

    def add(self, index: int, decoded: DecodedSlice, payload: bytes) -> None:
        """Take the next slice, decoded and as it was encoded.

        Raises:
            StorageError: The spool cannot be written.
        """
        if self._config.thumbnail_px and index == len(self._stack.slices) // 2:
            self._middle = decoded.pixels.copy()
        self._pool.add(payload)
        if self._has_small:
            small = shrink(decoded.pixels, *self._size, valid=decoded.valid, fill=self._form.fill)
            shrunk = encode_array(self._codec, small)
            self._sizes.append(len(shrunk))
            try:
                self._spool.write(shrunk)
            except OSError as error:
                raise storage_error("writing small slices aside", error) from None

    def finish(self, display_range: tuple[float, float]) -> dict[str, Any]:
        """Write the fields.

        Returns:
            What ``study.json`` says of the variants of the series.

        Raises:
            StorageError: A field cannot be written, or the spool not be read.
        """
        said: dict[str, Any] = {}
        if self._has_small:
            self._write_small()
            said["small"] = self._describe_small()
        if self._middle is not None:
            picture = encode_thumbnail(
                self._middle,
                self._stack.geometry.pixel_spacing_mm,
                display_range,
                max_side=self._config.thumbnail_px,
            )
            self._writer.add(thumbnail_field(self._number), picture.jpeg)
            said["thumbnail"] = {
                "columns": picture.width,
                "rows": picture.height,
                "slice": len(self._stack.slices) // 2,
            }
        augmented = self._pool.write(display_range)
        if augmented:
            said["augmented"] = augmented
        return said

    def _write_small(self) -> None:
        try:
            self._spool.seek(0)
            for index, size in enumerate(self._sizes):
                self._writer.add(small_field(self._number, index, self._codec), self._spool.read(size))
        except OSError as error:
            raise storage_error("reading small slices back", error) from None

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
