"""Field of waveforms: chosen channels of a sample's recordings, on one grid of time, in physical units."""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Field,
    FieldContext,
    Missing,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.events import window_seconds
from shardflow.fields.types.members import BoundMember, present_beside, read_npy
from shardflow.format.contents.records import StoredArray, StoredChannel, StoredRecording, read_recordings
from shardflow.format.contents.ucum import conversion
from shardflow.format.keys import WAVEFORMS_FIELD

_LOGGER = logging.getLogger(__name__)
_MAX_SAMPLES: Final = 1 << 28
_MAX_BYTES: Final = 1 << 40
_MAX_RATE_HZ: Final = 1e6
_SAMPLES_BEFORE_WARNING: Final = 16
_MAX_DENOMINATOR: Final = 4096
_ARRAY: Final = re.compile(r"w\d{3,}\.g\d{2,}\.npy", re.ASCII)
_UNITS: Final = ("mV", "mm[Hg]", "Cel")
"""Units that channels of their kinds are delivered in; others keep the stored one."""


@dataclass(frozen=True, kw_only=True)
class Waveform(Field):
    """Waveforms such as an ECG: chosen channels, on one grid of time, in physical units.

    The entry is ``(B, C, T)`` float32: voltages in mV, pressures in mm[Hg], temperatures in Cel, others in
    the stored unit, or all in ``unit``; 0 where there is no sample. ``NAME_mask`` ``(B, C, T)`` uint8 is 1
    where there is one. ``NAME_recorded`` ``(B,)`` uint8 is 1 where the study has recordings.
    ``batch.info.classes[NAME]`` names the channels.

    With ``window``, place k of T is ``begin + k / rate_hz`` seconds from the first image of the study (from
    the study, where its acquisition is not known), to the nearest place of the grid; all recordings in the
    window are used, the earlier one where two overlap, and one whose start is unknown is not. With
    ``duration_s`` it is ``k / rate_hz`` seconds from the start of one recording: of those with the most of
    the channels the nearest to the study. Other rates are resampled by `scipy.signal.resample_poly`.

    Channels that a sample's recordings lack are zeros and count as ``absent_channels`` of `Loader.counters`;
    those without a known unit or calibration too, and as ``unknown_units``.

    Example::

        sf.Waveform(channels=["II|MLII", "V1"], rate_hz=500, duration_s=10)

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "waveform"

    channels: Sequence[str]
    """Names of channels as recorded, in any case (``II`` is also ``ECG II``), or ``SCHEME:VALUE`` of their
    code; alternatives are separated by ``|``, the first that a recording has is taken."""
    rate_hz: float
    """Samples per second to deliver."""
    window: tuple[str, str] | tuple[float, float] | None = None
    """Begin and end (excluded): seconds from the study, or text such as ``"-10s"``."""
    duration_s: float | None = None
    """In place of ``window``: length from the start of a recording."""
    unit: str | None = None
    """Unit of all channels, such as ``"uV"``."""
    max_bytes: int = 1 << 26
    """Size that the recordings of a sample may have, all of which are read; larger ones mask its slot."""
    missing: Missing = "pad"
    """Meaning of a sample without recordings. ``error`` masks its slot and counts a bad sample; ``drop`` is
    refused, since no table knows which samples have them."""

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, ("pad", "drop", "error"))
        check_count("max_bytes", self.max_bytes, _MAX_BYTES)
        if isinstance(self.channels, str):
            raise ConfigError(f"channels is a list of names, write channels=[{self.channels!r}].")
        channels: tuple[Any, ...] = tuple(self.channels)
        if not channels or not all(isinstance(one, str) and all(_alternatives(one)) for one in channels):
            raise ConfigError("channels is a list of names of channels, such as ['II', 'V1'].")
        if len({*channels}) < len(channels):
            raise ConfigError("channels names one twice; leave out one of the two.")
        object.__setattr__(self, "channels", channels)
        _check_number("rate_hz", self.rate_hz)
        if self.duration_s is not None:
            _check_number("duration_s", self.duration_s)
        if (self.window is None) == (self.duration_s is None):
            raise ConfigError(
                "A waveform has either window=('-10s', '0s'), around the study, or duration_s=10, from the "
                "start of a recording; write one of the two."
            )
        if self.window is not None:
            object.__setattr__(self, "window", tuple(self.window))
        start, stop = self.span
        if not math.isfinite(stop - start):
            raise ConfigError("The window of a waveform has two ends, such as ('-10s', '0s'); write both.")
        check_count("the number of samples, duration times rate_hz,", self.num_places, _MAX_SAMPLES)

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end in seconds, from the study or from the start of a recording."""
        return (0.0, float(self.duration_s or 0)) if self.window is None else window_seconds(self.window)

    @property
    def num_places(self) -> int:
        """Number of places of the grid (T)."""
        start, stop = self.span
        return round((stop - start) * self.rate_hz)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundWaveform(name, self, context)

    @classmethod
    def present(cls, entry: Any, arrays: Arrays) -> dict[str, Any]:
        """Return the waveforms and what is beside them."""
        return present_beside(entry, arrays, ("mask", "recorded"))


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or value is True or not 0 < value <= _MAX_RATE_HZ:
        raise ConfigError(f"{name} is a number above 0, up to {_MAX_RATE_HZ:,.0f}, got {value!r}.")


def _alternatives(channel: str) -> list[str]:
    return [name.strip().lower() for name in channel.split("|")]


class BoundWaveform(BoundMember):
    """Field of waveforms, bound to a selection."""

    spec: Waveform

    def __init__(self, name: str, spec: Waveform, context: FieldContext) -> None:
        super().__init__(name, spec, context, WAVEFORMS_FIELD, spec.max_bytes)
        if importlib.util.find_spec("scipy") is None:
            raise ConfigError(
                f"The field {name!r} resamples with SciPy, which is not installed; run: pip install "
                "'shardflow[waveforms]'"
            )
        self._wanted = [_alternatives(channel) for channel in spec.channels]
        self._counters = context.counters
        self._seen = _SeenChannels(spec.channels)

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        shape = (len(slots), len(self._wanted), self.spec.num_places)
        return [
            ArraySpec.of(self.name, np.float32, *shape),
            ArraySpec.of(f"{self.name}_mask", np.uint8, *shape),
            ArraySpec.of(f"{self.name}_recorded", np.uint8, len(slots)),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:  # noqa: ARG002
        """Empty every slot."""
        self.blank(arrays, slice(None))

    def blank(self, arrays: Arrays, slot: int | slice) -> None:
        """Make a slot look like one without recordings."""
        for beside in ("", "_mask", "_recorded"):
            arrays[f"{self.name}{beside}"][slot] = 0

    def example(self, arrays: Arrays) -> None:
        """Make the only slot one of a flat line."""
        super().example(arrays)
        arrays[f"{self.name}_recorded"][:] = 1

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the list of recordings and of their arrays, if the sample has them.

        Raises:
            BadSample: It has none, and ``missing`` is ``error``; or they are larger than ``max_bytes``.
        """
        found = list(super().needed(shard, request))
        if not found:
            return found
        start, stop = shard.index.first_field[request.row_in_shard : request.row_in_shard + 2].tolist()
        names = shard.index.field_names
        ids = shard.index.field_name_ids[start:stop].tolist()
        found += [start + at for at, one in enumerate(ids) if _ARRAY.fullmatch(names[one])]
        num_bytes = sum(map(shard.num_bytes, found))
        if num_bytes > self.spec.max_bytes:
            detail = f"{num_bytes:,} bytes of recordings, and {self.spec.max_bytes:,} are allowed"
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, found[0], detail)
        return found

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        return _SlotWaveform(self, shard, request.slot, arrays, self.needed(shard, request))

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs, and the names of the channels."""
        return {**super().describe(), "classes": list(self.spec.channels)}

    def fill(self, arrays: Arrays, slot: int, payloads: dict[str, NDArray[np.uint8]]) -> None:
        """Fill a slot from its members by name.

        Raises:
            FormatError: They are not what their names say.
            ValueError: An array is none.
        """
        recordings = read_recordings(payloads[WAVEFORMS_FIELD].tobytes())
        values, mask = arrays[self.name][slot], arrays[f"{self.name}_mask"][slot]
        arrays[f"{self.name}_recorded"][slot] = 1
        labels = {
            name
            for one in recordings
            for array in one.arrays
            for each in array.channels
            for name in each.names
        }
        stored = {name: payload for name, payload in payloads.items() if name != WAVEFORMS_FIELD}
        for recording, begin in self._chosen(recordings):
            arrays_of = {array.field: _read(array, stored) for array in recording.arrays}
            # A device may add averaged beats to a strip; the longer array decides, and others fill its gaps.
            found = sorted(
                self._channels(recording),
                key=lambda one: -arrays_of[one[1].field].shape[1] / one[1].rate_hz,
            )
            for place, array, row in found:
                samples = arrays_of[array.field][row]
                with self._counters.timed("decode", samples.nbytes):
                    self._place(samples, array, array.channels[row], begin, values[place], mask[place])
        self._counters.add("absent_channels", num_items=int((~mask.any(axis=1)).sum()))
        self._seen.note(self.name, labels, self._wanted)

    def _chosen(self, recordings: Sequence[StoredRecording]) -> Iterator[tuple[StoredRecording, float]]:
        """Yield recordings to use, and the second of the grid's time at which each starts."""
        if self.spec.window is not None:
            timed = [(one.seconds, one.number, one) for one in recordings if one.seconds is not None]
            for seconds, _, recording in sorted(timed, key=lambda entry: entry[:2]):
                yield recording, seconds
            return
        found = [
            (
                -len({place for place, *_ in self._channels(one)}),
                math.inf if one.seconds is None else abs(one.seconds),
                one.number,
                one,
            )
            for one in recordings
        ]
        for *_, recording in sorted(found, key=lambda entry: entry[:3])[:1]:
            yield recording, 0.0

    def _channels(self, recording: StoredRecording) -> Iterator[tuple[int, StoredArray, int]]:
        """Yield place, array and row of the wanted channels that a recording has."""
        for place, names in enumerate(self._wanted):
            for name in names:
                found = [
                    (array, row)
                    for array in recording.arrays
                    for row, channel in enumerate(array.channels)
                    if name in channel.names
                ]
                yield from ((place, array, row) for array, row in found)
                if found:
                    break

    def _place(
        self,
        stored: NDArray[Any],
        array: StoredArray,
        channel: StoredChannel,
        begin: float,
        values: NDArray[np.float32],
        mask: NDArray[np.uint8],
    ) -> None:
        """Write the samples of a channel that fall on the grid."""
        factors = self._factors(channel)
        if factors is None:
            self._counters.add("unknown_units", num_items=1)
            unit = None if channel.gain is None else channel.unit
            self._seen.note_unit(self.name, unit, self.spec.unit)
            return
        rate_hz = float(self.spec.rate_hz)
        ratio = (Fraction(rate_hz) / Fraction(array.rate_hz)).limit_denominator(_MAX_DENOMINATOR)
        if not ratio:
            return
        up, down = ratio.numerator, ratio.denominator
        offset = round((begin + array.start_s - self.spec.span[0]) * rate_hz)
        first = max(0, -offset)
        stop = min(len(values) - offset, -(-len(stored) * up // down))
        if stop <= first:
            return
        # The part of the recording that these places depend on; its begin falls on a place of the grid.
        margin = 10 * max(up, down) // up + 2
        begin_at = max(0, first * down // up - margin) // down * down
        part = stored[begin_at : -(-stop * down // up) + margin].astype(np.float64)
        is_valid = np.ones(len(part), bool) if channel.invalid is None else part != channel.invalid
        if not is_valid.any():
            return
        part = np.interp(np.arange(len(part)), np.flatnonzero(is_valid), part[is_valid])
        at = slice(first - begin_at * up // down, stop - begin_at * up // down)
        if up != down:
            from scipy.signal import resample_poly

            # The gain of the filter differs a little between phases, so an offset of the device would ripple.
            level = float((stored if channel.invalid is None else stored[stored != channel.invalid]).mean())
            part = resample_poly(part - level, up, down, padtype="edge") + level
            source = np.arange(at.start, at.stop) * down
            left, right = source // up, np.minimum(-(-source // up), len(is_valid) - 1)
            kept = is_valid[np.minimum(left, right)] & is_valid[right]
        else:
            kept = is_valid[at]
        scale, shift = factors
        target = slice(first + offset, stop + offset)
        kept &= mask[target] == 0
        np.copyto(values[target], part[at] * scale + shift, where=kept, casting="same_kind")
        mask[target] |= kept

    def _factors(self, channel: StoredChannel) -> tuple[float, float] | None:
        """Return scale and offset from stored numbers to the unit that is delivered; None if unknown."""
        if channel.gain is None or channel.unit is None:
            return None
        units = _UNITS if self.spec.unit is None else (self.spec.unit,)
        found = next((one for unit in units if (one := conversion(channel.unit, unit)) is not None), None)
        if found is None and self.spec.unit is None:
            found = 1.0, 0.0
        return None if found is None else (channel.gain * found[0], channel.offset * found[0] + found[1])


def _read(array: StoredArray, payloads: Mapping[str, NDArray[np.uint8]]) -> NDArray[Any]:
    """Read the samples of an array, ``(channels, samples)``.

    Raises:
        FormatError: The sample lacks them, or they are of another form.
        ValueError: They are no array.
    """
    if array.field not in payloads:
        raise FormatError("waveforms.json names an array that the sample lacks")
    stored = read_npy(payloads[array.field])
    if stored.ndim != 2 or len(stored) != len(array.channels) or stored.dtype.kind not in "iu":
        raise FormatError("an array is not channels x samples of integers")
    return stored


class _SeenChannels:
    """Names of channels read so far; warns once of wanted channels that none has, and of units."""

    def __init__(self, channels: Sequence[str]) -> None:
        self._channels = channels
        self._labels: set[str] = set()
        self._num_samples = 0
        self._units: set[str | None] = set()

    def note_unit(self, field: str, unit: str | None, wanted: str | None) -> None:
        """Warn once of channels that are left out: of a unit; None, of no known unit or calibration."""
        if unit not in self._units:
            self._units.add(unit)
            _LOGGER.warning(
                "field %r: channels %s are left out, and counted as unknown_units",
                field,
                "without a known unit or calibration" if unit is None else f"in {unit!r}, not {wanted!r},",
            )

    def note(self, field: str, labels: set[str], wanted: Sequence[Sequence[str]]) -> None:
        """Take the recordings of a sample into account."""
        if self._num_samples >= _SAMPLES_BEFORE_WARNING:
            return
        self._labels |= labels
        self._num_samples += 1
        if self._num_samples == _SAMPLES_BEFORE_WARNING:
            pairs = zip(self._channels, wanted, strict=True)
            absent = [channel for channel, names in pairs if not self._labels & {*names}]
            if absent:
                _LOGGER.warning(
                    "field %r: none of the first %d samples with recordings has a channel %s; they have %s",
                    field,
                    self._num_samples,
                    ", ".join(map(repr, absent)),
                    ", ".join(map(repr, sorted(self._labels))) or "no named channels",
                )


class _SlotWaveform:
    """Waveforms of one slot. Its members arrive in any order, so they are kept until all are there."""

    __slots__ = ("_arrays", "_field", "_payloads", "_shard", "_slot", "fields")

    def __init__(
        self, field: BoundWaveform, shard: Shard, slot: int, arrays: Arrays, fields: Sequence[int]
    ) -> None:
        self._field, self._shard, self._slot, self._arrays = field, shard, slot, arrays
        self.fields = fields
        self._payloads: dict[str, NDArray[np.uint8]] = {}
        field.blank(arrays, slot)

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Keep a member, and fill the slot with the last one."""
        self._payloads[self._shard.field_name(self.fields[place])] = payload.copy()
        if len(self._payloads) < len(self.fields):
            return
        thread.enter("decode", f"shard {self._shard.name}")
        try:
            self._field.fill(self._arrays, self._slot, self._payloads)
        except FormatError as error:
            raise self._shard.bad(BadSampleReason.DECODE_FAILED, WAVEFORMS_FIELD, error.message) from None
        except (ValueError, TypeError, SyntaxError, EOFError) as error:
            raise self._shard.bad(
                BadSampleReason.DECODE_FAILED, WAVEFORMS_FIELD, type(error).__name__
            ) from None
        finally:
            self._payloads.clear()

    def close(self) -> None:
        """Do nothing: the slot is complete."""
