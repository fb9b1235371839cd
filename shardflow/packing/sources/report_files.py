"""Text of reports in PDF and RTF, by pypdf and striprtf; needs shardflow[documents].

A PDF holds letters at places of pages; its text is what pypdf makes of them, page after page. One that needs
a password, or whose pages hold no text (a scan), is refused by the name of the outcome. What is read is
bounded by counts: bytes of the file and of its streams, pages, and characters. What a parser does with a
hostile one is bounded by the process that reads it: `ReportDocument` is what the job hands to it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from shardflow.errors import ConfigError, SourceError, os_reason
from shardflow.format.reasons import Reason, source_error

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
