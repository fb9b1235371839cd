"""``shardflow review`` and ``shardflow reports``: rows of tables and findings for people to check."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_where,
    choose_samples,
    open_dataset,
    positive_number,
    write_result,
)
from shardflow.errors import ConfigError
from shardflow.logs import counted

DESCRIPTION = """\
Writes rows of an attached table as a CSV file, which a person corrects in a spreadsheet, and reads it back as
the next version of the table. Rows are named by keys of the dataset alone (shardflow view DATASET shows a
sample by its key). A --table that is not there is made of what the person fills in (--add).

  shardflow review DATASET --table NAME -o FILE    writes the rows
  shardflow review DATASET --read FILE             reads the corrections

Rows may be deleted from the file, and columns added (NAME.urgent); an empty cell is a missing value. Each
value is compared with the version that was written out: nothing but corrections changes, corrections of
several files are merged, and a value that two of them correct differently is refused. A value of another
type, a class that the column does not have, and a row that is no row of the dataset are refused too, before
anything is written.
"""
EXAMPLES = """\
examples:
  shardflow review my-dataset --table chexpert --where "predictions.edema > 0.8 and chexpert.edema == 0" \\
      --show predictions.edema -o review.csv
  shardflow review my-dataset --read review.csv --mark reviewed
  shardflow review my-dataset --table quality --add usable --limit 200 -o usable.csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow review``."""
    add_dataset(parser)
    add = parser.add_argument
    add("--table", metavar="NAME", help="attached table to correct, or the name of a new one")
    add("-o", "--output", metavar="FILE", type=Path, help="CSV file to write; it must not exist")
    add("--columns", metavar="A,B", help="columns to correct (all of bool, int, float and category)")
    add("--add", metavar="A,B", help="new columns to fill in")
    add("--show", metavar="TABLE.A,facts.B", help="other columns to look at, such as predictions")
    add_where(parser)
    add("--split", metavar="SPLIT", help="splits of the rows, such as train+val (all)")
    add("--limit", metavar="N", type=positive_number, help="most rows; of more a random sample")
    add("--seed", metavar="N", type=int, default=0, help="of that sample (0)")
    add("--read", metavar="FILE", type=Path, help="read a file with corrections back")
    add("--mark", metavar="COLUMN", help="with --read: column of bool that becomes true for its rows")
    add("--new-classes", action="store_true", help="with --read: a category may get new classes")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    if (arguments.read is None) == (arguments.output is None):
        raise ConfigError(
            "review needs either -o FILE, which it writes, or --read FILE; write: shardflow review DATASET "
            "--table NAME -o FILE"
        )
    if arguments.read is not None:
        _read(arguments)
    else:
        _write(arguments)
    return 0


def _write(arguments: argparse.Namespace) -> None:
    from shardflow.packing.tables.review import write_review

    if not arguments.table:
        raise ConfigError("-o needs --table, the name of the table; `shardflow info DATASET` lists them.")
    if arguments.mark or arguments.new_classes:
        raise ConfigError("--mark and --new-classes belong to --read; leave them out.")
    dataset = open_dataset(arguments.dataset)
    rows, _ = choose_samples(dataset, arguments.split, arguments.where, arguments.keys)
    done = write_review(
        dataset,
        rows,
        arguments.output,
        table=arguments.table,
        columns=None if arguments.columns is None else _names(arguments.columns),
        add=_names(arguments.add or ""),
        show=_names(arguments.show or ""),
        limit=arguments.limit,
        seed=arguments.seed,
    )
    written = f"{counted(done.num_rows, 'row')} of table {done.table} in {arguments.output}"
    lines = [
        f"{written}; to correct: {', '.join(done.columns)}",
        f"read it back with: shardflow review {arguments.dataset} --read {arguments.output}",
    ]
    write_result(arguments, asdict(done), lines)


def _names(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _read(arguments: argparse.Namespace) -> None:
    from shardflow.packing.tables.review import read_review

    given = ("table", "columns", "add", "show", "where", "keys", "split", "limit")
    extra = [f"--{name}" for name in given if getattr(arguments, name) is not None]
    if extra:
        raise ConfigError(f"--read takes table and rows from the file; leave out {', '.join(extra)}.")
    done = read_review(
        open_dataset(arguments.dataset),
        arguments.read,
        allows_new_classes=arguments.new_classes,
        mark=arguments.mark,
    )
    version = f"version {done.number}" if done.is_new else f"version {done.number}, unchanged"
    lines = [f"table {done.table}, {version}: {counted(done.num_rows, 'row')} read"]
    for what, counts in (("changed", done.changed), ("filled in", done.filled), ("cleared", done.cleared)):
        lines += [f"{counted(count, 'value')} of {name} {what}" for name, count in counts.items()]
    write_result(arguments, asdict(done), lines)


REPORTS_DESCRIPTION = """\
  shardflow reports review DATASET -o FILE   findings that are not sure, as a CSV file that a person fills
                                             in; it is read back by: shardflow entities DATASET
                                             --corrections FILE --name reviewed
  shardflow reports lint DATASET -o FILE     phrases of findings and impressions that no table knows, with the
                                             number of reports, for a lexicon of one's own

The files hold words of reports: only their owner may read them, and nothing of them is printed.
"""
REPORTS_EXAMPLES = """\
examples:
  shardflow reports review my-dataset -o private/review.csv --least 0.3 --most 0.8
  shardflow reports lint my-dataset -o private/unknown.csv --min-reports 20
"""


def add_reports_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow reports``."""
    from shardflow.format.entities import USUAL_WHERE

    add = parser.add_argument
    add("task", choices=("review", "lint"), help="what to write")
    add_dataset(parser)
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        required=True,
        help="new CSV file to write",
    )
    add("--limit", metavar="N", type=positive_number, default=1000, help="most rows (1,000)")
    add("--least", metavar="P", type=float, default=0.2, help="review: lower bound of sureness (0.2)")
    add("--most", metavar="P", type=float, default=0.8, help="review: upper bound (0.8)")
    add("--where", metavar="EXPRESSION", default=USUAL_WHERE, help="review: as of `shardflow entities`")
    add(
        "--min-reports",
        metavar="N",
        type=positive_number,
        default=5,
        help="lint: least number of reports with a phrase (5)",
    )
    add_json(parser)


def run_reports(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.format.entities import EntityRules
    from shardflow.reports.review import write_findings, write_unknown_phrases

    dataset = open_dataset(arguments.dataset, with_studies=True)
    if arguments.task == "lint":
        phrases, reports = write_unknown_phrases(
            dataset, arguments.output, min_reports=arguments.min_reports, limit=arguments.limit
        )
        lines = [f"{counted(phrases, 'phrase')} of {counted(reports, 'report')} in {arguments.output}"]
        write_result(arguments, {"num_phrases": phrases, "num_reports": reports}, lines)
        return 0
    rows = write_findings(
        dataset,
        arguments.output,
        rules=EntityRules(where=arguments.where),
        least=arguments.least,
        most=arguments.most,
        limit=arguments.limit,
    )
    lines = [
        f"{counted(rows, 'finding')} in {arguments.output}; fill in right (y or n), new_label, new_assertion",
        f"read back: shardflow entities {arguments.dataset} --corrections {arguments.output} --name reviewed",
    ]
    write_result(arguments, {"num_findings": rows}, lines)
    return 0
