"""Which technical attributes may leave; everything else stays behind.

Two gates, both fail closed: an attribute leaves only if its keyword is listed here, and only with a value of
the kind that is listed: a number within plausible bounds, or a word of a closed vocabulary. A name typed into
the field for the body part, or a date into the one for the weight, is no such value. Free text never leaves
here.

Owns no parsing: values come from `shardflow.sources.dicom.read_attributes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from shardflow.deid import vocabularies as words

__all__ = ["KEYWORDS", "MAX_AGE_YEARS", "MAX_ORDINAL", "allow_ordinal", "allow_patient", "allow_technical"]

MAX_AGE_YEARS = 90
"""Ages above 89 form one class (45 CFR 164.514(b)(2)(i)(C))."""

MAX_ORDINAL = 99_999
"""Largest series or instance number that leaves: five digits hold no date and hardly a record number."""

Values = Sequence[str | int | float]
Allowed = str | float | int | list[str] | list[float]
Rule = Callable[[Values], Allowed | None]

_MAX_VALUES = 16
_AGE = re.compile(r"(\d{3})([DWMY])")
_AGE_UNITS_A_YEAR = {"D": 365.25, "W": 52.18, "M": 12.0, "Y": 1.0}


def _numbers(low: float, high: float) -> Rule:
    """Finite numbers within bounds; one number or a list."""

    def rule(values: Values) -> Allowed | None:
        if not 0 < len(values) <= _MAX_VALUES:
            return None
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) != len(values) or not all(
            math.isfinite(each) and low <= each <= high for each in numbers
        ):
            return None
        return numbers[0] if len(numbers) == 1 else [float(each) for each in numbers]

    return rule


def _words(vocabulary: frozenset[str]) -> Rule:
    """One word of a vocabulary, upper-cased."""

    def rule(values: Values) -> Allowed | None:
        word = str(values[0]).strip().upper() if len(values) == 1 else ""
        return word if word in vocabulary else None

    return rule


def _word_list(vocabulary: frozenset[str]) -> Rule:
    """The words that belong to a vocabulary, in their order; the others are left out."""

    def rule(values: Values) -> Allowed | None:
        kept = [
            word
            for word in (str(value).strip().upper() for value in values[:_MAX_VALUES])
            if word in vocabulary
        ]
        return kept or None

    return rule


def _pattern(expression: str) -> Rule:
    """One value that matches as a whole."""
    compiled = re.compile(expression)

    def rule(values: Values) -> Allowed | None:
        text = str(values[0]).strip() if len(values) == 1 else ""
        return text if compiled.fullmatch(text) else None

    return rule


def _manufacturer(values: Values) -> Allowed | None:
    """A known maker under one spelling."""
    text = str(values[0]).upper() if values else ""
    return next((name for word, name in words.MANUFACTURERS if word in text), None)


_RULES: dict[str, Rule] = {
    "AnodeTargetMaterial": _words(words.ANODES),
    "BodyPartExamined": _words(words.BODY_PARTS),
    "BodyPartThickness": _numbers(0, 2000),
    "BurnedInAnnotation": _words(words.YES_NO),
    "CTDIvol": _numbers(0, 10_000),
    "CompressionForce": _numbers(0, 1000),
    "ConvolutionKernel": _pattern(words.KERNEL_PATTERN),
    "DataCollectionDiameter": _numbers(0, 5000),
    "DetectorType": _words(words.DETECTORS),
    "DistanceSourceToDetector": _numbers(0, 10_000),
    "DistanceSourceToPatient": _numbers(0, 10_000),
    "EchoNumbers": _numbers(0, 10_000),
    "EchoTime": _numbers(0, 100_000),
    "EchoTrainLength": _numbers(0, 100_000),
    "Exposure": _numbers(0, 1_000_000),
    "ExposureInuAs": _numbers(0, 5_000_000),
    "ExposureIndex": _numbers(0, 100_000),
    "ExposureTime": _numbers(0, 1_000_000),
    "FlipAngle": _numbers(-360, 360),
    "FocalSpots": _numbers(0, 100),
    "GantryDetectorTilt": _numbers(-360, 360),
    "ImageLaterality": _words(words.LATERALITIES),
    "ImageType": _word_list(words.IMAGE_TYPES),
    "ImagerPixelSpacing": _numbers(0, 1000),
    "InversionTime": _numbers(0, 100_000),
    "KVP": _numbers(0, 50_000),
    "Laterality": _words(words.LATERALITIES),
    "LossyImageCompression": _words(frozenset({"00", "01"})),
    "LossyImageCompressionRatio": _numbers(0, 10_000),
    "MRAcquisitionType": _words(frozenset({"2D", "3D"})),
    "MagneticFieldStrength": _numbers(0, 100_000),
    "Manufacturer": _manufacturer,
    "Modality": _words(words.MODALITIES),
    "NumberOfAverages": _numbers(0, 100_000),
    "PatientOrientation": _word_list(words.ORIENTATIONS),
    "PatientPosition": _words(words.POSITIONS),
    "PercentPhaseFieldOfView": _numbers(0, 1000),
    "PercentSampling": _numbers(0, 1000),
    "PhotometricInterpretation": _words(words.PHOTOMETRICS),
    "PixelBandwidth": _numbers(0, 1_000_000),
    "PixelSpacing": _numbers(0, 1000),
    "PixelSpacingCalibrationType": _words(frozenset({"FIDUCIAL", "GEOMETRY"})),
    "PositionerType": _words(words.POSITIONERS),
    "PresentationIntentType": _words(words.INTENTS),
    "ReconstructionDiameter": _numbers(0, 5000),
    "RepetitionTime": _numbers(0, 1_000_000),
    "RescaleType": _words(words.RESCALE_TYPES),
    "SAR": _numbers(0, 1000),
    "ScanningSequence": _word_list(words.SCANNING_SEQUENCES),
    "SequenceVariant": _word_list(words.SEQUENCE_VARIANTS),
    "SingleCollimationWidth": _numbers(0, 1000),
    "SliceThickness": _numbers(0, 1000),
    "SpacingBetweenSlices": _numbers(-1000, 1000),
    "SpiralPitchFactor": _numbers(0, 100),
    "TotalCollimationWidth": _numbers(0, 1000),
    "Units": _words(words.UNITS),
    "ViewPosition": _words(words.VIEWS),
    "WindowCenter": _numbers(-100_000, 100_000),
    "WindowWidth": _numbers(0, 1_000_000),
    "XRayTubeCurrent": _numbers(0, 1_000_000),
}
_PRESENCE = {"ContrastBolusAgent": "has_contrast"}
"""Free text of which only the presence leaves."""
_SPELLINGS = {"CTDIvol": "ctdi_vol"}
_PATIENT = ("PatientAge", "PatientSex")

KEYWORDS: tuple[str, ...] = tuple(sorted({*_RULES, *_PRESENCE, *_PATIENT}))
"""DICOM keywords worth reading; hand them to `shardflow.sources.dicom.read_attributes`."""


def allow_technical(attributes: Mapping[str, Values]) -> dict[str, Allowed | bool]:
    """Keep the technical attributes whose name and value are both allowed.

    Args:
        attributes: DICOM keyword to all its values.

    Returns:
        JSON-able, sorted; keys are the keywords in snake case.

    Example:
        >>> allow_technical({"KVP": (120.0,), "BodyPartExamined": ("John Smith",), "PatientName": ("Smith",)})
        {'kvp': 120.0}
    """
    allowed: dict[str, Allowed | bool] = {}
    for keyword, values in attributes.items():
        if keyword in _RULES and (value := _RULES[keyword](values)) is not None:
            allowed[_snake_case(keyword)] = value
        elif keyword in _PRESENCE:
            allowed[_PRESENCE[keyword]] = any(str(value).strip() for value in values)
    return dict(sorted(allowed.items()))


def allow_ordinal(number: int | None) -> int | None:
    """Series or instance number, unless it is larger than counting explains.

    Example:
        >>> allow_ordinal(301), allow_ordinal(20231105)
        (301, None)
    """
    return number if number is not None and 0 <= number <= MAX_ORDINAL else None


def allow_patient(attributes: Mapping[str, Values]) -> dict[str, str | int | None]:
    """Patient characteristics that may leave.

    Returns:
        ``{"age_years": whole years, at most 90, or None, "sex": "F", "M", "O" or None}``.

    Example:
        >>> allow_patient({"PatientAge": ("097Y",), "PatientSex": ("F",)})
        {'age_years': 90, 'sex': 'F'}
    """
    sex = _words(frozenset({"F", "M", "O"}))(attributes.get("PatientSex", ()))
    age = _AGE.fullmatch(str(next(iter(attributes.get("PatientAge", ())), "")).strip().upper())
    years = None if age is None else min(int(int(age[1]) / _AGE_UNITS_A_YEAR[age[2]]), MAX_AGE_YEARS)
    return {"age_years": years, "sex": sex if isinstance(sex, str) else None}


def _snake_case(keyword: str) -> str:
    """Keyword in snake case; a run of capitals stays one word.

    Example:
        >>> _snake_case("MRAcquisitionType"), _snake_case("KVP"), _snake_case("CTDIvol")
        ('mr_acquisition_type', 'kvp', 'ctdi_vol')
    """
    if keyword in _SPELLINGS:
        return _SPELLINGS[keyword]
    parts = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", keyword)
    return "_".join(part.lower() for part in parts)
