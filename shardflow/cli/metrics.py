"""``shardflow metrics``: the numbers of a training run for Prometheus, from its folder."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path

from shardflow.cli.common import show_lines
from shardflow.errors import ConfigError
from shardflow.monitoring import MetricsServer, read_metrics_text, require_prometheus

DESCRIPTION = """\
Serves the numbers of a training run under /metrics, as a run with [monitor] prometheus does itself: for a run
that was started without it, from another machine that sees its folder, and on after the run has ended. The
folder may still be empty. Only numbers are served; on an address beyond this machine (--listen) everybody who
reaches it can read them.
"""
EXAMPLES = """\
examples:
  shardflow metrics run
  shardflow metrics run --listen 0.0.0.0:9464
  shardflow metrics run --once
"""
_DEFAULT = "127.0.0.1:9464"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow metrics``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a training run")
    parser.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        default=_DEFAULT,
        help=f"where to serve; port 0 for any free one ({_DEFAULT})",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="write the numbers to standard output instead, and exit: for a textfile collector",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until it is stopped; the exit code is 0."""
    require_prometheus("shardflow metrics")
    if not arguments.folder.is_dir():
        raise ConfigError("RUN must be an existing folder, got none of that name; correct it.")
    if arguments.once:
        sys.stdout.write(read_metrics_text(arguments.folder))
        return 0
    with MetricsServer(arguments.folder, arguments.listen, asked_by="--listen") as server:
        show_lines([f"Metrics are at {server.url} until Ctrl-C."])
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0
