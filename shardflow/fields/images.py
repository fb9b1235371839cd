"""Slices of a sample's primary series: chosen, read with the report in one go, and decoded into place.

Only what the view and the text setting ask for is read: the chosen slices, the study's description (for the
display range), the report. A finding that a sample is bad concerns its slot alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.fields.decode import convert_slice, decode_slice
from shardflow.fields.findings import centre_first
from shardflow.fields.quarantine import BadSample, BadSampleReason
from shardflow.fields.reader import FieldReader, Shard
from shardflow.fields.scratch import ThreadState
from shardflow.fields.text import SlotRequest, check_row, find_text, put_text
from shardflow.fields.views import ImageView, SizedView, TileView, View
from shardflow.seeds import derive
from shardflow.telemetry import StageCounters

ORIGINAL = 0
_WORD = 2**64


def choose_variant(
    num_variants: int, share: float, *, seed: int, epoch: int, row: int, place: tuple[int, ...] = ()
) -> int:
    """Return the number of the variant, from 1, or `ORIGINAL`.

    Args:
        num_variants: Of the sample's series.
        share: Of the samples that get a variant; which one, all are as likely.
        seed: Run-level seed.
        epoch: The epoch.
        row: Row of the sample in the samples table; of a blend, the blended one.
        place: Step, micro-batch and slot in a blend, where a sample may stand twice; else nothing.
    """
    if not num_variants or derive(seed, "variant-share", epoch, row, *place) >= share * _WORD:
        return ORIGINAL
    return 1 + derive(seed, "variant-choice", epoch, row, *place) * num_variants // _WORD


def find_slices(
    shard: Shard,
    row_in_shard: int,
    view: View,
    series: int,
    *,
    seed: int,
    epoch: int,
    row: int,
    place: tuple[int, ...] = (),
) -> tuple[NDArray[np.int64], int]:
    """Return the fields that hold the slices of a sample's series, and which variant of it they are.

    A variant has all slices of its series; one that has not is none, and the original is taken.
    """
    slices = shard.slices(row_in_shard, view.resolution, series)
    if isinstance(view, ImageView) and view.augment_pool:
        num_variants = shard.num_variants(row_in_shard, series)
        variant = choose_variant(
            num_variants, view.augment_pool, seed=seed, epoch=epoch, row=row, place=place
        )
        varied = shard.variant_slices(row_in_shard, variant, series) if variant else slices[:0]
        if len(varied) == len(slices):
            return varied, variant
    return slices, ORIGINAL


_LOGGER = logging.getLogger(__name__)

# What a field is for: a slice has its place among the chosen ones, from 0.
_REPORT = -1
_STUDY = -2


@dataclass(slots=True)
class _Slot:
    """A slot under way."""

    request: SlotRequest
    slices: NDArray[Any] | None = None
    """``(chosen, rows, columns)``, the place of its slices."""
    display_range: tuple[float, float] | None = None


@dataclass(slots=True)
class _Work:
    """The fields to read, and for each the slot it belongs to and what it is for."""

    fields: list[int] = field(default_factory=list)
    purposes: list[tuple[_Slot, int]] = field(default_factory=list)

    def add(self, slot: _Slot, purpose: int, number: int) -> None:
        self.fields.append(number)
        self.purposes.append((slot, purpose))


class ImageAssembler:
    """Fills slots for the micro-batches of one epoch. Safe for many threads.

    Args:
        reader: Where bytes come from.
        view: Which slices of the primary series; None for text alone.
        text: Whether the report is asked for.
        seed: Run-level seed, which keys the choice of slices.
        epoch: The epoch.
        counters: Gets the stages ``decode``, ``transform`` and ``saturated`` (items: pixels).
    """

    def __init__(
        self,
        reader: FieldReader,
        view: View | None,
        *,
        text: bool,
        seed: int,
        epoch: int,
        counters: StageCounters,
    ) -> None:
        self._reader = reader
        self._view = view
        self._text = text
        self._seed = seed
        self._epoch = epoch
        self._counters = counters
        self._has_warned = False

    def fill(
        self,
        shard_number: int,
        requests: list[SlotRequest],
        arrays: Mapping[str, NDArray[Any]],
        thread: ThreadState,
    ) -> dict[int, BadSample]:
        """Fill slots whose samples lie in one shard.

        Args:
            shard_number: Position of the shard in the manifest.
            requests: The slots.
            arrays: The arrays of the micro-batch.
            thread: Of the caller.

        Returns:
            The slots whose sample is bad, and why; their arrays hold anything.

        Raises:
            StorageError: The store cannot read the shard at all.
        """
        try:
            shard = self._reader.open_shard(shard_number, thread)
        except BadSample as bad:
            return {request.slot: bad for request in requests}
        bad_slots: dict[int, BadSample] = {}
        slots = [_Slot(request) for request in requests]
        work = _Work()
        for slot in slots:
            try:
                self._order(shard, slot, arrays, work)
            except BadSample as bad:
                bad_slots[slot.request.slot] = bad
        for position, payload in self._reader.read(shard, np.array(work.fields, np.int64), thread):
            slot, purpose = work.purposes[position]
            if slot.request.slot in bad_slots:
                continue
            try:
                self._put(shard, work.fields[position], slot, purpose, payload, arrays, thread)
            except BadSample as bad:
                bad_slots[slot.request.slot] = bad
        if self._view is not None:
            for slot in slots:
                if slot.request.slot not in bad_slots:
                    arrays["display_range"][slot.request.slot] = _display_range(slot)
        return bad_slots

    def _order(self, shard: Shard, slot: _Slot, arrays: Mapping[str, NDArray[Any]], work: _Work) -> None:
        """Add the fields that a slot needs to the work."""
        request = slot.request
        check_row(shard, request)
        row = request.row_in_shard
        report = find_text(shard, request) if self._text else None
        if report is not None:
            work.add(slot, _REPORT, report)
        view = self._view
        if view is None:
            return
        entity = request.entity
        series = 0 if entity is None else entity.series
        key = {"seed": self._seed, "epoch": self._epoch, "row": request.row}
        slices, variant = find_slices(shard, row, view, series, **key, place=request.place)
        if "variant" in arrays:
            arrays["variant"][request.slot] = variant
        chooser = view.of_size(int(arrays["size"][request.slot])) if isinstance(view, SizedView) else view
        num_slices = len(slices) if entity is None else len(entity.slices)
        chosen = chooser.choose(num_slices, **key, place=request.place)
        if entity is not None:
            chosen = centre_first(chosen, entity)
            if chosen.max(initial=-1) >= len(slices):
                raise shard.bad(BadSampleReason.FIELD_MISSING, "", "a slice of the entity")
        try:
            slot.slices = view.target(arrays, request.slot, len(chosen))
        except FormatError as error:
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, "", error.message) from None
        for purpose, number in enumerate(slices[chosen].tolist()):
            work.add(slot, purpose, number)
        study = shard.study(row)
        if study is not None and len(chosen):
            work.add(slot, _STUDY, study)

    def _put(
        self,
        shard: Shard,
        number: int,
        slot: _Slot,
        purpose: int,
        payload: NDArray[np.uint8] | BadSample,
        arrays: Mapping[str, NDArray[Any]],
        thread: ThreadState,
    ) -> None:
        """Put one field where it belongs."""
        if isinstance(payload, BadSample):
            raise payload
        if purpose == _REPORT:
            put_text(shard, slot.request, payload, arrays)
        elif purpose == _STUDY:
            slot.display_range = self._display_range(shard, slot.request, payload)
        else:
            self._put_slice(shard, number, slot, purpose, payload, arrays, thread)

    def _display_range(
        self, shard: Shard, request: SlotRequest, payload: NDArray[np.uint8]
    ) -> tuple[float, float] | None:
        """Return what the study says, or the view's window for a CT; None where there is neither."""
        series = 0 if request.entity is None else request.entity.series
        stated, is_hounsfield = _read_display_range(shard, payload, series)
        if self._view is None or not is_hounsfield:
            return stated
        chosen = self._view.window(seed=self._seed, epoch=self._epoch, row=request.row, place=request.place)
        return stated if chosen is None else chosen

    def _put_slice(
        self,
        shard: Shard,
        number: int,
        slot: _Slot,
        purpose: int,
        payload: NDArray[np.uint8],
        arrays: Mapping[str, NDArray[Any]],
        thread: ThreadState,
    ) -> None:
        view, slices = self._view, slot.slices
        if view is None or slices is None:
            return
        place = slices[purpose]
        target = place
        if isinstance(view, TileView):
            shape = view.canvas_shape(arrays, slot.request.slot)
            target = thread.scratch.array("canvas", shape, place.dtype)
        elif not place.flags.c_contiguous:
            # Codecs fill rows without gaps; a slice in a frame has some.
            target = thread.scratch.array("framed", place.shape, place.dtype)
        thread.enter("decode", f"shard {shard.name}")
        try:
            with self._counters.timed("decode", target.nbytes):
                decoded = decode_slice(
                    shard.codec(number), payload, target, thread.scratch, may_resize=view.may_resize
                )
        except FormatError as error:
            raise shard.bad(BadSampleReason.DECODE_FAILED, number, error.message) from None
        if decoded is not None:
            thread.enter("transform", f"shard {shard.name}")
            with self._counters.timed("transform", target.nbytes):
                num_saturated = convert_slice(decoded, target, thread.scratch)
            if num_saturated:
                self._counters.add("saturated", num_items=num_saturated)
            if num_saturated or (decoded.dtype.kind == "f" and target.dtype.kind != "f"):
                self._warn_of_loss(decoded.dtype, target.dtype)
        if isinstance(view, TileView):
            view.cut(target, place)
        elif target is not place:
            np.copyto(place, target)

    def _warn_of_loss(self, stored: np.dtype[Any], delivered: np.dtype[Any]) -> None:
        """Say once an epoch that pixels are not what was stored; two threads at once may both say it."""
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "pixels are cut or rounded: slices stored as %s are delivered as %s; set the view's dtype "
                "(image.dtype of a training run) to float32",
                stored,
                delivered,
            )


def _read_display_range(
    shard: Shard, payload: NDArray[np.uint8], number: int
) -> tuple[tuple[float, float] | None, bool]:
    """Read the display range of a series, None if none is given, and whether it is in HU."""
    try:
        series = json.loads(payload.tobytes())["series"][number]
        found, is_hounsfield = series.get("display_range"), series.get("unit") == "HU"
        if found is None:
            return None, is_hounsfield
        low, high = found
        return (float(low), float(high)), is_hounsfield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise shard.bad(BadSampleReason.TEXT_UNREADABLE, "study.json", type(error).__name__) from None


def _display_range(slot: _Slot) -> tuple[float, float]:
    """Return what the study says, else the extremes of the slices that are there."""
    if slot.display_range is not None:
        return slot.display_range
    if slot.slices is None or not slot.slices.size:
        return 0.0, 0.0
    return float(slot.slices.min()), float(slot.slices.max())
