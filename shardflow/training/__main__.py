"""Entry point of one training process: ``python -m shardflow.training --config FILE``, under torchrun.

``shardflow train`` starts torchrun on it. Torch is imported only once the settings are known to be valid.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from shardflow.config import dump_config, load_config
from shardflow.errors import (
    ConfigError,
    NoProgressError,
    PlanError,
    RankLostError,
    SampleError,
    ShardflowError,
    SignatureError,
    StateError,
)
from shardflow.logs import LINE_EVERY_S, configure_logging, time_left

if TYPE_CHECKING:
    from shardflow.training.config import TrainConfig
    from shardflow.training.metrics import StepMetrics

EXIT_FAILED: Final = 1
EXIT_STOPPED: Final = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, start again later."""
EXIT_INTERRUPTED: Final = 130

CODES_VARIABLE: Final = "SHARDFLOW_EXIT_CODES"
"""Environment variable: folder where the ranks of a machine leave their exit codes for the launcher."""
RANK_MARK: Final = "-rank-"
"""In the name of such a file, between the attempt and the local rank."""
_AFTER_RANK_0_S: Final = 3.0
"""Time that a rank with a mistake leaves rank 0 to tell of the same one."""

_LOGGER = logging.getLogger("shardflow.training")  # not __main__, whose lines would not be shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    code = _run(lambda: _build_parser().parse_args(argv))
    report_code(code)
    return code


def run(arguments: argparse.Namespace) -> int:
    """Run the job with parsed arguments, in this process alone; returns the exit code."""
    return _run(lambda: arguments)


def report_code(code: int) -> None:
    """Tell the launcher of this machine, if there is one, the code that this rank is about to exit with."""
    folder = os.environ.get(CODES_VARIABLE)
    if folder is None:
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{attempt}{RANK_MARK}{os.environ['LOCAL_RANK']}"
    with suppress(FileNotFoundError):  # the launcher was killed, and another one has cleaned up
        Path(folder, name).write_text(str(code), encoding="ascii")


def _run(parse: Callable[[], argparse.Namespace]) -> int:
    def work(rank: int) -> int:
        arguments = parse()
        from shardflow.training.config import TrainConfig  # imports NumPy, which --help does without

        adopts = arguments.adopt_new_versions
        overrides = [
            *arguments.overrides,
            *([f"tune.mode={arguments.tune}"] if arguments.tune else []),
            *([f"data.adopt_new_versions={adopts}"] if adopts else []),
        ]
        config = load_config(TrainConfig, arguments.config, overrides)
        if arguments.print_config:
            print(dump_config(config), end="")
            return 0
        if arguments.propose_micro_batch:
            return _propose(config)
        if arguments.plan_memory:
            return _plan_memory(config, arguments.plan_memory)
        if arguments.store_reference:
            return _store_reference(config, rank)
        return _train(config, rank)

    return answered(work)


def answered(work: Callable[[int], int]) -> int:
    """Do the work of one rank, which gets its number; return its exit code, and log why it failed."""
    rank = int(os.environ.get("RANK", "0"))
    configure_logging(rank=rank)
    try:
        return work(rank)
    except (ConfigError, NoProgressError, PlanError, SignatureError, StateError) as error:
        # Nearly always every rank finds the same mistake, and one line of it is enough: the launcher ends the
        # others once rank 0 has left. A mistake of one machine is told by the ranks that are still there.
        if rank != 0:
            time.sleep(_AFTER_RANK_0_S)
        _LOGGER.error("%s", error.message)  # noqa: TRY400 - a traceback would hide the sentence
        return error.exit_code
    except (RankLostError, SampleError) as error:
        # The traceback would be that of a broken connection, or of our own count; the sentence says where.
        _LOGGER.error("%s", error.message)  # noqa: TRY400
        return error.exit_code
    except ShardflowError as error:
        _LOGGER.exception("%s", error.message)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, which one rank reports in one line."""
        raise ConfigError(f"{message}; see: {self.prog} --help")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m shardflow.training",
        description="One rank of a training job. To start all of them: shardflow train --help",
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the job."""
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
    parser.add_argument(
        "--tune",
        choices=("off", "observe", "on"),
        help="find settings of the loader and the cache during the run; the same as --set tune.mode=",
    )
    parser.add_argument(
        "--adopt-new-versions",
        choices=("never", "epoch"),
        help="train each epoch on the newest version of the dataset; as --set data.adopt_new_versions=",
    )
    parser.add_argument("--print-config", action="store_true", help="show the settings in force, and exit")
    parser.add_argument(
        "--propose-micro-batch",
        action="store_true",
        help="measure how much memory a micro-batch takes here, propose its size, and exit",
    )
    parser.add_argument(
        "--plan-memory",
        type=_numbers,
        metavar="N,...",
        help="compute how much memory each of N GPUs needs, without any, and exit",
    )
    parser.add_argument(
        "--store-reference",
        action="store_true",
        help="of a run of dpo: write what the model says of each pair before training as columns of the "
        "dataset, for task.reference = 'stored', and exit",
    )


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.isascii() and part.isdigit()]
    if not numbers or len(numbers) != text.count(",") + 1 or 0 in numbers:
        raise argparse.ArgumentTypeError(f"numbers of GPUs must be such as 8,64, got {text!r}")
    return numbers


def _propose(config: TrainConfig) -> int:
    """Print the memory curve, a line a size, and last of all JSON."""
    from shardflow.training.jobs.memory import measure_memory_curve

    curve = measure_memory_curve(config, ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    for size, peak_bytes in curve.points:
        _LOGGER.info("%d samples take %.3g GB", size, peak_bytes / 1e9)
    _LOGGER.info("%s", curve.text())
    print(json.dumps(asdict(curve)), flush=True)
    return 0


def _plan_memory(config: TrainConfig, world_sizes: Sequence[int]) -> int:
    """Print what each number of GPUs takes, a line each, and last of all JSON."""
    from shardflow.training.jobs.memory import plan_memory

    plan = plan_memory(config, world_sizes)
    for each in plan:
        _LOGGER.info("%s", each.text())
    print(json.dumps([each.to_json() for each in plan]), flush=True)
    return 0


def _store_reference(config: TrainConfig, rank: int) -> int:
    """Write the columns of the reference; rank 0 prints what was written as JSON."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as training does
    from shardflow.training.jobs.reference_columns import store_reference

    written = store_reference(config)
    if rank == 0:
        print(json.dumps(written), flush=True)
    return 0


def _train(config: TrainConfig, rank: int) -> int:
    # As torchrun does where it starts several: OpenMP would take every processor of the machine, those of the
    # loader's threads too and more than a container may use, and add in another order on another machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Torch takes seconds to import; a wrong setting is reported before that.
    from shardflow.training.distributed import StopRequest
    from shardflow.training.run import train

    stop = StopRequest()
    has_text = config.task.has_reports or config.task.has_next_tokens
    with stop.listening(), _progress(rank, has_text=has_text) as on_step:
        summary = train(config, on_step=on_step, stop=stop)
        # Still listening: once another rank has left with 75, torchrun sends SIGTERM to this one.
        if rank == 0:
            print(json.dumps(summary.to_json()), flush=True)
    return EXIT_STOPPED if summary.outcome == "stopped" else 0


@contextmanager
def _progress(rank: int, *, has_text: bool) -> Iterator[Callable[[StepMetrics, int], None] | None]:
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
                task,
                total=num_steps,
                completed=metrics.global_step + 1,
                description=_describe(metrics, has_text=has_text),
            )
    else:
        shown_at = float("-inf")
        began: tuple[int, float] | None = None

        def log(metrics: StepMetrics, num_steps: int) -> None:
            nonlocal shown_at, began
            number, now = metrics.global_step + 1, time.monotonic()
            # The first step warms up, and a resumed run begins in the middle: both are left out of the speed.
            first, since = began = began or (number, now)
            if now - shown_at >= LINE_EVERY_S or number == num_steps:
                shown_at = now
                rest = time_left(number - first, num_steps - first, now - since)
                _LOGGER.info(
                    "step %d of %d: %s%s", number, num_steps, _describe(metrics, has_text=has_text), rest
                )

        yield log


def _describe(metrics: StepMetrics, *, has_text: bool) -> str:
    loss = "no loss" if metrics.loss is None else f"loss {metrics.loss:.4f}"
    share = metrics.data_wait_s / metrics.step_s if metrics.step_s else 0.0
    number, noun = (metrics.num_tokens, "tokens") if has_text else (metrics.num_samples, "samples")
    rate = number / max(metrics.step_s, 1e-9)
    return f"{loss}, {rate:,.{0 if rate >= 10 else 2}f} {noun}/s, {share:.0%} waiting for data"


if __name__ == "__main__":
    sys.exit(main())
