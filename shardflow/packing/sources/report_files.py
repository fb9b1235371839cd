"""Text of reports in PDF and RTF, by pypdf and striprtf; needs shardflow[documents].

A PDF holds letters at places of pages; its text is what pypdf makes of them, page after page. One that needs
a password, or whose pages hold no text (a scan), is refused by the name of the outcome. What is read is
bounded by counts: bytes of the file and of its streams, pages, and characters.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from typing import Any, Final

from shardflow.errors import ConfigError, SourceError
from shardflow.format.reasons import Reason, source_error

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
    except SourceError:
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
    except Exception as error:  # noqa: BLE001 -- a broken RTF may raise anything
        raise source_error(Reason.REPORT_UNREADABLE, f"RTF: {type(error).__name__}") from None
    return text.replace("\xa0", " ").strip()


READERS: Final[dict[str, Callable[[bytes], str]]] = {".pdf": read_pdf, ".rtf": read_rtf}
"""By the extension of a file."""
