"""How much of a slow link the loader fills, and what a remote store costs in processor time.

    python -m benchmarks.stream.remote --output benchmarks/results/remote.json

S3 is a Ceph RADOS Gateway on this machine (installed from Debian's packages where it is missing: needs root);
``tests.fault_proxy``, in a process of its own, adds 20 ms to each answer and lets 100 MB a second through.
Content: studies of 40 CT slices, 512 x 512 int16.

- ``link``: ranged reads of 8 MiB side by side, nothing else: what the way from the store gives.
- ``cold``: ``Loader``, nothing cached; share of the nominal link by the stored bytes of all batches.
- ``cold_cached``: the same through an empty cache on the local disk, read ahead by the plan.
- ``second``: the next epoch of that loader, from the cache.
- ``local``: the same loader on the folder.
- ``small_requests``, ``large_requests``: `RemoteStore` against nginx with no proxy between, 64 KiB and 8 MiB
  a request: requests and megabytes a second of the client's processor time.

Every measurement runs in a fresh process, in turns; medians, and the least and most, are of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.stream.content import NUM_SLICES, SIZE, make_content
from tests.object_stores import CEPH_KEYS, ceph_bucket, ceph_gateway, nginx

REPOSITORY = Path(__file__).resolve().parents[2]
LATENCY_MS = 20
LINK_MB_PER_S = 100
PACKAGES = ("obstore", "blosc2", "numpy")
BUCKET = "shardflow-benchmark"
_REQUEST_BYTES = {"link": 8 << 20, "small_requests": 64 << 10, "large_requests": 8 << 20}
_READ_BYTES = 256 << 20


# ---- contestants: what one measurement yields -----------------------------------------------------


def _read_all(url: str, request_bytes: int, max_bytes: int) -> dict[str, float]:
    """Read every shard by requests of one size into one buffer."""
    from shardflow.storage import ByteRange, RemoteOptions, RemoteStore

    # Nothing is joined: each range of these is a request.
    store = RemoteStore(url, RemoteOptions(request_bytes=request_bytes))
    paths = [path.strip() for path in os.environ["BENCHMARK_SHARDS"].split(",")]
    sizes = {path: store.size(path) for path in paths}
    buffer = memoryview(bytearray(max(sizes.values())))
    start, used = time.perf_counter(), _processor_s()
    num_bytes = 0
    while num_bytes < max_bytes:
        for path, size in sizes.items():
            store.read_ranges(path, [ByteRange(0, size)], [buffer[:size]])
            num_bytes += size
    seconds, processor_s = time.perf_counter() - start, _processor_s() - used
    return {
        "mb_per_s": num_bytes / seconds / 1e6,
        "mb_per_processor_s": num_bytes / processor_s / 1e6,
        "requests_per_processor_s": store.counts.num_requests / processor_s,
    }


def _loader(url: str, num_threads: int, cache: Any = None) -> Any:
    from shardflow.fields.types.pictures import Slices
    from shardflow.fields.types.text import Text
    from shardflow.format import Dataset
    from shardflow.loading import Loader, LoaderConfig
    from shardflow.sampling import BatchSpec

    fields = {"image": Slices(num_slices=NUM_SLICES, size=(SIZE, SIZE)), "report": Text()}
    config = LoaderConfig(num_threads=num_threads)
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=4)
    dataset = Dataset.open(url, cache=cache)
    return Loader(dataset, split="train", batch=spec, seed=1, fields=fields, config=config)


def _epoch(loader: Any, epoch: int, stored_bytes: int, name: str) -> dict[str, float]:
    loader.set_epoch(epoch)
    start, used, first, num_studies = time.perf_counter(), _processor_s(), 0.0, 0
    for _ in loader:
        num_studies += 1
        first = first or time.perf_counter()
    end = time.perf_counter()
    return {
        f"{name}studies_per_s": num_studies / (end - start),
        f"{name}mb_per_s": stored_bytes / (end - start) / 1e6,
        f"{name}first_batch_s": first - start,
        f"{name}processor_ms_per_study": (_processor_s() - used) / num_studies * 1e3,
    }


def measure(name: str, url: str, stored_bytes: int) -> dict[str, float]:
    """Run one contestant once, in this process."""
    if name in _REQUEST_BYTES:
        return _read_all(url, _REQUEST_BYTES[name], stored_bytes if name == "link" else _READ_BYTES)
    if name == "cold":
        # A thread waits for its study: as many threads as fill the link, and two or three of them decode.
        return _epoch(_loader(url, 16), 0, stored_bytes, "")
    if name == "local":
        return _epoch(_loader(url, 2), 0, stored_bytes, "")
    from shardflow.storage import CacheConfig

    with tempfile.TemporaryDirectory(prefix="shardflow-cache-") as folder:
        cache = CacheConfig(directory=Path(folder), max_bytes=4 * stored_bytes, min_free_bytes=0)
        loader = _loader(url, 2, cache)
        found = _epoch(loader, 0, stored_bytes, "")
        return {**found, **_epoch(loader, 1, stored_bytes, "second_")}


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- the servers, and the table -------------------------------------------------------------------


@contextlib.contextmanager
def slow_link(port: int) -> Iterator[str]:
    """Put the slow link before a server on a port; yields its address."""
    command = [sys.executable, "-m", "tests.fault_proxy", "--target", str(port)]
    command += ["--latency-ms", str(LATENCY_MS), "--mb-per-s", str(LINK_MB_PER_S)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the proxy has no output")
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _run(name: str, url: str, stored_bytes: int, variables: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.stream.remote", "--run", name, "--url", url]
    command += ["--stored-bytes", str(stored_bytes)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | variables, check=True, stdout=subprocess.PIPE, timeout=600
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(num_studies: int, num_rounds: int) -> dict[str, Any]:
    """Measure all contestants ``num_rounds`` times and sum up."""
    with contextlib.ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardflow-bench-")))
        kind = make_content(where / "content", num_studies, with_png=False)
        folder = where / "content" / "ours"
        shards = sorted(path.relative_to(folder).as_posix() for path in folder.glob("shards/*.tar"))
        stored_bytes = sum((folder / path).stat().st_size for path in shards)
        for name in ("ceph", "nginx"):
            (where / name).mkdir()
        gateway = stack.enter_context(ceph_gateway(where / "ceph", memory_bytes=4 << 30))
        web = stack.enter_context(nginx(folder, where / "nginx"))
        os.environ.update(CEPH_KEYS, AWS_ENDPOINT_URL=gateway, AWS_REGION="us-east-1")
        url = ceph_bucket(BUCKET)
        copy_to(folder, url)
        slow = stack.enter_context(slow_link(int(gateway.rpartition(":")[2])))
        variables = {"AWS_ENDPOINT_URL": slow, "BENCHMARK_SHARDS": ",".join(shards)}
        urls = {"link": url, "cold": url, "cold_cached": url, "local": str(folder)}
        urls |= {"small_requests": web, "large_requests": web}
        found = _in_turns(urls, num_rounds, stored_bytes, variables)
    return {
        "what": (__doc__ or "").strip().splitlines()[0],
        "command": f"python -m benchmarks.stream.remote --studies {num_studies} --rounds {num_rounds}",
        "content": f"{num_studies} studies of {NUM_SLICES} slices {SIZE}x{SIZE} int16: {kind}",
        "stored_bytes": stored_bytes,
        "link": f"{LINK_MB_PER_S} MB/s and {LATENCY_MS} ms before each answer",
        "server": _version("radosgw", "--version"),
        "share_of_link": {
            name: round(found["summary"][name]["mb_per_s"]["median"] / LINK_MB_PER_S, 4)
            for name in ("link", "cold", "cold_cached")
        },
        **found,
    }


def compare_disk(num_studies: int, num_rounds: int) -> dict[str, Any]:
    """Measure the second epoch from a cache folder and the local one alone, which needs no server."""
    with tempfile.TemporaryDirectory(prefix="shardflow-bench-") as where:
        kind = make_content(Path(where) / "content", num_studies, with_png=False)
        folder = Path(where) / "content" / "ours"
        stored_bytes = sum(path.stat().st_size for path in folder.glob("shards/*.tar"))
        urls = {"cold_cached": str(folder), "local": str(folder)}
        found = _in_turns(urls, num_rounds, stored_bytes, {})
    return {
        "what": "The next epoch from a cache folder in front of a local folder, beside that folder itself.",
        "command": f"python -m benchmarks.stream.remote --disk --studies {num_studies} --rounds {num_rounds}",
        "content": f"{num_studies} studies of {NUM_SLICES} slices {SIZE}x{SIZE} int16: {kind}",
        "stored_bytes": stored_bytes,
        **found,
    }


def _in_turns(
    urls: dict[str, str], num_rounds: int, stored_bytes: int, variables: dict[str, str]
) -> dict[str, Any]:
    """Measure contestants in turns; return every run, medians, and the second epoch beside the local one."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
    loads = []
    for number in range(num_rounds):
        names = list(urls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            loads.append(os.getloadavg()[0])
            rows[name].append(_run(name, urls[name], stored_bytes, variables))
            print(number, name, rows[name][-1], file=sys.stderr, flush=True)
    summary = {name: _summed(runs) for name, runs in rows.items()}
    second, local = summary["cold_cached"], summary["local"]
    return {
        **_environment(),
        "load_average_1min_before_each_run": {"least": min(loads), "most": max(loads)},
        "second_epoch_by_local": round(
            second["second_studies_per_s"]["median"] / local["studies_per_s"]["median"], 4
        ),
        "second_epoch_by_local_in_processor_time": round(
            local["processor_ms_per_study"]["median"] / second["second_processor_ms_per_study"]["median"], 4
        ),
        "summary": summary,
        "runs": rows,
    }


def copy_to(folder: Path, url: str) -> None:
    """Copy a dataset into a bucket."""
    from shardflow.format.copies.copying import copy_dataset
    from shardflow.storage import LocalStore, open_store

    copy_dataset(LocalStore(folder), open_store(url))


def _summed(runs: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    summaries: dict[str, Callable[..., float]] = {"median": statistics.median, "least": min, "most": max}
    return {
        key: {name: round(sum_up([run[key] for run in runs]), 3) for name, sum_up in summaries.items()}
        for key in runs[0]
    }


def _version(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    return done.stdout.strip()


def _environment() -> dict[str, Any]:
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "commit": _version("git", "rev-parse", "HEAD"),
        "processor": models[0].partition(":")[2].strip() if models else "unknown",
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def main() -> int:
    """Compare, or run one contestant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--studies", type=int, default=72)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", action="store_true", help="only `second` and `local`, without servers")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--stored-bytes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        found: Any = measure(arguments.run, arguments.url, arguments.stored_bytes)
    else:
        contest = compare_disk if arguments.disk else compare
        found = contest(arguments.studies, arguments.rounds)
    text = json.dumps(found, indent=None if arguments.run else 1)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
