"""``shardflow preview``: slices of one study beside its report, as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipelines.surface import (
    add_dataset,
    add_json,
    human_bytes,
    natural_number,
    open_dataset,
    positive_number,
    show_lines,
    write_json,
)
from shardflow.errors import ConfigError
from shardflow.preview import WINDOWS, Window, find_row, read_study, render_study
from shardflow.storage import write_atomic

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "draw slices of a study beside its report (PNG)"
DESCRIPTION = """\
Draws slices of a study, evenly spread over its primary series, with the sides of the patient, a scale bar and
slice numbers, beside the report.

KEY is a sample key, or a split and a row of it: train:0. The picture shows pixels and text of a
patient, unless it says GENERATED: keep it where the dataset may lie. Needs Pillow:
pip install 'shardflow[pack]'.
"""
_MOST_SLICES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow preview``."""
    parser.description = DESCRIPTION
    add_dataset(parser)
    parser.add_argument("key", metavar="KEY", help="sample key, or a row such as train:0")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="PNG file to write")
    parser.add_argument(
        "--series", metavar="S", type=natural_number, default=0, help="series, from 0 (0: primary)"
    )
    parser.add_argument(
        "--slices",
        metavar="K",
        type=positive_number,
        default=12,
        help=f"slices at most, up to {_MOST_SLICES} (12)",
    )
    parser.add_argument(
        "--window",
        metavar="C,W",
        help=f"centre and width in the slices' unit (--window=-600,1500), or one of {', '.join(WINDOWS)}; by "
        "default what the series states",
    )
    parser.add_argument(
        "--font", metavar="FILE", type=Path, help="font for scripts that the system's fonts lack"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    if arguments.slices > _MOST_SLICES:
        raise ConfigError(f"--slices must be at most {_MOST_SLICES}, got {arguments.slices}.")
    window = Window.parse(arguments.window) if arguments.window else None
    dataset = open_dataset(arguments.dataset)
    row = find_row(dataset, arguments.key)
    view = read_study(dataset, row, series=arguments.series, num_slices=arguments.slices)
    picture = render_study(view, window=window, font=arguments.font)
    write_atomic(arguments.output, [picture], replace=True)
    facts = {
        "sample_key": view.sample_key,
        "row": view.place,
        "series": view.series_number,
        "slices": list(view.indexes),
        "generated": bool(view.generated),
        "bytes": len(picture),
    }
    if arguments.json:
        write_json(facts)
    else:
        amount = "1 slice" if len(view.slices) == 1 else f"{len(view.slices)} slices"
        show_lines([f"{view.place}: {amount}, {human_bytes(len(picture))}: {arguments.output}"])
    return 0
