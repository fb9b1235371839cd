"""DICOMweb archive for tests: QIDO-RS and WADO-RS (PS3.18) over a folder of files, with faults on demand."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pydicom

__all__ = ["Fault", "WebArchive", "serving"]

_BOUNDARY = "a boundary"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One instance of the archive."""

    study: str
    series: str
    instance: str
    modality: str
    date: str
    path: Path


@dataclass(kw_only=True, slots=True)
class Fault:
    """What goes wrong with answers whose path ends in a text."""

    kind: str
    """``truncate``, ``status``, ``type``, ``wrong``, ``duplicate``, ``redirect``, ``length``,
    ``reset``, ``encoding``."""
    path: str = ""
    """End of the paths; empty for all."""
    times: int = 1 << 30
    """How many answers."""
    value: str = ""
    """Status, or address to redirect to."""


@dataclass(slots=True)
class WebArchive:
    """A served folder.

    Attributes:
        url: Root of the service.
        faults: The first one that fits an answer is used up.
        requests: Number of answers by path.
        queries: What stood behind the paths, as it was sent.
        page_size: Most results of one answer.
        piece_bytes: Bytes that are sent at once.
        ignores_pages: Whether every answer begins with the first result.
        names_modalities: Whether results of instances name them.
        description: Of all studies, whatever was asked for; empty where it is not returned.
        framing: ``chunked``, ``length`` or ``close``.
        authorization: What requests must have.
    """

    folder: Path
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    queries: list[str] = field(default_factory=list)
    page_size: int = 1000
    ignores_pages: bool = False
    names_modalities: bool = True
    description: str = ""
    piece_bytes: int = 1 << 16
    framing: str = "chunked"
    authorization: str = ""
    stored: list[Stored] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self) -> None:
        """Read the files of the folder."""
        self.stored = []
        for path in sorted(self.folder.rglob("*.dcm")):
            header = pydicom.dcmread(path, stop_before_pixels=True)
            self.stored.append(
                Stored(
                    study=header.StudyInstanceUID,
                    series=header.SeriesInstanceUID,
                    instance=header.SOPInstanceUID,
                    modality=header.Modality,
                    date=header.get("StudyDate", ""),
                    path=path,
                )
            )

    def fault_of(self, path: str) -> Fault | None:
        with self.lock:
            self.requests[path] += 1
            for fault in self.faults:
                if path.endswith(fault.path) and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def serving(folder: Path, *, tls: tuple[Path, Path] | None = None) -> Iterator[WebArchive]:
    """Serve a folder on 127.0.0.1.

    Args:
        folder: Holds the files.
        tls: Certificate and key; plain HTTP without.
    """
    archive = WebArchive(folder)
    archive.load()

    class Handler(_Handler):
        served = archive

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    archive.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}/dicom-web"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield archive
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: WebArchive

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.served.queries.append(url.query)
        fault = self.served.fault_of(url.path)
        kind = "" if fault is None else fault.kind
        if self.served.authorization and self.headers.get("Authorization") != self.served.authorization:
            return self._end(401)
        if fault is not None and kind == "status":
            return self._end(int(fault.value))
        if fault is not None and kind == "redirect":
            return self._end(302, {"Location": fault.value})
        if kind == "reset":
            self.close_connection = True
            return None
        parts = [unquote(part) for part in url.path.split("/") if part][1:]
        query = parse_qs(url.query, keep_blank_values=True)
        if parts == ["studies"]:
            return self._results(self._studies(query), query)
        if len(parts) == 3 and parts[2] == "instances":
            rows = [one for one in self.served.stored if one.study == parts[1]]
            found_rows = [_row(one) for one in rows]
            if not self.served.names_modalities:
                found_rows = [{**one, "00080060": _value("CS", "")} for one in found_rows]
            return self._results(found_rows, query)
        if len(parts) == 3 and parts[2] == "series":
            series = {one.series: _row(one) for one in self.served.stored if one.study == parts[1]}
            return self._results([*series.values()], query)
        found = [
            one
            for one in self.served.stored
            if parts[:2] == ["studies", one.study]
            and parts[2:4] in ([], ["series", one.series])
            and parts[4:] in ([], ["instances", one.instance])
        ]
        if not found:
            return self._end(404)
        accept = self.headers.get("Accept", "")
        if "transfer-syntax=*" not in accept or 'type="application/dicom"' not in accept:
            return self._end(406)
        return self._deliver(found, fault)

    def _studies(self, query: dict[str, list[str]]) -> list[dict[str, object]]:
        rows: dict[str, dict[str, object]] = {}
        for one in self.served.stored:
            first, dash, last = query.get("StudyDate", ["-"])[0].partition("-")
            if not (first <= one.date <= (last or "9") if dash else one.date == first):
                continue
            if one.modality not in query.get("ModalitiesInStudy", [one.modality]):
                continue
            rows[one.study] = {
                "0020000D": _value("UI", one.study),
                "00080020": _value("DA", one.date),
                "00081030": _value("LO", self.served.description),
            }
        return list(rows.values())

    def _results(self, rows: list[dict[str, object]], query: dict[str, list[str]]) -> None:
        start = 0 if self.served.ignores_pages else int(query.get("offset", ["0"])[0])
        count = min(self.served.page_size, int(query.get("limit", ["1000"])[0]))
        body = json.dumps(rows[start : start + count]).encode()
        if body == b"[]":
            return self._end(204)
        self.send_response(200)
        self.send_header("Content-Type", "application/dicom+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def _deliver(self, found: list[Stored], fault: Fault | None) -> None:
        kind = "" if fault is None else fault.kind
        files = [(one.path.read_bytes()) for one in found]
        if kind == "wrong":
            others = [one for one in self.served.stored if one not in found]
            files = [others[0].path.read_bytes()]
        if kind == "duplicate":
            files = [data for data in files for _ in range(2)]
        body = b"a preamble, which is ignored"
        for data in files:
            num_bytes = len(data) - (1 if kind == "length" else 0)
            body += b"\r\n--" + _BOUNDARY.encode() + b" \t\r\nContent-Type: application/dicom\r\n"
            body += f"Content-Length: {num_bytes}\r\n\r\n".encode() + data
        body += b"\r\n--" + _BOUNDARY.encode() + b"--\r\nan epilogue"
        if kind == "truncate":
            body = body[: len(body) - len(files[-1]) // 2]
        media = f'multipart/related; type="application/dicom"; boundary="{_BOUNDARY}"'
        media = "text/html" if kind == "type" else media
        self.send_response(200)
        self.send_header("Content-Type", media)
        if kind == "encoding":
            self.send_header("Content-Encoding", "gzip")
        framing = "close" if kind == "truncate" else self.served.framing
        if framing == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif framing == "length":
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        size = self.served.piece_bytes
        try:
            for start in range(0, len(body), size):
                piece = body[start : start + size]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if framing == "chunked" else piece)
            if framing == "chunked":
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _end(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status == 503:
            self.send_header("Retry-After", "0")
        if status != 204:
            self.send_header("Content-Length", "0")
        self.end_headers()


def basic(user: str, password: str) -> str:
    """Return the ``Authorization`` of a user."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _value(vr: str, value: str) -> dict[str, object]:
    return {"vr": vr, "Value": [value]} if value else {"vr": vr}


def _row(one: Stored) -> dict[str, object]:
    return {
        "00080018": _value("UI", one.instance),
        "00080060": _value("CS", one.modality),
        "0020000D": _value("UI", one.study),
        "0020000E": _value("UI", one.series),
    }
