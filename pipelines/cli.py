"""The console script ``shardflow``: one module for each command, and one way to fail.

Exit codes: 0 done; 1 damage, or a mistake inside shardflow; 2 a setting or an argument is wrong; 3 (pack)
more was quarantined than allowed. An error is one line on standard error, and with ``--json`` also
``{"error": ...}`` on standard output.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from pipelines import (
    bench,
    compact,
    completion,
    copy,
    doctor,
    entities,
    goodput,
    index,
    info,
    ledger,
    metrics,
    pack_text,
    plan,
    preview,
    remove,
    report,
    synth,
    tokenize,
    top,
    verdict,
    verify,
    view,
)
from pipelines.help_text import CommandParser, HelpFormatter
from shardflow._version import __version__
from shardflow.errors import ConfigError, PlanError, ShardflowError
from shardflow.logs import describe_exception

__all__ = [
    "EXIT_CONFIGURATION",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "build_parser",
    "command_parsers",
    "main",
]

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130

# In the order in which a newcomer meets them.
_COMMANDS = {
    "synth": synth,
    "pack-text": pack_text,
    "index": index,
    "info": info,
    "verify": verify,
    "view": view,
    "preview": preview,
    "report": report,
    "copy": copy,
    "tokenize": tokenize,
    "entities": entities,
    "plan": plan,
    "doctor": doctor,
    "ledger": ledger,
    "goodput": goodput,
    "top": top,
    "verdict": verdict,
    "metrics": metrics,
    "remove": remove,
    "compact": compact,
    "bench": bench,
    "completion": completion,
}
_PACK_SUMMARY = "pack DICOM studies and reports into a dataset"
_DESCRIPTION = """\
Packs medical studies into plain WebDataset shards, and streams them, exactly, to GPUs.
The usual way: synth (or own data) -> pack -> info, verify, preview, report -> plan -> train.
"""
_EPILOG = """\
Each command explains itself: shardflow COMMAND --help

Training is a job of its own:
  python -m pipelines.train_tokenizer --dataset DATASET --output FOLDER
  torchrun --standalone --nproc-per-node N -m pipelines.train --config FILE

Exit codes: 0 done; 1 damage, or a failure; 2 a setting or an argument is wrong; 3 (pack) more inputs are
quarantined than allowed; 130 stopped by a signal. An error is one line on standard error. Colours are left
out where standard output is no terminal, or NO_COLOR is set.
"""
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
    parser = CommandParser(
        prog="shardflow",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions that matter, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    # Listed here for --help; its own parser reads what follows (see main).
    commands.add_parser("pack", help=_PACK_SUMMARY, add_help=False)
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.SUMMARY, formatter_class=HelpFormatter)
        command.add_arguments(subparser)
        # The function, not the parser: a parser that is built needs no second one.
        subparser.set_defaults(run=command.run, parser=lambda: parser)
    return parser


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command in the order of ``--help``, without ``pack``, which has one of its own."""
    (commands,) = (
        action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {name: parser for name, parser in commands.choices.items() if name != "pack"}


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
        # The reader of a pipe (head, say) has what it wanted.
        _abandon_output()
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last place to give a mistake of ours one exit code
        if isinstance(error, OSError) and (reason := _why_output_is_lost()) is not None:
            _abandon_output()
            message = f"standard output must take what is written to it, got {reason}; make room, and repeat."
            return _fail(message, EXIT_FAILED, as_json=False)
        return _fail(f"internal error: {describe_exception(error)}", EXIT_FAILED, as_json=as_json)
    return code


def _why_output_is_lost() -> str | None:
    """Why standard output takes no more (a full disk behind it, say); None while it does."""
    try:
        # What could not be written before is forgotten by now, so only a further byte tells.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "an error")
    return None


def _abandon_output() -> None:
    """Write what is still buffered nowhere: Python would complain once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": message}))
    print(f"shardflow: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
