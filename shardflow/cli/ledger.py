"""``shardflow ledger``: which samples made a run, and whether two runs were made of the same."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import islice
from pathlib import Path

from shardflow.cli.common import add_json, counted, positive_number, show_lines, write_json
from shardflow.errors import ConfigError
from shardflow.training.ledger import StepRecord, compare_ledgers, read_records

DESCRIPTION = """\
Reads the committed steps of a training run: those that its newest checkpoint counts, each once, as the
attempt that was kept ran them. `show` lists them, `diff` compares two runs step by step. A RUN is a run
folder, or a file of lines that `show --json` wrote; with --compact these hold a digest of each step in place
of its samples.

Exit code 0: done, and for diff: every step has the same samples in the same micro-batches with the same
weights. 1: the runs differ, or a ledger has a gap.
"""
EXAMPLES = """\
examples:
  shardflow ledger show run
  shardflow ledger show run --json --compact
  shardflow ledger diff run another-run
  shardflow ledger diff cluster-a.jsonl run --json
"""
EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and options of ``shardflow ledger``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("action", choices=("show", "diff"), metavar="ACTION", help="show or diff")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="one run to show, two to compare")
    parser.add_argument(
        "--compact", action="store_true", help="show: a digest a step in place of its samples"
    )
    parser.add_argument(
        "--limit",
        type=positive_number,
        default=20,
        metavar="N",
        help="diff: differences that are described; all are counted (20)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 0, or 1 where runs differ."""
    wanted = 1 if arguments.action == "show" else 2
    if len(arguments.runs) != wanted:
        raise ConfigError(
            f"ledger {arguments.action} must have {counted(wanted, 'RUN')}, got {len(arguments.runs)}; see "
            "shardflow ledger --help."
        )
    ledgers = [_read(path) for path in arguments.runs]
    if arguments.action == "show":
        return _show(ledgers[0], arguments)
    return _diff(ledgers[0], ledgers[1], arguments)


def _read(path: Path) -> list[StepRecord]:
    if not path.exists():
        raise ConfigError(
            f"RUN must be a run folder or a file of ledger lines, got {path.name!r}; correct it."
        )
    return read_records(path)


def _show(records: list[StepRecord], arguments: argparse.Namespace) -> int:
    if arguments.json:
        for record in records:
            write_json(record.to_json(compact=arguments.compact))
        return 0
    num_samples = sum(record.num_samples for record in records)
    lines = [f"{counted(len(records), 'committed step')}, {counted(num_samples, 'sample')}"]
    for record in records:
        what = f"digest {record.digest}" if arguments.compact else " ".join(record.keys)
        lines.append(f"step {record.global_step} (epoch {record.epoch}, step {record.step}): {what}")
    show_lines(lines)
    return 0


def _diff(first: list[StepRecord], second: list[StepRecord], arguments: argparse.Namespace) -> int:
    differences = list(compare_ledgers(first, second))
    kinds = Counter(difference.kind for difference in differences)
    first_step = differences[0].global_step if differences else None
    if arguments.json:
        write_json(
            {
                "equal": not differences,
                "num_steps": [len(first), len(second)],
                "first_difference": first_step,
                "differences": dict(sorted(kinds.items())),
                "described": [
                    {"kind": d.kind, "global_step": d.global_step, "text": d.text}
                    for d in islice(differences, arguments.limit)
                ],
            }
        )
    elif not differences:
        show_lines([f"equal: {counted(len(first), 'step')}, the same samples in the same micro-batches"])
    else:
        lines = [f"step {d.global_step}: {d.kind}: {d.text}" for d in differences[: arguments.limit]]
        if len(differences) > arguments.limit:
            lines.append(f"... and {len(differences) - arguments.limit} more")
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines.append(f"different in {counted(len(differences), 'step')}, from step {first_step} on: {found}")
        show_lines(lines)
    return EXIT_DIFFERENT if differences else 0
