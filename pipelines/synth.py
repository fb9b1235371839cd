"""``shardflow synth``: generated DICOM studies with reports, annotations and their truth.

The generator needs pydicom, which the training image does not carry, so it is imported when the command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.surface import add_json, human_bytes, natural_number, positive_number, show_facts, write_json
from shardflow.errors import ConfigError

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "generate studies, reports and their truth, for tests and demos"
DESCRIPTION = """\
Generates DICOM studies (CT, MR, CR, DX) of a phantom with lesions of known place and size, reports that
mention them by series and image, boxes, and a file with the whole truth. The same arguments give the same
bytes on every machine and for every number of processes. Everything says that it is generated.

OUT receives dicom/ (images only), reports.csv, annotations.csv, truth.jsonl and README.txt.
"""
# Kept here so that --help needs no pydicom; a test compares them with the generator's.
MODALITIES = ("CT", "MR", "CR", "DX", "mixed")
_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow synth``."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="folder to fill; it must be empty or missing")
    add("--studies", required=True, type=positive_number, metavar="N", help="number of studies")
    add(
        "--seed",
        required=True,
        type=natural_number,
        metavar="S",
        help="seed; another one gives other patients",
    )
    add("--modality", choices=MODALITIES, default="mixed", help="what to generate (mixed)")
    add(
        "--slices",
        type=_bounds,
        default=(24, 64),
        metavar="MIN:MAX",
        help="slices of the finest stacks (24:64)",
    )
    add(
        "--size",
        type=positive_number,
        default=512,
        metavar="PIXELS",
        help="matrix of CT; MR about half, CR and DX four times (512)",
    )
    add("--lesions", type=_bounds, default=(0, 5), metavar="MIN:MAX", help="lesions of a patient (0:5)")
    add(
        "--pathologies",
        default="default",
        metavar="LIST",
        help="oddities and their chance, such as tilt,oblique=50 (default)",
    )
    add("--processes", type=positive_number, default=1, metavar="P", help="processes to share the work (1)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    try:
        from shardflow.synthetic import DEFAULT_PATHOLOGIES, PATHOLOGIES, SynthOptions, generate
    except ModuleNotFoundError as error:
        if error.name != "pydicom":
            raise
        raise ConfigError(
            "shardflow synth needs pydicom; install it with: pip install 'shardflow[pack]'."
        ) from None
    options = SynthOptions(
        num_studies=arguments.studies,
        seed=arguments.seed,
        modality=arguments.modality,
        min_slices=arguments.slices[0],
        max_slices=arguments.slices[1],
        size=arguments.size,
        min_lesions=arguments.lesions[0],
        max_lesions=arguments.lesions[1],
        pathologies=_pathologies(arguments.pathologies, DEFAULT_PATHOLOGIES, tuple(PATHOLOGIES)),
    )
    started = time.monotonic()
    with _progress(arguments.studies) as report_progress:
        summary = generate(
            options, arguments.out, num_processes=arguments.processes, progress=report_progress
        )
    seconds = time.monotonic() - started
    if arguments.json:
        write_json({"out": str(arguments.out), **summary.to_json(), "seconds": round(seconds, 3)})
    else:
        show_facts(
            [
                ("generated studies", summary.num_studies),
                ("patients", summary.num_patients),
                ("series", summary.num_series),
                ("images", summary.num_instances),
                ("lesions", summary.num_lesions),
                ("mentions of images", summary.num_mentions),
                ("size of the images", human_bytes(summary.num_bytes)),
                ("time", f"{seconds:.1f} s"),
            ]
        )
    return 0


def _bounds(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be MIN:MAX or one number, got {text!r}")
    low = int(match[1])
    high = low if match[2] is None else int(match[2])
    if high < low:
        raise argparse.ArgumentTypeError(f"must have MIN at most MAX, got {text!r}")
    return low, high


def _pathologies(text: str, defaults: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
    """Read a list of ``default``, ``all``, ``none`` and ``name[=percent]``; without a percent, always."""
    # Damage is made only where it is named.
    words = {
        "default": defaults,
        "all": {name: 0 if name == "truncated" else 100 for name in names},
        "none": dict.fromkeys(names, 0),
    }
    chosen: dict[str, int] = {}
    for item in text.split(","):
        name, equals, percent = item.strip().partition("=")
        if equals and not (percent.isascii() and percent.isdigit()):
            raise ConfigError(f"--pathologies must be names with whole percents, got {item!r}.")
        chosen.update({name: int(percent)} if equals else words.get(name, {name: 100}))
    return chosen


@contextlib.contextmanager
def _progress(num_studies: int) -> Iterator[Callable[[int], None] | None]:
    """Show a bar with the time left on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating studies"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("studies", total=num_studies)
        yield lambda count: bar.update(task, completed=count)
