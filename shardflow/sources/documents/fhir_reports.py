"""Reports in FHIR: the presented form and the conclusion of a DiagnosticReport.

The generated narrative (``text.div``) is not read: it repeats header data, and is not what the doctor wrote.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Final

from shardflow.sources.documents.fhir import FhirIndex, Resource, as_text, objects
from shardflow.sources.documents.found import NOT_REPORT, DocumentReport, NoReport
from shardflow.sources.reasons import Reason

__all__ = ["attachment_text", "read_fhir_report"]

_STATUS: Final = {
    "amended": "corrected",
    "appended": "corrected",
    "corrected": "corrected",
    "final": "final",
    "partial": "preliminary",
    "preliminary": "preliminary",
    "registered": "preliminary",
    "unknown": "preliminary",
}
_WITHDRAWN: Final = frozenset({"cancelled", "entered-in-error"})
_MAX_TEXT: Final = 1 << 24
_BLOCKS: Final = frozenset({"br", "div", "h1", "h2", "h3", "h4", "li", "p", "pre", "table", "tr"})
_HIDDEN: Final = frozenset({"head", "script", "style"})


def read_fhir_report(resource: Resource, index: FhirIndex) -> DocumentReport | NoReport:
    """Read a resource; those of other kinds and those without text give no report."""
    if resource.get("resourceType") != "DiagnosticReport":
        return NOT_REPORT
    facts = index.facts(resource)
    status = as_text(resource.get("status")).lower()
    if status in _WITHDRAWN:
        return NoReport(reason=Reason.REPORT_WITHDRAWN, facts=facts)
    texts = [attachment_text(form, resource, index) for form in objects(resource.get("presentedForm"))]
    # Several forms of one report are the same text in several media.
    text = next((one for one in texts if one), "")
    conclusion = as_text(resource.get("conclusion"))
    if conclusion and " ".join(conclusion.split()) not in " ".join(text.split()):
        text = f"{text.rstrip()}\n\nIMPRESSION:\n{conclusion}\n".lstrip("\n")
    if not text.strip():
        return NoReport(reason=Reason.NOT_REPORT, facts=facts)
    return DocumentReport(text=text, status=_STATUS.get(status, "final"), facts=facts)


def attachment_text(attachment: Resource, holder: Resource, index: FhirIndex) -> str:
    """Return the text of an Attachment: plain or HTML, in it or in a Binary of the same export.

    Other media, such as PDF, give none.
    """
    data, media = attachment.get("data"), as_text(attachment.get("contentType"))
    if data is None and (url := as_text(attachment.get("url"))):
        binary = index.resolve(url, holder)
        if binary is not None and binary.get("resourceType") == "Binary":
            data = binary.get("data", binary.get("content"))
            media = media or as_text(binary.get("contentType"))
    kind, _, parameters = media.lower().partition(";")
    if kind.strip() not in {"text/html", "text/plain"}:
        return ""
    if not isinstance(data, str) or len(data) > 2 * _MAX_TEXT:
        return ""
    try:
        raw = base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        return ""
    text = _decode(raw, parameters)
    return _html_text(text) if kind.strip() == "text/html" else text.replace("\r\n", "\n")


def _decode(raw: bytes, parameters: str) -> str:
    charset = parameters.partition("charset=")[2].strip(" \"'").split(";")[0]
    for name in (charset, "utf-8-sig"):
        if name in {"iso-8859-1", "latin-1", "us-ascii", "utf-16", "utf-8", "utf-8-sig", "windows-1252"}:
            try:
                return raw.decode(name)
            except UnicodeDecodeError:
                continue
    return raw.decode("latin-1")


class _Text(HTMLParser):
    """Collects what a reader sees."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._num_hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002 - of the base class
        self._num_hidden += tag in _HIDDEN
        if tag in _BLOCKS:
            self.parts.append("\0")

    def handle_endtag(self, tag: str) -> None:
        self._num_hidden = max(self._num_hidden - (tag in _HIDDEN), 0)
        if tag in _BLOCKS:
            self.parts.append("\0")

    def handle_data(self, data: str) -> None:
        if not self._num_hidden:
            self.parts.append(" ".join(f".{data}.".replace("\0", " ").split())[1:-1])


def _html_text(text: str) -> str:
    parser = _Text()
    parser.feed(text)
    parser.close()
    return "\n".join(_lines("".join(parser.parts))) + "\n"


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.split("\0") if line.strip())
