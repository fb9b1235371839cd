"""One measurement, in a process of its own: ``python -m benchmarks.stream.one LOOP WORKLOAD FOLDER WORKERS``.

``LOOP`` may be ``prepare:PEER``, which writes the workload's records in the peer's format. Prints one JSON
object: samples a second without the first batch, seconds to the first batch (worker processes start there),
samples a second with it, and processor time of all threads and processes in microseconds a sample.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
import warnings
from pathlib import Path

from benchmarks.stream.contestants import loop, prepare

__all__ = ["measure"]


def measure(name: str, workload: str, folder: Path, num_workers: int) -> dict[str, float]:
    """Run one contestant over the records once."""
    batches = loop(name, workload, folder, num_workers)
    next(batches)  # imports and opening are behind us
    processor_s = _processor_s()
    start = time.perf_counter()
    first_s, num_first, number = 0.0, 0, 0
    for size in batches:
        number += size or 0
        if not first_s:
            first_s, num_first = time.perf_counter() - start, number
    end = time.perf_counter()
    del batches
    gc.collect()  # ends worker processes, whose time counts once they are gone
    return {
        "samples_per_s": (number - num_first) / (end - start - first_s),
        "first_batch_s": first_s,
        "whole_per_s": number / (end - start),
        "processor_us": (_processor_s() - processor_s) / number * 1e6,
        "num_samples": number,
    }


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    """Measure, or write records in a peer's format."""
    warnings.simplefilter("ignore")
    name, workload, folder, num_workers = sys.argv[1:]
    if name.startswith("prepare:"):
        prepare(name.partition(":")[2], workload, Path(folder))
        return
    print(json.dumps(measure(name, workload, Path(folder), int(num_workers))))


if __name__ == "__main__":
    main()
