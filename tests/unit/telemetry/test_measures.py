"""Rows of ranks become an interval; a loop of somebody else's gets intervals of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardflow.errors import ConfigError
from shardflow.telemetry import (
    GaugeNumbers,
    Interval,
    IntervalRecorder,
    RankMeasures,
    StageCounters,
    StageNumbers,
    interval_of,
)

pytestmark = pytest.mark.fast


@pytest.fixture
def measures() -> Iterator[tuple[StageCounters, RankMeasures]]:
    counters = StageCounters()
    memory = {"pinned_bytes": 5, "cache_ram_bytes": 7}
    rows = RankMeasures(counters, memory=lambda: memory, num_masked=lambda: counters.totals("m").num_items)
    yield counters, rows
    rows.close()


def test_rows_of_two_ranks_make_an_interval(measures: tuple[StageCounters, RankMeasures]) -> None:
    counters, rows = measures
    counters.add("decode", 2.0, num_bytes=10, num_items=4)
    counters.add("forward", 1.0, num_items=1)
    counters.add("exchange", 0.5, num_items=1)
    counters.add("cache_fault", num_items=3)
    counters.add("m", num_items=2)
    counters.observe("threads_busy", 2.0, weight=3.0)
    first = rows.take()
    counters.add("decode", 1.0, num_bytes=5, num_items=1)
    counters.add("forward", 3.0, num_items=1)
    counters.observe("threads_busy", 0.0, weight=1.0)
    second = rows.take()
    assert len(first) == len(second)
    interval = interval_of(
        [first, second], hosts=["a", "a"], global_step=9, num_steps=10, settings={"loader.num_threads": 2}
    )
    assert interval.stage("decode") == StageNumbers(
        seconds=3.0, num_bytes=15, num_items=5, most_seconds=2.0, most_rank=0, least_seconds=1.0
    )
    assert interval.stage("exchange").least_seconds == 0.0
    assert "backward" not in interval.stages
    assert interval.gauges == {"threads_busy": GaugeNumbers(mean=1.5, least=0.0, most=2.0)}
    assert [(one.rank, one.host, one.compute_s) for one in interval.ranks] == [(0, "a", 1.0), (1, "a", 3.0)]
    assert [(one.exchange_s, one.pinned_bytes) for one in interval.ranks] == [(0.5, 5), (0.0, 5)]
    assert (interval.world_size, interval.ranks_per_node) == (2, 2)
    assert (interval.num_masked, interval.events, interval.cache_free_bytes) == (2, {"cache_fault": 3}, -1)
    assert interval.available_bytes > 0
    assert Interval.from_json(interval.to_json()) == interval


def test_of_many_ranks_the_busiest_stay_in_their_order(measures: tuple[StageCounters, RankMeasures]) -> None:
    counters, rows = measures
    by_rank = []
    for rank in range(70):
        counters.add("forward", 100.0 - rank, num_items=1)
        by_rank.append(rows.take())
    interval = interval_of(by_rank, hosts=["a"] * 35 + ["b"] * 35, global_step=0, num_steps=1)
    assert [one.rank for one in interval.ranks] == list(range(64))
    assert (interval.world_size, interval.ranks_per_node) == (70, 35)
    assert interval.stage("forward").least_seconds == 31.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Kept:
    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def measured(self, interval: Interval) -> None:
        self.intervals.append(interval)


def test_a_loop_of_somebody_elses_gets_intervals() -> None:
    counters, clock, kept = StageCounters(), Clock(), Kept()
    settings = {"loader.num_threads": 3}
    with IntervalRecorder(
        counters, listeners=[kept], interval_s=2.0, settings=lambda: settings, clock=clock
    ) as recorder:
        counters.add("wait", 5.0, num_items=1)
        found = []
        for _ in range(8):
            clock.now_s += 0.7
            counters.add("wait", 0.1, num_items=1)
            with recorder.stage("forward"):
                pass
            found.append(recorder.step(num_samples=4, num_tokens=40))
    # The first step alone, then every third one: 2.1 s.
    assert [one is not None for one in found] == [True, False, False, True, False, False, True, False]
    first, second, third = kept.intervals
    assert [first.is_warm_up, second.is_warm_up] == [True, False]
    assert (first.global_step, second.global_step, third.global_step) == (0, 3, 6)
    assert (second.num_steps, second.num_samples, second.num_tokens) == (3, 12.0, 120.0)
    assert second.wall_s == pytest.approx(2.1)
    assert second.stage("data_wait").seconds == pytest.approx(0.3)
    assert second.ranks[0].data_wait_s == pytest.approx(0.3)
    assert second.stage("forward").num_items == 3
    assert second.settings == settings


def test_a_stage_that_is_none_and_an_interval_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="interval_s must be above 0"):
        IntervalRecorder(StageCounters(), interval_s=0)
    with IntervalRecorder(StageCounters()) as recorder, pytest.raises(ConfigError, match="must be one of"):
        recorder.stage("foward")
