"""``shardflow verdict``: what a run is bound by, and what to do about it, from its run folder alone.

Of a run that goes on, the newest intervals are judged; of one that has ended, its last ones. What was said
before is shown as stretches of steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from shardflow.cli.common import add_json, show_lines, show_table, write_json
from shardflow.errors import ConfigError
from shardflow.monitoring.history import RunFile, read_settings
from shardflow.monitoring.lines import damage_note
from shardflow.monitoring.verdict.judging import judge_each
from shardflow.telemetry import Verdict

DESCRIPTION = """\
Judges what a run measured (metrics.jsonl in its folder): whether its steps wait for storage, decoding,
copies, gradients or a slow rank, or compute. Each finding comes with its share of the step, its numbers, and
advice that names a setting with its old and new value. Gains are estimates.
"""
EXAMPLES = """\
examples:
  shardflow verdict runs/first
  shardflow verdict runs/first --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a training run")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    file = RunFile(arguments.folder)
    now, stretches = _judged(judge_each(file.intervals(), config=read_settings(arguments.folder)))
    if not now:
        raise ConfigError(
            f"RUN must hold measurements of a few steps, got {file.num_intervals} intervals that tell too "
            "little; wait until it has run for longer, and look at monitor.interval_s."
        )
    if arguments.json:
        rows = [{"first_step": first, "last_step": last, "code": one.code} for first, last, one in stretches]
        verdicts = [one.to_json() for one in now]
        write_json({"verdicts": verdicts, "stretches": rows, "damaged_lines": file.num_damaged})
        return 0
    for verdict in now:
        show_lines([verdict.text, *(_advice_line(one.text, one.gain) for one in verdict.advice)])
    shown = [(one.code, f"{first:,}", f"{last:,}", f"{one.share:.0%}") for first, last, one in stretches]
    show_table("what came first over the run", ("", "from step", "to step", "of the step"), shown)
    show_lines(filter(None, [damage_note(file.num_damaged)]))
    return 0


def _advice_line(text: str, gain: float) -> str:
    return f"  - {text}" + (f" (about {gain:.0%} faster)" if gain >= 0.01 else "")


def _judged(found: Iterable[list[Verdict]]) -> tuple[list[Verdict], list[tuple[int, int, Verdict]]]:
    """The last verdicts; and first and last step of each stretch with the same first one, and its newest."""
    now: list[Verdict] = []
    stretches: list[tuple[int, int, Verdict]] = []
    last = -1
    for now in found:
        first = now[0]
        if stretches and stretches[-1][2].code == first.code:
            stretches[-1] = (stretches[-1][0], first.global_step, first)
        else:
            stretches.append((last + 1, first.global_step, first))
        last = first.global_step
    return now, stretches
