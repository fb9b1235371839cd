"""A canary in every text of every kind of annotation and recording; none comes out.

Segmentations, structure sets, reports, presentation states and waveforms are made whole, and then every text
in them, at any depth, is replaced; tables, XML and recordings have one in every place that holds words.
"""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pydicom.config
import pytest
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence as Items

from tests.dicom_factory import MadeStudy, dicom_uid, make_study
from tests.pack_case import PackCase, read_ledger
from tests.privacy.canaries import DATE, NUMBER, STEM, find_canaries, output_bytes
from tests.unit.packing.annotations.made_objects import code, contour, item, make_object

_TEXTS = frozenset({"AE", "LO", "LT", "PN", "SH", "ST", "UC", "UR", "UT"})
_UID = f"1.2.826.0.1.3680043.10.{NUMBER}"
# What an object is read by; codes and their schemes are tried both ways, see `_poison`.
_READ_BY = frozenset(
    "PatientID CodingSchemeDesignator CodeValue GraphicLayer ReferencedSOPInstanceUID".split()  # noqa: SIM905
)
_NAME = f"{STEM.capitalize()}^Jane"


def _poison(dataset: Dataset) -> int:
    """Replace every text below a dataset, at any depth; return how many there were."""
    count = 0
    for element in dataset:
        if element.VR == "SQ":
            count += sum(map(_poison, element.value))
        elif element.VR in _TEXTS and element.keyword not in _READ_BY:
            element.value, count = _NAME if element.VR == "PN" else STEM, count + 1
        elif element.VR == "DA":
            element.value, count = DATE, count + 1
    return count


def _add_words(dataset: Dataset) -> None:
    """Add what writers may add: people, places, private elements."""
    dataset.ContentCreatorName = dataset.OperatorsName = dataset.PatientName = _NAME
    dataset.ContentDescription = dataset.ContentLabel = dataset.SeriesDescription = STEM
    dataset.DeviceUID = dataset.InstanceCreatorUID = f"{_UID}1"
    dataset.StructureSetLabel = dataset.InstitutionName = dataset.PatientComments = STEM
    dataset.ContributingEquipmentSequence = Items([item(Manufacturer=STEM, InstitutionName=STEM)])
    dataset.VerifyingObserverSequence = Items([item(VerifyingObserverName=_NAME, VerifyingOrganization=STEM)])
    dataset.private_block(0x0029, STEM, create=True).add_new(1, "LO", STEM)


def _own(path: Path, study: MadeStudy) -> None:
    dataset = dcmread(path)
    _poison(dataset)
    _add_words(dataset)
    dataset.StudyInstanceUID, dataset.PatientID = study.study_instance_uid, f"{STEM}4711"
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = f"{_UID}{path.stat().st_size}"
    dataset.save_as(path, enforce_file_format=True)


def _coded(value: str, scheme: str = "SCT") -> list[Dataset]:
    return [code(value, scheme, f"of {STEM}")]


def _dicom_objects(folder: Path, study: MadeStudy) -> None:
    """One of each class; codes are the patient's name in public schemes and in a maker's own."""
    images = [dcmread(path) for path in study.files]
    uids = [str(image.SOPInstanceUID) for image in images]
    frame = str(images[0].FrameOfReferenceUID)
    refer = partial(item, ReferencedSOPClassUID=images[0].SOPClassUID)
    one = refer(ReferencedSOPInstanceUID=uids[1])
    position = np.array(images[1].ImagePositionPatient, np.float64)
    square = position + np.array([[2.0, 2, 0], [6, 2, 0], [6, 6, 0], [2, 6, 0]])
    drawn = contour(square)
    make_object(
        folder / f"rt{STEM}", "1.2.840.10008.5.1.4.1.1.481.3", FrameOfReferenceUID=frame,
        StructureSetROISequence=[item(
            ROINumber=1, ROIName=STEM, ROIDescription=STEM, ROIGenerationDescription=STEM,
            ReferencedFrameOfReferenceUID=frame)],
        ROIContourSequence=[item(ReferencedROINumber=1, ContourSequence=[drawn])],
        RTROIObservationsSequence=[item(
            ReferencedROINumber=1, ROIObservationLabel=STEM, ROIInterpreter=_NAME,
            RTROIIdentificationCodeSequence=_coded(STEM))],
    )  # fmt: skip
    image = item(ValueType="IMAGE", ReferencedSOPSequence=[one])
    shape = item(
        ValueType="SCOORD", GraphicType="POLYLINE", GraphicData=[1.0, 1.0, 6.0, 1.0, 6.0, 6.0, 1.0, 1.0],
        ContentSequence=[image],
    )  # fmt: skip
    number = item(
        ValueType="NUM", ConceptNameCodeSequence=_coded(STEM, "DCM"),
        MeasuredValueSequence=[item(
            NumericValue="98765.4321", MeasurementUnitsCodeSequence=[code(STEM, "UCUM", STEM)])],
    )  # fmt: skip
    texts = [
        item(ValueType="TEXT", ConceptNameCodeSequence=_coded("112039", "DCM"), TextValue=STEM),
        item(ValueType="UIDREF", ConceptNameCodeSequence=_coded("112040", "DCM"), UID=f"{_UID}7"),
        item(ValueType="PNAME", ConceptNameCodeSequence=_coded("121008", "DCM"), PersonName=_NAME),
        item(ValueType="DATE", ConceptNameCodeSequence=_coded("111060", "DCM"), Date=DATE),
        item(
            ValueType="CODE", ConceptNameCodeSequence=_coded("121071", "DCM"),
            ConceptCodeSequence=_coded(STEM, "99LOCAL"),
        ),
    ]  # fmt: skip
    make_object(
        folder / "sr", "1.2.840.10008.5.1.4.1.1.88.33", ValueType="CONTAINER",
        ConceptNameCodeSequence=_coded("126000", "DCM"),
        ContentSequence=[item(ValueType="CONTAINER", ConceptNameCodeSequence=_coded("125007", "DCM"),
                              ContentSequence=[*texts, shape, number])],
    )  # fmt: skip
    make_object(
        folder / "ko", "1.2.840.10008.5.1.4.1.1.88.59", ConceptNameCodeSequence=_coded(STEM, "DCM"),
        ContentSequence=[item(ValueType="TEXT", TextValue=STEM), image],
    )  # fmt: skip
    make_object(
        folder / "pr", "1.2.840.10008.5.1.4.1.1.11.1", ContentLabel=STEM,
        GraphicLayerSequence=[item(GraphicLayer=STEM, GraphicLayerDescription=STEM)],
        GraphicAnnotationSequence=[item(
            GraphicLayer=STEM, ReferencedImageSequence=[one],
            GraphicObjectSequence=[item(
                GraphicType="CIRCLE", GraphicAnnotationUnits="PIXEL", GraphicData=[6.0, 6.0, 9.0, 6.0])],
            TextObjectSequence=[item(
                UnformattedTextValue=STEM, AnchorPointAnnotationUnits="PIXEL", AnchorPoint=[2.0, 3.0])])],
    )  # fmt: skip
    _segmentation(folder / "seg", images)
    ecg = dcmread(str(get_testdata_file("waveform_ecg.dcm")))
    for group in ecg.WaveformSequence:
        group.MultiplexGroupLabel = STEM
        for channel in group.ChannelDefinitionSequence:
            channel.ChannelLabel = STEM
            channel.ChannelSourceSequence[0].CodeValue = STEM
            channel.ChannelSensitivityUnitsSequence[0].CodeValue = STEM
    for number_, annotation in enumerate(ecg.WaveformAnnotationSequence):
        annotation.UnformattedTextValue = STEM
        annotation.ConceptNameCodeSequence = Items(
            [code(STEM, ("MDC", "SCT", "DCM", "LN")[number_ % 4], STEM)]
        )
    ecg.save_as(folder / "ecg")
    for path in folder.iterdir():
        _own(path, study)


def _segmentation(path: Path, images: list[Any]) -> None:
    import highdicom as hd
    from pydicom.sr.codedict import codes

    for image in images:
        for keyword in (
            "PatientBirthDate",
            "PatientSex",
            "StudyID",
            "AccessionNumber",
            "ReferringPhysicianName",
        ):
            if keyword not in image:
                setattr(image, keyword, "")
    mask = np.zeros((len(images), images[0].Rows, images[0].Columns, 1), np.uint8)
    mask[:, 3:6, 4:8] = 1
    segment = hd.seg.SegmentDescription(
        1, STEM, codes.SCT.Organ, hd.sr.CodedConcept(STEM, "99LOCAL", STEM),
        hd.seg.SegmentAlgorithmTypeValues.SEMIAUTOMATIC, tracking_uid=f"{_UID}9", tracking_id=STEM,
        algorithm_identification=hd.AlgorithmIdentificationSequence(
            STEM, codes.DCM.ArtificialIntelligence, STEM),
    )  # fmt: skip
    hd.seg.Segmentation(
        images, mask, "BINARY", [segment], series_instance_uid=f"{_UID}2", series_number=9,
        sop_instance_uid=f"{_UID}3", instance_number=1, manufacturer=STEM, manufacturer_model_name=STEM,
        software_versions=STEM, device_serial_number=STEM, content_creator_name=_NAME,
        content_description=STEM, series_description=STEM,
    ).save_as(path)  # fmt: skip


def _tables(folder: Path, study: MadeStudy) -> None:
    uids = [str(dcmread(path, stop_before_pixels=True).SOPInstanceUID) for path in study.files]
    points = "".join(
        f"<edgeMap><xCoord>{x}</xCoord><yCoord>{y}</yCoord></edgeMap>" for x, y in ((1, 1), (8, 1), (8, 8))
    )
    (folder / f"{STEM}.xml").write_text(
        f"<LidcReadMessage uid='{STEM}'><!-- {STEM} --><ResponseHeader>"
        f"<ServiceRequestId>{STEM}</ServiceRequestId>"
        f"<SeriesInstanceUid>{dicom_uid('series', STEM, 'A', 1)}</SeriesInstanceUid>"
        f"<StudyInstanceUID>{study.study_instance_uid}</StudyInstanceUID></ResponseHeader><readingSession>"
        f"<servicingRadiologistID>{STEM}</servicingRadiologistID><unblindedReadNodule><noduleID>{STEM}</noduleID>"
        f"<characteristics><subtlety>{STEM}</subtlety></characteristics><roi><imageSOP_UID>{uids[0]}</imageSOP_UID>"
        f"<inclusion>{STEM}</inclusion>{points}</roi></unblindedReadNodule></readingSession></LidcReadMessage>",
        encoding="utf-8",
    )
    (folder / "boxes.csv").write_text(
        f"image_id,label,x_min,y_min,x_max,y_max,{STEM}\n{uids[0]},{STEM},1,1,5,5,{STEM}\n", encoding="utf-8"
    )
    box = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "caption": STEM, "attributes": {STEM: STEM}}
    coco = {
        "info": {"contributor": STEM, "url": STEM}, "licenses": [{"name": STEM}],
        "images": [{"id": 1, "file_name": f"{STEM}/{uids[2]}.dcm", "coco_url": STEM, "date_captured": DATE}],
        "annotations": [box], "categories": [{"id": 1, "name": STEM, "supercategory": STEM}],
    }  # fmt: skip
    (folder / "coco.json").write_text(json.dumps(coco), encoding="utf-8")
    (folder / f"{STEM}_seg.nii.gz").write_bytes(gzip.compress(f"{STEM}".encode() * 100))


def _recordings(folder: Path, shared: Path) -> None:
    import wfdb

    edf = bytearray((shared / "edf" / "test_subsecond.edf").read_bytes())
    edf[8:168] = (
        f"{STEM}4711 F 01-JAN-1917 {STEM}".ljust(80).encode()
        + f"Startdate 24-JAN-2020 {STEM}".ljust(80).encode()
    )
    num_signals = int(edf[252:256])
    for start, width in ((0, 16), (16, 80), (96, 8), (136, 80), (224, 32)):
        for signal in range(num_signals):
            at = 256 + num_signals * start + signal * width
            if not bytes(edf[at : at + width]).startswith((b"EDF Annotations", b"BDF")):
                edf[at : at + width] = STEM.ljust(width).encode()
    (folder / f"{STEM}.edf").write_bytes(edf.replace(b"\x14Recording", f"\x14{STEM}".ljust(10).encode()))
    samples = (shared / "wfdb" / "100.dat").read_bytes()[:3000]  # three bytes for two samples
    (folder / f"{STEM}.dat").write_bytes(samples)
    wfdb.wrann(
        STEM,
        "atr",
        np.array([10, 20]),
        ["N", "+"],
        aux_note=[STEM, f"(AFIB {STEM}"],
        write_dir=str(folder),
    )
    header = (shared / "wfdb" / "100.hea").read_text(encoding="utf-8").replace("100.dat", f"{STEM}.dat")
    lines = header.replace("MLII", STEM).splitlines()
    (folder / f"{STEM}.hea").write_text(
        "\n".join(
            [f"# {STEM}", f"{STEM} 2 360 1000 10:11:12 24/01/2020", *lines[2:], f"# subject_id: {STEM}4711"]
        ),
        encoding="utf-8",
    )


def _of_the_day(dataset: Dataset, _: int) -> None:
    dataset.StudyDate, dataset.StudyTime = "20200124", "040000"


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of wfdb, which writes a file here
def test_no_canary_of_annotations_and_recordings_comes_out(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pydicom.config.settings, "_writing_validation_mode", pydicom.config.IGNORE)
    monkeypatch.setattr(pydicom.config.settings, "reading_validation_mode", pydicom.config.IGNORE)
    case = PackCase(tmp_path)
    case.prepare()
    study = make_study(case.dicom / "a", patient=f"{STEM}4711", num_slices=4, change=_of_the_day)
    folder = case.dicom / f"{STEM} {DATE}"
    folder.mkdir()
    _dicom_objects(folder, study)
    _tables(folder, study)
    _recordings(folder, shared_data)
    done = case.command("--set", "policy.max_quarantined_share=1.0")
    assert done.returncode == 0, done.stderr[-2000:]
    for text in (done.stdout, done.stderr):
        assert not find_canaries(text.encode())
    for name, data in output_bytes(case.output):
        assert not find_canaries(data), name
    ledger = [row for row in read_ledger(case.output) if row["kind"] == "attachment"]
    assert len(ledger) >= 13
    fields = case.open().read_fields(0)
    sources = {roi["source"] for roi in json.loads(fields["annotations.json"])["rois"]}
    assert sources == {"coco", "csv", "dicom-seg", "gsps", "ko", "lidc-xml", "rtstruct", "sr-tid1500"}
    recordings = json.loads(fields["waveforms.json"])["recordings"]
    assert {one["source"] for one in recordings} == {"dicom-waveform", "edf", "wfdb"}
