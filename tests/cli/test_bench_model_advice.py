"""``shardflow bench --with-model``: what it says of a job's two ceilings."""

from __future__ import annotations

from typing import Any

import pytest

from shardflow.cli.bench import advise_job

pytestmark = pytest.mark.fast


def _facts(
    *, loader: float, compute: float, together: float, wait_share: float = 0.0, **others: Any
) -> dict[str, Any]:
    rates = {"loader": loader, "compute": compute, "together": together}
    lower = "loader" if loader < compute else "compute"
    return {
        "device": "cuda",
        "execution": "threads",
        "threads": 4,
        "processors": 16,
        "load_before": 0.1,
        "results": {
            name: {"steps_per_s": rate, "samples_per_s": 8 * rate, "spread": 0.02}
            for name, rate in rates.items()
        },
        "stages": {"read": 1.0, "decode": 3.0},
        "lower_ceiling": lower,
        "share_of_lower": together / rates[lower],
        "data_wait_share": wait_share,
        "headspace": {
            "with_free_data": max(1.0, compute / together),
            "with_free_compute": max(1.0, loader / together),
        },
        **others,
    }


def test_data_limits_and_says_how_much_there_is_to_gain() -> None:
    first, stage, command = advise_job(_facts(loader=10, compute=40, together=9.6, wait_share=0.75))
    assert first.startswith("Data limits this job")
    assert "10 steps/s (80 samples/s)" in first
    assert "96% of the lower ceiling, and wait for data 75% of the time" in first
    assert "4.17 times as fast" in first
    assert "4 threads were at work in decode for 75% of their time" in stage
    assert command.endswith("shardflow bench DATASET --need 320")


def test_the_model_limits_and_the_loader_is_left_alone() -> None:
    (only,) = advise_job(_facts(loader=100, compute=20, together=19, wait_share=0.01))
    assert only.startswith("The model limits this job")
    assert "5 times as much" in only
    assert "at most 5% faster" in only


def test_a_ceiling_that_is_reached_leaves_nothing() -> None:
    (only,) = advise_job(_facts(loader=100, compute=20, together=20.4))
    assert "100% of the lower ceiling" in only
    assert "less than 1% faster" in only


def test_ceilings_that_are_nearly_equal_are_both_named() -> None:
    assert any("nearly equal" in line for line in advise_job(_facts(loader=20, compute=22, together=19)))
    assert not any("nearly equal" in line for line in advise_job(_facts(loader=20, compute=24, together=19)))


@pytest.mark.parametrize(
    ("others", "advice"),
    [
        ({"device": "cpu"}, "they share 16 processors"),
        ({}, "loader.execution=process"),
        ({"execution": "process"}, "Try fewer loader.num_threads"),
    ],
)
def test_a_loss_that_neither_ceiling_explains_is_one_of_sharing(others: dict[str, Any], advice: str) -> None:
    lines = advise_job(_facts(loader=40, compute=20, together=12, **others))
    assert any("60% of the lower ceiling" in line and advice in line for line in lines)
    assert not any("unevenly" in line for line in lines)


def test_waits_for_a_loader_that_is_fast_enough_are_uneven_data() -> None:
    lines = advise_job(_facts(loader=40, compute=20, together=12, wait_share=0.3))
    assert any("waits for data 30% of the time" in line and "prefetch_bytes" in line for line in lines)


def test_rounds_that_differ_widely_are_said_first() -> None:
    facts = _facts(loader=10, compute=40, together=9)
    facts["results"]["compute"]["spread"] = 0.5
    assert advise_job(facts)[0].startswith("The rounds differ widely")
    assert advise_job({**_facts(loader=10, compute=40, together=9), "load_before": 15.0})[0].startswith(
        "The machine was busy"
    )
