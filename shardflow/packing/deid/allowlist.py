"""Allowlist of technical attributes and of the values that each may have.

Two gates, both fail closed: an attribute is published only if its keyword is listed here, and only with a
value of the listed kind: a number within plausible bounds, or a word of a closed vocabulary. A name typed
into the field for the body part is rejected, and so is a date in the one for the weight. Free text is never
published: of a description at most its class leaves, one word of a closed list. A description is searched
for the field's own terms: phases of contrast in CT, weightings in MR, attenuation correction in PET, and
what was computed from other images. Two phases in one description, or none, are no class. Values come from
`shardflow.packing.sources.dicom.attributes.read_attributes`.

Source: DICOM PS3.3 (defined terms of each attribute), PS3.16 annex L (body parts) and CID 4010 (mammography
views), edition 2024b; manufacturers and kernels as found in public collections.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from shardflow.packing.deid.pixel_rules import split_words


def _of(text: str) -> frozenset[str]:
    return frozenset(text.split())


YES_NO = _of("YES NO")
LATERALITIES = _of("R L B U")
INTENTS = frozenset({"FOR PRESENTATION", "FOR PROCESSING"})
PHOTOMETRICS = _of("MONOCHROME1 MONOCHROME2 RGB YBR_FULL YBR_FULL_422 YBR_ICT YBR_RCT") | {"PALETTE COLOR"}
MODALITIES = _of(
    "BMD CR CT DX ECG ES GM IO IVUS MG MR NM OCT OP OPT OT PT PX RF RG RTDOSE RTIMAGE SC SM US XA XC"
)
POSITIONS = _of("HFP HFS HFDR HFDL FFDR FFDL FFP FFS LFP LFS RFP RFS AFDR AFDL PFDR PFDL")
ORIENTATIONS = frozenset(
    first + second for first in "AFHLPR" for second in ("", "A", "F", "H", "L", "P", "R") if first != second
)
POSITIONERS = _of("CARM COLUMN MAMMOGRAPHIC PANORAMIC CEPHALOSTAT RIGID NONE")
DETECTORS = _of("DIRECT SCINTILLATOR STORAGE FILM")
ANODES = _of("TUNGSTEN MOLYBDENUM RHODIUM")
RESCALE_TYPES = _of("HU HU_MOD OD US MGML PCT Z_EFF ED EDW")
UNITS = _of(
    "CNTS NONE CM2 CM2ML PCNT CPS BQML MGMINML UMOLMINML MLMING MLG 1CM UMOLML PROPCNTS PROPCPS MLMINML"
    " MLML GML STDDEV"
)
CORRECTIONS = _of("ATTN CLN DCAL DECY DTIM MOTN NORM PMOT RADL RAN SCAT SENS")
SCANNING_SEQUENCES = _of("SE IR GR EP RM")
SEQUENCE_VARIANTS = _of("SK MTC SS TRSS SP MP OSP NONE")

VIEWS = _of(
    "AP PA LL RL RLD LLD RLO LLO LATERAL LAT OBLIQUE AXIAL SUPINE PRONE ERECT DECUBITUS LORDOTIC SWIMMERS"
    " CC MLO ML LM LMO XCCL XCCM FB SIO ISO CV AT RCC LCC RMLO LMLO SUNRISE TANGENTIAL"
)

IMAGE_TYPES = _of(
    "ORIGINAL DERIVED PRIMARY SECONDARY AXIAL LOCALIZER SAGITTAL CORONAL OBLIQUE MPR MIP MINIP AVERAGE"
    " M P R I MAGNITUDE PHASE REAL IMAGINARY NORM DIS2D DIS3D ND FM FFE SE IR M_FFE M_SE M_IR P_FFE"
    " PHASE_MAP ADC TRACEW FA DIFFUSION MOSAIC MFSPLIT PROJECTION IMAGE SUBTRACTION DYNAMIC STATIC GATED"
    " WHOLE_BODY TOMO RECON_TOMO EMISSION TRANSMISSION VOLUME VOLREN NONE OTHER MIXED RESAMPLED"
    " REFORMATTED POST_PROCESSED SINGLE_PLANE BIPLANE DIXON WATER FAT IN_PHASE OUT_PHASE OPP_PHASE T1 T2"
    " T2_STAR STIR FLAIR MONO_ENERGETIC VMI DUAL_ENERGY HELICAL CINE"
)

BODY_PARTS = _of(
    "ABDOMEN ABDOMENPELVIS ADRENAL ANKLE AORTA ARM AXILLA BACK BLADDER BODY BONE BRAIN BREAST BRONCHUS"
    " BUTTOCK CALCANEUS CALF CAROTID CEREBELLUM CERVIX CHEEK CHEST CHESTABDOMEN CHESTABDPELVIS"
    " CIRCLEOFWILLIS CLAVICLE COCCYX COLON CORNEA CORONARYARTERY CSPINE CTSPINE CERVICALSPINE DUODENUM EAR"
    " ELBOW ESOPHAGUS EXTREMITY EYE EYELID FACE FEMUR FINGER FOOT FOREARM GALLBLADDER HAND HEAD HEADNECK"
    " HEART HIP HUMERUS IAC ILEUM ILIUM JAW JEJUNUM KIDNEY KNEE LARYNX LEG LIVER LOWERLEG LOWERLIMB LSPINE"
    " LSSPINE LUMBARSPINE LUNG MANDIBLE MAXILLA MEDIASTINUM MOUTH NECK NECKCHEST NECKCHESTABDOMEN"
    " NECKCHESTABDPELV NOSE ORBIT OVARY PANCREAS PAROTID PATELLA PELVIS PENIS PHANTOM PHARYNX PROSTATE"
    " RADIUS RECTUM RIB RIBS SACRUM SCALP SCAPULA SCROTUM SELLA SHOULDER SIJOINT SINUS SKULL SKULLBASE"
    " SPINE SPLEEN SSPINE STERNUM STOMACH SUBMANDIBULAR TEETH TESTIS THIGH THORAX THUMB THYMUS THYROID"
    " TIBIA TIBIAFIBULA TLSPINE TMJ TOE TONGUE TRACHEA TSPINE THORACICSPINE ULNA UPPERARM UPPERLIMB URETER"
    " URETHRA UTERUS VAGINA VULVA WHOLEBODY WRIST ZYGOMA"
)

MANUFACTURERS: tuple[tuple[str, str], ...] = (
    ("SIEMENS", "SIEMENS"),
    ("PHILIPS", "PHILIPS"),
    ("ADAC", "PHILIPS"),
    ("CANON", "CANON"),
    ("TOSHIBA", "TOSHIBA"),
    ("HITACHI", "HITACHI"),
    ("FUJI", "FUJIFILM"),
    ("AGFA", "AGFA"),
    ("CARESTREAM", "CARESTREAM"),
    ("KODAK", "KODAK"),
    ("HOLOGIC", "HOLOGIC"),
    ("LORAD", "HOLOGIC"),
    ("KONICA", "KONICA MINOLTA"),
    ("MINOLTA", "KONICA MINOLTA"),
    ("SAMSUNG", "SAMSUNG"),
    ("SHIMADZU", "SHIMADZU"),
    ("UIH", "UNITED IMAGING"),
    ("UNITED IMAGING", "UNITED IMAGING"),
    ("NEUSOFT", "NEUSOFT"),
    ("MINDRAY", "MINDRAY"),
    ("ESAOTE", "ESAOTE"),
    ("BRUKER", "BRUKER"),
    ("PICKER", "PICKER"),
    ("MARCONI", "MARCONI"),
    ("ELSCINT", "ELSCINT"),
    ("IMATRON", "IMATRON"),
    ("VAREX", "VAREX"),
    ("VARIAN", "VARIAN"),
    ("ELEKTA", "ELEKTA"),
    ("GE MEDICAL", "GE"),
    ("GE HEALTHCARE", "GE"),
    ("GENERAL ELECTRIC", "GE"),
    ("SYNTHETIC", "SYNTHETIC"),  # what `shardflow synth` calls itself
)
"""Word to search for, and the spelling that is published."""

KERNEL_PATTERN = (
    r"[A-Z][a-z]?\d{2}[a-z]{0,2}"  # Siemens: B30f, Br40d, Hr36s
    r"|FC\d{2}"  # Toshiba, Canon
    r"|[A-Z]{1,2}"  # Philips: B, C, YA
    r"|STANDARD|STND|SOFT|BONE|BONEPLUS|BONE\+|LUNG|DETAIL|EDGE|CHST|ULTRA|SHARP|SMOOTH|BODY|HEAD"
)
"""Convolution kernels of the large manufacturers."""


MAX_AGE_YEARS = 90
"""Ages above 89 form one class (45 CFR 164.514(b)(2)(i)(C))."""

MAX_ORDINAL = 99_999
"""Largest published series or instance number: five digits hold no date and hardly a record number."""

Values = Sequence[str | int | float]
Allowed = str | float | int | list[str] | list[float]
Rule = Callable[[Values], Allowed | None]

_MAX_VALUES = 16
_AGE = re.compile(r"(\d{3})([DWMY])")
_AGE_UNITS_A_YEAR = {"D": 365.25, "W": 52.18, "M": 12.0, "Y": 1.0}


def _numbers(low: float, high: float) -> Rule:
    """Return a rule for finite numbers within bounds: one number or a list."""

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
    """Return a rule for one word of a vocabulary, in upper case."""

    def rule(values: Values) -> Allowed | None:
        word = str(values[0]).strip().upper() if len(values) == 1 else ""
        return word if word in vocabulary else None

    return rule


def _word_list(vocabulary: frozenset[str]) -> Rule:
    """Return a rule that keeps the words of a vocabulary, in their order."""

    def rule(values: Values) -> Allowed | None:
        kept = [
            word
            for word in (str(value).strip().upper() for value in values[:_MAX_VALUES])
            if word in vocabulary
        ]
        return kept or None

    return rule


def _pattern(expression: str) -> Rule:
    """Return a rule for one value that matches an expression as a whole."""
    compiled = re.compile(expression)

    def rule(values: Values) -> Allowed | None:
        text = str(values[0]).strip() if len(values) == 1 else ""
        return text if compiled.fullmatch(text) else None

    return rule


def _manufacturer(values: Values) -> Allowed | None:
    """Return the spelling of a known manufacturer."""
    text = str(values[0]).upper() if values else ""
    return next((name for word, name in MANUFACTURERS if word in text), None)


_RULES: dict[str, Rule] = {
    "AnodeTargetMaterial": _words(ANODES),
    "BodyPartExamined": _words(BODY_PARTS),
    "BodyPartThickness": _numbers(0, 2000),
    "BreastImplantPresent": _words(YES_NO),
    "BurnedInAnnotation": _words(YES_NO),
    "CTDIvol": _numbers(0, 10_000),
    "CompressionForce": _numbers(0, 1000),
    "ConvolutionKernel": _pattern(KERNEL_PATTERN),
    "CorrectedImage": _word_list(CORRECTIONS),
    "DataCollectionDiameter": _numbers(0, 5000),
    "DetectorType": _words(DETECTORS),
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
    "ImageLaterality": _words(LATERALITIES),
    "ImageType": _word_list(IMAGE_TYPES),
    "ImagerPixelSpacing": _numbers(0, 1000),
    "InversionTime": _numbers(0, 100_000),
    "KVP": _numbers(0, 50_000),
    "Laterality": _words(LATERALITIES),
    "LossyImageCompression": _words(frozenset({"00", "01"})),
    "LossyImageCompressionRatio": _numbers(0, 10_000),
    "MRAcquisitionType": _words(frozenset({"2D", "3D"})),
    "MagneticFieldStrength": _numbers(0, 100_000),
    "Manufacturer": _manufacturer,
    "Modality": _words(MODALITIES),
    "NumberOfAverages": _numbers(0, 100_000),
    "PatientOrientation": _word_list(ORIENTATIONS),
    "PatientPosition": _words(POSITIONS),
    "PercentPhaseFieldOfView": _numbers(0, 1000),
    "PercentSampling": _numbers(0, 1000),
    "PhotometricInterpretation": _words(PHOTOMETRICS),
    "PixelBandwidth": _numbers(0, 1_000_000),
    "PixelSpacing": _numbers(0, 1000),
    "PixelSpacingCalibrationType": _words(frozenset({"FIDUCIAL", "GEOMETRY"})),
    "PositionerPrimaryAngle": _numbers(-360, 360),
    "PositionerSecondaryAngle": _numbers(-360, 360),
    "PositionerType": _words(POSITIONERS),
    "PresentationIntentType": _words(INTENTS),
    "ReconstructionDiameter": _numbers(0, 5000),
    "RepetitionTime": _numbers(0, 1_000_000),
    "RescaleType": _words(RESCALE_TYPES),
    "SAR": _numbers(0, 1000),
    "ScanningSequence": _word_list(SCANNING_SEQUENCES),
    "SequenceVariant": _word_list(SEQUENCE_VARIANTS),
    "SingleCollimationWidth": _numbers(0, 1000),
    "SliceThickness": _numbers(0, 1000),
    "SpacingBetweenSlices": _numbers(-1000, 1000),
    "SpiralPitchFactor": _numbers(0, 100),
    "TotalCollimationWidth": _numbers(0, 1000),
    "Units": _words(UNITS),
    "ViewPosition": _words(VIEWS),
    "WindowCenter": _numbers(-100_000, 100_000),
    "WindowWidth": _numbers(0, 1_000_000),
    "XRayTubeCurrent": _numbers(0, 1_000_000),
}
_PRESENCE = {"ContrastBolusAgent": "has_contrast"}
"""Free text of which only the presence is published."""
_DESCRIPTION = "SeriesDescription"
_SPELLINGS = {"CTDIvol": "ctdi_vol"}
_PATIENT = ("PatientAge", "PatientSex")

KEYWORDS: tuple[str, ...] = tuple(sorted({*_RULES, *_PRESENCE, *_PATIENT, _DESCRIPTION}))
"""DICOM keywords to read with `shardflow.packing.sources.dicom.attributes.read_attributes`."""
VIEW_KEYWORDS: tuple[str, ...] = ("ImageLaterality", "PatientOrientation", "ViewPosition")
"""Those that may differ between the images of a series and say what each one shows."""
ANGLE_KEYWORDS: tuple[str, ...] = ("PositionerPrimaryAngle", "PositionerSecondaryAngle")
"""Likewise of angiograms, whose runs are seen from several directions."""


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
        elif keyword == _DESCRIPTION:
            modality = str(next(iter(attributes.get("Modality", ())), ""))
            found = description_class(modality.strip().upper(), " ".join(map(str, values)))
            if found is not None:
                allowed["description_class"] = found
    return dict(sorted(allowed.items()))


def allow_ordinal(number: int | None) -> int | None:
    """Return a series or instance number; None if it is too large to be a count.

    Example:
        >>> allow_ordinal(301), allow_ordinal(20231105)
        (301, None)
    """
    return number if number is not None and 0 <= number <= MAX_ORDINAL else None


def allow_patient(attributes: Mapping[str, Values]) -> dict[str, str | int | None]:
    """Return the patient characteristics that may be published.

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
    """Return a keyword in snake case; a run of capitals stays one word.

    Example:
        >>> _snake_case("MRAcquisitionType"), _snake_case("KVP"), _snake_case("CTDIvol")
        ('mr_acquisition_type', 'kvp', 'ctdi_vol')
    """
    if keyword in _SPELLINGS:
        return _SPELLINGS[keyword]
    parts = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+", keyword)
    return "_".join(part.lower() for part in parts)


_SURVEY: Final = r"(?<!skeletal )(?<!bone )(?<!myeloma )survey"
_MADE: Final = (
    (
        "localizer",
        r"scouts?|locali[sz]ers?|topograms?|surview|scanogram|lokalizer|" + _SURVEY,
    ),
    ("mip", r"(thick )?m(in|ax)? ?i ?ps?|maximum intensity( projection)?"),
    ("volume_rendering", r"vrt?|volume render(ing|ed)?"),
    ("perfusion", r"perf(usion)?|ctp|cbf|cbv|mtt|tmax|ttp|(pc)?asl|arterial spin( label+ing)?|dsc|dce"),
    ("subtraction", r"subtraction|subtracted|subtraktion|dsa"),
    ("angiography", r"angio(graphy|graphie|grafia|gram)?|cta|mra|tof"),
)
"""What a series is, whatever phase it is of."""
_NO: Final = r"(non?|without|w ?o|ohne|sans|sin|senza|pre)"
_NOT_BOTH: Final = r"(?<!with )(?<!\bw )(?<!and )"
"""Series with and without contrast are of no phase."""
_CONTRAST: Final = r"(contrast(e|o)?|km|iv|inj(ection)?|gad(o(linium)?)?|gd)"
_PHASES: Final = (
    (
        "non_contrast",
        rf"{_NOT_BOTH}{_NO} (iv )?{_CONTRAST}|noncon(trast)?|non con|unenhanced|plain|nati(v|ve|vo|va)|平扫",
    ),
    ("arterial", r"(early |late |hepatic )?art(?! red)(erial|eriell|erielle|eriosa|erielle|eriale)?|动脉期"),
    (
        "portal_venous",
        r"portal( ?ven(ous|os|oes|osa|euse))?|portalven(ous|os|oes|ose)|porto ?venous|pvp?|门静?脉期",
    ),
    ("nephrographic", r"nephro(graphic|genic|graphique|grafica)?|实质期"),
    ("excretory", r"excretory|excretion|urograph(y|ic)|urogram|pyelographic|排泄期"),
    ("delayed", r"delay(ed)?|late( phase| venous)?|spat(phase)?|spaet(phase)?|tardi(f|ve|a|vo)|延迟期"),
    ("venous", r"ven(ous|os|oes|osa|euse)?( phase)?|静脉期"),
)
"""Phases of contrast, in the order in which their words are taken out of a description."""
_WEIGHTINGS: Final = (
    ("t1", r"t 1 ?(flair|dark fluid)"),
    ("flair", r"(t 2 )?(t 2 ?)?flair|dark fluid"),
    ("adc", r"e?adc|apparent diffusion( coefficient)?"),
    ("dwi", r"dwi|diff(usion)?|dti|resolve|trace(w)?"),
    ("swi", r"swi|swan|suscept(ibility)?"),
    ("stir", r"stir|tirm"),
    ("t2_star", r"t 2 ?(star|s)|(t 2 )?(gre|ffe|hemo|heme)"),
    ("t1", r"t 1( ?w(i|eighted)?)?|mp ?rage|b ?ravo|fspgr|vibe|lava|thrive"),
    ("t2", r"t 2( ?w(i|eighted)?)?|haste|ssfse"),
    ("pd", r"pd( ?w)?|proton density"),
)
_CORRECTED: Final = r"att(enuation)?( |n )?corr(ected|ection)?"
_CORRECTIONS: Final = (
    (
        "not_attenuation_corrected",
        r"nac|(no|non|not|un|without|w ?o|ohne|sans|sin|senza) ?(ac|corrected|"
        + _CORRECTED
        + r")|uncorrected",
    ),
    ("attenuation_corrected", r"(ct|mr)? ?ac|" + _CORRECTED),
)
_ATTENUATION_MAP: Final = (("attenuation_map", r"(ct|mr) ?ac|ac ct|attenuation( correction| map)?|mu ?map"),)

_Terms = tuple[tuple[str, re.Pattern[str]], ...]


def _compiled(terms: tuple[tuple[str, str], ...]) -> _Terms:
    return tuple((name, re.compile(rf"(?<![^ ])(?:{pattern})(?![^ ])")) for name, pattern in terms)


_FIRST: Final[dict[str, _Terms]] = {
    "CT": _compiled((*_ATTENUATION_MAP, *_MADE)),
    "MR": _compiled((*_ATTENUATION_MAP, *_MADE, *_WEIGHTINGS)),
    "PT": _compiled((*_MADE[:3], *_CORRECTIONS)),
}
"""Classes by modality; the first whose words are found is the series' own."""
_ONE: Final[dict[str, _Terms]] = {"CT": _compiled(_PHASES)}
"""Likewise behind those: the one whose words are found, if no other's are."""


def description_class(modality: str, description: str) -> str | None:
    """Return the class of a series by the words of its description, in any case; None if it names none.

    Example:
        >>> description_class("CT", "ABD/PEL PortalVenous 3.0"), description_class("CT", "Art+Ven 1.0 B30f")
        ('portal_venous', None)
        >>> description_class("MR", "ax_T2_FLAIR fs"), description_class("PT", "WB uncorrected NAC")
        ('flair', 'not_attenuation_corrected')
    """
    # The star of T2* is the only sign that says something.
    words = split_words(description.replace("*", " star "))
    for name, pattern in _FIRST.get(modality, ()):
        if pattern.search(words):
            return name
    found = []
    for name, pattern in _ONE.get(modality, ()):
        words, count = pattern.subn("", words)
        if count:
            found.append(name)
    return found[0] if len(found) == 1 else None
