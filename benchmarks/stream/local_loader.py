"""How near the loader comes to the decode limit, and how far it is ahead of webdataset, from the page cache.

    python -m benchmarks.stream.local_loader --output benchmarks/results/local_loader.json

Content: studies of 40 CT slices, 512 x 512 int16, one study a batch, into a loop that does nothing.
Contestants:

- ``decode_limit``: the codec alone in two threads, payloads in memory, one reused buffer a thread.
- ``shardflow``: ``Loader`` with two threads (reads, checksums, decode, order, batches).
- ``shardflow_dataloader``: the same micro-batches through torch's DataLoader, two workers of one thread.
- ``webdataset``: webdataset + DataLoader, two workers, the same tars, our codec into one new buffer a study.
- ``webdataset_png``: webdataset + DataLoader, two workers, 16-bit PNG, as people do it today.

Every measurement runs in a fresh process; the order of the contestants turns from round to round.
``studies_per_s`` leaves the first batch out, ``first_batch_s`` is from the start of the iteration to it
(worker processes start there), ``whole_per_s`` counts both. ``processor_ms_per_study`` is the time of all
threads and processes on the processors, which says more than the others on a machine that is not idle.
``peak_pss_mb`` comes from an extra run that is not timed: the largest sum of PSS of the process and its
children, sampled every 50 ms.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stream.content import NUM_SLICES, SIZE, make_content

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("blosc2", "numpy", "opencv-python-headless", "torch", "webdataset", "google-crc32c")


# ---- contestants: each yields once per study -----------------------------------------------------


def decode_limit(folder: Path) -> Iterator[object]:
    from shardflow.shards import Dataset, decode_array

    dataset = Dataset.open(folder / "ours")
    payloads = [
        [
            np.frombuffer(data, np.uint8)
            for name, data in dataset.read_fields(row).items()
            if name.endswith("b2nd")
        ]
        for row in dataset.splits["train"]
    ]
    yield None  # reading is not part of the limit: the clock starts at the first study
    numbers = iter(range(len(payloads)))
    done: list[int] = []
    is_done = threading.Semaphore(0)

    def work() -> None:
        buffer = np.zeros((NUM_SLICES, SIZE, SIZE), np.int16)
        for number in numbers:  # next() on an iterator of a range is atomic
            for index, payload in enumerate(payloads[number]):
                decode_array("b2nd", payload, out=buffer[index])
            done.append(number)
            is_done.release()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in payloads:
        is_done.acquire()
        yield None
    for thread in threads:
        thread.join()


def _config(num_threads: int) -> Any:
    from shardflow.loading import ImageView, LoaderConfig

    view = ImageView(num_slices=NUM_SLICES, rows=SIZE, columns=SIZE)
    return LoaderConfig(view=view, num_threads=num_threads)


def shardflow(folder: Path) -> Iterator[object]:
    from shardflow.epochs import BatchSpec
    from shardflow.loading import Loader
    from shardflow.shards import Dataset

    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=4)
    loader = Loader(Dataset.open(folder / "ours"), split="train", spec=spec, seed=1, config=_config(2))
    yield None
    yield from loader


def shardflow_dataloader(folder: Path) -> Iterator[object]:
    import torch
    from torch.utils.data import DataLoader

    from shardflow.epochs import BatchSpec
    from shardflow.loading.torch_dataset import ShardIterableDataset
    from shardflow.shards import Dataset

    torch.set_num_threads(1)
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=4)
    dataset = ShardIterableDataset(
        Dataset.open(folder / "ours"), split="train", spec=spec, seed=1, config=_config(1)
    )
    yield None
    yield from dataset.track(DataLoader(dataset, batch_size=None, num_workers=2))


def _webdataset(urls: list[str], collate: Callable[[dict[str, Any]], Any]) -> Iterator[object]:
    import torch
    import webdataset
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    dataset = webdataset.WebDataset(urls, shardshuffle=False).map(collate)
    yield None
    yield from DataLoader(dataset, batch_size=None, num_workers=2)


def webdataset_same_codec(folder: Path) -> Iterator[object]:
    import torch

    from shardflow.shards import decode_array

    def collate(sample: dict[str, Any]) -> Any:
        volume = torch.empty((NUM_SLICES, SIZE, SIZE), dtype=torch.int16)
        pixels = volume.numpy()
        for index, name in enumerate(sorted(name for name in sample if name.endswith("b2nd"))):
            decode_array("b2nd", sample[name], out=pixels[index])
        return volume

    return _webdataset(sorted(str(path) for path in (folder / "ours" / "shards").glob("*.tar")), collate)


def webdataset_png(folder: Path) -> Iterator[object]:
    import cv2
    import torch

    def collate(sample: dict[str, Any]) -> Any:
        volume = torch.empty((NUM_SLICES, SIZE, SIZE), dtype=torch.int16)
        pixels = volume.numpy()
        for index, name in enumerate(sorted(name for name in sample if name.endswith("png"))):
            decoded: Any = cv2.imdecode(np.frombuffer(sample[name], np.uint8), cv2.IMREAD_UNCHANGED)
            np.bitwise_xor(
                decoded, 0x8000, out=pixels[index].view(np.uint16)
            )  # stored with an offset of 32,768
        return volume

    return _webdataset(sorted(str(path) for path in (folder / "png").glob("*.tar")), collate)


CONTESTANTS: dict[str, Callable[[Path], Iterator[object]]] = {
    "decode_limit": decode_limit,
    "shardflow": shardflow,
    "shardflow_dataloader": shardflow_dataloader,
    "webdataset": webdataset_same_codec,
    "webdataset_png": webdataset_png,
}


# ---- one measurement, in a process of its own ----------------------------------------------------


def measure(name: str, folder: Path) -> dict[str, float]:
    """Run one contestant over the content once."""
    studies = CONTESTANTS[name](folder)
    next(studies)  # imports and opening are behind us
    processor_s = _processor_s()
    start = time.perf_counter()
    first = 0.0
    num_studies = 0
    for _ in studies:
        num_studies += 1
        first = first or time.perf_counter()
    end = time.perf_counter()
    del studies
    gc.collect()  # ends worker processes, whose time counts once they are gone
    return {
        "processor_ms_per_study": (_processor_s() - processor_s) / num_studies * 1e3,
        "num_studies": num_studies,
        "first_batch_s": first - start,
        "studies_per_s": (num_studies - 1) / (end - first),
        "whole_per_s": num_studies / (end - start),
    }


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _start(name: str, folder: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.stream.local_loader",
        "--run",
        name,
        "--content",
        str(folder),
    ]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def _run(name: str, folder: Path) -> dict[str, float]:
    process = _start(name, folder)
    output, _ = process.communicate(timeout=600)
    if process.returncode:
        raise RuntimeError(f"{name} ended with exit code {process.returncode}")
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def _peak_pss_mb(name: str, folder: Path) -> float:
    process = _start(name, folder)
    peak_kb = 0
    while process.poll() is None:
        peak_kb = max(peak_kb, sum(_pss_kb(pid) for pid in _tree(process.pid)))
        time.sleep(0.05)
    process.communicate()
    return round(peak_kb * 1024 / 1e6, 1)


def _tree(pid: int) -> list[int]:
    found = [pid]
    try:
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in listing.read_text().split():
                found += _tree(int(child))
    except OSError:
        pass
    return found


def _pss_kb(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)


# ---- the table -----------------------------------------------------------------------------------


def _environment() -> dict[str, Any]:
    def first(path: str, key: str) -> str:
        lines = Path(path).read_text().splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "unknown")

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "processor": first("/proc/cpuinfo", "model name"),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory": first("/proc/meminfo", "MemTotal"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def compare(num_studies: int, num_rounds: int) -> dict[str, Any]:
    """Measure all contestants ``num_rounds`` times and sum up."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    loads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="shardflow-bench-") as where:
        folder = Path(where) / "content"
        kind = make_content(folder, num_studies)
        for name in CONTESTANTS:
            _run(name, folder)  # page cache, bytecode
        for number in range(num_rounds):
            names = list(CONTESTANTS)
            turned = names[number % len(names) :] + names[: number % len(names)]
            for name in turned:
                loads.append(os.getloadavg()[0])
                rows[name].append(_run(name, folder))
                print(number, name, rows[name][-1], file=sys.stderr, flush=True)
        memory = {name: _peak_pss_mb(name, folder) for name in CONTESTANTS}
    summary = {name: {**_summed(runs), "peak_pss_mb": memory[name]} for name, runs in rows.items()}
    ours = summary["shardflow"]
    return {
        "what": (__doc__ or "").strip().splitlines()[0],
        "command": f"python -m benchmarks.stream.local_loader --studies {num_studies} --rounds {num_rounds}",
        "content": f"{num_studies} studies of {NUM_SLICES} slices {SIZE}x{SIZE} int16: {kind}",
        **_environment(),
        # Above about 1 other work shared the processors: read the processor times, not the rates.
        "load_average_1min_before_each_run": {"least": min(loads), "most": max(loads)},
        "shardflow_times_faster": {
            name: round(ours["studies_per_s"]["median"] / row["studies_per_s"]["median"], 3)
            for name, row in summary.items()
        },
        "shardflow_times_less_processor": {
            name: round(row["processor_ms_per_study"]["median"] / ours["processor_ms_per_study"]["median"], 3)
            for name, row in summary.items()
        },
        "summary": summary,
        "runs": rows,
    }


def _summed(runs: list[dict[str, float]]) -> dict[str, Any]:
    return {
        key: {
            "median": round(statistics.median(run[key] for run in runs), 3),
            "least": round(min(run[key] for run in runs), 3),
            "most": round(max(run[key] for run in runs), 3),
        }
        for key in ("studies_per_s", "whole_per_s", "first_batch_s", "processor_ms_per_study")
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=sorted(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--content", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(measure(arguments.run, arguments.content)))
        return 0
    results = compare(arguments.studies, arguments.rounds)
    text = json.dumps(results, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
