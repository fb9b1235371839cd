"""Recording as stored: integers of the device, their scaling, and the header words that may be published.

Channel names, units, filters and events are free text in EDF and WFDB, so their lists are closed: a word that
is not listed is stored as null, and the caller counts it.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.format.reasons import Reason, source_error
from shardflow.format.slice_codecs import npy
from shardflow.packing.sources.attachments import Attached

if TYPE_CHECKING:
    from shardflow.packing.sources.attachments import StudyContext

# The types of EDF+ (edfplus.info, "standard texts") and the names of PhysioNet's monitors.
_TYPE_WORDS: Final = """
    EEG ECG EKG EOG ERG EMG MEG MCG EP RESP RESPIRATION SAO2 SPO2 PLETH PPG ABP ART ART1 BP CVP PAP ICP CO2
    ETCO2 PCO2 TEMP LIGHT SOUND EVENT MARKER STATUS TRIGGER FLOW THORAX ABDOMEN ABDOMINAL CHEST NASAL ORAL
    AIRFLOW SNORE BODY POSITION CHIN LEG TIB HR PULSE RR IMPEDANCE FHR UC TOCO ACC GYRO X Y Z MCL1 MCL MLI
    MLII MLIII MV1 MV2 V EASI LEAD REF HORIZONTAL VERTICAL SUBMENTAL RECTAL AVG LE RE
"""
_TYPES: Final = frozenset(_TYPE_WORDS.split())
_LEADS: Final = re.compile(r"I{1,3}|AV[RLF]|V[1-9]R?|V10|V11|V12|ES|AS|AI|VX|VY|VZ|D[1-3]", re.IGNORECASE)
# Electrodes of the 10-20 and 10-10 systems, mastoids, eyes; the American names are among them.
_ELECTRODE: Final = re.compile(
    r"(?:FP|AF|F|FT|FC|T|TP|C|CP|P|PO|O|A|M|I|N|E|PG|SP|LOC|ROC)(?:Z|[0-9]{1,2}H?)?", re.IGNORECASE
)
_SEPARATORS: Final = re.compile(r"[\s/:+-]+")
_UNIT: Final = re.compile(
    r"[numk\u00b5\u03bc]?V|[nump]?A|mmHg|cmH2O|[kh]?Pa|%|bpm|/min|1/min|deg ?[CF]|[CF]|Cel|L/min|mL/s|mL|L|"
    r"[munkM]?Ohm|Hz|[mun]?s|NU|nu|a\.u\.|AU|1|g|m/s2|m/s\^2|deg|lux|fT|pT|T|uS|dB"
)
_FILTER: Final = re.compile(r"(HP|LP|N|BP|NOTCH):? ?(\d+(?:\.\d+)?|DC) ?(k?Hz|S|s)?", re.IGNORECASE)
_EVENT_TEXTS: Final = """
    sleep stage w, sleep stage 1, sleep stage 2, sleep stage 3, sleep stage 4, sleep stage n1, sleep stage n2,
    sleep stage n3, sleep stage n, sleep stage r, sleep stage m, sleep stage ?, movement time, lights off,
    lights on, recording starts, recording ends, apnea, obstructive apnea, central apnea, mixed apnea,
    hypopnea, obstructive hypopnea, central hypopnea, hypoventilation, periodic breathing, cs breathing, rera,
    limb movement, plms, eeg arousal, sinus tachycardia, wc tachycardia, nc tachycardia, bradycardia,
    asystole, atrial fibrillation, bruxism, rbd, seizure, spike, artifact, eyes open, eyes closed,
    hyperventilation, photic stimulation
"""
_EVENTS: Final = frozenset(" ".join(text.split()) for text in _EVENT_TEXTS.split(","))
_RHYTHM: Final = re.compile(
    r"\((AB|AFIB|AFL|B|BII|IVR|N|NOD|P|PREX|SBR|SVTA|T|VFL|VT|VF|ASYS|BI|AT|MISSB|PSE)"
)


def allow_label(text: str) -> str | None:
    """Return the name of a channel where each of its words is a known one, else None.

    Example:
        >>> allow_label("EEG Fpz-Cz"), allow_label("MLII"), allow_label("Anna")
        ('EEG Fpz-Cz', 'MLII', None)
    """
    text = " ".join(text.split())
    words = [word for word in _SEPARATORS.split(text) if word]
    if words and all(
        word.upper() in _TYPES or _LEADS.fullmatch(word) or _ELECTRODE.fullmatch(word) for word in words
    ):
        return text
    return None


def allow_unit(text: str) -> str | None:
    """Return a physical unit as written where it is a known one, else None."""
    text = text.strip()
    return text if _UNIT.fullmatch(text) else None


def allow_filter(text: str) -> str | None:
    """Return the filters of a channel, ``"HP:0.1Hz LP:75Hz"``; words that are none are left out."""
    found = [match[0] for match in _FILTER.finditer(text)]
    return " ".join(found) or None


def allow_event(text: str) -> str | None:
    """Return the kind of an event where it is one of EDF+'s standard texts or as plain as they, else None."""
    text = " ".join(text.split())
    return text if text.lower() in _EVENTS else None


def allow_rhythm(text: str) -> str | None:
    """Return the rhythm that a WFDB note names, such as ``"(AFIB"``, else None."""
    text = text.rstrip("\0").strip()
    return text if _RHYTHM.fullmatch(text) else None


MAX_BYTES: Final = 1 << 31
"""Decoded samples of one recording: two days of a twelve-lead ECG at 500 Hz, a night of polysomnography."""
MAX_EVENTS: Final = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """One signal. ``physical = stored * gain + offset``, in ``unit``."""

    label: str | None
    unit: str | None
    gain: float | None
    """None where the recording is not calibrated."""
    offset: float
    code: Mapping[str, str] | None = None
    """The measured quantity, as ``scheme`` and ``value``."""
    invalid_value: int | None = None
    """Stored where there is no sample."""
    filters: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``waveforms.json``."""
        return {
            "label": self.label,
            "code": self.code,
            "unit": self.unit,
            "gain": self.gain,
            "offset": self.offset + 0.0,  # no negative zero
            "invalid_value": self.invalid_value,
            "filters": self.filters,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleArray:
    """Channels of one rate."""

    samples: NDArray[np.integer[Any]]
    """``(channels, samples)`` int8, int16 or int32; uint8, uint16, uint32 where the device stored these."""
    rate_hz: float
    channels: Sequence[Channel]
    start_s: float = 0.0
    """Since the recording began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The content of one file, or of one header with its files."""

    source: str
    arrays: Sequence[SampleArray]
    start: datetime | None
    events: Sequence[Mapping[str, Any]] = ()
    flags: Sequence[str] = field(default_factory=tuple)


@contextlib.contextmanager
def parsing(what: str = "") -> Iterator[None]:
    """Drop the warnings of a library, and convert whatever it raises over a file.

    Args:
        what: The part of the file that is read, for the error.

    Raises:
        SourceError: ATTACHMENT_UNREADABLE, with the class of the error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - libraries raise of every kind
            raise source_error(Reason.ATTACHMENT_UNREADABLE, what + type(error).__name__) from None


def attach_recording(recording: Recording, study: StudyContext) -> Attached:
    """Return the fields of a recording, ``wNNN.gMM.npy`` for each array, and its part of ``waveforms.json``.

    Raises:
        SourceError: There are neither samples nor events, or too many samples.
    """
    num_bytes = sum(array.samples.nbytes for array in recording.arrays)
    if not num_bytes and not recording.events:
        raise source_error(Reason.ATTACHMENT_UNREADABLE, "neither samples nor events")
    if num_bytes > MAX_BYTES:
        raise source_error(Reason.LIMIT_EXCEEDED, f"{num_bytes} bytes of samples, limit {MAX_BYTES}")
    number = study.num("waveforms", "recordings")
    fields, arrays = {}, []
    for group, array in enumerate(recording.arrays):
        name = f"w{number:03d}.g{group:02d}.npy"
        samples = np.ascontiguousarray(array.samples)
        fields[name] = npy.encode(samples.astype(samples.dtype.newbyteorder("<"), copy=False))
        arrays.append(
            {
                "field": name,
                "dtype": samples.dtype.name,
                "num_samples": samples.shape[1],
                "rate_hz": array.rate_hz,
                "start_s": array.start_s,
                "channels": [channel.to_json() for channel in array.channels],
            }
        )
    start = recording.start
    entry = {
        "recording": number,
        "source": recording.source,
        "start": {} if start is None else dict(study.when(start)),
        "seconds_from_study": None if start is None else study.published_seconds(start),
        "arrays": arrays,
        "events": list(recording.events[:MAX_EVENTS]),
        "flags": [*recording.flags, *(["events_left_out"] if len(recording.events) > MAX_EVENTS else [])],
    }
    return Attached(fields=fields, parts={"waveforms": {"recordings": [entry]}})
