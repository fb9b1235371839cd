"""Places of requests, pauses of a store that refuses, second requests for late ones, and taking back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from shardflow.errors import StorageError
from shardflow.storage import RequestCost
from shardflow.storage.event_loop import EventLoopThread, run_all
from shardflow.storage.ranged_reads import Admission, Hedging
from shardflow.storage.requests import PassingFaultError

pytestmark = pytest.mark.fast


def test_no_more_are_under_way_than_there_are_places() -> None:
    async def run() -> tuple[int, int]:
        admission, now, most = Admission(3, 1.0), 0, 0

        async def one() -> None:
            nonlocal now, most
            async with admission:
                now += 1
                most = max(most, now)
                await asyncio.sleep(0)
                now -= 1

        await run_all([one() for _ in range(40)])
        return most, now

    assert asyncio.run(run()) == (3, 0)


def test_cancelled_waits_lose_no_place() -> None:
    async def run() -> None:
        admission = Admission(2, 1.0)

        async def hold(gate: asyncio.Event) -> None:
            async with admission:
                await gate.wait()

        for turn in range(30):
            gate = asyncio.Event()
            tasks = [asyncio.create_task(hold(gate)) for _ in range(6)]
            await asyncio.sleep(0)
            # Some wait, some were just admitted by the end of another: all are cancelled in one breath.
            tasks[turn % 2].cancel()
            if turn % 3:
                await asyncio.sleep(0)
            for task in tasks[2:5]:
                task.cancel()
            gate.set()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60), admission, admission:
            pass  # both places are free

    asyncio.run(run())


def test_refusals_in_a_row_halve_the_places_and_pause() -> None:
    async def run() -> None:
        admission = Admission(16, 0.05)
        for _ in range(3):
            admission.was_refused()
        admission.succeeded()
        for _ in range(3):
            admission.was_refused()
        assert (admission.limit, admission.num_pauses) == (16, 0)
        admission.was_refused()
        assert (admission.limit, admission.num_pauses) == (8, 1)
        start = asyncio.get_running_loop().time()
        for _ in range(20):
            admission.was_refused()  # of requests that were under way: they say nothing new
        assert admission.num_pauses == 1
        async with admission:
            assert asyncio.get_running_loop().time() - start >= 0.02
        for _ in range(200):
            admission.succeeded()
        assert admission.limit == 16

    asyncio.run(run())


def test_the_places_change_while_requests_wait() -> None:
    async def run() -> None:
        admission, gate, now = Admission(2, 1.0), asyncio.Event(), [0]

        async def hold() -> None:
            async with admission:
                now[0] += 1
                await gate.wait()
                now[0] -= 1

        async def settle() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(hold()) for _ in range(12)]
        await settle()
        assert now == [2]
        admission.bound(5)
        await settle()
        assert now == [5]
        admission.bound(1)
        await settle()
        assert now == [5]  # none is taken back
        gate.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        assert admission.limit == 1
        async with admission:
            late = asyncio.create_task(hold())
            await settle()
            assert now == [0]
        await late

    asyncio.run(run())


def test_a_store_that_is_spared_stays_spared_under_another_bound() -> None:
    async def run() -> None:
        admission = Admission(16, 0.0)
        for _ in range(8):
            admission.was_refused()
        assert admission.limit == 4
        admission.bound(32)
        assert admission.limit == 4
        for _ in range(1000):
            admission.succeeded()
        assert admission.limit == 32
        admission.bound(8)
        assert admission.limit == 8

    asyncio.run(run())


def _hedged(
    requests: Callable[[Hedging], Awaitable[Any]], *, share: float = 0.5, num_before: int = 40
) -> tuple[Any, Hedging]:
    async def run() -> tuple[Any, Hedging]:
        hedging = Hedging(share, RequestCost(latency_s=0.001, place_bytes_per_s=1e9))

        async def quick() -> int:
            return 0

        for _ in range(num_before):
            await hedging.run(quick, 10)
        async with asyncio.timeout(60):
            return await requests(hedging), hedging

    return asyncio.run(run())


def _answers(*outcomes: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
    """A request whose first try does what the first outcome says, and so on."""
    left = list(outcomes)

    async def request() -> Any:
        outcome = left.pop(0)
        if outcome == "hang":
            await asyncio.Event().wait()
        if outcome == "late fault":
            await asyncio.sleep(0.2)
            raise PassingFaultError("late")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return request


def test_the_second_request_answers_for_one_that_hangs() -> None:
    value, hedging = _hedged(lambda hedging: hedging.run(_answers("hang", 7), 10))
    assert (value, hedging.num_hedges) == (7, 1)


def test_one_that_fails_leaves_the_answer_to_the_other() -> None:
    value, _ = _hedged(lambda hedging: hedging.run(_answers("late fault", 7), 10))
    assert value == 7
    with pytest.raises(PassingFaultError, match="late"):
        _hedged(lambda hedging: hedging.run(_answers("late fault", PassingFaultError("second")), 10))


def test_nothing_is_asked_twice_before_enough_is_known_or_without_a_share() -> None:
    for settings in ({"num_before": 3}, {"share": 0.0}):

        async def hang(hedging: Hedging) -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await hedging.run(_answers("hang", 7), 10)

        _, hedging = _hedged(hang, **settings)
        assert hedging.num_hedges == 0


def test_the_first_error_cancels_the_others_and_waits_for_them() -> None:
    ended = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail() -> None:
        raise StorageError("no")

    thread = EventLoopThread("test")
    with pytest.raises(StorageError, match="no"):
        thread.run(run_all([hang(), fail(), hang()]))
    assert ended == [True, True]


def test_a_loop_ends_with_its_last_reference() -> None:
    thread = EventLoopThread("shardflow-test-loop")

    async def nothing() -> int:
        return 3

    assert thread.run(nothing()) == 3
    (worker,) = [each for each in threading.enumerate() if each.name == "shardflow-test-loop"]
    del thread
    worker.join(timeout=300)
    assert not worker.is_alive()
