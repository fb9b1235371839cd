"""The command ``shardflow stats``: intensities, spacings and shapes of what fields deliver."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_unit,
    add_where,
    counted,
    open_dataset,
    positive_number,
    show_lines,
    show_table,
    step_progress,
    write_json,
)
from shardflow.errors import ConfigError

DESCRIPTION = """\
Reads a split of DATASET once, by the fields of a TOML file, and shows for each field of images, slices or
volumes: mean, standard deviation, range and percentiles of the pixels in their unit, by channel; the same of
the foreground, where a field of the type mask is like= that field; and the percentiles of spacings and shapes
of the selected series. They are what a normalization and a target spacing are chosen from.

Numbers are those of the training split, so that nothing of the others enters a training. Integers of at most
16 bits are counted exactly; of other numbers percentiles are right to 0.03 %. Memory does not grow with the
dataset, and the result depends neither on threads nor on machines. Resizing in the fields changes pixels; a
field without size= shows them as they are stored. Of a volume all stored slices count, whatever is cut of it.
"""
EXAMPLES = """\
examples:
  shardflow stats my-dataset --fields my-fields.toml
  shardflow stats my-dataset --fields my-fields.toml --where "facts.modality == 'CT'" -o fingerprint.json
  shardflow stats my-dataset --fields my-fields.toml --percentiles 1,50,99 --json
"""
_SERIES = {
    "slice_spacing_mm": "spacing of slices, mm",
    "row_spacing_mm": "spacing of rows, mm",
    "column_spacing_mm": "spacing of columns, mm",
    "num_slices": "slices",
    "rows": "rows",
    "columns": "columns",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow stats``."""
    add_dataset(parser)
    parser.add_argument("--fields", metavar="FILE", required=True, help="TOML file of the fields of a loader")
    parser.add_argument("--split", metavar="SPLIT", default="train", help="split to read (train)")
    add_where(parser)
    add_unit(parser)
    parser.add_argument(
        "--percentiles",
        metavar="P,Q",
        default="0.5,5,25,50,75,95,99.5",
        help="percentiles, in percent (0.5,5,25,50,75,95,99.5)",
    )
    parser.add_argument("--threads", metavar="N", type=positive_number, help="threads (all processors)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write the numbers as JSON too")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.fields.registry import read_fields
    from shardflow.loading import LoaderConfig, select
    from shardflow.loading.statistics import field_statistics
    from shardflow.storage.local import write_atomic

    try:
        percentiles = [float(one) for one in arguments.percentiles.split(",")]
    except ValueError:
        raise ConfigError(
            f"--percentiles are numbers with commas, such as 1,50,99, got {arguments.percentiles!r}."
        ) from None
    selection = select(
        open_dataset(arguments.dataset),
        arguments.split,
        unit=arguments.unit or "study",
        where=arguments.where,
        keys=arguments.keys,
    )
    config = None if arguments.threads is None else LoaderConfig(num_threads=arguments.threads)
    with step_progress("reading samples") as advance:
        found = field_statistics(
            selection,
            read_fields(arguments.fields),
            percentiles=percentiles,
            config=config,
            progress=advance,
        )
    found = {"split": selection.split, **found}
    if arguments.output is not None:
        write_atomic(arguments.output, [json.dumps(found, indent=1).encode() + b"\n"], replace=True)
    if arguments.json:
        write_json(found)
        return 0
    bad = f"; {found['num_bad']:,} could not be read" if found["num_bad"] else ""
    show_lines([f"{counted(found['num_samples'], 'sample')} of split {selection.split}{bad}"])
    for name, one in found["fields"].items():
        _show(name, one)
    return 0


def _show(name: str, found: Mapping[str, Any]) -> None:
    units = found.get("units", {})
    unit = ", ".join(units) if all(units) else ""
    parts = [("", found), *([("foreground", found["foreground"])] if "foreground" in found else [])]
    rows = [row for part, numbers in parts for row in _rows(part, numbers)]
    names = [f"{one} %" for one in found["channels"][0]["percentiles"]] if found["channels"] else []
    show_table(
        f"{name}{f' ({unit})' if unit else ''}, {counted(found['num_samples'], 'sample')}",
        ("", "pixels", "mean", "std", "min", "max", *names),
        rows,
    )
    notes = []
    if len(units) > 1:
        shares = ", ".join(f"{count:,} {unit or 'without'}" for unit, count in units.items())
        notes.append(f"note: series of several units are mixed ({shares}); select those of one with --where")
    if found["num_not_finite"]:
        notes.append(f"note: {found['num_not_finite']:,} pixels are not finite, and count nowhere")
    if "foreground" in found:
        with_mask = found["foreground"]["num_samples"]
        notes.append(f"foreground is that of {counted(with_mask, 'sample')} with a mask")
    show_lines(notes)
    if "series" in found:
        percents = list(next(iter(found["series"].values()))["percentiles"])
        show_table(
            f"{name}, {found['num_series']:,} series",
            ("", "missing", *(f"{one} %" for one in percents)),
            [
                (label, f"{one['num_missing']:,}", *map(_number, one["percentiles"].values()))
                for label, one in ((_SERIES[key], one) for key, one in found["series"].items())
            ],
        )


def _rows(part: str, numbers: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for channel, one in enumerate(numbers["channels"]):
        label = part or "all pixels"
        label += f", channel {channel}" if len(numbers["channels"]) > 1 else ""
        shown = [_number(one[key]) for key in ("mean", "std", "min", "max")]
        yield (label, f"{one['num_pixels']:,}", *shown, *map(_number, one["percentiles"].values()))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
