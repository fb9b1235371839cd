"""``shardflow reports``: what reports say, for a person to look at."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardflow.cli.common import (
    add_dataset,
    add_json,
    counted,
    open_dataset,
    positive_number,
    write_result,
)

DESCRIPTION = """\
  shardflow reports review DATASET -o FILE   findings that are not sure, as a CSV file that a person fills
                                             in; it is read back by: shardflow entities DATASET
                                             --corrections FILE --name reviewed
  shardflow reports lint DATASET -o FILE     phrases of findings and impressions that no table knows, with the
                                             number of reports, for a lexicon of one's own

The files hold words of reports: only their owner may read them, and nothing of them is printed.
"""
EXAMPLES = """\
examples:
  shardflow reports review my-dataset -o private/review.csv --least 0.3 --most 0.8
  shardflow reports lint my-dataset -o private/unknown.csv --min-reports 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
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
