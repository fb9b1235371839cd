"""What do data servers bring, and what does the trainer pay? Two servers beside one, and loading in threads.

    python -m benchmarks.stream.data_service --output benchmarks/results/data_service.json

Cells, each of ``--seconds`` in slices of 3.5 s that take turns (the first second of a slice does not count),
so that all of them meet the same other work of the machine:

- ``threads``: the trainer makes its batches, on the first processor alone.
- ``one server``: the trainer asks one server, which has half of the last processor: a loop of Python has the
  rest, in place of the other server, which is stopped.
- ``two servers``: both share the last processor, so each has half of it.

Contents: radiographs (JPEG, 1024 x 1024) delivered as 224 x 224 and as 512 x 512, and CT studies of 40 slices
of 512 x 512 as they are stored, in micro-batches of 32 and of 1. ``trainer_ms`` is the processor time of the
trainer's process a sample. Every number of every round is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.about import about_run
from benchmarks.stream.content import NUM_SLICES, SIZE, make_content, make_radiographs

REPOSITORY = Path(__file__).resolve().parents[2]
CELLS = ("threads", "one server", "two servers")
CONTENTS = ("radiographs 224", "radiographs 512", "ct 512")
_BURN = "while True: pass"
_WARM_S, _SLICE_S = 1.0, 2.5
Results = dict[str, dict[str, float]]


def measure(content: str, folder: Path, servers: list[str], pids: list[int], seconds: float) -> Results:
    """Let the cells take turns; return for each samples a second and processor time of this process a sample.

    Args:
        content: One of `CONTENTS`.
        folder: Of the dataset.
        servers: Addresses of the two servers.
        pids: Process ids of the second server, and of the loop in its place.
        seconds: Of each cell.
    """
    import shardflow as sf
    from shardflow.loading import service

    service._LEAST_PATIENCE_S = 60.0  # type: ignore[misc] # a server that is stopped here is not slow
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    field: Any
    if content.startswith("ct"):
        field, size = sf.Slices(num_slices=NUM_SLICES, size=(SIZE, SIZE)), 1
        num_bytes = 2 * NUM_SLICES * SIZE**2
    else:
        side = int(content.split()[1])
        field, size = sf.Image(member="image.jpg", size=(side, side), channels=1), 32
        num_bytes = size * side**2
    spec = sf.BatchSpec(micro_batch_size=size, micro_batches_per_step=1)
    loaders: dict[str, sf.Loader] = {}
    for cell, used in zip(CELLS, ([], servers[:1], servers), strict=True):
        config = sf.LoaderConfig(num_threads=1, prefetch_bytes=3 * num_bytes)
        if used:
            config = replace(
                config, execution="service", servers=tuple(used), num_threads=3, server_timeout_s=60.0
            )
        loaders[cell] = sf.Loader(
            sf.open(str(folder)), split="train", batch=spec, seed=1, fields={"image": field}, config=config
        )
    batches = {cell: _endless(loader) for cell, loader in loaders.items()}
    found = {cell: {"samples": 0.0, "seconds": 0.0, "cpu_s": 0.0} for cell in CELLS}
    turns = [*CELLS, *reversed(CELLS)]
    while min(one["seconds"] for one in found.values()) < seconds:
        for cell in turns:
            server, burner = (
                (signal.SIGCONT, signal.SIGSTOP) if cell == CELLS[2] else (signal.SIGSTOP, signal.SIGCONT)
            )
            os.kill(pids[0], server)
            os.kill(pids[1], signal.SIGSTOP if cell == CELLS[0] else burner)
            _spend(batches[cell], _WARM_S)
            number, spent, cpu = _spend(batches[cell], _SLICE_S)
            found[cell]["samples"] += number
            found[cell]["seconds"] += spent
            found[cell]["cpu_s"] += cpu
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return {
        cell: {
            "samples_per_s": round(one["samples"] / one["seconds"], 2),
            "trainer_ms": round(one["cpu_s"] / one["samples"] * 1e3, 3),
            "seconds": round(one["seconds"], 1),
            "made_here": loaders[cell].counters.totals("service_local").num_items,
            "resent": loaders[cell].counters.totals("service_resent").num_items,
        }
        for cell, one in found.items()
    }


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _spend(batches: Iterator[Any], seconds: float) -> tuple[int, float, float]:
    """Take batches for a while; return the samples, the seconds and the processor time of this process."""
    number, start, cpu = 0, time.monotonic(), time.process_time()
    while time.monotonic() < start + seconds:
        number += next(batches).num_slots
    return number, time.monotonic() - start, time.process_time() - cpu


def _run(content: str, folder: Path, seconds: float) -> Results:
    """Start two servers and a loop on the last processor, and a trainer on the first."""
    pin = ["taskset", "-c", str(max(os.sched_getaffinity(0)))]
    running: list[subprocess.Popen[str]] = []
    addresses: list[str] = []
    try:
        for _ in range(2):
            command = [*pin, sys.executable, "-m", "shardflow.cli.main", "serve", str(folder)]
            command += ["--listen", "127.0.0.1:0", "--no-token", "--threads", "1"]
            server = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
            running.append(server)
            assert server.stdout is not None
            words = server.stdout.readline().split()
            addresses.append(words[words.index("at") + 1].rstrip(";"))
        running.append(subprocess.Popen([*pin, sys.executable, "-c", _BURN], text=True))
        command = [sys.executable, "-m", "benchmarks.stream.data_service", "--run", content]
        command += ["--content", str(folder), "--seconds", str(seconds), "--servers", *addresses]
        command += ["--pids", *(str(one.pid) for one in running[1:])]
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=600
        )
    finally:
        for process in running:
            process.kill()
            process.wait()
    found: Results = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure, or run one cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--contents", nargs="+", choices=CONTENTS, default=CONTENTS)
    parser.add_argument("--run", choices=CONTENTS, help=argparse.SUPPRESS)
    parser.add_argument("--content", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--servers", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--pids", nargs="*", type=int, default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        found = measure(options.run, options.content, options.servers, options.pids, options.seconds)
        print(json.dumps(found))
        return 0
    loads: list[float] = []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardflow-bench-") as where:
        folders = {"radiographs": Path(where) / "radiographs", "ct": Path(where) / "ct"}
        make_radiographs(folders["radiographs"], 256)
        make_content(folders["ct"], 16, with_png=False)
        for number in range(options.rounds):
            for content in options.contents:
                loads.append(os.getloadavg()[0])
                cells = _run(content, folders[content.split()[0]] / "ours", options.seconds)
                rounds += [
                    {"round": number, "content": content, "cell": cell} | one for cell, one in cells.items()
                ]
                print(*rounds[-len(CELLS) :], sep="\n", file=sys.stderr, flush=True)

    def median(content: str, cell: str, name: str) -> float:
        found: float = statistics.median(
            one[name] for one in rounds if (one["content"], one["cell"]) == (content, cell)
        )
        return found

    results = {
        "what": (__doc__ or "").strip().splitlines()[0],
        **about_run(("blosc2", "numpy", "pyarrow")),
        "load_average_1min_before_each_run": {"least": min(loads), "most": max(loads)},
        "two_servers_to_one": {
            content: round(
                median(content, "two servers", "samples_per_s")
                / median(content, "one server", "samples_per_s"),
                3,
            )
            for content in options.contents
        },
        # Processor time of the trainer with servers, over that of the trainer that loads by itself.
        "trainer_share": {
            content: round(
                median(content, "two servers", "trainer_ms") / median(content, "threads", "trainer_ms"), 4
            )
            for content in options.contents
        },
        "rounds": rounds,
    }
    text = json.dumps(results, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
