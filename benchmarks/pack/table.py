"""What a run of the packing benchmark found, beside the goals: a few lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["table"]

KINDS = ("ct", "cxr")
_MB = 1e6
# Name, where the number stands below a kind, its goal and the kinds that have to reach it.
_ROWS: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        "times the usual script, per core: whole job",
        ("ratios_by_processor_time", "whole_times_the_script"),
        "times_the_script",
        ("ct",),
    ),
    (
        "  without what a job costs once",
        ("ratios_by_processor_time", "running_times_the_script"),
        "times_the_script",
        ("ct",),
    ),
    (
        "share of the bare loop: whole job",
        ("ratios_by_processor_time", "whole_share_of_the_limit"),
        "share_of_the_limit",
        KINDS,
    ),
    (
        "  without what a job costs once",
        ("ratios_by_processor_time", "running_share_of_the_limit"),
        "share_of_the_limit",
        KINDS,
    ),
    (
        "two processes times one, by the clock",
        ("ratios_by_wall_time", "two_processes_times_one"),
        "two_processes_times_one",
        KINDS,
    ),
    ("  two bare loops times one, likewise", ("ratios_by_wall_time", "two_loops_times_one"), "", ()),
    (
        "header pass, files/s and core",
        ("summary", "headers", "slices_per_s_and_core"),
        "header_files_per_s",
        KINDS,
    ),
    ("whole job, slices/s and core", ("summary", "job", "slices_per_s_and_core"), "", ()),
    ("whole job, MB of pixels/s and core", ("summary", "job", "pixel_mb_per_s_and_core"), "", ()),
    ("once per job, s of processor time", ("once_per_job_processor_s",), "", ()),
)


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines; a number that misses its goal is marked with ``<``.

    Args:
        results: What `benchmarks.pack.run` writes.
    """
    yield f"{'median of the rounds':<46}{'goal':>8}" + "".join(f"{kind.upper():>10}" for kind in KINDS)
    for name, path, goal_name, kinds in _ROWS:
        goal = results["goals"].get(goal_name)
        cells = [
            _cell(_find(results[kind], path)["median"], goal if kind in kinds else None) for kind in KINDS
        ]
        yield f"{name:<46}{'' if goal is None else _number(goal):>8}" + "".join(cells)
    yield ""
    yield f"{'peak memory, MB':<46}{'job':>8}{'process':>10}"
    for kind in KINDS:
        yield _memory(f"{kind.upper()}, one process", results[kind]["peak_memory_bytes"]["job"])
    for count, peaks in results["peak_memory"]["peak_memory_bytes_by_num_studies"].items():
        yield _memory(f"{int(count):,} studies of one small slice", peaks)
    loads = results["load_average_1min"]
    yield ""
    yield f"load of the machine meanwhile: {loads['least']:.1f} to {loads['most']:.1f}"


def _find(found: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        found = found[name]
    return found


def _cell(value: float, goal: float | None) -> str:
    mark = "<" if goal is not None and value < goal else " "
    return f"{mark + _number(value):>10}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _memory(name: str, peaks: Mapping[str, int]) -> str:
    return f"{name:<46}{peaks['job'] / _MB:>8.0f}{peaks['process'] / _MB:>10.0f}"
