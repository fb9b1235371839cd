from __future__ import annotations

import logging
import os
import platform
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable

import pytest

from shardflow.errors import ShardflowError, WaitTimeoutError
from shardflow.fields.decode import ThreadState
from shardflow.loading.engine import OrderedEngine
from shardflow.telemetry import StageCounters

pytestmark = pytest.mark.fast

# Of a machine with much else to do.
DEADLINE_S = 300.0


class Task:
    """A task whose parts run a function; its result is its number."""

    def __init__(
        self,
        number: int,
        *,
        num_bytes: int = 10,
        num_parts: int = 3,
        part: Callable[[int], None] | None = None,
    ) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.num_parts = num_parts
        self.part = part
        self.has_begun = False
        self.done: list[int] = []

    def begin(self) -> None:
        self.has_begun = True

    def run(self, part: int, thread: ThreadState) -> None:
        assert self.has_begun
        thread.enter("read", f"shard train-{self.number:06d}, tier local")
        if self.part is not None:
            self.part(part)
        self.done.append(part)

    def finish(self) -> int:
        assert sorted(self.done) == list(range(self.num_parts))
        return self.number

    def describe(self) -> str:
        return f"task {self.number}"


def _engine(
    open_task: Callable[[int], Task],
    num_tasks: int,
    *,
    num_threads: int = 3,
    max_bytes: int = 100,
    wait_timeout_s: float = DEADLINE_S,
    counters: StageCounters | None = None,
) -> OrderedEngine[int]:
    return OrderedEngine(
        open_task,
        num_tasks,
        num_threads=num_threads,
        max_bytes=max_bytes,
        wait_timeout_s=wait_timeout_s,
        counters=counters or StageCounters(),
    )


def _wait(what: threading.Event | threading.Barrier) -> None:
    what.wait(DEADLINE_S)


def _loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardflow-loading")]


def _take_all(engine: OrderedEngine[int]) -> list[int]:
    try:
        return list(iter(engine.take, None))
    finally:
        engine.close()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_parts", [0, 1, 4])
def test_results_come_in_order_however_long_each_takes(num_threads: int, num_parts: int) -> None:
    rng = random.Random(num_threads)

    def part(_: int) -> None:
        time.sleep(rng.random() * 0.002)

    engine = _engine(lambda n: Task(n, num_parts=num_parts, part=part), 40, num_threads=num_threads)
    assert _take_all(engine) == list(range(40))
    assert not _loader_threads()


def test_no_threads_run_before_the_first_take_and_none_after_close() -> None:
    engine = _engine(Task, 5)
    assert not _loader_threads()
    assert engine.take() == 0
    assert len(_loader_threads()) == 3
    engine.close()
    assert not _loader_threads()
    assert engine.take() is None
    engine.close()


@pytest.mark.parametrize(("num_bytes", "most"), [(30, 3), (100, 1), (101, 1), (1000, 1)])
def test_work_ahead_is_bounded_in_bytes_and_one_ticket_may_exceed_it_alone(num_bytes: int, most: int) -> None:
    open_tickets: set[int] = set()
    seen: list[int] = []
    lock = threading.Lock()

    class Counting(Task):
        def begin(self) -> None:
            super().begin()
            with lock:
                open_tickets.add(self.number)
                seen.append(len(open_tickets))

    engine = _engine(lambda n: Counting(n, num_bytes=num_bytes), 20)
    for expected in range(20):
        assert engine.take() == expected
        with lock:
            open_tickets.discard(expected)
        time.sleep(0.002)
    engine.close()
    # A task counts until it is taken; the consumer takes it off our list a little later.
    assert most <= max(seen) <= most + 1


def test_nothing_is_opened_while_the_bound_is_full() -> None:
    begun: list[int] = []

    class Noting(Task):
        def begin(self) -> None:
            super().begin()
            begun.append(self.number)

    engine = _engine(lambda n: Noting(n, num_bytes=40), 20)
    assert engine.take() == 0
    assert _eventually(lambda: len(begun) == 3)  # one taken, two of 40 bytes waiting
    time.sleep(0.05)  # a chance for what must not happen; the right answer does not depend on it
    assert len(begun) == 3
    engine.close()


def test_all_threads_work_on_the_oldest_ticket_first() -> None:
    barrier = threading.Barrier(3, timeout=DEADLINE_S)
    engine = _engine(lambda n: Task(n, part=lambda _: _wait(barrier)), 1)
    assert _take_all(engine) == [0]  # three parts met, so three threads ran parts of one task


def test_an_error_comes_out_in_order_with_the_threads_traceback() -> None:
    def part_of_seven(_: int) -> None:
        raise ZeroDivisionError("in the view")

    engine = _engine(lambda n: Task(n, part=part_of_seven if n == 7 else None), 20)
    for expected in range(7):
        assert engine.take() == expected
    with pytest.raises(ZeroDivisionError, match="in the view") as caught:
        engine.take()
    engine.close()
    assert any(frame.name == "part_of_seven" for frame in traceback.extract_tb(caught.value.__traceback__))


@pytest.mark.parametrize("where", ["open", "begin", "finish"])
def test_an_error_anywhere_comes_out(where: str) -> None:
    class Failing(Task):
        def begin(self) -> None:
            if where == "begin" and self.number == 2:
                raise OSError(where)
            super().begin()

        def finish(self) -> int:
            if where == "finish" and self.number == 2:
                raise OSError(where)
            return super().finish()

    def open_task(number: int) -> Task:
        if where == "open" and number == 2:
            raise OSError(where)
        return Failing(number)

    engine = _engine(open_task, 5)
    assert [engine.take(), engine.take()] == [0, 1]
    with pytest.raises(OSError, match=where):
        engine.take()
    engine.close()
    assert not _loader_threads()


def test_a_wait_has_a_deadline_that_names_ticket_stage_shard_and_tier() -> None:
    release = threading.Event()
    engine = _engine(
        lambda n: Task(n, part=(lambda _: _wait(release)) if n == 1 else None),
        3,
        wait_timeout_s=1.5,
    )
    assert engine.take() == 0
    with pytest.raises(
        WaitTimeoutError,
        match=r"task 1 must be ready within 1\.5 s.*stage read of shard train-000001, tier local",
    ):
        engine.take()
    release.set()
    engine.close()
    assert not _loader_threads()


def test_a_thread_that_cannot_end_is_named_by_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shardflow.loading.engine._JOIN_TIMEOUT_S", 0.1)
    release = threading.Event()
    engine = _engine(
        lambda n: Task(n, num_parts=1, part=lambda _: _wait(release)),
        1,
        wait_timeout_s=0.1,
        num_threads=1,
    )
    engine.start()
    assert _eventually(lambda: "stage read" in engine.describe_wait(0))
    with pytest.raises(WaitTimeoutError):
        engine.take()
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert "stage read of shard train-000000" in caplog.text
    release.set()
    for thread in _loader_threads():
        thread.join(DEADLINE_S)


def test_a_forked_child_cannot_go_on_and_can_close() -> None:
    engine = _engine(Task, 50)
    assert engine.take() == 0
    pid = os.fork()
    if pid == 0:
        try:
            engine.take()
        except ShardflowError:
            engine.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.take() == 1
    engine.close()


def test_waiting_and_queue_depth_are_counted() -> None:
    counters = StageCounters()
    engine = _engine(lambda n: Task(n, part=lambda _: time.sleep(0.005)), 10, counters=counters)
    _take_all(engine)
    snapshot = counters.snapshot()
    assert counters.totals("wait").num_items == 10
    assert counters.totals("wait").num_bytes == 100
    assert counters.totals("wait").seconds > 0
    assert snapshot["buffered_bytes"]["most"] <= 100
    assert 0 <= snapshot["ready_batches"]["least"] <= snapshot["ready_batches"]["most"] <= 10
    assert 0 < snapshot["threads_busy"]["mean"] <= 3
    assert counters.totals("collate").num_items == 10


def test_a_take_that_finds_nothing_ready_is_starved_and_one_that_need_not_wait_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = StageCounters()
    slow = threading.Event()
    engine = _engine(lambda n: Task(n, part=None if n else lambda _: _wait(slow)), 2, counters=counters)
    wait_for_next = engine._wait_for_next

    def waits(deadline: float) -> bool:
        # Not before the take has found nothing.
        threading.Timer(0.05, slow.set).start()
        return wait_for_next(deadline)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_wait_for_next", waits)
        assert engine.take() == 0
    assert counters.totals("starved").num_items == 1
    assert counters.totals("starved").seconds > 0.01
    assert _eventually(lambda: engine._num_ready == 1)
    assert engine.take() == 1
    assert counters.totals("starved").num_items == 1
    engine.close()


def test_results_that_come_soon_after_one_another_are_taken_by_one_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = _engine(lambda n: Task(n, num_parts=1), 5, num_threads=1)
    engine._is_soon = True  # as after a short wait
    naps: list[float] = []
    told: list[int] = []
    wait, notify_all = engine._done.wait, engine._done.notify_all

    def nap(timeout: float) -> bool:
        naps.append(timeout)
        while not told:
            wait(0.01)
        return True

    def tell() -> None:
        told.append(engine._num_ready)
        notify_all()

    monkeypatch.setattr(engine._done, "wait", nap)
    monkeypatch.setattr(engine._done, "notify_all", tell)
    assert [engine.take() for _ in range(5)] == [*range(5)]
    assert len(naps) == 1
    assert told[0] == 5
    engine.close()


@pytest.mark.parametrize("max_bytes", [10, 15, 100])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_loop_is_woken_where_nothing_more_is_made_before_it_takes_a_result(
    max_bytes: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound has room for one result, for one and a part of the next, or for all."""
    engine = _engine(lambda n: Task(n, num_parts=1), 4, num_threads=num_threads, max_bytes=max_bytes)
    engine._is_soon = True  # as after a short wait
    num_naps = 0
    wait = engine._done.wait

    def nap(timeout: float) -> bool:
        nonlocal num_naps
        num_naps += 1
        assert wait(timeout), "nobody woke the loop"
        return True

    monkeypatch.setattr("shardflow.loading.engine._NAP_S", 20.0)
    monkeypatch.setattr("shardflow.loading.engine._SOON_S", DEADLINE_S)
    monkeypatch.setattr(engine._done, "wait", nap)
    assert _take_all(engine) == [*range(4)]
    assert num_naps


# ---- other threads and bounds while it runs ---------------------------------------------------------


def _eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_threads_are_as_many_as_were_asked_for_last() -> None:
    gate = threading.Event()
    begun: list[int] = []

    def part(number: int) -> None:
        begun.append(number)
        _wait(gate)

    engine = _engine(lambda number: Task(number, part=part), 40, num_threads=2)
    engine.resize(num_threads=3)
    assert not _loader_threads()  # they start with the first take
    engine.start()
    assert len(_loader_threads()) == 3
    engine.resize(num_threads=6)
    assert _eventually(lambda: len(begun) == 6)
    engine.resize(num_threads=1)
    assert len(_loader_threads()) == 6  # each has a part in its hands
    gate.set()
    assert [engine.take() for _ in range(39)] == list(range(39))
    assert _eventually(lambda: len(_loader_threads()) == 1)
    assert engine.take() == 39
    engine.close()
    assert not _loader_threads()
    engine.resize(num_threads=3)
    engine.start()
    assert not _loader_threads()


def test_a_thread_that_is_too_many_loses_no_part_and_its_error_comes_out_in_place() -> None:
    rng = random.Random(4)

    def part(number: int) -> None:
        time.sleep(rng.random() / 2000)

    def fail(number: int) -> None:
        raise ValueError("seven")

    engine = _engine(lambda number: Task(number, part=fail if number == 70 else part), 90, num_threads=4)
    for number in range(70):
        assert engine.take() == number
        engine.resize(num_threads=rng.randint(1, 6), max_bytes=rng.choice([5, 40, 300]))
    with pytest.raises(ValueError, match="seven"):
        engine.take()
    assert engine.take() == 71
    engine.close()
    assert not _loader_threads()


def test_a_lower_bound_drops_nothing_and_opens_nothing() -> None:
    opened: list[int] = []

    def open_task(number: int) -> Task:
        opened.append(number)
        return Task(number)

    engine = _engine(open_task, 40, max_bytes=100)
    assert engine.take() == 0
    assert _eventually(lambda: len(opened) == 11)
    engine.resize(max_bytes=20)
    for number in range(1, 9):
        assert engine.take() == number
        assert max(opened) <= 10
    assert engine.buffered_bytes <= 20
    engine.resize(max_bytes=1000)
    assert [engine.take() for _ in range(31)] == list(range(9, 40))
    engine.close()


_MANY_PICTURES = """
import resource
import cv2
import numpy as np
from tests.unit.loading import test_engine as engines

picture = cv2.imencode(".jpg", np.zeros((1024, 1024), np.uint8))[1]

def part(_):
    cv2.imdecode(picture, cv2.IMREAD_GRAYSCALE)

engine = engines._engine(lambda number: engines.Task(number, num_parts=1, part=part), 100, num_threads=2)
[engine.take() for _ in range(20)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
engines._take_all(engine)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep memory as they like")
def test_a_decoder_finds_the_memory_of_the_picture_before() -> None:
    """A megabyte that was freed to the system costs 256 page faults when it is allocated again."""
    # A process of its own: whoever freed a larger block before has the same effect.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", _MANY_PICTURES]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80 * 256 / 4
