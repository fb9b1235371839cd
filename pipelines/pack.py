"""Packing job of a checkout: ``python -m pipelines.pack ...`` is ``shardflow pack ...``."""

from __future__ import annotations

import sys

from shardflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pack", *sys.argv[1:]]))
