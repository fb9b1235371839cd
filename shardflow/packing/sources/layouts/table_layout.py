"""Layouts with one table row per image or study: their base, and the kind ``manifest`` for own tables.

Layouts without image tables: ``folder`` (a pattern over paths), ``headers``, ``lidc`` and ``rsna``.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

from shardflow.errors import ConfigError, SourceError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.bounded import parse_xml, read_bounded
from shardflow.packing.sources.layouts.base import (
    LabelTable,
    LayoutInputs,
    PlacedLayout,
    find_files,
    form_of_path,
    patient_attributes,
    read_reports,
    read_table,
    restored,
)
from shardflow.packing.sources.placement import DiscoveredFile, ImageForm, Placement, discover
from shardflow.packing.sources.reports import BrokenReport, ReportRecord, ReportRole, make_record

Values = Mapping[str, str]

_TABLE: Final = "layout.table"
_ROLES: Final[dict[str, ReportRole]] = {
    "": "final",
    "add": "addendum",
    "addendum": "addendum",
    "amendment": "addendum",
    "corrected": "final",
    "final": "final",
    "prelim": "preliminary",
    "preliminary": "preliminary",
}


class TableLayout(PlacedLayout):
    """Base of layouts with a table of images: finds the row of a file by a key that subclasses define.

    A table keeps its rows in memory: some hundred bytes an image.
    """

    columns: ClassVar[Mapping[str, str]] = {}
    """Role to the name that the collection gives the column."""
    required: ClassVar[tuple[str, ...]] = ()
    """Roles whose columns the table must have."""
    report_columns: ClassVar[Mapping[str, str]] = {}
    """The same for the table of reports; the role ``role`` tells preliminary reports and addenda."""
    report_required: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        _check_roles("layout.columns", self.settings.columns, self.columns)
        self._roles = tuple(sorted(self.columns))
        self._rows: dict[str, tuple[str, ...] | None] = {}
        """Key to the values of a row; None where rows contradict each other."""
        self._there: set[str] = set()
        """Keys of the files that were found."""
        if self.settings.table is not None:
            self._read_rows(self.settings.table)

    @property
    def has_table(self) -> bool:
        """Whether there is a table; it is optional in some layouts."""
        return self.settings.table is not None

    def key_of_row(self, values: Values) -> str:
        """Return the key of a row; ``""`` for a row that names no image."""
        return values["image"]

    def key_of_file(self, path: str) -> str:
        """Return the key of a file, by its path below the input folder."""
        return path

    def place_row(self, values: Values, path: str, form: ImageForm) -> Placement | Reason:
        """Place a file by its row; without a table all roles are empty."""
        raise NotImplementedError

    def studies_of(self, values: Values) -> Sequence[str]:
        """Return the studies that a row of the reports names."""
        raise NotImplementedError

    def is_rounded(self, values: Values) -> bool:  # noqa: ARG002 - most layouts know no numbers of orders
        """Return whether numbers that alone join a row of the reports lost digits in a float."""
        return False

    def text_of(self, values: Values) -> str:
        """Return the text of a row of the reports."""
        return values["text"]

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the table of reports."""
        if self.inputs.reports is None:
            return
        settings, copies = self.settings.report_columns, self.settings.report_of_several_studies == "copy"
        _check_roles("layout.report_columns", settings, self.report_columns)
        columns = {**self.report_columns, **settings}
        required = sorted({*self.report_required, *settings})
        place = 0
        for row in read_table(self.inputs.reports, "inputs.reports", columns, required):
            place += 1
            if row.values is None:
                yield _unreadable(place, "another number of columns")
                continue
            if self.is_rounded(row.values):
                yield BrokenReport(place=place, reason=Reason.ROUNDED_IDENTIFIER, detail="")
                continue
            studies = self.studies_of(row.values)
            role = _ROLES.get(row.values.get("role", "").casefold())
            for number, study in enumerate(studies or ("",)):
                place += number > 0
                if role is None:
                    yield _unreadable(place, "an unknown status", study)
                elif len(studies) > 1 and not copies:
                    yield BrokenReport(
                        place=place, reason=Reason.AMBIGUOUS_LINK, detail="", study_instance_uid=study
                    )
                else:
                    yield make_record(place, study, self.text_of(row.values), role)

    def rows(self) -> Iterator[tuple[str, Values]]:
        """Yield all rows without contradiction, by key."""
        for key, row in self._rows.items():
            if row is not None:
                yield key, dict(zip(self._roles, row, strict=True))

    def discover(self) -> list[DiscoveredFile]:
        """List the files, and the rows whose file does not exist."""
        found = super().discover()
        if not self.has_table or self.settings.missing_files == "ignore":
            return found
        there = self._there
        for file in found:
            path = file.path(self._roots)
            if form_of_path(path) is not None:
                there.add(self.key_of_file(self.relative_path(path)))
        return found + [
            DiscoveredFile(root_index=0, relative_path=key, num_bytes=0, problem=Reason.MISSING_FILE)
            for key in sorted(self._rows.keys() - there)
        ]

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Place a file; a row without a file is placed too, and makes its study incomplete."""
        if file.problem is Reason.MISSING_FILE:
            key = self.relative_path(file.path(self._roots))
            if key in self._there:
                # The row had no file earlier, and has one now, maybe with an ending.
                return Reason.DUPLICATE_INSTANCE
            return self._place_key(key, key, form_of_path(key) or "dicom")
        return super().place(file)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place a file by its row."""
        if not self.has_table:
            return self.place_row(dict.fromkeys(self._roles, ""), path, form)
        return self._place_key(self.key_of_file(path), path, form)

    def _place_key(self, key: str, path: str, form: ImageForm) -> Placement | Reason:
        if key not in self._rows:
            return Reason.NOT_IN_LAYOUT
        row = self._rows[key]
        if row is None:
            return Reason.AMBIGUOUS_LINK
        return self.place_row(dict(zip(self._roles, row, strict=True)), path, form)

    def _read_rows(self, table: Path) -> None:
        columns = {**self.columns, **self.settings.columns}
        # Columns that the settings name must exist: a misspelled name would silently be empty.
        required = {*self.required, *self.settings.columns}
        known: dict[str, str] = {}
        for row in read_table(table, _TABLE, columns, sorted(required)):
            if row.values is None:
                raise ConfigError(
                    f"{_TABLE} must have as many values as columns in every row, but line {row.place} has "
                    "another number; repair the table."
                )
            key = self.key_of_row(row.values)
            if not key:
                raise ConfigError(
                    f"{_TABLE} must name an image in every row, but line {row.place} names none; correct it."
                )
            # Few values differ: sexes, views, splits, patients with several images.
            values = tuple(known.setdefault(row.values[role], row.values[role]) for role in self._roles)
            if self._rows.setdefault(key, values) != values:
                self._rows[key] = None


def _unreadable(place: int, detail: str, study: str = "") -> BrokenReport:
    reason = Reason.REPORT_UNREADABLE
    return BrokenReport(place=place, reason=reason, detail=detail, study_instance_uid=study)


def _check_roles(what: str, named: Mapping[str, str], known: Mapping[str, str]) -> None:
    if unknown := sorted(named.keys() - known.keys()):
        roles = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{what} must name roles out of {roles}, got {unknown[0]!r}; correct it.")


_MAX_DIGITS: Final = 18


class Manifest(TableLayout):
    """Layout by a table of the user's own: ``path`` below the input folder, and what the header lacks.

    Reports join by ``study``; by ``report``, which rows of images name as well; or by ``patient`` and
    ``accession`` together, never by accession number alone: two hospitals count alike.
    """

    columns: ClassVar[Mapping[str, str]] = {
        name: name
        for name in (
            *("accession", "age", "body_part", "instance", "intercept", "modality", "number", "path"),
            *("patient", "report", "series", "sex", "slope", "split", "study", "view"),
        )
    }
    required: ClassVar[tuple[str, ...]] = ("path",)
    report_columns: ClassVar[Mapping[str, str]] = {
        name: name for name in ("accession", "patient", "report", "role", "study", "text")
    }
    report_required: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        if "accession" in self.settings.columns and not any(row["patient"] for _, row in self.rows()):
            raise ConfigError(
                "layout.columns names accession numbers without patients, and two hospitals may use the same "
                "numbers; add the column of patients."
            )

    def key_of_row(self, values: Values) -> str:
        """Return the path without a leading ``./``."""
        return values["path"].removeprefix("./")

    def place_row(self, values: Values, path: str, form: ImageForm) -> Placement | Reason:
        """Place by the row; it overrides the header wherever it has a value."""
        split = self.split_of(values["patient"], values["split"])
        if isinstance(split, Reason):
            return split
        study = self.study_of_row(values)
        series = values["series"] or path
        if not (_is_rescale(values["slope"], values["intercept"]) and _is_ordinal(values["number"])):
            return Reason.INVALID_IMAGE_DESCRIPTION
        # A volume may have it in its header; a PNG or JPEG has only its row.
        has_table_rescale = form == "raster" or (form == "nifti" and self.settings.volume_facts == "table")
        return Placement(
            form=form,
            patient=values["patient"],
            study=study,
            series=f"{study}/{series}" if values["series"] or form != "dicom" else "",
            instance=values["instance"] or ("" if form == "dicom" else path),
            number=int(values["number"]) if values["number"] else None,
            split=split,
            modality=(values["modality"] or self.settings.modality).upper(),
            attributes=patient_attributes(
                sex=values["sex"], age=values["age"], view=values["view"], body_part=values["body_part"]
            ),
            is_patient_study=self.settings.is_patient_study,
            other_ids=tuple(sorted({values["accession"], values["report"]} - {""})),
            rescale=_rescale(values["slope"], values["intercept"]) if has_table_rescale else None,
        )

    @cached_property
    def _join(self) -> _Join:
        return _Join(self)

    def studies_of(self, values: Values) -> Sequence[str]:
        """Return the studies by the most reliable key of the row."""
        return self._join.studies_of(values)

    def is_rounded(self, values: Values) -> bool:
        """Return whether the numbers that join the row, or those of the images, lost digits in a float."""
        return self._join.is_rounded(values)

    def study_of_row(self, values: Values) -> str:
        """Return the study of a row of images or reports."""
        if self.settings.is_study_within_patient and values["study"]:
            return f"{values['patient']}/{values['study']}" if values["patient"] else ""
        return values["study"]


class _Join:
    """Lookup of the studies that a row of the reports names."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._by_report: defaultdict[str, set[str]] = defaultdict(set)
        self._by_accession: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        self._is_rounded = False
        """Whether numbers of images lost digits in a float."""
        for _, values in manifest.rows():
            study = manifest.study_of_row(values)
            report, patient, accession = _numbers(values)
            self._is_rounded = self._is_rounded or _lost_digits(values)
            if report:
                self._by_report[report].add(study)
            if accession and patient:
                self._by_accession[patient, accession].add(study)

    def is_rounded(self, values: Values) -> bool:
        """Return whether a row of the reports finds no study because a float rounded numbers."""
        if self._manifest.study_of_row(values) or self._found(values):
            return False
        return _lost_digits(values) or (self._is_rounded and any(_numbers(values)))

    def _found(self, values: Values) -> set[str]:
        report, patient, accession = _numbers(values)
        # A column of the name "report" may hold something else, or number the texts alone.
        return self._by_report.get(report) or self._by_accession.get((patient, accession)) or set()

    def studies_of(self, values: Values) -> Sequence[str]:
        """Return the studies by the most reliable key of the row."""
        if study := self._manifest.study_of_row(values):
            return [study]
        if found := self._found(values):
            return sorted(found)
        key = values["patient"], values["accession"]
        unknown = values["report"] or ("/".join(key) if all(key) else "")
        return [unknown] if unknown else []


def _numbers(values: Values) -> tuple[str, str, str]:
    """Return the report, patient and accession number of a row as they were before a float."""
    report, patient, accession = (restored(values[name])[0] for name in ("report", "patient", "accession"))
    return report, patient, accession


def _lost_digits(values: Values) -> bool:
    return any(restored(values[name]) == ("", True) for name in ("report", "accession"))


def _rescale(slope: str, intercept: str) -> tuple[float, float] | None:
    """Return slope and intercept if the row states either."""
    return (float(slope or 1), float(intercept or 0)) if slope or intercept else None


def _is_rescale(slope: str, intercept: str) -> bool:
    """Whether slope and intercept are usable: finite numbers, and a slope other than 0."""
    try:
        factor, offset = float(slope or 1), float(intercept or 0)
    except ValueError:
        return False
    return math.isfinite(factor) and math.isfinite(offset) and factor != 0


def _is_ordinal(text: str) -> bool:
    return text.isascii() and len(text) <= _MAX_DIGITS and (text.isdigit() or not text)


class Folder(PlacedLayout):
    """Layout by paths: a pattern with named groups must match the whole path below the input folder.

    Reports are read as without a layout; they name the study as the group ``study`` does (behind
    ``patient/`` with ``is_study_within_patient``).
    """

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        self._pattern = re.compile(self.settings.pattern)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place by the groups of the pattern."""
        match = self._pattern.fullmatch(path)
        if match is None:
            return Reason.NOT_IN_LAYOUT
        said = {name: value or "" for name, value in match.groupdict().items()}
        patient, study, series = said.get("patient", ""), self._study(match), said.get("series", "")
        split = self.split_of(patient, said.get("split", ""))
        if isinstance(split, Reason):
            return split
        number = said.get("number", "")
        return Placement(
            form=form,
            patient=patient,
            study=study,
            series=f"{study}/{series or path}" if series or form != "dicom" else "",
            instance="" if form == "dicom" else path,
            number=int(number) if number.isascii() and number.isdigit() else None,
            split=split,
            modality=self.settings.modality.upper(),
            attributes={},
            is_patient_study=self.settings.is_patient_study,
        )

    def study_of_attachment(self, file: DiscoveredFile) -> str:
        """Return what the pattern calls the study, where it fits the path of a file that is no image too."""
        match = self._pattern.fullmatch(self.relative_path(file.path(self._roots)))
        return "" if match is None else self._study(match)

    def _study(self, match: re.Match[str]) -> str:
        study, patient = match["study"] or "", match.groupdict().get("patient") or ""
        return f"{patient}/{study}" if self.settings.is_study_within_patient and patient else study

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``."""
        return read_reports(self.inputs)


_INSTANCE: Final = re.compile(r"(?:.*/)?(?:train|test)_images/([^/]+)/([^/]+)/(\d+)\.dcm(?:\.gz)?")


class Headers:
    """Layout without tables: the DICOM header of each file identifies its study."""

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:  # noqa: ARG002 - as every layout
        self._inputs = inputs
        self._is_patient_study = inputs.layout.is_patient_study

    def discover(self) -> list[DiscoveredFile]:
        """List the files below the input folders."""
        return discover(self._inputs.dicom)

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:  # noqa: ARG002 - all alike
        """Leave it to the header."""
        return Placement(attributes={}, is_patient_study=True) if self._is_patient_study else None

    def study_of_attachment(self, file: DiscoveredFile) -> str:  # noqa: ARG002 - headers name the study
        """Return nothing: only headers name studies."""
        return ""

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``."""
        return read_reports(self._inputs)


LIDC_RATINGS: Final = (
    "subtlety",
    "internalStructure",
    "calcification",
    "sphericity",
    "margin",
    "lobulation",
    "spiculation",
    "texture",
    "malignancy",
)
"""Of a nodule by a reader, 1 to 5 or 6; "LIDC XML file documentation" of The Cancer Imaging Archive."""


class Lidc(PlacedLayout):
    """Layout of LIDC-IDRI: headers identify the study; the readers' XML is linked later, as an attachment."""

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Leave images to their headers."""
        path = file.path(self._roots)
        if path.suffix.lower() == ".xml":
            return Reason.ANNOTATION_FILE
        if path.suffix.lower() in {".dcm", ""}:
            return Placement(attributes={}, is_patient_study=self.settings.is_patient_study)
        return self.reason_of_other(path)

    def labels(self) -> Sequence[LabelTable]:
        """Return the readers' ratings of the nodules of a study: how many, and mean and largest of each.

        A nodule's number is a reader's own, so each reader's nodule counts; small ones are not rated.
        """
        readers: Counter[str] = Counter()
        found: defaultdict[str, dict[str, list[int]]] = defaultdict(
            lambda: {name: [] for name in LIDC_RATINGS}
        )
        for path in sorted(self._annotations(), key=os.fsencode):
            try:
                root = parse_xml(read_bounded(path))
            except SourceError:  # it has an outcome of its own, as an attachment
                continue
            study = next((one.text().strip() for one in root.walk() if one.name == "StudyInstanceUID"), "")
            for session in (one for one in root.walk() if one.name == "readingSession" and study):
                readers[study] += 1
                for rated in (one for one in session.walk() if one.name == "characteristics"):
                    for name in LIDC_RATINGS:
                        value = rated.find(name)
                        text = "" if value is None else value.text().strip()
                        if text.isdecimal():
                            found[study][name].append(int(text))
        rows = []
        for study, count in readers.items():
            ratings = found[study]
            row: dict[str, Any] = {
                "study": study,
                "num_readers": count,
                "num_rated": max(map(len, ratings.values())),
            }
            for name, values in ratings.items():
                row[f"{name}_mean"] = sum(values) / len(values) if values else None
                row[f"{name}_max"] = max(values, default=None)
            rows.append(row)
        return [LabelTable(name="lidc", rows=rows, keys=("study",), study=lambda values: values[0])]

    def _annotations(self) -> Iterator[Path]:
        for root in (*self.inputs.dicom, *self.inputs.attachments):
            yield from root.rglob("*.xml") if root.is_dir() else [root] * (root.suffix.lower() == ".xml")


class Rsna(PlacedLayout):
    """Layout of RSNA's challenges: ``train_images/<study>/<series>/<instance>.dcm``; tables are labels."""

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Take study and series from the path, the patient from the header."""
        match = _INSTANCE.fullmatch(path)
        if match is None or form != "dicom":
            return Reason.NOT_IN_LAYOUT
        study, series, _ = match.groups()
        return Placement(
            study=study,
            series=f"{study}/{series}",
            attributes={},
            is_patient_study=self.settings.is_patient_study,
        )

    def labels(self) -> Sequence[LabelTable]:
        """Return the conditions of ``train.csv``, a row per study."""
        return [
            LabelTable(
                name="rsna",
                files=find_files(self.table_folders(), "train.csv"),
                keys=("study_id",),
                study=lambda values: values[0],
            )
        ]

    def reason_of_other(self, path: Path) -> Reason:
        """Return ANNOTATION_FILE for tables of labels."""
        return Reason.ANNOTATION_FILE if path.suffix.lower() == ".csv" else super().reason_of_other(path)
