"""When, of what and on what machine something was measured: the head of every table of results."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["about_run", "processor", "write_result"]

REPOSITORY = Path(__file__).resolve().parents[1]


def about_run(packages: Iterable[str] = ()) -> dict[str, object]:
    """Return date, commit, machine, Python, and the versions of some installed packages."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "processor": processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def processor() -> str:
    """Return the processor's name."""
    return _first("/proc/cpuinfo", "model name")


def write_result(found: Mapping[str, object], output: Path | None) -> None:
    """Write a result as JSON into a file; without one, print it."""
    text = json.dumps(found, indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


def _first(path: str, key: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")
