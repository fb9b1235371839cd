"""What proving each field against its signed digest costs: ``python -m benchmarks.stream.field_digests``.

One loader thread reads an epoch from a cache on disk that holds all of it, in turns with and without trusted
keys; processor time of the process by sample. Contents: studies of 24 slices of 512 x 512 whose noise hardly
compresses, the worst case, and short texts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import shardflow as sf
from benchmarks.about import about_run, write_result
from shardflow.format import Dataset
from shardflow.format.copies.signing import sign_dataset
from shardflow.storage import CacheConfig, LocalStore
from tests.factories import make_dataset

_ROUNDS = 5


def _measure(folder: Path, key: Path, fields: dict[str, Any], micro_batch_size: int) -> dict[str, Any]:
    start = time.process_time()
    sign_dataset(LocalStore(folder), key, with_digests=True)
    sign_s = time.process_time() - start
    batch = sf.BatchSpec.simple(global_batch_size=micro_batch_size, micro_batch_size=micro_batch_size)
    config = sf.LoaderConfig(num_threads=1)
    proven_bytes = 0

    def epoch(signed_by: Path | None) -> float:
        nonlocal proven_bytes
        cache = CacheConfig(directory=folder.with_suffix(".cache"), max_bytes=1 << 33, min_free_bytes=0)
        dataset = Dataset.open(folder, cache=cache, signed_by=signed_by)
        with sf.Loader(dataset, split="train", batch=batch, seed=1, fields=fields, config=config) as loader:
            start = time.process_time()
            num_samples = sum(batch.num_slots for batch in loader)
            spent = time.process_time() - start
        assert dataset.cache is not None
        proven_bytes = dataset.cache.counters.totals("cache_proof").num_bytes // num_samples
        return spent / num_samples * 1e6

    epoch(None)  # fills the cache
    pairs = [(epoch(None), epoch(key.with_suffix(".pub"))) for _ in range(_ROUNDS)]
    without, proven = (round(statistics.median(each), 1) for each in zip(*pairs, strict=True))
    return {
        "proven_bytes_per_sample": proven_bytes,
        "sign_processor_s": round(sign_s, 2),
        "processor_us_without": without,
        "processor_us_proven": proven,
        "ratio": round(proven / without, 3),
        "rounds": [[round(one, 1) for one in pair] for pair in pairs],
    }


def main() -> None:
    """Measure both contents."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        key = root / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        make_dataset(
            root / "studies", num_samples=32, samples_per_shard=8, slices=24, size=(512, 512), facts=True
        )
        studies = {"image": sf.Slices(num_slices=24, size=(512, 512), dtype="int16")}
        make_dataset(
            root / "texts", num_samples=6000, samples_per_shard=1000, slices=1, size=(4, 4), facts=True
        )
        found = {
            **about_run(["numpy", "blosc2"]),
            "method": (__doc__ or "").partition("\n\n")[2].replace("\n", " ").strip(),
            "studies": _measure(root / "studies", key, studies, 4),
            "texts": _measure(root / "texts", key, {"text": sf.Text(missing="pad")}, 64),
        }
    write_result(found, arguments.output)


if __name__ == "__main__":
    main()
