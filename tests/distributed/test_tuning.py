"""What two ranks train does not depend on their settings, nor on when these change (contract S2)."""

from __future__ import annotations

import pytest

from shardflow.monitoring.history import read_history
from tests.distributed.conftest import Scenarios
from tests.distributed.runs import committed_samples, differing_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2400)]


def test_ledger_and_weights_are_the_same_with_a_tuner_without_and_at_random(scenarios: Scenarios) -> None:
    first, second = (result["moves"] for result in scenarios.of("tuning")[:2])
    # Both ranks did the same after the same steps, and it came about.
    assert first == second
    assert first["off"] == []
    assert len(first["random"]) >= 8
    assert {name for _, name, _, _ in first["random"]} >= {"loader.num_threads", "loader.execution"}
    for _, name, wanted, found in first["random"]:
        assert wanted == found, name

    off, on, random = (scenarios.output / f"tuned-{mode}" for mode in ("off", "on", "random"))
    whole = committed_samples(off)
    assert len(whole) == 7 * 3
    for run in (on, random):
        assert committed_samples(run) == whole
        assert differing_weights(run, off) == []
    assert read_history(on).moves
    assert not read_history(off).moves


def test_what_ranks_begin_with_stops_none_of_them_or_all(scenarios: Scenarios) -> None:
    first, second = (result["said"] for result in scenarios.of("tuned_starts")[:2])
    assert first == second
    outcome, refused, modes, intervals = first
    assert outcome == "finished"
    assert refused.startswith("ConfigError: tune.start_from: a file of tuned settings must be readable TOML")
    assert 'tune.mode "on" on rank 0 but "observe" on rank 1' in modes
    assert "monitor.interval_s 0.0 on rank 0 but 1.0 on rank 1" in intervals
