"""CPU time per sample by the number of shards: the same samples in few, many and very many tars.

    python -m benchmarks.stream.many_shards [--samples N] [--shards 40,400,2000] --output FILE

Texts, stored tokens, radiographs and findings of an entity view are generated, written once per number of
shards and read with a full shuffle from the page cache, in one loader thread of a child process. The numbers
of shards alternate within each repeat; a cell reads until it has taken ``--seconds`` of CPU time. What
opening costs is measured apart: the first opening on a node, which collects the indexes, and a later one.
Every file is synced: give ``--folder`` a place in memory for 100,000 shards.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardflow as sf
from benchmarks.about import about_run
from shardflow.format.manifest import Manifest, commit
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import FACT_COLUMNS
from shardflow.format.shard_files import SplitFiles, write_samples
from shardflow.format.tar import member_num_bytes
from shardflow.loading import LoaderConfig
from shardflow.storage import LocalStore

_WORDS = [
    *("lungs", "clear", "heart", "size", "normal", "no", "effusion", "or", "pneumothorax", "small"),
    *("left", "basal", "opacity", "unchanged"),
]
_CONTENTS = ("texts", "tokens", "radiographs", "entities")
_REPORT = "FINDINGS: A 9 mm nodule in the right upper lobe. Mild cardiomegaly, unchanged. No pneumothorax.\n"
_BATCH = 32


def make(folder: Path, content: str, num_samples: int, num_shards: int) -> None:
    """Write a dataset of generated samples in a number of shards."""
    if content in {"radiographs", "entities"}:
        _make_images(folder, content, num_samples, -(-num_samples // num_shards))
        return
    _make_texts(folder, num_samples, -(-num_samples // num_shards))
    if content == "tokens":
        from shardflow.training.text import train_tokenizer
        from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset

        dataset = sf.open(folder)
        train_tokenizer(dataset, "train", 300, folder.with_suffix(".bpe"))
        tokenize_dataset(dataset, TextTokenizer(folder.with_suffix(".bpe")))


def _make_images(folder: Path, content: str, num_samples: int, shard_samples: int) -> None:
    """Write studies of one slice, or of three and a report with two findings that an entity view has."""
    num_slices = 1 if content == "radiographs" else 3
    pictures = np.random.default_rng(7).integers(0, 4096, (num_slices, 64, 64)).astype(np.uint16)
    report = {} if content == "radiographs" else _aligned_report(num_slices)
    with sf.ShardWriter(folder, max_samples=shard_samples) as writer:
        for number in range(num_samples):
            slices = np.roll(pictures.reshape(num_slices, -1), number, axis=1).reshape(pictures.shape)
            writer.write({"__key__": f"s{number:08d}", "s000.b2nd": slices, **report})
    commands = [["attach", str(folder), "--facts"], *([["entities", str(folder)]] if report else [])]
    for command in commands:
        subprocess.run([sys.executable, "-m", "shardflow.cli.main", *command], check=True)


def _aligned_report(num_slices: int) -> dict[str, Any]:
    """Return the fields that packing writes of a report whose findings are on the first slices."""
    from shardflow.reports import ReportReader

    read = ReportReader().read(_REPORT).to_json()
    present = [number for number, one in enumerate(read["entities"]) if one["assertion"] == "present"]
    aligned = [
        {"entity": number, "series": 0, "slices": [0, 1], "weights": [1.0, 0.5], "confidence": 0.95}
        for number in present
    ]
    series = {"num_slices": num_slices, "rows": 64, "columns": 64, "modality": "CT", "unit": "raw"}
    return {
        "alignment.json": {"format_version": 1, "threshold": 0.7, "entities": aligned, "unaligned": []},
        "report.json": {"format_version": 1, **read},
        "report.txt": _REPORT,
        "study.json": {"series": [series]},
    }


def _make_texts(folder: Path, num_samples: int, shard_samples: int) -> None:
    """Write texts, by the parts of a writer, which takes several times as long for a shard."""
    rng = np.random.default_rng(7)
    files = SplitFiles(folder, "train", 1 << 40, shard_samples)
    sizes = np.zeros(num_samples, np.int64)
    for number in range(num_samples):
        text = " ".join(_WORDS[word] for word in rng.integers(0, len(_WORDS), 60)).encode()
        sizes[number] = len(text)
        files.add(f"s{number:08d}", [("report.txt", text)])
    shards = files.close()
    rows = np.arange(num_samples)
    inside = rows % shard_samples
    ends = np.cumsum([member_num_bytes(size) for size in sizes.tolist()])
    starts = np.concatenate([[0], ends[:-1]])
    given = {
        **{name: np.zeros(num_samples, "<u4") for name in FACT_COLUMNS},
        "sample_key": np.array([f"s{row:08d}" for row in range(num_samples)], "S9"),
        "row_in_shard": inside,
        "offset_bytes": starts - starts[rows - inside],
        "num_bytes": ends - starts,
        "text_bytes": sizes,
    }
    samples = write_samples(folder, "samples/samples-000001.tbl", shards, key_num_bytes=9, given=given).table
    counts = OutcomeCounts(packed=num_samples, skipped=0, quarantined=0)
    manifest = Manifest(manifest_version=1, shards=tuple(shards), samples=samples, counts=counts)
    commit(LocalStore(folder), manifest)


def _fields(content: str, folder: Path) -> dict[str, sf.Field]:
    if content == "radiographs":
        return {"image": sf.Image(dtype="uint16")}
    if content == "entities":
        return {"image": sf.Slices(num_slices=2, size=(64, 64)), "sentence": sf.Text()}
    if content == "texts":
        return {"report": sf.Text()}
    from shardflow.training.tokenizing import tokenizer_digest

    return {"tokens": sf.Tokens(tokenizer=tokenizer_digest(folder.with_suffix(".bpe")), flat=True)}


def read(folder: Path, content: str, seconds: float) -> dict[str, float]:
    """Read the dataset in this process; CPU seconds to the first batch, and microseconds a sample."""
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
        for _ in iterator:  # one epoch, so that every shard was read once
            pass
        num_batches, begin = 0, time.process_time()
        while time.process_time() - begin < seconds:
            for _ in loader:
                num_batches += 1
                if not num_batches % 64 and time.process_time() - begin >= seconds:
                    break
        used = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"open_cpu_s": opened_s, "us_per_sample": used / (num_batches * _BATCH) * 1e6, "peak_mb": peak}


def _one(folder: Path, content: str, seconds: float, node: Path) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.stream.many_shards",
        "--one",
        str(folder),
        content,
        str(seconds),
    ]
    environment = {**os.environ, "TMPDIR": str(node)}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def main() -> int:
    """Run the benchmark."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(read(Path(sys.argv[2]), sys.argv[3], float(sys.argv[4]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--shards", default="40,400,2000")
    parser.add_argument("--contents", default=",".join(_CONTENTS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
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
                cells[count].append(_one(places[count], content, options.seconds, folder / "node"))
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
