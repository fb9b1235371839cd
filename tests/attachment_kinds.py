"""A kind of attachments for tests, and packing processes that know it.

A file is ``TOY`` and a JSON object: ``records`` with the evidence and the ``text`` of each, and what else the
kind is to do (``raise``, ``crash``, ``missing``). A file of ``TOX`` belongs to another one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from shardflow.errors import SourceError
from shardflow.format import codecs
from shardflow.format.reasons import Reason
from shardflow.packing import registry
from shardflow.packing import registry as kinds
from shardflow.packing.engines.worker import Handler
from shardflow.packing.handlers import make_handler as make_real_handler
from shardflow.packing.sources.attachments import Attached, AttachmentItem, StudyContext
from shardflow.packing.studies import study as study_members

__all__ = ["HANDLERS", "KINDS", "ToyKind", "write_toy"]

HANDLERS: Final = "tests.attachment_kinds:make_handler"


class ToyKind:
    """Reads toys."""

    name = "toy"
    version = 1
    sop_classes: frozenset[str] = frozenset()

    def recognise(self, path: Path, head: bytes) -> bool:
        return head.startswith((b"TOY", b"TOX"))

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        data = path.read_bytes()
        if data.startswith(b"TOX"):
            return ()
        toy = json.loads(data[3:])
        if toy.get("crash") == "describe":
            os.kill(os.getpid(), signal.SIGKILL)
        if toy.get("raise") == "describe":
            raise ValueError(str(toy))
        return [
            AttachmentItem(
                item=number,
                study_uids=tuple(record.get("study_uids", ())),
                series_uids=tuple(record.get("series_uids", ())),
                sop_uids=tuple(record.get("sop_uids", ())),
                accession=record.get("accession", ""),
                patient_id=record.get("patient_id", ""),
                time=datetime.fromisoformat(record["time"]) if "time" in record else None,
            )
            for number, record in enumerate(toy["records"])
        ]

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:
        toy = json.loads(path.read_bytes()[3:])
        if toy.get("crash") == "convert":
            _fail(toy)
        if toy.get("crash") == "slices":
            _fail_at_slices(toy)
        if toy.get("raise") == "text":
            return Attached(fields={"toy.000.txt": "no bytes"})  # type: ignore[dict-item]
        if toy.get("raise") == "convert":
            raise ValueError(str(toy))
        if toy.get("raise") == "number":
            return Attached(parts={"toys": {"records": [{"gain": float("inf")}]}})
        if toy.get("raise") == "source":
            raise SourceError(Reason.LIMIT_EXCEEDED.value, "too large")
        first = study.num("toys", "records")
        fields, records = {}, []
        for number, item in enumerate(items, start=first):
            record = toy["records"][item]
            text = study.scrub(record.get("text", ""), record.get("people", {}))
            fields[f"toy.{number:03d}.txt"] = text.encode()
            # A mask of the first slice of each series: between the slices and what comes behind them.
            for series in study.series:
                fields[f"s{series.number:03d}.m{number:03d}.i0000.npy"] = bytes([number])
            when = datetime.fromisoformat(record["time"]) if "time" in record else None
            records.append(
                {
                    "record": number,
                    "tracking_key": study.surrogate("tracking", record.get("tracking", "1")),
                    "when": {} if when is None else dict(study.when(when)),
                    "seconds": None if when is None else study.seconds_from_study(when),
                    "series": [
                        [one.number, len(one.sop_uids), one.rows, one.columns] for one in study.series
                    ],
                }
            )
        dangling = [{"reason": "MENTION", "count": len(items)}]
        missing = {item: Reason.ATTACHMENT_UNREADABLE for item in toy.get("missing", ()) if item in items}
        return Attached(
            fields=fields, parts={"toys": {"records": records, "dangling": dangling}}, reasons=missing
        )


def _fail_at_slices(toy: Mapping[str, Any]) -> None:
    """Fail where slices are encoded, behind all attachments."""
    real = codecs.encode_array

    def encode(*values: Any) -> bytes:
        _fail(toy)
        return real(*values)

    setattr(study_members, "encode_array", encode)  # noqa: B010 - a name that the module does not offer


def _fail(toy: Mapping[str, Any]) -> None:
    """End the process, or need too much memory; at most ``times`` times, each a byte of ``tally``."""
    with Path(toy["tally"]).open("ab") as tally:
        if tally.tell() >= toy.get("times", 1 << 30):
            return
        tally.write(b".")
    if toy.get("how") == "memory":
        raise MemoryError
    os.kill(os.getpid(), signal.SIGKILL)


KINDS: Final = (ToyKind(),)


def write_toy(path: Path, *records: Mapping[str, Any], **rest: Any) -> Path:
    """Write a file of the kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"TOY" + json.dumps({"records": list(records), **rest}).encode())
    return path


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the real handler in a process that knows toys."""
    registry.ATTACHMENT_KINDS["toys"] = f"{__name__}:KINDS"
    kinds.attachment_kinds.cache_clear()
    return make_real_handler(setup)
