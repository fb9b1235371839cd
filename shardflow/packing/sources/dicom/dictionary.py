"""Tables of the DICOM standard: UIDs of image classes and encodings, tags of attributes, sequences of people.

The lists of classes and encodings fail closed: what is missing is not packed, with a reason. The tags that
packing itself needs are listed here because pydicom's dictionary loads all of pydicom: a third of a second
and 30 MB in every process. Other keywords, such as those of a site's own rules, are looked up there.

Source: DICOM PS3.4 annex B (storage SOP classes) and PS3.6 chapter 6 and annex A (registry of data elements,
UIDs), edition 2024b.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_STORAGE = "1.2.840.10008.5.1.4.1.1."

MEDIA_DIRECTORY = "1.2.840.10008.1.3.10"
"""Media Storage Directory: a DICOMDIR."""

SECONDARY_CLASSES = frozenset(_STORAGE + end for end in ("7", "7.1", "7.2", "7.3", "7.4"))
"""Secondary captures: screen saves, dose pages, scanned film."""

NUCLEAR = _STORAGE + "20"
DOSE_GRID = _STORAGE + "481.2"
PARAMETRIC_MAP = _STORAGE + "30"
MAP_CLASSES = frozenset({DOSE_GRID, PARAMETRIC_MAP})
"""Computed volumes: RT dose and parametric maps."""

WHOLE_SLIDE = _STORAGE + "77.1.6"
"""VL Whole Slide Microscopy Image: a level of a slide."""

IMAGE_CLASSES = (
    SECONDARY_CLASSES
    | MAP_CLASSES
    | {WHOLE_SLIDE}
    | frozenset(
        _STORAGE + end
        for end in (
            *("1", "1.1", "1.1.1", "1.2", "1.2.1", "1.3", "1.3.1"),  # CR, DX, MG, intra-oral
            *("2", "2.1", "2.2"),  # CT, enhanced, legacy converted
            *("4", "4.1", "4.3", "4.4"),  # MR, enhanced, enhanced color, legacy converted
            *("3", "3.1", "6", "6.1", "6.2", "6.3"),  # ultrasound, with the retired classes
            *("5", "20"),  # nuclear medicine
            *("12.1", "12.1.1", "12.2", "12.2.1", "12.3"),  # angiography, fluoroscopy
            *("13.1.1", "13.1.2", "13.1.3", "13.1.4", "13.1.5"),  # 3D X-ray, tomosynthesis
            *("14.1", "14.2"),  # intravascular optical coherence tomography
            *(
                "77.1",
                "77.2",
                "77.1.1",
                "77.1.1.1",
                "77.1.2",
                "77.1.2.1",
                "77.1.3",
                "77.1.4",
                "77.1.4.1",
                "77.1.7",
            ),
            *("77.1.5.1", "77.1.5.2", "77.1.5.4"),  # ophthalmology
            *("128", "128.1", "130"),  # PET
            "481.1",  # RT image
        )
    )
)
"""Objects whose pixels are packed. Segmentations are not among them."""

IMPLICIT_LITTLE = "1.2.840.10008.1.2"
EXPLICIT_LITTLE = "1.2.840.10008.1.2.1"
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT_BIG = "1.2.840.10008.1.2.2"
RLE = "1.2.840.10008.1.2.5"

STATED_UNITS = frozenset(
    # (0054,1001) Units
    {"BQML", "CM2ML", "CNTS", "GML", "MLMING", "MLMINML", "PROPCNTS", "PROPCPS", "STDDEV", "UMOLML"}
    | {"ED", "EDW", "HU", "HU_MOD", "MGML", "OD", "PCT", "Z_EFF"}  # (0028,1054) Rescale Type
    | {"GY"}  # (3004,0002) Dose Units
)
"""Units that a file may state for its values; other words, and "unspecified" ones, are no unit."""

MAP_UNITS = frozenset(
    # UCUM codes of PS3.16, CID 82, 7180, 9301 and 9302
    {"1", "%", "[hnsf'U]", "{counts}", "{ratio}", "{Particles}/[100]g{Tissue}", "deg", "rad", "ppm", "ppb"}
    | {"mm2/s", "um2/s", "10-6.mm2/s", "10-3.mm2/s", "mm", "cm", "mm2", "cm2", "mm3", "cm3", "ml"}
    | {"s", "ms", "us", "/s", "/ms", "/min", "Hz", "kHz", "mm/s", "cm/s", "m/s", "T", "mT", "kPa", "Pa"}
    | {"ml/min", "ml/ml", "ml/s", "ml/ml/min", "ml/min/ml", "ml/(100.g)", "ml/(100.g.min)", "ml/min/(100.g)"}
    | {"g/ml", "mg/ml", "ug/ml", "mg/dl", "mmol/l", "umol/ml", "umol/min/ml", "mmol/kg"}
    | {"Bq/ml", "kBq/ml", "MBq/ml", "{propcounts}", "{propcounts}/s", "{counts}/s", "Gy", "cGy"}
    | {"g/ml{SUVbw}", "{SUVbw}g/ml", "{SUVlbm}g/ml", "{SUVibw}g/ml", "{SUVbsa}cm2/ml"}
)
"""Units that a parametric map may state for its values."""

NATIVE_SYNTAXES = frozenset({IMPLICIT_LITTLE, EXPLICIT_LITTLE, DEFLATED, EXPLICIT_BIG})
"""Syntaxes with uncompressed pixels."""

ENCAPSULATED_SYNTAXES = frozenset(
    {RLE} | {f"1.2.840.10008.1.2.4.{end}" for end in (50, 51, 57, 70, 80, 81, 90, 91, 201, 202, 203)}
)
"""RLE, JPEG (baseline, extended, lossless), JPEG-LS, JPEG 2000, HTJ2K."""


class Attribute(NamedTuple):
    """An entry of the registry."""

    tag: int
    representation: str
    """Value representation; the first one where the registry allows several."""


def find_attribute(keyword: str) -> Attribute | None:
    """Look a keyword up; None where the registry does not have it."""
    known = KNOWN.get(keyword)
    if known is not None:
        return Attribute(*known)
    from pydicom.datadict import dictionary_VR, tag_for_keyword

    tag = tag_for_keyword(keyword)
    return None if tag is None else Attribute(int(tag), str(dictionary_VR(tag)).split(" or ", maxsplit=1)[0])


KNOWN: Final[dict[str, tuple[int, str]]] = {
    "AccessionNumber": (0x00080050, "SH"),
    "AdmissionID": (0x00380010, "LO"),
    "AnodeTargetMaterial": (0x00181191, "CS"),
    "BodyPartExamined": (0x00180015, "CS"),
    "BodyPartThickness": (0x001811A0, "DS"),
    "BreastImplantPresent": (0x00281300, "CS"),
    "BurnedInAnnotation": (0x00280301, "CS"),
    "CTDIvol": (0x00189345, "FD"),
    "CompressionForce": (0x001811A2, "DS"),
    "ConsultingPhysicianName": (0x0008009C, "PN"),
    "ContentCreatorName": (0x00700084, "PN"),
    "ContrastBolusAgent": (0x00180010, "LO"),
    "ConversionType": (0x00080064, "CS"),
    "ConvolutionKernel": (0x00181210, "SH"),
    "CorrectedImage": (0x00280051, "CS"),
    "CurrentObserverTrial": (0x0040A307, "PN"),
    "DataCollectionDiameter": (0x00180090, "DS"),
    "DetectorType": (0x00187004, "CS"),
    "DeviceSerialNumber": (0x00181000, "LO"),
    "DistanceSourceToDetector": (0x00181110, "DS"),
    "DistanceSourceToPatient": (0x00181111, "DS"),
    "DistributionName": (0x40080119, "PN"),
    "DocumentAuthorTrial": (0x0040A067, "PN"),
    "EchoNumbers": (0x00180086, "IS"),
    "EchoTime": (0x00180081, "DS"),
    "EchoTrainLength": (0x00180091, "IS"),
    "EvaluatorName": (0x00142006, "PN"),
    "Exposure": (0x00181152, "IS"),
    "ExposureIndex": (0x00181411, "DS"),
    "ExposureInuAs": (0x00181153, "IS"),
    "ExposureTime": (0x00181150, "IS"),
    "FillerOrderNumberImagingServiceRequest": (0x00402017, "LO"),
    "FillerOrderNumberImagingServiceRequestRetired": (0x00402007, "SH"),
    "FillerOrderNumberProcedure": (0x00401007, "SH"),
    "FlipAngle": (0x00181314, "DS"),
    "FocalSpots": (0x00181190, "DS"),
    "GantryDetectorTilt": (0x00181120, "DS"),
    "HumanPerformerName": (0x00404037, "PN"),
    "ImageLaterality": (0x00200062, "CS"),
    "ImageType": (0x00080008, "CS"),
    "ImagerPixelSpacing": (0x00181164, "DS"),
    "InstitutionAddress": (0x00080081, "ST"),
    "InstitutionName": (0x00080080, "LO"),
    "InstitutionalDepartmentName": (0x00081040, "LO"),
    "InsurancePlanIdentification": (0x00101050, "LO"),
    "InterpretationAuthor": (0x4008010C, "PN"),
    "InterpretationRecorder": (0x40080102, "PN"),
    "InterpretationTranscriber": (0x4008010A, "PN"),
    "InversionTime": (0x00180082, "DS"),
    "IssuerOfAdmissionID": (0x00380011, "LO"),
    "IssuerOfPatientID": (0x00100021, "LO"),
    "KVP": (0x00180060, "DS"),
    "Laterality": (0x00200060, "CS"),
    "LossyImageCompression": (0x00282110, "CS"),
    "LossyImageCompressionRatio": (0x00282112, "DS"),
    "MRAcquisitionType": (0x00180023, "CS"),
    "MagneticFieldStrength": (0x00180087, "DS"),
    "Manufacturer": (0x00080070, "LO"),
    "MedicalRecordLocator": (0x00101090, "LO"),
    "Modality": (0x00080060, "CS"),
    "NameOfPhysiciansReadingStudy": (0x00081060, "PN"),
    "NamesOfIntendedRecipientsOfResults": (0x00401010, "PN"),
    "NumberOfAverages": (0x00180083, "DS"),
    "OperatorsName": (0x00081070, "PN"),
    "OrderEnteredBy": (0x00402008, "PN"),
    "OtherPatientIDs": (0x00101000, "LO"),
    "OtherPatientNames": (0x00101001, "PN"),
    "PatientAddress": (0x00101040, "LO"),
    "PatientAge": (0x00101010, "AS"),
    "PatientBirthDate": (0x00100030, "DA"),
    "PatientBirthName": (0x00101005, "PN"),
    "PatientID": (0x00100020, "LO"),
    "PatientInstitutionResidence": (0x00380400, "LO"),
    "PatientMotherBirthName": (0x00101060, "PN"),
    "PatientName": (0x00100010, "PN"),
    "PatientOrientation": (0x00200020, "CS"),
    "PatientPosition": (0x00185100, "CS"),
    "PatientSex": (0x00100040, "CS"),
    "PatientTelephoneNumbers": (0x00102154, "SH"),
    "PercentPhaseFieldOfView": (0x00180094, "DS"),
    "PercentSampling": (0x00180093, "DS"),
    "PerformedProcedureStepID": (0x00400253, "SH"),
    "PerformedStationName": (0x00400242, "SH"),
    "PerformingPhysicianName": (0x00081050, "PN"),
    "PersonAddress": (0x00401102, "ST"),
    "PersonName": (0x0040A123, "PN"),
    "PersonTelephoneNumbers": (0x00401103, "LO"),
    "PhotometricInterpretation": (0x00280004, "CS"),
    "PhysicianApprovingInterpretation": (0x40080114, "PN"),
    "PhysiciansOfRecord": (0x00081048, "PN"),
    "PixelBandwidth": (0x00180095, "DS"),
    "PixelSpacing": (0x00280030, "DS"),
    "PixelSpacingCalibrationType": (0x00280A02, "CS"),
    "PlacerOrderNumberImagingServiceRequest": (0x00402016, "LO"),
    "PlacerOrderNumberImagingServiceRequestRetired": (0x00402006, "SH"),
    "PlacerOrderNumberProcedure": (0x00401006, "SH"),
    "PositionerPrimaryAngle": (0x00181510, "DS"),
    "PositionerSecondaryAngle": (0x00181511, "DS"),
    "PositionerType": (0x00181508, "CS"),
    "PresentationIntentType": (0x00080068, "CS"),
    "ProtocolName": (0x00181030, "LO"),
    "ROIInterpreter": (0x300600A6, "PN"),
    "RecognizableVisualFeatures": (0x00280302, "CS"),
    "ReconstructionDiameter": (0x00181100, "DS"),
    "ReferringPhysicianAddress": (0x00080092, "ST"),
    "ReferringPhysicianName": (0x00080090, "PN"),
    "ReferringPhysicianTelephoneNumbers": (0x00080094, "SH"),
    "RepetitionTime": (0x00180080, "DS"),
    "RequestedProcedureID": (0x00401001, "SH"),
    "RequestingPhysician": (0x00321032, "PN"),
    "RequestingService": (0x00321033, "LO"),
    "RescaleType": (0x00281054, "LO"),
    "ResponsibleOrganization": (0x00102299, "LO"),
    "ResponsiblePerson": (0x00102297, "PN"),
    "ReviewerName": (0x300E0008, "PN"),
    "SAR": (0x00181316, "DS"),
    "ScanningSequence": (0x00180020, "CS"),
    "ScheduledPatientInstitutionResidence": (0x0038001E, "LO"),
    "ScheduledPerformingPhysicianName": (0x00400006, "PN"),
    "ScheduledProcedureStepID": (0x00400009, "SH"),
    "ScheduledStationName": (0x00400010, "SH"),
    "SecondaryReviewerName": (0x00140104, "PN"),
    "SelectorPNValue": (0x0072006A, "PN"),
    "SequenceVariant": (0x00180021, "CS"),
    "SeriesDescription": (0x0008103E, "LO"),
    "ServiceEpisodeID": (0x00380060, "LO"),
    "SingleCollimationWidth": (0x00189306, "FD"),
    "SliceThickness": (0x00180050, "DS"),
    "SpacingBetweenSlices": (0x00180088, "DS"),
    "SpecimenAccessionNumber": (0x0040050A, "LO"),
    "SpiralPitchFactor": (0x00189311, "FD"),
    "StationName": (0x00081010, "SH"),
    "StudyDate": (0x00080020, "DA"),
    "StudyDescription": (0x00081030, "LO"),
    "StudyID": (0x00200010, "SH"),
    "TotalCollimationWidth": (0x00189307, "FD"),
    "Units": (0x00541001, "CS"),
    "VerbalSourceTrial": (0x0040A352, "PN"),
    "VerifyingObserverName": (0x0040A075, "PN"),
    "ViewPosition": (0x00185101, "CS"),
    "WindowCenter": (0x00281050, "DS"),
    "WindowWidth": (0x00281051, "DS"),
    "XRayTubeCurrent": (0x00181151, "IS"),
}


_ELEMENTS: Final = """
    0004: 1220
    0008: 0006 0051 0063 0082 0096 009D 0109 0110 0121 0123 0124 0220 0300 0305 0310 0400 0406 0410 0411
          0412 0413 0419 041A 041D 041E 0420 0421 0422 0423 0424 0425 1032 103F 1041 1049 1052 1062 1072
          1084 1100 1110 1111 1112 1115 1120 1125 1130 1134 113A 1140 1145 114A 114B 1156 1164 1198 1199
          119A 119B 1200 1250 2112 2133 2135 2218 2220 2228 2229 2230 2240 2242 2244 2246 2251 2253 2255
          2257 2259 225A 225C 3001 3011 9092 9121 9124 9154 9215 9237 9410 9458
    0010: 0024 0026 0027 0050 0101 0102 0201 0215 0216 0219 0221 0229 1002 1021 1100 2161 2202 2293 2294
          2296
    0012: 0023 0054 0064 0083
    0014: 0106 0200 0201 2002 2012 201E 2030 2204 2220 3020 3040 3060 4002 4008 400E 4010 4011 4020 4030
          4035 4040 4050 4051 4060 4070 4080 4083 4086 4087 4091 409A
    0018: 0012 0014 0026 0029 002A 0036 100A 11B8 11BA 11BC 11BF 11C1 1272 2041 5011 5104 6011 9006 9042
          9045 9049 9076 9083 9084 9092 9103 9107 9112 9114 9115 9117 9118 9119 9125 9126 9152 9176 9197
          9226 9227 9239 9251 925D 9260 9301 9304 9308 9312 9314 9321 9325 9326 9329 9338 9340 9341 9346
          9360 9362 9363 9364 9365 936F 9379 937D 9380 9381 9382 9401 9405 9406 9407 9412 9417 9432 9434
          9451 9455 9456 9462 9472 9476 9477 9504 9506 9507 9530 9538 9541 9542 9555 9556 9601 9621 9732
          9733 9734 9735 9736 9737 9749 9751 9771 9772 9803 9806 9807 9809 980D 980E 980F 9821 9825 982A
          982C 9831 9832 9835 9836 9902 9903 9906 9907 9909 990B 990C 990D 990E 9911 9912 9913 9914 991B
          991C 991D 991F 9920 9931 9932 9933 9934 9935 9936 993B 993C 993D 993E A001
    0020: 9071 9111 9113 9116 9170 9171 9172 9221 9222 9253 930E 930F 9310 9450 9529
    0022: 0006 0015 0016 0017 0018 0019 001A 001B 001C 001D 0020 0021 0022 0031 0042 0058 1007 1008 1012
          1024 1025 1028 1035 1036 1040 1044 1045 1047 1048 104A 104B 1050 1090 1092 1096 1100 1101 1103
          1125 1127 1128 112A 1132 1133 1134 1135 1150 1153 1210 1211 1212 1220 1225 1230 1250 1255 1257
          1260 1262 1265 1300 1310 1330 1420 1423 1436 1443 1445 1450 1458 1465 1470 1472 1512 1513 1518
          1525 1526 1612 1615 1618 1620 1628 1640
    0024: 0016 0021 0024 0032 0033 0034 0058 0064 0065 0067 0083 0085 0089 0097 0110 0112 0114 0115 0122
          0317 0320 0325 0344
    0028: 1230 1352 1401 1404 140B 140C 3000 3001 3010 3110 5000 6100 7000 7008 700A 700F 7010 7011 7012
          7015 7016 701C 7022 7023 7024 7027 7028 702C 702D 702E 9110 9132 9145 9415 9422 9443 9501 9502
          9505
    0032: 1031 1034 1064 1065 1067
    0034: 0001 0009 000A 000B 000D
    0038: 0004 0014 0044 0064 0100 0101 0502
    003A: 0200 0208 0209 020A 0211 0240 0242 0300 0312 0318 0319 0320 0321 0323 0325 0326 0328 032A 032C
          032D
    0040: 0008 000A 000B 0026 0027 0036 0039 003A 0100 0220 0260 0270 0275 0281 0293 0295 0296 030E 0320
          0321 0324 0330 0340 0440 0441 0500 0513 0515 0518 0520 0550 0552 0555 0560 0562 059A 0610 0612
          0620 0710 071A 08D8 08DA 08EA 09F8 100A 1011 1012 1101 4004 4007 4009 4015 4016 4018 4019 4021
          4022 4025 4026 4027 4028 4029 4030 4031 4032 4033 4034 4035 4070 4071 4072 4074 9092 9094 9096
          9098 9220 A020 A026 A028 A043 A066 A068 A070 A073 A076 A078 A07A A07C A085 A088 A090 A167 A168
          A170 A195 A296 A300 A301 A313 A340 A358 A360 A370 A372 A375 A380 A385 A390 A404 A504 A525 A730
          A731 A732 A744 A801 A806 A807 A808 B020 E006 E008 E021 E022 E023 E024 E025
    0042: 0013
    0044: 0007 0013 0019 0100 0101 0103 0107 0109 010A
    0046: 0014 0015 0016 0018 0028 0047 0050 0052 0070 0071 0074 0080 0097 0098 0100 0101 0102 0110 0111
          0112 0113 0116 0121 0122 0123 0124 0145 0207 0210 0211 0215 0218 0244
    0048: 0008 0100 0105 0108 0110 0116 0120 0200 0207 021A
    0050: 0010 0012
    0052: 0016 0025 0027 0029
    0054: 0012 0013 0016 0022 0032 0052 0062 0063 0072 0220 0222 0300 0302 0304 0306 0410 0412 0414
    0060: 3000
    0062: 0003 0007 000A 000F 0011 0012
    0064: 0002 0005 000F 0010
    0066: 0002 0011 0012 0013 0026 0027 0028 002B 002D 002E 002F 0030 0034 0035 0101 0102 0104 0108 0121
          0124 0130 0132 0133 0134
    0068: 6222 6224 6225 6230 6260 6265 62A0 62C0 62E0 62F0 6320 6360 63A0 63A4 63A8 63AC 63B0 63E0 6400
          6430 6470 6500 6510 6520 6545 6550 65A0 65E0 7003
    006A: 0002 0008 0009 000A 000B
    0070: 0001 0008 0009 005A 0060 0086 0087 0209 0231 0232 0233 0234 0287 0308 0309 030A 030D 0311 0314
          0315 0318 031C 031E 031F 0402 0404 1104 1201 120A 1301 1304 1801 1803 1805 1806 1901 1903 1905
          1A04 1A08 1B01 1B03 1B04 1B11 1B12
    0072: 000C 000E 0012 0020 0022 0030 003E 0080 0102 0200 0210 0214 0300 0400 0422 0424 0427 0430 0600
          0705
    0074: 1002 1007 1008 100E 1020 1030 1040 1042 1044 1046 1048 104A 104C 104E 1050 1210 1212 1216 1220
          1224 1401 1405 1409 140D 140E
    0076: 0008 000C 000E 0010 0020 0032 0034 0040 0060
    0078: 0026 0028 002A 0070 00B0 00B4
    0080: 0001 0002 0003 0008 0012 0013
    0082: 0004 0005 0007 000C 0010 0017 0021 0022 0034 0035
    0400: 0401 0402 0403 0500 0550 0551 0561
    2000: 001E 00A2 00A4 00A8 0500 0510
    2010: 0500 0510 0520
    2020: 0110 0111 0130 0140
    2040: 0010 0020 0500
    2050: 0010 0500
    2100: 0500
    2120: 0050 0070
    2130: 0010 0015 0030 0040 0050 0060 0080 00A0 00C0
    2200: 000D
    3002: 0030 0040 0050 0101 0102 0103 0104 0108 0109 010A 010B 010C 010D 010E 0110 0112 0113 0114 0117
          0118 0119 011A 011B 011E 011F 0122 0124 0125 0126 0127 0128 012B 012C 0130 0131 0132 0133 0135
    3004: 0010 0050 0060
    3006: 0010 0012 0014 0016 0018 0020 0030 0037 0040 004A 004B 004C 004D 004E 004F 0080 0086 00A0 00B0
          00B6 00B9 00C0 00C9 00CA 00CB
    3008: 0010 0020 0021 0030 0040 0041 0050 0060 0068 0070 0080 0090 00A0 00A1 00A2 00B0 00C0 00D0 00D1
          00E0 00F0 00F2 00F4 00F6 0100 0110 0120 0130 0140 0150 0160 0171 0173 0220 0240
    300A: 0010 0040 0048 0070 008C 00B0 00B6 00CA 00D1 00E3 00F4 0107 0111 0116 011A 0180 0190 01A0 01B4
          0206 0210 0230 0260 0280 02B0 02D0 02EA 030C 0314 0332 0342 0360 0370 0380 03A0 03A2 03A4 03A6
          03A8 03AA 03AC 0401 0410 0420 0431 0441 0450 0453 0505 0506 060A 0610 0614 0616 0617 0618 061C
          061F 0620 0621 0629 062B 062D 062F 0630 0631 0632 0635 063A 063B 063E 063F 0644 0646 0647 064C
          064D 0651 0656 0658 0659 065A 065B 065D 0660 0662 0667 0668 066A 066F 0671 0673 0677 0678 067B
          067E 067F 0683 0684 0686 0689 068A 0702 0703 0715 0716 0722 0731 0733 073E 073F 0740 0743 0744
          0745 0746 0761 0762 0772 0774 0780 0784 0787 0788 0789 078A 078B 078C 078D 078F 0790 0791 0793
          0797 0798 0799 079C 079D 079F 07A0 07A1
    300C: 0002 0004 000A 0020 0040 0042 0050 0055 0060 0080 00B0 00F2 0111 0114 0116 0120 0125 0128
    3010: 0001 0003 0004 0007 0008 0009 000A 0011 0012 0014 0016 0018 0019 0021 0023 0024 0025 0026 0027
          0028 002A 002B 002C 002E 002F 0030 0032 0044 0049 004A 004B 004E 0055 0057 005B 005D 005F 0060
          0062 0064 0065 0067 0069 006A 006B 006C 006D 0070 0071 0076 0078 0079 0080 0081 0082 0087 0088
          0089 0091 0097 0098 00A0
    4008: 0050 0111 0117 0118
    4010: 0004 1001 100A 1011 1037 1038 1045 1047 1064 106F 1071 1072 1076 1077 1079 107B 107D
    4FFE: 0001
    FFFA: FFFA
"""
"""Group, and the elements of it."""


def _tags() -> Iterator[int]:
    group = 0
    for word in _ELEMENTS.split():
        if word.endswith(":"):
            group = int(word[:-1], 16)
        else:
            yield group << 16 | int(word, 16)


SEQUENCES: Final = frozenset(_tags())
