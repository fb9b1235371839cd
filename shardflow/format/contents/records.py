"""Clinical facts and recordings of a sample, as ``records.json`` and ``waveforms.json`` list them.

Records are coded statements in time, with their values; recordings are arrays of stored integers, and what
they mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from shardflow.errors import FormatError

RECORD_TIMES: Final = "record_times"
"""Key of a manifest's ``extra``: ``second``, ``minute``, ``hour`` or ``day``, the resolution of the times of
its records; ``none`` without dates."""
DAY_S: Final = 86_400

Code: TypeAlias = tuple[str, str]
"""System in lower case, and code; of a mapped record its source and the name of a field."""

# Questions, plans and papers are no events: an order has the code of the result that it asks for.
_NO_EVENTS: Final = frozenset({"document", "imaging_study", "order", "patient", "report"})
_NOT_DONE: Final = frozenset(
    {"aborted", "cancelled", "draft", "entered-in-error", "intended", "not-done", "not-taken", "nullified"}
    | {"planned", "preparation", "refuted", "registered", "rejected", "revoked", "scheduled"}
)
_OWN_KEYS: Final = frozenset({"document", "end", "kind", "line", "source", "status", "when"})
_MAPPED: Final = "mapped-"
_BROKEN: Final = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Statement:
    """Statement of a record, such as one measurement."""

    time_s: int | None
    """Seconds from the study; of a day without a time of day the last ones that it can be, so that an event
    which may have come after the images does not seem to come before. None if unknown."""
    codes: Sequence[Code]
    """All that say the same."""
    number: float | None
    unit: str


def read_statements(payload: bytes) -> Iterator[Statement]:
    """Read the coded statements of ``records.json``, in the order of their sources.

    Parts of a panel are statements of their own. What was asked for, refuted or withdrawn is none.

    Args:
        payload: The field's bytes.

    Raises:
        FormatError: It is no list of facts.
    """
    try:
        for fact in json.loads(payload).get("facts", ()):
            if fact["kind"] in _NO_EVENTS or fact.get("negated") or fact.get("status") in _NOT_DONE:
                continue
            time_s = _time_of(fact.get("when"))
            source = str(fact["source"])
            if source.startswith(_MAPPED):
                yield from _mapped(fact, source, time_s)
                continue
            for part in (fact, *fact.get("components", ())):
                if part.get("codes"):
                    value = part.get("value") or _dose(part)
                    yield Statement(time_s, _codes(part["codes"]), *_quantity(value))
    except _BROKEN as error:
        raise FormatError(
            "records.json must list facts as docs/format.md, section 4, says, got "
            f"{type(error).__name__} while reading them; verify the dataset."
        ) from None


def _time_of(when: Mapping[str, Any] | None) -> int | None:
    if when is None:
        return None
    if "seconds" in when:
        return int(when["seconds"])
    return (int(when["day_offset"]) + 1) * DAY_S if "day_offset" in when else None


def _codes(coded: Sequence[Mapping[str, str]]) -> list[Code]:
    return [(one["system"].lower(), one["code"]) for one in coded]


def _dose(fact: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the dose of a medication."""
    doses = [fact.get("dose"), *(one.get("dose") for one in fact.get("dosage", ()))]
    return next((dose for dose in doses if dose), None)


def _quantity(value: Any) -> tuple[float | None, str]:
    if not isinstance(value, dict):
        return None, ""
    if isinstance(value.get("flag"), bool):
        return float(value["flag"]), "1"
    number = value.get("number")
    return (None, "") if number is None else (float(number), str(value.get("unit", "1")))


def _mapped(fact: Mapping[str, Any], source: str, time_s: int | None) -> Iterator[Statement]:
    """Yield a statement for each field of a mapped record.

    Its codes are of what the record measures, if that is one quantity: a row of a table of results.
    """
    fields = {name: value for name, value in fact.items() if name not in _OWN_KEYS}
    quantities = [value for value in fields.values() if isinstance(value, dict) and "number" in value]
    measured = quantities[0] if len(quantities) == 1 else None
    for name, value in fields.items():
        own = [(source, name)]
        if isinstance(value, bool):
            yield Statement(time_s, own, float(value), "1")
        elif not isinstance(value, list):
            yield Statement(time_s, own, *_quantity(value))
        elif value and "code" in value[0]:
            yield Statement(time_s, [*_codes(value), *own], *_quantity(measured))
        else:
            yield from (Statement(time_s, own, *_quantity(one)) for one in value)


@dataclass(frozen=True, slots=True)
class StoredChannel:
    """One row of an array. ``physical = stored * gain + offset``, in ``unit``."""

    names: frozenset[str]
    """Its label, the same without the word of its type (``ECG II``: ``II``), and its code as
    ``SCHEME:VALUE``; in lower case."""
    unit: str | None
    gain: float | None
    """None where the recording is not calibrated."""
    offset: float
    invalid: int | None
    """Stored where there is no sample."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Channels of one rate, ``(channels, samples)``."""

    field: str
    rate_hz: float
    start_s: float
    """From the start of the recording."""
    channels: Sequence[StoredChannel]


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """Entry of ``waveforms.json``."""

    number: int
    seconds: float | None
    """From the study to its start; None if unknown."""
    arrays: Sequence[StoredArray]


def read_recordings(payload: bytes) -> list[StoredRecording]:
    """Read ``waveforms.json``.

    Args:
        payload: The field's bytes.

    Raises:
        FormatError: It is no such list.
    """
    try:
        return [_recording(each) for each in json.loads(payload).get("recordings", ())]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise FormatError(
            "waveforms.json must list recordings as docs/format.md, section 4, says, got "
            f"{type(error).__name__} while reading them; verify the dataset."
        ) from None


def _recording(entry: Mapping[str, Any]) -> StoredRecording:
    seconds = entry.get("seconds_from_study")
    arrays = [
        StoredArray(
            str(array["field"]),
            _finite(array["rate_hz"], above=0.0),
            _finite(array.get("start_s", 0.0)),
            [_channel(channel) for channel in array["channels"]],
        )
        for array in entry["arrays"]
    ]
    return StoredRecording(int(entry["recording"]), None if seconds is None else _finite(seconds), arrays)


def _channel(entry: Mapping[str, Any]) -> StoredChannel:
    label, code, gain, invalid = (entry.get(name) for name in ("label", "code", "gain", "invalid_value"))
    names = set() if label is None else {label.lower()}
    for kind in ("ecg ", "ekg ", "eeg ", "lead "):
        names |= {name.removeprefix(kind) for name in names}
    if code is not None:
        names.add(f"{code['scheme']}:{code['value']}".lower())
    return StoredChannel(
        frozenset(names),
        entry.get("unit"),
        None if gain is None else _finite(gain),
        _finite(entry.get("offset", 0.0)),
        None if invalid is None else int(invalid),
    )


def _finite(value: Any, above: float = -math.inf) -> float:
    number = float(value)
    if not math.isfinite(number) or number <= above:
        raise ValueError("a number out of range")
    return number
