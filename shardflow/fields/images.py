"""Field kind of slices: chosen slices of a series, decoded into their places, with the display range.

Only the chosen slices are read, and the study's description for the display range.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.decode import ThreadState, convert_slice, decode_slice
from shardflow.fields.field import Arrays, DrawKey, SlotRequest
from shardflow.fields.findings import centre_first
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.views import ImageView, TileView, View
from shardflow.telemetry import StageCounters

ORIGINAL: Final = 0
"""Number of the version of a sample that is not augmented."""

_LOGGER = logging.getLogger(__name__)
_WORD: Final = 2**64


def choose_variant(num_variants: int, share: float, key: DrawKey) -> int:
    """Return the number of the variant, from 1, or `ORIGINAL`.

    Args:
        num_variants: Number of variants of the series.
        share: Share of the samples that get a variant; all variants are equally likely.
        key: Key of the sample's random choices.
    """
    if not num_variants or key.derive("variant-share") >= share * _WORD:
        return ORIGINAL
    return 1 + key.derive("variant-choice") * num_variants // _WORD


class Slices:
    """Field kind of the slices of a view.

    Args:
        view: Which slices, and how.
        counters: Gets the stages ``decode``, ``transform`` and ``saturated`` (items: pixels).
    """

    def __init__(self, view: View, counters: StageCounters) -> None:
        self.view = view
        self.counters = counters
        self._has_warned = False

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the chosen slices, and of the study's description."""
        slices, _ = self.choose(shard, request)
        return with_study(shard, request, slices)

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> _SlotSlices:
        """Begin a slot: choose its slices and lay out their places."""
        return _SlotSlices(self, shard, request, arrays)

    def choose(self, shard: Shard, request: SlotRequest) -> tuple[list[int], int]:
        """Return the numbers of the fields of the chosen slices, and the number of their variant.

        A variant that lacks slices of its series is ignored, and the original is used.

        Raises:
            BadSample: The sample lacks a slice of its finding.
        """
        view, row, key, entity = self.view, request.row_in_shard, request.draw, request.entity
        series = 0 if entity is None else entity.series
        slices, variant = shard.slices(row, view.resolution, series), ORIGINAL
        if isinstance(view, ImageView) and view.augment_pool:
            drawn = choose_variant(shard.num_variants(row, series), view.augment_pool, key)
            varied = shard.variant_slices(row, drawn, series) if drawn else slices[:0]
            if len(varied) == len(slices):
                slices, variant = varied, drawn
        chosen = view.choose(len(slices) if entity is None else len(entity.slices), key)
        if entity is not None:
            chosen = centre_first(chosen, entity)
            if chosen.max(initial=-1) >= len(slices):
                raise shard.bad(BadSampleReason.FIELD_MISSING, "", "a slice of the entity")
        return slices[chosen].tolist(), variant

    def report_loss(self, stored: np.dtype[Any], delivered: np.dtype[Any]) -> None:
        """Warn once per stream that pixels are not delivered as stored; two threads at once may both warn.

        Raises:
            ConfigError: Nobody asked for the type of the pixels.
        """
        if self.view.dtype is None:
            raise ConfigError(
                f"Slices stored as {stored} do not fit into {delivered}, the dtype of a view that names "
                'none: pixels would be cut or rounded. Write dtype="float32" in the view, which holds them, '
                f'or dtype="{delivered}" if the loss is meant.'
            )
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "pixels are cut or rounded: slices stored as %s are delivered as %s; set the view's dtype "
                "(image.dtype of a training run) to float32",
                stored,
                delivered,
            )


def with_study(shard: Shard, request: SlotRequest, slices: list[int]) -> list[int]:
    """Append the field of the study's description, which has the display range."""
    study = shard.study(request.row_in_shard) if slices else None
    return slices if study is None else [*slices, study]


class _SlotSlices:
    """Slices of one slot."""

    __slots__ = ("_arrays", "_display_range", "_kind", "_places", "_request", "_shard", "fields")

    def __init__(self, kind: Slices, shard: Shard, request: SlotRequest, arrays: Arrays) -> None:
        self._kind, self._shard, self._request, self._arrays = kind, shard, request, arrays
        slices, variant = kind.choose(shard, request)
        if "variant" in arrays:
            arrays["variant"][request.slot] = variant
        try:
            self._places = kind.view.target(arrays, request.slot, len(slices))
        except FormatError as error:
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, "", error.message) from None
        self.fields: Sequence[int] = with_study(shard, request, slices)
        self._display_range: tuple[float, float] | None = None

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Decode a slice into its place, or read the display range of the study."""
        if place == len(self._places):
            self._read_study(payload)
            return
        view, shard, counters = self._kind.view, self._shard, self._kind.counters
        number, target = self.fields[place], self._places[place]
        decoded_to = target
        if isinstance(view, TileView):
            shape = view.canvas_shape(self._arrays, self._request.slot)
            decoded_to = thread.scratch.array("canvas", shape, target.dtype)
        elif not target.flags.c_contiguous:
            # Codecs need contiguous memory, which a slice inside a frame is not.
            decoded_to = thread.scratch.array("framed", target.shape, target.dtype)
        thread.enter("decode", f"shard {shard.name}")
        try:
            with counters.timed("decode", decoded_to.nbytes):
                decoded = decode_slice(
                    shard.codec(number), payload, decoded_to, thread.scratch, may_resize=view.may_resize
                )
        except FormatError as error:
            raise shard.bad(BadSampleReason.DECODE_FAILED, number, error.message) from None
        if decoded is not None:
            thread.enter("transform", f"shard {shard.name}")
            with counters.timed("transform", decoded_to.nbytes):
                num_saturated = convert_slice(decoded, decoded_to, thread.scratch)
            if num_saturated:
                counters.add("saturated", num_items=num_saturated)
            if num_saturated or (decoded.dtype.kind == "f" and decoded_to.dtype.kind != "f"):
                self._kind.report_loss(decoded.dtype, decoded_to.dtype)
        if isinstance(view, TileView):
            view.cut(decoded_to, target)
        elif decoded_to is not target:
            np.copyto(target, decoded_to)

    def close(self) -> None:
        """Set the display range: that of the study, or else the extremes of the slices."""
        found, places = self._display_range, self._places
        if found is None and places.size:
            found = float(places.min()), float(places.max())
        self._arrays["display_range"][self._request.slot] = found or (0.0, 0.0)

    def _read_study(self, payload: NDArray[np.uint8]) -> None:
        """Read the display range of the series; for CT, the view's window if it has any."""
        entity = self._request.entity
        try:
            series = json.loads(payload.tobytes())["series"][0 if entity is None else entity.series]
            found, is_hounsfield = series.get("display_range"), series.get("unit") == "HU"
            if found is not None:
                low, high = found
                self._display_range = float(low), float(high)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            reason = BadSampleReason.TEXT_UNREADABLE
            raise self._shard.bad(reason, "study.json", type(error).__name__) from None
        window = self._kind.view.window(self._request.draw) if is_hounsfield else None
        self._display_range = window or self._display_range
