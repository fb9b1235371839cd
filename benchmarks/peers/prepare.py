"""Writes the samples in a peer's own format: ``python -m benchmarks.peers.prepare PEER FOLDER``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    importlib.import_module(f"benchmarks.peers.{sys.argv[1]}").prepare(Path(sys.argv[2]) / "data")
