"""Opening a dataset of 10^8 samples in 10^5 shards: time and private memory of a process, and of commands.

    python -m benchmarks.plan.opening --output benchmarks/results/opening.json

The manifest and the samples table are real (keys of 9 characters, texts of drawn sizes, no images); shards
are sparse files without content, and so are their indexes but those that `info` reads. Each measurement is a
child process; seconds are of the processor; memory is private (RssAnon), of openings above that of imports.
The first opening on a node collects the shards and, of version 2, proves the blocks of the samples table that
it reads; of version 1, which has no digests of blocks, it copies the table. Later ones map what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.about import about_run
from benchmarks.plan.scale import private_bytes
from shardflow.format.index import ShardIndex
from shardflow.format.keys import Json
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry, manifest_path
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import FACT_COLUMNS, KIND
from shardflow.format.shard_files import SamplesFiles
from shardflow.format.table import StreamedColumn, stream_table

_BLOCK: Final = 1 << 20
_CHILD: Final = """
import json, resource, sys, time
from pathlib import Path
from benchmarks.plan.scale import Peak, private_bytes
import shardflow as sf
from shardflow.format import Dataset
from shardflow.loading import LoaderConfig
what, folder, version = sys.argv[1:]
start = time.process_time()
with Peak() as memory:
    dataset = Dataset.open(folder, version=int(version))
    if what == "loader":
        loader = sf.Loader(dataset, split="train", seed=7, fields={"report": sf.Text()},
            batch=sf.BatchSpec(micro_batch_size=8, micro_batches_per_step=2048),
            world=sf.World(rank=5, world_size=1024), config=LoaderConfig(num_threads=1))
        len(loader)
    used = time.process_time() - start
    kept = private_bytes() - memory.before
peak = memory.peak - memory.before
sys.stdout.write(json.dumps({"processor_s": used, "peak_mb": peak / 2**20, "kept_mb": kept / 2**20}) + "\\n")
"""
_OPENINGS: Final = (
    ("first opening", "open", 2),
    ("opening", "open", 2),
    ("first loader of a rank", "loader", 2),
    ("loader of a rank", "loader", 2),
    ("first opening without digests of blocks", "open", 1),
    ("opening without digests of blocks", "open", 1),
)
_PLAN: Final = [
    *("plan", "FOLDER", "--split", "train", "--seed", "7", "--epoch", "0", "--world-size", "1024"),
    *("--micro-batch-size", "8", "--micro-batches-per-step", "2048", "--summary"),
]
_COMMANDS: Final = {
    "first info": ["info", "FOLDER"],
    "info": ["info", "FOLDER"],
    "first plan": _PLAN,
    "plan": _PLAN,
}
_NUM_INDEXES: Final = 64
"""Indexes that `info` reads."""


def make(folder: Path, num_samples: int, num_shards: int) -> None:
    """Write the dataset."""
    rng = np.random.default_rng(0)
    bounds = np.linspace(0, num_samples, num_shards + 1).astype(np.int64)

    def pieces(value: Callable[[NDArray[np.int64]], NDArray[Any]]) -> Iterator[NDArray[Any]]:
        for start in range(0, num_samples, _BLOCK):
            yield value(np.arange(start, min(start + _BLOCK, num_samples)))

    def shard_of(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(bounds, rows, side="right") - 1

    def inside(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return rows - bounds[shard_of(rows)]

    values: dict[str, tuple[str, Callable[[NDArray[np.int64]], NDArray[Any]]]] = {
        "sample_key": ("S9", lambda rows: (rows + 10**8).astype("S9")),
        "shard": ("<u4", shard_of),
        "row_in_shard": ("<u4", inside),
        "offset_bytes": ("<u8", lambda rows: inside(rows) * 4096),
        "num_bytes": ("<u8", lambda rows: np.full(len(rows), 4096)),
        **{name: ("<u4", lambda rows: np.zeros(len(rows))) for name in FACT_COLUMNS},
        "text_bytes": ("<u4", lambda rows: rng.integers(8, 2000, len(rows))),
        "modality": ("|u1", lambda rows: np.zeros(len(rows))),
    }
    columns = [
        StreamedColumn(name=name, dtype=np.dtype(dtype), shape=(num_samples,), pieces=pieces(value))
        for name, (dtype, value) in values.items()
    ]
    meta: dict[str, Json] = {
        "kind": KIND,
        "format_version": 1,
        "splits": {"train": [0, num_samples]},
        "modalities": [""],
    }
    samples = SamplesFiles.write(folder, "samples/samples-000001.tbl", stream_table(columns, meta))
    shards = []
    (folder / "shards").mkdir()
    read = {place * num_shards // _NUM_INDEXES for place in range(_NUM_INDEXES)}
    for number, count in enumerate(np.diff(bounds).tolist()):
        name = f"train-{number:06d}"
        sizes = {f"shards/{name}.tar": 4096 * count, f"shards/{name}.idx": 60 * count}
        for file, size in sizes.items():
            with (folder / file).open("wb") as handle:
                handle.truncate(size)
        tar, index = (
            FileEntry(path=file, num_bytes=size, sha256=hashlib.sha256(file.encode()).hexdigest())
            for file, size in sizes.items()
        )
        if number in read:
            data = _index(name, int(bounds[number]), count)
            (folder / index.path).write_bytes(data)
            index = FileEntry(path=index.path, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        shards.append(
            ShardEntry(
                name=name,
                split="train",
                path=tar.path,
                num_bytes=tar.num_bytes,
                sha256=tar.sha256,
                index=index,
                num_samples=count,
                num_fields=count,
            )
        )
    counts = OutcomeCounts(packed=num_samples, skipped=0, quarantined=0)
    old = Manifest(manifest_version=1, shards=tuple(shards), samples=samples.table, counts=counts)
    new = replace(old, manifest_version=2, parent=old.dataset_id, extra=samples.extra)
    for manifest in (old, new):
        (folder / manifest_path(manifest.manifest_version)).write_bytes(manifest.encode())


def _index(name: str, first_row: int, count: int) -> bytes:
    """Encode the index of a shard of texts of 3,000 bytes."""
    rows = np.arange(count)
    columns: dict[str, NDArray[Any]] = {
        "sample_key": (first_row + rows + 10**8).astype("S9"),
        "sample_first_field": np.arange(count + 1, dtype="<u4"),
        "field_name": np.zeros(count, "<u4"),
        "field_offset": (rows * 4096 + 512).astype("<u8"),
        "field_num_bytes": np.full(count, 3000, "<u8"),
        "field_crc32c": np.zeros(count, "<u4"),
    }
    return ShardIndex.encode_columns(name, 4096 * count, ["report.txt"], columns)


def _run(command: list[str], node: Path) -> tuple[dict[str, float], str]:
    """Run a command; return its processor time and the most private memory it had, and its output."""
    before, peak = os.times(), 0
    with tempfile.TemporaryFile("w+") as output:
        environment = {**os.environ, "TMPDIR": str(node)}
        process = subprocess.Popen([sys.executable, *command], env=environment, stdout=output)
        while process.poll() is None:
            with suppress(OSError, StopIteration):
                peak = max(peak, private_bytes(process.pid))
            time.sleep(0.02)
        output.seek(0)
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        found = {"processor_s": used, "private_mb": peak / 2**20, "code": process.returncode}
        return found, output.read()


def main() -> int:
    """Make the dataset, open it, run commands, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--samples", type=int, default=10**8)
    parser.add_argument("--shards", type=int, default=10**5)
    parser.add_argument(
        "--folder", type=Path, help="dataset that an earlier run made there, or where to make it"
    )
    parser.add_argument("--output", type=Path, required=True)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = settings.folder or Path(scratch) / "data"
        if not folder.exists():
            make(folder, settings.samples, settings.shards)
        node = Path(scratch) / "node"
        node.mkdir()
        rows: dict[str, Any] = {}
        for name, what, version in _OPENINGS:
            found, output = _run(["-c", _CHILD, what, str(folder), str(version)], node)
            rows[name] = found | json.loads(output.splitlines()[-1] if output else "{}")
            sys.stderr.write(f"{name}: {rows[name]}\n")
        for name, command in _COMMANDS.items():
            words = [str(folder) if word == "FOLDER" else word for word in command]
            rows[name], _ = _run(["-m", "shardflow.cli.main", *words], node)
            sys.stderr.write(f"{name}: {rows[name]}\n")
    content = {
        "about": about_run(["numpy"]),
        "command": f"python -m benchmarks.plan.opening --output {settings.output}",
        "load_average": os.getloadavg(),
        "samples": settings.samples,
        "shards": settings.shards,
        "simulated": "manifest, samples table and 64 indexes are whole; shards and other indexes are sparse",
        "rows": rows,
    }
    settings.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
