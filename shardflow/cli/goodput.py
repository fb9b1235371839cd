"""``shardflow goodput``: where the time of a training run went, over all its starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardflow.cli.common import add_json, counted, show_lines, show_table, write_json
from shardflow.monitoring.goodput import goodput_of
from shardflow.monitoring.lines import MetricsTail, damage_note

DESCRIPTION = """\
Splits the time of a training run, over all its starts, into steps that count, waiting for data, checkpoints,
evaluations, restarts, and work that a later start did again. The share of useful steps is the number that
people compare (goodput, effective training time ratio). Time before the first start had joined its ranks is
not known and not counted.
"""
EXAMPLES = """\
examples:
  shardflow goodput run
  shardflow goodput run --json
"""
_PARTS = (
    ("steps that count", "useful_s"),
    ("waiting for data in them", "data_wait_s"),
    ("standing still for checkpoints", "checkpoint_s"),
    ("evaluations", "evaluation_s"),
    ("starts and restarts", "restart_s"),
    ("work done again", "lost_s"),
    ("between all that", "other_s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow goodput``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a training run")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    tail = MetricsTail(arguments.folder)
    found = goodput_of(tail.read())
    values = {**found.to_json(), "damaged_lines": tail.num_damaged}
    if arguments.json:
        write_json(values)
        return 0
    starts = counted(found.num_starts, "start")
    steps = f"{counted(found.num_steps, 'step')} that count, {found.num_lost_steps} done again"
    show_lines([f"{found.useful_share:.1%} useful of {found.wall_s:,.1f} s in {starts}; {steps}."])
    total = found.wall_s or 1.0
    rows = [(name, f"{values[key]:,.1f}", f"{values[key] / total:.1%}") for name, key in _PARTS]
    show_table("where the time went", ("", "s", "share"), rows)
    show_lines(filter(None, [damage_note(tail.num_damaged)]))
    return 0
