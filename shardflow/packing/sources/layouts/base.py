"""Base of all layouts: settings, the interface, tables by role, and the parts that most layouts share.

Tables are CSV or Parquet and are read row by row; a role such as ``study`` stands for the name of a column,
which settings can change.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NamedTuple, Protocol

from shardflow.config import check_fields
from shardflow.errors import ConfigError, os_reason
from shardflow.format.reasons import Reason
from shardflow.packing.sources.documents.reports import iter_document_reports
from shardflow.packing.sources.placement import DiscoveredFile, ImageForm, Placement, discover
from shardflow.packing.sources.reports import (
    BrokenReport,
    ReportFormat,
    ReportRecord,
    iter_csv_rows,
    iter_reports,
    say_columns,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_BATCH_ROWS: Final = 1 << 14


class Row(NamedTuple):
    """One row of a table. Holds identifiers and text; its ``repr`` shows none."""

    place: int
    """Line where the row begins (CSV), or number of the row (Parquet); from 1."""
    values: dict[str, str] | None
    """Role to text without outer spaces, ``""`` where it is empty or no such column is there; None where the
    row has another number of columns than the table."""

    def __repr__(self) -> str:
        return f"Row(place={self.place})"


def read_table(
    path: Path, what: str, columns: Mapping[str, str], required: Iterable[str] = ()
) -> Iterator[Row]:
    """Read a table.

    Args:
        path: ``.csv``, ``.csv.gz`` or ``.parquet``.
        what: What errors call the table.
        columns: Role to name of the column; case and outer spaces do not count.
        required: Roles whose column must be there; others are empty without it.

    Raises:
        ConfigError: The table is missing, damaged, or lacks a required column.
    """
    try:
        if path.suffix.lower() == ".parquet":
            yield from _read_parquet(path, what, columns, required)
        else:
            yield from _read_csv(path, what, columns, required)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{what} must be a readable table, got {os_reason(error)}; correct its path or the file."
        ) from None


def _read_csv(path: Path, what: str, columns: Mapping[str, str], required: Iterable[str]) -> Iterator[Row]:
    with _open(path) as file:
        rows = iter_csv_rows(file, what)
        _, header = next(rows, (1, []))
        found = _find(header, what, columns, required)
        for place, row in rows:
            values = None
            if len(row) == len(header):
                values = {role: "" if at is None else row[at].strip() for role, at in found.items()}
            yield Row(place, values)


def _read_parquet(
    path: Path, what: str, columns: Mapping[str, str], required: Iterable[str]
) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            found = _find(names, what, columns, required)
            wanted = sorted({names[at] for at in found.values() if at is not None})
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                for values in batch.to_pylist():
                    place += 1
                    yield Row(
                        place,
                        {role: "" if at is None else _text(values[names[at]]) for role, at in found.items()},
                    )
    except pa.ArrowException as error:
        raise ConfigError(
            f"{what} must be a readable Parquet table, got {type(error).__name__}; repair the table."
        ) from None


def restored(value: object) -> tuple[str, bool]:
    """Return a key as text, and whether it came through a float; empty where it is missing or was rounded.

    A float holds integers below 2**53 exactly; of longer ones the last digits are lost.
    """
    if isinstance(value, float):  # np.float64 is one
        if math.isnan(value) or abs(value) >= _EXACT or not value.is_integer():
            return "", not math.isnan(value)
        return str(int(value)), True
    text = "" if value is None else str(value).strip()
    found = _THROUGH_FLOAT.fullmatch(text) if text[:1].isdigit() else None
    if found is None:
        return text, False
    return ("" if found[1] is None or int(found[1]) >= _EXACT else found[1]), True


_THROUGH_FLOAT: Final = re.compile(r"(\d{1,40})\.0*|\d(?:\.\d+)?[eE]\+?\d+", re.ASCII)
_EXACT: Final = 1 << 53


def _text(value: object) -> str:
    # A column of integers with gaps comes as floats: 17.0 is the study 17.
    if isinstance(value, float):
        is_whole = value.is_integer() and abs(value) < _EXACT
        return "" if value != value else f"{value:.0f}" if is_whole else repr(value)
    return "" if value is None else str(value).strip()


def _find(
    header: Sequence[str], what: str, columns: Mapping[str, str], required: Iterable[str]
) -> dict[str, int | None]:
    names = [name.strip().casefold() for name in header]
    for role in required:
        count = names.count(columns[role].casefold())
        if count != 1:
            raise ConfigError(
                f"{what} must have one column {columns[role]!r} ({role}), got {count} {say_columns(header)}; "
                "correct the table, or name the column in the settings of the layout."
            )
    wanted = {role: name.casefold() for role, name in columns.items()}
    return {role: names.index(name) if name in names else None for role, name in wanted.items()}


def _open(path: Path) -> BinaryIO:
    if path.name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value] # a GzipFile reads as one
    return path.open("rb")


_PACKAGE: Final = "shardflow.packing.sources.layouts"
LAYOUTS: Final = {
    "headers": f"{_PACKAGE}.table_layout:Headers",
    "folder": f"{_PACKAGE}.table_layout:Folder",
    "manifest": f"{_PACKAGE}.table_layout:Manifest",
    "mimic-cxr": f"{_PACKAGE}.archives:MimicCxr",
    "chexpert": f"{_PACKAGE}.archives:Chexpert",
    "openi": f"{_PACKAGE}.archives:OpenI",
    "padchest": f"{_PACKAGE}.archives:PadChest",
    "ct-rate": f"{_PACKAGE}.archives:CtRate",
    "lidc": f"{_PACKAGE}.table_layout:Lidc",
    "rsna": f"{_PACKAGE}.table_layout:Rsna",
    "nnunet": f"{_PACKAGE}.volumes:NnUnet",
    "msd": f"{_PACKAGE}.volumes:Decathlon",
    "pairs": f"{_PACKAGE}.volumes:Pairs",
    "totalsegmentator": f"{_PACKAGE}.volumes:TotalSegmentator",
    "bids": f"{_PACKAGE}.bids:Bids",
}
"""Class of each kind. ``headers``: DICOM headers identify the study of an image. ``folder``: paths do, by a
pattern. ``manifest``: a table does. The others are public collections in the form in which their owners
distribute them; docs/layouts.md describes each."""

LAYOUTS_GROUP: Final = "shardflow.layouts"
"""Group of entry points by which installed packages offer further layouts: the name of an entry point is the
kind, and it refers to a callable that takes `LayoutInputs` and the names of the splits and returns a
`Layout`."""


def offered_layouts() -> dict[str, EntryPoint]:
    """Return the layouts of installed packages by kind; they do not replace built-in ones."""
    # Slow to import, and of no use to a job with a built-in layout.
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=LAYOUTS_GROUP) if entry.name not in LAYOUTS}


_GROUPS = frozenset({"patient", "study", "series", "number", "split"})
_PATHS = ("table", "split_table")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """Settings of a layout: how the study and the report of an input are found."""

    kind: str = "headers"
    """Layout of the inputs: one of `LAYOUTS`, or a layout of an installed package."""
    table: Path | None = None
    """CSV (``.csv``, ``.csv.gz``) or Parquet table of the images; which kinds have one: docs/layouts.md."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of the columns of ``table`` by role, if they differ from the kind's own."""
    report_columns: dict[str, str] = field(default_factory=dict)
    """The same for the table of ``inputs.reports``."""
    pattern: str = ""
    """Of kind ``folder``: a regular expression for the path below the input folder, with named groups
    ``patient``, ``study``, ``series``, ``number``, ``split``; a path must match it whole."""
    is_study_within_patient: bool = False
    """Whether studies are named within their patient (``study1``), so that only both names tell them apart.
    Of kinds ``folder`` and ``manifest``."""
    is_patient_study: bool = False
    """Whether a study that names no patient is a patient of its own; else it is quarantined. Set it only if
    no patient has several studies, or one may be trained on and tested on."""
    modality: str = ""
    """DICOM term of images without a header, such as ``CR`` or ``CT``, where neither table nor kind has
    one."""
    split_table: Path | None = None
    """Table of the official splits: a column ``split`` and one of patients."""
    split_columns: dict[str, str] = field(default_factory=dict)
    """Names of its columns: roles ``patient`` and ``split``."""
    split_names: dict[str, str] = field(default_factory=dict)
    """Split of this dataset for names in tables, paths and patterns, such as ``valid = "val"``."""
    volume_facts: Literal["header", "table"] = "header"
    """Source of spacing, slope and intercept of NIfTI volumes; never both."""
    missing_files: Literal["quarantine", "ignore"] = "quarantine"
    """Treatment of rows whose file does not exist: quarantined inputs, or no inputs (if only a part of a
    collection was fetched)."""
    report_of_several_studies: Literal["quarantine", "copy"] = "quarantine"
    """Treatment of a report that names several studies: none of them gets it, or each gets a copy."""
    reports_of_one_study: Literal["quarantine", "append"] = "quarantine"
    """Treatment of several different reports of one study: quarantined with it, or the final one is taken
    with all addenda behind it, and preliminary ones are left out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind not in LAYOUTS and self.kind not in (offered := offered_layouts()):
            known = ", ".join(map(repr, [*LAYOUTS, *sorted(offered)]))
            raise ConfigError(f"kind must be one of {known}, got {self.kind!r}; correct it.")
        if self.kind == "folder":
            self._check_pattern()
        elif self.pattern:
            raise ConfigError(f"pattern is of kind 'folder' alone, but kind is {self.kind!r}; remove it.")
        if self.kind == "manifest" and self.table is None:
            raise ConfigError("kind 'manifest' needs a table of images, got none; name it in layout.table.")

    def _check_pattern(self) -> None:
        try:
            groups = set(re.compile(self.pattern).groupindex)
        except re.error as error:
            raise ConfigError(
                f"pattern must be a regular expression, got: {error.msg}; correct it."
            ) from None
        if unknown := groups - _GROUPS:
            raise ConfigError(
                f"pattern must have groups out of {', '.join(sorted(_GROUPS))}, "
                f"got {', '.join(sorted(unknown))}; rename them."
            )
        if "study" not in groups:
            raise ConfigError("pattern must have a group (?P<study>...), but it has none; add it.")

    def content(self) -> dict[str, Any] | None:
        """Return the settings that decide the dataset's bytes; None for the default layout."""
        row = {name: value for name, value in asdict(self).items() if name not in _PATHS}
        row["has_split_table"] = self.split_table is not None
        return None if self == LayoutConfig() else row


_ENDINGS: Final[dict[str, ImageForm]] = {
    ".dcm": "dicom",
    ".dcm.gz": "dicom",
    ".jpeg": "raster",
    ".jpg": "raster",
    ".nii": "nifti",
    ".nii.gz": "nifti",
    ".png": "raster",
    ".svs": "slide",
    ".tif": "slide",
    ".tiff": "slide",
}
_SPLIT_WORDS: Final = {"dev": "val", "eval": "val", "valid": "val", "validate": "val", "validation": "val"}
_SEXES: Final = {"f": "F", "female": "F", "m": "M", "male": "M", "o": "O", "other": "O"}
_AGE: Final = re.compile(r"0*(\d{1,3})(?:\.\d+)?\s*(?:y|years?)?", re.IGNORECASE)


class LayoutInputs(Protocol):
    """The settings that a layout is opened with."""

    @property
    def dicom(self) -> tuple[Path, ...]:
        """Input folders."""

    @property
    def attachments(self) -> tuple[Path, ...]:
        """Further folders, of attachments alone."""

    @property
    def reports(self) -> Path | None:
        """File or folder of the reports."""

    @property
    def reports_format(self) -> ReportFormat | Literal["documents"]:
        """Format of the reports, unless the layout decides it."""

    @property
    def layout(self) -> LayoutConfig:
        """Settings of the layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelTable:
    """Table of labels that a collection distributes, attached to the dataset when it is packed."""

    name: str
    """Of the attached table."""
    files: tuple[Path, ...] = ()
    """CSV files of the same columns."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Rows that the layout has read from its own documents, instead of files."""
    keys: tuple[str, ...]
    """Columns that name the study."""
    study: Callable[[Sequence[str]], str]
    """Returns the study as `Placement.study` names it, from the values of ``keys``; empty for none."""
    columns: tuple[str, ...] | None = None
    """Columns to take; None for all that look like labels."""
    classes: str = ""
    """Column of lists of classes, each of which becomes a column of yes or no."""


def find_files(folders: Iterable[Path | None], pattern: str) -> tuple[Path, ...]:
    """Return the files that match a pattern in the first folder that has any, ascending by name."""
    for folder in folders:
        found = sorted(path for path in folder.glob(pattern) if path.is_file()) if folder else []
        if found:
            return tuple(found)
    return ()


class Layout(Protocol):
    """Turns input folders into images, reports, links and splits."""

    def discover(self) -> list[DiscoveredFile]:
        """List all inputs but the reports; also rows whose file is not there, with MISSING_FILE."""

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Return the placement of a file, or the reason why it has none; None if its DICOM header decides."""

    def study_of_attachment(self, file: DiscoveredFile) -> str:
        """Return the study that the path of a non-image file names; ``""`` if it names none."""

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports; each names the study that `Placement.study` names."""


class PlacedLayout:
    """Base of the layouts that place images themselves.

    Args:
        inputs: The settings.
        splits: Names of the dataset's splits.
    """

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        self.settings = inputs.layout
        self.inputs = inputs
        self._splits = frozenset(splits)
        self._patient_splits = self._read_splits()
        tables = (inputs.reports, inputs.layout.table, inputs.layout.split_table)
        self._own_files = {path.resolve() for path in tables if path is not None}
        self._roots = [root.absolute() for root in inputs.dicom]

    def discover(self) -> list[DiscoveredFile]:
        """List the files below the input folders."""
        return discover(self.inputs.dicom)

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Place a file; see `Layout`."""
        path = file.path(self._roots)
        form = form_of_path(path)
        placed = self.place_image(self.relative_path(path), form) if form is not None else None
        if placed is not None:
            return self._complete(placed) if isinstance(placed, Placement) else placed
        return self.reason_of_other(path)

    def study_of_attachment(self, file: DiscoveredFile) -> str:  # noqa: ARG002 - for layouts whose paths say it
        """Return the study that the path of a file names; see `Layout`."""
        return ""

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place a file that looks like an image; implemented by each layout."""
        raise NotImplementedError

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports; by default there are none."""
        return iter(())

    def labels(self) -> Sequence[LabelTable]:
        """Return the tables of labels that are there; by default there are none."""
        return ()

    def table_folders(self) -> list[Path | None]:
        """Return where a collection keeps its tables: beside the named ones, and beside the images."""
        named = (self.settings.table, self.settings.split_table, self.inputs.reports)
        places = [None if path is None else path.absolute().parent for path in named]
        return [*places, *self._roots, *(root.parent for root in self._roots)]

    def reason_of_other(self, path: Path) -> Reason:
        """Return the reason for which a file is not an image."""
        is_table = path.name.lower().endswith((".csv", ".csv.gz", ".parquet"))
        return Reason.LAYOUT_FILE if is_table or path.resolve() in self._own_files else Reason.NOT_IMAGE

    def relative_path(self, path: Path) -> str:
        """Return the POSIX path below its input folder; of a file that is an input itself, its name."""
        for root in self._roots:
            if path != root and path.is_relative_to(root):
                return path.relative_to(root).as_posix()
        return path.name

    def split_of(self, patient: str, named: str = "") -> str | Reason:
        """Return the split of a patient: of the split table, else the name that path or row gives."""
        if self._patient_splits is None:
            return self.known_split(named) if named else ""
        return self._patient_splits.get(patient, Reason.NOT_IN_LAYOUT)

    def known_split(self, name: str) -> str:
        """Return the split of the dataset for a name in a table or path.

        Raises:
            ConfigError: There is none.
        """
        folded = name.strip().casefold()
        given = {key.casefold(): value for key, value in self.settings.split_names.items()}
        split = given.get(folded) or (folded if folded in self._splits else _SPLIT_WORDS.get(folded, folded))
        if split not in self._splits:
            raise ConfigError(
                "[splits] lacks a split that the layout names; add it to [splits], or map it in "
                "layout.split_names."
            )
        return split

    def split_columns(self) -> Mapping[str, str]:
        """Return the default column names of the split table."""
        return {"patient": "patient", "split": "split"}

    def patient_name(self, text: str) -> str:
        """Spell a patient of the split table as placements do."""
        return text

    def _read_splits(self) -> dict[str, str] | None:
        table = self.settings.split_table
        if table is None:
            return None
        columns = {**self.split_columns(), **self.settings.split_columns}
        found: dict[str, str] = {}
        for row in read_table(table, "layout.split_table", columns, ("patient", "split")):
            if row.values is None or not row.values["patient"]:
                raise ConfigError(
                    "layout.split_table must name a patient and a split in every row, but the row on line "
                    f"{row.place} does not; correct it."
                )
            patient, split = self.patient_name(row.values["patient"]), self.known_split(row.values["split"])
            if found.setdefault(patient, split) != split:
                raise ConfigError(
                    "layout.split_table must have each patient in one split, but the patient on line "
                    f"{row.place} is in two; correct it: a patient that is trained on must not be tested on."
                )
        return found

    def _complete(self, placed: Placement) -> Placement | Reason:
        """Refuse what names no study or patient and has no header that could."""
        if placed.form != "dicom":
            named = placed.identify(dict.fromkeys(_IDENTIFIERS, ""))
            if not named["patient_id"] or not named["study_instance_uid"]:
                return Reason.MISSING_IDENTIFIER
        return placed


_IDENTIFIERS: Final = ("patient_id", "study_instance_uid", "series_instance_uid", "sop_instance_uid")


def read_reports(inputs: LayoutInputs) -> Iterator[ReportRecord | BrokenReport]:
    """Read the reports in ``inputs.reports_format``."""
    if inputs.reports is None:
        return iter(())
    if inputs.reports_format == "documents":
        copies = inputs.layout.report_of_several_studies == "copy"
        return iter_document_reports(inputs.reports, copies=copies)
    return iter_reports(inputs.reports, inputs.reports_format)


def form_of_path(path: Path | str) -> ImageForm | None:
    """Tell by its ending how an image file is read; None where it looks like none.

    Example:
        >>> form_of_path("a/b.dcm.gz"), form_of_path("b.nii.gz"), form_of_path("notes.txt")
        ('dicom', 'nifti', None)
    """
    name = str(path).rsplit("/", 1)[-1].lower()
    return next((form for ending, form in _ENDINGS.items() if name.endswith(ending)), None)


def patient_attributes(
    *, sex: str = "", age: str = "", view: str = "", body_part: str = ""
) -> dict[str, tuple[str, ...]]:
    """Turn values of tables into DICOM attributes; the allowlist filters them later.

    Example:
        >>> patient_attributes(sex="Female", age="68.0", view="pa")
        {'PatientAge': ('068Y',), 'PatientSex': ('F',), 'ViewPosition': ('PA',)}
    """
    match = _AGE.fullmatch(age.strip())
    said = {
        "BodyPartExamined": body_part.upper(),
        "PatientAge": f"{int(match[1]):03d}Y" if match else "",
        "PatientSex": _SEXES.get(sex.casefold(), ""),
        "ViewPosition": view.upper(),
    }
    return {keyword: (text,) for keyword, text in said.items() if text}


def open_layout(inputs: LayoutInputs, splits: Sequence[str]) -> Layout:
    """Open the layout of a job; its tables and the first report of a table are read.

    Args:
        inputs: The settings of the inputs.
        splits: Names of the dataset's splits.

    Raises:
        ConfigError: A table is missing, damaged or contradicts itself, a setting does not fit, or the layout
            of another package cannot be imported.
    """
    kind = inputs.layout.kind
    layout: Layout = (resolve_name(LAYOUTS[kind]) if kind in LAYOUTS else _load(kind))(inputs, splits)
    source = inputs.reports
    if source is not None and not source.is_dir() and inputs.reports_format != "documents":
        # The first line of a table shows whether it has its columns, before any image is read.
        next(iter(layout.reports()), None)
    return layout


def _load(kind: str) -> Callable[[LayoutInputs, Sequence[str]], Layout]:
    try:
        factory: Callable[[LayoutInputs, Sequence[str]], Layout] = offered_layouts()[kind].load()
    except Exception as error:
        raise ConfigError(
            f"layout {kind!r} (entry point group {LAYOUTS_GROUP}) must be importable, got "
            f"{type(error).__name__}; repair or remove the package that offers it."
        ) from error
    return factory
