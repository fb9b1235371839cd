"""What a recording's header may say, and what it may not."""

from __future__ import annotations

import pytest

from shardflow.packing.attachments.codes import Code, allow_code
from shardflow.packing.attachments.waveforms.recording import (
    allow_event,
    allow_filter,
    allow_label,
    allow_rhythm,
    allow_unit,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "text", ["EEG Fpz-Cz", "ECG II", "MLII", "aVR", "Resp", "SaO2", "EMG Chin", "C3-A2", "V5"]
)
def test_standard_names_of_channels_pass(text: str) -> None:
    assert allow_label(f" {text} ") == text


@pytest.mark.parametrize("text", ["Anna", "ECG Smith", "12345678", "", "EEG 03/14", "John-Cz", "ward 5"])
def test_other_names_of_channels_do_not(text: str) -> None:
    assert allow_label(text) is None


def test_units_filters_events_rhythms_and_codes_are_closed_lists() -> None:
    assert [allow_unit(text) for text in ("uV", " mmHg", "\u00b5V", "Smith", "")] == [
        "uV", "mmHg", "\u00b5V", None, None,
    ]  # fmt: skip
    assert allow_filter("HP:0.1Hz LP:75Hz Dr. Smith") == "HP:0.1Hz LP:75Hz"
    assert allow_filter("none by Smith") is None
    assert [allow_event(text) for text in ("Sleep stage W", "Called Mrs Smith")] == ["Sleep stage W", None]
    assert [allow_rhythm(text) for text in ("(AFIB\0", "(SMITH", "note")] == ["(AFIB", None, None]
    assert allow_code(Code("MDC", "2:1")) == {"scheme": "MDC", "value": "2:1"}
    assert allow_code(Code("99ACME", "2:1")) is None
    assert allow_code(Code("MDC", "John Smith")) is None
    assert allow_code(Code("LN", "8867-4")) == {"scheme": "LN", "value": "8867-4"}
    assert allow_code(Code("LN", "8867-5")) is None  # the check digit is wrong


@pytest.mark.parametrize(
    "scheme",
    ["DCM", "FMA", "LN", "MDC", "NCIt", "RADLEX", "SCPECG", "SCT", "SNM3", "SRT", "UCUM", "UMLS"],
)
@pytest.mark.parametrize("value", ["SMITH_JOHN", "Anna-Miller", "SMITH", "smith:anna", "19171113", "J.D."])
def test_a_word_is_no_code_whatever_its_scheme_is_called(scheme: str, value: str) -> None:
    assert allow_code(Code(scheme, value)) is None
