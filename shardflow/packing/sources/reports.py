"""Reader of report tables, folders and documents: texts keyed by study, record by record.

Two reports for one study are returned as two records; the job decides. A record that cannot be read is
returned with a reason and its line, never with its content.

A PDF holds letters at places of pages; its text is what pypdf makes of them, page after page; striprtf
reads RTF. A file that needs a password, or whose pages hold no text (a scan), is refused by the name of the
outcome. What is read is bounded by counts: bytes of the file and of its streams, pages, and characters.
What a parser does with a hostile one is bounded by the process that reads it: `ReportDocument` is what the
job hands to it.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias

from shardflow.errors import ConfigError, SourceError, os_reason
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.attachments import PatientNumber

MAX_REPORT_BYTES: Final = 1 << 24
"""Longest report that is read, and longest line of a table."""
MAX_PAGES: Final = 500
_MAX_CHARACTERS: Final = 1 << 24
_CODE_PAGE: Final = re.compile(rb"\\ansicpg(\d{1,5})")


def read_pdf(data: bytes) -> str:
    """Return the text of a PDF, a blank line between pages.

    Raises:
        ConfigError: pypdf is missing.
        SourceError: REPORT_ENCRYPTED, REPORT_WITHOUT_TEXT, LIMIT_EXCEEDED or REPORT_UNREADABLE.
    """
    try:
        from pypdf import PdfReader
        from pypdf.errors import FileNotDecryptedError, LimitReachedError
    except ImportError:
        raise ConfigError("reports in PDF need pypdf; install shardflow[documents].") from None
    # It logs what it mends, with words of the document.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        text = _pages(PdfReader(io.BytesIO(data)))
    except (MemoryError, SourceError):
        raise
    except FileNotDecryptedError:
        raise source_error(Reason.REPORT_ENCRYPTED, "PDF") from None
    except LimitReachedError:
        raise source_error(Reason.LIMIT_EXCEEDED, "PDF") from None
    except Exception as error:  # noqa: BLE001 -- a broken PDF may raise anything
        raise source_error(Reason.REPORT_UNREADABLE, f"PDF: {type(error).__name__}") from None
    if not re.search(r"\w", text):
        raise source_error(Reason.REPORT_WITHOUT_TEXT, "PDF")
    return text


def _pages(reader: Any) -> str:
    if reader.is_encrypted and not reader.decrypt(""):
        raise source_error(Reason.REPORT_ENCRYPTED, "PDF")
    if len(reader.pages) > MAX_PAGES:
        raise source_error(Reason.LIMIT_EXCEEDED, f"more than {MAX_PAGES} pages")
    pages: list[str] = []
    for page in reader.pages:
        pages.append(page.extract_text().strip())
        if sum(map(len, pages)) > _MAX_CHARACTERS:
            raise source_error(Reason.LIMIT_EXCEEDED, f"more than {_MAX_CHARACTERS} characters")
    return "\n\n".join(page for page in pages if page)


def read_rtf(data: bytes) -> str:
    """Return the text of an RTF.

    Raises:
        ConfigError: striprtf is missing.
        SourceError: REPORT_UNREADABLE.
    """
    try:
        from striprtf.striprtf import rtf_to_text
    except ImportError:
        raise ConfigError("reports in RTF need striprtf; install shardflow[documents].") from None
    if not data.lstrip().startswith(b"{\\rtf"):
        raise source_error(Reason.REPORT_UNREADABLE, "no RTF")
    page = _CODE_PAGE.search(data[:1024])
    encoding = f"cp{page[1].decode('ascii')}" if page else "cp1252"
    try:
        # RTF is ASCII with escapes; other bytes are of its code page.
        text: str = rtf_to_text(data.decode(encoding, errors="replace"), encoding=encoding, errors="replace")
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- a broken RTF may raise anything
        raise source_error(Reason.REPORT_UNREADABLE, f"RTF: {type(error).__name__}") from None
    # Characters beyond the first 65,536 are pairs of escapes.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.replace("\xa0", " ").strip()


ReportForm: TypeAlias = Literal[".pdf", ".rtf"]
"""Form of a report that a package reads, by the extension of a file."""

READERS: Final[dict[ReportForm, Callable[[bytes], str]]] = {".pdf": read_pdf, ".rtf": read_rtf}
_PACKAGES: Final[dict[ReportForm, str]] = {".pdf": "pypdf", ".rtf": "striprtf"}
# The first bytes of each in base 64.
_BEGINNINGS: Final[dict[str, ReportForm]] = {"JVBERi": ".pdf", "e1xydG": ".rtf"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportDocument:
    """A report in PDF or RTF that has yet to be read: a file, or what a message holds."""

    form: ReportForm
    path: Path | None = None
    """None if the document is in a message."""
    data: str = ""
    """Of a document in a message, in base 64."""

    def __repr__(self) -> str:
        return f"ReportDocument({self.form})"

    @property
    def num_bytes(self) -> int:
        """Size of the document, or of its base 64; 0 for a file that cannot be found."""
        try:
            return len(self.data) if self.path is None else self.path.stat().st_size
        except OSError:
            return 0

    def check_reader(self) -> None:
        """Check that the package that reads it is installed.

        Raises:
            ConfigError: It is not.
        """
        package = _PACKAGES[self.form]
        if importlib.util.find_spec(package) is None:
            name = self.form[1:].upper()
            raise ConfigError(f"reports in {name} need {package}; install shardflow[documents].")

    def read(self) -> str:
        """Return the text.

        Raises:
            ConfigError: The package that reads it is missing.
            SourceError: FILE_UNREADABLE, LIMIT_EXCEEDED, or what `read_pdf` and `read_rtf` raise.
        """
        return READERS[self.form](self._bytes())

    def digest(self) -> str:
        """Return a digest of all that its text depends on; nothing of what has no bytes that can be read."""
        try:
            return hashlib.sha256(self.form.encode("ascii") + self._bytes()).hexdigest()
        except SourceError:
            return ""

    def _bytes(self) -> bytes:
        try:
            if self.path is None:
                data = base64.b64decode("".join(self.data.split()), validate=True)
            else:
                with self.path.open("rb") as file:
                    data = file.read(MAX_REPORT_BYTES + 1)
        except OSError as error:
            raise source_error(Reason.FILE_UNREADABLE, os_reason(error)) from None
        except ValueError:
            raise source_error(Reason.REPORT_UNREADABLE, "no base 64") from None
        if len(data) > MAX_REPORT_BYTES:
            raise source_error(Reason.LIMIT_EXCEEDED, f"more than {MAX_REPORT_BYTES} bytes")
        return data


def encoded_document(media: str, data: str) -> ReportDocument | None:
    """Return the PDF or RTF that a message holds in base 64, by media type or first bytes; else None."""
    words = re.split(r"[^a-z]+", media.lower())
    forms = [form for form in READERS if form[1:] in words]
    forms += [form for beginning, form in _BEGINNINGS.items() if data.lstrip().startswith(beginning)]
    return ReportDocument(form=forms[0], data=data) if forms else None


ReportFormat = Literal["csv", "folder", "jsonl"]
"""``csv``: columns study_instance_uid and text. ``folder``: <StudyInstanceUID>.txt, .pdf or .rtf. ``jsonl``:
the same two keys."""

ReportRole = Literal["addendum", "corrected", "final", "preliminary"]
"""Role of a report among those of its study; a corrected one replaces the final ones before it."""

REPORT_FILES: Final = frozenset((".txt", *READERS))
"""Extensions of files that are one report each."""

_KEY, _TEXT = "study_instance_uid", "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRecord:
    """One report. Holds an identifier and text: it never goes into a message, log or dataset as it is."""

    study_instance_uid: str
    text: str
    """As written, with line ends as ``\\n``."""
    place: int
    """Line where the record begins (csv, jsonl), or number of the file in the sorted folder; from 1."""
    role: ReportRole = "final"
    accessions: tuple[str, ...] = ()
    """Accession numbers by which the study is found where its UID is not named, together with a patient."""
    patient_ids: tuple[str, ...] = ()
    patient_numbers: tuple[PatientNumber, ...] = ()
    """Those of them that are the patient's own: they are one person's."""
    people: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """People that its document names, by DICOM keyword: removed from the text, and written nowhere."""
    document: ReportDocument | None = None
    """A PDF or RTF whose text comes before that of the record; a packing process reads it (`completed`)."""

    def __repr__(self) -> str:
        return f"ReportRecord(place={self.place})"

    def completed(self, text: str, reason: str | None = None) -> ReportRecord | BrokenReport:
        """Return the record with the text of its document.

        Args:
            text: Of the document. What the record says beside it follows, unless the document says it too.
            reason: Why it has none; then the rest of the record is the report, if there is any.
        """
        rest = replace(self, document=None)
        if reason is not None:
            if self.text.strip():
                return rest
            return _broken(self.place, Reason(reason), "document", self.study_instance_uid)
        said = _HEADING.sub("", self.text).split()
        if said and " ".join(said) not in " ".join(text.split()):
            text = f"{text.rstrip()}\n\n{self.text.strip()}\n"
        made = make_record(self.place, self.study_instance_uid, text, needs_study=False)
        return made if isinstance(made, BrokenReport) else replace(rest, text=made.text)


_HEADING: Final = re.compile(r"^[A-Z ]+:\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenReport:
    """A record that cannot be used."""

    place: int
    reason: Reason
    """REPORT_UNREADABLE, REPORT_ENCRYPTED, REPORT_WITHOUT_TEXT, EMPTY_REPORT, MISSING_IDENTIFIER,
    LIMIT_EXCEEDED or FILE_UNREADABLE."""
    detail: str
    """Description of the problem, without content."""
    study_instance_uid: str = ""

    def __repr__(self) -> str:
        return f"BrokenReport(place={self.place}, {self.reason})"


def iter_reports(path: Path, kind: ReportFormat = "csv") -> Iterator[ReportRecord | BrokenReport]:
    """Read the reports of one source, in its order (a folder's: sorted by file name), one at a time.

    Text is UTF-8, with or without a byte order mark; line ends may be LF, CRLF or CR.

    Raises:
        ConfigError: The source as a whole is missing, of the wrong kind, or a table lacks a column.
    """
    if path.is_dir() != (kind == "folder") or not path.exists():
        expected = "a folder" if kind == "folder" else "a file"
        raise ConfigError(
            f"the reports must be {expected} for the format {kind!r}; check the path in the configuration."
        )
    readers = {"csv": _iter_csv, "folder": _iter_folder, "jsonl": _iter_jsonl}
    if kind not in readers:
        raise ConfigError(
            f"the report format must be one of {', '.join(sorted(readers))}; check the configuration."
        )
    return readers[kind](path)


def _iter_csv(path: Path) -> Iterator[ReportRecord | BrokenReport]:
    with _open_table(path) as file:
        rows = iter_csv_rows(file, "the report table")
        _, header = next(rows, (1, []))
        key, text, num_columns = _find_columns(header)
        for place, row in rows:
            if len(row) != num_columns:
                yield _broken(place, Reason.REPORT_UNREADABLE, f"{len(row)} columns instead of {num_columns}")
            else:
                yield make_record(place, row[key], row[text])


def iter_csv_rows(file: BinaryIO, what: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row of a CSV table with the line where it begins, the header first, without blank lines.

    Args:
        file: The table in UTF-8, with or without a byte order mark; closed at the end.
        what: Name of the table in errors.

    Raises:
        ConfigError: A quote or a field does not end.
    """
    # The csv module knows one limit per process; its default of 128 KiB is shorter than real reports may be.
    csv.field_size_limit(MAX_REPORT_BYTES)
    # Bytes that are no UTF-8 become lone surrogates, so that one bad row does not end the table.
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        rows = csv.reader(text, strict=True)
        place = 1
        try:
            for row in rows:
                if row or place == 1:
                    yield place, row
                place = rows.line_num + 1
        except csv.Error:
            raise ConfigError(
                f"{what} must be well-formed CSV, but a quote on line {rows.line_num} does not end; repair "
                "the table, or the rows after this line would be lost."
            ) from None


def _find_columns(header: list[str]) -> tuple[int, int, int]:
    names = [name.strip().lower() for name in header]
    for wanted in (_KEY, _TEXT):
        if names.count(wanted) != 1:
            raise ConfigError(
                f"the report table must have one column {wanted!r}, got {names.count(wanted)} "
                f"{say_columns(header)}; name it in the first line."
            )
    return names.index(_KEY), names.index(_TEXT), len(names)


def say_columns(names: Sequence[str]) -> str:
    """Say which columns a table has, as a part of a sentence.

    The first line of a table without names holds identifiers, so one of the usual names must be among them.

    Example:
        >>> say_columns(["StudyInstanceUID", "findings"]), say_columns(["1.2.840", "No fracture."])
        ('among StudyInstanceUID, findings', 'among what does not look like names of columns')
    """
    found = [name.strip() for name in names if name.strip()]
    folded = {re.sub(r"[ _-]", "", name).casefold() for name in found}
    if not folded & _USUAL_NAMES or not all(map(_COLUMN_NAME.fullmatch, found)):
        return "among what does not look like names of columns"
    return f"among {', '.join(found[:_MAX_COLUMNS_SAID])}{', ...' * (len(found) > _MAX_COLUMNS_SAID)}"


_COLUMN_NAME: Final = re.compile(r"[A-Za-z_][\w ./-]{0,39}", re.ASCII)
_MAX_COLUMNS_SAID: Final = 20
_USUAL_NAMES: Final = frozenset(
    {
        *("accession", "accessionnumber", "file", "filename", "findings", "id", "image", "imageid"),
        *("impression", "path", "patient", "patientid", "report", "reportid", "reporttext", "split"),
        *("study", "studyid", "studyinstanceuid", "studyuid", "subject", "subjectid", "text"),
    }
)


def _iter_jsonl(path: Path) -> Iterator[ReportRecord | BrokenReport]:
    with _open_table(path) as file:
        place = 0
        while line := file.readline(MAX_REPORT_BYTES + 1):
            place += 1
            if len(line) > MAX_REPORT_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_REPORT_BYTES)
                yield _broken(place, Reason.LIMIT_EXCEEDED, f"a line of more than {MAX_REPORT_BYTES} bytes")
                continue
            if line.strip():
                yield _parse_json(place, line.removeprefix(b"\xef\xbb\xbf") if place == 1 else line)


def _parse_json(place: int, line: bytes) -> ReportRecord | BrokenReport:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return _broken(place, Reason.REPORT_UNREADABLE, f"no JSON: {type(error).__name__}")
    absent = [name for name in (_KEY, _TEXT) if name not in row] if isinstance(row, dict) else []
    if absent and place == 1:
        # The keys of the first line are those of all, as the header of a CSV is.
        raise ConfigError(
            f"the reports must have the keys {_KEY!r} and {_TEXT!r} in every line, got no {absent[0]!r} "
            f"{say_columns([*row])} in the first; rename the keys."
        )
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in (_KEY, _TEXT)):
        return _broken(place, Reason.REPORT_UNREADABLE, f"no object with the strings {_KEY} and {_TEXT}")
    return make_record(place, row[_KEY], row[_TEXT])


def _iter_folder(path: Path) -> Iterator[ReportRecord | BrokenReport]:
    for place, entry in enumerate(sorted(path.iterdir(), key=lambda one: os.fsencode(one.name)), start=1):
        if entry.suffix.lower() not in REPORT_FILES or not entry.is_file():
            yield _broken(place, Reason.NOT_REPORT, "")
            continue
        yield read_report_file(entry, place, entry.stem)


def read_report_file(path: Path, place: int, study: str) -> ReportRecord | BrokenReport:
    """Read a file that is one report of a study: UTF-8 text; a PDF or RTF, by its extension, is named only.

    Raises:
        ConfigError: The package that reads such a file is missing.
    """
    for form in READERS:
        if path.suffix.lower() == form:
            document = ReportDocument(form=form, path=path)
            document.check_reader()
            return ReportRecord(study_instance_uid=study.strip(), text="", place=place, document=document)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_REPORT_BYTES + 1)
    except OSError as error:
        return _broken(place, Reason.FILE_UNREADABLE, os_reason(error), study)
    if len(data) > MAX_REPORT_BYTES:
        return _broken(place, Reason.LIMIT_EXCEEDED, f"more than {MAX_REPORT_BYTES} bytes", study)
    return make_record(place, study, data.decode("utf-8-sig", errors="surrogateescape"))


def make_record(
    place: int, study: str, text: str, role: ReportRole = "final", *, needs_study: bool = True
) -> ReportRecord | BrokenReport:
    """Make a record of a text, or of the reason why it cannot be used."""
    key = study.strip()
    if not _is_utf8(key + text):
        return _broken(place, Reason.REPORT_UNREADABLE, "the text is not UTF-8")
    if needs_study and not key:
        return _broken(place, Reason.MISSING_IDENTIFIER, _KEY)
    if not text.strip():
        return _broken(place, Reason.EMPTY_REPORT, "", key)
    return ReportRecord(
        study_instance_uid=key,
        text=text.replace("\r\n", "\n").replace("\r", "\n"),
        place=place,
        role=role,
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _broken(place: int, reason: Reason, detail: str, key: str = "") -> BrokenReport:
    return BrokenReport(place=place, reason=reason, detail=detail, study_instance_uid=key)


def _open_table(path: Path) -> BinaryIO:
    """Open a table; a UTF-16 one is refused as a whole, because every row of it would be."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"the report table must be readable, got {os_reason(error)}; check the path."
        ) from None
    if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
        file.close()
        raise ConfigError("the report table must be UTF-8, got UTF-16; convert it.")
    file.seek(0)
    return file
