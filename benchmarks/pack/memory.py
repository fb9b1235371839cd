"""Memory that writers take for each sample: of shards, indexes, tables, tokens, attached columns, copies.

    python -m benchmarks.pack.memory --output benchmarks/results/writers.json

Each writes small and many samples, in a process of its own; bytes a sample are the difference of their peaks
of private memory (RssAnon) by the difference of their samples, so what is the same for both does not count.
Shards and indexes are real, with a text of 10 bytes a sample; the table of a version is written from rows as
a packing job leaves them, without shards. `attach` joins two columns of a CSV, a number and a word, by the
sample key.
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
SIZES: Final = {
    **dict.fromkeys(("index", "writer", "tokenize", "attach", "copy"), (100_000, 500_000)),
    "version": (10**6, 10**7),
}


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


def tokenize(folder: Path, num_samples: int) -> Callable[[], object]:
    """Store the tokens of all texts, as `shardflow tokenize` does."""
    from shardflow.format import Dataset
    from shardflow.training.text import train_tokenizer
    from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset

    dataset = Dataset.open(_dataset(folder, num_samples))
    train_tokenizer(dataset, "train", 260, folder / "bpe")
    tokenizer = TextTokenizer(folder / "bpe")
    return lambda: tokenize_dataset(dataset, tokenizer)


def attach(folder: Path, num_samples: int) -> Callable[[], object]:
    """Attach two columns, as `shardflow attach` does."""
    from shardflow.format import Dataset
    from shardflow.packing.tables.joining import TableSettings, attach_table

    dataset = Dataset.open(_dataset(folder, num_samples))
    with (folder / "labels.csv").open("w", encoding="ascii") as file:
        file.write("sample_key,risk,label\n")
        for number, key in enumerate(dataset.samples.sample_keys()):
            file.write(f"{key},{number / num_samples:.3f},{'abc'[number % 3]}\n")
    settings = TableSettings(name="labels", on="sample_key")
    return lambda: attach_table(dataset, folder / "labels.csv", settings)


def copy(folder: Path, num_samples: int) -> Callable[[], object]:
    """Copy a dataset, as `shardflow copy` does."""
    from shardflow.format.copies.copying import copy_dataset
    from shardflow.storage import LocalStore

    source = LocalStore(_dataset(folder, num_samples))
    return lambda: copy_dataset(source, LocalStore(folder / "copy"))


def _dataset(folder: Path, num_samples: int) -> Path:
    """Write a dataset in a process of its own, so that what this one keeps free is not taken again."""
    command = [sys.executable, "-c", _MAKE, str(folder), str(num_samples)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return folder / "out"


_MAKE: Final = """
import sys
from pathlib import Path
from benchmarks.pack.memory import writer
writer(Path(sys.argv[1]), int(sys.argv[2]))()
"""
_RUNS: Final = {one.__name__: one for one in (index, writer, version, tokenize, attach, copy)}


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
            run = _RUNS[name](Path(folder), num_samples)
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
