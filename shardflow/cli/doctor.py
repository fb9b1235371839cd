"""``shardflow doctor``: checks the environment of a training job before it starts."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from shardflow.cli.common import add_json, positive_number, show_lines, write_json
from shardflow.config import load_config
from shardflow.logs import counted
from shardflow.training.config import TrainConfig
from shardflow.training.doctor import Finding, examine, inspect_environment

DESCRIPTION = """\
Looks at the environment of a training job, on the machine and in the container where it will run: variables
of NCCL and torch that nothing reads or that have old names or wrong values, network interfaces and adapters,
ulimits, /dev/shm, cores for each rank, memory for pinned buffers, free disk, versions with known holes,
torchrun's settings. With --config, also what the run's own settings ask of the machine.

Each line says what must hold, what was found, and the fix. Exit code 0: nothing is wrong, apart from
warnings. 1: something is, marked "error".
"""
EXAMPLES = """\
examples:
  shardflow doctor
  shardflow doctor --config my-training.toml --nodes 4 --ranks-per-node 8
  shardflow doctor --json --allow NCCL_MY_PLUGIN_MODE
"""
EXIT_WRONG = 1
_MARKS = {"error": "error  ", "warning": "warning", "ok": "ok     "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow doctor``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of the run, TOML")
    parser.add_argument(
        "--nodes", type=positive_number, default=1, metavar="N", help="machines of the job (1)"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=positive_number,
        metavar="R",
        help="ranks on each (a rank a GPU of this machine)",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that only a plugin reads, and is left alone (repeatable)",
    )
    parser.add_argument("--quiet", action="store_true", help="leave out what is as it must be")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or 1 if a check fails."""
    config = load_config(TrainConfig, arguments.config) if arguments.config else None
    environment = inspect_environment(
        config, num_nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node
    )
    findings = examine(environment, allowed=arguments.allow)
    counts = Counter(finding.level for finding in findings)
    if arguments.json:
        for finding in findings:
            write_json(finding.to_json())
    else:
        shown = [finding for finding in findings if finding.level != "ok" or not arguments.quiet]
        show_lines(map(_describe, sorted(shown, key=lambda finding: list(_MARKS).index(finding.level))))
        wrong = f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}"
        show_lines([f"{wrong}, {counts['ok']} as they must be"])
    return EXIT_WRONG if counts["error"] else 0


def _describe(finding: Finding) -> str:
    line = f"{_MARKS[finding.level]} {finding.topic} must {finding.must}, got {finding.found}"
    return f"{line}; {finding.fix}" if finding.fix else line
