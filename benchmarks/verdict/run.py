"""The right verdict, how often: 200 seeded runs of the real training job in which exactly one thing is slow.

    python -m benchmarks.verdict.run                  # all that count, seeds 1000 to 1199; about ten minutes
    python -m benchmarks.verdict.run --seed 0 --runs 40   # other seeds, to tune rules on; nothing is recorded

Causes take turns, so that each has its share of the seeds. Runs of one rank go in this process, those of two
ranks one after another in one launch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.about import REPOSITORY, about_run
from benchmarks.verdict.one import WAIT, make_inputs, run_scenario
from benchmarks.verdict.scenarios import CAUSES, RANK_CAUSES, draw
from shardflow.training.config import TimeoutConfig
from shardflow.training.distributed import join_ranks

__all__ = ["FIRST_SEED", "NUM_RUNS", "assign", "measure", "table", "tally"]

FIRST_SEED: Final = 1000
"""Of the runs that count; thresholds were chosen on seeds below it."""
NUM_RUNS: Final = 200
_LAUNCH_TIMEOUT_S: Final = 3600.0
_RESULTS: Final = REPOSITORY / "benchmarks" / "results" / "verdicts.json"

_PAGE: Final = REPOSITORY / "docs" / "verdicts.md"
_BEGIN: Final = "<!-- results -->"
_END: Final = "<!-- end of results -->"

Row = dict[str, Any]


def assign(first_seed: int, num_runs: int) -> list[tuple[int, str]]:
    """Return seed and cause of each run."""
    causes = list(CAUSES)
    return [(first_seed + number, causes[number % len(causes)]) for number in range(num_runs)]


def measure(folder: Path, runs: Sequence[tuple[int, str]]) -> list[Row]:
    """Run them all; one row a run, see ``Found.to_json``.

    Args:
        folder: Gets datasets and run folders.
        runs: Seed and cause of each.
    """
    make_inputs(folder)
    rows = _alone(folder, [one for one in runs if one[1] not in RANK_CAUSES])
    rows += _together(folder, [one for one in runs if one[1] in RANK_CAUSES])
    return sorted(rows, key=lambda row: int(row["seed"]))


def tally(rows: Sequence[Row]) -> dict[str, Any]:
    """Count which verdict came first, by cause."""
    confusion: dict[str, Counter[str]] = {cause: Counter() for cause in CAUSES}
    for row in rows:
        confusion[row["cause"]][_first(row)] += 1
    num_right = sum(_first(row) == row["expected"] for row in rows)
    return {
        "num_runs": len(rows),
        "num_right": num_right,
        "share_right": num_right / max(1, len(rows)),
        "num_right_had_they_been_alone": sum(
            row["first_had_it_been_alone"] == row["expected"] for row in rows
        ),
        "by_cause": {
            cause: {
                "expected": CAUSES[cause],
                "num_runs": sum(found.values()),
                "num_right": found[CAUSES[cause]],
                "first_verdicts": dict(found.most_common()),
            }
            for cause, found in confusion.items()
        },
    }


def table(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of docs/verdicts.md: the total, and a row for each cause that was missed at times."""
    lines = [f"The right verdict came first in {summary['num_right']} of {summary['num_runs']} runs."]
    missed = [one for one in summary["by_cause"].items() if one[1]["num_right"] < one[1]["num_runs"]]
    if missed:
        lines += ["", "| made slow | right verdict | came first | instead |", "|---|---|---|---|"]
    for cause, found in missed:
        others = ", ".join(
            f"{code or 'none'} {count}"
            for code, count in found["first_verdicts"].items()
            if code != found["expected"]
        )
        right = f"{found['num_right']} of {found['num_runs']}"
        lines.append(f"| {cause} | `{found['expected']}` | {right} | {others} |")
    return lines


def _write_page(summary: Mapping[str, Any]) -> None:
    head, _, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    _PAGE.write_text("\n".join([head + _BEGIN, *table(summary), _END + tail]), encoding="utf-8")


def _first(row: Row) -> str:
    return next(iter(row["verdicts"]), "")


def _alone(folder: Path, runs: Sequence[tuple[int, str]]) -> list[Row]:
    rows = []
    torch.set_num_threads(1)
    with join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)) as ranks:
        for seed, cause in runs:
            output = folder / f"run-{seed}"
            rows.append(run_scenario(ranks, folder, output, draw(seed, cause)).to_json())
            _say(rows[-1])
    return rows


def _together(folder: Path, runs: Sequence[tuple[int, str]]) -> list[Row]:
    if not runs:
        return []
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words = [str(word) for run in runs for word in run]
    subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node=2", "-m", "benchmarks.verdict.one", str(folder), *words],
        cwd=REPOSITORY,
        check=True,
        timeout=_LAUNCH_TIMEOUT_S,
    )
    rows: list[Row] = [json.loads(line) for line in (folder / "found.jsonl").read_text().splitlines()]
    for row in rows:
        _say(row)
    return rows


def _say(row: Row) -> None:
    mark = "" if _first(row) == row["expected"] else "  <- not " + row["expected"]
    found = ", ".join(f"{code} {share:.2f}" for code, share in row["verdicts"].items())
    sys.stdout.write(f"{row['seed']} {row['cause']} x{row['severity']}: {found}{mark}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure; the runs that count are recorded."""
    parser = argparse.ArgumentParser(description="how often the right verdict comes first")
    parser.add_argument("--seed", type=int, default=FIRST_SEED)
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--cause", choices=list(CAUSES), help="this one alone; nothing is recorded")
    arguments = parser.parse_args()
    runs = assign(arguments.seed, arguments.runs)
    if arguments.cause:
        runs = [(seed, arguments.cause) for seed, _ in runs]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), runs)
    summary = {**tally(rows), "elapsed_s": round(time.perf_counter() - started)}
    for cause, found in summary["by_cause"].items():
        sys.stdout.write(f"{cause}: {found['num_right']} of {found['num_runs']}, {found['first_verdicts']}\n")
    sys.stdout.write(
        f"{summary['num_right']} of {summary['num_runs']} right; "
        f"{summary['num_right_had_they_been_alone']} had nobody else used the machine\n"
    )
    if (arguments.seed, arguments.runs, arguments.cause) == (FIRST_SEED, NUM_RUNS, None):
        about = {"command": "python -m benchmarks.verdict.run", **about_run(("torch", "numpy"))}
        _RESULTS.write_text(json.dumps({"about": about, **summary, "runs": rows}, indent=1) + "\n")
        _write_page(summary)


if __name__ == "__main__":
    main()
