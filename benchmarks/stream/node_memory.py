"""A data set of 90 GB and four ranks on one node: what of it is private, and what all ranks share.

    python -m benchmarks.stream.node_memory --output benchmarks/results/node_memory.json

Writes one shard of texts of half a megabyte and names it again and again (hard links), each name with an
index of its own, until the data set has ``--gigabytes``. Each rank opens the whole data set, plans an epoch
of it, and takes ``--batches`` micro-batches of 16; then its private memory is read (``Private_Clean`` and
``Private_Dirty``), and its part of what it shares (PSS less private). Contract S7: one mapped table and one
page cache for the node, less than 1 GB of its own a rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.about import about_run
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import REPORT_FIELD, sha256_hex, shard_name
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry, commit
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import SampleEntry, SampleFacts, SamplesTable
from shardflow.format.table import crc32c
from shardflow.format.tar import END_OF_ARCHIVE, encode_member
from shardflow.storage import LocalStore

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLES_PER_SHARD = 1000
NUM_BYTES = 500_000
_PRIVATE = ("Private_Clean", "Private_Dirty")


def make_sparse(folder: Path, num_bytes: int) -> int:
    """Write a data set of about ``num_bytes``, of shards that share their bytes; return its size."""
    store = LocalStore(folder)
    rng = np.random.default_rng(0)
    payload = rng.integers(97, 123, NUM_BYTES, dtype=np.uint8).tobytes()
    checksum = crc32c(payload)
    whole, shards, entries = 0, [], []
    (folder / "shards").mkdir(parents=True)
    while whole < num_bytes:
        number = len(shards)
        name, located, offset = shard_name("train", number), [], 0
        for place in range(SAMPLES_PER_SHARD):
            key = f"text{number:04d}{place:06d}"
            located.append((key, [FieldLocation(REPORT_FIELD, offset + 512, NUM_BYTES, checksum)]))
            size = 512 + -(-NUM_BYTES // 512) * 512
            facts = SampleFacts(
                text_bytes=NUM_BYTES, num_series=0, num_slices=0, rows=0, columns=0, modality=""
            )
            entries.append(
                SampleEntry(
                    sample_key=key,
                    shard=number,
                    row_in_shard=place,
                    offset_bytes=offset,
                    num_bytes=size,
                    facts=facts,
                )
            )
            offset += size
        path = folder / "shards" / f"{name}.tar"
        if not number:
            members = [encode_member(f"{key}.{REPORT_FIELD}", payload) for key, _ in located]
            tar_num_bytes = path.write_bytes(b"".join([*members, END_OF_ARCHIVE]))
        else:
            # The same bytes under another name: what a rank reads of it is in the one page cache.
            path.hardlink_to(folder / "shards" / f"{shard_name('train', 0)}.tar")
        data = ShardIndex.encode(name, tar_num_bytes, located)
        store.put_new(f"shards/{name}.idx", data)
        index = FileEntry(path=f"shards/{name}.idx", num_bytes=len(data), sha256=sha256_hex(data))
        shards.append(
            ShardEntry(
                name=name,
                split="train",
                path=f"shards/{name}.tar",
                num_bytes=tar_num_bytes,
                sha256="0" * 64,
                index=index,
                num_samples=SAMPLES_PER_SHARD,
                num_fields=SAMPLES_PER_SHARD,
            )
        )
        whole += tar_num_bytes
    table = SamplesTable.encode(entries, shard_splits=["train"] * len(shards))
    store.put_new("samples/samples-000001.tbl", table)
    samples = FileEntry(path="samples/samples-000001.tbl", num_bytes=len(table), sha256=sha256_hex(table))
    counts = OutcomeCounts(packed=len(entries), skipped=0, quarantined=0)
    commit(store, Manifest(manifest_version=1, shards=tuple(shards), samples=samples, counts=counts))
    return whole


def run_rank(folder: Path, rank: int, world_size: int, num_batches: int) -> None:
    """Iterate, tell that it is done, and keep everything until told to end."""
    from shardflow.fields.types.text import Text
    from shardflow.format import Dataset
    from shardflow.loading import Loader, World
    from shardflow.sampling import BatchSpec

    spec = BatchSpec(micro_batch_size=16, micro_batches_per_step=world_size, lanes=4)
    world = World(rank=rank, world_size=world_size, ranks_per_node=world_size)
    fields = {"report": Text()}
    with Loader(
        Dataset.open(folder), split="train", batch=spec, seed=1, fields=fields, world=world
    ) as loader:
        iterator = iter(loader)
        for _ in range(num_batches):
            batch = next(iterator)
            if loader.quarantined or not batch.info.weight.all():
                raise RuntimeError("a sample was masked")
        print("ready", flush=True)
        sys.stdin.readline()


def measure(folder: Path, num_ranks: int, num_batches: int) -> list[dict[str, float]]:
    """Run the ranks beside each other; memory of each in MB."""
    command = [sys.executable, "-m", "benchmarks.stream.node_memory", "--folder", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--ranks", str(num_ranks), "--batches", str(num_batches)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            if rank.stdout is None or rank.stdout.readline().strip() != "ready":
                raise RuntimeError("a rank ended early")
        return [_memory_mb(rank.pid) for rank in ranks]
    finally:
        for rank in ranks:
            rank.communicate("end\n")


def _memory_mb(pid: int) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 / 1e6 for line in lines}
    private = sum(values[name] for name in _PRIVATE)
    return {"private_mb": round(private, 1), "shared_part_mb": round(values["Pss"] - private, 1)}


def main() -> int:
    """Measure, or be one rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=90.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.folder, options.rank, options.ranks, options.batches)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="shardflow-node-"))
    start = time.monotonic()
    try:
        whole = make_sparse(folder / "data", int(options.gigabytes * 1e9))
        ranks = measure(folder / "data", options.ranks, options.batches)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = {
        "what": (__doc__ or "").strip().splitlines()[0],
        "dataset_gb": round(whole / 1e9, 1),
        **about_run(),
        "seconds": round(time.monotonic() - start, 1),
        "goal_private_mb": 1000,
        "ranks": ranks,
    }
    text = json.dumps(results, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
