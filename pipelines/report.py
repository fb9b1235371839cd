"""``shardflow report``: one page about a whole dataset, to be opened in a browser without a network."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipelines.surface import (
    add_dataset,
    add_json,
    human_bytes,
    natural_number,
    open_dataset,
    positive_number,
    show_lines,
    step_progress,
    write_json,
)
from shardflow.errors import ConfigError
from shardflow.preview import gather, render_page
from shardflow.storage import write_atomic

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "write one page about a whole dataset (HTML)"
DESCRIPTION = """\
Writes one HTML file: outcomes of all inputs with their reasons, splits, histograms of size, spacing, slices
and CT values, and a gallery of thumbnails. It asks the network for nothing. The same dataset and options give
the same bytes.

Reads every study, and every slice of CT; --ct-slices bounds that. Thumbnails are pixels of patients: keep the
page where the dataset may lie, or leave them out with --thumbnails 0.
"""
_MOST_THUMBNAILS = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow report``."""
    parser.description = DESCRIPTION
    add_dataset(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="HTML file to write")
    parser.add_argument(
        "--thumbnails", metavar="N", type=natural_number, default=24, help="studies in the gallery (24)"
    )
    parser.add_argument(
        "--ct-slices", metavar="K", type=positive_number, help="slices of each CT series to count (all)"
    )
    parser.add_argument(
        "--threads",
        metavar="N",
        type=positive_number,
        default=os.cpu_count() or 1,
        help="studies read at once",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    if arguments.thumbnails > _MOST_THUMBNAILS:
        raise ConfigError(f"--thumbnails must be at most {_MOST_THUMBNAILS}, got {arguments.thumbnails}.")
    dataset = open_dataset(arguments.dataset)
    with step_progress("reading studies") as progress:
        facts = gather(
            dataset,
            num_thumbnails=arguments.thumbnails,
            slices_per_series=arguments.ct_slices,
            num_threads=arguments.threads,
            progress=progress,
        )
    page = render_page(dataset, facts).encode("utf-8")
    write_atomic(arguments.output, [page], replace=True)
    samples = dataset.samples.num_samples
    if arguments.json:
        thumbnails = len(facts.thumbnails)
        write_json(
            {
                "dataset_id": dataset.dataset_id,
                "samples": samples,
                "thumbnails": thumbnails,
                "bytes": len(page),
            }
        )
    else:
        show_lines([f"{samples:,} samples, {human_bytes(len(page))}: {arguments.output}"])
    return 0
