"""The packing benchmark: every contestant still runs, and its table names what misses a goal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.pack.content import make_small_content
from benchmarks.pack.contestants import JOBS, LOOPS
from benchmarks.pack.run import GOALS, measure
from benchmarks.pack.table import table
from tests.sweeps import sampled

NUM_STUDIES = 3


@pytest.mark.parametrize("name", sampled([*JOBS, *LOOPS], {next(iter(JOBS)), next(iter(LOOPS))}))
def test_every_contestant_runs(tmp_path: Path, name: str) -> None:
    make_small_content(tmp_path / "ct", NUM_STUDIES)
    found = measure(name, tmp_path / "ct", tmp_path)
    assert found["num_slices"] == NUM_STUDIES
    assert found["processor_s"] > 0
    assert (found["output_bytes"] > 0) == (name != "headers")


def _kind(value: float) -> dict[str, Any]:
    """Results of one kind of study, every number the same."""
    median = {"median": value}
    ratios = dict.fromkeys(
        (
            "whole_times_the_script",
            "running_times_the_script",
            "whole_share_of_the_limit",
            "running_share_of_the_limit",
            "two_processes_times_one",
            "two_loops_times_one",
        ),
        median,
    )
    rates = {"slices_per_s_and_core": median, "pixel_mb_per_s_and_core": median}
    return {
        "summary": {"headers": rates, "job": rates},
        "ratios_by_processor_time": ratios,
        "ratios_by_wall_time": ratios,
        "once_per_job_processor_s": median,
        "peak_memory_bytes": {"job": {"job": 90_000_000, "process": 80_000_000}},
    }


def test_the_table_marks_what_misses_a_goal() -> None:
    peaks = {"500": {"job": 1_000_000, "process": 2_000_000}}
    results = {
        "goals": GOALS,
        "ct": _kind(3.0),
        "cxr": _kind(0.5),
        "peak_memory": {"peak_memory_bytes_by_num_studies": peaks},
        "load_average_1min": {"least": 0.0, "most": 1.5},
    }
    lines = list(table(results))
    script = next(line for line in lines if line.startswith("times the usual script"))
    assert script.split()[-3:] == ["3.50", "<3.00", "0.50"]
    limit = next(line for line in lines if line.startswith("share of the bare loop"))
    assert limit.split()[-3:] == ["0.80", "3.00", "<0.50"]
    assert "500 studies of one small slice                       1         2" in lines
