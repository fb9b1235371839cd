from __future__ import annotations

import logging
import os
import random
import threading
import time
import traceback
from collections.abc import Callable

import pytest

from shardflow.errors import ShardflowError, WaitTimeoutError
from shardflow.loading.engine import OrderedEngine
from shardflow.loading.thread_state import ThreadState
from shardflow.telemetry import StageCounters

pytestmark = pytest.mark.fast


class Ticket:
    """A ticket whose parts run a function; its result is its number."""

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
        return f"ticket {self.number}"


def _engine(
    open_ticket: Callable[[int], Ticket],
    num_tickets: int,
    *,
    num_threads: int = 3,
    max_bytes: int = 100,
    wait_timeout_s: float = 20.0,
    counters: StageCounters | None = None,
) -> OrderedEngine[int]:
    return OrderedEngine(
        open_ticket,
        num_tickets,
        num_threads=num_threads,
        max_bytes=max_bytes,
        wait_timeout_s=wait_timeout_s,
        counters=counters or StageCounters(),
    )


def _wait(what: threading.Event | threading.Barrier) -> None:
    what.wait(20)


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

    engine = _engine(lambda n: Ticket(n, num_parts=num_parts, part=part), 40, num_threads=num_threads)
    assert _take_all(engine) == list(range(40))
    assert not _loader_threads()


def test_no_threads_run_before_the_first_take_and_none_after_close() -> None:
    engine = _engine(Ticket, 5)
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

    class Counting(Ticket):
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
    # A ticket counts until it is taken; the consumer takes it off our list a little later.
    assert most <= max(seen) <= most + 1


def test_nothing_is_opened_while_the_bound_is_full() -> None:
    begun: list[int] = []

    class Noting(Ticket):
        def begin(self) -> None:
            super().begin()
            begun.append(self.number)

    engine = _engine(lambda n: Noting(n, num_bytes=40), 20)
    assert engine.take() == 0
    time.sleep(0.1)
    assert len(begun) == 3  # one taken, two of 40 bytes waiting
    engine.close()


def test_all_threads_work_on_the_oldest_ticket_first() -> None:
    barrier = threading.Barrier(3, timeout=10)
    engine = _engine(lambda n: Ticket(n, part=lambda _: _wait(barrier)), 1)
    assert _take_all(engine) == [0]  # three parts met, so three threads ran parts of one ticket


def test_an_error_comes_out_in_order_with_the_threads_traceback() -> None:
    def part_of_seven(_: int) -> None:
        raise ZeroDivisionError("in the view")

    engine = _engine(lambda n: Ticket(n, part=part_of_seven if n == 7 else None), 20)
    for expected in range(7):
        assert engine.take() == expected
    with pytest.raises(ZeroDivisionError, match="in the view") as caught:
        engine.take()
    engine.close()
    assert any(frame.name == "part_of_seven" for frame in traceback.extract_tb(caught.value.__traceback__))


@pytest.mark.parametrize("where", ["open", "begin", "finish"])
def test_an_error_anywhere_comes_out(where: str) -> None:
    class Failing(Ticket):
        def begin(self) -> None:
            if where == "begin" and self.number == 2:
                raise OSError(where)
            super().begin()

        def finish(self) -> int:
            if where == "finish" and self.number == 2:
                raise OSError(where)
            return super().finish()

    def open_ticket(number: int) -> Ticket:
        if where == "open" and number == 2:
            raise OSError(where)
        return Failing(number)

    engine = _engine(open_ticket, 5)
    assert [engine.take(), engine.take()] == [0, 1]
    with pytest.raises(OSError, match=where):
        engine.take()
    engine.close()
    assert not _loader_threads()


def test_a_wait_has_a_deadline_that_names_ticket_stage_shard_and_tier() -> None:
    release = threading.Event()
    engine = _engine(
        lambda n: Ticket(n, part=(lambda _: _wait(release)) if n == 1 else None),
        3,
        wait_timeout_s=1.5,
    )
    assert engine.take() == 0
    with pytest.raises(
        WaitTimeoutError,
        match=r"ticket 1 must be ready within 1\.5 s.*stage read of shard train-000001, tier local",
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
        lambda n: Ticket(n, num_parts=1, part=lambda _: _wait(release)),
        1,
        wait_timeout_s=0.1,
        num_threads=1,
    )
    with pytest.raises(WaitTimeoutError):
        engine.take()
    with caplog.at_level(logging.WARNING):
        engine.close()
    assert "stage read of shard train-000000" in caplog.text
    release.set()
    for thread in _loader_threads():
        thread.join(10)


def test_a_forked_child_cannot_go_on_and_can_close() -> None:
    engine = _engine(Ticket, 50)
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
    engine = _engine(lambda n: Ticket(n, part=lambda _: time.sleep(0.005)), 10, counters=counters)
    _take_all(engine)
    snapshot = counters.snapshot()
    assert counters.totals("wait").num_items == 10
    assert counters.totals("wait").num_bytes == 100
    assert counters.totals("wait").seconds > 0.01
    assert snapshot["buffered_bytes"]["most"] <= 100
    assert 0 <= snapshot["ready_batches"]["least"] <= snapshot["ready_batches"]["most"] <= 10
