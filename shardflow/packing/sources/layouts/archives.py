"""Layouts of public collections: ``mimic-cxr``, ``chexpert``, ``ct-rate``, ``openi`` and ``padchest``.

Each expects the folders and tables as the collection is distributed; the class says which, and
docs/layouts.md describes each with its recipe.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from shardflow.errors import ConfigError, SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.bounded import DocumentLimits, parse_xml, read_bounded
from shardflow.packing.sources.layouts.base import (
    LabelTable,
    LayoutInputs,
    PlacedLayout,
    find_files,
    patient_attributes,
    read_table,
)
from shardflow.packing.sources.layouts.table_layout import TableLayout
from shardflow.packing.sources.placement import ImageForm, Placement
from shardflow.packing.sources.reports import (
    MAX_REPORT_BYTES,
    BrokenReport,
    ReportRecord,
    make_record,
    read_report_file,
)

_CHEXPERT_IMAGE: Final = re.compile(
    r"(?:.*/)?(train|valid|test)/(patient\d+)/(study\d+)/((view\d+)_\w+)\.\w+", re.IGNORECASE
)
_PLUS: Final = {
    "age": "age",
    "image": "path_to_image",
    "position": "ap_pa",
    "sex": "sex",
    "view": "frontal_lateral",
}


class Chexpert(TableLayout):
    """Layout of CheXpert and CheXpert Plus: paths name patient and study; the table adds sex, age and view.

    Images are ``train/patient00001/study1/view1_frontal.jpg`` (or ``.png``, ``.dcm``); ``layout.table`` is
    ``train.csv`` or the table of CheXpert Plus, which is also ``inputs.reports`` because it holds the texts.
    """

    columns: ClassVar[Mapping[str, str]] = {
        "age": "Age",
        "image": "Path",
        "position": "AP/PA",
        "sex": "Sex",
        "view": "Frontal/Lateral",
    }
    required: ClassVar[tuple[str, ...]] = ("image",)
    report_columns: ClassVar[Mapping[str, str]] = {
        "findings": "section_findings",
        "image": "path_to_image",
        "impression": "section_impression",
        "text": "report",
    }
    report_required: ClassVar[tuple[str, ...]] = ("image",)

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        table = inputs.layout.table
        if table is not None and not inputs.layout.columns and _is_plus(table):
            self.columns = _PLUS  # type: ignore[misc] # the two tables of one collection
        super().__init__(inputs, splits)

    def key_of_row(self, values: Mapping[str, str]) -> str:
        """Return the path from the split on without its ending: tables of either form name images of both."""
        return self.key_of_file(values["image"]) if _CHEXPERT_IMAGE.fullmatch(values["image"]) else ""

    def key_of_file(self, path: str) -> str:
        """Return the same part of a file's path."""
        match = _CHEXPERT_IMAGE.fullmatch(path)
        return "/".join(match.groups()[:4]) if match else path

    def place_row(self, values: Mapping[str, str], path: str, form: ImageForm) -> Placement | Reason:
        """Place by the path."""
        match = _CHEXPERT_IMAGE.fullmatch(path) or _CHEXPERT_IMAGE.fullmatch(f"{path}.jpg")
        if match is None:
            return Reason.NOT_IN_LAYOUT
        where, patient, study, image, _ = match.groups()
        split = self.split_of(patient, where)
        if isinstance(split, Reason):
            return split
        is_lateral = (values["view"] or image).lower().endswith("lateral")
        return Placement(
            form=form,
            patient=patient,
            study=f"{patient}/{study}",
            series="" if form == "dicom" else f"{patient}/{study}/{image}",
            instance="" if form == "dicom" else f"{patient}/{study}/{image}",
            split=split,
            modality=self.settings.modality.upper() or "CR",
            attributes=patient_attributes(
                sex=values["sex"],
                age=values["age"],
                view=values["position"] or ("LATERAL" if is_lateral else ""),
            ),
            is_gray=True,
        )

    def studies_of(self, values: Mapping[str, str]) -> Sequence[str]:
        """Return the study in the path of the row's image."""
        match = _CHEXPERT_IMAGE.fullmatch(values["image"])
        return [f"{match[2]}/{match[3]}"] if match else []

    def labels(self) -> Sequence[LabelTable]:
        """Return the 14 observations of ``layout.table``, or of ``report_fixed.json`` of CheXpert Plus."""
        table = self.settings.table
        if table is None:
            return ()
        is_plus = self.columns["image"] == _PLUS["image"]
        files = find_files([table.parent], "report_fixed.json") if is_plus else (table,)
        key = self.settings.columns.get("image", self.columns["image"])
        return [
            LabelTable(
                name="chexpert",
                files=files,
                keys=(key,),
                study=lambda values: next(iter(self.studies_of({"image": values[0]})), ""),
                columns=CHEXPERT_LABELS,
            )
        ]

    def text_of(self, values: Mapping[str, str]) -> str:
        """Return the whole report, or its sections where the table has no whole one."""
        sections = [f"{name.upper()}: {values[name]}" for name in ("findings", "impression") if values[name]]
        return values["text"] or "\n".join(sections)


CHEXPERT_LABELS: Final = (
    "No Finding",
    "Enlarged Cardiomediastinum",
    "Cardiomegaly",
    "Lung Lesion",
    "Lung Opacity",
    "Edema",
    "Consolidation",
    "Pneumonia",
    "Atelectasis",
    "Pneumothorax",
    "Pleural Effusion",
    "Pleural Other",
    "Fracture",
    "Support Devices",
)
"""Columns of the labelers CheXpert and NegBio: 1 present, 0 absent, -1 uncertain, empty not mentioned."""


def _is_plus(table: Path) -> bool:
    row = next(read_table(table, "layout.table", _PLUS), None)
    return row is not None and bool(row.values and row.values["image"])


_VOLUME: Final = re.compile(r"(?:.*/)?((((train|valid)_\d+)_[a-z]+)_(\d+))\.nii(?:\.gz)?")


class CtRate(TableLayout):
    """Layout of CT-RATE, NIfTI volumes named ``train_1_a_1.nii.gz``: patient, scan, reconstruction.

    Reconstructions of a scan are series of one study. The table of reports is ``inputs.reports``; the
    metadata table is ``layout.table``. The headers of the first release were blank, and the table has
    spacing, slope and intercept (``volume_facts = "table"``); the headers of the fixed release have them
    (``"header"``). Only one of the two is used: nothing is rescaled twice.
    """

    columns: ClassVar[Mapping[str, str]] = {
        "age": "PatientAge",
        "image": "VolumeName",
        "intercept": "RescaleIntercept",
        "sex": "PatientSex",
        "slope": "RescaleSlope",
        "xy": "XYSpacing",
        "z": "ZSpacing",
    }
    required: ClassVar[tuple[str, ...]] = ("image",)
    report_columns: ClassVar[Mapping[str, str]] = {
        "findings": "Findings_EN",
        "image": "VolumeName",
        "impression": "Impressions_EN",
    }
    report_required: ClassVar[tuple[str, ...]] = ("image", "findings", "impression")

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        if self.settings.volume_facts == "table" and not self.has_table:
            raise ConfigError(
                "layout.table must name the metadata table for volume_facts 'table', got none; name it."
            )

    def key_of_row(self, values: Mapping[str, str]) -> str:
        """Return the name of the volume."""
        return self.key_of_file(values["image"])

    def key_of_file(self, path: str) -> str:
        """Return the name of the volume without its ending."""
        match = _VOLUME.fullmatch(path)
        return match[1] if match else path

    def place_row(
        self,
        values: Mapping[str, str],
        path: str,
        form: ImageForm,  # noqa: ARG002 - volumes only
    ) -> Placement | Reason:
        """Place by the name; the table fills the header's place or adds age and sex."""
        match = _VOLUME.fullmatch(path) or _VOLUME.fullmatch(f"{path}.nii.gz")
        if match is None:
            return Reason.NOT_IN_LAYOUT
        series, study, patient, where, number = match.groups()
        split = self.split_of(patient, where)
        if isinstance(split, Reason):
            return split
        rescale, spacing = None, None
        if self.settings.volume_facts == "table":
            facts = _table_facts(values)
            if facts is None:
                return Reason.INVALID_IMAGE_DESCRIPTION
            rescale, spacing = facts
        return Placement(
            form="nifti",
            patient=patient,
            study=study,
            series=series,
            instance=series,
            number=int(number),
            split=split,
            modality="CT",
            attributes=patient_attributes(sex=values["sex"], age=values["age"], body_part="CHEST"),
            spacing_mm=spacing,
            rescale=rescale,
        )

    def studies_of(self, values: Mapping[str, str]) -> Sequence[str]:
        """Return the scan of a reconstruction; all reconstructions of a scan repeat its report."""
        match = _VOLUME.fullmatch(values["image"])
        return [match[2]] if match else []

    def labels(self) -> Sequence[LabelTable]:
        """Return the 18 abnormalities of ``train_predicted_labels.csv`` and that of ``valid``."""
        return [
            LabelTable(
                name="abnormalities",
                files=find_files(self.table_folders(), "*predicted_labels.csv"),
                keys=(self.columns["image"],),
                study=lambda values: next(iter(self.studies_of({"image": values[0]})), ""),
            )
        ]

    def text_of(self, values: Mapping[str, str]) -> str:
        """Join the sections that are not empty."""
        sections = {"FINDINGS": values["findings"], "IMPRESSION": values["impression"]}
        return "\n".join(f"{name}: {text}" for name, text in sections.items() if text)


def _table_facts(values: Mapping[str, str]) -> tuple[tuple[float, float], tuple[float, float, float]] | None:
    """Return rescale and spacing between rows, columns, slices; None where the row lacks one."""
    try:
        in_plane = json.loads(values["xy"])
        rows, columns = in_plane if isinstance(in_plane, list) else (in_plane, in_plane)
        numbers = [float(each) for each in (values["slope"], values["intercept"], rows, columns, values["z"])]
    except (TypeError, ValueError):
        return None
    slope, intercept, *spacing = numbers
    if not all(map(math.isfinite, numbers)) or min(spacing) <= 0 or slope == 0:
        return None
    return (slope, intercept), (spacing[0], spacing[1], spacing[2])


_MIMIC_IMAGE: Final = re.compile(
    r"(?:.*/)?p(\d+)/s(\d+)/([^/]+?)(?:\.dcm\.gz|\.dcm|\.jpe?g|\.png)", re.IGNORECASE
)
_MIMIC_REPORT: Final = re.compile(r"(?:.*/)?p\d+/s(\d+)\.txt")


class MimicCxr(TableLayout):
    """Layout of MIMIC-CXR and MIMIC-CXR-JPG: folders name patient and study, and rows must agree with them.

    Images are ``files/p10/p10000032/s50414267/<dicom_id>.dcm`` (or ``.dcm.gz``, ``.jpg``), reports
    ``files/p10/p10000032/s50414267.txt``. ``layout.table`` is ``cxr-record-list.csv`` or the metadata table
    of the JPG version, ``layout.split_table`` is ``mimic-cxr-2.0.0-split.csv``. Tables may be ``.csv.gz``.
    """

    columns: ClassVar[Mapping[str, str]] = {
        "image": "dicom_id",
        "patient": "subject_id",
        "study": "study_id",
        "view": "ViewPosition",
    }
    required: ClassVar[tuple[str, ...]] = ("image", "patient", "study")

    def key_of_file(self, path: str) -> str:
        """Return the identifier, which is the file's name."""
        match = _MIMIC_IMAGE.fullmatch(path)
        return match[3] if match else path

    def split_columns(self) -> Mapping[str, str]:
        """Return the names in the official split table."""
        return {"patient": "subject_id", "split": "split"}

    def place_row(self, values: Mapping[str, str], path: str, form: ImageForm) -> Placement | Reason:
        """Place by folders, by the row where there is no file, and compare the two."""
        match = _MIMIC_IMAGE.fullmatch(path)
        if match is None and not values["study"]:
            return Reason.NOT_IN_LAYOUT
        patient, study = (match[1], match[2]) if match else (values["patient"], values["study"])
        if self.has_table and (patient, study) != (values["patient"], values["study"]):
            return Reason.AMBIGUOUS_LINK
        split = self.split_of(patient)
        if isinstance(split, Reason):
            return split
        return Placement(
            form=form,
            patient=patient,
            study=study,
            series="" if form == "dicom" else f"{study}/{self.key_of_file(path)}",
            instance=self.key_of_file(path),
            split=split,
            modality=self.settings.modality.upper() or "DX",
            attributes=patient_attributes(view=values["view"]),
            is_gray=True,
        )

    def labels(self) -> Sequence[LabelTable]:
        """Return the labels of the JPG version by CheXpert and NegBio, and the official split."""
        return [
            LabelTable(
                name=name,
                files=find_files(self.table_folders(), f"mimic-cxr-*-{file}.csv*"),
                keys=("study_id",),
                study=lambda values: values[0],
                columns=columns,
            )
            for name, file, columns in (
                ("chexpert", "chexpert", CHEXPERT_LABELS),
                ("negbio", "negbio", CHEXPERT_LABELS),
                ("official", "split", ("split",)),
            )
        ]

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the report tree, sorted by path; it may be the tree of the images."""
        source = self.inputs.reports
        if source is None:
            return
        if not source.is_dir():
            raise ConfigError("inputs.reports must be the folder of the report tree, got a file; correct it.")
        texts = sorted(_texts_below(source), key=os.fsencode)
        for place, text in enumerate(texts, start=1):
            match = _MIMIC_REPORT.fullmatch(text)
            if match is None:
                yield BrokenReport(place=place, reason=Reason.NOT_REPORT, detail="")
            else:
                yield read_report_file(source / text, place, match[1])

    def reason_of_other(self, path: Path) -> Reason:
        """Return the reason of a file; reports beside the images have their own outcomes."""
        return (
            Reason.LAYOUT_FILE if _MIMIC_REPORT.fullmatch(path.as_posix()) else super().reason_of_other(path)
        )


def _texts_below(folder: Path) -> Iterator[str]:
    for where, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".txt"):
                yield (Path(where) / name).relative_to(folder).as_posix()


_XML_LIMITS: Final = DocumentLimits(max_bytes=MAX_REPORT_BYTES)
_NOT_INDEXED: Final = "no indexing"
_SECTIONS: Final = ("COMPARISON", "INDICATION", "FINDINGS", "IMPRESSION")


class _Report(NamedTuple):
    study: str
    images: tuple[str, ...]
    terms: tuple[str, ...]
    """Headings that indexers gave it, without their qualifiers."""
    text: str


class OpenI(PlacedLayout):
    """Layout of the Indiana chest X-rays of Open-i: reports in XML (``inputs.reports``) name their images.

    An image that two reports name (``parentImage``) is ambiguous. There are no patients, so every study is a
    patient of its own.
    """

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        source = inputs.reports
        if source is None or not source.is_dir():
            raise ConfigError("inputs.reports must be the folder of the XML reports, got none; name it.")
        self._source = source
        self._studies: defaultdict[str, set[str]] = defaultdict(set)
        for record in self._read_all():
            if isinstance(record, _Report):
                for image in record.images:
                    self._studies[image].add(record.study)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place by the name of the file."""
        image = path.rsplit("/", 1)[-1].removesuffix(".gz").rsplit(".", 1)[0]
        studies = self._studies.get(image, set())
        if len(studies) != 1:
            return Reason.AMBIGUOUS_LINK if studies else Reason.NOT_IN_LAYOUT
        (study,) = studies
        return Placement(
            form=form,
            patient=study,
            study=study,
            series="" if form == "dicom" else image,
            instance=image,
            modality=self.settings.modality.upper() or "DX",
            attributes={},
            is_gray=True,
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the sections of each report."""
        for place, record in enumerate(self._read_all(), start=1):
            if isinstance(record, _Report):
                yield make_record(place, record.study, record.text)
            else:
                yield BrokenReport(place=place, reason=record, detail="")

    def labels(self) -> Sequence[LabelTable]:
        """Return the MeSH headings of the reports, each as yes or no; of reports without any, missing."""
        rows = [
            {"study": record.study, "MeSH": json.dumps(record.terms) if record.terms else None}
            for record in self._read_all()
            if isinstance(record, _Report) and _NOT_INDEXED not in map(str.casefold, record.terms)
        ]
        return [
            LabelTable(
                name="mesh",
                rows=rows,
                keys=("study",),
                study=lambda values: values[0],
                columns=(),
                classes="MeSH",
            )
        ]

    def reason_of_other(self, path: Path) -> Reason:
        """Return the reason of a file; reports beside the images have their own outcomes."""
        is_report = path.suffix.lower() == ".xml" and path.is_relative_to(self._source.absolute())
        return Reason.LAYOUT_FILE if is_report else super().reason_of_other(path)

    def _read_all(self) -> Iterator[_Report | Reason]:
        for path in sorted(self._source.rglob("*.xml"), key=os.fsencode):
            yield _read_report(path)


def _read_report(path: Path) -> _Report | Reason:
    try:
        root = parse_xml(read_bounded(path, _XML_LIMITS), _XML_LIMITS)
    except SourceError as error:
        return Reason(error.reason)
    images = [node.get("id") for node in root.walk() if node.name == "parentImage"]
    said = {
        node.get("Label").upper(): node.text().strip() for node in root.walk() if node.name == "AbstractText"
    }
    text = "\n".join(f"{name}: {said[name]}" for name in _SECTIONS if said.get(name))
    # "Opacity/lung/base/left" is a heading with its qualifiers.
    terms = [
        node.text().partition("/")[0].strip()
        for mesh in root.walk()
        if mesh.name == "MeSH"
        for node in mesh.elements("major")
    ]
    return _Report(path.stem, tuple(filter(None, images)), tuple(filter(None, terms)), text)


_VIEWS = {"ANTEROPOSTERIOR": "AP", "LATERAL": "LATERAL", "POSTEROANTERIOR": "PA"}


class PadChest(TableLayout):
    """Layout of PadChest: 16-bit PNG and one table, which is both ``layout.table`` and ``inputs.reports``.

    The table names images by file name, whatever their folder.
    """

    columns: ClassVar[Mapping[str, str]] = {
        "image": "ImageID",
        "modality": "Modality_DICOM",
        "patient": "PatientID",
        "sex": "PatientSex_DICOM",
        "study": "StudyID",
        "view": "ViewPosition_DICOM",
    }
    required: ClassVar[tuple[str, ...]] = ("image", "patient", "study")
    report_columns: ClassVar[Mapping[str, str]] = {"study": "StudyID", "text": "Report"}
    report_required: ClassVar[tuple[str, ...]] = ("study", "text")

    def key_of_file(self, path: str) -> str:
        """Return the name of the file."""
        return path.rsplit("/", 1)[-1]

    def place_row(
        self,
        values: Mapping[str, str],
        path: str,  # noqa: ARG002 - the row decides
        form: ImageForm,
    ) -> Placement | Reason:
        """Place by the row."""
        if not values["image"]:
            return Reason.NOT_IN_LAYOUT
        split = self.split_of(values["patient"])
        if isinstance(split, Reason):
            return split
        view = values["view"].upper()
        return Placement(
            form=form,
            patient=values["patient"],
            study=values["study"],
            series=values["image"],
            instance=values["image"],
            split=split,
            modality=(values["modality"] or self.settings.modality or "DX").upper(),
            attributes=patient_attributes(sex=values["sex"], view=_VIEWS.get(view, view)),
            is_patient_study=self.settings.is_patient_study,
            is_gray=True,
        )

    def studies_of(self, values: Mapping[str, str]) -> Sequence[str]:
        """Return the study of an image; all images of a study repeat its report."""
        return [values["study"]] if values["study"] else []

    def labels(self) -> Sequence[LabelTable]:
        """Return the findings of the column ``Labels``, each as yes or no."""
        table = self.settings.table
        return [
            LabelTable(
                name="padchest",
                files=() if table is None else (table,),
                keys=(self.settings.columns.get("study", self.columns["study"]),),
                study=lambda values: values[0],
                columns=(),
                classes="Labels",
            )
        ]
