"""Pack DICOM studies and reports into a dataset.

    python -m pipelines.pack --config pipelines/recipes/pack_folders.toml [--set table.key=value]...

Also ``shardflow pack``. Run the same command again to go on where a stopped job was. Exit codes: 0 done (or
already done), 1 error (run it again), 2 a setting is wrong, 3 more inputs are quarantined than allowed, 130
stopped by a signal. The last line of standard output is one JSON object; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from pipelines.pack_progress import make_progress
from shardflow.configs import dump_config, load_config
from shardflow.errors import ConfigError, ShardflowError
from shardflow.logs import configure_logging, describe_exception
from shardflow.packing import PackConfig, PackSummary, pack

__all__ = ["SUMMARY", "add_arguments", "main", "run"]

SUMMARY: Final = "pack DICOM studies and reports into a dataset"

_EXIT_FAILED: Final = 1
_EXIT_CONFIGURATION: Final = 2
_EXIT_INTERRUPTED: Final = 130

_logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the job."""
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file of the job's settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="TABLE.KEY=VALUE",
        help="change one setting; may be given several times",
    )
    parser.add_argument("--print-config", action="store_true", help="show every setting in force, and exit")
    parser.add_argument(
        "--json", action="store_true", help="write nothing but the JSON line on standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Run the job.

    Args:
        args: What `add_arguments` has parsed.

    Returns:
        The exit code.
    """
    configure_logging(withhold_foreign_text=True)
    try:
        config = load_config(PackConfig, args.config, args.overrides)
        if args.print_config:
            print(dump_config(config), end="")
            return 0
        with _interruptible(), make_progress() as progress:
            summary = pack(config, progress)
    except ConfigError as error:
        return _fail("configuration_error", error.message, _EXIT_CONFIGURATION)
    except ShardflowError as error:
        return _fail("error", f"{error.message} What is packed stands; run the job again.", _EXIT_FAILED)
    except KeyboardInterrupt:
        text = "stopped by a signal; what is packed stands, run the job again to go on."
        return _fail("interrupted", text, _EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last place where an error may show its text
        return _fail("error", f"internal error: {describe_exception(error)}", _EXIT_FAILED)
    if not args.json:
        print("\n".join(_describe(summary)))
    print(json.dumps(summary.to_json()))
    return summary.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job from a command line."""
    parser = argparse.ArgumentParser(
        prog="shardflow pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM (a scheduler's way) end the job as Ctrl-C does; a second signal does not disturb it."""

    def stop(*_: Any) -> NoReturn:
        for number in stopping:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    stopping = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, stop) for number in stopping}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _fail(status: str, message: str, code: int) -> int:
    print(json.dumps({"status": status, "error": message}))
    sys.stdout.flush()
    sys.stderr.write(f"{message}\n")
    return code


def _describe(summary: PackSummary) -> Iterator[str]:
    """Say the summary in words."""
    inputs = summary.inputs
    counts = ", ".join(f"{inputs[name]} {name}" for name in ("packed", "skipped", "quarantined"))
    yield f"{inputs['total']} inputs: {counts}."
    if summary.reasons:
        ranked = sorted(summary.reasons.items(), key=lambda item: (-item[1], item[0]))
        yield "Not packed: " + ", ".join(f"{count} {reason}" for reason, count in ranked) + "."
    match summary.status:
        case "quarantine_limit":
            yield "Too many inputs are quarantined: nothing is published; what is packed stands."
            yield "See inputs-*.jsonl in private_dir; repair inputs, or raise policy.max_quarantined_share."
            return
        case "already_packed":
            yield "This dataset is already packed."
        case _:
            splits = ", ".join(f"{count} {split}" for split, count in summary.splits.items())
            yield f"{summary.num_slices} slices in {summary.num_shards} shards, samples: {splits}."
    yield f"dataset_id {summary.dataset_id}"


if __name__ == "__main__":
    sys.exit(main())
