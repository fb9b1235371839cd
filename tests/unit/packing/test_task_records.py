"""Records that cross a process border: equal on the other side, and refused where a type is another."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ShardflowError
from shardflow.format.reasons import Reason
from shardflow.packing.deid.identity import PublishedPerson
from shardflow.packing.deid.pseudonyms import DateOffsets
from shardflow.packing.engines.base import decode, encode
from shardflow.packing.header_rows import RowPlace
from shardflow.packing.inventory import Attachment, ItemLinks, ScannedFile, StudyFacts
from shardflow.packing.linking import ReportPlace
from shardflow.packing.sources.placement import Placement
from shardflow.packing.sources.reports import ReportDocument
from shardflow.packing.studies import tasks
from shardflow.packing.studies.tasks import StudyOutcome

pytestmark = pytest.mark.fast

PLACE = RowPlace("batch-0000000.jsonl", 65, 100)
LINKS = ItemLinks(
    item=0,
    studies=("s",),
    series=(1 << 63,),
    instances=(),
    accession=7,
    beside="",
    patient="p",
    others=("q",),
    time_s=None,
)
SCANNED = ScannedFile(
    surrogate="i",
    reason=None,
    study="s",
    patient="p",
    bucket=3,
    decoded_bytes=4,
    num_slices=1,
    instance=(1 << 64) - 1,
    series=0,
    digest=5,
    modified_ns=6,
    row_offset=7,
    row_num_bytes=8,
    facts=StudyFacts(1, None, 2),
    attachment=Attachment(kind="toy", version=1, links=(LINKS,)),
    listed=(((1, 0), (2, 3)),),
)
FILE = tasks.InputFile(
    root_index=0,
    relative_path="caf\udce9.dcm",
    num_bytes=3,
    reason=Reason.NOT_DICOM,
    placement=Placement(study="s", attributes={"Modality": ("CR",)}, spacing_mm=(1.0, 2.0, 3.0)),
)
RECORDS = (
    tasks.ScanTask(name="batch", files=(FILE,)),
    tasks.ScanDone(files=(SCANNED,)),
    tasks.ProbeTask(file=FILE),
    tasks.ProbeDone(),
    tasks.DocumentTask(document=ReportDocument(form=".pdf", path=Path("a.pdf"))),
    tasks.DocumentDone(text="Clear.", reason=Reason.REPORT_UNREADABLE),
    tasks.LanguagesTask(reports=(ReportPlace(offset=0, num_bytes=5, people_num_bytes=0),)),
    tasks.LanguagesDone(counts={"english": 3}),
    tasks.StudyTask(
        sample_key="k",
        task_digest="d",
        files=(tasks.StudyFile(position=0, row=PLACE),),
        attachments=(tasks.StudyAttachment(position=1, row=PLACE, items=(0, 2)),),
        report=ReportPlace(offset=0, num_bytes=5, people_num_bytes=0),
        siblings=(PLACE,),
        person=PublishedPerson(
            patient_key="p", dates=DateOffsets(origin_days=1, shift_days=2, shift_weeks=3)
        ),
    ),
    tasks.StudyDone(outcome=StudyOutcome(outcome="packed", instances={3: "DECODE_FAILED"}, tallies={"a": 1})),
    tasks.ShardTask(name="n", digest="d", fragments=(tasks.FragmentName(sample_key="k", task_digest="d"),)),
    tasks.ShardDone(missing=("k",)),
    tasks.CheckTask(name="n", digest="d", trusts_sizes=True),
    tasks.CheckDone(is_whole=False),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_arrives_as_it_was(record: Any) -> None:
    arrived = decode(type(record), json.loads(json.dumps(encode(record))))
    assert arrived == record


def test_every_record_of_a_task_is_tried_here() -> None:
    known = {one for one in vars(tasks).values() if is_dataclass(one) and one.__module__ == tasks.__name__}
    tried = {type(record) for record in RECORDS} | {tasks.InputFile, tasks.FragmentName}
    assert known == tried | {tasks.StudyAttachment, tasks.StudyFile, tasks.StudyOutcome}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_values_of_another_type_are_refused_without_being_quoted(record: Any) -> None:
    sent = encode(record)
    for field in fields(record):
        for value in ({"DOE": "JANE"}, 1.5, None):
            if value is None and field.name in {"report", "person", "reason"}:
                continue
            with pytest.raises(ShardflowError, match=f"must be a {type(record).__name__}") as caught:
                decode(type(record), {**sent, field.name: value})
            assert "DOE" not in caught.value.message
        rest = {name: value for name, value in sent.items() if name != field.name}
        with pytest.raises(ShardflowError, match="KeyError"):
            decode(type(record), rest)
