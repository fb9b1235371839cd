"""What lies beside the slices of a series: a thumbnail for people, small slices and variants for models.

Fields (docs/format.md, section 4): ``sSSS.small.iIIII.CODEC`` and ``sSSS.thumb.jpg``. They follow the slices
of their series in the tar, so that all small slices of a series are one read. While the slices stream by, the
small ones wait encoded in a spool: in memory up to a bound, above it in a file without a name.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any, Final, Self

from shardflow.packing.area import fit_within, scale_affine, shrink
from shardflow.packing.augmented import SeriesPool
from shardflow.packing.workplace import storage_error
from shardflow.preview.thumbnails import encode_thumbnail
from shardflow.shards.codecs import encode_array
from shardflow.shards.keys import small_field, thumbnail_field

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from shardflow.fields.augmentation import Draw
    from shardflow.packing.field_order import InOrder
    from shardflow.packing.variants_config import VariantsConfig
    from shardflow.sources.dicom import DecodedSlice, SliceForm, Stack

__all__ = ["SeriesVariants"]

_SPOOL_BYTES: Final = 64 << 20


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
