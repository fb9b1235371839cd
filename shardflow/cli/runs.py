"""Commands that read the measurements of a training run: ``goodput``, ``verdict`` and ``metrics``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterable

from shardflow.cli.common import add_json, add_run, show_lines, show_table, write_json
from shardflow.errors import ConfigError
from shardflow.logs import counted
from shardflow.monitoring import MetricsServer, read_metrics_text, require_prometheus
from shardflow.monitoring.goodput import goodput_of
from shardflow.monitoring.history import RunFile, read_settings
from shardflow.monitoring.lines import MetricsTail, damage_note, refuse_dataset
from shardflow.monitoring.verdict.judging import judge_each
from shardflow.telemetry import Verdict
from shardflow.viewing.web import new_token, read_token

GOODPUT_DESCRIPTION = """\
Splits the time of a training run, over all its starts, into steps that count, waiting for data, checkpoints,
evaluations, restarts, and work that a later start did again. The share of useful steps is the number that
people compare (goodput, effective training time ratio). Time before the first start had joined its ranks is
not known and not counted.
"""
GOODPUT_EXAMPLES = """\
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


def add_goodput_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow goodput``."""
    add_run(parser)
    add_json(parser)


def run_goodput(arguments: argparse.Namespace) -> int:
    """Run ``shardflow goodput``."""
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


VERDICT_DESCRIPTION = """\
Judges what a run measured (metrics.jsonl in its folder): whether its steps wait for storage, decoding,
copies, gradients or a slow rank, or compute. Each finding comes with its share of the step, its numbers, and
advice that names a setting with its old and new value. Gains are estimates.
"""
VERDICT_EXAMPLES = """\
examples:
  shardflow verdict runs/first
  shardflow verdict runs/first --json
"""
_LEAST_GAIN = 0.01


def add_verdict_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow verdict``."""
    add_run(parser)
    add_json(parser)


def run_verdict(arguments: argparse.Namespace) -> int:
    """Run ``shardflow verdict``."""
    file = RunFile(arguments.folder)
    now, phases = _judge(judge_each(file.intervals(), config=read_settings(arguments.folder)))
    if not now:
        raise ConfigError(
            f"A verdict needs the measurements of a few steps; the {file.num_intervals} intervals of this "
            "RUN are too few. Wait until it has run longer, and check monitor.interval_s."
        )
    if arguments.json:
        rows = [{"first_step": first, "last_step": last, "code": one.code} for first, last, one in phases]
        verdicts = [one.to_json() for one in now]
        write_json({"verdicts": verdicts, "stretches": rows, "damaged_lines": file.num_damaged})
        return 0
    for verdict in now:
        show_lines([verdict.text, *(_advice_line(one.text, one.gain) for one in verdict.advice)])
    shown = [(one.code, f"{first:,}", f"{last:,}", f"{one.share:.0%}") for first, last, one in phases]
    show_table("what came first over the run", ("", "from step", "to step", "of the step"), shown)
    show_lines(filter(None, [damage_note(file.num_damaged)]))
    return 0


def _advice_line(text: str, gain: float) -> str:
    return f"  - {text}" + (f" (about {gain:.0%} faster)" if gain >= _LEAST_GAIN else "")


def _judge(found: Iterable[list[Verdict]]) -> tuple[list[Verdict], list[tuple[int, int, Verdict]]]:
    """Return the last verdicts, and the phases of the run: first and last step, newest leading verdict."""
    now: list[Verdict] = []
    phases: list[tuple[int, int, Verdict]] = []
    last = -1
    for now in found:
        first = now[0]
        if phases and phases[-1][2].code == first.code:
            phases[-1] = (phases[-1][0], first.global_step, first)
        else:
            phases.append((last + 1, first.global_step, first))
        last = first.global_step
    return now, phases


METRICS_DESCRIPTION = """\
Serves the numbers of a training run under /metrics, as a run with [monitor] prometheus does itself: for a run
that was started without it, from another machine that sees its folder, and on after the run has ended. The
folder may still be empty. Only numbers are served. Scrapers need a token, because other users of this machine
reach its ports too: the one in the printed address, which is new at each start, or that of --token-file, for
a scrape configuration; with --no-token none.
"""
METRICS_EXAMPLES = """\
examples:
  shardflow metrics run
  shardflow metrics run --token-file scrape.token
  shardflow metrics run --listen 0.0.0.0:9464 --token-file scrape.token
  shardflow metrics run --once
"""
_LISTEN = "127.0.0.1:9464"


def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow metrics``."""
    add_run(parser)
    parser.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        default=_LISTEN,
        help=f"where to serve; port 0 for any free one ({_LISTEN})",
    )
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument(
        "--token-file", metavar="FILE", help="ask scrapers for the token in this file, not for a new one"
    )
    tokens.add_argument("--no-token", action="store_true", help="serve everybody who reaches the address")
    parser.add_argument(
        "--once",
        action="store_true",
        help="write the numbers to standard output instead, and exit: for a textfile collector",
    )


def run_metrics(arguments: argparse.Namespace) -> int:
    """Run ``shardflow metrics`` until it is stopped."""
    require_prometheus("shardflow metrics")
    if not arguments.folder.is_dir():
        raise ConfigError("RUN must be an existing folder, got none of that name; correct it.")
    refuse_dataset(arguments.folder)
    if arguments.once:
        sys.stdout.write(read_metrics_text(arguments.folder))
        return 0
    if arguments.token_file is not None:
        token = read_token(arguments.token_file, "--token-file")
    else:
        token = "" if arguments.no_token else new_token()
    with MetricsServer(arguments.folder, arguments.listen, asked_by="--listen", token=token) as server:
        show_lines([f"Metrics are at {server.url} until Ctrl-C."])
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0
