"""The training job: ``torchrun --nproc-per-node N -m pipelines.train --config FILE [--set table.key=value]``.

Also runs without torchrun, as one rank. Progress goes to standard error; the last line of standard output
is a JSON summary, written by rank 0. Exit codes: 0 finished; 1 failed; 2 a setting is wrong, or the
checkpoint belongs to another run; 75 stopped by SIGTERM or SIGUSR1 with a checkpoint: start again to go on
(torchrun itself then exits with 1, so read the summary or the run folder behind a launcher).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardflow.configs import dump_config, load_config
from shardflow.errors import ConfigError, PlanError, ShardflowError, StateError
from shardflow.logs import configure_logging
from shardflow.training import TrainConfig
from shardflow.training.metrics import StepMetrics

__all__ = ["EXIT_CONFIGURATION", "EXIT_FAILED", "EXIT_STOPPED", "main"]

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, start again later."""

_LOGGER = logging.getLogger(__name__)
_LOG_EVERY_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    configure_logging(rank=rank)
    try:
        config = load_config(TrainConfig, arguments.config, arguments.overrides)
        if arguments.print_config:
            print(dump_config(config), end="")
            return 0
        return _train(config, rank)
    except (ConfigError, PlanError, StateError) as error:
        # Every rank finds the same mistake; one line of it is enough.
        if rank == 0:
            _LOGGER.error("%s", error.message)  # noqa: TRY400 - the sentence says it, a traceback would hide it
        return EXIT_CONFIGURATION
    except ShardflowError as error:
        _LOGGER.exception("%s", error.message)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipelines.train", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="settings of the run, TOML"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="replace one setting; repeatable",
    )
    parser.add_argument("--print-config", action="store_true", help="show the settings in force, and exit")
    return parser


def _train(config: TrainConfig, rank: int) -> int:
    # Torch takes seconds to import; a wrong setting is reported before that.
    from shardflow.training.run import train
    from shardflow.training.signals import StopRequest

    stop = StopRequest()
    with stop.listening(), _progress(rank) as on_step:
        summary = train(config, on_step=on_step, stop=stop)
        # Still listening: once another rank has left with 75, torchrun sends SIGTERM to this one.
        if rank == 0:
            print(json.dumps(summary.to_json()), flush=True)
    return EXIT_STOPPED if summary.outcome == "stopped" else 0


@contextmanager
def _progress(rank: int) -> Iterator[Callable[[StepMetrics, int], None] | None]:
    """Show steps on rank 0: a bar on a terminal, a line every ten seconds in a log."""
    if rank != 0:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        ) as bar:
            task = bar.add_task("", total=None)
            yield lambda metrics, num_steps: bar.update(
                task, total=num_steps, completed=metrics.global_step + 1, description=_describe(metrics)
            )
    else:
        shown_at = float("-inf")

        def log(metrics: StepMetrics, num_steps: int) -> None:
            nonlocal shown_at
            number, now = metrics.global_step + 1, time.monotonic()
            if now - shown_at >= _LOG_EVERY_S or number == num_steps:
                shown_at = now
                _LOGGER.info("step %d of %d: %s", number, num_steps, _describe(metrics))

        yield log


def _describe(metrics: StepMetrics) -> str:
    loss = "no tokens" if metrics.loss is None else f"loss {metrics.loss:.4f}"
    share = metrics.data_wait_s / metrics.step_s if metrics.step_s else 0.0
    tokens_per_s = metrics.num_tokens / max(metrics.step_s, 1e-9)
    return f"{loss}, {tokens_per_s:,.0f} tokens/s, {share:.0%} waiting for data"


if __name__ == "__main__":
    sys.exit(main())
