"""``python -m fuzz``: every target in a process of its own, for some seconds each.

A target that breaks is started again until its time is over; what broke it lies in ``.fuzz-corpus``. The
inputs of a finding go to ``fuzz/found``, where the tests read them, once the reader is mended.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.about import about_run
from fuzz.targets import TARGETS

_MAX_FINDINGS: Final = 20
_STATS: Final = {
    "inputs": r"stat::number_of_executed_units:\s*(\d+)",
    "peak_rss_mb": r"stat::peak_rss_mb:\s*(\d+)",
    "slowest_s": r"stat::slowest_unit_time_sec:\s*(\d+)",
}
_EXCEPTION: Final = re.compile(r"^ ?=== Uncaught Python exception: ===\n(.*)$", re.MULTILINE)
_FAULT: Final = re.compile(r"ERROR: (?:libFuzzer|AddressSanitizer): (.*)$", re.MULTILINE)


def fuzz(name: str, seconds: float, options: list[str]) -> dict[str, Any]:
    """Run one target for some seconds; return counts, and the last lines of each finding."""
    found: dict[str, Any] = {"target": name, "seconds": 0.0, "inputs": 0, "peak_rss_mb": 0, "slowest_s": 0}
    findings: list[str] = []
    began = time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 1 and len(findings) < _MAX_FINDINGS:
        words = [f"-max_total_time={int(left)}", f"-artifact_prefix=.fuzz-corpus/{name}-", *options]
        finished = subprocess.run(
            [sys.executable, "-m", "fuzz.engine", name, *words], capture_output=True, text=True, check=False
        )
        said = finished.stderr + finished.stdout
        for key, pattern in _STATS.items():
            number = max((int(value) for value in re.findall(pattern, said)), default=0)
            found[key] = found[key] + number if key == "inputs" else max(found[key], number)
        if finished.returncode == 0:
            break
        cause = _EXCEPTION.search(said) or _FAULT.search(said)
        findings.append(cause[1] if cause else said[-300:])
        sys.stderr.write(f"{name}: {findings[-1]}\n{said[-3000:]}\n")
    return {**found, "seconds": round(time.monotonic() - began, 1), "findings": findings}


def main() -> int:
    """Run the targets of the command line; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"all, or some of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target (10)")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once (1)")
    parser.add_argument("--output", type=Path, help="record the counts as JSON, with date and commit")
    parser.add_argument(
        "--option", action="append", default=[], help="an option of libFuzzer, such as -seed=1"
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.targets if name not in TARGETS]:
        parser.error(f"no target {unknown[0]!r}")
    results = []
    about = {**about_run(["atheris"]), "seconds_each": arguments.seconds}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        names = arguments.targets or list(TARGETS)
        for result in pool.map(lambda name: fuzz(name, arguments.seconds, arguments.option), names):
            results.append(result)
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
            if arguments.output is not None:
                record = json.dumps({**about, "targets": results}, indent=1)
                arguments.output.write_text(f"{record}\n", encoding="utf-8")
    return 1 if any(result["findings"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
