"""Streaming against the decode limit and the peers: one run, contestants in turn, medians.

    python -m benchmarks.stream.run --output benchmarks/results/stream.json

Makes an environment for each peer (needs the package index once), writes the content, and measures three
workloads from the page cache into a loop that does nothing: CT studies of 40 slices (512 x 512 int16, one a
batch), radiographs (1,024 x 1,024 gray JPEG to RGB, with a report, 16 a batch; ``gray``: the same as one
channel), texts (256 a batch).
The decoders are the same for all. Every measurement is a process of its own, and the order of the contestants
turns from round to round; a cell takes ten seconds and more. The first round is not timed, it warms the
caches and samples the peak memory (PSS of the process and all below it, shared memory included). ``--sweep``
also tries 0, 1 and 4 workers for the peers, once, and goes on with each one's best.

Texts are token ids, 450 of 16 bits a sample. ``shardflow_tokens`` maps them from their table, checked by
block; the peers parse JSON, as they are mostly stored, and ``litdata_typed`` has them in a typed column.
``shardflow`` there reads the texts themselves, each a stored field checked by its own checksum.

``*_resumed`` goes on at half an epoch: ours beside a fresh start, each peer's in the first two rounds, for
what it needs. WebDataset keeps no position and reads over what was seen.

The last row of the table is `benchmarks.stream.sample_counts`: the plan of a step in an epoch of 10^4 and of
10^8 samples. A contestant that fails or hangs is missing from then on, and named at the end. Takes about
25 minutes on two quiet cores; ``--studies 16 --images 128 --texts 10000 --rounds 1`` shows that all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.about import about_run
from benchmarks.peers.environments import environment, installed
from benchmarks.stream import sample_counts
from benchmarks.stream.content import make_content, make_radiographs, make_texts
from benchmarks.stream.contestants import CONTESTANTS, PEERS, RESUMED_PEERS
from benchmarks.stream.goals import goals
from benchmarks.stream.records import CONTENT

REPOSITORY = Path(__file__).resolve().parents[2]
EXTRAS = ("blosc2==4.14.1", "opencv-python-headless==5.0.0.93", "google-crc32c==1.9.0")
NUM_THREADS = 2
# What a peer needs to go on is a figure beside ours, and takes half an epoch to come to.
_RESUMED_ROUNDS = 2
_WARM_S = 60.0
_MEASURE_S = 120.0


class Bench:
    """The content, the environments, and the measurements so far."""

    def __init__(
        self, folder: Path, environments: Path, only: list[str] | None, workloads: list[str]
    ) -> None:
        self._folder = folder
        self._contestants = {
            workload: [name for name in CONTESTANTS[workload] if only is None or name in only]
            for workload in workloads
        }
        self._peers = [name for name in PEERS if only is None or name in map(_peer_of, only)]
        self._pythons = {name: environment(name, environments, *EXTRAS) for name in self._peers}
        self.workers = {
            (workload, name): NUM_THREADS for workload, names in self._contestants.items() for name in names
        }
        self.missing: dict[str, str] = {}
        self.runs: dict[tuple[str, str], list[dict[str, float]]] = {}
        self.memory_mb: dict[tuple[str, str], float] = {}
        self.loads: list[float] = []

    def make(self, num_studies: int, num_images: int, num_texts: int) -> None:
        """Write the content, ours and the peers'."""
        folders = {CONTENT.get(workload, workload) for workload in self._contestants}
        if "ct" in folders:
            make_content(self._folder / "ct", num_studies, loose=True)
        if "cxr" in folders:
            make_radiographs(self._folder / "cxr", num_images)
        if "text" in folders:
            make_texts(self._folder / "text", num_texts)
        for workload in sorted(folders):
            for peer in self._peers:
                if peer == "webdataset":  # reads our tars
                    continue
                self._start(f"prepare:{peer}", workload).communicate(timeout=600)

    def warm(self) -> None:
        """Run each contestant once, with its memory watched; one that fails is missing from then on."""
        for workload, names in self._contestants.items():
            for name in names:
                peak_mb, code, said = self._watched(name, workload)
                if code:
                    self.missing[f"{workload} {name}"] = said
                else:
                    self.memory_mb[workload, name] = peak_mb
                _say("warm", workload, name, f"{peak_mb:.0f} MB", "failed" if code else "")

    def sweep(self) -> None:
        """Find the best number of workers of each peer."""
        for workload, name in self.workers:
            is_fixed = name.startswith("shardflow") or name == "limit" or name in RESUMED_PEERS
            if is_fixed or f"{workload} {name}" in self.missing:
                continue
            rates = {}
            for number in (0, 1, 2, 4):
                self.workers[workload, name] = number
                rates[number] = self._measure(name, workload)["samples_per_s"]
            self.workers[workload, name] = max(rates, key=lambda number: rates[number])
            _say("sweep", workload, name, rates)

    def round(self, number: int) -> None:
        """Measure every contestant once."""
        for workload, names in self._contestants.items():
            there = [name for name in names if f"{workload} {name}" not in self.missing]
            if number >= _RESUMED_ROUNDS:
                there = [name for name in there if name not in RESUMED_PEERS]
            turn = number % max(len(there), 1)
            for name in there[turn:] + there[:turn]:
                self.loads.append(os.getloadavg()[0])
                try:
                    found = self._measure(name, workload)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    # One that fails or hangs must not take the others' results along.
                    self.missing[f"{workload} {name}"] = str(error)
                    self.runs.pop((workload, name), None)
                    _say(number, workload, name, "failed")
                    continue
                self.runs.setdefault((workload, name), []).append(found)
                _say(number, workload, name, {key: round(value, 3) for key, value in found.items()})

    def _measure(self, name: str, workload: str) -> dict[str, float]:
        process = self._start(name, workload)
        try:
            output = process.communicate(timeout=_MEASURE_S)[0]
        except subprocess.TimeoutExpired:
            _kill(process)
            raise
        if process.returncode:
            raise RuntimeError(f"{workload} {name} ended with code {process.returncode}: {self._said()}")
        found: dict[str, float] = json.loads(output.splitlines()[-1])
        return found

    def _watched(self, name: str, workload: str) -> tuple[float, int, str]:
        process, peak_kb, deadline = self._start(name, workload), 0, time.monotonic() + _WARM_S
        while process.poll() is None:
            peak_kb = max(peak_kb, sum(_pss_kb(pid) for pid in _tree(process.pid)))
            time.sleep(0.05)
            if time.monotonic() > deadline:
                _kill(process)
        return peak_kb * 1024 / 1e6, process.returncode, self._said()

    def _start(self, name: str, workload: str) -> subprocess.Popen[str]:
        peer = name.partition(":")[2] or _peer_of(name)
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        environment_variables = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(home),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        # Else every worker process, ours and the peers', compiles what it imports.
        environment_variables.pop("PYTHONDONTWRITEBYTECODE", None)
        number = self.workers.get((workload, name), NUM_THREADS)
        command = [
            str(self._pythons.get(peer, sys.executable)),
            "-m",
            "benchmarks.stream.one",
            name,
            workload,
        ]
        with (self._folder / "said").open("wb") as said:
            return subprocess.Popen(
                [*command, str(self._folder / CONTENT.get(workload, workload)), str(number)],
                cwd=self._folder,
                env=environment_variables,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def _said(self) -> str:
        """Return the end of what the last process wrote to its error stream."""
        return (self._folder / "said").read_text("utf-8", "replace")[-1000:]

    # ---- the table -------------------------------------------------------------------------------

    def medians(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return medians and peak memory, by workload and contestant."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for (workload, name), runs in self.runs.items():
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            row["peak_pss_mb"] = self.memory_mb[workload, name]
            row["workers"] = self.workers[workload, name]
            found.setdefault(workload, {})[name] = {key: round(value, 3) for key, value in row.items()}
        return found

    def packages(self) -> dict[str, str]:
        """Return the versions of the peers."""
        names = {"mosaic": "mosaicml-streaming", "energon": "megatron-energon"}
        found: dict[str, str] = {}
        for peer, python in self._pythons.items():
            found |= installed(python, [names.get(peer, peer), "torch", "numpy"])
        return found


def _peer_of(name: str) -> str:
    """Return the peer whose environment a contestant runs in: ``mosaic`` of ``mosaic_resumed``."""
    return name.partition("_")[0]


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process that we started, and all below it."""
    for pid in reversed(_tree(process.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


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


def _say(*what: object) -> None:
    print(*what, file=sys.stderr, flush=True)


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--studies", type=int, default=64)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--sweep", action="store_true")
    default = Path(tempfile.gettempdir()) / "shardflow-stream-peers"
    names = sorted({name for names in CONTESTANTS.values() for name in names})
    parser.add_argument("--only", nargs="+", choices=names, help="measure these alone, without goals")
    parser.add_argument(
        "--workloads", nargs="+", choices=[*CONTESTANTS], help="measure these alone, without goals"
    )
    parser.add_argument("--environments", type=Path, default=default)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="shardflow-stream-"))
    try:
        bench = Bench(folder, options.environments, options.only, options.workloads or [*CONTESTANTS])
        bench.make(options.studies, options.images, options.texts)
        bench.warm()
        if options.sweep:
            bench.sweep()
        for number in range(options.rounds):
            bench.round(number)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = bench.medians()
    counts = sample_counts.compare()
    table = [] if options.only or options.workloads else goals(medians, counts)
    results = {
        "what": (__doc__ or "").strip().splitlines()[0],
        "command": " ".join(["python -m benchmarks.stream.run", *sys.argv[1:]]),
        **about_run(),
        "packages": bench.packages(),
        # Above about 1 other work shared the processors: read the processor times, not the rates.
        "load_average_1min": {"least": min(bench.loads), "most": max(bench.loads)},
        "seconds": round(time.monotonic() - start),
        "goals": table,
        "medians": medians,
        "plan_of_a_step_us": counts,
        "missing": bench.missing,
        "runs": {f"{workload} {name}": runs for (workload, name), runs in bench.runs.items()},
    }
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for workload, rows in medians.items():
        print(f"\n{workload:<22}{'samples/s':>12}{'first, s':>10}{'CPU us':>10}{'PSS, MB':>9}{'workers':>9}")
        for name, row in sorted(rows.items(), key=lambda item: -item[1]["samples_per_s"]):
            print(
                f"{name:<22}{row['samples_per_s']:>12,.1f}{row['first_batch_s']:>10.3f}"
                f"{row['processor_us']:>10,.1f}{row['peak_pss_mb']:>9.0f}{row['workers']:>9.0f}"
            )
    print(f"\n{'goal':<52}{'goal':>12}{'reached':>12}")
    for row in table:
        print(
            f"{row['what']:<52}{row['goal']:>12,}{row['reached']:>12,}  {'met' if row['met'] else 'NOT MET'}"
        )
    for name, said in bench.missing.items():
        print(f"missing: {name}: {said.splitlines()[-1] if said else 'nothing said'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
