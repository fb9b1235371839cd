"""CPU time per sample by the number of shards: the same samples in few, many and very many tars.

    python -m benchmarks.stream.many_shards [--samples N] [--shards 40,400,2000] --output FILE

Texts, stored tokens, radiographs and findings of an entity view are generated, written once per number of
shards and read with a full shuffle from the page cache, in one loader thread of a child process. The numbers
of shards alternate within each repeat; a cell reads one epoch, for ``--warm-seconds`` of CPU time at most,
and then until it has taken ``--seconds``. What opening costs is measured apart: the first opening on a node,
which collects the indexes, and a later one. Every file is synced: give ``--folder`` a place in memory for
100,000 shards. Datasets that are in it already are read as they are. ``--open`` bounds how many shards stay
open, so that fewer of them cost as much as very many.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import shardflow as sf
from benchmarks.about import about_run
from shardflow.fields import reader
from shardflow.format import dataset_index
from shardflow.format.manifest import Manifest, commit
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.sample_values import encode_fields
from shardflow.format.shard_files import Fields, SplitFiles, write_samples
from shardflow.loading import LoaderConfig
from shardflow.storage import LocalStore, local

_WORDS = [
    *("lungs", "clear", "heart", "size", "normal", "no", "effusion", "or", "pneumothorax", "small"),
    *("left", "basal", "opacity", "unchanged"),
]
_CONTENTS = ("texts", "tokens", "radiographs", "entities")
_REPORT = "FINDINGS: A 9 mm nodule in the right upper lobe. Mild cardiomegaly, unchanged. No pneumothorax.\n"
_BATCH = 32
_SIDE = 64


def make(folder: Path, content: str, num_samples: int, num_shards: int) -> None:
    """Write a dataset of generated samples in a number of shards."""
    is_images = content in {"radiographs", "entities"}
    samples = _images(content, num_samples) if is_images else _texts(num_samples)
    _write(folder, samples, num_samples, -(-num_samples // num_shards), side=_SIDE if is_images else 0)
    commands = [["attach", str(folder), "--facts"]] if is_images else []
    commands += [["entities", str(folder)]] if content == "entities" else []
    for command in commands:
        subprocess.run([sys.executable, "-m", "shardflow.cli.main", *command], check=True)
    if content == "tokens":
        from shardflow.training.text import train_tokenizer
        from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset

        dataset = sf.open(folder)
        train_tokenizer(dataset, "train", 300, folder.with_suffix(".bpe"))
        tokenize_dataset(dataset, TextTokenizer(folder.with_suffix(".bpe")))


def _images(content: str, num_samples: int) -> Iterator[Fields]:
    """Yield studies of one slice, or of three and a report with two findings that an entity view has."""
    num_slices = 1 if content == "radiographs" else 3
    pictures = np.random.default_rng(7).integers(0, 4096, (num_slices, _SIDE, _SIDE)).astype(np.uint16)
    report = {} if content == "radiographs" else _aligned_report(num_slices)
    for number in range(num_samples):
        slices = np.roll(pictures.reshape(num_slices, -1), number, axis=1).reshape(pictures.shape)
        yield encode_fields({"s000.b2nd": slices, **report})


def _aligned_report(num_slices: int) -> dict[str, Any]:
    """Return the fields that packing writes of a report whose findings are on the first slices."""
    from shardflow.reports import ReportReader

    read = ReportReader().read(_REPORT).to_json()
    present = [number for number, one in enumerate(read["entities"]) if one["assertion"] == "present"]
    aligned = [
        {"entity": number, "series": 0, "slices": [0, 1], "weights": [1.0, 0.5], "confidence": 0.95}
        for number in present
    ]
    series = {"num_slices": num_slices, "rows": _SIDE, "columns": _SIDE, "modality": "CT", "unit": "raw"}
    return {
        "alignment.json": {"format_version": 1, "threshold": 0.7, "entities": aligned, "unaligned": []},
        "report.json": {"format_version": 1, **read},
        "report.txt": _REPORT,
        "study.json": {"series": [series]},
    }


def _texts(num_samples: int) -> Iterator[Fields]:
    """Yield reports of 60 words."""
    rng = np.random.default_rng(7)
    for _ in range(num_samples):
        text = " ".join(_WORDS[word] for word in rng.integers(0, len(_WORDS), 60)).encode()
        yield [("report.txt", text)]


def _write(folder: Path, samples: Iterable[Fields], num_samples: int, shard_samples: int, side: int) -> None:
    """Write a dataset by the parts of `ShardWriter`, which takes several times as long for a shard."""
    files = SplitFiles(folder, "train", 1 << 40, shard_samples)
    for number, fields in enumerate(samples):
        files.add(f"s{number:08d}", fields)
    shards = files.close()
    given = {name: np.full(num_samples, side, "<u4") for name in ("rows", "columns")}
    table = write_samples(folder, "samples/samples-000001.tbl", shards, key_num_bytes=9, given=given).table
    counts = OutcomeCounts(packed=num_samples, skipped=0, quarantined=0)
    manifest = Manifest(manifest_version=1, shards=tuple(shards), samples=table, counts=counts)
    commit(LocalStore(folder), manifest)


def _fields(content: str, folder: Path) -> dict[str, sf.Field]:
    if content == "radiographs":
        return {"image": sf.Image(dtype="uint16")}
    if content == "entities":
        return {"image": sf.Slices(num_slices=2, size=(_SIDE, _SIDE)), "sentence": sf.Text()}
    if content == "texts":
        return {"report": sf.Text()}
    from shardflow.training.tokenizing import tokenizer_digest

    return {"tokens": sf.Tokens(tokenizer=tokenizer_digest(folder.with_suffix(".bpe")), flat=True)}


def read(folder: Path, content: str, seconds: float, warm_s: float = math.inf) -> dict[str, float]:
    """Read the dataset in this process; CPU seconds to the first batch, and microseconds a sample.

    Args:
        folder: Of the dataset.
        content: Of its samples.
        seconds: Of CPU time to read for, after one epoch in which every shard was read once.
        warm_s: CPU time after which that epoch ends early.
    """
    start = time.process_time()
    loader = sf.Loader(
        sf.open(folder),
        split="train",
        unit="entity" if content == "entities" else "study",
        seed=5,
        batch=sf.BatchSpec(micro_batch_size=_BATCH, micro_batches_per_step=1),
        fields=_fields(content, folder),
        world="single",
        config=LoaderConfig(num_threads=1),
    )
    with loader:
        iterator = iter(loader)
        next(iterator)
        opened_s = time.process_time() - start
        for _ in iterator:
            if time.process_time() - start - opened_s > warm_s:
                break
        num_batches, begin = 0, time.process_time()
        while time.process_time() - begin < seconds:
            for _ in loader:
                num_batches += 1
                if not num_batches % 64 and time.process_time() - begin >= seconds:
                    break
        used = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"open_cpu_s": opened_s, "us_per_sample": used / (num_batches * _BATCH) * 1e6, "peak_mb": peak}


@contextmanager
def few_open(num_shards: int) -> Iterator[None]:
    """Keep so few shards open that most are opened for each sample, as where there are very many."""
    before = reader._MAX_SHARDS, dataset_index._MAX_OPEN_NUM_BYTES, local._OPEN_FILES.max_files
    reader._MAX_SHARDS = local._OPEN_FILES.max_files = num_shards
    dataset_index._MAX_OPEN_NUM_BYTES = num_shards * dataset_index._VIEW_NUM_BYTES  # type: ignore[misc]
    try:
        yield
    finally:
        reader._MAX_SHARDS, dataset_index._MAX_OPEN_NUM_BYTES, local._OPEN_FILES.max_files = before  # type: ignore[misc]


def _one(folder: Path, content: str, options: argparse.Namespace, node: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.stream.many_shards", "--one", str(folder), content]
    command += [
        str(options.seconds),
        str(options.warm_seconds),
        *([str(options.open)] if options.open else []),
    ]
    environment = {**os.environ, "TMPDIR": str(node)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def main() -> int:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--one"]:
        given, content, seconds, warm_s, *num_open = sys.argv[2:]
        with few_open(int(num_open[0])) if num_open else nullcontext():
            print(json.dumps(read(Path(given), content, float(seconds), float(warm_s))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--shards", default="40,400,2000")
    parser.add_argument("--contents", default=",".join(_CONTENTS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-seconds", type=float, default=math.inf)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--open", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    shard_counts = [int(count) for count in options.shards.split(",")]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="many-shards-"))
    (folder / "node").mkdir(exist_ok=True)  # a TMPDIR that does not exist is not taken
    rows = []
    for content in options.contents.split(","):
        places = {count: folder / f"{content}-{count}" for count in shard_counts}
        for count, place in places.items():
            if not place.exists():
                make(place, content, options.samples, count)
        cells: dict[int, list[dict[str, float]]] = {count: [] for count in shard_counts}
        for repeat in range(options.repeats):
            for count in shard_counts if repeat % 2 == 0 else shard_counts[::-1]:
                cells[count].append(_one(places[count], content, options, folder / "node"))
                print(content, count, cells[count][-1], flush=True)
        medians = {
            count: statistics.median(one["us_per_sample"] for one in cells[count]) for count in shard_counts
        }
        rows.append(
            {
                "content": content,
                "us_per_sample": medians,
                **{
                    f"ratio_{count}_to_{shard_counts[0]}": medians[count] / medians[shard_counts[0]]
                    for count in shard_counts[1:]
                },
                "runs": cells,
            }
        )
    if options.folder is None:
        shutil.rmtree(folder)
    report = {
        "about": about_run(["numpy", "blosc2"]),
        "command": " ".join(sys.argv),
        "load_average": os.getloadavg(),
        "samples": options.samples,
        "generated": True,
        "rows": rows,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
