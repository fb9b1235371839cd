"""The decoder in bare threads: payloads in memory, one reused buffer a thread, nothing else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stream.records import (
    NUM_SLICES,
    SIZE,
    Loop,
    decode_gray,
    decode_picture,
    decode_study,
    records,
    slice_decoder,
)


def loop(workload: str, folder: Path, num_workers: int) -> Loop:
    """Decode every record."""
    decode_slice = slice_decoder()
    shape, dtype = ((NUM_SLICES, SIZE, SIZE), np.int16) if workload == "ct" else ((1024, 1024, 3), np.uint8)

    def work(fields: dict[str, bytes], out: Any) -> None:
        if workload == "ct":
            decode_study(fields, out, decode_slice)
        elif workload == "gray":
            decode_gray(fields["image.jpg"])
        else:
            decode_picture(fields["image.jpg"], out)

    held = list(records(workload, folder))
    yield None
    numbers = iter(range(len(held)))
    is_done = threading.Semaphore(0)

    def run() -> None:
        out = np.zeros(shape, dtype)
        for number in numbers:  # next() on an iterator of a range is atomic
            work(held[number], out)
            is_done.release()

    threads = [threading.Thread(target=run) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    for _ in held:
        is_done.acquire()
        yield 1
    for thread in threads:
        thread.join()
