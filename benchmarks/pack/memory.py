"""Memory that writers take for each sample: an index of tars, `ShardWriter`, and the table of a new version.

    python -m benchmarks.pack.memory --output benchmarks/results/writers.json

Each writes small and many samples, in a process of its own; bytes a sample are the difference of their peaks
of private memory (RssAnon) by the difference of their samples, so what is the same for both does not count.
Indexes and shards of `index` and `writer` are real, with a text of 10 bytes a sample; the table of a version
is written from rows as a packing job leaves them, without shards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.about import about_run, write_result
from benchmarks.plan.scale import Peak

REPOSITORY: Final = Path(__file__).resolve().parents[2]
SAMPLES_PER_SHARD: Final = 10_000
SIZES: Final = {"index": (100_000, 500_000), "writer": (100_000, 500_000), "version": (10**6, 10**7)}


def index(folder: Path, num_samples: int) -> Callable[[], object]:
    """Index tars, as `shardflow index` does."""
    from shardflow.format.foreign.build import ForeignSource, index_tars
    from shardflow.format.tar import END_OF_ARCHIVE, encode_member

    sources = []
    for start in range(0, num_samples, SAMPLES_PER_SHARD):
        path = folder / f"{start}.tar"
        with path.open("wb") as file:
            for number in range(start, start + SAMPLES_PER_SHARD):
                file.write(encode_member(f"key{number:09d}.txt", b"0123456789"))
            file.write(END_OF_ARCHIVE)
        sources.append(ForeignSource(place=str(path)))
    return lambda: index_tars(sources, folder / "out")


def writer(folder: Path, num_samples: int) -> Callable[[], object]:
    """Write samples from Python."""
    from shardflow.format.writer import ShardWriter

    def run() -> None:
        with ShardWriter(folder / "out", max_samples=SAMPLES_PER_SHARD) as made:
            for number in range(num_samples):
                made.write({"__key__": f"key{number:09d}", "report.txt": "0123456789"})

    return run


def version(folder: Path, num_samples: int) -> Callable[[], object]:
    """Write the samples table of a version from the rows of its shards."""
    from shardflow.format.manifest import FileEntry, ShardEntry
    from shardflow.format.samples import FACT_COLUMNS
    from shardflow.packing.versions.base import RowSpool, ShardRows
    from shardflow.packing.versions.files import write_rows

    nothing = FileEntry(path="none", num_bytes=0, sha256="0" * 64)

    def run() -> None:
        spool, shards = RowSpool(folder / "rows"), []
        places = np.arange(SAMPLES_PER_SHARD)
        columns: dict[str, Any] = dict.fromkeys(FACT_COLUMNS, places)
        columns |= {"row_in_shard": places, "offset_bytes": 2048 * places, "num_bytes": places}
        for start in range(0, num_samples, SAMPLES_PER_SHARD):
            keys = [f"{number:026d}".encode() for number in range(start, start + SAMPLES_PER_SHARD)]
            rows = spool.add({**columns, "sample_key": keys}, ["CT"] * len(keys))
            entry = ShardEntry(
                name=f"train-{start:012d}",
                split="train",
                path="none",
                num_bytes=0,
                sha256="0" * 64,
                index=nothing,
                num_samples=len(keys),
                num_fields=0,
            )
            shards.append(ShardRows(entry, spool, rows))
        write_rows(folder, "samples.tbl", shards)

    return run


def measure(name: str, num_samples: int) -> dict[str, Any]:
    """Run a writer in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.pack.memory", "--run", name, str(num_samples)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    print(name, found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", nargs=2, metavar=("WRITER", "SAMPLES"), help="one, in this process")
    parser.add_argument("--only", nargs="+", default=list(SIZES))
    arguments = parser.parse_args()
    if arguments.run:
        name, num_samples = arguments.run[0], int(arguments.run[1])
        with tempfile.TemporaryDirectory() as folder:
            run = {"index": index, "writer": writer, "version": version}[name](Path(folder), num_samples)
            began = time.process_time()
            with Peak() as memory:
                run()
        found = {
            "samples": num_samples,
            "peak_mb": round((memory.peak - memory.before) / 2**20, 1),
            "processor_s": round(time.process_time() - began, 1),
        }
        sys.stdout.write(json.dumps(found) + "\n")
        return
    rows = {}
    for name in arguments.only:
        few, many = (measure(name, size) for size in SIZES[name])
        grown = (many["peak_mb"] - few["peak_mb"]) * 2**20 / (many["samples"] - few["samples"])
        rows[name] = {"few": few, "many": many, "bytes_per_sample": round(grown, 1)}
    write_result(
        {"about": about_run(["numpy"]), "command": "python -m benchmarks.pack.memory", "rows": rows},
        arguments.output,
    )


if __name__ == "__main__":
    main()
