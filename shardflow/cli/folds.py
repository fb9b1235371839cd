"""The command ``shardflow folds``: folds of cross-validation, as a table beside a dataset."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_where,
    counted,
    open_dataset,
    show_lines,
    show_table,
    write_json,
)

if TYPE_CHECKING:
    from shardflow.packing.tables.folds import Folds

DESCRIPTION = """\
Deals the studies of DATASET into folds of cross-validation, as a table: NAME.fold is 0 to K-1.
All studies of a person are in one fold, and classes of --stratify have equal shares in all, as far as persons
allow. Run again after the dataset has grown, it keeps the folds of known persons and deals the new ones.

Use it in where=: "folds.fold != 0" trains without the first fold, "folds.fold == 0" validates on it.
"""
EXAMPLES = """\
examples:
  shardflow folds my-dataset --k 5 --stratify labels.finding
  shardflow folds my-dataset --k 10 --stratify facts.modality --name tenfold --split train+val
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow folds``."""
    add_dataset(parser)
    parser.add_argument("--k", metavar="K", type=int, required=True, help="number of folds")
    parser.add_argument(
        "--stratify", metavar="COLUMN", required=True, help="column of classes whose shares are kept alike"
    )
    parser.add_argument("--name", default="folds", help="name of the table (folds)")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="decides among equal choices (0); any whole number"
    )
    parser.add_argument("--split", metavar="SPLIT", help="splits to deal, such as train+val (all)")
    parser.add_argument(
        "--private-dir",
        metavar="DIR",
        type=Path,
        help="folder that the dataset was packed with, for persons who have several patient keys",
    )
    add_where(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    import numpy as np

    from shardflow.loading.selection import choose_rows
    from shardflow.packing.tables.folds import write_folds
    from shardflow.packing.tables.keys import PrivateFolder

    dataset = open_dataset(arguments.dataset)
    split = arguments.split or "+".join(name for name, span in dataset.splits.items() if span)
    chosen = choose_rows(dataset, split, arguments.where, arguments.keys).rows
    rows = np.asarray(chosen) if isinstance(chosen, range) else chosen.span(0, len(chosen))
    private = None if arguments.private_dir is None else PrivateFolder(path=arguments.private_dir)
    done = write_folds(
        dataset,
        rows,
        name=arguments.name,
        k=arguments.k,
        stratify=arguments.stratify,
        seed=arguments.seed,
        same_persons=() if private is None else private.same_persons(dataset),
    )
    if arguments.json:
        write_json(asdict(done))
    else:
        _show(done)
    return 0


def _show(done: Folds) -> None:
    version = (
        f"version {done.number}" if done.is_new else f"version {done.number}, which has the same content"
    )
    persons = counted(done.num_persons, "person")
    dealt = f"{done.num_studies:,} studies of {persons} in {len(done.studies)} folds"
    notes = (
        (done.num_kept, "studies keep their fold"),
        (done.num_without_person, "studies name no person; each counts as one of its own"),
        (done.num_without_class, "studies have no value to stratify by; they are one class"),
    )
    show_lines(
        [f"table {done.name}, {version}: {dealt}", *(f"{count:,} {what}" for count, what in notes if count)]
    )
    rows = [("studies", *(f"{count:,}" for count in done.studies))]
    rows += [(label, *(f"{count:,}" for count in counts)) for label, counts in done.classes.items()]
    show_table("folds", ("", *map(str, range(len(done.studies)))), rows)
