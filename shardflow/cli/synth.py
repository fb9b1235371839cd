"""``shardflow synth``: generated DICOM studies with reports, annotations and their truth.

The generator needs pydicom, which the training image does not carry, so it is imported when the command runs.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from shardflow.cli.common import (
    add_json,
    natural_number,
    positive_number,
    show_facts,
    step_progress,
    write_json,
)
from shardflow.errors import ConfigError
from shardflow.logs import human_bytes

DESCRIPTION = """\
Generates DICOM studies (CT, MR, CR, DX) of a phantom with lesions of known place and size, reports that
mention them by series and image, boxes, and a file with the whole truth. The same arguments give the same
bytes on every machine and for every number of processes. Everything says that it is generated.

OUT receives dicom/ (images only), reports.csv, annotations.csv, truth.jsonl and README.txt.
"""
EXAMPLES = """\
oddities of --pathologies, and how often each comes by default:
  duplicates      15 %   an instance stands twice, byte for byte
  high-bits       15 %   bits above Bits Stored are set
  missing-slices  15 %   slices inside a stack are lost
  mixed-phases    15 %   two contrast phases in one series
  oblique         30 %   the whole stack is turned in space
  padding         30 %   a padding value outside a circle
  same-number      8 %   two series of a study have one Series Number
  shuffled        30 %   Instance Numbers do not follow the slices
  stray-files     20 %   files that are not DICOM lie among the images
  tilt            25 %   the gantry is tilted
  truncated        0 %   the pixels of one instance are cut short
  all (100 % of each but truncated), none and default may stand in the list too; NAME alone means 100 %.

oddities of --report-oddities, of which none comes by default:
  no-image     no image of a finding is named
  no-series    an image is named without its series
  overcall     something is thought possible on an image that shows nothing (chance a report)
  wrong-image  the image that is named is another one, or there is none of the number

examples:
  shardflow synth generated --studies 20 --seed 7
  shardflow synth small --studies 4 --seed 7 --size 64 --slices 6:12 --modality CT
  shardflow synth odd --studies 8 --seed 7 --size 64 --pathologies none,tilt=50,truncated=10
"""
# Kept here so that --help needs no pydicom; a test compares them with the generator's.
MODALITIES = ("CT", "MR", "CR", "DX", "mixed")
_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow synth``."""
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
        help="oddities, NAME or NAME=PERCENT, separated by commas; see below (default)",
    )
    add(
        "--report-oddities",
        default="none",
        metavar="LIST",
        help="what reports leave out or get wrong, in the same way (none)",
    )
    add("--processes", type=positive_number, default=1, metavar="P", help="processes to share the work (1)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.synthetic import (
        DEFAULT_PATHOLOGIES,
        PATHOLOGIES,
        REPORT_ODDITIES,
        SynthOptions,
        generate,
    )

    options = SynthOptions(
        num_studies=arguments.studies,
        seed=arguments.seed,
        modality=arguments.modality,
        min_slices=arguments.slices[0],
        max_slices=arguments.slices[1],
        size=arguments.size,
        min_lesions=arguments.lesions[0],
        max_lesions=arguments.lesions[1],
        pathologies=_chances("--pathologies", arguments.pathologies, DEFAULT_PATHOLOGIES, tuple(PATHOLOGIES)),
        report_oddities=_chances("--report-oddities", arguments.report_oddities, {}, tuple(REPORT_ODDITIES)),
    )
    started = time.monotonic()
    with step_progress("generating studies") as advance:
        summary = generate(
            options,
            arguments.out,
            num_processes=arguments.processes,
            progress=lambda done: advance(done, arguments.studies),
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


def _chances(option: str, text: str, defaults: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
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
            raise ConfigError(f"{option} must be names with whole percents, got {item!r}.")
        chosen.update({name: int(percent)} if equals else words.get(name, {name: 100}))
    return chosen
