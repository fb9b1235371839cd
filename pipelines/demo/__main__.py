"""Run the demo: ``python -m pipelines.demo --output FOLDER``; exit code 0 if all that it claims holds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from pipelines.demo.story import Story
from shardflow.cli.common import HelpFormatter

DESCRIPTION = """\
Packs real DICOM, trains on two processes, kills one, resumes on one, and shows that nothing was lost: under
three minutes on two cores, without a GPU or a download.
"""
EPILOG = """\
example:
  python -m pipelines.demo --output demo-output

exit codes: 0 all that it claims holds; 1 a claim fails, or a job failed; 2 the folder is not the demo's;
130 stopped by Ctrl-C.
"""
_MARKER = ".made-by-the-shardflow-demo"


def build_parser() -> argparse.ArgumentParser:
    """Build the command line of the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.demo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="FOLDER",
        help="new folder, or the one of an earlier demo (demo-output)",
    )
    return parser


def main() -> int:
    """Run the demo: 0 done, 1 a claim fails or a job failed, 2 the output folder is not the demo's."""
    output = build_parser().parse_args().output.resolve()
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
