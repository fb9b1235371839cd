"""How fast packing is: against the usual script, against a bare loop, with two processes, and in memory.

    python -m benchmarks.pack.run --output benchmarks/results/pack.json

Contestants (contestants.py), each in a fresh process, their order turned from round to round:

- ``job``: the whole packing job with default settings and one packing process, from the start of its
  interpreters to the manifest: discovery, headers, surrogates, reports, plan, pixels, shards, digests, page.
- ``job_of_two``: the same with two packing processes.
- ``half``, ``half_of_two``: both again over half of the studies. What a job costs once (interpreters,
  imports, the page of a bounded number of pictures) is the same in both; the difference is what slices cost.
- ``limit``: header, pixels, codec and one write of the same members in a loop that does nothing else, with
  the settings of memory that packing processes have. ``limit_of_two``: two such loops at once, each over half
  of the files; no job of two processes can gain more than they do.
- ``script``: pydicom, 16-bit PNG by OpenCV, webdataset's ShardWriter, at full size, on a part of the input.
- ``script_scaled``: the same, every image scaled to 256 (CT) or 1,024 pixels (radiographs) first.
- ``headers``: the header pass alone.
- ``job_before``: the job of an earlier checkout (``--before``), by the same interpreter and packages.

"per core" is per second of processor time of all threads and processes, which says more than wall time on a
machine that others use; both are given. Whether two processes are as good as twice one is asked of the wall
clock. Ratios are of the contestants of one round, then the median over the
rounds. ``whole`` takes all of the job; ``running`` the difference to ``half``, as what a job costs once is
spread over millions of slices in life. Bytecode is cached as in any installation that may write its files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.about import about_run
from benchmarks.pack.content import CT, CXR, Kind, make_content, make_small_content
from benchmarks.pack.table import table
from shardflow.packing.engines.base import PROCESS_ENVIRONMENT

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("blosc2", "numpy", "opencv-python-headless", "pydicom", "webdataset")
CONTESTANTS = ("job", "limit", "script", "job_of_two", "limit_of_two", "script_scaled", "headers")
AS_PACKING_PROCESSES = ("headers", "limit", "limit_of_two")
HALVES = {"half": "job", "half_of_two": "job_of_two"}
GOALS = {
    "times_the_script": 3.5,
    "share_of_the_limit": 0.8,
    "two_processes_times_one": 1.8,
    "header_files_per_s": 1500,
}
Rounds = list[dict[str, dict[str, Any]]]


def measure(name: str, folder: Path, scratch: Path, tree: Path = REPOSITORY) -> dict[str, Any]:
    """Run one contestant of a checkout in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(scratch / "bytecode")
    if name in AS_PACKING_PROCESSES:
        environment.update(PROCESS_ENVIRONMENT)
    command = [sys.executable, "-m", "benchmarks.pack.contestants", name, str(folder), str(scratch)]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "load_average": os.getloadavg()[0]}


def measure_kind(
    kind: Kind, scratch: Path, num_studies: int, num_rounds: int, before: Path | None
) -> dict[str, Any]:
    """Measure all contestants on one kind of study."""
    contestants = (*CONTESTANTS, *([] if before is None else ["job_before"]))
    folder, half = scratch / kind.name, scratch / "half" / kind.name
    said = make_content(folder, kind, num_studies)
    _link_half(folder, half)
    for tree in (REPOSITORY, before or REPOSITORY):
        measure("job", half, scratch, tree)  # bytecode, page cache
    rounds: Rounds = []
    for number in range(num_rounds):
        names = [*contestants, *HALVES]
        found: dict[str, dict[str, Any]] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if name == "job_before" and before is not None:
                found[name] = measure("job", folder, scratch, before)
            elif name in HALVES:
                found[name] = measure(HALVES[name], half, scratch)
            else:
                found[name] = measure(name, folder, scratch)
            row = {key: found[name][key] for key in ("wall_s", "processor_s")}
            print(kind.name, number, name, row, file=sys.stderr, flush=True)
        rounds.append(found)
    slice_bytes = kind.rows * kind.columns * 2
    return {
        "content": f"{num_studies} studies of {kind.slices_per_study} slices, "
        f"{kind.columns} x {kind.rows}: {said}",
        "summary": {name: _rates(rounds, name, slice_bytes) for name in contestants},
        "once_per_job_processor_s": _spread(
            rounds, lambda one: 2 * one["half"]["processor_s"] - one["job"]["processor_s"]
        ),
        "ratios_by_processor_time": _ratios(rounds, "processor_s"),
        "ratios_by_wall_time": _ratios(rounds, "wall_s"),
        "peak_memory_bytes": {name: rounds[0][name]["peak_memory_bytes"] for name in ("job", "job_of_two")},
        "rounds": rounds,
    }


def _link_half(folder: Path, half: Path) -> None:
    """Make a folder of every second study, by hard links."""
    half.mkdir(parents=True)
    (half / "reports.csv").write_bytes((folder / "reports.csv").read_bytes())
    for study in sorted((folder / "dicom").iterdir())[::2]:
        (half / "dicom" / study.name).mkdir(parents=True)
        for file in study.iterdir():
            os.link(file, half / "dicom" / study.name / file.name)


def _rates(rounds: Rounds, name: str, slice_bytes: int) -> dict[str, Any]:
    return {
        "slices_per_s_and_core": _spread(
            rounds, lambda one: one[name]["num_slices"] / one[name]["processor_s"]
        ),
        "pixel_mb_per_s_and_core": _spread(
            rounds, lambda one: one[name]["num_slices"] * slice_bytes / 1e6 / one[name]["processor_s"]
        ),
        "slices_per_s_by_wall": _spread(rounds, lambda one: one[name]["num_slices"] / one[name]["wall_s"]),
        "stored_share_of_pixels": round(
            rounds[0][name]["output_bytes"] / rounds[0][name]["num_slices"] / slice_bytes, 3
        ),
    }


def _ratios(rounds: Rounds, clock: str) -> dict[str, Any]:
    def per_slice(one: dict[str, dict[str, Any]], name: str) -> float:
        return float(one[name][clock]) / int(one[name]["num_slices"])

    def running(one: dict[str, dict[str, Any]], name: str = "job", half: str = "half") -> float:
        num_slices = int(one[name]["num_slices"]) - int(one[half]["num_slices"])
        return (float(one[name][clock]) - float(one[half][clock])) / num_slices

    # Two processes share the work: by processor time, what each of them adds to it takes speed away.
    share = 2 if clock == "processor_s" else 1
    return {
        "whole_times_the_script": _spread(
            rounds, lambda one: per_slice(one, "script") / per_slice(one, "job")
        ),
        "running_times_the_script": _spread(rounds, lambda one: per_slice(one, "script") / running(one)),
        "running_times_the_scaled_script": _spread(
            rounds, lambda one: per_slice(one, "script_scaled") / running(one)
        ),
        "whole_share_of_the_limit": _spread(
            rounds, lambda one: per_slice(one, "limit") / per_slice(one, "job")
        ),
        "running_share_of_the_limit": _spread(rounds, lambda one: per_slice(one, "limit") / running(one)),
        "two_processes_times_one": _spread(
            rounds, lambda one: share * running(one) / running(one, "job_of_two", "half_of_two")
        ),
        "two_loops_times_one": _spread(
            rounds, lambda one: share * per_slice(one, "limit") / per_slice(one, "limit_of_two")
        ),
        **(
            {
                "whole_times_before": _spread(
                    rounds, lambda one: per_slice(one, "job_before") / per_slice(one, "job")
                )
            }
            if "job_before" in rounds[0]
            else {}
        ),
    }


def _spread(rounds: Rounds, value: Callable[[dict[str, dict[str, Any]]], float]) -> dict[str, float]:
    values = [value(one) for one in rounds]
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def measure_memory(scratch: Path, counts: Sequence[int]) -> dict[str, Any]:
    """Peak memory of jobs over few and many studies, in the job's process and in its packing process."""
    peaks: dict[str, dict[str, int]] = {}
    for count in counts:
        make_small_content(scratch / f"small{count}", count)
        peaks[str(count)] = measure("job", scratch / f"small{count}", scratch)["peak_memory_bytes"]
    few, many = peaks[str(counts[0])], peaks[str(counts[-1])]
    num_more = counts[-1] - counts[0]
    return {
        "peak_memory_bytes_by_num_studies": peaks,
        "job_bytes_per_study": round((many["job"] - few["job"]) / num_more),
        "process_bytes_per_study": round((many["process"] - few["process"]) / num_more),
    }


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ct-studies", type=int, default=120)
    parser.add_argument("--cxr-studies", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-studies", type=int, nargs="+", default=(500, 1000, 2000))
    parser.add_argument("--before", type=Path, help="an earlier checkout, whose job is measured as well")
    parser.add_argument("--scratch", type=Path, help="folder for 10 GB; by default the temporary one")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardflow-pack-", dir=arguments.scratch) as where:
        scratch = Path(where)
        kinds = {
            kind.name: measure_kind(kind, scratch, count, arguments.rounds, arguments.before)
            for kind, count in ((CT, arguments.ct_studies), (CXR, arguments.cxr_studies))
        }
        memory = measure_memory(scratch, arguments.memory_studies)
    counts = " ".join(map(str, arguments.memory_studies))
    loads = [row["load_average"] for kind in kinds.values() for one in kind["rounds"] for row in one.values()]
    results = {
        "what": (__doc__ or "").strip().splitlines()[0],
        "command": f"python -m benchmarks.pack.run --ct-studies {arguments.ct_studies} --cxr-studies "
        f"{arguments.cxr_studies} --rounds {arguments.rounds} --memory-studies {counts}"
        + " --before checkout"
        * (arguments.before is not None),
        **about_run(PACKAGES),
        **({} if arguments.before is None else {"before": _commit(arguments.before)}),
        # Above about 1 others shared the processors, and even processor times are worth less.
        "load_average_1min": {"least": min(loads), "most": max(loads)},
        "goals": GOALS,
        "peak_memory": memory,
        **kinds,
    }
    text = json.dumps(results, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
