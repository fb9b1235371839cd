from __future__ import annotations

import json
import threading

import pytest

from shardflow.telemetry import GaugeTotals, StageCounters, StageTotals

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


def test_a_window_sees_what_came_since_its_last_look_and_no_more() -> None:
    counters = StageCounters()
    counters.add("read", 1.0, num_bytes=10, num_items=1)
    counters.observe("ready", 9.0)
    window, other = counters.window(), counters.window()
    counters.add("read", 0.5, num_bytes=5, num_items=2)
    for value in (3.0, 1.0):
        counters.observe("ready", value)
    stages, gauges = window.take()
    assert stages == {"read": StageTotals(seconds=0.5, num_bytes=5, num_items=2)}
    assert gauges == {"ready": GaugeTotals(last=1.0, least=1.0, most=3.0, weighted=4.0, weight=2.0)}
    assert window.take() == ({}, {})
    assert other.take() == (stages, gauges)


def test_a_gauge_that_stood_for_different_times_has_a_mean_over_time() -> None:
    counters = StageCounters()
    window = counters.window()
    counters.observe("busy", 2.0, weight=3.0)
    counters.observe("busy", 0.0, weight=1.0)
    assert counters.snapshot()["busy"]["mean"] == pytest.approx(1.5)
    # What another process saw at the same time counts beside it.
    counters.merge("busy", GaugeTotals(last=4.0, least=4.0, most=4.0, weighted=16.0, weight=4.0))
    seen = window.take()[1]["busy"]
    assert (seen.weighted, seen.weight, seen.most) == (22.0, 8.0, 4.0)
