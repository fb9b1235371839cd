"""Augmented variants of a series behind its slices: a pool that training chooses from.

Fields (docs/format.md, section 4): ``sSSS.vVV.iIIII.CODEC``. Slices wait as they were encoded in a spool, in
memory up to a bound, above it in a file without a name: what changes intensities needs the display range,
which is known once all slices have passed. Then variant after variant is made slice by slice.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardflow.fields.augmentation import ALLOWED, Draw, Warp, change_intensity, draw_sample, names_a_side
from shardflow.packing.workplace import storage_error
from shardflow.shards.codecs import decode_array, encode_array
from shardflow.shards.keys import variant_field

if TYPE_CHECKING:
    from shardflow.packing.field_order import InOrder
    from shardflow.packing.variants_config import PoolConfig
    from shardflow.sources.dicom import SliceForm, Stack

__all__ = ["SeriesPool", "draw_variants", "speaks_of_sides"]

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
