from __future__ import annotations

import json
import threading

import pytest

from shardflow.telemetry import StageCounters, StageTotals

pytestmark = pytest.mark.fast


def test_totals_of_many_threads_add_up() -> None:
    counters = StageCounters()

    def work() -> None:
        for _ in range(1000):
            counters.add("read", 0.001, num_bytes=3, num_items=1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = counters.totals("read")
    assert (totals.num_bytes, totals.num_items) == (12000, 4000)
    assert totals.seconds == pytest.approx(4.0)


def test_a_stage_that_never_ran_is_zero() -> None:
    assert StageCounters().totals("decode") == StageTotals()


def test_a_timed_block_counts_also_when_it_raises() -> None:
    counters = StageCounters()
    with pytest.raises(RuntimeError), counters.timed("decode", num_bytes=7):
        raise RuntimeError
    assert counters.totals("decode").num_bytes == 7
    assert counters.totals("decode").num_items == 1
    assert counters.totals("decode").seconds > 0


def test_a_gauge_keeps_last_least_most_and_mean() -> None:
    counters = StageCounters()
    for value in (3, 1, 5, 3):
        counters.observe("ready", value)
    assert counters.snapshot()["ready"] == {"last": 3, "least": 1, "most": 5, "mean": 3}


def test_a_snapshot_is_json_and_does_not_move() -> None:
    counters = StageCounters()
    counters.add("read", 0.5, num_bytes=1, num_items=1)
    before = counters.snapshot()
    counters.add("read", 0.5, num_bytes=1, num_items=1)
    assert json.loads(json.dumps(before)) == {"read": {"seconds": 0.5, "num_bytes": 1, "num_items": 1}}
