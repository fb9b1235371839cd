"""The console script ``shardflow``: one module for each command, and one way to fail.

Exit codes: 0 done; 1 damage, or a mistake inside shardflow; 2 a setting or an argument is wrong; 3 (pack)
more was quarantined than allowed. An error is one line on standard error, and with ``--json`` also
``{"error": ...}`` on standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from pipelines import bench, completion, info, plan, preview, report, synth, verify
from shardflow import __version__
from shardflow.errors import ConfigError, PlanError, ShardflowError
from shardflow.logs import describe_exception

__all__ = ["EXIT_CONFIGURATION", "EXIT_FAILED", "EXIT_INTERRUPTED", "build_parser", "main"]

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130

_COMMANDS = {
    "bench": bench,
    "completion": completion,
    "info": info,
    "plan": plan,
    "preview": preview,
    "report": report,
    "synth": synth,
    "verify": verify,
}
_PACK_SUMMARY = "pack DICOM studies and reports into a dataset"
# What decides whether two machines can give the same bytes, or run at all.
_VERSIONS_SHOWN = (
    "numpy",
    "blosc2",
    "imagecodecs",
    "opencv-python-headless",
    "pillow",
    "pydicom",
    "torch",
    "transformers",
)


class _UsageError(ConfigError):
    """The command line itself is wrong."""


class _Parser(argparse.ArgumentParser):
    """argparse that fails the way every other error does, instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message}; see: {self.prog} --help")


class _Version(argparse.Action):
    """``--version``: shardflow's, and those of the packages that matter, found only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_describe_versions())
        parser.exit()


def _describe_versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in _VERSIONS_SHOWN:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return f"shardflow {__version__} (dataset format 1; {', '.join(found)})"


def build_parser() -> argparse.ArgumentParser:
    """Build the whole command line."""
    parser = _Parser(
        prog="shardflow",
        description="Pack medical studies into plain WebDataset shards, and stream them, exactly, to GPUs.",
        epilog="Training: torchrun --nproc-per-node N -m pipelines.train --config FILE",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions that matter, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Listed here for --help; its own parser reads what follows (see main).
    commands.add_parser("pack", help=_PACK_SUMMARY, add_help=False)
    for name, command in sorted(_COMMANDS.items()):
        subparser = commands.add_parser(
            name, help=command.SUMMARY, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(subparser)
        # The function, not the parser: a parser that is built needs no second one.
        subparser.set_defaults(run=command.run, parser=lambda: parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["pack"]:
        # Packing needs pydicom, which the training image does not carry.
        from pipelines import pack

        return pack.main(arguments[1:])
    as_json = "--json" in arguments
    try:
        parsed = build_parser().parse_args(arguments)
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except (ConfigError, PlanError) as error:
        return _fail(error.message, EXIT_CONFIGURATION, as_json=as_json)
    except ShardflowError as error:
        return _fail(error.message, EXIT_FAILED, as_json=as_json)
    except BrokenPipeError:
        # The reader of a pipe (head, say) has what it wanted. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last place to give a mistake of ours one exit code
        return _fail(f"internal error: {describe_exception(error)}", EXIT_FAILED, as_json=as_json)
    return code


def _fail(message: str, code: int, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": message}))
    print(f"shardflow: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
