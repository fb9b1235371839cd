"""One measurement, in a process of its own: ``python -m benchmarks.stream.one LOOP WORKLOAD FOLDER WORKERS``.

``LOOP`` may be ``prepare:PEER``, which writes the workload's records in the peer's format. Reads all records
again and again, each time by a new loader, until ten seconds are over without the first batches; what goes
on at half an epoch once. Prints one JSON object: samples a second without the first batch, seconds to the
first batch of a loader (worker processes start there; the median), samples a second with it, and processor
time of all threads and processes in microseconds a sample.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path

from benchmarks.stream.contestants import loop, prepare

__all__ = ["measure"]

_SECONDS = 10.0
_MAX_S = 40.0
"""Of few records, whose loaders begin and end all the time."""


def measure(name: str, workload: str, folder: Path, num_workers: int) -> dict[str, float]:
    """Run one contestant over the records until the time is over."""
    firsts: list[float] = []
    steady_s = processor_s = 0.0
    num_steady = num_samples = 0
    began = time.perf_counter()
    while not firsts or (
        steady_s < _SECONDS and time.perf_counter() - began < _MAX_S and not name.endswith("_resumed")
    ):
        batches = loop(name, workload, folder, num_workers)
        next(batches)  # imports and opening are behind us
        start_processor_s, start = _processor_s(), time.perf_counter()
        first_s, num_first, number = 0.0, 0, 0
        for size in batches:
            number += size or 0
            if not first_s:
                first_s, num_first = time.perf_counter() - start, number
        steady_s += time.perf_counter() - start - first_s
        del batches
        gc.collect()  # ends worker processes, whose time counts once they are gone
        processor_s += _processor_s() - start_processor_s
        firsts.append(first_s)
        num_steady, num_samples = num_steady + number - num_first, num_samples + number
    return {
        "samples_per_s": num_steady / steady_s,
        "first_batch_s": statistics.median(firsts),
        "whole_per_s": num_samples / (steady_s + sum(firsts)),
        "processor_us": processor_s / num_samples * 1e6,
        "num_samples": num_samples,
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
