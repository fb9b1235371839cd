"""Tags and value representations of attributes, by keyword.

Those that packing itself asks for stand here, because pydicom's dictionary comes with all of pydicom: a
third of a second and 30 MB in every process of every job. Any other keyword (a site's own rules may name
one) is looked up there.

Source: DICOM PS3.6, chapter 6 (registry of data elements), edition 2024b.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["KNOWN", "Attribute", "find_attribute"]


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
    "BurnedInAnnotation": (0x00280301, "CS"),
    "CTDIvol": (0x00189345, "FD"),
    "CompressionForce": (0x001811A2, "DS"),
    "ConsultingPhysicianName": (0x0008009C, "PN"),
    "ContentCreatorName": (0x00700084, "PN"),
    "ContrastBolusAgent": (0x00180010, "LO"),
    "ConversionType": (0x00080064, "CS"),
    "ConvolutionKernel": (0x00181210, "SH"),
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
