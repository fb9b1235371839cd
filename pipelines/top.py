"""``shardflow top``: a run in the terminal while it goes on, and afterwards."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pipelines.top_draw import ASCII, UNICODE, Glyphs
from pipelines.top_frame import frame
from pipelines.top_screen import show_live, show_replay
from shardflow.errors import ConfigError
from shardflow.monitoring.live import LiveRun

__all__ = ["add_arguments", "run"]

DESCRIPTION = """\
Shows a training run while it goes on: rate of steps and wait for data, parts of a step, what the loader's
threads do, queues, tiers, ranks, memory, the verdict with its advice, the tuner, goodput. Reads metrics.jsonl
in the run folder and nothing else, so it works from any machine that sees the folder, before the first step,
and on a run that has ended. Memory does not grow with the length of a run.

Without a terminal, or with --once, one picture is printed.

keys:
  q            leave
  p, space     hold the picture; play and pause in a replay
  left, right  in a replay: ten seconds back and on; with shift a minute
  home, end    in a replay: to its start, to its end
  up, down     in a replay: twice as fast, half as fast
"""
EXAMPLES = """\
examples:
  shardflow top run
  shardflow top run --once
  shardflow top run --replay --speed 20
"""
_LOG_WIDTH = 100
_MOST_SPEED = 100_000.0


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= _MOST_SPEED:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most {_MOST_SPEED:,.0f}, got {text!r}"
        )
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow top``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a training run")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--replay", action="store_true", help="play the run from its first line on")
    parser.add_argument(
        "--speed",
        type=_speed,
        default=10.0,
        metavar="N",
        help="of a replay, times as fast as it was (default 10)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    folder: Path = arguments.folder
    console = Console(highlight=False)
    glyphs = _glyphs(console)
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        if not folder.is_dir():
            raise ConfigError("RUN must be the folder of a training run, got no folder; correct it.")
        _print_once(console, LiveRun(folder), glyphs)
        return 0
    if arguments.replay:
        show_replay(console, folder, glyphs, speed=arguments.speed)
    else:
        show_live(console, folder, glyphs)
    return 0


def _glyphs(console: Console) -> Glyphs:
    """What the terminal can show."""
    try:
        f"{UNICODE.spark}{UNICODE.full}{UNICODE.box}{UNICODE.dot}".encode(console.encoding)
    except (LookupError, UnicodeEncodeError):
        glyphs = ASCII
    else:
        glyphs = UNICODE
    return replace(glyphs, is_coloured=console.color_system is not None and not console.no_color)


def _print_once(console: Console, run: LiveRun, glyphs: Glyphs) -> None:
    """A picture as high as it takes; as wide as the terminal, or as COLUMNS says."""
    width = console.width if console.is_terminal or os.environ.get("COLUMNS") else _LOG_WIDTH
    console.width = width
    for line in frame(run.follow(time.time()), width=width, height=None, glyphs=glyphs):
        line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
    sys.stdout.flush()
