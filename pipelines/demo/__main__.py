"""Run the demo: ``python -m pipelines.demo --output FOLDER``; exit code 0 if all that it claims holds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from pipelines.demo.story import Story

__all__ = ["main"]

_MARKER = ".made-by-the-shardflow-demo"


def main() -> int:
    """Run the demo: 0 done, 1 a claim fails or a job failed, 2 the output folder is not the demo's."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.demo", description="From DICOM to a resumed training run."
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="FOLDER", help="(demo-output)"
    )
    output = parser.parse_args().output.resolve()
    console = Console(highlight=False, soft_wrap=True)
    if output.exists() and any(output.iterdir()) and not (output / _MARKER).exists():
        console.print(f"--output must be a new folder or one of an earlier demo, got {output}", markup=False)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).touch()
    try:
        return Story(output, console, keep=_MARKER).tell()
    except RuntimeError as error:
        console.print(f"\nThe demo failed: {error}", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
