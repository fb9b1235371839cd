"""An hour of everything at once: is anything lost, and does anything grow?

    python -m benchmarks.training.soak --minutes 60 --output benchmarks/results/soak.json

Two jobs run beside each other, both on generated data. A *steady* run trains on two ranks from beginning to
end, with a loader process, a cache folder, evaluations and checkpoints; its processes are sampled every few
seconds. Meanwhile this process goes round a *loop*: generate studies, kill an append and run it again, train
on two ranks, kill (one rank, or the job), go on with one rank, stop it, finish on two, compare the ledger
with the plan, read an epoch in threads and in a process, with a stop and a resume, remove samples, and now
and then compact. At the end the steady run is killed as well, and goes on with one rank.

Failed is: a ledger that differs from the plan, a removed sample that is trained on, a damaged dataset, a
process that is left behind, or growth. Growth is the median of all slopes between two samples (Theil 1950,
Sen 1968) over the time after the first fifth, times that time: neither a single peak nor a garbage collection
moves it. Memory counts what belongs to no file: pages of libraries count for more when others let go of them.
"""

from __future__ import annotations

import argparse
import csv
import gc
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import shardflow as sf
from benchmarks.about import about_run
from shardflow.cli.main import main as command
from shardflow.format.checks.verification import verify
from shardflow.monitoring.goodput import Goodput, measure_goodput
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.sampling import BatchSpec
from shardflow.synthetic import SynthOptions, generate
from shardflow.training.ledger import read_ledger
from tests.distributed.launcher import Job, job
from tests.integration.loader_support import open_loader, planned_keys, received_keys
from tests.pack_case import PackCase
from tests.tiny_runs import TinyInput, make_tiny_input, tiny_fields, write_config

SAMPLE_EVERY_S = 5.0
WAIT_S = 900.0
"""For a job to begin, or to end: a loaded machine is no failure."""
NUM_STUDIES = 6
"""Generated each round; as many samples are removed once there are more than KEPT."""
KEPT = {"train": 12, "val": 4}
LOOP_STEPS = 300
SEED = 3
SPEC = BatchSpec(micro_batch_size=1, micro_batches_per_step=4)
"""That of `tests.tiny_runs`."""
MIB = 1 << 20
MOST_GROWTH = {"memory_bytes": 16 * MIB, "files": 2.0, "threads": 1.0, "shared_bytes": 4 * MIB}
"""Of one process over the whole time that is judged."""
MOST_GROWTH_OF_TREE = {"temporary_files": 4.0, "shared_files": 4.0, "dataset_bytes": 4 * MIB}
LEAST_JUDGED = 60
"""Samples; in fewer a slope says nothing."""
LEAST_ROUNDS = 5
"""Of the loop; rounds are few, and each leaves behind what it leaves behind."""
PATIENT = {
    "timeouts.steady_s": 700,
    "timeouts.hang_s": 600,
    "loader.wait_timeout_s": 500,
    "timeouts.lost_s": 300,
    "timeouts.startup_s": 1200,
}
"""Nothing here hangs on purpose, and other jobs may take the processors."""


class SoakError(Exception):
    """Something was lost, doubled, damaged or left behind."""


def check(holds: bool, text: str) -> None:
    if not holds:
        raise SoakError(text)


# ---- samples -----------------------------------------------------------------------------------------


def tree_of(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listing.read_text().split()):
                found += tree_of(child)
    return found


def sample_process(pid: int) -> dict[str, float]:
    """Measure one process; memory in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "rss_bytes": sizes["Rss"],
        "pss_bytes": sizes["Pss"],
        "memory_bytes": sizes["Pss_Anon"] + sizes["Pss_Shmem"],
        "shared_bytes": sizes["Pss_Shmem"],
        "files": sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        "threads": int(status["Threads"]),
    }


def name_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    module = next((words[at + 1] for at, word in enumerate(words) if word in {"-m", "-c"}), words[0])
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    rank = next((value.decode() for value in variables if value.startswith(b"RANK=")), "")
    return f"{module[:60]} {rank}".strip()


@dataclass(slots=True)
class Series:
    """Samples over time, of one process or one folder."""

    times_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, time_s: float, values: dict[str, float]) -> None:
        """Take a sample in."""
        self.times_s.append(time_s)
        for name, value in values.items():
            self.values[name].append(value)

    def growth(self, name: str) -> float:
        """Return how much a value grew after the first fifth, by the median slope."""
        first = len(self.times_s) // 5
        times, values = np.array(self.times_s[first:]), np.array(self.values[name][first:])
        pick = np.linspace(0, len(times) - 1, min(len(times), 500)).astype(int)
        one, other = np.triu_indices(len(pick), 1)
        spans = times[pick][other] - times[pick][one]
        slopes = (values[pick][other] - values[pick][one])[spans > 0] / spans[spans > 0]
        return float(np.median(slopes) * (times[-1] - times[0])) if len(slopes) else 0.0

    def summary(self, num_points: int = 13) -> dict[str, Any]:
        """Return growth and some points, small enough for a file of results."""
        pick = np.linspace(0, len(self.times_s) - 1, min(len(self.times_s), num_points)).astype(int)
        return {
            "num_samples": len(self.times_s),
            "minutes": round((self.times_s[-1] - self.times_s[0]) / 60, 1),
            "growth": {name: round(self.growth(name), 2) for name in self.values},
            "points": {name: [values[at] for at in pick] for name, values in self.values.items()},
        }


class Sampler(threading.Thread):
    """Samples all processes of a job every few seconds."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.series: dict[tuple[int, str], Series] = {}
        self.total = Series()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Sample until `stop`."""
        while not self._is_over.wait(SAMPLE_EVERY_S):
            now, total = time.monotonic(), Counter[str]()
            for pid in tree_of(self.pid):
                with suppress(OSError, KeyError):  # it ended meanwhile
                    values = sample_process(pid)
                    self.series.setdefault((pid, name_of(pid)), Series()).add(now, values)
                    total.update(values)
            self.total.add(now, dict(total))

    def stop(self) -> None:
        """End the sampling."""
        self._is_over.set()
        self.join()

    def lasting(self) -> dict[str, Series]:
        """Return the processes that lived through nine tenths of the samples."""
        least = 0.9 * len(self.total.times_s)
        return {f"{name} ({pid})": s for (pid, name), s in self.series.items() if len(s.times_s) >= least}


# ---- runs --------------------------------------------------------------------------------------------


def steps_done(run: Path) -> int:
    """Return the number of steps in the metrics, from their last lines."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        for line in reversed(file.read().split(b"\n")[:-1]):
            if b'"event":"step"' in line.replace(b" ", b""):
                return int(json.loads(line)["global_step"]) + 1
    return 0


def wait_for_steps(running: Job, run: Path, number: int) -> bool:
    """Wait until a run has done some steps; say whether it still runs."""
    deadline = time.monotonic() + WAIT_S
    while steps_done(run) < number:
        if running.process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise SoakError(f"no step {number}: {running.wait(1).text[-4000:]}")
        time.sleep(0.02)
    return running.process.poll() is None


def check_ledger(run: Path, dataset: sf.Dataset, num_steps: int) -> int:
    """Compare all committed steps with the pure plan; return the number of rows."""
    expected: Iterator[tuple[Any, ...]] = iter(())
    epoch, num_rows = -1, 0
    steps = read_ledger(run)
    check([step.global_step for step in steps] == list(range(num_steps)), f"steps of {run.name}")
    for step in steps:
        if step.epoch != epoch:
            check(next(expected, None) is None, f"epoch {epoch} of {run.name} lacks rows of its plan")
            epoch = step.epoch
            expected = planned_keys(dataset, "train", SPEC, seed=SEED, epoch=epoch)
        for micro in step.micro_batches:
            found = (step.epoch, step.step, micro.micro, micro.keys, micro.weights)
            check(
                found == next(expected, None), f"step {step.global_step} of {run.name}: not the plan's rows"
            )
            num_rows += len(micro.keys)
    return num_rows


class Loop:
    """The changing dataset, and what is done to it."""

    def __init__(self, folder: Path, tiny: TinyInput) -> None:
        self.folder, self.tiny = folder, tiny
        self.case = PackCase(folder / "changing")
        self.case.folder.mkdir()
        self.case.prepare(has_reports=True)
        self.case.write_reports({})
        self.draws = random.Random(SEED)
        self.counts: Counter[str] = Counter()
        self.goodput: list[Goodput] = []
        self.removed: list[str] = []

    def round(self, number: int) -> None:
        """Go round once."""
        self._add_studies(number)
        mode = "append" if number else "pack"
        self._kill_packing(mode)
        self.case.pack("execution.num_processes=2", mode=mode)
        dataset = self._dataset()
        run = self.folder / f"run-{number:03d}"
        self._train(run)
        self.counts["loop_rows"] += check_ledger(run, dataset, LOOP_STEPS)
        self.counts["loop_steps"] += LOOP_STEPS
        self._prove_removed(run)
        self._read(dataset)
        self._remove(dataset, number)
        shutil.rmtree(run)
        self.counts["rounds"] += 1

    def _dataset(self) -> sf.Dataset:
        report = verify(str(self.case.output))
        check(report.is_whole, f"the dataset has {len(report.damages)} damages")
        return sf.Dataset.open(self.case.output)

    def _add_studies(self, number: int) -> None:
        made = self.folder / "made"
        count = NUM_STUDIES if number else 2 * sum(KEPT.values())
        options = SynthOptions(
            num_studies=count, seed=1000 + number, modality="CT", min_slices=4, max_slices=8, size=32
        )
        generate(options, made)
        (made / "dicom").rename(self.case.dicom / f"round-{number:03d}")
        with (made / "reports.csv").open(newline="", encoding="utf-8") as new:
            rows = list(csv.reader(new))[1:]
        with (self.case.folder / "reports.csv").open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        shutil.rmtree(made)
        self.counts["studies"] += count

    def _kill_packing(self, mode: str) -> None:
        """Start the job in a group of its own, and kill the group after a while."""
        words = [sys.executable, "-m", "pipelines.pack", "--config", str(self.case.config_path)]
        words += ["--set", "execution.num_processes=2", *([] if mode == "pack" else [f"--{mode}"])]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(words, stdout=quiet, stderr=quiet, start_new_session=True) as process:
            try:
                process.wait(self.draws.uniform(1.0, 6.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                self.counts["packing_kills"] += 1

    def _train(self, run: Path) -> None:
        """Two ranks, a kill, one rank, a stop, two ranks to the end."""
        config = write_config(
            self.tiny,
            self.folder / "loop.toml",
            run,
            {
                "data.dataset": self.case.output,
                "data.eval_split": "val",
                "run.evaluate_every_steps": 40,
                "run.max_steps": LOOP_STEPS,
                "run.num_epochs": LOOP_STEPS,
                "run.checkpoint_every_steps": 10,
                "run.max_failed_starts": 0,
                **PATIENT,
            },
        )

        def start(num_ranks: int) -> Any:
            logs, words = self.folder / "logs", [f"--config={config}"]
            return job(logs, "shardflow.training", words, num_ranks=num_ranks, passes_codes=True)

        with start(2) as running:
            if wait_for_steps(running, run, self.draws.randrange(12, 60)):
                self._kill(running)
                self.counts["training_kills"] += 1
        with start(1) as running:
            if wait_for_steps(running, run, steps_done(run) + self.draws.randrange(5, 40)):
                running.process.send_signal(signal.SIGTERM)
                finished = running.wait(WAIT_S)
                check(finished.exit_code in {0, 75}, f"after SIGTERM: {finished.text[-4000:]}")
                self.counts["stops"] += finished.exit_code == 75
        with start(2) as running:
            finished = running.wait(WAIT_S)
            check(finished.exit_code == 0, f"the last start: {finished.text[-4000:]}")
        shutil.rmtree(self.folder / "logs")
        self.goodput.append(measure_goodput(run))

    def _kill(self, running: Job) -> None:
        """Kill one rank, and see the job end; or all of it."""
        ranks = sorted(running.rank_pids().values())
        if self.draws.random() < 0.5 or not ranks:
            running.kill()
            return
        with suppress(ProcessLookupError):
            os.kill(self.draws.choice(ranks), signal.SIGKILL)
        finished = running.wait(WAIT_S)
        check(finished.exit_code != 0, "a job must not end with 0 when a rank was killed")

    def _prove_removed(self, run: Path) -> None:
        for key in self.removed[-8:]:
            with redirect_stdout(io.StringIO()):
                code = command(["ledger", "prove-removed", str(run), "--sample", key])
            check(code == 0, f"{key} was removed, and {run.name} is not proven to be without it")
            self.counts["proofs"] += 1

    def _read(self, dataset: sf.Dataset) -> None:
        """Read epochs in this process, with a stop and a resume amid each."""
        for execution in ("threads", "process"):
            epoch = self.counts["epochs_read"]
            settings: dict[str, Any] = {"seed": SEED, "execution": execution, "num_threads": 2}
            with open_loader(dataset, SPEC, tiny_fields(), **settings) as loader:
                loader.set_epoch(epoch)
                stop = self.draws.randrange(1, len(loader) + 1)
                batches = iter(loader)
                found = [received_key(next(batches)) for _ in range(stop)]
                state = loader.state_dict()
            with open_loader(dataset, SPEC, tiny_fields(), **settings) as loader:
                loader.load_state_dict(state)
                if loader.epoch == epoch:
                    found += received_keys(loader)
            # A state counts whole steps: micro-batches of a step that was not finished come again.
            unique = list(dict.fromkeys(found))
            planned = list(planned_keys(dataset, "train", SPEC, seed=SEED, epoch=epoch))
            check(unique == planned, f"epoch {epoch} in {execution}: not the plan's rows")
            self.counts["epochs_read"] += 1

    def _remove(self, dataset: sf.Dataset, number: int) -> None:
        """Remove what is more than is kept; now and then take it out of the shards as well."""
        keys = []
        for split, rows in dataset.splits.items():
            extra = min(max(0, len(rows) - KEPT[split]), NUM_STUDIES)
            keys += [dataset.samples.sample_key(row) for row in self.draws.sample(rows, extra)]
        del dataset
        if keys:
            remove(self.case.output, self.case.private, Withdrawn(sample_keys=keys))
            self.removed += keys
            self.counts["samples_removed"] += len(keys)
        if number % 3 == 2:
            compact(self.case.output, self.case.private, deletes_old=True)
            self.counts["compactions"] += 1


def received_key(batch: sf.Batch) -> Any:
    return next(received_keys([batch]))


# ---- the whole ---------------------------------------------------------------------------------------


def folder_numbers(work: Path, dataset: Path) -> dict[str, float]:
    """Count what jobs may leave on disk and in shared memory."""
    return {
        "temporary_files": sum(1 for _ in (work / "tmp").rglob("*")),
        "shared_files": sum(1 for _ in Path("/dev/shm").iterdir()),
        "dataset_bytes": sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file()),
    }


def soak(work: Path, minutes: float, *, is_alone: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Run everything; return the numbers, with what grew too much under ``grown``."""
    began = time.monotonic()
    tiny = make_tiny_input(work / "tiny")
    loop, steady = Loop(work, tiny), work / "steady"
    config = write_config(
        tiny,
        work / "steady.toml",
        steady,
        {
            "data.eval_split": "val",
            "run.num_epochs": 100_000,
            "run.checkpoint_every_steps": 100,
            "run.evaluate_every_steps": 500,
            "loader.execution": "process",
            "cache.directory": work / "cache",
            "cache.max_bytes": "64MiB",
            "cache.min_free_bytes": 0,
            **PATIENT,
        },
    )
    words = [f"--config={config}"]
    own, folders = Series(), Series()
    with job(work / "steady-log", "shardflow.training", words, num_ranks=2, passes_codes=True) as running:
        check(wait_for_steps(running, steady, 10), f"steady run: {running._read(-1).text[-4000:]}")
        sampler = Sampler(running.process.pid)
        sampler.start()
        number = 0
        while number < 1 or time.monotonic() - began < 60 * minutes:
            loop.round(number)
            number += 1
            gc.collect()
            own.add(time.monotonic(), sample_process(os.getpid()))
            folders.add(time.monotonic(), folder_numbers(work, loop.case.output))
            check(running.process.poll() is None, f"steady run: {running._read(-1).text[-4000:]}")
            say(
                f"{(time.monotonic() - began) / 60:.1f} min, {dict(loop.counts)}, steady {steps_done(steady)}"
            )
        sampler.stop()
        ranks = sorted(running.rank_pids().values())
        os.kill(ranks[0], signal.SIGKILL)
        check(
            running.wait(WAIT_S).exit_code != 0, "the steady run must not end with 0 when a rank was killed"
        )
    with job(work / "steady-log", "shardflow.training", words, num_ranks=1, passes_codes=True) as running:
        check(wait_for_steps(running, steady, steps_done(steady) + 50), "one rank must go on")
        running.process.send_signal(signal.SIGTERM)
        check(running.wait(WAIT_S).exit_code == 75, "the steady run must stop with 75")
    num_steps = steps_done(steady)
    num_rows = check_ledger(steady, sf.Dataset.open(tiny.dataset), num_steps)
    left = [pid for pid in tree_of(os.getpid())[1:] if "resource_tracker" not in name_of(pid)]
    check(not left, f"processes left behind: {[name_of(pid) for pid in left]}")
    lasting = sampler.lasting()
    check(len(lasting) >= 4, f"launcher, two ranks and their helpers must last, got {sorted(lasting)}")
    grown: list[str] = []
    for name, series in {**lasting, "loop (this process)": own}.items():
        if len(series.times_s) >= (LEAST_JUDGED if series is not own else LEAST_ROUNDS):
            for what, most in MOST_GROWTH.items():
                if series.growth(what) > most:
                    grown.append(f"{name}: {what} by {series.growth(what):.1f}")
    if len(folders.times_s) >= LEAST_ROUNDS:
        for what, most in MOST_GROWTH_OF_TREE.items():
            if folders.growth(what) > most and (is_alone or what != "shared_files"):
                grown.append(f"{what} by {folders.growth(what):.1f}")
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "grown": grown,
        "loop": {**loop.counts, "goodput": summed(loop.goodput), "process": own.summary()},
        "steady": {
            "steps": num_steps,
            "rows_equal_to_the_plan": num_rows,
            "goodput": rounded(measure_goodput(steady)),
            "all_processes": sampler.total.summary(),
            "processes": {name: series.summary() for name, series in sorted(lasting.items())},
        },
        "folders": folders.summary(),
    }


def rounded(goodput: Goodput) -> dict[str, float]:
    return {name: round(value, 3) for name, value in goodput.to_json().items()}


def summed(runs: list[Goodput]) -> dict[str, float]:
    """Add up runs; the share is that of the sums."""
    total: Counter[str] = Counter()
    for run in runs:
        total.update({name: value for name, value in run.to_json().items() if name != "useful_share"})
    share = total["useful_s"] / total["wall_s"] if total["wall_s"] else 0.0
    return {**{name: round(value, 1) for name, value in total.items()}, "useful_share": round(share, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--alone", action="store_true", help="nobody else uses /dev/shm: judge it as well")
    arguments = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="shardflow-soak-") as name:
        work = Path(name)
        (work / "tmp").mkdir()
        # Of this process and of all that it starts.
        os.environ["TMPDIR"] = tempfile.tempdir = str(work / "tmp")
        numbers = soak(
            work,
            arguments.minutes,
            is_alone=arguments.alone,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    record = {
        "command": f"python -m benchmarks.training.soak --minutes {arguments.minutes:g}",
        **about_run(["torch", "numpy"]),
        "note": arguments.note,
        "load_average": {"start": load, "end": os.getloadavg()},
        "most_growth": {**MOST_GROWTH, **MOST_GROWTH_OF_TREE},
        **numbers,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: record[name] for name in ("minutes", "grown", "loop")}, indent=1))
    return 1 if numbers["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
