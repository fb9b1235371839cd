"""How long a change of a loader's settings takes to act, and what it costs the loop.

    python -m benchmarks.stream.tunables --output benchmarks/results/knobs.json

A generated dataset of slices, iterated as fast as it goes. For each change: how long the call takes, how
long until it has acted (threads counted, bytes buffered, bytes in the folder), and the longest wait of the
loop for a batch around it, beside the longest without any. Medians, and all numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.about import about_run
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.text import Text
from shardflow.format import Dataset
from shardflow.loading import Loader, LoaderConfig
from shardflow.sampling import BatchSpec
from shardflow.storage import CacheConfig
from tests.factories import make_dataset

SPEC = BatchSpec(micro_batch_size=8, micro_batches_per_step=1)
FIELDS = {"image": Slices(num_slices=4, size=(256, 256)), "report": Text(missing="pad")}
MIB = 1 << 20
BATCHES_AROUND = 12
DEADLINE_S = 120.0


def _threads() -> int:
    return sum(thread.name.startswith("shardflow-loading") for thread in threading.enumerate())


def _wait_for(has_acted: Callable[[], bool], start: float, into: list[float]) -> threading.Thread:
    """Note in another thread when a change has acted, while the loop goes on."""

    def look() -> None:
        while time.perf_counter() - start < DEADLINE_S:
            if has_acted():
                into.append(time.perf_counter() - start)
                return
            time.sleep(0.0005)

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def one(dataset: Dataset, change: str) -> dict[str, float]:
    """Iterate, change once in the middle, and return seconds."""
    before: dict[str, int | str] = {"loader.num_threads": 1}
    if change == "threads 2 to 1":
        before = {"loader.num_threads": 2}
    if change == "process to threads":
        before["loader.execution"] = "process"
    settings = {name.partition(".")[2]: value for name, value in before.items()}
    config = LoaderConfig(**{"prefetch_bytes": 16 * MIB, **settings})  # type: ignore[arg-type]
    with Loader(dataset, split="train", batch=SPEC, seed=1, fields=FIELDS, config=config) as loader:
        iterator = iter(loader)
        for _ in range(BATCHES_AROUND):
            next(iterator)
        undisturbed = max(_timed(iterator) for _ in range(BATCHES_AROUND))
        disk = None if dataset.cache is None else dataset.cache.disk
        tunables, acted, start = loader.tunables, list[float](), time.perf_counter()
        has_acted: Callable[[], bool]
        if change == "threads 1 to 2":
            tunables.set("loader.num_threads", 2)
            has_acted = lambda: _threads() == 2  # noqa: E731
        elif change == "threads 2 to 1":
            tunables.set("loader.num_threads", 1)
            has_acted = lambda: _threads() == 1  # noqa: E731
        elif change == "prefetch bytes to an eighth":
            (stream,) = loader._runtime.streams
            tunables.set("loader.prefetch_bytes", 2 * MIB)
            has_acted = lambda: stream._engine.buffered_bytes <= 2 * MIB  # noqa: E731
        elif change == "cache folder to a quarter" and disk is not None:
            low = disk.num_bytes // 4
            tunables.set("cache.max_bytes", low)
            has_acted = lambda: disk.num_bytes <= low  # noqa: E731
        else:
            tunables.set("loader.execution", change.rpartition(" ")[2])
            loader.apply_pending()
            has_acted = lambda: True  # noqa: E731
        call_s = time.perf_counter() - start
        looking = _wait_for(has_acted, start, acted)
        disturbed = max(_timed(iterator) for _ in range(BATCHES_AROUND))
        looking.join()
    return {
        "call_s": call_s,
        "acted_s": acted[0] if acted else DEADLINE_S,
        "longest_wait_s": disturbed,
        "longest_wait_before_s": undisturbed,
    }


def _timed(iterator: object) -> float:
    start = time.perf_counter()
    next(iterator)  # type: ignore[call-overload]
    return time.perf_counter() - start


CHANGES = (
    "threads 1 to 2",
    "threads 2 to 1",
    "prefetch bytes to an eighth",
    "cache folder to a quarter",
    "threads to process",
    "process to threads",
)


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shardflow-knobs-"))
    rows: dict[str, dict[str, list[float]]] = {change: {} for change in CHANGES}
    try:
        url = make_dataset(
            folder / "data",
            num_samples=options.samples,
            samples_per_shard=100,
            slices=(4, 5),
            size=(256, 256),
            facts=True,
        )
        for repeat in range(options.repeats):
            for change in CHANGES:
                cache = None
                if "cache" in change:
                    cache = CacheConfig(
                        directory=folder / f"cache-{repeat}", max_bytes=1 << 32, min_free_bytes=0
                    )
                for name, seconds in one(Dataset.open(url, cache=cache), change).items():
                    rows[change].setdefault(name, []).append(round(seconds, 5))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = {
        "what": (__doc__ or "").strip().splitlines()[0],
        "command": f"python -m benchmarks.stream.knobs --samples {options.samples} "
        f"--repeats {options.repeats}",
        **about_run(["numpy"]),
        "median": {
            change: {name: statistics.median(seconds) for name, seconds in row.items()}
            for change, row in rows.items()
        },
        "raw": rows,
    }
    text = json.dumps(results, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
