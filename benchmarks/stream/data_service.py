"""What do data servers bring, and what does the trainer pay? Two servers beside one, and loading in threads.

    python -m benchmarks.stream.data_service --output benchmarks/results/data_service.json

Cells, each of ``--seconds`` of whole epochs after one that is not measured, in processes of their own:

- ``threads``: the trainer makes its batches, on the first processor alone.
- ``one server``: the trainer asks one server, which has half of the last processor: a loop of Python has the
  rest.
- ``two servers``: both share the last processor, so each has half of it.

Contents: radiographs (JPEG, 1024 x 1024) delivered as 224 x 224 and as 512 x 512, and CT studies of 40 slices
of 512 x 512 as they are stored, in micro-batches of 32 and of 1. ``trainer_ms`` is the processor time of the
trainer's process a sample. The order turns from round to round; every number of every round is kept.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.about import about_run
from benchmarks.stream.content import NUM_SLICES, SIZE, make_content, make_radiographs

REPOSITORY = Path(__file__).resolve().parents[2]
CELLS = ("threads", "one server", "two servers")
CONTENTS = ("radiographs 224", "radiographs 512", "ct 512")
_BURN = "while True: pass"


def measure(content: str, folder: Path, servers: list[str], seconds: float) -> dict[str, float]:
    """Run whole epochs for so long; return samples a second and processor time of this process a sample."""
    import shardflow as sf

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    field: Any
    if content.startswith("ct"):
        field, size = sf.Slices(num_slices=NUM_SLICES, size=(SIZE, SIZE)), 1
    else:
        side = int(content.split()[1])
        field, size = sf.Image(member="image.jpg", size=(side, side), channels=1), 32
    config = (
        sf.LoaderConfig(execution="service", servers=tuple(servers), num_threads=3)
        if servers
        else sf.LoaderConfig(num_threads=1)
    )
    spec = sf.BatchSpec(micro_batch_size=size, micro_batches_per_step=1)
    with sf.Loader(
        sf.open(str(folder)), split="train", batch=spec, seed=1, fields={"image": field}, config=config
    ) as loader:
        for _ in loader:
            pass
        number, start, cpu = 0, time.monotonic(), time.process_time()
        while time.monotonic() < start + seconds:
            for batch in loader:
                number += batch.num_slots
        spent, cpu = time.monotonic() - start, time.process_time() - cpu
        local = loader.counters.totals("service_local").num_items
        resent = loader.counters.totals("service_resent").num_items
    return {
        "samples_per_s": round(number / spent, 2),
        "trainer_ms": round(cpu / number * 1e3, 3),
        "seconds": round(spent, 1),
        "made_here": local,
        "resent": resent,
    }


@contextmanager
def _servers(folder: Path, cell: str) -> Iterator[list[str]]:
    """Start the servers of a cell on the last processor, and what takes their place there."""
    last = max(os.sched_getaffinity(0))
    pin = ["taskset", "-c", str(last)]
    running: list[subprocess.Popen[str]] = []
    addresses: list[str] = []
    try:
        for _ in range(CELLS.index(cell)):
            command = [*pin, sys.executable, "-m", "shardflow.cli.main", "serve", str(folder)]
            command += ["--listen", "127.0.0.1:0", "--threads", "1"]
            server = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
            running.append(server)
            assert server.stdout is not None
            words = server.stdout.readline().split()
            addresses.append(words[words.index("at") + 1].rstrip(";"))
        if cell == "one server":
            running.append(subprocess.Popen([*pin, sys.executable, "-c", _BURN], text=True))
        yield addresses
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _run(content: str, folder: Path, cell: str, seconds: float) -> dict[str, float]:
    with _servers(folder, cell) as addresses:
        command = [sys.executable, "-m", "benchmarks.stream.data_service", "--run", content]
        command += ["--content", str(folder), "--seconds", str(seconds), "--servers", *addresses]
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=600
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
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
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options.run, options.content, options.servers, options.seconds)))
        return 0
    loads: list[float] = []
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardflow-bench-") as where:
        folders = {"radiographs": Path(where) / "radiographs", "ct": Path(where) / "ct"}
        make_radiographs(folders["radiographs"], 256)
        make_content(folders["ct"], 16, with_png=False)
        pairs = [(content, cell) for content in options.contents for cell in CELLS]
        for number in range(options.rounds):
            for content, cell in pairs[number % len(CELLS) :] + pairs[: number % len(CELLS)]:
                loads.append(os.getloadavg()[0])
                folder = folders[content.split()[0]]
                folder = next(iter(sorted(folder.glob("**/manifest-*.json")))).parent
                found = {"round": number, "content": content, "cell": cell} | _run(
                    content, folder, cell, options.seconds
                )
                rounds.append(found)
                print(found, file=sys.stderr, flush=True)

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
