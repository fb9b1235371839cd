"""Opening a dataset of 10^8 samples in 10^5 shards: time and private memory of a process, and of commands.

    python -m benchmarks.plan.opening --output benchmarks/results/opening.json

The manifest, the samples table and the indexes are real (keys of 9 characters, texts of 8 to 2,000 bytes, no
images); shards are sparse files, whose texts are zeros. Each measurement is a child process; seconds are of
the processor; memory is private (RssAnon), of openings above that of imports. The first opening on a node
collects the shards and, of version 2, proves the blocks of the samples table that it reads; of version 1,
which has no digests of blocks, it copies the table. Later ones map what is there. Requests to the viewer are
answered by one process, one after another; `verify` checks the newest version alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

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
from shardflow.format.table import StreamedColumn, crc32c, stream_table
from shardflow.format.tar import BLOCK_NUM_BYTES

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
    "page": ["report", "FOLDER", "--fast", "-o", "PAGE"],
    "verify": ["verify", "FOLDER", "--fast"],
}
_REQUESTS: Final = {
    "viewer, all samples": "/api/samples",
    "viewer, one sample": "/api/samples/{middle}",
    "viewer, keys that begin with a text": "/api/samples?text=15",
    "viewer, a condition": "/api/samples?where=facts.text_bytes+%3E+1990&start=400000",
    "viewer, a step": "/api/steps?split=train&seed=7&step=100&size=8&count=2048",
}
_STRIDE: Final = 4096
"""Bytes from one sample of a shard to the next."""
_LEAST_TEXT, _MOST_TEXT = 8, 2000


def make(folder: Path, num_samples: int, num_shards: int) -> None:
    """Write the dataset."""
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
        "offset_bytes": ("<u8", lambda rows: inside(rows) * _STRIDE),
        "num_bytes": ("<u8", lambda rows: BLOCK_NUM_BYTES + _padded(_text_bytes(rows))),
        **{name: ("<u4", lambda rows: np.zeros(len(rows))) for name in FACT_COLUMNS},
        "text_bytes": ("<u4", _text_bytes),
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
    checksums = np.array([crc32c(bytes(size)) for size in range(_MOST_TEXT + 1)], "<u4")
    for number, count in enumerate(np.diff(bounds).tolist()):
        name = f"train-{number:06d}"
        tar = FileEntry(path=f"shards/{name}.tar", num_bytes=_STRIDE * count, sha256=f"{number:064x}")
        with (folder / tar.path).open("wb") as handle:
            handle.truncate(tar.num_bytes)
        data = _index(name, np.arange(bounds[number], bounds[number + 1]), checksums)
        index = FileEntry(
            path=f"shards/{name}.idx", num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
        )
        (folder / index.path).write_bytes(data)
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


def _text_bytes(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sizes of texts, spread by Knuth's multiplicative hash."""
    spread = rows * 2_654_435_761 % (1 << 32)
    return _LEAST_TEXT + (spread * (_MOST_TEXT - _LEAST_TEXT + 1) >> 32)


def _padded(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-sizes // BLOCK_NUM_BYTES) * BLOCK_NUM_BYTES


def _index(name: str, rows: NDArray[np.int64], checksums: NDArray[np.uint32]) -> bytes:
    """Encode the index of a shard."""
    count, sizes = len(rows), _text_bytes(rows)
    columns: dict[str, NDArray[Any]] = {
        "sample_key": (rows + 10**8).astype("S9"),
        "sample_first_field": np.arange(count + 1, dtype="<u4"),
        "field_name": np.zeros(count, "<u4"),
        "field_offset": (np.arange(count) * _STRIDE + BLOCK_NUM_BYTES).astype("<u8"),
        "field_num_bytes": sizes.astype("<u8"),
        "field_crc32c": checksums[sizes],
    }
    return ShardIndex.encode_columns(name, _STRIDE * count, ["report.txt"], columns)


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


@contextmanager
def _newest_alone(folder: Path) -> Iterator[None]:
    """Hide the first version."""
    first = folder / manifest_path(1)
    hidden = first.with_suffix(".hidden")
    first.rename(hidden)
    try:
        yield
    finally:
        hidden.rename(first)


def _view(folder: Path, node: Path, middle: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Ask a viewer; yield name, processor seconds and private memory of its start and of each request."""
    command = [sys.executable, "-m", "shardflow.cli.main", "view", str(folder), "--port", "0", "--no-token"]
    environment = {**os.environ, "TMPDIR": str(node), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            url = viewer.stdout.readline().split()[0].rstrip("/")
            before = _processor_s(viewer.pid)
            yield "viewer, start", {"processor_s": before, "private_mb": private_bytes(viewer.pid) / 2**20}
            for name, path in _REQUESTS.items():
                peak, done = private_bytes(viewer.pid), threading.Event()

                def watch(done: threading.Event = done) -> None:
                    nonlocal peak
                    while not done.wait(0.02):
                        peak = max(peak, private_bytes(viewer.pid))

                watcher = threading.Thread(target=watch)
                watcher.start()
                try:
                    with urlopen(url + path.format(middle=middle)) as answer:
                        answer.read()
                finally:
                    done.set()
                    watcher.join()
                after = _processor_s(viewer.pid)
                yield name, {"processor_s": after - before, "private_mb": peak / 2**20}
                before = after
        finally:
            viewer.terminate()


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
            places = {"FOLDER": str(folder), "PAGE": str(Path(scratch) / "page.html")}
            words = [places.get(word, word) for word in command]
            with _newest_alone(folder) if name == "verify" else nullcontext():
                rows[name], _ = _run(["-m", "shardflow.cli.main", *words], node)
            sys.stderr.write(f"{name}: {rows[name]}\n")
        for name, found in _view(folder, node, settings.samples // 2):
            rows[name] = found
            sys.stderr.write(f"{name}: {found}\n")
    content = {
        "about": about_run(["numpy"]),
        "command": f"python -m benchmarks.plan.opening --output {settings.output}",
        "load_average": os.getloadavg(),
        "samples": settings.samples,
        "shards": settings.shards,
        "simulated": "manifest, samples table and indexes are whole; shards are sparse, their texts zeros",
        "rows": rows,
    }
    settings.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
