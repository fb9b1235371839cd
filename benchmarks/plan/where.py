"""Time and memory to choose among 100 million rows by an expression over three columns.

    python -m benchmarks.plan.where [--rows N] [--repeats N] --output benchmarks/results/where.json

Columns are generated and lie in mapped files, as attached tables store them: an age (float32), a class of 8
names (uint8) and a number with missing values (float32). Blocks are those of a loader; memory is what the
process holds beyond the mapped columns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.about import about_run, write_result
from shardflow.sampling.expressions import parse_expression
from shardflow.sampling.layout import select_rows

_BLOCK = 2**22
_NAMES = tuple("abcdefgh")
EXPRESSION = "t.age >= 40 and t.age < 80 and t.finding in ('b', 'c', 'f') and not (t.score > 0.9)"


@dataclass(frozen=True)
class _Column:
    values: NDArray[Any]
    is_missing: NDArray[np.bool_] | None = None
    names: tuple[str, ...] | None = None
    also: tuple[frozenset[str], ...] | None = None


def _generate(folder: Path, num_rows: int) -> dict[str, np.memmap]:
    made = {
        "age": np.memmap(folder / "age", "<f4", "w+", shape=num_rows),
        "finding": np.memmap(folder / "finding", "u1", "w+", shape=num_rows),
        "score": np.memmap(folder / "score", "<f4", "w+", shape=num_rows),
    }
    rng = np.random.default_rng(0)
    for start in range(0, num_rows, _BLOCK):
        stop = min(start + _BLOCK, num_rows)
        made["age"][start:stop] = rng.uniform(0, 100, stop - start)
        made["finding"][start:stop] = rng.integers(0, len(_NAMES), stop - start)
        score = rng.uniform(0, 1, stop - start)
        made["score"][start:stop] = np.where(score < 0.1, np.nan, score)
    return made


def measure(num_rows: int, repeats: int) -> dict[str, Any]:
    """Choose several times; the last time with memory traced."""
    with tempfile.TemporaryDirectory() as folder:
        stored = _generate(Path(folder), num_rows)
        expression = parse_expression(EXPRESSION, {f"t.{name}" for name in stored})

        def choose(start: int, stop: int) -> NDArray[np.bool_]:
            score = np.asarray(stored["score"][start:stop])
            columns = {
                "t.age": _Column(np.asarray(stored["age"][start:stop])),
                "t.finding": _Column(np.asarray(stored["finding"][start:stop]), None, _NAMES),
                "t.score": _Column(score, np.isnan(score)),
            }
            return expression.select(columns, stop - start).rows

        runs = []
        for _ in range(repeats):
            start, cpu = time.perf_counter(), time.process_time()
            rows = select_rows(range(num_rows), choose)
            runs.append((time.perf_counter() - start, time.process_time() - cpu))
        tracemalloc.start()
        select_rows(range(num_rows), choose)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    seconds, processor = zip(*runs, strict=True)
    return {
        "num_rows": num_rows,
        "num_chosen": len(rows),
        "seconds": [round(one, 3) for one in seconds],
        "median_s": round(statistics.median(seconds), 3),
        "median_processor_s": round(statistics.median(processor), 3),
        "peak_mib": round(peak / 2**20, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure, and write or print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = {
        "about": about_run(["numpy"]),
        "expression": EXPRESSION,
        "method": " ".join((__doc__ or "").split("\n\n")[-1].split()),
        **measure(arguments.rows, arguments.repeats),
    }
    write_result(found, arguments.output)


if __name__ == "__main__":
    main()
