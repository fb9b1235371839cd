"""Header pass: reasons of files that are no images; batches that fail although no file does."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli.pack import LineProgress
from shardflow.errors import ShardflowError
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.engines.base import Engine, Task, TaskDone, encode
from shardflow.packing.header_rows import BATCH_FILES
from shardflow.packing.inventory import ScannedFile
from shardflow.packing.progress import Progress, SilentProgress
from shardflow.packing.scan import AttachmentFinder, HeaderPass, _stated
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.placement import DiscoveredFile, Placement
from shardflow.packing.studies.tasks import ScanDone
from shardflow.packing.workspace import CrashLog
from tests.unit.packing.sources.dicom.factory import make_header

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "head",
    [
        b"\x30\x82\x0a\x0d\x02\x01\x03\x30\x82\x09\xd3",  # a PKCS12 file whose length holds a line end
        b"\x1f\x8bqB\x81K\r\xa6N",
    ],
)
def test_a_recognizer_that_fails_does_not_know_the_file(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "certificate.p12").write_bytes(head)
    finder = AttachmentFinder(limits=HeaderLimits(), max_bytes=1 << 20)
    assert finder.find(tmp_path / "certificate.p12") is None


class _Busy(Engine):
    """Answers like a machine that is busy: so many batches exceed their deadline, and no file by itself."""

    def __init__(self, num_slow: int) -> None:
        self.num_slow, self.tasks = num_slow, list[Task]()

    @property
    def has_idle(self) -> bool:
        return not self.tasks

    @property
    def num_running(self) -> int:
        return len(self.tasks)

    def restart(self, num_processes: int | None = None) -> None:
        pass

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def wait(self) -> TaskDone:
        task = self.tasks.pop()
        if task.kind == "probe":
            return TaskDone(task=task, result={})
        self.num_slow -= 1
        if self.num_slow >= 0:
            return TaskDone(task=task, failure="timeout", detail="no progress within 1 s")
        assert task.num_steps == len(task.payload.files)
        return TaskDone(task=task, result=encode(ScanDone(files=(_NO_IMAGE,) * len(task.payload.files))))

    def close(self) -> None:
        pass


_NO_IMAGE = ScannedFile(
    surrogate="a" * 26,
    reason="NOT_DICOM",
    study="",
    patient="",
    bucket=0,
    decoded_bytes=0,
    num_slices=0,
    instance=0,
    series=0,
    digest=0,
    modified_ns=0,
    row_offset=0,
    row_num_bytes=0,
)


class _Images:
    def place(self, file: DiscoveredFile) -> Placement:
        return Placement(attributes={})


def _header_pass(folder: Path, engine: Engine, progress: Progress, *, num_files: int) -> HeaderPass:
    return HeaderPass(
        engine=engine,
        files=[
            DiscoveredFile(root_index=0, relative_path=f"{number}.dcm", num_bytes=100)
            for number in range(num_files)
        ],
        layout=_Images(),  # type: ignore[arg-type]
        key=SecretKey(b"k" * 32),
        crash_log=CrashLog(folder / "outcomes.jsonl"),
        task_timeout_s=1.0,
        progress=progress,
        num_image_roots=1,
    )


def test_a_batch_that_is_slow_by_chance_does_not_end_the_job(tmp_path: Path) -> None:
    def run(num_slow: int) -> Any:
        return _header_pass(tmp_path, _Busy(num_slow), SilentProgress(), num_files=29).run()

    assert set(run(4).surrogate.tolist()) == {b"a" * 26}
    assert not (tmp_path / "outcomes.jsonl").exists()
    with pytest.raises(ShardflowError, match=r"execution\.task_timeout_s"):
        run(5)


@pytest.mark.parametrize(("birth_date", "age"), [("19701231", ""), ("1970", "055Y"), ("00000000", "055Y")])
def test_an_age_is_stated_where_no_whole_birth_date_is(tmp_path: Path, birth_date: str, age: str) -> None:
    header = replace(make_header(tmp_path, 1), birth_date=birth_date, patient_age="055Y")
    assert _stated("A", header).age == age


class _SlowStore(_Busy):
    """Two processes on a simulated clock; the second batch waits for a file until its deadline."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__(num_slow=0)
        self.clock, self.hanging, self.has_hung = clock, list[Task](), False

    @property
    def has_idle(self) -> bool:
        return len(self.tasks) + len(self.hanging) < 2

    @property
    def num_running(self) -> int:
        return len(self.tasks) + len(self.hanging)

    def submit(self, task: Task) -> None:
        hangs = task.kind == "scan" and task.handle == BATCH_FILES and not self.has_hung
        (self.hanging if hangs else self.tasks).append(task)

    def wait(self) -> TaskDone:
        if self.tasks:
            self.clock[0] += 6.0
            return super().wait()
        self.clock[0] += 60.0
        self.has_hung = True
        return TaskDone(task=self.hanging.pop(), failure="timeout", detail="no progress within 1 s")


def test_while_a_file_hangs_the_time_left_is_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    _header_pass(tmp_path, _SlowStore(clock), LineProgress(stream), num_files=BATCH_FILES * 12).run()
    lines = [line.partition(", ")[2] for line in stream.getvalue().splitlines()[1:]]
    # A batch takes 6 s; the hanging one is late after four times that, and tried again at last.
    assert lines == [
        "about 1 min left",
        "about 48 s left",
        "at least 36 s left",
        "at least 24 s left",
        "at least 12 s left",
        "",
    ]
