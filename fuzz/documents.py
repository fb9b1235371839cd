"""Targets: clinical documents and records, recordings of signals, lines of corpora."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fuzz.target import Target, encoded
from shardflow.errors import SourceError
from shardflow.packing.attachments.records.kinds import record_kinds
from shardflow.packing.attachments.records.mapping import RecordsConfig
from shardflow.packing.attachments.waveforms.edf import EdfKind
from shardflow.packing.attachments.waveforms.wfdb_records import WfdbKind
from shardflow.packing.corpora.config import (
    ConversationsConfig,
    CorpusConfig,
    CorpusDeidConfig,
    CorpusInputsConfig,
    FieldsConfig,
    LineError,
)
from shardflow.packing.corpora.content import ContentMaker
from shardflow.packing.corpora.lines import DamagedFileError, parse_line, tar_samples
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.sources.documents.bounded import parse_json, parse_xml
from shardflow.packing.sources.documents.cda import read_cda_report
from shardflow.packing.sources.documents.fhir import FhirIndex, iter_resources, read_fhir_report
from shardflow.packing.sources.documents.hl7 import read_hl7_reports
from shardflow.packing.sources.reports import read_rtf
from tests.foreign_tars import make_members, python_tar
from tests.record_case import cda_canaries, context, fhir_canaries, hl7_canaries

_HEAD_BYTES: Final = 4096
_MAX_ITEMS: Final = 16


class _Documents(Target):
    """A document as a report, and as an attachment."""

    errors = (SourceError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kinds = record_kinds(RecordsConfig())
        self._number = 0

    def attach(self, data: bytes) -> None:
        """Link and convert a file as packing does."""
        # Readers remember files by name and time: each input has a name of its own.
        self._number += 1
        path = self.file(f"{self._number}.document", data)
        try:
            for kind in self._kinds:
                if kind.recognise(path, data[:_HEAD_BYTES]):
                    items = kind.describe(path)
                    kind.convert(path, [item.item for item in items[:_MAX_ITEMS]], context())
        finally:
            path.unlink()


class Fhir(_Documents):
    """Resources and bundles of FHIR, as JSON or NDJSON."""

    def seeds(self) -> Iterator[bytes]:
        """Return the resources of the tests, alone and in a bundle."""
        resources = fhir_canaries()
        yield from encoded(*resources)
        yield from encoded(
            {"resourceType": "Bundle", "entry": [{"resource": one, "fullUrl": "urn:1"} for one in resources]}
        )
        yield b"\n".join(encoded(*resources[:4]))

    def read(self, data: bytes) -> None:
        """Read it as an attachment, and its reports."""
        self.attach(data)
        found = list(iter_resources(parse_json(data)))
        index = FhirIndex()
        for url, resource in found:
            index.add(url, resource)
        for _, resource in found:
            if resource.get("resourceType") == "DiagnosticReport":
                read_fhir_report(resource, index)


class Cda(_Documents):
    """A document of the Clinical Document Architecture."""

    def seeds(self) -> Iterator[bytes]:
        """Return the document of the tests."""
        yield cda_canaries()

    def read(self, data: bytes) -> None:
        """Read it as an attachment and as a report."""
        self.attach(data)
        read_cda_report(parse_xml(data))


class Hl7(_Documents):
    """Messages of HL7v2."""

    def seeds(self) -> Iterator[bytes]:
        """Return the message of the tests, and one of a report."""
        yield hl7_canaries()
        yield (
            b"MSH|^~\\&|RIS|H|PACS|H|20140102||ORU^R01|1|P|2.5\rPID|||P1^^^H||Doe^Jane\rOBR|1||A1\r"
            b"OBX|1|TX|18782-3||FINDINGS: no effusion\\.br\\IMPRESSION: normal\\X41\\||||||F\r"
        )

    def read(self, data: bytes) -> None:
        """Read them as an attachment and as reports."""
        self.attach(data)
        list(read_hl7_reports(data))


class Rtf(Target):
    """A report in RTF."""

    errors = (SourceError,)

    def seeds(self) -> Iterator[bytes]:
        """Return small documents."""
        yield rb"{\rtf1\ansi\deff0{\fonttbl{\f0 Arial;}}\f0 FINDINGS: no \b effusion\b0 .\par \u8364? \'e4}"
        yield rb"{\rtf1\mac {\*\generator x}{\pict 00ff}a\bin3 abc\par}"

    def read(self, data: bytes) -> None:
        """Read its text."""
        read_rtf(data)


class Edf(Target):
    """A recording in EDF, EDF+ or BDF."""

    errors = (SourceError,)

    def seeds(self) -> Iterator[bytes]:
        """Write a recording by hand: 256 bytes of header, 256 a signal, records."""
        for version, width, reserved in ((b"0", 2, b""), (b"0", 2, b"EDF+C"), (b"\xffBIOSEMI", 3, b"24BIT")):
            texts: Sequence[tuple[bytes, int]] = (
                (version, 8),
                (b"P1 F 01-JAN-1970 Name", 80),
                (b"Startdate 02-JAN-2014 X X X", 80),
                *((b"02.01.14", 8), (b"10.00.00", 8), (b"512", 8), (reserved, 44), (b"2", 8), (b"1", 8)),
                *((b"1", 4), (b"ECG I", 16), (b"AgCl", 80), (b"mV", 8), (b"-5", 8), (b"5", 8)),
                *((b"-32768", 8), (b"32767", 8), (b"HP:0.1Hz", 80), (b"16", 8), (b"", 32)),
            )
            head = b"".join(text.ljust(size) for text, size in texts)
            yield head + bytes(range(32)) * width

    def read(self, data: bytes) -> None:
        """Link and convert it."""
        path = self.file("a.edf", data)
        kind = EdfKind()
        if kind.recognise(path, data[:_HEAD_BYTES]):
            kind.convert(path, [item.item for item in kind.describe(path)], context())


class Wfdb(Target):
    """A WFDB record: header, samples and annotations, divided by `_MARK`."""

    errors = (SourceError,)
    _MARK: Final = b"\xff\x00--\x00\xff"
    _NAMES: Final = ("r.hea", "r.dat", "r.atr")

    def seeds(self) -> Iterator[bytes]:
        """Write small records in several formats."""
        samples = np.arange(24).astype("<i2").tobytes()
        annotations = bytes([10, 4, 20, 4, 5, 92]) + b"(AFIB\0" + b"\0\0"
        for form, data in ((16, samples), (212, samples[:36]), (80, samples[:24])):
            head = (
                f"r 2 250 12 10:00:00 02/01/2014\nr.dat {form} 200(0)/mV 12 0 0 0 0 I\n"
                f"r.dat {form} 200(0)/mV 12 0 0 0 0 II\n# subject_id: 7\n"
            )
            yield self._MARK.join([head.encode(), data, annotations])

    def read(self, data: bytes) -> None:
        """Link and convert it."""
        parts = [*data.split(self._MARK, 2), b"", b""]
        paths = [self.file(name, part) for name, part in zip(self._NAMES, parts, strict=False)]
        kind = WfdbKind()
        if kind.recognise(paths[0], parts[0][:_HEAD_BYTES]):
            kind.convert(paths[0], [item.item for item in kind.describe(paths[0])], context())


class Conversations(Target):
    """A line of a corpus, as a conversation and as a text."""

    errors = (LineError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._makers = [
            ContentMaker(
                CorpusConfig(
                    output=Path("o"),
                    private_dir=Path("p"),
                    inputs=CorpusInputsConfig(files=(Path("i"),)),
                    deid=CorpusDeidConfig(text="scrub"),
                    fields=fields,
                    conversations=conversations,
                ),
                SecretKey(b"k" * 32),
            )
            for fields, conversations in (
                (FieldsConfig(kind="conversations"), ConversationsConfig()),
                (FieldsConfig(kind="text"), ConversationsConfig()),
            )
        ]

    def seeds(self) -> Iterator[bytes]:
        """Return a line of each known form."""
        user, answer = {"role": "user", "content": "Effusion?"}, {"role": "assistant", "content": "No."}
        asked: dict[str, Any] = {"from": "human", "value": "<image>\nEffusion?"}
        yield from encoded(
            {"text": "no effusion on 02.01.2014, Dr. Doe"},
            {"messages": [user, answer]},
            {"conversations": [asked, {"from": "gpt", "value": "No."}], "image": "a.png"},
            {"prompt": [user], "chosen": [answer], "rejected": [{"role": "assistant", "content": "Yes."}]},
            {"prompt": "Effusion?", "completion": "No."},
            {"question": "Effusion?", "answer": "No.", "images": ["a.png", {"bytes": None}]},
            {"texts": ["a", None, "b"], "images": [None, "a.png", None]},
            {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]},
            {"messages": [user | {"tool_calls": []}, answer | {"weight": 0}], "tools": []},
        )

    def read(self, data: bytes) -> None:
        """Read it, and make the fields of a sample."""
        line = parse_line(data)
        for maker in self._makers:
            try:
                record = maker.read(line)
                maker.identify(line, record, "file", 0)
                members = maker.fields(line, record, self.folder)
            except LineError:
                continue
            for name, value in members:
                if name.endswith(".json"):
                    json.loads(value)


class CorpusTar(Target):
    """A tar of conversations with pictures beside them."""

    errors = (LineError, DamagedFileError)

    def seeds(self) -> Iterator[bytes]:
        """Write a small tar."""
        yield python_tar(self.folder / "seed.tar", make_members(range(2))).read_bytes()

    def read(self, data: bytes) -> None:
        """Read its samples."""
        for _ in tar_samples(self.file("a.tar", data), 1 << 16, 1 << 16):
            pass
