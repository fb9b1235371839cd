"""Where should loading run? The loader beside training loops of three kinds, in each of its executions.

    python -m benchmarks.stream.execution --output benchmarks/results/execution.json

Loops, each taking ``--step-ms`` a batch on a quiet machine:

- ``nothing``: takes the next batch at once.
- ``python``: pure Python, which never lets the interpreter go by itself.
- ``torch``: forward and backward of a small convolutional network in one thread.

Executions: ``threads``, ``threads, 50 us`` (with ``sys.setswitchinterval(5e-5)``), ``process``, ``workers``;
two threads or processes each. Content: CT studies of 40 slices, 512 x 512 int16, one a batch. The order
turns from round to round; each measurement is a process of its own. ``decode_ms`` is the mean time of
decoding a study over all threads: beside ``nothing`` it is the codec's, and what it grows to beside another
loop is the hazard (``interpreter_hazard``). Takes three to four minutes with the three rounds of the default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.about import about_run
from benchmarks.stream.content import NUM_SLICES, SIZE, make_content

__all__ = ["compare"]

REPOSITORY = Path(__file__).resolve().parents[2]
EXECUTIONS = ("threads", "threads, 50 us", "process", "workers")
LOOPS = ("nothing", "python", "torch")


def _loop(kind: str, step_s: float) -> Callable[[], None]:
    if kind == "nothing":
        return lambda: None
    if kind == "python":

        def count() -> None:
            end, number = time.perf_counter() + step_s, 0
            while time.perf_counter() < end:
                number += 1

        return count
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU()
    )
    images = torch.randn(1, 8, 64, 64)

    def train() -> None:
        end = time.perf_counter() + step_s
        while time.perf_counter() < end:
            model(images).sum().backward()

    return train


def measure(folder: Path, execution: str, loop: str, step_ms: float) -> dict[str, float]:
    """Run two epochs and time the second."""
    from shardflow.fields.types.pictures import Slices
    from shardflow.format import Dataset
    from shardflow.loading import Loader, LoaderConfig
    from shardflow.sampling import BatchSpec

    train = _loop(loop, step_ms / 1e3)
    train()
    name, _, switch = execution.partition(", ")
    if switch:
        sys.setswitchinterval(5e-5)
    config = LoaderConfig(
        execution=name,  # type: ignore[arg-type]
        num_threads=2,
    )
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=4)
    fields = {"image": Slices(num_slices=NUM_SLICES, size=(SIZE, SIZE))}
    dataset = Dataset.open(folder / "ours")
    with Loader(dataset, split="train", batch=spec, seed=1, fields=fields, config=config) as loader:
        start = time.perf_counter()
        first_s = 0.0
        for _ in loader:
            first_s = first_s or time.perf_counter() - start
        decode, wait = loader.counters.totals("decode"), loader.counters.totals("wait")
        start = time.perf_counter()
        for _ in loader:
            train()
        seconds = time.perf_counter() - start
        number = len(loader)
        decode_s = loader.counters.totals("decode").seconds - decode.seconds
        wait_s = loader.counters.totals("wait").seconds - wait.seconds
    return {
        "studies_per_s": number / seconds,
        "decode_ms": decode_s / number * 1e3,
        "wait_share": wait_s / seconds,
        "first_batch_s": first_s,
    }


def compare(
    folder: Path, *, num_rounds: int, step_ms: float, loads: list[float]
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure all pairs in turn, and note the load before each; medians."""
    pairs = [(execution, loop) for loop in LOOPS for execution in EXECUTIONS]
    runs: dict[tuple[str, str], list[dict[str, float]]] = {pair: [] for pair in pairs}
    for number in range(num_rounds):
        for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
            loads.append(os.getloadavg()[0])
            runs[pair].append(_run(folder, *pair, step_ms))
            print(number, *pair, runs[pair][-1], file=sys.stderr, flush=True)
    return {
        loop: {
            execution: {
                key: round(statistics.median(run[key] for run in runs[execution, loop]), 3)
                for key in runs[execution, loop][0]
            }
            for execution in EXECUTIONS
        }
        for loop in LOOPS
    }


def _run(folder: Path, execution: str, loop: str, step_ms: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.stream.execution", "--run", execution, "--loop", loop]
    command += ["--content", str(folder), "--step-ms", str(step_ms)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Measure, or run one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", choices=EXECUTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--content", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options.content, options.run, options.loop, options.step_ms)))
        return 0
    loads: list[float] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardflow-bench-") as where:
        folder = Path(where) / "content"
        make_content(folder, options.studies, with_png=False)
        found = compare(folder, num_rounds=options.rounds, step_ms=options.step_ms, loads=loads)
    hazard = {
        name: round(found["python"][name]["decode_ms"] / found["nothing"][name]["decode_ms"], 2)
        for name in EXECUTIONS
    }
    results = {
        "what": (__doc__ or "").strip().splitlines()[0],
        **about_run(("blosc2", "numpy", "torch")),
        "load_average_1min_before_each_run": {"least": min(loads), "most": max(loads)},
        "seconds": round(time.monotonic() - start),
        # How many times longer decoding takes beside a loop that never lets the interpreter go.
        "interpreter_hazard": hazard,
        "median": found,
    }
    text = json.dumps(results, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
